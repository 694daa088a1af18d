"""Which parties speak which protocol."""

from __future__ import annotations

from lightsecagg.protocol.lightsecagg_client import LightSecAggClient
from lightsecagg.protocol.lightsecagg_server import LightSecAggServer
from lightsecagg.protocol.round_client import RoundClient
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.settings import ProtocolName

PARTIES: dict[ProtocolName, tuple[type[RoundClient], type[RoundServer]]] = {
    ProtocolName.LIGHTSECAGG: (LightSecAggClient, LightSecAggServer),
}
"""The client and the server of a synchronous round."""

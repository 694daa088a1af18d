"""Which parties speak which protocol."""

from __future__ import annotations

from lightsecagg.protocol.lightsecagg_client import LightSecAggClient
from lightsecagg.protocol.lightsecagg_server import LightSecAggServer
from lightsecagg.protocol.plain import PlainClient, PlainServer
from lightsecagg.protocol.round_client import RoundClient
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.secagg_client import SecAggClient
from lightsecagg.protocol.secagg_server import SecAggServer
from lightsecagg.protocol.settings import ProtocolName

PARTIES: dict[ProtocolName, tuple[type[RoundClient], type[RoundServer]]] = {
    ProtocolName.LIGHTSECAGG: (LightSecAggClient, LightSecAggServer),
    ProtocolName.SECAGG: (SecAggClient, SecAggServer),
    ProtocolName.SECAGG_PLUS: (SecAggClient, SecAggServer),
    ProtocolName.PLAIN: (PlainClient, PlainServer),
}
"""The client and the server of a synchronous round."""

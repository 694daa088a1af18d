"""Which parties speak which protocol."""

from __future__ import annotations

from collections.abc import Iterable

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import ParameterError
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.lightsecagg_client import LightSecAggClient
from lightsecagg.protocol.lightsecagg_server import LightSecAggServer
from lightsecagg.protocol.plain import PlainClient, PlainServer
from lightsecagg.protocol.round_client import RoundClient
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.secagg_client import SecAggClient
from lightsecagg.protocol.secagg_server import SecAggServer
from lightsecagg.protocol.settings import AllowList, Policy, ProtocolName, Settings

PARTIES: dict[ProtocolName, tuple[type[RoundClient], type[RoundServer]]] = {
    ProtocolName.LIGHTSECAGG: (LightSecAggClient, LightSecAggServer),
    ProtocolName.SECAGG: (SecAggClient, SecAggServer),
    ProtocolName.SECAGG_PLUS: (SecAggClient, SecAggServer),
    ProtocolName.PLAIN: (PlainClient, PlainServer),
}
"""The client and the server of a synchronous round."""


def client_party(
    client: int,
    identity: IdentityKey,
    policy: Policy,
    ledger: Ledger,
    entropy: Entropy = system_entropy,
) -> RoundClient:
    """A client's party for one round of the protocol that its policy names.

    Pass the same `ledger` in every round of a session: it keeps an update from being summed twice.
    There is no default, because a fresh one would have forgotten all that was spent; see `Ledger`.
    """
    kinds = {PARTIES[protocol][0] for protocol in policy.protocols}
    if len(kinds) != 1:
        raise ParameterError(
            f"a party speaks one protocol, but the policy names {', '.join(policy.protocols)}"
        )
    return kinds.pop()(client, identity, policy, ledger, entropy)


def server_party(
    settings: Settings,
    allow_list: AllowList,
    invited: Iterable[int] | None = None,
    entropy: Entropy = system_entropy,
) -> RoundServer:
    """The server's party for one round; it invites everybody on the allow-list, or `invited`."""
    return PARTIES[settings.protocol][1](settings, allow_list, invited, entropy)

"""The parties of a synchronous round, of whatever protocol the policy or the settings name."""

from __future__ import annotations

from collections.abc import Iterable

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.round_client import RoundClient
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.settings import Settings


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
    return RoundClient(client, identity, policy, ledger, entropy)


def server_party(
    settings: Settings,
    allow_list: AllowList,
    invited: Iterable[int] | None = None,
    entropy: Entropy = system_entropy,
    *,
    durable: bool = False,
) -> RoundServer:
    """The server's party for one round; it invites everybody on the allow-list, or `invited`.

    A `durable` one asks for what it promises to be stored (`Persist`), and can be resumed.
    """
    return RoundServer(settings, allow_list, invited, entropy, durable=durable)

"""The parties of rounds and epochs, of whatever protocol the policy or the settings name.

a client                         client_party, from a snapshot restore_party
a server                         server_party, after a crash restored_server_party
"""

from __future__ import annotations

from collections.abc import Iterable

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.journal_facts import Recall, RecallShares
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings


def client_party(
    client: int,
    identity: IdentityKey,
    policy: Policy,
    ledger: Ledger,
    entropy: Entropy = system_entropy,
) -> Client:
    """A client's party for one round, or one epoch if the policy says how to buffer.

    Pass the same `ledger` in every round of a session: it keeps an update from being summed twice.
    There is no default, because a fresh one would have forgotten all that was spent; see `Ledger`.
    """
    return Client(client, identity, policy, ledger, entropy)


def server_party(
    settings: Settings,
    allow_list: AllowList,
    invited: Iterable[int] | None = None,
    entropy: Entropy = system_entropy,
    *,
    buffer_size: int = 0,
    time: int = 0,
    durable: bool = False,
) -> Server:
    """The server's party for one round, or one epoch with buffers of `buffer_size` updates.

    It invites everybody on the allow-list, or `invited`. A `durable` one asks for what it promises
    to be stored (`Persist`); after a crash: `restored_server_party`.
    """
    return Server(
        settings,
        allow_list,
        invited,
        entropy,
        buffer_size=buffer_size,
        time=time,
        durable=durable,
    )


def restore_party(
    snapshot: bytes,
    identity: IdentityKey,
    policy: Policy,
    generation: int,
    entropy: Entropy = system_entropy,
) -> Client:
    """A client's party from its `snapshot()`.

    Refused if it is older than `generation`; see `client_machine` for what a driver owes.
    """
    return Client.restore(snapshot, identity, policy, generation, entropy)


def restored_server_party(
    facts: Iterable[bytes], allow_list: AllowList, recall: Recall, recall_shares: RecallShares
) -> Server:
    """A durable server's party, after a crash; see `Server.restore`."""
    return Server.restore(facts, allow_list, recall, recall_shares)

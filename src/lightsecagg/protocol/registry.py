"""The parties of both modes, of whatever protocol the policy or the settings name.

a synchronous round              client_party, server_party
an epoch, asynchronous           epoch_client_party, epoch_server_party
either, from a snapshot          restore_party
"""

from __future__ import annotations

from collections.abc import Iterable

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.epoch_client import EpochClient
from lightsecagg.protocol.epoch_server import EpochServer
from lightsecagg.protocol.journal_facts import Recall, RecallShares
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import Roster, SharesClosed
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


def epoch_client_party(
    client: int,
    identity: IdentityKey,
    policy: Policy,
    ledger: Ledger,
    entropy: Entropy = system_entropy,
) -> EpochClient:
    """A client's party for one epoch of the asynchronous mode; the policy says how to buffer.

    Of `ledger` the same is true as for `client_party`.
    """
    return EpochClient(client, identity, policy, ledger, entropy)


def epoch_server_party(
    settings: Settings,
    allow_list: AllowList,
    buffer_size: int,
    invited: Iterable[int] | None = None,
    entropy: Entropy = system_entropy,
    *,
    time: int = 0,
    durable: bool = False,
) -> EpochServer:
    """The server's party for one epoch, with buffers of `buffer_size` updates; see `EpochServer`.

    A `durable` one asks for what it promises to be stored. After a crash: `EpochServer.restore`.
    """
    return EpochServer(
        settings,
        allow_list,
        buffer_size,
        invited,
        entropy,
        time,
        durable=durable,
    )


def restore_party(
    snapshot: bytes,
    identity: IdentityKey,
    policy: Policy,
    generation: int,
    entropy: Entropy = system_entropy,
) -> RoundClient | EpochClient:
    """A client's party from its `snapshot()`, in the mode that the policy names.

    Refused if it is older than `generation`; see `client_machine` for what a driver owes.
    """
    kind = RoundClient if policy.buffering is None else EpochClient
    return kind.restore(snapshot, identity, policy, generation, entropy)


def restored_epoch_server_party(
    facts: Iterable[bytes], allow_list: AllowList, recall: Recall, recall_shares: RecallShares
) -> EpochServer:
    """A durable server's party of an epoch, after a crash; see `EpochServer.restore`."""
    return EpochServer.restore(facts, allow_list, recall, recall_shares)


def resumed_server_party(
    settings: Settings,
    allow_list: AllowList,
    roster: Roster,
    closed: SharesClosed,
    entropy: Entropy = system_entropy,
) -> RoundServer:
    """A durable server's party, after a crash; see `RoundServer.resume` for what it needs next."""
    return RoundServer.resume(settings, allow_list, roster, closed, entropy)

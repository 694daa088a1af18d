"""Shares travel in bundles; tests look at them, and tamper with them, one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.protocol.interface import Send
from lightsecagg.protocol.messages import Message, SealedShare, ShareBundle
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.share_exchange import OutgoingShare, root_of, seal_shares

Part = Message | SealedShare
"""What a test sees of a message."""


def parts_of(message: Message) -> tuple[Part, ...]:
    """The shares of a bundle; any other message itself."""
    return message.shares if isinstance(message, ShareBundle) else (message,)


def whole(part: Part) -> Message:
    """What travels: a share in a bundle of its own."""
    return ShareBundle((part,)) if isinstance(part, SealedShare) else part


def shares_in(outputs: Iterable[object], recipient: int | None = None) -> list[SealedShare]:
    """The shares that a party sends, or those for this recipient."""
    sent = [output.message for output in outputs if isinstance(output, Send)]
    shares = [
        share for bundle in sent if isinstance(bundle, ShareBundle) for share in bundle.shares
    ]
    return [share for share in shares if recipient in (None, share.recipient)]


def sealed_alone(
    round_: Round, key: AgreementKey, owner: int, share: OutgoingShare, serial: int = 0
) -> SealedShare:
    """A share that is all of its mask, as it comes to its recipient."""
    (sealed,) = seal_shares(round_, key, owner, [share], serial).shares
    return relayed([sealed])[0]


def relayed(shares: Iterable[SealedShare]) -> list[SealedShare]:
    """The shares of a mask, as the server passes them on."""
    of_one_mask = list(shares)
    root = root_of(of_one_mask)
    return [replace(share, root=root) for share in of_one_mask]

"""The relay: an owner's shares are passed on when all of a mask's are there, and not before.

Half a mask's shares are of use to nobody: were they passed on, some clients could answer for a mask
and others not. Masks are shared one after the other, so of each owner one is under way, and its
serial only goes up; in a synchronous round there is one mask, of serial 0.

What an owner sends comes in bundles, and what a recipient gets leaves in bundles: a message per
share, N (N - 1) of them, would cost more than the shares. A bundle is taken or refused as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from lightsecagg.crypto.sealing import MAC_LENGTH
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.protocol.interface import Send
from lightsecagg.protocol.messages import (
    MAX_SERIAL,
    Message,
    SealedShare,
    ShareBundle,
    UploadDropped,
)
from lightsecagg.protocol.schemes.interface import MaskRef, ServerScheme
from lightsecagg.protocol.share_exchange import Filling, bundles, root_of


class Relay:
    """The shares under way at the server, by owner and serial."""

    def __init__(self, scheme: ServerScheme, single: bool = False) -> None:
        """`single`: every owner has one mask, of serial 0."""
        self.complete: dict[int, int] = {}
        """Owner -> the serial of its last mask whose shares were complete."""
        self._scheme = scheme
        self._single = single
        self._wanted = scheme.settings.degree(len(scheme.round.members))
        self.begun: dict[int, tuple[int, dict[int, SealedShare]]] = {}
        """Owner -> the serial of the mask under way, and recipient -> share."""

    def has_begun(self, owner: int) -> bool:
        """Whether anything of this owner has come."""
        return owner in self.begun

    def restore(self, owner: int, serial: int) -> None:
        """This mask was complete."""
        self.complete[owner] = serial
        self.begun[owner] = (serial, {})

    def take(self, sender: int, message: ShareBundle) -> list[SealedShare] | None:
        """The shares of those masks that these complete; None if all of these are past."""
        for share in message.shares:
            self._check(sender, share)
        serial, begun = self.begun.get(sender, (-1, {}))
        begun, done = dict(begun), self.complete.get(sender, -1)
        ready: list[SealedShare] = []
        is_news = False
        for share in message.shares:
            if share.serial < serial or share.serial <= done:
                continue
            if share.serial > serial:
                serial, begun = share.serial, {}  # a mask that is incomplete now is lost
            if (known := begun.get(share.recipient)) is not None:
                if known != share:
                    raise RemoteProtocolError(
                        f"client {sender} sent two shares to {share.recipient}"
                    )
                continue
            if next(iter(begun.values()), share).salt != share.salt:
                raise RemoteProtocolError(f"client {sender} gave the shares of a mask two salts")
            is_news = True
            begun[share.recipient] = share
            if len(begun) == self._wanted:
                ready += self._bound(begun.values())
                done, begun = serial, {}
        if not is_news:
            return None
        self.begun[sender] = (serial, begun)
        if ready:
            self.complete[sender] = done
        return ready

    def _bound(self, shares: Collection[SealedShare]) -> Iterable[SealedShare]:
        """With the hash of them all, from which every recipient finds the header (S46)."""
        if not self._scheme.settings.traits.checked:
            return shares
        root = root_of(shares)
        return [replace(share, root=root) for share in shares]

    def _check(self, sender: int, share: SealedShare) -> None:
        are_peers = self._scheme.are_peers(sender, share.recipient)
        bound = len(share.mac) == (MAC_LENGTH if self._scheme.settings.traits.checked else 0)
        if share.root or not bound:
            raise RemoteProtocolError(f"client {sender} sent a share that is not bound as it must")
        last = 0 if self._single else MAX_SERIAL
        if share.owner != sender or not are_peers or share.serial > last:
            raise RemoteProtocolError(
                f"client {sender} sent a share from {share.owner} to {share.recipient}, of its "
                f"mask {share.serial}"
            )
        try:
            self._scheme.admit(share.kind, share.length)
        except CryptoError as error:
            raise RemoteProtocolError(
                f"client {sender} sent a share that is refused: {error}"
            ) from error


class Outbox:
    """Shares that wait for their recipients until they are worth a message."""

    def __init__(self) -> None:
        self._waiting: defaultdict[int, Filling] = defaultdict(Filling)
        self.owners: set[int] = set()
        """Whose shares have come since the last `flush`."""

    def put(self, share: SealedShare) -> list[Send]:
        """Let a share wait; those before it for its recipient, if they leave it no room."""
        self.owners.add(share.owner)
        full = self._waiting[share.recipient].put(share)
        return [] if full is None else [Send(share.recipient, full)]

    def flush(self) -> list[Send]:
        """Everything that waits."""
        waiting, self._waiting = self._waiting, defaultdict(Filling)
        self.owners.clear()
        return [Send(client, ShareBundle(tuple(one.shares))) for client, one in waiting.items()]


class Mailbox:
    """What clients may lack: shares until they report on them, notices until they are back.

    That a share was sent says nothing: it may be lost with a connection, or with the server.
    """

    def __init__(self) -> None:
        self.missed: dict[int, dict[MaskRef, SealedShare | UploadDropped]] = {}
        """Client -> by the mask that it is about, the masks of an owner in their order."""

    def put(self, client: int, message: SealedShare | UploadDropped) -> None:
        """Keep a message for a client."""
        owner = client
        if isinstance(message, SealedShare):
            owner = message.owner
            # A copy: a view would keep the whole bundle in memory.
            message = replace(message, sealed=bytes(message.sealed))
        self.missed.setdefault(client, {})[MaskRef(owner, message.serial)] = message

    def delivered(self, client: int, mask: MaskRef) -> None:
        """A client has reported on its share."""
        missed = self.missed.get(client, {})
        if isinstance(missed.get(mask), SealedShare):
            del missed[mask]

    def forget(self, mask: MaskRef) -> None:
        """Nobody needs the shares of a mask that is past."""
        for missed in self.missed.values():
            missed.pop(mask, None)

    @property
    def lacking(self) -> dict[MaskRef, list[int]]:
        """Mask -> who may lack its share."""
        lacking: dict[MaskRef, list[int]] = {}
        for client, missed in self.missed.items():
            for mask, message in missed.items():
                if isinstance(message, SealedShare):
                    lacking.setdefault(mask, []).append(client)
        return lacking

    def read(self, client: int, first: Iterable[MaskRef]) -> tuple[list[Message], list[Message]]:
        """What a client may lack up to these masks, and of the others, in few messages.

        Up to: it takes the masks of an owner in their order only. The shares stay.
        """
        missed, newest = self.missed.get(client, {}), dict(first)
        urgent: list[SealedShare | UploadDropped] = []
        others: list[SealedShare | UploadDropped] = []
        for (owner, serial), message in missed.items():
            is_urgent = isinstance(message, SealedShare) and serial <= newest.get(owner, -1)
            (urgent if is_urgent else others).append(message)
        self.missed[client] = {m: s for m, s in missed.items() if isinstance(s, SealedShare)}
        return _bundled(urgent), _bundled(others)


def _bundled(missed: Iterable[SealedShare | UploadDropped]) -> list[Message]:
    kept = list(missed)
    shares = [message for message in kept if isinstance(message, SealedShare)]
    notices = [message for message in kept if isinstance(message, UploadDropped)]
    return [*bundles(shares), *notices]

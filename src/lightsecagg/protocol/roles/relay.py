"""The relay: an owner's shares are passed on when all of a mask's are there, and not before.

Half a mask's shares are of use to nobody: were they passed on, some clients could answer for a mask
and others not. Masks are shared one after the other, so of each owner one is under way, and its
serial only goes up; in a synchronous round there is one mask, of serial 0.
"""

from __future__ import annotations

from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.protocol.messages import SealedShare
from lightsecagg.protocol.schemes.interface import ServerScheme


class Relay:
    """The shares under way at the server, by owner and serial."""

    def __init__(self, scheme: ServerScheme, single: bool = False) -> None:
        """`single`: every owner has one mask, of serial 0."""
        self.complete: dict[int, int] = {}
        """Owner -> the serial of its last mask whose shares were complete."""
        self._scheme = scheme
        self._single = single
        self._wanted = scheme.settings.degree(len(scheme.round.members))
        self._begun: dict[int, tuple[int, dict[int, SealedShare]]] = {}

    def has_begun(self, owner: int) -> bool:
        """Whether anything of this owner has come."""
        return owner in self._begun

    def take(self, sender: int, share: SealedShare) -> list[SealedShare] | None:
        """The shares of a mask, if they are complete with this one; None for one that is past."""
        self._check(sender, share)
        serial, bundle = self._begun.get(sender, (-1, {}))
        if share.serial < serial or share.serial <= self.complete.get(sender, -1):
            return None
        if share.serial > serial:
            bundle = {}  # a mask that is incomplete now is lost
        if (known := bundle.get(share.recipient)) is not None:
            if known != share:
                raise RemoteProtocolError(f"client {sender} sent two shares to {share.recipient}")
            return None
        bundle[share.recipient] = share
        self._begun[sender] = (share.serial, bundle)
        if len(bundle) < self._wanted:
            return []
        self._begun[sender] = (share.serial, {})
        self.complete[sender] = share.serial
        return list(bundle.values())

    def _check(self, sender: int, share: SealedShare) -> None:
        are_peers = self._scheme.are_peers(sender, share.recipient)
        if share.owner != sender or not are_peers or (self._single and share.serial):
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

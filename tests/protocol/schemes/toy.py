"""A fifth scheme that lives outside the package: one-time pads, known to every peer.

Every client gives its whole mask to all others, so that any one of them can tell the server the
sum: T = 0, and all the answers must be equal. Nobody should want this; it shows that a scheme needs
nothing but the interface.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import NotEnoughAnswers, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import Pair
from lightsecagg.protocol.messages import AggregatedShare
from lightsecagg.protocol.schemes.interface import (
    Answer,
    ClientScheme,
    MaskRef,
    MaskSum,
    PreparedMask,
    ServerScheme,
    Term,
)
from lightsecagg.protocol.schemes.traits import Shares, Traits
from lightsecagg.protocol.share_exchange import OutgoingShare, Share

if TYPE_CHECKING:
    from lightsecagg.protocol.settings import Settings


class PadTraits(Traits):
    """A share is as long as the update."""

    def shares(self, settings: Settings) -> Mapping[ShareKind, Shares]:
        peers = settings.parameters.clients - 1
        return {ShareKind.EXPLICIT: Shares(peers, 4 * settings.length)}


class PadsClient(ClientScheme):
    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        field = self.settings.field
        pad = field.to_bytes(prg.draw_uniform(self.settings.length, field.modulus, entropy))
        outgoing = [
            OutgoingShare(peer, ShareKind.EXPLICIT, pad)
            for peer in self.round.members
            if peer != self.client
        ]
        return PreparedMask(pad, (ShareKind.EXPLICIT.value, pad), outgoing)

    def check(self, kind: ShareKind, plaintext: bytes) -> None:
        self.check_elements(plaintext)

    def mask(self, secret: bytes, owners: Sequence[int]) -> Elements:
        return self.settings.field.from_bytes(secret, self.settings.length)

    def answer(
        self, held: Mapping[MaskRef, Share], terms: Sequence[Term], owners: Sequence[int]
    ) -> AggregatedShare:
        pads = [self.mask(held[term.ref][1], owners) for term in terms]
        weights = [term.weight for term in terms]
        return AggregatedShare(self.settings.field.weighted_sum(weights, pads))


class PadsServer(ServerScheme):
    answer_type: ClassVar = AggregatedShare

    def choose(
        self,
        owners: Sequence[int],
        held: Mapping[int, frozenset[int]],
        accused: Collection[Pair] = (),
    ) -> tuple[int, ...]:
        return tuple(sorted(held))

    def check_answer(self, asked: MaskSum, sender: int, answer: Answer) -> None:
        assert isinstance(answer, AggregatedShare)
        if answer.vector.shape != (self.settings.length,):
            raise RemoteProtocolError(
                f"client {sender} answered with {answer.vector.size} elements"
            )

    def recover(
        self, asked: MaskSum, answers: Mapping[int, Answer]
    ) -> tuple[Elements, tuple[int, ...]]:
        pads = {c: answer.vector for c, answer in answers.items() if hasattr(answer, "vector")}
        if not pads:
            raise NotEnoughAnswers("nobody answered")
        first = pads[min(pads)]
        return first, tuple(c for c, pad in sorted(pads.items()) if (pad != first).any())


PADS = PadTraits("pads", "one-time pads", buffered=True)

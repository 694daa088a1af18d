"""No masks: NO PROTECTION AT ALL. The server sees every client's update.

This is FedAvg's sum, the baseline that secure aggregation is measured against: the same interface,
the same quantisation, the same settings, and no masks, keys, shares or signatures. An upload is the
client's quantised update in the clear; whoever reads the server's memory reads it.

A client takes part only if its policy names `ProtocolName.PLAIN`; no server can talk it into that.
Phases advertise, share, agree and recover do not exist here. Rounds end like those of the secure
protocols: with fewer uploads than they would demand, the round is aborted, so that both train on
the same rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import NoneType
from typing import ClassVar

import numpy as np

from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import Pair
from lightsecagg.protocol.schemes.interface import (
    Answer,
    ClientScheme,
    MaskRef,
    MaskSum,
    PreparedMask,
    ServerScheme,
    Term,
)
from lightsecagg.protocol.share_exchange import Share


class NoMasksClient(ClientScheme):
    """One client that uploads its update UNPROTECTED."""

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        """Nothing is drawn and nothing shared."""
        return PreparedMask(b"", (0, b""), [])

    def check(self, kind: ShareKind, plaintext: bytes) -> None:
        """There are no shares."""
        raise CryptoError("plain summation has no shares")

    def mask(self, secret: bytes, owners: Sequence[int]) -> Elements:
        """Zero: the upload is the update."""
        return np.zeros(self.settings.length, dtype=np.uint32)

    def answer(
        self, held: Mapping[MaskRef, Share], terms: Sequence[Term], owners: Sequence[int]
    ) -> Answer:
        """There is nothing to answer for."""
        raise RemoteProtocolError("plain summation has no masks to recover")


class NoMasksServer(ServerScheme):
    """The server that sums UNPROTECTED updates."""

    answer_type: ClassVar = NoneType

    def choose(
        self,
        owners: Sequence[int],
        held: Mapping[int, frozenset[int]],
        accused: Collection[Pair] = (),
    ) -> tuple[int, ...]:
        """All who uploaded."""
        return tuple(sorted(held))

    def check_answer(self, asked: MaskSum, sender: int, answer: Answer) -> None:
        """Nobody is asked."""
        raise RemoteProtocolError(f"client {sender} answered, but nobody was asked")

    def recover(
        self, asked: MaskSum, answers: Mapping[int, Answer]
    ) -> tuple[Elements, tuple[int, ...]]:
        """The sum of no masks is zero."""
        return np.zeros(self.settings.length, dtype=np.uint32), ()

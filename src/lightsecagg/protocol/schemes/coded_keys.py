"""LightSecAgg with short keys: a key is shared like a mask, and stretched to one (experimental).

All that concerns shares, reports and answers is that of `coded_masks`, on a secret of n + k
elements instead of d. What differs lies at the two ends: a client stretches its key to a mask and
adds noise; the server stretches the sum of the keys, and takes the sum of the noise away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy, draw
from lightsecagg.crypto.transcript import uint
from lightsecagg.field.prime import Elements
from lightsecagg.masks.one_shot_recovery import unmask
from lightsecagg.masks.short_keys import add_noise, expand, strip
from lightsecagg.protocol.schemes.coded_masks import (
    CodedMasksClient,
    CodedMasksServer,
    DecodeMasks,
)
from lightsecagg.protocol.schemes.interface import Answer, MaskSum


class CodedKeysClient(CodedMasksClient):
    """One client of LightSecAgg with short keys."""

    def _secret(
        self, serial: int, seeds: Mapping[int, bytes], mask: Elements, entropy: Entropy
    ) -> tuple[bytes, Elements | None]:
        """The key and the seed of its noise, drawn now: one key meets one noise, whatever comes."""
        seed = prg.derive_seed(
            draw(entropy, prg.SEED_LENGTH),
            self.round.context,
            "short key noise",
            uint(self.client),
            uint(serial),
        )
        return self.settings.field.to_bytes(mask) + seed, None

    def mask(self, secret: bytes, owners: Sequence[int]) -> Elements:
        """The key, stretched, and the noise: the same whenever it is asked for."""
        settings = self.settings
        key = settings.field.from_bytes(secret[: -prg.SEED_LENGTH], settings.secret_length)
        mask = expand(settings.field, self.round.context, key, settings.dimension)
        seed, step = secret[-prg.SEED_LENGTH :], settings.quantizer.step
        add_noise(settings.field, mask, seed, settings.dimension, step)
        return mask


class CodedKeysServer(CodedMasksServer):
    """The server of LightSecAgg with short keys."""

    def recovery(self, asked: MaskSum, answers: Mapping[int, Answer]) -> DecodeMasks:
        """Decode the sum of the keys, stretch it, and strip the sum of the noise."""
        return _DecodeKeys(self, asked, answers)


class _DecodeKeys(DecodeMasks):
    """The sum of the masks but for their noise."""

    def __init__(
        self, scheme: CodedKeysServer, asked: MaskSum, answers: Mapping[int, Answer]
    ) -> None:
        super().__init__(scheme, answers)
        self._settings, self._context = scheme.settings, scheme.round.context
        self._squared_weights = sum(term.weight**2 for term in asked.terms)
        shape = (self._settings.parameters.pieces, self.columns)
        self._pieces = np.empty(shape, dtype=np.uint32)

    def take_away(self, total: Elements, start: int, part: Elements) -> None:
        """Only the whole key can be stretched."""
        self._pieces[:, start : start + part.shape[1]] = part

    def whole(self, pieces: Elements) -> Elements:
        settings, key = self._settings, super().whole(pieces)
        return expand(settings.field, self._context, key, settings.dimension)

    def finish(self, total: Elements) -> Elements:
        """Exact decoding takes the noise away; dithered decoding leaves it."""
        settings, step = self._settings, self._settings.quantizer.step
        total = super().finish(unmask(settings.field, total, self.whole(self._pieces)))
        if step == 1:
            return total
        return strip(settings.field, total, settings.dimension, step, self._squared_weights)

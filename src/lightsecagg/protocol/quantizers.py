"""The quantizer that fits a round's parameters: with short keys, one that leaves room for noise."""

from __future__ import annotations

from typing import Final

from lightsecagg.errors import ParameterError
from lightsecagg.field.group import Group
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.masks.short_keys import exact_step, noise_bound
from lightsecagg.params import Decoding, Parameters, ShareMode
from lightsecagg.protocol.buffering import Buffering

LEAST_EXACT_BUDGET: Final = 128
"""Exact decoding is the default where it leaves every client 8 bits per entry: -128..128."""


def make_quantizer(
    parameters: Parameters,
    dimension: int,
    bound: float,
    *,
    max_samples: int = 1,
    weighted: bool = False,
    scale: float = 0.0,
    buffering: Buffering | None = None,
    decoding: Decoding | None = None,
    group: Group | None = None,
) -> Quantizer:
    """The quantizer of a round or epoch, with the finest safe scale unless one is given.

    * `group`: where the protocol sums (`Traits.group`); F_q unless it is given.

    * `decoding`: of short keys alone. None takes exact decoding where it leaves every client, even
      one with a single sample, 8 bits per entry, and dithered elsewhere.
    """
    summands = parameters.clients if buffering is None else buffering.max_updates
    max_weight = 1 if buffering is None else buffering.table.max_weight

    def quantizer(step: int, noise: int) -> Quantizer:
        return Quantizer(
            group or PrimeField(parameters.modulus),
            bound,
            summands,
            max_samples,
            max_weight,
            weighted,
            scale,
            step,
            noise,
        )

    if parameters.share_mode is not ShareMode.SHORT_KEY:
        if decoding is not None:
            raise ParameterError(
                f"{decoding} decoding is for short keys; {parameters.share_mode} shares leave no "
                "noise in a sum"
            )
        return quantizer(1, 0)
    noise = noise_bound(summands, max_weight, dimension)
    step = exact_step(parameters.modulus, noise)
    if decoding is None:
        least = LEAST_EXACT_BUDGET * max_samples
        roomy = (step - 1) // 2 >= least * summands * max_weight
        decoding = Decoding.EXACT if roomy else Decoding.DITHERED
    return quantizer(step if decoding is Decoding.EXACT else 1, noise)


def decoding_of(quantizer: Quantizer) -> Decoding:
    """How the noise of short keys leaves the sums of this quantizer."""
    return Decoding.EXACT if quantizer.step > 1 else Decoding.DITHERED

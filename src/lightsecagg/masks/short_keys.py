"""Short keys: masks that ring-LWE stretches from 2048 shared elements to any length.

A client draws a key s, shares it as LightSecAgg shares a mask, and hides its vector under

    z = A s + t e      A  a public matrix that everybody expands from C1, n x L blocks of a ring
                       e  fresh noise, a centred binomial of 256 coins per entry
                       t  a public integer that leaves room for the sum below it

The sum of the shares of many keys is a share of S = sum s; from S anybody computes A S, and the
masked sum less A S is X + t E with E = sum e. `strip` takes t E away (exact decoding), or t is 1
and E stays in the sum as rounding noise (dithered decoding). A key has k elements more than n: they
mask the k scalar coordinates of an upload, such as the sample count, one to one and without noise.

What that rests on, what the sum of the noise tells, and why a key and its noise must never meet
two uploads: `docs/short-keys.md`.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.transcript import context_hash, uint
from lightsecagg.errors import FieldError, ParameterError, RecoveryError
from lightsecagg.field import kernels
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.field.ring import times_key

ASSUMPTION: Final = (
    "short keys are experimental: they also rest on ring-LWE (n = 2048, 31 bits, binomial noise), "
    "and no independent expert has reviewed them"
)
"""What must be said wherever they are offered."""

RING_DIMENSION: Final = 2048
"""n: elements of a key that are stretched."""

COINS: Final = 256
"""Fair coins behind the noise of one entry."""

VARIANCE: Final = COINS // 4
"""sigma^2 of the noise of one entry; sigma = 8."""

LONG_SHARE: Final = 128
"""Elements with blinds from which on a share of a key travels as a seed. A shorter one, of less
than 512 bytes, takes its owner and its holder longer to expand than to send as it is."""

_WORDS: Final = COINS // 32  # of the generator's output per entry
_BLOCK: Final = 1 << 13  # entries whose words, 256 KiB, stay in the second-level cache

FAILURE_BITS: Final = 40
"""A round's noise exceeds its bound in any entry with a probability below 2^-40."""

CHECKED_FROM: Final = 1000
"""The fewest entries whose noise has a variance worth a verdict."""

_SUSPICIOUS: Final = 1.5


def key_length(scalars: int) -> int:
    """n + k: elements of the key of an upload with so many scalar coordinates."""
    return RING_DIMENSION + scalars


def public_matrix(context: bytes, dimension: int, modulus: int) -> Elements:
    """A for vectors of `dimension` entries: ceil(d / n) columns, each a ring element by its values.

    Everybody expands it from C1, which nobody could choose alone. Never take it from a message:
    whoever chooses A may keep a trapdoor.
    """
    seed = context_hash(
        "short key matrix", context, uint(RING_DIMENSION), uint(dimension), uint(modulus)
    )
    columns = -(-dimension // RING_DIMENSION)
    elements = prg.expand(seed, RING_DIMENSION * columns, modulus)
    return elements.reshape(RING_DIMENSION, columns)


def expand(field: PrimeField, context: bytes, key: Elements, dimension: int) -> Elements:
    """A s, then the key's k elements for scalars: a mask of d + k elements, still without noise.

    Linear in the key: of a sum of keys it makes the sum of their masks.
    """
    if dimension < 1 or len(key) < RING_DIMENSION:
        raise FieldError(
            f"a key has at least n = {RING_DIMENSION} elements and masks at least one entry, "
            f"got {len(key)} elements and {dimension} entries"
        )
    matrix = public_matrix(context, dimension, field.modulus)
    ring, scalars = key[:RING_DIMENSION], key[RING_DIMENSION:]
    stretched = times_key(field, matrix, ring).reshape(-1)
    length = dimension + len(scalars)
    if length > stretched.size:
        return np.concatenate([stretched[:dimension], scalars])
    stretched[dimension:length] = scalars  # the last block is seldom full: there is room for them
    return stretched[:length]


def add_noise(field: PrimeField, mask: Elements, seed: bytes, dimension: int, step: int) -> None:
    """Add t e to the first `dimension` elements of a mask, in place.

    * `seed`: 32 bytes that are drawn with the key and kept with it. The same key under fresh noise
      would show e - e', and many repeats the mask.
    """
    if not 1 <= step < field.modulus:
        raise ParameterError(
            f"the step t = {step} must be in [1, q) with q = {field.modulus}: t = 0 takes the "
            "noise away, and with it the protection"
        )
    keystream = prg.aes_ctr_keystream(seed)
    words = np.empty(_WORDS * min(_BLOCK, dimension), dtype=np.uint32)
    for start in range(0, dimension, _BLOCK):
        part = mask[start : min(start + _BLOCK, dimension)]
        block = words[: _WORDS * len(part)]
        keystream(block)
        kernels.active().add_popcount_noise(block, part, step, field.modulus)


def noise_bound(summands: int, max_weight: int, dimension: int) -> int:
    """Emax: what no entry of sum w e exceeds, but for a probability of 2^-40 per sum.

    Sums of binomials are sub-Gaussian: |sum w e| > K sigma |w| with probability at most
    2 exp(-K^2 / 2), and K^2 = 2 ln 2 (41 + log2 d) covers d entries. Computed in integers, a
    little upwards (ln 2 < 0.6932), so that every party finds the same.
    """
    bits = FAILURE_BITS + 1 + (dimension - 1).bit_length()
    squared = 2 * 6932 * bits * VARIANCE * summands * max_weight**2
    likely = math.isqrt(-(-squared // 10000)) + 1
    return min(likely, COINS // 2 * summands * max_weight)


def exact_step(modulus: int, bound: int) -> int:
    """t of exact decoding: the largest with t (2 Emax + 1) <= q."""
    return modulus // (2 * bound + 1)


def strip(
    field: PrimeField, total: Elements, dimension: int, step: int, squared_weights: int
) -> Elements:
    """X from X + t E, where |X| <= (t - 1) / 2 and |E| <= Emax; scalars stay as they are.

    * `squared_weights`: sum w^2 over the summands, their number if nobody has a weight.

    E is known now, and its variance is sigma^2 sum w^2. `RecoveryError` if it is far from that:
    then the keys of the answers are not those of the uploads, and X is noise.
    """
    out = total.copy()
    half, squares = (field.modulus - 1) // 2, 0.0
    for start in range(0, dimension, _BLOCK):
        part = slice(start, min(start + _BLOCK, dimension))
        value = total[part].astype(np.float64)
        value[value >= half] -= field.modulus
        noise = np.rint(value / step)
        value -= noise * step
        value[value < 0] += field.modulus
        out[part] = value
        squares += float(noise @ noise)
    _check_variance(squares / dimension, dimension, squared_weights)
    return out


def _check_variance(variance: float, dimension: int, squared_weights: int) -> None:
    expected = VARIANCE * squared_weights
    if dimension >= CHECKED_FROM and variance > _SUSPICIOUS * expected:
        raise RecoveryError(
            f"the noise of the sum has a variance of {variance:.0f} instead of {expected}: an "
            "answer is wrong, or a client's upload and its shares are not of one key"
        )

"""Several integers in one element: no sum wraps, and every digit comes back exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightsecagg.errors import FieldError, ParameterError, RecoveryError
from lightsecagg.field import kernels, reference
from lightsecagg.field.group import Elements, Group
from lightsecagg.field.packing import Packing
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, PrimeField
from lightsecagg.field.words import WORDS

GROUPS = {"default": DEFAULT_FIELD, "paper": PAPER_FIELD, "words": WORDS}
SUMMANDS = [1, 2, 3, 10, 50, 200, 644, 1000, 10_000]
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 2047, 2049, 4097, 12_289]


def packing(group: Group, summands: int, slots: int, **more: int) -> Packing:
    """A packing, or nothing to test where no level is left."""
    try:
        return Packing(group, summands, slots, **more)
    except ParameterError:
        assume(False)
        raise


def random_words(count: int, seed: int) -> Elements:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def pack_integers(packing: Packing, z: NDArray[Any], mask: Elements | None = None) -> Elements:
    """Integers within -L..L: with r = L they are levels already."""
    v = z.astype(np.float32)
    if mask is None:
        mask = np.zeros(packing.length(v.size), dtype=np.uint32)
    coins = np.zeros(-(-v.size // 2), dtype=np.uint32)
    elements, cut = packing.pack(v, packing.levels, coins, mask)
    assert cut == 0
    return elements


def packed_exactly(packing: Packing, z: NDArray[Any]) -> list[int]:
    """The signed integers that elements stand for, in Python."""
    length = packing.length(len(z))
    return [
        sum(
            int(z[slot * length + e]) * place
            for slot, place in enumerate(packing.places)
            if slot * length + e < len(z)
        )
        for e in range(length)
    ]


# -- bases and levels ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "bases"),
    [
        (DEFAULT_FIELD, [46_335, 1_289, 215, 73, 35]),
        (WORDS, [65_535, 1_625, 255, 83, 39]),
    ],
)
def test_the_base_is_the_largest_odd_number_that_fits(group: Group, bases: list[int]) -> None:
    for slots, base in enumerate(bases, 2):
        assert Packing(group, 1, slots).bases == (base,) * (slots - 1)
        assert base % 2 == 1
        assert base**slots <= group.modulus - 2 < (base + 2) ** slots


@pytest.mark.parametrize(
    ("slots", "levels"), [(2, [2316, 463, 115, 23, 2]), (3, [64, 12, 3]), (4, [10, 2])]
)
def test_levels_of_the_default_field(slots: int, levels: list[int]) -> None:
    for summands, expected in zip((10, 50, 200, 1000, 10_000), levels, strict=False):
        assert Packing(DEFAULT_FIELD, summands, slots).levels == expected
        assert Packing(DEFAULT_FIELD, 1, slots, max_weight=summands).levels == expected


@pytest.mark.parametrize(
    ("summands", "gain", "levels"), [(10, 14, 618), (50, 13, 128), (200, 12, 33), (1000, 14, 6)]
)
def test_noise_that_stays_gets_the_best_bases(summands: int, gain: int, levels: int) -> None:
    """g and L minimise an element's variance: no other pair that fits has less."""
    noise = math.isqrt(2 * 61 * 64 * summands * 7 // 10)  # about 2^-40 for a million entries
    chosen = Packing(DEFAULT_FIELD, summands, 2, noise=noise)
    assert (chosen.gain, chosen.levels) == (gain, levels)
    fitting = [
        (g, L)
        for g in range(1, 65)
        for L in range(1, 5 * levels)
        if (2 * (g * summands * L + noise) + 1) * (2 * summands * L + 1)
        <= DEFAULT_FIELD.modulus - 2
    ]
    # (2 / 6 + 64 / g^2) / L^2, without fractions, and the larger L where two are equal
    least = min(fitting, key=lambda pair: (pair[0] ** 2 + 192) / (pair[0] * pair[1]) ** 2)
    assert least == (gain, levels)
    assert chosen.variance == pytest.approx(1 / 6 + 64 / (2 * gain**2))


def test_the_exact_decoding_of_noise_leaves_the_room_of_a_step() -> None:
    chosen = Packing(DEFAULT_FIELD, 10, 2, step=260_003, noise=4128)
    assert chosen.bases == (509,)  # 511^2 = 261,121 is too much
    assert (chosen.gain, chosen.levels, chosen.residue) == (1, 25, 0)
    assert chosen.variance == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": 1}, "slots = 1 must be at least 2"),
        ({"summands": 0}, "summands = 0 must be at least 1"),
        ({"max_weight": 0}, "max_weight = 0 must be at least 1"),
        ({"noise": -1}, "noise Emax = -1 must be at least 0"),
        ({"step": 0}, "step t = 0 must be at least 1"),
        (
            {"slots": 3, "summands": 1000},
            "3 slots leave no level for sums of 1000 vectors of weight 1, at most 644: take fewer",
        ),
        ({"noise": 2**30}, "2 slots leave no level for sums of 10 vectors of weight 1 with noise"),
    ],
)
def test_impossible_packings_are_refused(arguments: dict[str, int], message: str) -> None:
    acceptable: dict[str, Any] = {"group": DEFAULT_FIELD, "summands": 10, "slots": 2}
    Packing(**acceptable)
    with pytest.raises(ParameterError) as refusal:
        Packing(**acceptable | arguments)
    assert message in str(refusal.value)


# -- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS.values(), ids=list(GROUPS))
@pytest.mark.parametrize("slots", range(2, 7))
@pytest.mark.parametrize("summands", SUMMANDS)
def test_everybody_at_the_limit_does_not_wrap(
    backend: str, group: Group, slots: int, summands: int
) -> None:
    """Every pattern of signs over the slots, N times at the largest weight."""
    weight = 1 + summands % 3
    try:
        chosen = Packing(group, summands, slots, max_weight=weight)
    except ParameterError:
        assert summands * weight > (Packing(group, 1, slots).bases[0] - 1) // 2
        return
    patterns = 2**slots
    signs = [1 - 2 * (e >> slot & 1) for slot in range(slots) for e in range(patterns)]
    z = chosen.levels * np.array(signs)
    packed = pack_integers(chosen, z)
    total = group.vector([summands * weight * int(value) for value in packed])
    assert chosen.unpack(total, z.size, chosen.levels, summands * weight).tolist() == (
        (summands * weight * z).tolist()
    )


@given(
    group=st.sampled_from([*GROUPS.values(), PrimeField(65_537)]),
    slots=st.integers(2, 6),
    summands=st.integers(1, 10_000),
    weight=st.integers(1, 5),
    size=st.sampled_from(SIZES[:-1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_of_masked_vectors_equal_those_of_python_integers(
    backend: str, group: Group, slots: int, summands: int, weight: int, size: int, seed: int
) -> None:
    chosen = packing(group, summands, slots, max_weight=weight)
    rng = np.random.default_rng(seed)
    kinds = min(summands, 3)
    counts = [1 + int(part) for part in rng.multinomial(summands - kinds, [1 / kinds] * kinds)]
    sums, expected = [0] * chosen.length(size), np.zeros(size, dtype=np.int64)
    for count in counts:
        z = rng.integers(-chosen.levels, chosen.levels, size, endpoint=True)
        z[rng.random(size) < 0.5] = chosen.levels * rng.choice([-1, 1])
        factor = count * int(rng.integers(1, weight, endpoint=True))
        mask = rng.integers(0, group.modulus, len(sums), dtype=np.uint32)
        packed = pack_integers(chosen, z, mask)
        signed = packed_exactly(chosen, z)
        assert packed.tolist() == [
            (integer + int(m)) % group.modulus for integer, m in zip(signed, mask, strict=True)
        ]
        sums = [a + factor * b for a, b in zip(sums, signed, strict=True)]
        expected += factor * z
    assert max(map(abs, sums)) <= (group.modulus - 3) // 2
    total = group.vector(np.array(sums, dtype=object))
    unpacked = chosen.unpack(total, size, chosen.levels, summands * weight)
    assert unpacked.tolist() == expected.tolist()


@pytest.mark.parametrize("group", GROUPS.values(), ids=list(GROUPS))
@pytest.mark.parametrize("slots", range(2, 7))
def test_the_next_base_wraps(backend: str, group: Group, slots: int) -> None:
    """B + 2 leaves room for one level more, and a sum at that limit is another sum."""
    base = Packing(group, 1, slots).bases[0] + 2
    digits = np.full(slots, (base - 1) // 2)
    total = group.vector([sum(int(z) * base**slot for slot, z in enumerate(digits))])
    out = np.empty(slots, dtype=np.float32)
    kernels.active().unpack(total, (base,) * (slots - 1), (1.0,) * slots, group.modulus, out)
    assert out.tolist() != digits.tolist()


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("summands", [10, 50, 200])
@pytest.mark.parametrize("weight", [1, 2])
def test_noise_moves_the_lowest_slot_alone(
    backend: str, slots: int, summands: int, weight: int
) -> None:
    noise = 600 * weight
    try:
        chosen = Packing(DEFAULT_FIELD, summands, slots, weight, noise=noise)
    except ParameterError:
        assert slots == 3
        return
    reach = summands * weight
    signs = np.array([1 - 2 * (e >> s & 1) for s in range(slots) for e in range(2**slots)])
    z = chosen.levels * signs
    packed = pack_integers(chosen, z)
    for error in (-noise, -1, 0, noise):
        total = DEFAULT_FIELD.vector([reach * int(value) + error for value in packed])
        unpacked = chosen.unpack(total, z.size, chosen.levels, reach)
        low = reach * z[: total.size] + error / chosen.gain
        np.testing.assert_allclose(unpacked[: total.size], low, rtol=1e-6)
        assert unpacked[total.size :].tolist() == (reach * z[total.size :]).tolist()


def test_noise_beyond_its_room_spoils_the_next_slot(backend: str) -> None:
    """The low base is no wider than it must be."""
    chosen = Packing(DEFAULT_FIELD, 10, 2, noise=600)
    z = np.full(2, chosen.levels)
    total = DEFAULT_FIELD.vector([10 * int(pack_integers(chosen, z)[0]) + 601])
    with pytest.raises(RecoveryError):
        chosen.unpack(total, 2, chosen.levels, 10)


@pytest.mark.parametrize("r", [1e-12, 3e-7, 0.7, 1e12])
def test_a_sum_at_the_limit_is_believed_and_one_beyond_is_not(backend: str, r: float) -> None:
    chosen = Packing(DEFAULT_FIELD, 200, 2)
    v = np.full(6, np.float32(r) * np.float32(1.5))
    zeros = np.zeros(3, dtype=np.uint32)
    packed, cut = chosen.pack(v, r, random_words(3, 1), zeros)
    assert cut == 6
    total = DEFAULT_FIELD.weighted_sum([150], [packed])
    unpacked = chosen.unpack(total, 6, r, 150)
    np.testing.assert_allclose(unpacked, 150 * r, rtol=1e-6)
    for place in chosen.places:  # one level too many in one slot
        beyond = total.copy()
        beyond[1] = (int(beyond[1]) + place) % DEFAULT_FIELD.modulus
        with pytest.raises(RecoveryError, match="the sum is spoilt"):
            chosen.unpack(beyond, 6, r, 150)


def test_a_sum_under_a_wrong_mask_is_noticed(backend: str) -> None:
    chosen = Packing(DEFAULT_FIELD, 200, 2)
    total = np.random.default_rng(5).integers(0, DEFAULT_FIELD.modulus, 1000, dtype=np.uint32)
    with pytest.raises(RecoveryError, match="the sum is spoilt"):
        chosen.unpack(total, 2000, 1.0, 140)


# -- rounding ------------------------------------------------------------------------------------


@given(
    levels=st.sampled_from([1, 2, 23, 115, 2316, 23_167]),
    size=st.sampled_from(SIZES),
    exponent=st.sampled_from([-12, -3, 0, 12, 30]),  # the last product overflows
    seed=st.integers(0, 2**32 - 1),
)
def test_rounding_is_that_of_single_precision(
    backend: str, levels: int, size: int, exponent: int, seed: int
) -> None:
    """In float64 a product of two float32 numbers is exact, and a sum rounds only once."""
    rng = np.random.default_rng(seed)
    scale = np.float32(levels * 10.0**-exponent if exponent < 30 else 2.0**55)
    v = (rng.normal(size=size) * 10.0**exponent).astype(np.float32)
    v[rng.random(size) < 0.1] = 0.0
    v[rng.random(size) < 0.1] = 2.0**-149
    v[rng.random(size) < 0.1] = -(2.0**-149)
    coins = random_words(size, seed).view(np.uint16)[:size].copy()
    coins[rng.random(size) < 0.2] = 0
    coins[rng.random(size) < 0.2] = 2**16 - 1
    packed = np.empty(size, dtype=np.uint32)
    zeros, q = np.zeros_like(packed), DEFAULT_FIELD.modulus
    cut = kernels.active().quantise_pack(v, float(scale), coins, levels, (1,), zeros, q, packed)
    expected, beyond = [], 0
    for value, coin in zip(v.tolist(), coins.tolist(), strict=True):
        with np.errstate(over="ignore"):
            product = float(np.float32(value * float(scale)))
        y = float(np.float32(product + coin / 2**16))
        z = math.floor(y) if math.isfinite(y) else int(math.copysign(levels + 1, y))
        kept = max(-levels, min(z, levels))
        expected.append(kept % q)
        beyond += kept != z
    assert packed.tolist() == expected
    assert cut == beyond


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("level", [0.0, 0.3, -0.3, -2.71875, 11.9, -12.0])
def test_rounding_is_unbiased(backend: str, slots: int, level: float) -> None:
    """Over all 2^16 coins, to 2^-11 of a level."""
    chosen = Packing(DEFAULT_FIELD, 50, slots)
    v = np.full(2**16, level, dtype=np.float32)
    coins = np.arange(2**16, dtype=np.uint16).view(np.uint32)
    zeros = np.zeros(chosen.length(v.size), dtype=np.uint32)
    packed, cut = chosen.pack(v, float(chosen.levels), coins, zeros)
    z = chosen.unpack(packed, v.size, float(chosen.levels), 1)
    assert cut == 0
    assert abs(float(z.mean(dtype=np.float64)) - level) <= 2**-11
    assert set(z.tolist()) <= {math.floor(level), math.ceil(level)}


def test_what_is_cut_is_counted(backend: str) -> None:
    chosen = Packing(DEFAULT_FIELD, 200, 2)
    v = np.array([0.5, 2.01, -2.01, 1e30, 0.0], dtype=np.float32)
    packed, cut = chosen.pack(v, 2.0, np.zeros(3, np.uint32), np.zeros(3, np.uint32))
    # Without a coin's help a little beyond the range is still the highest level below it.
    assert cut == 2
    z = chosen.unpack(packed, 5, 2.0, 1)
    np.testing.assert_allclose(z[1:], [2, -2, 2, 0], rtol=1e-6)


@pytest.mark.parametrize("slots", range(2, 7))
@pytest.mark.parametrize("size", [*SIZES, 400_000])
def test_native_packing_equals_numpy(slots: int, size: int) -> None:
    if not kernels.native_available():
        pytest.skip("the native library was not built")
    from lightsecagg.field.native import loops

    rng = np.random.default_rng(size)
    v = rng.standard_t(2, size).astype(np.float32)
    coins, q = random_words(size, 1).view(np.uint16)[:size], DEFAULT_FIELD.modulus
    chosen = Packing(DEFAULT_FIELD, 3, slots)
    scale = float(np.float32(chosen.levels / 2.5))
    mask = rng.integers(0, q, chosen.length(size), dtype=np.uint32)
    factors = [0.1 + slot for slot in range(slots)]

    def results(used: kernels.Loops) -> list[object]:
        out, back = np.empty_like(mask), np.empty(size, dtype=np.float32)
        cut = used.quantise_pack(v, scale, coins, chosen.levels, chosen.places, mask, q, out)
        used.unpack(mask, chosen.bases, factors, q, back)  # any elements have digits
        return [cut, out.tobytes(), back.tobytes()]

    expected = results(reference)
    assert results(loops) == expected
    in_place = mask.copy()
    loops.quantise_pack(v, scale, coins, chosen.levels, chosen.places, in_place, q, in_place)
    assert in_place.tobytes() == expected[1]
    loops.set_threads(3)
    loops.allow_avx2(False)
    try:
        assert results(loops) == expected
    finally:
        loops.set_threads(1)
        loops.allow_avx2(True)


def test_native_packing_keeps_subnormal_numbers() -> None:
    """floor(-1e-42) is -1; a processor that flushes makes it 0, and the upload another one."""
    if not kernels.native_available():
        pytest.skip("the native library was not built")
    torch = pytest.importorskip("torch")
    chosen = Packing(DEFAULT_FIELD, 200, 2)
    v, zeros = np.full(4, -1e-42, dtype=np.float32), np.zeros(2, dtype=np.uint32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        with kernels.using("native"):
            packed, _ = chosen.pack(v, float(chosen.levels), zeros, zeros)
        still_flushing = float(v[0]) * 1.0 == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert DEFAULT_FIELD.modulus - packed[0] == 1 + chosen.places[1]
    assert still_flushing


# -- what is refused -----------------------------------------------------------------------------


def test_ranges_and_arrays_of_the_wrong_kind_are_refused() -> None:
    chosen = Packing(DEFAULT_FIELD, 10, 2)
    v, coins, mask = (np.zeros(n, kind) for n, kind in ((5, "f4"), (3, "u4"), (3, "u4")))
    for r in (0.0, -1.0, math.nan, math.inf, 1e-13, 1e13):
        with pytest.raises(ParameterError, match="range r = "):
            chosen.pack(v, r, coins, mask)
        with pytest.raises(ParameterError, match="range r = "):
            chosen.unpack(mask, 5, r, 1)
    for wrong in (v.astype(np.float64), v[:0], v.reshape(1, 5)):
        with pytest.raises(FieldError, match="float32"):
            chosen.pack(wrong, 1.0, coins, mask)
    for few in (coins[:2], coins.astype(np.uint64)):
        with pytest.raises(FieldError, match="packing 5 entries takes 3 uniform uint32 words"):
            chosen.pack(v, 1.0, few, mask)
    for short in (mask[:2], np.full(3, 2**32 - 1, dtype=np.uint32)):
        with pytest.raises(FieldError):
            chosen.pack(v, 1.0, coins, short)
        with pytest.raises(FieldError):
            chosen.unpack(short, 5, 1.0, 1)

"""Rounding, its budget and its refusals: Lemma 2, S12 and S13."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightsecagg.errors import FieldError, InputRefused, ParameterError, RecoveryError
from lightsecagg.field.group import Group
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements, PrimeField
from lightsecagg.field.quantization import Quantizer, clip_to_bound, signed, with_room
from lightsecagg.field.words import WORDS

ALL_GROUPS = pytest.mark.parametrize(
    "field", [DEFAULT_FIELD, PAPER_FIELD, WORDS], ids=["2^31", "2^32", "words"]
)
LOWEST, HIGHEST = 0, 2**32 - 1  # words that round everything up, or nothing


def words(count: int, value: int | None = None, seed: int = 1) -> Elements:
    if value is not None:
        return np.full(count, value, dtype=np.uint32)
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def elements(field: Group, count: int, seed: int = 2) -> Elements:
    return np.random.default_rng(seed).integers(0, field.modulus, count, dtype=np.uint32)


def rounded(quantizer: Quantizer, value: float, word: int, samples: int = 1) -> int:
    """The signed integer that one entry becomes."""
    out = quantizer.quantise(np.array([value]), words(1, word), samples)
    return int(signed(quantizer.group, out[:1])[0])


# -- phi and phi^-1 ------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [3, 5, 7, 11, 101])
def test_phi_and_its_inverse_over_a_whole_field(q: int) -> None:
    field = PrimeField(q)
    half = (q - 3) // 2
    integers = list(range(-half - 2, half + 1))  # exactly q integers, two more below than above
    assert len(integers) == q
    assert signed(field, field.vector(integers)).tolist() == integers


@ALL_GROUPS
def test_phi_is_symmetric_up_to_the_documented_limit(field: Group) -> None:
    limit = (field.modulus - 3) // 2
    assert signed(field, field.vector([limit, -limit])).tolist() == [limit, -limit]
    half = field.modulus // 2
    assert signed(field, field.vector([half - 1, half])).tolist() == [
        half - 1,
        half - field.modulus,
    ]


# -- rounding ------------------------------------------------------------------------------------


@given(
    value=st.floats(-1, 1),
    scale=st.floats(0.001, 2**20),
    word=st.integers(0, 2**32 - 1),
    single=st.booleans(),
)
def test_rounding_equals_exact_arithmetic(
    backend: str, value: float, scale: float, word: int, single: bool
) -> None:
    x = np.array([value], dtype=np.float32 if single else np.float64)
    quantizer = Quantizer(PAPER_FIELD, bound=1.0, summands=100, scale=scale)
    y = Fraction(float(x[0]) * scale)
    expected = math.floor(y) + int((y - math.floor(y)) * 2**32 > word)
    result = signed(PAPER_FIELD, quantizer.quantise(x, words(1, word)))
    # A fraction closer to 1 than float64 can tell counts as 1; no other difference is allowed.
    nearly_integer = 0 < math.ceil(y) - y < Fraction(1, 2**50)
    assert int(result[0]) in ({expected, math.ceil(y)} if nearly_integer else {expected})


@pytest.mark.parametrize("fraction", [0.0, 2.0**-40, 0.25, 0.5, 1 / 3, 1 - 2.0**-20])
@pytest.mark.parametrize("whole", [-5, -1, 0, 7])
def test_probability_of_rounding_up_is_exact(backend: str, whole: int, fraction: float) -> None:
    """Exactly ceil(frac * 2^32) of the 2^32 words round up: a bias of at most 2^-32."""
    quantizer = Quantizer(DEFAULT_FIELD, bound=16.0, summands=2, scale=1.0)
    value = whole + fraction
    up = math.ceil((Fraction(value) - whole) * 2**32)
    if up > 0:
        assert rounded(quantizer, value, up - 1) == whole + 1
    if up < 2**32:
        assert rounded(quantizer, value, up) == whole


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 0.5, -2.71875, 1.999])
@pytest.mark.parametrize("scale", [1.0, 0.25, 1000.0])
def test_lemma_2_rounding_is_unbiased_with_bounded_variance(
    backend: str, value: float, scale: float
) -> None:
    """Lemma 2: E[Q_c(x)] = x and Var[Q_c(x)] <= 1 / (4 c^2).

    Both are means of n independent numbers in [0, 1] (in units of a quantum and its square), so by
    Hoeffding's inequality each of the two checks fails with probability at most 1e-9 if the words
    were drawn anew: 4e-8 for all cases of one backend. The words here are fixed.
    """
    n = 1 << 18
    quantizer = Quantizer(DEFAULT_FIELD, bound=4.0, summands=10, scale=scale)
    out = quantizer.dequantise(quantizer.quantise(np.full(n, value), words(n)))
    tolerance = math.sqrt(math.log(2 / 1e-9) / (2 * n)) + 2.0**-32
    error = (out - value) * scale
    fraction = scale * value - math.floor(scale * value)
    assert abs(error.mean()) <= tolerance
    assert abs((error**2).mean() - fraction * (1 - fraction)) <= tolerance
    assert fraction * (1 - fraction) <= 1 / 4


def test_rounding_never_leaves_the_two_neighbours(backend: str) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=3.0, summands=10, scale=1000.0)
    x = np.random.default_rng(3).uniform(-3, 3, 100_001)
    error = quantizer.dequantise(quantizer.quantise(x, words(x.size))) - x
    assert float(np.abs(error).max()) <= 1 / 1000 * (1 + 1e-9)


# -- the budget (S13) ----------------------------------------------------------------------------


@st.composite
def admissible(draw: st.DrawFn) -> Quantizer:
    moduli = [101, 65537, 2**31 - 2**19 + 1, 2**32 - 5]
    field = draw(st.sampled_from([*map(PrimeField, moduli), WORDS]))
    summands = draw(st.integers(1, 40))
    max_weight = draw(st.integers(1, 64))
    budget = (field.modulus - 3) // 2 // (summands * max_weight)
    assume(budget >= 1)
    weighted = draw(st.booleans())
    max_samples = draw(st.integers(1, budget)) if weighted else 1
    bound = draw(st.floats(1e-30, 1e30))
    return Quantizer(field, bound, summands, max_samples, max_weight, weighted)


@given(quantizer=admissible(), sign=st.sampled_from([-1, 1]), up=st.booleans())
def test_S13_the_worst_sum_of_admissible_parameters_never_wraps(
    backend: str, quantizer: Quantizer, sign: int, up: bool
) -> None:
    field, n = quantizer.group, quantizer.summands
    x = np.array([sign * quantizer.bound])
    word = words(1, LOWEST if up else HIGHEST)
    one = quantizer.quantise(x, word, quantizer.max_samples)
    integers = [int(value) for value in signed(field, one)]
    # The worst case really is one: the integer is within one of the whole budget.
    assert quantizer.budget - 1 <= abs(integers[0]) <= quantizer.budget

    masks = [elements(field, one.size, seed) for seed in range(n)]
    weights = [quantizer.max_weight] * n
    uploads = [quantizer.quantise_and_mask(x, word, z, quantizer.max_samples) for z in masks]
    total = field.subtract(field.weighted_sum(weights, uploads), field.weighted_sum(weights, masks))
    expected = [n * quantizer.max_weight * value for value in integers]
    assert signed(field, total).tolist() == expected
    assert all(abs(value) <= (field.modulus - 3) // 2 for value in expected)


@given(quantizer=admissible())
def test_S13_the_automatic_scale_is_the_largest_safe_one(quantizer: Quantizer) -> None:
    arguments = (
        quantizer.group,
        quantizer.bound,
        quantizer.summands,
        quantizer.max_samples,
        quantizer.max_weight,
        quantizer.weighted,
    )
    assert Quantizer(*arguments, scale=quantizer.scale) == quantizer
    with pytest.raises(ParameterError, match="could wrap around"):
        Quantizer(*arguments, scale=math.nextafter(quantizer.scale, math.inf))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bound", [0.1, 1 / 3, 0.7, 1.1, 1e-3])
def test_S13_float_products_beyond_the_limit_are_clamped(
    backend: str, bound: float, dtype: Any
) -> None:
    """In float32 the bound itself may round upwards; the integer must not follow it."""
    for field in (PrimeField(10007), DEFAULT_FIELD, PAPER_FIELD):
        for summands in range(1, 40):
            quantizer = Quantizer(field, bound, summands)
            x = np.array([bound, -bound], dtype=dtype)
            integers = signed(field, quantizer.quantise(x, words(2, LOWEST)))
            assert int(np.abs(integers).max()) <= quantizer.budget


def test_scale_may_be_below_one(backend: str) -> None:
    quantizer = Quantizer(PrimeField(101), bound=1000.0, summands=7)
    assert quantizer.budget == 7
    assert quantizer.scale == pytest.approx(0.007)
    out = quantizer.dequantise(quantizer.quantise(np.array([1000.0, -1000.0]), words(2, HIGHEST)))
    np.testing.assert_allclose(out, [1000.0, -1000.0], rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bound": 0.0}, "bound = 0.0 must be positive"),
        ({"bound": -1.0}, "bound = -1.0 must be positive"),
        ({"bound": math.inf}, "bound = inf must be positive"),
        ({"bound": math.nan}, "bound = nan must be positive"),
        ({"bound": 1e-300}, "bound = 1e-300 must be positive, between"),
        ({"summands": 0}, "summands = 0 must be at least 1"),
        ({"summands": 2.5}, "summands = 2.5 must be an integer"),
        ({"max_weight": 0}, "max_weight = 0 must be at least 1"),
        ({"max_samples": 2}, "only makes sense for a weighted quantizer"),
        ({"weighted": True, "max_samples": 2**30}, "lower max_samples"),
        ({"summands": 2**31}, "is too small for sums of 2147483648 vectors"),
        ({"scale": -1.0}, "scale c_l = -1.0 must be finite"),
        ({"scale": math.nan}, "scale c_l = nan must be finite"),
        ({"scale": math.inf}, "scale c_l = inf must be finite"),
        ({"scale": 1e12}, "the largest safe scale is"),
    ],
)
def test_S13_impossible_budgets_are_refused(arguments: dict[str, Any], message: str) -> None:
    acceptable: dict[str, Any] = {"group": DEFAULT_FIELD, "bound": 1.0, "summands": 10}
    Quantizer(**acceptable)
    with pytest.raises(ParameterError) as refusal:
        Quantizer(**acceptable | arguments)
    assert message in str(refusal.value)


# -- inputs that are refused (S13, S12) ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 17, 99_999])
def test_S13_not_finite_is_refused_even_when_clipping(
    backend: str, bad: float, position: int, clip: bool, dtype: Any
) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=1.0, summands=3)
    x = np.zeros(100_000, dtype=dtype)
    x[50] = 0.5
    x[position] = bad
    if clip:
        x = clip_to_bound(x, 1.0)
    for use in (quantizer.check, lambda x: quantizer.quantise(x, words(x.size))):
        with pytest.raises(InputRefused, match=f"entry {position} of the vector is NaN or inf"):
            use(x)


def test_S13_not_finite_is_refused_under_a_bound_that_float32_cannot_hold(backend: str) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=1e60, summands=3)
    with pytest.raises(InputRefused, match="entry 1 of the vector is NaN or infinite"):
        quantizer.quantise(np.array([1e38, np.inf], dtype=np.float32), words(2))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_S13_over_range_is_refused_and_the_value_not_told(
    backend: str, sign: float, dtype: Any
) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=1.0, summands=3)
    x = np.zeros(1000, dtype=dtype)
    x[700] = np.nextafter(dtype(sign), dtype(2 * sign))  # one unit in the last place beyond
    with pytest.raises(InputRefused, match=r"entry 700 of the vector lies beyond the bound 1\.0"):
        quantizer.quantise(x, words(x.size))
    x[700] = 723.4375 * sign
    with pytest.raises(InputRefused) as refusal:
        quantizer.quantise(x, words(x.size))
    assert "723" not in str(refusal.value)


def test_entries_at_the_bound_pass_in_their_own_precision(backend: str) -> None:
    """float32(0.1) exceeds 0.1, but it is what clamping a float32 tensor to 0.1 produces."""
    quantizer = Quantizer(DEFAULT_FIELD, bound=0.1, summands=3)
    x = np.array([0.1, -0.1], dtype=np.float32)
    assert float(x[0]) > 0.1
    out = quantizer.dequantise(quantizer.quantise(x, words(2)))
    np.testing.assert_allclose(out, [0.1, -0.1], rtol=1e-7)
    assert clip_to_bound(x, 0.1) is x


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_clipped_to_the_bound_passes(backend: str, dtype: Any) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=0.1, summands=3)
    x = np.array([0.05, 5.0, -0.1, -7.0, 0.1], dtype=dtype)
    original = x.copy()
    clipped = clip_to_bound(x, 0.1)
    assert clipped.dtype == dtype
    out = quantizer.dequantise(quantizer.quantise(clipped, words(5)))
    np.testing.assert_allclose(out, [0.05, 0.1, -0.1, -0.1, 0.1], atol=1e-8)
    np.testing.assert_array_equal(x, original)  # the caller's model is left alone


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(4, dtype=np.float16), "float16"),
        (np.zeros(4, dtype=np.int64), "int64"),
        (np.zeros(4, dtype=">f8"), "float32 or float64"),
        ([0.0, 0.0, 0.0, 0.0], "list"),
        (np.zeros((2, 2)), r"shape \(2, 2\)"),
    ],
)
def test_S13_what_is_not_a_real_vector_is_refused(x: Any, message: str) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=1.0, summands=3)
    with pytest.raises(InputRefused, match=message):
        quantizer.quantise(x, words(4))
    with pytest.raises(InputRefused, match=message):
        quantizer.check(x)


def test_S12_masks_and_words_of_the_wrong_kind_are_refused(backend: str) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=1.0, summands=3)
    x, mask = np.zeros(4), np.zeros(4, dtype=np.uint32)
    for wrong in (words(3), words(4).astype(np.uint64), words(4).reshape(2, 2)):
        with pytest.raises(FieldError, match="uniform uint32 words"):
            quantizer.quantise_and_mask(x, wrong, mask)
    too_large = mask.copy()
    too_large[2] = DEFAULT_FIELD.modulus
    for wrong_mask in (mask[:3], mask.astype(np.int64), np.zeros(5, np.uint32), too_large):
        with pytest.raises(FieldError):
            quantizer.quantise_and_mask(x, words(4), wrong_mask)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 501, 600_001])
def test_a_vector_may_be_masked_where_its_coins_lie(backend: str, size: int, dtype: type) -> None:
    quantizer = Quantizer(PAPER_FIELD, 1.0, 2, max_samples=9, weighted=True)
    x = np.random.default_rng(7).uniform(-1, 1, size).astype(dtype)
    mask, coins = elements(PAPER_FIELD, size + 1, 8), words(size + 1, seed=9)
    expected = quantizer.quantise_and_mask(x, coins[:-1].copy(), mask, 5)
    masked = quantizer.quantise_and_mask(x, coins[:-1], mask, 5, out=coins)
    assert masked is coins
    assert np.array_equal(masked, expected)


def test_S12_a_masked_vector_fits_where_it_is_wanted() -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=1.0, summands=3)
    x, mask = np.zeros(4), np.zeros(4, dtype=np.uint32)
    for wrong in (words(3), words(5), words(4).astype(np.uint64), words(8)[::2]):
        with pytest.raises(FieldError):
            quantizer.quantise_and_mask(x, words(4), mask, out=wrong)


def test_S12_totals_of_the_wrong_kind_are_refused(backend: str) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound=1.0, summands=3)
    good = np.zeros(4, dtype=np.uint32)
    bad = np.full(4, DEFAULT_FIELD.modulus, dtype=np.uint32)
    for masked, mask in [(good, good[:3]), (good[:3], good), (bad, good), (good, bad)]:
        with pytest.raises(FieldError):
            quantizer.unmask_and_dequantise(masked, mask)
    with pytest.raises(FieldError):
        signed(DEFAULT_FIELD, bad)


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.nan, math.inf])
def test_a_sum_is_not_divided_by_nothing(divisor: float) -> None:
    """All staleness weights may round to zero; Eq. (35) would divide by their sum."""
    quantizer = Quantizer(DEFAULT_FIELD, bound=1.0, summands=3)
    with pytest.raises(ParameterError, match="cannot divide"):
        quantizer.dequantise(np.zeros(4, dtype=np.uint32), divisor)


# -- in place ------------------------------------------------------------------------------------

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 2**18, 2**18 + 1, 3 * 2**18 - 1])
"""Around the blocks by which a sum becomes real numbers."""


@SIZES
@pytest.mark.parametrize("weighted", [False, True])
def test_R53_a_sum_becomes_real_numbers_in_its_own_buffer(
    backend: str, size: int, weighted: bool
) -> None:
    quantizer = Quantizer(PAPER_FIELD, 1.0, 3, weighted=weighted)
    total = with_room(size + weighted)
    total[:] = field_sum = elements(PAPER_FIELD, total.size)
    values = total[:size]
    found = quantizer.dequantise(values, 7.0, in_place=True)
    np.testing.assert_array_equal(found, quantizer.dequantise(field_sum[:size], 7.0))
    assert found.base is total.base, "no other vector was made"


def test_a_sum_is_spent_only_where_that_was_asked_for() -> None:
    quantizer, total = Quantizer(PAPER_FIELD, 1.0, 3), with_room(5)
    total[:] = before = elements(PAPER_FIELD, 5)
    quantizer.dequantise(total)
    np.testing.assert_array_equal(total, before)


@pytest.mark.parametrize("start", [0, 3, 4, 6])
def test_elements_that_lie_elsewhere_are_not_written_over(start: int) -> None:
    """In a buffer of ten, only those from the fifth on have room."""
    quantizer, whole = Quantizer(PAPER_FIELD, 1.0, 3), elements(PAPER_FIELD, 10)
    before, total = whole.copy(), whole[start : start + 4]
    quantizer.dequantise(total, in_place=True)
    np.testing.assert_array_equal(whole, before)


# -- sample counts -------------------------------------------------------------------------------


def test_weights_multiply_before_rounding(backend: str) -> None:
    """Rounding first would multiply the error by the sample count."""
    quantizer = Quantizer(PAPER_FIELD, 1.0, 2, max_samples=1000, weighted=True, scale=100.0)
    x = np.random.default_rng(5).uniform(-1, 1, 10_000)
    out = quantizer.quantise(x, words(x.size), samples=1000)
    error = quantizer.dequantise(out[:-1]) - 1000 * x
    assert float(np.abs(error).max()) <= 1 / 100 * (1 + 1e-9)
    assert int(out[-1]) == 1000


@ALL_GROUPS
def test_weighted_mean_of_masked_vectors(backend: str, field: Group) -> None:
    counts, weights = [3, 500, 77, 9999], [4, 1, 2, 4]
    quantizer = Quantizer(field, 1.0, len(counts), max_samples=1000, max_weight=4, weighted=True)
    generator = np.random.default_rng(6)
    vectors = [generator.uniform(-1, 1, 501).astype(np.float32) for _ in counts]
    masks = [elements(field, 502, seed) for seed in range(4)]
    uploads = [
        quantizer.quantise_and_mask(x, words(501, seed=seed), z, count)
        for seed, (x, z, count) in enumerate(zip(vectors, masks, counts, strict=True))
    ]
    mean, total = quantizer.weighted_mean(
        field.subtract(field.weighted_sum(weights, uploads), field.weighted_sum(weights, masks)),
        sum(weights),
    )
    cut = [3, 500, 77, 1000]  # the last count is cut to s_max, in weight and in count alike
    effective = [w * s for w, s in zip(weights, cut, strict=True)]
    assert total == sum(effective)
    expected = np.average(np.float64(vectors), axis=0, weights=effective)
    np.testing.assert_allclose(mean, expected, atol=sum(weights) / quantizer.scale / total)


@pytest.mark.parametrize("count", [0, -1, 1, 2 * 10 + 1, 3 * 10, 10**6, -(10**6)])
def test_S47_an_impossible_sum_of_counts_is_refused(count: int) -> None:
    """Two of at most three clients are in the sum, with 1 to 10 samples each."""
    quantizer = Quantizer(DEFAULT_FIELD, 1.0, summands=3, max_samples=10, weighted=True)
    total = DEFAULT_FIELD.vector([1, 2, count])
    with pytest.raises(RecoveryError, match=rf"sample counts is {count}, outside 2\.\.\.20"):
        quantizer.weighted_mean(total, 2)
    for possible in (2, 20):
        total[-1] = possible
        assert quantizer.weighted_mean(total, 2)[1] == possible


def raised(field: PrimeField, total: Elements, entry: int, quanta: int) -> Elements:
    """The total after one upload was raised by so many quanta at one entry."""
    out = total.copy()
    out[entry] = (int(out[entry]) + quanta) % field.modulus
    return out


@ALL_GROUPS
@pytest.mark.parametrize("scale", [0.0, 0.5, 7.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_S47_an_average_beyond_the_bound_is_refused(
    backend: str, field: Group, scale: float, dtype: Any
) -> None:
    """Inputs at the bound itself pass at any scale; what no rounding explains does not."""
    counts, weights, bound = [3, 10, 1], [4, 1, 2], 0.1  # float32 rounds this bound up
    weight, count = sum(weights), 4 * 3 + 1 * 10 + 2 * 1
    quantizer = Quantizer(field, bound, 3, 10, max_weight=4, weighted=True, scale=scale)
    ends = np.array([bound, -bound, 0.0], dtype=dtype)
    uploads = [quantizer.quantise(ends, words(3, seed=s), s) for s in counts]
    total = field.weighted_sum(weights, uploads)
    honest = quantizer.dequantise(total[:-1], count)
    mean, _ = quantizer.weighted_mean(total, weight)
    np.testing.assert_array_equal(mean, honest)
    lie = math.ceil(quantizer.scale * count * bound) + 2 * weight
    for entry, quanta in ((0, lie), (1, -lie), (2, 2 * lie), (0, field.modulus // 3)):
        spoilt = raised(field, total, entry, quanta)
        assert abs(quantizer.dequantise(spoilt[:-1], count)[entry]) > bound
        with pytest.raises(RecoveryError, match=f"entry {entry} of the average lies beyond .* 0.1"):
            quantizer.weighted_mean(spoilt, weight)


@pytest.mark.parametrize("divisor", [1.0, 7.0])
def test_S47_a_sum_beyond_the_bound_is_refused(divisor: float) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, 0.1, 3, max_weight=4)
    uploads = [quantizer.quantise(np.array([0.1, -0.1]), words(2, seed=k)) for k in range(3)]
    total = DEFAULT_FIELD.weighted_sum([4, 1, 2], uploads)
    honest = quantizer.plain_sum(total, 7, divisor)
    np.testing.assert_allclose(honest, np.array([0.7, -0.7]) / divisor, rtol=1e-6)
    with pytest.raises(RecoveryError, match="entry 0 of the average lies beyond the bound"):
        quantizer.plain_sum(raised(DEFAULT_FIELD, total, 0, 100), 7, divisor)
    with pytest.raises(RecoveryError, match="entry 1 of the average lies beyond the bound"):
        quantizer.plain_sum(raised(DEFAULT_FIELD, total, 1, -100), 7, divisor)


def test_weighted_mean_needs_a_count() -> None:
    total = np.ones(4, dtype=np.uint32)
    with pytest.raises(ParameterError, match="only a weighted quantizer"):
        Quantizer(DEFAULT_FIELD, 1.0, 3).weighted_mean(total, 3)
    with pytest.raises(FieldError, match="at least its count"):
        Quantizer(DEFAULT_FIELD, 1.0, 3, max_samples=10, weighted=True).weighted_mean(total[:0], 3)


@pytest.mark.parametrize("samples", [0, -3, 2.5])
def test_sample_counts_are_positive_integers(samples: Any) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, 1.0, 3, max_samples=10, weighted=True)
    with pytest.raises(InputRefused, match="must be an integer of at least 1"):
        quantizer.quantise(np.zeros(2), words(2), samples)
    with pytest.raises(InputRefused, match="must be an integer of at least 1"):
        quantizer.check(np.zeros(2), samples)


def test_unweighted_vectors_take_no_count() -> None:
    with pytest.raises(ParameterError, match="takes no sample count"):
        Quantizer(DEFAULT_FIELD, 1.0, 3).quantise(np.zeros(2), words(2), samples=5)


@pytest.mark.parametrize("strided", ["x", "uniforms"])
def test_strided_arrays_are_taken_as_they_are_meant(backend: str, strided: str) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, 1.0, 3)
    x, uniforms = np.linspace(-1, 1, 64), words(64)
    expected = quantizer.quantise(x[::2].copy(), uniforms[::2].copy())
    if strided == "x":
        result = quantizer.quantise(x[::2], uniforms[::2].copy())
    else:
        result = quantizer.quantise(x[::2].copy(), uniforms[::2])
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("bound", [2, np.float32(2), np.float64(2), np.int64(2), Fraction(2)])
def test_a_bound_of_any_type_of_number_is_the_same_bound(bound: Any) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, bound, 3)
    assert type(quantizer.bound) is float
    assert quantizer == Quantizer(DEFAULT_FIELD, 2.0, 3)


@pytest.mark.parametrize("bound", ["1", None, True, 1j, [1.0], np.ones(1)])
def test_a_bound_that_is_no_number_is_refused(bound: Any) -> None:
    with pytest.raises(ParameterError, match="must be a number"):
        Quantizer(DEFAULT_FIELD, bound, 3)

"""The range of packed rounds: its arithmetic, its error law, and what liars can do to it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightsecagg.errors import ParameterError, RecoveryError
from lightsecagg.field import kernels
from lightsecagg.field.group import Elements
from lightsecagg.field.packing import Packing
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.ranges import (
    Codec,
    RangeRule,
    RangeScalars,
    Reading,
    Sums,
    root_mean_square,
)
from lightsecagg.field.rotation import Rotation

Q = DEFAULT_FIELD.modulus
BOUND = 16.0
Vectors = list[NDArray[np.float32]]


def rule(
    summands: int, entries: int = 4096, slots: tuple[int, ...] = (2, 3), **more: Any
) -> RangeRule:
    packings = {s: Packing(DEFAULT_FIELD, summands, s) for s in slots}
    return RangeRule(packings, RangeScalars(Q, summands, 1, entries), BOUND, **more)


class Federation:
    """Rounds of clients that rotate, pack and add up, and of a server that follows the rule."""

    def __init__(self, clients: int, dimension: int, slots: tuple[int, ...] = (2, 3)) -> None:
        self.rng = np.random.default_rng(20_260)
        self.rotation = Rotation(dimension)
        self.rule = rule(clients, self.rotation.length, slots)
        self.codec = Codec()

    def words(self, *shape: int) -> Elements:
        return self.rng.integers(0, 2**32, shape, dtype=np.uint32)

    def updates(self, norms: list[float], agreement: float = 0.4) -> Vectors:
        """Heavy-tailed vectors of these lengths that partly agree."""
        size = self.rotation.dimension
        directions = self.rng.standard_t(3, (len(norms) + 1, size))
        directions /= np.linalg.norm(directions, axis=1)[:, None]
        own = math.sqrt(1 - agreement**2)
        return [
            (norm * (agreement * directions[0] + own * direction)).astype(np.float32)
            for norm, direction in zip(norms, directions[1:], strict=True)
        ]

    def round(
        self, updates: Vectors, lie: Callable[[RangeScalars, int], int] | None = None
    ) -> tuple[Codec, Reading, float]:
        """The round's codec and reading, and the error of its average; the first client may lie."""
        codec, scalars, n = self.codec, self.rule.scalars, self.rotation.length
        signs = self.words(*self.rotation.signs_shape)
        uploads, norms, cuts = [], 0, 0
        for number, x in enumerate(updates):
            r, values = BOUND, x.clip(-BOUND, BOUND)
            if codec.slots > 1:
                packing, r = self.rule.packings[codec.slots], codec.r
                values = self.rotation.forward(x, signs)
                mask = np.zeros(packing.length(n), dtype=np.uint32)
                upload, cut = packing.pack(values, r, self.words(-(-n // 2)), mask)
                uploads.append(upload)
                cuts += scalars.cut(cut, int(self.words(1)[0]))
            rms = root_mean_square(values, n)
            a = scalars.norm(rms, r, codec.slots, int(self.words(1)[0]))
            norms += lie(scalars, codec.slots) if lie is not None and number == 0 else a
        true = np.sum(updates, axis=0, dtype=np.float64)
        if codec.slots > 1:
            total = packing.unpack(DEFAULT_FIELD.sum(uploads), n, codec.r, len(updates))
            length = math.sqrt(kernels.active().sum_of_squares(total))
            result = self.rotation.inverse(total, signs).astype(np.float64)
        else:
            result = np.clip(updates, -BOUND, BOUND).sum(axis=0, dtype=np.float64)
            length = float(np.linalg.norm(result))
        sums = Sums(length, len(updates), len(updates), norms, cuts)
        self.codec, reading = self.rule.follow(codec, sums)
        error = float(((reading.factor * result - true) ** 2).sum() / (true**2).sum())
        return codec, reading, error


def largest_lie(scalars: RangeScalars, slots: int) -> int:
    return scalars.norm_unit(1)


def lie_in_packed_rounds(scalars: RangeScalars, slots: int) -> int:
    return scalars.norm_unit(1) if slots > 1 else scalars.norm_unit(1) // 1000


# -- the scalars ---------------------------------------------------------------------------------


@pytest.mark.parametrize("summands", [2, 10, 200, 10_000])
@pytest.mark.parametrize("weight", [1, 5])
@pytest.mark.parametrize("entries", [16, 1_208_320, 10**9])
def test_sums_of_scalars_cannot_wrap(summands: int, weight: int, entries: int) -> None:
    scalars, last = RangeScalars(Q, summands, weight, entries), 2**32 - 1
    for slots in (1, 2):
        most = scalars.norm(1e300, 1e-12, slots, last)
        assert 0 < summands * weight * most <= (Q - 3) // 2
        assert scalars.norm_unit(1) == most == 64 * scalars.norm_unit(2)
    cut = scalars.cut(entries, last)
    assert cut == scalars.cut_unit
    assert summands * weight * cut <= (Q - 3) // 2
    scalars.check(summands * weight * most, summands * weight * cut, summands * weight)


def test_scalars_are_rounded_by_a_coin() -> None:
    scalars = RangeScalars(Q, 200, 1, 1_208_320)
    unit = scalars.norm_unit(2)
    assert unit == 83_865
    rms = 1000.25 / unit
    assert scalars.norm(rms, 1.0, 2, 0) == 1000
    assert scalars.norm(rms, 1.0, 2, int(0.74 * 2**32)) == 1000
    assert scalars.norm(rms, 1.0, 2, int(0.76 * 2**32)) == 1001
    # As norms in a round of one slot: 64 units in one, over the bound.
    assert scalars.norm(rms, 64.0, 1, 0) == 1000
    assert scalars.norm(0.0, 1.0, 2, 2**32 - 1) == 0


@given(st.integers(0, 10**9), st.integers(0, 2**32 - 1))
def test_cut_entries_are_counted_exactly_where_there_is_room(count: int, word: int) -> None:
    assert RangeScalars(Q, 200, 1, 1_208_320).cut(count % 1_208_321, word) == count % 1_208_321
    scalars = RangeScalars(Q, 200, 1, 10**9)
    expected = Fraction(scalars.cut_unit * count, 10**9) + Fraction(word, 2**32)
    assert scalars.cut(count, word) == math.floor(expected)


def test_units_are_the_largest_that_fit() -> None:
    scalars = RangeScalars(Q, 200, 3, 10**9)
    assert scalars.cut_unit == (Q - 3) // 1200
    assert scalars.norm_unit(2) == (Q - 3) // (128 * 600)


@pytest.mark.parametrize("size", [1, 1000, 70_001])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_root_mean_square(backend: str, size: int, kind: type) -> None:
    x = np.random.default_rng(1).normal(size=size).astype(kind)
    expected = 7 * math.sqrt(math.fsum(value * value for value in x.tolist()) / 80_000)
    assert root_mean_square(x, 80_000, samples=7) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["norms", "cut"])
@pytest.mark.parametrize("negative", [True, False])
def test_impossible_sums_of_scalars_are_refused(name: str, negative: bool) -> None:
    server = rule(10)
    most = 7 * {"norms": server.scalars.norm_unit(1), "cut": server.scalars.cut_unit}[name]
    sums = Sums(0.1, 7, 7, norms=most, cut=0)
    codec = Codec(slots=2, r=1.0)
    server.read(codec, dataclasses.replace(sums, **{name: most}))
    with pytest.raises(RecoveryError, match=r"the sum is spoilt"):
        server.read(codec, dataclasses.replace(sums, **{name: -1 if negative else most + 1}))


# -- the error law -------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("norms", [[1.0] * 10, [1.0] * 50, [3.0] * 5 + [1.0] * 15])
def test_the_error_law_is_what_happens(backend: str, slots: int, norms: list[float]) -> None:
    """nu against the error of real rounds, within 5 %."""
    federation = Federation(len(norms), 60_000, (slots,))
    updates = federation.updates(norms)
    rms = [root_mean_square(x, federation.rotation.length) for x in updates]
    federation.codec = Codec(slots=slots, r=5 * max(rms))  # nothing is cut
    _, reading, error = federation.round(updates)
    assert reading.share < 1e-5
    assert error == pytest.approx(reading.nu, rel=0.05)
    # The same by the clients' agreement: (r / rms)^2 / (6 L^2 N rho^2).
    levels = federation.rule.packings[slots].levels
    law = (5 * max(rms) / np.mean(rms)) ** 2 / (6 * levels**2 * len(norms) * reading.rho**2)
    assert error == pytest.approx(law, rel=0.05)


def test_the_error_law_with_noise_in_the_lowest_slot(backend: str) -> None:
    """64 squares of noise per client, spread by g, in one entry of s."""
    rotation, clients, r = Rotation(60_000), 20, 5.0
    packing = Packing(DEFAULT_FIELD, clients, 2, noise=1100)
    rng = np.random.default_rng(3)
    signs = rng.integers(0, 2**32, rotation.signs_shape, dtype=np.uint32)
    updates = rng.normal(size=(clients, 60_000)).astype(np.float32)
    uploads = []
    for x in updates:
        v = rotation.forward(x, signs)
        noise = rng.binomial(256, 0.5, packing.length(v.size)) - 128
        coins = rng.integers(0, 2**32, v.size // 2, dtype=np.uint32)
        uploads.append(packing.pack(v, r, coins, DEFAULT_FIELD.vector(noise))[0])
    total = packing.unpack(DEFAULT_FIELD.sum(uploads), rotation.length, r, clients)
    true = updates.sum(axis=0, dtype=np.float64)
    square = kernels.active().sum_of_squares(total)
    scalars = RangeScalars(Q, clients, 1, rotation.length)
    server = RangeRule({2: packing}, scalars, BOUND, low=r, high=r)
    nu = server.read(Codec(slots=2, r=r), Sums(math.sqrt(square), clients, clients)).nu
    error = ((rotation.inverse(total, signs) - true) ** 2).sum() / (true**2).sum()
    assert error == pytest.approx(nu, rel=0.05)


# -- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "first"), [(10, 3), (50, 2), (200, 2)])
def test_a_steady_federation_is_packed_from_the_second_round(clients: int, first: int) -> None:
    federation = Federation(clients, 1000)
    rounds = [federation.round(federation.updates([1.0] * clients)) for _ in range(12)]
    assert [codec.slots for codec, _, _ in rounds[:2]] == [1, first]
    for codec, reading, error in rounds[1:]:
        assert codec.slots > 1
        assert error < 5e-3
        assert not reading.coarse
        assert 1.5 < codec.r / reading.rms < 12


@pytest.mark.parametrize("clients", [10, 50, 200])
@pytest.mark.parametrize("lie", [largest_lie, lie_in_packed_rounds])
def test_a_liar_costs_the_compression_and_not_the_model(
    clients: int, lie: Callable[[RangeScalars, int], int]
) -> None:
    """From the fourth round on; after at most four packed rounds there is one slot, for long."""
    federation = Federation(clients, 300)
    honest = [federation.updates([1.0] * clients) for _ in range(80)]
    slots, errors = [], []
    for number, updates in enumerate(honest):
        codec, _, error = federation.round(updates, lie if number >= 3 else None)
        slots.append(codec.slots)
        errors.append(error)
    runs = "".join("p" if used > 1 else "1" for used in slots[3:]).split("1")
    assert max(map(len, runs)) <= 4
    assert sum(used > 1 for used in slots[3:]) <= 15
    # Where the lie was believed, the average is shorter and noisier, but finite and bounded.
    assert max(errors) <= 1.1
    assert np.median(errors) < 1e-6


def test_very_unequal_counts_end_in_one_slot() -> None:
    federation = Federation(200, 300, (2,))
    slots = []
    for _ in range(30):
        codec, _, _ = federation.round(federation.updates([10.0] + [0.1] * 199))
        slots.append(codec.slots)
    assert slots[:5] in ([1, 2, 1, 1, 1], [1, 2, 2, 1, 1], [1, 2, 2, 2, 1], [1, 2, 2, 2, 2])
    assert sum(used > 1 for used in slots) <= 9


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.5, 2.0, 5.0, 100.0])
def test_after_a_jump_the_next_round_is_in_range(factor: float) -> None:
    federation = Federation(50, 3000, (2,))
    for _ in range(4):
        federation.round(federation.updates([0.1] * 50))
    _, jumped, _ = federation.round(federation.updates([0.1 * factor] * 50))
    codec, reading, error = federation.round(federation.updates([0.1 * factor] * 50))
    assert error < 1e-3
    assert reading.share < 1e-2
    if factor <= 0.01:
        assert jumped.nu > 0.05
    assert codec.slots == 1 or codec.r / reading.rms > 4


def test_a_round_in_which_nothing_changes_changes_nothing() -> None:
    server = rule(50)
    for codec in (Codec(slots=2, r=0.3, stretch=0.7), Codec(slots=1), Codec(slots=1, pause=3)):
        after, reading = server.follow(codec, Sums(0.0, 50, 50))
        assert after == dataclasses.replace(codec, pause=max(0, codec.pause - 1))
        assert (reading.rms, reading.rho) == (0.0, 0.0)


def test_a_coarse_average_is_made_shorter() -> None:
    server = rule(50, slots=(2,))
    codec = Codec(slots=2, r=1.0)
    quantum, n = 1.0 / 463, 4096
    for nu, coarse, factor in ((0.05, False, 1.0), (0.49, False, 1.0), (0.6, True, 0.4)):
        length = math.sqrt(50 * n * quantum**2 / (6 * nu))
        a = server.scalars.norm_unit(2) * 50 // 100
        reading = server.read(codec, Sums(length, 50, 50, a))
        assert reading.nu == pytest.approx(nu)
        assert reading.coarse == coarse
        assert reading.factor == pytest.approx(factor)
    assert Reading(1.0, 0.0, math.inf, 0.0, 9.0).factor == 0.0


def test_a_sum_longer_than_its_parts_is_refused() -> None:
    server = rule(50, slots=(2,))
    codec, n = Codec(slots=2, r=1.0), 4096
    a = 50 * server.scalars.norm_unit(2) // 5  # each client's rms is 0.2
    server.read(codec, Sums(50 * 0.2 * math.sqrt(n), 50, 50, a))
    with pytest.raises(RecoveryError, match="the sum is 832 long, and the parties' own lengths"):
        server.read(codec, Sums(50 * 0.26 * math.sqrt(n), 50, 50, a))


@pytest.mark.parametrize("measured", [1.0, 2e-4])
def test_the_range_moves_no_further_than_its_limits(measured: float) -> None:
    server = rule(50, slots=(2,), error=0.999)
    codec = Codec(slots=2, r=1e-3 if measured == 1.0 else 1.0)
    a = min(int(server.scalars.norm_unit(2) * measured / codec.r), server.scalars.norm_unit(1)) * 50
    length = 50 * math.sqrt(4096) * min(measured, 32 * codec.r)
    after, _ = server.follow(codec, Sums(length, 50, 50, a))
    assert after.r == pytest.approx(codec.r * 64 if measured == 1.0 else codec.r / 256)


def test_a_pinned_range_asks_for_nothing_and_stays() -> None:
    server = rule(50, slots=(2,), low=0.5, high=0.5)
    assert server.pinned
    n, codec = 4096, Codec()
    slots = []
    for rms in (0.05, 0.05, 1e-5, 0.02, *[0.02] * 8):
        assert codec.slots == 1 or codec.r == 0.5
        codec, reading = server.follow(codec, Sums(50 * rms * math.sqrt(n), 50, 50))
        slots.append(codec.slots)
        assert reading.rms == pytest.approx(rms)
    # Too small an update for the range ends in one slot, for eight rounds.
    assert slots == [2, 2, *[1] * 8, 2, 2]


def test_a_policy_keeps_the_range_in_its_interval() -> None:
    server = rule(50, slots=(2,), low=0.1, high=0.2)
    n = 4096
    for rms, r in ((1e-3, 0.1), (0.0145, None), (0.05, 0.2)):
        a = 50 * int(server.scalars.norm_unit(1) * rms / BOUND)
        codec, _ = server.follow(Codec(), Sums(50 * rms * math.sqrt(n) / 2, 50, 50, a))
        assert codec.slots == 2
        assert codec.r == r or (r is None and 0.1 < codec.r < 0.2)


@pytest.mark.parametrize(
    ("share", "r_over_wanted", "change"),
    [
        *((25, 1.0, 2.0), (25, 0.7, 1.0), (5, 0.81, 1.25), (5, 0.79, 1.0)),
        *((1, 1.0, 1.0), (0.3, 1.0, 1 / 1.05), (0.3, 1.24, 1 / 1.05), (0.3, 1.3, 1.0)),
    ],
)
def test_kappa_follows_what_is_cut(share: float, r_over_wanted: float, change: float) -> None:
    """Shares in units of the target, 1 / (10 L^2), and only where r had followed kappa."""
    server = rule(1000, entries=10**6, slots=(2,))
    levels = server.packings[2].levels
    kappa = 2.5 + math.log2(levels)
    a = server.scalars.norm_unit(2) * 1000 / (kappa * r_over_wanted)
    cut = server.scalars.cut_unit * 1000 * share / (10 * levels**2)
    sums = Sums(1000 * 1000 * 0.5 / (kappa * r_over_wanted), 1000, 1000, round(a), round(cut))
    after, reading = server.follow(Codec(slots=2, r=1.0), sums)
    assert reading.kappa == pytest.approx(kappa)
    assert after.stretch == pytest.approx(change)
    assert after.r == pytest.approx(change / r_over_wanted, rel=1e-3)
    for limit in (0.5, 8.0):
        after, _ = server.follow(Codec(slots=2, r=limit, stretch=limit), sums)
        assert 0.5 <= after.stretch <= 8.0


def test_pauses_grow_and_shrink_again() -> None:
    server = rule(50, slots=(2,))
    n = 4096
    fine = Sums(50 * 0.1 * math.sqrt(n) / 2, 50, 50, 50 * server.scalars.norm_unit(2) // 10)
    lost = dataclasses.replace(fine, cut=50 * server.scalars.cut_unit // 2)
    limit = Codec(slots=2, r=8 * 0.1 * (2.5 + math.log2(463)), stretch=8.0)
    fine = dataclasses.replace(fine, norms=round(50 * server.scalars.norm_unit(2) * 0.1 / limit.r))
    lost = dataclasses.replace(lost, norms=fine.norms)
    pauses = []
    for next_pause in (8, 16, 40, 64):
        after, _ = server.follow(dataclasses.replace(limit, next_pause=next_pause), lost)
        pauses.append((after.slots, after.pause, after.next_pause, after.stretch))
    assert pauses == [(1, 8, 16, 1.0), (1, 16, 32, 1.0), (1, 40, 64, 1.0), (1, 64, 64, 1.0)]
    after, _ = server.follow(dataclasses.replace(limit, next_pause=10), fine)
    assert (after.slots, after.next_pause) == (2, 9)
    # Three of ten packed rounds that cut more than a thousandth are enough, at any kappa.
    codec = Codec(slots=2, r=0.1 * (2.5 + math.log2(463)), clear_cuts=(True, False, True))
    lost = dataclasses.replace(lost, norms=round(50 * server.scalars.norm_unit(2) * 0.1 / codec.r))
    assert server.follow(codec, lost)[0].pause == 8
    codec = dataclasses.replace(codec, clear_cuts=(True, True, *[False] * 8))
    assert server.follow(codec, lost)[0].pause == 0


def test_few_levels_may_cut_more_than_a_thousandth() -> None:
    """With L = 3 the best range cuts 1 of 90 entries: that is no sign of a liar."""
    server, n = rule(200, slots=(3,), error=0.5), 4096
    codec = Codec(slots=3, r=0.4, clear_cuts=(True, True))
    sums = Sums(200 * 0.05 * math.sqrt(n), 200, 200, 200 * server.scalars.norm_unit(3) // 4)
    for share, pause in ((0.02, 0), (0.03, 8)):
        cut = round(200 * server.scalars.cut_unit * share)
        assert server.follow(codec, dataclasses.replace(sums, cut=cut))[0].pause == pause


@pytest.mark.parametrize(("nu", "slots"), [(0.05, 2), (0.3, 1)])
def test_slots_are_predicted_from_the_signal_alone(nu: float, slots: int) -> None:
    """Three tenths of rounding are three sevenths of the signal, which errors are relative to."""
    server, quantum = rule(50, slots=(2,), error=0.35), 1.0 / 463
    length = math.sqrt(50 * 4096 * quantum**2 / (6 * nu))
    kappa = 2.5 + math.log2(463)
    sums = Sums(length, 50, 50, round(50 * server.scalars.norm_unit(2) * 1.05 / kappa))
    assert server.follow(Codec(slots=2, r=1.0), sums)[0].slots == slots


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": 0.0}, "range r = 0.0 must be between 1e-12 and 1e"),
        ({"high": 1e13}, "must be between 1e-12 and 1e"),
        ({"low": 2.0, "high": 1.0}, "the range's lowest value 2.0 exceeds 1.0"),
        ({"error": 0.0}, "error = 0.0 must be between 0 and 1"),
        ({"error": math.nan}, "error = nan must be between 0 and 1"),
    ],
)
def test_impossible_rules_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        rule(10, **arguments)

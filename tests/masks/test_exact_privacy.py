"""Exact T-privacy by enumeration over tiny fields (Theorem 1; S10).

The *view* of the adversary is all that the server and T colluding clients see: the masked uploads
of everybody (even of those who count as dropped), the answers of the survivors U1, and the shares,
masks and noise of the colluders. Here every value that the honest clients' randomness can take is
enumerated, each with equal probability, so that the distribution of the view is a multiset that
can be compared exactly. Privacy is: two inputs with the same sum over U1 have the same multiset.

Two facts keep the enumeration small, and neither is about the code under test:

* An input x enters the view only as the upload x + z. So the multiset of input x + e is that of e
  with all uploads shifted by x, and it is enough to compare input 0 with a set of generators e of
  all differences that leave the sum alone.
* A colluder's own randomness is independent of the honest ones' and part of the view. So its value
  may be fixed, and the multisets compared value by value; the smallest cases enumerate it too.

The controls break one condition each, and the same comparison must notice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.masks.mask_encoding import (
    EncodedMask,
    encode_mask,
    encode_seeded_mask,
    seeded_positions,
)
from lightsecagg.masks.one_shot_recovery import aggregate_shares, recover_mask, unmask


@dataclass(frozen=True)
class Masks:
    """All masks that a client may draw, with all their shares: one row per outcome."""

    masks: Elements
    """(outcomes, d)"""
    shares: Elements
    """(outcomes, N, L)"""
    blinds: Elements
    """(outcomes, N, blinds)"""


Draw = Callable[[MdsCode, int, int, int], Masks]

Check = tuple[Elements, ...]
"""By holder: the (L + blinds, c) coefficients of its report (S46)."""


def every_vector(q: int, length: int) -> Elements:
    """All q^length vectors, as columns."""
    return np.indices((q,) * length, dtype=np.uint32).reshape(length, -1)


def tabulate(
    code: MdsCode, d: int, blinds: int, encoded: EncodedMask, shares: dict[int, Elements]
) -> Masks:
    """Cut what was encoded for all outcomes at once (side by side, as columns) into outcomes."""
    L = code.share_length(d)
    pieces = encoded.mask.reshape(code.pieces, -1, L + blinds)[:, :, :L]
    masks = pieces.transpose(1, 0, 2).reshape(-1, code.pieces * L)[:, :d]
    rows = np.stack([shares[j].reshape(-1, L + blinds) for j in range(code.clients)], axis=1)
    return Masks(masks, rows[:, :, :L], rows[:, :, L:])


def paper_mode(
    code: MdsCode, d: int, owner: int, blinds: int = 0, noise_free: bool = False
) -> Masks:
    """Every mask with every noise, through `encode_mask`."""
    L, q = code.share_length(d) + blinds, code.field.modulus
    rows = every_vector(q, code.survivors * L) if not noise_free else every_mask_alone(code, L)
    # (U * L, outcomes) -> U rows in which the L columns of an outcome lie side by side.
    rows = rows.reshape(code.survivors, L, -1).transpose(0, 2, 1).reshape(code.survivors, -1)
    pieces, noise = np.split(np.ascontiguousarray(rows), [code.pieces])
    encoded = encode_mask(code, pieces, noise, pieces.size)
    return tabulate(code, d, blinds, encoded, dict(encoded.shares))


def every_mask_alone(code: MdsCode, L: int) -> Elements:
    masks = every_vector(code.field.modulus, code.pieces * L)
    return np.concatenate([masks, np.zeros((code.privacy * L, masks.shape[1]), np.uint32)])


def without_noise(code: MdsCode, d: int, owner: int, blinds: int = 0) -> Masks:
    return paper_mode(code, d, owner, blinds, noise_free=True)


def seeded_mode(
    code: MdsCode, d: int, owner: int, blinds: int = 0, equal_streams: bool = False
) -> Masks:
    """Every choice of the U seeded shares, through `encode_seeded_mask`: the PRG made ideal."""
    L, q, U = code.share_length(d) + blinds, code.field.modulus, code.survivors
    chosen = seeded_positions(owner, code.clients, U)
    free = U - equal_streams
    rows = every_vector(q, free * L).reshape(free, L, -1).transpose(0, 2, 1).reshape(free, -1)
    if equal_streams:
        rows = np.concatenate([rows, rows[-1:]])
    seeded = {position: row.copy() for position, row in zip(chosen, rows, strict=True)}
    length = code.pieces * rows.shape[1]
    encoded = encode_seeded_mask(code, chosen, rows, code.clients, length)
    return tabulate(code, d, blinds, encoded, {**seeded, **encoded.shares})


def with_equal_streams(code: MdsCode, d: int, owner: int, blinds: int = 0) -> Masks:
    return seeded_mode(code, d, owner, blinds, equal_streams=True)


def number(digits: NDArray[np.uint32], q: int) -> NDArray[np.int64]:
    """Every row of digits as one number, different for different rows."""
    assert digits.shape[1] * np.log2(q) < 62
    key = np.zeros(len(digits), dtype=np.int64)
    for column in digits.T:
        key = key * q + column
    return key


def report(field: PrimeField, masks: Masks, holder: int, coefficients: Elements) -> Elements:
    """What a holder says in every outcome: (outcomes, c)."""
    shares = np.concatenate([masks.shares[:, holder], masks.blinds[:, holder]], axis=1)
    every_share = every_vector(field.modulus, shares.shape[1]).T.copy()
    return field.matmul(every_share, coefficients)[number(shares, field.modulus)]


BOTH_MODES = pytest.mark.parametrize("draw", [paper_mode, seeded_mode])


@dataclass(frozen=True)
class Game:
    """One run of the protocol, for all outcomes of the randomness at once."""

    code: MdsCode
    d: int
    draw: Draw
    colluders: tuple[int, ...]
    survivor_sets: tuple[tuple[int, ...], ...]
    """U1; a second entry is what no client may ever answer."""
    fixed: int | None = 0
    """Which outcome every colluder drew; None enumerates these too."""
    blinds: int = 0
    """Blind columns of every share."""
    checks: tuple[Check, ...] = ()
    """The reports that everybody gives; a second entry is what no client may ever answer."""

    @property
    def honest(self) -> list[int]:
        return [i for i in range(self.code.clients) if i not in self.colluders]

    def outcomes(self) -> tuple[list[Masks], list[NDArray[np.intp]]]:
        """Every client's masks, and which of them it drew in each joint outcome."""
        tables = [self.draw(self.code, self.d, i, self.blinds) for i in range(self.code.clients)]
        choices = [
            np.arange(len(table.masks))
            if i not in self.colluders or self.fixed is None
            else np.array([self.fixed % len(table.masks)])
            for i, table in enumerate(tables)
        ]
        drawn = [grid.reshape(-1) for grid in np.meshgrid(*choices, indexing="ij")]
        return tables, drawn

    def views(self, inputs: Sequence[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
        """The multiset of views, as sorted numbers, for each matrix (honest, d) of inputs."""
        q, field = self.code.field.modulus, self.code.field
        tables, drawn = self.outcomes()
        uploads = [tables[i].masks[drawn[i]].astype(np.int64) for i in self.honest]
        key = np.zeros(len(drawn[0]), dtype=np.int64)
        digits = 0.0

        def see(values: NDArray[np.int64], base: int) -> None:
            nonlocal key, digits
            key = key * base + values
            digits += np.log2(base)
            assert digits < 62  # two different views never get the same number

        for c in self.colluders:
            see(drawn[c], len(tables[c].masks))
            for i in self.honest:
                for column in (*tables[i].shares[drawn[i], c].T, *tables[i].blinds[drawn[i], c].T):
                    see(column, q)
        for check in self.checks:
            for i, (j, coefficients) in itertools.product(self.honest, enumerate(check)):
                reports = report(field, tables[i], j, coefficients)
                for column in reports[drawn[i]].T:
                    see(column, q)
        for U1 in self.survivor_sets:
            for j in U1:
                held = [tables[i].shares[drawn[i], j] for i in U1]
                for column in aggregate_shares(field, held).T:
                    see(column, q)
        rest = key.copy(), digits
        for x in inputs:
            key, digits = rest
            for entry, masks in zip(x, uploads, strict=True):
                for column in ((masks + entry) % q).T:
                    see(column, q)
            yield np.sort(key)

    def generators(self) -> list[NDArray[np.int64]]:
        """Inputs of the honest clients that generate all whose sum over (the first) U1 is zero."""
        within = [k for k, i in enumerate(self.honest) if i in self.survivor_sets[0]]
        found = []
        for coordinate in range(self.d):
            for k in range(len(self.honest)):
                x = np.zeros((len(self.honest), self.d), dtype=np.int64)
                x[k, coordinate] = 1
                if k in within:
                    if k == within[0]:
                        continue
                    x[within[0], coordinate] = -1
                found.append(x)
        return found

    def reveals_only_the_sum(self) -> bool:
        zero = np.zeros((len(self.honest), self.d), dtype=np.int64)
        reference, *others = self.views([zero, *self.generators()])
        assert others  # with one honest client in U1 there is nothing to hide
        return all(np.array_equal(reference, other) for other in others)


def vandermonde(q: int, N: int, U: int, T: int) -> MdsCode:
    return MdsCode(PrimeField(q), U, T, range(1, N + 1))


def survivor_sets(N: int, U: int) -> list[tuple[int, ...]]:
    return [s for size in range(U, N + 1) for s in itertools.combinations(range(N), size)]


# -- privacy holds -------------------------------------------------------------------------------


@BOTH_MODES
@pytest.mark.parametrize("q", [5, 7])
def test_S10_all_inputs_and_all_randomness_of_three_clients(q: int, draw: Draw) -> None:
    """Nothing is cut short: every input, every colluder's randomness, every U1."""
    code = vandermonde(q, N=3, U=2, T=1)
    for colluder, U1 in itertools.product(range(3), survivor_sets(3, 2)):
        game = Game(code, 1, draw, (colluder,), (U1,), fixed=None)
        summed = [k for k, i in enumerate(game.honest) if i in U1]
        inputs = [np.array(x).reshape(2, 1) for x in itertools.product(range(q), repeat=2)]
        first: dict[int, NDArray[np.int64]] = {}
        for x, view in zip(inputs, game.views(inputs), strict=True):
            total = int(x[summed].sum()) % q
            np.testing.assert_array_equal(first.setdefault(total, view), view)
        # The server does learn the sum: the comparison tells different sums apart.
        assert len(first) == q
        for a, b in itertools.combinations(first.values(), 2):
            assert not np.array_equal(a, b)


SIZES = [
    # q, N, U, T, d
    (5, 3, 2, 0, 2),  # nobody colludes
    (5, 3, 2, 1, 2),  # shares of two elements
    (5, 3, 3, 1, 2),  # U = N
    (5, 4, 2, 1, 1),
    (7, 4, 2, 1, 1),
    (5, 4, 3, 2, 1),
    (7, 4, 3, 2, 1),
]


@BOTH_MODES
@pytest.mark.parametrize(("q", "N", "U", "T", "d"), SIZES)
def test_S10_view_depends_on_the_sum_alone(
    q: int, N: int, U: int, T: int, d: int, draw: Draw
) -> None:
    code = vandermonde(q, N, U, T)
    for colluders in itertools.combinations(range(N), T):
        for U1 in survivor_sets(N, U):
            assert Game(code, d, draw, colluders, (U1,), fixed=17).reveals_only_the_sum()


@BOTH_MODES
@pytest.mark.parametrize("d", [1, 2])  # d = 1 leaves half of the last piece unused
@pytest.mark.parametrize("U1", [(0, 1, 2, 3), (0, 1, 2)])
@pytest.mark.parametrize("colluder", [0, 3])
def test_S10_view_depends_on_the_sum_alone_with_two_mask_pieces(
    draw: Draw, d: int, U1: tuple[int, ...], colluder: int
) -> None:
    code = vandermonde(5, N=4, U=3, T=1)
    assert Game(code, d, draw, (colluder,), (U1,), fixed=3).reveals_only_the_sum()


@pytest.mark.parametrize(("q", "N", "U", "T", "d"), [*SIZES, (5, 4, 3, 1, 1), (7, 6, 4, 2, 2)])
def test_S10_both_modes_draw_from_the_same_codewords(
    q: int, N: int, U: int, T: int, d: int
) -> None:
    """Whoever could tell the modes apart would have to tell the PRG from uniform draws."""
    code = vandermonde(q, N, U, T)

    def rows(table: Masks) -> list[tuple[int, ...]]:
        flat = np.concatenate([table.masks, table.shares.reshape(len(table.shares), -1)], axis=1)
        return sorted(map(tuple, flat.tolist()))

    expected = rows(paper_mode(code, d, owner=0))
    for owner in range(N):
        assert rows(seeded_mode(code, d, owner)) == expected


@BOTH_MODES
def test_S10_the_game_is_the_protocol(draw: Draw) -> None:
    """What is enumerated decodes to the right sum: the views are those of working runs."""
    code, d, U1 = vandermonde(5, N=4, U=3, T=1), 2, (0, 1, 3)
    tables = [draw(code, d, i, 0) for i in range(4)]
    x = [code.field.vector(entry) for entry in ([1, 4], [3, 2], [0, 1], [2, 2])]
    generator = np.random.default_rng(1)
    for _ in range(50):
        drawn = [int(generator.integers(len(table.masks))) for table in tables]
        uploads = [code.field.add(x[i], tables[i].masks[drawn[i]].copy()) for i in U1]
        answers = {
            j: aggregate_shares(code.field, [tables[i].shares[drawn[i], j] for i in U1]) for j in U1
        }
        total = unmask(code.field, code.field.sum(uploads), recover_mask(code, answers, d))
        assert total.tolist() == [(1 + 3 + 2) % 5, (4 + 2 + 2) % 5]


# -- controls: each breaks one condition, and the comparison notices -----------------------------


def check_control(sound: Game, broken: Game) -> None:
    assert sound.reveals_only_the_sum()
    assert not broken.reveals_only_the_sum()


@pytest.mark.parametrize("q", [5, 7])
@BOTH_MODES
def test_S10_control_a_point_zero_is_detected(draw: Draw, q: int) -> None:
    everybody = (tuple(range(3)),)
    points = [0, 1, 2]
    matrix = PrimeField(q).vector([[pow(a, k, q) for a in points] for k in range(2)])
    zero = MdsCode.from_matrix(PrimeField(q), matrix, privacy=1)
    check_control(
        Game(vandermonde(q, 3, 2, 1), 1, draw, (0,), everybody),
        Game(zero, 1, draw, (0,), everybody),
    )
    # Only the client at point zero learns something.
    assert Game(zero, 1, draw, (1,), everybody).reveals_only_the_sum()


@pytest.mark.parametrize("q", [5, 7])
@BOTH_MODES
def test_S10_control_one_colluder_too_many_is_detected(draw: Draw, q: int) -> None:
    code, everybody = vandermonde(q, 4, 2, 1), (tuple(range(4)),)
    for one_more in itertools.combinations(range(4), 2):
        check_control(
            Game(code, 1, draw, one_more[:1], everybody),
            Game(code, 1, draw, one_more, everybody),
        )


@pytest.mark.parametrize("q", [5, 7])
def test_S10_control_missing_noise_is_detected(q: int) -> None:
    code, everybody = vandermonde(q, 4, 3, 2), (tuple(range(4)),)
    for colluders in itertools.combinations(range(4), 2):
        check_control(
            Game(code, 1, paper_mode, colluders, everybody),
            Game(code, 1, without_noise, colluders, everybody),
        )


def test_S10_control_equal_streams_of_two_recipients_are_detected() -> None:
    """Why the PRG key of a seeded share binds its recipient."""
    code, everybody = vandermonde(5, 4, 3, 2), (tuple(range(4)),)
    leaks = 0
    for colluders in itertools.combinations(range(4), 2):
        assert Game(code, 1, seeded_mode, colluders, everybody).reveals_only_the_sum()
        leaks += not Game(code, 1, with_equal_streams, colluders, everybody).reveals_only_the_sum()
    assert leaks > 0


@pytest.mark.parametrize("q", [5, 7])
@BOTH_MODES
def test_S10_control_a_second_answer_is_detected(draw: Draw, q: int) -> None:
    """S04: answers for S and for S without v reveal v's model, without any colluder."""
    code = vandermonde(q, 3, 2, 1)
    S = (0, 1, 2)
    for colluder, v in itertools.permutations(range(3), 2):
        without_v = tuple(i for i in S if i != v)
        check_control(
            Game(code, 1, draw, (colluder,), (S,)),
            Game(code, 1, draw, (colluder,), (S, without_v)),
        )
        # A repeat of the same request, on the other hand, reveals nothing new.
        assert Game(code, 1, draw, (colluder,), (S, S)).reveals_only_the_sum()


# -- checked sharing: the reports tell nothing more (S46) ----------------------------------------


def same_for_all(N: int, *columns: Sequence[int]) -> Check:
    """Everybody combines with these coefficients, one column per value reported."""
    return (np.array(columns, dtype=np.uint32).T.copy(),) * N


@BOTH_MODES
@pytest.mark.parametrize("r", [0, 1, 3])
def test_S46_reports_leave_the_view_a_function_of_the_sum(draw: Draw, r: int) -> None:
    """The whole protocol, with one blind: reports, uploads, answers and what a colluder holds."""
    code = vandermonde(5, N=3, U=2, T=1)
    for colluder, U1 in [(0, (0, 1, 2)), (2, (0, 1, 2)), (1, (0, 2)), (1, (0, 1, 2))]:
        game = Game(
            code, 1, draw, (colluder,), (U1,), 7, blinds=1, checks=(same_for_all(3, [r, 1]),)
        )
        assert game.reveals_only_the_sum()


@BOTH_MODES
@pytest.mark.parametrize(
    "checks",
    [
        (same_for_all(3, [1, 0]),),
        (same_for_all(3, [1, 1])[:2] + same_for_all(1, [2, 1]),),
        (same_for_all(3, [1, 1]), same_for_all(3, [3, 1])),
    ],
    ids=["no blind", "other coefficients for one holder", "a second report"],
)
def test_S46_control_reports_that_reveal_more_are_detected(
    draw: Draw, checks: tuple[Check, ...]
) -> None:
    code, everybody = vandermonde(5, N=3, U=2, T=1), ((0, 1, 2),)
    sound = (same_for_all(3, [1, 1]),)
    check_control(
        Game(code, 1, draw, (0,), everybody, 7, blinds=1, checks=sound),
        Game(code, 1, draw, (0,), everybody, 7, blinds=1, checks=checks),
    )
    # The same report again, on the other hand, reveals nothing new.
    again = Game(code, 1, draw, (0,), everybody, 7, blinds=1, checks=sound * 2)
    assert again.reveals_only_the_sum()


def reports_are_independent(
    code: MdsCode, masks: Masks, colluders: tuple[int, ...], checks: Sequence[Check]
) -> bool:
    """Whether the reports on one owner are distributed alike for all masks, noise included.

    That is, for all that look alike to the colluders. Owners draw independently, and a blind
    enters nothing but reports: so whoever sees all shares but the colluders' blinds, and every
    upload and answer therefore, learns nothing from reports that he could not have drawn himself.
    """
    seen = [
        report(code.field, masks, j, coefficients)
        for check in checks
        for j, coefficients in enumerate(check)
    ]
    q, outcomes = code.field.modulus, len(masks.masks)
    blinds, known = (
        table[:, list(colluders)].reshape(outcomes, -1) for table in (masks.blinds, masks.shares)
    )
    view = number(np.concatenate([blinds, *seen], axis=1), q)
    codeword = number(masks.shares.reshape(outcomes, -1), q)
    order = np.lexsort((view, codeword))
    views: dict[bytes, NDArray[np.int64]] = {}
    for block in order.reshape(len(np.unique(codeword)), -1):
        first = views.setdefault(known[block[0]].tobytes(), view[block])
        if not np.array_equal(first, view[block]):
            return False
    return True


BOTH_BLINDS = [
    # N, U, T, d; L = 1 but in the last
    (3, 2, 1, 1),
    (4, 2, 1, 1),
    (4, 2, 0, 2),
    (3, 2, 1, 2),
]


@BOTH_MODES
@pytest.mark.parametrize(("N", "U", "T", "d"), BOTH_BLINDS)
def test_S46_reports_under_two_blinds_are_independent_of_the_mask(
    N: int, U: int, T: int, d: int, draw: Draw
) -> None:
    code = vandermonde(5, N, U, T)
    L = code.share_length(d)
    masks = draw(code, d, 0, 2)
    r = [[1, 4][:L], [3, 2][:L]]
    both = same_for_all(N, [*r[0], 1, 0], [*r[1], 0, 1])
    one_blind = same_for_all(N, [*r[0], 1, 0], [*r[1], 1, 0])
    no_blind = same_for_all(N, [*r[0], 1, 0], [*r[1], 0, 0])
    other = same_for_all(N, [*r[1], 1, 0], [*r[0], 0, 1])
    for colluders in itertools.combinations(range(N), T):
        assert reports_are_independent(code, masks, colluders, [both])
        assert reports_are_independent(code, masks, colluders, [both, both])
        assert not reports_are_independent(code, masks, colluders, [one_blind])
        assert not reports_are_independent(code, masks, colluders, [no_blind])
        assert not reports_are_independent(code, masks, colluders, [both, other])
        for j in range(N):
            if j not in colluders:  # a colluder's report is no news to it
                mixed = (*both[:j], other[j], *both[j + 1 :])
                assert not reports_are_independent(code, masks, colluders, [mixed])


@BOTH_MODES
@pytest.mark.parametrize("colluder", [0, 1, 2])
def test_S46_coefficients_may_depend_on_the_upload_and_on_what_a_colluder_holds(
    draw: Draw, colluder: int
) -> None:
    """As a hash of sealed shares might; without its blind a report is detected all the same."""
    code, q = vandermonde(5, N=3, U=2, T=1), 5
    masks = draw(code, 1, 0, 1)
    held = masks.shares[:, colluder, 0].astype(np.int64)

    def views(x: int, blind: int) -> NDArray[np.int64]:
        upload = (masks.masks[:, 0].astype(np.int64) + x) % q
        r = (2 * upload + held + 1) % q
        reports = [
            (r * masks.shares[:, j, 0] + blind * masks.blinds[:, j, 0]) % q for j in range(3)
        ]
        seen = [upload, held, masks.blinds[:, colluder, 0], *reports]
        return np.sort(number(np.stack(seen, axis=1).astype(np.uint32), q))

    first = views(0, 1)
    assert all(np.array_equal(first, views(x, 1)) for x in range(1, q))
    assert not all(np.array_equal(views(0, 0), views(x, 0)) for x in range(1, q))


@pytest.mark.parametrize("colluders", [(), (1,)])
def test_S46_blinds_of_fewer_than_U_rows_are_detected(colluders: tuple[int, ...]) -> None:
    """Why paper mode draws the blinds in all U rows: constants would blind one holder only."""
    code = vandermonde(5, N=3, U=2, T=len(colluders))
    masks = paper_mode(code, code.pieces, 0, 1)
    constant = masks.blinds[:, :1, 0] == masks.blinds[:, 1:, 0]
    some = np.flatnonzero(constant.all(axis=1))
    poor = Masks(masks.masks[some], masks.shares[some].copy(), masks.blinds[some].copy())
    check = same_for_all(3, [2, 1])
    assert reports_are_independent(code, masks, colluders, [check])
    assert not reports_are_independent(code, poor, colluders, [check])

"""Checked sharing: coefficients, reports, accused pairs and named parties (S46).

That the reports reveal nothing is enumerated in `test_exact_privacy`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.crypto import prg
from lightsecagg.crypto.transcript import context_hash
from lightsecagg.errors import InconsistentAnswers
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements, PrimeField
from lightsecagg.masks.checked_sharing import (
    BLINDS,
    Pair,
    check_coefficients,
    find_accused,
    name_liars,
    part_quarrels,
    report_on_share,
)

HEADER = bytes(range(32))
L = 9


def uniform(shape: tuple[int, ...], q: int, seed: int) -> Elements:
    return np.random.default_rng(seed).integers(0, q, shape, dtype=np.uint32)


def make_code(field: PrimeField, N: int, U: int, T: int) -> MdsCode:
    return MdsCode(field, U, T, ntt.points(field, N))


class Sharing:
    """What N owners have shared among N holders, to be spoilt, and then reported on."""

    def __init__(self, code: MdsCode, seed: int = 1) -> None:
        self.code, N = code, code.clients
        size, q = (code.survivors, L + BLINDS), code.field.modulus
        self.shares = np.stack([code.encode_rows(uniform(size, q, seed + i)) for i in range(N)])
        self.lies: set[Pair] = set()

    def spoil(self, owner: int, holder: int, column: int = 0) -> None:
        """The owner sends this holder something else, which fits no other codeword either."""
        q, share = self.code.field.modulus, self.shares[owner, holder]
        share[column] = (int(share[column]) + 1 + 7**holder) % q

    def reports(self, holders: range | list[int] | None = None) -> dict[int, dict[int, Elements]]:
        q, everybody = self.code.field.modulus, range(self.code.clients)
        said = {
            j: np.stack(
                [
                    report_on_share(self.code.field, row[j], bytes([i]) * 32)
                    for i, row in enumerate(self.shares)
                ]
            )
            for j in (everybody if holders is None else holders)
        }
        for owner, holder in self.lies:
            if holder in said:
                said[holder][owner] = (said[holder][owner] + np.uint32(1)) % np.uint32(q)
        return {i: {j: rows[i] for j, rows in said.items()} for i in everybody}

    def accused(self, holders: range | list[int] | None = None) -> frozenset[Pair]:
        return find_accused(self.code, self.reports(holders))


# -- coefficients and reports --------------------------------------------------------------------


@pytest.mark.parametrize("field", [DEFAULT_FIELD, PAPER_FIELD, PrimeField(5)])
def test_S46_a_report_is_the_combination_that_the_header_fixes(
    backend: str, field: PrimeField
) -> None:
    """Against Python integers, and against the derivation spelt out."""
    q = field.modulus
    seed = context_hash("check coefficients", HEADER)
    for length in (1, 2, 9, 1000):
        stream = prg.expand(seed, BLINDS * length, q).tolist()
        share = uniform((length + BLINDS,), q, seed=length)
        entries = share.tolist()
        assert report_on_share(field, share, HEADER).tolist() == [
            (sum(stream[b * length + k] * entries[k] for k in range(length)) + entries[length + b])
            % q
            for b in range(BLINDS)
        ]


def test_S46_the_header_changes_every_coefficient() -> None:
    q = DEFAULT_FIELD.modulus
    ours = check_coefficients(HEADER, 100, q)
    assert (ours != check_coefficients(bytes(32), 100, q)).mean() > 0.95
    for one, other in itertools.combinations(ours, 2):
        assert (one != other).mean() > 0.95


def test_S46_two_columns_could_be_ground_and_four_cannot() -> None:
    """A lie about one share passes if its combinations vanish: q^-B for each header tried."""
    field, length = PrimeField(5), 3
    difference = field.vector([1, 0, 2])

    def passes(header: int, blinds: int) -> bool:
        r = check_coefficients(header.to_bytes(32, "big"), length, 5)[:blinds].astype(int)
        return not ((r @ difference.astype(int)) % 5).any()

    tries = 20_000
    for blinds in (1, 2, BLINDS):
        expected = tries / 5**blinds
        found = sum(passes(header, blinds) for header in range(tries))
        assert abs(found - expected) < 5 * expected**0.5


# -- accused pairs -------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [DEFAULT_FIELD, PAPER_FIELD])
def test_S46_honest_reports_accuse_nobody(backend: str, field: PrimeField) -> None:
    sharing = Sharing(make_code(field, 11, 5, 2))
    for holders in (range(11), range(5), [9, 0, 3, 7, 1, 10]):
        assert sharing.accused(list(holders)) == frozenset()


@pytest.mark.parametrize("column", [0, L - 1, L, L + BLINDS - 1])
def test_S46_a_wrong_share_accuses_its_pair_whatever_column_is_wrong(
    backend: str, column: int
) -> None:
    sharing = Sharing(make_code(DEFAULT_FIELD, 11, 5, 2))
    sharing.spoil(owner=4, holder=8, column=column)
    assert sharing.accused() == {(4, 8)}


def test_S46_a_lying_holder_is_accused_with_every_owner_that_it_lies_about(backend: str) -> None:
    sharing = Sharing(make_code(DEFAULT_FIELD, 11, 5, 2))
    sharing.lies = {(owner, 6) for owner in range(11)}
    assert sharing.accused() == sharing.lies
    sharing.lies = {(3, 6), (9, 6)}
    assert sharing.accused() == sharing.lies


@given(st.data())
def test_S46_accused_are_exactly_the_pairs_that_lie(data: st.DataObject) -> None:
    """Up to floor((n - U) / 2) wrong reports per owner, by sharers and holders in any mixture."""
    N = data.draw(st.integers(5, 14))
    U = data.draw(st.integers(2, N - 2))
    n = data.draw(st.integers(U + 2, N))
    sharing = Sharing(make_code(DEFAULT_FIELD, N, U, 1), seed=data.draw(st.integers(0, 99)))
    holders = data.draw(st.permutations(range(N)))[:n]
    expected: set[Pair] = set()
    for owner in range(N):
        wrong = data.draw(st.lists(st.sampled_from(holders), max_size=(n - U) // 2, unique=True))
        for holder in wrong:
            expected.add((owner, holder))
            if data.draw(st.booleans()):
                sharing.spoil(owner, holder, column=data.draw(st.integers(0, L + BLINDS - 1)))
            else:
                sharing.lies.add((owner, holder))
    assert sharing.accused(holders) == expected


def test_S46_an_owner_that_lied_to_too_many_is_accused_with_everybody(backend: str) -> None:
    sharing = Sharing(make_code(DEFAULT_FIELD, 11, 5, 2))
    for holder in range(4):  # three could be told
        sharing.spoil(2, holder)
    sharing.lies = {(owner, 10) for owner in (0, 1, 2)}
    assert sharing.accused() == {(2, holder) for holder in range(11)} | {(0, 10), (1, 10)}


def test_S46_one_spare_report_shows_a_lie_and_U_reports_show_none(backend: str) -> None:
    sharing = Sharing(make_code(DEFAULT_FIELD, 11, 5, 2))
    sharing.spoil(2, 0)
    assert sharing.accused(range(6)) == {(2, holder) for holder in range(6)}
    assert sharing.accused(range(5)) == frozenset()


def test_S46_owners_with_different_holders_are_judged_apart(backend: str) -> None:
    sharing = Sharing(make_code(DEFAULT_FIELD, 11, 5, 2))
    sharing.lies = {(owner, 6) for owner in range(11)}
    reports = sharing.reports()
    del reports[1][6], reports[2][0], reports[2][1]
    assert find_accused(sharing.code, reports) == sharing.lies - {(1, 6)}
    assert find_accused(sharing.code, {}) == frozenset()


def test_S46_a_known_liar_spares_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """One holder that lies about everybody must not cost a decoding per owner."""
    decoded = []

    def counting(self: MdsCode, positions: list[int], values: Elements) -> tuple[int, ...]:
        decoded.append(positions)
        return find_errors(self, positions, values)

    find_errors = MdsCode.find_errors
    monkeypatch.setattr(MdsCode, "find_errors", counting)
    sharing = Sharing(make_code(DEFAULT_FIELD, 11, 5, 2))
    sharing.lies = {(owner, 6) for owner in range(11)}
    assert sharing.accused() == sharing.lies
    assert len(decoded) == 1


# -- named parties -------------------------------------------------------------------------------


def test_S46_names_whoever_is_accused_together_with_too_many() -> None:
    everybody = range(11)
    assert name_liars({(4, 8)}, liars=3) == ()
    assert name_liars({(i, 6) for i in everybody}, liars=3) == (6,)
    assert name_liars({(2, j) for j in everybody}, liars=3) == (2,)
    assert name_liars({(2, j) for j in everybody} | {(i, 6) for i in everybody}, 3) == (2, 6)
    assert name_liars({(2, j) for j in (0, 1, 3)}, liars=3) == ()


def test_S46_accusations_both_ways_count_once() -> None:
    """An honest party and a liar may accuse each other as owner and as holder."""
    assert name_liars({(0, 1), (1, 0), (0, 2), (2, 0)}, liars=2) == ()


def test_S46_names_nobody_where_the_assumption_is_refuted() -> None:
    everybody = list(itertools.product(range(5), range(5)))
    assert name_liars(everybody, liars=2) == ()
    assert name_liars([(0, 1)], liars=0) == ()


@given(st.data())
def test_S46_no_honest_party_is_named_while_the_liars_are_as_few_as_assumed(
    data: st.DataObject,
) -> None:
    N, U = 11, 5
    bad = data.draw(st.lists(st.integers(0, N - 1), max_size=3, unique=True))
    sharing = Sharing(make_code(DEFAULT_FIELD, N, U, 2))
    for liar in bad:
        for holder in data.draw(st.lists(st.integers(0, N - 1), unique=True)):
            sharing.spoil(liar, holder)
        for owner in data.draw(st.lists(st.integers(0, N - 1), unique=True)):
            sharing.lies.add((owner, liar))
    accused = sharing.accused()
    assert all(owner in bad or holder in bad for owner, holder in accused)
    assert set(name_liars(accused, (N - U) // 2)) <= set(bad)


def test_S46_too_many_errors_are_refused_by_the_code(backend: str) -> None:
    code = make_code(DEFAULT_FIELD, 11, 5, 2)
    values = code.encode_rows(uniform((5, 2), DEFAULT_FIELD.modulus, seed=4))
    values[[1, 9]] += np.uint32(1)
    assert code.find_errors(range(11), values) == (1, 9)
    assert code.contradictions(range(11), values).tolist() == [True, True]
    values[[0, 2]] += np.uint32(1)
    with pytest.raises(InconsistentAnswers):
        code.find_errors(range(11), values)


# -- R59: who answers ------------------------------------------------------------------------------


def test_R59_who_contradicts_itself_leaves_alone() -> None:
    left, doubted = part_quarrels(range(1, 6), {(3, 3), (3, 4)})
    assert (left, doubted) == ({1, 2, 4, 5}, {3})
    # Another with as many quarrels does not leave in its company: one of that other pair lied, too.
    left, doubted = part_quarrels(range(1, 7), {(5, 5), (2, 5), (2, 1), (2, 3)})
    assert (left, doubted) == ({3, 4, 6}, {2})


def test_R59_owners_with_most_quarrels_leave_first() -> None:
    """Else every pair would be left by two, of whom one has no other quarrel."""
    left, doubted = part_quarrels(range(1, 6), {(2, 1), (2, 3), (3, 4)})
    assert (left, doubted) == ({1, 4, 5}, {2, 3})
    left, doubted = part_quarrels(range(1, 7), {(1, 5), (2, 5), (2, 3), (2, 4)})
    assert (left, doubted) == ({1, 3, 4, 6}, {2})

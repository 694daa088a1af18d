"""Checked sharing: who lied when a mask was shared, before anybody's update depends on it (S46).

A share has L columns of mask and noise, and `BLINDS` columns more, uniform in all U rows. From the
header of a mask, a hash of all its sealed shares, everybody expands one vector r_b per blind, and
holder j reports

    report_b(i, j) = sum_l r_b[l] * share(i, j)[l] + blind_b(i, j),        b = 0, ..., B - 1

for every owner i whose share it holds. Shares and blinds of an honest owner are polynomials of
degree below U at the holders' points, so its reports are one too, and uniformly random: they tell
nothing about the mask. Where an owner sent something else to a holder, or a holder says something
else, they are not, and a Reed-Solomon decoder finds the place.

A contradiction accuses a *pair*: the owner lied to the holder, or the holder lies about the owner.

Two rules keep the blinds from cancelling, and both hold by construction:

* All holders use the same r_b. N reports of different combinations satisfy N - U parity checks in
  the blinds alone, which would leave as many equations in the columns of the mask. An owner binds
  each share to one header, and r_b follows from that.
* A second report on one mask is the first one again. Two combinations with one blind differ by a
  piece of the mask.

An owner that lies fixes its shares before it sees r_b, since these follow from the shares. It can
try again and again; a try passes with probability N / q^B, so B is 4: two could be ground.

`docs/mathematics.md` proves what is hidden and what is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.transcript import context_hash
from lightsecagg.errors import InconsistentAnswers
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import Elements, PrimeField

BLINDS = 4
"""B: blind columns of a share, hence values of a report."""

Pair = tuple[int, int]
"""An owner and a holder, one of whom lied to, or about, the other."""


def check_coefficients(header: bytes, length: int, modulus: int) -> Elements:
    """The (B, L) matrix of the r_b by which the shares of a mask with this header are checked."""
    seed = context_hash("check coefficients", header)
    return prg.expand(seed, BLINDS * length, modulus).reshape(BLINDS, length)


def report_on_share(field: PrimeField, share: Elements, header: bytes) -> Elements:
    """A holder's report on a share of L + B elements: B of them."""
    length = share.size - BLINDS
    combined = field.matmul(
        check_coefficients(header, length, field.modulus),
        np.ascontiguousarray(share[:length].reshape(length, 1)),
    )
    blinded = combined.reshape(BLINDS).astype(np.uint64) + share[length:]
    return (blinded % field.modulus).astype(np.uint32)


def find_accused(code: MdsCode, reports: Mapping[int, Mapping[int, Elements]]) -> frozenset[Pair]:
    """The pairs (owner, holder) whose reports contradict the code.

    * `reports`: owner -> the holder's position -> its values about this owner's share.
    * Up to floor((n - U) / 2) wrong ones of an owner's n reports are found. If there are more,
      every pair of this owner is accused: nothing that it shared can be relied on.
    * n = U + 1 reports show a lie without its place; n = U show nothing.
    """
    owners_by_holders: dict[tuple[int, ...], list[int]] = {}
    for owner, values in reports.items():
        owners_by_holders.setdefault(tuple(sorted(values)), []).append(owner)
    accused: set[Pair] = set()
    for holders, owners in owners_by_holders.items():
        values = {owner: np.stack([reports[owner][j] for j in holders]) for owner in owners}
        for owner, wrong in _wrong_reports(code, holders, values).items():
            accused.update((owner, holder) for holder in wrong)
    return frozenset(accused)


def name_liars(accused: Iterable[Pair], liars: int) -> tuple[int, ...]:
    """The parties that must have lied if at most `liars` of all did.

    In a pair with an honest party the other one lied, so an honest party is accused together with
    at most `liars` others. If more parties than that would be named, the assumption was wrong, and
    nobody is.
    """
    others: dict[int, set[int]] = {}
    for owner, holder in accused:
        others.setdefault(owner, set()).add(holder)
        others.setdefault(holder, set()).add(owner)
    named = tuple(sorted(party for party in others if len(others[party]) > liars))
    return named if len(named) <= liars else ()


def part_quarrels(
    parties: Collection[int], doubts: Collection[Pair]
) -> tuple[frozenset[int], frozenset[int]]:
    """Who answers, and which owners they doubt (S46, R59).

    * `doubts`: pairs (owner, holder) of whom one lied: the share must not be relied on.

    Pairs leave together, so that everybody who is left has no quarrel with anybody who is left.
    Each pair takes a liar along. Of n parties with at most e liars, k pairs leave n - 2 k parties
    with at most e - k liars; if n >= U + 2 e, that is U + 2 (e - k) at least, and the decoder
    locates all lies in their answers. An owner in a pair stays in the sum unless somebody who
    answers doubts its share. Owners with most quarrels go first: so they leave with a holder that
    doubts them, and fewest others do.
    """
    quarrels = Counter(party for pair in doubts for party in pair)
    apart: set[int] = set()

    def first(pair: Pair) -> tuple[bool, int, int, Pair]:
        """Who contradicts itself leaves alone, and is a liar."""
        return pair[0] != pair[1], -quarrels[pair[0]], -quarrels[pair[1]], pair

    for owner, holder in sorted(doubts, key=first):
        if owner not in apart and holder not in apart:
            apart |= {owner, holder}
    left = frozenset(parties) - apart
    return left, frozenset(owner for owner, holder in doubts if holder in left)


def _wrong_reports(
    code: MdsCode, holders: Sequence[int], values: Mapping[int, Elements]
) -> dict[int, Collection[int]]:
    """Owner -> the holders whose values about it are wrong; all if there are too many to tell.

    The decoder is slow. But a codeword that all but floor((n - U) / 2) values lie on is the only
    one, however it was found: so once a liar is known, the other owners are tried without it.
    """
    found: dict[int, Collection[int]] = {}
    likely: set[int] = set()
    remaining = _contradicted(code, holders, values)
    while remaining:
        owner = remaining.pop()
        try:
            found[owner] = code.find_errors(holders, values[owner])
            likely.update(found[owner])
        except InconsistentAnswers:
            found[owner] = holders
            continue
        if len(likely) <= (len(holders) - code.survivors) // 2:
            left = {owner: values[owner] for owner in remaining}
            explained = _explained(code, holders, left, likely)
            found.update(explained)
            remaining = [owner for owner in remaining if owner not in explained]
    return found


def _contradicted(
    code: MdsCode, holders: Sequence[int], values: Mapping[int, Elements]
) -> list[int]:
    """The owners whose values are not those of a codeword; one product for all of them."""
    if not values:
        return []
    wrong = code.contradictions(holders, np.concatenate(list(values.values()), axis=1))
    owners = list(values)
    return [owners[k] for k in np.flatnonzero(np.any(wrong.reshape(len(owners), -1), axis=1))]


def _explained(
    code: MdsCode, holders: Sequence[int], values: Mapping[int, Elements], likely: set[int]
) -> dict[int, Collection[int]]:
    """The owners whose values are a codeword once the likely liars' are left out, and who lied."""
    trusted = [k for k, holder in enumerate(holders) if holder not in likely]
    doubted = [k for k, holder in enumerate(holders) if holder in likely]
    honest = {owner: np.ascontiguousarray(rows[trusted]) for owner, rows in values.items()}
    positions = [holders[k] for k in trusted]
    contradicted = set(_contradicted(code, positions, honest))
    owners = [owner for owner in values if owner not in contradicted]
    if not owners:
        return {}
    known = np.concatenate([honest[owner][: code.survivors] for owner in owners], axis=1)
    targets = [holders[k] for k in doubted]
    _, predicted = code.complete(positions[: code.survivors], known, targets)
    said = np.concatenate([values[owner][doubted] for owner in owners], axis=1)
    wrong = np.any((predicted != said).reshape(len(targets), len(owners), -1), axis=2)
    return {
        owner: [targets[k] for k in np.flatnonzero(wrong[:, column])]
        for column, owner in enumerate(owners)
    }

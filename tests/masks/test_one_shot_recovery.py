"""A round through the pure functions: exact sums, whoever drops out (S11), and strictness."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import FieldError, NotEnoughAnswers
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements, PrimeField
from lightsecagg.masks.mask_encoding import (
    MaskId,
    encode_mask,
    encode_seeded_mask,
    expand_share,
    seeded_positions,
)
from lightsecagg.masks.one_shot_recovery import aggregate_shares, recover_mask, unmask
from lightsecagg.params import ShareMode

CONTEXT = b"c" * 32


def uniform(generator: np.random.Generator, field: PrimeField, *shape: int) -> Elements:
    return generator.integers(0, field.modulus, shape, dtype=np.uint32)


def share_mask(
    code: MdsCode, mode: ShareMode, owner: int, d: int, generator: np.random.Generator
) -> tuple[Elements, dict[int, Elements]]:
    """A fresh mask of length d and what every recipient holds of it, in either mode."""
    L, q = code.share_length(d), code.field.modulus
    if mode is ShareMode.PAPER:
        pieces = uniform(generator, code.field, code.pieces, L)
        noise = uniform(generator, code.field, code.privacy, L)
        encoded = encode_mask(code, pieces, noise, d)
        return encoded.mask, dict(encoded.shares)
    seeds = {j: generator.bytes(32) for j in seeded_positions(owner, code.clients, code.survivors)}
    mask_id = MaskId(CONTEXT, owner)
    seeded = {j: expand_share(seed, mask_id, j, L, q) for j, seed in seeds.items()}
    rows = np.stack(list(seeded.values()))
    encoded = encode_seeded_mask(code, list(seeded), rows, code.clients, d)
    return encoded.mask, {**encoded.shares, **seeded}


def run_round(
    code: MdsCode,
    mode: ShareMode,
    d: int,
    uploaders: list[int],
    responders: list[int],
    seed: int,
    weights: list[int] | None = None,
) -> None:
    """`uploaders` share and upload, `responders` answer; compare with Python integers."""
    field, q = code.field, code.field.modulus
    generator = np.random.default_rng(seed)
    shared = {i: share_mask(code, mode, i, d, generator) for i in uploaders}
    x = {i: uniform(generator, field, d) for i in uploaders}
    uploads = [field.add(x[i], shared[i][0].copy()) for i in uploaders]
    masked_sum = aggregate_shares(field, uploads, weights)
    answers = {
        j: aggregate_shares(field, [shared[i][1][j] for i in uploaders], weights)
        for j in responders
    }
    total = unmask(field, masked_sum, recover_mask(code, answers, d))
    factors = weights or [1] * len(uploaders)
    expected = [
        sum(w * int(x[i][k]) for w, i in zip(factors, uploaders, strict=True)) % q for k in range(d)
    ]
    assert total.tolist() == expected


@given(st.data())
def test_S11_any_U_responders_recover_the_exact_sum(backend: str, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from([DEFAULT_FIELD, PAPER_FIELD]))
    mode = data.draw(st.sampled_from(ShareMode))
    N = data.draw(st.one_of(st.integers(2, 9), st.integers(2, 40)))
    U = data.draw(st.integers(1, N))
    T = data.draw(st.integers(0, U - 1))
    d = data.draw(st.integers(1, 50))
    order = data.draw(st.permutations(range(N)))
    alive = order[: data.draw(st.integers(U, N))]
    responders = data.draw(st.permutations(alive))[: data.draw(st.integers(U, len(alive)))]
    weights = data.draw(
        st.none() | st.lists(st.integers(0, 64), min_size=len(alive), max_size=len(alive))
    )
    code = MdsCode(field, U, T, ntt.points(field, N))
    run_round(code, mode, d, alive, responders, data.draw(st.integers(0, 2**32)), weights)


@pytest.mark.parametrize("field", [DEFAULT_FIELD, PAPER_FIELD], ids=["2^31", "2^32"])
@pytest.mark.parametrize("mode", [ShareMode.PAPER, ShareMode.SEEDED])
@pytest.mark.parametrize(
    ("N", "U", "T", "d"),
    [
        (256, 256, 255, 3),  # no dropout, one mask piece
        (256, 200, 100, 1001),  # d is not divisible by U - T
        (200, 140, 100, 97),
        (64, 33, 32, 7),
        (33, 32, 0, 100),  # no privacy against clients, most pieces
    ],
)
def test_S11_large_rounds_are_exact(
    backend: str, field: PrimeField, mode: ShareMode, N: int, U: int, T: int, d: int
) -> None:
    """Exactly U of N clients answer; twelve uploads suffice to show that their masks add up."""
    code = MdsCode(field, U, T, ntt.points(field, N))
    alive = np.random.default_rng(N).permutation(N)[:U].tolist()
    run_round(code, mode, d, alive[:12], alive, seed=1)


def test_S11_spare_answers_do_not_change_the_result(backend: str) -> None:
    code = MdsCode(DEFAULT_FIELD, 4, 2, ntt.points(DEFAULT_FIELD, 9))
    generator = np.random.default_rng(4)
    _, shares = share_mask(code, ShareMode.PAPER, 0, 11, generator)
    few = recover_mask(code, {j: shares[j] for j in (8, 1, 5, 2)}, 11)
    many = recover_mask(code, shares, 11)
    assert few.tolist() == many.tolist()


def test_too_few_answers_recover_nothing() -> None:
    code = MdsCode(DEFAULT_FIELD, 4, 2, ntt.points(DEFAULT_FIELD, 9))
    answers = {j: np.zeros(6, dtype=np.uint32) for j in range(3)}
    with pytest.raises(NotEnoughAnswers, match="takes U = 4 answers, got 3"):
        recover_mask(code, answers, 11)


@pytest.mark.parametrize("wrong", [np.zeros(5, np.uint32), np.zeros((6, 1), np.uint32)])
def test_S12_answers_of_the_wrong_length_are_refused_and_named(wrong: Elements) -> None:
    code = MdsCode(DEFAULT_FIELD, 4, 2, ntt.points(DEFAULT_FIELD, 9))
    answers = {j: np.zeros(6, dtype=np.uint32) for j in range(4)}
    with pytest.raises(FieldError, match="answer at position 2 has shape"):
        recover_mask(code, {**answers, 2: wrong}, 11)
    with pytest.raises(FieldError, match="answer at position 0 has shape"):
        recover_mask(code, answers, 13)


def test_S12_answers_that_are_not_field_elements_are_refused(backend: str) -> None:
    code = MdsCode(DEFAULT_FIELD, 4, 2, ntt.points(DEFAULT_FIELD, 9))
    answers = {j: np.zeros(6, dtype=np.uint32) for j in range(4)}
    for wrong in (
        np.full(6, DEFAULT_FIELD.modulus, dtype=np.uint32),
        np.zeros(6, dtype=np.int64),
        np.zeros(6, dtype=np.float32),
    ):
        with pytest.raises(FieldError):
            recover_mask(code, {**answers, 2: wrong}, 11)  # type: ignore[dict-item]


def test_S12_sums_of_different_lengths_are_refused() -> None:
    four, five = np.zeros(4, dtype=np.uint32), np.zeros(5, dtype=np.uint32)
    with pytest.raises(FieldError):
        aggregate_shares(DEFAULT_FIELD, [four, five])
    with pytest.raises(FieldError):
        aggregate_shares(DEFAULT_FIELD, [four, four], [1])
    with pytest.raises(FieldError):
        aggregate_shares(DEFAULT_FIELD, [])
    with pytest.raises(FieldError):
        unmask(DEFAULT_FIELD, four, five)

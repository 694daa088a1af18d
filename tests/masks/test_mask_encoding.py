"""Both ways to share a mask: the same decoding, and strictness about sizes (S11, S12)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.crypto import prg
from lightsecagg.errors import CryptoError, FieldError, ParameterError
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements
from lightsecagg.masks.mask_encoding import (
    EncodedMask,
    MaskId,
    encode_mask,
    encode_seeded_mask,
    expand_share,
    join_pieces,
    seeded_positions,
)

SEED = bytes(range(32))
CONTEXT = bytes(32)


def uniform(shape: tuple[int, ...], q: int, seed: int = 1) -> Elements:
    return np.random.default_rng(seed).integers(0, q, shape, dtype=np.uint32)


@pytest.fixture
def code() -> MdsCode:
    return MdsCode(DEFAULT_FIELD, 5, 2, ntt.points(DEFAULT_FIELD, 8))


# -- paper mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [10, 11, 12])
def test_paper_mode_pads_and_never_sends_the_padding(
    backend: str, code: MdsCode, dimension: int
) -> None:
    pieces, noise = uniform((3, 4), code.field.modulus), uniform((2, 4), code.field.modulus, 2)
    encoded = encode_mask(code, pieces, noise, dimension)
    assert encoded.mask.tolist() == pieces.reshape(-1).tolist()[:dimension]
    assert sorted(encoded.shares) == list(range(8))
    chosen = [7, 2, 4, 0, 5]
    stacked = np.stack([encoded.shares[j] for j in chosen])
    assert code.decode(chosen, stacked).tolist() == pieces.tolist()


@pytest.mark.parametrize("dimension", [9, 13, 0, -1])
def test_S12_paper_mode_refuses_pieces_that_do_not_fit(code: MdsCode, dimension: int) -> None:
    with pytest.raises(ParameterError, match=f"do not fit a mask of d = {dimension}"):
        encode_mask(code, uniform((3, 4), 5), uniform((2, 4), 5), dimension)


def test_S12_paper_mode_refuses_wrong_pieces(code: MdsCode) -> None:
    with pytest.raises(FieldError):
        encode_mask(code, uniform((2, 4), 5), uniform((2, 4), 5), 12)
    with pytest.raises(FieldError):
        encode_mask(code, uniform((3, 4), 5), uniform((1, 4), 5), 12)


def rows_of(seeded: dict[int, Elements]) -> tuple[list[int], Elements]:
    return list(seeded), np.stack(list(seeded.values()))


# -- seeded mode ---------------------------------------------------------------------------------


@given(st.data())
def test_S11_seeded_shares_are_shares_of_the_derived_mask(
    backend: str, data: st.DataObject
) -> None:
    """Derive mask and explicit shares from U seeded ones; encoding that mask gives them all back.

    The noise is not returned, so decode it from the shares with a code of privacy zero.
    """
    field = data.draw(st.sampled_from([DEFAULT_FIELD, PAPER_FIELD]))
    N = data.draw(st.integers(2, 30))
    members = data.draw(st.integers(2, N))
    U = data.draw(st.integers(1, members))
    T = data.draw(st.integers(0, U - 1))
    d = data.draw(st.integers(1, 40))
    owner = data.draw(st.integers(0, members - 1))
    code = MdsCode(field, U, T, ntt.points(field, N))
    chosen = seeded_positions(owner, members, U)
    L = code.share_length(d)
    seeded = {j: uniform((L,), field.modulus, seed=j) for j in chosen}
    encoded = encode_seeded_mask(code, *rows_of(seeded), members, d)

    shares = {**seeded, **encoded.shares}
    assert sorted(shares) == list(range(members))
    assert not seeded.keys() & encoded.shares.keys()
    everything = MdsCode(field, U, 0, ntt.points(field, N))
    rows = everything.decode(chosen, np.stack([seeded[j] for j in chosen]))
    assert encoded.mask.tolist() == rows[: U - T].reshape(-1)[:d].tolist()
    expected = code.encode(*np.split(rows, [U - T]))
    for j in range(members):
        assert shares[j].tolist() == expected[j].tolist()
    alone = encode_seeded_mask(code, *rows_of(seeded), members, d, with_mask=False)
    assert not alone.mask.size
    assert alone.shares.keys() == encoded.shares.keys()
    for j, share in alone.shares.items():
        assert share.tolist() == expected[j].tolist()


def test_seeded_mode_with_every_share_seeded_sends_no_explicit_share(backend: str) -> None:
    code = MdsCode(DEFAULT_FIELD, 6, 2, ntt.points(DEFAULT_FIELD, 6))
    seeded = {j: uniform((3,), DEFAULT_FIELD.modulus, seed=j) for j in range(6)}
    encoded = encode_seeded_mask(code, *rows_of(seeded), 6, 12)
    assert encoded.shares == {}
    assert encoded.mask.size == 12


@pytest.mark.parametrize(
    ("positions", "members", "dimension", "words"),
    [
        ([0, 1, 2, 3], 8, 12, "exactly U = 5 shares, got 4"),
        ([0, 1, 2, 3, 4, 5], 8, 12, "exactly U = 5 shares, got 6"),
        ([0, 1, 2, 3, 7], 7, 12, "among the 7 members"),
        ([0, 1, 2, 3, -1], 8, 12, "among the 8 members"),
        ([0, 1, 2, 3, 4], 8, 13, "do not fit a mask of d = 13"),
        ([0, 1, 2, 3, 4], 8, 0, "do not fit a mask of d = 0"),
    ],
)
def test_S12_seeded_mode_refuses_what_does_not_fit(
    code: MdsCode, positions: list[int], members: int, dimension: int, words: str
) -> None:
    seeded = {j: np.zeros(4, dtype=np.uint32) for j in positions}
    with pytest.raises(ParameterError) as refusal:
        encode_seeded_mask(code, *rows_of(seeded), members, dimension)
    assert words in str(refusal.value)


def test_S12_seeded_mode_refuses_members_beyond_the_code(code: MdsCode) -> None:
    seeded = {j: np.zeros(4, dtype=np.uint32) for j in range(5)}
    with pytest.raises(FieldError, match=r"must lie in 0\.\.7"):
        encode_seeded_mask(code, *rows_of(seeded), 9, 12)


# -- who gets a seed -----------------------------------------------------------------------------


@given(st.integers(1, 60), st.data())
def test_explicit_shares_are_spread_evenly(members: int, data: st.DataObject) -> None:
    survivors = data.draw(st.integers(1, members))
    seeds = Counter(
        position
        for owner in range(members)
        for position in seeded_positions(owner, members, survivors)
    )
    assert set(seeds.values()) == {survivors}  # everybody receives equally many seeds


@given(st.integers(1, 60), st.data())
def test_U_distinct_members_get_seeds_and_the_owner_comes_last(
    members: int, data: st.DataObject
) -> None:
    survivors = data.draw(st.integers(1, members))
    owner = data.draw(st.integers(0, members - 1))
    chosen = seeded_positions(owner, members, survivors)
    assert len(set(chosen)) == len(chosen) == survivors
    assert set(chosen) <= set(range(members))
    assert (owner in chosen) == (survivors == members)


@pytest.mark.parametrize(
    ("owner", "members", "survivors"), [(8, 8, 3), (-1, 8, 3), (0, 8, 9), (0, 8, 0)]
)
def test_impossible_choices_of_seeded_positions_are_refused(
    owner: int, members: int, survivors: int
) -> None:
    with pytest.raises(ParameterError, match="cannot choose"):
        seeded_positions(owner, members, survivors)


# -- seeds ---------------------------------------------------------------------------------------


def test_owner_and_recipient_expand_a_seed_to_the_same_share() -> None:
    q = DEFAULT_FIELD.modulus
    share = expand_share(SEED, MaskId(CONTEXT, owner=3, serial=4), 5, 1000, q)
    again = expand_share(SEED, MaskId(CONTEXT, owner=3, serial=4), 5, 1000, q)
    assert share.tolist() == again.tolist()
    assert share.dtype == np.uint32
    assert int(share.max()) < q
    # The seed itself is never expanded, only a key that is derived from it for this use.
    assert not np.array_equal(share, prg.expand(SEED, 1000, q))


def test_S19_equal_seeds_give_unrelated_shares_wherever_anything_differs() -> None:
    q = PAPER_FIELD.modulus
    uses = [
        (MaskId(CONTEXT, 3, 4), 5),
        (MaskId(CONTEXT, 3, 4), 6),
        (MaskId(CONTEXT, 3, 5), 5),
        (MaskId(CONTEXT, 5, 4), 3),
        (MaskId(CONTEXT, 4, 3), 5),
        (MaskId(b"\1" + CONTEXT[1:], 3, 4), 5),
    ]
    first_words = {
        int(word)
        for mask_id, recipient in uses
        for word in expand_share(SEED, mask_id, recipient, 100, q)
    }
    # 600 uniform words below 2^32 collide with probability 4e-5; these are fixed and do not.
    assert len(first_words) == 600


def test_short_seeds_are_refused() -> None:
    with pytest.raises(CryptoError):
        expand_share(SEED[:31], MaskId(CONTEXT, 1), 2, 10, DEFAULT_FIELD.modulus)


def test_S22_masks_and_shares_are_not_shown() -> None:
    secret = np.array([123456789], dtype=np.uint32)
    assert "123456789" not in repr(EncodedMask(secret, {0: secret}))


# -- blinds --------------------------------------------------------------------------------------


def test_S46_blinds_are_shared_with_the_mask_and_no_part_of_it(backend: str, code: MdsCode) -> None:
    pieces, noise = uniform((3, 6), code.field.modulus), uniform((2, 6), code.field.modulus, 2)
    encoded = encode_mask(code, pieces, noise, 11, blinds=2)
    assert encoded.mask.tolist() == pieces[:, :4].reshape(-1).tolist()[:11]
    chosen = [7, 2, 4, 0, 5]
    rows = rows_of({j: encoded.shares[j] for j in chosen})
    again = encode_seeded_mask(code, *rows, 8, 11, blinds=2)
    assert again.mask.tolist() == encoded.mask.tolist()
    for j, share in again.shares.items():
        assert share.tolist() == encoded.shares[j].tolist()
    with pytest.raises(ParameterError, match="shares of 5 elements do not fit"):
        encode_mask(code, pieces, noise, 11, blinds=1)


@pytest.mark.parametrize(("pieces", "columns"), [(1, 5), (2, 4), (3, 7), (5, 1)])
def test_S10_S49_interleaving_only_orders_the_elements_anew(pieces: int, columns: int) -> None:
    """So the privacy of shares of a key is that of shares of a mask, element for element."""
    rows = np.arange(pieces * columns, dtype=np.uint32).reshape(pieces, columns)
    contiguous = join_pieces(rows, rows.size)
    interleaved = join_pieces(rows, rows.size, interleaved=True)
    assert sorted(interleaved) == sorted(contiguous)
    for piece in range(pieces):
        assert np.array_equal(interleaved[piece::pieces], rows[piece])
    assert np.array_equal(join_pieces(rows, 1, interleaved=True), rows[0, :1]), "padding goes"

"""SecAgg's masks: the paper's example number by number, cancelling, and exact recovery."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightsecagg.crypto import prg
from lightsecagg.errors import FieldError, LocalProtocolError
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements, PrimeField
from lightsecagg.masks.pairwise_masks import mask_vector, orphaned_masks, unmask

FIELDS = [PrimeField(5), PrimeField(257), DEFAULT_FIELD, PAPER_FIELD]
D = 1000


def self_seed(i: int) -> bytes:
    """b_i"""
    return bytes([1, i]) + bytes(30)


def pair_seed(i: int, j: int) -> bytes:
    """a_ij"""
    return bytes([2, min(i, j), max(i, j)]) + bytes(29)


def inputs(field: PrimeField, clients: int, length: int = D) -> list[Elements]:
    """A unique vector per client, so that a missing or double count shows."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, field.modulus, length, dtype=np.uint32) for _ in range(clients)]


def upload(field: PrimeField, x: Elements, i: int, neighbours: set[int]) -> Elements:
    seeds = {j: pair_seed(i, j) for j in neighbours if j != i}
    return mask_vector(x, self_seed(i), seeds, i, field)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field.modulus))
def test_the_papers_example(field: PrimeField) -> None:
    """Section 3: N = 3, client 1 drops after the masks were agreed on."""
    q = field.modulus

    def expand(seed: bytes) -> list[int]:
        return [int(value) for value in prg.expand(seed, D, q)]

    x_1, x_2, x_3 = inputs(field, 3)
    n_1, n_2, n_3 = (expand(self_seed(i)) for i in (1, 2, 3))
    z_12, z_13, z_23 = (expand(pair_seed(i, j)) for i, j in ((1, 2), (1, 3), (2, 3)))
    everybody = {1, 2, 3}
    masked_1, masked_2, masked_3 = (
        upload(field, x, i, everybody) for i, x in ((1, x_1), (2, x_2), (3, x_3))
    )
    for k in range(D):
        assert masked_1[k] == (int(x_1[k]) + n_1[k] + z_12[k] + z_13[k]) % q
        assert masked_2[k] == (int(x_2[k]) + n_2[k] + z_23[k] - z_12[k]) % q
        assert masked_3[k] == (int(x_3[k]) + n_3[k] - z_13[k] - z_23[k]) % q

    # x_2 + x_3 = x~_2 + x~_3 + (z_12 + z_13 - n_2 - n_3)
    orphans = [(2, 1, pair_seed(1, 2)), (3, 1, pair_seed(1, 3))]
    left = orphaned_masks(orphans, D, field)
    assert left.tolist() == [(-a - b) % q for a, b in zip(z_12, z_13, strict=True)]

    recovered = unmask(field.add(masked_2, masked_3), [self_seed(2), self_seed(3)], orphans, field)
    assert recovered.tolist() == field.add(x_2, x_3).tolist()


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(FIELDS))
def test_any_graph_and_any_dropouts_give_the_sum_of_the_survivors(
    data: st.DataObject, field: PrimeField
) -> None:
    clients = data.draw(st.integers(2, 9))
    pairs = list(combinations(range(clients), 2))
    edges = data.draw(st.sets(st.sampled_from(pairs)))
    dropped = data.draw(st.sets(st.sampled_from(range(clients)), max_size=clients - 1))
    survivors = set(range(clients)) - dropped
    vectors = inputs(field, clients, 50)
    neighbours = {i: {a + b - i for a, b in edges if i in (a, b)} for i in range(clients)}

    masked = field.sum(upload(field, vectors[i], i, neighbours[i]) for i in survivors)
    recovered = unmask(
        masked,
        (self_seed(i) for i in survivors),
        ((i, j, pair_seed(i, j)) for i in survivors for j in neighbours[i] & dropped),
        field,
    )
    assert recovered.tolist() == field.sum(vectors[i] for i in survivors).tolist()


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field.modulus))
@pytest.mark.parametrize("length", [0, 1, prg.BLOCK_WORDS, 2 * prg.BLOCK_WORDS + 77])
def test_sums_equal_whole_expansions(field: PrimeField, length: int) -> None:
    """Masks are added up block by block; rejected words must land where `expand` puts them."""
    seeds = [self_seed(i) for i in range(6)]
    expected = np.zeros(length, dtype=np.uint64)
    for seed in seeds:
        expected += prg.expand(seed, length, field.modulus)
    expected %= field.modulus
    assert not unmask(expected.astype(np.uint32), seeds, [], field).any()


def test_no_masks_sum_to_zero() -> None:
    assert orphaned_masks([], 3, DEFAULT_FIELD).tolist() == [0, 0, 0]


def test_control_a_forgotten_mask_spoils_the_sum() -> None:
    field = DEFAULT_FIELD
    vectors = inputs(field, 3)
    masked = field.sum(upload(field, vectors[i], i, {0, 1, 2}) for i in (1, 2))
    selves = [self_seed(1), self_seed(2)]
    orphans = [(1, 0, pair_seed(0, 1)), (2, 0, pair_seed(0, 2))]
    total = field.add(vectors[1], vectors[2]).tolist()
    assert unmask(masked, selves, orphans, field).tolist() == total
    assert unmask(masked, selves[:1], orphans, field).tolist() != total
    assert unmask(masked, selves, orphans[:1], field).tolist() != total
    swapped = [(j, i, seed) for i, j, seed in orphans]
    assert unmask(masked, selves, swapped, field).tolist() != total


def test_an_upload_is_uniform_whatever_the_input() -> None:
    """Over F_5, all values of one mask element: each upload value occurs once per input."""
    field = PrimeField(5)
    seeds = {}
    for serial in range(200):
        seed = self_seed(serial)
        seeds[int(prg.expand(seed, 1, 5)[0])] = seed
    assert set(seeds) == {0, 1, 2, 3, 4}
    for value in range(5):
        x = np.array([value], dtype=np.uint32)
        uploads = {int(mask_vector(x, seed, {}, 0, field)[0]) for seed in seeds.values()}
        assert uploads == {0, 1, 2, 3, 4}


def test_a_mask_with_oneself_is_refused() -> None:
    x = np.zeros(3, dtype=np.uint32)
    with pytest.raises(LocalProtocolError, match="client 4 "):
        mask_vector(x, self_seed(4), {4: pair_seed(4, 4)}, 4, DEFAULT_FIELD)
    with pytest.raises(LocalProtocolError, match="client 4 "):
        unmask(x, [], [(4, 4, pair_seed(4, 4))], DEFAULT_FIELD)


def test_S12_vectors_outside_the_field_are_refused() -> None:
    for x in (np.array([5], dtype=np.uint32), np.array([1], dtype=np.int64)):
        with pytest.raises(FieldError):
            mask_vector(x, self_seed(0), {}, 0, PrimeField(5))
        with pytest.raises(FieldError):
            unmask(x, [], [], PrimeField(5))


def test_inputs_are_left_alone() -> None:
    x = np.arange(5, dtype=np.uint32)
    masked = mask_vector(x, self_seed(0), {1: pair_seed(0, 1)}, 0, DEFAULT_FIELD)
    kept = masked.copy()
    unmask(masked, [self_seed(0)], [(0, 1, pair_seed(0, 1))], DEFAULT_FIELD)
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert masked.tolist() == kept.tolist()

"""SecAgg's masks: the paper's example number by number, cancelling, and exact recovery."""

from __future__ import annotations

import struct
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from lightsecagg.errors import FieldError, LocalProtocolError
from lightsecagg.field.group import Elements
from lightsecagg.field.words import WORDS
from lightsecagg_lab.schemes.pairwise_masks import mask_vector, remaining_masks, unmask

D = 1000
Q = 2**32


def self_seed(i: int) -> bytes:
    """b_i"""
    return bytes([1, i]) + bytes(30)


def pair_seed(i: int, j: int) -> bytes:
    """a_ij"""
    return bytes([2, min(i, j), max(i, j)]) + bytes(29)


def expand(seed: bytes, length: int = D) -> list[int]:
    """The words of AES-256-CTR under the seed, counted from zero."""
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    return list(struct.unpack(f"<{length}I", encryptor.update(bytes(4 * length))))


def inputs(clients: int, length: int = D) -> list[Elements]:
    """A unique vector per client, so that a missing or double count shows."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, Q, length, dtype=np.uint32) for _ in range(clients)]


def upload(x: Elements, i: int, neighbours: set[int]) -> Elements:
    seeds = {j: pair_seed(i, j) for j in neighbours if j != i}
    return mask_vector(x, self_seed(i), seeds, i)


def test_the_papers_example() -> None:
    """Section 3: N = 3, client 1 drops after the masks were agreed on."""
    q = Q
    x_1, x_2, x_3 = inputs(3)
    n_1, n_2, n_3 = (expand(self_seed(i)) for i in (1, 2, 3))
    z_12, z_13, z_23 = (expand(pair_seed(i, j)) for i, j in ((1, 2), (1, 3), (2, 3)))
    everybody = {1, 2, 3}
    masked_1, masked_2, masked_3 = (
        upload(x, i, everybody) for i, x in ((1, x_1), (2, x_2), (3, x_3))
    )
    for k in range(D):
        assert masked_1[k] == (int(x_1[k]) + n_1[k] + z_12[k] + z_13[k]) % q
        assert masked_2[k] == (int(x_2[k]) + n_2[k] + z_23[k] - z_12[k]) % q
        assert masked_3[k] == (int(x_3[k]) + n_3[k] - z_13[k] - z_23[k]) % q

    # x_2 + x_3 = x~_2 + x~_3 + (z_12 + z_13 - n_2 - n_3)
    orphans = [(2, 1, pair_seed(1, 2)), (3, 1, pair_seed(1, 3))]
    left = remaining_masks([], orphans).sum(0, D)
    assert left.tolist() == [(-a - b) % q for a, b in zip(z_12, z_13, strict=True)]

    recovered = unmask(WORDS.add(masked_2, masked_3), [self_seed(2), self_seed(3)], orphans)
    assert recovered.tolist() == [(int(a) + int(b)) % q for a, b in zip(x_2, x_3, strict=True)]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_graph_and_any_dropouts_give_the_sum_of_the_survivors(data: st.DataObject) -> None:
    clients = data.draw(st.integers(2, 9))
    pairs = list(combinations(range(clients), 2))
    edges = data.draw(st.sets(st.sampled_from(pairs)))
    dropped = data.draw(st.sets(st.sampled_from(range(clients)), max_size=clients - 1))
    survivors = set(range(clients)) - dropped
    vectors = inputs(clients, 50)
    neighbours = {i: {a + b - i for a, b in edges if i in (a, b)} for i in range(clients)}

    masked = WORDS.sum(upload(vectors[i], i, neighbours[i]) for i in survivors)
    recovered = unmask(
        masked,
        (self_seed(i) for i in survivors),
        ((i, j, pair_seed(i, j)) for i in survivors for j in neighbours[i] & dropped),
    )
    columns = zip(*(vectors[i].tolist() for i in survivors), strict=True)
    assert recovered.tolist() == [sum(column) % Q for column in columns]


@given(st.data())
def test_any_range_of_columns_is_found_alone(data: st.DataObject) -> None:
    plus = [self_seed(i) for i in range(data.draw(st.integers(0, 3)))]
    orphans = [(i, 7, pair_seed(i, 7)) for i in range(8, 8 + data.draw(st.integers(0, 3)))]
    start = data.draw(st.integers(0, 40))
    stop = data.draw(st.integers(start, 41))
    masks = [expand(seed, 41) for seed in plus]
    minus = [expand(seed, 41) for _, _, seed in orphans]
    expected = [
        (sum(mask[k] for mask in masks) - sum(mask[k] for mask in minus)) % Q for k in range(41)
    ]
    seeds = remaining_masks(plus, orphans)
    assert seeds.sum(start, stop).tolist() == expected[start:stop]
    assert "SignedSeeds(" in repr(seeds)
    assert not any(repr(seed)[2:-1] in repr(seeds) for seed in plus)


def test_control_a_forgotten_mask_spoils_the_sum() -> None:
    vectors = inputs(3)
    masked = WORDS.sum(upload(vectors[i], i, {0, 1, 2}) for i in (1, 2))
    selves = [self_seed(1), self_seed(2)]
    orphans = [(1, 0, pair_seed(0, 1)), (2, 0, pair_seed(0, 2))]
    total = WORDS.add(vectors[1], vectors[2]).tolist()
    assert unmask(masked, selves, orphans).tolist() == total
    assert unmask(masked, selves[:1], orphans).tolist() != total
    assert unmask(masked, selves, orphans[:1]).tolist() != total
    swapped = [(j, i, seed) for i, j, seed in orphans]
    assert unmask(masked, selves, swapped).tolist() != total


def test_an_upload_differs_from_its_mask_by_the_input_alone() -> None:
    """Adding is a permutation of the words, so a uniform mask makes a uniform upload."""
    mask = expand(self_seed(3), 4)
    for value in (0, 1, 2**31, Q - 1):
        x = np.full(4, value, dtype=np.uint32)
        uploaded = mask_vector(x, self_seed(3), {}, 0).tolist()
        assert uploaded == [(word + value) % Q for word in mask]


def test_a_mask_with_oneself_is_refused() -> None:
    x = np.zeros(3, dtype=np.uint32)
    with pytest.raises(LocalProtocolError, match="client 4 "):
        mask_vector(x, self_seed(4), {4: pair_seed(4, 4)}, 4)
    with pytest.raises(LocalProtocolError, match="client 4 "):
        unmask(x, [], [(4, 4, pair_seed(4, 4))])


def test_S12_what_is_no_vector_of_words_is_refused() -> None:
    for x in (np.array([1], dtype=np.int64), np.arange(4, dtype=np.uint32)[::2]):
        with pytest.raises(FieldError):
            mask_vector(x, self_seed(0), {}, 0)
        with pytest.raises(FieldError):
            unmask(x, [], [])


def test_inputs_are_left_alone() -> None:
    x = np.arange(5, dtype=np.uint32)
    masked = mask_vector(x, self_seed(0), {1: pair_seed(0, 1)}, 0)
    kept = masked.copy()
    unmask(masked, [self_seed(0)], [(0, 1, pair_seed(0, 1))])
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert masked.tolist() == kept.tolist()

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import ConfigurationError
from lightsecagg.training import partition

SEEDS = st.integers(0, 2**32)


@st.composite
def labelled(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    clients = draw(st.integers(1, 12))
    samples = draw(st.integers(2 * clients, 2 * clients + 60))
    labels = draw(st.lists(st.integers(0, 4), min_size=samples, max_size=samples))
    return np.array(labels, dtype=np.int64), clients


def deal(kind: str, labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    if kind == "iid":
        return partition.iid(len(labels), clients, rng)
    if kind == "dirichlet":
        return partition.dirichlet(labels, clients, 0.1, rng)
    if kind == "shards":
        return partition.shards(labels, clients, 2, rng)
    # Each writer wrote two consecutive examples.
    return partition.natural(np.arange(len(labels)) // 2 % (len(labels) // 2), clients, rng)


KINDS = ["iid", "dirichlet", "shards", "natural"]


@pytest.mark.parametrize("kind", KINDS)
@given(case=labelled(), seed=SEEDS)
def test_every_example_belongs_to_exactly_one_client(
    kind: str, case: tuple[np.ndarray, int], seed: int
) -> None:
    labels, clients = case
    parts = deal(kind, labels, clients, seed)
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all(len(part) >= partition.MIN_SAMPLES for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("kind", KINDS)
@given(case=labelled(), seed=SEEDS)
def test_the_seed_decides_the_partition(kind: str, case: tuple[np.ndarray, int], seed: int) -> None:
    labels, clients = case
    first, second = (deal(kind, labels, clients, seed) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_is_another_partition(kind: str) -> None:
    labels = np.arange(200) % 5
    first, second = (deal(kind, labels, 5, seed) for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(case=labelled(), seed=SEEDS)
def test_iid_sizes_differ_by_at_most_one(case: tuple[np.ndarray, int], seed: int) -> None:
    labels, clients = case
    sizes = [len(part) for part in deal("iid", labels, clients, seed)]
    assert max(sizes) - min(sizes) <= 1


def test_small_alpha_is_more_skewed_than_large_alpha() -> None:
    labels = np.repeat(np.arange(10), 200)

    def top_share(alpha: float) -> float:
        parts = partition.dirichlet(labels, 10, alpha, np.random.default_rng(3))
        return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts]))

    assert top_share(0.1) > 0.4
    assert top_share(1000.0) < 0.15


def test_two_shards_hold_at_most_a_few_labels() -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = partition.shards(labels, 20, 2, np.random.default_rng(0))
    assert all(len(np.unique(labels[part])) <= 2 for part in parts)


def test_natural_never_splits_a_writer() -> None:
    groups = np.random.default_rng(0).integers(0, 30, size=500)
    parts = partition.natural(groups, 7, np.random.default_rng(1))
    owners = [set(groups[part].tolist()) for part in parts]
    assert sum(len(owner) for owner in owners) == len(set(groups.tolist()))


def test_too_few_examples_or_writers_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigurationError, match="7 training examples are too few for 4 clients"):
        partition.iid(7, 4, rng)
    with pytest.raises(ConfigurationError, match="2 writers for 3 clients"):
        partition.natural(np.array([0, 0, 1, 1]), 3, rng)
    with pytest.raises(ConfigurationError, match=r"has 1 example\(s\)"):
        partition.natural(np.array([0, 0, 1]), 2, rng)

"""Graphs against brute force, and the (k, t) finder against enumeration of all clients' fates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, permutations, product
from math import comb

import pytest

from lightsecagg.crypto.entropy import random_order
from lightsecagg.errors import ParameterError
from lightsecagg_lab.schemes.sharing_graph import (
    GraphParameters,
    SharingGraph,
    _disconnection_bound,
    find_graph_parameters,
    leak_bound,
    recoverable_threshold,
)

REGULAR = [(N, k) for N in range(2, 12) for k in range(1, N) if N * k % 2 == 0]


def is_connected(graph: SharingGraph, members: set[int]) -> bool:
    """Whether the subgraph on `members` is connected."""
    reached, frontier = set(), {min(members)}
    while frontier:
        reached |= frontier
        frontier = {n for c in frontier for n in graph.neighbours(c)} & members - reached
    return reached == members


@pytest.mark.parametrize(("N", "k"), REGULAR)
def test_graphs_are_regular_symmetric_and_without_loops(N: int, k: int) -> None:
    clients = [10 * i for i in range(N)]
    graph = SharingGraph(random_order(clients), k)
    for client in clients:
        neighbours = graph.neighbours(client)
        assert len(set(neighbours)) == len(neighbours) == k
        assert client not in neighbours
        assert all(client in graph.neighbours(neighbour) for neighbour in neighbours)


@pytest.mark.parametrize("N", [2, 5, 6])
def test_secagg_is_the_complete_graph(N: int) -> None:
    graph = SharingGraph(tuple(range(N)), N - 1)
    assert all(graph.neighbours(i) == tuple(j for j in range(N) if j != i) for i in range(N))


@pytest.mark.parametrize(("N", "k"), [(N, k) for N, k in REGULAR if k >= 2 and N <= 9])
def test_a_graph_of_degree_k_stays_connected_without_any_k_minus_1(N: int, k: int) -> None:
    graph = SharingGraph(tuple(range(N)), k)
    for removed in combinations(range(N), k - 1):
        assert is_connected(graph, set(range(N)) - set(removed))


@pytest.mark.parametrize(("order", "degree"), [((0, 1, 2), 0), ((0, 1, 2), 3), ((0, 1, 1, 2), 2)])
def test_impossible_graphs_are_refused(order: tuple[int, ...], degree: int) -> None:
    with pytest.raises(ParameterError):
        SharingGraph(order, degree)


def test_odd_degree_with_an_odd_number_of_clients_is_refused() -> None:
    with pytest.raises(ParameterError, match="even"):
        SharingGraph(tuple(range(7)), 3)


def test_strangers_have_no_neighbours() -> None:
    with pytest.raises(ParameterError, match="client 9"):
        SharingGraph(tuple(range(4)), 3).neighbours(9)


def replay(*draws: bytes) -> Callable[[int], bytes]:
    remaining = list(draws)
    return lambda count: remaining.pop(0)


def test_S17_every_order_is_equally_likely() -> None:
    """Enumerate all ranks of four keys: each permutation comes from exactly as many of them."""
    seen: Counter[tuple[int, ...]] = Counter()
    for ranks in product(range(4), repeat=4):
        drawn = b"".join(rank.to_bytes(16, "big") for rank in ranks)
        try:
            seen[random_order([5, 6, 7, 8], replay(drawn))] += 1
        except IndexError:  # equal keys: asked for another draw
            assert len(set(ranks)) < 4
    assert set(seen) == set(permutations([5, 6, 7, 8]))
    assert set(seen.values()) == {1}


def test_S17_equal_keys_are_drawn_again() -> None:
    first = bytes(32)
    second = b"\x02" * 16 + b"\x01" * 16
    assert random_order([3, 4], replay(first, second)) == (4, 3)


def test_the_order_is_fresh_every_time() -> None:
    clients = range(50)
    assert sorted(random_order(clients)) == list(clients)
    assert random_order(clients) != random_order(clients)


# -- the (k, t) finder ---------------------------------------------------------------------------


def failures(N: int, T: int, D: int, k: int, t: int) -> tuple[Fraction, Fraction]:
    """Exact probabilities that privacy or recovery fails, over all fates of a fixed ring."""
    graph = SharingGraph(tuple(range(N)), k)
    neighbours = [set(graph.neighbours(i)) for i in range(N)]
    exposed = unrecoverable = 0
    for corrupt in map(set, combinations(range(N), T)):
        honest = set(range(N)) - corrupt
        known = any(len(neighbours[i] & corrupt) >= t for i in honest)
        for dropped in map(set, combinations(honest, D)):
            exposed += known or not is_connected(graph, honest - dropped)
            unrecoverable += any(len(neighbours[i] - dropped) < t for i in set(range(N)) - dropped)
    total = comb(N, T) * comb(N - T, D)
    return Fraction(exposed, total), Fraction(unrecoverable, total)


@pytest.mark.parametrize(
    ("N", "T", "D"), [(8, 2, 1), (9, 2, 1), (9, 1, 2), (10, 3, 1), (10, 2, 2), (11, 1, 1)]
)
@pytest.mark.parametrize(("sigma", "eta"), [(1, 0), (1, 1), (2, 1), (3, 3)])
def test_S15_parameters_keep_their_promise(N: int, T: int, D: int, sigma: int, eta: int) -> None:
    """Dropouts among the honest are the worst for connectivity; both bounds must hold."""
    found = find_graph_parameters(N, T, D, sigma, eta)
    exposed, unrecoverable = failures(N, T, D, found.degree, found.threshold)
    assert exposed < Fraction(1, 2**sigma)
    assert unrecoverable < Fraction(1, 2**eta)


@pytest.mark.parametrize(("N", "T", "D"), [(200, 20, 20), (400, 40, 80), (200, 100, 60)])
def test_S15_parameters_hold_for_every_ring_that_dropouts_leave(N: int, T: int, D: int) -> None:
    """Clients that vanish before the ring is drawn leave a smaller one, odd or even."""
    found = find_graph_parameters(N, T, D)
    assert found.degree % 2 == 0
    for n in range(N - D, N + 1):
        degree = min(found.degree, n - 1)
        bound = leak_bound(n, T, D - (N - n), degree, found.threshold)
        assert bound < Fraction(1, 2**40)


@pytest.mark.parametrize(("N", "T", "D", "k", "t"), [(8, 2, 1, 4, 2), (9, 3, 2, 4, 3)])
def test_S15_the_bound_on_leaks_is_a_bound(N: int, T: int, D: int, k: int, t: int) -> None:
    exposed, _ = failures(N, T, D, k, t)
    assert 0 < exposed <= leak_bound(N, T, D, k, t)


def test_S15_graphs_that_protect_whatever_the_ring() -> None:
    assert leak_bound(20, 3, 4, degree=8, threshold=4) == 0
    assert leak_bound(20, 3, 4, degree=7, threshold=4) > 0
    assert leak_bound(20, 3, 4, degree=8, threshold=3) > 0


def test_S15_the_finder_makes_use_of_sparseness() -> None:
    """A control for the test above, which a finder of complete graphs would pass as well."""
    assert find_graph_parameters(10, 2, 2, 1, 1).degree < 9


@pytest.mark.parametrize(("N", "k"), [(N, k) for N, k in REGULAR if k >= 2 and 5 <= N <= 10])
def test_the_bound_on_disconnection_is_a_bound(N: int, k: int) -> None:
    graph = SharingGraph(tuple(range(N)), k)
    for removed in range(N - 1):
        broken = sum(
            not is_connected(graph, set(range(N)) - set(gone))
            for gone in combinations(range(N), removed)
        )
        assert Fraction(broken, comb(N, removed)) <= _disconnection_bound(N, removed, k)


def test_the_bound_on_disconnection_bites() -> None:
    """Of the 20 ways to take 3 clients from a ring of 6, only the 6 in a row leave it connected."""
    assert _disconnection_bound(6, 3, 2) >= Fraction(14, 20)
    assert _disconnection_bound(200, 120, 94) < Fraction(1, 2**40)
    assert _disconnection_bound(200, 120, 40) > Fraction(1, 2**40)


@pytest.mark.parametrize(
    ("D", "degree", "threshold"), [(20, 104, 84), (60, 162, 101), (98, 199, 101)]
)
def test_parameters_at_200_clients(D: int, degree: int, threshold: int) -> None:
    """Half of the clients corrupt, sigma = 40, eta = 30."""
    assert find_graph_parameters(200, 100, D) == GraphParameters(degree, threshold)


def test_degrees_grow_slowly_with_the_number_of_clients() -> None:
    """The point of SecAgg+: with 5 % corrupt and 5 % dropped, ten times the clients."""
    small = find_graph_parameters(1000, 50, 50)
    large = find_graph_parameters(10_000, 500, 500)
    assert (small.degree, large.degree) == (34, 38)


def test_no_graph_has_one_neighbour_per_client() -> None:
    """Without corrupt or dropped clients a matching would satisfy the tails, but not connect."""
    assert find_graph_parameters(1000, 0, 0) == GraphParameters(2, 1)


def test_few_clients_get_the_complete_graph() -> None:
    assert find_graph_parameters(10, 5, 3) == GraphParameters(9, 6)
    assert find_graph_parameters(2, 0, 0) == GraphParameters(1, 1)


@pytest.mark.parametrize(
    ("N", "T", "D", "sigma", "eta"),
    [
        (10, 5, 4, 40, 30),
        (10, -1, 2, 40, 30),
        (10, 2, -1, 40, 30),
        (10, 2, 2, -1, 30),
        (1, 0, 0, 1, 1),
    ],
)
def test_S15_impossible_demands_are_refused(N: int, T: int, D: int, sigma: int, eta: int) -> None:
    with pytest.raises(ParameterError):
        find_graph_parameters(N, T, D, sigma, eta)


@pytest.mark.parametrize(("N", "D", "k"), [(8, 2, 4), (9, 3, 6), (7, 0, 3), (10, 5, 4)])
@pytest.mark.parametrize("eta", [0, 2, 5])
def test_the_threshold_that_survives_is_the_largest_by_enumeration(
    N: int, D: int, k: int, eta: int
) -> None:
    """A survivor's k neighbours are a uniform sample of the others; union bound over N clients."""
    samples = list(combinations(range(N - 1), k))
    alive = [sum(member >= D for member in sample) for sample in samples]
    fits = [
        t
        for t in range(k + 1)
        if Fraction(N * sum(count < t for count in alive), len(samples)) < Fraction(1, 2**eta)
    ]
    assert recoverable_threshold(N, D, k, eta) == max(fits)

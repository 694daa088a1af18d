"""Who masks with whom: the complete graph is SecAgg, a random Harary graph is SecAgg+.

SecAgg+ (Bell, Bonawitz, Gascón, Lepoint, Raykova, CCS 2020) lets each client share its secrets and
agree on masks with k neighbours instead of all. Clients are placed on a ring by a random
permutation; neighbours are the next and previous floor(k / 2) clients, and for odd k the client
opposite as well (N is even then). Any t of its k neighbours can rebuild a client's secret.

`find_graph_parameters` chooses (k, t). The permutation must be unknown to whoever chooses the
corrupt and the dropped clients, so SecAgg+ is for the honest-but-curious server only.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, comb, perm

from lightsecagg.errors import ParameterError
from lightsecagg.protocol.policy import GRAPH_SECURITY


@dataclass(frozen=True, slots=True)
class SharingGraph:
    """A k-regular Harary graph of clients, given by their order on a ring; k = N - 1: complete."""

    order: tuple[int, ...]
    """Client ids in the order of the ring."""
    degree: int
    """k, the neighbours of each client."""

    def __post_init__(self) -> None:
        N = len(self.order)
        if len(set(self.order)) != N:
            raise ParameterError("a client stands on the ring twice")
        if not 1 <= self.degree < N:
            raise ParameterError(f"degree {self.degree} must be in [1, {N - 1}] for {N} clients")
        if self.degree * N % 2:
            raise ParameterError(
                f"{N} clients cannot have {self.degree} neighbours each: "
                "one of the two numbers must be even"
            )

    def neighbours(self, client: int) -> tuple[int, ...]:
        """The k neighbours of `client`, by ascending id."""
        if client not in self.order:
            raise ParameterError(f"client {client} is not in the graph")
        N, position = len(self.order), self.order.index(client)
        half = self.degree // 2
        steps = {*range(1, half + 1), *(N - step for step in range(1, half + 1))}
        if self.degree % 2:
            steps.add(N // 2)
        return tuple(sorted(self.order[(position + step) % N] for step in steps))


@dataclass(frozen=True, slots=True)
class GraphParameters:
    """What `find_graph_parameters` found."""

    degree: int
    """k"""
    threshold: int
    """t, the shares that rebuild a secret."""


def find_graph_parameters(
    clients: int, privacy: int, dropouts: int, sigma: int = GRAPH_SECURITY, eta: int = 30
) -> GraphParameters:
    """The smallest k, and the smallest t for it, that make SecAgg+ safe and correct.

    Of N clients, T are corrupt and D drop; both sets are fixed before the ring is drawn, uniformly.
    All probabilities are over that draw, computed in integers from hypergeometric tails. Some of
    the D may drop before the ring is drawn: then the ring is smaller and the corrupt weigh more.
    What is found holds for every ring of N - D to N clients; k is even, as rings may be odd.

    Privacy, all together less than 2^-sigma:

    * *secrets*: some client has t or more corrupt neighbours, so that the adversary rebuilds its
      secrets. Union bound over N clients; among the at least N - D - 1 others of an honest one, T
      are corrupt, and its k neighbours are a uniform sample of them.
    * *connectivity*: the graph falls apart once the T + D corrupt and dropped clients are removed,
      so that the server learns the sums of its parts. On the ring that takes two disjoint gaps of
      floor(k / 2) removed clients in a row each (one gap leaves a path). Union bound over the
      N (N - 2 floor(k / 2) + 1) / 2 pairs of gaps; impossible if k > T + D. Worst for N clients.

    Correctness, less than 2^-eta:

    * *recovery*: some client has fewer than t surviving neighbours. Union bound over N clients;
      among the N - 1 others of a survivor, N - D - 1 survive. Worst for N clients.

    The complete graph always satisfies all of it, with t = T + 1, because T + D <= N - 2.

    - `clients` N >= 2, `privacy` T >= 0, `dropouts` D >= 0, T + D <= N - 2.
    """
    N, T, D = clients, privacy, dropouts
    if min(T, D, sigma, eta) < 0:
        raise ParameterError(
            f"privacy T = {T}, dropouts D = {D}, sigma = {sigma} and eta = {eta} must be >= 0"
        )
    if T + D > N - 2:
        raise ParameterError(
            f"T + D = {T + D} must be at most N - 2 = {N - 2}: fewer than T + 2 clients "
            "would be left to hide among; lower the privacy or the dropouts"
        )
    corrupt = _Hypergeometric(population=N - D - 1, marked=T)
    surviving = _Hypergeometric(population=N - 1, marked=N - D - 1)
    for k in range(2, N - 1, 2):  # one neighbour each would leave separate pairs
        left = Fraction(1, 2**sigma) - _disconnection_bound(N, T + D, k)
        if left <= 0:
            continue
        t = corrupt.smallest_rare_excess(min(k, N - D - 1), left / N)
        if t <= surviving.largest_rare_shortfall(k, Fraction(1, N * 2**eta)):
            return GraphParameters(degree=k, threshold=t)
    return GraphParameters(degree=N - 1, threshold=T + 1)


def recoverable_threshold(clients: int, dropouts: int, degree: int, eta: int = 20) -> int:
    """The largest t that k neighbours can keep, if D clients drop, but for less than 2^-eta.

    Correctness alone, as in `find_graph_parameters`; it says nothing of privacy. 0: none.
    """
    surviving = _Hypergeometric(population=clients - 1, marked=clients - dropouts - 1)
    return surviving.largest_rare_shortfall(degree, Fraction(1, clients * 2**eta))


def leak_bound(clients: int, privacy: int, dropouts: int, degree: int, threshold: int) -> Fraction:
    """Bound on the probability that a random graph with this (k, t) fails to protect somebody.

    The two privacy events of `find_graph_parameters`: secrets and connectivity. Zero if t > T and
    k > T + D, whatever the ring.
    """
    corrupt = _Hypergeometric(population=clients - 1, marked=privacy)
    secrets = clients * corrupt.excess(degree, threshold)
    return secrets + _disconnection_bound(clients, privacy + dropouts, degree)


def _disconnection_bound(clients: int, removed: int, degree: int) -> Fraction:
    """Bound on the probability that a random Harary graph falls apart without `removed` clients."""
    gaps = 2 * (degree // 2)
    if degree > removed:  # a Harary graph of degree k stays connected without any k - 1 clients
        return Fraction(0)
    pairs = Fraction(clients * (clients - gaps + 1), 2)
    return pairs * Fraction(perm(removed, gaps), perm(clients, gaps))


class _Hypergeometric:
    """How many of `marked` members, out of `population`, are in a uniform sample; exact tails."""

    def __init__(self, population: int, marked: int) -> None:
        self._population = population
        self._marked = _Binomials(marked)
        self._unmarked = _Binomials(population - marked)

    def _ways(self, sample: int, count: int) -> int:
        """How many samples hold exactly `count` marked members."""
        return self._marked[count] * self._unmarked[sample - count]

    def excess(self, sample: int, t: int) -> Fraction:
        """P[at least t marked in the sample]."""
        tail = sum(self._ways(sample, count) for count in range(t, sample + 1))
        return Fraction(tail, comb(self._population, sample))

    def smallest_rare_excess(self, sample: int, limit: Fraction) -> int:
        """The smallest t such that P[at least t marked in the sample] < limit."""
        allowed = ceil(limit * comb(self._population, sample))
        t, tail = sample + 1, 0
        while t > 0:
            tail += self._ways(sample, t - 1)
            if tail >= allowed:
                break
            t -= 1
        return t

    def largest_rare_shortfall(self, sample: int, limit: Fraction) -> int:
        """The largest t <= sample such that P[fewer than t marked in the sample] < limit."""
        allowed = ceil(limit * comb(self._population, sample))
        t, tail = 0, 0
        while t < sample:
            tail += self._ways(sample, t)
            if tail >= allowed:
                break
            t += 1
        return t


class _Binomials:
    """comb(n, 0), comb(n, 1), ... by recurrence, as far as they are asked for."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._row = [1]

    def __getitem__(self, j: int) -> int:
        while len(self._row) <= j:
            i = len(self._row)
            self._row.append(self._row[-1] * (self._n - i + 1) // i)
        return self._row[j]

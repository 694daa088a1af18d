"""Who is invited when more are ready than a round takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_federation import Federation

from lightsecagg.drivers.federation.selection import choose
from memory_transport import MemoryServer

READY = range(40)


def draw(number: int, **changes: Any) -> list[int]:
    arguments: dict[str, Any] = {"sampling": "random", "seed": 7, "invited": {}}
    return choose(READY, 10, number, **(arguments | changes))


def test_lots_are_drawn_anew_in_every_round_and_favour_nobody() -> None:
    counts = Counter(client for number in range(1000) for client in draw(number))
    assert set(counts) == set(READY)
    assert sum(counts.values()) == 10_000
    # 250 are expected; twelve standard deviations are no bad luck, and the seed is fixed.
    assert all(90 < count < 410 for count in counts.values())


def test_the_same_seed_draws_the_same_clients_after_a_restart() -> None:
    assert [draw(n) for n in range(5)] == [draw(n) for n in range(5)]
    assert [draw(n) for n in range(5)] != [draw(n, seed=8) for n in range(5)]


def test_fair_invites_everybody_before_anybody_again() -> None:
    invited: dict[int, int] = {}
    for cycle in range(5):
        seen: list[int] = []
        for number in range(4 * cycle + 1, 4 * cycle + 5):
            chosen = draw(number, sampling="fair", invited=invited)
            invited |= dict.fromkeys(chosen, number)
            seen += chosen
        assert sorted(seen) == list(READY)


@pytest.mark.parametrize("sampling", ["random", "fair"])
def test_S42_clients_that_are_bound_to_a_set_come_first(sampling: str) -> None:
    """Also those that were invited last; one that is away takes nobody's place."""
    bound = [3, 17, 39, 99]
    invited = dict.fromkeys(bound, 50)
    for number in range(51, 71):
        chosen = draw(number, sampling=sampling, invited=invited, first=bound)
        assert {3, 17, 39} < set(chosen)
        assert len(chosen) == len(set(chosen)) == 10


def test_few_clients_are_all_invited_in_order() -> None:
    assert choose([5, 2, 9], 4, 1, sampling="random", seed=0, invited={}) == [2, 5, 9]


@pytest.mark.parametrize("sampling", ["random", "fair"])
def test_a_federation_of_more_clients_than_a_round_takes_uses_all(
    tmp_path: Path, sampling: str
) -> None:
    """Ten are admitted, five are in a round; the five with the lowest ids were it for ever."""
    parameters = {"clients": 5, "privacy": 1, "dropouts": 1}
    federation = Federation(tmp_path, 10)
    federation.aggregation = federation.aggregation.model_copy(update=parameters)
    # The first round waits until all that are admitted are there, not only N of them.
    rounds = {"min_clients": 5, "settle": 60, "sampling": sampling}
    records = asyncio.run(federation.run(number=4, **rounds))
    assert [len(record.invited) for record in records] == [5] * 4
    assert [record.included for record in records] == [record.invited for record in records]
    assert any(record.invited != [0, 1, 2, 3, 4] for record in records)
    if sampling == "fair":
        first, second, third, fourth = (set(record.invited) for record in records)
        assert first | second == third | fourth == set(range(10))
    # A server that was restarted knows who has had its turn.
    federation.transport = MemoryServer(range(10))
    (fifth,) = asyncio.run(federation.run(number=5, **rounds))
    if sampling == "fair":
        assert set(fifth.invited) == third

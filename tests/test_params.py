"""Parameters: what is refused, with which words, and what the accepted ones imply (S01)."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import flint
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightsecagg.errors import ParameterError
from lightsecagg.params import (
    DEFAULT_MODULUS,
    PAPER_MODULUS,
    Parameters,
    ShareMode,
    ThreatModel,
    check_modulus,
    is_prime,
)

MALICIOUS = ThreatModel.MALICIOUS_SERVER


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"survivors": 4, "privacy": 4}, "survivors U = 4 must exceed privacy T = 4"),
        ({"survivors": 3, "privacy": 4}, "survivors U = 3 must exceed privacy T = 4"),
        ({"survivors": 9, "dropouts": 2}, "only 8 remain"),
        ({"survivors": 11}, "survivors U = 11 is out of reach"),
        ({"privacy": 7, "dropouts": 2}, "fewer than T + 2 = 9 protects nobody"),
        ({"clients": 1, "privacy": 0, "dropouts": 0}, "clients N = 1 must be at least 2"),
        ({"privacy": -1}, "privacy T = -1 must be at least 0"),
        ({"dropouts": -1}, "dropouts D = -1 must be at least 0"),
        ({"survivors": -1}, "survivors U = -1 must be at least 0"),
        ({"dropouts": 10}, "dropouts D = 10 of N = 10 clients leave nobody"),
        ({"clients": 10.0}, "clients N = 10.0 must be an integer"),
        ({"privacy": True}, "privacy T = True must be an integer"),
        ({"modulus": 2**31 - 2**19 + 3}, "is not prime"),
        ({"modulus": 1 << 16}, "modulus q = 65536 is not prime"),
        ({"modulus": 2**32 + 15}, "must be a prime below 2^32"),
        ({"modulus": -5}, "modulus q = -5 must be at least 3"),
        ({"modulus": 2}, "modulus q = 2 must be at least 3"),
        ({"modulus": 7}, "modulus q = 7 must exceed the number of clients N = 10"),
        ({"clients": 7, "modulus": 7}, "modulus q = 7 must exceed the number of clients N = 7"),
        ({"threat_model": MALICIOUS, "privacy": 4, "dropouts": 3}, "needs T + 2D < N"),
        ({"threat_model": "nobody"}, "'nobody' is unknown; choose one of honest-but-curious"),
        ({"share_mode": "fast"}, "'fast' is unknown; choose one of paper, seeded"),
    ],
)
def test_S01_impossible_parameters_are_refused(arguments: dict[str, Any], words: str) -> None:
    acceptable: dict[str, Any] = {"clients": 10, "privacy": 3, "dropouts": 2}
    Parameters(**acceptable)
    with pytest.raises(ParameterError) as refusal:
        Parameters(**acceptable | arguments)
    assert words in str(refusal.value)


sizes = st.integers(-2, 14)


@given(sizes, sizes, sizes, sizes, st.sampled_from(ThreatModel))
def test_S01_exactly_the_feasible_parameters_are_accepted(
    N: int, T: int, D: int, U: int, threat_model: ThreatModel
) -> None:
    assume(U != 0)  # 0 stands for N - D
    feasible = N >= 2 and T >= 0 and D >= 0 and U > T and max(U, T + 2) <= N - D
    if threat_model is MALICIOUS:
        feasible = feasible and T + 2 * D < N
    try:
        Parameters(N, T, D, U, threat_model, modulus=17)
    except ParameterError:
        assert not feasible
    else:
        assert feasible


@given(st.data())
def test_S01_quorums_overlap_in_an_honest_client(data: st.DataObject) -> None:
    N = data.draw(st.integers(2, 300))
    D = data.draw(st.integers(0, (N - 2) // 2))
    T = data.draw(st.integers(0, min(N - 2 * D - 1, N - D - 2)))
    parameters = Parameters(N, T, D, threat_model=MALICIOUS)
    m = parameters.quorum
    assert 2 * m - N > T  # two quorums share more than T clients
    assert 2 * (m - 1) - N <= T  # and no smaller quorum would do
    assert m <= N - D
    assert parameters.minimum == max(parameters.survivors, m, T + 2)


def test_defaults_are_the_cheapest_survivors_and_seeds() -> None:
    parameters = Parameters(clients=10, privacy=3, dropouts=2)
    assert (parameters.survivors, parameters.pieces) == (8, 5)
    assert parameters.quorum == 0
    assert parameters.minimum == 8
    assert parameters.share_mode is ShareMode.SEEDED
    assert parameters.modulus == DEFAULT_MODULUS


def test_the_sum_covers_at_least_two_honest_clients() -> None:
    assert Parameters(clients=6, privacy=3, dropouts=1, survivors=4).minimum == 5


def test_names_are_accepted_where_a_configuration_file_gives_them() -> None:
    parameters = Parameters(9, 3, 2, threat_model="malicious-server", share_mode="paper")  # type: ignore[arg-type]
    assert parameters.threat_model is MALICIOUS
    assert parameters.share_mode is ShareMode.PAPER


def test_parameters_are_frozen() -> None:
    parameters = Parameters(10, 3, 2)
    with pytest.raises(FrozenInstanceError):
        parameters.privacy = 0  # type: ignore[misc]


@pytest.mark.parametrize(("dimension", "length"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_share_length_is_padded_upwards(dimension: int, length: int) -> None:
    assert Parameters(10, 3, 2).share_length(dimension) == length


def test_share_length_of_nothing_is_refused() -> None:
    with pytest.raises(ParameterError, match="dimension d = 0"):
        Parameters(10, 3, 2).share_length(0)


def test_both_fields_are_prime_as_documented() -> None:
    for modulus in (DEFAULT_MODULUS, PAPER_MODULUS):
        check_modulus(modulus)
    assert DEFAULT_MODULUS - 1 == 2**19 * 3**2 * 5 * 7 * 13
    assert not any(is_prime(number) for number in range(PAPER_MODULUS + 1, 2**32))


def test_is_prime_equals_a_sieve_below_10000() -> None:
    sieve = [False, False] + [True] * 9998
    for k in range(2, 100):
        if sieve[k]:
            sieve[k * k :: k] = [False] * len(sieve[k * k :: k])
    assert [is_prime(k) for k in range(10000)] == sieve


# A Carmichael number, and the least strong pseudoprimes to bases 2; 2, 3; ... ; 2, 3, 5, 7.
@pytest.mark.parametrize("composite", [561, 2047, 1373653, 25326001, 3215031751])
def test_strong_pseudoprimes_are_composite(composite: int) -> None:
    assert not is_prime(composite)


@given(st.integers(0, 2**32 - 1))
def test_is_prime_equals_flint(number: int) -> None:
    assert is_prime(number) == bool(flint.fmpz(number).is_prime())

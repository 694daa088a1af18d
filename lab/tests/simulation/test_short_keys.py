"""Short keys in simulated rounds: every sum is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightsecagg.params import Decoding, Parameters, ShareMode, ThreatModel
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.faults import Drop
from lightsecagg_lab.simulation.scenario import Outcome, Scenario, run

MALICIOUS, SHORT, EXACT = ThreatModel.MALICIOUS_SERVER, ShareMode.SHORT_KEY, Decoding.EXACT
KEY_LENGTH = 2048


def simulated(outcome: dict[str, Any]) -> Outcome:
    (result,) = run(Scenario(**outcome))
    return result


@pytest.mark.parametrize("survivors", [16, 17])
def test_S49_shares_of_a_key_that_travel_as_seeds_or_whole_give_the_same_sum(
    survivors: int,
) -> None:
    """Of 2048 elements in 16 pieces, some shares travel as seeds; in 17 pieces, none."""
    outcome = simulated(
        {
            "protocol": ProtocolName.LIGHTSECAGG,
            "parameters": Parameters(18, 0, 1, survivors, MALICIOUS, SHORT),
            "dimension": 9,
            "decoding": EXACT,
        }
    )
    assert outcome.report.exact is True


@pytest.mark.parametrize("seed", range(6))
def test_S49_random_rounds_with_dropouts_in_every_phase_are_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    N = int(rng.integers(6, 31))
    T = int(rng.integers(0, N // 3))
    D = int(rng.integers(1, (N - T - 1) // 2))
    U = int(rng.integers(T + 1, N - D + 1))
    phases = rng.choice(["advertise", "share", "upload", "agree", "recover"], D)
    moments = rng.choice(["before", "during", "after"], D)
    drops = tuple(Drop.parse(f"{p}:{m}=1") for p, m in zip(phases, moments, strict=True))
    outcome = simulated(
        {
            "protocol": ProtocolName.LIGHTSECAGG,
            "parameters": Parameters(N, T, D, U, MALICIOUS, SHORT),
            "dimension": int(rng.integers(1, 3 * KEY_LENGTH)),
            "decoding": EXACT,
            "drops": drops,
            "seed": seed,
        }
    )
    assert outcome.report.exact is True, outcome.report

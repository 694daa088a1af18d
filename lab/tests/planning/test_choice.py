"""The choice of a plan: the fastest protected protocol, named with the reason, ours or not."""

from __future__ import annotations

from lightsecagg.params import ThreatModel
from lightsecagg_lab.planning import Federation, Network
from lightsecagg_lab.planning.choice import choose, decisive_phase
from lightsecagg_lab.planning.planner import SEEDED, SHORT_KEY, plan

CNN = 1_206_590


def test_a_slow_recovery_speaks_for_lightsecagg() -> None:
    found = choose(plan(Federation(200, 100, 60, CNN, training_seconds=20.0)))
    assert found.protocol == SEEDED
    assert found.rival is not None
    assert found.rival.startswith("secagg")
    assert found.decisive == "recovery"
    assert not found.alike
    assert str(found).startswith(f"choose {SEEDED}, because its round takes ")
    assert f"; {found.rival} takes " in found.because
    assert found.because.split("short keys")[0].endswith("longer in the recovery phase")


def test_a_slow_link_of_the_server_and_long_shares_speak_for_another() -> None:
    slow = Network(server_bandwidth=1000.0)
    made = plan(Federation(200, 100, 98, CNN, slow, training_seconds=4.0))
    found = choose(made)
    assert found.protocol in ("secagg", "secagg+")
    assert found.rival == SEEDED
    assert found.decisive == "offline"
    assert found.seconds == min(
        costs.round_seconds for name, costs in made.protocols.items() if name.startswith("secagg")
    )
    assert found.document()["rival_over_choice"] > 10


def test_where_training_takes_most_of_the_round_either_will_do() -> None:
    found = choose(plan(Federation(20, 5, 2, 100_000, training_seconds=60.0)))
    assert found.protocol == SEEDED
    assert found.alike
    assert found.because.endswith("so either will do")


def test_against_a_malicious_server_only_those_with_such_a_mode_are_compared() -> None:
    federation = Federation(40, 10, 8, 1000, threat_model=ThreatModel.MALICIOUS_SERVER)
    made = plan(federation)
    found = choose(made)
    assert found.rival is None or found.rival in made.protocols
    assert found.protocol in made.protocols


def test_short_keys_are_named_where_they_are_faster_and_never_chosen() -> None:
    slow = choose(plan(Federation(200, 100, 98, CNN)))
    assert slow.protocol != SHORT_KEY
    assert "short keys, which are experimental" in str(slow)
    assert "short keys" not in str(choose(plan(Federation(20, 5, 2, 100_000))))
    # A little faster is enough where the plan speaks for another protocol than ours.
    federation = Federation(50, 12, 12, 1_000_000, threat_model=ThreatModel.MALICIOUS_SERVER)
    found = choose(plan(federation))
    assert found.protocol == "secagg"
    assert found.short_key is not None
    assert 1 < found.seconds / found.short_key < 1.2


def test_the_decisive_phase_is_where_most_is_gained() -> None:
    fast, slow = {"offline": 2.0, "recovery": 0.1}, {"offline": 1.0, "recovery": 9.1}
    assert decisive_phase(fast, slow) == ("recovery", 9.0)

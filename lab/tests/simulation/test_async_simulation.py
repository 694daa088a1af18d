"""The asynchronous simulation: exact buffers, honest figures, schedules that repeat themselves."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.errors import Aborted, LightSecAggError, ParameterError
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer, quantizer_of_scale
from lightsecagg.field.staleness import Staleness, StalenessTable, polynomial
from lightsecagg.params import DEFAULT_MODULUS, PAPER_MODULUS, Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.schemes.fedbuff import FedBuffServer
from lightsecagg_lab.simulation.async_fedbuff import PlainFederation
from lightsecagg_lab.simulation.async_federation import Flush
from lightsecagg_lab.simulation.async_lightsecagg import AsyncConfig, ProtectedFederation
from lightsecagg_lab.simulation.asynchronous import AsyncReport, simulate_async
from lightsecagg_lab.simulation.schedule import (
    Event,
    EventQueue,
    Finished,
    Fleet,
    Left,
    Returned,
    UniformStaleness,
)
from lightsecagg_lab.simulation.workload import RandomVectors

DIMENSION = 29
HONEST, MALICIOUS = ThreatModel.HONEST_BUT_CURIOUS, ThreatModel.MALICIOUS_SERVER


def make_config(
    clients: int = 10,
    privacy: int = 2,
    dropouts: int = 3,
    buffer_size: int = 5,
    threat_model: ThreatModel = HONEST,
    share_mode: ShareMode = ShareMode.SEEDED,
    modulus: int = DEFAULT_MODULUS,
    departures: float = 0.0,
    strict: bool = False,
) -> AsyncConfig:
    table = StalenessTable.from_function(polynomial(1.0), 64, 6)
    return AsyncConfig(
        parameters=Parameters(
            clients,
            privacy,
            dropouts,
            threat_model=threat_model,
            share_mode=share_mode,
            modulus=modulus,
        ),
        buffering=Buffering(table, max_updates=buffer_size, strict=strict),
        quantizer=Quantizer(PrimeField(modulus), 1.0, buffer_size, max_weight=table.max_weight),
        dimension=DIMENSION,
        buffer_size=buffer_size,
        departures=departures,
    )


def generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng((seed, stream))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    threat_model=st.sampled_from([HONEST, MALICIOUS]),
    share_mode=st.sampled_from([ShareMode.PAPER, ShareMode.SEEDED]),
    modulus=st.sampled_from([DEFAULT_MODULUS, PAPER_MODULUS]),
    dropout=st.sampled_from([0.0, 0.1, 0.3]),
    departures=st.sampled_from([0.0, 0.1, 0.3]),
    flush_after=st.sampled_from([None, 10.0]),
)
def test_every_recovered_buffer_is_exact(
    seed: int,
    threat_model: ThreatModel,
    share_mode: ShareMode,
    modulus: int,
    dropout: float,
    departures: float,
    flush_after: float | None,
) -> None:
    """R30: random speeds, stragglers, dropouts, returns and departures in flight."""
    federation = ProtectedFederation(
        make_config(
            threat_model=threat_model,
            share_mode=share_mode,
            modulus=modulus,
            departures=departures,
        ),
        generator(seed, 2),
    )
    fleet = Fleet(dropout=dropout, absence=20.0, straggling=0.2)
    report = simulate_async(
        federation,
        RandomVectors(DIMENSION, seed=seed),
        EventQueue(10, 4 * DIMENSION, fleet, generator(seed, 1)),
        4,
        max_staleness=6,
        flush_after=flush_after,
    )
    assert report.recovered == 4
    assert report.exact is True
    assert [flush.time for flush in report.flushes] == list(range(len(report.flushes)))


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a server that adds one to a coordinate is caught."""
    from lightsecagg.protocol import jobs as module

    right = module.Unmask.result

    def wrong(job: module.Unmask) -> Any:
        total = right(job).copy()
        total[0] ^= 1
        return total

    monkeypatch.setattr(module.Unmask, "result", wrong)
    federation = ProtectedFederation(make_config(), generator(0, 2))
    schedule = UniformStaleness(10, 6, generator(0, 1))
    report = simulate_async(federation, RandomVectors(DIMENSION), schedule, 2, max_staleness=6)
    assert report.exact is False


class Remember(RandomVectors):
    """Random vectors that note every mean."""

    def __init__(self) -> None:
        super().__init__(DIMENSION)
        self.means: list[NDArray[np.float64]] = []

    def advance(self, mean: NDArray[np.float64] | None) -> None:
        super().advance(mean)
        assert mean is not None
        self.means.append(mean)


@pytest.mark.parametrize("name", list(Staleness))
def test_protected_and_plain_buffers_hold_the_same_updates(name: Staleness) -> None:
    """Same seeds, same buffers; the means differ by rounding of updates and weights only."""
    function = name.function()
    table = StalenessTable.from_function(function, 2**12, 6)
    runs: list[tuple[AsyncReport, Remember]] = []
    config = make_config(modulus=PAPER_MODULUS)
    protected = AsyncConfig(
        parameters=config.parameters,
        buffering=Buffering(table, max_updates=5, strict=False),
        quantizer=Quantizer(PrimeField(PAPER_MODULUS), 1.0, 5, max_weight=table.max_weight),
        dimension=DIMENSION,
        buffer_size=5,
    )
    for federation in (
        ProtectedFederation(protected, generator(3, 2)),
        PlainFederation(10, FedBuffServer(DIMENSION, 5, function, 6)),
    ):
        workload = Remember()
        schedule = UniformStaleness(10, 6, generator(3, 1))
        report = simulate_async(federation, workload, schedule, 12, max_staleness=6)
        runs.append((report, workload))
    (ours, secure), (theirs, plain) = runs
    assert [(f.owners, f.staleness) for f in ours.flushes] == [
        (f.owners, f.staleness) for f in theirs.flushes
    ]
    assert theirs.exact is None
    assert ours.exact is True
    for one, other in zip(secure.means, plain.means, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


def test_runs_repeat_themselves() -> None:
    means = []
    for _ in range(2):
        workload = Remember()
        federation = ProtectedFederation(make_config(), generator(1, 2))
        schedule = UniformStaleness(10, 6, generator(1, 1))
        simulate_async(federation, workload, schedule, 3, max_staleness=6)
        means.append(np.stack(workload.means))
    assert np.array_equal(means[0], means[1])


def test_uploads_never_wait_for_the_offline_phase() -> None:
    federation = ProtectedFederation(make_config(), generator(0, 2))
    assert all(client.stock == 2 for client in federation.clients.values())
    federation.publish(bytes(32), 0)
    federation.upload(0, np.zeros(DIMENSION), 0, bytes(32))
    assert federation.clients[0].stock == 2


def test_costs_are_those_of_the_bytes() -> None:
    federation = ProtectedFederation(make_config(), generator(0, 2))
    schedule = UniformStaleness(10, 6, generator(0, 1))
    report = simulate_async(federation, RandomVectors(DIMENSION), schedule, 2, max_staleness=6)
    costs = federation.meter.costs()
    assert set(costs) == {"advertise", "share", "upload", "recover"}
    assert costs["upload"]["upload_bytes"] > report.uploads * 4 * DIMENSION
    shares = federation.meter.phases[Phase.SHARE].server
    roots = shares.shares_sent - shares.shares_received
    assert roots > 0
    assert roots % 32 == 0, "a hash for each share that is passed on"
    assert all(cost["client_seconds"] > 0 for cost in costs.values())


def test_early_flushes_have_fewer_updates() -> None:
    federation = ProtectedFederation(make_config(buffer_size=9), generator(0, 2))
    fleet = Fleet(compute=10.0, spread=1.5)
    schedule = EventQueue(10, 4 * DIMENSION, fleet, generator(0, 1))
    report = simulate_async(
        federation, RandomVectors(DIMENSION), schedule, 6, max_staleness=6, flush_after=8.0
    )
    sizes = {len(flush.owners) for flush in report.flushes}
    assert min(sizes) < 9
    assert min(sizes) >= 4
    assert report.exact is True


def test_a_federation_that_can_never_flush_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightsecagg_lab.simulation import asynchronous

    monkeypatch.setattr(asynchronous, "_PATIENCE", 50)
    federation = ProtectedFederation(make_config(), generator(0, 2))

    class OneClient(UniformStaleness):
        def next(self, version: int) -> Event:
            return Finished(0, version)

    with pytest.raises(Aborted, match="no buffer was recovered during 51 events"):
        simulate_async(
            federation,
            RandomVectors(DIMENSION),
            OneClient(10, 6, generator(0, 1)),
            1,
            max_staleness=6,
        )


# -- schedules ---------------------------------------------------------------------------------


def test_uniform_staleness_is_the_paper_s() -> None:
    schedule = UniformStaleness(7, 10, generator(0, 1))
    events = [schedule.next(100) for _ in range(7000)]
    assert all(isinstance(event, Finished) for event in events)
    staleness = np.bincount([100 - event.version for event in events])
    assert len(staleness) == 11
    assert staleness.min() > 500  # 636 expected, standard deviation 24
    turns = [event.client for event in events]
    assert all(set(turns[k : k + 7]) == set(range(7)) for k in range(0, 7000, 7))
    assert all(schedule.next(3).version >= 0 for _ in range(100))


def test_the_queue_s_clock_goes_forward_and_clients_come_back() -> None:
    schedule = EventQueue(6, 1000, Fleet(dropout=0.3, absence=5.0), generator(4, 1))
    away: set[int] = set()
    clocks, version, kinds = [], 0, set()
    for step in range(2000):
        event = schedule.next(version)
        kinds.add(type(event))
        clocks.append(schedule.clock)
        match event:
            case Finished(client, trained):
                assert client not in away
                assert trained <= version
            case Left(client):
                assert client not in away
                away.add(client)
            case Returned(client):
                away.remove(client)
        version += step % 5 == 0
    assert kinds == {Finished, Left, Returned}
    assert all(later >= earlier for earlier, later in pairwise(clocks))


def test_concurrency_bounds_staleness() -> None:
    """With one client at work at a time nothing is ever stale."""
    federation = PlainFederation(10, FedBuffServer(DIMENSION, 3, polynomial(1.0), 6))
    fleet = Fleet(dropout=0.2, absence=1.0, concurrency=1)
    schedule = EventQueue(10, 4 * DIMENSION, fleet, generator(0, 1))
    report = simulate_async(federation, RandomVectors(DIMENSION), schedule, 10, max_staleness=6)
    assert {tau for flush in report.flushes for tau in flush.staleness} <= {0, 1}


def test_slow_clients_are_stale_and_the_stalest_are_dropped() -> None:
    federation = PlainFederation(10, FedBuffServer(DIMENSION, 3, polynomial(1.0), 2))
    fleet = Fleet(spread=1.5, straggling=0.3)
    schedule = EventQueue(10, 4 * DIMENSION, fleet, generator(0, 1))
    report = simulate_async(federation, RandomVectors(DIMENSION), schedule, 40, max_staleness=2)
    assert report.too_stale > 0
    assert max(tau for flush in report.flushes for tau in flush.staleness) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"compute": 0.0},
        {"bandwidth": -1.0},
        {"absence": float("inf")},
        {"straggling": 1.0},
        {"dropout": -0.1},
        {"spread": 4.0},
        {"concurrency": -1},
    ],
)
def test_impossible_fleets_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ParameterError):
        Fleet(**change)  # type: ignore[arg-type]


def test_a_scale_gets_the_largest_bound_that_cannot_wrap() -> None:
    quantizer = quantizer_of_scale(PAPER_MODULUS, 10, 64, 2.0**16)
    assert quantizer.limit == quantizer.budget
    with pytest.raises(ParameterError, match="could wrap around"):
        Quantizer(quantizer.group, 2 * quantizer.bound, 10, max_weight=64, scale=2.0**16)


def test_flushes_do_not_print_means() -> None:
    assert "mean" not in repr(Flush(0, (1,), (0,), np.ones(3)))


# -- the command -------------------------------------------------------------------------------

SYNC = "simulate --mode sync --clients 5 --privacy 1 --dropouts 1 --dim 9 --json"
ASYNC = "simulate --mode async --clients 10 --privacy 2 --dropouts 3 --buffer 5 --json"


def run(options: str) -> dict[str, Any]:
    arguments = f"{ASYNC} {options}".split()
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize("staleness", list(Staleness))
def test_simulate_mode_async_reports_exact_sums_and_costs(staleness: str) -> None:
    document = run(
        f"--dim 50 --staleness {staleness} --staleness-alpha 0.5 --tau-max 4 --flushes 3 "
        "--local-scale 1024 --staleness-scale 32 --threat-model malicious-server"
    )
    assert document["exact"] is True
    assert document["flushes"] == 3
    assert set(document["phases"]) == {"advertise", "share", "upload", "agree", "recover"}
    assert document["bytes"] > 0
    assert document["seconds"] > 0
    assert len(document["buffers"]) == 3


@pytest.mark.parametrize(
    ("options", "threat_model", "strict"),
    [
        ("", "honest-but-curious", False),
        ("--strict", "honest-but-curious", True),
        ("--threat-model malicious-server", "malicious-server", True),
    ],
)
def test_S43_simulate_mode_async_says_what_it_defends_against_and_how(
    options: str, threat_model: str, strict: bool
) -> None:
    document = run(f"--dim 20 --flushes 2 --tau-max 4 --local-scale 1024 {options}")
    assert document["exact"] is True
    assert document["threat_model"] == threat_model
    assert document["strict"] is strict
    assert document["scale"] == 1024


def test_strict_buffers_and_an_impatient_server_get_along() -> None:
    document = run(
        "--dim 20 --flushes 5 --arrivals queue --flush-after 1 --threat-model malicious-server"
    )
    assert document["exact"] is True
    assert document["strict"] is True


def test_simulate_mode_async_on_a_virtual_clock() -> None:
    document = run(
        "--dim 50 --arrivals queue --dropout 0.1 --departures 0.1 --flushes 5 "
        "--field paper --share-mode paper --flush-after 30"
    )
    assert document["exact"] is True
    assert document["virtual_seconds"] > 0


def test_simulate_mode_async_fedbuff_claims_no_protection() -> None:
    document = run("--dim 50 --protocol fedbuff")
    assert document["exact"] is None
    assert set(document["phases"]) == {"upload"}


def test_simulate_mode_async_trains_a_task() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    document = run("--task digits --flushes 2 --server-rate 1 --learning-rate 0.3")
    assert document["exact"] is True
    assert len(document["evaluations"]) == 2
    assert 0 <= document["evaluations"][-1]["accuracy"] <= 1


def test_simulate_mode_async_wants_vectors_or_a_task() -> None:
    with pytest.raises(LightSecAggError, match="either --dim"):
        run("")


def test_simulate_mode_sync_is_still_there() -> None:
    result = CliRunner().invoke(
        app,
        SYNC.split(),
        catch_exceptions=False,
    )
    assert json.loads(result.stdout)["protocol"] == "lightsecagg"

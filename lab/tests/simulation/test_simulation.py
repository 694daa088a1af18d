"""The simulated synchronous round: exact sums or clean aborts, honest bytes, a sane timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightsecagg.crypto import prg
from lightsecagg.crypto.sealing import CHUNK_LENGTH
from lightsecagg.drivers.local import Packet
from lightsecagg.drivers.spreading import LEAST_COLUMNS
from lightsecagg.errors import InputRefused, ParameterError
from lightsecagg.field.group import Elements
from lightsecagg.params import PAPER_MODULUS, Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.interface import Aggregate, Phase, Update
from lightsecagg.protocol.jobs import Job, SumUploads, Unmask
from lightsecagg.protocol.messages import MaskedUpload
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation import (
    Cohort,
    Drop,
    Faults,
    Moment,
    RoundReport,
    choose_faults,
    simulate_round,
    synchronous,
)
from lightsecagg_lab.simulation.metering import Load, PhaseLoads

HONEST, MALICIOUS = ThreatModel.HONEST_BUT_CURIOUS, ThreatModel.MALICIOUS_SERVER
PHASES = {
    HONEST: (Phase.ADVERTISE, Phase.SHARE, Phase.UPLOAD, Phase.RECOVER),
    MALICIOUS: (Phase.ADVERTISE, Phase.SHARE, Phase.UPLOAD, Phase.AGREE, Phase.RECOVER),
}
DIMENSION = 37


def make_cohort(
    parameters: Parameters,
    protocol: ProtocolName = ProtocolName.LIGHTSECAGG,
    dimension: int = DIMENSION,
    max_samples: int = 0,
    neighbours: int = 0,
    threshold: int = 0,
) -> Cohort:
    quantizer = make_quantizer(
        parameters,
        dimension,
        1.0,
        max_samples=max(1, max_samples),
        weighted=max_samples > 0,
        group=traits_of(protocol).group(parameters),
    )
    return Cohort(
        protocol, parameters, quantizer, dimension, neighbours, threshold, graph_security=0
    )


def unique_input(client: int, dimension: int = DIMENSION) -> Update:
    """An input that no sum with another multiset of clients equals."""
    return Update(np.random.default_rng((7, client)).uniform(-1, 1, dimension))


def must_be_included(fate: tuple[Phase, Moment] | None) -> bool:
    """Whether a client's update is in the sum although it drops there."""
    if fate is None:
        return True
    phase, moment = fate
    if phase is Phase.UPLOAD:
        return moment is Moment.AFTER
    return phase in (Phase.AGREE, Phase.RECOVER)


def assert_right_or_aborted(report: RoundReport) -> None:
    assert (report.aggregate is None) == (report.aborted is not None)
    assert report.exact is (None if report.aggregate is None else True)


# -- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
@pytest.mark.parametrize("modulus", [Parameters(2, 0, 0).modulus, PAPER_MODULUS])
def test_a_round_without_faults_is_exact_and_refuses_nothing(
    threat_model: ThreatModel, share_mode: ShareMode, modulus: int
) -> None:
    parameters = Parameters(7, 2, 2, 5, threat_model, share_mode, modulus)
    cohort = make_cohort(parameters, max_samples=10)
    report = simulate_round(cohort, lambda c: dataclasses.replace(unique_input(c), samples=c + 1))
    assert report.exact is True
    assert report.aggregate is not None
    assert report.aggregate.included == tuple(range(7))
    assert not report.late
    assert not report.refused
    average, samples = report.settings.average(report.aggregate.total, 7)
    weights = np.arange(1, 8)
    expected = np.average([unique_input(c).vector for c in range(7)], axis=0, weights=weights)
    assert samples == weights.sum()
    np.testing.assert_allclose(average, expected, atol=1e-5)


def test_a_wrong_sum_is_called_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    original = synchronous._Run.output

    def falsify(self: synchronous._Run, party: int, output: object) -> None:
        if isinstance(output, Aggregate):
            total = output.total.copy()
            total[3] ^= 1
            output = dataclasses.replace(output, total=total)
        original(self, party, output)

    monkeypatch.setattr(synchronous._Run, "output", falsify)
    assert simulate_round(make_cohort(Parameters(5, 1, 1)), unique_input).exact is False


def test_rounds_follow_each_other_with_the_same_clients() -> None:
    cohort = make_cohort(Parameters(6, 2, 1))
    for round_ in range(4):
        report = simulate_round(
            cohort, lambda c, r=round_: Update(np.full(DIMENSION, (c + 1) / (r + 10)))
        )
        assert report.exact is True
        assert report.settings.round == round_ + 1


def test_an_input_beyond_the_bound_is_refused() -> None:
    with pytest.raises(InputRefused, match="bound"):
        simulate_round(make_cohort(Parameters(5, 1, 1)), lambda c: Update(np.full(DIMENSION, 1.5)))


# -- dropouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", list(ProtocolName))
@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("silent", [False, True])
def test_R30_each_phase_survives_up_to_D_dropouts(
    protocol: ProtocolName, moment: Moment, silent: bool
) -> None:
    weak = protocol in (ProtocolName.SECAGG_PLUS, ProtocolName.PLAIN)
    threat_model = HONEST if weak else MALICIOUS
    parameters = Parameters(7, 1, 2, 5, threat_model)
    for phase in PHASES[threat_model]:
        for count in (1, 2, 3):
            drops = dict.fromkeys(range(1, 2 * count, 2), (phase, moment))
            neighbours = 6 if protocol is ProtocolName.SECAGG_PLUS else 0
            cohort = make_cohort(parameters, protocol, neighbours=neighbours)
            report = simulate_round(cohort, unique_input, Faults(drops=drops, silent=silent))
            assert_right_or_aborted(report)
            if count <= parameters.dropouts:
                assert report.aggregate is not None, (phase, count, report.aborted)
                expected = [c for c in range(7) if must_be_included(drops.get(c))]
                assert list(report.aggregate.included) == expected


def test_R30_too_many_dropouts_abort_with_the_reason() -> None:
    drops = dict.fromkeys(range(4), (Phase.UPLOAD, Moment.BEFORE))
    report = simulate_round(make_cohort(Parameters(8, 3, 3)), unique_input, Faults(drops=drops))
    assert report.aborted == "only 4 clients uploaded their masked updates, at least 5 are needed"
    assert report.aggregate is None
    assert report.exact is None


@st.composite
def _parameters(draw: st.DrawFn, protocol: ProtocolName) -> Parameters:
    models = [HONEST]
    if protocol in (ProtocolName.LIGHTSECAGG, ProtocolName.SECAGG):
        models.append(MALICIOUS)
    threat_model = draw(st.sampled_from(models))
    clients = draw(st.integers(5, 10))
    privacy = draw(st.integers(0, 2))
    room = clients - privacy - 2 if threat_model is HONEST else (clients - privacy - 1) // 2
    dropouts = draw(st.integers(0, min(room, 4)))
    least = privacy + 1
    if protocol is ProtocolName.SECAGG and threat_model is MALICIOUS:
        least = (clients + privacy) // 2 + 1
    survivors = draw(st.integers(least, clients - dropouts))
    modes = [ShareMode.PAPER, ShareMode.SEEDED]
    if protocol is ProtocolName.LIGHTSECAGG:
        modes.append(ShareMode.SHORT_KEY)
    mode = draw(st.sampled_from(modes))
    return Parameters(clients, privacy, dropouts, survivors, threat_model, mode)


@st.composite
def _faults(draw: st.DrawFn, parameters: Parameters) -> Faults:
    phases = st.sampled_from(PHASES[parameters.threat_model])
    someone = st.integers(0, parameters.clients - 1)
    fate = st.tuples(phases, st.sampled_from(list(Moment)))
    drops = draw(st.dictionaries(someone, fate, max_size=parameters.dropouts + 2))
    late = draw(st.dictionaries(someone, phases, max_size=2))
    duplicates = draw(st.frozensets(someone, max_size=parameters.clients))
    return Faults(drops, late, duplicates, draw(st.booleans()))


@pytest.mark.parametrize("protocol", list(ProtocolName))
@given(data=st.data())
@settings(max_examples=30)
def test_R30_R33_any_history_ends_in_the_exact_sum_or_an_abort(
    protocol: ProtocolName, data: st.DataObject
) -> None:
    parameters = data.draw(_parameters(protocol))
    faults = data.draw(_faults(parameters))
    dense = parameters.clients - 1
    neighbours = threshold = 0
    if protocol is ProtocolName.SECAGG_PLUS:
        threshold = data.draw(st.integers(parameters.privacy + 1, min(dense, parameters.survivors)))
        neighbours = data.draw(st.one_of(st.just(dense), st.integers(threshold, dense)))
    cohort = make_cohort(parameters, protocol, neighbours=neighbours, threshold=threshold)
    report = simulate_round(cohort, unique_input, faults, early_input=data.draw(st.booleans()))
    assert_right_or_aborted(report)
    troubled = len(faults.drops.keys() | faults.late.keys())
    # On a sparse graph few dropouts may already leave somebody without neighbours.
    if troubled <= parameters.dropouts and neighbours in (0, dense):
        assert report.aggregate is not None, report.aborted
        punctual = [c for c in range(parameters.clients) if c not in faults.late]
        must = {c for c in punctual if must_be_included(faults.drops.get(c))}
        assert must <= set(report.aggregate.included)
        must_not = {c for c, fate in faults.drops.items() if not must_be_included(fate)}
        assert not must_not & set(report.aggregate.included)


@pytest.mark.parametrize("phase", PHASES[MALICIOUS])
def test_S29_late_messages_are_ignored_and_counted(phase: Phase) -> None:
    report = simulate_round(
        make_cohort(Parameters(8, 1, 2, 4, MALICIOUS)), unique_input, Faults(late={2: phase})
    )
    assert report.exact is True
    assert report.aggregate is not None
    late = {Phase.UPLOAD: 2, Phase.AGREE: 0}  # with reports; a late consent gets the certificate
    assert sum(report.late.values()) == late.get(phase, 1)
    in_sum = phase in (Phase.AGREE, Phase.RECOVER)
    assert (2 in report.aggregate.included) is in_sum


def test_S29_duplicates_change_nothing() -> None:
    parameters = Parameters(6, 2, 0, 4, MALICIOUS)
    report = simulate_round(
        make_cohort(parameters), unique_input, Faults(duplicates=frozenset(range(6)))
    )
    assert report.exact is True
    assert report.aggregate is not None
    assert report.aggregate.included == tuple(range(6))


def test_choosing_dropouts_takes_every_client_at_most_once() -> None:
    drops = [Drop(Phase.UPLOAD, 3), Drop(Phase.RECOVER, 2, Moment.AFTER)]
    faults = choose_faults(range(6), drops, HONEST, np.random.default_rng(1))
    assert sorted(faults.drops.values()) == sorted(
        [(Phase.UPLOAD, Moment.BEFORE)] * 3 + [(Phase.RECOVER, Moment.AFTER)] * 2
    )
    again = choose_faults(range(6), drops, HONEST, np.random.default_rng(1))
    assert again == faults
    with pytest.raises(ParameterError, match="7 clients should drop, but there are only 6"):
        choose_faults(range(6), [Drop(Phase.UPLOAD, 7)], HONEST, np.random.default_rng(1))
    with pytest.raises(ParameterError, match="malicious-server mode only"):
        choose_faults(range(6), [Drop(Phase.AGREE, 1)], HONEST, np.random.default_rng(1))


@pytest.mark.parametrize(
    ("text", "drop"),
    [
        ("upload=3", Drop(Phase.UPLOAD, 3, Moment.BEFORE)),
        ("share:during=1", Drop(Phase.SHARE, 1, Moment.DURING)),
        ("recover:after=0", Drop(Phase.RECOVER, 0, Moment.AFTER)),
    ],
)
def test_drops_are_parsed(text: str, drop: Drop) -> None:
    assert Drop.parse(text) == drop
    assert Drop.parse(str(drop)) == drop


@pytest.mark.parametrize(
    "text",
    ["upload", "upload=", "upload=-1", "upload=x", "done=1", "upload:now=1", "=1", "upload:=1"],
)
def test_malformed_drops_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ParameterError, match=r"PHASE\[:MOMENT\]=COUNT"):
        Drop.parse(text)


# -- costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "privacy", "survivors", "dimension"), [(8, 2, 5, 1000), (6, 1, 3, 700_001)]
)
@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
def test_offline_upload_keeps_its_promise(
    clients: int, privacy: int, survivors: int, dimension: int, share_mode: ShareMode
) -> None:
    parameters = Parameters(clients, privacy, clients - survivors, survivors, share_mode=share_mode)
    cohort = make_cohort(parameters, dimension=dimension)
    report = simulate_round(cohort, lambda c: unique_input(c, dimension))
    share_bytes = 4 * parameters.share_length(dimension)
    explicit = clients - 1 if share_mode is ShareMode.PAPER else clients - survivors
    chunks = -(-share_bytes // CHUNK_LENGTH)
    most = explicit * share_bytes + 120 * (clients - 1) * chunks
    loads = report.meter.phases[Phase.SHARE].clients
    assert len(loads) == clients
    for load in loads.values():
        assert load.sent == 0
        assert load.shares_sent <= most
        # The bound is not slack: the explicit shares are really there (the own one stays).
        assert load.shares_sent > (explicit - 1) * share_bytes


def test_every_byte_sent_is_received() -> None:
    report = simulate_round(make_cohort(Parameters(6, 1, 2, 3, MALICIOUS)), unique_input)
    for phase, loads in report.meter.phases.items():
        clients = loads.clients.values()
        assert loads.server.received == sum(load.sent for load in clients)
        assert loads.server.sent == sum(load.received for load in clients)
        assert loads.server.shares_received == sum(load.shares_sent for load in clients)
        assert loads.server.shares_sent == sum(load.shares_received for load in clients)
        assert (loads.server.shares_sent > 0) is (phase is Phase.SHARE)
        assert len(clients) == 6
        assert all(load.seconds > 0 for load in clients)
        assert loads.server.seconds > 0


def test_what_a_vanished_client_did_not_do_costs_nothing() -> None:
    drops = {2: (Phase.UPLOAD, Moment.BEFORE), 4: (Phase.UPLOAD, Moment.DURING)}
    report = simulate_round(make_cohort(Parameters(6, 1, 2)), unique_input, Faults(drops=drops))
    loads = report.meter.phases[Phase.UPLOAD].clients
    assert 2 not in loads
    reports = 1 + 6 * 24  # of the two messages of an upload the first is whole
    assert loads[0].sent // 2 < loads[4].sent < loads[0].sent // 2 + reports
    assert {2, 4}.isdisjoint(report.meter.phases[Phase.RECOVER].clients)
    assert {0, 1, 2, 3, 4, 5} == set(report.meter.phases[Phase.SHARE].clients)


MEGABYTE = 10**6


def _loads() -> PhaseLoads:
    """Two clients that exchange shares: 4 MB and 2 MB up, 3 MB each down; 1 MB of control."""
    first = Load(seconds=0.5, sent=MEGABYTE, shares_sent=4 * MEGABYTE, shares_received=3 * MEGABYTE)
    second = Load(seconds=0.2, sent=0, shares_sent=2 * MEGABYTE, shares_received=3 * MEGABYTE)
    server = Load(
        seconds=0.3,
        relay_seconds=0.1,
        spread_seconds=0.16,
        received=MEGABYTE,
        shares_received=6 * MEGABYTE,
        shares_sent=6 * MEGABYTE,
    )
    return PhaseLoads(server, {0: first, 1: second})


def test_a_phase_is_charged_for_its_busiest_and_slowest_client() -> None:
    traffic, work = _loads().traffic, _loads().work
    assert (traffic.client_sent, traffic.client_received) == (MEGABYTE, 0)
    assert traffic.client_shares_sent == 4 * MEGABYTE
    assert traffic.client_shares_received == 3 * MEGABYTE
    assert traffic.server_shares_received == traffic.server_shares_sent == 6 * MEGABYTE
    assert (work.client, work.server, work.server_relaying) == (0.5, 0.3, 0.1)
    assert work.on(1) == work
    assert work.on(4).server == pytest.approx(0.3 - 0.16 + 0.04)
    assert work.on(4).server_spread == pytest.approx(0.04)
    assert work.on(4).client == 0.5


@pytest.mark.parametrize("protocol", list(ProtocolName))
@pytest.mark.parametrize("cores", [1, 3])
def test_cores_share_sums_and_masks_and_nothing_else(protocol: ProtocolName, cores: int) -> None:
    """By a clock that counts what is done by columns, and nothing else."""
    done, dimension = [0], 4 * LEAST_COLUMNS

    def clock() -> float:
        return float(done[0])

    def counting(run: Callable[..., Elements]) -> Callable[..., Elements]:
        def counted(job: Job, start: int, stop: int) -> Elements:
            found = run(job, start, stop)
            done[0] += stop - start
            return found

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for kind in (SumUploads, Unmask):
            patch.setattr(kind, "run", counting(kind.run))
        report = simulate_round(
            make_cohort(Parameters(6, 1, 2, 4), protocol, dimension, neighbours=5, threshold=2)
            if protocol is ProtocolName.SECAGG_PLUS
            else make_cohort(Parameters(6, 1, 2, 4), protocol, dimension),
            lambda client: unique_input(client, dimension),
            clock=clock,
            server_cores=cores,
        )
    assert report.exact
    upload, recover = (report.meter.phases[p].server for p in (Phase.UPLOAD, Phase.RECOVER))
    assert upload.spread_seconds == upload.seconds
    assert recover.spread_seconds == recover.seconds
    light = protocol is ProtocolName.LIGHTSECAGG
    unmasked = report.settings.share_length if light else dimension
    assert upload.seconds + recover.seconds == dimension + unmasked


@pytest.mark.parametrize("absent", [0, 1])
def test_masks_of_secagg_are_expanded_where_training_hides_it(absent: int) -> None:
    """By a clock that counts the words of masks: all while sharing, but for those who vanish."""
    words, add_words = [0], prg.add_words

    def counted(totals: Elements, seeds: list[bytes], start: int = 0) -> None:
        words[0] += totals.size * len(seeds)
        add_words(totals, seeds, start)

    faults = Faults(drops={5: (Phase.SHARE, Moment.BEFORE)} if absent else {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prg, "add_words", counted)
        cohort = make_cohort(Parameters(6, 1, 2, 4), ProtocolName.SECAGG)
        report = simulate_round(cohort, unique_input, faults, clock=lambda: float(words[0]))
    assert report.exact
    share, upload = (report.meter.phases[p].clients[0] for p in (Phase.SHARE, Phase.UPLOAD))
    assert share.seconds == 6 * DIMENSION
    assert upload.seconds == absent * DIMENSION
    assert report.stored >= 4 * DIMENSION


# -- the seed steers nothing secret --------------------------------------------------------------


def test_S17_seeding_numpy_changes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[bytes] = []
    original = synchronous._Run.deliver

    def spy(self: synchronous._Run, packet: Packet) -> None:
        if packet.kind is MaskedUpload:
            uploads.append(packet.data)
        original(self, packet)

    monkeypatch.setattr(synchronous._Run, "deliver", spy)
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002 - the legacy seed is what a user might set
        simulate_round(make_cohort(Parameters(4, 1, 0)), unique_input)
    assert len(uploads) == len(set(uploads)) == 8

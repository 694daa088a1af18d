"""Sums and recoveries as jobs: exact by any ranges, and an answer to everything meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from async_driver import AsyncFederation
from driver import HONEST, MALICIOUS, Federation, Network
from secagg_driver import Federation as SecAgg

from laboratory import needs_laboratory
from lightsecagg.errors import NotEnoughAnswers, RecoveryError, RemoteProtocolError
from lightsecagg.field.prime import DEFAULT_FIELD, Elements
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import SERVER, Aggregate, Phase, RoundAborted, Send
from lightsecagg.protocol.jobs import (
    Compute,
    Job,
    SumUploads,
    Unmask,
    UploadInMemory,
    at_once,
    complete,
)
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Consent,
    MaskedUpload,
    Message,
    Refusal,
    ShareBundle,
)

RNG = np.random.default_rng(7)


def by_ranges(job: Job, *cuts: int) -> Elements:
    """As a driver with threads does it; the ranges are run backwards."""
    job.open()
    edges = [0, *cuts, job.columns]
    ranges = list(pairwise(edges))
    for start, stop in reversed(ranges):
        job.put(start, job.run(start, stop))
    return job.result()


# -- the arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [3, 1, 4, 1, 5]])
@pytest.mark.parametrize("cuts", [(), (1,), (4, 5, 8), tuple(range(1, 9))])
def test_uploads_are_summed_by_any_ranges(weights: list[int] | None, cuts: Sequence[int]) -> None:
    q = DEFAULT_FIELD.modulus
    vectors = RNG.integers(0, q, (5, 9), dtype=np.uint32)
    job = SumUploads(DEFAULT_FIELD, 9, [UploadInMemory(vector) for vector in vectors], weights)
    factors = weights or [1] * 5
    exact = [
        sum(w * int(vector[k]) for w, vector in zip(factors, vectors, strict=True)) % q
        for k in range(9)
    ]
    assert by_ranges(job, *cuts).tolist() == exact


class Held(Network):
    """Jobs wait until the test runs them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.jobs: list[Job] = []

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        return outputs

    def output(self, party: int, output: object) -> None:
        super().output(party, output)
        if isinstance(output, Compute):
            self.jobs.append(output.job)

    def finish_job(self) -> None:
        job = self.jobs.pop(0)
        self.call(SERVER, partial(self.server.computed, job, complete(job)))


def held(federation: Federation) -> Held:
    network = federation.network()
    return Held(federation, network.server, network.clients, network.inputs).start()  # type: ignore[return-value]


@pytest.mark.parametrize("liars", [0, 1])
def test_masks_are_decoded_by_any_ranges(liars: int) -> None:
    """Two pieces and padding; a liar is found before the ranges, and none of them uses it."""
    federation = Federation(8, 1, 4, 3, dimension=26)
    liar = federation.ids[0]

    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if liars and sender == liar and isinstance(message, AggregatedShare):
            return [AggregatedShare((message.vector + 1) % np.uint32(federation.modulus))]
        return [message]

    for cuts in ((), (1,), (5, 6), tuple(range(1, 14))):
        network = held(federation)
        network.tamper = tamper
        network.run()
        network.finish_job()
        (job,) = network.jobs
        assert isinstance(job, Unmask)
        assert job.columns == 14
        total = by_ranges(job, *cuts)
        network.call(SERVER, partial(network.server.computed, job, total))
        network.assert_exact(federation.ids)
        assert isinstance(network.result, Aggregate)
        assert network.result.suspects == ((liar,) if liars else ())
        federation.ledgers.clear()


def test_at_once_runs_jobs_in_their_place_and_those_that_follow() -> None:
    class Party:
        def computed(self, job: Job, result: object) -> list[object]:
            return [job, Compute(second)] if job is first else [result]

    vectors = [UploadInMemory(np.ones(2, dtype=np.uint32))]
    first, second = (SumUploads(DEFAULT_FIELD, 2, vectors * n) for n in (1, 2))
    before, same, result, after = at_once(Party(), ["before", Compute(first), "after"])
    assert (before, same, after) == ("before", first, "after")
    assert result.tolist() == [2, 2]


def test_a_recovery_that_fails_is_a_result_and_other_failures_are_the_drivers() -> None:
    class Failing(Job):
        columns = 1

        def __init__(self, error: Exception) -> None:
            self.error = error

        def run(self, start: int, stop: int) -> Elements:
            raise self.error

        def put(self, start: int, part: Elements) -> None:
            raise AssertionError("it has no part")

        def result(self) -> Elements:
            raise AssertionError("it has no result")

    error = NotEnoughAnswers("too few")
    assert complete(Failing(error)) is error
    with pytest.raises(OSError, match="disk"):
        complete(Failing(OSError("disk")))


# -- the server meanwhile ------------------------------------------------------------------------


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_the_sum_takes_its_time_and_the_round_goes_on(threat_model: ThreatModel) -> None:
    """U1 is announced, agreed on and answered for before the uploads are summed."""
    federation = Federation(threat_model=threat_model)
    network = held(federation)
    network.run()
    server = network.server
    assert server.phase is Phase.RECOVER
    assert [type(job) for job in network.jobs] == [SumUploads]
    assert server.pending == frozenset()
    network.finish_job()
    assert [type(job) for job in network.jobs] == [Unmask]
    assert not network.results
    network.finish_job()
    network.assert_exact(federation.ids)
    assert server.phase is Phase.DONE


def message_of(network: Network, client: int, kind: type) -> Message:
    if kind is Refusal:
        return Refusal(0, (client,))
    sent = [m for s, _, data in network.wire if s == client for m in [network.codec.decode(data)]]
    return next(message for message in sent if isinstance(message, kind))


@pytest.mark.parametrize("awaited", [SumUploads, Unmask])
@pytest.mark.parametrize(
    "kind",
    [Advertise, ShareBundle, MaskedUpload, Consent, AggregatedShare, Refusal],
)
def test_S29_every_message_has_an_answer_while_only_a_result_is_awaited(
    kind: type, awaited: type
) -> None:
    federation = Federation(7, 1, 2, 4, MALICIOUS)
    network = held(federation)
    network.run()
    if awaited is Unmask:
        network.finish_job()
    (job,) = network.jobs
    assert isinstance(job, awaited)
    server, client = network.server, federation.ids[0]
    late = server.late_messages.total()
    assert server.receive(client, message_of(network, client, kind)) == []
    assert server.late_messages.total() == late + 1
    with pytest.raises(RemoteProtocolError, match="not invited"):
        server.receive(999, message_of(network, client, kind))
    assert server.proceed() == []
    assert server.drop(federation.ids[1]) == []
    assert server.rejoin(client) == []
    assert server.pending == server.refusals.keys() == set()
    while network.jobs:
        network.finish_job()
    network.assert_exact(federation.ids)


def test_an_answer_that_is_too_late_does_not_count() -> None:
    """The deadline closes recovery while the uploads are still being summed."""
    federation = Federation()
    network = held(federation)
    slow = federation.ids[-1]
    withheld: list[Message] = []

    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if sender != slow or not isinstance(message, AggregatedShare):
            return [message]
        withheld.append(message)
        return []

    network.tamper = tamper
    network.run()
    assert network.server.pending == {slow}
    assert network.server.proceed() == []
    assert network.server.receive(slow, *withheld) == []
    assert network.server.late_messages["AggregatedShare"] == 1
    network.finish_job()
    network.finish_job()
    network.assert_exact(federation.ids)
    assert isinstance(network.result, Aggregate)
    assert slow not in network.result.responders


def test_a_result_of_an_aborted_round_changes_nothing() -> None:
    federation = Federation(threat_model=MALICIOUS)
    network = held(federation)
    network.run(until=lambda: network.server.phase is Phase.AGREE)
    (job,) = network.jobs
    network.call(SERVER, network.server.proceed)
    assert "0 clients signed" in network.assert_aborted()
    assert network.server.computed(job, complete(job)) == []
    assert network.server.phase is Phase.DONE


def test_a_recovery_that_fails_aborts_the_round_and_everybody_hears_why() -> None:
    federation = Federation()
    network = held(federation)
    network.run(until=lambda: network.server.phase is Phase.RECOVER)
    outputs = [*network.server.proceed(), *network.server.computed(network.jobs[0], ZEROS)]
    (compute,) = outputs
    assert isinstance(compute, Compute)
    reason = complete(compute.job)
    assert isinstance(reason, RecoveryError)
    outputs = network.server.computed(compute.job, reason)
    assert outputs[-1] == RoundAborted("only 0 clients answered, U = 4 are needed")
    assert outputs[:-1] == [Send(client, AbortRound(str(reason))) for client in federation.ids]
    assert network.server.phase is Phase.DONE


ZEROS = np.zeros(8, dtype=np.uint32)


class HeldSecAgg(SecAgg):
    """The baselines with jobs that wait until nothing else is left to do."""

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        return outputs

    def output(self, party: int, output: object) -> None:
        super().output(party, output)
        if isinstance(output, Compute):
            self.waiting = [*getattr(self, "waiting", []), output.job]


@needs_laboratory
@pytest.mark.parametrize("protocol", ["secagg", "secagg+"])
def test_secagg_recovers_as_a_job(protocol: str) -> None:
    sizes = {"k": 6, "t": 3} if protocol == "secagg+" else {}
    federation = HeldSecAgg(protocol, N=8, T=2, D=2, **sizes)
    federation.call(SERVER, federation.server.start)
    federation.settle()
    assert federation.result is None
    assert federation.server.pending == frozenset()
    seen = []
    while federation.waiting:
        job = federation.waiting.pop(0)
        seen.append(type(job))
        result = by_ranges(job, 1, 3)
        federation.call(SERVER, partial(federation.server.computed, job, result))
    assert seen == [SumUploads, Unmask]
    assert isinstance(federation.result, Aggregate)
    np.testing.assert_array_equal(federation.result.total, federation.exact_sum(federation.ids))


# -- the asynchronous mode -----------------------------------------------------------------------


class HeldAsync(AsyncFederation):
    """Jobs wait until the test runs them."""

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        return outputs

    def output(self, party: int, output: object) -> None:
        super().output(party, output)
        if isinstance(output, Compute):
            self.jobs = [*getattr(self, "jobs", []), output.job]

    def finish_job(self) -> None:
        job = self.jobs.pop(0)
        result = by_ranges(job, 1)
        self.call(SERVER, partial(self.server.computed, job, result))


def in_flight() -> HeldAsync:
    """Enough answers are in; only the result of the first buffer is awaited."""
    fed = HeldAsync(clients=8, buffer_size=4, survivors=5)
    fed.open()
    for client in range(4):
        fed.upload(client)
    fed.settle()
    fed.finish_job()
    (job,) = fed.jobs
    assert isinstance(job, Unmask)
    assert fed.server.phase is Phase.RECOVER
    return fed


def test_a_buffer_stays_in_flight_until_its_result_and_uploads_wait_for_the_next() -> None:
    fed = in_flight()
    for client in range(4, 8):
        fed.upload(client)
    fed.settle()
    assert fed.server.intake.waiting == 4
    assert list(fed.announced) == [0]
    assert fed.server.pending == frozenset()
    assert fed.server.proceed() == []
    fed.finish_job()
    assert [result.time for result in fed.results] == [0]
    assert list(fed.announced) == [0, 1], "the next buffer follows at once"
    fed.settle()
    while fed.jobs:
        fed.finish_job()
        fed.settle()
    assert [result.time for result in fed.results] == [0, 1]
    fed.assert_exact()


def test_S29_answers_are_late_and_refusals_are_heard_while_the_result_is_awaited() -> None:
    fed = in_flight()
    before = fed.server.late_messages["AggregatedShare"]
    length = fed.settings.share_length
    answer = AggregatedShare(np.zeros(length, dtype=np.uint32), 0)
    assert fed.server.receive(7, answer) == []
    assert fed.server.late_messages["AggregatedShare"] == before + 1
    assert fed.server.receive(0, Refusal(0, (1,))) == []
    assert fed.server.drop(7) == []
    sends = fed.server.rejoin(7)
    assert [output.message for output in sends if isinstance(output, Send)] == [fed.announced[0]]
    fed.finish_job()
    fed.assert_exact()
    assert len(fed.results) == 1
    assert 7 not in fed.results[0].responders


def test_a_result_of_a_lost_buffer_changes_nothing() -> None:
    fed = HeldAsync(clients=6, buffer_size=4, threat_model=MALICIOUS)
    fed.open()
    for client in range(4):
        fed.upload(client)
        fed.step_up(client)
    (job,) = fed.jobs
    assert fed.server.phase is Phase.AGREE
    fed.call(SERVER, fed.server.proceed)
    assert len(fed.failures) == 1
    assert fed.server.computed(job, complete(job)) == []
    assert fed.server.phase is Phase.UPLOAD

"""The asynchronous mode over sockets and TLS: stragglers, restarts, and what clients demand."""

from __future__ import annotations

import asyncio
import errno
import threading
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from network_federation import Contribution, NetworkFederation, contribution

from laboratory import needs_laboratory
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation import promise_store
from lightsecagg.drivers.federation.client import FederationClient, _is_brief
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.tables import BufferingTable
from lightsecagg.errors import ConfigurationError, JournalError, RemoteProtocolError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.staleness import Staleness
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import SERVER, Update
from lightsecagg.protocol.messages import ReportsWanted
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.roles import relay
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import name_of, pack_protocol
from lightsecagg.session.epoch_client import EpochClientSession
from lightsecagg.session.interface import Effect, Event, Received
from lightsecagg.session.record import RoundRecord


class Slow(Contribution):
    """Is not done before the test says so."""

    def __init__(self, client: int) -> None:
        super().__init__(client)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        self.begun.set()
        assert self.may_end.wait(60)
        return super().compute(model, round_number, bound)


def check_every_mean(folder: Path, records: list[RoundRecord]) -> None:
    """Each recovered mean against that of the plain vectors."""
    for record in records:
        if record.aborted is not None:
            continue
        with np.load(folder / f"average-{record.round}.npz") as stored:
            mean = stored["average"]
        vectors = [
            contribution(*each) for each in zip(record.included, record.versions, strict=True)
        ]
        expected = np.average(vectors, axis=0, weights=record.weights)
        np.testing.assert_allclose(mean, expected, atol=record.quantisation_step)
    pairs = [each for r in records for each in zip(r.included, r.versions, strict=True)]
    assert len(set(pairs)) == len(pairs), "no update is summed twice"


SETTINGS = ["buffering.renew=2", "buffering.reports=30.0"]


def test_buffers_over_sockets_are_exact_and_wait_for_no_straggler(tmp_path: Path) -> None:
    """A restarted client joins the next epoch; the slow one's update counts when it comes."""
    federation = NetworkFederation(tmp_path, clients=6, buffer=3)
    curious = "threat_model=honest-but-curious"  # against a malicious server it needs company
    patient = ["buffering.tau_max=60", f"client.{curious}"]
    slow = Slow(5)

    async def until(condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.02)

    async def scenario() -> list[RoundRecord]:
        demands = [*SETTINGS, patient[0], f"aggregation.{curious}"]
        server = federation.server(number=1000, settings=demands, sums=tmp_path)
        mortal = federation.client(4, table=patient)
        others = [federation.client(i, table=patient) for i in range(4)]
        others.append(federation.client(5, table=patient, job=slow))
        running = asyncio.create_task(server.run())
        first = asyncio.create_task(mortal.run())
        tasks = [running, first, *(asyncio.create_task(client.run()) for client in others)]
        try:
            await until(lambda: len(server.records) >= 4)
            slow.may_end.set()
            await until(lambda: any(5 in record.included for record in server.records))
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            tasks.append(asyncio.create_task(federation.client(4, table=patient).run()))
            await until(lambda: any(r.epoch > 1 and 4 in r.included for r in server.records))
            server.stop()
            return await running
        finally:
            slow.may_end.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    records = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert all(record.aborted is None for record in records)
    check_every_mean(tmp_path, records)
    late = next(record for record in records if 5 in record.included)
    assert late.versions[late.included.index(5)] == 0
    assert late.round > 4, "its update was more than two versions old, and welcome"


def test_S09_a_client_s_file_pins_its_buffering(tmp_path: Path) -> None:
    """The others go on without the one whose file demands another K."""
    federation = NetworkFederation(tmp_path, clients=4, dropouts=1, buffer=3)

    async def scenario() -> list[RoundRecord]:
        server = federation.server(number=1, settings=SETTINGS, sums=tmp_path)
        clients = [federation.client(i) for i in range(3)]
        odd = federation.client(3, table=["buffering.size=4"])
        tasks = [asyncio.create_task(client.run()) for client in (*clients, odd)]
        try:
            records = await server.run()
            await asyncio.gather(*tasks)
            return records
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    (record,) = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert record.included == [0, 1, 2]
    assert list(record.withdrawn.values()) == [[3]]
    assert "other asynchronous settings" in next(iter(record.withdrawn))


async def served(server: Any, clients: list[FederationClient], **options: Any) -> list[RoundRecord]:
    """The records of a federation that comes to its end."""
    tasks = [asyncio.create_task(client.run()) for client in clients]
    try:
        records: list[RoundRecord] = await server.run(**options)
        await asyncio.gather(*tasks)
        return records
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pairs_of(records: list[RoundRecord]) -> set[tuple[int, int]]:
    """Whose update of which version is in a sum."""
    return {each for r in records for each in zip(r.included, r.versions, strict=True)}


class NotedSession(EpochClientSession):
    """Notes which of its steps were made in the thread of the event loop."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.here: set[str] = set()
        self.elsewhere: set[str] = set()

    def handle(self, event: Event, now: float) -> list[Effect]:
        name = name_of(event.data) if isinstance(event, Received) else type(event).__name__
        loop_thread = threading.current_thread() is threading.main_thread()
        (self.here if loop_thread else self.elsewhere).add(name)
        return super().handle(event, now)


class NotedClient(FederationClient):
    epoch_session_type = NotedSession


def test_only_what_is_brief_holds_up_a_client_s_event_loop(tmp_path: Path) -> None:
    federation = NetworkFederation(tmp_path, clients=3, dropouts=0, buffer=3)

    async def scenario() -> list[Any]:
        clients = [federation.client(i, NotedClient) for i in range(3)]
        await served(federation.server(number=2, settings=SETTINGS, sums=tmp_path), clients)
        return [client._session for client in clients]

    for session in asyncio.run(asyncio.wait_for(scenario(), 60)):
        assert session.here - {"Stop"} == {"ShareBundle", "Stored"}
        assert {"Roster", "Trained", "SumRequest", "Certificate"} <= session.elsewhere
    data = pack_protocol(1, Codec(DEFAULT_FIELD).encode(ReportsWanted(((0, 0),))))
    assert _is_brief(Received(SERVER, data))
    assert not _is_brief(Received(SERVER, data + bytes(1 << 14))), "it may be as long as a model"


@needs_laboratory
def test_fedbuff_over_sockets(tmp_path: Path) -> None:
    """The same programs without protection, where both sides say so."""
    federation = NetworkFederation(tmp_path, clients=3, dropouts=0, buffer=3)
    unprotected = ["aggregation.protocol=plain", "aggregation.threat_model=honest-but-curious"]
    table = ['client.protocols=["plain"]', "client.threat_model=honest-but-curious"]

    async def scenario() -> list[RoundRecord]:
        server = federation.server(number=2, settings=[*SETTINGS, *unprotected], sums=tmp_path)
        clients = [federation.client(i, table=table) for i in range(3)]
        return await served(server, clients)

    records = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [(record.protocol, record.included) for record in records] == [("plain", [0, 1, 2])] * 2
    check_every_mean(tmp_path, records)


def test_R36_an_upload_that_finds_the_disk_full_is_lost_and_the_server_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not acknowledged; its owner's update from the next version counts."""
    original = promise_store.write_synced

    def write(path: Path, data: bytes) -> None:
        if path.name == "1-3-0.u32":
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, data)

    monkeypatch.setattr(promise_store, "write_synced", write)
    federation = NetworkFederation(tmp_path, clients=4, buffer=3)

    async def scenario() -> list[RoundRecord]:
        server = federation.server(number=5, settings=SETTINGS, sums=tmp_path)
        return await served(server, [federation.client(i) for i in range(4)])

    records = asyncio.run(asyncio.wait_for(scenario(), 60))
    check_every_mean(tmp_path, records)
    assert all(record.aborted is None for record in records)
    assert "the upload of client 3: cannot write the journal" in caplog.text
    assert "No space left on device" in caplog.text
    versions = [version for owner, version in pairs_of(records) if owner == 3]
    assert versions
    assert 0 not in versions, "its first upload was never stored"


def stored(server: Any) -> set[int]:
    """Whose uploads are durable in the epoch that goes on."""
    epoch = server._session._round
    return set() if epoch is None else set(epoch.stored)


def test_R31_an_epoch_that_is_abandoned_gives_up_its_updates_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`--abandon-round`: two uploads wait when the server ends; clients train anew."""
    federation = NetworkFederation(tmp_path, clients=4, buffer=3)
    slow = [Slow(2), Slow(3)]

    async def scenario() -> list[RoundRecord]:
        first = federation.server(number=1000, settings=SETTINGS, sums=tmp_path)
        jobs = [None, None, *slow]
        clients = [federation.client(i, job=job) for i, job in enumerate(jobs)]
        running = asyncio.create_task(first.run())
        tasks = [asyncio.create_task(client.run()) for client in clients]
        try:
            while not first.connected or stored(first) != {0, 1}:
                await asyncio.sleep(0.02)
            first.stop()
            await running
            for job in slow:
                job.may_end.set()
            second = federation.server(number=2, settings=SETTINGS, sums=tmp_path)
            records = await second.run(abandon=True)
            await asyncio.gather(*tasks)
            return records
        finally:
            for task in (running, *tasks):
                task.cancel()
            await asyncio.gather(running, *tasks, return_exceptions=True)

    records = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "epoch 1 is abandoned as demanded" in caplog.text
    assert {record.epoch for record in records} == {2}
    check_every_mean(tmp_path, records)
    assert pairs_of(records).isdisjoint({(0, 0), (1, 0)})


def test_mode_and_buffering_go_together(tmp_path: Path) -> None:
    made = NetworkFederation(tmp_path, clients=4, buffer=3).made
    config = load_config(ServerConfig, made.server)
    assert config.aggregation.mode == "async"
    client = load_config(ClientConfig, made.clients[0])
    assert config.buffering is not None
    assert client.buffering is not None
    assert config.buffering.make() == client.buffering.make()
    with pytest.raises(ConfigurationError, match="go together"):
        load_config(ServerConfig, made.server, ['aggregation.mode="sync"'])
    with pytest.raises(ConfigurationError, match=r"\[training.schedule\] is for rounds"):
        load_config(ServerConfig, made.server, ["training.schedule.decay.factor=0.5"])
    assert FederationClient.session_type is not FederationClient.epoch_session_type


def test_S43_a_fine_scale_is_demanded_where_an_update_may_have_a_weight_of_its_own() -> None:
    """A server that hands out versions hands out weights: coarse sums would tell updates apart."""
    allow_list = AllowList({i: IdentityKey.generate().public for i in range(5)})
    for threat_model, strict in product(ThreatModel, (True, False)):
        parameters = Parameters(5, 1, 1, threat_model=threat_model)
        accepted = strict or threat_model is ThreatModel.MALICIOUS_SERVER
        buffering = BufferingTable(size=3, staleness=Staleness.POLY, strict=strict).make()
        assert (buffering.together(parameters) == 3) == accepted
        coarse = make_quantizer(parameters, 4, 1000.0, buffering=buffering)
        assert coarse.scale < 2**16
        settings = Settings(
            "lightsecagg",
            parameters,
            coarse,
            4,
            bytes(32),
            1,
            allow_list.digest,
            buffering=buffering,
        )
        policy = Policy(allow_list, bytes(32), 1, parameters.threat_model, buffering=buffering)
        if accepted:
            policy.check(settings)
        else:
            with pytest.raises(RemoteProtocolError, match="scale c_l"):
                policy.check(settings)


class FarSession(EpochClientSession):
    """Numbers its masks from 2^63 on."""

    def _go_on(self) -> None:
        party: Any = None if self._round is None else self._round.party
        if (
            party is not None
            and party.is_registered
            and party.state.contributor.next_serial < 2**63
        ):
            far = msgspec.structs.replace(party.state.contributor, next_serial=2**63)
            party.state = msgspec.structs.replace(party.state, contributor=far)
        super()._go_on()


class Far(FederationClient):
    """The client of such a session."""

    epoch_session_type = FarSession


@pytest.mark.parametrize("naive", [True, False])
def test_S41_a_mask_whose_number_fits_no_journal_costs_its_owner_alone(
    naive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: shares of such a mask could not be stored, nor could its end with what came next.

    The server ended, and would have ended after every restart.
    """
    if naive:
        monkeypatch.setattr(relay, "MAX_SERIAL", 2**64)
    federation = NetworkFederation(tmp_path, clients=6, buffer=3)

    async def scenario() -> list[RoundRecord]:
        server = federation.server(number=2, settings=SETTINGS, sums=tmp_path)
        clients = [federation.client(client) for client in range(5)]
        return await served(server, [*clients, federation.client(5, Far)])

    run = partial(asyncio.run, asyncio.wait_for(scenario(), 60))
    if naive:
        with pytest.raises(JournalError, match="too large to convert to SQLite INTEGER"):
            run()
        return
    records = run()
    assert not any(record.aborted for record in records)
    assert not any(5 in record.included for record in records)
    check_every_mean(tmp_path, records)

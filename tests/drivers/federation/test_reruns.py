"""S42 over real sockets: what a server gets that runs a round again from the same model."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from network_federation import DIMENSION, NetworkFederation
from small_federation import Federation
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.errors import Aborted, ConfigurationError, ParameterError
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.settings import hash_model
from lightsecagg.session.envelope import name_of
from lightsecagg.session.interface import Train
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_server import RoundServerSession

CLIENTS = 6
VICTIM = CLIENTS - 1
MODEL = np.arange(DIMENSION, dtype="<f4").tobytes()


class Retrained:
    """A client's job on full batches: training again from the same model changes the last bits."""

    dimension = DIMENSION

    def __init__(self, client: int) -> None:
        self.client, self.trainings = client, 0

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        self.trainings += 1
        vector = np.random.default_rng(self.client).uniform(-0.9, 0.9, DIMENSION)
        return Update(vector * (1 + 1e-12 * self.trainings))


class OldLedger(Ledger):
    """What a client remembered before: spent updates and a count, but no update and no set."""

    def check_update(self, model: bytes, fingerprint: bytes, commitment: bytes) -> None:
        self.check_unspent(fingerprint)

    def consent(self, model: bytes, fingerprint: bytes, survivors: tuple[int, ...]) -> None:
        self.spend(fingerprint)


class NaiveClient(FederationClient):
    """Trains again in every round, and remembers what clients remembered before."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:-1], OldLedger.volatile())

    async def _train(self, effect: Train) -> None:
        await super()._train(replace(effect, update=None))


class SameModel:
    """A server's job that never steps, and keeps the sums that it was given."""

    dimension, weighted = DIMENSION, False

    def __init__(self, results: list[np.ndarray[Any, Any]]) -> None:
        self.results = results

    def model(self) -> bytes:
        return MODEL

    def apply(self, aggregate: Any, samples: int, completed: int) -> None:
        self.results.append(aggregate.copy())

    def instructions(self, completed: int) -> None:
        return None

    def metrics(self, aggregate: Any, rounding: float) -> dict[str, Any]:
        return {}

    def evaluate(self) -> dict[str, float]:
        return {}

    def save(self) -> bytes:
        return b""

    def load(self, data: bytes) -> None:
        pass


class RerunsWithout(RoundServerSession):
    """Invites everybody, then everybody but the victim, for the same model."""

    absent: tuple[int, ...] = (VICTIM,)

    def _open_round(self, invited: list[int], now: float) -> None:
        if self.rounds:
            invited = [c for c in range(CLIENTS) if c not in self.absent]
        super()._open_round(invited, now)


def attack(
    folder: Path, kind: type[FederationClient], absent: tuple[int, ...] = (VICTIM,)
) -> tuple[list[np.ndarray[Any, Any]], list[Retrained]]:
    """The sums of the two rounds, and the clients' jobs."""
    federation = NetworkFederation(folder, CLIENTS)
    results: list[np.ndarray[Any, Any]] = []
    jobs = [Retrained(client) for client in range(CLIENTS)]

    async def scenario() -> None:
        server = federation.server(number=2, settle=10, agree=20)
        server.session_type = type("Reruns", (RerunsWithout,), {"absent": absent})
        server._learning.job = SameModel(results)
        clients = [federation.client(c, kind) for c in range(CLIENTS)]
        for client, job in zip(clients, jobs, strict=True):
            client._job = job
        tasks = [asyncio.create_task(client.run()) for client in clients]
        try:
            await asyncio.wait_for(server.run(), 120)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    try:
        asyncio.run(scenario())
    except Aborted:
        assert len(results) == 1
    return results, jobs


def test_S42_attack_a_rerun_without_the_victim_over_real_sockets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (whole, rest), jobs = attack(tmp_path / "naive", NaiveClient)
    update = jobs[VICTIM].compute(b"", 0, 1.0).vector
    learnt = whole - rest
    cosine = learnt @ update / np.linalg.norm(learnt) / np.linalg.norm(update)
    assert cosine > 0.9999

    results, jobs = attack(tmp_path / "ours", FederationClient)
    assert len(results) == 1
    assert [job.trainings for job in jobs] == [1] * CLIENTS, "the repeat brings the same update"
    assert "a second, different survivor set for global model" in caplog.text
    assert "lightsecagg ledger forgive" in caplog.text


def test_S42_a_rerun_with_the_same_clients_gives_the_same_sum(tmp_path: Path) -> None:
    (first, second), jobs = attack(tmp_path, FederationClient, absent=())
    np.testing.assert_array_equal(first, second)
    assert [job.trainings for job in jobs] == [1] * CLIENTS


class Constant:
    """A client's job: one vector for one model; `fail_in` names a round without it."""

    dimension = DIMENSION

    def __init__(self, client: int, fail_in: int = -1) -> None:
        self.client, self.fail_in = client, fail_in

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        if round_number == self.fail_in:
            raise Aborted("the job failed")
        return Update(np.random.default_rng(self.client).uniform(-0.9, 0.9, DIMENSION))


class MuteInRoundOne(FederationClient):
    """Signs, but its answer is lost."""

    async def _post(self, data: bytes) -> None:
        if not (name_of(data) == "AggregatedShare" and self._session.round == 1):
            await super()._post(data)


class Bereaved(RoundServerSession):
    """After its first round it notices that client 0 is gone, and waits no longer for it."""

    def _begin_to_wait(self, now: float) -> None:
        if self.rounds:
            self._plan = replace(self._plan, min_clients=7, wait_for_clients=0.5)
        super()._begin_to_wait(now)

    def _decide(self, now: float) -> None:
        if not (self.rounds and 0 in self._peers.ready()):
            super()._decide(now)


@pytest.mark.parametrize("returns", [True, False])
def test_S42_a_server_repeats_a_failed_round_with_the_same_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, returns: bool
) -> None:
    """Client 7 was not in the U1 that the others have signed for, so it is not invited again."""
    federation = Federation(tmp_path, 8, dimension=DIMENSION)
    federation.job = SameModel([])
    federation.jobs = {i: Constant(i, fail_in=1 if i == 7 else -1) for i in range(8)}

    async def scenario() -> list[RoundRecord]:
        kinds = [MuteInRoundOne if i < 4 else FederationClient for i in range(8)]
        clients = [federation.client(i, kind) for i, kind in enumerate(kinds)]
        server = federation.server(retries=1, recover=1, agree=60)
        async with federation.connected(clients) as tasks:
            if not returns:
                server.session_type = Bereaved
                original = server._end_round

                async def end_round(record: RoundRecord) -> None:
                    await original(record)
                    tasks[0].cancel()  # it is gone for good

                server._end_round = end_round  # type: ignore[method-assign]
            try:
                await asyncio.wait_for(server.run(), 120)
            except Aborted:
                assert not returns
            return server.records

    records = asyncio.run(scenario())
    assert "answered" in (records[0].aborted or "")
    if returns:
        assert records[1].aborted is None
        assert records[1].invited == records[1].included == [0, 1, 2, 3, 4, 5, 6]
    else:
        assert "of the failed round are away, others will refuse" in caplog.text


# -- the way out -----------------------------------------------------------------------------------


class Mute(FederationClient):
    """Signs, and never answers: what a client does whose peers got garbage for shares."""

    async def _post(self, data: bytes) -> None:
        if name_of(data) != "AggregatedShare":
            await super()._post(data)


def run_once(
    federation: NetworkFederation, kind: type[FederationClient], retries: int = 0
) -> list[np.ndarray[Any, Any]]:
    """One round from the same model, with the ledgers on disk; its sum, if there is one."""
    results: list[np.ndarray[Any, Any]] = []

    async def scenario() -> None:
        server = federation.server(retries=retries, recover=1)
        server._learning.job = SameModel(results)
        clients = [federation.client(c, kind) for c in range(CLIENTS)]
        for number, client in enumerate(clients):
            client._job = Constant(number)
        tasks = [asyncio.create_task(client.run()) for client in clients]
        try:
            await asyncio.wait_for(server.run(), 120)
        except Aborted:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    return results


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["ledger", *arguments])


def test_S42_a_model_whose_rounds_failed_goes_on_when_the_operators_of_the_clients_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rounds fail after the uploads; nobody but the clients' operators mends that."""
    federation = NetworkFederation(tmp_path, CLIENTS)
    assert run_once(federation, Mute, retries=1) == []
    caplog.clear()
    assert run_once(federation, FederationClient) == [], "every honest client refuses"
    said = re.search(r"2 updates for global model (\w{16})\.\.\., .* ledger forgive", caplog.text)
    assert said is not None
    configs = [str(federation.made.clients[c]) for c in range(CLIENTS)]
    shown = command("show", "--json", "--config", configs[0])
    assert json.loads(shown.stdout) == {
        "last_round": 2,
        "uploads": {hash_model(MODEL).hex(): 2},
    }
    assert hash_model(MODEL).hex().startswith(said[1])
    refused = CliRunner().invoke(app, ["ledger", "forgive", said[1], "--config", configs[0]], "n\n")
    assert refused.exit_code == 1
    assert run_once(federation, FederationClient) == [], "asked, and not answered with yes"
    for config in configs:
        result = command("forgive", said[1], "--yes", "--config", config)
        assert result.exit_code == 0
        assert "that client's update" in " ".join(result.output.split())
    (total,) = run_once(federation, FederationClient)
    expected = np.sum([Constant(c).compute(b"", 0, 1.0).vector for c in range(CLIENTS)], axis=0)
    np.testing.assert_allclose(total, expected, atol=1e-6)


def test_forgiving_needs_one_model_and_a_ledger(tmp_path: Path) -> None:
    federation = NetworkFederation(tmp_path, CLIENTS)
    config = str(federation.made.clients[0])
    result = command("show", "--config", config)
    assert isinstance(result.exception, ConfigurationError)
    assert "there is no ledger" in str(result.exception)
    client = federation.client(0)
    ledger: Any = client._ledger
    for model in (b"\xab" * 32, b"\xac" * 32):
        ledger.count_upload(model)
    ledger.store(ledger.to_bytes())
    result = command("show", "--config", config)
    assert "another process" in str(result.exception), "not while the client runs"
    ledger.close()
    assert command("show", "--config", config).output.count("1 uploads") == 2
    for prefix in ("a", "ff"):
        result = command("forgive", prefix, "--yes", "--config", config)
        assert isinstance(result.exception, ParameterError)
    assert command("forgive", "AC", "--yes", "--config", config).exit_code == 0
    assert "ac" * 32 not in command("show", "--config", config).output


# -- a ledger that is lost, or older than the uploads ----------------------------------------------


def test_S06_a_client_without_its_newest_ledger_notices_and_sits_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Control: a newcomer, whose ledger is new too, takes part."""
    caplog.set_level("INFO")
    federation = NetworkFederation(tmp_path, CLIENTS)
    paths = [federation.made.clients[c].parent / "ledger" for c in range(2)]

    def rounds(number: int, present: range) -> RoundRecord:
        async def scenario() -> RoundRecord:
            server = federation.server(number=number, min_clients=len(present), settle=0.1)
            clients = [federation.client(c) for c in present]
            tasks = [asyncio.create_task(client.run()) for client in clients]
            try:
                return (await asyncio.wait_for(server.run(), 120))[-1]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return asyncio.run(scenario())

    assert rounds(1, range(CLIENTS - 1)).included == [0, 1, 2, 3, 4]
    older = paths[0].read_bytes()
    assert rounds(2, range(CLIENTS)).included == [0, 1, 2, 3, 4, 5], "client 5 is new"
    assert rounds(3, range(CLIENTS)).included == [0, 1, 2, 3, 4, 5]

    paths[0].write_bytes(older)
    assert rounds(4, range(CLIENTS)).included == [1, 2, 3, 4, 5]
    assert "client 0: the server has stored an upload of this client's in round 3" in caplog.text
    assert "latest round is 1" in caplog.text
    config = str(federation.made.clients[0])
    assert command("accept-loss", "--round", "3", "--yes", "--config", config).exit_code == 0
    assert rounds(5, range(CLIENTS)).included == [0, 1, 2, 3, 4, 5]

    caplog.clear()
    paths[1].unlink()
    assert rounds(6, range(CLIENTS)).included == [0, 2, 3, 4, 5]
    assert "client 1 begins a new ledger" in caplog.text
    assert "client 1: the server has stored an upload of this client's in round 5" in caplog.text

"""Settings of local training from the server: what clients take, refuse and are safe from."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from network_federation import DIMENSION, NetworkFederation
from small_federation import Federation

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.jobs import TrainingClient, TrainingServer
from lightsecagg.drivers.federation.steering import adopt, scheduled
from lightsecagg.drivers.federation.training_tables import AcceptTable, ScheduleTable, TrainingTable
from lightsecagg.errors import Aborted, DecodeError, RemoteProtocolError
from lightsecagg.protocol.interface import Update
from lightsecagg.session.envelope import RoundModel, name_of, pack_control, unpack
from lightsecagg.session.instructions import Instructions
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_client import RoundClientSession
from lightsecagg.session.round_server import RoundServerSession
from lightsecagg.training.config import LocalConfig

OWN = LocalConfig(epochs=2, batch_size=32, learning_rate=0.05)
ACCEPT = AcceptTable(epochs=(1, 5), learning_rate=(0.001, 0.2))

# -- schedules -------------------------------------------------------------------------------------


def test_steps_begin_with_the_completed_round_that_they_name() -> None:
    schedule = ScheduleTable(epochs={2: 5, 4: 1}, learning_rate={1: 0.3})
    said = [scheduled(schedule, OWN, completed) for completed in range(4)]
    assert [values.get("epochs") for values in said] == [None, 5, 5, 1]
    assert {values["learning_rate"] for values in said} == {0.3}


def test_the_learning_rate_decays_down_to_its_least() -> None:
    schedule = ScheduleTable.model_validate({"decay": {"factor": 0.5, "every": 2, "least": 0.02}})
    rates = [scheduled(schedule, OWN, completed)["learning_rate"] for completed in range(6)]
    assert rates == [0.05, 0.05, 0.025, 0.025, 0.02, 0.02]


def test_a_least_above_the_rate_does_not_raise_it() -> None:
    schedule = ScheduleTable.model_validate({"decay": {"factor": 0.5, "least": 1.0}})
    assert scheduled(schedule, OWN, 3)["learning_rate"] == 0.05


# -- what a client takes ---------------------------------------------------------------------------


def test_a_client_adopts_what_its_ranges_allow() -> None:
    asked = Instructions({"epochs": 5, "learning_rate": 0.2, "batch_size": 32, "optimizer": "sgd"})
    assert adopt(asked, OWN, ACCEPT) == replace(OWN, epochs=5, learning_rate=0.2)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("learning_rate", 0.3, r"learning_rate = 0\.3; this client accepts 0\.001 to 0\.2"),
        ("learning_rate", math.nan, r"learning_rate = nan; this client accepts"),
        ("learning_rate", "0.1", r"learning_rate = '0\.1'; this client accepts"),
        ("epochs", 6, r"epochs = 6; this client accepts 1 to 5"),
        ("epochs", 2.5, r"epochs = 2\.5; this client accepts 1 to 5"),
        ("batch_size", 16, r"batch_size = 16; this client's own is 32, and \[training\.accept\]"),
        ("optimizer", "adam", r"optimizer = 'adam'; this client's own is 'sgd'"),
        ("algorithm", "fednova", r"algorithm = 'fednova'; this client's own is 'fedavg'"),
        ("privacy\x1b[2J", 0, r"privacy\\x1b\[2J = 0; which this client does not know"),
    ],
)
def test_a_client_refuses_anything_else_by_name(name: str, value: Any, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        adopt(Instructions({name: value}), OWN, ACCEPT)


def test_what_is_allowed_alone_may_still_not_fit_together() -> None:
    wide = AcceptTable(learning_rate=(0.0, 1.0))
    with pytest.raises(RemoteProtocolError, match=r"the server's settings .* learning_rate is 0"):
        adopt(Instructions({"learning_rate": 0.0}), OWN, wide)


@pytest.mark.parametrize(
    "instructions",
    [
        {"local": {f"name{i}": 1 for i in range(17)}},
        {"local": {"x" * 65: 1}},
        {"local": {"optimizer": "x" * 65}},
        {"local": {"epochs": [1]}},
        {"local": {"epochs": None}},
        {"local": {}, "metrics": [["accuracy", 0.0, 1.0]] * 65},
        {"metrics": [["accuracy", 0.0]]},
        {"more": 1},
    ],
)
def test_instructions_are_bounded_on_the_wire(instructions: Any) -> None:
    honest = msgspec.msgpack.decode(pack_control(RoundModel(1, b"", 1.0, Instructions()))[1:])
    data = b"\x00" + msgspec.msgpack.encode(honest | {"instructions": instructions})
    with pytest.raises(DecodeError, match="malformed control message"):
        unpack(data)


def test_the_hash_of_instructions_does_not_depend_on_their_order() -> None:
    one, other = {"epochs": 1, "batch_size": 2}, {"batch_size": 2, "epochs": 1}
    assert Instructions(one).digest == Instructions(other).digest
    assert Instructions(one).digest != Instructions({"epochs": 1}).digest


# -- a federation that trains ----------------------------------------------------------------------

CLIENTS = 5
TASK = {"task": "digits", "clients": CLIENTS, "model": "logistic", "samples_per_client": 40}


def table(**more: Any) -> TrainingTable:
    return TrainingTable.model_validate({"task": TASK, "local": {"learning_rate": 0.1}} | more)


def train(folder: Path, server: TrainingTable, clients: list[TrainingTable]) -> list[RoundRecord]:
    federation = Federation(folder, CLIENTS, privacy=1, dropouts=1, bound=2.0, max_samples=1000)
    federation.job = TrainingServer(server, 2.0)
    federation.jobs = {i: TrainingClient(t, i, bytes([i]) * 32) for i, t in enumerate(clients)}
    return asyncio.run(federation.run(number=2, settle=5, upload=100, advertise=100))


def test_a_learning_rate_of_the_server_reaches_the_clients_that_accept_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Client 4 does not: it sits out, says why on both sides, and the rounds go on."""
    pytest.importorskip("sklearn")
    caplog.set_level("INFO")
    steered = table(accept={"learning_rate": [0.01, 0.5]})
    server = table(schedule={"learning_rate": {2: 0.4}})
    first, second = train(tmp_path, server, [steered] * 4 + [table()])
    assert (first.local, second.local) == ({"learning_rate": 0.1}, {"learning_rate": 0.4})
    assert (first.included, second.included) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])
    reason = (
        "the server asks for learning_rate = 0.4; this client's own is 0.1, and [training.accept] "
        "has no range"
    )
    assert second.withdrawn == {reason: [4]}
    assert second.to_json()["withdrawn"] == {reason: [4]}
    assert f"client 4 dropped in phase advertise: it withdraws: {reason!r}" in caplog.text
    assert f"client 4: round 2: {reason}" in caplog.text
    assert "client 0: round 2: the server sets learning_rate = 0.4 (own: 0.1)" in caplog.text


def test_the_settings_of_the_server_are_the_ones_that_are_trained_with() -> None:
    pytest.importorskip("sklearn")
    job = TrainingServer(table(), 2.0)
    own = TrainingClient(table(accept={"learning_rate": [0.0, 1.0]}), 0, bytes(32))
    asked = own.instructed(Instructions({"learning_rate": 0.4}))
    told = TrainingClient(table(local={"learning_rate": 0.4}), 0, bytes(32))
    vectors = [each.compute(job.model(), 1, 2.0).vector for each in (own, asked, told)]
    np.testing.assert_array_equal(vectors[1], vectors[2])
    assert not np.array_equal(vectors[0], vectors[1])


# -- S42: one model, one update, whatever the settings ---------------------------------------------


class Steered:
    """A client's job: its vector times the learning rate that it is told."""

    dimension = DIMENSION

    def __init__(self, client: int, rate: float = 1.0) -> None:
        self.client, self.rate = client, rate

    def instructed(self, instructions: Instructions) -> Steered:
        return Steered(self.client, float(instructions.local["learning_rate"]))

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        return Update(self.rate * np.random.default_rng(self.client).uniform(-1, 1, DIMENSION))


class OneModel:
    """A server's job that never steps; attempt by attempt it asks for another learning rate."""

    dimension, weighted = DIMENSION, False

    def __init__(self, *rates: float) -> None:
        self.rates, self.results = list(rates), []  # type: ignore[var-annotated]

    def model(self) -> bytes:
        return b"the same model"

    def instructions(self, completed: int) -> Instructions:
        rate = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        return Instructions({"learning_rate": rate})

    def apply(self, aggregate: Any, samples: int, completed: int) -> None:
        self.results.append(aggregate.copy())

    def metrics(self, aggregate: Any, rounding: float) -> dict[str, Any]:
        return {}

    def evaluate(self) -> dict[str, float]:
        return {}

    def save(self) -> bytes:
        return b""

    def load(self, data: bytes) -> None:
        pass


def whole_sum(rate: float, clients: int) -> np.ndarray[Any, Any]:
    return np.sum([Steered(c, rate).compute(b"", 0, 1.0).vector for c in range(clients)], axis=0)


class MuteInRoundOne(FederationClient):
    """Signs, but its answer is lost: the round fails after the uploads, and is run again."""

    async def _post(self, data: bytes) -> None:
        if not (name_of(data) == "AggregatedShare" and self._session.round == 1):
            await super()._post(data)


class ForgetfulSession(RoundClientSession):
    """Has trained from no model before."""

    def _known(self, round_: Any) -> None:
        return None


class Forgetful(MuteInRoundOne):
    """Trains again for every attempt, and its ledger does not mind: the naive client."""

    session_type = ForgetfulSession

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ledger.check_update = lambda *_: None  # type: ignore[method-assign]


class Restarted(MuteInRoundOne):
    """Has lost its update, as a restart would have it, but not its ledger."""

    session_type = ForgetfulSession


class Fickle(RoundServerSession):
    """Asks for other settings when a round is repeated."""

    job: OneModel

    def _open_round(self, invited: list[int], now: float) -> None:
        if self.rounds:
            asked = self.job.instructions(self.completed)
            self._announcement = replace(self._announcement, instructions=asked)
        super()._open_round(invited, now)


def rerun(
    folder: Path, kind: type[FederationClient], rates: tuple[float, ...] = (0.5, 0.25)
) -> list[np.ndarray[Any, Any]]:
    """The sums of a round that is run again, by default with another learning rate."""
    federation = Federation(folder, CLIENTS, dimension=DIMENSION, privacy=1, dropouts=1)
    federation.job = OneModel(*rates)
    federation.jobs = {i: Steered(i) for i in range(CLIENTS)}

    async def scenario() -> None:
        clients = [federation.client(i, kind) for i in range(CLIENTS)]
        async with federation.connected(clients):
            server = federation.server(retries=1, recover=1, upload=60, agree=60)
            server.session_type = Fickle
            Fickle.job = federation.job
            await asyncio.wait_for(server.run(), 120)

    try:
        asyncio.run(scenario())
    except Aborted:
        assert not federation.job.results
    results: list[np.ndarray[Any, Any]] = federation.job.results
    return results


def test_S42_S55_a_repeat_with_other_settings_brings_no_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (naive,) = rerun(tmp_path / "naive", Forgetful)
    np.testing.assert_allclose(naive, whole_sum(0.25, CLIENTS), atol=1e-6)

    assert rerun(tmp_path / "ours", MuteInRoundOne) == []
    assert "it has trained from this model already, by other instructions" in caplog.text

    assert rerun(tmp_path / "restarted", Restarted) == []
    assert "this client has uploaded another update, or by other instructions" in caplog.text


# -- S08: everybody is told the same ---------------------------------------------------------------

VICTIM = 2
FAST, SLOW = Instructions({"learning_rate": 1.0}), Instructions({"learning_rate": 1e-7})


class TrustingSession(RoundClientSession):
    """Takes part whatever the others were told."""

    def _make_party(self, protocol: str, round_: Any) -> Any:
        given = replace(round_.announcement, instructions=SLOW)
        return super()._make_party(protocol, replace(round_, announcement=given))


class Trusting(FederationClient):
    """The naive client."""

    session_type = TrustingSession


def single_out(folder: Path, kind: type[FederationClient]) -> list[np.ndarray[Any, Any]]:
    """The server tells everybody but the victim to train as good as nothing."""
    federation = NetworkFederation(folder, CLIENTS)
    job = OneModel(1e-7)

    async def scenario() -> None:
        server = federation.server()
        server._learning.job = job
        post = server._communicator.post

        def favour(client: int, data: bytes) -> None:
            content = unpack(data)
            if client == VICTIM and isinstance(content, RoundModel):
                data = pack_control(msgspec.structs.replace(content, instructions=FAST))
            post(client, data)

        server._communicator.post = favour  # type: ignore[method-assign]
        clients = [federation.client(c, kind, job=Steered(c)) for c in range(CLIENTS)]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        try:
            records = await asyncio.wait_for(server.run(), 120)
            assert (VICTIM in records[0].included) == (kind is Trusting)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    return job.results


def test_S08_a_server_cannot_train_one_client_harder_than_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the sum is the update of that one client."""
    update = Steered(VICTIM).compute(b"", 0, 1.0).vector
    (leaked,) = single_out(tmp_path / "naive", Trusting)
    np.testing.assert_allclose(leaked, update, atol=1e-5)

    (ours,) = single_out(tmp_path / "ours", FederationClient)
    assert np.abs(ours).max() < 1e-5
    assert "other instructions for training than those that this client was given" in caplog.text


def test_S42_a_repeat_with_the_same_settings_brings_the_same_update(tmp_path: Path) -> None:
    (ours,) = rerun(tmp_path, MuteInRoundOne, (0.5,))
    np.testing.assert_allclose(ours, whole_sum(0.5, CLIENTS), atol=1e-6)


# -- S55: an update is of its instructions ---------------------------------------------------------


class ReusingSession(RoundClientSession):
    """Uses the update that it has from a model, however the server asked for it."""

    def _known(self, round_: Any) -> Any:
        known = super()._known(round_)
        if known is None:
            return None
        return replace(known, instructions=round_.instructions)


class Reusing(FederationClient):
    """The naive client."""

    session_type = ReusingSession


def prepare_and_repeat(folder: Path, kind: type[FederationClient]) -> list[np.ndarray[Any, Any]]:
    """A round that is announced to the victim alone, and never opened; then an honest one."""
    federation = NetworkFederation(folder, CLIENTS)
    job = OneModel(1e-7)

    async def scenario() -> None:
        server = federation.server()
        server._learning.job = job
        clients = [federation.client(c, kind, job=Steered(c)) for c in range(CLIENTS)]
        post, behind = server._communicator.post, list[bytes]()

        async def release() -> None:
            while clients[VICTIM]._session._trained is None:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            server._communicator.post = post  # type: ignore[method-assign]
            for data in behind:
                post(VICTIM, data)

        def prepare(client: int, data: bytes) -> None:
            content = unpack(data)
            if client == VICTIM and isinstance(content, RoundModel):
                told = msgspec.structs.replace(content, round=0, instructions=FAST)
                post(VICTIM, pack_control(told))
                tasks.append(asyncio.create_task(release()))
            if client == VICTIM and len(tasks) > CLIENTS:
                behind.append(data)
            else:
                post(client, data)

        server._communicator.post = prepare  # type: ignore[method-assign]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        try:
            records = await asyncio.wait_for(server.run(), 120)
            assert (VICTIM in records[0].included) == (kind is Reusing)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    return job.results


def test_S55_S08_a_round_that_is_never_opened_prepares_no_update_for_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All clients sign the same instructions; the victim's update would be of others."""
    update = Steered(VICTIM).compute(b"", 0, 1.0).vector
    (leaked,) = prepare_and_repeat(tmp_path / "naive", Reusing)
    np.testing.assert_allclose(leaked, update, atol=1e-5)

    (ours,) = prepare_and_repeat(tmp_path / "ours", FederationClient)
    assert np.abs(ours).max() < 1e-5
    assert "it has trained from this model already, by other instructions" in caplog.text


class Held(Steered):
    """Trains fast in its own time: until `released` the update is not ready."""

    begun, released = threading.Event(), threading.Event()

    def instructed(self, instructions: Instructions) -> Held:
        return Held(self.client, float(instructions.local["learning_rate"]))

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        if self.rate == 1.0:
            self.begun.set()
            assert self.released.wait(60)
        return super().compute(model, round_number, bound)


class ReadySession(RoundClientSession):
    """Begins a round as often as it is announced."""

    def _begin(self, message: RoundModel) -> None:
        self._announced = -1
        super()._begin(message)


class Ready(FederationClient):
    """The naive client."""

    session_type = ReadySession


def announce_twice(folder: Path, kind: type[FederationClient]) -> list[np.ndarray[Any, Any]]:
    """One number for two rounds: what is trained in the first is handed in in the second.

    The victim has an update from the model that all will train from. While it trains from another
    model, by other instructions, it hears that this round is from the old one: nothing has to be
    trained, so the training that is under way brings an update of the round's number.
    """
    federation = NetworkFederation(folder, CLIENTS)
    job = OneModel(1e-7)
    Held.begun.clear()
    Held.released.clear()

    async def scenario() -> None:
        server = federation.server()
        server._learning.job = job
        clients = [
            federation.client(c, kind, job=Held(c) if c == VICTIM else Steered(c))
            for c in range(CLIENTS)
        ]
        victim, post, behind = clients[VICTIM], server._communicator.post, list[bytes]()

        async def until(holds: Callable[[], bool]) -> None:
            while not holds():
                await asyncio.sleep(0.01)

        async def prepare(told: RoundModel) -> None:
            session: Any = victim._session
            post(VICTIM, pack_control(msgspec.structs.replace(told, round=0)))
            await until(lambda: session._trained is not None)
            other = {"model": b"another model", "instructions": FAST}
            post(VICTIM, pack_control(msgspec.structs.replace(told, **other)))
            await until(Held.begun.is_set)
            handled, handle = list[Any](), session.handle

            def noted(event: Any, now: float) -> Any:
                effects = handle(event, now)
                handled.append(event)
                return effects

            session.handle = noted
            post(VICTIM, pack_control(told))
            await until(lambda: bool(handled))
            Held.released.set()
            await until(lambda: victim._training is None)
            server._communicator.post = post  # type: ignore[method-assign]
            for data in behind:
                post(VICTIM, data)

        def favour(client: int, data: bytes) -> None:
            content = unpack(data)
            if client == VICTIM and isinstance(content, RoundModel):
                tasks.append(asyncio.create_task(prepare(content)))
            elif client == VICTIM:
                behind.append(data)
            else:
                post(client, data)

        server._communicator.post = favour  # type: ignore[method-assign]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(c.run()) for c in clients]
        try:
            await asyncio.wait_for(server.run(), 120)
        finally:
            Held.released.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    return job.results


def test_S55_S08_what_is_trained_under_one_number_is_not_handed_in_under_the_same_again(
    tmp_path: Path,
) -> None:
    update = Steered(VICTIM).compute(b"", 0, 1.0).vector
    (leaked,) = announce_twice(tmp_path / "naive", Ready)
    np.testing.assert_allclose(leaked, update, atol=1e-5)

    (ours,) = announce_twice(tmp_path / "ours", FederationClient)
    assert np.abs(ours).max() < 1e-5

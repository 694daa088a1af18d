"""A bad sum, or a bad evaluation, harms one round at most, and no restart repeats it."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from network_federation import DIMENSION, NetworkFederation
from small_federation import Federation

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.server import FederationServer
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import ConfigurationError, RecoveryError
from lightsecagg.field.prime import PrimeField
from lightsecagg.params import DEFAULT_MODULUS as Q
from lightsecagg.protocol.buffers import hash_upload
from lightsecagg.protocol.messages import MaskedUpload
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import RoundOver, name_of, pack_protocol, unpack
from lightsecagg.session.interface import Announcement, Applied, Apply, Event, Received
from lightsecagg.session.record import RoundRecord


class Liar(FederationClient):
    """Adds `lie` (entry -> quanta) to its masked upload in its first round."""

    lie: ClassVar[dict[int, int]] = {}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard: list[str | None] = []

    async def _post(self, data: bytes) -> None:
        if name_of(data) == "MaskedUpload" and self._session.round == 1:
            content, codec = unpack(data), Codec(PrimeField(Q))
            assert isinstance(content, tuple)
            message = codec.decode(content[1])
            assert isinstance(message, MaskedUpload)
            vector = message.vector.copy()
            for entry, quanta in self.lie.items():
                vector[entry] = (int(vector[entry]) + quanta) % Q
            tag = msgspec.structs.replace(message.tag, digest=hash_upload(codec._group, vector))
            data = pack_protocol(1, codec.encode(MaskedUpload(tag, vector)))
        await super()._post(data)

    async def _tell(self, event: Event) -> None:
        if isinstance(event, Received):
            content = unpack(event.data)
            if isinstance(content, RoundOver):
                self.heard.append(content.aborted)
        await super()._tell(event)


def liar(**lie: int) -> type[Liar]:
    places = {"count": DIMENSION, "entry": 3}
    return type("LiarOnce", (Liar,), {"lie": {places[name]: lie[name] for name in lie}})


@asynccontextmanager
async def running(clients: Iterable[FederationClient]) -> Any:
    tasks = [asyncio.create_task(client.run()) for client in clients]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def bounded(server: FederationServer) -> list[RoundRecord]:
    return await asyncio.wait_for(server.run(), 120)


def everybody(federation: NetworkFederation, kind: type[Liar]) -> list[FederationClient]:
    return [federation.client(0, kind), *(federation.client(i) for i in (1, 2, 3))]


# -- sums ----------------------------------------------------------------------------------------


async def trusting_apply(self: FederationServer, effect: Apply) -> Applied:
    """What a server does that expects honest uploads: an average that fails is its own end."""
    aggregate = effect.aggregate
    average, samples = effect.settings.average(aggregate.total, len(aggregate.included))
    self._job.apply(average, samples, 1)
    self._journal.complete(effect.record.round, 1, self._job.save())
    return Applied(Announcement())


def test_S41_a_false_count_ends_one_round_and_no_server(tmp_path: Path) -> None:
    """Over real sockets. A trusting server dies of it, and again whenever it is started."""
    federation = NetworkFederation(tmp_path, 4, weighted=True)

    async def scenario() -> list[RoundRecord]:
        async with running(everybody(federation, liar(count=-(10**6)))):
            for _ in ("at first", "after a restart"):
                trusting: Any = federation.server()
                trusting._apply = MethodType(trusting_apply, trusting)
                with pytest.raises(RecoveryError, match="sample counts is -999996"):
                    await bounded(trusting)
            return await bounded(federation.server(retries=1))

    resumed, second = asyncio.run(scenario())
    assert federation.server()._journal.unfinished() == [], "no restart repeats it"
    assert (resumed.round, resumed.resumed, resumed.spoilt) == (1, True, True)
    assert second.included == [0, 1, 2, 3]
    federation.check(second)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"count": -(10**6)}, "the sum of sample counts is -999996, outside 4...400000"),
        ({"count": 10**6}, "the sum of sample counts is 1000004, outside 4...400000"),
        ({"count": -1}, "the sum of sample counts is 3, outside 4...400000"),
        ({"entry": Q // 4}, "entry 3 of the average lies beyond the bound 1.0"),
        ({"entry": -Q // 4}, "entry 3 of the average lies beyond the bound 1.0"),
    ],
)
def test_S47_a_spoilt_sum_leaves_the_model_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lie: dict[str, int], reason: str
) -> None:
    """Over real sockets; the record and the log name it, clients hear no number of the sum."""
    federation = NetworkFederation(tmp_path, 4, weighted=True)
    clients = everybody(federation, liar(**lie))
    states: list[Any] = []

    async def scenario() -> list[RoundRecord]:
        server = federation.server(retries=1)
        abandon = server._journal.abandon

        def look(number: int, why: str, *, renews: bool) -> None:
            states.append((server._job.save(), federation.output.exists()))
            abandon(number, why, renews=renews)

        server._journal.abandon = look  # type: ignore[method-assign]
        async with running(clients):
            return await bounded(server)

    with caplog.at_level(logging.INFO, "lightsecagg"):
        spoilt, second = asyncio.run(scenario())
    assert spoilt.spoilt
    assert spoilt.aborted is not None
    assert spoilt.aborted.startswith(f"the sum is spoilt: it cannot be used: {reason}")
    assert f"round 1: {spoilt.aborted}" in caplog.text
    assert states == [(b"", False)], "there was no result before, and there is none now"
    (first, *_) = clients
    assert isinstance(first, Liar)
    assert first.heard[0] == "the sum is spoilt: it cannot be used"
    assert not second.spoilt
    federation.check(second)


def test_S47_control_a_server_that_only_divides_takes_any_average(tmp_path: Path) -> None:
    federation = NetworkFederation(tmp_path, 4, weighted=True)

    async def divide(self: Any, effect: Apply) -> Applied:
        total = effect.aggregate.total
        average = effect.settings.quantizer.dequantise(total[:-1], int(total[-1]))
        self._job.apply(average, 4, 1)
        self._journal.complete(effect.record.round, 1, self._job.save())
        return Applied(Announcement())

    async def scenario() -> None:
        server: Any = federation.server()
        server._apply = MethodType(divide, server)
        async with running(everybody(federation, liar(entry=Q // 4))):
            await bounded(server)

    asyncio.run(scenario())
    with np.load(federation.output) as stored:
        assert stored["result"][3] > 10_000


# -- jobs ----------------------------------------------------------------------------------------


class Stumbling(VectorServer):
    """A job that breaks in chosen steps of its first round, after it has begun to change."""

    def __init__(self, table: VectorsTable, breaks_in: str) -> None:
        super().__init__(table)
        self.breaks_in, self.calls = breaks_in, 0
        self.completed: list[int] = []

    def apply(self, aggregate: Any, samples: int, completed: int) -> None:
        super().apply(aggregate, samples, completed)
        self.completed.append(completed)
        self._break("apply")

    def save(self) -> bytes:
        if self.completed:
            self._break("save")
        return super().save()

    def evaluate(self) -> dict[str, float]:
        self._break("evaluate")
        return super().evaluate()

    def _break(self, place: str) -> None:
        if place == self.breaks_in:
            self.calls += 1
            if self.calls == 1:
                raise KeyError("rmse")


def stumbling(folder: Path, breaks_in: str) -> Federation:
    federation = Federation(folder, 4, privacy=1, dropouts=1)
    federation.job = Stumbling(VectorsTable(dimension=federation.job.dimension), breaks_in)
    return federation


@pytest.mark.parametrize("place", ["apply", "save"])
def test_S41_a_step_that_fails_is_undone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    federation = stumbling(tmp_path, place)
    restored: list[bytes] = []
    load = federation.job.load
    federation.job.load = lambda data: (restored.append(data), load(data))
    spoilt, second = asyncio.run(federation.run(retries=1))
    assert spoilt.spoilt
    assert "KeyError" in caplog.text
    assert "in _break" in caplog.text, "an error of foreign code comes with its traceback"
    assert restored == [b""], "as before the round, when there was no result"
    assert federation.job.completed == [1, 1], "the spoilt round did not count"
    federation.check(second)


def test_R30_a_failing_evaluation_costs_its_figures_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = stumbling(tmp_path, "evaluate")
    first, second = asyncio.run(federation.run(number=2))
    assert (first.aborted, first.figures) == (None, {})
    assert "round 1 is done and its model stored, but evaluating it failed" in caplog.text
    assert "KeyError: 'rmse'" in caplog.text
    assert list(second.figures) == ["norm"]
    federation.check(second)


def test_R36_a_result_that_is_not_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "result.npz"
    job = VectorServer(VectorsTable(dimension=3, output=output))
    job.apply(np.ones(3), samples=2, completed=1)

    def halfway(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", halfway)
    with pytest.raises(ConfigurationError, match=r"result.npz cannot be written: .*No space left"):
        job.apply(np.zeros(3), samples=2, completed=2)
    with np.load(output) as kept:
        assert (kept["result"].tolist(), int(kept["round"])) == ([1.0, 1.0, 1.0], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["result.npz"]


def test_a_result_that_cannot_be_written_is_not_lost(tmp_path: Path) -> None:
    """Nobody lied: the operator mends it, and the same round is resumed, its vectors not spent."""
    federation = NetworkFederation(tmp_path, 4)
    federation.output = tmp_path / "results" / "result.npz"
    federation.output.parent.mkdir()

    def remove(phase: str, done: int, expected: int) -> None:
        if phase == "recover" and federation.output.parent.exists():
            federation.output.parent.rmdir()

    async def scenario() -> RoundRecord:
        async with running([federation.client(i) for i in range(4)]):
            with pytest.raises(ConfigurationError, match=r"output .* cannot be written"):
                await bounded(federation.server(remove))
            federation.output.parent.mkdir()
            (record,) = await bounded(federation.server())
            return record

    record = asyncio.run(scenario())
    assert (record.round, record.resumed) == (1, True)
    federation.check(record)

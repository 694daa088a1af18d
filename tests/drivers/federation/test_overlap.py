"""Where training runs while masks are encoded and shared: a process, a thread, or before it."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_federation import Federation

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.demo_notes import DemoWatch, read_notes, spans_of
from lightsecagg.drivers.federation.jobs import TrainingClient, TrainingServer
from lightsecagg.drivers.federation.training_tables import TrainingTable
from lightsecagg.errors import ConfigurationError
from lightsecagg.protocol.interface import Update
from lightsecagg.session.record import RoundRecord

pytest.importorskip("torch")
pytest.importorskip("sklearn")

CLIENTS = 4
TABLE = TrainingTable(
    task={"task": "digits", "clients": CLIENTS, "model": "logistic"}, local={"epochs": 1}
)


def run(folder: Path, overlap: str, executor: Any = None) -> list[RoundRecord]:
    federation = Federation(folder / "state", CLIENTS, privacy=1, dropouts=0, bound=2.0)
    federation.job = TrainingServer(TABLE, 2.0)
    federation.jobs = {i: TrainingClient(TABLE, i, bytes(32)) for i in range(CLIENTS)}

    def kind(*arguments: Any) -> FederationClient:
        return FederationClient(*arguments, executor=executor, watch=DemoWatch(folder))

    async def scenario() -> list[RoundRecord]:
        clients = [federation.client(i, kind, overlap=overlap) for i in range(CLIENTS)]
        async with federation.connected(clients):
            waits = {"settle": 20, "wait_for_clients": 120}
            server = federation.server(number=2, upload=120, share=120, **waits)
            return await asyncio.wait_for(server.run(), 120)

    return asyncio.run(scenario())


def spans(folder: Path, number: int, client: int) -> dict[str, tuple[float, float]]:
    """Phase -> first start and last end at this client."""
    found: dict[str, tuple[float, float]] = {}
    for span in spans_of(read_notes(folder))[number, client]:
        start, end = found.get(span["phase"], (span["start"], span["end"]))
        found[span["phase"]] = (min(start, span["start"]), max(end, span["end"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["process", "thread", "off"])
def test_every_overlap_mode_trains_and_its_timings_are_told(tmp_path: Path, overlap: str) -> None:
    if overlap == "process":
        # One child for all clients, spawned like a client's own: it imports torch once.
        from lightsecagg.training import training_pool

        with training_pool(1) as pool:
            records = run(tmp_path, overlap, pool)
            assert len(multiprocessing.active_children()) == 1
    else:
        records = run(tmp_path, overlap)
    assert [record.included for record in records] == [list(range(CLIENTS))] * 2
    assert records[-1].figures["accuracy"] > 0.2
    for number in (1, 2):
        for client in range(CLIENTS):
            found = spans(tmp_path, number, client)
            assert set(found) >= {"advertise", "share", "training", "upload", "agree", "recover"}
            assert found["training"][1] <= found["upload"][1]
            if overlap == "off":
                # One after the other: not even keys are drawn before training has ended.
                assert found["training"][1] <= found["advertise"][0]
            else:
                assert found["training"][0] <= found["advertise"][0]
    for phase in records[-1].phases.values():
        assert phase.seconds > 0


class Quick(TrainingClient):
    """Stands for a training that needs no torch."""

    def prepare(self) -> None:
        pass

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        return Update(np.random.default_rng([self.client, round_number]).uniform(-1, 1, 37))


class DyingPool(ThreadPoolExecutor):
    """A pool whose process is killed once the task is loaded: broken for good."""

    loaded = False

    def submit(self, *arguments: Any, **named: Any) -> Any:
        if not self.loaded:
            self.loaded = True
            return super().submit(*arguments, **named)
        future: Future[Any] = Future()
        future.set_exception(BrokenProcessPool("a process in the pool was terminated abruptly"))
        return future


def test_a_training_process_that_dies_costs_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client sits that round out, and trains in a new process in the next one."""
    pools: list[ThreadPoolExecutor] = []

    def pool() -> ThreadPoolExecutor:
        pools.append((DyingPool if not pools else ThreadPoolExecutor)(1))
        return pools[-1]

    monkeypatch.setattr("lightsecagg.drivers.federation.client._training_pool", pool)
    federation = Federation(tmp_path, CLIENTS, privacy=1, dropouts=1)
    federation.jobs[0] = Quick(TABLE, 0, bytes(32))
    federation.client_tables[0] = {"overlap": "process"}
    first, second = asyncio.run(federation.run(number=2, settle=10, upload=60))
    assert 0 not in first.included
    assert 0 in second.included
    assert len(pools) == 2
    assert "client 0 sits round 1 out: training failed with BrokenProcessPool" in caplog.text


class Unloadable(TrainingClient):
    """Its data is not there."""

    def prepare(self) -> None:
        raise ConfigurationError("no file train.csv")


def test_a_client_loads_its_task_before_the_server_counts_on_it(tmp_path: Path) -> None:
    """Deadlines run from the connection on, and a client that cannot train shall not connect."""
    federation = Federation(tmp_path, CLIENTS, privacy=1, dropouts=1)
    connected: list[bool] = []

    class Slow(Quick):
        def prepare(self) -> None:
            connected.append(bool(server.connected))

    async def scenario() -> None:
        serving = asyncio.create_task(server.run())
        federation.jobs[0] = Unloadable(TABLE, 0, bytes(32))
        with pytest.raises(ConfigurationError, match="no file"):
            await federation.client(0).run()
        assert not server.connected
        federation.jobs = {i: Slow(TABLE, i, bytes(32)) for i in range(CLIENTS)}
        async with federation.connected([federation.client(0)]):
            while not server.connected:
                await asyncio.sleep(0.01)
        assert connected == [False]
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    server = federation.server(wait_for_clients=60)
    asyncio.run(scenario())


@pytest.mark.slow
def test_R32_a_killed_client_leaves_no_training_behind() -> None:
    """SIGKILL of the client in the middle of a training that would last for ten minutes."""
    code = (
        "import os, signal, time\n"
        "from lightsecagg.training import training_pool\n"
        "if __name__ == '__main__':\n"
        "    pool = training_pool(1)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 600)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while is_alive(int(done.stdout)):
        assert time.monotonic() < deadline, "the training process goes on"
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_ends_a_training_without_a_traceback() -> None:
    """A terminal sends it to the training process too."""
    code = (
        "import os, signal, time\n"
        "from lightsecagg.training import training_pool\n"
        "if __name__ == '__main__':\n"
        "    pool = training_pool(1)\n"
        "    child = pool.submit(os.getpid).result()\n"
        "    job = pool.submit(time.sleep, 600)\n"
        "    os.kill(child, signal.SIGINT)\n"
        "    print(type(job.exception()).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("BrokenProcessPool\n", "")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"

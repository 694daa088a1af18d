"""A federation at the paper's scale over real sockets: rounds on random vectors, no training.

The server is one process; the clients are logical clients, many to a process, each with its own
identity, certificate and TLS stream. `lost` of them vanish after sharing and before their upload.
The same setting without protection (plain) runs first: what protection costs is the ratio.

`longest_hold_ms` is the longest time for which somebody waited for the server's event loop, with
what was before it in the queue; on a busy machine others' work is in it, which
`longest_hold_cpu_ms` leaves out. `longest_callback_ms` is the longest that one event held the loop,
in CPU time too. So is `cpu_seconds`, of server and clients together from the start of their
processes to the end.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.programs import build_client, build_server, prepare_to_serve
from lightsecagg.drivers.federation.provisioning import Provisioned, free_port, provision
from lightsecagg.drivers.federation.report import phase_table
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import Aborted
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.session.envelope import name_of
from lightsecagg.session.instructions import Instructions
from lightsecagg.session.record import RoundRecord
from lightsecagg_lab.experiments.processes import begin, running, terminable


@dataclass(frozen=True, slots=True)
class FederationBench:
    """What to measure."""

    clients: int = 50
    privacy: int = 12
    dropouts: int = 15
    survivors: int = 0
    dimension: int = 1_206_590
    lost: int = 15
    processes: int = 2
    rounds: int = 1
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    share_mode: ShareMode = ShareMode.SEEDED
    """Of the protocols that share masks."""
    pages: int = 0
    """Of the server's dashboard, open all the time; 0: it has none."""
    timeout: float = 900.0


@dataclass(frozen=True, slots=True)
class RandomVectors:
    """A client's job: a fresh random vector per round."""

    client: int
    dimension: int | None

    def instructed(self, instructions: Instructions) -> RandomVectors:
        """There is nothing to train."""
        return self

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        """Uniform on [-1, 1]; steered by client and round, so that the sum can be checked."""
        return Update(_vector(self.client, round_number, self.dimension or 0))


def _vector(
    client: int, round_number: int, dimension: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    vector = np.random.default_rng([client, round_number]).random(dimension, dtype=np.float32)
    np.multiply(vector, 2, out=vector)
    return np.subtract(vector, 1, out=vector)


def measure(
    bench: FederationBench,
    protocols: tuple[str, ...],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run every protocol in the same setting; the first one should be plain."""
    runs = {}
    for protocol in protocols:
        tell(f"{protocol}: {bench.clients} clients, d = {bench.dimension}")
        with terminable(), tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder:
            runs[str(protocol)] = _run(bench, protocol, Path(folder))
    if "plain" in runs:
        for run in runs.values():
            run["ratio_to_plain"] = run["seconds"] / runs["plain"]["seconds"]
            run["cpu_ratio_to_plain"] = run["cpu_seconds"] / runs["plain"]["cpu_seconds"]
    return {"runs": runs}


def _run(bench: FederationBench, protocol: str, folder: Path) -> dict[str, Any]:
    traits = traits_of(protocol)
    made = provision(
        folder / "federation",
        bench.clients,
        privacy=bench.privacy,
        dropouts=bench.dropouts,
        port=free_port(),
    )
    weak = bench.threat_model not in traits.threat_models
    threat_model = ThreatModel.HONEST_BUT_CURIOUS if weak else bench.threat_model
    lost = set(range(bench.clients - bench.lost, bench.clients))
    context = multiprocessing.get_context("spawn")
    dashboard = free_port()
    server = context.Process(
        target=_server_main,
        args=(bench, protocol, threat_model, made.server, folder, dashboard),
        daemon=True,
    )
    hosts = [
        context.Process(
            target=_host_main,
            args=(bench, protocol, threat_model, made, group, lost, folder),
            daemon=True,
        )
        for group in np.array_split(np.arange(bench.clients), bench.processes)
    ]
    before = _cpu_of_children()
    with running([server, *hosts]):
        for _ in range(bench.pages):
            threading.Thread(target=_look, args=(dashboard, server), daemon=True).start()
        _wait(server, folder, bench.timeout)
    summary = _summarise(bench, json.loads((folder / "result.json").read_text()), made)
    return summary | {"cpu_seconds": _cpu_of_children() - before}


def _cpu_of_children() -> float:
    """Of those that have ended and been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _summarise(bench: FederationBench, result: dict[str, Any], made: Provisioned) -> dict[str, Any]:
    record = result["records"][-1]
    if record["aborted"] is not None:
        raise Aborted(record["aborted"])
    with np.load(made.server.parent / "result.npz") as stored:
        total = stored["result"]
    expected = np.zeros(bench.dimension)
    for client in record["included"]:
        expected += _vector(client, record["round"], bench.dimension)
    allowed = len(record["included"]) * record["quantisation_step"]
    return {
        "seconds": record["seconds"],
        "included": len(record["included"]),
        "responders": len(record["responders"]),
        "dropped": {phase: len(ids) for phase, ids in record["dropped"].items()},
        "max_abs_difference": float(np.abs(total - expected).max()),
        "quantisation_bound": allowed,
        "server_peak_rss_bytes": result["peak_rss"],
        "server_cpu_seconds": result["cpu_seconds"],
        "longest_hold_ms": result["longest_hold_ms"],
        "longest_hold_cpu_ms": result["longest_hold_cpu_ms"],
        "longest_callback_ms": result["longest_callback_ms"],
        "phases": phase_table(result["records"]),
    }


def _look(port: int, server: SpawnProcess) -> None:
    """What an open page does: read all that it is told."""
    while server.exitcode is None:
        try:
            with socket.create_connection(("127.0.0.1", port)) as page:
                page.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while page.recv(2**16):
                    pass
        except OSError:
            time.sleep(0.1)  # it does not listen yet


def _wait(server: SpawnProcess, folder: Path, timeout: float) -> None:
    server.join(timeout)
    if server.exitcode != 0:
        log = folder / "server.log"
        tail = log.read_text()[-2000:] if log.exists() else ""
        raise Aborted(f"the server ended with exit code {server.exitcode}: {tail}")


def _server_main(
    bench: FederationBench,
    protocol: str,
    threat_model: ThreatModel,
    path: Path,
    folder: Path,
    dashboard: int,
) -> None:
    begin(folder / "server.log", "info")
    overrides = [
        f'aggregation.protocol="{protocol}"',
        f'aggregation.threat_model="{threat_model}"',
        f"aggregation.survivors={0 if traits_of(protocol).ring else bench.survivors}",
        f'aggregation.share_mode="{_share_mode(bench, protocol)}"',
        f"rounds.number={bench.rounds}",
        f"rounds.min_clients={bench.clients}",
        "rounds.grace=0.2",
        f"rounds.wait_for_clients={bench.timeout}",
        "rounds.retries=0",
        *([f"server.dashboard_port={dashboard}"] if bench.pages else []),
        *(
            f"rounds.{phase}={bench.timeout}"
            for phase in ("advertise", "share", "upload", "agree", "recover")
        ),
    ]
    config = load_config(ServerConfig, path, overrides)
    vectors = VectorsTable(dimension=bench.dimension, output=path.parent / "result.npz")
    config = config.model_copy(update={"training": None, "vectors": vectors})
    records, watch = asyncio.run(_serve(config))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    document = {
        "records": [record.to_json() for record in records],
        "peak_rss": usage.ru_maxrss * 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "longest_hold_ms": 1000 * watch.longest,
        "longest_hold_cpu_ms": 1000 * watch.longest_cpu,
        "longest_callback_ms": 1000 * watch.longest_callback,
    }
    (folder / "result.json").write_text(json.dumps(document), encoding="utf-8")


def _share_mode(bench: FederationBench, protocol: str) -> ShareMode:
    """Protocols that share no masks are measured as they are."""
    known = bench.share_mode in traits_of(protocol).share_modes
    return bench.share_mode if known else ShareMode.SEEDED


async def _serve(config: ServerConfig) -> tuple[list[RoundRecord], LoopWatch]:
    server, watch = build_server(config), LoopWatch()
    prepare_to_serve()
    beats = asyncio.create_task(watch.run())
    with watch.callbacks():
        try:
            return await server.run(), watch
        finally:
            beats.cancel()


class LoopWatch:
    """How long its event loop was held at most: a beat every millisecond, and when it came."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds by which a beat came late."""
        self.longest_cpu = 0.0
        """CPU seconds of the loop's thread between two beats."""
        self.longest_callback = 0.0
        """CPU seconds of one callback."""

    @contextmanager
    def callbacks(self) -> Iterator[None]:
        """Time each of them: asyncio's only hook for that is its debug mode, which slows it."""
        real = asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            real(handle)
            self.longest_callback = max(self.longest_callback, time.thread_time() - began)

        asyncio.Handle._run = run  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            asyncio.Handle._run = real  # type: ignore[method-assign]

    async def run(self) -> None:
        """Until it is cancelled."""
        pause = 0.001
        while True:
            began, worked = time.monotonic(), time.thread_time()
            await asyncio.sleep(pause)
            self.longest = max(self.longest, time.monotonic() - began - pause)
            self.longest_cpu = max(self.longest_cpu, time.thread_time() - worked)


class LostClient(FederationClient):
    """Vanishes after sharing, in place of its upload."""

    async def _post(self, data: bytes) -> None:
        if name_of(data) == "MaskedUpload":
            await self._communicator.close()
            await asyncio.sleep(3600)
        await super()._post(data)


def _host_main(
    bench: FederationBench,
    protocol: str,
    threat_model: ThreatModel,
    made: Provisioned,
    group: NDArray[np.int64],
    lost: set[int],
    folder: Path,
) -> None:
    begin(folder / f"clients-{int(group[0])}.log", "warning")
    overrides = [
        f'client.protocols=["{protocol}"]',
        f'client.threat_model="{threat_model}"',
        f'client.share_mode="{_share_mode(bench, protocol)}"',
        'client.overlap="thread"',
        f"client.reconnect={bench.timeout}",
    ]

    async def main() -> None:
        clients = []
        for client in map(int, group):
            config = load_config(ClientConfig, made.clients[client], overrides)
            vectors = VectorsTable(input=Path("unused.npy"))
            config = config.model_copy(update={"training": None, "vectors": vectors})
            kind = LostClient if client in lost else FederationClient
            job = RandomVectors(client, bench.dimension)
            clients.append(build_client(config, kind, job=job))
        await asyncio.gather(*(client.run() for client in clients))

    asyncio.run(main())

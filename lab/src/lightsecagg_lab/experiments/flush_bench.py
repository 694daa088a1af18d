"""Buffers per minute over real sockets, protected and without protection.

As `federation_bench`: one server process, logical clients, many to a process, each with its own
identity, certificate and TLS stream, and random vectors. Without `training` a client has its next
update as soon as it has a newer model; then the figure is what the machine can carry that the
server and all the clients share. With it, clients wait as long as real ones would train, each on a
processor of its own; then it is what a federation of machines would see.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.programs import build_client, run_server
from lightsecagg.drivers.federation.provisioning import Provisioned, free_port, provision
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.drivers.federation.watch import ClientWatch, Training
from lightsecagg.errors import Aborted
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.session.interface import Trained, TrainingFailed
from lightsecagg_lab.experiments.federation_bench import RandomVectors
from lightsecagg_lab.experiments.processes import begin, running, terminable


class Patient(ClientWatch):
    """Has its update after a while, and leaves the processor to others until then."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def begins(self, client: int) -> None:
        """Of its own pace, or all would upload at once."""
        self._pace = np.random.default_rng(client)

    async def training(self, number: int, train: Training) -> Trained | TrainingFailed:
        """Later than its job."""
        await asyncio.sleep(self._seconds * self._pace.uniform(0.5, 1.5))
        return await train()


@dataclass(frozen=True, slots=True)
class FlushBench:
    """What to measure; the weights are those of constant staleness."""

    clients: int = 50
    privacy: int = 8
    dropouts: int = 15
    buffer: int = 10
    dimension: int = 1_206_590
    flushes: int = 8
    """The first is not counted: masks are made for it, and everybody connects."""
    processes: int = 2
    training: float = 0.0
    """Seconds that an update takes on average: uniform between half and one and a half of it."""
    share_mode: ShareMode = ShareMode.SHORT_KEY
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    timeout: float = 1800.0


def measure_flushes(
    bench: FlushBench,
    protocols: tuple[str, ...],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Every protocol in the same setting; `ratio_to_plain` is of buffers per minute."""
    runs = {}
    for protocol in protocols:
        tell(f"{protocol}: {bench.flushes} buffers of {bench.buffer}, {bench.clients} clients")
        with terminable(), tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder:
            runs[str(protocol)] = _run(bench, protocol, Path(folder))
    if "plain" in runs:
        for run in runs.values():
            run["ratio_to_plain"] = run["per_minute"] / runs["plain"]["per_minute"]
    return {"bench": asdict(bench), "runs": runs}


def _run(bench: FlushBench, protocol: str, folder: Path) -> dict[str, Any]:
    made = provision(
        folder / "federation",
        bench.clients,
        privacy=bench.privacy,
        dropouts=bench.dropouts,
        survivors=0,
        vectors=bench.dimension,
        mode="async",
        buffer=bench.buffer,
        port=free_port(),
    )
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(bench, protocol, made, folder), daemon=True)
    hosts = [
        context.Process(
            target=_host, args=(bench, protocol, made, group.tolist(), folder), daemon=True
        )
        for group in np.array_split(np.arange(bench.clients), bench.processes)
    ]
    with running([server, *hosts]):
        server.join(bench.timeout)
        if server.exitcode != 0:
            log = folder / "server.log"
            tail = log.read_text(encoding="utf-8")[-2000:] if log.exists() else ""
            raise Aborted(f"the server ended with {server.exitcode}: {tail}")
    return _summary(json.loads((folder / "records.json").read_text(encoding="utf-8")))


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    done = [record for record in records if record["aborted"] is None]
    ends = [max(phase["end"] for phase in record["phases"].values()) for record in done]
    seconds = ends[-1] - ends[0]
    return {
        "buffers": len(done),
        "failed": len(records) - len(done),
        "updates": sum(len(record["included"]) for record in done[1:]),
        "seconds": seconds,
        "per_minute": 60 * (len(done) - 1) / seconds,
    }


def _overrides(bench: FlushBench, protocol: str) -> tuple[ThreatModel, ShareMode]:
    """As the protocol can: plain sums know no malicious server, and share nothing."""
    traits = traits_of(protocol)
    weak = bench.threat_model not in traits.threat_models
    known = bench.share_mode in traits.share_modes
    return (
        ThreatModel.HONEST_BUT_CURIOUS if weak else bench.threat_model,
        bench.share_mode if known else ShareMode.SEEDED,
    )


def _serve(bench: FlushBench, protocol: str, made: Provisioned, folder: Path) -> None:
    begin(folder / "server.log", "info")
    threat_model, share_mode = _overrides(bench, protocol)
    phases = ("advertise", "share", "upload", "agree", "recover")
    overrides = [
        f'aggregation.protocol="{protocol}"',
        f'aggregation.threat_model="{threat_model}"',
        f'aggregation.share_mode="{share_mode}"',
        f"rounds.number={bench.flushes}",
        f"rounds.min_clients={bench.clients}",
        f"rounds.wait_for_clients={bench.timeout}",
        *(f"rounds.{phase}={bench.timeout}" for phase in phases),
        f"buffering.flush_after={bench.timeout}",
        f"buffering.reports={bench.timeout}",
    ]
    records = run_server(load_config(ServerConfig, made.server, overrides))
    content = json.dumps([record.to_json() for record in records])
    (folder / "records.json").write_text(content, encoding="utf-8")


def _host(
    bench: FlushBench, protocol: str, made: Provisioned, ids: list[int], folder: Path
) -> None:
    begin(folder / f"clients-{ids[0]}.log", "warning")
    threat_model, share_mode = _overrides(bench, protocol)
    overrides = [
        f'client.protocols=["{protocol}"]',
        f'client.threat_model="{threat_model}"',
        f'client.share_mode="{share_mode}"',
        'client.overlap="thread"',
        f"client.reconnect={bench.timeout}",
    ]

    async def run() -> None:
        clients = []
        for client in ids:
            config = load_config(ClientConfig, made.clients[client], overrides)
            vectors = VectorsTable(input=Path("unused.npy"))
            config = config.model_copy(update={"vectors": vectors})
            job = RandomVectors(client, bench.dimension)
            clients.append(build_client(config, job=job, watch=Patient(bench.training)))
        await asyncio.gather(*(client.run() for client in clients))

    asyncio.run(run())

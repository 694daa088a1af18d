"""A federation that runs for long, or with many clients, and what happens to its memory (R38, R39).

Real processes, sockets and TLS on this machine: one server, and clients with random vectors in a
few processes. Memory is read when everybody is connected, at 10 % of the rounds and at the end, and
the last sum is compared with the plain one. Needs Linux (/proc).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.programs import build_client, run_server
from lightsecagg.drivers.federation.provisioning import Provisioned, free_port, provision
from lightsecagg.errors import Aborted
from lightsecagg.params import ThreatModel
from lightsecagg_lab.experiments.federation_bench import RandomVectors
from lightsecagg_lab.experiments.processes import begin, running, terminable
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run; the defaults are R38."""

    clients: int = 5
    rounds: int = 1000
    dimension: int = 1000
    processes: int = 2
    """That host the clients."""
    protocol: str = ProtocolName.LIGHTSECAGG
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    timeout: float = 7200.0
    """Seconds after which it ends and reports what there is."""


@dataclass(slots=True)
class Findings:
    """What was measured."""

    rounds: int = 0
    aborted: int = 0
    included: int = 0
    """Clients in the last sum."""
    seconds: float = 0.0
    """Without start-up."""
    seconds_per_round: float = 0.0
    server_bytes: dict[str, int] = field(default_factory=dict)
    """Resident memory of the server: when all are connected, at 10 % of the rounds, at the end."""
    clients_bytes: dict[str, int] = field(default_factory=dict)
    """The same, of all processes that host clients."""
    growth_per_round: float = 0.0
    """Bytes of the server's memory per round, between 10 % and the end."""
    largest_difference: float | None = None
    """Between the last secure sum and the plain one; None if it was interrupted."""
    allowed_difference: float | None = None
    interrupted: bool = False
    """By Ctrl-C, SIGTERM or the timeout."""


def soak(plan: Plan, tell: Tell = lambda line: None) -> Findings:
    """Run it; `tell` hears of progress. What was measured until an interruption is kept."""
    findings = Findings()
    try:
        with terminable(), tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder:
            _soak(plan, findings, Path(folder), tell)
    except (KeyboardInterrupt, TimeoutError):
        findings.interrupted = True
    return findings


def _soak(plan: Plan, findings: Findings, folder: Path, tell: Tell) -> None:
    tell(f"provisioning {plan.clients} clients")
    made = provision(
        folder / "federation",
        plan.clients,
        survivors=0,
        vectors=plan.dimension,
        port=free_port(),
    )
    metrics = free_port()
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=_serve, args=(plan, made, metrics, folder), daemon=True)
    hosts = [
        spawn.Process(target=_host, args=(plan, made, group.tolist(), folder), daemon=True)
        for group in np.array_split(np.arange(plan.clients), plan.processes)
    ]
    with running([server, *hosts]):
        _watch(plan, findings, server, hosts, metrics, folder, tell)
        _compare(plan, findings, made)


def _watch(
    plan: Plan,
    findings: Findings,
    server: SpawnProcess,
    hosts: list[SpawnProcess],
    metrics: int,
    folder: Path,
    tell: Tell,
) -> None:
    """Until the server ends; reads everybody's memory as the rounds go by."""
    deadline, began, early = time.monotonic() + plan.timeout, 0.0, 0
    tenth, progress = max(1, plan.rounds // 10), Progress(plan, tell)
    while server.exitcode is None:
        if time.monotonic() > deadline:
            tell(f"not finished within {plan.timeout:g} s; see --timeout")
            raise TimeoutError
        for process in hosts:
            if process.exitcode not in (None, 0):
                raise Aborted(
                    f"clients ended with {process.exitcode}: {_tail(folder / 'clients.log')}"
                )
        health = _ask(metrics)
        if health.get("connected") == plan.clients and "connected" not in findings.server_bytes:
            began = time.monotonic()
            _read_memory(findings, "connected", server, hosts)
        done = int(health.get("rounds_done", 0)) + int(health.get("rounds_aborted", 0))
        if began and done:
            findings.rounds, findings.seconds = done, time.monotonic() - began
            _read_memory(findings, "end", server, hosts)
            if done >= tenth and not early:
                early = done
                _read_memory(findings, "10 %", server, hosts)
            elif early and done > early:
                grown = findings.server_bytes["end"] - findings.server_bytes["10 %"]
                findings.growth_per_round = grown / (done - early)
        if health:
            progress(int(health.get("connected", 0)), done, findings.server_bytes)
        server.join(0.2 if plan.rounds > 20 else 1.0)
    if server.exitcode != 0:
        raise Aborted(f"the server ended with {server.exitcode}: {_tail(folder / 'server.log')}")


class Progress:
    """Tells of every tenth of the clients that has connected, and of the rounds."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self._plan, self._tell = plan, tell
        self._told = (-1, -1)

    def __call__(self, connected: int, done: int, memory: Mapping[str, int]) -> None:
        """So many are connected, and so many rounds done; `memory` by the moment it was read."""
        tenths = 10 * connected // self._plan.clients, 10 * done // self._plan.rounds
        if tenths == self._told:
            return
        self._told = tenths
        latest = memory.get("end", memory.get("connected"))
        used = "" if latest is None else f", server {latest / 1e6:.1f} MB"
        self._tell(f"{connected} connected, {done} of {self._plan.rounds} rounds{used}")


def _read_memory(
    findings: Findings, moment: str, server: SpawnProcess, hosts: list[SpawnProcess]
) -> None:
    with contextlib.suppress(OSError):  # a process that has just ended
        findings.server_bytes[moment] = _resident(server)
        findings.clients_bytes[moment] = sum(_resident(process) for process in hosts)


def _resident(process: SpawnProcess) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _compare(plan: Plan, findings: Findings, made: Provisioned) -> None:
    """Count the rounds, and compare the last sum with the plain one."""
    records = json.loads((made.server.parent / "state" / "rounds.json").read_text())
    done = [record for record in records if record["aborted"] is None]
    findings.rounds, findings.aborted = len(done), len(records) - len(done)
    findings.seconds_per_round = sum(record["seconds"] for record in done) / len(done)
    last = done[-1]
    findings.included = len(last["included"])
    with np.load(made.server.parent / "result.npz") as stored:
        total = stored["result"]
    for client in last["included"]:
        job = RandomVectors(client, plan.dimension)
        total = total - job.compute(b"", last["round"], 1.0).vector
    findings.largest_difference = float(np.abs(total).max())
    findings.allowed_difference = findings.included * last["quantisation_step"]
    if findings.largest_difference > findings.allowed_difference:
        raise Aborted(f"the sum is wrong: off by {findings.largest_difference}")


# -- the processes -------------------------------------------------------------------------------


def _serve(plan: Plan, made: Provisioned, metrics: int, folder: Path) -> None:
    begin(folder / "server.log", "warning")
    phases = ("advertise", "share", "upload", "agree", "recover")
    overrides = [
        f'aggregation.protocol="{plan.protocol}"',
        f'aggregation.threat_model="{plan.threat_model}"',
        f"rounds.number={plan.rounds}",
        f"rounds.min_clients={plan.clients}",
        f"rounds.wait_for_clients={plan.timeout}",
        *(f"rounds.{phase}={plan.timeout}" for phase in phases),
        f"server.metrics_port={metrics}",
    ]
    run_server(load_config(ServerConfig, made.server, overrides))


def _host(plan: Plan, made: Provisioned, ids: list[int], folder: Path) -> None:
    begin(folder / "clients.log", "warning")
    overrides = [
        f'client.protocols=["{plan.protocol}"]',
        f'client.threat_model="{plan.threat_model}"',
        'client.overlap="thread"',
        f"client.reconnect={plan.timeout}",
    ]

    async def run() -> None:
        clients = []
        for i in ids:
            config = load_config(ClientConfig, made.clients[i], overrides)
            clients.append(build_client(config, job=RandomVectors(i, plan.dimension)))
        await asyncio.gather(*(client.run() for client in clients))

    asyncio.run(run())


def _ask(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:  # not listening yet, or no more
        return {}


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8")[-2000:] if log.exists() else "no log"

"""A throw-away federation in the asynchronous mode: slow clients, killed clients, a killed server.

As `demo`, of which it is a variant: real processes over loopback TLS, whose clients also write
their plain updates down. Some of them take much longer than others. Clients and the server are
killed with SIGKILL, from outside and at any moment, and started again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.demo import check_demo
from lightsecagg.drivers.federation.demo_audit import (
    Audit,
    Comparison,
    audit,
    compare,
    read_notes,
    read_sums,
    versions_of,
)
from lightsecagg.drivers.federation.demo_config import DemoConfig
from lightsecagg.drivers.federation.demo_processes import Ask, Processes, Watch
from lightsecagg.drivers.federation.history import History
from lightsecagg.drivers.federation.jobs import ClientJob
from lightsecagg.drivers.federation.models import read_model
from lightsecagg.drivers.federation.tables import ServerBufferingTable
from lightsecagg.drivers.federation.watched_client import WatchedClient
from lightsecagg.errors import ConfigurationError
from lightsecagg.field.staleness import Staleness

SERVER = -1
"""The server, among those who are killed."""
_ENDLESS = 10**6


@dataclass(frozen=True, slots=True)
class Kill:
    """Who is killed, and when."""

    victim: int
    """A client, or `SERVER`."""
    after: int
    """Not before so many sums are known,"""
    delay: float
    """and so many seconds have passed since then and since the kill before."""


@dataclass(frozen=True, slots=True)
class EpochDemoConfig(DemoConfig):
    """What to demonstrate; `rounds` counts buffers.

    With `kills` it goes on until all of them have happened and been recovered from, however many
    buffers that takes.
    """

    mode: Literal["sync", "async"] = "async"
    """Rounds, with the same stragglers, are there to be compared with."""
    buffer: int = 4
    """K"""
    staleness: Staleness = Staleness.CONSTANT
    tau_max: int = 20
    server_rate: float = 0.5
    """eta_g: stale updates overshoot with 1."""
    slow: int = 2
    """How many clients are stragglers: the last ones."""
    slowdown: float = 10.0
    """How many times as long they train."""
    least_training: float = 0.1
    """Seconds that no training is faster than."""
    kills: tuple[Kill, ...] = ()
    afterwards: int = 1
    """The fewest sums after the last kill."""
    least_staleness: int | None = 0
    """With kills: how stale an update of every straggler must have been; None: they need not be in
    a sum at all, as where T + 2 owners must share a model."""
    patience: float = 120.0
    """Seconds without a sum after which it hangs."""
    vectors: int | None = None
    """Entries of vectors, which `job` makes, to be summed instead of training a task."""
    job: Callable[[int], ClientJob] | None = None
    """Of a client; None: to train."""

    @property
    def number(self) -> int:
        """Buffers after which the server ends by itself."""
        return _ENDLESS if self.kills else self.rounds

    @property
    def buffering(self) -> ServerBufferingTable:
        """What server and clients agree on, and the server's deadlines."""
        return ServerBufferingTable(
            size=self.buffer,
            staleness=self.staleness,
            tau_max=self.tau_max,
            flush_after=10.0,
            reports=5.0,
            renew=2,
        )

    @property
    def provisioned(self) -> dict[str, Any]:
        """Arguments of `provision`."""
        buffered = {"buffer": self.buffer, "staleness": self.staleness}
        return {
            "privacy": self.privacy,
            "dropouts": self.dropouts,
            "vectors": self.vectors,
            "weighted": self.vectors is not None,
            "bound": self.bound,
            "mode": self.mode,
            **(buffered if self.mode == "async" else {}),
        }


@dataclass(frozen=True, slots=True)
class EpochDemoResult:
    """What happened."""

    records: list[dict[str, Any]]
    """Of all buffers whose sum is known, by version."""
    compared: list[Comparison]
    """One for each of them."""
    lost_buffers: list[dict[str, Any]]
    """Records of buffers without a sum."""
    notes: list[dict[str, Any]]
    """What clients did, in the order of time."""
    killed: list[dict[str, Any]]
    complaints: list[str]
    audit: Audit
    model: NDArray[np.float32] | None = field(repr=False)
    state: Path
    seconds: float
    hung: bool
    interrupted: int | None
    """The exit code, if a signal has ended it early."""


def plan_kills(config: EpochDemoConfig, clients: int, server: int) -> tuple[Kill, ...]:
    """So many kills of clients and of the server, spread over the demonstration.

    Stragglers are spared: their updates are to count.
    """
    rng = random.Random(config.seed)  # noqa: S311 - who is killed is no secret
    fast = config.clients - config.slow
    victims = [SERVER] * server + [rng.randrange(fast) for _ in range(clients)]
    rng.shuffle(victims)
    step = config.rounds / (len(victims) + 1)
    return tuple(
        Kill(victim, round(step * number), rng.random())
        for number, victim in enumerate(victims, start=1)
    )


def check_epoch_demo(config: EpochDemoConfig) -> None:
    """Refuse what would fail in a process later on: what `check_demo` refuses, and more."""
    check_demo(config)
    least = config.privacy + 2
    if not least <= config.buffer <= config.clients:
        raise ConfigurationError(
            f"--buffer {config.buffer} must be T + 2 = {least} to N = {config.clients}"
        )
    if not 0 <= config.slow <= config.clients - config.buffer:
        raise ConfigurationError(
            f"--slow {config.slow} must be 0 to N - K = {config.clients - config.buffer}: the "
            "others fill the buffers"
        )


def run_epochs(
    config: EpochDemoConfig, folder: Path, watch: Watch, ask: Ask = lambda: None
) -> EpochDemoResult:
    """The whole demonstration; see `run_demo`. What there is when `ask` raises is reported too."""
    started = time.monotonic()
    processes = _EpochProcesses(config, folder)
    hung, interrupted = False, None
    try:
        with processes.running(ask, **config.provisioned):
            hung = not _wait(processes, config, watch, ask)
    except SystemExit as stop:
        if not processes.sums():
            raise
        interrupted = int(stop.code or 0)
    trace, state = processes.trace, processes.state
    history = History(state / "rounds.json").records()  # written after the first sum is known
    records = with_history(read_sums(trace), history)
    compared, notes = [compare(record, trace) for record in records], read_notes(trace)
    return EpochDemoResult(
        records=records,
        compared=compared,
        lost_buffers=[record for record in history if record["aborted"] is not None],
        notes=notes,
        killed=processes.killed,
        complaints=processes.complaints(),
        audit=audit(records, compared, notes, least=config.privacy + 2),
        model=read_model(state)[1] if config.vectors is None and records else None,
        state=state,
        seconds=time.monotonic() - started,
        hung=hung,
        interrupted=interrupted,
    )


def with_history(sums: list[dict[str, Any]], history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is known of every sum, with what the server has told of the buffer that led to it.

    A server that was killed after it had learned a sum, and before it had stored it, may find too
    few clients for the same buffer when it is back: that it then tells of a lost one makes the sum
    no less known.
    """
    told = {record["round"]: record for record in history if record["aborted"] is None}
    return [each | told.get(each["round"], {}) for each in sums]


class _EpochProcesses(Processes):
    """Whoever is killed here is started again."""

    _config: EpochDemoConfig
    _told = False

    def sums(self) -> int:
        """How many are known."""
        return sum(
            name.startswith("average-") and name.endswith(".npz") and ".new" not in name
            for name in os.listdir(self.trace)
        )

    def kill(self, kill: Kill, after: int) -> bool:
        """Whether it could be: whoever has taken its leave is not."""
        process = self.server if kill.victim == SERVER else self.clients[kill.victim]
        if process is None:
            return False
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            return False
        who = "server" if kill.victim == SERVER else kill.victim
        self.killed.append({"who": who, "after": after, "time": time.time()})
        if kill.victim == SERVER:
            self.start_server()
        else:
            self.start_client(kill.victim)
        return True

    def _have_recovered(self) -> bool:
        """Whether all who were killed upload again, and stragglers have been stale enough."""
        killed = {kill["who"]: kill["time"] for kill in self.killed if kill["who"] != "server"}
        notes = read_notes(self.trace)
        back = {
            note["client"]
            for note in notes
            if note["what"] == "stored" and note["time"] > killed.get(note["client"], 0.0)
        }
        return set(killed) <= back and self._stragglers_count()

    def _stragglers(self) -> set[int]:
        config = self._config
        return set(range(config.clients - config.slow, config.clients))

    def _stragglers_count(self) -> bool:
        """Whether an update of every straggler was summed, and stale enough."""
        least = self._config.least_staleness
        if least is None:
            return True
        return self._stragglers() <= {
            owner
            for record in read_sums(self.trace)
            for owner, version in zip(record["included"], versions_of(record), strict=True)
            if record["round"] - 1 - version >= least
        }

    def end_if_recovered(self) -> None:
        """Tell the server, once, to stop; it leaves the epoch as it is."""
        if self.server is not None and not self._told and self._have_recovered():
            self._told = True  # a second signal would end it at once
            self.server.terminate()

    def check(self) -> None:
        """Nobody but those above has died."""
        for client, process in self.clients.items():
            if process.exitcode not in (None, 0):
                raise self.failure(f"client-{client}", process.exitcode)

    def _preloaded(self) -> list[str]:
        job = self._config.job
        if job is None:
            return super()._preloaded()
        transport = "lightsecagg.drivers.transport.grpc"
        return ["lightsecagg.drivers.federation.programs", transport, type(job(0)).__module__]

    def _client(self, client: int) -> tuple[Callable[..., FederationClient], ClientJob | None]:
        config = self._config
        slowdown = config.slowdown if client in self._stragglers() else 1.0
        kind = partial(WatchedClient, slowdown=slowdown, least=config.least_training)
        return kind, None if config.job is None else config.job(client)

    def _overrides(self) -> list[str]:
        trains = self._config.vectors is None
        rate = [f"training.server.learning_rate={self._config.server_rate}"] if trains else []
        mode = f'aggregation.mode="{self._config.mode}"'
        number = f"rounds.number={self._config.number}"
        return [*super()._overrides(), number, mode, *rate, *self._buffering(server=True)]

    def _client_overrides(self) -> list[str]:
        config = self._config
        reconnect = f"client.reconnect={config.timeout}"
        return [*super()._client_overrides(), reconnect, *self._buffering(server=False)]

    def _buffering(self, *, server: bool) -> list[str]:
        if self._config.mode == "sync":
            return []
        table = self._config.buffering.model_dump(mode="json", exclude_none=True)
        own = set() if server else {"flush_after", "reports", "renew"}
        return [f"buffering.{k}={json.dumps(v)}" for k, v in table.items() if k not in own]

    def _shared(self) -> list[str]:
        return super()._shared() if self._config.vectors is None else []


def _wait(processes: _EpochProcesses, config: EpochDemoConfig, watch: Watch, ask: Ask) -> bool:
    """Until the server ends, with all that is to be killed killed; False if it hangs."""
    kills, sums, last = list(config.kills), 0, 0
    grown, due = time.monotonic(), None
    for now in processes.looks(watch, ask):
        if (found := processes.sums()) > sums:
            sums, grown = found, now
            watch("sums", sums, config.rounds)
        elif now - grown > config.patience:
            return False
        if kills and sums >= kills[0].after:
            due = now + kills[0].delay if due is None else due
            if now >= due:
                processes.kill(kills.pop(0), sums)
                due, last = None, sums
                watch("kills", len(config.kills) - len(kills), len(config.kills))
        elif config.kills and not kills and sums >= max(config.rounds, last + config.afterwards):
            processes.end_if_recovered()
        processes.check()
    return True

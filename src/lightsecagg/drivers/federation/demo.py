"""A throw-away federation on this machine: real processes, real sockets, real kills.

The main job of the README. It provisions a federation in a temporary folder and starts the server
and every client as a process of its own over loopback TLS. In rounds, up to D clients per round
kill themselves with SIGKILL in the middle of a phase; in the asynchronous mode some clients are
slow, and clients and the server are killed from outside at any moment. All are started again.

To prove that the secure average is the plain average, the demonstration's clients ALSO write their
plain updates into a local folder (`demo_notes`). No real client does that.

Whatever a user can get wrong is found by `check_demo` before the first process starts.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.aggregation import make_settings
from lightsecagg.drivers.federation.demo_audit import Audit, Comparison, audit, compare, versions_of
from lightsecagg.drivers.federation.demo_config import SERVER, DemoConfig, Kill
from lightsecagg.drivers.federation.demo_notes import read_notes, read_sums
from lightsecagg.drivers.federation.demo_processes import Ask, Processes, Watch
from lightsecagg.drivers.federation.history import History
from lightsecagg.drivers.federation.jobs import VectorServer, check_task
from lightsecagg.drivers.federation.models import read_model
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.params import ThreatModel, check_integer
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.schemes.traits import traits_of

_MOST_CLIENTS = 256


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What happened."""

    records: list[dict[str, Any]]
    """Of all rounds, or buffers, whose sum is known, in order."""
    compared: list[Comparison]
    """One for each of them."""
    aborted: list[dict[str, Any]]
    """Records of those without a sum."""
    notes: list[dict[str, Any]]
    """What clients did, in the order of time."""
    killed: list[dict[str, Any]]
    complaints: list[str]
    """What clients have logged as errors; if it hangs, how the logs end, too."""
    audit: Audit
    """What became of every update; rounds have few of them (see `demo_audit`)."""
    model: NDArray[np.float32] | None = field(repr=False)
    """The latest global model."""
    state: Path
    """The server's state folder."""
    seconds: float
    hung: bool = False
    interrupted: int | None = None
    """The exit code, if a signal has ended it early."""


def plan_deaths(config: DemoConfig) -> dict[int, dict[int, str]]:
    """Client -> round -> phase in which it is killed; at most `dropout` clients per round."""
    if not 0 <= config.dropout <= config.dropouts:
        raise ConfigurationError(
            f"--dropout {config.dropout} must be 0 to D = {config.dropouts}: more dropouts than "
            "the parameters allow would abort every round"
        )
    rng = random.Random(config.seed)  # noqa: S311 - who is killed is no secret
    phases = ["share", "upload", "recover"]
    if config.threat_model is ThreatModel.MALICIOUS_SERVER:
        phases.append("agree")
    phases = [phase for phase in phases if phase in traits_of(config.protocol).phases]
    deaths: dict[int, dict[int, str]] = {}
    for number in range(1, config.rounds + 1):
        for client in rng.sample(range(config.clients), rng.randint(0, config.dropout)):
            deaths.setdefault(client, {})[number] = rng.choice(phases)
    return deaths


def plan_kills(config: DemoConfig, clients: int, server: int) -> tuple[Kill, ...]:
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


def check_demo(config: DemoConfig) -> None:
    """Refuse, in the words of the command line, what would fail in a process later on."""
    check_sizes(config)
    plan_deaths(config)
    check_task(config.own_task, client=0)
    if config.mode == "async":
        _check_buffers(config)


def check_sizes(config: DemoConfig) -> None:
    """The part of it that has nothing to do with training."""
    check_integer("--rounds", config.rounds, 1)
    check_integer("--seed", config.seed, 0)
    if not 0 < config.timeout < math.inf:
        raise ParameterError(f"--timeout {config.timeout:g} must be a positive number of seconds")
    check_integer("clients N", config.clients, 3)
    if config.clients > _MOST_CLIENTS:
        raise ParameterError(
            f"--clients {config.clients}: each is a process here, and {_MOST_CLIENTS} are the "
            "most; `lightsecagg simulate` holds many more"
        )
    try:
        table = config.aggregation
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ParameterError(f"--{wrong['loc'][0]} {wrong['input']}: {wrong['msg']}") from error
    any_job = VectorServer(VectorsTable(dimension=1, weighted=True))
    any_list = AllowList({i: IdentityKey.generate().public for i in range(config.clients)})
    make_settings(table, any_job, bytes(32), any_list)


def _check_buffers(config: DemoConfig) -> None:
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


def run_demo(config: DemoConfig, folder: Path, watch: Watch, ask: Ask = lambda: None) -> DemoResult:
    """The whole demonstration; `folder` receives keys, state and notes.

    What there is of an asynchronous one when `ask` raises is reported too.
    """
    started = time.monotonic()
    processes = Processes(config, folder, plan_deaths(config))
    hung, interrupted = False, None
    try:
        with processes.running(ask):
            hung = not _wait(processes, watch, ask)
    except SystemExit as stop:
        if config.mode == "sync" or not processes.sums():
            raise
        interrupted = int(stop.code or 0)
    state, notes = processes.state, read_notes(processes.notes)
    history = History(state / "rounds.json").records()  # written after the first sum is known
    records = with_history(read_sums(processes.notes), history)
    compared = [compare(record, processes.notes) for record in records]
    drops = config.threat_model is ThreatModel.MALICIOUS_SERVER
    return DemoResult(
        records=records,
        compared=compared,
        aborted=[record for record in history if record["aborted"] is not None],
        notes=notes,
        killed=processes.killed,
        complaints=processes.complaints() + (processes.last_words() if hung else []),
        audit=audit(records, compared, notes, least=config.privacy + 2, drops=drops),
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


def _wait(processes: Processes, watch: Watch, ask: Ask) -> bool:
    """Until the server ends, with all that is to be killed killed; False if it hangs."""
    config = processes.config
    kills, sums, last = list(config.kills), 0, 0
    grown, due = time.monotonic(), None
    for now in processes.looks(watch, ask):
        enough = bool(config.kills) and sums >= max(config.rounds, last + config.afterwards)
        if (found := processes.sums()) > sums:
            sums, grown = found, now
            watch("sums", sums, config.rounds)
        elif now - grown > config.patience and (config.mode == "async" or config.kills):
            return False
        if kills and sums >= kills[0].after:
            due = now + kills[0].delay if due is None else due
            if now >= due:
                processes.kill(kills.pop(0), sums)
                due, last = None, sums
                watch("kills", len(config.kills) - len(kills), len(config.kills))
        elif enough and not kills and _have_recovered(processes):
            processes.end()
        processes.mind_the_dead()
    return True


def _have_recovered(processes: Processes) -> bool:
    """Whether all who were killed upload again, and stragglers have been stale enough."""
    config, least = processes.config, processes.config.least_staleness
    killed = {kill["who"]: kill["time"] for kill in processes.killed if kill["who"] != "server"}
    back = {
        note["client"]
        for note in read_notes(processes.notes)
        if note["what"] == "stored" and note["time"] > killed.get(note["client"], 0.0)
    }
    if least is None or not set(killed) <= back:
        return set(killed) <= back
    return set(config.stragglers) <= {
        owner
        for record in read_sums(processes.notes)
        for owner, version in zip(record["included"], versions_of(record), strict=True)
        if record["round"] - 1 - version >= least
    }

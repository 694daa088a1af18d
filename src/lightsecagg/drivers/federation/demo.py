"""A throw-away federation on this machine: real processes, real sockets, real dropouts.

The main job of the README. It provisions a federation in a temporary folder, starts the server
and every client as a process of its own over loopback TLS, and kills up to D clients per round
with SIGKILL in the middle of a phase; a killed client is restarted and joins the next round.

To prove that the secure average is the plain average, the demo's clients ALSO write their plain
updates into a local folder. No real client does that.

Whatever a user can get wrong is found by `check_demo` before the first process starts.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.aggregation import make_settings
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.demo_audit import compare, read_spans
from lightsecagg.drivers.federation.demo_config import DemoConfig
from lightsecagg.drivers.federation.demo_processes import Ask, Processes, Watch
from lightsecagg.drivers.federation.history import History
from lightsecagg.drivers.federation.jobs import VectorServer, check_task
from lightsecagg.drivers.federation.models import read_model
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import Aborted, ConfigurationError, ParameterError
from lightsecagg.params import ThreatModel, check_integer
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.session.envelope import name_of

# Phase -> the message before which a doomed client is killed.
_LAST_WORDS = {
    "share": ("ShareBundle",),
    "upload": ("MaskedUpload",),
    "agree": ("Consent",),
    "recover": ("AggregatedShare", "UnmaskingShares"),
}

_MOST_CLIENTS = 256


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What happened."""

    records: list[dict[str, Any]]
    spans: dict[tuple[int, int], list[dict[str, Any]]]
    """(round, client) -> what that client did, and when."""
    killed: list[dict[str, Any]]
    complaints: list[str]
    """What clients have logged as errors."""
    max_abs_difference: float
    quantisation_bound: float
    matches: bool
    model: NDArray[np.float32] = field(repr=False)
    """The global model after the last round."""
    state: Path
    """The server's state folder."""
    seconds: float


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


def check_demo(config: DemoConfig) -> None:
    """Refuse, in the words of the command line, what would fail in a process later on."""
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
    plan_deaths(config)
    check_task(config.own_task, client=0)


def run_demo(config: DemoConfig, folder: Path, watch: Watch, ask: Ask = lambda: None) -> DemoResult:
    """The whole demonstration; `folder` receives keys, state and traces."""
    started = time.monotonic()
    processes = _RoundProcesses(config, folder)
    with processes.running(ask, bound=config.bound):
        for _ in processes.looks(watch, ask):
            processes.restart_the_dead()
    records = History(processes.state / "rounds.json").records()
    compared = [compare(record, processes.trace) for record in records if record["aborted"] is None]
    return DemoResult(
        records=records,
        spans=read_spans(processes.trace),
        killed=processes.killed,
        complaints=processes.complaints(),
        max_abs_difference=max((each.difference for each in compared), default=0.0),
        quantisation_bound=max((each.bound for each in compared), default=0.0),
        matches=all(each.exact for each in compared),
        model=read_model(processes.state)[1],
        state=processes.state,
        seconds=time.monotonic() - started,
    )


class _RoundProcesses(Processes):
    """Clients are killed in the middle of a phase."""

    def __init__(self, config: DemoConfig, folder: Path) -> None:
        self._deaths = plan_deaths(config)
        super().__init__(config, folder)

    def restart_the_dead(self) -> None:
        """A killed client comes back, without memory; any other end is an error."""
        for client, process in list(self.clients.items()):
            if process.exitcode in (None, 0):
                continue
            if process.exitcode != -signal.SIGKILL:
                raise self.failure(f"client-{client}", process.exitcode)
            planned = self._deaths.get(client, {})
            if not planned:
                raise Aborted(f"client {client} was killed by somebody else")
            number = min(planned)
            self.killed.append({"client": client, "round": number, "phase": planned.pop(number)})
            self.start_client(client)

    def _client(self, client: int) -> tuple[Callable[..., FederationClient], None]:
        return partial(DoomedClient, deaths=self._deaths.get(client, {})), None

    def _overrides(self) -> list[str]:
        # Large models and busy machines take their time, and whoever is killed is noticed without
        # a deadline. A round that began without one of them would have one dropout too many.
        waits = ("wait_for_clients", "advertise", "share", "upload", "agree", "recover")
        patient = [f"rounds.{wait}={self._config.timeout}" for wait in waits]
        everybody = f"rounds.min_clients={self._config.clients}"
        return [*super()._overrides(), everybody, *patient]


class DoomedClient(FederationClient):
    """A client that is killed in the middle of chosen phases."""

    def __init__(self, *arguments: Any, deaths: Mapping[int, str]) -> None:
        super().__init__(*arguments)
        self._deaths = deaths

    async def _post(self, data: bytes) -> None:
        number = self._session.round
        phase = self._deaths.get(number)
        if phase is not None and name_of(data) in _LAST_WORDS[phase]:
            self._trace.write_spans(number)  # what it has done belongs into the timeline
            os.kill(os.getpid(), signal.SIGKILL)
        await super()._post(data)

"""A throw-away federation in the asynchronous mode: slow clients, killed clients, a killed server.

As `demo`, of which it is a variant: real processes over loopback TLS, whose clients also write
their plain updates down. Some of them take much longer than others. Clients and the server are
killed with SIGKILL, from outside and at any moment, and started again.

Whoever may be killed writes down at once what it does. From these notes `audit` finds what became
of every update, and whether anything has happened that must not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, load_config
from lightsecagg.drivers.federation.demo import (
    Comparison,
    DemoConfig,
    Processes,
    Watch,
    compare,
    free_port,
    last_words,
    versions_of,
)
from lightsecagg.drivers.federation.jobs import ClientJob
from lightsecagg.drivers.federation.models import read_model
from lightsecagg.drivers.federation.provisioning import provision
from lightsecagg.drivers.federation.tables import ServerBufferingTable
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.staleness import Staleness
from lightsecagg.params import DEFAULT_MODULUS
from lightsecagg.protocol.messages import BufferedUpload, Message, SumRequest, UploadDropped
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.client import Round
from lightsecagg.session.envelope import RoundOver, name_of, unpack
from lightsecagg.session.epoch import GOES_ON
from lightsecagg.session.epoch_client import EpochClientSession
from lightsecagg.session.interface import Event, Received, Train, Trained, TrainingFailed

_LOOK = 0.05
"""Seconds between two looks at the processes."""
SERVER = -1
"""The server, among those who are killed."""


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
    """What to demonstrate; `rounds` counts buffers."""

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
    afterwards: int | None = None
    """Sums after the last kill at which it ends; None: with the last of `rounds`."""
    patience: float = 120.0
    """Seconds without a sum after which it hangs."""
    vectors: int | None = None
    """Entries of vectors, which `job` makes, to be summed instead of training a task."""
    job: Callable[[int], ClientJob] | None = None
    """Of a client; None: to train."""

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


@dataclass(frozen=True, slots=True)
class Audit:
    """What must not happen, and what may: numbers of updates, buffers and masks."""

    acknowledged: int
    """Updates that the server has promised to keep."""
    summed: int
    dropped: int
    """Too stale, or pushed out by newer ones of their owner; it was told."""
    in_failed_buffers: int
    """Of which too few clients were left to answer."""
    left_behind: int
    """In epochs that ended with too few of them for a buffer, or with too few clients."""
    waiting: int
    """When the federation ended."""
    lost: int
    """None of these: this must be 0, as all below."""
    wrong: int
    """Sums that are not the weighted sum of the plain updates."""
    summed_twice: int
    masks_used_twice: int
    changed: int
    """Buffers that were announced in two versions."""

    @property
    def clean(self) -> bool:
        """Whether nothing has happened that must not."""
        return not any((self.lost, self.wrong, self.summed_twice, self.masks_used_twice)) and (
            not self.changed
        )


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
    """Refuse what would fail in a process later on, beside what `check_demo` refuses."""
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
    config: EpochDemoConfig, folder: Path, watch: Watch, ask: Callable[[], None] = lambda: None
) -> EpochDemoResult:
    """The whole demonstration; see `run_demo`. What there is when `ask` raises is reported too."""
    started = time.monotonic()
    trace = folder / "trace"
    trace.mkdir(mode=0o700, parents=True)
    processes = _EpochProcesses(config, trace, {})
    hung, interrupted = False, None
    try:
        made = provision(
            folder / "federation",
            config.clients,
            privacy=config.privacy,
            dropouts=config.dropouts,
            vectors=config.vectors,
            weighted=config.vectors is not None,
            bound=config.bound,
            mode=config.mode,
            buffer=config.buffer if config.mode == "async" else None,
            staleness=config.staleness if config.mode == "async" else None,
            port=free_port(),
        )
        processes.start(made, ask)
        hung = not _wait(processes, config, watch, ask)
    except SystemExit as stop:
        if not processes.sums():
            raise
        interrupted = int(stop.code or 0)
    finally:
        processes.stop()
    state = made.server.parent / "state"
    return _result(config, trace, state, processes, started, hung=hung, interrupted=interrupted)


def _result(
    config: EpochDemoConfig,
    trace: Path,
    state: Path,
    processes: _EpochProcesses,
    started: float,
    *,
    hung: bool,
    interrupted: int | None,
) -> EpochDemoResult:
    path = state / "rounds.json"  # written after the first sum is known
    history = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    told = {record["round"]: record for record in history}
    records = [each | told.get(each["round"], {}) for each in read_sums(trace)]
    compared = [compare(record, trace) for record in records]
    notes = _read_notes(trace)
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


class _EpochProcesses(Processes):
    """Whoever is killed here is started again."""

    _config: EpochDemoConfig
    _told = False

    def sums(self) -> int:
        """How many are known."""
        return sum(
            name.startswith("average-") and name.endswith(".npz") and ".new" not in name
            for name in os.listdir(self._trace)
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

    def end(self) -> None:
        """Tell the server, once, to stop; it leaves the epoch as it is."""
        if self.server is not None and not self._told:
            self._told = True  # a second signal would end it at once
            self.server.terminate()

    def check(self) -> None:
        """Nobody but those above has died."""
        for client, process in self.clients.items():
            if process.exitcode not in (None, 0):
                raise self.failure(f"client-{client}", process.exitcode)

    @property
    def _client_program(self) -> Callable[..., None]:
        return _client_main

    def _preloaded(self) -> list[str]:
        job = self._config.job
        if job is None:
            return super()._preloaded()
        transport = "lightsecagg.drivers.transport.grpc"
        return ["lightsecagg.drivers.federation.programs", transport, type(job(0)).__module__]

    def _doom(self, client: int) -> tuple[Any, ...]:
        config = self._config
        slow = client >= config.clients - config.slow
        job = None if config.job is None else config.job(client)
        return (job, config.slowdown if slow else 1.0, config.least_training)

    def _overrides(self) -> list[str]:
        trains = self._config.vectors is None
        rate = [f"training.server.learning_rate={self._config.server_rate}"] if trains else []
        mode = f'aggregation.mode="{self._config.mode}"'
        return [*super()._overrides(), mode, *rate, *self._buffering(server=True)]

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


def _wait(
    processes: _EpochProcesses, config: EpochDemoConfig, watch: Watch, ask: Callable[[], None]
) -> bool:
    """Until the server ends, with all that is to be killed killed; False if it hangs."""
    deadline = time.monotonic() + config.timeout
    kills, sums, last = list(config.kills), 0, 0
    grown, due = time.monotonic(), None
    while True:
        ask()
        now = time.monotonic()
        if now > deadline:
            raise Aborted(f"the demonstration did not finish within --timeout {config.timeout:g} s")
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
        elif not kills and config.afterwards is not None and sums >= last + config.afterwards:
            processes.end()
        server = processes.server
        assert server is not None  # noqa: S101 - started
        processes.check()
        while processes.progress.poll():
            watch(*processes.progress.recv())  # or the server would wait for us
        server.join(_LOOK)
        if server.exitcode == 0:
            return True
        if server.exitcode is not None:
            raise processes.failure("server", server.exitcode)


# -- a client that may be killed -----------------------------------------------------------------


def _client_main(
    path: Path,
    overrides: list[str],
    folder: Path,
    job: ClientJob | None,
    slowdown: float,
    least: float,
) -> None:
    from lightsecagg.training.parent import end_with_parent

    end_with_parent()
    with last_words(folder, path.stem):
        from lightsecagg.drivers.federation.programs import build_client

        if job is None:
            from lightsecagg.training import use_one_thread

            use_one_thread()
        config = load_config(ClientConfig, path, overrides, environment={})
        kind = partial(WatchedClient, slowdown=slowdown, least=least)
        asyncio.run(build_client(config, kind, job=job).run())


Note = Callable[..., None]
"""Told what has happened, and the particulars."""


class _WatchedSession(EpochClientSession):
    """Tells which masks are used, and which uploads are acknowledged."""

    note: Note

    def _send(self, round_: Round, message: Message) -> None:
        if isinstance(message, BufferedUpload):
            tag = message.tag
            about = {"serial": tag.serial, "version": tag.version, "digest": tag.digest.hex()}
            self.note("upload", epoch=round_.number, **about)
        super()._send(round_, message)

    def _acknowledged(self, epoch: Round) -> None:
        if epoch.unacknowledged is not None:
            self.note("stored", epoch=epoch.number, serial=self._unacknowledged)
        super()._acknowledged(epoch)


class WatchedClient(FederationClient):
    """A client that may be slow, and notes at once what it does: it may be killed at any moment."""

    epoch_session_type = _WatchedSession

    def __init__(self, *arguments: Any, slowdown: float, least: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._slowdown, self._least = slowdown, least
        self._codec = Codec(PrimeField(DEFAULT_MODULUS))
        if isinstance(self._session, _WatchedSession):
            self._session.note = self._note
        self._note("started")

    async def _trained(self, effect: Train, job: ClientJob) -> Trained | TrainingFailed:
        start, began = time.time(), time.monotonic()
        self._note("trains")
        result = await super()._trained(effect, job)
        seconds = time.monotonic() - began
        await asyncio.sleep(self._slowdown * max(seconds, self._least) - seconds)
        self._note("trained", version=effect.round, start=start)
        return result

    async def _tell(self, event: Event) -> None:
        if isinstance(event, Received) and isinstance(self._session, _WatchedSession):
            self._note_message_of_server(event.data)
        await super()._tell(event)

    def _note_message_of_server(self, data: bytes | memoryview) -> None:
        if name_of(data) not in ("SumRequest", "UploadDropped", "RoundOver"):
            return
        match unpack(data):
            case (number, body):
                match self._codec.decode(body):
                    case SumRequest() as request:
                        terms = [(tag.owner, tag.serial) for tag in request.tags]
                        self._note("announced", epoch=number, at=request.time, terms=terms)
                    case UploadDropped(serial):
                        self._note("dropped", epoch=number, serial=serial)
            case RoundOver(number, aborted):
                self._note("over", epoch=number, aborted=aborted)

    def _note(self, what: str, **about: object) -> None:
        trace = self._table.trace
        assert trace is not None  # noqa: S101 - the demonstration has one
        line = json.dumps({"client": self._table.id, "what": what, "time": time.time(), **about})
        with (trace / f"notes-{self._table.id}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")  # in one piece, when it is closed


# -- checking ------------------------------------------------------------------------------------


def read_sums(trace: Path) -> list[dict[str, Any]]:
    """The record of every sum that the server has learned, by version; `time` is when it did."""
    records = []
    for path in trace.glob("average-*.npz"):
        if ".new" in path.name:
            continue
        with np.load(path) as stored:
            records.append(json.loads(str(stored["record"])) | {"time": float(stored["time"])})
    return sorted(records, key=lambda record: int(record["round"]))


def _read_notes(trace: Path) -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for path in trace.glob("notes-*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(lines, key=lambda note: float(note["time"]))


def audit(
    records: list[dict[str, Any]],
    compared: list[Comparison],
    notes: list[dict[str, Any]],
    *,
    least: int,
) -> Audit:
    """What became of every update; `least` of them suffice for a buffer."""
    sums = [
        (record["epoch"], *term)
        for record in records
        for term in zip(record["included"], versions_of(record), strict=True)
    ]
    summed = set(sums)
    uploads = {_mask(note): note for note in notes if note["what"] == "upload"}
    digests = {(*_mask(note), note["digest"]) for note in notes if note["what"] == "upload"}
    stored = {_mask(note) for note in notes if note["what"] == "stored"}
    dropped = {_mask(note) for note in notes if note["what"] == "dropped"}
    announced = {
        (note["epoch"], note["at"], tuple(map(tuple, note["terms"])))
        for note in notes
        if note["what"] == "announced"
    }
    announced_masks = {(epoch, *term) for epoch, _, terms in announced for term in terms}
    endings = {
        note["epoch"]: note["aborted"]
        for note in notes
        if note["what"] == "over" and note["aborted"] != GOES_ON
    }
    last = max(((epoch, at) for epoch, at, _ in announced), default=None)
    in_flight = {
        (epoch, *term) for epoch, at, terms in announced for term in terms if (epoch, at) == last
    }
    fates: Counter[str] = Counter()
    left: defaultdict[int, list[int]] = defaultdict(list)
    for mask in stored:
        epoch, owner, _ = mask
        if (epoch, owner, uploads[mask]["version"]) in summed:
            fates["summed"] += 1
        elif mask in in_flight:
            fates["waiting"] += 1
        elif mask in announced_masks:
            fates["in_failed_buffers"] += 1
        elif mask in dropped:
            fates["dropped"] += 1
        else:
            left[epoch].append(owner)
    for epoch, owners in left.items():
        if epoch not in endings or epoch == max(endings):
            fates["waiting"] += len(owners)
        elif endings[epoch] is not None or len(set(owners)) < least:
            fates["left_behind"] += len(owners)
        else:
            fates["lost"] += len(owners)
    kinds = ("summed", "dropped", "in_failed_buffers", "left_behind", "waiting", "lost")
    return Audit(
        acknowledged=len(stored),
        wrong=sum(not each.exact for each in compared),
        summed_twice=len(sums) - len(summed),
        masks_used_twice=len(digests) - len(uploads),
        changed=len(announced) - len({(epoch, at) for epoch, at, _ in announced}),
        **{kind: fates[kind] for kind in kinds},
    )


def _mask(note: dict[str, Any]) -> tuple[int, int, int]:
    return note["epoch"], note["client"], note["serial"]

"""A server session and its client sessions without a socket, a loop or a clock.

The laboratory is the driver: it carries bytes in order, keeps records in dictionaries, runs jobs
and training when it is told to, and time passes when the test says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import JournalError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import (
    SERVER,
    LedgerChanged,
    Promised,
    Update,
)
from lightsecagg.protocol.jobs import Compute, Job, UploadInMemory, complete
from lightsecagg.protocol.journal_facts import SumAnnounced, encode_fact
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import Tag
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.settings import Settings
from lightsecagg.session.envelope import name_of
from lightsecagg.session.interface import (
    Announcement,
    AnyRecord,
    Applied,
    Apply,
    Computed,
    Connected,
    Cut,
    Disconnected,
    Effect,
    Event,
    Finished,
    Log,
    PhaseBegan,
    Post,
    Received,
    RoundAbandoned,
    RoundEnded,
    RoundOpened,
    Store,
    Stored,
    StoreFailed,
    TakeMembers,
    Train,
    Trained,
)
from lightsecagg.session.past import Past, Unfinished
from lightsecagg.session.plan import Plan
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_client import RoundClientSession
from lightsecagg.session.round_server import RoundServerSession

DIMENSION = 5
SESSION = bytes(range(32))
CLIENTS = 6


def recall(uploads: dict[int, UploadInMemory], tag: Tag) -> UploadInMemory:
    if tag.owner not in uploads:
        raise JournalError(f"no upload of client {tag.owner} is stored")
    return uploads[tag.owner]


class Disk:
    """What a server's driver has made durable; outlives the server."""

    def __init__(self) -> None:
        self.rounds: dict[int, dict[str, Any]] = {}
        self.completed = 0
        self.refuses: Callable[[AnyRecord], bool] = lambda record: False
        """Which records find the disk full."""

    def store(self, number: int, record: AnyRecord) -> UploadInMemory | None:
        entry = self.rounds.setdefault(
            number, {"facts": [], "uploads": {}, "survivors": None, "over": None}
        )
        match record:
            case RoundOpened(settings):
                entry["settings"] = settings
            case Promised(facts, upload):
                entry["facts"] += map(encode_fact, facts)
                for fact in facts:
                    if isinstance(fact, SumAnnounced):
                        entry["survivors"] = fact.request.survivors
                if upload is not None:
                    stored = UploadInMemory(upload.vector.copy())
                    entry["uploads"][upload.tag.owner] = stored
                    return stored
            case RoundAbandoned(reason):
                entry["over"] = reason
            case LedgerChanged():
                raise AssertionError("a server has no ledger")
        return None

    def past(self, allow_list: AllowList) -> Past:
        unfinished = []
        for entry in self.rounds.values():
            if entry["over"] is not None:
                continue
            uploads: dict[int, UploadInMemory] = entry["uploads"]
            unfinished.append(
                Unfinished(
                    entry["settings"],
                    entry["facts"],
                    partial(recall, uploads),
                    lambda owner, serial: (),
                    allow_list,
                    bool(uploads),
                )
            )
        return Past(1 + max(self.rounds, default=0), self.completed, unfinished=unfinished)


class Laboratory:
    """One server, its clients, and what is between them."""

    def __init__(self, clients: int = CLIENTS, dropouts: int = 2, **plan: Any) -> None:
        self.now = 1000.0
        self.identities = {i: IdentityKey.generate() for i in range(clients)}
        self.allow_list = AllowList({i: key.public for i, key in self.identities.items()})
        self.settings = Settings(
            "lightsecagg",
            Parameters(clients, 1, dropouts, threat_model=ThreatModel.MALICIOUS_SERVER),
            Quantizer(DEFAULT_FIELD, bound=1.0, summands=clients),
            DIMENSION,
            SESSION,
            0,
            self.allow_list.digest,
        )
        self.plan = replace(Plan(number=1, retries=0, settle=1.0, grace=5.0), **plan)
        self.disk = Disk()
        self.ledgers = {i: Ledger().to_bytes() for i in range(clients)}
        """On the disks of the clients: what outlives their processes."""
        self.ledger_is_full: set[int] = set()
        self.clients: dict[int, RoundClientSession] = {}
        self.online: set[int] = set()
        self.up: deque[tuple[int, bytes]] = deque()
        self.down: deque[tuple[int, bytes]] = deque()
        self.jobs: list[Job] = []
        self.trainings: list[tuple[int, Train]] = []
        self.applying: list[Apply] = []
        self.hold_jobs = self.hold_training = self.hold_apply = False
        self.records: list[RoundRecord] = []
        self.cuts: list[tuple[int, str]] = []
        self.log: list[str] = []
        self.client_log: list[str] = []
        self.finished: Finished | None = None
        self.goodbyes: dict[int, Finished] = {}
        self.takes: list[tuple[int, bytes]] = []
        """Allow-lists that clients were given."""
        self.seen: list[tuple[int, str]] = []
        """Messages that reached the server: client and kind."""
        self.start()

    # -- the parties ---------------------------------------------------------------------------

    def start(self) -> None:
        """A server, for the first time or after a crash."""
        self.server = RoundServerSession(
            self.settings,
            self.plan,
            self.allow_list,
            Announcement(),
            lambda ready, number, first: sorted(ready)[: self.settings.parameters.clients],
            self.disk.past(self.allow_list),
        )
        self.finished = None
        self.do(SERVER, self.server.start(self.now))

    def crash(self) -> None:
        """kill -9: only the disk is left; every stream ends."""
        self.jobs, self.applying = [], []
        self.up.clear()
        self.down.clear()
        for client in list(self.online):
            self.online.discard(client)
            self.do(client, self.clients[client].handle(Disconnected(SERVER), self.now))

    def client(self, client: int) -> RoundClientSession:
        policy = Policy(self.allow_list, SESSION, 1, ThreatModel.MALICIOUS_SERVER, bound=1.0)
        ledger = Ledger.from_bytes(self.ledgers[client])
        return RoundClientSession(client, self.identities[client], policy, ledger, patience=600.0)

    def connect(self, *clients: int) -> None:
        for client in clients or self.identities:
            if client not in self.clients:
                self.clients[client] = self.client(client)
            self.online.add(client)
            self.tell(Connected(client))
            self.do(client, self.clients[client].handle(Connected(SERVER), self.now))

    def disconnect(self, *clients: int) -> None:
        """The network fails: what is on its way is lost."""
        for client in clients or list(self.online):
            self._end_stream(client, "lost")

    def _end_stream(self, client: int, reason: str) -> None:
        self.online.discard(client)
        self.up = deque(item for item in self.up if item[0] != client)
        self.down = deque(item for item in self.down if item[0] != client)
        self.tell(Disconnected(client, reason))
        if client in self.clients:  # or only its stream was ever here
            self.do(client, self.clients[client].handle(Disconnected(SERVER), self.now))

    def restart(self, client: int) -> None:
        """A client's process: its secrets are gone, its ledger is not."""
        self.disconnect(client)
        del self.clients[client]
        self.connect(client)

    # -- effects -------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        self.do(SERVER, self.server.handle(event, self.now))

    def do(self, party: int, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Post(to, data):
                    if party == SERVER and to in self.online:
                        self.down.append((to, data))
                    elif party in self.online:
                        self.up.append((party, data))
                case Store(number, record):
                    if not self._store(party, number, record):
                        return
                case Cut(client, reason):
                    self.cuts.append((client, reason))
                    self._end_stream(client, reason)
                case Compute(job):
                    self.jobs.append(job)
                case Train():
                    self.trainings.append((party, effect))
                case Apply():
                    self.applying.append(effect)
                case PhaseBegan(phase):
                    phase.start = 1e9 + self.now
                case RoundEnded(record):
                    starts = {name: phase.start for name, phase in record.phases.items()}
                    assert 0.0 not in starts.values(), f"a phase has no start: {starts}"
                    self.records.append(record)
                case Log(_, message, arguments):
                    (self.log if party == SERVER else self.client_log).append(message % arguments)
                case TakeMembers(content):
                    self.takes.append((party, content))
                case Finished() if party == SERVER:
                    self.finished = effect
                case Finished():
                    self.goodbyes[party] = effect

    def _store(self, party: int, number: int, record: AnyRecord) -> bool:
        if party == SERVER:
            if self.disk.refuses(record):
                self.tell(StoreFailed(record, "the disk is full"))
                return False
            self.tell(Stored(record, self.disk.store(number, record)))
            return True
        assert isinstance(record, LedgerChanged)
        if party in self.ledger_is_full:
            session = self.clients[party]
            self.do(party, session.handle(StoreFailed(record, "the disk is full"), self.now))
            return False
        self.ledgers[party] = record.entries
        return True

    # -- time and motion -----------------------------------------------------------------------

    def update(self, client: int, number: int) -> Update:
        return Update(np.random.default_rng([client, number]).uniform(-1, 1, DIMENSION))

    def step(self) -> bool:
        """The next thing that can happen by itself; False if there is none."""
        if self.up:
            client, data = self.up.popleft()
            self.seen.append((client, name_of(data)))
            self.tell(Received(client, data))
        elif self.down:
            client, data = self.down.popleft()
            self.do(client, self.clients[client].handle(Received(SERVER, data), self.now))
        elif self.trainings and not self.hold_training:
            client, train = self.trainings.pop(0)
            event = Trained(train.round, train.update or self.update(client, train.round))
            self.do(client, self.clients[client].handle(event, self.now))
        elif self.jobs and not self.hold_jobs:
            job = self.jobs.pop(0)
            self.tell(Computed(job, complete(job)))
        elif self.applying and not self.hold_apply:
            self.apply(self.applying.pop(0))
        elif self.server.deadline <= self.now:
            self.do(SERVER, self.server.tick(self.now))
        else:
            return False
        return True

    def apply(self, effect: Apply) -> None:
        included = effect.aggregate.included
        average, _ = effect.settings.average(effect.aggregate.total, len(included))
        expected = np.sum([self.update(c, effect.settings.round).vector for c in included], axis=0)
        step = len(included) / effect.settings.quantizer.scale
        np.testing.assert_allclose(average, expected, atol=step)
        self.disk.completed += 1
        self.disk.rounds[effect.settings.round]["over"] = "done"
        self.tell(Applied(Announcement()))

    def settle(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing moves without time passing, or `until` holds."""
        for _ in range(100_000):
            if until() or not self.step():
                return
        raise AssertionError("it never comes to rest")

    def wait(self, seconds: float) -> None:
        """Time passes, deadline by deadline."""
        end = self.now + seconds
        self.settle()
        while self.server.deadline < end:
            self.now = max(self.now, self.server.deadline)
            self.settle()
        self.now = end
        self.settle()

    def until_seen(self, kind: str, count: int) -> None:
        """Until the server has so many messages of a kind."""
        self.settle(lambda: [name for _, name in self.seen].count(kind) >= count)
        assert [name for _, name in self.seen].count(kind) >= count

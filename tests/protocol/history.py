"""What may happen to parties and their links, and what must hold whatever happens.

The same events and the same demands for rounds and for epochs; see `test_histories`.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from driver import CountingEntropy
from links import Links

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.local import Packet
from lightsecagg.errors import (
    DecodeError,
    MaskAlreadyUsed,
    RecoveryError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.params import DEFAULT_MODULUS, Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.client import Registered
from lightsecagg.protocol.client_machine import ClientMachine
from lightsecagg.protocol.contributor import hide
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    BufferAggregate,
    BufferFailed,
    LedgerChanged,
    NeedInput,
    Persist,
    RoundAborted,
    Update,
)
from lightsecagg.protocol.jobs import Compute, Job, Result
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Certificate,
    Consent,
    MaskedUpload,
    Member,
    Message,
    Report,
    Reports,
    ReportsWanted,
    Roster,
    ShareBundle,
    SharesClosed,
    SumRequest,
    Tag,
    UnmaskingShares,
    UploadDropped,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec

SESSION = b"a session of histories".ljust(32, b".")
STEPS = 45
SECRET = re.compile(r"[0-9a-f]{24}|\\x[0-9a-f]{2}|\bb['\"]|array\(|(\d+, ){9}")
"""Bytes and vectors, as an error would show them; a model's hash is named by 16 digits."""

HONEST, MALICIOUS = ThreatModel.HONEST_BUT_CURIOUS, ThreatModel.MALICIOUS_SERVER
SEEDED, PAPER, SHORT = ShareMode.SEEDED, ShareMode.PAPER, ShareMode.SHORT_KEY


@dataclass(frozen=True)
class Kind:
    """What a history is about."""

    mode: str
    protocol: str = "lightsecagg"
    threat_model: ThreatModel = HONEST
    share_mode: ShareMode = SEEDED
    modulus: int = DEFAULT_MODULUS
    neighbours: int = 0
    threshold: int = 0

    def __str__(self) -> str:
        share_mode = f" {self.share_mode}" if traits_of(self.protocol).share_modes else ""
        return f"{self.mode}: {self.protocol}{share_mode}, {self.threat_model}"


class History(Links, ABC):
    """Parties on links, and all that may happen to them; a subclass knows its mode."""

    EVENTS: ClassVar[dict[str, int]] = {
        "some_messages_arrive": 22,
        "everything_arrives": 8,
        "a_message_arrives_twice": 6,
        "somebody_trains": 12,
        "everybody_trains": 4,
        "work_is_done": 10,
        "a_client_leaves": 3,
        "a_client_comes_back": 5,
        "a_client_goes_on_from_its_snapshot": 4,
        "a_client_goes_on_without_it": 1,
        "the_server_crashes": 2,
        "the_deadline_fires": 4,
        "it_begins_anew": 1,
    }
    ROUGH: ClassVar[dict[str, int]] = {
        "a_message_overtakes_another": 4,
        "an_old_message_comes_again": 5,
        "a_message_is_forged": 10,
    }
    LIMIT = 4
    """How often it begins anew."""
    clients: dict[int, Any]
    server: Any

    def __init__(self, kind: Kind, seed: int) -> None:
        name = f"{kind} {seed}"
        self.kind, self.coins, self.rough = kind, random.Random(name), seed % 2 == 1
        traits = traits_of(kind.protocol)
        self.ids = tuple(3 * k + 2 for k in range(6))
        self.sources = {party: CountingEntropy(f"{name} {party}") for party in (*self.ids, SERVER)}
        self.identities = {c: IdentityKey(self.sources[c](32)) for c in self.ids}
        self.allow_list = AllowList({c: key.public for c, key in self.identities.items()})
        self.ledgers = {c: Ledger(self.sources[c]) for c in self.ids}
        sizes = Parameters(6, 1, 1, 4, kind.threat_model, kind.share_mode, kind.modulus)
        own = traits.resolve(sizes, kind.neighbours, kind.threshold)
        self.parameters = own.parameters
        self.group = traits.group(own.parameters)
        self.settings = Settings(
            kind.protocol,
            self.parameters,
            self.quantizer(),
            7,
            SESSION,
            0,
            self.allow_list.digest,
            neighbours=own.neighbours,
            threshold=own.threshold,
            buffering=self.buffering(),
        )
        self.policy = Policy(
            self.allow_list,
            SESSION,
            1,
            kind.threat_model,
            protocols=(kind.protocol,),
            buffering=self.buffering(),
            share_mode=SHORT if kind.share_mode is SHORT else None,
            scale=0.0,
            graph_security=0,
            max_openings=100,
            max_attempts=2 if self.buffering() is None else 1000,
        )
        super().__init__(None, {}, Codec(self.group))  # type: ignore[arg-type]
        self.number = 0
        self.old: dict[int, tuple[bytes, int]] = {}
        """A snapshot of each client from some time ago, and its generation."""
        self.stored_ledgers: dict[int, bytes] = {}
        self.masks: dict[bytes, object] = {}
        """Every mask that was ever used -> which it was."""
        self.happened: Counter[str] = Counter()
        self.forget_the_wire()

    def forget_the_wire(self) -> None:
        self.up.clear()
        self.down.clear()
        self.away: set[int] = set()
        self.waiting: set[int] = set()
        self.jobs: list[Job] = []
        self.log: list[Packet] = []
        self.answers: dict[tuple[int, int], bytes] = {}
        self.results: list[Any] = []
        self.was_refused = False

    # -- what a mode has -----------------------------------------------------------------------

    def buffering(self) -> Buffering | None:
        return None

    def quantizer(self, **options: Any) -> Any:
        common = {"scale": 1.0, "buffering": self.buffering(), "group": self.group}
        return make_quantizer(self.parameters, 7, 1000.0, **common, **options)

    @abstractmethod
    def begin(self) -> None:
        """The next round or epoch, with new parties and the ledgers of before."""

    @abstractmethod
    def train(self, client: int) -> None:
        """The client has an update."""

    @abstractmethod
    def crash(self) -> None:
        """The server's process ends; a new one goes on from what was stored."""

    @abstractmethod
    def come_back(self, client: int) -> None:
        """The client is connected again."""

    @abstractmethod
    def memory(self, party: int) -> object:
        """What a party remembers; refused messages leave it as it is."""

    @abstractmethod
    def check_sums(self) -> None:
        """Every result is exact, and of the set that was announced."""

    @abstractmethod
    def check_consents(self) -> None:
        """Nobody consents to two sums of one update."""

    @abstractmethod
    def make_client(self, client: int) -> ClientMachine[Any]:
        """With the client's ledger."""

    @abstractmethod
    def finish_undisturbed(self) -> None:
        """A new round or epoch works."""

    # -- the wire ------------------------------------------------------------------------------

    def busy(self) -> list[tuple[int, int]]:
        return [link for link in super().busy() if self.away.isdisjoint(link)]

    def deliver(self, packet: Packet) -> None:
        self.before = self.memory(packet.recipient)
        self.was_refused = False
        super().deliver(packet)

    def refused(self, packet: Packet, error: DecodeError | RemoteProtocolError) -> None:
        self.happened[f"refused {packet.kind.__name__}"] += 1
        self.check_silent(error)
        assert self.memory(packet.recipient) == self.before, f"a refusal changes nothing: {error}"
        self.was_refused = True

    def carry(self, packet: Packet) -> Iterable[Packet]:
        self.log.append(packet)
        message = self.codec.decode(packet.data)
        match message:
            case AggregatedShare() | UnmaskingShares():
                key = (packet.sender, getattr(message, "time", 0))
                known = self.answers.setdefault(key, packet.data)
                assert known == packet.data, "two different answers for one sum"
            case MaskedUpload():
                self.note_mask(packet.sender, message)
        return (packet,)

    def note_mask(self, client: int, message: MaskedUpload) -> None:
        """What is left of an upload without its update; no two uploads leave the same."""
        if self.settings.traits.protected:
            key = self.mask_of(client, message)
            plain = hide(self.settings, self.update_of(key), bytes(32), self.zeros())
            mask = self.group.subtract(message.vector, plain).tobytes()
            assert self.masks.setdefault(mask, key) == key, "one mask for two uploads"

    def zeros(self) -> Elements:
        return np.zeros(self.settings.length, dtype=np.uint32)

    @abstractmethod
    def mask_of(self, client: int, message: Any) -> tuple[int, ...]:
        """The name of an upload."""

    @abstractmethod
    def update_of(self, upload: tuple[int, ...]) -> Update:
        """What it hides."""

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        """Jobs take their time."""
        self.jobs += [o.job for o in outputs if isinstance(o, Compute)]
        return [output for output in outputs if not isinstance(output, Compute)]

    def output(self, party: int, output: object) -> None:
        match output:
            case NeedInput():
                self.waiting.add(party)
            case Persist(LedgerChanged(entries)):
                self.stored_ledgers[party] = entries
            case RoundAborted() if party != SERVER:
                self.waiting.discard(party)
            case Aggregate() | RoundAborted() | BufferAggregate() | BufferFailed():
                self.results.append(output)

    def run(self, job: Job) -> Result:
        """In ranges of any size, in any order."""
        try:
            job.open()
            inner = self.coins.sample(range(1, job.columns), min(2, job.columns - 1))
            cuts = [0, *sorted(inner), job.columns]
            ranges = list(pairwise(cuts))
            parts = {start: job.run(start, stop) for start, stop in self.shuffled(ranges)}
            for start, part in self.shuffled(parts.items()):
                job.put(start, part)
            return job.result()
        except RecoveryError as error:
            self.check_silent(error)
            return error

    def shuffled(self, items: Iterable[Any]) -> list[Any]:
        ordered = list(items)
        return self.coins.sample(ordered, len(ordered))

    # -- what may happen -----------------------------------------------------------------------

    def live(self) -> None:
        events = self.EVENTS | (self.ROUGH if self.rough else {})
        self.begin()
        for _ in range(STEPS):
            (event,) = self.coins.choices(list(events), list(events.values()))
            self.happened[event] += 1
            getattr(self, event)()
            self.check()
        self.finish()

    def check(self) -> None:
        self.check_sums()
        self.check_consents()
        assert not SECRET.search(repr(self.clients))

    def finish(self) -> None:
        self.begin()
        self.finish_undisturbed()
        self.check()

    def some_messages_arrive(self) -> None:
        for _ in range(self.coins.randint(1, 12)):
            if links := self.busy():
                self.deliver(self.take(*self.coins.choice(links)))

    def everything_arrives(self) -> None:
        while links := self.busy():
            self.deliver(self.take(*self.coins.choice(links)))

    def a_message_arrives_twice(self) -> None:
        if links := self.busy():
            packet = self.take(*self.coins.choice(links))
            self.deliver(packet)
            self.deliver(packet)

    def a_message_overtakes_another(self) -> None:
        crowded = [link for link in self.busy() if len(self.on(*link)) > 1]
        if crowded:
            link = self.coins.choice(crowded)
            late = self.take(*link)
            self.deliver(self.take(*link))
            self._queue(late.recipient).appendleft(late)

    def an_old_message_comes_again(self) -> None:
        packets = [p for p in self.log if self.away.isdisjoint((p.sender, p.recipient))]
        packets = [p for p in packets if p.kind not in (AbortRound, UploadDropped)]
        if packets:
            self.deliver(self.coins.choice(packets))

    def a_message_is_forged(self) -> None:
        """The genuine one comes after it, or never."""
        if not (links := self.busy()):
            return
        packet = self.take(*self.coins.choice(links))
        if (forged := self.forge(packet)) is None:
            self.deliver(packet)
            return
        data, harmless = forged
        before = self.memory(packet.recipient)
        self.deliver(packet._replace(data=data))
        if harmless:
            assert self.memory(packet.recipient) == before, f"a forged {packet.kind.__name__}"
        if self.coins.random() < 0.7:
            self.deliver(packet)

    def forge(self, packet: Packet) -> tuple[bytes, bool] | None:
        """Another message in place of this one, and whether it must change nothing."""
        if self.coins.random() < 0.1:
            return self.coins.choice([packet.data[:-1], packet.data + b"\0"]), True
        message, harmless = self.codec.decode(packet.data), True
        changed: Message
        match message:
            case ShareBundle(shares):
                k = self.coins.randrange(len(shares))
                bad = replace(shares[k], sealed=self.flipped(bytes(shares[k].sealed)))
                changed, harmless = ShareBundle((*shares[:k], bad, *shares[k + 1 :])), False
            case Advertise(keys, signature):
                changed = Advertise(keys, self.flipped(signature))
            case Roster(members, graph):
                first, *others = members
                keys = (self.flipped(first.keys[0]), *first.keys[1:])
                other = Member(first.client, keys, first.signature)
                changed = Roster((other, *others), graph)
                if self.coins.random() < 0.5:  # another round: who believes in it is alone
                    changed, harmless = Roster(members[1:], graph), False
            case SharesClosed(owners):
                changed = SharesClosed(tuple(c for c in owners if c != packet.recipient))
            case SumRequest(time, tags):
                stranger = self.coins.random() < 0.5
                others = (*tags, Tag(999)) if stranger else self.without_one(packet.recipient, tags)
                changed = SumRequest(time, others)
                settled = self.has_consented(packet.recipient, message)
                harmless = stranger or settled
                if self.kind.threat_model is HONEST and not harmless:
                    return None  # a lie that the threat model excludes
            case Consent(time, signature):
                changed = Consent(time, self.flipped(signature))
            case Certificate(time, ((client, signature), *rest)):
                changed = Certificate(time, ((client, self.flipped(signature)), *rest))
            case MaskedUpload(tag, vector):
                changed = MaskedUpload(tag, np.roll(vector, 1))
            case ReportsWanted(masks):
                changed = ReportsWanted((*masks, (999, 0)))
            case Reports((report, *others)):
                changed = Reports((Report(report.owner, report.serial, bytes(3)), *others))
            case AggregatedShare(vector, time):
                changed = AggregatedShare(vector[1:], time)
            case UnmaskingShares(of_seeds, of_keys):
                changed = UnmaskingShares(of_seeds[4:], of_keys)
            case _:
                return None
        return self.codec.encode(changed), harmless

    def flipped(self, data: bytes) -> bytes:
        k = self.coins.randrange(len(data))
        return data[:k] + bytes([data[k] ^ 1 << self.coins.randrange(8)]) + data[k + 1 :]

    def without_one(self, client: int, tags: tuple[Tag, ...]) -> tuple[Tag, ...]:
        others = [tag for tag in tags if tag.owner != client]
        gone = self.coins.choice(others)
        return tuple(tag for tag in tags if tag != gone)

    def has_consented(self, client: int, request: SumRequest) -> bool:
        """Whether it takes no other request in the place of this one."""
        state = self.clients[client].state
        is_registered = isinstance(state, Registered) and state.holder is not None
        return is_registered and state.holder.time >= request.time

    def somebody_trains(self) -> None:
        if able := sorted(self.waiting - self.away):
            self.train(self.coins.choice(able))

    def everybody_trains(self) -> None:
        for client in sorted(self.waiting - self.away):
            self.train(client)

    def work_is_done(self) -> None:
        while self.jobs:
            job = self.jobs.pop(self.coins.randrange(len(self.jobs)))
            self.call(SERVER, partial(self.server.computed, job, self.run(job)))

    def a_client_leaves(self) -> None:
        if present := [c for c in self.ids if c not in self.away]:
            self.leave(self.coins.choice(present))

    def leave(self, client: int) -> None:
        """The server may be told."""
        self.away.add(client)
        self.disconnect(client)

    def disconnect(self, client: int) -> list[Packet]:
        """What was on its way is lost."""
        return [*self.lose(client, SERVER), *self.lose(SERVER, client)]

    def a_client_comes_back(self) -> None:
        if self.away:
            self.come_back(self.coins.choice(sorted(self.away)))

    def a_client_goes_on_from_its_snapshot(self) -> None:
        client = self.coins.choice(self.ids)
        party = self.clients[client]
        snapshot, generation = party.snapshot(), party.generation
        older, before = self.old.get(client, (b"", generation))
        if before < generation:
            with pytest.raises(MaskAlreadyUsed) as error:
                self.restore(client, older, generation)
            self.check_silent(error.value)
        self.old[client] = (snapshot, generation)
        self.clients[client] = moved = self.restore(client, snapshot, generation)
        self.ledgers[client] = moved.ledger
        assert moved.snapshot() == snapshot

    def restore(self, client: int, snapshot: bytes, generation: int) -> Any:
        source, identity = self.sources[client], self.identities[client]
        kind = type(self.clients[client])
        return kind.restore(snapshot, identity, self.policy, generation, source)

    def a_client_goes_on_without_it(self) -> None:
        """All that is left is the ledger, as it was stored; this round or epoch is over for it."""
        client = self.coins.choice(self.ids)
        if stored := self.stored_ledgers.get(client):
            self.ledgers[client] = Ledger.from_bytes(stored)
            self.old.pop(client, None)
            self.leave(client)
            self.waiting.discard(client)
            self.clients[client] = self.make_client(client)

    def the_server_crashes(self) -> None:
        for client in self.ids:
            self.disconnect(client)
        self.jobs.clear()
        self.crash()

    def the_deadline_fires(self) -> None:
        self.call(SERVER, self.server.proceed)

    def it_begins_anew(self) -> None:
        if self.number < self.LIMIT:
            self.begin()

    # -- no secrets ----------------------------------------------------------------------------

    def check_silent(self, error: BaseException) -> None:
        drawn = [d.hex()[:16] for source in self.sources.values() for d in source.drawn]
        for one in chain_of(error):
            text = f"{one} {one!r} {one.args}"
            assert not SECRET.search(text), text
            assert not any(secret in text for secret in drawn), text


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

"""What became of every vector of a federation whose parties are killed: what `bench chaos` asks.

Clients note what they hear, and what they are about to say, before anything else: whoever is killed
right after it has said so. The server writes every sum that it learns down. Vectors follow from the
client and the round, so nobody has to be believed about them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.demo_audit import several
from lightsecagg.drivers.federation.demo_notes import Noted
from lightsecagg.field.prime import PrimeField
from lightsecagg.params import DEFAULT_MODULUS
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.messages import SumRequest
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import UploadStored, name_of, unpack
from lightsecagg.session.interface import Effect, Event, Post, Received
from lightsecagg_lab.experiments.federation_bench import RandomVectors

DROPPED = "dropped after a crash"
"""Why a round was given up of which the journal knew no upload."""
_SAID = {"MaskedUpload": "uploaded", "Consent": "signed", "AggregatedShare": "answered"}


def edition(client: int, number: int, clients: int) -> int:
    """Which of its vectors a client has in a round: now and then that of the round before.

    So has one whose file nobody has replaced. If it was spent, the client must sit out.
    """
    return number - (number % (2 * clients) == client)


@dataclass(frozen=True, slots=True)
class RepeatingVectors:
    """A client's job: random vectors, now and then the same again."""

    client: int
    dimension: int | None
    clients: int

    def instructed(self, instructions: object) -> RepeatingVectors:
        """There is nothing to train."""
        return self

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        """Steered by client and edition."""
        chosen = edition(self.client, round_number, self.clients)
        return RandomVectors(self.client, self.dimension).compute(model, chosen, bound)


class RoundWatch(Noted):
    """Notes what a client says and hears: it may be killed at any moment."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._asked: dict[int, tuple[int, ...]] = {}

    @contextmanager
    def step(self, event: Event, effects: Sequence[Effect], start: float) -> Iterator[None]:
        if isinstance(event, Received) and name_of(event.data) in ("SumRequest", "UploadStored"):
            self._hear(event.data)
        for each in effects:
            if isinstance(each, Post) and name_of(each.data) in _SAID:
                self._say(each.data)
        yield

    def _say(self, data: bytes) -> None:
        number, body = unpack(data)  # type: ignore[misc]  # a protocol message, by its name
        about = {"set": list(self._asked.get(number, ())), "digest": sha256(body).hexdigest()}
        self._note(_SAID[name_of(data)], round=number, **about)

    def _hear(self, data: bytes | memoryview) -> None:
        match unpack(data):
            case UploadStored(number):
                self._note("stored", round=number)
            case (number, body):
                request = Codec(PrimeField(DEFAULT_MODULUS)).decode(body)
                if isinstance(request, SumRequest):
                    self._asked[number] = request.survivors
                    self._note("asked", round=number, set=list(request.survivors))


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum that the server has learned."""

    round: int
    included: tuple[int, ...]
    exact: bool
    """Whether it is the plain sum of the vectors of these clients, but for rounding."""


def check_sum(
    record: Mapping[str, Any], total: NDArray[np.float64], dimension: int, clients: int
) -> Sum:
    """Compare with the plain sum."""
    number, included = int(record["round"]), tuple(record["included"])
    expected = np.zeros(dimension)
    for client in included:
        expected += RepeatingVectors(client, dimension, clients).compute(b"", number, 1.0).vector
    off = float(np.abs(total - expected).max())
    return Sum(number, included, off <= len(included) * record["quantisation_step"])


@dataclass(frozen=True, slots=True)
class RoundAudit:
    """What must not happen, and what may: numbers of rounds, uploads and clients in rounds."""

    finished: int
    failed: dict[str, int]
    """Why rounds were given up, and how often."""
    resumed: int
    """Rounds that were under way when the server was killed, and finished by the next one."""
    acknowledged: int
    """Uploads that the server has promised to keep."""
    in_failed_rounds: int
    """Of these, those whose round failed: more than D of its clients did not answer in time."""
    wrong: int
    """Finished rounds whose sum is not the plain sum over the set that was announced. This must be
    0, as all below."""
    lost: int
    """Acknowledged uploads that are in no sum although their round did not fail."""
    twice: int
    """Vectors in the sums of two rounds."""
    two_sets: int
    """Clients that have signed or answered for two sets in one round."""
    two_answers: int
    two_uploads: int
    """Different ones, under one mask."""
    changed: int
    """Rounds of which two sets were announced."""

    @property
    def clean(self) -> bool:
        """Whether nothing has happened that must not."""
        bad = (self.wrong, self.lost, self.twice, self.two_sets, self.two_answers)
        return not any((*bad, self.two_uploads, self.changed))


def audit(
    records: Sequence[Mapping[str, Any]],
    sums: Iterable[Sum],
    notes: Iterable[Mapping[str, Any]],
    clients: int,
) -> RoundAudit:
    """What became of every upload, by the server's history, its sums and the clients' notes."""
    told: defaultdict[str, set[tuple[Any, Any]]] = defaultdict(set)
    for note in notes:
        what, key = note["what"], (note["client"], note.get("round"))
        if what == "asked":
            told["asked"].add((note["round"], tuple(note["set"])))
        elif what in ("signed", "answered"):
            told["sets"].add((key, tuple(note["set"])))
        if what in ("answered", "uploaded"):
            told[what].add((key, note["digest"]))
        elif what == "stored":
            told["stored"].add((note["round"], note["client"]))
    learned: defaultdict[int, set[Sum]] = defaultdict(set)
    for each in sums:
        learned[each.round].add(each)
    announced: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
    for number, asked in told["asked"]:
        announced[number].add(asked)
    done = {record["round"]: record for record in records if record["aborted"] is None}
    aborted = {record["round"]: record["aborted"] for record in records if record["aborted"]}
    vectors = Counter(
        (client, edition(client, number, clients))
        for number, found in learned.items()
        for client in set().union(*(each.included for each in found))
    )
    excused = {number for number, why in aborted.items() if why != DROPPED}
    return RoundAudit(
        finished=len(done),
        failed=dict(Counter(re.sub(r"\d+", "#", why) for why in aborted.values())),
        resumed=sum(bool(record["resumed"]) for record in done.values()),
        acknowledged=len(told["stored"]),
        in_failed_rounds=sum(number in excused for number, _ in told["stored"]),
        wrong=sum(
            not _is_right(record, learned[number], announced[number])
            for number, record in done.items()
        ),
        lost=sum(
            number not in excused and owner not in done.get(number, {"included": ()})["included"]
            for number, owner in told["stored"]
        ),
        twice=sum(count > 1 for count in vectors.values()),
        two_sets=several(told["sets"]),
        two_answers=several(told["answered"]),
        two_uploads=several(told["uploaded"]),
        changed=several(told["asked"]),
    )


def _is_right(
    record: Mapping[str, Any], learned: set[Sum], announced: set[tuple[int, ...]]
) -> bool:
    """One exact sum, of those who were announced and none else."""
    included = tuple(record["included"])
    return {(each.included, each.exact) for each in learned} == {(included, True)} and (
        announced == {included}
    )

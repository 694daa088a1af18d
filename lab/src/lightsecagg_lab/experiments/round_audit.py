"""What became of every vector of a federation whose parties are killed: what `bench chaos` asks.

Clients note what they hear, and what they are about to say, before anything else: whoever is killed
right after it has said so. The server writes every sum that it learns down. Vectors follow from the
client and the round, so nobody has to be believed about them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.field.prime import PrimeField
from lightsecagg.params import DEFAULT_MODULUS
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.messages import SumRequest
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import UploadStored, name_of, unpack
from lightsecagg.session.interface import Event, Received
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


class NotedClient(FederationClient):
    """A client that notes what it says and hears: it may be killed at any moment."""

    def __init__(self, *arguments: Any, notes: Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._notes = notes
        self._codec = Codec(PrimeField(DEFAULT_MODULUS))
        self._asked: dict[int, tuple[int, ...]] = {}
        self._note("started")

    async def _tell(self, event: Event) -> None:
        if isinstance(event, Received):
            self._hear(event.data)
        await super()._tell(event)

    async def _post(self, data: bytes) -> None:
        what = _SAID.get(name_of(data))
        message = unpack(data) if what is not None else None
        if what is not None and isinstance(message, tuple):
            number, body = message
            asked = list(self._asked.get(number, ()))
            self._note(what, round=number, set=asked, digest=hashlib.sha256(body).hexdigest())
        await super()._post(data)

    def _hear(self, data: bytes | memoryview) -> None:
        if name_of(data) not in ("SumRequest", "UploadStored"):
            return
        match unpack(data):
            case UploadStored(number):
                self._note("stored", round=number)
            case (number, body):
                request = self._codec.decode(body)
                if isinstance(request, SumRequest):
                    self._asked[number] = request.survivors
                    self._note("asked", round=number, set=list(request.survivors))

    def _note(self, what: str, **about: object) -> None:
        line = json.dumps({"client": self._table.id, "what": what, **about})
        with (self._notes / f"notes-{self._table.id}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")  # in one piece, when it is closed


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """What the clients have noted."""
    return [
        json.loads(line)
        for path in folder.glob("notes-*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


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
    told: defaultdict[str, defaultdict[Any, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for note in notes:
        what, key = note["what"], (note["client"], note.get("round"))
        if what == "asked":
            told["asked"][note["round"]].add(tuple(note["set"]))
        elif what in ("signed", "answered"):
            told["sets"][key].add(tuple(note["set"]))
        if what in ("answered", "uploaded"):
            told[what][key].add(note["digest"])
        elif what == "stored":
            told["stored"][note["round"]].add(note["client"])
    learned: defaultdict[int, set[Sum]] = defaultdict(set)
    for each in sums:
        learned[each.round].add(each)
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
        acknowledged=sum(map(len, told["stored"].values())),
        in_failed_rounds=sum(len(told["stored"][number]) for number in excused),
        wrong=sum(
            not _is_right(record, learned[number], told["asked"][number])
            for number, record in done.items()
        ),
        lost=sum(
            len(owners - set(done[number]["included"] if number in done else ()))
            for number, owners in told["stored"].items()
            if number not in excused
        ),
        twice=sum(count > 1 for count in vectors.values()),
        two_sets=_several(told["sets"]),
        two_answers=_several(told["answered"]),
        two_uploads=_several(told["uploaded"]),
        changed=_several(told["asked"]),
    )


def _is_right(
    record: Mapping[str, Any], learned: set[Sum], announced: set[tuple[int, ...]]
) -> bool:
    """One exact sum, of those who were announced and none else."""
    included = tuple(record["included"])
    return {(each.included, each.exact) for each in learned} == {(included, True)} and (
        announced == {included}
    )


def _several(found: Mapping[Any, set[Any]]) -> int:
    return sum(len(values) > 1 for values in found.values())

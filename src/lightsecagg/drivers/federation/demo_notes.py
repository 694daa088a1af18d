"""What the parties of a demonstration write down: what they did and when, plain updates, sums.

No real party writes its updates down. Whoever may be killed writes at once, and whole files or
none.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg import system
from lightsecagg.drivers.federation.watch import ClientWatch, Training
from lightsecagg.field.prime import PrimeField
from lightsecagg.params import DEFAULT_MODULUS
from lightsecagg.protocol.messages import (
    MaskedUpload,
    Message,
    Opening,
    SumRequest,
    UploadDropped,
)
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import MasksKnown, RoundOver, UploadStored, name_of, unpack
from lightsecagg.session.interface import (
    Effect,
    Event,
    Post,
    Received,
    RoundBegan,
    RoundLeft,
    Trained,
    TrainingFailed,
)
from lightsecagg.session.record import RoundRecord

_PHASES = {
    "Opening": "advertise",
    "Roster": "share",
    "ShareBundle": "share",
    "MaskedUpload": "upload",
    "Consent": "agree",
    "AggregatedShare": "recover",
    "UnmaskingShares": "recover",
}
"""To which phase of a round it counts what a message costs."""

_LAST_WORDS = {
    "share": ("ShareBundle",),
    "upload": ("MaskedUpload",),
    "agree": ("Consent",),
    "recover": ("AggregatedShare", "UnmaskingShares"),
}
"""Phase -> the message before which a doomed client is killed."""

_HEARD = ("Opening", "SumRequest", "UploadDropped", "UploadStored", "MasksKnown", "RoundOver")


class Noted(ClientWatch):
    """Notes lines about a client."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._client = folder, -1

    def begins(self, client: int) -> None:
        """It has its keys and its ledger."""
        self._client = client
        self._note("started")

    def _note(self, what: str, **about: object) -> None:
        line = json.dumps({"client": self._client, "what": what, "time": time.time(), **about})
        with (self._folder / f"notes-{self._client}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")  # in one piece, when it is closed


class DemoWatch(Noted):
    """Notes what a client does, and its plain updates; it may be slow, and doomed."""

    _round = -1
    _in_rounds = False
    """Whether it takes part in rounds, which have phases."""
    _codec: Codec | None = None
    _unacknowledged: tuple[int, int] | None = None
    """Epoch and serial of the latest upload, until it is stored or dropped."""

    def __init__(
        self,
        folder: Path,
        *,
        slowdown: float = 1.0,
        least: float = 0.0,
        deaths: Mapping[int, str] | None = None,
    ) -> None:
        """Training takes `slowdown` times as long, as if it took `least` seconds at least.

        `deaths` names the phase of a round in the middle of which it is killed.
        """
        super().__init__(folder)
        self._slowdown, self._least, self._deaths = slowdown, least, deaths or {}

    @contextmanager
    def step(self, event: Event, effects: Sequence[Effect], start: float) -> Iterator[None]:
        """Notes the update before it is masked, and what is about to be said before it is."""
        if isinstance(event, Trained):
            _write(
                self._folder / f"update-{event.round}-{self._client}.npz",
                vector=event.update.vector,
                samples=event.update.samples,
            )
        if isinstance(event, Received) and name_of(event.data) in _HEARD:
            self._hear(event.data)
        for each in effects:
            if isinstance(
                each, RoundBegan | RoundLeft
            ):  # what is said of an epoch that it has left
                self._round, self._unacknowledged = each.round, None  # is of an earlier upload
        posted = [each.data for each in effects if isinstance(each, Post)]
        for data in posted:
            self._say(data)
        yield
        heard = [event.data] if isinstance(event, Received) else []
        phases = [_PHASES[kind] for kind in map(name_of, [*posted, *heard]) if kind in _PHASES]
        if phases and self._in_rounds:
            self._note("span", round=self._round, phase=phases[0], start=start)

    async def training(self, number: int, train: Training) -> Trained | TrainingFailed:
        """Takes its time."""
        start, began = time.time(), time.monotonic()
        self._note("trains")
        result = await train()
        seconds = time.monotonic() - began
        await asyncio.sleep(self._slowdown * max(seconds, self._least) - seconds)
        self._note("trained", version=number, start=start)
        return result

    def _say(self, data: bytes | memoryview) -> None:
        name = name_of(data)
        if name in _LAST_WORDS.get(self._deaths.get(self._round, ""), ()):
            system.kill_self()
        if name == "MaskedUpload":
            number, message = self._message(data)
            assert isinstance(message, MaskedUpload)  # noqa: S101 - it says so
            tag = message.tag
            about = {"serial": tag.serial, "version": tag.version, "digest": tag.digest.hex()}
            self._note("upload", epoch=number, **about)
            self._unacknowledged = number, tag.serial

    def _hear(self, data: bytes | memoryview) -> None:
        match unpack(data):
            case RoundOver(number, aborted):
                self._note("over", epoch=number, aborted=aborted)
            case UploadStored(number):
                self._stored(number)
            case MasksKnown(number, _, waiting):
                if self._unacknowledged is not None and self._unacknowledged[1] in waiting:
                    self._stored(number)
            case (_, _):
                number, message = self._message(data)
                match message:
                    case Opening(content):
                        settings = Settings.from_bytes(content)
                        self._codec = Codec(settings.group)
                        self._in_rounds = settings.buffering is None
                    case SumRequest() as request:
                        terms = [(tag.owner, tag.serial) for tag in request.tags]
                        self._note("announced", epoch=number, at=request.time, terms=terms)
                    case UploadDropped(serial):
                        self._note("dropped", epoch=number, serial=serial)
                        if self._unacknowledged == (number, serial):
                            self._unacknowledged = None

    def _message(self, data: bytes | memoryview) -> tuple[int, Message]:
        number, body = unpack(data)  # type: ignore[misc]  # a protocol message, by its name
        codec = self._codec or Codec(PrimeField(DEFAULT_MODULUS))
        return number, codec.decode(body)

    def _stored(self, number: int) -> None:
        if self._unacknowledged is not None and self._unacknowledged[0] == number:
            self._note("stored", epoch=number, serial=self._unacknowledged[1])
            self._unacknowledged = None


def write_sum(folder: Path, record: RoundRecord, mean: NDArray[np.float64]) -> None:
    """With its record: the server may be killed before it has stored that."""
    about = {"record": json.dumps(record.to_json()), "time": time.time()}
    _write(folder / f"average-{record.round}.npz", average=mean, **about)


def _write(path: Path, **arrays: Any) -> None:
    """A process that is killed leaves no half of a file."""
    beside = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        np.savez(file, **arrays)
    beside.replace(path)


# -- reading -------------------------------------------------------------------------------------


def read_sums(folder: Path) -> list[dict[str, Any]]:
    """The record of every sum that the server has learned, by version; `time` is when it did."""
    records = []
    for path in folder.glob("average-*.npz"):
        with np.load(path) as stored:
            records.append(json.loads(str(stored["record"])) | {"time": float(stored["time"])})
    return sorted(records, key=lambda record: int(record["round"]))


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """What clients did, in the order of time."""
    lines = [
        json.loads(line)
        for path in folder.glob("notes-*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(lines, key=lambda note: float(note["time"]))


def spans_of(notes: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """(round, client) -> the phases in which that client did something, and when."""
    spans: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for note in notes:
        when = {"start": note.get("start"), "end": note["time"]}
        if note["what"] == "trained":
            spans[note["version"], note["client"]].append({"phase": "training", **when})
        elif note["what"] == "span":
            spans[note["round"], note["client"]].append({"phase": note["phase"], **when})
    return dict(spans)

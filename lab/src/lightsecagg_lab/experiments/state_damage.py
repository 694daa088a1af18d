"""A server's state folder: what it must not forget, and how a byte of it is damaged."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.protocol.journal_facts import UploadWaits, decode_facts
from lightsecagg.session.past import Unfinished


@dataclass(frozen=True, slots=True)
class Memory:
    """What a server's state folder knows, of all that must not be forgotten."""

    completed: tuple[int, bytes]
    """How many rounds are done, and the hash of the model after them."""
    next_round: int
    ended: dict[int, str | None]
    announced: dict[int, tuple[int, ...]]
    """Round -> U1."""
    uploads: dict[tuple[int, int], bytes]
    """Round that is under way, client -> the hash of what is stored."""
    unheard: bool = False
    """Whether the last change was not marked yet: what nobody has heard of may be forgotten."""

    def survived_in(self, later: Memory) -> bool:
        """Whether all of it is known later.

        A server that has come back may have dropped rounds without an upload meanwhile, and have
        chosen U1 of one whose uploads are all there.
        """
        return (
            self.completed == later.completed
            and self.next_round == later.next_round
            and self.ended.items() <= later.ended.items()
            and self.announced.items() <= later.announced.items()
            and self.uploads == later.uploads
        )


def memory_of(state: Path, session: str, copy: Path) -> Memory:
    """Read from a copy: to open a journal changes it."""
    shutil.copytree(state, copy)
    try:
        with closing(Journal(copy, session)) as journal:
            completed, model = journal.load_model() or (0, b"")
            numbers = range(1, journal.next_round())
            sets = {number: journal.announced(number) for number in numbers}
            unfinished = journal.unfinished()
            return Memory(
                completed=(completed, hashlib.sha256(model).digest()),
                next_round=journal.next_round(),
                ended=journal.ended(),
                announced={number: ids for number, ids in sets.items() if ids is not None},
                uploads={
                    (number, client): digest
                    for number in unfinished
                    for client, digest in _uploads_of(journal.left(number, None))
                },
                unheard=journal.unheard_change,
            )
    finally:
        shutil.rmtree(copy)


def _uploads_of(left: Unfinished) -> Iterator[tuple[int, bytes]]:
    """Client and hash of each upload of a round that is stored."""
    if not (left.facts and left.settings.one_sum):
        return
    for fact in decode_facts(left.facts)[1]:
        if isinstance(fact, UploadWaits):
            stored = left.recall(fact.tag).read(0, left.settings.length)
            yield fact.tag.owner, hashlib.sha256(stored.tobytes()).digest()


def settle(state: Path, session: str) -> None:
    """Open the journal, as a restart does: its last change is marked then."""
    Journal(state, session).close()


def history_of(state: Path) -> list[dict[str, Any]]:
    path = state / "rounds.json"
    records: list[dict[str, Any]] = []
    if path.exists():
        records = json.loads(path.read_text(encoding="utf-8"))
    return records


def records_of(state: Path, session: str) -> tuple[list[dict[str, Any]], set[int]]:
    """Of all rounds that are over, some known to the journal alone; and those under way."""
    records = {record["round"]: record for record in history_of(state)}
    with closing(Journal(state, session)) as journal:
        for number, aborted in journal.ended().items():
            included = list(journal.announced(number) or ())
            told = {"round": number, "aborted": aborted, "included": included, "resumed": False}
            records.setdefault(number, told)
        return list(records.values()), set(journal.unfinished())


def checksummed_files(state: Path) -> list[Path]:
    """All that is not empty and that the server vouches for: not its report, nor older models."""
    models = sorted((state / "models").glob("*.npz"), key=lambda path: int(path.stem))
    names = ("journal.sqlite", "journal.sqlite-wal", "journal.mark")
    files = [*(state / name for name in names), *(state / "uploads").iterdir(), *models[-1:]]
    return [path for path in files if path.exists() and path.stat().st_size]


def flip_a_byte(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    path.write_bytes(data)

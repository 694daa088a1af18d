"""A board of what a state folder holds, whether its server runs or has ended; only read.

The rounds that are over are in `rounds.json`. Of the one under way the journal knows what it must:
that it was opened, who takes part, whose uploads are stored, whether U1 was announced. The database
is opened as if it never changed, so that SQLite makes no files beside it and takes no lock; what a
change under way makes unreadable is looked at again later.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lightsecagg.drivers.federation.dashboard.board import Board, LiveRound
from lightsecagg.drivers.federation.durable import verified
from lightsecagg.drivers.federation.promise_store import fact_of
from lightsecagg.errors import ConfigurationError, LightSecAggError
from lightsecagg.foreign import reading
from lightsecagg.protocol.journal_facts import decode_facts
from lightsecagg.protocol.settings import Settings


class FolderBoard(Board):
    """Looks into a state folder when it is asked to."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._rounds, self._journal = folder / "rounds.json", folder / "journal.sqlite"
        if not self._journal.is_file():
            raise ConfigurationError(
                f"{folder} is no state folder: it has no journal.sqlite. Either the server has not "
                "started yet, or this is not the folder of `server.state`"
            )
        self._stamps: tuple[Any, ...] = ()

    def look(self) -> None:
        """Take in what has changed since the last time; a damaged history raises."""
        stamps = (_stamp(self._rounds), _stamp(self._journal))
        if stamps == self._stamps:
            return
        if self._rounds.exists():
            with reading(self._rounds, "a history of rounds"):
                self.remember(json.loads(self._rounds.read_text(encoding="utf-8")))
        with suppress(sqlite3.Error, LightSecAggError):  # it is being changed
            self._look_into_journal()
            self._stamps = stamps

    def _look_into_journal(self) -> None:
        address = f"file:{quote(str(self._journal.resolve()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            latest = database.execute(
                "SELECT number, settings, survivors, outcome FROM rounds "
                "ORDER BY number DESC LIMIT 1"
            ).fetchone()
            if latest is None:
                self.show("recorded", "no round has begun", None)
                return
            number, settings, survivors, outcome = latest
            uploads = database.execute("SELECT owner FROM uploads WHERE number = ?", (number,))
            uploaded = {int(owner) for (owner,) in uploads}
            fact = database.execute(
                "SELECT content FROM facts WHERE number = ? AND place = 0", (number,)
            ).fetchone()
        opened = Settings.from_bytes(verified(f"{number}/settings", settings))
        self.describe(_overview(opened))
        if outcome is not None:
            self.show("recorded", f"round {number} was the last", None)
            return
        if opened.buffering is not None:
            self.show("running", f"epoch {number}, according to the journal", None)
            return
        live = LiveRound(number, (), self._journal.stat().st_mtime)
        if fact is None:
            live.progress("share", (), live.start)
        else:
            first, _ = decode_facts([verified(fact_of(number, 0), *fact)])
            members = {member.client for member in first.roster.members}
            live.progress("upload", members, live.start)
            live.progress("upload", members - uploaded, live.start)
            if survivors is not None:
                live.progress("recover", uploaded, live.start)
        self.show("running", "according to the journal", live)


def _overview(settings: Settings) -> dict[str, Any]:
    parameters = settings.parameters
    return {
        "protocol": str(settings.protocol),
        "threat_model": str(parameters.threat_model),
        "clients": parameters.clients,
        "privacy": parameters.privacy,
        "dropouts": parameters.dropouts,
        "survivors": parameters.survivors,
        "mode": "sync" if settings.buffering is None else "async",
        "rounds": 0,
    }


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)

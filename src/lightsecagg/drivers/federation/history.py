"""`rounds.json`: the record of every round of a federation, over all restarts of its server.

Written when a round ends, as a whole or not at all. It is a report, not a promise: the journal
holds what must not be lost. So a file that cannot be written (a full disk) or read (somebody edited
it) is a warning; nothing else waits for it, ends by it or is hidden behind it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.durable import write_synced
from lightsecagg.drivers.federation.observer import log
from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import reading
from lightsecagg.session.record import RoundRecord


class History:
    """The records of all rounds; the process that holds the journal's lock is its only writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[int, str] = {}
        """Round -> its record, as JSON on one line."""
        self.invited: dict[int, int] = {}
        """Client -> the latest round that it was invited to."""
        try:
            self._read()
        except ConfigurationError as error:
            aside = path.with_suffix(".damaged")
            log.warning("%s; it is kept as %s and a new history begins", error, aside.name)
            path.replace(aside)
            self._lines, self.invited = {}, {}

    def _read(self) -> None:
        if not self._path.exists():
            return
        with reading(self._path, "a history of rounds"):
            for record in json.loads(self._path.read_text(encoding="utf-8")):
                self._note(record["round"], record["invited"])
                self._lines[record["round"]] = json.dumps(record)

    def __contains__(self, number: int) -> bool:
        return number in self._lines

    def records(self) -> list[dict[str, Any]]:
        """All of them, by round."""
        return [json.loads(line) for _, line in sorted(self._lines.items())]

    def put(self, *records: RoundRecord) -> None:
        """Add rounds, each in the place of an earlier record of its number."""
        for record in records:
            self._note(record.round, record.invited)
            self._lines[record.round] = json.dumps(record.to_json())
        lines = ",\n".join(line for _, line in sorted(self._lines.items()))
        try:
            write_synced(self._path, f"[\n{lines}\n]\n".encode())
        except OSError as error:
            log.warning(
                "%s cannot be written: %s; the next round that ends will try again",
                self._path,
                error.strerror,
            )

    def _note(self, number: int, invited: list[int]) -> None:
        for client in invited:
            self.invited[client] = max(number, self.invited.get(client, 0))

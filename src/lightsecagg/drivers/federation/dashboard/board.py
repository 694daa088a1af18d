"""What there is to see of a federation, folded from what its server tells; never a secret (S22).

Everything to see is one of a few *parts*: the federation, the round that runs, the summary of each
round that has ended. A part has the version at which it last changed, so whoever has seen a version
is told the parts that are newer, and no more: a page that was away, or reads slowly, skips what
happened in between, and nothing is kept for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec

from lightsecagg.drivers.federation.callbacks import CONNECT, Overview, ServerCallback
from lightsecagg.foreign import escaped
from lightsecagg.session.interface import Leave
from lightsecagg.session.record import RoundRecord

SUMMARIES: Final = 500
"""Rounds that a page is told of; the latest."""
DETAILS: Final = 8_000_000
"""Bytes of details of rounds that are kept; of the latest."""
_WORDS = 600
"""Characters of a reason that are shown."""

_AWAITED = {"advertise": "waiting", "share": "sharing", "upload": "training"}
_DELIVERED = {"advertise": "sharing", "share": "training", "recover": "answered"}
"""Phase -> what a client is doing before, and after, its message is there; else: uploaded."""
_GONE = frozenset(Leave)
Rows = list[dict[str, Any]]


class Board(ServerCallback):
    """Takes what a server tells, in one thread; is read in another."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self.boot = f"{time.time_ns():x}"
        """Versions of another boot say nothing here."""
        self.version = 0
        self._here: set[int] = set()
        self._members: dict[int, dict[str, Any]] = {}
        """All that may take part, and since when each is away; None: not seen by this server."""
        self._federation: dict[str, Any] = {"state": "starting", "message": "", "connected": 0}
        self._aborted: dict[int, bool] = {}
        """Round -> whether it was; of all rounds."""
        self._live: LiveRound | None = None
        self._changed = {"federation": 0, "members": 0, "live": 0}
        self._summaries: dict[int, tuple[int, dict[str, Any]]] = {}
        """Round -> version, summary."""
        self._details: dict[int, bytes] = {}
        self._size = 0
        """Of all details."""
        self._told: tuple[tuple[int, int], bytes] = ((-1, -1), b"")

    # -- what the server tells -----------------------------------------------------------------

    def begins(self, overview: Overview, past: Sequence[dict[str, Any]]) -> None:
        """See `ServerCallback`."""
        with self._lock:
            self.describe(asdict(overview))
            self.remember(past)
            if self._live is None:
                self._say_waiting()

    def members(self, names: Mapping[int, str], needed: int) -> None:
        """See `ServerCallback`."""
        with self._lock:
            self._members = {
                client: {"id": client, "name": _words(name), "here": client in self._here}
                | {"away": self._members.get(client, {}).get("away")}
                for client, name in sorted(names.items())
            }
            self._touch("members")
            self.describe({"needed": needed})

    def connected(self, client: int) -> None:
        """See `ServerCallback`."""
        with self._lock:
            self._here.add(client)
            self._note_presence(client)

    def disconnected(self, client: int) -> None:
        """See `ServerCallback`."""
        with self._lock:
            self._here.discard(client)
            self._note_presence(client)

    def round_begins(self, number: int, invited: Sequence[int]) -> None:
        """See `ServerCallback`."""
        with self._lock:
            if self._asynchronous:  # it is the number of an epoch; what ends is a buffer
                number = 1 + max(self._aborted, default=0)
            self._begin(number, invited)
            self._say("running", "")

    def progress(self, phase: str, awaited: Collection[int]) -> None:
        """See `ServerCallback`."""
        with self._lock:
            if phase == CONNECT:
                self._say_waiting()
            elif self._live is not None:
                # In an epoch clients train and upload while others are asked for a sum.
                asked = () if self._asynchronous else awaited
                self._live.progress(phase, asked, self._clock())
                self._touch("live")

    def client_left(self, client: int, phase: str, how: Leave, reason: str) -> None:
        """See `ServerCallback`."""
        with self._lock:
            if self._live is not None:
                self._live.leave(client, phase, str(how), _words(reason), self._clock())
                self._touch("live")

    def update_buffered(self, client: int, staleness: int) -> None:
        """See `ServerCallback`."""
        with self._lock:
            if self._live is not None:
                self._live.buffer(client, staleness, self._clock())
                self._touch("live")

    def round_ended(self, record: RoundRecord) -> None:
        """See `ServerCallback`."""
        entry = record.to_json()
        with self._lock:
            live = self._live
            if live is None or not (self._asynchronous or live.number == record.round):
                self._keep(entry, client_rows)
            else:
                live.number = record.round
                live.end(entry, self._here)
                self._touch("live")
                self._keep(entry, lambda _: live.rows())
            if live is not None and self._asynchronous:
                self._begin_next(live)
            else:
                self._say_waiting()

    def finished(self, reason: str) -> None:
        """See `ServerCallback`."""
        with self._lock:
            self._say("ended", reason)

    def close(self) -> None:
        """See `ServerCallback`."""
        with self._lock:
            if self._federation["state"] != "ended":
                self._say("stopped", "the server has stopped; its clients wait for it")

    # -- what a state folder tells ---------------------------------------------------------------

    def describe(self, overview: dict[str, Any]) -> None:
        """What kind of federation it is."""
        with self._lock:
            if not overview.items() <= self._federation.items():
                self._federation |= overview
                self._touch("federation")

    def remember(self, records: Sequence[dict[str, Any]]) -> None:
        """Rounds of the past, by number, as `rounds.json` has them."""
        with self._lock:
            for record in records[:-SUMMARIES]:
                self._aborted[record["round"]] = record["aborted"] is not None
            for record in records[-SUMMARIES:]:
                self._keep(record, client_rows)

    def show(self, state: str, message: str, live: LiveRound | None) -> None:
        """What is under way."""
        with self._lock:
            before, after = (each and each.to_json() for each in (self._live, live))
            if after != before:
                self._live = live
                self._touch("live")
            self._say(state, message)

    # -- folding, with the lock held -------------------------------------------------------------

    @property
    def _asynchronous(self) -> bool:
        return self._federation.get("mode") == "async"

    def _begin(self, number: int, clients: Iterable[int]) -> LiveRound:
        state = "training" if self._asynchronous else "waiting"
        self._live = live = LiveRound(number, clients, self._clock(), state)
        self._touch("live")
        return live

    def _begin_next(self, before: LiveRound) -> None:
        """The next buffer of an epoch: who is out of it stays so, what waits still waits."""
        live = self._begin(before.number + 1, before.clients)
        live.progress("upload", (), live.start)
        live.waiting = +before.waiting
        for client, row in before.clients.items():
            if row["state"] in _GONE:
                kept = ("state", "why", "phase")
                live.clients[client].update((key, row[key]) for key in kept if key in row)
            elif live.waiting[client]:
                live.clients[client]["state"] = "uploaded"

    def _keep(self, record: dict[str, Any], rows: Callable[[dict[str, Any]], Rows]) -> None:
        summary = summarise(record)
        number = summary["round"]
        if self._summaries.get(number, (0, None))[1] == summary:
            return
        self._aborted[number] = summary["aborted"] is not None
        self._touch("federation")
        self._summaries[number] = (self.version, summary)
        self._size -= len(self._details.pop(number, b""))
        self._details[number] = msgspec.json.encode(summary | {"clients": rows(record)})
        self._size += len(self._details[number])
        while len(self._summaries) > SUMMARIES:
            del self._summaries[min(self._summaries)]
        while self._size > DETAILS:
            self._size -= len(self._details.pop(min(self._details)))

    def _say(self, state: str, message: str) -> None:
        said = {"state": state, "message": _words(message), "connected": len(self._here)}
        if not said.items() <= self._federation.items():
            self._federation |= said
            self._touch("federation")

    def _say_waiting(self) -> None:
        few = len(self._here) < self._federation.get("needed", 1)
        self._say("waiting", "for clients" if few else "for the next round")

    def _note_presence(self, client: int) -> None:
        self._federation["connected"] = len(self._here)
        self._touch("federation")
        member = self._members.get(client)
        if member is not None:
            here = client in self._here
            member |= {"here": here, "away": None if here else self._clock()}
            self._touch("members")
        if self._live is not None:
            self._touch("live")

    def _touch(self, part: str) -> None:
        self.version += 1
        self._changed[part] = self.version

    # -- what pages ask ------------------------------------------------------------------------

    @property
    def clients(self) -> int:
        """How many there are to show."""
        here = self._here if self._live is None else self._live.clients
        return max(len(here), len(self._members))

    def changes(self, seen: int) -> tuple[int, bytes]:
        """The version now, and all parts that are newer than the one that was seen, as JSON."""
        with self._lock:
            if self._told[0] != (seen, self.version):
                self._told = ((seen, self.version), msgspec.json.encode(self.since(seen)))
            return self.version, self._told[1]

    def detail(self, number: int) -> bytes | None:
        """A round that has ended, with its clients, as JSON."""
        with self._lock:
            return self._details.get(number)

    def seen(self, event: str) -> int:
        """The version that the id of an event names; 0 if it is none of this boot."""
        boot, _, version = event.partition("-")
        known = boot == self.boot and version.isascii() and version.isdecimal()
        return min(int(version[:18]), self.version) if known else 0

    def since(self, seen: int) -> dict[str, Any]:
        """The parts that are newer than a version."""
        parts: dict[str, Any] = {"boot": self.boot, "now": self._clock()}
        if self._changed["federation"] > seen:
            aborted = sum(self._aborted.values())
            done = len(self._aborted) - aborted
            parts["federation"] = self._federation | {"done": done, "aborted": aborted}
        if self._changed["members"] > seen:
            parts["members"] = list(self._members.values())
        if self._changed["live"] > seen and self._live is not None:
            parts["live"] = self._live.to_json() | {"here": sorted(self._here)}
        newer = [summary for version, summary in self._summaries.values() if version > seen]
        if newer:
            parts["history"] = newer
        return parts


class LiveRound:
    """The round that runs, and what each of its clients is doing."""

    def __init__(
        self, number: int, invited: Iterable[int], now: float, state: str = "waiting"
    ) -> None:
        self.number, self.start, self._state = number, now, state
        self.clients: dict[int, dict[str, Any]] = {}
        self.phases: list[dict[str, Any]] = []
        self.staleness: dict[int, int] = {}
        self.waiting: Counter[int] = Counter()
        """Asynchronous: client -> its updates that no buffer has taken yet."""
        self.ended: dict[str, Any] | None = None
        self._awaited: frozenset[int] = frozenset()
        for client in invited:
            self.client(client)

    def client(self, client: int) -> dict[str, Any]:
        row = {"id": client, "state": self._state, "why": "", "steps": {}}
        return self.clients.setdefault(client, row)

    def progress(self, phase: str, awaited: Collection[int], now: float) -> None:
        """Who has delivered since, and when."""
        if not self.phases or self.phases[-1]["name"] != phase:
            self._enter(phase, awaited, now)
        for client in self._awaited.difference(awaited):
            self._deliver(client, phase, now)
        self._awaited = frozenset(awaited)
        entry = self.phases[-1]
        entry["awaited"] = len(awaited)

    def _enter(self, phase: str, awaited: Collection[int], now: float) -> None:
        """Whoever has not delivered in the phase before is awaited in none after it."""
        if self.phases:
            before = self.phases[-1]
            before["end"] = now
            for client in self._awaited:
                if client in awaited:
                    self._deliver(client, before["name"], now)
                else:
                    deadline = f"nothing came before phase {before['name']} was over"
                    self.leave(client, before["name"], "dropped", deadline, now)
        self._awaited = frozenset(awaited)
        self.phases.append(
            {"name": phase, "start": now, "end": None, "awaited": 0, "expected": len(awaited)}
        )
        for client in awaited:
            row = self.client(client)
            if row["state"] not in _GONE:
                row["state"] = _AWAITED.get(phase, "uploaded")

    def _deliver(self, client: int, phase: str, now: float) -> None:
        row = self.client(client)
        if row["state"] not in _GONE:
            row["state"] = _DELIVERED.get(phase, "uploaded")
            row["steps"][phase] = now

    def leave(self, client: int, phase: str, how: str, why: str, now: float) -> None:
        row = self.client(client)
        if row["state"] not in _GONE:
            row |= {"state": how, "why": why, "phase": phase, "left": now}

    def buffer(self, client: int, staleness: int, now: float) -> None:
        """Asynchronous: an update is here."""
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
        self.waiting[client] += 1
        row = self.client(client)
        row |= {"state": "uploaded", "why": "", "staleness": staleness}
        row["steps"]["upload"] = now

    def end(self, record: dict[str, Any], here: Collection[int]) -> None:
        """With what the record says: who is in the sum, and who was not named as gone but is."""
        included = set(record["included"])
        if record["aborted"] is None:
            self.waiting.subtract(record["included"])
        else:  # whose updates are lost with it, nobody says
            self.waiting.clear()
        ends = [phase["end"] for phase in record["phases"].values()]
        for phase in self.phases:
            known = record["phases"].get(phase["name"])
            if known is not None:
                phase |= {"start": known["start"], "end": known["end"], "awaited": 0}
        if self.phases and self.phases[-1]["end"] is None:
            self.phases[-1]["end"] = max(ends, default=self._last())
        for client in self._awaited.intersection(record["responders"]):
            self._deliver(client, self.phases[-1]["name"], self._last())
        if record["aborted"] is not None:
            for client in self._awaited.difference(here):
                away = "it was away when the round was aborted"
                self.leave(client, self.phases[-1]["name"], "dropped", away, self._last())
        for client, row in self.clients.items():
            if client in included:
                row["included"] = True
                if row["state"] not in _GONE:
                    row["state"] = "included"
            elif row["state"] in _GONE or record["aborted"] is not None or record["staleness"]:
                continue  # asynchronous: it will be in another sum
            else:
                row |= {"state": "dropped", "why": "it is not in the sum"}
        self.ended = summarise(record)

    def _last(self) -> float:
        """As far as it has come."""
        if not self.phases:
            return self.start
        phase = self.phases[-1]
        return float(phase["end"] or phase["start"])

    def rows(self) -> list[dict[str, Any]]:
        return [self.clients[client] for client in sorted(self.clients)]

    def to_json(self) -> dict[str, Any]:
        return {
            "round": self.number,
            "start": self.start,
            "phases": self.phases,
            "clients": self.rows(),
            "staleness": {str(key): count for key, count in sorted(self.staleness.items())},
            "buffered": (+self.waiting).total(),
            "ended": self.ended,
        }


def summarise(record: dict[str, Any]) -> dict[str, Any]:
    """A line about a round, of its record."""
    phases = record.get("phases", {})
    return {
        "round": record["round"],
        "aborted": None if record["aborted"] is None else _words(record["aborted"]),
        "resumed": record.get("resumed", False),
        "recalled": record.get("recalled", False),
        "stopped": record.get("stopped"),
        "start": min((entry["start"] for entry in phases.values()), default=None),
        "seconds": record.get("seconds", 0.0),
        "invited": len(record["invited"]),
        "included": len(record["included"]),
        "dropped": {name: len(who) for name, who in record.get("dropped", {}).items()},
        "withdrawn": sum(map(len, record.get("withdrawn", {}).values())),
        "refusals": {_words(why): count for why, count in record.get("refusals", {}).items()},
        "suspects": record.get("suspects", []),
        "figures": {_words(name): value for name, value in record.get("figures", {}).items()},
        "metrics": {_words(name): each for name, each in record.get("metrics", {}).items()},
        "phases": phases,
        "staleness": {str(key): n for key, n in record.get("staleness", {}).items()},
    }


def client_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What a record alone knows of its clients: not when each delivered, but how far it came."""
    phases = record.get("phases", {})
    gone = {client: phase for phase, who in record.get("dropped", {}).items() for client in who}
    own = {client: why for why, who in record.get("withdrawn", {}).items() for client in who}
    rows = []
    for client in sorted({*record["invited"], *record["included"]}):
        row: dict[str, Any] = {"id": client, "state": "included", "why": "", "steps": {}}
        for phase, entry in phases.items():
            if gone.get(client) == phase:
                row["left"] = entry["end"]
                break
            row["steps"][phase] = entry["end"]
        if client in gone:
            state = "withdrawn" if client in own else "dropped"
            row |= {"state": state, "why": _words(own.get(client, "")), "phase": gone[client]}
            row["included"] = client in record["included"]
        elif client in record["included"]:
            pass
        elif record.get("staleness"):
            row |= {"state": "training", "steps": {}}
        elif record["aborted"] is not None:
            row |= {"state": "waiting", "why": "the round was aborted"}
        else:
            row |= {"state": "dropped", "why": "it is not in the sum"}
        rows.append(row)
    return rows


def _words(text: str) -> str:
    """A reason, on one line, escaped and cut (S48)."""
    return escaped(text[:_WORDS])

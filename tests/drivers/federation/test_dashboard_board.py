"""What the page is told: the state of every client, the past, and only what is new."""

from __future__ import annotations

import json
from typing import Any

from lightsecagg.drivers.federation.callbacks import Overview
from lightsecagg.drivers.federation.dashboard import board as boards
from lightsecagg.drivers.federation.dashboard.board import Board
from lightsecagg.session.interface import Leave
from lightsecagg.session.record import PhaseRecord, RoundRecord

OVERVIEW = Overview("lightsecagg", "malicious-server", 5, 1, 1, 4, rounds=3, completed=0)


class Watched:
    """A board with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.board = Board(lambda: self.now)

    def told(self, seen: int = 0) -> dict[str, Any]:
        parts: dict[str, Any] = json.loads(self.board.changes(seen)[1])
        return parts

    def states(self) -> dict[int, str]:
        return {client["id"]: client["state"] for client in self.told()["live"]["clients"]}

    def round(self, number: int = 1) -> None:
        """Client 1 drops, 2 is refused, 3 sits it out, 4 is too late for the sum."""
        board = self.board
        board.round_begins(number, range(5))
        for phase in ("advertise", "share"):
            board.progress(phase, frozenset(range(5)))
            self.now += 1
        board.client_left(1, "share", Leave.DROPPED, "disconnected")
        board.progress("share", frozenset({0}))
        self.now += 1
        board.progress("upload", frozenset({0, 2, 3, 4}))
        board.client_left(2, "upload", Leave.REFUSED, "an element is not below q")
        board.client_left(3, "upload", Leave.WITHDRAWN, "it withdraws: 'no update'")
        self.now += 1
        board.progress("upload", frozenset({4}))
        self.now += 1
        board.progress("recover", frozenset({0}))


def ended(number: int = 1, **more: Any) -> RoundRecord:
    record = RoundRecord(number, "lightsecagg", list(range(5)), included=[0])
    record.phases = {"share": PhaseRecord(1001.0, 2.0, 10, 20), "upload": PhaseRecord(1003.0, 2.0)}
    for name, value in more.items():
        setattr(record, name, value)
    return record


def test_members_are_shown_always_and_since_when_they_are_away() -> None:
    watched = Watched()
    board = watched.board
    board.begins(OVERVIEW, [])
    board.members({0: "charite", 1: "", 2: "evil\nname"}, 2)
    seen = watched.told()
    assert [row["name"] for row in seen["members"]] == ["charite", "", "evil\\nname"]
    assert [row["away"] for row in seen["members"]] == [None] * 3
    assert (seen["federation"]["connected"], seen["federation"]["needed"]) == (0, 2)
    board.connected(0)
    board.connected(1)
    assert [row["here"] for row in watched.told()["members"]] == [True, True, False]
    board.round_begins(1, [0, 1])
    assert "members" not in watched.told(board.version)
    watched.now = 1234.0
    board.disconnected(1)
    seen = watched.told(board.version - 3)
    assert [row["away"] for row in seen["members"]] == [None, 1234.0, None]
    board.members({1: "", 3: "ucl"}, 2)  # another list: who was away still is
    assert [(row["id"], row["away"]) for row in watched.told()["members"]] == [
        (1, 1234.0),
        (3, None),
    ]
    board.connected(1)
    assert watched.told()["members"][0] == {"id": 1, "name": "", "here": True, "away": None}
    board.connected(7)  # who is on no list is no member
    assert len(watched.told()["members"]) == 2


def test_it_waits_for_clients_only_while_too_few_are_here() -> None:
    watched = Watched()
    board = watched.board
    board.begins(OVERVIEW, [])
    board.members(dict.fromkeys(range(3), ""), 2)
    messages = []
    for client in range(3):
        board.progress("connect", frozenset())
        messages.append(watched.told()["federation"]["message"])
        board.connected(client)
    assert messages == ["for clients", "for clients", "for the next round"]


def test_the_state_of_every_client_follows_the_phases() -> None:
    watched = Watched()
    board = watched.board
    board.begins(OVERVIEW, [])
    board.round_begins(1, range(5))
    assert set(watched.states().values()) == {"waiting"}
    board.progress("advertise", frozenset(range(5)))
    board.progress("advertise", frozenset({3, 4}))
    assert watched.states() == {
        0: "sharing",
        1: "sharing",
        2: "sharing",
        3: "waiting",
        4: "waiting",
    }
    board.progress("share", frozenset(range(5)))
    board.progress("share", frozenset({4}))
    assert watched.states() == {
        0: "training",
        1: "training",
        2: "training",
        3: "training",
        4: "sharing",
    }
    board.progress("upload", frozenset(range(4)))
    board.progress("upload", frozenset({0}))
    states = watched.states()
    assert states == {0: "training", 1: "uploaded", 2: "uploaded", 3: "uploaded", 4: "dropped"}
    board.progress("recover", frozenset(range(1, 4)))
    board.progress("recover", frozenset({1}))
    states = watched.states()
    assert states == {0: "dropped", 1: "uploaded", 2: "answered", 3: "answered", 4: "dropped"}


def test_who_left_and_why_is_told_and_stays_when_the_round_is_over() -> None:
    watched = Watched()
    watched.round()
    watched.board.round_ended(ended(responders=[0]))
    rows = {row["id"]: row for row in watched.told()["live"]["clients"]}
    assert {client: row["state"] for client, row in rows.items()} == {
        0: "included",
        1: "dropped",
        2: "refused",
        3: "withdrawn",
        4: "dropped",
    }
    assert rows[1]["why"] == "disconnected"
    assert rows[2] | {"steps": {}} == {
        "id": 2,
        "state": "refused",
        "why": "an element is not below q",
        "phase": "upload",
        "left": 1003.0,
        "steps": {},
    }
    assert rows[4]["why"] == "nothing came before phase upload was over"
    assert rows[0]["steps"] == {
        "advertise": 1001.0,
        "share": 1003.0,
        "upload": 1004.0,
        "recover": 1005.0,
    }
    detail = json.loads(watched.board.detail(1) or b"")
    assert detail["clients"] == list(rows.values()), "a reload shows the same"


def test_whoever_is_awaited_and_away_when_a_round_is_aborted_has_left_it() -> None:
    watched = Watched()
    board = watched.board
    for client in (0, 1):
        board.connected(client)
    board.round_begins(1, range(3))
    board.progress("upload", frozenset(range(3)))
    board.progress("upload", frozenset({1, 2}))
    board.round_ended(ended(1, included=[], aborted="too few"))
    assert watched.states() == {0: "uploaded", 1: "training", 2: "dropped"}


def test_a_page_is_told_what_is_new_to_it_and_nothing_else() -> None:
    watched = Watched()
    board = watched.board
    board.begins(OVERVIEW, [ended(1).to_json()])
    first = board.version
    assert set(watched.told()) == {"boot", "now", "federation", "history"}
    board.round_begins(2, range(5))
    news = watched.told(first)
    assert set(news) == {"boot", "now", "federation", "live"}, "the history is known"
    second = board.version
    board.progress("advertise", frozenset(range(5)))
    assert set(watched.told(second)) == {"boot", "now", "live"}
    board.round_ended(ended(2))
    assert [each["round"] for each in watched.told(second)["history"]] == [2]
    assert board.seen(f"{board.boot}-{second}") == second
    assert board.seen(f"{board.boot}-{10**30}") <= board.version
    for foreign in ("", "x", "0-1", f"{board.boot}-", f"{board.boot}-٣", f"{board.boot}--1"):
        assert board.seen(foreign) == 0


def test_the_past_is_there_after_a_restart() -> None:
    past = [
        ended(1, dropped={"upload": [1, 3]}, withdrawn={"no update": [3]}).to_json(),
        ended(2, aborted="too few", included=[], figures={"loss": float("nan")}).to_json(),
    ]
    watched = Watched()
    watched.board.begins(OVERVIEW, json.loads(json.dumps(past)))
    told = watched.told()
    assert (told["federation"]["done"], told["federation"]["aborted"]) == (1, 1)
    assert told["federation"]["state"] == "waiting"
    assert [each["aborted"] for each in told["history"]] == [None, "too few"]
    assert told["history"][1]["figures"] == {"loss": None}, "JSON has no NaN"
    rows = {row["id"]: row for row in json.loads(watched.board.detail(1) or b"")["clients"]}
    assert {client: row["state"] for client, row in rows.items()} == {
        0: "included",
        1: "dropped",
        2: "dropped",
        3: "withdrawn",
        4: "dropped",
    }
    assert rows[1]["left"] == 1005.0
    assert rows[3]["why"] == "no update"
    assert watched.board.detail(3) is None


def test_what_is_kept_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(boards, "SUMMARIES", 3)
    watched = Watched()
    watched.board.begins(OVERVIEW, [ended(number).to_json() for number in range(1, 11)])
    one = len(watched.board.detail(10) or b"")
    monkeypatch.setattr(boards, "DETAILS", 2 * one + one // 2)
    watched.board.round_ended(ended(11))
    told = watched.told()
    assert [each["round"] for each in told["history"]] == [9, 10, 11]
    assert told["federation"]["done"] == 11, "those that are not shown are counted"
    assert [number for number in range(12) if watched.board.detail(number)] == [10, 11]


def test_staleness_is_counted_while_the_buffer_fills_and_kept_with_the_round() -> None:
    watched = Watched()
    board = watched.board
    board.begins(Overview("lightsecagg", "x", 5, 1, 1, 4, 9, 0, mode="async", buffer=3), [])
    board.round_begins(1, range(5))
    board.progress("upload", frozenset(range(5)))
    for client, staleness in ((0, 0), (3, 2), (1, 0)):
        board.update_buffered(client, staleness)
    live = watched.told()["live"]
    assert live["buffered"] == 3
    assert live["staleness"] == {"0": 2, "2": 1}
    assert watched.states() == {
        0: "uploaded",
        1: "uploaded",
        2: "training",
        3: "uploaded",
        4: "training",
    }
    assert live["clients"][3]["staleness"] == 2
    board.update_buffered(3, 0)  # its next one, while a sum is made of the buffer
    board.client_left(4, "upload", Leave.DROPPED, "restarted")
    record = ended(1, included=[0, 1, 3], staleness={0: 2, 2: 1})
    board.round_ended(record)
    told = watched.told()
    assert told["history"][0]["staleness"] == {"0": 2, "2": 1}
    assert told["federation"]["mode"] == "async"
    assert told["live"]["round"] == 2, "the next buffer fills at once"
    assert told["live"]["buffered"] == 1
    states = watched.states()
    assert states == {0: "training", 1: "training", 2: "training", 3: "uploaded", 4: "dropped"}
    rows = json.loads(board.detail(1) or b"")["clients"]
    assert [row["state"] for row in rows] == [
        "included",
        "included",
        "training",
        "included",
        "dropped",
    ]
    again = Watched()
    again.board.begins(OVERVIEW, json.loads(json.dumps([record.to_json()])))
    assert again.told()["history"][0]["staleness"] == {"0": 2, "2": 1}


def test_presence_is_told_as_it_changes() -> None:
    watched = Watched()
    for client in range(3):
        watched.board.connected(client)
    watched.board.round_begins(1, range(3))
    watched.board.disconnected(1)
    told = watched.told()
    assert told["federation"]["connected"] == 2
    assert told["live"]["here"] == [0, 2]
    watched.board.finished("the federation has finished")
    watched.board.close()
    assert watched.told()["federation"]["state"] == "ended"


def test_a_server_that_was_stopped_says_so() -> None:
    watched = Watched()
    watched.board.begins(OVERVIEW, [])
    watched.board.close()
    assert watched.told()["federation"]["state"] == "stopped"


def test_S48_words_of_others_are_escaped_and_cut() -> None:
    watched = Watched()
    watched.board.round_begins(1, range(2))
    hostile = "\x1b[2J\u202e<script>alert(1)</script>\n" + "x" * 10_000
    watched.board.client_left(0, "share", Leave.REFUSED, hostile)
    record = ended(1, aborted=hostile, figures={hostile: 1.0}, withdrawn={hostile: [1]})
    watched.board.round_ended(record)
    text = watched.board.changes(0)[1].decode() + (watched.board.detail(1) or b"").decode()
    assert "\\\\x1b[2J\\\\u202e<script>" in text, "it is there, and harmless as text"
    for harmful in ("\x1b", "\u202e", "\n", "x" * 700):
        assert harmful not in text

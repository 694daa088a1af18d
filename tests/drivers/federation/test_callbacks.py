"""Callbacks: the user's own code is told of every round, and can spoil none."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation
from small_federation import Federation

from lightsecagg.drivers.federation.callbacks import (
    Callbacks,
    ClientCallback,
    ServerCallback,
    load_callbacks,
)
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.programs import build_client, build_server
from lightsecagg.errors import ConfigurationError


class Diary(ServerCallback):
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def round_begins(self, number: int, invited: Any) -> None:
        self.lines.append(("begins", number, invited))

    def round_ended(self, record: Any) -> None:
        self.lines.append(("ended", record.round, record.included, record.figures))

    def finished(self, reason: str) -> None:
        self.lines.append(("finished", reason))


class ClientDiary(ClientCallback):
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def round_begins(self, number: int) -> None:
        self.lines.append(("begins", number))

    def trained(self, number: int, seconds: float) -> None:
        assert seconds >= 0
        self.lines.append(("trained", number))

    def round_ended(self, number: int, included: bool, aborted: str | None) -> None:
        self.lines.append(("ended", number, included, aborted))

    def finished(self, reason: str) -> None:
        self.lines.append(("finished", reason))


class Broken(Diary, ClientDiary):  # type: ignore[misc]
    """Fails in whatever it is told."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("round_begins", "trained", "round_ended", "finished"):
            raise ZeroDivisionError("a bug of the user's")
        return super().__getattribute__(name)


def run(folder: Path, server: list[Any], clients: list[Any], fail_in: int | None = None) -> Any:
    federation = Federation(folder, 5, privacy=1, dropouts=1)
    federation.jobs[4].fail_in = fail_in

    async def scenario() -> Any:
        made = [federation.client(i) for i in range(5)]
        for client in made:
            client._callbacks = Callbacks(clients if client is made[4] else [])
        federated = federation.server(number=2, upload=60, agree=60, recover=60, settle=5)
        federated._callbacks = Callbacks(server)
        tasks = [asyncio.create_task(client.run()) for client in made]
        records = await asyncio.wait_for(federated.run(), 120)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        return records

    return asyncio.run(scenario())


def test_both_sides_are_told_of_every_round(tmp_path: Path) -> None:
    """Client 4 has no update in round 2, and hears nothing of how the round ends without it."""
    diary, client = Diary(), ClientDiary()
    records = run(tmp_path, [diary], [client], fail_in=2)
    everybody, figures = [0, 1, 2, 3, 4], [record.figures for record in records]
    assert diary.lines == [
        ("begins", 1, everybody),
        ("ended", 1, everybody, figures[0]),
        ("begins", 2, everybody),
        ("ended", 2, everybody[:4], figures[1]),
        ("finished", "the federation has finished"),
    ]
    assert client.lines == [
        ("begins", 1),
        ("trained", 1),
        ("ended", 1, True, None),
        ("begins", 2),
        ("ended", 2, False, "it has no update to upload"),
        ("finished", "the federation has finished"),
    ]


def test_a_failing_callback_is_a_warning_with_its_traceback_and_costs_no_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary()
    records = run(tmp_path, [Broken(), diary], [Broken()])
    assert [record.included for record in records] == [[0, 1, 2, 3, 4]] * 2
    assert len(diary.lines) == 5, "the next callback is told all the same"
    failures = [record for record in caplog.records if "the callback" in record.getMessage()]
    assert len(failures) == 5 + 7
    assert {record.levelname for record in failures} == {"WARNING"}
    assert all(record.exc_info is not None for record in failures)
    assert "ZeroDivisionError: a bug of the user's" in caplog.text


def test_a_callback_that_wants_to_end_the_program_fails_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Exits(Diary):
        def round_begins(self, number: int, invited: Any) -> None:
            sys.exit(1)

    diary = Exits()
    callbacks: Callbacks[ServerCallback] = Callbacks([diary])
    callbacks.tell("round_begins", 1, [])
    callbacks.tell("finished", "all the same")
    callbacks.close()
    assert diary.lines == [("finished", "all the same")]
    assert "the callback Exits.round_begins failed" in caplog.text


def test_no_round_waits_for_a_callback_and_the_end_not_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()

    class Stuck(ServerCallback):
        def finished(self, reason: str) -> None:
            released.wait()

    callbacks: Callbacks[ServerCallback] = Callbacks([Stuck()])
    callbacks.tell("finished", "it does not return")
    callbacks.tell("finished", "nor does this call wait for it")
    callbacks.close(patience=0.01)
    assert "a callback has not returned within 0.01 s" in caplog.text
    released.set()


def test_a_stuck_callback_keeps_no_other_waiting() -> None:
    released, told = threading.Event(), threading.Event()

    class Stuck(ServerCallback):
        def finished(self, reason: str) -> None:
            released.wait()

    class Quick(ServerCallback):
        def finished(self, reason: str) -> None:
            told.set()

    callbacks: Callbacks[ServerCallback] = Callbacks([Stuck(), Quick()])
    callbacks.tell("finished", "done")
    assert told.wait(60)
    released.set()
    callbacks.close()


class Watch(ServerCallback):
    """Takes down all that a page needs."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.phases: list[str] = []
        self.awaited: dict[str, set[int]] = {}
        self.left: list[tuple[int, str, str, str]] = []
        self.overview: Any = None
        self.closed = False

    def begins(self, overview: Any, past: Any) -> None:
        self.overview = (overview, past)

    def connected(self, client: int) -> None:
        self.here.add(client)

    def progress(self, phase: str, awaited: Any) -> None:
        if phase not in self.phases:
            self.phases.append(phase)
            self.awaited[phase] = set(awaited)

    def client_left(self, client: int, phase: str, how: Any, reason: str) -> None:
        self.left.append((client, phase, str(how), reason))

    def close(self) -> None:
        self.closed = True


def test_a_server_tells_who_is_here_who_is_awaited_and_who_has_left(tmp_path: Path) -> None:
    watch = Watch()
    (record, _) = run(tmp_path, [watch], [], fail_in=1)
    overview, past = watch.overview
    assert (overview.clients, overview.privacy, overview.dropouts) == (5, 1, 1)
    assert (overview.rounds, overview.completed, overview.mode, past) == (2, 0, "sync", [])
    assert watch.here == set(range(5))
    assert [phase for phase in watch.phases if phase != "connect"] == list(record.phases)
    assert watch.awaited["advertise"] == watch.awaited["upload"] == set(range(5))
    assert watch.awaited["recover"] == set(range(4))
    (left,) = watch.left
    assert left[:3] == (4, "upload", "withdrawn")
    assert "it has no update to upload" in left[3]
    assert watch.closed


OWN = """
from pathlib import Path
from lightsecagg.drivers.federation.callbacks import ClientCallback, ServerCallback

HERE = Path(__file__).parent


def Broken():
    return 1 / 0


class Server(ServerCallback):
    def round_ended(self, record):
        (HERE / "server.txt").write_text(f"{record.round} {record.included}")


class Client(ClientCallback):
    def round_ended(self, number, included, aborted):
        (HERE / "client.txt").write_text(f"{number} {included} {aborted}")
"""


def test_callbacks_are_named_in_the_configuration(tmp_path: Path) -> None:
    federation = NetworkFederation(tmp_path, 4)
    module = tmp_path / "own.py"
    module.write_text(OWN)
    server_config = load_config(ServerConfig, federation.made.server)
    named = server_config.server.model_copy(update={"callbacks": (f"{module}:Server",)})

    async def scenario() -> None:
        server = federation.server()
        loaded = load_callbacks(named.callbacks, ServerCallback, "server.callbacks")
        server._callbacks = Callbacks(loaded)
        table = [f'client.callbacks=["{module}:Client"]']
        clients = [federation.client(i, table=table if i == 0 else ()) for i in range(4)]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        await asyncio.wait_for(server.run(), 120)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)

    asyncio.run(scenario())
    assert (tmp_path / "server.txt").read_text() == "1 [0, 1, 2, 3]"
    assert (tmp_path / "client.txt").read_text() == "1 True None"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("own", r"callbacks own: write package\.module:Name"),
        ("no_such_module_here:Name", "there is no module 'no_such_module_here'"),
        ("/nowhere/own.py:Name", r"/nowhere/own\.py does not exist"),
        ("own.py:Nothing", "defines no 'Nothing'"),
        ("own.py:Client", r"this is a Client, not a subclass of .*ServerCallback"),
        ("own.py:HERE", "defines no 'HERE'"),
        ("own.py:Broken", r"callbacks .*own\.py:Broken fails with ZeroDivisionError at own\.py:9"),
    ],
)
def test_a_wrong_name_is_found_before_a_socket_is_opened(
    tmp_path: Path, name: str, complaint: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    federation = NetworkFederation(tmp_path, 4)
    name = name.replace("own.py", str(tmp_path / "own.py"), 1) if name[0] == "o" else name
    override = f'server.callbacks=["{name}"]'
    with pytest.raises(ConfigurationError, match=complaint):
        build_server(load_config(ServerConfig, federation.made.server, [override]))
    if "own.py:Client" not in name:
        config = load_config(
            ClientConfig, federation.made.clients[0], [override.replace("server.", "client.")]
        )
        with pytest.raises(ConfigurationError, match=complaint):
            build_client(config)

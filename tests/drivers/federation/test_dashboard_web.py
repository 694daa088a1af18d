"""The dashboard over HTTP: who may look, what is served, and what a page can cost."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation
from small_federation import Federation
from test_secrets import CanaryVectors, canaries

from lightsecagg.crypto import entropy
from lightsecagg.drivers.federation.callbacks import Callbacks, Overview
from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.dashboard import web
from lightsecagg.drivers.federation.dashboard.board import Board
from lightsecagg.drivers.federation.dashboard.folder import FolderBoard
from lightsecagg.drivers.federation.dashboard.live import Dashboard, make_dashboard
from lightsecagg.drivers.federation.dashboard.web import PageServer, read_token
from lightsecagg.errors import ConfigurationError
from lightsecagg.session.interface import Leave
from lightsecagg.session.record import RoundRecord

TOKEN = "a-token-that-nobody-guesses"  # noqa: S105
OVERVIEW = Overview("lightsecagg", "malicious-server", 5, 1, 1, 4, rounds=3, completed=0)


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    made = Dashboard(0)
    made.begins(OVERVIEW, [])
    yield made
    made.close()


@pytest.fixture
def locked() -> Iterator[Dashboard]:
    made = Dashboard(0, token=TOKEN)
    made.round_ended(RoundRecord(1, "lightsecagg", [0, 1]))
    yield made
    made.close()


class Answer:
    """What came back."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers = response.status, response.headers
        endless = response.headers["Content-Type"] == "text/event-stream"
        self.body = b"" if endless else response.read()


def ask(
    server: Dashboard | PageServer,
    path: str,
    method: str = "GET",
    body: str | None = None,
    **headers: str,
) -> Answer:
    port = server.pages.port if isinstance(server, Dashboard) else server.port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, sent)
        return Answer(connection.getresponse())
    finally:
        connection.close()


class Page:
    """An open stream of events."""

    def __init__(self, server: Dashboard, last: str | None = None, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.pages.port, timeout=60)
        if last is not None:
            headers["Last_Event_ID"] = last
        self.connection.request(
            "GET", "/events", headers={n.replace("_", "-"): v for n, v in headers.items()}
        )
        self.response = self.connection.getresponse()
        self.last = ""

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *error: object) -> None:
        self.response.close()
        self.connection.close()

    def event(self) -> dict[str, Any]:
        """The next one; how long it takes does not matter."""
        while line := self.response.readline():
            if line.startswith(b"id: "):
                self.last = line[4:].strip().decode()
            if line.startswith(b"data: "):
                parts: dict[str, Any] = json.loads(line[6:])
                return parts
        raise EOFError

    def until(self, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        while True:
            event = self.event()
            if wanted(event):
                return event


def eventually(look: Callable[[], Any]) -> None:
    """However loaded the machine is; a wait that never ends fails after a minute."""
    deadline = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# -- the page --------------------------------------------------------------------------------------


def test_every_file_of_the_page_is_served_with_a_strict_policy(dashboard: Dashboard) -> None:
    page = ask(dashboard, "/")
    assert page.status == 200
    named = re.findall(r'(?:href|src)="([\w.]+)"', page.body.decode())
    named += re.findall(r'from "\./([\w.]+)"', ask(dashboard, "/app.js").body.decode())
    assert {"style.css", "app.js", "icon.svg", "charts.js", "dom.js", "format.js"} <= set(named)
    for name in ("", *named):
        answer = ask(dashboard, f"/{name}")
        assert answer.status == 200, name
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["Access-Control-Allow-Origin"] is None
    for path in ("/nothing", "/rounds/1", "/rounds/x", "/../web.py", "/rounds/" + "9" * 4000):
        assert ask(dashboard, path).status == 404, path
    assert ask(dashboard, "/", "DELETE").status == 405


def test_the_page_asks_no_other_host_and_parses_no_text_as_markup() -> None:
    folder = Path(web.__file__).parent / "page"
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//\w+\.\w+", text), path.name
        markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|style=|onclick="
        assert not re.search(markup, text), path.name


def test_a_name_that_is_not_ours_is_refused(dashboard: Dashboard) -> None:
    """DNS rebinding: a page of somebody's leads its own name here and reads what is answered."""
    port = dashboard.pages.port
    for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", ""):
        for path in ("/", "/events"):
            assert ask(dashboard, path, Host=host).status == 421, host
    for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", f"[::1]:{port}", "192.0.2.7:80"):
        assert ask(dashboard, "/", Host=host).status == 200, host


# -- the token -------------------------------------------------------------------------------------


def test_without_the_token_nothing_of_the_federation_is_served(locked: Dashboard) -> None:
    for path in ("/rounds/1", "/app.js", "/index.html", "/events"):
        assert ask(locked, path).status == 401, path
        assert ask(locked, path, Authorization="Bearer wrong").status == 401, path
        assert ask(locked, path, Cookie="lightsecagg-dashboard=wrong").status == 401, path
        assert ask(locked, path, Cookie=f"lightsecagg-dashboard={TOKEN}").status == 401, path
        assert ask(locked, f"{path}?token={TOKEN}").status == 401, "addresses are logged"
    form = ask(locked, "/")
    assert form.status == 401
    assert b'<form method="post" action="login">' in form.body
    assert ask(locked, "/style.css").status == 200
    assert ask(locked, "/rounds/1", Authorization=f"Bearer {TOKEN}").status == 200


def test_the_token_is_given_once_and_becomes_a_cookie(
    locked: Dashboard, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = ask(locked, "/login", "POST", "token=wrong")
    assert (wrong.status, wrong.headers["Set-Cookie"]) == (401, None)
    assert b"That is not the token." in wrong.body
    foreign = ask(locked, "/login", "POST", f"token={TOKEN}", Origin="http://evil.example")
    assert foreign.status == 403
    right = ask(locked, "/login", "POST", f"token={TOKEN}")
    assert (right.status, right.headers["Location"]) == (303, "/")
    cookie = right.headers["Set-Cookie"]
    assert cookie.endswith("; HttpOnly; SameSite=Strict; Path=/")
    assert TOKEN not in cookie
    assert ask(locked, "/", Cookie=f"other=1; {cookie.partition(';')[0]}").status == 200
    with Page(locked, Cookie=cookie.partition(";")[0]) as page:
        assert page.event()["history"]
    assert "wrong token" in caplog.text
    assert TOKEN not in caplog.text
    caplog.clear()
    assert ask(locked, "/rounds/1", Authorization="Bearer wrong").status == 401
    assert "wrong token" in caplog.text, "a program waits as long for it"
    for length in ("x", "-1", str(10**9)):
        assert ask(locked, "/login", "POST", None, Content_Length=length).status == 400


def test_S24_beyond_loopback_a_token_is_needed_and_tls_used(tmp_path: Path) -> None:
    federation = NetworkFederation(tmp_path, 4)
    secret = tmp_path / "token"
    secret.write_text(f"{TOKEN}\n")
    secret.chmod(0o600)

    def made(*more: str) -> Dashboard | None:
        changes = ["server.dashboard_port=0", *more]
        return make_dashboard(load_config(ServerConfig, federation.made.server, changes))

    outside = 'server.dashboard_address="0.0.0.0"'
    with pytest.raises(ConfigurationError, match="only with a token"):
        made(outside)
    with_token = [outside, f'server.dashboard_token="{secret}"']
    dashboard = made(*with_token)
    assert dashboard is not None
    assert dashboard.pages.url.startswith("https://")
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(dashboard, "/", Authorization=f"Bearer {TOKEN}")  # in the clear
    dashboard.close()
    inside = made()
    assert inside is not None
    assert inside.pages.url.startswith("http://127.0.0.1:")
    assert ask(inside, "/").status == 200
    inside.close()


@pytest.mark.unix
def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_token(path)


def test_a_token_is_long(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_token(path)
    path.write_text(TOKEN)
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    path.write_text("short")
    with pytest.raises(ConfigurationError, match="16 printable characters"):
        read_token(path)


def test_a_port_that_is_taken_is_named(dashboard: Dashboard) -> None:
    with pytest.raises(ConfigurationError, match=f"on 127.0.0.1:{dashboard.pages.port}"):
        PageServer(Board(), dashboard.pages.port)


# -- events ----------------------------------------------------------------------------------------


def test_a_page_that_comes_back_is_told_what_it_has_missed(dashboard: Dashboard) -> None:
    dashboard.round_ended(RoundRecord(1, "lightsecagg", [0, 1]))
    with Page(dashboard) as page:
        event = page.until(lambda event: "history" in event)
        assert event["federation"]["done"] == 1
    dashboard.round_ended(RoundRecord(2, "lightsecagg", [0, 1]))
    with Page(dashboard, page.last) as again:
        assert [each["round"] for each in again.event()["history"]] == [2]
    with Page(dashboard, "another-boot-1") as other:
        assert [each["round"] for each in other.event()["history"]] == [1, 2]


def test_the_last_that_happens_is_told_before_the_server_ends() -> None:
    made = Dashboard(0)
    with Page(made) as page:
        page.event()
        made.finished("the federation has finished")
        made.close()
        assert page.until(lambda e: e["federation"]["state"] == "ended")
        with pytest.raises(EOFError):
            page.event()


def test_S27_a_page_that_does_not_read_holds_nothing_and_is_cut(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "DEADLINE", 0.5)
    monkeypatch.setattr(web, "PAUSE", 0.001)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", dashboard.pages.port))
    slow.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    eventually(lambda: dashboard.pages._streams == 1)

    def is_cut() -> bool:
        """Every change is a message of up to 60 kB; a queue of them would grow without end."""
        dashboard.round_begins(1, range(100))
        for client in range(100):
            dashboard.client_left(client, "share", Leave.DROPPED, "x" * 500)
        return dashboard.pages._streams == 0

    eventually(is_cut)
    eventually(lambda: not dashboard.pages._open)
    slow.close()
    with Page(dashboard) as page:
        assert page.event()["live"]["round"] == 1


def test_S27_connections_and_pages_are_few(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "STREAMS", 2)
    monkeypatch.setattr(web, "CONNECTIONS", 5)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(Page(dashboard)).event()
        assert ask(dashboard, "/events").status == 503
        eventually(lambda: len(dashboard.pages._open) == 2)
        for _ in range(3):
            idle = stack.enter_context(
                socket.create_connection(("127.0.0.1", dashboard.pages.port))
            )
            idle.sendall(b"GET")
        eventually(lambda: len(dashboard.pages._open) == 5)
        refused = socket.create_connection(("127.0.0.1", dashboard.pages.port), 60)
        with refused, suppress(ConnectionResetError):
            assert refused.recv(1) == b""
    eventually(lambda: not dashboard.pages._open)
    assert ask(dashboard, "/").status == 200


def test_R60_strangers_that_begin_no_handshake_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS they were counted after it: each held a descriptor of the server."""
    folder = NetworkFederation(tmp_path, 4).made.server.parent
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "server.pem", folder / "server.key")
    trust = ssl.create_default_context(cafile=folder / "ca.pem")
    monkeypatch.setattr(web, "CONNECTIONS", 5)
    monkeypatch.setattr(web, "DEADLINE", 600.0)  # whoever says nothing stays
    dashboard = Dashboard(0, tls=tls)
    address = ("127.0.0.1", dashboard.pages.port)
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(40)]
        for refused in strangers[5:]:
            with suppress(ConnectionResetError):
                assert refused.recv(1) == b"", "closed at once"
        assert len(dashboard.pages._open) == 5
    eventually(lambda: not dashboard.pages._open)
    for _ in range(10):  # the handshake is never taken for a request
        asked = http.client.HTTPSConnection(*address, timeout=60, context=trust)
        asked.request("GET", "/")
        assert asked.getresponse().status == 200
        asked.close()
    dashboard.close()


def test_S27_a_request_must_come_in_time_and_be_short(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "DEADLINE", 0.3)
    for request in (b"GET / HT", b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000):
        with socket.create_connection(("127.0.0.1", dashboard.pages.port), 60) as connection:
            connection.sendall(request)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    for nonsense in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET x HTTP/1.1\r\n\r\n",
        b"\xff\xfe / \0\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", dashboard.pages.port), 60) as connection:
            connection.sendall(nonsense)
            assert connection.recv(64).startswith(b"HTTP/1.1 400 ")


# -- what it shows ---------------------------------------------------------------------------------


def test_S22_nothing_that_is_served_holds_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that pages are told of a federation whose secrets and updates are canaries."""
    drawn: list[bytes] = []
    original = entropy.os.urandom

    def urandom(count: int) -> bytes:
        data = original(count)
        drawn.extend([data[:32]] if count >= 32 else [])
        return data

    monkeypatch.setattr(entropy.os, "urandom", urandom)
    federation = Federation(tmp_path / "state")
    federation.job.weighted = True
    federation.job.dimension = CanaryVectors.dimension
    for client in range(8):
        federation.jobs[client] = CanaryVectors(client)
    federation.jobs[1] = CanaryVectors(1, "foreign")
    federation.jobs[2] = CanaryVectors(2, "range")
    dashboard = Dashboard(0)
    served = bytearray()
    told = dashboard.changes

    def changes(seen: int) -> tuple[int, bytes]:
        version, data = told(seen)
        served.extend(data)
        return version, data

    monkeypatch.setattr(dashboard, "changes", changes)

    async def scenario() -> list[RoundRecord]:
        server = federation.server(number=2)
        server._callbacks = Callbacks([dashboard])
        async with federation.connected([federation.client(i) for i in range(8)]):
            return await asyncio.wait_for(server.run(), 120)

    with Page(dashboard) as page:
        page.event()
        records = asyncio.run(scenario())
        page.until(lambda event: event.get("federation", {}).get("state") == "ended")
    assert [record.included for record in records] == [[0, 3, 4, 5, 6, 7]] * 2
    board = FolderBoard(tmp_path / "state")
    board.look()
    for each in (dashboard, board):
        served += told(0)[1] if each is dashboard else each.changes(0)[1]
        served += b"".join(each.detail(number) or b"" for number in (1, 2))
    assert b'"state":"withdrawn"' in served
    assert b"it has no update to upload" in served
    assert drawn, "nothing was drawn: the capture of randomness does not work"
    content = bytes(served)
    for kind, forms in canaries(federation, drawn).items():
        found = [form for form in forms if form in content]
        assert not found, f"{kind} is served: {found[:3]}"
    assert not re.search(rb"(?<![\d.])48611(?![\d.])", content), "nobody's sample count"


# -- a state folder --------------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_state_folder_is_shown_and_not_touched(tmp_path: Path) -> None:
    federation = Federation(tmp_path / "state", 5, privacy=1, dropouts=1)
    records = asyncio.run(federation.run(number=2))
    before = listing(tmp_path)
    tmp_path.joinpath("state").chmod(stat.S_IRUSR | stat.S_IXUSR)
    board = FolderBoard(tmp_path / "state")
    board.look()
    told = json.loads(board.changes(0)[1])
    assert told["federation"]["state"] == "recorded"
    assert told["federation"]["done"] == 2
    assert (told["federation"]["clients"], told["federation"]["privacy"]) == (5, 1)
    assert [each["included"] for each in told["history"]] == [5, 5]
    assert told["history"][0]["seconds"] == records[0].seconds
    assert listing(tmp_path) == before
    version = board.version
    board.look()
    assert board.version == version, "nothing has changed"
    tmp_path.joinpath("state").chmod(0o700)


def test_a_round_under_way_is_seen_in_the_folder_of_a_server_that_runs(tmp_path: Path) -> None:
    federation = Federation(tmp_path / "state", 5, privacy=1, dropouts=1)
    seen: list[dict[str, Any]] = []
    server = federation.server(number=1)

    def and_look(store: Callable[..., Any]) -> Callable[..., Any]:
        def store_and_look(*arguments: Any) -> Any:
            stored = store(*arguments)
            board = FolderBoard(tmp_path / "state")
            board.look()
            seen.append(json.loads(board.changes(0)[1]))
            return stored

        return store_and_look

    journal = server._journal
    journal.open_round = and_look(journal.open_round)  # type: ignore[method-assign]
    journal.store_all = and_look(journal.store_all)  # type: ignore[method-assign]

    async def scenario() -> None:
        async with federation.connected([federation.client(i) for i in range(5)]):
            await asyncio.wait_for(server.run(), 120)

    asyncio.run(scenario())
    live = [event["live"] for event in seen]
    phases = [each["phases"][-1]["name"] for each in live]
    uploaded = [sum(c["state"] == "uploaded" for c in each["clients"]) for each in live]
    # Uploads that come together are stored, and seen, together.
    groups = len(phases) - 4  # the set is announced, and then agreed on
    assert 1 <= groups <= 5
    assert phases == ["share", "upload", *["upload"] * groups, "recover", "recover"]
    assert uploaded[:2] == [0, 0]
    assert uploaded[-3:] == [5, 5, 5]
    assert all(before < after for before, after in pairwise(uploaded[1:-2]))


def test_buffers_of_the_asynchronous_mode_are_shown_with_their_staleness(tmp_path: Path) -> None:
    federation = NetworkFederation(tmp_path, clients=5, buffer=3)
    board = Board()

    async def scenario() -> list[RoundRecord]:
        server = federation.server(number=4)
        server._callbacks = Callbacks([board])
        tasks = [asyncio.create_task(federation.client(i).run()) for i in range(5)]
        records = await asyncio.wait_for(server.run(), 120)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        return records

    records = asyncio.run(scenario())
    told = json.loads(board.changes(0)[1])
    federated = told["federation"]
    assert (federated["mode"], federated["buffer"], federated["state"]) == ("async", 3, "ended")
    shown = {each["round"]: each["staleness"] for each in told["history"]}
    assert shown == {r.round: {str(t): n for t, n in r.staleness.items()} for r in records}
    assert sum(sum(each.values()) for each in shown.values()) >= 3 * len(records)
    for record in records:
        detail = json.loads(board.detail(record.round) or b"")
        states = {row["id"]: row["state"] for row in detail["clients"]}
        assert {states[client] for client in record.included} == {"included"}
        assert set(states.values()) <= {"included", "training", "uploaded"}
        assert "recover" in detail["phases"]
    folder = FolderBoard(federation.made.server.parent / "state")
    folder.look()
    recorded = json.loads(folder.changes(0)[1])
    assert recorded["federation"]["mode"] == "async"
    assert {each["round"]: each["staleness"] for each in recorded["history"]} == shown


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no state folder"):
        FolderBoard(tmp_path)

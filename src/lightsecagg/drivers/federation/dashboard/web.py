"""Serves a `Board` to browsers: HTTP in a thread of its own, which no round waits for.

Who may look. On loopback everybody who can connect, as to the metrics; with a token, whoever knows
it, and only then may the address be another. A browser gives the token once, in a form, and gets a
cookie that is made of it; a program sends `Authorization: Bearer`. Names that lead here by
somebody else's DNS are refused by their `Host` (DNS rebinding).

What it may cost. Connections are few, each must ask in time, and the events of a page are the
difference to what it has taken: one that does not read holds one message, and is cut (S27).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from lightsecagg.drivers.federation.dashboard.board import Board
from lightsecagg.drivers.federation.observer import is_our_name, log
from lightsecagg.drivers.transport.tls import is_loopback
from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import read_private, reading

CONNECTIONS: Final = 64
"""At a time; more are closed at once."""
STREAMS: Final = 32
"""Pages that are told of changes at a time; more are asked to come later."""
DEADLINE = 10.0
"""Seconds in which a request must have been made, and an answer or event taken."""
PAUSE: Final = 0.25
"""Seconds between two events of a page, and 1 ms for every client that there is to show."""
HEARTBEAT: Final = 15.0
"""Seconds after which a page hears from a server that has nothing to tell."""
TOKEN: Final = 16
"""The fewest characters of a token."""
_REQUEST = 8192
_FORM = 4096
_BUFFER = 65_536
_WRONG_TOKEN_PAUSE = 0.5

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_JSON = "application/json"
_STATUS = {
    200: "OK",
    303: "See Other",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    503: "Service Unavailable",
}
_OPEN_TO_ALL = frozenset({"/style.css", "/icon.svg"})
"""What the form for the token needs; the same on every machine."""


def read_token(path: Path) -> str:
    """The token in a file that nobody else may read."""
    with reading(path, "a token"):
        token = read_private(path).decode("ascii").strip()
    if len(token) < TOKEN or not token.isprintable():
        raise ConfigurationError(
            f"{path}: a token of {TOKEN} printable characters or more is needed; "
            "`openssl rand -hex 16` makes one"
        )
    return token


class RefusedError(Exception):
    """A request that is not answered as it wishes."""

    def __init__(self, status: int, words: str, **headers: str) -> None:
        super().__init__(words)
        self.status, self.headers = status, {n.replace("_", "-"): v for n, v in headers.items()}


@dataclass(frozen=True, slots=True)
class Request:
    """What a browser asks for."""

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)

    def cookie(self, name: str) -> str:
        """Its value; empty if there is none."""
        for pair in self.headers.get("cookie", "").split(";"):
            key, _, value = pair.strip().partition("=")
            if key == name:
                return value
        return ""


def parse_request(head: bytes) -> Request:
    """The head of a request; `RefusedError` if it is none."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[1].startswith("/") or not words[2].startswith("HTTP/1."):
        raise RefusedError(400, "this is not an HTTP/1 request")
    headers: dict[str, str] = {}
    for line in filter(None, lines):
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or (name == "host" and name in headers):
            raise RefusedError(400, "a header is malformed")
        headers[name] = value.strip()
    return Request(words[0], words[1].partition("?")[0], headers)


class Gate:
    """Who may look."""

    def __init__(self, address: str, token: str | None, *, secure: bool) -> None:
        if token is None and not is_loopback(address):
            raise ConfigurationError(
                f"the dashboard may listen on {address} only with a token: anybody who reaches "
                "it could look; name its file in server.dashboard_token, or use 127.0.0.1"
            )
        self._address = address.lower()
        self._token, self._secure = token, secure

    def check_host(self, request: Request) -> None:
        """`RefusedError` if some name leads here that is not ours (S27)."""
        if not is_our_name(request.headers.get("host", ""), self._address):
            raise RefusedError(421, "this server does not go by that name; use its address")

    def admits(self, request: Request) -> bool:
        """Whether the token is not needed, or known."""
        if self._token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.knows(given.strip())
        return hmac.compare_digest(request.cookie(self._cookie).encode(), self._pass().encode())

    def knows(self, given: str) -> bool:
        """Whether this is the token; takes as long for any other."""
        expected = hashlib.sha256((self._token or "").encode()).digest()
        return self._token is not None and hmac.compare_digest(
            hashlib.sha256(given.encode()).digest(), expected
        )

    def cookie(self) -> str:
        """For a browser that knows the token."""
        flags = "HttpOnly; SameSite=Strict; Path=/" + ("; Secure" if self._secure else "")
        return f"{self._cookie}={self._pass()}; {flags}"

    _cookie = "lightsecagg-dashboard"

    def _pass(self) -> str:
        """Not the token: cookies go to every port of a host."""
        return hmac.new((self._token or "").encode(), b"dashboard cookie", "sha256").hexdigest()


class PageServer:
    """Listens from `start` to `close`."""

    def __init__(
        self,
        board: Board,
        port: int,
        address: str = "127.0.0.1",
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._board, self._tls = board, tls
        self._gate = Gate(address, token, secure=tls is not None)
        self._pages = _read_pages()
        self._open: set[asyncio.Task[None]] = set()
        self._streams = 0
        self._closing = False
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._socket = socket.create_server((address, port), family=family)
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve the dashboard on {address}:{port}: {error.strerror}; "
                "choose another port, or 0 for any that is free"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        shown_address = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' if tls else ''}://{shown_address}:{self.port}/"
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)

    def start(self) -> None:
        """Serve, from now on."""
        self._thread.start()

    def close(self) -> None:
        """Let pages take the last changes, if they are quick, and stop."""
        self._closing = True
        if self._thread.is_alive():
            self._thread.join(DEADLINE)
        self._socket.close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            log.warning("the dashboard has failed; nothing else is harmed", exc_info=True)

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected,
            sock=self._socket,
            limit=_REQUEST,
        )
        while not self._closing:
            await asyncio.sleep(PAUSE)
        server.close()
        if self._open:
            await asyncio.wait(self._open, timeout=4 * PAUSE)
        for task in self._open:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if len(self._open) >= CONNECTIONS or task is None:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            # Not by `start_server`: it calls here after the handshake, and counts nobody before.
            # Nothing may wait before this, or the stream would take the handshake for a request.
            if self._tls is not None:
                await writer.start_tls(self._tls, ssl_handshake_timeout=DEADLINE)
            await self._converse(reader, writer)
            writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked is gone, or too slow, or talks too much
        except Exception:
            log.debug("the dashboard: a request failed", exc_info=True)
        finally:
            self._open.discard(task)
            if not writer.is_closing():
                writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until all is taken
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        try:
            async with asyncio.timeout(DEADLINE):
                request = parse_request(await reader.readuntil(b"\r\n\r\n"))
                self._gate.check_host(request)
                if request.path == "/events" and request.method == "GET":
                    await self._check_token(request)
                else:
                    await self._answer(request, reader, writer)
                    return
        except RefusedError as refusal:
            body = f"{refusal}\n".encode()
            async with asyncio.timeout(DEADLINE):
                await _send(writer, refusal.status, "text/plain", body, refusal.headers)
            return
        await self._stream(request, reader, writer)

    # -- answers -------------------------------------------------------------------------------

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if request.path == "/login" and request.method == "POST":
            await self._log_in(request, reader, writer)
            return
        if request.method != "GET":
            raise RefusedError(405, "only GET is answered", Allow="GET")
        if request.path == "/" and not self._gate.admits(request):
            await self._ask_for_token(writer, "")
            return
        if request.path not in _OPEN_TO_ALL:
            await self._check_token(request)
        kind, body = self._content("/index.html" if request.path == "/" else request.path)
        await _send(writer, 200, kind, body)

    async def _check_token(self, request: Request) -> None:
        if not self._gate.admits(request):
            if "authorization" in request.headers:
                await _slow_down()
            raise RefusedError(401, "a token is needed", WWW_Authenticate="Bearer")

    def _content(self, path: str) -> tuple[str, bytes]:
        if path in self._pages:
            return self._pages[path]
        number = path.removeprefix("/rounds/")
        if path != number and number.isascii() and number.isdecimal() and len(number) < 19:
            detail = self._board.detail(int(number))
            if detail is not None:
                return _JSON, detail
        raise RefusedError(404, "there is no such page")

    async def _log_in(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        length = request.headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and int(length[:9]) <= _FORM):
            raise RefusedError(400, "a form with a token is expected")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise RefusedError(403, "the form must come from this page")
        form = parse_qs((await reader.readexactly(int(length))).decode("latin-1"))
        if self._gate.knows(form.get("token", [""])[0]):
            headers = {"Set-Cookie": self._gate.cookie(), "Location": "/"}
            await _send(writer, 303, "text/plain", b"", headers)
            return
        await _slow_down()
        await self._ask_for_token(writer, "That is not the token.")

    async def _ask_for_token(self, writer: asyncio.StreamWriter, words: str) -> None:
        kind, body = self._pages["/login.html"]
        body = body.replace(b"<!-- words -->", words.encode())
        await _send(writer, 401, kind, body, {"WWW-Authenticate": "Bearer"})

    # -- events --------------------------------------------------------------------------------

    async def _stream(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Tell a page of changes, as fast as it takes them."""
        if self._streams >= STREAMS:
            busy = b"too many pages are open\n"
            await _send(writer, 503, "text/plain", busy, {"Retry-After": "10"})
            return
        self._streams += 1
        try:
            writer.write(_head(200, "text/event-stream", None, {}))
            writer.write(b"retry: 2000\n\n")
            await self._tell_changes(request, reader, writer)
        finally:
            self._streams -= 1

    async def _tell_changes(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        board, loop = self._board, asyncio.get_running_loop()
        seen = board.seen(request.headers.get("last-event-id", ""))
        silent_since, first = loop.time(), True
        while not reader.at_eof():
            last = self._closing  # looked at first: what was told before is sent
            if board.version > seen or first:
                seen, data = board.changes(seen)
                writer.write(b"id: %s-%d\ndata: %b\n\n" % (board.boot.encode(), seen, data))
                silent_since, first = loop.time(), False
            elif loop.time() - silent_since > HEARTBEAT:
                writer.write(b":\n\n")
                silent_since = loop.time()
            async with asyncio.timeout(DEADLINE):
                await writer.drain()
            if last:
                return
            await asyncio.sleep(PAUSE + board.clients / 1000)


async def _slow_down() -> None:
    """What a wrong token costs."""
    log.warning("the dashboard: a wrong token was given")
    await asyncio.sleep(_WRONG_TOKEN_PAUSE)


def _read_pages() -> dict[str, tuple[str, bytes]]:
    """Path -> type and content; the page has no other files."""
    folder = files("lightsecagg.drivers.federation.dashboard").joinpath("page")
    return {
        f"/{each.name}": (_KINDS[Path(each.name).suffix], each.read_bytes())
        for each in folder.iterdir()
        if Path(each.name).suffix in _KINDS
    }


def _head(status: int, kind: str, length: int | None, headers: Mapping[str, str]) -> bytes:
    lines = {"Content-Type": kind, **_HEADERS, **headers}
    if length is not None:
        lines["Content-Length"] = str(length)
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} {_STATUS[status]}\r\n{text}\r\n".encode("latin-1")


async def _send(
    writer: asyncio.StreamWriter,
    status: int,
    kind: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
) -> None:
    writer.write(_head(status, kind, len(body), headers or {}) + body)
    await writer.drain()

"""What the server tells about itself: log lines and metrics; never a secret (S22).

`Metrics` exposes the records of its rounds as Prometheus counters, with a health page; on
127.0.0.1, unless the operator names another address.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightsecagg.drivers.transport.tls import is_loopback
from lightsecagg.errors import ConfigurationError, MissingExtra
from lightsecagg.foreign import escaped
from lightsecagg.session.record import RoundRecord

log = logging.getLogger("lightsecagg")
LEVELS = ("debug", "info", "warning", "error")
_CLIENT = re.compile(r"\bclient ([0-9]{1,19})\b")
"""A client in a line of the log."""
PAGE_CONNECTIONS = 16
"""Connections to the metrics port at a time; more are closed at once."""
PAGE_DEADLINE = 10.0
"""Seconds from connecting until the page must have been asked for and taken."""


def _stamp(record: logging.LogRecord) -> str:
    """ISO 8601, with the offset from UTC."""
    moment = datetime.fromtimestamp(record.created).astimezone()
    return moment.isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """One JSON object per line, for machines."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


class LineFormatter(logging.Formatter):
    """One line per record, for people: no message moves a terminal's cursor or forges a line (S48).

    Foreign text was made harmless where it came in; this is for what slipped through.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatTime(  # noqa: N802 - logging calls it so
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        return _stamp(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging calls it so
        record.message = escaped(record.message)
        return super().formatMessage(record)


class _Stderr:
    """Standard error as it is when something is written: a progress bar stands in for it."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def set_up_logging(level: str = "INFO") -> None:
    """Human lines on a terminal, JSON lines otherwise; always on stderr."""
    if level.lower() not in LEVELS:
        raise ConfigurationError(f"log level {level!r} must be one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(_Stderr())
    if sys.stderr.isatty():
        handler.setFormatter(LineFormatter())
    else:
        handler.setFormatter(JsonFormatter())
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False


def show_names(names: Mapping[int, str]) -> None:
    """Let every line that mentions a client show its name too."""

    def named(client: re.Match[str]) -> str:
        name = names.get(int(client[1]))
        return f"{client[0]} ({escaped(name)})" if name else client[0]

    def show(record: logging.LogRecord) -> bool:
        record.msg, record.args = _CLIENT.sub(named, record.getMessage()), ()
        return True

    for handler in log.handlers:
        handler.addFilter(show)


def is_our_name(host: str, *names: str) -> bool:
    """Whether a request's `Host` is an address, `localhost` or one of these names.

    A page of somebody's may lead its own name here and read what is answered (DNS rebinding); an
    address or `localhost` is not its own.
    """
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host.lower() in {"localhost", *names}


class _PageServer(ThreadingHTTPServer):
    """A thread per connection, few of them, and each must end by a deadline (S27)."""

    def __init__(self, address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, float] = {}
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._open) < PAGE_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open[request] = time.monotonic() + PAGE_DEADLINE
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second: a timeout of the socket would begin anew with every byte."""
        now = time.monotonic()
        for request, deadline in list(self._open.items()):
            if now >= deadline:
                with suppress(OSError):  # its own thread was faster
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("the metrics port: a request failed", exc_info=True)


class Metrics:
    """Prometheus counters and a health page; does nothing until `serve` is called."""

    def __init__(self) -> None:
        self._server: _PageServer | None = None
        self._thread: threading.Thread | None = None
        self.started = time.monotonic()
        self.here: set[int] = set()
        """The clients that are connected."""
        self.admitted, self.needed = 0, 0
        """Clients on the allow-list; how many of them a round waits for."""
        self.round = 0
        """The round, or epoch, that is under way; 0 if none is."""
        self.done, self.aborted, self.wanted = 0, 0, 0
        """Sums and aborted rounds, those of earlier runs included; how many sums there are to be.
        """
        self.last_success = 0.0
        self.expires: dict[str, float] = {}
        """Whose certificate -> when it ends; seconds since 1970."""
        self._registry: Any = None
        self.port = 0

    def serve(self, port: int, address: str = "127.0.0.1") -> None:
        """Listen there, for everybody who reaches it; port 0 picks a free one."""
        try:
            import prometheus_client as prometheus
        except ModuleNotFoundError as error:
            raise MissingExtra("metrics need prometheus-client", "grpc") from error
        self._registry = prometheus.CollectorRegistry()
        self._seconds = prometheus.Histogram(
            "lightsecagg_phase_seconds", "Duration of a phase", ["phase"], registry=self._registry
        )
        self._bytes = prometheus.Counter(
            "lightsecagg_bytes", "Bytes by phase", ["phase", "direction"], registry=self._registry
        )
        self._rounds = prometheus.Counter(
            "lightsecagg_rounds", "Rounds by outcome", ["outcome"], registry=self._registry
        )
        self._dropouts = prometheus.Counter(
            "lightsecagg_dropouts", "Clients given up", ["phase"], registry=self._registry
        )
        self._refusals = prometheus.Counter(
            "lightsecagg_refusals", "Messages refused", ["reason"], registry=self._registry
        )
        self._late = prometheus.Counter(
            "lightsecagg_late_messages", "Late messages", ["type"], registry=self._registry
        )
        self._figures = prometheus.Gauge(
            "lightsecagg_figure", "Of the latest round", ["name"], registry=self._registry
        )
        self._add_gauges(prometheus.Gauge)
        metrics = self
        own = is_loopback(address)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # Without a Host it is no browser that asks.
                if own and not is_our_name(self.headers.get("Host", "localhost")):
                    self.send_error(421)
                    return
                if self.path == "/metrics":
                    body, kind = prometheus.generate_latest(metrics._registry), "text/plain"
                elif self.path == "/health":
                    body, kind = metrics.health(), "application/json"
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            self._server = _PageServer(address, port, Handler)
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve metrics on {address}, port {port}: {error}"
            ) from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _add_gauges(self, gauge: Any) -> None:
        """What is so now, asked whenever somebody looks."""
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "clients_connected": ("Clients that are connected", lambda: len(self.here)),
            "clients_admitted": ("Clients on the allow-list", lambda: self.admitted),
            "clients_needed": ("Clients that a round waits for", lambda: self.needed),
            "round": ("Current round or epoch; 0 if there is none", lambda: self.round),
            "rounds_completed": ("Sums, with those of earlier runs", lambda: self.done),
            "rounds_wanted": ("Sums that there are to be", lambda: self.wanted),
            "last_success_timestamp_seconds": ("End of the latest sum", lambda: self.last_success),
        }
        for name, (words, value) in gauges.items():
            made = gauge(f"lightsecagg_{name}", words, registry=self._registry)
            made.set_function(value)
        expiry = gauge(
            "lightsecagg_certificate_expiry_timestamp_seconds",
            "End of a certificate",
            ["certificate"],
            registry=self._registry,
        )
        for name, moment in self.expires.items():
            expiry.labels(name).set(moment)

    @property
    def state(self) -> str:
        """In a word."""
        if self.round:
            return "running"
        return "waiting for clients" if len(self.here) < self.needed else "between rounds"

    def health(self) -> bytes:
        """What `/health` answers."""
        return json.dumps(
            {
                "status": "ok",
                "state": self.state,
                "uptime": time.monotonic() - self.started,
                "connected": len(self.here),
                "admitted": self.admitted,
                "needed": self.needed,
                "round": self.round or None,
                "rounds_done": self.done,
                "rounds_aborted": self.aborted,
                "rounds_wanted": self.wanted,
                "last_success": self.last_success or None,
                "certificates": self.expires,
            }
        ).encode()

    def begin(self, done: int, wanted: int, past: Sequence[dict[str, Any]]) -> None:
        """So many sums there are, and are to be; with the records of all rounds before."""
        self.done, self.wanted = done, wanted
        good = [record for record in past if record["aborted"] is None]
        self.aborted = len(past) - len(good)
        ends = [phase["end"] for record in good for phase in record.get("phases", {}).values()]
        self.last_success = max(ends, default=0.0)

    def record(self, record: RoundRecord) -> None:
        """A round has ended."""
        if record.aborted is None:
            self.last_success = time.time()
        else:
            self.aborted += 1
        if self._registry is None:
            return
        self._rounds.labels("aborted" if record.aborted else "done").inc()
        for phase, entry in record.phases.items():
            self._seconds.labels(phase).observe(entry.seconds)
            self._bytes.labels(phase, "in").inc(entry.bytes_in)
            self._bytes.labels(phase, "out").inc(entry.bytes_out)
        for phase, clients in record.dropped.items():
            self._dropouts.labels(phase).inc(len(clients))
        for reason, count in record.refusals.items():
            self._refusals.labels(reason).inc(count)
        for kind, count in record.late.items():
            self._late.labels(kind).inc(count)
        for name, value in record.all_figures().items():
            self._figures.labels(name).set(value)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

"""What the server tells about itself: log lines and metrics; never a secret (S22).

`Metrics` exposes the records of its rounds as Prometheus counters, with a health page, on
127.0.0.1.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightsecagg.errors import ConfigurationError, MissingExtra
from lightsecagg.foreign import escaped
from lightsecagg.session.record import RoundRecord

log = logging.getLogger("lightsecagg")
LEVELS = ("debug", "info", "warning", "error")
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

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, float] = {}
        super().__init__(("127.0.0.1", port), handler)

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
        self.connected = 0
        self.rounds: list[RoundRecord] = []
        self._registry: Any = None
        self.port = 0

    def serve(self, port: int) -> None:
        """Listen on 127.0.0.1; port 0 picks a free one."""
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
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # Without a Host it is no browser that asks.
                if not is_our_name(self.headers.get("Host", "localhost")):
                    self.send_error(421)
                    return
                if self.path == "/metrics":
                    body, kind = prometheus.generate_latest(metrics._registry), "text/plain"
                elif self.path == "/health":
                    body, kind = metrics._health(), "application/json"
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
            self._server = _PageServer(port, Handler)
        except OSError as error:
            raise ConfigurationError(f"cannot serve metrics on port {port}: {error}") from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _health(self) -> bytes:
        return json.dumps(
            {
                "status": "ok",
                "uptime": time.monotonic() - self.started,
                "connected": self.connected,
                "rounds": len(self.rounds),
            }
        ).encode()

    def record(self, record: RoundRecord) -> None:
        """A round has ended."""
        self.rounds.append(record)
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

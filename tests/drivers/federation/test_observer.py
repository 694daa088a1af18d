"""The metrics port spends little on whoever connects to it, and forgets nobody (S27)."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lightsecagg.drivers.federation import observer
from lightsecagg.drivers.federation.observer import PAGE_CONNECTIONS, Metrics
from lightsecagg.session.record import MetricMean, RoundRecord


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics()
    made.serve(0)
    yield made
    made.close()


def dial(metrics: Metrics) -> socket.socket:
    return socket.create_connection(("127.0.0.1", metrics.port), timeout=60)


def is_healthy(metrics: Metrics) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/health", timeout=60) as page:
            return bool(page.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def eventually(look: Callable[[], Any]) -> None:
    """However loaded the machine is; a wait that never ends fails after a minute."""
    deadline = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_S27_connections_to_the_metrics_port_are_few(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "PAGE_DEADLINE", 600.0)
    before = threads()
    with ExitStack() as stack:
        slow = [stack.enter_context(dial(metrics)) for _ in range(PAGE_CONNECTIONS)]
        for connection in slow:
            connection.sendall(b"GET /health")
        eventually(lambda: threads() - before == PAGE_CONNECTIONS)
        for _ in range(50):
            with dial(metrics) as refused:
                assert refused.recv(1) == b""  # closed at once, without a word
        assert threads() - before == PAGE_CONNECTIONS
        slow[0].sendall(b" HTTP/1.0\r\n\r\n")
        assert slow[0].recv(12) == b"HTTP/1.0 200"
    eventually(lambda: is_healthy(metrics))


def test_S27_a_page_that_is_asked_for_letter_by_letter_is_never_served(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "PAGE_DEADLINE", 0.5)
    with dial(metrics) as slow, ExitStack() as stack:
        # The others say nothing at all; all places are taken.
        for _ in range(PAGE_CONNECTIONS - 1):
            stack.enter_context(dial(metrics))

        def is_cut() -> bool:
            try:
                slow.sendall(b"G")  # always in time for a timeout between two bytes
            except ConnectionError:
                return True
            return False

        eventually(is_cut)
        eventually(lambda: is_healthy(metrics))


def test_a_visitor_that_hangs_up_leaves_no_traceback(
    metrics: Metrics, capfd: pytest.CaptureFixture[str]
) -> None:
    before = threads()
    for _ in range(5):
        connection = dial(metrics)
        reset = (1).to_bytes(4, "little") + bytes(4)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        connection.sendall(b"GET /met")
        connection.close()
    eventually(lambda: threads() <= before)
    assert is_healthy(metrics)
    assert "Traceback" not in capfd.readouterr().err


def test_the_port_tells_the_figures_of_the_latest_round(metrics: Metrics) -> None:
    for loss in (2.5, 1.25):
        record = RoundRecord(1, "plain", [])
        record.figures = {"loss": 7.0}
        record.metrics = {"loss": MetricMean(loss, 0.1)}
        metrics.record(record)
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    assert 'lightsecagg_figure{name="loss"} 7.0' in lines
    assert 'lightsecagg_figure{name="clients.loss"} 1.25' in lines


def test_S27_metrics_and_health_answer_to_no_name_of_somebodys(metrics: Metrics) -> None:
    """DNS rebinding, as on the dashboard; a collector on this machine uses an address."""
    for host, status in (
        ("evil.example", 421),
        (f"127.0.0.1.evil.example:{metrics.port}", 421),
        (f"127.0.0.1:{metrics.port}", 200),
        (f"localhost:{metrics.port}", 200),
        (f"[::1]:{metrics.port}", 200),
    ):
        for page in ("/metrics", "/health"):
            asked = http.client.HTTPConnection("127.0.0.1", metrics.port, timeout=60)
            asked.request("GET", page, headers={"Host": host})
            assert asked.getresponse().status == status, (host, page)
            asked.close()

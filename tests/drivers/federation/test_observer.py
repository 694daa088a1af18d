"""The metrics port spends little on whoever connects to it, and forgets nobody (S27)."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from small_federation import Federation, FreshVectors

from lightsecagg.drivers.federation import observer
from lightsecagg.drivers.federation.observer import PAGE_CONNECTIONS, Metrics
from lightsecagg.errors import ConfigurationError
from lightsecagg.protocol.interface import Update
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


def read(metrics: Metrics, page: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}{page}", timeout=60) as answer:
        return str(answer.read().decode())


def gauges(metrics: Metrics) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in read(metrics, "/metrics").splitlines())
    names = {name.removeprefix("lightsecagg_"): value for name, _, value in lines}
    return {name: float(value) for name, value in names.items() if not name.startswith("#")}


def test_gauges_and_health_show_what_is_so_now_and_count_the_runs_of_before(
    tmp_path: Path,
) -> None:
    before = time.time()
    first = Federation(tmp_path, clients=6, dropouts=1)
    asyncio.run(first.run(number=1))
    federation = Federation(tmp_path, clients=6, dropouts=1)
    federation.identities, federation.allow_list = first.identities, first.allow_list
    federation.ledgers = first.ledgers
    metrics = federation.metrics
    metrics.expires = {"server": 2e9}
    metrics.serve(0)
    waiting, running = [json.loads(read(metrics, "/health"))], []
    count = {"clients_connected": 6, "clients_admitted": 6, "clients_needed": 6}
    count |= {"rounds_completed": 1, "rounds_wanted": 2, "round": 2}

    class Looks(FreshVectors):
        def compute(self, model: bytes, round_number: int, bound: float) -> Update:
            if round_number == 2:
                running.append((gauges(metrics), json.loads(read(metrics, "/health"))))
            return super().compute(model, round_number, bound)

    federation.jobs[0] = Looks(0)
    metrics.close, close = lambda: None, metrics.close  # type: ignore[method-assign]
    asyncio.run(federation.run(number=2))
    ((found, health),) = running
    assert count.items() <= found.items()
    assert before <= found["last_success_timestamp_seconds"] <= time.time()  # of the first run
    assert found['certificate_expiry_timestamp_seconds{certificate="server"}'] == 2e9
    assert (health["state"], health["round"]) == ("running", 2)
    assert (health["rounds_done"], health["rounds_wanted"], health["connected"]) == (1, 2, 6)
    assert waiting[0]["last_success"] is None
    after = gauges(metrics)
    assert (after["round"], after["rounds_completed"]) == (0, 2)
    metrics.here.clear()
    assert json.loads(read(metrics, "/health"))["state"] == "waiting for clients"
    close()


def test_names_are_in_every_line_about_a_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(observer.log, "handlers", [])
    monkeypatch.setattr(observer.log, "propagate", True)
    observer.set_up_logging()
    observer.show_names({3: "charite", 31: "u\x1bcl"})
    observer.log.info("client %d connected (%s)", 3, "4 of 5")
    logging.getLogger("lightsecagg.drivers.transport").warning("client 31 and client 4: 100 %")
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "client 3 (charite) connected (4 of 5)",
        "client 31 (u\\x1bcl) and client 4: 100 %",
    ]


def test_beyond_this_machine_any_name_of_the_server_is_good() -> None:
    metrics = Metrics()
    metrics.serve(0, "0.0.0.0")  # noqa: S104
    asked = http.client.HTTPConnection("127.0.0.1", metrics.port, timeout=60)
    asked.request("GET", "/metrics", headers={"Host": "aggregator:9464"})
    assert asked.getresponse().status == 200
    asked.close()
    metrics.close()
    with pytest.raises(ConfigurationError, match=r"on 203\.0\.113\.7, port 0"):
        metrics.serve(0, "203.0.113.7")


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

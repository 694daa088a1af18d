"""No peer fills a log, and nothing that one says moves a terminal (S48)."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from lightsecagg.drivers.federation.observer import JsonFormatter, LineFormatter
from lightsecagg.drivers.peer_log import BURST, INTERVAL, PeerLog

LOG = logging.getLogger("lightsecagg.test_peer_log")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_S48_a_noisy_peer_gets_its_share_of_lines_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    log = PeerLog(LOG, clock)
    for number in range(1000):
        log.write(logging.INFO, "client 7", "client 7 cut: %d", number)
    assert said(caplog) == [f"client 7 cut: {number}" for number in range(BURST)]
    caplog.clear()
    clock.now += INTERVAL
    for number in range(5):
        log.write(logging.INFO, "client 7", "again %d", number)
    assert said(caplog) == [f"{1000 - BURST} lines about client 7 were left out here", "again 0"]
    caplog.clear()
    log.close()
    log.close()
    assert said(caplog) == ["4 lines about client 7 were left out here"]


def test_what_was_left_out_is_as_loud_as_its_loudest_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    for levels, level in (([logging.INFO], logging.INFO), ([20, 30, 20], logging.WARNING)):
        log = PeerLog(LOG, Clock(), burst=1)
        log.write(logging.INFO, "the server", "first")
        caplog.clear()
        for each in levels:
            log.write(each, "the server", "more")
        log.close()
        (record,) = caplog.records
        assert record.levelno == level
        lines = (
            "1 line about the server was" if len(levels) == 1 else "3 lines about the server were"
        )
        assert record.getMessage() == f"{lines} left out here"


def test_S48_a_noisy_peer_silences_no_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = PeerLog(LOG, Clock())
    for _ in range(1000):
        log.write(logging.WARNING, "client 7", "noise")
    caplog.clear()
    log.write(logging.WARNING, "client 8", "client 8 cut")
    assert said(caplog) == ["client 8 cut"]


def test_a_quiet_peer_loses_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    log = PeerLog(LOG, clock)
    for number in range(10 * BURST):
        log.write(logging.INFO, "client 7", "line %d", number)
        clock.now += INTERVAL
    log.close()
    assert said(caplog) == [f"line {number}" for number in range(10 * BURST)]


def test_lines_that_nobody_would_see_are_neither_written_nor_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = PeerLog(LOG, Clock())
    caplog.set_level("WARNING")
    for _ in range(1000):
        log.write(logging.INFO, "client 7", "too quiet")
    log.write(logging.WARNING, "client 7", "loud")
    log.close()
    assert said(caplog) == ["loud"]


FORGED = "client 7: \x1b[2J\n2026-01-01 00:00:00,000 INFO    all is well\u202e"


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_S48_one_record_is_one_visible_line(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "%s", (FORGED,), None)
    naive = logging.Formatter("%(message)s").format(record)
    assert len(naive.splitlines()) == 2
    assert "\x1b" in naive
    line = formatter.format(record)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert "all is well" in line


def test_a_traceback_keeps_its_lines() -> None:
    try:
        json.loads("")
    except ValueError:
        record = logging.LogRecord("x", logging.INFO, "x.py", 1, "a", (), sys.exc_info())
    assert len(LineFormatter().format(record).splitlines()) > 3

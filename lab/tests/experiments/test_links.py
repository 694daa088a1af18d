"""Shaped links: what they refuse, what the delay line does, what is fitted; and real rounds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lightsecagg.cli.main import main
from lightsecagg.errors import ConfigurationError
from lightsecagg.params import ShareMode
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.experiments import delay_line, links, namespaces
from lightsecagg_lab.experiments.cells import Results
from lightsecagg_lab.experiments.link_fit import TERMS, fit
from lightsecagg_lab.experiments.links_report import GOAL, _observed, links_report
from lightsecagg_lab.experiments.namespaces import check_namespaces
from lightsecagg_lab.experiments.setups import QUICK
from lightsecagg_lab.experiments.shaped_links import raw_transfer, shaped_links
from lightsecagg_lab.planning.transport_costs import STATED as STATED_TRANSPORT
from lightsecagg_lab.planning.transport_costs import TransportCosts
from lightsecagg_lab.planning.unit_costs import STATED, describe
from lightsecagg_lab.schemes.baseline_traits import ProtocolName


def lacking() -> str:
    """Why no links can be shaped here, or nothing."""
    try:
        check_namespaces()
    except ConfigurationError as error:
        return str(error)
    return ""


real = pytest.mark.skipif(bool(lacking()), reason=lacking() or "it can be measured")


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[], str]:
    """What the command says when it ends with exit code 2."""

    def ask() -> str:
        arguments = ["experiments", "links", "--quick", "--busy-anyway", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["lightsecagg", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return ask


def test_without_iproute2_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[[], str]
) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    with pytest.raises(ConfigurationError, match="iproute2"):
        links.LinkCell(ProtocolName.PLAIN, ShareMode.SEEDED, 4, 98.0).check()
    assert "need ip and tc, which this machine does not have; install iproute2" in refused()


def test_without_the_right_to_namespaces_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: Callable[[], str]
) -> None:
    def refuse(name: str, *arguments: int) -> None:
        if name == "unshare":
            raise PermissionError(1, "Operation not permitted", name)

    monkeypatch.setattr(namespaces.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(namespaces, "_TUN", tmp_path)
    monkeypatch.setattr(namespaces, "_call", refuse)
    assert "(Operation not permitted); run it as root" in refused()


def test_the_delay_line_keeps_frames_until_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(delay_line.time, "monotonic", lambda: clock[0])
    # Sockets that keep frames apart stand in for the taps.
    near, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far, sink = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, source, far, sink:
        source.setblocking(False)
        far.setblocking(False)
        way = delay_line._Way(source.fileno(), sink.fileno())
        assert way.due == float("inf")
        near.send(b"first")
        way.take(0.02)
        clock[0] += 0.01
        near.send(b"second")
        way.take(0.02)
        assert way.due == pytest.approx(100.02)
        clock[0] = 100.019
        way.give()
        with pytest.raises(BlockingIOError):
            far.recv(100)
        clock[0] = 100.021
        way.give()
        assert far.recv(100) == b"first"
        with pytest.raises(BlockingIOError):
            far.recv(100)
        clock[0] = 100.031
        way.give()
        assert far.recv(100) == b"second"
        assert way.due == float("inf")


TRUTH = TransportCosts(
    "a test", 8e-4, 7e-9, 3e-4, 3e-9, stored_upload=9e-3, stored_byte=2e-9, result_byte=4e-8
)


def made_up(truth: TransportCosts) -> Results:
    """Cells as if the model with these costs were the world."""
    results: Results = {
        links.UnitCostCell().key: {"unit_costs": describe(STATED), "cores": 2},
        **{
            links.RawLinkCell(rate).key: {"round_trips": [0.04], "seconds": [0.5]}
            for rate in links.bandwidths(QUICK)
        },
    }
    for cell in {*links.federation_cells(QUICK), *links.fitted_cells(QUICK)}:
        phases = [Phase.UPLOAD] if cell.protocol is ProtocolName.PLAIN else [*Phase][:3]
        phases += [Phase.RECOVER] * (cell.protocol is not ProtocolName.PLAIN)
        names = [*(phase.value for phase in phases), "client_cpu", "server_cpu"]
        document: dict[str, Any] = {"rounds": {name: [0.0] * cell.repeats for name in names}}
        results[cell.key] = document
        observed = _observed(cell, results)
        times = observed.times(truth)
        measured = {phase.value: times[phase].total for phase in phases}
        measured["client_cpu"] = observed.client_seconds(truth)
        measured["server_cpu"] = observed.server_seconds(truth)
        document["rounds"] = {name: [value] * cell.repeats for name, value in measured.items()}
        document["cell"] = asdict(cell)
    return results


def test_the_fit_finds_the_terms_that_the_rounds_were_made_with() -> None:
    results = made_up(TRUTH)
    found = fit([_observed(cell, results) for cell in links.fitted_cells(QUICK)], "a test")
    assert found.source == "a test"
    for name in TERMS:
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.02), name


def test_the_report_tells_which_forecasts_are_good() -> None:
    results = made_up(TRUTH)
    report = links_report(QUICK, results)
    assert report.figures["within"] == report.figures["of"] == 16
    assert "The goal (90%) is met" in report.paragraphs[0]
    for cell in links.federation_cells(QUICK):
        if cell.clients != links.FITTED:  # what is checked, and not fitted to
            rounds = results[cell.key]["rounds"]
            rounds["upload"] = [3 * seconds for seconds in rounds["upload"]]
    report = links_report(QUICK, results)
    assert report.figures["within"] < GOAL * report.figures["of"]
    assert "is missed" in report.paragraphs[0]


@real
@pytest.mark.slow
def test_real_links_have_the_latency_and_rate_that_were_asked_for() -> None:
    with shaped_links(2, bandwidth=8.0, latency=30.0) as made:
        round_trip, _ = raw_transfer(made, 1, 1000)
        _, seconds = raw_transfer(made, 0, 2_000_000)
    assert round_trip >= 0.06
    assert seconds >= (2_000_000 - 131_072) / 1e6  # but for the burst


@real
@pytest.mark.slow
def test_a_real_federation_over_shaped_links() -> None:
    cell = links.LinkCell(
        ProtocolName.LIGHTSECAGG, ShareMode.SEEDED, 4, 98.0, latency=10.0, dimension=1000
    )
    found = replace(cell, pause=0.1, repeats=1).measure()
    rounds = found["rounds"]
    assert {"advertise", "share", "upload", "recover", "server_cpu", "client_cpu"} == set(rounds)
    # Each phase is a message to the clients and one back.
    assert all(rounds[name][0] >= 0.02 for name in ("advertise", "share", "recover"))
    assert rounds["upload"][0] > 0.01
    assert rounds["client_cpu"][0] > 0


def _hold(pipe: Connection) -> None:
    with shaped_links(1, 98.0, 5.0):
        children = multiprocessing.active_children()
        pipe.send([child.pid for child in children])
        time.sleep(3600)


@real
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_the_links_outlives_their_process(end: signal.Signals) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_hold, args=(theirs,))
    process.start()
    assert process.pid is not None
    (line,) = ours.recv()
    assert Path(f"/proc/{line}").exists()
    os.kill(process.pid, end)
    process.join()
    deadline = time.monotonic() + 60
    while _lives(line) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(line)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_stated_terms_are_all_charged() -> None:
    assert all(getattr(STATED_TRANSPORT, name) > 0 for name in TERMS)
    assert len(TERMS) == 7

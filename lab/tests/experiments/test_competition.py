"""Whether others use the machine is decided by what they took, not by what we did before."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import main
from lightsecagg.errors import ConfigurationError
from lightsecagg_lab.commands import laboratory
from lightsecagg_lab.commands.experiments import app
from lightsecagg_lab.experiments import competition
from lightsecagg_lab.experiments.catalogue import experiment
from lightsecagg_lab.experiments.competition import (
    PAUSE,
    WINDOW,
    Competition,
    Moment,
    compare,
    read_stat,
    wait_until_quiet,
)
from lightsecagg_lab.experiments.setups import QUICK

STAT = "cpu  1000 10 500 90000 300 20 30 40 5 5\ncpu0 1 2 3\nintr 5\n"


def test_busy_and_stolen_seconds_are_read_from_the_system() -> None:
    # user, nice, system, irq, softirq; a guest's time is part of user already
    assert read_stat(STAT, ticks=100) == (pytest.approx(15.6), pytest.approx(0.4))


@pytest.mark.parametrize(
    ("busy", "stolen", "own", "too_much"),
    [
        (0.02, 0.0, 0.0, False),  # idle
        (10.0, 0.0, 10.0, False),  # we alone, whatever the load average says afterwards
        (12.0, 0.0, 9.9, False),
        (16.0, 0.0, 10.0, True),  # six tenths of a core are somebody else's
        (0.1, 0.9, 0.0, True),  # the hypervisor's other guests
    ],
)
def test_what_others_took_decides(busy: float, stolen: float, own: float, too_much: bool) -> None:
    before = Moment(at=100.0, busy=7.0, stolen=1.0, own=3.0)
    after = Moment(at=110.0, busy=7.0 + busy, stolen=1.0 + stolen, own=3.0 + own)
    found = compare(before, after)
    assert found is not None
    assert found.others == pytest.approx((busy - own) / 10)
    assert found.too_much is too_much


def test_where_the_system_does_not_tell_nobody_knows() -> None:
    assert compare(None, Moment(1.0, 1.0, 1.0, 1.0)) is None
    wait_until_quiet(lambda _: None, observe=lambda: None, sleep=lambda _: None)


def others_use(*cores: float) -> Callable[[], Moment]:
    """A machine of which others use so much, look by look, then nothing."""
    now, busy = 0.0, 0.0
    looks = [used for each in cores for used in (0.0, each)]

    def observe() -> Moment:
        nonlocal now, busy
        now += 1.0
        busy += looks.pop(0) if looks else 0.0
        return Moment(now, busy, 0.0, 0.0)

    return observe


def test_one_waits_until_the_others_are_done() -> None:
    told: list[str] = []
    slept: list[float] = []
    wait_until_quiet(told.append, observe=others_use(1.5, 0.9, 0.1), sleep=slept.append)
    assert slept == [WINDOW, PAUSE, WINDOW, PAUSE, WINDOW]
    assert "other processes use 1.50 cores" in told[0]
    assert "--busy-anyway does not wait" in told[0]
    assert "other processes use 0.90 cores" in told[1]
    assert len(told) == 2


def test_one_does_not_wait_for_ever() -> None:
    with pytest.raises(ConfigurationError, match=r"busy for 21 s: .* 1\.20 .*--busy-anyway"):
        wait_until_quiet(lambda _: None, 20.0, observe=others_use(*[1.2] * 9), sleep=lambda _: None)


def test_off_a_terminal_there_is_a_line_per_cell(capsys: pytest.CaptureFixture[str]) -> None:
    from lightsecagg_lab.commands.laboratory import progress_bar

    class Keyed:
        def __init__(self, key: str) -> None:
            self.key = key

    with progress_bar("table4", 3) as (advance, _):
        for key, needed in (("first", True), ("known", False), ("last", True)):
            advance(Keyed(key), needed)  # type: ignore[arg-type]
    lines = [line for line in capsys.readouterr().err.splitlines() if "cell" in line]
    assert lines == ["table4: cell 1 of 3, first", "table4: cell 3 of 3, last"]


@pytest.mark.skipif(find_spec("torch") is None, reason="the command asks for torch first")
def test_the_command_gives_up_on_a_busy_machine_unless_told_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def busy(tell: Callable[[str], None]) -> None:
        raise ConfigurationError(f"the machine was busy: {Competition(1.0, 0.0)}")

    def measured(cells: object, folder: Path, progress: object, quiet: object) -> None:
        asked.append(quiet is not None)
        raise ConfigurationError("enough seen")

    monkeypatch.setattr(competition, "wait_until_quiet", busy)
    arguments = ["lightsecagg", "experiments", "overhead", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    cells = len(experiment("overhead").cells(QUICK))
    assert re.search(rf"{cells} cells to measure, about \d+ min on an idle machine", told)
    assert "the machine was busy: other processes use 1.00 cores" in told
    assert not list((tmp_path / laboratory.CELLS).glob("*.json"))
    monkeypatch.setattr("lightsecagg_lab.experiments.cells.measure_cells", measured)
    for flags in ([], ["--busy-anyway"]):
        CliRunner().invoke(app, [*arguments[2:], *flags])
    assert asked == [True, False]

"""The laboratory: cells are kept and not measured again, reports say what was measured."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.field import kernels
from lightsecagg.field.prime import PrimeField
from lightsecagg.params import DEFAULT_MODULUS
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.commands import laboratory
from lightsecagg_lab.commands.experiments import app
from lightsecagg_lab.commands.laboratory import ASYNCHRONOUS, RECORDED
from lightsecagg_lab.commands.laboratory import EXPERIMENTS as LISTED
from lightsecagg_lab.experiments import (
    catalogue,
    complexity,
    gains,
    impact_of_u,
    overhead,
    paper_values,
)
from lightsecagg_lab.experiments.catalogue import EXPERIMENTS, Experiment, experiment
from lightsecagg_lab.experiments.cells import (
    VERSION,
    Cell,
    Document,
    Results,
    RoundCell,
    TrainingCell,
    measure_cells,
    missing_cells,
    warm_rounds,
)
from lightsecagg_lab.experiments.operation_counts import counting
from lightsecagg_lab.experiments.report import Plot, Report, Table, write_report
from lightsecagg_lab.experiments.setups import (
    FULL,
    QUICK,
    RECORD,
    SECURE,
    TASKS,
    Profile,
    dropouts,
    method,
    planned_survivors,
    privacy,
)
from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.experiments.timing import client_upload, timed_rounds
from lightsecagg_lab.planning import Network, Topology
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.scenario import Outcome, run

LIGHT, SECAGG, SECAGG_PLUS, PLAIN = ProtocolName
TINY = Profile("quick", (8, 12), sample=2, repeats=1)
RECORDING = replace(TINY, name="record")


def silent(cell: Cell, needed: bool) -> None:
    """No progress bar."""


@dataclass(frozen=True)
class FakeCell(Cell):
    """Counts how often it is measured."""

    name: str
    log: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.name

    def measure(self) -> Document:
        self.log.append(self.name)
        if self.name == "interrupted" and len(self.log) == 2:
            raise KeyboardInterrupt
        return {"value": len(self.log)}


def test_finished_cells_are_not_measured_again_after_an_interruption(tmp_path: Path) -> None:
    log: list[str] = []
    cells = [FakeCell("one", log), FakeCell("interrupted", log), FakeCell("three", log)]
    with pytest.raises(KeyboardInterrupt):
        measure_cells(cells, tmp_path, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    results = measure_cells(cells, tmp_path, silent)
    assert log == ["one", "interrupted", "interrupted", "three"]
    assert [results[key]["value"] for key in ("one", "interrupted", "three")] == [1, 3, 4]
    assert results["one"]["machine"]["kernels"] == kernels.backend()


def test_a_cell_is_the_simulators_round(tmp_path: Path) -> None:
    cell = RoundCell(LIGHT, clients=9, privacy=3, dropouts=2, dimension=400, survivors=6)
    document = measure_cells([cell], tmp_path, silent)[cell.key]
    outcome: Outcome = next(run(cell.scenario()))
    for phase, loads in outcome.report.meter.phases.items():
        found = document["cold"][phase.value]
        assert found["server_received"] == loads.server.received
        assert found["server_shares_received"] == loads.server.shares_received
        assert found["client_sent"] == max((c.sent for c in loads.clients.values()), default=0)


def test_a_cell_keeps_every_round_and_the_cold_one_apart() -> None:
    cell = RoundCell(SECAGG, clients=8, privacy=2, dropouts=2, dimension=300, repeats=3)
    document = cell.measure()
    rounds = warm_rounds(document)
    assert len(rounds) == 3
    for name, figures in document["cold"].items():
        assert all(set(loads[name]) == set(figures) for loads in rounds)
    seconds = [loads["recover"]["server_seconds"] for loads in rounds]
    assert seconds == document["rounds"]["recover"]["server_seconds"]
    assert len(set(seconds)) > 1, "each is measured by itself"


def test_what_a_round_takes_is_computed_round_by_round() -> None:
    """The median of the totals, which is not the total of the medians of the phases."""
    cell = RoundCell(PLAIN, clients=8, privacy=2, dropouts=2, dimension=30, repeats=3)
    document = cell.measure()
    server = {"upload": [1.0, 5.0, 1.0], "recover": [5.0, 1.0, 1.0]}
    for phase, loads in document["rounds"].items():
        loads |= dict.fromkeys(loads, [0.0] * 3)
        loads["server_seconds"] = server.get(phase, [0.0] * 3)
    times = timed_rounds(document, Network(latency=0.0), trainings=[10.0])
    assert times.total(overlap=True) == Spread(16.0, 14.0, 16.0)
    assert times.breakdown()["recovery"] == Spread(1.0, 1.0, 3.0)
    varied = timed_rounds(document, Network(latency=0.0), trainings=[0.0, 10.0, 20.0])
    assert varied.breakdown()["training"] == Spread.of([0.0, 10.0, 20.0] * 3)
    assert varied.total(overlap=True).high > times.total(overlap=True).high


def test_cells_of_another_version_are_measured_again(tmp_path: Path) -> None:
    cell = RoundCell(PLAIN, clients=8, privacy=2, dropouts=2, dimension=30)
    older = tmp_path / f"{cell.key.removesuffix(f'-{VERSION}')}.json"
    older.write_text('{"phases": {}}', encoding="utf-8")
    assert missing_cells([cell, cell], tmp_path) == [cell]
    assert "rounds" in measure_cells([cell], tmp_path, silent)[cell.key]
    assert missing_cells([cell], tmp_path) == []


@dataclass(frozen=True)
class ForeignProcessCell(FakeCell):
    """Says which process measured it."""

    timed: ClassVar[bool] = True

    def measure(self) -> Document:
        if self.name == "refused":
            raise ParameterError("this cannot be measured")
        if self.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"pid": os.getpid()}


def test_what_is_timed_is_alone_in_its_process_on_an_idle_machine(tmp_path: Path) -> None:
    looks: list[str] = []
    cells = [ForeignProcessCell("timed"), FakeCell("counted")]
    found = measure_cells(cells, tmp_path, silent, lambda: looks.append("look"))
    assert found["timed"]["pid"] != os.getpid()
    assert looks == ["look"], "once, before the one that is timed"
    for name, told in (("refused", "this cannot be measured"), ("killed", "ended with -9")):
        with pytest.raises(ConfigurationError, match=told):
            measure_cells([ForeignProcessCell(name)], tmp_path, silent)


def test_a_recording_stays_within_its_time_and_repeats_even_the_longest_cells() -> None:
    """By the forecast that is printed before it starts."""
    assert [FULL.repetitions(seconds) for seconds in (0.1, 5.0, 60.0)] == [14, 7, 3]

    def minutes(*names: str) -> float:
        cells = {cell.key: cell for name in names for cell in experiment(name).cells(RECORD)}
        for cell in cells.values():
            assert getattr(cell, "repeats", 3) >= 3
        return sum(cell.expected_seconds for cell in cells.values()) / 60

    assert minutes("table4", "overhead") <= 20
    assert minutes("table4", "overhead", "table2", "table3", "figure5", "figure6", "figure8") <= 60
    assert minutes(*RECORDED) <= 100


def test_a_recording_has_every_experiment_but_the_one_that_takes_root() -> None:
    assert sorted([*RECORDED, "links"]) == sorted(EXPERIMENTS)


def test_a_recording_goes_on_after_an_experiment_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is kept, reports are written one by one, and what failed is named."""
    log: list[str] = []

    def cells(profile: Profile) -> list[Cell]:
        return [FakeCell("shared", log)]

    def refuse(profile: Profile, results: Results) -> Report:
        raise ConfigurationError("this cannot be reported")

    made = {
        name: Experiment(cells, lambda profile, results, name=name: Report(name, name))
        for name in ("first", "last")
    }
    made["broken"] = Experiment(cells, refuse)
    monkeypatch.setattr(catalogue, "EXPERIMENTS", made)
    monkeypatch.setattr(laboratory, "RECORDED", ("first", "broken", "last"))
    result = CliRunner().invoke(app, ["record", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "broken: this cannot be reported" in result.output
    assert "not recorded: broken; run it again" in result.output
    assert log == ["shared"]
    assert {path.stem for path in tmp_path.glob("*.md")} == {"first", "last"}
    again = CliRunner().invoke(app, ["record", "--quick", "--out", str(tmp_path)])
    assert again.exit_code == 1
    assert log == ["shared"], "measured once"


def test_a_recording_leaves_out_the_longest_cells_of_figures_9_and_10(
    tiny_results: Results,
) -> None:
    report = experiment("figure9").report(RECORDING, tiny_results)
    rows = {row[0]: row[1:] for row in report.tables[0].rows}
    assert [rows[f"SecAgg, {p}%"][-1] == "-" for p in (10, 30, 50)] == [True, False, True]
    assert any("N = 12 is recorded at p = 30% only" in text for text in report.paragraphs)
    whole = experiment("figure9").report(TINY, tiny_results)
    assert not any("-" in row for row in whole.tables[0].rows)


@pytest.mark.parametrize("topology", list(Topology))
def test_link_times_of_a_cell_are_those_of_the_simulator(topology: Topology) -> None:
    cell = RoundCell(SECAGG, clients=8, privacy=2, dropouts=2, dimension=300)
    network = Network(5.0, 60.0, 3.0, topology)
    times = timed_rounds(cell.measure(), network, [1.5]).cold
    outcome = next(run(replace(cell.scenario(), network=network)))
    for phase, parts in outcome.times.items():
        assert times.phases[phase].link == pytest.approx(parts.link, rel=0.02)
    assert times.total(overlap=True) <= times.total(overlap=False)
    assert times.total(overlap=False) == pytest.approx(1.5 + times.aggregation)


def test_every_cell_of_the_profiles_can_be_built() -> None:
    for profile in (FULL, QUICK):
        for name, found in EXPERIMENTS.items():
            for cell in found.cells(profile):
                assert "/" not in cell.key, name
                if isinstance(cell, RoundCell):
                    assert cell.scenario().resolved().parameters.clients == cell.clients


def test_dropouts_at_fifty_per_cent_are_the_most_that_the_checks_allow() -> None:
    assert [dropouts(200, rate) for rate in (0.1, 0.3, 0.5)] == [20, 60, 98]
    assert 200 - dropouts(200, 0.5) == privacy(200) + 2


@pytest.fixture(scope="module")
def tiny_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cells of the running-time experiments, on small vectors and a made-up training time."""
    cells: list[Cell] = []
    for found in EXPERIMENTS.values():
        cells += found.cells(TINY)
    cells += EXPERIMENTS["figure9"].cells(RECORDING)
    results: Results = {}
    measure = cache(RoundCell.measure)  # without their dimensions, the tasks are alike
    for cell in cells:
        if isinstance(cell, RoundCell) and cell.key not in results:
            results[cell.key] = measure(replace(cell, dimension=64, repeats=2))
        if isinstance(cell, TrainingCell):
            results[cell.key] = {"cell": {"repeats": 3}, "seconds": [1.9, 2.0, 2.2]}
    return results


@pytest.mark.parametrize(
    "name",
    ["table2", "table3", "table4", "figure5", "figure6", "impact-of-u", "overhead", "regimes"],
)
def test_reports_are_written_whole(name: str, tiny_results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = experiment(name).report(TINY, tiny_results)
    write_report(report, {}, f"lightsecagg experiments {name}", tmp_path)
    markdown = (tmp_path / f"{name}.md").read_text("utf-8")
    page = (tmp_path / f"{name}.html").read_text("utf-8")
    document = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
    assert document["figures"]
    assert document["machine"]["processor"]
    assert "Method." in markdown
    for plot in report.plots:
        assert (tmp_path / f"{plot.name}.png").stat().st_size > 5000
        assert "data:image/png;base64," in page
    without_pictures = re.sub(r"base64,[^\"]*", "", page)  # which may hold any four letters
    assert "http" not in without_pictures  # self-contained


@pytest.mark.parametrize("name", ["table2", "table3", "table4"])
def test_a_report_of_another_n_says_which_n_the_papers_figures_are_of(
    name: str, tiny_results: Results
) -> None:
    report = experiment(name).report(TINY, tiny_results)
    beside = [t for t in report.tables if "paper" in " ".join([t.caption, *t.header])]
    assert beside
    for table in beside:
        assert "N = 200" in table.caption
    assert any("N = 12 clients, the paper's are of N = 200" in text for text in report.paragraphs)
    assert not any("must not be compared" in text for text in method(FULL))


def test_table2_states_the_papers_gains(tiny_results: Results) -> None:
    report = gains.table2_report(TINY, tiny_results)
    rows = {row[0]: row for row in report.tables[0].rows}
    stated = {"SecAgg": ("11.3", "12.7", "13.2"), "SecAgg+": ("3.7", "4.1", "4.2")}
    for other, papers in stated.items():
        cnn = rows[f"FEMNIST, CNN, over {other}"]
        for cell, paper in zip(cnn[2:], papers, strict=False):
            assert cell.endswith(f"× [{paper}×]")


def test_table3_begins_with_the_papers_two_rows_and_three_columns(tiny_results: Results) -> None:
    report = gains.table3_report(TINY, tiny_results)
    first, *others = report.tables
    assert [row[0] for row in first.rows] == ["SecAgg", "SecAgg+"]
    assert first.header[1:] == ["98 Mbit/s", "320 Mbit/s", "802 Mbit/s"]
    assert [row[1].split("[")[1] for row in first.rows] == ["8.5×]", "2.9×]"]
    links = {row[0].split("server ")[1].split(";")[0] for t in others for row in t.rows}
    assert links == {"0.72 Gbit/s", "1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "unlimited"}


def test_the_papers_table2_follows_from_its_table4_at_thirty_per_cent() -> None:
    table = paper_values.TABLE4
    totals = {name: rows["total"][1] for name, rows in table.items()}
    beside = {name: rows["overlapped"][1] for name, rows in table.items()}
    stated = paper_values.TABLE2["femnist"]
    for other, gain in (("secagg", 0), ("secagg+", 1)):
        assert totals[other] / totals["lightsecagg"] == pytest.approx(
            stated["non-overlapped"][gain], abs=0.06
        )
        assert beside[other] / beside["lightsecagg"] == pytest.approx(
            stated["overlapped"][gain], abs=0.06
        )
        without = (totals[other] - 22.8) / (totals["lightsecagg"] - 22.8)
        assert without == pytest.approx(stated["aggregation"][gain], abs=0.06)


def test_overhead_compares_bytes_with_plain_summation(tiny_results: Results) -> None:
    report = overhead.overhead_report(TINY, tiny_results)
    cells = {
        protocol: tiny_results[
            TINY.round(protocol, 12, overhead.RATE, TASKS["femnist"].dimension).key
        ]
        for protocol in (LIGHT, PLAIN)
    }
    ratio = client_upload(cells[LIGHT]) / client_upload(cells[PLAIN])
    assert report.figures["lightsecagg/relay"]["upload_ratio"] == ratio
    assert report.figures["plain/relay"]["time_ratio"] == Spread.exactly(1.0)


def test_overhead_has_rows_of_other_protections_and_servers(tiny_results: Results) -> None:
    report = overhead.overhead_report(TINY, tiny_results)
    cores, others = report.tables[-2:]
    assert cores.header[1:] == ["1 core", "8 cores", "32 cores"]
    titles = [row[0] for row in others.rows]
    assert len(titles) == 6
    assert any("SecAgg+" in title and "(insecure)" in title for title in titles)
    assert [title for title in titles if "malicious" in title and "SecAgg+" in title] == []
    assert report.figures["lightsecagg/T = N/2, malicious server"]["upload_ratio"].median > 1


@pytest.mark.parametrize("name", ["table2", "table3", "table4", "figure6", "figure8", "overhead"])
def test_short_keys_have_rows_of_their_own(name: str, tiny_results: Results) -> None:
    report = experiment(name).report(TINY, tiny_results)
    for table in report.tables:
        apart = "fastest" in table.header or any(
            words in table.caption for words in ("as the paper draws it", "Other", "by cores")
        )
        assert apart or any("short keys" in row[0] for row in table.rows)
        assert {len(row) for row in table.rows} == {len(table.header)}
    assert any("ring-LWE" in text for text in report.paragraphs)


def test_figure5_shows_short_keys_too(tiny_results: Results) -> None:
    shown = experiment("figure5").report(TINY, tiny_results).figures
    assert "LightSecAgg, short keys/overlapped" in shown


def test_the_sweep_of_u_contains_the_planners(tiny_results: Results) -> None:
    for profile in (FULL, QUICK):
        planned = planned_survivors(profile.largest, 0.1, TASKS["femnist"].dimension)
        sweep = impact_of_u.sweep_of_survivors(profile)
        assert planned in sweep
        assert min(sweep) > privacy(profile.largest)
    assert impact_of_u.impact_report(TINY, tiny_results).figures["planned_over_best"]


def test_operations_are_counted_exactly() -> None:
    prime = PrimeField(DEFAULT_MODULUS)
    a = np.ones((3, 4), dtype=np.uint32)
    b = np.ones((4, 5), dtype=np.uint32)
    before = kernels.active()
    with counting() as counter:
        prime.matmul(a, b)
        assert counter.operations == 2 * 3 * 4 * 5
        prime.add(a, a)
        assert counter.operations == 2 * 3 * 4 * 5 + 12
    assert kernels.active() is before


def test_recovery_of_secagg_grows_with_the_square_and_ours_does_not() -> None:
    sizes = (8, 16, 32)
    counts = {
        protocol: [
            complexity.CountCell(protocol, N, dimension=2000).measure()["reconstruction (S)"]
            for N in sizes
        ]
        for protocol in (LIGHT, SECAGG)
    }
    slopes = {
        protocol: float(np.polyfit(np.log(sizes), np.log(found), 1)[0])
        for protocol, found in counts.items()
    }
    assert slopes[SECAGG] > 1.6
    assert slopes[LIGHT] < 1.1


def test_what_the_server_decodes_and_expands_is_counted_apart() -> None:
    """Of SecAgg: a mask per survivor and one per pair of a survivor and a dropped client."""
    N, d = 16, 2000
    light = complexity.CountCell(LIGHT, N, dimension=d).measure()
    assert light["PRG (S)"] == 0
    assert 0 < light["decoding (S)"] <= light["reconstruction (S)"]
    secagg = complexity.CountCell(SECAGG, N, dimension=d).measure()
    dropped = dropouts(N, 0.3)
    masks = (N - dropped) * (1 + dropped)
    assert secagg["PRG (S)"] == pytest.approx(masks * d, rel=0.02), "a few words are rejected"
    assert 0 < secagg["decoding (S)"] < secagg["PRG (S)"]


def test_growth_tables_give_an_exponent_per_row() -> None:
    results = {
        cell.key: dict.fromkeys(complexity._TABLE1 | complexity._TABLE5, 7.0 * cell.clients**2)
        for cell in complexity.count_cells(QUICK)
        if isinstance(cell, complexity.CountCell)
    }
    assert len(complexity._TABLE5) == 8, "as the paper has"
    for report in (
        complexity.table1_report(QUICK, results),
        complexity.table5_report(QUICK, results),
    ):
        assert len(report.tables) == len(SECURE)
        for table in report.tables:
            assert all(row[-2:] == ["2.00", "2.00"] for row in table.rows)


def test_table6_is_the_papers_closed_form() -> None:
    # N = 3, T = 1, U = 2: subsets of two and of three clients.
    assert complexity.zhao_sun(3, 1, 2) == (3 * 1 + 1 * (3 + 1), 1 + (3 * 2 + 1 * 3) // 3)
    assert complexity.lightsecagg_storage(3, 1, 2) == (6, 4)
    assert "e51" in complexity.table6_report(QUICK, {}).tables[0].rows[-1][3]


def test_reports_escape_what_they_print(tmp_path: Path) -> None:
    report = Report("x", "a < b", ["**bold** & `code`"], [Table("c", ["<"], [["&"]])])
    write_report(report, {}, "command", tmp_path)
    page = (tmp_path / "x.html").read_text("utf-8")
    assert "a &lt; b" in page
    assert "<strong>bold</strong> &amp; <code>code</code>" in page


def test_reports_say_that_the_machine_was_busy(tmp_path: Path) -> None:
    results = {
        name: {"machine": {"date": "2026-01-01", "competition": {"others": others, "stolen": 0.0}}}
        for name, others in (("busy", 1.2), ("idle", 0.02))
    }
    write_report(Report("x", "t"), results, "command", tmp_path)
    text = (tmp_path / "x.md").read_text("utf-8")
    assert "1 of 2 cells were measured while others used" in text
    assert "Those cells: `busy`." in text


def test_reports_name_the_cells_with_fewer_repetitions(tmp_path: Path) -> None:
    results = {
        name: {"cell": {"repeats": repeats}}
        for name, repeats in (("cheap", 14), ("usual", 7), ("long", 3))
    }
    write_report(Report("x", "t"), results, "command", tmp_path)
    text = (tmp_path / "x.md").read_text("utf-8")
    assert "after the cold one: 14 in 1 cells, 7 in 1 cells, 3 in 1 cells (`long`)." in text


def test_plots_are_drawn_by_the_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = Report("x", "t")
    report.plots.append(Plot("x", "c", lambda figure: figure.add_subplot().plot([1, 2], [3, 4])))
    write_report(report, {}, "command", tmp_path)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_lists_what_the_catalogue_holds() -> None:
    assert set(LISTED) == set(EXPERIMENTS)
    with pytest.raises(ParameterError, match="there is no experiment"):
        experiment("table9")


def test_the_document_names_every_experiment() -> None:
    text = (Path(__file__).parents[3] / "docs" / "laboratory.md").read_text("utf-8")
    assert [name for name in [*LISTED, *ASYNCHRONOUS] if f"`{name}`" not in text] == []


def test_the_command_prints_json_and_keeps_its_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["table6", "--quick", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["10"]["lightsecagg"] == [70, 12]
    assert (tmp_path / "table6.md").exists()


def test_phases_of_a_cell_are_the_protocols(tiny_results: Results) -> None:
    document = next(iter(tiny_results[k] for k in tiny_results if k.startswith("lightsecagg")))
    phases = {phase.value for phase in Phase if phase is not Phase.DONE}
    assert set(document["rounds"]) == set(document["cold"]) == phases

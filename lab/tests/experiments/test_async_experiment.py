"""The asynchronous experiment: comparable runs, both error sources, cells that are kept."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from lightsecagg.cli.main import app
from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.field.staleness import StalenessTable, polynomial
from lightsecagg.params import PAPER_MODULUS
from lightsecagg_lab.experiments.async_report import plot, rise_at_the_end, summarise, to_markdown
from lightsecagg_lab.experiments.asynchronous import (
    FEDBUFF,
    LIGHTSECAGG,
    QUICK,
    UNMASKED,
    Cell,
    UncheckedFieldServer,
    convergence_cells,
    read_cell,
    run_cells,
    sweep_cells,
)
from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.schemes.fedbuff import BufferMean, FedBuffServer, PlainUpload

SMALL = replace(QUICK, clients=8, privacy=1, survivors=6, buffer=3, rounds=4, evaluate_every=2)
TABLE = StalenessTable.from_function(polynomial(1.0), 64, 5)


def one_buffer(server: FedBuffServer, size: float) -> BufferMean:
    generator = np.random.default_rng(0)
    server.time = 2
    results: list[BufferMean] = []
    for owner in range(4):
        vector = generator.uniform(-size, size, 500).astype(np.float32)
        results += server.receive(owner, PlainUpload(owner % 3, vector))
    return results[0]


def unchecked(bits: int) -> UncheckedFieldServer:
    return UncheckedFieldServer(500, 4, TABLE, PAPER_MODULUS, 2.0**bits, np.random.default_rng(1))


def test_the_sweep_s_arithmetic_rounds_below_and_wraps_above() -> None:
    exact = one_buffer(FedBuffServer(500, 4, TABLE.weight, 5), 0.3)
    errors = {
        bits: float(np.abs(one_buffer(unchecked(bits), 0.3).mean - exact.mean).max())
        for bits in (0, 8, 16, 24, 31)
    }
    assert errors[24] < errors[16] < errors[8] < errors[0]
    assert errors[16] < 2**-16
    assert errors[8] < 2**-8
    assert errors[31] > 0.005  # q / (2^31 * sum of weights): whole turns around the field
    assert errors[31] > 100 * errors[24]


def test_the_sweep_counts_what_wraps_and_what_rounding_does() -> None:
    exact = one_buffer(FedBuffServer(500, 4, TABLE.weight, 5), 0.3).mean
    total = TABLE.weight(2) * 2 + TABLE.weight(1) + TABLE.weight(0)
    for bits in (0, 16, 28, 31):
        server = unchecked(bits)
        mean = one_buffer(server, 0.3).mean
        far = np.abs(mean - exact) > 1.5 * max(2.0**-bits, 1e-6)
        assert server.wrapped == [pytest.approx(far.mean())]
        assert server.wrapped[0] == np.mean(np.abs(exact) * total * 2.0**bits >= PAPER_MODULUS / 2)
        near = np.sqrt(np.mean(np.where(far, 0, mean - exact) ** 2) / np.mean(exact**2))
        assert server.noise == [pytest.approx(near, rel=0.01, abs=1e-6)]
    assert server.wrapped[0] > 0.1


def test_rounding_is_unbiased() -> None:
    server = UncheckedFieldServer(20_000, 1, TABLE, PAPER_MODULUS, 1.0, np.random.default_rng(1))
    (result,) = server.receive(0, PlainUpload(0, np.full(20_000, -0.3, dtype=np.float32)))
    assert set(np.unique(result.mean)) == {-1.0, 0.0}
    assert abs(result.mean.mean() + 0.3) < 0.02


def test_protected_runs_follow_fedbuff_and_cells_are_kept(tmp_path: Path) -> None:
    cells = convergence_cells(1) + sweep_cells([0, 31])
    calls: list[tuple[str, bool]] = []
    documents = run_cells(SMALL, cells, tmp_path, progress=lambda c, n: calls.append((c.name, n)))
    assert all(needed for _, needed in calls)
    for document in documents:
        assert document["flushes"] == 4
        assert sorted(document["accuracy"], key=int) == ["1", "2", "3", "4"]
    for document in documents[:4]:
        scheme = document["cell"]["scheme"]
        assert document["exact"] is (True if scheme == LIGHTSECAGG else None)
    for plain, protected in (documents[:2], documents[2:4]):
        assert plain["cell"]["scheme"] == FEDBUFF
        assert abs(plain["final_accuracy"] - protected["final_accuracy"]) < 0.01
    calls.clear()
    assert run_cells(SMALL, cells, tmp_path, progress=lambda c, n: calls.append((c.name, n))) == (
        documents
    )
    assert not any(needed for _, needed in calls)
    summary = summarise(documents)
    assert [row["staleness"] for row in summary["convergence"]] == ["constant", "poly"]
    assert [point["scale_bits"] for point in summary["sweep"]] == [0, 31]
    rounded, wrapped = summary["sweep"]
    assert rounded["noise"] > 0.1 > wrapped["noise"]
    assert rounded["wrapped"] == 0 < wrapped["wrapped"]
    assert summary["exact"] is True
    assert summary["cost"]["client_protocol_seconds"].median > 0
    said = to_markdown(SMALL, summary)
    assert "| 2^31 |" in said
    assert "6 of 6 runs name their machine: " in said
    with pytest.raises(ConfigurationError, match="another setup"):
        run_cells(replace(SMALL, rounds=5), cells[:1], tmp_path)
    path = tmp_path / "cells" / f"{cells[0].name}.json"
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="not a finished cell"):
        run_cells(SMALL, cells[:1], tmp_path)


def test_cells_in_processes_of_their_own_are_the_same_cells(tmp_path: Path) -> None:
    cells = [*sweep_cells([0, 16]), Cell(FEDBUFF, "poly", 0)]
    calls: list[tuple[str, bool]] = []
    together = run_cells(
        SMALL, cells, tmp_path / "a", progress=lambda c, n: calls.append((c.name, n)), jobs=2
    )
    assert calls == [(cell.name, True) for cell in cells]
    for one, other in zip(together, run_cells(SMALL, cells, tmp_path / "b"), strict=True):
        assert one["cell"] == other["cell"]
        assert one["accuracy"] == other["accuracy"]


def test_annealing_takes_eta_g_down_along_a_cosine(tmp_path: Path) -> None:
    annealed = replace(SMALL, annealing="cosine")
    assert [SMALL.rate_at(version) for version in range(4)] == [1, 1, 1, 1]
    assert [annealed.rate_at(version) for version in range(5)] == pytest.approx(
        [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0]
    )
    cell = Cell(FEDBUFF, "poly", 0)
    (annealed_run,) = run_cells(annealed, [cell], tmp_path / "annealed")
    (steady_run,) = run_cells(SMALL, [cell], tmp_path / "steady")
    first, *later = (annealed_run["accuracy"][done] for done in "1234")
    assert first == steady_run["accuracy"]["1"]  # the first step is a whole one
    assert later != [steady_run["accuracy"][done] for done in "234"]
    assert "eta_g = 0.3, cosine annealing;" in to_markdown(annealed, summarise([annealed_run]))
    with pytest.raises(ParameterError, match="annealing is 'warm'; choose one of constant, cosine"):
        replace(SMALL, annealing="warm")


def test_a_cell_that_fails_in_a_process_of_its_own_fails_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mnist"):
        run_cells(replace(SMALL, task="mnist"), sweep_cells([0]), tmp_path, tmp_path, jobs=2)
    assert not list((tmp_path / "cells").iterdir())


def made_up(cell: Cell, accuracy: float) -> dict[str, Any]:
    return {
        "cell": {
            "scheme": cell.scheme,
            "staleness": cell.staleness,
            "seed": cell.seed,
            "scale_bits": cell.scale_bits,
        },
        "accuracy": {"1": accuracy / 2, "2": accuracy},
        "final_accuracy": accuracy,
        "exact": cell.scheme == LIGHTSECAGG,
        "parameters": 10,
        "uploads": 5,
        "training_seconds": 1.0,
        "phases": {},
        "wrapped": 0.0,
        "noise": 0.0,
    }


def test_the_summary_compares_seed_by_seed() -> None:
    documents = [
        made_up(Cell(FEDBUFF, "poly", 0), 0.5),
        made_up(Cell(FEDBUFF, "poly", 1), 0.9),
        made_up(Cell(LIGHTSECAGG, "poly", 0), 0.49),
        made_up(Cell(LIGHTSECAGG, "hinge", 0), 0.1),
    ]
    (row,) = summarise(documents)["convergence"]
    assert row["seeds"] == [0]
    assert row["difference_points"] == pytest.approx(-1.0)
    assert summarise(documents)["sweep"] == []


def test_the_summary_says_how_certain_a_difference_is() -> None:
    plain, protected = (0.5, 0.6, 0.7), (0.51, 0.59, 0.73)  # +1, -1 and +3 points: 1 +- 2 / sqrt(3)
    documents = [
        made_up(Cell(scheme, "poly", seed), accuracy)
        for scheme, accuracies in ((FEDBUFF, plain), (LIGHTSECAGG, protected))
        for seed, accuracy in enumerate(accuracies)
    ]
    summary = summarise(documents)
    (row,) = summary["convergence"]
    assert row["standard_error_points"] == pytest.approx(2 / 3**0.5)
    assert "| +1.00 ± 1.15 points | +1.00, -1.00, +3.00 |" in to_markdown(SMALL, summary)
    alone = summarise([document for document in documents if document["cell"]["seed"] == 0])
    assert alone["convergence"][0]["standard_error_points"] is None
    assert "| +1.00 points |" in to_markdown(SMALL, alone)


def test_the_summary_names_machines_and_other_work() -> None:
    def on(date: str, others: float) -> dict[str, Any]:
        machine = {"processor": "a chip", "cores": 2, "python": "3.11", "kernels": "native"}
        competition = {"others": others, "stolen": 0.0}
        machine |= {"lightsecagg": "1.0", "date": date, "competition": competition}
        return {"machine": machine}

    cell = Cell(FEDBUFF, "poly", 0)
    silent, early, late = (made_up(cell, 0.5) | more for more in ({}, on("1", 1.0), on("2", 0.1)))
    assert "say where they were made" not in to_markdown(SMALL, summarise([silent]))
    said = to_markdown(SMALL, summarise([silent, late, early]))
    assert "2 of 3 runs name their machine: a chip, 2 cores, Python 3.11" in said
    assert "from 1 to 2, 1 of them beside other work" in said


def test_costs_are_medians_of_the_runs() -> None:
    def costing(seconds: float, seed: int) -> dict[str, Any]:
        names = ("client_seconds", "server_seconds", "upload_bytes", "download_bytes")
        phases = {"share": dict.fromkeys(names, seconds), "recover": dict.fromkeys(names, seconds)}
        return made_up(Cell(LIGHTSECAGG, "poly", seed), 0.5) | {"phases": phases}

    runs = [costing(seconds, seed) for seed, seconds in enumerate((1.0, 2.0, 99.0))]
    cost = summarise(runs)["cost"]
    assert cost["client_protocol_seconds"] == Spread(4.0, 3.0, 101.0)
    assert cost["megabytes"].median == pytest.approx(8e-6)


def test_the_summary_tells_what_is_still_rising() -> None:
    climbing = {str(done): done / 1000 for done in range(5, 301, 5)}
    flat = {done: min(done, 200) / 1000 for done in range(5, 301, 5)}
    assert rise_at_the_end(climbing) == pytest.approx(10)
    assert rise_at_the_end(flat) == pytest.approx(0)
    assert rise_at_the_end({300: 0.5}) == 0
    documents = [
        made_up(Cell(FEDBUFF, "poly", 0), 0.3) | {"accuracy": climbing},
        made_up(Cell(LIGHTSECAGG, "poly", 0), 0.2) | {"accuracy": flat},
    ]
    (row,) = summarise(documents)["convergence"]
    assert row["rise_points"] == pytest.approx(5)


def test_cells_from_before_a_setting_existed_have_its_default(tmp_path: Path) -> None:
    cell = Cell(FEDBUFF, "poly", 0)
    setup = asdict(SMALL)
    del setup["momentum"]
    path = tmp_path / "cell.json"
    path.write_text(json.dumps({"setup": setup, "cell": asdict(cell)}))
    assert read_cell(path, SMALL, cell) is not None
    with pytest.raises(ConfigurationError, match="another setup"):
        read_cell(path, replace(SMALL, momentum=0.9), cell)


def test_a_point_of_the_sweep_is_the_mean_of_its_seeds_between_the_extremes() -> None:
    cells = sweep_cells([4, 8], seeds=3)
    assert [(cell.seed, cell.scale_bits) for cell in cells][:3] == [(0, 4), (0, 8), (1, 4)]
    summary = summarise(made_up(cell, 0.5 + cell.seed / 10) for cell in cells)
    assert "| 2^4 | 3 | 60.00% | 50.00% | 70.00% |" in to_markdown(SMALL, summary)
    found = summary["sweep"]
    assert [(point["scale_bits"], point["seeds"]) for point in found] == [(4, 3), (8, 3)]
    for point in found:
        middle = [point[name] for name in ("least", "accuracy", "most")]
        assert middle == pytest.approx([0.5, 0.6, 0.7])


def test_figures_show_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = [made_up(Cell(FEDBUFF, "poly", 0), 0.5)]
    assert [path.name for path in plot(SMALL, curves, tmp_path)] == ["accuracy.png"]
    swept = [made_up(Cell(UNMASKED, "poly", 0, 4), 0.5)]
    assert [path.name for path in plot(SMALL, swept, tmp_path)] == ["sweep.png"]
    protected = [made_up(Cell(LIGHTSECAGG, "poly", seed), 0.5 + seed / 10) for seed in range(2)]
    both = plot(SMALL, curves + protected + swept, tmp_path)
    assert [path.name for path in both] == ["accuracy.png", "sweep.png"]


def test_the_quick_command_writes_everything(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = f"experiments async --quick --rounds 4 --sweep 16 --out {tmp_path} --json"
    arguments += " --annealing cosine --evaluate-every 2"
    result = CliRunner().invoke(app, arguments.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["exact"] is True
    assert len(summary["convergence"]) == 2
    kept = json.loads((tmp_path / "cells" / "fedbuff-poly-seed0.json").read_text())["setup"]
    chosen = (kept["rounds"], kept["annealing"], kept["evaluate_every"])
    assert chosen == (4, "cosine", 2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"cells", "summary.json", "README.md", "accuracy.png", "sweep.png"}
    page = (tmp_path / "README.md").read_text()
    assert all(f"]({picture}.png)" in page for picture in ("accuracy", "sweep"))
    assert len(list((tmp_path / "cells").iterdir())) == 5
    (tmp_path / "cells" / "lightsecagg-constant-c16-seed0.json").unlink()
    result = CliRunner().invoke(app, [*arguments.split(), "--finished"], catch_exceptions=False)
    assert [row["staleness"] for row in json.loads(result.stdout)["convergence"]] == ["poly"]

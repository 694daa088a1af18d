"""The kernel benchmark measures what it says; how fast, no test may ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lightsecagg.errors import ParameterError
from lightsecagg_lab.experiments.kernel_bench import Case, measure

KERNELS = {
    *("encode", "encode-seeded", "decode", "sum", "weighted-sum"),
    *("prg", "quantise-mask", "unmask-dequantise"),
}
SHORT_KEYS = {"short-key-mask", "short-key-expand"}
PACKED = {"rotate", "pack-mask", "unpack"}
SMALL = Case(clients=6, survivors=4, privacy=2, dimension=1000)


def test_the_default_is_the_main_case() -> None:
    assert Case() == Case(clients=200, survivors=140, privacy=100, dimension=1_206_590)
    assert Case().share_length == 30_165


@pytest.mark.parametrize(
    "case", [(6, 2, 2, 10), (6, 7, 2, 10), (6, 4, -1, 10), (6, 4, 2, 0)], ids=str
)
def test_impossible_cases_are_refused(case: tuple[int, int, int, int]) -> None:
    with pytest.raises(ParameterError):
        Case(*case)


def test_every_kernel_is_measured_in_the_fields_that_have_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightsecagg_lab.experiments.kernel_bench._ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr("lightsecagg_lab.experiments.kernel_bench._BULK_BYTES", 1 << 16)
    lines: list[str] = []
    document = measure(SMALL, lines.append)
    assert document["backend"] == backend
    assert document["machine"]["threads"] == 1
    found = [(row["kernel"], row["field"]) for row in document["rows"]]
    assert len(found) == len(set(found))
    assert set(found) == {
        *((k, f) for k in KERNELS for f in ("default", "paper")),
        *((k, "default") for k in PACKED | SHORT_KEYS),
        *((k, "words") for k in ("pairwise-mask", "sum")),
    }
    assert len(lines) == len(found) + 1, "progress: the memory, then every kernel"
    for row in document["rows"]:
        assert row["seconds"] > 0
        assert row["ratio"] == row["seconds"] / row["reference_seconds"]
        assert row["bytes_per_second"] == row["bytes"] / row["seconds"]
    sizes = {row["kernel"]: row.get("multiply_adds") for row in document["rows"]}
    assert sizes["encode"] == 6 * 4 * 500
    assert sizes["encode-seeded"] == (6 - 2) * 4 * 500
    assert sizes["decode"] == (4 - 2) * 4 * 500
    json.dumps(document, allow_nan=False)


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = "from lightsecagg.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", start, "bench", "kernels", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


SMALL_OPTIONS = ("--clients", "6", "--survivors", "4", "--privacy", "2", "--dim", "1000")


def test_the_command_prints_json_alone_on_stdout_and_progress_on_stderr() -> None:
    done = bench("--json", *SMALL_OPTIONS)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {row["kernel"] for row in document["rows"]} == {
        *(KERNELS | PACKED | SHORT_KEYS),
        "pairwise-mask",
    }
    assert document["case"]["dimension"] == 1000
    assert "decode (default field)" in done.stderr


def test_the_command_prints_a_table_and_names_the_fallback() -> None:
    done = bench(*SMALL_OPTIONS, LIGHTSECAGG_KERNELS="numpy")
    assert done.returncode == 0, done.stderr
    assert "numpy kernels on" in " ".join(done.stdout.split())
    assert "unmask-dequantise" in done.stdout
    assert done.stderr.count("native kernels are not in use") == 1


def test_the_command_refuses_impossible_cases() -> None:
    done = bench("--survivors", "300")
    assert done.returncode == 2
    assert "U = 300" in done.stderr
    assert done.stdout == ""

"""The native loops by another compiler; machines of another byte order. See scripts/portability"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import native_vectors
import pytest

from lightsecagg.field.native.loops import _SIGNATURES

ROOT = Path(__file__).parents[2]
NOT_LOOPS = {"set_threads", "has_avx2", "allow_avx2"}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The loops with their driver, built by clang: everything else here is built by the default."""
    if shutil.which("clang++") is None:
        pytest.skip("no clang++ here")
    program = tmp_path_factory.mktemp("clang") / "driver"
    loops = ROOT / "src/lightsecagg/field/native/kernels.cpp"
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(
        ["clang++", *options, loops, ROOT / "tests/field/native_driver.cpp", "-o", program],
        check=True,
    )
    return program


def test_every_native_loop_has_cases() -> None:
    assert set(native_vectors.cases_to_count()) == set(_SIGNATURES) - NOT_LOOPS


@pytest.mark.parametrize("avx2", ["0", "1"])
def test_loops_built_by_clang_agree_with_the_oracle(
    driver: Path, tmp_path: Path, avx2: str
) -> None:
    native_vectors.write(tmp_path / "cases", native_vectors.all_cases())
    subprocess.run([driver, tmp_path / "cases", "2", avx2, "0"], check=True)


@pytest.mark.parametrize(
    ("loop", "complaint"), [("matmul", "a wrong array"), ("find_beyond32", "a wrong result")]
)
def test_the_driver_notices_a_wrong_result(
    driver: Path, tmp_path: Path, loop: str, complaint: str
) -> None:
    case = native_vectors.cases_to_count()[loop]
    spoilt = dataclasses.replace(
        case,
        arguments=tuple(
            native_vectors.Written(argument.before, argument.after + 1)
            if isinstance(argument, native_vectors.Written)
            else argument
            for argument in case.arguments
        ),
        result=case.result + (loop == "find_beyond32"),
    )
    native_vectors.write(tmp_path / "cases", iter([spoilt]))
    told = subprocess.run(
        [driver, tmp_path / "cases", "1", "1", "0"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 1
    assert complaint in told.stderr


def test_a_big_endian_machine_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("lightsecagg")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(
        ImportError, match="little-endian machines only, and this one is big-endian"
    ):
        spec.loader.exec_module(package)

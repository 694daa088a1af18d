"""The wheel: small, one for every Python 3, native with a compiler and working without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("cmake", "ninja", "make", "sh", "uname")  # what a build may use besides a compiler

CHECK = """
import numpy as np
from lightsecagg.field import kernels, ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import DEFAULT_FIELD

code = MdsCode(DEFAULT_FIELD, 3, 1, ntt.points(DEFAULT_FIELD, 5))
mask, noise = np.uint32([[1, 2], [3, 4]]), np.uint32([[5, 6]])
shares = code.encode(mask, noise)
assert np.array_equal(code.decode([4, 0, 2], shares[[4, 0, 2]]), mask)
print(kernels.backend())
"""


def build_wheel(work: Path, **environment: str) -> Path:
    """Build from a copy of the sources, so that no earlier build can help."""
    source = work / "source"
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(work)]
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = work.glob("*.whl")
    return wheel


def backend_of(wheel: Path, work: Path) -> str:
    """Unpack the wheel, use it, and return the name of its backend."""
    target = work / "unpacked"
    zipfile.ZipFile(wheel).extractall(target)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTSECAGG_")}
    # -S: an editable install would hook itself in before the unpacked wheel.
    path = os.pathsep.join([str(target), *map(sysconfig.get_path, ("purelib", "platlib"))])
    checked = subprocess.run(
        [sys.executable, "-S", "-c", CHECK],
        env={**environment, "PYTHONPATH": path},
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    return checked.stdout.strip()


@pytest.mark.slow
def test_with_a_compiler_the_wheel_is_native_and_small(tmp_path: Path) -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    wheel = build_wheel(tmp_path)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert wheel.stat().st_size < 1_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("lightsecagg/field/native/kernels.") for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h", "CMakeLists.txt"))]
    assert backend_of(wheel, tmp_path) == "native"


@pytest.mark.slow
def test_without_a_compiler_the_wheel_still_works_on_numpy(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        # Tools installed by pip lie beside the interpreter.
        found = shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
        if found:
            (tools / tool).symlink_to(found)
    wheel = build_wheel(tmp_path, CC="/bin/false", CXX="/bin/false", PATH=str(tools))
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert backend_of(wheel, tmp_path) == "numpy"

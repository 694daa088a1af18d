"""scripts/release: notes of the right version; a wheel that works where nothing of ours is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LOADER = SourceFileLoader("release", str(ROOT / "scripts" / "release"))

CHANGES = """# Changelog

## [Unreleased]

### Added

- What comes.

## [1.2.0] - 2027-01-02

- What came.

## [1.1.0] - 2027-01-01
"""


@pytest.fixture(scope="module")
def release() -> Any:
    spec = importlib.util.spec_from_loader("release", LOADER)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module
    LOADER.exec_module(module)
    return module


def test_notes_are_those_of_the_version(release: Any) -> None:
    assert release.notes(CHANGES, "1.2.0") == "# lightsecagg 1.2.0\n\n- What came.\n"
    coming = release.notes(CHANGES, "1.3.0.dev0")
    assert coming == "# lightsecagg 1.3.0.dev0\n\n### Added\n\n- What comes.\n"


@pytest.mark.parametrize("number", ["1.1.0", "1.3.0", "1x2x0"])
def test_a_version_of_which_nothing_is_said_is_not_released(release: Any, number: str) -> None:
    with pytest.raises(SystemExit, match=f"says nothing about {number}"):
        release.notes(CHANGES, number)


def test_the_changelog_has_notes_of_this_version() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "release"), "--notes"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("# lightsecagg ")
    assert "### Added" in printed


@pytest.mark.slow
@pytest.mark.timeout(1800)  # pip fetches and builds, perhaps on a busy machine
@pytest.mark.skipif(
    "LIGHTSECAGG_RELEASE" not in os.environ,
    reason="builds and installs for minutes, as scripts/release does; set LIGHTSECAGG_RELEASE=1",
)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="builds what is committed; no git here")
@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)
def test_what_would_be_released_is_whole_and_works_elsewhere(
    release: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All but `lightsecagg run`, which has a test of its own."""
    monkeypatch.setenv("LIGHTSECAGG_VENV", str(tmp_path / "none"))
    wheel = release.build(tmp_path, tmp_path / "dist")
    names = zipfile.ZipFile(wheel).namelist()
    page = "lightsecagg/drivers/federation/dashboard/page/index.html"
    assert {"lightsecagg/py.typed", page} <= set(names)
    assert not [name for name in names if name.endswith((".cpp", ".h", "CMakeLists.txt"))]
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "src/lightsecagg/py.typed"} <= inside
    assert f"src/{page}" in inside
    assert not [name for name in inside if name.startswith((".ci", "docs/results"))]
    release.try_out(wheel, tmp_path)
    assert "README's ten lines run" in capsys.readouterr().out

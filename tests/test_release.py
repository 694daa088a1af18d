"""scripts/release: notes of the right version; a wheel that works where nothing of ours is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
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
    """All but training, which has a test of its own."""
    monkeypatch.setenv("LIGHTSECAGG_VENV", str(tmp_path / "none"))
    built = release.build(tmp_path, tmp_path / "dist")
    page = "lightsecagg/drivers/federation/dashboard/page/index.html"
    for wheel, loops in (built.native, True), (built.aarch64, True), (built.pure, False):
        names = zipfile.ZipFile(wheel).namelist()
        assert {"lightsecagg/py.typed", page} <= set(names)
        assert not [name for name in names if name.endswith((".cpp", ".h", "CMakeLists.txt"))]
        assert any(name.endswith("kernels.so") for name in names) is loops
    assert "manylinux" in built.native.name
    assert built.aarch64.name.endswith("-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl")
    assert built.pure.name.endswith("-py3-none-any.whl")
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "src/lightsecagg/py.typed"} <= inside
    assert f"src/{page}" in inside
    assert not [name for name in inside if name.startswith((".ci", "docs/results"))]
    untried, packages = release.try_everything(built, tmp_path, [], None)
    assert {"numpy", "cryptography"} <= {each["name"] for each in packages}
    # Without torch and grpc, nothing trains; where there is no emulator, its part is named as well.
    assert [built.native.name, built.pure.name] == [each.split(":")[0] for each in untried[:2]]
    assert capsys.readouterr().out.count("README's ten lines run") == 3


PACKAGES = [
    {"name": name, "version": number, **more}
    for name, number, more in (
        ("lightsecagg", "1.0", {"requires_dist": ["NumPy>=2", "rich; extra == 'x'"]}),
        ("numpy", "2.4", {"license_expression": "BSD-3-Clause"}),
        ("rich", "14.0", {"requires_dist": ["numpy (>=2)", "absent"]}),
        ("pip", "26.0", {}),
    )
]


def test_the_bill_of_materials_has_files_with_hashes_and_packages(
    release: Any, tmp_path: Path
) -> None:
    wheel = tmp_path / "lightsecagg-1.0-py3-none-any.whl"
    wheel.write_bytes(b"abc")
    bill = release.parts([wheel], PACKAGES, {"ziglang": "0.17"}, 0)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/lightsecagg@1.0"
    named = {each["name"]: each for each in bill["components"]}
    assert set(named) == {"numpy", "rich", "libc++", wheel.name}
    assert named["numpy"]["licenses"] == [{"expression": "BSD-3-Clause"}]
    (hashed,) = named[wheel.name]["hashes"]
    assert hashed["content"] == ("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    needs = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert needs["pkg:pypi/lightsecagg@1.0"] == ["pkg:pypi/numpy@2.4"]
    assert needs["pkg:pypi/rich@14.0"] == ["pkg:pypi/numpy@2.4"]
    assert bill == release.parts([wheel], PACKAGES, {"ziglang": "0.17"}, 0)


@pytest.mark.slow
def test_the_wheel_without_loops_trains_where_no_compiler_is(release: Any, tmp_path: Path) -> None:
    """Built from this tree and installed into a bare environment, as on macOS and Windows."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(tmp_path)]
    options += ["--config-settings", f"build-dir={tmp_path / 'build'}"]
    options += ["--config-settings", "wheel.cmake=false", "--quiet", str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    there = release.Elsewhere(tmp_path, "--no-deps", wheel)
    assert there.borrow(Path(sysconfig.get_path("purelib")))
    printed = there.python("-m", "lightsecagg", "--version")
    release.expect(printed + there.python("-c", release.ten_lines()), "numpy")
    report = there.lightsecagg(release.RUN)
    assert "the secure average equals the plain average" in report

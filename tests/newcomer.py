"""A newcomer's machine: a fresh environment, and a wheel of this tree to install there."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Newcomer:
    """A fresh environment with the package and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.processes: list[subprocess.Popen[str]] = []
        venv.create(folder / "venv", with_pip=True)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Python, in an empty folder, without a trace of the environment of the tests."""
        ours = ("LIGHTSECAGG_", "PYTHON", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        process = subprocess.Popen(
            [self.python, *arguments],
            env={**kept, "COLUMNS": "80"},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`start`, to its end."""
        process = self.start(*arguments)
        out, err = process.communicate()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def install(self, *what: str) -> None:
        done = self.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)
        assert done.returncode == 0, done.stderr

    def borrow(self, package: str) -> None:
        """A package of the environment of the tests, after all that is installed here."""
        from importlib.util import find_spec

        found = find_spec(package)
        assert found is not None
        assert found.origin is not None
        (place,) = (self.folder / "venv").glob("lib/python3*/site-packages")
        (place / f"{package}.pth").write_text(f"{Path(found.origin).parents[1]}\n")

    def lightsecagg(self, command: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "lightsecagg", *command.split())

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def wheel_of_this_tree(folder: Path) -> Path:
    """Without build isolation: the tools are here, and what is tested is the installation."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation"]
    # The build folder is not the one in the tree: other tests may be using it.
    options = ["--no-deps", "--no-index", "--wheel-dir", str(folder)]
    options += ["--config-settings", f"build-dir={folder / 'build'}"]
    built = subprocess.run(
        [*command, *options, str(ROOT)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def ten_lines() -> str:
    """The first program of the README."""
    _, _, rest = (ROOT / "README.md").read_text("utf-8").partition("```python\n")
    return rest.partition("```")[0]

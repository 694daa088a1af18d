"""What differs between systems: here, and as far as another system can play Windows."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightsecagg
from lightsecagg import system

SOURCE = Path(lightsecagg.__file__).parent
WINDOWS = Path(__file__).parent / "windows"


@pytest.fixture(scope="module")
def played() -> Any:
    """The module that plays Windows, imported without playing it."""
    spec = importlib.util.spec_from_file_location("played", WINDOWS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unix_only(source: str, absent: dict[str, set[str]]) -> set[str]:
    """What a module uses of `os`, `signal` and the like that Windows lacks."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in absent.get(node.value.id, ()):
                found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & absent.get(node.module or "", set())
            found |= {f"{node.module}.{name}" for name in names}
        elif isinstance(node, ast.Constant) and node.value in ("fork", "forkserver"):
            found.add(node.value)
        elif isinstance(node, ast.Attribute) and node.attr == "add_signal_handler":
            found.add(node.attr)
    return found


def test_what_windows_lacks_is_used_in_system_alone(played: Any) -> None:
    absent = {module: set(names.split()) for module, names in played.ABSENT.items()}
    uses = {
        str(path.relative_to(SOURCE)): found
        for path in SOURCE.rglob("*.py")
        if (found := unix_only(path.read_text("utf-8"), absent))
    }
    found = uses.pop("system.py")
    assert {"os.O_NOFOLLOW", "os.geteuid", "signal.SIGKILL", "forkserver"} <= found
    assert uses == {}


def test_a_lock_is_held_once_and_ends_with_its_descriptor(tmp_path: Path) -> None:
    first, second = (system.open_private(tmp_path / "lock") for _ in range(2))
    system.lock(first)
    with pytest.raises(OSError):
        system.lock(second)
    os.close(first)
    system.lock(second)
    os.close(second)


def test_S61_a_private_file_is_never_what_a_link_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        system.open_private(tmp_path / "link")
    assert not (tmp_path / "target").exists()


@pytest.mark.unix
@pytest.mark.parametrize(("mode", "wanted"), [(0o600, None), (0o640, "600"), (0o604, "600")])
def test_S61_a_secret_that_others_may_read_is_too_open(
    tmp_path: Path, mode: int, wanted: str | None
) -> None:
    path = tmp_path / "secret"
    path.touch()
    path.chmod(mode)
    with path.open("rb") as file:
        assert system.too_open(file.fileno()) == wanted


ON_WINDOWS = """
import asyncio, os, sys
from pathlib import Path
from lightsecagg import system
from lightsecagg.drivers.federation.durable import ProcessLock, write_synced
from lightsecagg.errors import ConfigurationError
from lightsecagg.field import kernels
from lightsecagg.foreign import read_private

assert not system.UNIX
assert kernels.backend() == "numpy"
system.leave_no_core()
assert system.ctypes.windll.kernel32.modes == [3]
system.allow_most_files()
system.return_large_memory()
assert system.most_files() is None
write_synced(Path("file"), b"whole")
Path("file").chmod(0o666)  # what Windows says of every file
assert read_private(Path("file")) == b"whole"
held = ProcessLock(Path("lock"), "held")
try:
    ProcessLock(Path("lock"), "held already")
except ConfigurationError as error:
    print(error)
Path("link").symlink_to("file")
try:
    system.open_private(Path("link"))
except OSError as error:
    print(error.strerror)

async def until_break():
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    system.on_signal(loop, system.STOP[0], heard.set)
    os.kill(os.getpid(), system.STOP[0])
    await heard.wait()
    system.default_signal(loop, system.STOP[0])
    print("asked to end")

asyncio.run(until_break())
"""


def play(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as on Windows."""
    ours = {name: text for name, text in os.environ.items() if not name.startswith("LIGHTSECAGG_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**ours, "PYTHONPATH": str(WINDOWS)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_files_locks_and_signals_work_as_on_windows(tmp_path: Path) -> None:
    done = play(ON_WINDOWS, tmp_path)
    assert done.stderr.startswith("Windows: nothing checks who else may read keys")
    assert done.stderr.count("\n") == 1
    told = done.stdout.splitlines()
    assert told == ["held already", "Too many levels of symbolic links", "asked to end"]


def test_a_demonstration_starts_kills_and_replaces_processes_as_on_windows(tmp_path: Path) -> None:
    program = """
import time
from lightsecagg import system

def ends():
    system.kill_self()

if __name__ == "__main__":
    context = system.processes(["lightsecagg"])
    with system.ctrl_c_blocked():
        own, other = context.Process(target=ends), context.Process(target=time.sleep, args=(60,))
        own.start(), other.start()
    other.kill()
    for each in own, other:
        each.join()
        assert each.exitcode == system.KILLED, each.exitcode
    print(type(context).__name__)
"""
    (tmp_path / "demonstration.py").write_text(program, "utf-8")
    done = play("import runpy; runpy.run_path('demonstration.py', run_name='__main__')", tmp_path)
    assert done.stdout == "SpawnContext\n", done.stderr

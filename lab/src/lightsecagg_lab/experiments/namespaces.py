"""Network namespaces without names: a laboratory's links, which vanish with their process.

A namespace lives as long as somebody holds it open, and its devices and routes live in it. These
are held by file descriptors of one process alone, so that nothing is left when it ends, whatever
ended it. They reach neither this machine's network nor each other, but over what is put there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lightsecagg.errors import ConfigurationError

_CLONE_NEWNET: Final = 0x40000000
_OWN: Final = "/proc/thread-self/ns/net"
_TUN: Final = Path("/dev/net/tun")
_TOOLS: Final = ("ip", "tc")


class Namespace:
    """A network of its own; `path` leads other processes to it while it is open."""

    def __init__(self) -> None:
        with _back_home():
            _call("unshare", _CLONE_NEWNET)
            self._descriptor = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
            configure("ip link set dev lo up")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def run(self, *commands: str) -> None:
        """Run commands of iproute2 in it."""
        with visiting(self.path):
            configure(*commands)

    def close(self) -> None:
        """Let go of it: it is gone when no process is left inside."""
        os.close(self._descriptor)


@contextmanager
def visiting(path: Path) -> Iterator[None]:
    """This thread is in the namespace meanwhile; sockets that it makes there stay there."""
    with _back_home():
        enter(path)
        yield


def enter(path: Path) -> None:
    """From now on this thread, and all that it starts, is in the namespace."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)


def configure(*commands: str) -> None:
    """Run commands of iproute2 where this thread is."""
    for command in commands:
        done = subprocess.run(  # noqa: S603 - words of ours, and no shell
            command.split(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigurationError(f"`{command}` failed: {done.stderr.strip()}")


def check_namespaces() -> None:
    """Refuse a machine on which links cannot be shaped, and say what it lacks."""
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        raise ConfigurationError(
            f"shaped links need {' and '.join(lacking)}, which this machine does not have; "
            "install iproute2"
        )
    if not _TUN.exists():
        raise ConfigurationError(f"shaped links need {_TUN}, which this system does not have")
    try:
        Namespace().close()
    except OSError as error:
        raise ConfigurationError(
            f"shaped links need network namespaces, which this process may not make "
            f"({error.strerror}); run it as root"
        ) from error


@contextmanager
def _back_home() -> Iterator[None]:
    """Wherever this thread goes meanwhile, it returns."""
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _call("setns", home, _CLONE_NEWNET)
        os.close(home)


def _call(name: str, *arguments: int) -> None:
    """A function of the C library that Python offers from 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)

"""Windows, as far as another system can play it, for the modules of the product alone.

    PYTHONPATH=tests/windows python -m pytest ...       `scripts/portability --only windows` does it

Python imports this file first, in every process. A module of `lightsecagg` then finds no `fcntl`
and no `resource`, an `os`, `signal` and `multiprocessing` without what Windows lacks, folders that
cannot be opened, loops without signal handlers, and no native library. `flock` plays a lock of
`msvcrt`. All other modules, the tests and the laboratory among them, see the system as it is.

Whoever is killed there ends with another exit code. Not played: files that cannot be removed or
replaced while they are open, drive letters, the console.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.popen_fork import Popen
from types import ModuleType, SimpleNamespace
from typing import Any

HIDDEN = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
ABSENT = {
    "os": """
        O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NDELAY O_NOATIME O_NOCTTY O_NOFOLLOW
        O_NONBLOCK O_PATH O_SYNC O_TMPFILE chown chroot confstr copy_file_range ctermid eventfd
        fchdir fchmod fchown fdatasync fork forkpty fstatvfs getegid geteuid getgid getgroups
        getloadavg getpgid getpgrp getpriority getresuid getsid getuid getxattr initgroups killpg
        lchown listxattr lockf major memfd_create minor mkfifo mknod nice openpty pathconf pipe2
        posix_fadvise posix_fallocate posix_spawn pread preadv pwrite pwritev register_at_fork
        removexattr sched_getaffinity sched_setaffinity sched_yield sendfile setegid seteuid setgid
        setgroups setpgid setpriority setsid setuid setxattr splice statvfs sync sysconf ttyname
        uname wait wait3 wait4 waitid
    """,
    "signal": """
        ITIMER_REAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGQUIT
        SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGWINCH SIG_BLOCK SIG_SETMASK
        SIG_UNBLOCK alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt
        sigpending sigtimedwait sigwait sigwaitinfo
    """,
    "multiprocessing.context": "ForkContext ForkProcess ForkServerContext ForkServerProcess",
    "socket": "AF_UNIX SO_REUSEPORT",
    "time": "clock_getres clock_gettime clock_settime pthread_getcpuclockid tzset",
}


class _Played(ModuleType):
    """A module as Windows has it; it reads and writes the one that is there."""

    def __init__(self, name: str, instead: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_real", import_module(name))
        object.__setattr__(self, "_instead", instead)
        object.__setattr__(self, "_absent", set(ABSENT.get(name, "").split()))

    def __getattribute__(self, name: str) -> Any:
        inner = object.__getattribute__
        if name in inner(self, "_absent"):
            raise AttributeError(f"Windows has no {name}")
        instead = inner(self, "_instead")
        return instead[name] if name in instead else getattr(inner(self, "_real"), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_real"), name, value)


def _open(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return os.open(path, flags, mode, **options)


def _get_context(method: str | None = None) -> Any:
    if method not in (None, "spawn"):
        raise ValueError(f"cannot find context for {method!r}")
    return import_module("multiprocessing").get_context("spawn")


def _library(name: str | None, *options: Any, **more: Any) -> Any:
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return import_module("ctypes").CDLL(name, *options, **more)


def _locking(descriptor: int, mode: int, count: int) -> None:
    assert (mode, count) == (2, 1)  # all that is played
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _exit(code: int) -> None:
    if code == _KILLED:
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(code)


def _no_handler(*_: object) -> None:
    raise NotImplementedError


_KILLED = 0x10000
_error_modes: list[int] = []
_kernel32 = SimpleNamespace(SetErrorMode=_error_modes.append, modes=_error_modes)
_INSTEAD: dict[str, dict[str, Any]] = {
    "os": {"_exit": _exit, "open": _open},
    "signal": {"SIGBREAK": signal.SIGUSR1},
    "sys": {"platform": "win32"},
    "multiprocessing": {"get_context": _get_context},
    "ctypes": {"windll": SimpleNamespace(kernel32=_kernel32), "CDLL": _library},
}
_MSVCRT = ModuleType("msvcrt")
_MSVCRT.__dict__.update(LK_NBLCK=2, locking=_locking)
_played: dict[str, _Played] = {}
_import: Callable[..., Any] = builtins.__import__


def _as_on_windows(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: tuple[str, ...] = (),
    level: int = 0,
) -> Any:
    importer = (globals or {}).get("__package__") or (globals or {}).get("__name__") or ""
    if importer.partition(".")[0] != "lightsecagg":
        return _import(name, globals, locals, fromlist, level)
    if name in HIDDEN:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if name == "msvcrt":
        return _MSVCRT
    module = _import(name, globals, locals, fromlist, level)
    of = name if fromlist else name.partition(".")[0]
    if of not in ABSENT and of not in _INSTEAD:
        return module
    if of not in _played:
        _played[of] = _Played(of, _INSTEAD.get(of, {}))
    return _played[of]


if __name__ == "sitecustomize" and sys.platform != "win32":
    builtins.__import__ = _as_on_windows
    loop = asyncio.SelectorEventLoop
    Popen.kill = Popen.terminate  # type: ignore
    loop.add_signal_handler = loop.remove_signal_handler = _no_handler  # type: ignore

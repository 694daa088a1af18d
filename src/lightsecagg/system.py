"""What differs between Unix and Windows, in one place.

No other module imports `fcntl`, `resource`, `pwd` or `grp`, or uses what `os`, `signal`, `asyncio`
and `multiprocessing` have on one system alone. Where Windows has an equivalent, the function here
uses it. Where it has none, the docstring names what is missing.

    file locks                  flock             LockFile, by msvcrt
    no link is followed         O_NOFOLLOW        the path is looked at first
    names survive a crash       fsync of a folder what NTFS does by itself
    others cannot read a file   permission bits   the folder's list of access: nobody checks it
    no file after a crash       RLIMIT_CORE       no error reporting, by SetErrorMode
    number of open files        RLIMIT_NOFILE     sockets are no files there
    end in order                SIGTERM, Ctrl-C   Ctrl-Break, Ctrl-C
    processes of a demo         fork server       spawned, each with its own imports
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

try:
    import fcntl
    import resource
except ImportError:
    import msvcrt

    UNIX = False
    _msvcrt: Any = msvcrt  # of which a type checker sees nothing elsewhere
else:
    UNIX = True

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from multiprocessing.context import ForkServerContext, SpawnContext

_log = logging.getLogger(__name__)

KILLED: Final = -signal.SIGKILL if UNIX else -signal.SIGTERM
"""`exitcode` of a process that was killed."""
TERMINATED: Final = 0 if UNIX else KILLED
"""`exitcode` of a program of ours after `terminate`: Windows has no way to ask."""
STOP: Final[tuple[signal.Signals, ...]] = (
    signal.SIGTERM if UNIX else getattr(signal, "SIGBREAK"),  # noqa: B009 - exists there alone
    signal.SIGINT,
)
"""What asks a program to end in order; the first is what a service manager sends."""

# Of Windows: winbase.h, and what `multiprocessing` takes for a killed process.
_NO_DIALOGUE = 0x0001 | 0x0002
_TERMINATE = 0x10000
# Of glibc: malloc.h.
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20


# -- files ---------------------------------------------------------------------------------------


def open_private(path: Path) -> int:
    """A descriptor of a file that only its owner may read, made if absent; no link is followed."""
    flags = os.O_RDWR | os.O_CREAT
    if UNIX:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)


def new_private(path: Path) -> int:
    """A descriptor of a new file that only its owner may read; no link is followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.open(path, flags | (os.O_NOFOLLOW if UNIX else getattr(os, "O_BINARY", 0)), 0o600)


def lock(descriptor: int) -> None:
    """Until the descriptor is closed or the process ends; `OSError` if it is locked already."""
    if UNIX:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)


def sync_folder(path: Path) -> None:
    """Let the names in a folder survive a crash; Windows opens no folder, and NTFS logs names."""
    if not UNIX:
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def too_open(descriptor: int) -> str | None:
    """The mode that a file with a secret should have, if others may read or change it (S61).

    The group may read a file that is not ours: that is how a container's user reads a secret that
    root has mounted for it. Windows has no such bits: one warning asks for a folder of one's own.
    """
    if not UNIX:
        _warn_of_readers()
        return None
    status = os.fstat(descriptor)
    ours = status.st_uid == os.geteuid()
    if not status.st_mode & (0o077 if ours else 0o037):
        return None
    return "600" if ours else "440"


# -- this process --------------------------------------------------------------------------------


def leave_no_core() -> None:
    """A process that crashes leaves no file with its keys in it (S61); nor do its children."""
    if UNIX:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    else:
        _kernel32().SetErrorMode(_NO_DIALOGUE)


def most_files() -> int | None:
    """How many files and connections this process may open; None: any number."""
    if not UNIX:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if most == resource.RLIM_INFINITY else most


def allow_most_files() -> None:
    """Raise the limit of open files as far as the system lets us."""
    if not UNIX:
        return
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems name a limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def return_large_memory() -> None:
    """Free large vectors to the system; glibc would keep them for later. Others free anyway."""
    if UNIX:
        with suppress(AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def on_signal(loop: AbstractEventLoop, number: int, act: Callable[[], object]) -> None:
    """Let the loop act on a signal; only the main thread may ask for it."""
    if UNIX:
        loop.add_signal_handler(number, act)
    else:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(act) and None)


def default_signal(loop: AbstractEventLoop, number: int) -> None:
    """The inverse of `on_signal`."""
    if UNIX:
        loop.remove_signal_handler(number)
    else:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


def kill_self() -> None:
    """End at once, as if somebody had pulled the plug."""
    if UNIX:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(_TERMINATE)


# -- other processes -----------------------------------------------------------------------------


def processes(preloaded: Sequence[str]) -> ForkServerContext | SpawnContext:
    """Starts processes that hold no memory of this one.

    A fork server imports what is `preloaded` once for all of them; Windows has none.
    """
    import multiprocessing  # here, where few come by

    if not UNIX:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    return context


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """A process that is started inside does not get Ctrl-C; on Windows, it gets it and ends."""
    if not UNIX:
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # or it would be started inside, and unblock the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@cache
def _warn_of_readers() -> None:
    _log.warning(
        "Windows: nothing checks who else may read keys, ledgers and state; keep them in a folder "
        "that only your account may open"
    )


def _kernel32() -> Any:
    return getattr(ctypes, "windll").kernel32  # noqa: B009 - exists on Windows alone

"""Whether a simulated round fits into memory, before it is begun.

All N clients live in one process. At the peak, when sharing is over, the process holds

    vectors   N * 4 d        each client's mask (LightSecAgg) or, later, its upload at the server
    shares    N * e * 4 L    the explicit shares that each client holds: e = N - U in seeded mode,
                             N in paper mode, none in SecAgg and SecAgg+
    messages  N * k * 1 kB   what Python needs per small share: k = N - 1, or SecAgg+'s degree
    working   16 * 4 d + 2 (N + U) * 8 L   vectors and matrices that one party works on
    program   200 MB

If only n clients are real (`--sample-clients`), `shares` counts those of n clients. In the
asynchronous mode every client has several masks at a time, so the first three count as often.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import ConfigurationError
from lightsecagg.protocol.settings import Settings

_PROGRAM = 200 * 10**6
_PER_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory that a round will take at its peak, in bytes."""

    vectors: int
    shares: int
    messages: int
    working: int
    program: int = _PROGRAM

    @property
    def total(self) -> int:
        """Everything."""
        return self.vectors + self.shares + self.messages + self.working + self.program

    def __str__(self) -> str:
        return (
            f"{_gigabytes(self.total)} ({_gigabytes(self.vectors)} for masks and uploads, "
            f"{_gigabytes(self.shares)} for shares, "
            f"{_gigabytes(self.messages + self.working + self.program)} for the rest)"
        )


def forecast(settings: Settings, sample: int | None = None, masks: int = 1) -> Forecast:
    """The peak memory of a simulation.

    * `sample`: the number of real clients, if not all are.
    * `masks`: how many each client has at a time.
    """
    parameters = settings.parameters
    N, U = parameters.clients, parameters.survivors
    vector, degree = 4 * settings.length, settings.degree(N)
    explicit = settings.traits.shares(settings).get(ShareKind.EXPLICIT)
    held, share = (0, 0) if explicit is None else (explicit.count + 1, explicit.length)
    return Forecast(
        vectors=masks * N * vector,
        shares=masks * (N if sample is None else sample) * held * share,
        messages=masks * N * degree * _PER_MESSAGE,
        working=16 * vector + 2 * (N + U) * 2 * share,
    )


def check_memory(settings: Settings, sample: int | None = None, masks: int = 1) -> None:
    """Refuse a simulation that would not fit into this machine's memory; see `forecast`."""
    needed, available = forecast(settings, sample, masks), available_memory()
    if available is not None and needed.total > available:
        instead = (
            "or only some of them (--sample-clients)"
            if settings.buffering is None
            else "or keep a smaller stock of masks (--stock)"
        )
        raise ConfigurationError(
            f"{settings.protocol} with N = {settings.parameters.clients} and d = "
            f"{settings.dimension} would need about {needed}, but {_gigabytes(available)} are "
            f"available; simulate fewer clients, {instead}"
        )


def available_memory() -> int | None:
    """What this process may still take, in bytes; None where the system does not say."""
    limits = [limit for limit in (_system_available(), _cgroup_available()) if limit is not None]
    return min(limits, default=None)


def _system_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    """What a container's limit leaves."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text("ascii").strip()
        used = (root / "memory.current").read_text("ascii").strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(used)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"

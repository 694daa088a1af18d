"""Where and when something was measured: a number without its machine means little."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightsecagg import __version__
from lightsecagg.field import kernels

_PACKAGES = ("numpy", "cryptography", "msgspec", "torch", "grpcio", "matplotlib", "flwr")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, load, versions and date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": load_average(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "lightsecagg": __version__,
        "kernels": kernels.backend(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""What a command needs beyond the core; asked before the command does anything."""

from __future__ import annotations

from importlib.util import find_spec

from lightsecagg.errors import MissingExtra

# extra -> its packages without which nothing works
PACKAGES = {
    "grpc": ("grpc", "pydantic"),
    "torch": ("torch",),
    "report": ("matplotlib",),
}


def require(command: str, *extras: str) -> None:
    """Refuse to begin a command whose extras are not installed."""
    missing = {
        extra: packages
        for extra in extras
        if (packages := [name for name in PACKAGES[extra] if find_spec(name) is None])
    }
    if missing:
        names = " and ".join(name for packages in missing.values() for name in packages)
        raise MissingExtra(f"{command} needs {names}", *missing)

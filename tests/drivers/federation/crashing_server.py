"""A server process for the crash tests: kills itself with SIGKILL at a chosen durable point.

    python crashing_server.py server.toml DIMENSION ROUNDS [METHOD|FACT before|after COUNT]

Not a test: `test_crashes` runs it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation import programs
from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.demo_notes import write_sum
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.observer import set_up_logging
from lightsecagg.drivers.federation.training_tables import VectorsTable


def doom(point: str, moment: str, count: int) -> None:
    """Die before or after the call of a method, or the storing of a fact, for the n-th time."""
    method = point if hasattr(Journal, point) else "store_all"
    original: Callable[..., Any] = getattr(Journal, method)
    calls = 0

    def doomed(self: Journal, number: Any, *arguments: Any) -> Any:
        nonlocal calls
        facts = (
            [fact for record in arguments[0] for fact in record.facts] if method != point else []
        )
        counts = method == point or any(type(fact).__name__ == point for fact in facts)
        calls += counts
        if counts and calls == count and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, number, *arguments)
        if counts and calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(Journal, method, doomed)


def main() -> None:
    path, dimension, rounds, *death = sys.argv[1:]
    if death:
        doom(death[0], death[1], int(death[2]))
    set_up_logging("info")
    overrides = [
        f"rounds.number={rounds}",
        "rounds.settle=8.0",
        "rounds.grace=3.0",
        "rounds.wait_for_clients=20.0",
        "rounds.retries=0",
        "rounds.upload=15.0",
        "rounds.agree=10.0",
        "rounds.recover=10.0",
    ]
    config = load_config(ServerConfig, Path(path), overrides)
    vectors = VectorsTable(dimension=int(dimension), output=Path(path).parent / "result.npz")
    config = config.model_copy(update={"training": None, "vectors": vectors})
    sums = Path(path).parent / "sums"
    sums.mkdir(exist_ok=True)
    programs.run_server(config, learned=partial(write_sum, sums))


if __name__ == "__main__":
    main()

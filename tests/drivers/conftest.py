"""What the tests of drivers share: a bounded event loop and a proxy that breaks connections."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

PROXY = Path(__file__).parents[2] / "lab/src/lightsecagg_lab/experiments/fault_proxy.py"
Scenario = Callable[[], Awaitable[None]]


@pytest.fixture
def run() -> Callable[[Scenario], None]:
    """Runs a scenario in a fresh event loop; a hang fails instead of blocking the suite."""

    def run_scenario(scenario: Scenario) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await scenario()

        asyncio.run(bounded())

    return run_scenario


@pytest.fixture(scope="session")
def fault_proxy() -> Any:
    """What breaks connections between clients and their server; the laboratory's, by its file."""
    spec = importlib.util.spec_from_file_location("fault_proxy", PROXY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.FaultProxy

"""What the tests of drivers share: a bounded event loop and a proxy that breaks connections."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

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
    """The class `FaultProxy` of `transport/fault_proxy.py`."""
    name = "tests_fault_proxy"
    path = Path(__file__).parent / "transport" / "fault_proxy.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FaultProxy

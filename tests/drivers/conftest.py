"""What the tests of drivers share: a bounded event loop and a proxy that breaks connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lightsecagg.experiments.fault_proxy import FaultProxy

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
def fault_proxy() -> type[FaultProxy]:
    """What breaks connections between clients and their server."""
    return FaultProxy

"""A bounded event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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

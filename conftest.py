"""What all tests share, here and in lab/: reproducible property tests, and both backends."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from lightsecagg import system
from lightsecagg.field import kernels

# Pytest's importlib mode leaves `sys.path` alone; `newcomer` and `sound_files` are there.
sys.path.append(str(Path(__file__).parent / "tests"))

# `backend` below is the same for every example of a property, so sharing it is sound.
_SHARED = [HealthCheck.function_scoped_fixture]
settings.register_profile(
    "quick",
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=_SHARED,
)
settings.register_profile(
    "thorough", max_examples=2000, deadline=None, suppress_health_check=_SHARED
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def _enabled_loggers() -> list[logging.Logger]:
    loggers = list(logging.Logger.manager.loggerDict.values())
    return [log for log in loggers if isinstance(log, logging.Logger) and not log.disabled]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """On Windows, or where it is played (tests/windows), leave out what it lacks."""
    if not system.UNIX and item.get_closest_marker("unix"):
        pytest.skip("Windows lacks what it tests")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Programs that a test runs in this process set up their logging for good.

    Flower's database disables all loggers that exist when it is set up.
    """
    log = logging.getLogger("lightsecagg")
    before, enabled = (log.handlers[:], log.level, log.propagate), _enabled_loggers()
    yield
    log.handlers[:], level, log.propagate = before
    log.setLevel(level)
    for each in enabled:
        each.disabled = False


@pytest.fixture(params=["numpy", "native"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each backend; `LIGHTSECAGG_KERNELS=native` makes a missing one an error."""
    name = str(request.param)
    demanded = os.environ.get("LIGHTSECAGG_KERNELS") == "native"
    if name == "native" and not demanded and not kernels.native_available():
        pytest.skip("the native library is not built")
    with kernels.using(name):
        yield name

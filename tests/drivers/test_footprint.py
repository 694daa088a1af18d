"""The forecast of the memory of a round in this process."""

from __future__ import annotations

import os

import pytest

from lightsecagg.drivers import footprint
from lightsecagg.drivers.cohort import Cohort
from lightsecagg.errors import ConfigurationError
from lightsecagg.params import Parameters, ShareMode
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.settings import Settings


def settings(parameters: Parameters, dimension: int, protocol: str = "lightsecagg") -> Settings:
    quantizer = make_quantizer(parameters, dimension, 1.0)
    return Cohort(protocol, parameters, quantizer, dimension).settings()


def test_the_main_case_fits_in_8_GB() -> None:
    seeded = footprint.forecast(settings(Parameters(200, 100, 60, 140), 1_206_590))
    assert seeded.vectors == 200 * 4 * 1_206_590
    assert seeded.shares == 200 * 60 * 4 * 30_169
    assert 2.4e9 < seeded.total < 8e9
    paper = Parameters(200, 100, 60, 140, share_mode=ShareMode.PAPER)
    assert footprint.forecast(settings(paper, 1_206_590)).shares == 200 * 200 * 4 * 30_169


def test_a_round_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = settings(Parameters(8, 2, 2), 10_000_000)
    needed = footprint.forecast(wanted).total
    monkeypatch.setattr(footprint, "available_memory", lambda: needed - 1)
    with pytest.raises(ConfigurationError, match=r"N = 8 and d = 10000000 would need about"):
        footprint.check_memory(wanted)
    monkeypatch.setattr(footprint, "available_memory", lambda: needed)
    footprint.check_memory(wanted)
    monkeypatch.setattr(footprint, "available_memory", lambda: None)
    footprint.check_memory(wanted)


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="the system does not say")
def test_the_available_memory_is_known_on_linux() -> None:
    available = footprint.available_memory()
    assert available is not None
    assert 10**8 < available < 10**14

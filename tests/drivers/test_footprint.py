"""The forecast of a simulation's memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from lightsecagg.drivers import footprint
from lightsecagg.drivers.simulation.async_lightsecagg import AsyncConfig, ProtectedFederation
from lightsecagg.drivers.simulation.scenario import Scenario
from lightsecagg.errors import ConfigurationError
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import StalenessTable, constant
from lightsecagg.params import Parameters, ShareMode
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.settings import ProtocolName, Settings


def settings(
    parameters: Parameters, dimension: int, protocol: ProtocolName = ProtocolName.LIGHTSECAGG
) -> Settings:
    return Scenario(protocol, parameters, dimension).cohort().settings()


def test_the_main_case_fits_in_8_GB() -> None:
    seeded = footprint.forecast(settings(Parameters(200, 100, 60, 140), 1_206_590))
    assert seeded.vectors == 200 * 4 * 1_206_590
    assert seeded.shares == 200 * 60 * 4 * 30_167
    assert 2.4e9 < seeded.total < 8e9
    paper = Parameters(200, 100, 60, 140, share_mode=ShareMode.PAPER)
    assert footprint.forecast(settings(paper, 1_206_590)).shares == 200 * 200 * 4 * 30_167


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


def test_the_asynchronous_mode_counts_every_mask_and_has_its_own_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = Parameters(8, 2, 2)
    once = footprint.forecast(settings(parameters, 1_000_000))
    thrice = footprint.forecast(settings(parameters, 1_000_000), masks=3)
    for name in ("vectors", "shares", "messages"):
        assert getattr(thrice, name) == 3 * getattr(once, name)
    config = AsyncConfig(
        parameters,
        Buffering(StalenessTable.from_function(constant(), 1, 4), max_updates=4),
        Quantizer(PrimeField(parameters.modulus), 1.0, 4),
        dimension=1_000_000,
        buffer_size=4,
    )
    monkeypatch.setattr(footprint, "available_memory", lambda: once.total)
    with pytest.raises(ConfigurationError, match="--stock"):
        ProtectedFederation(config, np.random.default_rng(0))


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="the system does not say")
def test_the_available_memory_is_known_on_linux() -> None:
    available = footprint.available_memory()
    assert available is not None
    assert 10**8 < available < 10**14


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not say")
@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
def test_the_forecast_is_an_honest_upper_bound(share_mode: ShareMode) -> None:
    """A real run stays below it, and comes near enough for it to mean something."""
    code = (
        "import re\n"
        "from lightsecagg.drivers.footprint import forecast\n"
        "from lightsecagg.drivers.simulation.scenario import Scenario, run\n"
        "from lightsecagg.params import Parameters\n"
        "from lightsecagg.protocol.settings import ProtocolName\n"
        f"parameters = Parameters(16, 4, 8, 8, share_mode='{share_mode}')\n"
        "scenario = Scenario(ProtocolName.LIGHTSECAGG, parameters, 1_000_000)\n"
        "needed = forecast(scenario.cohort().settings()).total\n"
        "assert next(run(scenario)).report.exact\n"
        # Not ru_maxrss: a child starts with its parent's, and a test worker may be large.
        "status = open('/proc/self/status').read()\n"
        "peak = 1024 * int(re.search(r'VmHWM:\\s*(\\d+) kB', status)[1])\n"
        "assert needed / 3 < peak < needed, (needed, peak)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()

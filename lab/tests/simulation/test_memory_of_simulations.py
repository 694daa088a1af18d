"""The forecast of a simulation's memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from lightsecagg.drivers import footprint
from lightsecagg.errors import ConfigurationError
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import StalenessTable, constant
from lightsecagg.params import Parameters, ShareMode
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.settings import Settings
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.async_lightsecagg import AsyncConfig, ProtectedFederation
from lightsecagg_lab.simulation.scenario import Scenario


def settings(parameters: Parameters, dimension: int) -> Settings:
    return Scenario(ProtocolName.LIGHTSECAGG, parameters, dimension).cohort().settings()


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


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not say")
@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
def test_the_forecast_is_an_honest_upper_bound(share_mode: ShareMode) -> None:
    """A real run stays below it, and comes near enough for it to mean something."""
    code = (
        "import re\n"
        "from lightsecagg.drivers.footprint import forecast\n"
        "from lightsecagg_lab.simulation.scenario import Scenario, run\n"
        "from lightsecagg.params import Parameters\n"
        f"parameters = Parameters(16, 4, 8, 8, share_mode='{share_mode}')\n"
        "scenario = Scenario('lightsecagg', parameters, 1_000_000)\n"
        "needed = forecast(scenario.cohort().settings()).total\n"
        "assert next(run(scenario)).report.exact\n"
        # Not ru_maxrss: a child starts with its parent's, and a test worker may be large.
        "status = open('/proc/self/status').read()\n"
        "peak = 1024 * int(re.search(r'VmHWM:\\s*(\\d+) kB', status)[1])\n"
        "assert needed / 3 < peak < needed, (needed, peak)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()

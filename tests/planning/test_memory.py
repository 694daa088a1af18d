"""Forecasts of memory, beside the limits that they stand for."""

from __future__ import annotations

import pytest

from lightsecagg.drivers.transport.communicator import Limits
from lightsecagg.drivers.transport.framing import MAX_CHUNK
from lightsecagg.params import Parameters
from lightsecagg.planning.memory import CONNECTION, WAITING, PhaseMemory, forecast_memory
from lightsecagg.planning.traffic import forecast_traffic
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.settings import ProtocolName, Settings

VECTOR = 4 * 10_000_000


def forecast(clients: int) -> dict[Phase, PhaseMemory]:
    parameters = Parameters(clients=clients, privacy=2, dropouts=2)
    settings = Settings(
        protocol=ProtocolName.LIGHTSECAGG,
        parameters=parameters,
        quantizer=make_quantizer(parameters, VECTOR // 4, 1.0),
        dimension=VECTOR // 4,
        session=bytes(32),
        round=1,
        allow_list=bytes(32),
    )
    return forecast_memory(settings, forecast_traffic(settings, ()), clients)


def test_R53_uploads_are_not_counted_in_the_servers_memory() -> None:
    few, many = forecast(10)[Phase.UPLOAD].server, forecast(100)[Phase.UPLOAD].server
    assert many - few == 90 * CONNECTION
    assert few < VECTOR + 10 * CONNECTION + WAITING + 10**8


def test_R53_the_forecast_knows_the_transports_limits() -> None:
    grpc = pytest.importorskip("lightsecagg.drivers.transport.grpc")
    assert CONNECTION == MAX_CHUNK + grpc._AHEAD
    assert Limits().memory == WAITING

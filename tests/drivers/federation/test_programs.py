"""Several clients in one process, and what a server says before it listens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lightsecagg.drivers.federation import programs
from lightsecagg.errors import Refused
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters
from lightsecagg.protocol.settings import ProtocolName, Settings


def test_a_client_that_fails_is_reported_while_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finished: list[str] = []

    class Client:
        def __init__(self, name: str, *, understood: bool) -> None:
            self.name = name

        async def run(self) -> None:
            if self.name == "refused":
                raise Refused("the certificate is another client's")
            async with asyncio.timeout(10):
                while "another client's" not in caplog.text:
                    await asyncio.sleep(0.01)
            finished.append(self.name)

    monkeypatch.setattr(programs, "build_client", Client)
    configs: Any = ["patient", "refused", "patient too"]
    with pytest.raises(Refused, match="another client's"):
        programs.run_clients(configs)
    assert sorted(finished) == ["patient", "patient too"]


@pytest.mark.parametrize(("max_samples", "coarse"), [(100_000, True), (1_000, False)])
def test_a_coarse_rounding_is_mentioned(
    caplog: pytest.LogCaptureFixture, max_samples: int, coarse: bool
) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, 1.0, 200, max_samples, weighted=True)
    settings = Settings(
        ProtocolName.PLAIN, Parameters(200, 1, 1), quantizer, 3, bytes(32), 1, bytes(32)
    )
    programs._mind_the_rounding(settings)
    assert ("lower aggregation.max_samples = 100000" in caplog.text) is coarse

"""Several clients in one process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lightsecagg.drivers.federation import programs
from lightsecagg.errors import Refused


def test_a_client_that_fails_is_reported_while_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finished: list[str] = []

    class Client:
        def __init__(self, name: str) -> None:
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

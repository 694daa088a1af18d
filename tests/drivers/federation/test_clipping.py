"""`client.clip`: large entries are cut to the bound, infinite ones keep a client out of the sum."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from small_federation import Federation, FreshVectors

from lightsecagg.protocol.interface import Update


class OneEntry(FreshVectors):
    """A client's job whose vector has one conspicuous entry; `given` is what may be summed."""

    def __init__(self, client: int, entry: float) -> None:
        super().__init__(client)
        self.entry = entry

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        vector = super().compute(model, round_number, bound).vector.copy()
        vector[3] = self.entry
        self.given[round_number][3] = np.clip(self.entry, -bound, bound)
        return Update(vector)


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_S13_a_client_clips_what_is_large_and_refuses_what_is_infinite(
    tmp_path: Path, infinite: float, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path, bound=1.0)
    federation.jobs |= {5: OneEntry(5, -7.0), 6: OneEntry(6, infinite)}
    for client in (5, 6):
        federation.client_tables[client]["clip"] = True
    # Nobody waits for client 6: the deadline is far longer than the test may take.
    (record,) = asyncio.run(federation.run(upload=600.0))
    assert record.included == [0, 1, 2, 3, 4, 5, 7]
    federation.check(record)
    assert [text for text in caplog.messages if "clipped" in text or " cut " in text] == [
        "client 5: round 1: 2.7 % of the entries were clipped to the bound 1; if training stalls, "
        "raise it"
    ]

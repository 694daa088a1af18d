"""The transports of the laboratory, each driven as a federation drives it."""

from __future__ import annotations

import pytest

from lightsecagg_lab.experiments.transport import TransportCell


@pytest.mark.parametrize("method", ["grpc-communicator", "torch-rpc-communicator"])
def test_every_batch_is_acknowledged_through_the_interface(method: str) -> None:
    document = TransportCell(method, messages=5, size=100_000, tries=2).measure()
    assert len(document["seconds"]) == 2
    assert min(document["seconds"]) > 0

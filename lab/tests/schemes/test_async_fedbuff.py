"""FedBuff's unprotected buffer: the baseline of the asynchronous mode."""

from __future__ import annotations

import numpy as np
import pytest

from lightsecagg.errors import DecodeError, InputRefused, ParameterError, RemoteProtocolError
from lightsecagg.field.staleness import constant, hinge, polynomial
from lightsecagg.protocol.interface import Update
from lightsecagg_lab.schemes.fedbuff import FedBuffClient, FedBuffServer, PlainUpload


def upload(client: int, value: float, version: int) -> PlainUpload:
    made = FedBuffClient(client).set_input(Update(np.full(3, value)), version)
    return PlainUpload.from_bytes(made.to_bytes())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (constant(), (1.0 + 5.0 + 9.0) / 3),
        (polynomial(1.0), (1.0 / 3 + 5.0 / 2 + 9.0) / (1 / 3 + 1 / 2 + 1)),
        (hinge(1.0, 1), (1.0 / 2 + 5.0 + 9.0) / (1 / 2 + 1 + 1)),
    ],
)
def test_the_mean_is_discounted_by_real_staleness(function: object, expected: float) -> None:
    server = FedBuffServer(3, 3, function, 5)  # type: ignore[arg-type]
    server.time = 2
    assert server.receive(0, upload(0, 1.0, 0)) == []
    assert server.receive(1, upload(1, 5.0, 1)) == []
    (result,) = server.receive(2, upload(2, 9.0, 2))
    assert (result.time, result.owners, result.staleness) == (2, (0, 1, 2), (2, 1, 0))
    np.testing.assert_allclose(result.mean, expected)
    assert server.time == 3


def test_an_owner_counts_once_per_buffer() -> None:
    server = FedBuffServer(3, 2, constant(), 5)
    assert server.receive(0, upload(0, 1.0, 0)) == []
    assert server.receive(0, upload(0, 2.0, 0)) == []
    (first,) = server.receive(1, upload(1, 3.0, 0))
    np.testing.assert_allclose(first.mean, 2.0)
    (second,) = server.receive(1, upload(1, 4.0, 1))
    np.testing.assert_allclose(second.mean, 3.0)


def test_what_is_too_stale_is_dropped() -> None:
    server = FedBuffServer(3, 2, constant(), 1)
    server.receive(0, upload(0, 1.0, 0))
    server.time = 2
    assert server.receive(1, upload(1, 2.0, 2)) == []
    (result,) = server.receive(2, upload(2, 4.0, 1))
    assert result.owners == (1, 2)


def test_bad_uploads_are_refused() -> None:
    server = FedBuffServer(3, 2, constant(), 1)
    with pytest.raises(RemoteProtocolError, match="2 entries instead of 3"):
        server.receive(0, PlainUpload(0, np.ones(2, dtype=np.float32)))
    with pytest.raises(RemoteProtocolError, match="of the future"):
        server.receive(0, upload(0, 1.0, 1))
    with pytest.raises(InputRefused, match="NaN"):
        FedBuffClient(0).set_input(Update(np.full(3, np.nan)), 0)
    with pytest.raises(ParameterError):
        FedBuffServer(3, 0, constant(), 1)


def test_S12_bytes_that_are_no_upload_are_refused() -> None:
    data = upload(0, 1.0, 7).to_bytes()
    assert PlainUpload.from_bytes(data).version == 7
    for bad in (b"", data[:-1], data + b"\0"):
        with pytest.raises(DecodeError):
            PlainUpload.from_bytes(bad)

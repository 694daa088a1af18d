"""What must not be seen: no secret in logs, errors, metrics or reports, no update on the wire."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_federation import Federation

from laboratory import baseline
from lightsecagg.crypto import entropy
from lightsecagg.drivers.federation.observer import JsonFormatter
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import Update
from lightsecagg.session.envelope import RoundModel, unpack
from lightsecagg.session.record import RoundRecord
from memory_transport import MemoryServer

# A model of one number, repeated: whoever sees it anywhere sees the update.
CANARY = 0.7853981633974483
SAMPLES = 48_611


class CanaryVectors:
    """A client's job whose update, and whose failures, are full of canaries."""

    dimension = 400

    def __init__(self, client: int, fails: str = "") -> None:
        self.client, self.fails = client, fails

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        vector = np.full(self.dimension, CANARY) + 1e-9 * round_number
        match self.fails:
            case "foreign":
                raise ValueError(f"bad batch {vector[:3]} of {SAMPLES} samples")
            case "range":
                vector[7] = 1234.5678
            case "nan":
                vector[7] = np.nan
        return Update(vector, SAMPLES)


def canaries(federation: Federation, drawn: list[bytes]) -> dict[str, list[bytes]]:
    """Everything secret, in every form in which it could be printed or sent."""
    secrets = [key.private_bytes() for key in federation.identities.values()] + drawn
    text = [repr(secret)[2:-1].encode() for secret in secrets]
    numbers = [f"{CANARY:.6f}", str(CANARY), str(np.float32(CANARY)), "1234.56"]
    doubles = np.array([CANARY]).tobytes(), np.array([CANARY], np.float32).tobytes()
    return {
        "keys and seeds": [*secrets, *(s.hex().encode() for s in secrets), *text],
        "the update": [*(n.encode() for n in numbers), *doubles],
    }


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every byte string that parties draw: ephemeral keys, mask seeds, share seeds."""
    taken: list[bytes] = []
    original = entropy.os.urandom

    def urandom(count: int) -> bytes:
        data = original(count)
        if count >= 32:
            taken.append(data[:32])
        return data

    monkeypatch.setattr(entropy.os, "urandom", urandom)
    return taken


def fetch(port: int, page: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}") as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("protocol", ["lightsecagg", baseline("secagg")])
def test_S22_no_secret_in_logs_metrics_reports_or_journal(
    tmp_path: Path,
    protocol: str,
    drawn: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    federation = Federation(tmp_path / "state", protocol=protocol)
    federation.job.weighted = True
    for client in range(8):
        federation.jobs[client] = CanaryVectors(client)
    federation.jobs[1] = CanaryVectors(1, "foreign")
    federation.jobs[2] = CanaryVectors(2, "range")
    federation.job.dimension = CanaryVectors.dimension
    federation.metrics.serve(0)
    seen: dict[str, bytes] = {}
    original = federation.metrics.record

    def record_and_look(record: RoundRecord) -> None:
        original(record)
        for page in ("metrics", "health"):
            seen[page] = fetch(federation.metrics.port, page)

    federation.metrics.record = record_and_look  # type: ignore[method-assign]
    with caplog.at_level(logging.DEBUG):
        records = asyncio.run(federation.run(number=2))
    assert [record.included for record in records] == [[0, 3, 4, 5, 6, 7]] * 2
    formatter = JsonFormatter()
    lines = [formatter.format(item) for item in caplog.records]
    seen["log"] = "\n".join(lines).encode()
    seen["report"] = json.dumps([record.to_json() for record in records]).encode()
    for path in sorted((tmp_path / "state").rglob("*")):
        if path.is_file() and path.parent.name != "models":  # there the sum is, by design
            seen[path.name] = path.read_bytes()
    assert drawn, "nothing was drawn: the capture of randomness does not work"
    assert b"sits round 1 out" in seen["log"]
    assert b"ValueError at test_secrets.py:" in seen["log"]
    for place, content in seen.items():
        for kind, forms in canaries(federation, drawn).items():
            found = [form for form in forms if form in content]
            assert not found, f"{kind} in {place}: {found[:3]}"
    # The sum of all sample counts is public; nobody's own is.
    assert not re.search(rf"(?<![\d.]){SAMPLES}(?![\d.])", "\n".join(lines))
    assert records[0].samples == 6 * SAMPLES
    assert b'lightsecagg_rounds_total{outcome="done"} 2.0' in seen["metrics"]
    assert b"lightsecagg_dropouts_total{phase=" in seen["metrics"]
    assert json.loads(seen["health"])["status"] == "ok"


class Tapped(MemoryServer):
    """Keeps a copy of everything that passes."""

    def __init__(self, clients: range) -> None:
        super().__init__(clients)
        self.captured: list[bytes] = []

    async def send(self, client: int, data: bytes) -> None:
        self.captured.append(bytes(data))
        await super().send(client, data)

    async def events(self) -> Any:
        async for event in super().events():
            if hasattr(event, "data"):
                self.captured.append(bytes(event.data))
            yield event


@pytest.mark.parametrize(
    ("protocol", "leaks"),
    [("lightsecagg", False), baseline("secagg", False), baseline("plain", True)],
)
def test_S16_the_wire_carries_no_trace_of_the_update(
    tmp_path: Path, drawn: list[bytes], protocol: str, leaks: bool
) -> None:
    """The canary in every form, quantised too; plain summation shows that it would be found."""
    federation = Federation(
        tmp_path,
        transport=Tapped(range(8)),
        protocol=protocol,
        threat_model=ThreatModel.HONEST_BUT_CURIOUS,
        max_samples=100_000,
    )
    federation.job.weighted = True
    federation.job.dimension = CanaryVectors.dimension
    for client in range(8):
        federation.jobs[client] = CanaryVectors(client)
    (record,) = asyncio.run(federation.run())
    assert record.included == list(range(8))
    assert record.samples == 8 * SAMPLES
    wire = b"\n".join(federation.transport.captured)
    assert len(wire) > 8 * 4 * CanaryVectors.dimension
    quantised = int(CANARY * SAMPLES / record.quantisation_step)
    forms = canaries(federation, drawn)
    forms["the sample count"] = [np.array([SAMPLES], "<u4").tobytes()]
    forms["the quantised entry"] = [np.array([quantised + k], "<u4").tobytes() for k in range(3)]
    found = {kind for kind, each in forms.items() if any(form in wire for form in each)}
    assert found == ({"the sample count", "the quantised entry"} if leaks else set())


def test_S16_a_withdrawal_says_nothing_about_the_update(tmp_path: Path) -> None:
    """An entry out of range is refused locally; how far out it was is nobody's business."""
    federation = Federation(tmp_path, transport=Tapped(range(8)))
    federation.job.weighted = True
    federation.job.dimension = CanaryVectors.dimension
    for client in range(8):
        federation.jobs[client] = CanaryVectors(client)
    federation.jobs[4] = CanaryVectors(4, "range")
    federation.jobs[5] = CanaryVectors(5, "nan")
    (record,) = asyncio.run(federation.run())
    assert record.included == [0, 1, 2, 3, 6, 7]
    withdrawals = [data for data in federation.transport.captured if b"Withdraw" in data]
    assert len(withdrawals) == 2
    for data in withdrawals:
        assert unpack(data).reason == "it has no update to upload"  # type: ignore[union-attr]
        assert b"1234" not in data


def test_messages_show_no_model_when_printed() -> None:
    assert "785" not in repr(RoundModel(1, b"0.785" * 10, 1.0))

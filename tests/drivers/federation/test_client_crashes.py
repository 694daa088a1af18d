"""R32: kill -9 of a client process in every phase, over real sockets and TLS."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation

from lightsecagg.protocol.messages import Message
from lightsecagg.protocol.server import Server
from lightsecagg.session.record import RoundRecord

SCRIPT = Path(__file__).with_name("doomed_client.py")
VICTIM = 5

# One death per round, in this order.
DEATHS = [
    ("Advertise", "before"),
    ("Advertise", "after"),
    ("ShareBundle", "before"),
    ("ShareBundle", "after"),
    ("MaskedUpload", "before"),
    ("MaskedUpload", "after"),
    ("Consent", "before"),
    ("Consent", "after"),
    ("AggregatedShare", "before"),
    ("AggregatedShare", "after"),
]


@pytest.mark.slow
def test_R32_a_client_killed_in_every_phase_joins_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N - D = U = 5 remain, so every round completes; the victim is back in the round after."""
    heard: dict[tuple[int, str], list[Message]] = defaultdict(list)
    original = Server.receive

    def receive(self: Server, sender: int, message: Message) -> Any:
        if sender == VICTIM:
            heard[self.settings.round, type(message).__name__].append(message)
        return original(self, sender, message)

    monkeypatch.setattr(Server, "receive", receive)
    federation = NetworkFederation(tmp_path)
    rounds = len(DEATHS)
    exits: list[int | None] = []

    async def die_and_return() -> None:
        command = [sys.executable, str(SCRIPT), str(federation.made.clients[VICTIM]), str(VICTIM)]
        with (tmp_path / "victim.log").open("wb") as log:
            for number, (message, moment) in enumerate(DEATHS, 1):
                death = (message, moment, str(number))
                await finish(subprocess.Popen([*command, *death], stdout=log, stderr=log))

    async def finish(process: subprocess.Popen[bytes]) -> None:
        try:
            exits.append(await asyncio.to_thread(process.wait, 60))
        finally:
            process.kill()
            process.wait()

    async def scenario() -> list[RoundRecord]:
        server = federation.server(number=rounds, min_clients=6, wait_for_clients=60)
        clients = [asyncio.create_task(federation.client(i).run()) for i in range(VICTIM)]
        victim = asyncio.create_task(die_and_return())
        try:
            records = await asyncio.wait_for(server.run(), 240)
            await asyncio.wait_for(asyncio.gather(*clients, victim), 30)
            return records
        finally:
            for task in (*clients, victim):
                task.cancel()
            await asyncio.gather(*clients, victim, return_exceptions=True)

    records = asyncio.run(scenario())
    assert exits == [-9] * rounds
    assert [record.aborted for record in records] == [None] * rounds
    for record, (message, moment) in zip(records, DEATHS, strict=True):
        assert record.invited == list(range(6)), "the victim is there again"
        assert set(record.included) >= set(range(VICTIM))
        delivered = message in ("Consent", "AggregatedShare") or (
            (message, moment) == ("MaskedUpload", "after")
        )
        assert (VICTIM in record.included) == delivered
        answered = (message, moment) == ("AggregatedShare", "after")
        assert (VICTIM in record.responders) == answered
    federation.check(records[-1])
    # Never two uploads or answers in one round, identical or not.
    for (number, kind), messages in heard.items():
        if kind != "ShareBundle":
            assert len(messages) == 1, (number, kind)

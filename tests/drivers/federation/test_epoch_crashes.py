"""R31, R32: kill -9 of server and client processes in the asynchronous mode, over sockets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from network_federation import DIMENSION, NetworkFederation, contribution

from lightsecagg.protocol.messages import MaskedUpload, Message
from lightsecagg.protocol.server import Server
from lightsecagg.session.record import RoundRecord

SERVER = Path(__file__).with_name("crashing_server.py")
CLIENT = Path(__file__).with_name("doomed_client.py")

SERVER_DEATHS = [
    ("store_all", "after", 1),  # the roster is stored, nobody has it
    ("store_all", "before", 5),  # masks are being shared
    ("store_all", "after", 14),  # uploads wait, or a buffer is about to be announced
    ("advance", "before", 1),  # a sum is recovered, its model is not stored
    ("advance", "after", 1),  # the model is stored, nobody knows
]
CLIENT_DEATHS = [
    ("ShareBundle", "after"),
    ("MaskedUpload", "before"),
    ("MaskedUpload", "after"),
    ("Consent", "after"),
    ("AggregatedShare", "before"),
]
VICTIM = 5


def check_sums(records: list[dict[str, Any]], sums: Path) -> None:
    """Every recovered mean is exact; no update of an owner and a version is in two of them."""
    done = [record for record in records if record["aborted"] is None]
    pairs: Counter[tuple[int, int]] = Counter()
    for record in done:
        summed = list(zip(record["included"], record["versions"], strict=True))
        pairs.update(summed)
        expected = np.average([contribution(*each) for each in summed], 0, record["weights"])
        with np.load(sums / f"average-{record['round']}.npz") as stored:
            step = record["quantisation_step"]
            np.testing.assert_allclose(stored["average"], expected, atol=step)
    assert max(pairs.values()) == 1
    numbers = [record["round"] for record in done]
    assert len(set(numbers)) == len(numbers), "one model per version"


@pytest.mark.slow
def test_R31_an_asynchronous_server_killed_at_its_durable_points_resumes(tmp_path: Path) -> None:
    federation = NetworkFederation(tmp_path, clients=5, dropouts=1, buffer=3)
    buffers = 4
    command = [sys.executable, str(SERVER), str(federation.made.server), str(DIMENSION)]
    exits: list[int] = []

    async def scenario() -> None:
        clients = [asyncio.create_task(federation.client(i).run()) for i in range(5)]
        try:
            with (tmp_path / "server.log").open("wb") as log:
                for death in [*SERVER_DEATHS, ()]:
                    arguments = [str(buffers), *map(str, death)]
                    process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
                    try:
                        exits.append(await asyncio.to_thread(process.wait, 100))
                    finally:
                        process.kill()
                        process.wait()
            await asyncio.wait_for(asyncio.gather(*clients), 30)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    asyncio.run(scenario())
    assert exits == [-9] * len(SERVER_DEATHS) + [0]
    folder = federation.made.server.parent
    records = [json.loads(line) for line in _lines(folder / "state" / "rounds.json")]
    assert len(records) >= buffers - 1, "the record of a buffer may be lost, its model is not"
    check_sums(records, folder / "sums")
    assert not list((folder / "state" / "uploads").iterdir()), "nothing is left behind"


def _lines(path: Path) -> list[str]:
    document = json.loads(path.read_text())
    return [json.dumps(record) for record in document]


@pytest.mark.slow
def test_R32_a_client_killed_in_every_state_uploads_and_answers_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins the next epoch each time; its updates of one version are never in two sums."""
    uploads: Counter[tuple[bytes, int]] = Counter()
    versions: Counter[int] = Counter()
    original = Server.receive

    def receive(self: Server, sender: int, message: Message) -> Any:
        if sender == VICTIM and isinstance(message, MaskedUpload):
            uploads[self.settings.context, message.tag.serial] += 1
            versions[message.tag.version] += 1
        return original(self, sender, message)

    monkeypatch.setattr(Server, "receive", receive)
    federation = NetworkFederation(tmp_path, clients=6, dropouts=1, buffer=3)
    command = [sys.executable, str(CLIENT), str(federation.made.clients[VICTIM]), str(VICTIM)]
    exits: list[int] = []

    async def die_and_return() -> None:
        with (tmp_path / "victim.log").open("wb") as log:
            for message, moment in CLIENT_DEATHS:
                death = (message, moment, "any")
                process = subprocess.Popen([*command, *death], stdout=log, stderr=log)
                try:
                    exits.append(await asyncio.to_thread(process.wait, 60))
                finally:
                    process.kill()
                    process.wait()

    async def scenario() -> list[RoundRecord]:
        server = federation.server(number=10_000, settings=["buffering.renew=1"], sums=tmp_path)
        running = asyncio.create_task(server.run())
        clients = [asyncio.create_task(federation.client(i).run()) for i in range(VICTIM)]
        try:
            await die_and_return()
            server.stop()
            return await asyncio.wait_for(running, 60)
        finally:
            for task in (running, *clients):
                task.cancel()
            await asyncio.gather(running, *clients, return_exceptions=True)

    records = asyncio.run(scenario())
    assert exits == [-9] * len(CLIENT_DEATHS)
    check_sums([record.to_json() for record in records], tmp_path)
    assert len({record.epoch for record in records}) > 1
    assert uploads
    assert max(uploads.values()) == max(versions.values()) == 1

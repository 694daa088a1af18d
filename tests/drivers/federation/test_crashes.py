"""R31: kill -9 of the server at every durable point, over real sockets and TLS."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, load_config
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.programs import build_client
from lightsecagg.drivers.federation.provisioning import Provisioned, provision
from lightsecagg.protocol.interface import Update
from lightsecagg.session.envelope import UploadStored, name_of, unpack
from lightsecagg.session.interface import Event, Received

CLIENTS, DIMENSION = 6, 23
SCRIPT = Path(__file__).with_name("crashing_server.py")


@dataclass
class Contribution:
    """A client's job: another vector in every round."""

    client: int
    dimension: int | None = DIMENSION
    given: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        rng = np.random.default_rng([self.client, round_number])
        self.given[round_number] = rng.uniform(-1, 1, DIMENSION)
        return Update(self.given[round_number])


class WatchedClient(FederationClient):
    """Notes for which rounds the server has acknowledged its upload."""

    acknowledged: set[int]

    async def _tell(self, event: Event) -> None:
        if isinstance(event, Received):
            message = unpack(event.data)
            if isinstance(message, UploadStored):
                self.acknowledged.add(message.round)
        await super()._tell(event)


class Setting:
    """A provisioned federation whose clients live in this process."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.made: Provisioned = provision(
            folder / "federation", CLIENTS, privacy=1, dropouts=1, port=port
        )
        self.state = self.made.server.parent / "state"
        self.jobs = {client: Contribution(client) for client in range(CLIENTS)}
        self.clients: dict[int, WatchedClient] = {}
        self.servers: list[subprocess.Popen[bytes]] = []

    def client(self, client: int, kind: type[WatchedClient] = WatchedClient) -> WatchedClient:
        overrides = ["client.overlap=thread", "client.reconnect=60.0"]
        config = load_config(ClientConfig, self.made.clients[client], overrides)
        made = build_client(config, kind, job=self.jobs[client])
        assert isinstance(made, WatchedClient)
        made.acknowledged = set()
        self.clients[client] = made
        return made

    def start_server(self, rounds: int, *death: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(SCRIPT), str(self.made.server), str(DIMENSION), str(rounds)]
        with (self.state.parent / "server.log").open("ab") as log:
            process = subprocess.Popen([*command, *death], stderr=log, stdout=log)
        self.servers.append(process)
        return process

    def announced(self) -> dict[int, tuple[int, ...]]:
        """Round -> U1, as it stands on disk."""
        journal = Journal(self.state, self.made.session.hex())
        try:
            sets = {number: journal.announced(number) for number in range(1, journal.next_round())}
        finally:
            journal.close()
        return {number: survivors for number, survivors in sets.items() if survivors is not None}

    def close(self) -> None:
        for process in self.servers:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.close()


async def crash_and_restart(setting: Setting, death: tuple[str, str, str]) -> dict[str, Any]:
    """One round during which the server dies once; returns what stood on disk at that moment."""
    tasks = [asyncio.create_task(setting.client(client).run()) for client in range(CLIENTS)]
    try:
        first = setting.start_server(1, *death)
        assert await asyncio.wait_for(asyncio.to_thread(first.wait), 40) == -9
        found = {
            "announced": setting.announced(),
            "acknowledged": {
                client: set(party.acknowledged) for client, party in setting.clients.items()
            },
        }
        second = setting.start_server(1)
        assert await asyncio.wait_for(asyncio.to_thread(second.wait), 60) == 0, (
            setting.state.parent / "server.log"
        ).read_text()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        return found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


POINTS = [
    ("open_round", "after", "1"),
    ("SharingClosed", "before", "1"),
    ("SharingClosed", "after", "1"),
    ("UploadWaits", "before", "2"),
    ("UploadWaits", "after", "1"),
    ("UploadWaits", "after", "2"),
    ("SumAnnounced", "before", "1"),
    ("SumAnnounced", "after", "1"),
    ("SumAgreed", "before", "1"),
    ("SumAgreed", "after", "1"),
    ("complete", "before", "1"),
    ("complete", "after", "1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("death", POINTS, ids=lambda death: "-".join(death))
def test_R31_server_killed_at_every_durable_point(
    setting: Setting, death: tuple[str, str, str]
) -> None:
    found = asyncio.run(crash_and_restart(setting, death))
    records = json.loads((setting.state / "rounds.json").read_text())
    done = [record for record in records if record["aborted"] is None]
    (record,) = done
    number, included = record["round"], record["included"]
    if death[:2] == ("complete", "after"):
        # The model was safe: the round is not run, nor applied, again, and the journal tells of it.
        assert record["recalled"]
        assert found["announced"] == {number: tuple(included)}
        return
    # An announced U1 never changes, and no acknowledged upload is lost.
    for old, survivors in found["announced"].items():
        assert (old, list(survivors)) == (number, included)
    for client, rounds in found["acknowledged"].items():
        assert not rounds or number not in rounds or client in included
    assert record["resumed"] is (death[0] not in ("open_round", "SharingClosed"))
    with np.load(setting.made.server.parent / "result.npz") as stored:
        result = stored["result"]
    expected = np.sum([setting.jobs[client].given[number] for client in included], axis=0)
    np.testing.assert_allclose(result, expected, atol=len(included) * record["quantisation_step"])


class SameVector(Contribution):
    """As of a client whose file nobody replaces."""

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        return super().compute(model, 1, bound)


class GoneBeforeConsent(WatchedClient):
    """Its upload is stored; it never says with whom it may be summed."""

    gone: asyncio.Event

    async def _post(self, data: bytes) -> None:
        if name_of(data) == "Consent":
            self.gone.set()
            await asyncio.Event().wait()
        await super()._post(data)


@pytest.mark.slow
def test_S06_R31_a_restarted_server_tells_a_client_that_was_away_that_its_vector_is_spent(
    setting: Setting,
) -> None:
    """Client and server die: only the journal knows that the others were summed with it."""
    victim = 5

    async def scenario() -> None:
        setting.jobs[victim] = SameVector(victim)
        doomed = setting.client(victim, GoneBeforeConsent)
        assert isinstance(doomed, GoneBeforeConsent)
        doomed.gone = asyncio.Event()
        others = [asyncio.create_task(setting.client(i).run()) for i in range(victim)]
        dying = asyncio.create_task(doomed.run())
        again = None
        try:
            first = setting.start_server(2, "complete", "after", "1")
            await asyncio.wait_for(doomed.gone.wait(), 60)
            dying.cancel()
            await asyncio.gather(dying, return_exceptions=True)
            assert await asyncio.wait_for(asyncio.to_thread(first.wait), 60) == -9
            again = asyncio.create_task(setting.client(victim).run())
            second = setting.start_server(2)
            assert await asyncio.wait_for(asyncio.to_thread(second.wait), 90) == 0
            await asyncio.wait_for(asyncio.gather(*others, again), 30)
        finally:
            tasks = [*others, dying, *([again] if again else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    first, second = json.loads((setting.state / "rounds.json").read_text())
    assert (first["included"], first["recalled"]) == (list(range(CLIENTS)), True)
    assert second["included"] == list(range(victim))
    assert second["withdrawn"] == {"it has no update to upload": [victim]}

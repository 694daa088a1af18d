"""Whole federations over the in-process transport, with plain vectors (no torch)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import (
    AggregationTable,
    ClientTable,
    RoundsTable,
    VectorsTable,
)
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.observer import RoundRecord
from lightsecagg.drivers.federation.server import FederationServer
from lightsecagg.drivers.transport.memory import MemoryServer
from lightsecagg.errors import Aborted
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.settings import AllowList, ProtocolName

SESSION = bytes(range(32))
DIMENSION = 37


class FreshVectors:
    """A client's job: another vector in every round, so that none is spent twice."""

    dimension = DIMENSION

    def __init__(self, client: int, fail_in: int | None = None) -> None:
        self.client, self.fail_in = client, fail_in
        self.given: dict[int, np.ndarray[Any, Any]] = {}

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        if round_number == self.fail_in:
            raise Aborted("the job failed")
        rng = np.random.default_rng([self.client, round_number])
        self.given[round_number] = rng.uniform(-1, 1, DIMENSION)
        return Update(self.given[round_number])


class Federation:
    """A server and its clients in one event loop."""

    def __init__(self, folder: Path, clients: int = 8, **aggregation: Any) -> None:
        self.identities = {i: IdentityKey.generate() for i in range(clients)}
        self.allow_list = AllowList({i: key.public for i, key in self.identities.items()})
        self.aggregation = AggregationTable(
            **({"clients": clients, "privacy": 2, "dropouts": 2} | aggregation)
        )
        self.transport = MemoryServer(range(clients))
        self.job = VectorServer(VectorsTable(dimension=DIMENSION))
        self.folder = folder
        self.jobs = {i: FreshVectors(i) for i in range(clients)}

    def server(self, **rounds: Any) -> FederationServer:
        defaults = {"number": 1, "settle": 0.05, "grace": 0.2, "wait_for_clients": 5, "retries": 0}
        table = RoundsTable(**(defaults | {"upload": 5, "agree": 2, "recover": 2} | rounds))
        return FederationServer(
            self.aggregation,
            table,
            SESSION,
            self.allow_list,
            self.transport,
            self.job,
            Journal(self.folder, SESSION.hex()),
        )

    def client(self, i: int, **table: Any) -> FederationClient:
        defaults: dict[str, Any] = {
            "id": i,
            "identity": Path("unused"),
            "overlap": "thread",
            "reconnect": 3,
            "protocols": (self.aggregation.protocol,),
            "threat_model": self.aggregation.threat_model,
        }
        return FederationClient(
            ClientTable(**(defaults | table)),
            SESSION,
            self.identities[i],
            self.allow_list,
            self.transport.client(i),
            self.jobs[i],
        )

    async def run(self, *, clients: list[int] | None = None, **rounds: Any) -> list[RoundRecord]:
        present = list(self.jobs) if clients is None else clients
        tasks = [asyncio.create_task(self.client(i).run()) for i in present]
        try:
            return await asyncio.wait_for(self.server(**rounds).run(), 30)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def expected(self, record: RoundRecord) -> np.ndarray[Any, Any]:
        return np.sum([self.jobs[i].given[record.round] for i in record.included], axis=0)

    def check(self, record: RoundRecord) -> None:
        assert record.aborted is None
        assert self.job.result is not None
        tolerance = record.quantisation_step * len(record.included)
        np.testing.assert_allclose(self.job.result, self.expected(record), atol=tolerance)


@pytest.mark.parametrize(
    ("protocol", "threat_model"),
    [
        (ProtocolName.LIGHTSECAGG, ThreatModel.MALICIOUS_SERVER),
        (ProtocolName.LIGHTSECAGG, ThreatModel.HONEST_BUT_CURIOUS),
        (ProtocolName.SECAGG, ThreatModel.MALICIOUS_SERVER),
        (ProtocolName.PLAIN, ThreatModel.HONEST_BUT_CURIOUS),
    ],
)
def test_three_rounds_sum_everybody(
    tmp_path: Path, protocol: ProtocolName, threat_model: ThreatModel
) -> None:
    federation = Federation(tmp_path, protocol=protocol, threat_model=threat_model)
    records = asyncio.run(federation.run(number=3))
    assert [record.round for record in records] == [1, 2, 3]
    assert all(record.included == list(range(8)) for record in records)
    federation.check(records[-1])


def test_clients_that_never_connect_are_not_waited_for(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    (record,) = asyncio.run(federation.run(clients=[0, 1, 2, 4, 5, 7]))
    assert record.included == [0, 1, 2, 4, 5, 7]
    federation.check(record)


def test_a_client_whose_training_fails_sits_the_round_out(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.jobs[3].fail_in = 1
    records = asyncio.run(federation.run(number=2, upload=1.0))
    assert 3 not in records[0].included
    assert 3 in records[1].included
    federation.check(records[-1])


def test_R35_too_few_clients_end_in_an_explained_abort(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    with pytest.raises(Aborted, match=r"only 3 clients connected within 0\.3 s, 6 are needed"):
        asyncio.run(federation.run(clients=[0, 1, 2], wait_for_clients=0.3))

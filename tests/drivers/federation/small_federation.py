"""A whole federation in one event loop, over the in-process transport and with plain vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.aggregation import make_settings
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.observer import Metrics
from lightsecagg.drivers.federation.server import FederationServer
from lightsecagg.drivers.federation.tables import AggregationTable, ClientTable, RoundsTable
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import Aborted
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.session.record import RoundRecord
from memory_transport import MemoryServer

SESSION = bytes(range(32))
DIMENSION = 37


class FreshVectors:
    """A client's job: another vector in every round, so that none is spent twice."""

    def __init__(self, client: int, fail_in: int | None = None, dimension: int = DIMENSION) -> None:
        self.client, self.fail_in, self.dimension = client, fail_in, dimension
        self.given: dict[int, np.ndarray[Any, Any]] = {}

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        if round_number == self.fail_in:
            raise Aborted("the job failed")
        rng = np.random.default_rng([self.client, round_number])
        self.given[round_number] = rng.uniform(-1, 1, self.dimension)
        return Update(self.given[round_number])


class Federation:
    """A server and its clients in one event loop."""

    def __init__(
        self,
        folder: Path,
        clients: int = 8,
        *,
        dimension: int = DIMENSION,
        transport: Any = None,
        **aggregation: Any,
    ) -> None:
        self.identities = {i: IdentityKey.generate() for i in range(clients)}
        self.allow_list = AllowList({i: key.public for i, key in self.identities.items()})
        self.aggregation = AggregationTable(
            **({"clients": clients, "privacy": 2, "dropouts": 2} | aggregation)
        )
        self.transport = transport or MemoryServer(range(clients))
        self.job: Any = VectorServer(VectorsTable(dimension=dimension))
        self.metrics = Metrics()
        self.folder = folder
        self.jobs: dict[int, Any] = {i: FreshVectors(i, None, dimension) for i in range(clients)}
        self.ledgers: dict[int, Ledger] = {}
        """As if on disk: a client that is made again has the same."""
        self.awaited = clients
        """How many clients the first round waits for."""
        self.client_tables: dict[int, dict[str, Any]] = {i: {} for i in range(clients)}

    def server(self, **rounds: Any) -> FederationServer:
        defaults: dict[str, Any] = {"number": 1, "settle": 0.05, "grace": 0.2, "retries": 0}
        defaults |= {"wait_for_clients": 10, "min_clients": self.awaited}
        table = RoundsTable(**(defaults | {"upload": 5, "agree": 2, "recover": 2} | rounds))
        return FederationServer(
            make_settings(self.aggregation, self.job, SESSION, self.allow_list),
            table,
            self.allow_list,
            self.transport,
            self.job,
            Journal(self.folder, SESSION.hex()),
            self.metrics,
        )

    def client(
        self,
        i: int,
        kind: Callable[..., FederationClient] = FederationClient,
        communicator: Any = None,
        **table: Any,
    ) -> FederationClient:
        defaults: dict[str, Any] = {
            "id": i,
            "identity": Path("unused"),
            "bound": self.aggregation.bound,
            "overlap": "thread",
            "reconnect": 3,
            "protocols": (self.aggregation.protocol,),
            "threat_model": self.aggregation.threat_model,
        }
        return kind(
            ClientTable(**(defaults | self.client_tables[i] | table)),
            SESSION,
            self.identities[i],
            self.allow_list,
            communicator or self.transport.client(i),
            self.jobs[i],
            self.ledgers.setdefault(i, Ledger.volatile()),
        )

    @asynccontextmanager
    async def connected(self, clients: Iterable[FederationClient]) -> Any:
        """These clients run while the block does."""
        tasks = [asyncio.create_task(client.run()) for client in clients]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run(
        self, *, clients: Iterable[int] | None = None, **rounds: Any
    ) -> list[RoundRecord]:
        present = list(self.jobs) if clients is None else list(clients)
        self.awaited = len(present)
        async with self.connected([self.client(i) for i in present]):
            return await asyncio.wait_for(self.server(**rounds).run(), 120)

    def expected(self, record: RoundRecord) -> np.ndarray[Any, Any]:
        return np.sum([self.jobs[i].given[record.round] for i in record.included], axis=0)

    def check(self, record: RoundRecord) -> None:
        assert record.aborted is None
        assert self.job.result is not None
        tolerance = record.quantisation_step * len(record.included)
        np.testing.assert_allclose(self.job.result, self.expected(record), atol=tolerance)

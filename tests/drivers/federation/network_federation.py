"""A provisioned federation over real sockets and TLS: the server here, clients anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.demo_notes import write_sum
from lightsecagg.drivers.federation.programs import build_client, build_server
from lightsecagg.drivers.federation.provisioning import Provisioned, free_port, provision
from lightsecagg.drivers.federation.server import FederationServer
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.params import ShareMode
from lightsecagg.protocol.interface import Update
from lightsecagg.session.record import RoundRecord

DIMENSION = 23


def contribution(client: int, round_number: int) -> np.ndarray[Any, Any]:
    """Another vector per client and round; the same in whatever process it is asked for."""
    return np.random.default_rng([client, round_number]).uniform(-1, 1, DIMENSION)


@dataclass
class Contribution:
    """A client's job."""

    client: int
    dimension: int | None = DIMENSION
    given: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        self.given[round_number] = contribution(self.client, round_number)
        return Update(self.given[round_number])


class NetworkFederation:
    """Files of a federation, and its parties on demand."""

    def __init__(
        self,
        folder: Path,
        clients: int = 6,
        privacy: int = 1,
        dropouts: int = 1,
        survivors: int = 0,
        *,
        weighted: bool = False,
        share_mode: ShareMode | None = None,
        buffer: int | None = None,
    ) -> None:
        """With a `buffer` of so many updates it is asynchronous."""
        self.weighted = weighted
        self.made: Provisioned = provision(
            folder / "federation",
            clients,
            privacy=privacy,
            dropouts=dropouts,
            survivors=survivors,
            share_mode=share_mode,
            mode="sync" if buffer is None else "async",
            buffer=buffer,
            port=free_port(),
        )
        self.output = folder / "result.npz"

    @property
    def address(self) -> str:
        return load_config(ServerConfig, self.made.server).server.address

    def server(
        self,
        progress: Any = None,
        settings: Sequence[str] = (),
        sums: Path | None = None,
        **rounds: Any,
    ) -> FederationServer:
        """`settings` overrides the file, as `--set` does; `sums` receives every average."""
        defaults = {"number": 1, "settle": 10, "grace": 0.5, "wait_for_clients": 30, "retries": 0}
        overrides = [f"rounds.{key}={value}" for key, value in (defaults | rounds).items()]
        overrides += settings
        config = load_config(ServerConfig, self.made.server, overrides)
        vectors = VectorsTable(dimension=DIMENSION, output=self.output, weighted=self.weighted)
        return build_server(
            config.model_copy(update={"training": None, "vectors": vectors}),
            progress,
            learned=None if sums is None else partial(write_sum, sums),
        )

    def client(
        self,
        client: int,
        kind: Any = FederationClient,
        address: str | None = None,
        job: Any = None,
        table: Sequence[str] = (),
        **extra: Any,
    ) -> FederationClient:
        """`table` overrides the client's file, as `--set` does."""
        overrides = ["client.overlap=thread", "client.reconnect=60.0", *table]
        if address is not None:
            overrides.append(f'server.address="{address}"')
        config = load_config(ClientConfig, self.made.clients[client], overrides)
        return build_client(config, kind, job=job or Contribution(client), **extra)

    def check(self, record: RoundRecord) -> None:
        """The latest result is the exact sum, or average, over those whom this record includes."""
        assert record.aborted is None
        with np.load(self.output) as stored:
            result = stored["result"]
        combine = np.mean if self.weighted else np.sum
        expected = combine([contribution(i, record.round) for i in record.included], axis=0)
        tolerance = (len(record.included) + record.noise) * record.quantisation_step
        np.testing.assert_allclose(result, expected, atol=tolerance)

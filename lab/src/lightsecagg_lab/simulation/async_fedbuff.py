"""FedBuff with N clients in one process: the asynchronous baseline, without protection."""

from __future__ import annotations

from lightsecagg.protocol.interface import SERVER, Phase, Update
from lightsecagg_lab.schemes.fedbuff import FedBuffClient, FedBuffServer, PlainUpload
from lightsecagg_lab.simulation.async_federation import Flush
from lightsecagg_lab.simulation.metering import Meter
from lightsecagg_lab.simulation.workload import Vector


class PlainFederation:
    """FedBuff: the server sees every update."""

    def __init__(self, clients: int, server: FedBuffServer) -> None:
        self.meter = Meter()
        self.server = server
        self.clients = [FedBuffClient(client) for client in range(clients)]

    @property
    def time(self) -> int:
        """t"""
        return self.server.time

    def publish(self, model: bytes, version: int) -> None:
        """Nobody checks."""

    def ready(self, client: int) -> bool:
        """Always."""
        return True

    def upload(self, client: int, vector: Vector, version: int, model: bytes) -> list[Flush]:
        """See `Federation`."""
        with self.meter.work(Phase.UPLOAD, client):
            data = self.clients[client].set_input(Update(vector), version).to_bytes()
        self.meter.sent(Phase.UPLOAD, client, SERVER, len(data), is_share=False)
        with self.meter.work(Phase.UPLOAD, SERVER):
            means = self.server.receive(client, PlainUpload.from_bytes(data))
        return [
            Flush(mean.time, mean.owners, mean.staleness, mean.mean, responders=0) for mean in means
        ]

    def leave(self, client: int) -> list[Flush]:
        """Its uploads stay."""
        return []

    def rejoin(self, client: int) -> list[Flush]:
        """It has missed nothing."""
        return []

    def flush(self) -> list[Flush]:
        """FedBuff waits for K updates."""
        return []

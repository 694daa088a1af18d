"""One party of FedML's cross-silo LightSecAgg over its gRPC: run by a Python that has `fedml`.

    python benchmarks/fedml/party.py RANK CLIENTS DIMENSION ROUNDS PAUSE ADDRESSES REPORT

Rank 0 is the server, which writes REPORT (.npz): when each model was there, and the models.
ADDRESSES is FedML's table of them (CSV). Nothing here needs FedML's cloud: the parties are made of
its own classes and told that its operations platform is not used.
"""

from __future__ import annotations

import csv
import logging
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fedml.core.alg_frame.client_trainer import ClientTrainer
from fedml.core.mlops import MLOpsStore
from fedml.cross_silo.client.fedml_trainer import FedMLTrainer
from fedml.cross_silo.lightsecagg.lsa_fedml_aggregator import LightSecAggAggregator
from fedml.cross_silo.lightsecagg.lsa_fedml_client_manager import FedMLClientManager
from fedml.cross_silo.lightsecagg.lsa_fedml_server_manager import FedMLServerManager

PATIENCE = 120.0
"""Seconds until all parties listen."""


def change(client: int, dimension: int) -> Any:
    """Different for every client; small, as the field of FedML's examples is."""
    return np.linspace(-0.05, 0.05, dimension, dtype=np.float32) + np.float32(client / 256)


class Vector(ClientTrainer):
    """A flat vector, and a pause in place of training."""

    def __init__(self, dimension: int, pause: float, args: SimpleNamespace) -> None:
        super().__init__(None, args)
        self.vector = torch.zeros(dimension)
        self.pause = pause
        self.looks: list[float] = []
        self.models: list[Any] = []

    def get_model_params(self) -> dict[str, Any]:
        if not self.looks:
            self._look()
        return {"vector": self.vector.clone()}

    def set_model_params(self, model_parameters: dict[str, Any]) -> None:
        self.vector = model_parameters["vector"]
        self._look()

    def _look(self) -> None:
        self.looks.append(time.monotonic())
        self.models.append(self.vector.numpy())

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        time.sleep(self.pause)
        self.vector = self.vector + torch.from_numpy(change(self.id - 1, len(self.vector)))

    def test(self, *_: Any) -> dict[str, float]:
        """There is nothing to test."""
        return {"test_correct": 0, "test_total": 1, "test_loss": 0.0}


def settings(rank: int, clients: int, rounds: int, addresses: str) -> SimpleNamespace:
    """What FedML's examples have, without its platform."""
    numbers = list(range(1, clients + 1))
    return SimpleNamespace(
        rank=rank,
        backend="GRPC",
        scenario="horizontal",
        training_type="cross_silo",
        federated_optimizer="LSA",
        dataset="vectors",
        run_id="0",
        worker_num=clients,
        client_num_in_total=clients,
        client_num_per_round=clients,
        client_id_list=str([rank] if rank else numbers),
        comm_round=rounds,
        prime_number=2**15 - 19,
        precision_parameter=10,
        frequency_of_the_test=10**6,
        grpc_ipconfig_path=addresses,
        using_mlops=False,
        enable_wandb=False,
    )


def wait_for_all(addresses: str) -> None:
    """Whoever sends to a party that does not listen yet ends with an error."""
    deadline = time.monotonic() + PATIENCE
    with Path(addresses).open() as file:
        places = [
            (row["grpc_server_ip"], int(row["grpc_server_port"])) for row in csv.DictReader(file)
        ]
    for place in places:
        while True:
            try:
                socket.create_connection(place, 5).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def main() -> None:
    rank, clients, dimension, rounds = map(int, sys.argv[1:5])
    pause, addresses, report = float(sys.argv[5]), sys.argv[6], sys.argv[7]
    logging.basicConfig(level=logging.WARNING)
    args = settings(rank, clients, rounds, addresses)
    MLOpsStore.mlops_args = args
    trainer = Vector(dimension, pause, args)
    trainer.set_id(rank)
    nothing = dict.fromkeys(range(clients))
    if rank == 0:
        aggregator = LightSecAggAggregator(
            None, None, 0, nothing, nothing, nothing, clients, "cpu", args, trainer
        )
        server = FedMLServerManager(args, aggregator, None, 0, clients, "GRPC")
        # It would ask every client for the status that each sends by itself, and begin the first
        # round once more with every answer.
        server.is_initialized = True
        wait_for_all(addresses)
        server.run()
        models = np.stack(trainer.models)
        np.savez(report, looks=trainer.looks, models=models, fedml=version("fedml"))
    else:
        local = FedMLTrainer(rank, nothing, nothing, nothing, 0, "cpu", args, trainer)
        client = FedMLClientManager(args, local, None, rank, clients, "GRPC")
        wait_for_all(addresses)
        client.run()


if __name__ == "__main__":
    main()

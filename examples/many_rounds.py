"""How much two ordinary sums reveal of a client that is missing from the second one.

python examples/many_rounds.py [rounds of training before the two, 3 by default]

Nobody cheats. All N clients train in one round, the server takes a step, and one client is missing
from the next round. The server subtracts the second sum from the first. For every client in turn,
this computes the cosine of the difference with the client's own update (1 is the update itself, up
to its length), and that of the first sum alone. It prints lowest, median and highest.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from lightsecagg.training import initial_model, local_update, use_one_thread
from lightsecagg.training.config import LocalConfig, TaskConfig


def contributions(task: TaskConfig, model: NDArray[np.float32], number: int) -> NDArray[np.float64]:
    """A row per client: its update times its sample count, and the count."""
    local = LocalConfig(epochs=1, batch_size=16, learning_rate=0.05)
    updates = [
        local_update(task, client, model, local, round_index=number)
        for client in range(task.clients)
    ]
    return np.array([np.append(each.delta, 1) * float(each.samples) for each in updates])


def step(model: NDArray[np.float32], total: NDArray[np.float64]) -> NDArray[np.float32]:
    """The next model: the average update is added."""
    return (model + total[:-1] / total[-1]).astype(np.float32)


def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Of the angle between two vectors."""
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def compare(task: TaskConfig, earlier: int) -> tuple[list[float], list[float]]:
    """For every client: the cosines of its update with the difference, and with the first sum."""
    model = initial_model(task)
    for number in range(earlier):
        model = step(model, contributions(task, model, number).sum(axis=0))
    first = contributions(task, model, earlier)
    total = first.sum(axis=0)
    second = contributions(task, step(model, total), earlier + 1)
    differences, alone = [], []
    for victim, own in enumerate(first[:, :-1]):
        without = second.sum(axis=0) - second[victim]
        differences.append(cosine((total - without)[:-1], own))
        alone.append(cosine(total[:-1], own))
    return differences, alone


def spread(cosines: list[float]) -> str:
    """Lowest, median and highest."""
    return " ".join(f"{quantile:5.2f}" for quantile in np.quantile(cosines, (0, 0.5, 1)))


def main() -> None:
    """Six federations on scikit-learn's digits."""
    use_one_thread()
    earlier = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for clients in (10, 30):
        tasks = {
            "few labels each, equal sizes": TaskConfig(clients=clients, partition="shards"),
            "skewed labels and sizes": TaskConfig(
                clients=clients, partition="dirichlet", dirichlet_alpha=0.1
            ),
            "iid": TaskConfig(clients=clients),
        }
        for name, task in tasks.items():
            differences, alone = compare(task, earlier)
            print(
                f"N = {clients}, {name:28}  difference {spread(differences)}  "
                f"one sum {spread(alone)}"
            )


if __name__ == "__main__":
    main()

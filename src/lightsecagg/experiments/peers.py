"""Our kernels beside a plain NumPy implementation, and beside Flower's SecAgg+ if it is installed.

The steps that decide how fast a protocol is, on the same vectors in the same run:

* a PRG mask of d elements
* adding a mask to a vector
* encoding a mask for N clients (LightSecAgg)
* sharing a secret of 32 bytes among N clients (Shamir)

The plain NumPy implementation is what one writes without thinking about speed: 64-bit products and
`%`, NumPy's own generator (which is not a cryptographic one), one share at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.experiments.cells import REPEATS, VERSION, Cell, Document, Results
from lightsecagg.experiments.report import Report, Table
from lightsecagg.experiments.setups import Profile
from lightsecagg.experiments.statistics import Spread
from lightsecagg.field import kernels, ntt, shamir
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import PrimeField
from lightsecagg.params import DEFAULT_MODULUS

_STEPS = {
    "prg": "PRG mask of d elements",
    "add": "adding a mask",
    "encode": "encoding a mask for N clients",
    "shamir": "sharing one secret among N clients",
}


@dataclass(frozen=True, slots=True)
class PeersCell(Cell):
    """CPU seconds of the four steps, by implementation."""

    timed: ClassVar[bool] = True
    clients: int
    dimension: int

    @property
    def key(self) -> str:
        return f"peers-N{self.clients}-d{self.dimension}-r{REPEATS}-{VERSION}"

    def measure(self) -> Document:
        seconds = {"ours": _ours(self), "numpy": _plain_numpy(self)}
        with kernels.using("numpy"):
            seconds["our NumPy fallback"] = _ours(self)
        if importlib.util.find_spec("flwr") is not None:
            seconds["flwr"] = _flower(self)
        return {"cell": asdict(self), "seconds": seconds}


def peers_cells(profile: Profile) -> list[Cell]:
    """One size."""
    return [_cell(profile)]


def _cell(profile: Profile) -> PeersCell:
    return PeersCell(profile.largest, 1_206_590 if profile.name != "quick" else 100_000)


def peers_report(profile: Profile, results: Results) -> Report:
    """Milliseconds by implementation."""
    cell = _cell(profile)
    seconds: dict[str, dict[str, Spread]] = {
        name: {step: Spread.of(tries[1:]) for step, tries in found.items()}
        for name, found in results[cell.key]["seconds"].items()
    }
    report = Report("peers", "Our kernels beside plain NumPy and Flower's SecAgg+ library")
    report.figures = dict(seconds)
    report.tables.append(
        Table(
            f"Milliseconds of CPU, N = {cell.clients}, d = {cell.dimension:,}",
            ["step", *seconds],
            [
                [title, *(_milliseconds(found.get(s)) for found in seconds.values())]
                for s, title in _STEPS.items()
            ],
        )
    )
    about = (
        "Flower's addition does not reduce modulo anything, its PRG is seeded with 32 bits, and "
        "its Shamir sharing is over GF(2^128) in Python."
        if "flwr" in seconds
        else "Flower (`flwr`) is not installed here and is left out."
    )
    report.paragraphs = [
        f"The median and interquartile range of {REPEATS} runs each after one that warms up, one "
        "core, on the same vectors in the same process. A "
        f"dash: the implementation has no such step. {about}"
    ]
    return report


def _milliseconds(seconds: Spread | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds.scaled(1e3):{',.0f' if seconds.median >= 0.1 else '.3g'}}"


def _tries(work: Callable[[], object]) -> list[float]:
    """Seconds of each run, the cold one first."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.process_time()
        work()
        times.append(round(time.process_time() - started, 6))
    return times


def _shape(cell: PeersCell) -> tuple[int, int, int]:
    """U, T and L for T = N/2 and 10 % dropouts."""
    N = cell.clients
    U, T = N - N // 10, N // 2
    return U, T, -(-cell.dimension // (U - T))


def _ours(cell: PeersCell) -> dict[str, list[float]]:
    field = PrimeField(DEFAULT_MODULUS)
    U, T, L = _shape(cell)
    vector = prg.expand(bytes(32), cell.dimension, field.modulus)
    rows = prg.expand(b"\1" * 32, U * L, field.modulus).reshape(U, L)
    points = ntt.points(field, cell.clients)
    code = MdsCode(field, U, T, points)
    secret = np.arange(32, dtype=np.uint8).reshape(1, 32)
    noise = prg.expand(b"\2" * 32, T * 16, field.modulus).reshape(shamir.noise_shape(1, T + 1))
    return {
        "prg": _tries(lambda: prg.expand(bytes(32), cell.dimension, field.modulus)),
        "add": _tries(lambda: field.add(vector, vector)),
        "encode": _tries(lambda: code.encode(rows[: U - T], rows[U - T :])),
        "shamir": _tries(lambda: shamir.share(field, secret, points.tolist(), noise)),
    }


def _plain_numpy(cell: PeersCell) -> dict[str, list[float]]:
    q = np.int64(DEFAULT_MODULUS)
    U, _, L = _shape(cell)
    generator = np.random.default_rng(0)
    vector = generator.integers(0, q, cell.dimension)
    rows = generator.integers(0, q, (U, L))
    points = np.arange(1, cell.clients + 1)

    def encode() -> None:
        for point in points:
            share, power = np.zeros(L, dtype=np.int64), np.int64(1)
            for row in rows:
                share = (share + row * power) % q
                power = power * point % q

    return {
        "prg": _tries(lambda: np.random.default_rng(1).integers(0, q, cell.dimension)),
        "add": _tries(lambda: (vector + vector) % q),
        "encode": _tries(encode),
    }


def _flower(cell: PeersCell) -> dict[str, list[float]]:
    """Flower's own functions: 32-bit-seeded PRG, modular addition, Shamir."""
    package = "flwr.common.secure_aggregation"
    create_shares = importlib.import_module(f"{package}.crypto.shamir").create_shares
    parameters_addition = importlib.import_module(
        f"{package}.ndarrays_arithmetic"
    ).parameters_addition
    pseudo_rand_gen = importlib.import_module(f"{package}.secaggplus_utils").pseudo_rand_gen
    bound = 1 << 31
    vector = [np.zeros(cell.dimension, dtype=np.int64)]
    threshold = cell.clients // 2 + 1
    return {
        "prg": _tries(lambda: pseudo_rand_gen(b"\1" * 32, bound, [(cell.dimension,)])),
        "add": _tries(lambda: parameters_addition(vector, vector)),
        "shamir": _tries(lambda: create_shares(bytes(32), threshold, cell.clients)),
    }

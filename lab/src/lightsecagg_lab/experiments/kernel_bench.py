"""How fast the hot loops are on this machine, against NumPy + BLAS and against a memory copy.

All of it runs in one process on one thread, BLAS included, which takes environment variables that
must be set before NumPy is loaded: `measure_in_child` starts that process, `measure` is its body.
Every figure is the minimum of at least five runs in CPU seconds, which on one thread are seconds
less the time that other programs took; ours and the reference's runs alternate, so that a machine
that slows down slows down both.

The reference is the package's own fallback: for products two 16-bit limbs per operand and float64
BLAS, for sums lazy 64-bit words. That of packed updates is today's quantiser, on the same loops.
`ratio` is our time over the reference's, so smaller is better.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from lightsecagg.crypto import prg
from lightsecagg.errors import LightSecAggError, ParameterError
from lightsecagg.field import kernels, ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.packing import Packing
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements, PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.rotation import Rotation
from lightsecagg.field.words import WORDS
from lightsecagg.masks import short_keys
from lightsecagg.masks.mask_encoding import seeded_positions
from lightsecagg_lab.schemes.pairwise_masks import client_mask

FIELDS: Final = {"default": DEFAULT_FIELD, "paper": PAPER_FIELD}

_THREAD_VARIABLES: Final = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "LIGHTSECAGG_THREADS",
)
_RUNS: Final = 5
_ENOUGH_SECONDS: Final = 0.5  # quick kernels run more often, up to this
_MOST_VECTORS: Final = 64  # of a sum: enough to leave every cache, and 300 MB in the main case
_PAIRS: Final = 8  # masks of a client, one of which is its own
_BULK_BYTES: Final = 1 << 28  # for the speed of the memory: larger than every cache

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured; the default is the paper's CNN with N = 200."""

    clients: int = 200
    """N"""
    survivors: int = 140
    """U"""
    privacy: int = 100
    """T"""
    dimension: int = 1_206_590
    """d"""

    def __post_init__(self) -> None:
        if not 0 <= self.privacy < self.survivors <= self.clients:
            raise ParameterError(
                f"the case needs 0 <= T < U <= N, not T = {self.privacy}, "
                f"U = {self.survivors}, N = {self.clients}"
            )
        if self.dimension < 1:
            raise ParameterError(f"dimension d = {self.dimension} must be at least 1")

    @property
    def share_length(self) -> int:
        """L = ceil(d / (U - T))."""
        return -(-self.dimension // (self.survivors - self.privacy))


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel on one field: what to run, and how much work that is."""

    kernel: str
    field: str
    description: str
    run: Callable[[], object]
    reference: Callable[[], object]
    bytes: int
    """Bytes read and written, counting every array once."""
    multiply_adds: int = 0
    """Of the plain matrix product, whatever is computed instead."""


def measure_in_child(case: Case) -> dict[str, Any]:
    """Run `measure` in a process of its own on one thread; progress goes to stderr."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(case))]
    child = subprocess.run(  # noqa: S603 - our own module
        command,
        env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")},
        stdout=subprocess.PIPE,
        check=False,
    )
    if child.returncode:
        raise LightSecAggError(f"the measurement failed with exit code {child.returncode}")
    document: dict[str, Any] = json.loads(child.stdout)
    return document


def measure(case: Case, report: Report) -> dict[str, Any]:
    """Measure every kernel; returns the document that `bench kernels --json` prints."""
    copy_speed, read_speed = _memory_speeds()
    report(f"memory: copies {copy_speed / 1e9:.1f} GB/s, reads {read_speed / 1e9:.1f} GB/s")
    rows = []
    for task in _tasks(case):
        row = _measure_task(task, copy_speed, read_speed)
        report(
            f"{task.kernel} ({task.field} field): {row['seconds'] * 1e3:.2f} ms, "
            f"{row['ratio']:.3f} of the reference"
        )
        rows.append(row)
    return {
        "machine": _machine(copy_speed, read_speed),
        "backend": kernels.backend(),
        "case": asdict(case),
        "rows": rows,
    }


def _measure_task(task: Task, copy_speed: float, read_speed: float) -> dict[str, Any]:
    seconds, reference_seconds = _fastest(task.run, task.reference)
    speed = task.bytes / seconds
    row: dict[str, Any] = {
        "kernel": task.kernel,
        "field": task.field,
        "description": task.description,
        "seconds": seconds,
        "reference_seconds": reference_seconds,
        "ratio": seconds / reference_seconds,
        "bytes": task.bytes,
        "bytes_per_second": speed,
        "of_memory_copy": speed / copy_speed,
        "of_memory_read": speed / read_speed,
    }
    if task.multiply_adds:
        row["multiply_adds"] = task.multiply_adds
        row["multiply_adds_per_second"] = task.multiply_adds / seconds
    return row


def _fastest(*functions: Callable[[], object]) -> tuple[float, ...]:
    """The least seconds of each function, over runs in turn."""
    best = [float("inf")] * len(functions)
    for function in functions:
        function()  # fills caches, pages and lazily built tables
    runs, started = 0, time.process_time()
    while runs < _RUNS or (time.process_time() - started < _ENOUGH_SECONDS and runs < 50):
        for number, function in enumerate(functions):
            start = time.process_time()
            function()
            best[number] = min(best[number], time.process_time() - start)
        runs += 1
    return tuple(best)


def _memory_speeds() -> tuple[float, float]:
    """Bytes per second of a copy (read plus written) and of reading alone."""
    source = np.ones(_BULK_BYTES // 4, dtype=np.uint32)
    target = np.zeros_like(source)
    copy, read = _fastest(
        lambda: np.copyto(target, source),
        lambda: kernels.active().find_out_of_range(source, 2**32 - 1),
    )
    return 2 * source.nbytes / copy, source.nbytes / read


def _on_numpy(function: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with kernels.using("numpy"):
            return function()

    return run


def _tasks(case: Case) -> Iterator[Task]:
    for name, field in FIELDS.items():
        yield from _code_tasks(case, name, field)
        yield from _vector_tasks(case, name, field)
    yield from _packed_tasks(case)
    yield from _short_key_tasks(case)
    yield from _word_tasks(case)


def _uniform(field: PrimeField, *shape: int) -> Elements:
    """Public test data: the expansion of a constant seed."""
    return prg.expand(bytes(prg.SEED_LENGTH), int(np.prod(shape)), field.modulus).reshape(shape)


def _code_tasks(case: Case, name: str, field: PrimeField) -> Iterator[Task]:
    N, U, T, L = case.clients, case.survivors, case.privacy, case.share_length
    code = MdsCode(field, U, T, ntt.points(field, N))
    rows = _uniform(field, U, L)

    def encode() -> object:
        return code.encode_rows(rows)

    yield Task(
        "encode",
        name,
        f"paper mode: {U} rows of {L} elements to {N} shares",
        encode,
        _on_numpy(encode),
        bytes=4 * (U + N) * L,
        multiply_adds=N * U * L,
    )

    seeded = seeded_positions(0, N, U)
    explicit = [position for position in range(N) if position not in set(seeded)]

    def complete() -> object:
        return code.complete(seeded, rows, explicit)

    yield Task(
        "encode-seeded",
        name,
        f"seeded mode: {U} expanded shares to {U - T} mask pieces and {N - U} shares",
        complete,
        _on_numpy(complete),
        bytes=4 * (U + N - T) * L,
        multiply_adds=(N - T) * U * L,
    )

    answering = list(range(N - U, N))

    def decode() -> object:
        return code.decode(answering, rows)

    yield Task(
        "decode",
        name,
        f"{U} answers to {U - T} pieces of the aggregate mask",
        decode,
        _on_numpy(decode),
        bytes=4 * (2 * U - T) * L,
        multiply_adds=(U - T) * U * L,
    )


def _vector_tasks(case: Case, name: str, field: PrimeField) -> Iterator[Task]:
    d, q = case.dimension, field.modulus
    count = min(case.clients, _MOST_VECTORS)
    vectors = [row.copy() for row in _uniform(field, count, d)]
    weights = [1 + k % 8 for k in range(count)]

    def total() -> object:
        return field.sum(vectors)

    yield Task(
        "sum",
        name,
        f"the sum of {count} masked models; bytes count the models alone",
        total,
        _on_numpy(total),
        bytes=4 * count * d,
    )

    def weighted_total() -> object:
        return field.weighted_sum(weights, vectors)

    yield Task(
        "weighted-sum",
        name,
        f"the sum of {count} masked models with integer weights 1..8",
        weighted_total,
        _on_numpy(weighted_total),
        bytes=4 * count * d,
    )

    out = np.empty(d, dtype=np.uint32)
    yield Task(
        "prg",
        name,
        "a seed to uniform field elements; the reference is raw AES-256-CTR for the same bytes",
        lambda: prg.expand(bytes(prg.SEED_LENGTH), d, q, out),
        lambda: _raw_aes_ctr(out),
        bytes=4 * d,
    )

    mask, words = vectors[0], vectors[-1]
    model = np.sin(np.arange(d, dtype=np.float32))
    limit = (q - 3) // 2 // case.clients

    masked, restored = np.empty_like(mask), np.empty(d, dtype=np.float32)

    def quantise() -> None:
        kernels.active().quantise_mask(model, float(limit), limit, words, mask, q, masked)

    yield Task(
        "quantise-mask",
        name,
        "stochastic rounding of a float32 model into the field, plus the mask",
        quantise,
        _on_numpy(quantise),
        bytes=16 * d,
    )

    quantise()

    def unmask() -> None:
        kernels.active().unmask_dequantise(masked, mask, 1.0 / limit, q, restored)

    yield Task(
        "unmask-dequantise",
        name,
        "the masked sum less the mask, back to float32",
        unmask,
        _on_numpy(unmask),
        bytes=12 * d,
    )


def _packed_tasks(case: Case) -> Iterator[Task]:
    """Packed updates, two entries per element, against one entry per element in the same run."""
    d, N, field = case.dimension, case.clients, DEFAULT_FIELD
    quantizer, packing = Quantizer(field, 1.0, N), Packing(field, N, 2)
    rotation = Rotation(d)
    n = rotation.length
    model = np.sin(np.arange(d, dtype=np.float32))
    mask, words, masked = _uniform(field, d), _uniform(PAPER_FIELD, n), np.empty(d, np.uint32)
    signs = words[: 2 * rotation.signs_shape[1]].reshape(rotation.signs_shape)
    rotated = rotation.forward(model, signs)
    packed = np.empty(packing.length(n), dtype=np.uint32)
    part = _uniform(field, packed.size)

    def rotate() -> None:
        rotation.forward(model, signs)

    def pack() -> None:
        packing.pack(rotated, 4.0, words[: -(-n // 2)], part, packed)

    def quantise() -> None:
        quantizer.quantise_and_mask(model, words[:d], mask, out=masked)

    total = field.subtract(packing.pack(rotated, 4.0, words[: -(-n // 2)], part)[0], part)

    def unpack() -> None:
        packing.unpack(total, n, 4.0, N)

    def dequantise() -> None:
        quantizer.dequantise(masked)

    than = "the reference is one entry per element"
    rounding = "stochastic rounding into half as many elements, plus the mask"
    yield Task("rotate", "default", f"of a model; {than}", rotate, quantise, bytes=4 * (d + 3 * n))
    yield Task("pack-mask", "default", f"{rounding}; {than}", pack, quantise, bytes=10 * n)
    yield Task("unpack", "default", f"of an unmasked sum; {than}", unpack, dequantise, bytes=6 * n)


def _short_key_tasks(case: Case) -> Iterator[Task]:
    """Short keys exist in the default field alone."""
    d, field, context = case.dimension, DEFAULT_FIELD, bytes(prg.SEED_LENGTH)
    key = _uniform(field, short_keys.key_length(scalars=0))
    bound = short_keys.noise_bound(case.clients, 1, d)
    step = short_keys.exact_step(field.modulus, bound)

    def expand() -> Elements:
        return short_keys.expand(field, context, key, d)

    def mask() -> None:
        short_keys.add_noise(field, expand(), context, d, step)

    size = f"{short_keys.RING_DIMENSION} elements to {d}"
    yield Task(
        "short-key-mask",
        "default",
        f"a client's key stretched from {size}, with noise; bytes are those of the mask",
        mask,
        _on_numpy(mask),
        bytes=4 * d,
    )
    yield Task(
        "short-key-expand",
        "default",
        f"the server's sum of keys stretched from {size}; bytes are those of the mask",
        expand,
        _on_numpy(expand),
        bytes=4 * d,
    )


def _word_tasks(case: Case) -> Iterator[Task]:
    """SecAgg's masks and sums, modulo 2^32."""
    d, out = case.dimension, np.empty(case.dimension, dtype=np.uint32)
    seeds = {_PAIRS + peer: bytes([peer]) * prg.SEED_LENGTH for peer in range(1, _PAIRS)}

    def masks() -> object:
        return client_mask(bytes(prg.SEED_LENGTH), seeds, 0, d)

    def raw() -> None:
        for _ in range(_PAIRS):
            _raw_aes_ctr(out)

    yield Task(
        "pairwise-mask",
        "words",
        f"{_PAIRS} seeds to the sum of their masks; the reference is raw AES-256-CTR",
        masks,
        raw,
        bytes=4 * _PAIRS * d,
    )
    count = min(case.clients, _MOST_VECTORS)
    vectors = [row.copy() for row in _uniform(DEFAULT_FIELD, count, d)]

    def total() -> object:
        return WORDS.sum(vectors)

    yield Task(
        "sum",
        "words",
        f"the sum of {count} masked models; bytes count the models alone",
        total,
        _on_numpy(total),
        bytes=4 * count * d,
    )


def _raw_aes_ctr(out: Elements) -> None:
    """What the PRG is measured against: the cipher alone, in blocks of 256 KiB."""
    block = 1 << 18
    zeros, view = bytes(block), out.data.cast("B")
    key, nonce = bytes(prg.SEED_LENGTH), bytes(16)
    encryptor = Cipher(algorithms.AES(key), modes.CTR(nonce)).encryptor()
    for start in range(0, len(view), block):
        part = view[start : start + block]
        encryptor.update_into(zeros[: len(part)], part)


def _machine(copy_speed: float, read_speed: float) -> dict[str, Any]:
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        "avx2": _has_avx2(),
        "threads": 1,
        "memory_copy_bytes_per_second": copy_speed,
        "memory_read_bytes_per_second": read_speed,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _has_avx2() -> bool:
    """Whether the native loops use AVX2 here."""
    if not kernels.native_available():
        return False
    from lightsecagg.field.native import loops

    return loops.has_avx2()


def _main() -> None:
    document = measure(
        Case(**json.loads(sys.argv[1])), lambda line: print(line, file=sys.stderr, flush=True)
    )
    json.dump(document, sys.stdout, allow_nan=False)


if __name__ == "__main__":
    _main()

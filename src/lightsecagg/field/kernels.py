"""Chooses the hot loops: the native library, or NumPy + BLAS where none was built.

Both give the same results, element for element. `LIGHTSECAGG_KERNELS=numpy` forces the fallback,
`=native` makes a missing library an error instead of a fallback. `LIGHTSECAGG_THREADS` sets how
many threads a native loop may use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lightsecagg.errors import ConfigurationError
from lightsecagg.field import reference
from lightsecagg.field.reference import Coins, Elements, Floats, Positions, Singles, Totals


class Loops(Protocol):
    """What a backend provides; the contracts stand in `reference`."""

    def add(self, a: Elements, b: Elements, q: int) -> Elements: ...
    def subtract(self, a: Elements, b: Elements, q: int) -> Elements: ...
    def accumulate(self, totals: Totals, vectors: Sequence[Elements]) -> None: ...
    def accumulate_words(self, totals: Elements, vectors: Sequence[Elements]) -> None: ...
    def weighted_accumulate(
        self, totals: Totals, vectors: Sequence[Elements], weights: Sequence[int]
    ) -> None: ...
    def reduce(self, totals: Totals, q: int) -> Elements: ...
    def matmul(self, a: Elements, b: Elements, q: int) -> Elements: ...
    def quantise_mask(
        self,
        x: Floats,
        scale: float,
        limit: int,
        uniforms: Elements,
        mask: Elements,
        q: int,
        out: Elements,
    ) -> None: ...
    def unmask_dequantise(
        self, masked: Elements, mask: Elements, scale: float, q: int, out: Floats
    ) -> None: ...
    def quantise_pack(
        self,
        v: Singles,
        scale: float,
        coins: Coins,
        levels: int,
        places: Sequence[int],
        mask: Elements,
        q: int,
        out: Elements,
    ) -> int: ...
    def unpack(
        self,
        total: Elements,
        bases: Sequence[int],
        factors: Sequence[float],
        q: int,
        out: Singles,
    ) -> None: ...
    def rotate_blocks(
        self,
        x: Floats,
        factor: float,
        before: Elements,
        after: Elements,
        block: int,
        out: Singles,
    ) -> None: ...
    def rotate_strided(self, x: Singles, rows: int, factor: float) -> None: ...
    def sum_of_squares(self, x: Floats) -> float: ...
    def find_out_of_range(self, values: Elements, q: int) -> int: ...
    def cut_and_find(self, words: Elements, q: int) -> Positions: ...
    def find_beyond(self, x: Floats, bound: float) -> int: ...
    def ntt_forward(
        self,
        rows: Elements,
        scales: Elements | None,
        positions: Positions,
        multipliers: Elements | None,
        roots: Elements,
        q: int,
    ) -> Elements: ...
    def ntt_inverse(
        self,
        rows: Elements,
        positions: Positions,
        multipliers: Elements,
        coefficients: int,
        inverse_roots: Elements,
        q: int,
    ) -> Elements: ...
    def add_popcount_noise(self, words: Elements, z: Elements, step: int, q: int) -> None: ...


class NativeLoops(Loops, Protocol):
    """The native loops also run on several threads."""

    def set_threads(self, count: int) -> None: ...


_CHOICES = ("auto", "native", "numpy")

_active: Loops | None = None


def active() -> Loops:
    """The module that holds the loops in use: `reference`, or `native.loops`."""
    global _active
    if _active is None:
        _active = _load(os.environ.get("LIGHTSECAGG_KERNELS", "auto"))
        set_threads(_threads_wanted())
    return _active


def backend() -> str:
    """'native' or 'numpy'."""
    return "numpy" if active() is reference else "native"


def native_available() -> bool:
    """Whether the native library was built and can be loaded here."""
    return _native() is not None


def set_threads(count: int) -> None:
    """Let one call of a native loop use up to `count` threads; NumPy's loops stay on one.

    The default is LIGHTSECAGG_THREADS, or 1.
    """
    if count < 1:
        raise ConfigurationError(f"the loops need at least 1 thread, not {count}")
    native = _native()
    if native is not None:
        native.set_threads(count)


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run a block on the named backend; for tests and benchmarks, not for concurrent code."""
    global _active
    previous = active()
    _active = _load(name)
    try:
        yield
    finally:
        _active = previous


def _load(name: str) -> Loops:
    if name not in _CHOICES:
        raise ConfigurationError(
            f"LIGHTSECAGG_KERNELS={name!r} is unknown; choose one of {', '.join(_CHOICES)}"
        )
    if name == "numpy":
        return reference
    native = _native()
    if native is None and name == "native":
        raise ConfigurationError(
            "LIGHTSECAGG_KERNELS=native, but the native library was not built: install the "
            "package with a C++ compiler at hand, or leave the variable out to run on NumPy"
        )
    return reference if native is None else native


def _native() -> NativeLoops | None:
    try:
        from lightsecagg.field.native import loops
    except ImportError:
        return None
    return loops


def _threads_wanted() -> int:
    text = os.environ.get("LIGHTSECAGG_THREADS", "1")
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"LIGHTSECAGG_THREADS={text!r} is not a number") from None

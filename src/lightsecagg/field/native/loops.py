"""The native loops through ctypes; names and contracts are those of `reference`.

Importing this module raises ImportError where no library was built. ctypes releases the GIL
during every call. A modulus of 2^32 becomes 0 on its way into 32 bits, which is what the loops that
take it expect.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError
from lightsecagg.field import native
from lightsecagg.field.reference import Coins, Elements, Floats, Positions, Singles, Totals

_ABI = 1
_FILE = "kernels.dll" if sys.platform == "win32" else "kernels.so"

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "set_threads": (None, [c_int]),
    "has_avx2": (c_int, []),
    "allow_avx2": (None, [c_int]),
    "add": (None, [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32]),
    "subtract": (None, [c_void_p, c_void_p, c_void_p, c_size_t, c_uint32]),
    "accumulate": (None, [c_void_p, POINTER(c_void_p), c_size_t, c_size_t]),
    "accumulate_words": (None, [c_void_p, POINTER(c_void_p), c_size_t, c_size_t]),
    "weighted_accumulate": (None, [c_void_p, POINTER(c_void_p), c_void_p, c_size_t, c_size_t]),
    "reduce": (None, [c_void_p, c_void_p, c_size_t, c_uint32]),
    "matmul": (None, [c_void_p] * 3 + [c_size_t] * 3 + [c_uint32]),
    "quantise_mask32": (
        None,
        [c_void_p, c_double, c_double] + [c_void_p] * 3 + [c_size_t, c_uint32],
    ),
    "quantise_mask64": (
        None,
        [c_void_p, c_double, c_double] + [c_void_p] * 3 + [c_size_t, c_uint32],
    ),
    "unmask_dequantise32": (None, [c_void_p, c_void_p, c_double, c_uint32, c_void_p, c_size_t]),
    "unmask_dequantise64": (None, [c_void_p, c_void_p, c_double, c_uint32, c_void_p, c_size_t]),
    "quantise_pack": (
        c_uint64,
        [c_void_p, c_size_t, c_double, c_void_p, c_int32]
        + [c_void_p, c_size_t]
        + [c_void_p] * 2
        + [c_size_t, c_uint32],
    ),
    "unpack": (
        None,
        [c_void_p] * 3 + [c_size_t, c_size_t, c_void_p, c_size_t, c_uint32],
    ),
    "rotate_blocks32": (
        None,
        [c_void_p, c_size_t, c_double] + [c_void_p] * 2 + [c_size_t, c_void_p, c_size_t],
    ),
    "rotate_blocks64": (
        None,
        [c_void_p, c_size_t, c_double] + [c_void_p] * 2 + [c_size_t, c_void_p, c_size_t],
    ),
    "rotate_strided": (None, [c_void_p, c_size_t, c_double, c_size_t]),
    "sum_of_squares32": (None, [c_void_p, c_size_t, c_void_p]),
    "sum_of_squares64": (None, [c_void_p, c_size_t, c_void_p]),
    "find_out_of_range": (c_size_t, [c_void_p, c_size_t, c_uint32]),
    "cut_and_find": (c_size_t, [c_void_p, c_size_t, c_uint32, c_uint32, c_void_p, c_size_t]),
    "find_beyond32": (c_size_t, [c_void_p, c_size_t, c_double]),
    "find_beyond64": (c_size_t, [c_void_p, c_size_t, c_double]),
    "ntt_forward": (
        None,
        [c_void_p] * 2
        + [c_size_t]
        + [c_void_p] * 3
        + [c_size_t, c_void_p, c_size_t, c_size_t, c_uint32],
    ),
    "ntt_inverse": (
        None,
        [c_void_p] * 3 + [c_size_t, c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_uint32],
    ),
    "add_popcount_noise": (None, [c_void_p, c_void_p, c_size_t, c_uint32, c_uint32]),
}


def _open() -> ctypes.CDLL:
    # LIGHTSECAGG_NATIVE names a library built by hand. In an editable install the library does
    # not lie beside this file but in another directory of the package (importlib.resources would
    # find it too, but takes longer to import than everything else here).
    path = os.environ.get("LIGHTSECAGG_NATIVE")
    if path is None:
        places = [os.path.join(place, _FILE) for place in native.__path__]
        path = next(filter(os.path.exists, places), places[0])
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"no native loops: {error}") from error
    abi = library.lightsecagg_abi()
    if abi != _ABI:
        raise ImportError(f"the native library at {path} has ABI {abi}, not {_ABI}: rebuild it")
    return library


class _Functions(dict[str, Any]):
    """The library's loops, each looked up when it is first called.

    So a library that was built before a loop was added still serves the others.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def __missing__(self, name: str) -> Any:
        result, arguments = _SIGNATURES[name]
        try:
            function = getattr(self._library, f"lightsecagg_{name}")
        except AttributeError:
            raise ConfigurationError(
                f"the native library at {self._library._name} has no loop {name}: rebuild it"
            ) from None
        function.restype, function.argtypes = result, arguments
        self[name] = function
        return function


_call = _Functions(_open())


def _at(array: NDArray[Any]) -> int:
    # What `array.ctypes.data` says, in a third of the time.
    address: int = array.__array_interface__["data"][0]
    return address


def _pointers(vectors: Sequence[Elements]) -> Any:
    return (c_void_p * len(vectors))(*map(_at, vectors))


def has_avx2() -> bool:
    """Whether the AVX2 versions of the loops run on this machine."""
    return bool(_call["has_avx2"]())


def allow_avx2(allowed: bool) -> None:
    """Switch AVX2 off or on again, to test and measure the plain loops; not for concurrent code."""
    _call["allow_avx2"](allowed)


def set_threads(count: int) -> None:
    """How many threads one call may use."""
    _call["set_threads"](count)


def add(a: Elements, b: Elements, q: int) -> Elements:
    out = np.empty_like(a)
    _call["add"](_at(a), _at(b), _at(out), a.size, q)
    return out


def subtract(a: Elements, b: Elements, q: int) -> Elements:
    out = np.empty_like(a)
    _call["subtract"](_at(a), _at(b), _at(out), a.size, q)
    return out


def accumulate(totals: Totals, vectors: Sequence[Elements]) -> None:
    _call["accumulate"](_at(totals), _pointers(vectors), len(vectors), totals.size)


def accumulate_words(totals: Elements, vectors: Sequence[Elements]) -> None:
    _call["accumulate_words"](_at(totals), _pointers(vectors), len(vectors), totals.size)


def weighted_accumulate(
    totals: Totals, vectors: Sequence[Elements], weights: Sequence[int]
) -> None:
    factors = np.array(weights, dtype=np.uint32)
    _call["weighted_accumulate"](
        _at(totals), _pointers(vectors), _at(factors), len(vectors), totals.size
    )


def reduce(totals: Totals, q: int) -> Elements:
    out = np.empty(totals.shape, dtype=np.uint32)
    _call["reduce"](_at(totals), _at(out), totals.size, q)
    return out


def matmul(a: Elements, b: Elements, q: int) -> Elements:
    (m, k), n = a.shape, b.shape[1]
    out = np.empty((m, n), dtype=np.uint32)
    _call["matmul"](_at(a), _at(b), _at(out), m, k, n, q)
    return out


def quantise_mask(
    x: Floats,
    scale: float,
    limit: int,
    uniforms: Elements,
    mask: Elements,
    q: int,
    out: Elements,
) -> None:
    call = _call[f"quantise_mask{8 * x.itemsize}"]
    call(_at(x), scale, limit, _at(uniforms), _at(mask), _at(out), x.size, q)


def unmask_dequantise(masked: Elements, mask: Elements, scale: float, q: int, out: Floats) -> None:
    call = _call[f"unmask_dequantise{8 * out.itemsize}"]
    call(_at(masked), _at(mask), scale, q, _at(out), out.size)


def quantise_pack(
    v: Singles,
    scale: float,
    coins: Coins,
    levels: int,
    places: Sequence[int],
    mask: Elements,
    q: int,
    out: Elements,
) -> int:
    table = np.array(places, dtype=np.int32)
    call = _call["quantise_pack"]
    arguments = (levels, _at(table), table.size, _at(mask), _at(out), out.size, q)
    return int(call(_at(v), v.size, scale, _at(coins), *arguments))


def unpack(
    total: Elements, bases: Sequence[int], factors: Sequence[float], q: int, out: Singles
) -> None:
    table, scales = np.array(bases, dtype=np.int32), np.array(factors, dtype=np.float64)
    arguments = (scales.size, total.size, _at(out), out.size, q)
    _call["unpack"](_at(total), _at(table), _at(scales), *arguments)


def rotate_blocks(
    x: Floats, factor: float, before: Elements, after: Elements, block: int, out: Singles
) -> None:
    call = _call[f"rotate_blocks{8 * x.itemsize}"]
    call(_at(x), x.size, factor, _at(before), _at(after), block, _at(out), out.size)


def rotate_strided(x: Singles, rows: int, factor: float) -> None:
    _call["rotate_strided"](_at(x), rows, factor, x.size)


def sum_of_squares(x: Floats) -> float:
    total = np.empty(1, dtype=np.float64)
    _call[f"sum_of_squares{8 * x.itemsize}"](_at(x), x.size, _at(total))
    return float(total[0])


def find_out_of_range(values: Elements, q: int) -> int:
    position = _call["find_out_of_range"](_at(values), values.size, q)
    return -1 if position == values.size else int(position)


def cut_and_find(words: Elements, q: int) -> Positions:
    mask = (1 << (q - 1).bit_length()) - 1
    # A large buffer costs more, in page faults, than the search. Searching again is harmless.
    capacity = words.size // 512 + 64
    while True:
        positions = np.empty(capacity, dtype=np.int64)
        count = _call["cut_and_find"](
            _at(words), words.size, mask, q, _at(positions), positions.size
        )
        if count <= capacity:
            return positions[:count]
        capacity = count


def find_beyond(x: Floats, bound: float) -> int:
    position = _call[f"find_beyond{8 * x.itemsize}"](_at(x), x.size, bound)
    return -1 if position == x.size else int(position)


def ntt_forward(
    rows: Elements,
    scales: Elements | None,
    positions: Positions,
    multipliers: Elements | None,
    roots: Elements,
    q: int,
) -> Elements:
    columns = rows.shape[1]
    out = np.empty((len(positions), columns), dtype=np.uint32)
    _call["ntt_forward"](
        _at(rows),
        None if scales is None else _at(scales),
        len(rows),
        _at(out),
        _at(positions),
        None if multipliers is None else _at(multipliers),
        len(positions),
        _at(roots),
        len(roots),
        columns,
        q,
    )
    return out


def ntt_inverse(
    rows: Elements,
    positions: Positions,
    multipliers: Elements,
    coefficients: int,
    inverse_roots: Elements,
    q: int,
) -> Elements:
    columns = rows.shape[1]
    out = np.empty((coefficients, columns), dtype=np.uint32)
    _call["ntt_inverse"](
        _at(rows),
        _at(positions),
        _at(multipliers),
        len(rows),
        _at(out),
        coefficients,
        _at(inverse_roots),
        len(inverse_roots),
        columns,
        q,
    )
    return out


def add_popcount_noise(words: Elements, z: Elements, step: int, q: int) -> None:
    _call["add_popcount_noise"](_at(words), _at(z), z.size, step, q)

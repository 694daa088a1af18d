"""Statistics of tables that stay where they are: counts, means, histograms, quantiles, tables.

A `StatisticsPlan` is public and fixed beforehand: which columns, in which ranges or categories. By
it every client turns its table into one vector of whole numbers, and the sum of the vectors, from
one round of secure aggregation, into `Statistics`. `summarise` does all of it in this process; a
federation of vectors does it in earnest (docs/statistics.md).

Every number is cut into bytes, one per entry of the vector, lest a sum of them be rounded: with a
bound of 255 the rounding of up to `MAX_CLIENTS` vectors moves an entry by less than a quarter. So
sums come back as the integers that they are. The only error is made before: a value of a column is
rounded to one of at least 2^23 steps of its range. The step is a power of two, so whole numbers in
a range between whole numbers are exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from hashlib import sha256
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.aggregation import aggregate
from lightsecagg.drivers.columns import (
    MISSING,
    OUTSIDE,
    Columns,
    Table,
    as_categories,
    as_quantile,
    as_range,
)
from lightsecagg.drivers.disclosure import hide_small_cells
from lightsecagg.errors import InputRefused, ParameterError, RecoveryError
from lightsecagg.params import ThreatModel, check_integer
from lightsecagg.protocol.schemes.traits import LIGHTSECAGG

BOUND: Final = 255
"""The bound of every vector: provision a federation with it."""
MAX_CLIENTS: Final = 1000
_MAX_ROWS: Final = 2**32 - 1
_MAX_CELLS: Final = 4096
_STEP_BITS: Final = 24
_COUNT, _SUM, _SQUARES = 4, 7, 10
"""Bytes of a count of rows, of a sum of steps, and of a sum of their squares, at most."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and how far it may be from the true one, apart from the rounding of float64."""

    value: float
    error: float

    def __repr__(self) -> str:
        return f"{self.value:.6g} \u00b1 {self.error:.2g}"


@dataclass(frozen=True, slots=True)
class Present:
    """How many rows of a column have a value."""

    count: int
    """With a value: in the range or the categories; outside of a range it counts as its end."""
    missing: int
    """Empty, None or NaN."""
    outside: int
    """Clipped to the range, and part of `count`; or of no listed category, and not part of it."""


@dataclass(frozen=True, slots=True, repr=False)
class Numbers(Present):
    """A column of numbers. What fewer than `minimum_cell` values would give is None."""

    sum: Figure | None
    mean: Figure | None
    variance: Figure | None
    """Of a sample: divided by count - 1."""
    std: Figure | None
    """Its square root."""
    edges: tuple[float, ...]
    """Of the bins of the histogram; the last bin includes both."""
    histogram: tuple[int | None, ...]
    """None: hidden."""
    quantiles: Mapping[float, Figure | None]
    """q -> the smallest value that at least q of all values do not exceed."""

    def __repr__(self) -> str:
        return f"Numbers(count={self.count}, missing={self.missing}, mean={self.mean})"


@dataclass(frozen=True, slots=True, repr=False)
class CrossTable:
    """How many rows have each category, or pair of categories; without totals."""

    columns: tuple[str, ...]
    """One or two."""
    labels: tuple[tuple[str, ...], ...]
    """The categories of each."""
    counts: tuple[tuple[int | None, ...], ...]
    """By the first column, then the second; one row for a single column. None: hidden."""

    def __repr__(self) -> str:
        return f"CrossTable({' x '.join(self.columns)}, {sum(map(len, self.counts))} cells)"


@dataclass(frozen=True, slots=True, repr=False)
class Statistics:
    """The joint statistics of the included clients' tables."""

    clients: int
    """Included."""
    rows: int
    minimum_cell: int
    """Smaller counts are hidden."""
    numbers: Mapping[str, Numbers]
    categories: Mapping[str, Present]
    tables: tuple[CrossTable, ...]

    def __repr__(self) -> str:
        columns = ", ".join([*self.numbers, *self.categories])
        return f"Statistics(clients={self.clients}, rows={self.rows}, columns: {columns})"

    def to_dict(self) -> dict[str, Any]:
        """The same for `json.dumps`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StatisticsPlan:
    """What is computed. Public, the same for all, and fixed before anybody looks at data."""

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Columns of numbers: the least and the largest value. Others are clipped, and counted."""
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Columns of categories, compared as text: two or more of each."""
    tables: Sequence[Sequence[str]] = ()
    """Pairs of columns of categories to tabulate; a column in none of them is counted alone."""
    bins: int = 10
    """Of a histogram."""
    resolution: int = 10
    """Into how many parts every bin is cut for the quantiles: a smaller error, a clearer view."""
    quantiles: Sequence[float] = (0.25, 0.5, 0.75)
    minimum_cell: int = 10
    """The least count that is shown, and the fewest values behind any other figure; 0 shows all."""

    def __post_init__(self) -> None:
        check_integer("bins", self.bins, 1)
        check_integer("resolution", self.resolution, 1)
        check_integer("minimum_cell", self.minimum_cell, 0)
        settle = object.__setattr__
        settle(self, "ranges", {name: as_range(name, given) for name, given in self.ranges.items()})
        settle(self, "categories", {n: as_categories(n, g) for n, g in self.categories.items()})
        settle(self, "tables", self._settled_tables())
        settle(self, "quantiles", tuple(map(as_quantile, self.quantiles)))
        if both := self.ranges.keys() & self.categories.keys():
            raise ParameterError(f"column {min(both)!r} has a range and categories; give one")
        if not self.ranges and not self.categories:
            raise ParameterError("the plan has no column: give ranges, categories or both")

    def _settled_tables(self) -> tuple[tuple[str, ...], ...]:
        """The pairs, and every other column alone."""
        pairs = [(pair,) if isinstance(pair, str) else tuple(pair) for pair in self.tables]
        for pair in pairs:
            for name in pair:
                if name not in self.categories:
                    raise ParameterError(f"the table of {pair} needs categories of {name!r}")
            if len(pair) > 2 or len({*pair}) < len(pair):
                raise ParameterError(f"a table has one or two columns, not {pair}")
            if sum({*pair} == {*other} for other in pairs) > 1:
                raise ParameterError(f"the table of {pair} is there twice")
            if len(pair) == 1 and any(pair[0] in other for other in pairs if len(other) == 2):
                raise ParameterError(
                    f"a table of {pair[0]!r} alone has the totals of another table of it, from "
                    "which hidden cells follow; leave one out"
                )
            if (cells := math.prod(self._shape(pair))) > _MAX_CELLS:
                raise ParameterError(f"the table of {pair} has {cells} cells; {_MAX_CELLS} fit")
        used = {name for pair in pairs for name in pair}
        return (*pairs, *((name,) for name in self.categories if name not in used))

    def to_dict(self) -> dict[str, Any]:
        """The same for `json.dumps`; `StatisticsPlan(**json.loads(...))` is the way back."""
        return asdict(self)

    # -- the vector ------------------------------------------------------------------------------

    @property
    def dimension(self) -> int:
        """Entries of a vector."""
        return len(self._head) + sum(self._widths)

    @property
    def _head(self) -> bytes:
        """One per client; the bound, which clipping would change; and which plan it is."""
        content = json.dumps(self.to_dict()).encode()  # in this order
        return bytes([1, BOUND]) + sha256(content).digest()[:4]

    @property
    def _widths(self) -> list[int]:
        """Bytes of each number, in order: rows, columns, tables."""
        fine = [_COUNT] * self.bins * self.resolution
        widths = [_COUNT]
        widths += [_COUNT, _COUNT, _COUNT, _SUM, _SQUARES, *fine] * len(self.ranges)
        widths += [_COUNT, _COUNT, _COUNT] * len(self.categories)
        return widths + [_COUNT] * sum(math.prod(self._shape(pair)) for pair in self.tables)

    def _shape(self, pair: Sequence[str]) -> tuple[int, ...]:
        return tuple(len(self.categories[name]) for name in pair)

    def encode(self, table: Table) -> NDArray[np.float64]:
        """A client's vector; `InputRefused` names the row and the column that cannot be read.

        It is as secret as the table, and must leave this machine masked only.
        """
        numbers = self._count(Columns(table, [*self.ranges, *self.categories]))
        parts = [n.to_bytes(w, "little") for n, w in zip(numbers, self._widths, strict=True)]
        return np.frombuffer(b"".join([self._head, *parts]), dtype=np.uint8).astype(np.float64)

    def _count(self, columns: Columns) -> list[int]:
        if columns.rows > _MAX_ROWS:
            raise InputRefused(f"a table of {columns.rows} rows; {_MAX_ROWS} are the most")
        numbers = [columns.rows]
        for name, (low, high) in self.ranges.items():
            values = columns.numbers(name)
            given = values[~np.isnan(values)]
            clipped = given.clip(low, high)
            steps = np.rint((clipped - low) / _step(low, high)).astype(np.int64)
            # Up to 2^48 each: their sum may not fit in 64 bits.
            tops, rests = np.divmod(steps * steps, 2**_STEP_BITS)
            numbers += [given.size, values.size - given.size, int((clipped != given).sum())]
            numbers += [int(steps.sum()), int(tops.sum()) * 2**_STEP_BITS + int(rests.sum())]
            parts, _ = np.histogram(clipped, self.bins * self.resolution, (low, high))
            numbers += map(int, parts)
        found = {name: columns.categories(name, self.categories[name]) for name in self.categories}
        for index in found.values():
            missing, outside = int((index == MISSING).sum()), int((index == OUTSIDE).sum())
            numbers += [index.size - missing - outside, missing, outside]
        for pair in self.tables:
            cells = np.zeros(self._shape(pair), dtype=np.int64)
            indices = [found[name] for name in pair]
            listed = np.all([index >= 0 for index in indices], axis=0)
            np.add.at(cells, tuple(index[listed] for index in indices), 1)
            numbers += map(int, cells.reshape(-1))
        return numbers

    # -- the sum ---------------------------------------------------------------------------------

    def decode(self, total: Any) -> Statistics:
        """The statistics that a sum of vectors stands for, without what must be hidden.

        `RecoveryError` if it is no sum of vectors of this plan.
        """
        entries = np.asarray(total, dtype=np.float64)
        if entries.shape != (self.dimension,):
            raise ParameterError(
                f"the sum has shape {entries.shape}; by this plan it has {self.dimension} entries"
            )
        whole = np.rint(entries)
        if not (np.isfinite(entries).all() and np.all(np.abs(entries - whole) < 0.25)):
            raise RecoveryError(
                f"the sum is not of whole numbers: aggregate with the bound {BOUND}, without "
                f"weights, and with {MAX_CLIENTS} clients at most"
            )
        clients = int(whole[0])
        head = np.frombuffer(self._head, dtype=np.uint8)
        if clients < 1 or not np.array_equal(whole[: head.size], clients * head.astype(float)):
            raise RecoveryError(
                f"the sum is not of vectors of this plan alone, or the bound is not {BOUND}"
            )
        _require(bool(np.all((whole >= 0) & (whole <= clients * BOUND))))
        return self._statistics(clients, _numbers_of(whole[head.size :], self._widths))

    def _statistics(self, clients: int, numbers: Iterator[int]) -> Statistics:
        rows = next(numbers)

        def present() -> Present:
            return Present(next(numbers), next(numbers), next(numbers))

        columns = {n: self._column(present(), *self.ranges[n], numbers) for n in self.ranges}
        for found in columns.values():
            _require(found.count + found.missing == rows and found.outside <= found.count)
        categories = {name: present() for name in self.categories}
        for each in categories.values():
            _require(each.count + each.missing + each.outside == rows)
        tables = []
        for pair in self.tables:
            shape = self._shape(pair)
            cells = np.array([next(numbers) for _ in range(math.prod(shape))], dtype=np.int64)
            _require(int(cells.sum()) <= min(categories[name].count for name in pair))
            labels = tuple(tuple(self.categories[name]) for name in pair)
            counts = hide_small_cells(cells.reshape((-1, shape[-1])), self.minimum_cell)
            tables.append(CrossTable(tuple(pair), labels, counts))
        return Statistics(clients, rows, self.minimum_cell, columns, categories, tuple(tables))

    def _column(self, present: Present, low: float, high: float, numbers: Iterator[int]) -> Numbers:
        n, step = present.count, _step(low, high)
        total, squares = next(numbers), next(numbers)
        parts = np.array([next(numbers) for _ in range(self.bins * self.resolution)], np.int64)
        deviations = n * squares - total * total
        _require(parts.sum() == n and deviations >= 0 and total <= n * 2**_STEP_BITS)
        mean = sums = variance = std = None
        if n >= max(1, self.minimum_cell):
            exact = Fraction(low) + Fraction(step) * Fraction(total, n)
            mean, sums = Figure(float(exact), step / 2), Figure(float(exact * n), n * step / 2)
        if n >= max(2, self.minimum_cell):
            found = float(Fraction(step) ** 2 * Fraction(deviations, n * (n - 1)))
            # Half a step more or less for every value moves the standard deviation no further.
            error = step / 2 * math.sqrt(n / (n - 1))
            std = Figure(math.sqrt(found), error)
            variance = Figure(found, error * (2 * std.value + error))
        edges = np.linspace(low, high, parts.size + 1)
        (histogram,) = hide_small_cells(
            parts.reshape(-1, self.resolution).sum(axis=1)[None, :], self.minimum_cell
        )
        return Numbers(
            *(present.count, present.missing, present.outside),
            *(sums, mean, variance, std),
            edges=tuple(map(float, edges[:: self.resolution])),
            histogram=histogram,
            quantiles={q: self._quantile(q, parts, edges) for q in self.quantiles},
        )

    def _quantile(
        self, q: float, parts: NDArray[np.int64], edges: NDArray[np.float64]
    ) -> Figure | None:
        """The middle of the part of the range where it lies, give or take half of that part."""
        n = int(parts.sum())
        rank = math.ceil(Fraction(str(q)) * n)
        if min(rank, n - rank + 1) < max(1, self.minimum_cell):
            return None
        part = int(np.searchsorted(np.cumsum(parts), rank))
        low, high = float(edges[part]), float(edges[part + 1])
        return Figure(low + (high - low) / 2, (high - low) / 2)


def summarise(
    tables: Sequence[Table | None],
    plan: StatisticsPlan,
    *,
    privacy: int,
    dropouts: int = 0,
    survivors: int = 0,
    protocol: str = LIGHTSECAGG,
    threat_model: str = ThreatModel.HONEST_BUT_CURIOUS,
) -> Statistics:
    """The statistics of the clients' tables through a protocol, every message included.

    * `tables`: one per client; None for a client that drops out. See `Table`.
    * `privacy` T, `dropouts` D, `survivors` U, `protocol`, `threat_model`: see `aggregate`.

    Raises `InputRefused` for a table that cannot be read, `ParameterError` for parameters that
    cannot work, `Aborted` if too few clients are left.
    """
    if isinstance(tables, str | bytes | Mapping) or not hasattr(tables, "__len__"):
        raise InputRefused(
            f"tables is {type(tables).__name__}; give a list with one table, or None, per client"
        )
    if len(tables) > MAX_CLIENTS:
        raise ParameterError(f"{len(tables)} tables: sums are exact for {MAX_CLIENTS} at most")
    vectors = []
    for client, table in enumerate(tables):
        try:
            vectors.append(None if table is None else plan.encode(table))
        except InputRefused as error:
            raise InputRefused(f"client {client}: {error}") from error
    result = aggregate(
        vectors,
        privacy=privacy,
        bound=BOUND,
        dropouts=dropouts,
        survivors=survivors,
        protocol=protocol,
        threat_model=threat_model,
    )
    return plan.decode(result.sum)


def _require(consistent: bool) -> None:
    if not consistent:
        raise RecoveryError(
            "the sums contradict each other: a client uploaded something else than a table's vector"
        )


def _numbers_of(entries: NDArray[np.float64], widths: Sequence[int]) -> Iterator[int]:
    """The integers that sums of bytes stand for."""
    digits = iter(entries.astype(np.int64).tolist())
    for width in widths:
        yield sum(next(digits) << 8 * place for place in range(width))


def _step(low: float, high: float) -> float:
    """The power of two of which 2^23 to 2^24 fit in the range."""
    return math.ldexp(1.0, math.frexp(high - low)[1] - _STEP_BITS)

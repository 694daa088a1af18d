"""Jobs on several threads: every column once, in whatever order, and errors as results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.drivers.spreading import LEAST_COLUMNS, ranges, spread
from lightsecagg.errors import NotEnoughAnswers
from lightsecagg.field.group import Elements
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.words import WORDS
from lightsecagg.protocol.jobs import SumUploads, UploadInMemory


@given(st.integers(0, 10**6), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 10**5)))
def test_ranges_make_up_all_columns(columns: int, cores: int, most: int | None) -> None:
    cuts = ranges(columns, cores, most)
    assert sum(stop - start for start, stop in cuts) == columns
    assert all(start == before for (_, before), (start, _) in pairwise(cuts))
    assert most is None or all(stop - start <= most for start, stop in cuts)
    if most is None:
        assert len(cuts) <= cores


class Together(SumUploads):
    """Ranges that end only if as many as there are cores run at once."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties)
        self.vectors = [
            np.arange(k, 4 * LEAST_COLUMNS + k, dtype=np.uint32) + np.uint32(2**32 - 9)
            for k in range(3)
        ]
        uploads = [UploadInMemory(vector) for vector in self.vectors]
        super().__init__(WORDS, 4 * LEAST_COLUMNS, uploads)

    def run(self, start: int, stop: int) -> Elements:
        self.barrier.wait(60)
        return super().run(start, stop)


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
def test_as_many_ranges_run_at_once_as_there_are_cores(cores: int) -> None:
    job = Together(cores)
    result = spread(job, cores)
    assert isinstance(result, np.ndarray)
    columns = zip(*(vector.tolist() for vector in job.vectors), strict=True)
    expected = [sum(column) % 2**32 for column in columns]
    assert result.tolist() == expected


def test_the_ranges_are_observed_and_nothing_else() -> None:
    log: list[str] = []

    class Watched(SumUploads):
        def open(self) -> None:
            log.append("open")

        def run(self, start: int, stop: int) -> Elements:
            log.append("run")
            return super().run(start, stop)

        def put(self, start: int, part: Elements) -> None:
            log.append("put")
            super().put(start, part)

        def result(self) -> Elements:
            log.append("result")
            return super().result()

    @contextmanager
    def observe() -> Iterator[None]:
        log.append("[")
        yield
        log.append("]")

    one = UploadInMemory(np.ones(2 * LEAST_COLUMNS, dtype=np.uint32))
    result = spread(Watched(DEFAULT_FIELD, 2 * LEAST_COLUMNS, [one] * 2), 2, observe)
    assert isinstance(result, np.ndarray)
    assert set(result.tolist()) == {2}
    assert log == ["open", "[", "run", "run", "]", "put", "put", "result"]


@pytest.mark.parametrize("where", ["open", "run", "result"])
def test_a_recovery_error_is_the_result(where: str) -> None:
    class Failing(SumUploads):
        pass

    def fail(*arguments: object) -> Elements:
        raise NotEnoughAnswers("too few")

    setattr(Failing, where, fail)
    one = UploadInMemory(np.ones(4 * LEAST_COLUMNS, dtype=np.uint32))
    result = spread(Failing(DEFAULT_FIELD, 4 * LEAST_COLUMNS, [one]), 3)
    assert isinstance(result, NotEnoughAnswers)

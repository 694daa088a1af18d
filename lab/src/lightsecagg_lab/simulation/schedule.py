"""Who is done when: the schedules of the asynchronous simulation.

A schedule is asked for one event after another and told the version of the current model, because
how stale an update is depends on when its client downloaded the model. Everything random in it
comes from one generator of its own: protected and unprotected runs with the same seed see the same
clients in the same order, as long as their buffers fill alike.

* `UniformStaleness`: the paper's setting. A client drawn at random hands in an update whose
  staleness is uniform on [0, tau_max].
* `EventQueue`: clients of different speed download, train and upload on a virtual clock; some
  strokes of work are much slower than others, and clients leave and come back.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Protocol

import numpy as np

from lightsecagg.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Finished:
    """A client has trained from the model of this version, and its upload arrives."""

    client: int
    version: int


@dataclass(frozen=True, slots=True)
class Left:
    """A client is gone, for now; what it was training is lost."""

    client: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A client is back."""

    client: int


Event = Finished | Left | Returned


class Schedule(Protocol):
    """A source of events without end."""

    @property
    def clock(self) -> float | None:
        """Virtual seconds since the start; None if the schedule has no clock."""

    def next(self, version: int) -> Event:
        """The next event, given the version of the current model."""


class UniformStaleness:
    """The paper's setting (Appendix F.5): random clients, staleness uniform on [0, tau_max].

    In the first rounds there are no older models than the first, so the staleness is at most t.
    """

    def __init__(self, clients: int, max_staleness: int, generator: np.random.Generator) -> None:
        if clients < 1 or max_staleness < 0:
            raise ParameterError(
                f"N = {clients} must be at least 1 and tau_max = {max_staleness} at least 0"
            )
        self._clients = clients
        self._max_staleness = max_staleness
        self._generator = generator
        self._order: deque[int] = deque()

    @property
    def clock(self) -> float | None:
        """None: rounds are counted, not seconds."""
        return None

    def next(self, version: int) -> Event:
        """An update of a random client; everybody's turn comes before anybody's second."""
        if not self._order:
            self._order.extend(self._generator.permutation(self._clients).tolist())
        staleness = int(self._generator.integers(self._max_staleness + 1))
        return Finished(self._order.popleft(), max(0, version - staleness))


@dataclass(frozen=True, slots=True)
class Fleet:
    """How fast and how reliable the clients are."""

    compute: float = 10.0
    """Median seconds of one local training."""
    spread: float = 0.5
    """Standard deviation of the logarithm of a client's speed, in computing and on its link."""
    bandwidth: float = 20.0
    """Median Mbit/s of a client's link."""
    straggling: float = 0.05
    """How often a training takes ten times as long."""
    dropout: float = 0.0
    """How often a client leaves before its work is done."""
    absence: float = 60.0
    """Mean seconds until it is back."""
    concurrency: int = 0
    """How many clients work at a time; 0 stands for everybody."""

    def __post_init__(self) -> None:
        for name in ("compute", "bandwidth", "absence"):
            if not 0 < getattr(self, name) < np.inf:
                raise ParameterError(f"{name} = {getattr(self, name)} must be positive")
        for name in ("straggling", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ParameterError(f"{name} = {getattr(self, name)} must lie in [0, 1)")
        if not 0 <= self.spread <= 3:
            raise ParameterError(f"spread = {self.spread} must lie in [0, 3]")
        if self.concurrency < 0:
            raise ParameterError(f"concurrency = {self.concurrency} must not be negative")


class _What(Enum):
    START = auto()
    FINISH = auto()
    LEAVE = auto()
    RETURN = auto()


class EventQueue:
    """Clients of a `Fleet` on a virtual clock.

    An idle client is put to work whenever fewer than `concurrency` are at work. It downloads the
    model, trains, and uploads; the three follow one another on its own link and processor.
    """

    def __init__(
        self, clients: int, payload: int, fleet: Fleet, generator: np.random.Generator
    ) -> None:
        """`payload`: bytes of a model, and of an upload."""
        if clients < 1:
            raise ParameterError(f"N = {clients} must be at least 1")
        self._fleet = fleet
        self._generator = generator
        self._now = 0.0
        slowness = generator.lognormal(0.0, fleet.spread, (2, clients))
        self._compute = fleet.compute * slowness[0]
        self._transfer = 8 * payload / (fleet.bandwidth * 1e6) * slowness[1]
        self._idle = deque(generator.permutation(clients).tolist())
        self._versions: dict[int, int] = {}
        self._queue: list[tuple[float, int, _What, int]] = []
        self._number = count()
        self._jobs = fleet.concurrency or clients  # how many more clients may work
        self._employ()

    @property
    def clock(self) -> float | None:
        """Virtual seconds since the start."""
        return self._now

    def next(self, version: int) -> Event:
        """The next upload, departure or return."""
        while True:
            self._now, _, what, client = heapq.heappop(self._queue)
            match what:
                case _What.START:
                    self._start(client, version)
                case _What.FINISH:
                    self._idle.append(client)
                    self._jobs += 1
                    self._employ()
                    return Finished(client, self._versions.pop(client))
                case _What.LEAVE:
                    del self._versions[client]
                    self._jobs += 1
                    self._employ()
                    absence = self._generator.exponential(self._fleet.absence)
                    self._push(absence, _What.RETURN, client)
                    return Left(client)
                case _What.RETURN:
                    self._idle.append(client)
                    self._employ()
                    return Returned(client)

    def _start(self, client: int, version: int) -> None:
        self._versions[client] = version
        slow = 10.0 if self._generator.random() < self._fleet.straggling else 1.0
        seconds = 2 * self._transfer[client] + slow * self._compute[client]
        if self._generator.random() < self._fleet.dropout:
            self._push(seconds * self._generator.random(), _What.LEAVE, client)
        else:
            self._push(seconds, _What.FINISH, client)

    def _employ(self) -> None:
        """Put those clients to work that have been idle for longest."""
        while self._jobs and self._idle:
            self._jobs -= 1
            self._push(0.0, _What.START, self._idle.popleft())

    def _push(self, delay: float, what: _What, client: int) -> None:
        heapq.heappush(self._queue, (self._now + delay, next(self._number), what, client))

"""What sees all that a client does, its plain updates too: for demonstrations and tests.

It is installed in code, by whoever makes the client. No configuration names one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from lightsecagg.session.interface import Effect, Event, Trained, TrainingFailed

Training = Callable[[], Awaitable[Trained | TrainingFailed]]


class ClientWatch:
    """Does nothing about it; override what you need. All is called at once, in the client's way."""

    def begins(self, client: int) -> None:
        """The client with this id is made."""

    @contextmanager
    def step(self, event: Event, effects: Sequence[Effect], start: float) -> Iterator[None]:
        """Inside, it carries out what its session made of an event from `start` on."""
        yield

    async def training(self, number: int, train: Training) -> Trained | TrainingFailed:
        """It trains for a round, or from a version of the model."""
        return await train()

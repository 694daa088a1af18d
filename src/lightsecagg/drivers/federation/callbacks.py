"""Your own code, told of every round: for dashboards, trackers of experiments, alarms.

Name a class in the configuration (`server.callbacks`, `client.callbacks`), or hand objects to
`build_server` and `build_client`. Calls come one after the other in a thread of their own: no
round waits for them, and one that raises is a warning with its traceback in the log.

A server's callback is told what the log and `rounds.json` say, a client's what its own log says:
no update, no metric of one client, no sample count.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from lightsecagg.drivers.federation.observer import log
from lightsecagg.errors import ConfigurationError, LightSecAggError
from lightsecagg.foreign import where
from lightsecagg.session.record import RoundRecord
from lightsecagg.training.plugin import load_named

PATIENCE: Final = 30.0
"""Seconds in which callbacks may finish when their program ends."""


class ServerCallback:
    """What a server tells; override what you need."""

    def round_begins(self, number: int, invited: Sequence[int]) -> None:
        """A round was announced to these clients."""

    def round_ended(self, record: RoundRecord) -> None:
        """A round is over, done or aborted, and its record is stored."""

    def finished(self, reason: str) -> None:
        """The federation is over; clients were told the same."""


class ClientCallback:
    """What a client tells; override what you need."""

    def round_begins(self, number: int) -> None:
        """The global model of a round has arrived."""

    def trained(self, number: int, seconds: float) -> None:
        """This client's update is ready."""

    def round_ended(self, number: int, included: bool, aborted: str | None) -> None:
        """A round is over: whether with this client's update, and why not, if it was aborted."""

    def finished(self, reason: str) -> None:
        """The server has said goodbye."""


Kind = TypeVar("Kind", ServerCallback, ClientCallback)


def load_callbacks(names: Iterable[str], kind: type[Kind], key: str) -> list[Kind]:
    """One object of each class that the configuration names."""
    loaded = []
    for name in names:
        try:
            made = load_named(name, key)()
        except LightSecAggError:
            raise
        except Exception as error:
            raise ConfigurationError(f"{key} {name} fails with {where(error)}") from error
        if not isinstance(made, kind):
            raise ConfigurationError(
                f"{key} {name}: this is a {type(made).__name__}, not a subclass of "
                f"lightsecagg.drivers.federation.callbacks.{kind.__name__}"
            )
        loaded.append(made)
    return loaded


class Callbacks(Generic[Kind]):
    """Calls them in order, in a thread; a failing one harms nobody."""

    def __init__(self, members: Iterable[Kind] = ()) -> None:
        self._members: list[Kind] = list(members)
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, event: str, *arguments: Any) -> None:
        """Call this method of every member, soon."""
        if not self._members:
            return
        if self._thread is None:
            # A daemon: a callback that never returns must not keep the program from ending.
            self._thread = threading.Thread(target=self._work, name="callbacks", daemon=True)
            self._thread.start()
        self._calls.put((event, arguments))

    def close(self, patience: float = PATIENCE) -> None:
        """Wait until all are told, but not for ever."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._calls.put(None)
        thread.join(patience)
        if thread.is_alive():
            log.warning("a callback has not returned within %g s; it is left behind", patience)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            event, arguments = call
            for member in self._members:
                try:
                    getattr(member, event)(*arguments)
                except (Exception, SystemExit):  # nor may it end this thread, and fall silent
                    name = f"{type(member).__name__}.{event}"
                    log.warning(
                        "the callback %s failed; nothing else is harmed", name, exc_info=True
                    )

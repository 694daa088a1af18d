"""Your own code for every round: dashboards, experiment trackers, alarms.

Name a class in the configuration (`server.callbacks`, `client.callbacks`), or hand objects to
`build_server` and `build_client`. Each object has a thread of its own, which runs its calls one
after the other. No round and no other callback waits for them. If a call raises, the log has a
warning with the traceback.

A server's callback receives the content of the log and of `rounds.json`, a client's that of its own
log: no update, no metric of one client, no sample count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Generic, Literal, TypeVar

from lightsecagg.drivers.federation.observer import log
from lightsecagg.errors import ConfigurationError, LightSecAggError
from lightsecagg.foreign import where
from lightsecagg.session.interface import Leave
from lightsecagg.session.record import RoundRecord
from lightsecagg.training.plugin import load_named

CONNECT: Final = "connect"
"""What a server reports progress of before a round."""
PATIENCE: Final = 30.0
"""Seconds in which callbacks may finish when their program ends."""


@dataclass(frozen=True, slots=True)
class Overview:
    """What kind of federation it is."""

    protocol: str
    threat_model: str
    clients: int
    """N"""
    privacy: int
    """T"""
    dropouts: int
    """D"""
    survivors: int
    """U"""
    rounds: int
    """How many are wanted."""
    completed: int
    """How many were done when the server was started."""
    mode: Literal["sync", "async"] = "sync"
    buffer: int = 0
    """Asynchronous: K, the updates of one step."""


class ServerCallback:
    """Events of a server; override what you need."""

    def begins(self, overview: Overview, past: Sequence[dict[str, Any]]) -> None:
        """The server is up, with the records of all rounds before, as `rounds.json` has them.

        A round that a crash cut short may have begun again already.
        """

    def members(self, names: Mapping[int, str], needed: int) -> None:
        """Who may take part from now on, by id, and how many of them a round waits for.

        A client without a name has an empty one.
        """

    def connected(self, client: int) -> None:
        """A client has a stream."""

    def disconnected(self, client: int) -> None:
        """It has none any more; whether it is given up is another matter."""

    def round_begins(self, number: int, invited: Sequence[int]) -> None:
        """A round was announced to these clients, or goes on after a crash."""

    def progress(self, phase: str, awaited: Collection[int]) -> None:
        """Whose messages a phase still waits for: when it begins, and now and then."""

    def client_left(self, client: int, phase: str, how: Leave, reason: str) -> None:
        """A client is waited for no more in this round; `reason` is fit to be seen."""

    def update_buffered(self, client: int, staleness: int) -> None:
        """Asynchronous: an update that is so many versions behind is in the buffer."""

    def round_ended(self, record: RoundRecord) -> None:
        """A round is over, done or aborted, and its record is stored."""

    def finished(self, reason: str) -> None:
        """The federation is over; clients receive the same reason."""

    def close(self) -> None:
        """The program ends; this is the last call."""


class ClientCallback:
    """Events of a client; override what you need."""

    def round_begins(self, number: int) -> None:
        """The global model of a round has arrived."""

    def trained(self, number: int, seconds: float) -> None:
        """This client's update is ready."""

    def round_ended(self, number: int, included: bool, aborted: str | None) -> None:
        """A round is over: whether with this client's update, and why not, if it was aborted."""

    def finished(self, reason: str) -> None:
        """The server has said goodbye."""

    def close(self) -> None:
        """The program ends; this is the last call."""


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
    """Calls each member in a thread of its own; a failing one harms no other."""

    def __init__(self, members: Iterable[Kind] = ()) -> None:
        self._members = [_Told(member) for member in members]

    def tell(self, event: str, *arguments: Any) -> None:
        """Call this method of every member, soon."""
        for member in self._members:
            member.tell(event, arguments)

    def close(self, patience: float = PATIENCE) -> None:
        """Wait until all calls are done, the last ones too, but not for ever."""
        self.tell("close")
        deadline = time.monotonic() + patience
        returned = [member.ends(deadline) for member in self._members]
        if not all(returned):
            log.warning("a callback has not returned within %g s; it is left behind", patience)
        self._members = []


class _Told:
    """One object and the calls that wait for it."""

    def __init__(self, member: ServerCallback | ClientCallback) -> None:
        self._member = member
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._thread is None:
            # A daemon: a callback that never returns must not keep the program from ending.
            self._thread = threading.Thread(target=self._work, name="callbacks", daemon=True)
            self._thread.start()
        self._calls.put((event, arguments))

    def ends(self, deadline: float) -> bool:
        """Whether it has returned from its last call by then."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._thread is None or not self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            event, arguments = call
            try:
                getattr(self._member, event)(*arguments)
            except (Exception, SystemExit):  # nor may it end this thread, and fall silent
                name = f"{type(self._member).__name__}.{event}"
                log.warning("the callback %s failed; nothing else is harmed", name, exc_info=True)

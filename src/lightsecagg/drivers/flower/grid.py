"""A Flower grid that is polled often, waits with an end, and forgets no message.

Flower's own `send_and_receive` sleeps three seconds between two looks, and drops the messages that
its timeout leaves unanswered; `sample_nodes` waits for nodes for ever. Here a look is due every
`interval` seconds; a reply that is late is found by a later look, whatever that one is for; and
`get_node_ids` loses patience with whoever asks again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.run import Run

Replied = Callable[[int, Message], Iterable[Message]]
"""Takes a node and its reply, and returns messages to send at once.

The node is the one that was asked: Flower replies for a dead one, under its own id.
"""


class PatientGrid(Grid):
    """A grid around Flower's; see the module."""

    def __init__(self, grid: Grid, interval: float, patience: float) -> None:
        self._grid = grid
        self._interval = interval
        self._patience = patience
        self._waiting_since: float | None = None
        self._open: dict[str, int] = {}  # messages without a reply, and the nodes they went to
        self.late: Callable[[int, Message], object] = lambda node, reply: None
        """Takes replies to messages that nobody waits for any more."""

    def exchange(
        self,
        messages: Iterable[Message],
        timeout: float,
        replied: Replied,
        enough: Callable[[], bool] = lambda: False,
    ) -> set[int]:
        """Send messages and take replies until all are in, `enough` says so, or time is up.

        Returns the nodes that have not replied.
        """
        pending = self._push(messages)
        deadline = time.monotonic() + timeout
        while True:
            for message_id, node, reply in self._look():
                if pending.pop(message_id, None) is None:
                    self.late(node, reply)
                else:
                    pending |= self._push(replied(node, reply))
            if not pending or enough() or time.monotonic() >= deadline:
                return set(pending.values())
            time.sleep(self._interval)

    def connected(self) -> frozenset[int]:
        """The nodes that are connected now."""
        return frozenset(self._grid.get_node_ids())

    def wraps(self, grid: Grid) -> bool:
        """Whether it is this grid that is inside."""
        return self._grid is grid

    def be_patient(self) -> None:
        """Whoever waits for nodes begins to wait now."""
        self._waiting_since = None

    def _push(self, messages: Iterable[Message]) -> dict[str, int]:
        sent = list(messages)
        ids = self._grid.push_messages(sent) if sent else []
        pairs = zip(ids, sent, strict=False)
        pushed = {id_: message.metadata.dst_node_id for id_, message in pairs if id_}
        self._open |= pushed
        return pushed

    def _look(self) -> list[tuple[str, int, Message]]:
        if not self._open:
            return []
        found = []
        for reply in self._grid.pull_messages(list(self._open)):
            answered = reply.metadata.reply_to_message_id
            if answered in self._open:
                found.append((answered, self._open.pop(answered), reply))
        return found

    # -- Flower's interface ------------------------------------------------------------------

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are connected; `TimeoutError` for who has asked for too long."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        nodes = list(self._grid.get_node_ids())
        if now - self._waiting_since > self._patience:
            raise TimeoutError(
                f"only {len(nodes)} nodes are connected, and the strategy has waited for more for "
                f"{self._patience:.0f} s; lower its min_available_nodes, or start more SuperNodes"
            )
        return nodes

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As Flower's, and quicker; waits no longer than `patience`."""
        replies: list[Message] = []
        wait = self._patience if timeout is None else min(timeout, self._patience)

        def replied(node: int, reply: Message) -> Iterable[Message]:
            replies.append(reply)
            return ()

        self.exchange(messages, wait, replied)
        return replies

    def set_run(self, run: Run) -> None:
        """As Flower's."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """As Flower's."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """As Flower's."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """As Flower's."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As Flower's."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As Flower's."""
        return self._grid.pull_messages(message_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

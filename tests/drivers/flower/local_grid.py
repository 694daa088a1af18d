"""A Flower grid in this process: every message and reply is serialised as Flower does it.

Nodes are a `ClientApp` and a `Context` each. A node works when its reply is looked for, one message
at a time; hooks make one fail, hang, die, or be killed after its reply has left.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1


class Killed(BaseException):
    """The node's process ends here."""


def carried(*messages: Message) -> list[tuple[Message, list[bytes]]]:
    """The messages as their recipients get them, and the bytes of all their objects.

    As Flower does it: what several messages have in common is hashed and serialised once.
    """
    contents: dict[str, bytes] = {}
    found = []
    with no_object_id_recompute():
        for message in messages:
            name = message.metadata.__dict__["_message_id"] = message.object_id
            objects = get_all_nested_objects(message)
            contents |= {n: o.deflate() for n, o in objects.items() if n not in contents}
            arrived = inflate_object_from_contents(name, contents, keep_object_contents=True)
            assert isinstance(arrived, Message)
            arrived.metadata.__dict__["_message_id"] = name
            found.append((arrived, [contents[n] for n in objects]))
    return found


class Node:
    """A SuperNode: an app, a memory, and what goes wrong with it."""

    def __init__(self, node_id: int, app: ClientApp, node_config: dict[str, Any]) -> None:
        self.node_id = node_id
        self.app = app
        self.node_config = node_config
        self.run_config: dict[str, Any] = {}
        """What the SuperLink says that the run's config is."""
        self.run_id = 1
        """And which run it is."""
        self.series_id = 0
        """And of which series."""
        self.state = RecordDict()
        self.connected = True
        self.inbox: deque[tuple[str, Message]] = deque()
        self.before: Callable[[Message], None] = lambda message: None
        """Called before the app gets a message; may raise."""
        self.after: Callable[[Message, Message], bool] = lambda message, reply: True
        """Whether the reply leaves; may raise `Killed`: it leaves, and the memory is not stored."""

    def work(self) -> tuple[str, Message] | None:
        """Take one message and reply to it."""
        if not self.connected or not self.inbox:
            return None
        message_id, message = self.inbox.popleft()
        state = copy.deepcopy(self.state)
        try:
            self.before(message)
            told = self.run_id, self.node_id, self.node_config, state, self.run_config
            context = Context(*told, self.series_id)
            asked = copy.copy(message)
            reply = self.app(message, context)
            try:
                leaves = self.after(asked, reply)
            except Killed:
                return message_id, reply
            self.state = context.state
            return (message_id, reply) if leaves else None
        except Killed:
            self.connected = False
            return None
        except Exception as error:  # as Flower does: its text reaches the server
            self.state = state
            told = f"{type(error)}:<'{error}'>"
            return message_id, Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, told), reply_to=message
            )


class LocalGrid(Grid):
    """Nodes in this process."""

    def __init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1
        self.nodes: dict[int, Node] = {}
        self.replies: dict[str, Message] = {}
        self.seen: list[tuple[int, list[bytes]]] = []
        """The bytes of every object of every reply that left a node."""
        self.reasons: list[str] = []
        """The texts of the errors among them."""
        self.pushed = 0
        self.notices_death = False
        """Whether the grid replies for dead nodes, as Flower does after a minute."""

    def add(self, node_id: int, app: ClientApp, **node_config: Any) -> Node:
        """Connect a node."""
        config = {key.replace("_", "-"): value for key, value in node_config.items()}
        self.nodes[node_id] = Node(node_id, app, config)
        return self.nodes[node_id]

    def get_node_ids(self) -> Iterable[int]:
        return [node_id for node_id, node in self.nodes.items() if node.connected]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for arrived, _ in carried(*messages):
            message_id = arrived.metadata.message_id
            node = self.nodes[arrived.metadata.dst_node_id]
            if node.connected or not self.notices_death:
                node.inbox.append((message_id, arrived))
            else:
                reply = Message(
                    Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=arrived
                )
                reply.metadata.__dict__["_src_node_id"] = SERVER
                self.replies[message_id] = reply
            ids.append(message_id)
            self.pushed += 1
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for node in list(self.nodes.values()):
            while (done := node.work()) is not None:
                message_id, reply = done
                ((arrived, objects),) = carried(reply)
                self.seen.append((node.node_id, objects))
                if arrived.has_error():
                    self.reasons.append(str(arrived.error.reason))
                self.replies[message_id] = arrived
        wanted = [message_id for message_id in message_ids if message_id in self.replies]
        return [self.replies.pop(message_id) for message_id in wanted]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

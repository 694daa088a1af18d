"""The server's side of an epoch: one roster, its party, and a link to every node.

Theory of operation. Flower carries a message to a node and a reply back, and loses either now and
then; the party wants links that are first in, first out. So the frames for a node wait in its link
until the node says that it has them. Every parcel to it holds all that wait.

    hello    the nodes' identity keys, before there is an epoch
    open     the opening, and everybody's fresh keys
    relay    the roster, and shares of the first masks

and then, for every round of Flower, two exchanges:

    train    the model -> the masked update, and shares of a mask for the round after the next
    relay    the peers' shares and the buffer -> reports on the shares, and the answer

This is the asynchronous mode with equal weights and no staleness: a buffer is a round, its time is
the round's number in the epoch. Every node has two masks shared ahead, so that one who misses an
exchange has another for the next round. A buffer is announced once; who did not answer is asked for
the same again, and for nothing else, so that asking again reveals nothing (S42).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from logging import WARNING

import numpy as np
from flwr.app import Message as FlowerMessage
from flwr.common.logger import log
from numpy.typing import NDArray

from lightsecagg.drivers.flower.agreed import FORGOTTEN, allow_list_of, buffering
from lightsecagg.drivers.flower.parcels import Parcel, Stage, detach
from lightsecagg.errors import Aborted, LightSecAggError, ParameterError
from lightsecagg.foreign import shown
from lightsecagg.params import Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import LONG_EPOCH
from lightsecagg.protocol.interface import BufferAggregate, BufferFailed, Phase, RoundAborted, Send
from lightsecagg.protocol.jobs import at_once
from lightsecagg.protocol.messages import (
    Advertise,
    Certificate,
    MaskedUpload,
    Message,
    SumRequest,
    UploadDropped,
)
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.registry import server_party
from lightsecagg.protocol.schemes.traits import LIGHTSECAGG
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec

_MORE_NODES = 1000
"""How far the search for a number of nodes that is enough goes."""


@dataclass(frozen=True)
class Terms:
    """What the user of the wrapper has chosen."""

    privacy: int | float
    """T, or as a fraction of N, rounded up."""
    dropouts: int | float
    """D, or as a fraction of N, rounded down."""
    bound: float
    max_samples: int = 1
    """1: all updates count alike."""
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS
    share_mode: ShareMode = ShareMode.SEEDED

    def __post_init__(self) -> None:
        for name, value in (("privacy", self.privacy), ("dropouts", self.dropouts)):
            if not isinstance(value, int) and not 0 <= value < 1:
                raise ParameterError(
                    f"{name} = {value} must be a count, or a fraction of at least 0, below 1"
                )

    def parameters(self, asked: int, came: int | None = None) -> Parameters:
        """N, T, D and U = N - D, where so many nodes were asked, and so many of them came.

        Who did not come has dropped out: it leaves so many fewer who may. `ParameterError` if
        there are too few nodes, with the number that is enough.
        """
        try:
            whole = self._parameters(asked)
        except ParameterError as error:
            enough = self._least_nodes(asked)
            if enough is None:
                raise
            raise ParameterError(
                f"connected nodes: {asked}, needed with privacy={self.privacy} and dropouts="
                f"{self.dropouts}: at least {enough}. In Flower's simulation: flwr run "
                f'--federation-config "num-supernodes={max(10, enough)}"; in a deployment start '
                "more SuperNodes, and let the wrapped strategy wait for them: "
                f"min_available_nodes={enough} ({error})"
            ) from error
        missing = 0 if came is None else asked - came
        return replace(whole, clients=asked - missing, dropouts=whole.dropouts - missing)

    def privacy_of(self, nodes: int) -> int:
        """T, with so many nodes."""
        return _count(self.privacy, nodes, up=True)

    def _parameters(self, nodes: int) -> Parameters:
        return Parameters(
            clients=nodes,
            privacy=self.privacy_of(nodes),
            dropouts=_count(self.dropouts, nodes, up=False),
            threat_model=self.threat_model,
            share_mode=self.share_mode,
        )

    def _least_nodes(self, few: int) -> int | None:
        """The least number of nodes above this one that is enough, if there is any."""
        for nodes in range(few + 1, few + _MORE_NODES):
            with suppress(ParameterError):
                return self._parameters(nodes).clients
        return None

    def settings(
        self,
        parameters: Parameters,
        allow_list: AllowList,
        dimension: int,
        session: bytes,
        number: int,
    ) -> Settings:
        """The settings of an epoch over the clients of this allow-list."""
        rounds = buffering(len(allow_list))
        quantizer = make_quantizer(
            parameters,
            dimension,
            self.bound,
            max_samples=self.max_samples,
            weighted=self.max_samples > 1,
            buffering=rounds,
        )
        return Settings(
            protocol=LIGHTSECAGG,
            parameters=parameters,
            quantizer=quantizer,
            dimension=dimension,
            session=session,
            round=number,
            allow_list=allow_list.digest,
            buffering=rounds,
        )


@dataclass(frozen=True, slots=True)
class Average:
    """The result of one round."""

    values: NDArray[np.float64] = field(repr=False)
    """The (weighted) average of the vectors."""
    samples: int
    """The sum of the weights."""
    clients: int
    """How many clients are in it."""


@dataclass(slots=True)
class _Link:
    """The frames on their way to a node."""

    acknowledged: int = 0
    waiting: list[bytes] = field(default_factory=list)

    def acknowledge(self, count: int) -> None:
        """The node has this many frames since the epoch began."""
        if not self.acknowledged <= count <= self.acknowledged + len(self.waiting):
            return  # an old reply, or nonsense: they are sent again
        del self.waiting[: count - self.acknowledged]
        self.acknowledged = count


class Epoch:
    """One roster and all its rounds; see the theory of operation."""

    def __init__(
        self,
        keys: Mapping[int, bytes],
        parameters: Parameters,
        terms: Terms,
        dimension: int,
        session: bytes,
        number: int,
    ) -> None:
        """`keys`: identity keys by Flower's node id."""
        self._allow_list = allow_list_of(keys.values())
        clients = {self._allow_list[client]: client for client in self._allow_list.clients}
        self._client_of = {node: clients[key] for node, key in keys.items()}
        self._node_of = {client: node for node, client in self._client_of.items()}
        self.settings = terms.settings(parameters, self._allow_list, dimension, session, number)
        self._codec = Codec(self.settings.group)
        self._server = server_party(self.settings, self._allow_list, buffer_size=len(keys))
        # That a node has died shows by the timeout alone: no answer is awaited but those needed.
        self._server.in_flight.spare_answers = 0
        self._links = {node: _Link() for node in keys}
        self._away: set[int] = set()
        self._members = set(keys)
        self.urgent: set[int] = set()
        """Nodes whose answer or consent the round waits for."""
        self._advertised: set[int] = set()
        self._uploaded: set[int] = set()
        self._aggregate: BufferAggregate | None = None
        self._failure: str | None = None
        self._do(self._server.start())

    @property
    def nodes(self) -> frozenset[int]:
        """Everybody who takes part: who advertised keys in time, and still has them."""
        return frozenset(self._members)

    @property
    def invited(self) -> frozenset[int]:
        """Everybody who was asked for keys."""
        return frozenset(self._links)

    @property
    def is_old(self) -> bool:
        """Whether its keys have served for long."""
        return self._server.time >= LONG_EPOCH

    @property
    def uploaded(self) -> frozenset[int]:
        """The nodes whose updates are here."""
        return frozenset(self._uploaded)

    # -- stages ------------------------------------------------------------------------------

    def close_registration(self) -> None:
        """Go on with those whose keys are here; `Aborted` if they are too few."""
        if self._server.phase is Phase.ADVERTISE:
            self._do(self._server.proceed())
        self._check()
        self._members &= self._advertised

    def begin_round(self, model: bytes) -> int:
        """A round from the model with this hash; its number."""
        self._uploaded, self._aggregate = set(), None
        self.urgent.clear()
        self._server.intake.publish(model)
        return self._server.time

    def announce(self) -> None:
        """No more updates: ask for the answers to those that are here."""
        if self._server.phase is Phase.UPLOAD:
            self._do(self._server.flush())

    @property
    def is_decided(self) -> bool:
        """Whether the round has a result, or can have none."""
        return self._aggregate is not None or self._failure is not None

    def result(self) -> Average:
        """The average, once enough nodes have answered; `Aborted` if it cannot be had.

        `RecoveryError` if no honest updates have this average (S47).
        """
        if self._aggregate is None:
            self._do(self._server.proceed())  # too few answers are here: hear its reasons
        self._check()
        if self._aggregate is None:
            raise Aborted("the round ended without a result")
        if suspects := [self._node_of[client] for client in self._aggregate.suspects]:
            log(WARNING, "LightSecAgg: nodes %s contradict the others", suspects)
        clients = len(self._aggregate.owners)
        values, samples = self.settings.average(self._aggregate.total, clients)
        if not self.settings.quantizer.weighted:
            values, samples = values / clients, clients
        return Average(values, samples, clients)

    def _check(self) -> None:
        if self._failure is not None:
            raise Aborted(self._failure)

    # -- nodes -------------------------------------------------------------------------------

    def connect(self, nodes: Iterable[int]) -> None:
        """These nodes can be reached, the others not."""
        reachable = frozenset(nodes) & self.nodes
        for node in reachable & self._away:
            self._away.discard(node)
            self._do(self._server.rejoin(self._client_of[node]))
        for node in self.nodes - reachable - self._away:
            self.lose(node)

    def lose(self, node: int) -> None:
        """A node cannot be reached: the party keeps by what it will need."""
        self._away.add(node)
        self._do(self._server.drop(self._client_of[node]))

    def parcel(self, node: int, stage: Stage, **numbers: object) -> Parcel:
        """All that waits for a node."""
        self._do(self._server.intake.relay())
        link = self._links[node]
        numbers |= {"stage": str(stage), "epoch": self.settings.context, "first": link.acknowledged}
        return Parcel(numbers, tuple(link.waiting))

    @property
    def keys(self) -> list[bytes]:
        """The identity keys of all nodes."""
        return [self._allow_list[client] for client in self._allow_list.clients]

    def deliver(self, node: int, reply: FlowerMessage) -> str | None:
        """Take a node's reply; why it is of no use, or None."""
        if reply.has_error():
            if reply.error.reason == FORGOTTEN:
                self._members.discard(node)
            return shown(reply.error.reason)
        try:
            parcel, _ = detach(reply.content)
            if parcel is None:
                return "it has no lightsecagg_mod"
            if parcel.numbers.get("epoch") != self.settings.context or node not in self._links:
                return "it speaks of another epoch"
            self.urgent.discard(node)
            self._take(node, parcel)
        except LightSecAggError as error:
            log(WARNING, "LightSecAgg: node %d is ignored: %s", node, shown(error))
            return shown(error)
        return "it could not train; see its log" if parcel.numbers.get("failed") else None

    def _take(self, node: int, parcel: Parcel) -> None:
        received = parcel.numbers.get("received")
        if isinstance(received, int):
            self._links[node].acknowledge(received)
        client = self._client_of[node]
        for frame in parcel.frames:
            message = self._codec.decode(frame)
            outputs = self._server.receive(client, message)
            if isinstance(message, Advertise):
                self._advertised.add(node)
            if isinstance(message, MaskedUpload) and not _is_dropped(outputs, client):
                self._uploaded.add(node)
            self._do(outputs)

    def _do(self, outputs: Sequence[object]) -> None:
        encoded: tuple[Message | None, bytes] = None, b""
        for output in at_once(self._server, outputs):
            match output:
                case Send(to, message):
                    if message is not encoded[0]:  # a broadcast is encoded once
                        encoded = message, self._codec.encode(message)
                    node = self._node_of[to]
                    self._links[node].waiting.append(encoded[1])
                    if isinstance(message, SumRequest | Certificate):
                        self.urgent.add(node)
                case BufferAggregate():
                    self._aggregate = output
                case BufferFailed() | RoundAborted():
                    self._failure = output.reason


def _is_dropped(outputs: Sequence[object], client: int) -> bool:
    """Whether the party refuses a client's upload, politely."""
    return any(
        isinstance(output, Send)
        and output.to == client
        and isinstance(output.message, UploadDropped)
        for output in outputs
    )


def _count(value: int | float, clients: int, *, up: bool) -> int:
    """A number of clients that was given as such, or as a fraction of all."""
    if isinstance(value, int):
        return value
    exact = value * clients
    return int(np.ceil(exact - 1e-9) if up else np.floor(exact + 1e-9))

"""The client: a Flower mod that stands between the server and the app's training.

One message in, one message out. The mod takes the parcel from the message, gives its frames to the
party, lets the app train if the server asks for an update, masks what comes of it, and replies with
what the party wants to be sent. What the node must remember is stored first; see `node`.

It fails closed. A TRAIN message without a parcel is not trained for, because its reply would be an
update in the clear. Any other message without one is the app's alone, unless the node's operator
demands malicious-server or the strategy wants masked evaluations: losses of one node, for models of
the server's choice, are its gradient (S58). Whatever goes wrong, the server hears one of a few
constant sentences, because the text of an exception could quote an update. The node's own log has
the reason. An app that cannot train is reported as such, and its node still helps to recover the
others' sum.
"""

from __future__ import annotations

import math
import time
from logging import ERROR, WARNING
from typing import Any, TypeVar

import numpy as np
from flwr.app import (
    DEFAULT_TTL,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.logger import log

from lightsecagg.crypto.entropy import draw, system_entropy
from lightsecagg.drivers.flower.agreed import FORGOTTEN, MASKS_AHEAD, allow_list_of
from lightsecagg.drivers.flower.layout import (
    Layout,
    arrays_of,
    check_limits,
    hash_assignment,
    hash_records,
    hash_run,
    scaled_metrics,
)
from lightsecagg.drivers.flower.node import (
    Memory,
    Operator,
    Store,
    identity_of,
    new_memory,
    opened,
)
from lightsecagg.drivers.flower.parcels import Parcel, Stage, attach, detach
from lightsecagg.errors import (
    ConfigurationError,
    DecodeError,
    InputRefused,
    JournalError,
    LightSecAggError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import clip_to_bound, percent_clipped
from lightsecagg.foreign import explain
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.interface import (
    SERVER,
    Output,
    Send,
    TravellingClientParty,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import MaskedUpload, Opening, UploadDropped
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec

REFUSED = "lightsecagg: this node refused; see its own log"
UNPROTECTED = (
    "lightsecagg_mod refuses to send an update in the clear; wrap the server's strategy: "
    "LightSecAgg(FedAvg(...), privacy=..., dropouts=..., bound=...)"
)
UNMASKED = (
    "lightsecagg_mod refuses every message without masks: this node's operator demands "
    "malicious-server, or the strategy masks evaluations"
)

Kind = TypeVar("Kind")

_CODEC = Codec(DEFAULT_FIELD)
_NORM_ROUNDING = 1e-4
"""Of fixedclipping_mod, which clips in float32."""


def lightsecagg_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Mask the app's updates: `ClientApp(mods=[lightsecagg_mod, ...])`, first in the list."""
    try:
        parcel, rest = detach(message.content)
        if parcel is None and _category(message) == MessageType.TRAIN:
            return _error(UNPROTECTED, message)
        operator = Operator.of(context.node_config)
        if parcel is not None:
            message.content = rest
            with opened(operator, context) as store:
                reply = _Exchange(operator, store, message, context, call_next).reply(parcel)
            return Message(attach(reply, RecordDict()), reply_to=message)
        if _masks_everything(operator, context):
            return _error(UNMASKED, message)
    except _Forgotten:
        return _error(FORGOTTEN, message)
    except Exception as error:
        return _refused(error, message)
    return call_next(message, context)


def _category(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def _masks_everything(operator: Operator, context: Context) -> bool:
    """Whether the app may reply to nobody in the clear.

    The word of the strategy is the server's; one that lies would not give it. So the operator's
    demand is enough.
    """
    if operator.threat_model is ThreatModel.MALICIOUS_SERVER:
        return True
    with opened(operator, context) as store:
        memory = store.load()
    return memory is not None and memory.masked


def _refused(error: Exception, message: Message) -> Message:
    log(ERROR, "lightsecagg: %s", explain(error))
    return _error(REFUSED, message)


def _error(reason: str, message: Message) -> Message:
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)


class _Forgotten(Exception):  # noqa: N818 - says what happened
    """This node does not know the epoch that the server speaks of."""


class _Exchange:
    """One message of the server, and what is replied to it."""

    def __init__(
        self,
        operator: Operator,
        store: Store,
        message: Message,
        context: Context,
        train: ClientAppCallable,
    ) -> None:
        self._operator = operator
        self._store = store
        self._message = message
        self._context = context
        self._train = train
        self._memory = store.load() or new_memory(operator)
        self._identity = identity_of(operator, self._memory)
        self._frames: list[bytes] = []
        self._failed = False

    def reply(self, parcel: Parcel) -> Parcel:
        """Do what the stage asks for; everything is stored when this returns."""
        stage = Stage(_number(parcel, "stage", str))
        if stage in (Stage.TRAIN, Stage.EVALUATE) and stage != _category(self._message):
            raise RemoteProtocolError(f"a message of another type asks for stage {stage}")
        if stage is Stage.HELLO:
            self._store.save(self._memory)
            told = hash_run(self._context)
            return Parcel({"key": self._identity.public, "run_config": told})
        epoch = _number(parcel, "epoch", bytes)
        if stage is Stage.OPEN and epoch != self._memory.epoch:
            self._open(parcel, epoch)
        elif epoch != self._memory.epoch or not self._memory.party:
            raise _Forgotten
        party = self._restore()
        party.keeps_masks = False  # most of them would be forgotten with this process
        try:
            self._store.fetch(party)
            self._deliver(party, parcel)
        except JournalError as error:
            log(ERROR, "lightsecagg: %s; this node takes part again in a new epoch", error)
            raise _Forgotten from error
        if stage in (Stage.TRAIN, Stage.EVALUATE):
            self._contribute(party, parcel, stage)
        if stage is not Stage.OPEN:
            self._restock(party)
        self._memory.ledger = party.ledger.to_bytes()
        self._store.save(self._memory, party)
        numbers = {"epoch": epoch, "received": self._memory.received, "failed": self._failed}
        return Parcel(numbers, tuple(self._frames))

    # -- the party ---------------------------------------------------------------------------

    def _open(self, parcel: Parcel, epoch: bytes) -> None:
        """Begin a new epoch, if the operator's demands admit it; the old one is over."""
        if len(parcel.frames) != 1:
            raise RemoteProtocolError(f"{len(parcel.frames)} frames open an epoch instead of one")
        opening = _CODEC.decode(parcel.frames[0])
        keys = _number(parcel, "keys", list)
        if not isinstance(opening, Opening) or not all(isinstance(key, bytes) for key in keys):
            raise RemoteProtocolError("an epoch begins with its settings and identities")
        settings = Settings.from_bytes(opening.settings)
        if settings.context != epoch:
            raise RemoteProtocolError("the epoch has another name than its settings say")
        self._memory = Memory(
            identity=self._memory.identity,
            ledger=self._memory.ledger,
            epoch=epoch,
            settings=opening.settings,
            keys=keys,
            masked=_number(parcel, "masked", bool),
            failures=self._memory.failures,
        )

    def _restore(self) -> TravellingClientParty:
        """The party as it was after the last message, or a new one."""
        memory, identities = self._memory, allow_list_of(self._memory.keys)
        policy = self._operator.policy(Settings.from_bytes(memory.settings), identities)
        ledger = Ledger.from_bytes(memory.ledger)
        if memory.party:
            generation = ledger.generation
            return Client.restore(memory.party, self._identity, policy, generation)
        own = [c for c in identities.clients if identities[c] == self._identity.public]
        if not own:
            raise RemoteProtocolError("the server opened an epoch without this node's identity")
        return Client(own[0], self._identity, policy, ledger)

    def _deliver(self, party: TravellingClientParty, parcel: Parcel) -> None:
        """Give the party all frames that it has not had, and again those it can answer again."""
        memory, first = self._memory, _number(parcel, "first", int)
        if first > memory.received:
            raise _Forgotten  # frames were acknowledged that are not here
        for number, frame in enumerate(parcel.frames, first):
            message = _CODEC.decode(frame)
            self._send(party.receive(SERVER, message))
            memory.received = max(memory.received, number + 1)

    def _send(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Send):
                self._frames.append(_CODEC.encode(output.message))

    def _restock(self, party: TravellingClientParty) -> None:
        missing = min(MASKS_AHEAD - party.stock, party.room)
        if missing > 0:
            self._send(party.restock(missing))

    # -- an update ---------------------------------------------------------------------------

    def _contribute(self, party: TravellingClientParty, parcel: Parcel, stage: Stage) -> None:
        """Train or evaluate, and upload, once for each version of the model."""
        memory, version = self._memory, _number(parcel, "version", int)
        if version <= memory.version:
            self._failed = True  # the reply that had the update is lost; there is no second one
            return
        if memory.serial >= 0:  # the round of the last upload is over, whatever became of it
            self._send(party.receive(SERVER, UploadDropped(memory.serial)))
            memory.serial = -1
        if not party.stock:
            self._failed = True
            return
        memory.version = version
        settings = Settings.from_bytes(memory.settings)
        try:
            self._check_failures(settings)
            update, model = self._update(settings, parcel, stage)
            outputs = party.set_input(update, version, model)
        except Exception as error:
            own = isinstance(error, LightSecAggError)
            log(ERROR, "lightsecagg: no update: %s", explain(error), exc_info=not own)
            self._failed = True
            return
        memory.failures -= 1
        for output in outputs:
            if isinstance(output, Send) and isinstance(output.message, MaskedUpload):
                memory.serial = output.message.tag.serial
        self._send(outputs)

    def _check_failures(self, settings: Settings) -> None:
        """Refuse to try again, once the app has failed too often (S62).

        Whether it fails depends on its data and on a model of the server's choice. A server that
        may ask without end learns much from that: the norm of a gradient from some thirty answers.
        """
        most, failures = self._operator.max_failures, self._memory.failures
        if settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER and failures >= most:
            raise ConfigurationError(
                f"this node had no update {failures} times, and every time the server learnt of "
                "it; find out why, then raise lightsecagg-max-failures in node-config"
            )

    def _update(self, settings: Settings, parcel: Parcel, stage: Stage) -> tuple[Update, bytes]:
        """What the app made of the model, as a vector within the bound; and the model's hash."""
        given = _only(self._message.content.array_records.values(), "ArrayRecord")
        limits = dict(
            zip(_number(parcel, "metrics", list), _number(parcel, "limits", list), strict=True)
        )
        check_limits(limits)
        weighted_by, quantizer = _number(parcel, "weighted_by", str), settings.quantizer
        context, content = self._context, self._message.content
        # What is not hashed, the app does not see: the order of a map, times and names.
        context.run_config = dict(sorted(context.run_config.items()))
        hashed = hash_assignment(
            hash_run(context),
            hash_records(content),
            self._message.metadata.message_type,
            weighted_by,
            limits,
            stage,
        )
        norm = min(map(_norm, content.config_records.values()), default=math.inf)
        layout = Layout(arrays_of(given))
        vector: Any = np.zeros(settings.dimension, layout.dtype)
        change, tail = np.split(vector, [layout.size])
        self._memory.failures += 1  # until the update is masked
        reply = self._train(_without_the_unsigned(self._message, context), context)
        if reply.has_error():
            raise ConfigurationError(f"the app replied with an error: {reply.error.reason}")
        metrics = _only(reply.content.metric_records.values(), "MetricRecord")
        if stage is Stage.TRAIN:
            trained = _only(reply.content.array_records.values(), "ArrayRecord")
            layout.write_change(arrays_of(trained), change)
            _clip_to_norm(change, norm)
            clipped = clip_to_bound(change, quantizer.bound)
            if percent := percent_clipped(change, clipped):
                log(
                    WARNING,
                    "lightsecagg: %.3g %% of the entries were clipped to the bound %g; "
                    "if training stalls, raise it",
                    *(percent, quantizer.bound),
                )
                change[:] = clipped
        else:
            tail[-1] = _nonce(quantizer.bound)
        tail[: len(limits)] = scaled_metrics(metrics, limits, quantizer.bound)
        samples = 1
        if quantizer.weighted:
            samples = _samples(metrics, weighted_by, quantizer.max_samples)
        return Update(vector, samples), hashed


def _without_the_unsigned(message: Message, context: Context) -> Message:
    """The message for the app: of its metadata, what nodes sign and what this node finds itself."""
    told = Metadata(
        run_id=context.run_id,
        message_id="",
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=context.node_id,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=DEFAULT_TTL,
        message_type=message.metadata.message_type,
    )
    seen: Message = Message(message.content, metadata=told)  # type: ignore[call-overload]
    return seen


def _nonce(bound: float) -> float:
    """What tells evaluations with equal metrics apart: an update is summed once (S06)."""
    return bound * (int.from_bytes(draw(system_entropy, 4)) / 2**31 - 1)


def _only(records: Any, kind: str) -> Any:
    found = list(records)
    if len(found) != 1:
        raise ConfigurationError(f"a message has one {kind}, and here are {len(found)}")
    return found[0]


def _samples(metrics: MetricRecord, name: str, most: int) -> int:
    """The weight of the update."""
    value = metrics.get(name)
    if value is None:
        raise InputRefused(
            f"the app returned no metric {name!r}, which weights its update: put the number of its "
            f"examples into its MetricRecord, or weight all nodes alike with "
            "LightSecAgg(max_samples=1)"
        )
    if not isinstance(value, int | float) or value != int(value) or value < 1:
        raise InputRefused(f"metric {name!r} must be a whole number of at least 1, as a weight")
    if value > most:
        log(WARNING, "lightsecagg: metric %r counts as max_samples = %d", name, most)
    return min(int(value), most)


def _norm(config: ConfigRecord) -> float:
    """The clipping norm that a strategy for differential privacy asks for."""
    norm = config.get("clipping_norm", math.inf)
    if not isinstance(norm, int | float) or not norm > 0:
        raise RemoteProtocolError("clipping_norm is not a number above 0")
    return float(norm)


def _clip_to_norm(change: np.ndarray[Any, Any], norm: float) -> None:
    """With differential privacy the change must be clipped before it is masked.

    Usually fixedclipping_mod has done it. A change that it left too long is scaled and not refused:
    a server that may choose the norm would find the change's by bisection (S62).
    """
    found = float(np.linalg.norm(change.astype(np.float64)))
    if found > norm * (1 + _NORM_ROUNDING):
        log(WARNING, "lightsecagg: the change of the model is clipped to clipping_norm = %s", norm)
        change *= norm / found


def _number(parcel: Parcel, name: str, kind: type[Kind]) -> Kind:
    """A field of a parcel, if it is of its type."""
    value = parcel.numbers.get(name)
    if not isinstance(value, kind):
        raise DecodeError(f"malformed parcel: {name} is not of type {kind.__name__}")
    return value

"""The wrapper: a Flower strategy around another one, for which it averages under masks.

`configure_train` enrols nodes when somebody is new, and adds to every message what the protocol has
for its node; `aggregate_train` takes the masked updates out of the replies, asks for the answers,
and gives the wrapped strategy one reply that holds the average. Evaluation is the wrapped
strategy's alone, in the clear; or, with `evaluation=`, a round like the others, in which the change
of the model is nothing and the metrics ride behind it.

A stage ends when every node has replied or its time is up. If more than D nodes are missing then,
those are asked again, `attempts` times in all; asking again never asks for anything else (S42).
After that the run ends with an error: never with a model that stands still, or is wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from lightsecagg.crypto.entropy import draw, system_entropy
from lightsecagg.crypto.transcript import HASH_LENGTH
from lightsecagg.drivers.flower.epoch import Average, Epoch, Terms
from lightsecagg.drivers.flower.grid import PatientGrid
from lightsecagg.drivers.flower.inner import Inner
from lightsecagg.drivers.flower.layout import (
    Layout,
    arrays_of,
    check_limits,
    hash_assignment,
    hash_records,
    unscaled_metrics,
)
from lightsecagg.drivers.flower.parcels import Parcel, Stage, attach, detach
from lightsecagg.errors import Aborted, DecodeError, LightSecAggError, ParameterError
from lightsecagg.foreign import shown
from lightsecagg.params import ShareMode, ThreatModel, choice

_NEXT_CHANCE = 5
"""After so many rounds, nodes that could not be enrolled are asked again."""


class LightSecAgg(Strategy):
    """Secure aggregation for the strategy that it wraps: the server sees averages only.

    * `privacy`: how many nodes may collude with the server and still learn nothing; a count, or a
      fraction of all nodes.
    * `dropouts`: how many nodes may vanish in a round, likewise.
    * `bound`: the largest change of an entry of the model in one round; larger ones are clipped.
    * `max_samples`: the largest weight of a node, which rounds with a precision of about
      `bound * max_samples * N / 10^9` per sample; larger ones count as this. 1 weights all alike.
    * `metrics`: the metrics that are averaged under the mask too, each with its largest absolute
      value. All other metrics stay at the node.
    * `evaluation`: the metrics of EVALUATE messages, likewise: nodes then send no others, and no
      counts, and reply to nothing in the clear. Without it evaluation is in the clear, as always in
      Flower; malicious-server mode then has none.
    * `threat_model`: `malicious-server` needs nodes that have a folder, an allow-list and their
      own least T.
    * `share_mode`: `short-key` shares keys of 2048 elements instead of masks (experimental: see
      `docs/short-keys.md`); nodes take part whose operators have said so.
    * `timeout`: seconds for one stage, training included.
    * `attempts`: how often those who are missing are asked, in all.
    * `poll_interval`: seconds between two looks for replies.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        privacy: int | float,
        dropouts: int | float,
        bound: float,
        max_samples: int = 2**16,
        metrics: Mapping[str, float] | None = None,
        evaluation: Mapping[str, float] | None = None,
        threat_model: str = ThreatModel.HONEST_BUT_CURIOUS,
        share_mode: str = ShareMode.SEEDED,
        timeout: float = 600.0,
        attempts: int = 2,
        poll_interval: float = 0.2,
    ) -> None:
        self.inner = Inner(strategy)
        self._limits = {Stage.TRAIN: _limits(metrics), Stage.EVALUATE: _limits(evaluation)}
        self._terms = Terms(
            privacy=privacy,
            dropouts=dropouts,
            bound=bound,
            max_samples=1 if self.inner.private else max_samples,
            threat_model=choice(ThreatModel, threat_model),
            share_mode=choice(ShareMode, share_mode),
        )
        self._timeout = timeout
        self._attempts = attempts
        self._interval = poll_interval
        self._grid: PatientGrid | None = None
        self._epoch: Epoch | None = None
        self._run_config = b""  # its hash, as the nodes of the epoch have given it
        self._session = draw(system_entropy, HASH_LENGTH)
        self._number = 0
        self._left_out: dict[int, int] = {}  # node -> when it gets another chance
        self._round: _Round | None = None
        self._logged: set[str] = set()

    # -- Flower's hooks ----------------------------------------------------------------------

    def start(self, grid: Grid, *arguments: object, **options: object) -> Result:
        """As Flower's, over a grid that is polled more often."""
        return super().start(self._patient(grid), *arguments, **options)  # type: ignore[arg-type]

    def train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """One round of training, for loops other than `start`."""
        patient = self._patient(grid)
        messages = self.configure_train(server_round, arrays, config, patient)
        return self.aggregate_train(server_round, patient.send_and_receive(messages))

    def summary(self) -> None:
        """Log the wrapped strategy's settings and these."""
        terms = self._terms
        log(INFO, "\t├──> LightSecAgg: privacy %s, dropouts %s", terms.privacy, terms.dropouts)
        log(INFO, "\t│\t└── bound %s, %s", terms.bound, terms.threat_model)
        self.inner.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, with shares for the nodes beside the model."""
        patient = self._patient(grid)
        patient.be_patient()
        if not self.inner.private and "clipping_norm" in config:
            raise ParameterError(
                "differential privacy goes inside: LightSecAgg(DifferentialPrivacyClientSide"
                "FixedClipping(FedAvg(...)))"
            )
        messages = list(self.inner.strategy.configure_train(server_round, arrays, config, patient))
        if messages and self._limits[Stage.EVALUATE]:  # known before anybody trains in vain
            evaluators = self.inner.evaluators(len(patient.connected()))
            self._check_chosen(Stage.EVALUATE, evaluators, patient)
        return self._begin(Stage.TRAIN, messages, server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Recover the average, and let the wrapped strategy go on from it."""
        round_, self._round = self._round, None
        if round_ is None:
            return None, None
        average = self._finish(round_, server_round, replies)
        arrays = round_.layout.changed(average.values[: round_.layout.size])
        metrics = self._metrics(round_, average)
        if not round_.limits:
            self._log_once(
                INFO,
                "the nodes' metrics stay with them; name those to average under the mask: "
                'LightSecAgg(metrics={"train_loss": 10.0})',
            )
        result = self.inner.aggregate(server_round, round_.asked, arrays, metrics, average.clients)
        round_.layout.restore_kept(result[0])
        return result

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, under masks if `evaluation` says so."""
        patient = self._patient(grid)
        patient.be_patient()
        messages = self.inner.strategy.configure_evaluate(server_round, arrays, config, patient)
        messages = list(messages)
        if self._limits[Stage.EVALUATE]:
            return self._begin(Stage.EVALUATE, messages, server_round)
        if messages and self._masked:
            raise ParameterError(
                "malicious-server mode has no evaluation in the clear: name its metrics with "
                "LightSecAgg(evaluation=...), or give the wrapped strategy fraction_evaluate=0.0"
            )
        if messages:
            self._log_once(
                WARNING,
                "evaluation is in the clear: the server sees every node's metrics. Name them in "
                "LightSecAgg(evaluation=...), or give the wrapped strategy fraction_evaluate=0.0",
            )
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """What the wrapped strategy makes of the replies, or of the average."""
        round_, self._round = self._round, None
        if round_ is None:
            return self.inner.strategy.aggregate_evaluate(server_round, replies)
        metrics = self._metrics(round_, self._finish(round_, server_round, replies))
        return self.inner.aggregate_evaluate(server_round, round_.asked, metrics)

    # -- enrolment ---------------------------------------------------------------------------

    def _enrol_if_needed(self, grid: PatientGrid, round_: _Round, server_round: int) -> None:
        """A new epoch if somebody is new, has forgotten the old one, or the vector has changed."""
        dimension = round_.layout.size + self._tail
        if self._epoch is not None:
            same = self._epoch.settings.dimension == dimension and not self._epoch.is_old
            new = round_.content.keys() - self._epoch.nodes
            if same and all(self._left_out.get(node, 0) > server_round for node in new):
                return
        try:
            self._enrol(grid, round_, dimension)
        except LightSecAggError as error:
            self._epoch = None
            raise RuntimeError(f"LightSecAgg, enrolment: {error}") from error
        missing = round_.content.keys() - self._current().nodes
        self._left_out = dict.fromkeys(missing, server_round + _NEXT_CHANCE)

    def _enrol(self, grid: PatientGrid, round_: _Round, dimension: int) -> None:
        wanted = sorted(grid.connected() | round_.content.keys())
        keys = self._collect_keys(grid, wanted, round_.type)
        # Epochs are numbered by the clock: a node refuses one that is older than its last.
        self._number = max(self._number + 1, time.time_ns() // 10**6)
        parameters = self._terms.parameters(len(wanted), len(keys))
        epoch = Epoch(keys, parameters, self._terms, dimension, self._session, self._number)
        self._epoch = epoch
        opening = {"keys": epoch.keys, "masked": self._masked}
        for node in self._exchange(epoch.nodes, Stage.OPEN, round_.type, **opening):
            epoch.lose(node)
        epoch.close_registration()
        for node in self._exchange(epoch.nodes, Stage.RELAY, round_.type):
            epoch.lose(node)

    def _collect_keys(
        self, grid: PatientGrid, nodes: list[int], message_type: str
    ) -> dict[int, bytes]:
        """The identity keys of all nodes but D, which have one run_config."""
        keys: dict[int, bytes] = {}
        told: dict[int, bytes] = {}
        reasons: dict[int, str] = {}

        def replied(node: int, reply: Message) -> Iterable[Message]:
            try:
                keys[node], told[node] = _introduction(reply)
            except DecodeError as error:
                reasons[node] = str(error)
            return ()

        allowed = self._terms.parameters(len(nodes)).dropouts
        hello = attach(Parcel({"stage": str(Stage.HELLO)}), RecordDict())
        messages = [self._message(hello, node, message_type) for node in nodes]
        grid.exchange(messages, self._timeout, replied)
        for run_config, count in Counter(told.values()).most_common(1):
            if 2 * count <= len(told):
                raise Aborted("no run_config is that of most nodes; all of a run have the same one")
            self._run_config = run_config
        for node in [node for node in told if told[node] != self._run_config]:
            reasons[node] = "its run_config is not that of most nodes"
            del keys[node]
        for node in set(nodes) - keys.keys():
            reason = reasons.setdefault(node, "it did not reply")
            log(WARNING, "LightSecAgg: node %d is left out: %s", node, reason)
        if len(set(keys.values())) != len(keys):
            raise Aborted("two nodes have one identity; give every node a folder of its own")
        if len(reasons) > allowed:
            raise Aborted(
                f"{len(reasons)} of {len(nodes)} nodes did not enrol, and D = {allowed} may be "
                f"missing; one of them: {next(iter(reasons.values()))}. Every ClientApp needs "
                "lightsecagg_mod as the first of its mods"
            )
        return keys

    # -- rounds ------------------------------------------------------------------------------

    @property
    def _masked(self) -> bool:
        """Whether nodes should refuse whatever is not masked (S58)."""
        malicious = self._terms.threat_model is ThreatModel.MALICIOUS_SERVER
        return malicious or bool(self._limits[Stage.EVALUATE])

    @property
    def _tail(self) -> int:
        """How many entries follow the change of the model: metrics, and a nonce of evaluations."""
        evaluated = len(self._limits[Stage.EVALUATE])
        return max(len(self._limits[Stage.TRAIN]), evaluated + 1 if evaluated else 0)

    def _begin(self, stage: Stage, messages: list[Message], server_round: int) -> list[Message]:
        """Enrol whoever must be, and begin a round with the wrapped strategy's messages."""
        self._round = None
        if not messages:
            return []
        patient = self._patient()
        self._check_chosen(stage, len(messages), patient)
        round_ = _Round(stage, messages, self.inner.weighted_by, self._limits[stage])
        if kept := round_.layout.kept:
            self._log_once(
                INFO, f"{_named(kept)}: no floats, so they are not averaged; the server's stay"
            )
        self._enrol_if_needed(patient, round_, server_round)
        epoch = self._current()
        round_.version = epoch.begin_round(round_.model(self._run_config))
        self._round = round_
        reachable = epoch.nodes & patient.connected()
        epoch.connect(reachable)
        round_.sent = self._round_messages(round_, reachable)
        return round_.sent

    def _check_chosen(self, stage: Stage, chosen: int, grid: PatientGrid) -> None:
        """Refuse a round in which fewer nodes contribute than a sum must have."""
        nodes = len(grid.connected())
        if self._epoch is None:
            privacy = self._terms.privacy_of(nodes)
        else:
            privacy = self._epoch.settings.parameters.privacy
        least, fraction = privacy + 2, self.inner.fractions[stage]
        if chosen < min(least, nodes):  # too few nodes in all are refused at enrolment
            raise ParameterError(
                f"fraction_{stage}={fraction:g} of {nodes} nodes is {chosen}, and a sum over fewer "
                f"than T + 2 = {least} protects nobody: raise fraction_{stage}, or set "
                f"min_{stage}_nodes={least}"
            )

    def _finish(self, round_: _Round, server_round: int, replies: Iterable[Message]) -> Average:
        """The average of what the nodes have sent."""
        for reply in replies:
            if (node := round_.node_of(reply)) is not None:
                self._take(node, reply)
        try:
            self._complete_uploads(round_)
            average = self._recover(round_.type)
        except LightSecAggError as error:
            self._epoch = None
            raise RuntimeError(f"LightSecAgg, round {server_round}: {error}") from error
        log(
            INFO,
            "aggregate_%s: %d of %d updates are in the average",
            *(round_.stage, average.clients, len(round_.content)),
        )
        return average

    def _metrics(self, round_: _Round, average: Average) -> MetricRecord:
        begin = round_.layout.size
        values = average.values[begin : begin + len(round_.limits)]
        metrics = MetricRecord({self.inner.weighted_by: average.samples})
        metrics.update(unscaled_metrics(values, round_.limits, self._terms.bound))
        return metrics

    def _round_messages(self, round_: _Round, nodes: Iterable[int]) -> list[Message]:
        """The model for those who were chosen, and peers' shares for everybody."""
        messages = []
        for node in sorted(nodes):
            parcel = self._current().parcel(
                node,
                round_.stage if node in round_.content else Stage.RELAY,
                version=round_.version,
                weighted_by=self.inner.weighted_by,
                metrics=list(round_.limits),
                limits=list(round_.limits.values()),
            )
            content = attach(parcel, round_.content.get(node, RecordDict()))
            messages.append(self._message(content, node, round_.type))
        return messages

    def _complete_uploads(self, round_: _Round) -> None:
        """Ask those who are missing again, while more than D are."""
        epoch, parameters = self._current(), self._current().settings.parameters
        chosen = len(epoch.invited & round_.content.keys())
        least = max(parameters.privacy + 2, chosen - parameters.dropouts)
        for _ in range(self._attempts - 1):
            connected = self._patient().connected()
            missing = connected & epoch.nodes & round_.content.keys() - epoch.uploaded
            if len(epoch.uploaded) >= least or not missing:
                break
            log(WARNING, "LightSecAgg: nodes %s are asked for updates again", sorted(missing))
            epoch.connect(connected)
            messages = self._round_messages(round_, missing)
            self._patient().exchange(messages, self._timeout, self._take_quietly)
        if len(epoch.uploaded) < least:
            raise Aborted(
                f"{len(epoch.uploaded)} of {len(round_.content)} nodes have sent an update, and "
                f"{least} are needed: {parameters.dropouts} of those who enrolled may be missing, "
                f"and a sum over fewer than T + 2 = {parameters.privacy + 2} protects nobody. See "
                "the nodes' own logs"
            )

    def _recover(self, message_type: str) -> Average:
        """Announce whose updates are summed, and ask for the answers."""
        epoch = self._current()
        epoch.connect(self._patient().connected())
        epoch.announce()
        for attempt in range(self._attempts):
            if epoch.is_decided or not epoch.urgent:
                break
            if attempt:
                log(WARNING, "LightSecAgg: nodes %s are asked again", sorted(epoch.urgent))
            self._exchange(epoch.urgent & epoch.nodes, Stage.RELAY, message_type)
        return epoch.result()

    # -- messages ----------------------------------------------------------------------------

    def _exchange(
        self, nodes: Iterable[int], stage: Stage, message_type: str, **numbers: object
    ) -> set[int]:
        """A parcel to each node, and more to those for whom something urgent comes up.

        Ends with the round. Returns the nodes of which nothing useful came.
        """
        epoch = self._current()
        silent, flying = set(nodes), set(nodes)

        def replied(node: int, reply: Message) -> list[Message]:
            if self._take(node, reply) is None:
                silent.discard(node)
                flying.discard(node)  # whoever fails is not asked again here
            return post(epoch.urgent & epoch.nodes - flying)

        def post(recipients: Iterable[int]) -> list[Message]:
            chosen = sorted(recipients)
            flying.update(chosen)
            parcels = {node: epoch.parcel(node, stage, **numbers) for node in chosen}
            return [
                self._message(attach(parcel, RecordDict()), node, message_type)
                for node, parcel in parcels.items()
            ]

        messages = post(silent)
        self._patient().exchange(messages, self._timeout, replied, lambda: epoch.is_decided)
        return silent

    def _take(self, node: int, reply: Message) -> str | None:
        """Give the epoch a reply; why it is of no use, or None."""
        if self._epoch is None:
            return "there is no epoch"
        reason = self._epoch.deliver(node, reply)
        if reason is not None:
            log(WARNING, "LightSecAgg: node %d: %s", node, reason)
        return reason

    def _take_quietly(self, node: int, reply: Message) -> Iterable[Message]:
        self._take(node, reply)
        return ()

    def _message(self, content: RecordDict, node: int, message_type: str) -> Message:
        return Message(content, node, message_type, ttl=self._timeout)

    def _log_once(self, level: int, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log(level, "LightSecAgg: %s", text)

    def _patient(self, grid: Grid | None = None) -> PatientGrid:
        """Flower's grid, wrapped once."""
        if isinstance(grid, PatientGrid):
            self._grid = grid
        elif grid is not None and (self._grid is None or not self._grid.wraps(grid)):
            self._grid = PatientGrid(grid, self._interval, self._timeout)
        assert self._grid is not None  # noqa: S101 - every round begins with a grid
        self._grid.late = self._take
        return self._grid

    def _current(self) -> Epoch:
        assert self._epoch is not None  # noqa: S101 - enrolment comes first
        return self._epoch


class _Round:
    """What the wrapped strategy wants to be sent in one round."""

    def __init__(
        self,
        stage: Stage,
        messages: list[Message],
        weighted_by: str,
        limits: Mapping[str, float],
    ) -> None:
        self.stage = stage
        self.limits = limits
        self.asked = messages[0]
        self.type = self.asked.metadata.message_type
        self.content = {message.metadata.dst_node_id: message.content for message in messages}
        self.version = 0
        self.sent: list[Message] = []
        self.layout = Layout(arrays_of(_model(self.asked)))
        known: dict[int, bytes] = {}  # most strategies send everybody the same
        found = {
            (hash_records(message.content, known), message.metadata.message_type)
            for message in messages
        }
        if len(found) != 1:
            raise ParameterError(
                "the strategy sends different models, configs or message types to different "
                "nodes; a sum of updates needs one that all of them train from"
            )
        ((self._records, _),) = found
        self._weighted_by = weighted_by

    def model(self, run_config: bytes) -> bytes:
        """What nodes with this run_config sign as the model that they trained from."""
        return hash_assignment(
            run_config, self._records, self.type, self._weighted_by, self.limits, self.stage
        )

    def node_of(self, reply: Message) -> int | None:
        """Who was asked for this reply."""
        answered = reply.metadata.reply_to_message_id
        for message in self.sent:
            if message.metadata.message_id == answered:
                return message.metadata.dst_node_id
        return None


def _named(names: Sequence[str]) -> str:
    """The first of the names, and how many follow."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def _limits(metrics: Mapping[str, float] | None) -> dict[str, float]:
    limits = {name: float(limit) for name, limit in (metrics or {}).items()}
    check_limits(limits)
    return limits


def _model(message: Message) -> ArrayRecord:
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ParameterError(
            f"a message of the strategy has {len(records)} ArrayRecords; LightSecAgg sums the "
            "changes of one"
        )
    return records[0]


def _introduction(reply: Message) -> tuple[bytes, bytes]:
    """A node's identity key, and the hash of its run_config."""
    if reply.has_error():
        raise DecodeError(shown(reply.error.reason))
    parcel, _ = detach(reply.content)
    numbers = {} if parcel is None else parcel.numbers
    key, run_config = numbers.get("key"), numbers.get("run_config")
    if not isinstance(key, bytes) or not isinstance(run_config, bytes):
        raise DecodeError("its ClientApp has no lightsecagg_mod")
    return key, run_config

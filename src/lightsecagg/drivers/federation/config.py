"""The configuration of the server and client programs: TOML, environment, flags.

    lightsecagg server --config server.toml --set rounds.number=20
    LIGHTSECAGG_SERVER__ADDRESS=0.0.0.0:9000 lightsecagg server --config server.toml

The file is read first; an environment variable LIGHTSECAGG_<TABLE>__<KEY> overrides it, `--set
table.key=value` overrides both. Every key is documented here and shown by `--print-config`; an
unknown key is an error. Relative paths are relative to the file. Nothing here is a secret: keys are
files, named by their paths.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from lightsecagg.drivers.federation.selection import Sampling
from lightsecagg.errors import ConfigurationError, DecodeError
from lightsecagg.field.staleness import Staleness, StalenessTable
from lightsecagg.foreign import decode
from lightsecagg.params import (
    DEFAULT_MODULUS,
    PAPER_MODULUS,
    Decoding,
    ShareMode,
    ThreatModel,
)
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.policy import MAX_UNANNOUNCED_DIMENSION
from lightsecagg.protocol.schemes.traits import TRAITS, ProtocolName

ENVIRONMENT_PREFIX = "LIGHTSECAGG_"
_TASK_PATHS = {"data_dir", "writer_ids"}


def _registered(protocol: str) -> str:
    if protocol not in TRAITS:
        raise ValueError(f"Input should be one of {', '.join(map(repr, map(str, TRAITS)))}")
    return protocol


RegisteredProtocol = Annotated[str, AfterValidator(_registered)]


Number = TypeVar("Number", int, float)


def _ordered(bounds: tuple[Number, Number]) -> tuple[Number, Number]:
    if not bounds[0] <= bounds[1]:
        raise ValueError("write [least, largest]")
    return bounds


Range = Annotated[tuple[Number, Number], AfterValidator(_ordered)]
PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Table(BaseModel):
    """Base of the tables: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FederationTable(Table):
    """[federation] what all its parties share."""

    session: str = Field(pattern=r"^[0-9a-f]{64}$")
    """32 bytes in hex that name this federation."""
    allow_list: Path
    """The signed list of client identities."""
    authority: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Ed25519 public key, in hex, that must have signed the allow-list."""


class TlsTable(Table):
    """[tls] mutual TLS; the certificate's identity is the sender's id."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False
    """Plaintext. Only accepted on loopback addresses; for laboratories."""


class AggregationTable(Table):
    """[aggregation] the protocol and its parameters; the server's choice, within client policy."""

    mode: Literal["sync", "async"] = "sync"
    """Rounds, or buffers of whatever updates come, by the table [buffering]."""
    protocol: RegisteredProtocol = ProtocolName.LIGHTSECAGG
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    clients: int = Field(ge=2)
    """N: how many clients are invited to a round or epoch, at most."""
    privacy: int = Field(ge=0)
    """T: how many clients may collude with the server."""
    dropouts: int = Field(ge=0)
    """D: how many may vanish, refuse or lie."""
    survivors: int = Field(default=0, ge=0)
    """U: answers needed; 0 for N - D. SecAgg's threshold t."""
    share_mode: ShareMode = ShareMode.SEEDED
    """LightSecAgg: seeded, paper, or short-key (experimental), which clients must name too."""
    decoding: Decoding | None = None
    """Short keys: exact or dithered; left out, exact where all clients keep 8 bits per entry."""
    field: Literal["default", "paper"] = "default"
    neighbours: int = Field(default=0, ge=0)
    """SecAgg+: degree of the sharing graph; 0 for the finder's."""
    bound: float = Field(default=1.0, gt=0)
    """Largest entry of an update; larger ones are refused (or clipped by the client)."""
    max_samples: int = Field(default=100_000, ge=1)
    """Largest sample count of a client; larger ones count as this."""

    @property
    def modulus(self) -> int:
        """q"""
        return DEFAULT_MODULUS if self.field == "default" else PAPER_MODULUS


class RoundsTable(Table):
    """[rounds] how many, and how long each phase may take (seconds)."""

    number: int = Field(default=10, ge=1)
    min_clients: int = Field(default=0, ge=0)
    """Fewest connected clients that start a round; 0 for N - D."""
    wait_for_clients: float = Field(default=120.0, gt=0)
    """How long to wait for `min_clients` before giving up."""
    settle: float = Field(default=1.0, ge=0)
    """Once `min_clients` are there, how long to wait for more, up to N."""
    advertise: float = Field(default=30.0, gt=0)
    share: float = Field(default=120.0, gt=0)
    upload: float = Field(default=900.0, gt=0)
    """Includes local training."""
    agree: float = Field(default=30.0, gt=0)
    recover: float = Field(default=120.0, gt=0)
    grace: float = Field(default=5.0, ge=0)
    """How long a disconnected client may take to come back before it counts as dropped."""
    retries: int = Field(default=2, ge=0)
    """How often an aborted round is tried again, with newly trained updates."""
    sampling: Sampling = "random"
    """Who is invited when more than N are ready: by lot, or (`fair`) the least recently invited."""
    seed: int = 0
    """Of the lots."""


class BufferingTable(Table):
    """[buffering] asynchronous mode: which sums are formed. A client demands exactly its own (S09).

    A client's file with this table takes part in the asynchronous mode, and in no other.
    """

    size: int = Field(ge=2)
    """K: how many updates make a buffer; T + 2 at least."""
    staleness: Staleness = Staleness.CONSTANT
    """s(tau), by which an update counts that is tau versions old: constant, poly or hinge."""
    alpha: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Exponent of poly, slope of hinge."""
    knee: int = Field(default=3, ge=0)
    """Where hinge begins to fall."""
    tau_max: int = Field(default=10, ge=0)
    """Updates that are older are not summed."""
    c_g: int = Field(default=64, ge=1)
    """Steps in which s is rounded to integer weights."""
    max_ratio: float = Field(default=64.0, ge=1, allow_inf_nan=False)
    """The largest ratio of two weights in one buffer."""
    strict: bool | None = None
    """T + 2 owners per weight; left out, in malicious-server mode."""
    stock: int = Field(default=4, ge=2)
    """Masks of one client that its peers keep, used or waiting; half of them are shared ahead."""
    share_lifetime: int = Field(default=64, ge=1)
    """Buffers after which shares expire."""

    def make(self) -> Buffering:
        """As the protocol has it."""
        function = self.staleness.function(self.alpha, self.knee)
        return Buffering(
            table=StalenessTable.from_function(function, self.c_g, self.tau_max),
            max_updates=self.size,
            max_ratio=self.max_ratio,
            strict=self.strict,
            stock=self.stock,
            share_lifetime=self.share_lifetime,
        )


class ServerBufferingTable(BufferingTable):
    """[buffering] server: the same, and when buffers are formed (seconds) and epochs ended."""

    flush_after: float = Field(default=60.0, gt=0)
    """Since the last buffer, until one of fewer than K updates is formed; T + 2 at least."""
    reports: float = Field(default=10.0, gt=0)
    """How long an upload waits for reports on its mask."""
    renew: int = Field(default=5, ge=1)
    """Buffers of an epoch after which clients that wait outside are let in, by another epoch."""


class AcceptTable(Table):
    """[training.accept] client: which settings of local training the server may choose.

    Least and largest value; without a range, the client's own value only.
    """

    epochs: Range[int] | None = None
    batch_size: Range[int] | None = None
    learning_rate: Range[float] | None = None


class DecayTable(Table):
    """[training.schedule.decay] server: the learning rate falls as rounds are completed."""

    factor: float = Field(gt=0, le=1)
    every: int = Field(default=1, ge=1)
    """Completed rounds between two steps."""
    least: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """It falls no further than this."""


class ScheduleTable(Table):
    """[training.schedule] server: settings of local training that change with the rounds.

    `{1 = 5, 20 = 1}` is 5 from the first and 1 from the twentieth completed round on; before the
    first that is named, the value of [training.local] holds.
    """

    epochs: dict[PositiveInt, PositiveInt] = {}
    batch_size: dict[PositiveInt, PositiveInt] = {}
    learning_rate: dict[PositiveInt, PositiveFinite] = {}
    decay: DecayTable | None = None
    """Of the learning rate, whichever of the two tables it comes from."""


class StoppingTable(Table):
    """[early_stopping] end the federation when a figure has stopped improving."""

    figure: str = Field(min_length=1)
    """One that the task's `evaluate` reports, or `clients.NAME`: one that the clients measure."""
    goal: Literal["lower", "higher"]
    """Which values are better."""
    patience: int = Field(default=5, ge=1)
    """Rounds in a row that do not improve it."""
    least_change: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What is no more than this is no improvement."""
    min_rounds: int = Field(default=1, ge=1)
    """Completed rounds before which it never stops."""


class CheckpointsTable(Table):
    """[checkpoints] which models stay in the state folder, beside the best."""

    keep: int = Field(default=2, ge=1)
    """The models of so many latest rounds."""
    figure: str | None = Field(default=None, min_length=1)
    """By which the best is judged: one that `evaluate` reports, or `clients.NAME`. Left out, that
    of [early_stopping], or else `loss` (lower) or `accuracy` (higher) if there is one."""
    goal: Literal["lower", "higher"] | None = None
    """Which values are better."""

    @model_validator(mode="after")
    def _check_goal(self) -> Self:
        if (self.figure is None) != (self.goal is None):
            raise ValueError("give both figure and goal (lower or higher), or neither")
        return self


class TrainingTable(Table):
    """[training] a PyTorch task; the same on the server and on every client."""

    task: dict[str, Any] = Field(default_factory=lambda: {"task": "digits"})
    """`TaskConfig`: task, clients, data_dir, partition, seed, ..."""
    local: dict[str, Any] = Field(default_factory=dict)
    """`LocalConfig`: epochs, batch_size, learning_rate, algorithm, ... What the server names here
    it tells its clients, who refuse a round that asks for anything but their own, or accepted,
    value."""
    accept: AcceptTable = AcceptTable()
    """Ranges in which the server may choose (client only)."""
    schedule: ScheduleTable = ScheduleTable()
    """What changes from round to round (server only)."""
    server: dict[str, Any] = Field(default_factory=dict)
    """`ServerConfig`: algorithm, learning_rate, ... (server only)"""
    seed: int = 0


class VectorsTable(Table):
    """[vectors] aggregation without training: sum (or average) plain vectors."""

    dimension: int = Field(default=0, ge=0)
    """Entries of a vector; a client takes it from its input."""
    weighted: bool = False
    """Average by sample counts instead of summing."""
    input: Path | None = None
    """Client: .npy, or .npz with `vector` and optionally `samples`."""
    output: Path | None = None
    """Server: where the result of each round is written, as .npz."""


class ServerTable(Table):
    """[server] where it listens and keeps its state."""

    address: str = "127.0.0.1:7700"
    transport: Literal["grpc", "torch-rpc"] = "grpc"
    """What carries the messages. PyTorch RPC executes what peers send: for laboratories only."""
    state: Path = Path("state")
    """Journal, checkpoints and reports."""
    name: str | None = None
    """Client: the name in the server's certificate, if it is not the address's host."""
    metrics_port: int | None = None
    """Prometheus metrics and /health on 127.0.0.1; none if left out."""
    dashboard_port: int | None = Field(default=None, ge=0, le=65535)
    """The live page, for browsers; none if left out."""
    dashboard_address: str = "127.0.0.1"
    """Where the page listens; beyond loopback a token is needed, and [tls] certificate is used."""
    dashboard_token: Path | None = None
    """A file with the token that a browser must know; nobody else may read it (chmod 600)."""
    callbacks: tuple[str, ...] = ()
    """`module:Class`, each a `ServerCallback`: your own code, told of every round."""
    trace: Path | None = None
    """Demo only: write each round's recovered average into this folder."""


class TrackingTable(Table):
    """[tracking] server: every round's numbers, where you watch your experiments."""

    tensorboard: Path | None = None
    """Folder for TensorBoard's event files."""
    mlflow: str | None = None
    """MLflow's tracking URI, such as http://127.0.0.1:5000; one run per federation."""
    experiment: str = Field(default="lightsecagg", min_length=1)
    """Under which MLflow files the run."""


class ClientTable(Table):
    """[client] who it is and what it demands."""

    id: int = Field(ge=0)
    identity: Path
    """Its Ed25519 key."""
    privacy: int = Field(default=1, ge=0)
    """The least T that this client accepts."""
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    """The weakest server that this client accepts to trust."""
    protocols: tuple[RegisteredProtocol, ...] = (ProtocolName.LIGHTSECAGG,)
    minimum: int = Field(default=0, ge=0)
    """The fewest clients in a sum that this client accepts to be part of; T + 2 always."""
    share_mode: ShareMode | None = None
    """How its masks may be shared; left out, seeded or paper, as the server likes."""
    bound: float = Field(gt=0)
    """The bound of every round, exactly: a server that could vary it could search for the largest
    entry of an update, by who is missing from the sum."""
    scale: float | None = Field(default=None, gt=0)
    """The least c_l, steps per unit of an update; left out, as the server likes."""
    max_dimension: int = Field(default=MAX_UNANNOUNCED_DIMENSION, gt=0)
    """The longest update that it trains and masks: parameters of the model, lest a server that
    asks for more exhaust the memory."""
    max_share_bytes: int | None = Field(default=None, gt=0)
    """The most bytes that the shares of one round may take here, 4 N L."""
    ledger: Path = Path("ledger")
    """What it must remember across restarts: the updates that are spent, the uploads per model."""
    max_removed: int | None = Field(default=None, ge=0)
    """Clients that an allow-list from the server may remove; left out, as many as `privacy` says.
    The list that lies at `federation.allow_list` when the client starts may remove any."""
    max_attempts: int = Field(default=2, ge=1, le=2)
    """Uploads for one global model, at most."""
    max_openings: int = Field(default=16, ge=1)
    """Rounds that the server may open from one global model, those included that fail early."""
    clip: bool = False
    """Clip entries beyond the bound instead of missing the round, which the server would see."""
    overlap: Literal["process", "thread", "off"] = "process"
    """Where training runs while masks are encoded and shared; `off`: before it."""
    reconnect: float = Field(default=120.0, gt=0)
    """Seconds of failed reconnection after which the client gives up."""
    patience: float = Field(default=86_400.0, gt=0)
    """Seconds of silence of a connected server after which the client gives up."""
    callbacks: tuple[str, ...] = ()
    """`module:Class`, each a `ClientCallback`: your own code, told of every round."""
    trace: Path | None = None
    """Demo only: write timings, and the plain update (!), into this folder."""


class ServerConfig(Table):
    """server.toml"""

    federation: FederationTable
    aggregation: AggregationTable
    server: ServerTable = ServerTable()
    rounds: RoundsTable = RoundsTable()
    tls: TlsTable = TlsTable()
    training: TrainingTable | None = None
    vectors: VectorsTable | None = None
    early_stopping: StoppingTable | None = None
    tracking: TrackingTable = TrackingTable()
    checkpoints: CheckpointsTable = CheckpointsTable()
    buffering: ServerBufferingTable | None = None

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        asynchronous = self.aggregation.mode == "async"
        if asynchronous != (self.buffering is not None):
            raise ValueError(
                'aggregation.mode = "async" and the table [buffering] (size = K at least) go '
                "together; give both, or neither"
            )
        changing = self.training is not None and self.training.schedule != ScheduleTable()
        if asynchronous and changing:
            raise ValueError(
                "[training.schedule] is for rounds: in the asynchronous mode all clients of an "
                "epoch train alike; set [training.local]"
            )
        return self

    @model_validator(mode="after")
    def _check_min_clients(self) -> Self:
        if self.rounds.min_clients > self.aggregation.clients:
            raise ValueError(
                f"rounds.min_clients = {self.rounds.min_clients} exceeds aggregation.clients N = "
                f"{self.aggregation.clients}: no round would ever start"
            )
        return self


class ClientConfig(Table):
    """client.toml"""

    federation: FederationTable
    client: ClientTable
    server: ServerTable = ServerTable()
    tls: TlsTable = TlsTable()
    training: TrainingTable | None = None
    vectors: VectorsTable | None = None
    buffering: BufferingTable | None = None


Config = TypeVar("Config", ServerConfig, ClientConfig)
_TABLES = tuple({**ServerConfig.model_fields, **ClientConfig.model_fields})


def load_config(
    kind: type[Config],
    path: Path,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Config:
    """Read, override, validate; `ConfigurationError` names the key and what is allowed."""
    try:
        document = decode(tomllib.loads, path.read_text(encoding="utf-8"), "TOML")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"no configuration file {path}; `lightsecagg provision` writes one"
        ) from error
    except (OSError, UnicodeDecodeError, DecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    for name, value in environment.items():
        table, separator, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if not name.startswith(ENVIRONMENT_PREFIX) or not separator:
            continue
        if table in kind.model_fields:
            _override(document, f"{table}.{key.replace('__', '.')}", value, name)
        elif table not in _TABLES:
            raise ConfigurationError(f"{name}: no table [{table}]; tables: {', '.join(_TABLES)}")
    for item in overrides:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigurationError(f"--set {item}: write table.key=value")
        _override(document, key, value, f"--set {key}")
    try:
        config = kind.model_validate(document)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {_explain(kind, error)}") from error
    return _anchor(config, path.resolve().parent)


def _override(document: dict[str, Any], key: str, value: str, source: str) -> None:
    *tables, last = key.split(".")
    target = document
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigurationError(f"{source}: {table} is not a table")
    target[last] = _parse(value)


def _parse(value: str) -> Any:
    """A TOML value, or the bare string."""
    try:
        return decode(tomllib.loads, f"value = {value}", "value")["value"]
    except DecodeError:
        return value


def _explain(kind: type[BaseModel], error: ValidationError) -> str:
    """Every mistake: the key, what was given and what is allowed."""
    return "; ".join(_explain_one(kind, dict(item)) for item in error.errors())


def _explain_one(kind: type[BaseModel], item: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = ", ".join(_known_keys(kind, item["loc"][:-1]))
        return f"{key} is not a key; known here: {known}"
    if item["type"] == "missing":
        return f"{key} is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{key} = {item['input']!r}: {message}" if key else message


def _known_keys(kind: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    for name in place:
        annotation = kind.model_fields[str(name)].annotation
        candidates = (annotation, *get_args(annotation))
        kind = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(kind.model_fields)


def _anchor(config: Config, folder: Path) -> Config:
    """Paths relative to the configuration file become absolute."""

    def anchored(table: Any) -> Any:
        if not isinstance(table, BaseModel):
            return folder / table if isinstance(table, Path) else table
        changes = {name: anchored(getattr(table, name)) for name in type(table).model_fields}
        return table.model_copy(update=changes)

    result: Config = anchored(config)
    if result.training is not None:
        for key in _TASK_PATHS & set(result.training.task):
            result.training.task[key] = str(folder / str(result.training.task[key]))
    return result

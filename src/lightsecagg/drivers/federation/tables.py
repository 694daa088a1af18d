"""The tables of server.toml and client.toml: what a federation is, who is in it and how it runs.

Every key is documented here; `training_tables` has those of what is learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lightsecagg.drivers.federation.selection import Sampling
from lightsecagg.field.staleness import Staleness, StalenessTable
from lightsecagg.params import DEFAULT_MODULUS, PAPER_MODULUS, Decoding, ShareMode, ThreatModel
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.policy import MAX_UNANNOUNCED_DIMENSION
from lightsecagg.protocol.schemes.traits import LIGHTSECAGG, protocols


def _registered(protocol: str) -> str:
    if protocol not in protocols():
        raise ValueError(f"Input should be one of {', '.join(map(repr, protocols()))}")
    return protocol


RegisteredProtocol = Annotated[str, AfterValidator(_registered)]


class Table(BaseModel):
    """Base of the tables: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FederationTable(Table):
    """[federation] What all parties share."""

    session: str = Field(pattern=r"^[0-9a-f]{64}$")
    """32 bytes in hex that name this federation."""
    allow_list: Path
    """The signed list of client identities."""
    authority: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Ed25519 public key, in hex, that must have signed the allow-list."""


class TlsTable(Table):
    """[tls] Mutual TLS; the certificate's identity is the sender's id."""

    ca: Path | None = None
    """PEM file of the authority."""
    certificate: Path | None = None
    """PEM file of this party's certificate."""
    key: Path | None = None
    """PEM file of its private key."""
    insecure: bool = False
    """Plaintext, for laboratories; accepted on loopback addresses only."""


class AggregationTable(Table):
    """[aggregation] Protocol and parameters; the server chooses, within the clients' policies."""

    mode: Literal["sync", "async"] = "sync"
    """Rounds, or buffers of updates as they come, with the table [buffering]."""
    protocol: RegisteredProtocol = LIGHTSECAGG
    """lightsecagg; the laboratory adds secagg, secagg+ and plain."""
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    """The server that clients are protected against."""
    clients: int = Field(ge=2)
    """N: the most clients that are invited to a round or epoch."""
    privacy: int = Field(ge=0)
    """T: how many clients may collude with the server."""
    dropouts: int = Field(ge=0)
    """D: how many may vanish, refuse or lie."""
    survivors: int = Field(default=0, ge=0)
    """U: answers needed; 0 for N - D. SecAgg's threshold t."""
    share_mode: ShareMode = ShareMode.SEEDED
    """LightSecAgg: seeded, paper, or short-key (experimental), which clients must name as well."""
    decoding: Decoding | None = None
    """Short keys; by default, exact where all clients keep 8 bits per entry."""
    field: Literal["default", "paper"] = "default"
    """q = 2^31 - 2^19 + 1, or the paper's 2^32 - 5."""
    neighbours: int = Field(default=0, ge=0)
    """SecAgg+: degree of the sharing graph; 0 finds it."""
    bound: float = Field(default=1.0, gt=0)
    """Largest entry of an update; larger ones are refused (or clipped by the client)."""
    max_samples: int = Field(default=100_000, ge=1)
    """Largest sample count of a client; larger ones count as this."""

    @property
    def modulus(self) -> int:
        """q"""
        return DEFAULT_MODULUS if self.field == "default" else PAPER_MODULUS


class RoundsTable(Table):
    """[rounds] How many, and how long each phase may take, in seconds."""

    number: int = Field(default=10, ge=1)
    """Rounds to complete, including those before a restart."""
    min_clients: int = Field(default=0, ge=0)
    """The fewest connected clients that start a round; 0 for N - D."""
    wait_for_clients: float = Field(default=120.0, gt=0)
    """How long to wait for `min_clients` before giving up."""
    settle: float = Field(default=1.0, ge=0)
    """Once `min_clients` are there, how long to wait for more, up to N."""
    advertise: float = Field(default=30.0, gt=0)
    """Includes the download of the model."""
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
    """If more than N are ready, invite by lot, or (`fair`) the least recently invited."""
    seed: int = 0
    """Seed of the lots."""


class BufferingTable(Table):
    """[buffering] Asynchronous mode: which sums are formed. A client demands exactly its own (S09).

    With this table, a client takes part in the asynchronous mode only.
    """

    size: int = Field(ge=2)
    """K: the updates that make a buffer; at least T + 2."""
    staleness: Staleness = Staleness.CONSTANT
    """s(tau), the weight of an update that is tau versions old."""
    alpha: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Exponent of poly, slope of hinge."""
    knee: int = Field(default=3, ge=0)
    """Where hinge begins to fall."""
    tau_max: int = Field(default=10, ge=0)
    """Older updates are not summed."""
    c_g: int = Field(default=64, ge=1)
    """Steps in which s is rounded to integer weights."""
    max_ratio: float = Field(default=64.0, ge=1, allow_inf_nan=False)
    """The largest ratio of two weights in one buffer."""
    strict: bool = False
    """T + 2 owners per weight; in malicious-server mode T + 2 share each model anyway."""
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
    """[buffering] Server: the same, and when buffers are formed (in seconds) and epochs end."""

    flush_after: float = Field(default=60.0, gt=0)
    """Time since the last buffer after which T + 2 updates are enough."""
    reports: float = Field(default=10.0, gt=0)
    """How long an upload waits for reports on its mask."""
    renew: int = Field(default=5, ge=1)
    """Buffers of an epoch after which waiting clients are let in, by a new epoch."""


class ServerTable(Table):
    """[server] Where the server listens and keeps its state."""

    address: str = "127.0.0.1:7700"
    """Where the server listens, or where a client finds it."""
    transport: str = "grpc"
    """What carries the messages; the laboratory adds torch-rpc."""
    state: Path = Path("state")
    """Journal, checkpoints and reports."""
    cores: int = Field(default=1, ge=1)
    """Threads that sum uploads and recover masks."""
    name: str | None = None
    """Client: the name in the server's certificate, if it is not the address's host."""
    metrics_port: int | None = None
    """Prometheus metrics and /health; 0 picks a port."""
    metrics_address: str = "127.0.0.1"
    """Where they listen. They have no token: anybody who reaches the address can read them."""
    dashboard_port: int | None = Field(default=None, ge=0, le=65535)
    """The live page, for browsers; 0 picks a port."""
    dashboard_address: str = "127.0.0.1"
    """Where the page listens; beyond loopback it needs a token and uses the [tls] certificate."""
    dashboard_token: Path | None = None
    """A file with the token for browsers, readable by its owner only (chmod 600)."""
    names: dict[int, str] = {}
    """Names of clients for log and page: `names = {0 = "berlin"}`."""
    callbacks: tuple[str, ...] = ()
    """`module:Class`, each a `ServerCallback`: your own code for every round."""


class TrackingTable(Table):
    """[tracking] Server: the figures of every round, for experiment trackers."""

    tensorboard: Path | None = None
    """Folder for TensorBoard's event files."""
    mlflow: str | None = None
    """MLflow's tracking URI, such as http://127.0.0.1:5000; one run per federation."""
    experiment: str = Field(default="lightsecagg", min_length=1)
    """MLflow's experiment for the run."""


class ClientTable(Table):
    """[client] Who the client is, and what it demands."""

    id: int = Field(ge=0)
    """Its number on the allow-list."""
    identity: Path
    """Its Ed25519 key."""
    privacy: int = Field(default=1, ge=0)
    """The least T that this client accepts."""
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    """The weakest protection that this client accepts."""
    protocols: tuple[RegisteredProtocol, ...] = (LIGHTSECAGG,)
    """The protocols in which this client takes part."""
    minimum: int = Field(default=0, ge=0)
    """The fewest clients in a sum; T + 2 is always demanded."""
    share_mode: ShareMode | None = None
    """How masks must be shared; by default, seeded or paper."""
    bound: float = Field(gt=0)
    """The bound of every round, exactly: a server that could vary it could search for the largest
    entry of an update."""
    scale: float | None = Field(default=None, gt=0)
    """The least c_l, the steps per unit of an update; by default, no limit."""
    max_dimension: int = Field(default=MAX_UNANNOUNCED_DIMENSION, gt=0)
    """The longest update, in parameters, so that a server cannot exhaust the memory."""
    max_share_bytes: int | None = Field(default=None, gt=0)
    """The most bytes that the shares of one round may take, 4 N L; by default, no limit."""
    ledger: Path = Path("ledger")
    """What it must remember across restarts: spent updates, uploads per model."""
    max_removed: int | None = Field(default=None, ge=0)
    """How many clients an allow-list from the server may remove; by default, T. The file at
    `federation.allow_list` may remove any number."""
    max_attempts: int = Field(default=2, ge=1, le=2)
    """Uploads for one global model, at most."""
    max_openings: int = Field(default=16, ge=1)
    """Rounds that may be opened from one global model, including those that fail early."""
    clip: bool = False
    """Clip entries beyond the bound. Otherwise the server sees that the client is missing."""
    overlap: Literal["process", "thread", "off"] = "process"
    """Where training runs while masks are shared; `off`: before."""
    reconnect: float = Field(default=120.0, gt=0)
    """Seconds without a connection until the client gives up."""
    patience: float = Field(default=86_400.0, gt=0)
    """Seconds of silence of a connected server until the client gives up."""
    callbacks: tuple[str, ...] = ()
    """`module:Class`, each a `ClientCallback`: your own code for every round."""

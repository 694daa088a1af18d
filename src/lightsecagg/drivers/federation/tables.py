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
    protocol: RegisteredProtocol = LIGHTSECAGG
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
    """[buffering] server: the same, and when buffers are formed (seconds) and epochs ended."""

    flush_after: float = Field(default=60.0, gt=0)
    """Since the last buffer, until one of fewer than K updates is formed; T + 2 at least."""
    reports: float = Field(default=10.0, gt=0)
    """How long an upload waits for reports on its mask."""
    renew: int = Field(default=5, ge=1)
    """Buffers of an epoch after which clients that wait outside are let in, by another epoch."""


class ServerTable(Table):
    """[server] where it listens and keeps its state."""

    address: str = "127.0.0.1:7700"
    transport: str = "grpc"
    """What carries the messages. Other distributions add theirs; the laboratory has torch-rpc."""
    state: Path = Path("state")
    """Journal, checkpoints and reports."""
    cores: int = Field(default=1, ge=1)
    """How many of them sum uploads and recover masks."""
    name: str | None = None
    """Client: the name in the server's certificate, if it is not the address's host."""
    metrics_port: int | None = None
    """Prometheus metrics and /health; none if left out."""
    metrics_address: str = "127.0.0.1"
    """Where they listen. Whoever reaches another address reads them: they have no token."""
    dashboard_port: int | None = Field(default=None, ge=0, le=65535)
    """The live page, for browsers; none if left out."""
    dashboard_address: str = "127.0.0.1"
    """Where the page listens; beyond loopback a token is needed, and [tls] certificate is used."""
    dashboard_token: Path | None = None
    """A file with the token that a browser must know; nobody else may read it (chmod 600)."""
    names: dict[int, str] = {}
    """What log and page call clients beside their ids: `names = {0 = "berlin"}`; for people."""
    callbacks: tuple[str, ...] = ()
    """`module:Class`, each a `ServerCallback`: your own code, told of every round."""


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
    protocols: tuple[RegisteredProtocol, ...] = (LIGHTSECAGG,)
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

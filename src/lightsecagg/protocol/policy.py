"""What a client demands of every round that a server proposes."""

from __future__ import annotations

from dataclasses import dataclass

from lightsecagg.errors import ParameterError
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.schemes.traits import LIGHTSECAGG, refused
from lightsecagg.protocol.settings import NO_MODEL, Settings

MAX_UNANNOUNCED_DIMENSION = 2**26
"""The longest vector for which a client makes masks without being configured for it."""

SINGLED_OUT_SCALE = 2.0**16
"""The least c_l where an update may have a weight of its own: the paper's."""

GRAPH_SECURITY = 40
"""A random sharing graph may leave a client unprotected with a probability below 2^-40."""

MAX_ATTEMPTS = 2
"""The most uploads for one global model: a round, and one repeat of it (S42)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a client demands of every round; the server may only tighten it (S01).

    `docs/security.md` lists all settings: those that a policy bounds, and why the server may
    choose the others.
    """

    allow_list: AllowList
    session: bytes
    privacy: int
    """The least T."""
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS
    """`malicious-server` also refuses honest-but-curious rounds."""
    protocols: tuple[str, ...] = (LIGHTSECAGG,)
    dimension: int | None = None
    """The length of the vectors this client contributes, if it is known in advance; otherwise
    the server may ask for at most `max_dimension`, lest it exhaust the memory."""
    max_dimension: int = MAX_UNANNOUNCED_DIMENSION
    """The longest vector that it takes part with where `dimension` is not known in advance."""
    model: bytes | None = NO_MODEL
    """Hash of the global model that this client was given (S08). The server must name the same:
    if it could name any, it could name a new one each time and evade `max_attempts`. None: the
    model comes with the opening or later; `set_input` then takes the hash of the one that was
    trained from, and nothing is masked unless the server had named it. At most `max_openings`
    rounds are then opened between two uploads, whatever they are named after."""
    instructions: bytes = b""
    """Hash of this client's training instructions, which the server must name to all clients."""
    buffering: Buffering | None = None
    """The asynchronous mode's settings, exactly; None for synchronous rounds (S09)."""
    max_attempts: int = MAX_ATTEMPTS
    """How often this client uploads an update trained from one and the same global model, at most
    `MAX_ATTEMPTS`; in rounds without a model, how often in the whole session. In the asynchronous
    mode its peers see to it that one of them is summed, so that there is no limit."""
    max_openings: int = 16
    """In how many rounds from one global model this client takes part, including those that end
    before its upload (S44); without a model, in the whole session. In the asynchronous mode, the
    most epochs between two uploads."""
    minimum: int = 0
    """The fewest clients whose updates may be summed. T + 2 is always demanded; a client that
    wants a larger crowd raises this, and takes `max_attempts` = 1, because two sums from one
    model may differ by fewer."""
    share_mode: ShareMode | None = None
    """LightSecAgg: how masks are shared. None takes seeded or paper: seeded shares rest on AES as a
    pseudorandom generator, the paper's do not but cost more; neither is a stricter form of the
    other, so that the server cannot tighten one into the other."""
    bound: float | None = None
    """The bound for the entries of an update, exactly (S44). A client whose update lies beyond it
    is missing from the sum, and the server sees that: were the bound the server's to choose, it
    could search for the largest entry. None leaves it to the server."""
    scale: float | None = None
    """The least c_l. In a sum with different integer weights, the low log2(w_max) bits belong to
    few updates; a small c_l puts all of an update into them (S43). None demands 2^16, the paper's,
    of buffers in which an update may have a weight of its own, and nothing elsewhere: where all
    have the same weight, or T + 2 share each, a coarse sum is still a sum over as many clients.
    Updates of entries far below 1 need more: c_l times their size should far exceed w_max."""
    max_share_bytes: int | None = None
    """LightSecAgg: the most bytes that the shares of one round may take at this client, those
    that it makes and those that it holds 4 N L each; `stock` times as much in the asynchronous
    mode. The server's T and U decide about L."""
    graph_security: int = GRAPH_SECURITY
    """SecAgg+: sigma; a random sharing graph may fail to protect with probability 2^-sigma.
    Zero accepts every graph, for benchmarks on made-up data only."""

    def __post_init__(self) -> None:
        repeats = self.model != NO_MODEL and self.buffering is None
        if repeats and self.max_attempts > MAX_ATTEMPTS:
            raise ParameterError(
                f"max_attempts = {self.max_attempts} must be at most {MAX_ATTEMPTS}: every rerun "
                "of one global model is another chance to compare sums; raise it only for rounds "
                "without a model"
            )
        if self.buffering is not None and self.buffering.max_updates < self.minimum:
            raise ParameterError(
                f"a sum over {self.minimum} clients at least and buffers of at most K_max = "
                f"{self.buffering.max_updates} updates exclude each other; raise max_updates or "
                "lower the minimum"
            )

    def check(self, settings: Settings) -> None:
        """Raise `RemoteProtocolError` unless a round with these settings is acceptable."""
        parameters = settings.parameters
        if settings.protocol not in self.protocols:
            wanted = " or ".join(self.protocols)
            raise refused(f"protocol {settings.protocol}, this client takes part in {wanted}")
        if settings.session != self.session:
            raise refused("another session")
        if settings.allow_list != self.allow_list.digest:
            raise refused("another allow-list than this client's")
        if parameters.clients > len(self.allow_list):
            raise refused(f"N = {parameters.clients} exceeds the allow-list")
        if parameters.privacy < self.privacy:
            raise refused(f"privacy T = {parameters.privacy}, this client demands {self.privacy}")
        if (
            self.threat_model is ThreatModel.MALICIOUS_SERVER
            and parameters.threat_model is not ThreatModel.MALICIOUS_SERVER
        ):
            raise refused(f"threat model {parameters.threat_model}, not malicious-server")
        if settings.buffering != self.buffering:
            raise refused("other asynchronous settings than this client's")
        if self.dimension is not None and settings.dimension != self.dimension:
            raise refused(f"dimension {settings.dimension}, this client's is {self.dimension}")
        if self.dimension is None and settings.dimension > self.max_dimension:
            raise refused(
                f"dimension {settings.dimension}, beyond this client's max_dimension = "
                f"{self.max_dimension}; a client that expects such vectors raises it"
            )
        if self.model is not None and settings.model != self.model:
            raise refused("a global model other than the one this client was given")
        if settings.instructions != self.instructions:
            raise refused("other instructions for training than those that this client was given")
        if settings.minimum < self.minimum:
            raise refused(
                f"sums over {settings.minimum} clients, this client demands {self.minimum}"
            )
        if self.bound is not None and settings.quantizer.bound != self.bound:
            raise refused(
                f"bound {settings.quantizer.bound} for the entries of an update, this client's is "
                f"{self.bound}; who changes it changes it at every client"
            )
        self._check_scale(settings)
        settings.traits.check_policy(self, settings)
        self.check_graph(settings, parameters.clients)

    def _check_scale(self, settings: Settings) -> None:
        least, buffering = self.scale, settings.buffering
        if least is None:
            singles_out = buffering is not None and buffering.singles_out(settings.parameters)
            least = SINGLED_OUT_SCALE if singles_out else 0.0
        if settings.quantizer.scale < least:
            raise refused(
                f"scale c_l = {settings.quantizer.scale:g}, this client demands {least:g}: the "
                "coarser the rounding, the more of an update lies in the low bits that different "
                "weights reveal; lower the bound or the weights, or take strict buffers"
            )

    def check_graph(self, settings: Settings, members: int) -> None:
        """Refuse a sharing graph that does not protect a roster of so many members."""
        settings.traits.check_roster(self, settings, members)

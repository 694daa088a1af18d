"""What the paper's experiments have in common: tasks, sizes, dropout rates, links, and the method.

Two profiles. *Full* is the paper's size, up to N = 200. *Quick* goes to N = 50 and repeats
less, so that a table is done in minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import ceil, log2

from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg_lab.experiments.cells import REPEATS, RoundCell, TrainingCell
from lightsecagg_lab.planning import Federation, Network
from lightsecagg_lab.planning.planner import recommend_short_key_survivors, recommend_survivors
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.baselines import all_traits
from lightsecagg_lab.schemes.sharing_graph import recoverable_threshold

PAPER_CLIENTS = 200
"""N of the paper's tables."""

EPOCHS = 5
"""E, of every task (Appendix D)."""

RATES = (0.1, 0.3, 0.5)
"""p, the dropout rates."""

SECURE = (ProtocolName.LIGHTSECAGG, ProtocolName.SECAGG, ProtocolName.SECAGG_PLUS)
"""The three protocols that are compared."""

LABELS = {traits.name: traits.label for traits in all_traits()}

SERVER_BANDWIDTH = Network().server_bandwidth
"""The server's link in Mbit/s, unless stated otherwise."""

UNLIMITED = 1_000_000.0
"""A server's link that is never the bottleneck, as the paper pictures it."""


@dataclass(frozen=True, slots=True)
class LearningTask:
    """A row of Table 2."""

    key: str
    """Of `PAPER_MODELS`."""
    title: str
    dimension: int
    """d"""
    samples: int
    """Examples per client."""
    epoch_seconds: float
    """About how long an epoch takes: it decides how often it is measured."""


TASKS = {
    "mnist": LearningTask("mnist", "MNIST, logistic regression", 7_850, 600, 0.02),
    "femnist": LearningTask("femnist", "FEMNIST, CNN", 1_206_590, 300, 0.7),
    "cifar10": LearningTask("cifar10", "CIFAR-10, MobileNetV3", 3_111_462, 500, 2.2),
    "gld23k": LearningTask("gld23k", "GLD-23K, EfficientNet-B0", 5_288_548, 100, 24.0),
}

CHEAP, LONG = 1.0, 13.0
"""Seconds up to which something is measured twice as often, and above which FEWEST times."""
FEWEST = 3


@dataclass(frozen=True, slots=True)
class Protection:
    """What a round protects from."""

    name: str
    """For rows and columns of tables."""
    colluders: Fraction = Fraction(1, 2)
    """T / N"""
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS
    sparse: bool = False
    """SecAgg+ on `sparse_graph` instead of one that protects."""

    def privacy(self, clients: int) -> int:
        """T"""
        return int(clients * self.colluders)

    def dropouts(self, clients: int, rate: float) -> int:
        """D = p N, at most what our checks allow: N - D >= T + 2, or T + 2D < N.

        At p = 0.5 and T = N / 2 the paper's D = N / 2 lies outside its own theorem (T + D < N);
        this is N / 2 - 2.
        """
        T = self.privacy(clients)
        most = clients - T - 2
        if self.threat_model is ThreatModel.MALICIOUS_SERVER:
            most = min(most, (clients - T - 1) // 2)
        return min(round(rate * clients), most)


STANDARD = Protection("T = N/2")
"""That of the paper's tables, and ours unless stated."""
FEW_COLLUDERS = Protection("T = N/10", Fraction(1, 10))
"""Where SecAgg+'s graph is sparse and safe."""
SPARSE = Protection("T = N/2, SecAgg+ on a sparse graph (insecure)", sparse=True)
"""SecAgg+ at the cost that the paper gives it; clients with default policies refuse its graph."""
MALICIOUS = Protection("T = N/2, malicious server", threat_model=ThreatModel.MALICIOUS_SERVER)
"""What this package defends against unless it is told otherwise; not for SecAgg+."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How large, and how carefully."""

    name: str
    clients: tuple[int, ...]
    """N of the figures; tables take the largest."""
    sample: int
    """Real clients per round; the others are stand-ins."""
    repeats: int
    """How often something is measured that is neither cheap nor long, see `repetitions`."""

    @property
    def largest(self) -> int:
        """N of the tables."""
        return self.clients[-1]

    def repetitions(self, seconds: float) -> int:
        """How often something is measured that takes so long."""
        if seconds <= CHEAP:
            return 2 * self.repeats
        return self.repeats if seconds <= LONG else min(self.repeats, FEWEST)

    def training(self, task: LearningTask) -> TrainingCell:
        """The training of one client."""
        seconds = task.epoch_seconds
        return TrainingCell(task.key, task.samples, EPOCHS, self.repetitions(seconds), seconds)

    def round(
        self,
        protocol: ProtocolName,
        clients: int,
        rate: float,
        dimension: int,
        survivors: int = 0,
        mode: ShareMode = ShareMode.SEEDED,
        protection: Protection = STANDARD,
    ) -> RoundCell:
        """Rounds at this dropout rate; LightSecAgg with the planner's U unless one is given."""
        T, D = protection.privacy(clients), protection.dropouts(clients, rate)
        traits = traits_of(protocol)
        cell = RoundCell(
            protocol=protocol,
            clients=clients,
            privacy=T,
            dropouts=D,
            dimension=dimension,
            survivors=(survivors or planned_survivors(clients, rate, dimension, mode, protection))
            if traits.share_modes
            else 0,
            share_mode=mode,
            sample=min(self.sample, T),
            threat_model=protection.threat_model,
            graph=sparse_graph(clients, D) if traits.ring and protection.sparse else (0, 0),
        )
        return replace(cell, repeats=self.repetitions(cell.expected_round_seconds))


FULL = Profile("full", (50, 100, 200), sample=4, repeats=REPEATS)
RECORD = replace(FULL, name="record")
"""The same, but for what would take a recording beyond its time, see `growth`."""
QUICK = Profile("quick", (20, 50), sample=4, repeats=FEWEST)


def privacy(clients: int) -> int:
    """T = N / 2."""
    return STANDARD.privacy(clients)


def dropouts(clients: int, rate: float) -> int:
    """D = p N, as far as it is allowed beside T = N / 2."""
    return STANDARD.dropouts(clients, rate)


def sparse_graph(clients: int, dropouts: int) -> tuple[int, int]:
    """A graph of SecAgg+ as sparse as the paper's, k = O(log N): INSECURE where T is N / 2.

    k = 4 log2 N, and the largest t with which the sum is recovered but for one round in a million.
    """
    degree = min(4 * ceil(log2(clients)), clients - 2)
    return degree, recoverable_threshold(clients, dropouts, degree)


@cache
def planned_survivors(
    clients: int,
    rate: float,
    dimension: int,
    mode: ShareMode = ShareMode.SEEDED,
    protection: Protection = STANDARD,
) -> int:
    """The planner's U, by its stated unit costs, on the default links."""
    federation = Federation(
        clients,
        protection.privacy(clients),
        protection.dropouts(clients, rate),
        dimension,
        threat_model=protection.threat_model,
    )
    if mode is ShareMode.SHORT_KEY:
        return recommend_short_key_survivors(federation)
    return recommend_survivors(federation)[0]


def method(profile: Profile) -> list[str]:
    """What every report must say."""
    smaller = (
        [
            f"**These are rounds of N = {profile.largest} clients, the paper's are of N = "
            f"{PAPER_CLIENTS}. The cost of a phase grows with N, differently for each protocol: "
            "do not compare the two.**"
        ]
        if profile.largest != PAPER_CLIENTS
        else []
    )
    return [
        *smaller,
        "Method. Computation is measured on this machine, in CPU seconds of one core per party and "
        "phase. Unless stated, this holds for the server too; more cores would share its work by "
        f"columns, above all SecAgg's recovery. {profile.sample} clients of each round are real, "
        "and the slowest of them counts. The others are stand-ins: they send messages of the right "
        "form and size, are not charged, and the server does all of its work "
        "(`simulation/sampling.py`). Training is measured with one thread on tensors of the data "
        "set's shape (600, 300, 500 and 100 examples per client for the four tasks), one epoch at "
        f"a time, which counts E = {EPOCHS} times. Time on the links is bytes over bandwidth: "
        "320 Mbit/s per client unless stated, 10 Gbit/s at the server, 20 ms one way. *Relay* "
        "sends shares through the server, as this package does; *direct* sends them from client "
        "to client, as in the paper. 200 clients share the server's 10 Gbit/s, 50 Mbit/s each: "
        "uploads then wait for the server, whatever the clients' links are. Headers, flow control, "
        "the slow start of uploads, and the cost of gRPC, TLS, framing and storing at both ends "
        "are charged by the messages and bytes of each protocol. Their terms come from real "
        "rounds over shaped links (docs/planning.md). Carrying and storing take one core of the "
        "server, however many it has.",
        "Statistics. Each cell is measured in its own process. Its first round is cold and kept "
        "apart; only figures called cold include it. Every other figure is computed round by "
        "round, with each of the measured trainings, and given as the median and, in brackets and "
        "as error bars, the interquartile range. A ratio compares rounds with the same, the "
        "median, training, and is that of the two medians. Its range is from the lower quartile "
        "over the upper to the upper over the lower, the widest that the quartiles allow.",
        "D clients vanish after sharing and before their upload; T = N/2; the 50 % cells have "
        "D = N/2 - 2, the most that the checks allow. LightSecAgg runs in seeded mode with the "
        "planner's U unless stated. Its rows *short keys* share keys instead of masks, with the "
        "planner's U for them and dithered decoding; they also depend on ring-LWE "
        "(docs/short-keys.md: experimental). SecAgg+ runs on the graph that is proven safe for "
        "these N, T and D, not on one of degree O(log N) as in the paper.",
        "The paper's figures come from EC2 m3.medium instances and its own implementations of all "
        "three protocols, ours from one machine: compare ratios, not seconds.",
    ]

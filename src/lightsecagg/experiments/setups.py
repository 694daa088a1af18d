"""What the paper's experiments have in common: tasks, sizes, dropout rates, links, and the method.

Two profiles. *Full* is the paper's size, up to N = 200. *Quick* goes to N = 50 and trains one epoch
instead of five, so that everything is done in minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightsecagg.experiments.cells import RoundCell, TrainingCell
from lightsecagg.params import ShareMode
from lightsecagg.planning import Federation, Network
from lightsecagg.planning.planner import recommend_short_key_survivors, recommend_survivors
from lightsecagg.protocol.schemes.traits import TRAITS, ProtocolName, traits_of

PAPER_CLIENTS = 200
"""N of the paper's tables."""

EPOCHS = 5
"""E, of every task (Appendix D)."""

RATES = (0.1, 0.3, 0.5)
"""p, the dropout rates."""

SECURE = (ProtocolName.LIGHTSECAGG, ProtocolName.SECAGG, ProtocolName.SECAGG_PLUS)
"""The three protocols that are compared."""

LABELS = {name: traits.label for name, traits in TRAITS.items()}

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


TASKS = {
    "mnist": LearningTask("mnist", "MNIST, logistic regression", 7_850, 600),
    "femnist": LearningTask("femnist", "FEMNIST, CNN", 1_206_590, 300),
    "cifar10": LearningTask("cifar10", "CIFAR-10, MobileNetV3", 3_111_462, 500),
    "gld23k": LearningTask("gld23k", "GLD-23K, EfficientNet-B0", 5_288_548, 100),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """How large, and how carefully."""

    name: str
    clients: tuple[int, ...]
    """N of the figures; tables take the largest."""
    sample: int
    """Real clients per round; the others are stand-ins."""
    repeats: int
    """Rounds of LightSecAgg and of plain summation; SecAgg and SecAgg+ get one."""
    epochs: int
    """Epochs that are really trained."""

    @property
    def largest(self) -> int:
        """N of the tables."""
        return self.clients[-1]

    def training(self, task: LearningTask) -> TrainingCell:
        """The training of one client."""
        return TrainingCell(task.key, task.samples, EPOCHS, self.epochs)

    def round(
        self,
        protocol: ProtocolName,
        clients: int,
        rate: float,
        dimension: int,
        survivors: int = 0,
        mode: ShareMode = ShareMode.SEEDED,
    ) -> RoundCell:
        """A round at this dropout rate; LightSecAgg with the planner's U unless one is given."""
        T, D = privacy(clients), dropouts(clients, rate)
        traits = traits_of(protocol)
        light = bool(traits.share_modes)
        quick_to_run = light or not traits.protected
        return RoundCell(
            protocol=protocol,
            clients=clients,
            privacy=T,
            dropouts=D,
            dimension=dimension,
            survivors=(survivors or planned_survivors(clients, rate, dimension, mode))
            if light
            else 0,
            share_mode=mode,
            sample=min(self.sample, T),
            repeats=self.repeats if quick_to_run else 1,
        )


FULL = Profile("full", (50, 100, 150, 200), sample=4, repeats=1, epochs=EPOCHS)
QUICK = Profile("quick", (20, 50), sample=4, repeats=1, epochs=1)


def privacy(clients: int) -> int:
    """T = N / 2."""
    return clients // 2


def dropouts(clients: int, rate: float) -> int:
    """D = p N, at most what our checks allow: N - D >= T + 2.

    At p = 0.5 the paper's D = N / 2 lies outside its own theorem (T + D < N); this is N / 2 - 2.
    """
    return min(round(rate * clients), clients - privacy(clients) - 2)


def planned_survivors(
    clients: int, rate: float, dimension: int, mode: ShareMode = ShareMode.SEEDED
) -> int:
    """The planner's U, by its stated unit costs, on the default links."""
    federation = Federation(clients, privacy(clients), dropouts(clients, rate), dimension)
    if mode is ShareMode.SHORT_KEY:
        return recommend_short_key_survivors(federation)
    return recommend_survivors(federation)[0]


def method(profile: Profile) -> list[str]:
    """What every report must say."""
    trained = (
        f"E = {EPOCHS} epochs"
        if profile.epochs == EPOCHS
        else f"{profile.epochs} of E = {EPOCHS} epochs, times {EPOCHS / profile.epochs:g}"
    )
    smaller = (
        [
            f"**These are rounds of N = {profile.largest} clients, the paper's are of N = "
            f"{PAPER_CLIENTS}: what a phase costs grows with N, differently for each protocol, so "
            "the two must not be compared.**"
        ]
        if profile.largest != PAPER_CLIENTS
        else []
    )
    return [
        *smaller,
        "Method. Computation is measured on this machine, in CPU seconds of one core per party and "
        f"phase. {profile.sample} clients of each round are real and the slowest of them counts; "
        "the others are stand-ins that send messages of the right form and size and are not "
        "charged, while the server does all of its work (`drivers/simulation/sampling.py`). The "
        f"median of {profile.repeats} round(s) of LightSecAgg and plain FedAvg is taken, and one "
        "round of SecAgg and SecAgg+. Training is measured with one thread on tensors of the data "
        f"set's shape ({trained}; 600, 300, 500 and 100 examples per client for the four tasks). "
        "Time on the links is bytes over bandwidth: 320 Mbit/s per client unless stated, 10 Gbit/s "
        "at the server, 20 ms one way; *relay* sends shares through the server, as this package "
        "does, *direct* sends them from client to client, as the paper draws it. Shared by 200 "
        "clients, the server's 10 Gbit/s are 50 Mbit/s each: then the uploads wait for the server, "
        "whatever the clients' links are.",
        "D clients vanish after sharing and before their upload; T = N/2; the 50 % cells have "
        "D = N/2 - 2, the most that the checks allow. LightSecAgg runs in seeded mode with the "
        "planner's U unless stated; its rows *short keys* share keys instead of masks, with the "
        "planner's U for them and dithered decoding, and rest on ring-LWE besides "
        "(docs/short-keys.md: experimental); SecAgg+ on the graph that the finder proves safe for "
        "these N, T and D, which is far denser than the O(log N) of the paper's setting.",
        "The paper's figures come from EC2 m3.medium instances and its own implementations of all "
        "three protocols; ours from one machine. Our SecAgg and SecAgg+ recover many times faster "
        "than the paper's, so training and links dominate our totals, and total-time gains are "
        "smaller for that reason.",
    ]

"""Tables 1, 5 and 6: measured growth beside the stated complexities, and a closed form.

Rounds of real parties are run for N, 2N, 4N, ... and every field operation, element and byte is
counted. The growth exponent is the slope of log(count) against log(N): 0 for a count that does not
grow, 1 for linear growth. As in the paper, T = N/2, D = 0.3 N and U = N - D.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, comb, log2
from typing import Any

import numpy as np

from lightsecagg.drivers.cohort import Cohort
from lightsecagg.errors import Aborted
from lightsecagg.params import Parameters, ShareMode
from lightsecagg.protocol.interface import Phase, Update
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg_lab.experiments.cells import VERSION, Cell, Document, Results
from lightsecagg_lab.experiments.operation_counts import Counter, counting
from lightsecagg_lab.experiments.report import Report, Table
from lightsecagg_lab.experiments.setups import LABELS, SECURE, Profile, dropouts, privacy
from lightsecagg_lab.planning.timeline import OFFLINE
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.faults import Faults, Moment
from lightsecagg_lab.simulation.synchronous import RoundReport, simulate_round

_RATE = 0.3
_DIMENSION = 50_000
_ATTEMPTS = 20
_PER_PAIR = 1e-4
"""Seconds that a round takes per pair of clients, about."""
_SAMPLE = 4
"""Real clients of a round; what a user does is their mean, and the server does all of its work."""


@dataclass(frozen=True, slots=True)
class CountCell(Cell):
    """The operations, elements and bytes of one round."""

    protocol: ProtocolName
    clients: int
    dimension: int = _DIMENSION
    mode: ShareMode = ShareMode.PAPER

    @property
    def key(self) -> str:
        name = self.protocol.value.replace("+", "plus")
        return f"counts-{name}-{self.mode}-N{self.clients}-d{self.dimension}-{VERSION}"

    @property
    def expected_seconds(self) -> float:
        return _PER_PAIR * self.clients**2

    def cohort(self) -> Cohort:
        """SecAgg+ with a graph as sparse as the paper's: k = 2 log2 N, t = k / 3."""
        N = self.clients
        T, D = privacy(N), dropouts(N, _RATE)
        k = min(2 * ceil(log2(N)), N - 2)
        traits, parameters = traits_of(self.protocol), Parameters(N, T, D, share_mode=self.mode)
        graph = (k, max(2, k // 3)) if traits.ring else ()
        parameters, neighbours, threshold = traits.resolve(parameters, *graph)
        return Cohort(
            self.protocol,
            parameters,
            make_quantizer(parameters, self.dimension, 1.0, group=traits.group(parameters)),
            self.dimension,
            neighbours,
            threshold,
            graph_security=0,
        )

    def measure(self) -> Document:
        report, decoded, expanded = self._round()
        phases = report.meter.phases
        offline = [phases[phase] for phase in OFFLINE]
        online = [phases[phase] for phase in (Phase.UPLOAD, Phase.AGREE, Phase.RECOVER)]
        everybody = self.clients
        survivors = everybody - dropouts(everybody, _RATE)  # the others do nothing online
        return {
            "cell": asdict(self),
            "offline storage (U)": report.stored / 4,
            "offline comm. (U)": sum(loads.uploaded for loads in offline) / 4 / everybody,
            "offline comp. (U)": sum(loads.client_seconds for loads in offline) / _SAMPLE,
            "online comm. (U)": sum(loads.uploaded for loads in online) / 4 / survivors,
            "online comm. (S)": sum(loads.uploaded for loads in online) / 4,
            "online comp. (U)": sum(loads.client_seconds for loads in online) / _SAMPLE,
            "reconstruction (S)": phases[Phase.RECOVER].server.seconds,
            "decoding (S)": decoded,
            "PRG (S)": expanded,
        }

    def _round(self) -> tuple[RoundReport, int, int]:
        """A round whose clock counts operations, and in which D clients vanish after sharing.

        Also returns what follows the last answer, which is the server's: operations of decoding,
        and words of the PRG.
        """
        dropped = range(self.clients - dropouts(self.clients, _RATE), self.clients)
        faults = Faults(drops=dict.fromkeys(dropped, (Phase.UPLOAD, Moment.BEFORE)))
        vector = np.linspace(-0.5, 0.5, self.dimension, dtype=np.float32)
        for _ in range(_ATTEMPTS):
            with counting() as counter:
                answered = _LastAnswer(counter)
                report = simulate_round(
                    self.cohort(),
                    lambda client: Update(vector + np.float32(client * 1e-6)),
                    faults,
                    sample=_SAMPLE,
                    progress=answered,
                    clock=counter,
                )
            if report.aggregate is not None:
                decoded, expanded = answered.coding, answered.prg_words
                return report, counter.coding - decoded, counter.prg_words - expanded
        # So sparse a graph may leave a client without enough neighbours.
        raise Aborted(f"none of {_ATTEMPTS} rounds came to a result: {report.aborted}")


class _LastAnswer:
    """What had been counted when a client was last done with something."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.coding = self.prg_words = 0

    def __call__(self, phase: Phase) -> None:
        self.coding, self.prg_words = self._counter.coding, self._counter.prg_words


# row -> what the paper states for LightSecAgg, SecAgg, SecAgg+
_TABLE1 = {
    "offline comm. (U)": ("O(d)", "O(sN)", "O(s log N)"),
    "offline comp. (U)": ("O(d log N)", "O(dN + sN²)", "O(d log N + s log² N)"),
    "online comm. (U)": ("O(d)", "O(d + sN)", "O(d + s log N)"),
    "online comm. (S)": ("O(dN)", "O(dN + sN²)", "O(dN + sN log N)"),
    "online comp. (U)": ("O(d)", "O(d)", "O(d)"),
    "reconstruction (S)": ("O(d log N)", "O(dN²)", "O(dN log N)"),
}
_TABLE5 = {
    "offline storage (U)": ("O(d + dN/(U-T))", "O(d + Ns)", "O(d + s log N)"),
    "offline comm. (U)": ("O(dN/(U-T))", "O(sN)", "O(s log N)"),
    "offline comp. (U)": ("O(dN log N/(U-T))", "O(dN + sN²)", "O(d log N + s log² N)"),
    "online comm. (U)": ("O(d + d/(U-T))", "O(d + sN)", "O(d + s log N)"),
    "online comm. (S)": ("O(dN + dU/(U-T))", "O(dN + sN²)", "O(dN + sN log N)"),
    "online comp. (U)": ("O(d + dU/(U-T))", "O(d)", "O(d)"),
    "decoding (S)": ("O(dU log U/(U-T))", "O(sN²)", "O(sN log² N)"),
    "PRG (S)": ("-", "O(dN²)", "O(dN log N)"),
}


def _sizes(profile: Profile) -> tuple[int, ...]:
    return (8, 16, 32) if profile.name == "quick" else (16, 32, 64, 128, 256, 512)


def count_cells(profile: Profile) -> list[Cell]:
    """All three protocols as N doubles."""
    return [CountCell(protocol, N) for protocol in SECURE for N in _sizes(profile)]


def table1_report(profile: Profile, results: Results) -> Report:
    """Table 1."""
    return _growth("table1", "Table 1: complexity, measured", _TABLE1, profile, results)


def table5_report(profile: Profile, results: Results) -> Report:
    """Table 5."""
    return _growth("table5", "Table 5: complexity, measured, in detail", _TABLE5, profile, results)


def _growth(
    name: str,
    title: str,
    stated: dict[str, tuple[str, str, str]],
    profile: Profile,
    results: Results,
) -> Report:
    sizes = _sizes(profile)
    report = Report(name, title)
    for column, protocol in enumerate(SECURE):
        rows = []
        for row, complexities in stated.items():
            counts = [results[CountCell(protocol, N).key][row] for N in sizes]
            found: dict[str, Any] = {"counts": counts}
            if all(counts):
                found["exponent"] = float(np.polyfit(np.log(sizes), np.log(counts), 1)[0])
                found["last_doubling"] = log2(counts[-1] / counts[-2])
            report.figures[f"{protocol}/{row}"] = found
            growth = [
                f"{found[name]:.2f}" if name in found else "-"
                for name in ("exponent", "last_doubling")
            ]
            listed = [f"{count:,.0f}" for count in counts]
            rows.append([row, complexities[column], *listed, *growth])
        report.tables.append(
            Table(
                f"{LABELS[protocol]}: elements (comm., storage) and operations (comp.) per round",
                ["", "the paper's"] + [f"N = {N}" for N in sizes] + ["exponent", "last doubling"],
                rows,
            )
        )
    report.figures["clients"] = list(sizes)
    report.paragraphs = [
        f"Counted in rounds of real parties with d = {_DIMENSION:,}, T = N/2, D = 0.3 N dropping "
        "before their upload, U = N - D, the paper's share mode. U: a user, the mean; S: the "
        f"server. {_SAMPLE} users of each round are real, the others stand-ins that are not "
        "counted. Communication and storage are in field elements of 4 bytes, headers, keys and "
        "signatures included. Computation is in operations in F_q plus PRG words (key agreements, "
        "signatures and sealing are not counted). Reconstruction is all that the server does with "
        "the answers: decoding is its matrix products and transforms, PRG the words it expands; "
        "neither includes adding up. `exponent` is the slope of log(count) over log(N), fitted "
        "over all N; `last doubling` is that of the last two. Where s N is not small against d, "
        "terms in s show: s stands for shares, keys and signatures of 40 to 170 bytes.",
        "Below N = 128 LightSecAgg decodes by a matrix product, which is faster there than a "
        "transform. Its reconstruction then grows faster than log N, but its count stays small; "
        "the doublings from 128 on show transforms. SecAgg and SecAgg+ expand their masks when "
        "they upload, so the term in d N, or d log N, appears online; the paper counts it "
        "offline. SecAgg+ is counted on a graph of k = 2 log2 N neighbours, as sparse as in the "
        "paper's analysis; the graphs that this package accepts are denser "
        "(`find_graph_parameters`).",
    ]
    return report


# -- Table 6 -------------------------------------------------------------------------------------


def table6_cells(profile: Profile) -> list[Cell]:
    """None: it is a closed form."""
    return []


def table6_report(profile: Profile, results: Results) -> Report:
    """Randomness and storage against the scheme of Zhao and Sun."""
    report = Report("table6", "Table 6: randomness and storage against the scheme of Zhao and Sun")
    rows = []
    for N in (10, 20, 50, 100, 200):
        T, D = privacy(N), dropouts(N, _RATE)
        U = N - D
        theirs, ours = zhao_sun(N, T, U), lightsecagg_storage(N, T, U)
        report.figures[str(N)] = {
            "zhao_sun": [_large(value) for value in theirs],
            "lightsecagg": list(ours),
        }
        rows.append(
            [
                f"N = {N}, T = {T}, U = {U}",
                _large(theirs[0]),
                f"{ours[0]:,}",
                _large(theirs[1]),
                f"{ours[1]:,}",
            ]
        )
    report.tables.append(
        Table(
            "In symbols of d / (U - T) field elements",
            [
                "",
                "randomness, Zhao and Sun",
                "randomness, LightSecAgg",
                "storage per user, Zhao and Sun",
                "storage per user, LightSecAgg",
            ],
            rows,
        )
    )
    report.paragraphs = [
        "Closed forms of the paper's Table 6. Zhao and Sun: N(U - T) + T sum C(N, u) over u = U..N "
        "symbols of randomness, and U - T + sum C(N, u) u / N symbols of storage per user. "
        "LightSecAgg: N U and U - T + N. In seeded mode the U seeds of a mask take 32 U bytes, and "
        "a user stores N - U explicit shares instead of N."
    ]
    return report


def zhao_sun(N: int, T: int, U: int) -> tuple[int, int]:
    """Total randomness and storage per user (rounded up), in symbols."""
    subsets = [(u, comb(N, u)) for u in range(U, N + 1)]
    randomness = N * (U - T) + T * sum(count for _, count in subsets)
    stored = sum(count * u for u, count in subsets)
    return randomness, U - T + -(-stored // N)


def lightsecagg_storage(N: int, T: int, U: int) -> tuple[int, int]:
    """Total randomness and storage per user, in symbols."""
    return N * U, U - T + N


def _large(value: int) -> str:
    if value < 10**7:
        return f"{value:,}"
    digits = str(value)
    return f"{digits[0]}.{digits[1]}e{len(digits) - 1}"

"""The figure that matters to a user: a protected round relative to unprotected FedAvg."""

from __future__ import annotations

from lightsecagg.experiments.cells import Cell, Results
from lightsecagg.experiments.report import Report, Table
from lightsecagg.experiments.rounds import LIGHT, PLAIN, SHORT_KEYS, Measured, round_cells
from lightsecagg.experiments.setups import LABELS, SECURE, TASKS, Profile, method
from lightsecagg.experiments.statistics import Spread
from lightsecagg.experiments.timing import client_download, client_upload, total
from lightsecagg.params import ShareMode
from lightsecagg.planning import Network, Topology

RATE = 0.1
TIME_GOAL, BYTES_GOAL = 1.15, 1.35


def overhead_cells(profile: Profile) -> list[Cell]:
    """All four protocols at 10 % dropouts, and short keys."""
    return round_cells(profile, [TASKS["femnist"]], [RATE], protocols=(*SECURE, PLAIN))


def overhead_report(profile: Profile, results: Results) -> Report:
    """Round time and bytes relative to unprotected FedAvg."""
    measured, task, N = Measured(profile, results), TASKS["femnist"], profile.largest
    report = Report("overhead", f"Overhead over unprotected FedAvg, CNN, N = {N}, 10 % dropouts")
    for topology in Topology:
        on = Network(topology=topology)
        plain_cell = measured.round(profile.round(PLAIN, N, RATE, task.dimension))
        plain = measured.times(PLAIN, task, RATE, on)
        rows = []
        shown = {p.value: (LABELS[p], p, ShareMode.SEEDED) for p in (PLAIN, *SECURE)}
        shown["short-key"] = (SHORT_KEYS, LIGHT, ShareMode.SHORT_KEY)
        for name, (label, protocol, mode) in shown.items():
            cell = measured.round(profile.round(protocol, N, RATE, task.dimension, mode=mode))
            times = measured.times(protocol, task, RATE, on, mode=mode)
            beside, apart = times.total(overlap=True), times.total(overlap=False)
            figures = {
                "round_seconds": beside,
                "time_ratio": times.over(plain, total(overlap=True)),
                "round_seconds_non_overlapped": apart,
                "time_ratio_non_overlapped": times.over(plain, total(overlap=False)),
                "client_upload_bytes": client_upload(cell),
                "upload_ratio": client_upload(cell) / client_upload(plain_cell),
                "client_download_bytes": client_download(cell),
            }
            if protocol is PLAIN:
                figures |= {ratio: Spread.exactly(1.0) for ratio in figures if "ratio" in ratio}
            cold = times.cold.total(overlap=True)
            report.figures[f"{name}/{topology}"] = figures | {"cold_round_seconds": cold}
            rows.append(
                [
                    label,
                    f"{beside:.2f}",
                    f"{figures['time_ratio']:.3f}",
                    f"{apart:.2f}",
                    f"{figures['time_ratio_non_overlapped']:.3f}",
                    f"{cold:.2f}",
                    f"{figures['client_upload_bytes'].scaled(1e-6):.3f}",
                    f"{figures['upload_ratio']:.3f}",
                    f"{figures['client_download_bytes'].scaled(1e-3):.1f}",
                ]
            )
        report.tables.append(
            Table(
                "Shares relayed" if topology is Topology.RELAY else "Shares sent directly",
                [
                    "protocol",
                    "round, overlapped (s)",
                    "over plain",
                    "non-overlapped (s)",
                    "over plain",
                    "cold, overlapped (s)",
                    "client sends (MB)",
                    "over plain",
                    "client receives (kB)",
                ],
                rows,
            )
        )
    light = report.figures[f"{LIGHT}/{Topology.RELAY}"]
    ratio, upload = light["time_ratio"], light["upload_ratio"]
    met = ratio.median <= TIME_GOAL and upload.median <= BYTES_GOAL
    report.figures["goal_met"] = met
    report.paragraphs = [
        f"Goal for LightSecAgg (relayed, overlapped): at most {TIME_GOAL} times the round time and "
        f"{BYTES_GOAL} times the upload of plain FedAvg. Measured: {ratio:.3f} and {upload:.3f}: "
        f"{'met' if met else 'NOT met'} by the median, and "
        f"{'by' if ratio.high <= TIME_GOAL else 'NOT by'} all of the range. The download of the "
        "global model, the same for all protocols, is not counted.",
        *method(profile),
    ]
    return report

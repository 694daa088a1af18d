"""What the asynchronous training runs come to: differences, the sweep, costs, tables, figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import Any

from lightsecagg.errors import MissingExtra
from lightsecagg_lab.experiments.asynchronous import (
    FEDBUFF,
    LAST_ROUNDS,
    LIGHTSECAGG,
    SCALE_BITS,
    UNMASKED,
    Setup,
)
from lightsecagg_lab.experiments.competition import Competition
from lightsecagg_lab.experiments.statistics import Spread


def summarise(documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Final accuracies by scheme and staleness, their differences, the sweep, and the costs."""
    done = list(documents)
    final: dict[tuple[str, str], dict[int, float]] = {}
    rises: dict[str, list[float]] = {}
    for document in done:
        cell = document["cell"]
        if cell["scheme"] != UNMASKED:
            by_seed = final.setdefault((cell["scheme"], cell["staleness"]), {})
            by_seed[cell["seed"]] = document["final_accuracy"]
            rises.setdefault(cell["staleness"], []).append(rise_at_the_end(document["accuracy"]))
    convergence = []
    for (scheme, function), protected in sorted(final.items()):
        plain = final.get((FEDBUFF, function), {})
        both = sorted(set(protected) & set(plain))
        if scheme == LIGHTSECAGG and both:
            ours, theirs = (fmean(acc[s] for s in both) for acc in (protected, plain))
            by_seed_points = [100 * (protected[s] - plain[s]) for s in both]
            convergence.append(
                {
                    "staleness": function,
                    "seeds": both,
                    FEDBUFF: theirs,
                    LIGHTSECAGG: ours,
                    "difference_points": 100 * (ours - theirs),
                    "difference_points_by_seed": by_seed_points,
                    "standard_error_points": _standard_error(by_seed_points),
                    "spread_points": 100 * (max(plain.values()) - min(plain.values())),
                    "rise_points": fmean(rises[function]),
                }
            )
    return {
        "convergence": convergence,
        "sweep": _sweep(done),
        "exact": all(d["exact"] for d in done if d["cell"]["scheme"] == LIGHTSECAGG),
        "cost": _cost([d for d in done if d["cell"]["scheme"] == LIGHTSECAGG]),
        "measured": _machines(done),
    }


def _standard_error(values: list[float]) -> float | None:
    """Of the mean of these values; one alone tells nothing of its error."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def rise_at_the_end(accuracy: Mapping[Any, float]) -> float:
    """Points per 100 rounds by which the accuracy still rises over the last third: 0 is flat."""
    last = max(map(int, accuracy))
    points = [
        (int(done), 100 * value) for done, value in accuracy.items() if int(done) > last / 1.5
    ]
    if len(points) < 2:
        return 0.0
    return 100 * linear_regression(*zip(*points, strict=True)).slope


def _sweep(documents: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sweep's points, by c_l: accuracy over its seeds, and the errors that cause it."""
    by_scale: dict[int, list[Mapping[str, Any]]] = {}
    for document in documents:
        if document["cell"]["scheme"] == UNMASKED:
            by_scale.setdefault(document["cell"]["scale_bits"], []).append(document)
    return [
        {
            "scale_bits": bits,
            "seeds": len(found),
            "accuracy": fmean(each["final_accuracy"] for each in found),
            "least": min(each["final_accuracy"] for each in found),
            "most": max(each["final_accuracy"] for each in found),
            "wrapped": fmean(each["wrapped"] for each in found),
            "noise": fmean(each["noise"] for each in found),
        }
        for bits, found in sorted(by_scale.items())
    ]


def _cost(protected: list[Mapping[str, Any]]) -> dict[str, Spread]:
    """What protection costs in a run: the price list of the real thing."""
    if not protected:
        return {}

    def over_runs(*names: str) -> Spread:
        return Spread.of(
            sum(phase[name] for phase in document["phases"].values() for name in names)
            for document in protected
        )

    return {
        "training_seconds": Spread.of(document["training_seconds"] for document in protected),
        "client_protocol_seconds": over_runs("client_seconds"),
        "server_protocol_seconds": over_runs("server_seconds"),
        "megabytes": over_runs("upload_bytes", "download_bytes").scaled(1e-6),
        "unprotected_megabytes": Spread.of(
            4e-6 * document["parameters"] * document["uploads"] for document in protected
        ),
    }


def _machines(documents: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Where and when the runs were made, of those that say so, and how many beside other work."""
    known = [document["machine"] for document in documents if "machine" in document]
    beside = [Competition(**found) for machine in known if (found := machine["competition"])]
    dates = sorted(machine["date"] for machine in known)
    return {
        "runs": len(documents),
        "known": len(known),
        "machines": sorted(
            {
                f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, "
                f"{machine['kernels']} kernels, lightsecagg {machine['lightsecagg']}"
                for machine in known
            }
        ),
        "dates": [dates[0], dates[-1]] if dates else [],
        "beside_others": sum(each.too_much for each in beside),
    }


def to_markdown(setup: Setup, summary: Mapping[str, Any], figures: Iterable[Path] = ()) -> str:
    """The summary as tables, with the figures that lie beside them."""
    annealed = "" if setup.annealing == "constant" else f", {setup.annealing} annealing"
    lines = [
        f"# Asynchronous convergence on {setup.task}{annealed}",
        "",
        f"N = {setup.clients}, K = {setup.buffer}, T = {setup.privacy}, U = {setup.survivors}, "
        f"tau_max = {setup.max_staleness}, c_g = {setup.staleness_scale}, q = {setup.modulus}, "
        f"{setup.rounds} rounds, E = {setup.epochs}, batch {setup.batch_size}, "
        f"lr {setup.learning_rate}, momentum {setup.momentum:g}, eta_g = {setup.server_rate}"
        f"{annealed}; "
        f"staleness uniform on [0, {setup.max_staleness}]; accuracy is the mean of the last "
        f"{LAST_ROUNDS} rounds, its rise a straight line's through the last third of them; "
        "± is the standard error of a mean over the seeds.",
        "",
    ]
    if summary["convergence"]:
        lines += [
            f"| staleness | seeds | FedBuff | LightSecAgg (c_l = 2^{SCALE_BITS}) | difference | "
            "by seed | FedBuff's spread over seeds | still rising, points per 100 rounds |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['staleness']} | {len(row['seeds'])} | {row[FEDBUFF]:.2%} | "
            f"{row[LIGHTSECAGG]:.2%} | {_difference(row)} points | "
            f"{', '.join(f'{points:+z.2f}' for points in row['difference_points_by_seed'])} | "
            + (f"{row['spread_points']:.2f} points | " if len(row["seeds"]) > 1 else "- | ")
            + f"{row['rise_points']:+z.2f} |"
            for row in summary["convergence"]
        ]
        exact = "every" if summary["exact"] else "NOT every"
        lines += ["", f"In the protected runs {exact} recovered sum was exact in F_q.", ""]
    if summary["cost"]:
        cost = summary["cost"]
        lines += [
            "Cost of a protected run, all parties together, as median and quartiles of the runs: "
            f"{cost['client_protocol_seconds']:.0f} s CPU of clients and "
            f"{cost['server_protocol_seconds']:.1f} s of the server, against "
            f"{cost['training_seconds']:.0f} s of training; {cost['megabytes'].median:.0f} MB on "
            f"the wire, against {cost['unprotected_megabytes'].median:.0f} MB of unprotected "
            "uploads.",
            "",
        ]
    if summary["sweep"]:
        lines += [
            "Sweep over c_l (poly): quantised arithmetic over F_q without masks and without the "
            "range check, which a real client never switches off. Rounding error: of "
            "a buffer's mean, relative to it (r.m.s., mean over buffers). Wrapped: entries of the "
            "sum that left [-q/2, q/2).",
            "",
            "| c_l | seeds | accuracy | from | to | rounding error | wrapped |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| 2^{point['scale_bits']} | {point['seeds']} | {point['accuracy']:.2%} | "
            f"{point['least']:.2%} | {point['most']:.2%} | {point['noise']:.2g} | "
            f"{point['wrapped']:.2%} |"
            for point in summary["sweep"]
        ]
        lines.append("")
    lines += _provenance(summary["measured"])
    for figure in figures:
        lines += [f"![{_CAPTIONS[figure.stem]}]({figure.name})", ""]
    return "\n".join(lines)


def _provenance(measured: Mapping[str, Any]) -> list[str]:
    """Accuracies do not depend on the load; seconds do."""
    if not measured["known"]:
        return []
    return [
        f"{measured['known']} of {measured['runs']} runs name their machine: "
        f"{'; '.join(measured['machines'])}; from {measured['dates'][0]} to "
        f"{measured['dates'][-1]}, {measured['beside_others']} of them beside other work "
        "(another run of the same command too), which makes CPU seconds longer.",
        "",
    ]


def _difference(row: Mapping[str, Any]) -> str:
    error = row["standard_error_points"]
    return f"{row['difference_points']:+z.2f}" + ("" if error is None else f" ± {error:.2f}")


def _seeds(count: int) -> str:
    return f"{count} seed" + "s" * (count > 1)


_CAPTIONS = {
    "accuracy": "Accuracy against rounds, as in figures 7 and 11",
    "sweep": "Accuracy at the end against c_l, as in figure 12",
}


def plot(setup: Setup, documents: Iterable[Mapping[str, Any]], out: Path) -> list[Path]:
    """`accuracy.png` (accuracy against rounds) and `sweep.png`, of what there is."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtra("figures need matplotlib", "report") from error
    done, written = list(documents), []
    for name, draw in (("accuracy", _draw_accuracy), ("sweep", _draw_sweep)):
        figure = Figure(figsize=(6, 4), layout="constrained")
        if draw(setup, done, figure.subplots()):
            written.append(out / f"{name}.png")
            figure.savefig(written[-1], dpi=120)
    return written


_NAMES = {FEDBUFF: "FedBuff", LIGHTSECAGG: "LightSecAgg"}


def _draw_accuracy(setup: Setup, documents: list[Mapping[str, Any]], axes: Any) -> bool:
    """Figures 7 and 11: means over seeds, and FedBuff's range as a band."""
    curves: dict[tuple[str, str], list[dict[str, float]]] = {}
    for document in documents:
        cell = document["cell"]
        if cell["scheme"] != UNMASKED:
            curves.setdefault((cell["scheme"], cell["staleness"]), []).append(document["accuracy"])
    colours = {function: f"C{i}" for i, function in enumerate(sorted({f for _, f in curves}))}
    for (scheme, function), runs in sorted(curves.items()):
        rounds = sorted(map(int, runs[0]))
        values = [[100 * run[str(done)] for run in runs] for done in rounds]
        label = f"{_NAMES[scheme]}, {function} ({_seeds(len(runs))})"
        style: dict[str, Any] = {"color": colours[function], "label": label}
        # The curves coincide: FedBuff is dashed and broad, with LightSecAgg's thin line on it.
        style |= (
            {"linewidth": 4.0, "alpha": 0.45, "linestyle": "--"}
            if scheme == FEDBUFF
            else {"linewidth": 1.2}
        )
        axes.plot(rounds, [fmean(each) for each in values], **style)
        if scheme == LIGHTSECAGG and len(runs) > 1:
            low, high = [min(each) for each in values], [max(each) for each in values]
            axes.fill_between(rounds, low, high, color=colours[function], alpha=0.18, linewidth=0)
    title = f"{setup.task}, N = {setup.clients}; band: LightSecAgg's range over seeds"
    axes.set(xlabel="round", ylabel="accuracy (%)")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, alpha=0.25)
    if curves:
        axes.legend(fontsize=8)
    return bool(curves)


def _draw_sweep(setup: Setup, documents: list[Mapping[str, Any]], axes: Any) -> bool:
    """Figure 12: the accuracy at the end against c_l, with FedBuff's, which has none."""
    sweep = _sweep(documents)
    bits = [point["scale_bits"] for point in sweep]
    percent = {
        name: [100 * point[name] for point in sweep] for name in ("accuracy", "least", "most")
    }
    axes.plot(bits, percent["accuracy"], "o-", label=f"quantised, poly ({_seeds_of(sweep)})")
    axes.fill_between(bits, percent["least"], percent["most"], alpha=0.2, linewidth=0)
    finals = _poly_finals(documents)
    if plain := finals[FEDBUFF]:
        label = f"FedBuff, poly ({_seeds(len(plain))})"
        axes.axhline(fmean(plain), color="black", linestyle="--", label=label)
        axes.axhspan(min(plain), max(plain), color="black", alpha=0.1, linewidth=0)
    if protected := finals[LIGHTSECAGG]:
        middle = fmean(protected)
        error = [[middle - min(protected)], [max(protected) - middle]]
        label = f"LightSecAgg, poly ({_seeds(len(protected))})"
        axes.errorbar([SCALE_BITS], [middle], error, fmt="D", color="C3", capsize=4, label=label)
    axes.set(xlabel="log2 of c_l", ylabel=f"accuracy, last {LAST_ROUNDS} rounds (%)")
    axes.set_title(f"{setup.task}: rounding (left), wrap-around (right)", fontsize=10)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=8)
    return bool(sweep)


def _seeds_of(sweep: list[dict[str, Any]]) -> str:
    """Of all points: `5 seeds`, or `2 to 5 seeds` while some have fewer."""
    counts = sorted({point["seeds"] for point in sweep}) or [0]
    return (f"{counts[0]} to " if len(counts) > 1 else "") + _seeds(counts[-1])


def _poly_finals(documents: list[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The accuracies in percent with which runs of poly end, of FedBuff and of LightSecAgg."""
    finals: dict[str, list[float]] = {FEDBUFF: [], LIGHTSECAGG: []}
    for document in documents:
        cell = document["cell"]
        if cell["scheme"] in finals and cell["staleness"] == "poly":
            finals[cell["scheme"]].append(100 * document["final_accuracy"])
    return finals

"""The report of `lightsecagg run`: `run.json`, a picture, and what is printed."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightsecagg.cli.output import warn
from lightsecagg.errors import Aborted, ConfigurationError

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.demo import DemoResult
    from lightsecagg.drivers.federation.demo_config import DemoConfig


def write_report(config: DemoConfig, result: DemoResult, out: Path) -> dict[str, Any]:
    """Into this folder; returns what is in `run.json`."""
    from lightsecagg.drivers.federation.report import write_json

    of_buffers = config.mode == "async"
    document = _of_buffers(config, result) if of_buffers else _of_rounds(result)
    document["report"] = str(out)
    write_json(document, out / "run.json")
    try:
        (_draw_buffers if of_buffers else _draw_rounds)(config, result, out / "timeline.png")
    except ConfigurationError as error:
        warn(str(error))
    return document


def print_report(config: DemoConfig, document: dict[str, Any]) -> None:
    """For people."""
    if config.mode == "async":
        _print_buffers(document)
    else:
        _print_rounds(config, document)


def judge(config: DemoConfig, result: DemoResult) -> None:
    """A demonstration of anything but exact sums has failed."""
    if config.mode == "sync" and not all(each.exact for each in result.compared):
        raise Aborted("the secure average differs from the plain average beyond the rounding bound")
    if not result.audit.clean:
        raise Aborted(f"this must not happen: {asdict(result.audit)}")
    if result.hung:
        raise Aborted("no buffer was recovered for a long time; the report covers the earlier ones")


def _of_rounds(result: DemoResult) -> dict[str, Any]:
    from lightsecagg.drivers.federation.report import phase_table

    records = [
        record | {"figures": _finite(record["figures"])}
        for record in sorted([*result.records, *result.aborted], key=lambda r: int(r["round"]))
    ]
    done = [record for record in records if record["aborted"] is None]
    return {
        "figures": done[-1]["figures"] if done else {},
        "metrics": done[-1]["metrics"] if done else {},
        "rounds": len(done),
        "seconds": result.seconds,
        "matches_plain_average": all(each.exact for each in result.compared),
        "max_abs_difference": max((each.difference for each in result.compared), default=0.0),
        "quantisation_bound": max((each.bound for each in result.compared), default=0.0),
        "dropped": result.killed,
        "phases": phase_table(records),
        "records": records,
    }


def _draw_rounds(config: DemoConfig, result: DemoResult, path: Path) -> None:
    """The round where most went missing; of these the last, when everything was warm."""
    from lightsecagg.drivers.federation.demo_notes import spans_of
    from lightsecagg.drivers.federation.report import draw_timeline

    shown = max(result.records, key=lambda r: (len(r["invited"]) - len(r["included"]), r["round"]))
    draw_timeline(shown, spans_of(result.notes), result.killed, path)


def _of_buffers(config: DemoConfig, result: DemoResult) -> dict[str, Any]:
    from lightsecagg.drivers.federation.epoch_report import histogram, staleness_of

    flushes = [
        {
            "version": record["round"],
            "epoch": record["epoch"],
            "exact": compared.exact,
            "difference": compared.difference,
            "rounding": compared.bound,
            "owners": record["included"],
            "staleness": staleness_of(record),
            "weights": record["weights"],
            "figures": _finite(record["figures"]),
        }
        for record, compared in zip(result.records, result.compared, strict=True)
    ]
    measured = [flush["figures"] for flush in flushes if flush["figures"]]
    return {
        "exact": all(flush["exact"] for flush in flushes),
        "figures": measured[-1] if measured else {},
        "flushes": flushes,
        "staleness": histogram(result.records),
        "stragglers": _stragglers(config, flushes),
        "kills": [{"who": kill["who"], "after": kill["after"]} for kill in result.killed],
        "failed_buffers": [record["aborted"] for record in result.aborted],
        "audit": asdict(result.audit),
        "seconds": result.seconds,
        "interrupted": result.interrupted is not None,
    }


def _draw_buffers(config: DemoConfig, result: DemoResult, path: Path) -> None:
    from lightsecagg.drivers.federation.epoch_report import draw_epochs

    title = (
        f"{config.protocol}, asynchronous: {len(result.records)} buffers of K = {config.buffer}, "
        f"{config.slow} of {config.clients} clients {config.slowdown:g} times slower"
    )
    draw_epochs(config.clients, result.records, result.notes, result.killed, title, path)


def _stragglers(config: DemoConfig, flushes: list[dict[str, Any]]) -> list[dict[str, int]]:
    """How stale the updates of the slow clients were."""
    found = []
    for client in config.stragglers:
        stale = [
            tau
            for flush in flushes
            for owner, tau in zip(flush["owners"], flush["staleness"], strict=True)
            if owner == client
        ]
        found.append(
            {"client": client, "updates": len(stale), "max_staleness": max(stale, default=0)}
        )
    return found


def _print_rounds(config: DemoConfig, document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{config.protocol}, {config.threat_model}: mean over rounds")
    for column in ("phase", "seconds", "bytes from clients", "bytes to clients"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, row in document["phases"].items():
        table.add_row(
            phase,
            f"{row['seconds']:.2f}",
            f"{row['client_upload_bytes']:,.0f}",
            f"{row['client_download_bytes']:,.0f}",
        )
    console.print(table)
    for record in document["records"]:
        dead = [
            f"client {item['client']} killed in {item['phase']}"
            for item in document["dropped"]
            if item["round"] == record["round"]
        ]
        included = f"{len(record['included'])} of {len(record['invited'])} included"
        figures = _in_words(record["figures"])
        figures += [
            f"clients' {name} {metric['mean']:.4g} \u00b1 {metric['error']:.1g}"
            for name, metric in record["metrics"].items()
        ]
        outcome = record["aborted"] or ", ".join([included, *figures])
        console.print(f"round {record['round']}: {outcome}" + "".join(f"; {d}" for d in dead))
    verdict = "equals" if document["matches_plain_average"] else "DIFFERS FROM"
    console.print(
        f"the secure average {verdict} the plain average of the included clients: "
        f"largest difference {document['max_abs_difference']:.2e}, "
        f"rounding bound {document['quantisation_bound']:.2e}"
    )
    console.print(
        f"{document['rounds']} rounds in {document['seconds']:.1f} s; "
        f"report in {document['report']}"
    )


def _print_buffers(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for flush in document["flushes"]:
        owners = ", ".join(map(str, flush["owners"]))
        verdict = "exact" if flush["exact"] else "WRONG"
        stale = f"up to {max(flush['staleness'])} versions behind"
        text = ", ".join([f"clients {owners}", stale, verdict, *_in_words(flush["figures"])])
        console.print(f"buffer {flush['version']}: {text}", highlight=False)
    table = Table(title="staleness of the updates")
    for column in ("versions behind", "updates", ""):
        table.add_column(column, justify="left" if not column else "right")
    most = max(document["staleness"].values())
    for tau, count in document["staleness"].items():
        table.add_row(str(tau), str(count), "#" * round(40 * count / most))
    console.print(table)
    for kill in document["kills"]:
        who = "the server" if kill["who"] == "server" else f"client {kill['who']}"
        console.print(f"{who} was killed after {kill['after']} buffers", highlight=False)
    exact = sum(flush["exact"] for flush in document["flushes"])
    console.print(
        f"{exact} of {len(document['flushes'])} sums equal the plain weighted sum of the announced "
        f"updates; {document['audit']['acknowledged']} uploads were acknowledged, "
        f"{document['audit']['lost']} lost",
        highlight=False,
    )
    console.print(f"{document['seconds']:.1f} s; report in {document['report']}", highlight=False)


def _finite(figures: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _in_words(figures: dict[str, float | None]) -> list[str]:
    """Such as "accuracy 0.93"."""
    return [
        f"{name} {'not finite' if value is None else f'{value:.4g}'}"
        for name, value in figures.items()
    ]

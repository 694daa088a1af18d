"""`lightsecagg bench`: how fast this machine runs the hot loops, and whole federations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lightsecagg.cli import options
from lightsecagg.cli.extras import require
from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.output import EXIT_INTERRUPTED, AsJson, print_json, warn
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg_lab.commands import lab_options
from lightsecagg_lab.commands.chaos import bench_chaos
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure the hot loops, and whole federations."
)
app.command("chaos")(bench_chaos)


@app.command("federation")
def bench_federation(
    clients: Annotated[int, typer.Option(help="N: logical clients.")] = 50,
    privacy: Annotated[int, typer.Option(help="T, how many may collude with the server.")] = 12,
    dropouts: Annotated[int, typer.Option(help="D, how many may drop.")] = 15,
    survivors: Annotated[int, typer.Option(help="U, the answers needed; 0 for N - D.")] = 0,
    dim: Annotated[int, typer.Option(help="d, the length of the vectors.")] = 1_206_590,
    lost: Annotated[int, typer.Option(help="Clients lost after sharing, before upload.")] = 15,
    processes: Annotated[int, typer.Option(help="Processes that host the clients.")] = 2,
    protocol: lab_options.Protocols = None,
    share_mode: options.HowShared = ShareMode.SEEDED,
    pages: Annotated[int, typer.Option(help="Pages of the dashboard that are open.", min=0)] = 0,
    timeout: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 900.0,
    as_json: AsJson = False,
) -> None:
    """Run one round of a real federation over loopback TLS, and the same without protection."""
    require("bench federation", "grpc")
    from lightsecagg_lab.experiments.federation_bench import FederationBench, measure

    bench = FederationBench(
        clients=clients,
        privacy=privacy,
        dropouts=dropouts,
        survivors=survivors,
        dimension=dim,
        lost=lost,
        processes=processes,
        share_mode=share_mode,
        pages=pages,
        timeout=timeout,
    )
    chosen = tuple(protocol or (ProtocolName.PLAIN, ProtocolName.LIGHTSECAGG))
    document = measure(bench, chosen, tell=lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(document)
        return
    for name, run in document["runs"].items():
        ratio = f", {run['ratio_to_plain']:.2f} times plain" if "ratio_to_plain" in run else ""
        typer.echo(
            f"{name}: {run['seconds']:.1f} s{ratio}, {run['cpu_seconds']:.1f} s of CPU, "
            f"{run['included']} of {clients} included, "
            f"server peak {run['server_peak_rss_bytes'] / 1e6:,.0f} MB, its loop held for at most "
            f"{run['longest_hold_ms']:.0f} ms ({run['longest_hold_cpu_ms']:.0f} ms of CPU, "
            f"{run['longest_callback_ms']:.0f} by one event)"
        )
        for phase, row in run["phases"].items():
            typer.echo(
                f"    {phase:10} {row['seconds']:8.2f} s  from clients "
                f"{row['client_upload_bytes'] / 1e6:10,.1f} MB  to clients "
                f"{row['client_download_bytes'] / 1e6:10,.1f} MB"
            )


@app.command("soak")
def bench_soak(
    clients: Annotated[int, typer.Option(help="N, the clients.", min=5)] = 5,
    rounds: Annotated[int, typer.Option(help="Rounds, one after the other.", min=1)] = 1000,
    dim: Annotated[int, typer.Option(help="d, the length of the vectors.", min=1)] = 1000,
    processes: Annotated[int, typer.Option(help="Processes that host the clients.", min=1)] = 2,
    protocol: options.ProtocolChoice = ProtocolName.LIGHTSECAGG,
    threat_model: lab_options.DefendAgainst = ThreatModel.MALICIOUS_SERVER,
    timeout: Annotated[
        float, typer.Option(help="Stop after this many seconds, and report.")
    ] = 7200.0,
    as_json: AsJson = False,
) -> None:
    """Run a real federation for a long time, or with many clients (--clients 1000 --rounds 2).

    Reports the memory of server and clients over time, and compares the last sum with the plain
    one. Ctrl-C ends it and reports the measurements so far (exit code 130).
    """
    require("bench soak", "grpc")
    from dataclasses import asdict

    from lightsecagg_lab.experiments.soak import Plan, soak

    plan = Plan(clients, rounds, dim, processes, protocol, threat_model, timeout)
    findings = soak(plan, tell=lambda line: typer.echo(line, err=True))
    if as_json:
        print_json({"plan": asdict(plan), "findings": asdict(findings)})
    else:
        _print_findings(asdict(findings))
    if findings.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _print_findings(findings: dict[str, Any]) -> None:
    typer.echo(
        f"{findings['rounds']} rounds, {findings['aborted']} aborted, in "
        f"{findings['seconds']:.0f} s, {findings['seconds_per_round']:.3f} s each; "
        f"{findings['included']} clients in the last sum"
    )
    for who in ("server", "clients"):
        sizes = findings[f"{who}_bytes"].items()
        typer.echo(f"{who}: " + ", ".join(f"{size / 1e6:.1f} MB ({when})" for when, size in sizes))
    typer.echo(f"the server grew by {findings['growth_per_round']:.0f} bytes per round")
    if findings["largest_difference"] is not None:
        typer.echo(
            f"the last sum is off by {findings['largest_difference']:.2g}, rounding allows "
            f"{findings['allowed_difference']:.2g}"
        )
    if findings["interrupted"]:
        warn("interrupted")


@app.command("stragglers")
def bench_stragglers(
    clients: Annotated[int, typer.Option(help="N, the clients.", min=4)] = 8,
    buffer: Annotated[int, typer.Option(help="K, the updates in a buffer.")] = 4,
    slow: Annotated[int, typer.Option(help="How many clients are stragglers.", min=0)] = 1,
    slowdown: Annotated[float, typer.Option(help="How many times longer they train.")] = 10.0,
    training: Annotated[float, typer.Option(help="Seconds that the others train, at least.")] = 1.0,
    accuracy: Annotated[float, typer.Option(help="The accuracy to reach.")] = 0.9,
    rounds: Annotated[int, typer.Option(help="Rounds, at most.", min=1)] = 12,
    flushes: Annotated[int, typer.Option(help="Buffers, at most.", min=1)] = 40,
    out: Annotated[Path | None, typer.Option(help="Folder for stragglers.json and .png.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each mode, at most.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Time to reach an accuracy on digits with slow clients, in rounds and in buffers."""
    require("bench stragglers", "grpc", "torch")
    from lightsecagg.drivers.federation.report import write_json
    from lightsecagg_lab.experiments.stragglers import Stragglers, compare_modes, draw

    plan = Stragglers(
        clients=clients,
        buffer=buffer,
        slow=slow,
        slowdown=slowdown,
        least_training=training,
        accuracy=accuracy,
        rounds=rounds,
        flushes=flushes,
        timeout=timeout,
    )
    with deferred_signals() as ask:
        document = compare_modes(plan, lambda line: typer.echo(line, err=True), ask)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_json(document, out / "stragglers.json")
            draw(document, out / "stragglers.png")
    if as_json:
        print_json(document)
        return
    for name, run in document["runs"].items():
        reached = run["seconds_to_accuracy"]
        told = "not reached" if reached is None else f"reached after {reached:.1f} s"
        typer.echo(
            f"{name}: accuracy {accuracy:g} {told}; {run['final_accuracy']:.3f} in the end, after "
            f"{run['sums']} sums"
        )


@app.command("flushes")
def bench_flushes(
    clients: Annotated[int, typer.Option(help="N: logical clients.")] = 50,
    privacy: Annotated[int, typer.Option(help="T, how many may collude with the server.")] = 8,
    dropouts: Annotated[int, typer.Option(help="D, how many may drop.")] = 15,
    buffer: Annotated[int, typer.Option(help="K, the updates in a buffer.")] = 10,
    dim: Annotated[int, typer.Option(help="d, the length of the vectors.")] = 1_206_590,
    flushes: Annotated[int, typer.Option(help="Buffers; the first is not counted.", min=2)] = 8,
    processes: Annotated[int, typer.Option(help="Processes that host the clients.")] = 2,
    training: Annotated[
        float,
        typer.Option(help="Seconds in which a client pretends to train, on average.", min=0),
    ] = 0.0,
    protocol: lab_options.Protocols = None,
    share_mode: options.HowShared = ShareMode.SHORT_KEY,
    timeout: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Buffers per minute of the asynchronous mode over TLS, with and without protection."""
    require("bench flushes", "grpc")
    from lightsecagg_lab.experiments.flush_bench import FlushBench, measure_flushes

    bench = FlushBench(
        clients=clients,
        privacy=privacy,
        dropouts=dropouts,
        buffer=buffer,
        dimension=dim,
        flushes=flushes,
        processes=processes,
        training=training,
        share_mode=share_mode,
        timeout=timeout,
    )
    chosen = tuple(protocol or (ProtocolName.PLAIN, ProtocolName.LIGHTSECAGG))
    document = measure_flushes(bench, chosen, tell=lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(document)
        return
    for name, run in document["runs"].items():
        ratio = f", {run['ratio_to_plain']:.2f} of plain" if "ratio_to_plain" in run else ""
        typer.echo(f"{name}: {run['per_minute']:.1f} buffers per minute{ratio}")


@app.command("kernels")
def bench_kernels(
    clients: Annotated[int, typer.Option(help="N, the clients.")] = 200,
    survivors: Annotated[int, typer.Option(help="U, the answers needed.")] = 140,
    privacy: Annotated[int, typer.Option(help="T, how many may collude with the server.")] = 100,
    dim: Annotated[int, typer.Option(help="d, the length of the model")] = 1_206_590,
    as_json: AsJson = False,
) -> None:
    """Time every kernel on one thread, against NumPy + BLAS and against a memory copy."""
    from lightsecagg.field import kernels
    from lightsecagg_lab.experiments.kernel_bench import Case, measure_in_child

    if kernels.backend() == "numpy":
        warn(
            "The native kernels are not in use: these are NumPy's speeds. "
            "To build them, install the package with a C++ compiler present."
        )
    document = measure_in_child(Case(clients, survivors, privacy, dim))
    if as_json:
        print_json(document)
    else:
        _print_table(document)


def _print_table(document: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    machine, case = document["machine"], document["case"]
    table = Table(
        title=f"{document['backend']} kernels on {machine['processor']}, one thread; "
        f"N = {case['clients']}, U = {case['survivors']}, T = {case['privacy']}, "
        f"d = {case['dimension']:,}",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("kernel", no_wrap=True)
    table.add_column("field", no_wrap=True)
    for heading in ("ms", "NumPy ms", "ratio", "GB/s", "of a copy", "GMAC/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in document["rows"]:
        speed = row.get("multiply_adds_per_second")
        table.add_row(
            row["kernel"],
            row["field"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['reference_seconds'] * 1e3:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{row['of_memory_copy']:.2f}",
            f"{speed / 1e9:.1f}" if speed else "",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Memory copies {machine['memory_copy_bytes_per_second'] / 1e9:.1f} GB/s and reads "
        f"{machine['memory_read_bytes_per_second'] / 1e9:.1f} GB/s. The reference is NumPy with "
        f"{machine['blas']}; for the PRG it is raw AES-256-CTR.",
        highlight=False,
    )

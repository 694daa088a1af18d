"""`lightsecagg plan`: what a federation will cost before it runs, and which U to take."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lightsecagg.cli.output import print_json
from lightsecagg.params import ThreatModel
from lightsecagg.planning import STATED, Federation, Network, Plan, Topology, calibrate
from lightsecagg.planning import plan as make_plan

app = typer.Typer()


@app.command()
def plan(
    clients: Annotated[int, typer.Option(help="N, the clients.")],
    privacy: Annotated[int, typer.Option(help="T, how many may collude with the server.")],
    dropouts: Annotated[int, typer.Option(help="D, how many may drop.")],
    dim: Annotated[int, typer.Option(help="d, the length of the vectors.")],
    bandwidth: Annotated[float, typer.Option(help="Of a client, Mbit/s each way.")] = 320.0,
    server_bandwidth: Annotated[
        float, typer.Option(help="Of the server, Mbit/s each way.")
    ] = 10_000.0,
    latency: Annotated[float, typer.Option(metavar="MS", help="One way, milliseconds.")] = 20.0,
    topology: Annotated[Topology, typer.Option(help="How shares travel.")] = Topology.RELAY,
    threat_model: Annotated[
        ThreatModel, typer.Option(help="Whom the clients defend against.")
    ] = ThreatModel.HONEST_BUT_CURIOUS,
    training_seconds: Annotated[float, typer.Option(help="How long training takes.")] = 0.0,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Train during the offline phase.")
    ] = True,
    survivors: Annotated[
        int, typer.Option(help="U of the forecast.", show_default="the recommended")
    ] = 0,
    liars: Annotated[
        int, typer.Option(help="E, wrong answers that the server shall be able to name.")
    ] = 0,
    measure: Annotated[
        bool, typer.Option("--measure/--stated", help="Measure this machine, or use constants.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Forecast bytes, seconds and memory per party and phase, and recommend U."""
    federation = Federation(
        clients=clients,
        privacy=privacy,
        dropouts=dropouts,
        dimension=dim,
        network=Network(bandwidth, server_bandwidth, latency, topology),
        threat_model=threat_model,
        training_seconds=training_seconds,
        overlap=overlap,
        liars=liars,
        survivors=survivors,
    )
    made = make_plan(federation, calibrate() if measure else STATED)
    if as_json:
        print_json(made.document())
    else:
        show(made)


def show(plan: Plan) -> None:
    """The plan as a table."""
    from rich.console import Console
    from rich.table import Table

    document = plan.document()
    table = Table(
        title=f"N = {plan.federation.clients}, T = {plan.federation.privacy}, "
        f"D = {plan.federation.dropouts}, d = {plan.federation.dimension:,}",
        caption="every client shares, D of them drop before their upload; seconds are CPU",
    )
    for column in ("protocol", "phase"):
        table.add_column(column)
    for column in (
        "client\nsends",
        "client\nreceives",
        "client\ncompute",
        "on the\nlink",
        "server\ncompute",
        "server\ntraffic",
        "client\nmemory",
        "server\nmemory",
    ):
        table.add_column(column, justify="right")
    for name, phases in document["protocols"].items():
        title = name
        for phase, costs in phases.items():
            if costs["server_bytes"]:
                table.add_row(title, phase, *_cells(costs))
                title = ""
        table.add_row("", "round", "", "", "", _seconds(document["round_seconds"][name]))
        table.add_section()
    console = Console()
    console.print(table)
    console.print(f"[bold]recommended[/bold] {plan.reason}", highlight=False, soft_wrap=True)
    for warning in plan.warnings:
        console.print(f"[yellow]{warning}[/yellow]", highlight=False, soft_wrap=True)
    console.print(f"unit costs: {plan.unit_costs.source}", highlight=False, soft_wrap=True)


def _cells(costs: dict[str, Any]) -> list[str]:
    return [
        _bytes(costs["client_upload_bytes"]),
        _bytes(costs["client_download_bytes"]),
        _seconds(costs["client_seconds"]),
        _seconds(costs["link_seconds"]),
        _seconds(costs["server_seconds"]),
        _bytes(costs["server_bytes"]),
        _bytes(costs["client_memory_bytes"]),
        _bytes(costs["server_memory_bytes"]),
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

"""`lightsecagg plan`: what a federation will cost before it runs, and which U to take."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lightsecagg.cli import options
from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.drivers.simulation.calibration import calibrate
from lightsecagg.params import ThreatModel
from lightsecagg.planning import STATED, Federation, Network, Plan, Topology
from lightsecagg.planning import plan as make_plan
from lightsecagg.planning.traffic import in_units

app = typer.Typer(add_completion=False)


@app.command()
def plan(
    clients: options.Clients,
    privacy: options.Privacy,
    dropouts: options.Dropouts,
    dim: options.Dimension,
    bandwidth: options.Bandwidth = 320.0,
    server_bandwidth: options.ServerBandwidth = 10_000.0,
    latency: options.Latency = 20.0,
    topology: options.SharesTravel = Topology.RELAY,
    threat_model: options.DefendAgainst = ThreatModel.HONEST_BUT_CURIOUS,
    training_seconds: options.TrainingSeconds = 0.0,
    overlap: options.Overlap = True,
    survivors: Annotated[
        int, typer.Option(help="U of the forecast.", show_default="the recommended")
    ] = 0,
    liars: Annotated[
        int, typer.Option(help="E, wrong answers that the server shall be able to name.")
    ] = 0,
    measure: Annotated[
        bool, typer.Option("--measure/--stated", help="Measure this machine, or use constants.")
    ] = True,
    as_json: AsJson = False,
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
        in_units(costs["client_upload_bytes"]),
        in_units(costs["client_download_bytes"]),
        _seconds(costs["client_seconds"]),
        _seconds(costs["link_seconds"]),
        _seconds(costs["server_seconds"]),
        in_units(costs["server_bytes"]),
        in_units(costs["client_memory_bytes"]),
        in_units(costs["server_memory_bytes"]),
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"

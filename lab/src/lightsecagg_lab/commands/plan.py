"""`lightsecagg plan`: what a federation will cost before it runs, and which T, D and U to take."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.params import ThreatModel
from lightsecagg_lab.commands import lab_options
from lightsecagg_lab.planning import STATED, Federation, Network, Plan, Topology, UnitCosts
from lightsecagg_lab.planning import plan as make_plan
from lightsecagg_lab.planning.choice import choose, in_seconds
from lightsecagg_lab.planning.proposals import Proposal, most_dropouts, most_privacy, propose
from lightsecagg_lab.planning.traffic import in_units
from lightsecagg_lab.simulation.calibration import calibrate

app = typer.Typer(add_completion=False)


@app.command()
def plan(
    clients: lab_options.Clients,
    dim: lab_options.Dimension,
    privacy: Annotated[
        int | None,
        typer.Option(help="T, how many may collude with the server.", show_default="N/4"),
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="D, how many may vanish or lie.", show_default="N/4")
    ] = None,
    bandwidth: lab_options.Bandwidth = 320.0,
    server_bandwidth: lab_options.ServerBandwidth = 10_000.0,
    server_cores: lab_options.ServerCores = 1,
    latency: lab_options.Latency = 20.0,
    topology: lab_options.SharesTravel = Topology.RELAY,
    threat_model: lab_options.DefendAgainst = ThreatModel.MALICIOUS_SERVER,
    training_seconds: lab_options.TrainingSeconds = 0.0,
    no_overlap: lab_options.NoOverlap = False,
    survivors: Annotated[
        int, typer.Option(help="U of the forecast.", show_default="recommended")
    ] = 0,
    liars: Annotated[
        int, typer.Option(help="E, how many wrong answers the server must be able to name.")
    ] = 0,
    stated: Annotated[
        bool, typer.Option("--stated", help="Use recorded constants; do not measure this machine.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show the cost of every phase for every party.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forecast the cost of a round with every protocol, and recommend parameters.

    Without --privacy and --dropouts it compares three pairs of them: docs/how-to-choose.md.
    """
    proposals: list[Proposal] = []
    if privacy is None and dropouts is None:
        proposals = propose(clients, threat_model)
        privacy, dropouts = proposals[0].privacy, proposals[0].dropouts
    elif privacy is None:
        assert dropouts is not None  # noqa: S101 - one of the two
        privacy = min(max(1, clients // 4), most_privacy(clients, dropouts, threat_model))
    elif dropouts is None:
        dropouts = min(clients // 4, most_dropouts(clients, privacy, threat_model))
    federation = Federation(
        clients=clients,
        privacy=privacy,
        dropouts=dropouts,
        dimension=dim,
        network=Network(bandwidth, server_bandwidth, latency, topology),
        threat_model=threat_model,
        training_seconds=training_seconds,
        overlap=not no_overlap,
        liars=liars,
        survivors=survivors,
        server_cores=server_cores,
    )
    costs = STATED if stated else _measured()
    plans = {
        each.name: make_plan(
            replace(federation, privacy=each.privacy, dropouts=each.dropouts), costs
        )
        for each in proposals
    }
    made = plans[proposals[0].name] if proposals else make_plan(federation, costs)
    if as_json:
        print_json(_document(made, proposals, plans))
        return
    if proposals:
        _show_proposals(proposals, plans)
    show(made)
    if verbose:
        show_phases(made)
    _conclude(made)


def _measured() -> UnitCosts:
    """Unit costs of this machine; they take some seconds, so say what is going on."""
    from rich.console import Console

    console = Console(stderr=True)
    doing = "measuring this machine (--stated uses constants instead)"
    if not console.is_terminal:
        typer.echo(doing, err=True)
    with console.status(doing):
        return calibrate()


def _document(made: Plan, proposals: list[Proposal], plans: dict[str, Plan]) -> dict[str, Any]:
    document = made.document() | _choice(made)
    if proposals:
        document["proposals"] = [
            {
                "name": each.name,
                "privacy": each.privacy,
                "dropouts": each.dropouts,
                "buys": each.buys,
                **_choice(plans[each.name]),
                **plans[each.name].document(),
            }
            for each in proposals
        ]
    return document


def _choice(plan: Plan) -> dict[str, Any]:
    choice = choose(plan)
    return {"verdict": str(choice), "choice": choice.document()}


def _show_proposals(proposals: list[Proposal], plans: dict[str, Plan]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = plans[proposals[0].name].federation
    table = Table(title=f"N = {first.clients}, {first.threat_model}: three choices of T and D")
    for column in ("choice", "T", "D", "a round", "client sends", "memory"):
        table.add_column(column, justify="left" if column == "choice" else "right")
    for each in proposals:
        cells = _summary(plans[each.name], next(iter(plans[each.name].protocols)))
        table.add_row(each.name, str(each.privacy), str(each.dropouts), *cells[:3])
    console = Console()
    console.print(table)
    for each in proposals:
        console.print(f"{each.name}: {each.buys}", highlight=False, soft_wrap=True)
    console.print(
        f"below: {proposals[0].name}; --privacy and --dropouts choose another pair\n",
        highlight=False,
        soft_wrap=True,
    )


def show(plan: Plan) -> None:
    """The totals of every protocol."""
    from rich.console import Console
    from rich.table import Table

    of = plan.federation
    table = Table(
        title=f"N = {of.clients}, T = {of.privacy}, D = {of.dropouts}, d = {of.dimension:,}, "
        f"{of.threat_model}"
    )
    table.add_column("protocol", no_wrap=True)
    for column in ("a round", "client\nsends", "client\nmemory", "server\nmemory"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in plan.protocols:
        table.add_row(name, *_summary(plan, name))
    Console().print(table)


def _summary(plan: Plan, name: str) -> list[str]:
    costs = plan.protocols[name]
    memory = [phase.memory for phase in costs.phases.values()]
    return [
        in_seconds(costs.round_seconds),
        in_units(costs.client_upload),
        in_units(max(each.client for each in memory)),
        in_units(max(each.server for each in memory)),
    ]


def show_phases(plan: Plan) -> None:
    """What every phase costs every party, a table per protocol."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name, phases in plan.document()["protocols"].items():
        table = Table(title=name, box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left")
        table.add_column("phase", no_wrap=True)
        for column in (
            "client\nsends",
            "client\nreceives",
            "client\ncompute",
            "on the\nlink",
            "server\ncompute",
            "server\ntraffic",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for phase, costs in phases.items():
            if costs["server_bytes"]:
                table.add_row(phase, *_cells(costs))
        console.print(table)
    console.print("every client shares, D of them drop before their upload; seconds are CPU")


def _conclude(plan: Plan) -> None:
    from rich.console import Console

    console = Console()
    for warning in plan.warnings:
        console.print(f"[yellow]{warning}[/yellow]", highlight=False, soft_wrap=True)
    console.print(f"unit costs: {plan.unit_costs.source}", highlight=False, soft_wrap=True)
    console.print(f"[bold]recommended[/bold] {plan.reason}", highlight=False, soft_wrap=True)
    console.print(f"[bold]verdict[/bold] {choose(plan)}", highlight=False, soft_wrap=True)


def _cells(costs: dict[str, Any]) -> list[str]:
    return [
        in_units(costs["client_upload_bytes"]),
        in_units(costs["client_download_bytes"]),
        in_seconds(costs["client_seconds"]),
        in_seconds(costs["link_seconds"]),
        in_seconds(costs["server_seconds"]),
        in_units(costs["server_bytes"]),
    ]

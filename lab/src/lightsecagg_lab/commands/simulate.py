"""`lightsecagg simulate`: N parties in one process, with dropouts, and what each phase costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lightsecagg.cli import options
from lightsecagg.cli.options import Mode
from lightsecagg.cli.output import EXIT_ABORTED, AsJson, print_json, warn
from lightsecagg.errors import ParameterError
from lightsecagg.params import Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.commands import lab_options, simulate_async
from lightsecagg_lab.planning import Network, Topology
from lightsecagg_lab.planning.traffic import in_units
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.baselines import all_traits
from lightsecagg_lab.simulation.faults import Drop
from lightsecagg_lab.simulation.recording import allowed_error
from lightsecagg_lab.simulation.scenario import Outcome, Scenario, run
from lightsecagg_lab.simulation.synchronous import Progress

app = typer.Typer(add_completion=False)


class _ByMode(TyperCommand):
    """Hands the arguments to `simulate_async` if they say `--mode async`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **kw: Any
    ) -> Any:
        """As the command of the mode has it."""
        command = typer.main.get_command(simulate_async.app)
        if "--mode=async" not in args and ("--mode", "async") not in pairwise(args):
            for given in {arg.split("=")[0] for arg in args} - _names(self):
                if given in _names(command):
                    raise ParameterError(
                        f"{given} belongs to the asynchronous mode; add --mode async"
                    )
            return super().make_context(info_name, args, parent, **kw)
        pairs = zip(["", *args], args, strict=False)
        rest = [arg for before, arg in pairs if before != "--mode" and not arg.startswith("--mode")]
        return command.make_context(info_name, rest, parent, **kw)


def _names(command: Any) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


@app.command(cls=_ByMode)
def simulate(
    clients: lab_options.Clients = 10,
    privacy: Annotated[
        int | None,
        typer.Option(help="T, how many may collude with the server.", show_default="N/4"),
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="D, how many may drop.", show_default="N/4")
    ] = None,
    dim: lab_options.Dimension = 10_000,
    mode: Annotated[
        Mode, typer.Option(help="Rounds, or buffers: see simulate --mode async --help.")
    ] = Mode.SYNC,
    protocol: lab_options.ProtocolOrAll = ProtocolName.LIGHTSECAGG,
    survivors: Annotated[
        int, typer.Option(help="LightSecAgg: U, the answers needed.", show_default="N - D")
    ] = 0,
    share_mode: options.HowShared = ShareMode.SEEDED,
    decoding: options.HowToDecode = None,
    threat_model: lab_options.DefendAgainst = ThreatModel.HONEST_BUT_CURIOUS,
    field: lab_options.FieldChoice = lab_options.Field.DEFAULT,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PHASE=COUNT",
            help="Let clients vanish before a phase, as in upload=60; share:during=2 and "
            "share:after=2 choose another moment. Repeatable.",
        ),
    ] = None,
    neighbours: Annotated[
        int, typer.Option(help="SecAgg+: k, the degree of the graph.", show_default="the finder's")
    ] = 0,
    threshold: Annotated[
        int,
        typer.Option(
            help="SecAgg(+): t, the shares that rebuild a secret.",
            show_default="T + 1; SecAgg+: the finder's",
        ),
    ] = 0,
    bandwidth: lab_options.Bandwidth = 320.0,
    server_bandwidth: lab_options.ServerBandwidth = 10_000.0,
    server_cores: lab_options.ServerCores = 1,
    latency: lab_options.Latency = 0.0,
    topology: lab_options.SharesTravel = Topology.RELAY,
    training_seconds: lab_options.TrainingSeconds = 0.0,
    no_overlap: lab_options.NoOverlap = False,
    bound: Annotated[
        float, typer.Option(help="Largest entry; the inputs are uniform in [-1, 1).")
    ] = 1.0,
    clip: Annotated[bool, typer.Option("--clip", help="Clip inputs to the bound.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds, one after the other.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of inputs and dropouts; never of a mask.")] = 0,
    sample_clients: Annotated[
        int | None,
        typer.Option(
            metavar="n", help="Only n clients are real; for runs that need too much memory."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate secure aggregation in one process and report the cost of every phase."""
    if privacy is None:
        privacy = max(1, clients // 4)
    if dropouts is None:
        dropouts = max(0, min(clients // 4, clients - privacy - 2))
    scenario = Scenario(
        protocol=ProtocolName.LIGHTSECAGG,
        parameters=Parameters(
            clients=clients,
            privacy=privacy,
            dropouts=dropouts,
            survivors=survivors,
            threat_model=threat_model,
            share_mode=share_mode,
            modulus=field.modulus,
        ),
        dimension=dim,
        bound=bound,
        clip=clip,
        drops=tuple(map(Drop.parse, drop or ())),
        network=Network(bandwidth, server_bandwidth, latency, topology),
        training_seconds=training_seconds,
        overlap=not no_overlap,
        seed=seed,
        sample_clients=sample_clients,
        server_cores=server_cores,
        decoding=decoding,
    )
    outcomes = []
    for each in expand(scenario, protocol, neighbours, threshold):
        with progress_bar(each, rounds) as progress:
            for outcome in run(each, rounds, progress):
                outcomes.append(outcome)
                if not as_json:
                    show(outcome)
    if as_json:
        documents = [outcome.document() for outcome in outcomes]
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})
    elif len({outcome.scenario.protocol for outcome in outcomes}) > 1:
        compare(outcomes)
    if any(outcome.report.aborted for outcome in outcomes):
        raise typer.Exit(EXIT_ABORTED)


def expand(scenario: Scenario, protocol: str, neighbours: int, threshold: int) -> list[Scenario]:
    """One scenario per protocol; of all, `neighbours` and `threshold` are SecAgg+'s."""
    if protocol != lab_options.ALL:
        return [replace(scenario, protocol=protocol, neighbours=neighbours, threshold=threshold)]
    able = [t for t in all_traits() if scenario.parameters.threat_model in t.threat_models]
    if left_out := [traits.name for traits in all_traits() if traits not in able]:
        warn(f"{' and '.join(left_out)} have no malicious-server mode and are left out")
    return [
        replace(scenario, protocol=traits.name, neighbours=neighbours, threshold=threshold)
        if traits.ring
        else replace(scenario, protocol=traits.name)
        for traits in able
    ]


@contextmanager
def progress_bar(scenario: Scenario, rounds: int) -> Iterator[Progress]:
    """On stderr, a bar that counts the clients' steps; off a terminal, a line per phase."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    malicious = scenario.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
    steps = len(set(scenario.traits.phases) - (set() if malicious else {Phase.AGREE}))
    total = steps * scenario.parameters.clients * rounds
    console = Console(stderr=True)
    last: Phase | None = None
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(str(scenario.protocol), total=total)

        def advance(phase: Phase) -> None:
            nonlocal last
            if phase is not last and not console.is_terminal:
                typer.echo(f"{scenario.protocol}: {phase}", err=True)
            last = phase
            bar.update(task, advance=1, description=f"{scenario.protocol} {phase}")

        yield advance


def show(outcome: Outcome) -> None:
    """One round as a table."""
    from rich.console import Console
    from rich.table import Table

    document = outcome.document()
    parameters = _describe(document["parameters"])
    table = Table(
        title=f"{document['protocol']}, round {document['round']}: {parameters}",
        caption="the slowest client and the server; seconds are CPU, links are modelled",
    )
    table.add_column("phase")
    for column in (
        "client\ncompute",
        "client\nsends",
        "client\nreceives",
        "on the\nlink",
        "server\ncompute",
        "server\ntraffic",
    ):
        table.add_column(column, justify="right")
    for phase, costs in document["phases"].items():
        if not costs["server_bytes"] and not costs["client_upload_bytes"]:
            continue
        table.add_row(
            phase,
            _seconds(costs["client_seconds"]),
            in_units(costs["client_upload_bytes"]),
            in_units(costs["client_download_bytes"]),
            _seconds(costs["link_seconds"]),
            _seconds(costs["server_seconds"]),
            in_units(costs["server_bytes"]),
        )
    console = Console()
    console.print(table)
    for warning in document["warnings"]:
        console.print(f"[yellow]{warning}[/yellow]", highlight=False, soft_wrap=True)
    console.print(_result(outcome), highlight=False, soft_wrap=True)


def compare(outcomes: Sequence[Outcome]) -> None:
    """The rounds of several protocols beside each other."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="all of them")
    table.add_column("protocol")
    for column in ("round", "server\ncompute", "client\ncompute", "client\nsends"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        document = outcome.document()
        phases = list(document["phases"].values())
        table.add_row(
            str(document["protocol"]),
            "aborted" if outcome.report.aborted else _seconds(outcome.round_seconds(True)),
            _seconds(sum(costs["server_seconds"] for costs in phases)),
            _seconds(sum(costs["client_seconds"] for costs in phases)),
            in_units(sum(costs["client_upload_bytes"] for costs in phases)),
        )
    Console().print(table)


def _describe(parameters: dict[str, Any]) -> str:
    names = {
        "clients": "N",
        "privacy": "T",
        "dropouts": "D",
        "survivors": "U",
        "neighbours": "k",
        "threshold": "t",
        "dim": "d",
    }
    return ", ".join(
        f"{letter} = {parameters[name]:,}" for name, letter in names.items() if name in parameters
    )


def _result(outcome: Outcome) -> str:
    report, scenario = outcome.report, outcome.scenario
    if report.aborted is not None:
        return f"[red]aborted: {report.aborted}[/red]"
    if report.aggregate is None:
        raise AssertionError("a round ends with an aggregate or an abort")
    verdict = _verdict(report.largest_error, allowed_error(report.settings))
    apart, beside = outcome.round_seconds(False), outcome.round_seconds(True)
    return (
        f"{len(report.aggregate.included)} of {scenario.parameters.clients} clients included, "
        f"{len(report.aggregate.responders)} answered; {verdict}\n"
        f"round: {_seconds(beside)} with training ({_seconds(scenario.training_seconds)}) "
        f"beside the offline phase, {_seconds(apart)} without overlap\n"
    )


def _verdict(error: int | None, allowed: int) -> str:
    if error is None:
        return "[yellow]sampled clients: there is no sum to compare with[/yellow]"
    if error > allowed:
        return "[red]THE RECOVERED SUM IS WRONG[/red]"
    if allowed:
        return (
            f"[green]the recovered sum is off by at most {error} quanta per entry[/green], the "
            f"noise of dithered decoding (bound: {allowed})"
        )
    return "[green]the recovered sum is exact, element for element[/green]"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"

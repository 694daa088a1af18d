"""`lightsecagg status`: how a federation is, from its server's health page or its state folder."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

import msgspec
import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.errors import ConfigurationError, TransportError
from lightsecagg.foreign import decode, escaped

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.tables import ServerTable

app = typer.Typer(add_completion=False)

_PATIENCE, _LONGEST = 5.0, 1 << 20
_DAY = 86_400


Stamp = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds since 1970."""


class Health(msgspec.Struct):
    """What `/health` answers; of a state folder alone, what is left out is not known."""

    state: str
    rounds_done: int
    rounds_wanted: int | None = None
    rounds_aborted: int | None = None
    round: int | None = None
    """Under way."""
    connected: int | None = None
    admitted: int | None = None
    needed: int | None = None
    last_success: Stamp | None = None
    certificates: dict[str, Stamp] = {}


_health = msgspec.json.Decoder(Health)


@app.command()
def status(
    config: Annotated[
        Path | None, typer.Option(help="server.toml: its metrics port, or else its state folder.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Of the metrics, such as http://127.0.0.1:9464.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="The server's state folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print how far a federation is, who is connected, and when certificates end. Only reads.

    Ends with 1 if the server does not answer and there is no folder to look into.
    """
    require("status", "grpc")
    if sum(each is not None for each in (config, url, state)) != 1:
        raise ConfigurationError("give one of --config server.toml, --url and --state")
    found, source = _look(config, url, state)
    if as_json:
        print_json({"source": source, **msgspec.to_builtins(found)})
        return
    for line in _lines(found, source, time.time()):
        typer.echo(line)


def _look(config: Path | None, url: str | None, state: Path | None) -> tuple[Health, str]:
    if url is not None:
        return ask(url), url
    if state is not None:
        return look_into(state), str(state)
    from lightsecagg.drivers.federation.config import ServerConfig, load_config

    assert config is not None  # noqa: S101 - one of the three was given
    loaded = load_config(ServerConfig, config)
    server = loaded.server
    source = str(server.state)
    if server.metrics_port:
        address = _page_of(server)
        try:
            return ask(address), address
        except TransportError as error:  # it has stopped, or stands still
            source += f"; {error}"
    found = look_into(server.state)
    found.rounds_wanted = loaded.rounds.number
    return found, source


def _page_of(server: ServerTable) -> str:
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where it listens, not we
    host = here.get(server.metrics_address, server.metrics_address)
    return f"http://{f'[{host}]' if ':' in host else host}:{server.metrics_port}"


def ask(url: str) -> Health:
    """The server's own word; `TransportError` if there is none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"--url {url} must begin with http:// or https://")
    page = url.rstrip("/").removesuffix("/metrics").removesuffix("/health") + "/health"
    try:
        with build_opener(ProxyHandler({})).open(page, timeout=_PATIENCE) as answer:
            content = answer.read(_LONGEST)
    except HTTPError as error:
        error.close()
        raise TransportError(
            f"{page} answers {error.code} {escaped(error.reason)}: it is no health page, or asked "
            "under a name that it refuses; give the server's metrics_port, with an IP address"
        ) from error
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise TransportError(f"{page} does not answer: {reason}") from error
    return read_health(content)


def read_health(content: bytes) -> Health:
    """An answer of the page; `DecodeError` if it is something else."""
    return decode(_health.decode, content, "health page")


def look_into(folder: Path) -> Health:
    """What a state folder shows: of a server that has stopped, or of the last round's end."""
    from lightsecagg.drivers.federation.dashboard.folder import FolderBoard

    board = FolderBoard(folder)
    board.look()
    seen = board.since(0)
    live = seen.get("live") or {}
    ends = [
        phase["end"]
        for each in seen.get("history", ())
        if each["aborted"] is None
        for phase in each["phases"].values()
    ]
    federation = seen["federation"]
    return Health(
        state=f"{federation['state']}, {federation['message']}",
        rounds_done=federation["done"],
        rounds_aborted=federation["aborted"],
        round=live.get("round"),
        last_success=max(ends, default=None),
    )


def _lines(found: Health, source: str, now: float) -> list[str]:
    of = "" if found.rounds_wanted is None else f" of {found.rounds_wanted}"
    under_way = "" if found.round is None else f", {found.round} is under way"
    aborted = f", {found.rounds_aborted} aborted" if found.rounds_aborted else ""
    rows = [("rounds", f"{found.rounds_done}{of} done{aborted}{under_way}")]
    if found.connected is not None:
        clients = f"{found.connected} of {found.admitted} connected, {found.needed} needed"
        rows.append(("clients", clients))
    if found.last_success:
        ago = now - found.last_success
        rows.append(("last sum", f"{_moment(found.last_success)}, {_ago(ago)} ago"))
    for name, end in found.certificates.items():
        left = int((end - now) // _DAY)
        rows.append((f"{escaped(name)}'s certificate", f"until {_moment(end)}, {left} days"))
    width = max(len(name) for name, _ in rows)
    head = f"{escaped(found.state)} ({source})"
    return [head, *(f"  {name:{width}}  {words}" for name, words in rows)]


def _moment(stamp: float) -> str:
    return f"{datetime.fromtimestamp(stamp, UTC):%Y-%m-%d %H:%M} UTC"


def _ago(seconds: float) -> str:
    for size, unit in ((_DAY, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

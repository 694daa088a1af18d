"""Rounds of a real federation over shaped links: a process per party, each in its namespace.

Server and clients are those of `lightsecagg server` and `lightsecagg client`, with mutual TLS over
gRPC. An update is ready `pause` seconds after the model has come: nobody computes in that time, so
training costs no core here, but connections fall silent as they do in real rounds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.callbacks import ClientCallback, ServerCallback
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.programs import build_client, build_server, prepare_to_serve
from lightsecagg.drivers.federation.provisioning import provision
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.interface import Phase, Update
from lightsecagg.session.instructions import Instructions
from lightsecagg.session.record import RoundRecord
from lightsecagg_lab.experiments.namespaces import enter
from lightsecagg_lab.experiments.processes import begin, running
from lightsecagg_lab.experiments.shaped_links import SERVER_ADDRESS, ShapedLinks

_PORT: Final = 5000
"""In a namespace of its own, so it is free."""
_PATIENCE: Final = 120.0
"""Seconds for each wait of a federation."""
_DIGITS: Final = 6
"""Microseconds."""


@dataclass(frozen=True, slots=True)
class LinkFederation:
    """What runs."""

    protocol: str
    parameters: Parameters
    dimension: int
    rounds: int
    pause: float


@dataclass(frozen=True, slots=True)
class ReadyVector:
    """A client's job: a vector that is cheap to make, after a pause."""

    client: int
    dimension: int | None
    pause: float
    ready: list[float]
    """When each update was."""

    def instructed(self, instructions: Instructions) -> ReadyVector:
        """There is nothing to train."""
        return self

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        """Where training would be."""
        time.sleep(self.pause)
        self.ready.append(time.time())
        return Update(_vector(self.client, round_number, self.dimension or 0))


def _vector(client: int, round_number: int, dimension: int) -> NDArray[np.float32]:
    """Different for every client and round: nobody uploads the same update twice."""
    ramp = np.linspace(-0.5, 0.5, dimension, dtype=np.float32)
    return ramp + np.float32(client / 256 + round_number / 1024)


def run_rounds(federation: LinkFederation, links: ShapedLinks) -> list[dict[str, float]]:
    """Of each round: seconds of its phases without the pause; `server_cpu`, `client_cpu`."""
    with tempfile.TemporaryDirectory(prefix="lightsecagg-") as name:
        folder = Path(name)
        made = provision(
            folder / "federation",
            federation.parameters.clients,
            privacy=federation.parameters.privacy,
            dropouts=federation.parameters.dropouts,
            server_name=SERVER_ADDRESS,
            port=_PORT,
        )
        context = multiprocessing.get_context("spawn")
        server = context.Process(
            target=_server_main, args=(federation, made.server, folder, links.server), daemon=True
        )
        clients = [
            context.Process(
                target=_client_main,
                args=(federation, client, path, folder, links.clients[client]),
                daemon=True,
            )
            for client, path in made.clients.items()
        ]
        with running([server, *clients]), _ended_at_once([server, *clients]):
            _wait(server, folder)
            for process in clients:
                process.join(_PATIENCE)
        records = json.loads((folder / "server.json").read_text("utf-8"))
        _check(federation, records, made.server.parent / "result.npz")
        return _summary(records, folder, federation.parameters.clients)


@contextmanager
def _ended_at_once(processes: Sequence[SpawnProcess]) -> Iterator[None]:
    """Who is interrupted does not give each of them a moment first."""
    try:
        yield
    except BaseException:
        for process in processes:
            process.terminate()
        raise


def _wait(server: SpawnProcess, folder: Path) -> None:
    server.join(_PATIENCE)
    if server.exitcode != 0:
        tail = (folder / "server.log").read_text("utf-8")[-2000:]
        raise ConfigurationError(f"the server ended with exit code {server.exitcode}: {tail}")


def _check(federation: LinkFederation, records: Sequence[dict[str, Any]], result: Path) -> None:
    """A round that gave no sum, or a wrong one, is no measurement."""
    for record in records:
        if record["aborted"] is not None or len(record["included"]) != len(record["invited"]):
            raise Aborted(f"a round over shaped links lost clients: {record['aborted']}")
    with np.load(result) as stored:
        total = stored["result"]
    clients, last = federation.parameters.clients, records[-1]["round"]
    expected = np.zeros(federation.dimension)
    for client in range(clients):
        expected += _vector(client, last, federation.dimension)
    step = records[-1]["quantisation_step"] * (clients + records[-1]["noise"])
    if not np.abs(total - expected).max() <= step:
        raise ConfigurationError("the federation over shaped links summed wrongly")


def _summary(
    records: Sequence[dict[str, Any]], folder: Path, clients: int
) -> list[dict[str, float]]:
    """Of each round: seconds of its phases, and CPU seconds of the server and of a client."""
    used = [
        json.loads((folder / f"client-{client}.json").read_text("utf-8"))
        for client in range(clients)
    ]
    return [
        _phase_seconds(record, max(each["ready"][number] for each in used))
        | {
            "server_cpu": round(record["server_cpu"], _DIGITS),
            "client_cpu": round(mean(each["cpu"][number] for each in used), _DIGITS),
        }
        for number, record in enumerate(records)
    ]


def _phase_seconds(record: dict[str, Any], ready: float) -> dict[str, float]:
    """Phases as the server saw them, without the time that uploads waited for the last update."""
    waited = max(0.0, ready - record["phases"][Phase.UPLOAD.value]["start"])
    return {
        name: round(phase["seconds"] - (waited if name == Phase.UPLOAD.value else 0.0), _DIGITS)
        for name, phase in record["phases"].items()
    }


class _ServerMeter(ServerCallback):
    """CPU seconds of the server's process in each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def round_begins(self, number: int, invited: Sequence[int]) -> None:
        self._began = time.process_time()

    def round_ended(self, record: RoundRecord) -> None:
        self.seconds.append(time.process_time() - self._began)


class _ClientMeter(ClientCallback):
    """CPU seconds of a client's process in each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def round_begins(self, number: int) -> None:
        self._began = time.process_time()

    def round_ended(self, number: int, included: bool, aborted: str | None) -> None:
        self.seconds.append(time.process_time() - self._began)


def _server_main(federation: LinkFederation, path: Path, folder: Path, namespace: Path) -> None:
    enter(namespace)
    begin(folder / "server.log", "info")
    parameters = federation.parameters
    overrides = [
        f'aggregation.protocol="{federation.protocol}"',
        f'aggregation.threat_model="{ThreatModel.HONEST_BUT_CURIOUS}"',
        f"aggregation.survivors={parameters.survivors}",
        f'aggregation.share_mode="{parameters.share_mode}"',
        f"rounds.number={federation.rounds}",
        f"rounds.min_clients={parameters.clients}",
        f"rounds.wait_for_clients={_PATIENCE}",
        "rounds.retries=0",
        *(
            f"rounds.{phase}={_PATIENCE}"
            for phase in ("advertise", "share", "upload", "agree", "recover")
        ),
    ]
    config = load_config(ServerConfig, path, overrides)
    vectors = VectorsTable(dimension=federation.dimension, output=path.parent / "result.npz")
    config = config.model_copy(update={"training": None, "vectors": vectors})
    meter = _ServerMeter()

    async def serve() -> list[RoundRecord]:
        server = build_server(config, callbacks=[meter])
        prepare_to_serve()
        return await server.run()

    records = asyncio.run(serve())
    document = [
        record.to_json() | {"server_cpu": seconds}
        for record, seconds in zip(records, meter.seconds, strict=True)
    ]
    (folder / "server.json").write_text(json.dumps(document), encoding="utf-8")


def _client_main(
    federation: LinkFederation, client: int, path: Path, folder: Path, namespace: Path
) -> None:
    enter(namespace)
    begin(folder / f"client-{client}.log", "warning")
    overrides = [
        f'client.protocols=["{federation.protocol}"]',
        f'client.threat_model="{ThreatModel.HONEST_BUT_CURIOUS}"',
        f'client.share_mode="{federation.parameters.share_mode}"',
        'client.overlap="thread"',
        f"client.reconnect={_PATIENCE}",
    ]
    config = load_config(ClientConfig, path, overrides)
    vectors = VectorsTable(input=Path("unused.npy"))
    config = config.model_copy(update={"training": None, "vectors": vectors})
    job = ReadyVector(client, federation.dimension, federation.pause, [])
    meter = _ClientMeter()
    asyncio.run(build_client(config, job=job, callbacks=[meter]).run())
    document = {"cpu": meter.seconds, "ready": job.ready}
    (folder / f"client-{client}.json").write_text(json.dumps(document), encoding="utf-8")

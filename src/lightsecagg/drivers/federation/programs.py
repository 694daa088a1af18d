"""The server and client programs: from a configuration file to a running manager."""

from __future__ import annotations

import asyncio
import gc
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightsecagg import system
from lightsecagg.drivers.federation.aggregation import make_settings
from lightsecagg.drivers.federation.callbacks import ClientCallback, ServerCallback, load_callbacks
from lightsecagg.drivers.federation.checkpoints import Checkpoints
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig
from lightsecagg.drivers.federation.dashboard.live import make_dashboard
from lightsecagg.drivers.federation.dashboard.web import CONNECTIONS
from lightsecagg.drivers.federation.epoch_server import EpochFederationServer
from lightsecagg.drivers.federation.jobs import (
    ClientJob,
    ServerJob,
    make_client_job,
    make_server_job,
)
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.learning import Learned
from lightsecagg.drivers.federation.membership import KnownMembers, MembersInUse
from lightsecagg.drivers.federation.observer import PAGE_CONNECTIONS, Metrics, log, show_names
from lightsecagg.drivers.federation.provisioning import describe_liars, load_identity
from lightsecagg.drivers.federation.server import FederationServer, TellProgress
from lightsecagg.drivers.federation.stopping import CLIENTS, EarlyStopping
from lightsecagg.drivers.federation.tables import FederationTable, TlsTable
from lightsecagg.drivers.federation.trackers import make_trackers
from lightsecagg.drivers.federation.training_tables import StoppingTable, VectorsTable
from lightsecagg.drivers.transport.communicator import (
    ClientCommunicator,
    Limits,
    ServerCommunicator,
    Transport,
    ahead_of,
)
from lightsecagg.drivers.transport.framing import MAX_MESSAGE
from lightsecagg.drivers.transport.tls import Credentials, end_of, is_loopback
from lightsecagg.errors import ConfigurationError, LightSecAggError
from lightsecagg.masks.short_keys import ASSUMPTION
from lightsecagg.plugins import TRANSPORTS, added
from lightsecagg.protocol.quantizers import decoding_of
from lightsecagg.protocol.settings import Settings
from lightsecagg.session.record import RoundRecord

_EXIT_BY_SIGNAL = 128
"""A shell's exit code for a program that a signal ended is this plus the signal's number."""
_BESIDE_THE_MODEL = 1 << 20
"""Bytes of a round's announcement that are not the model, at most."""
_OWN_FILES = 64
"""Files that a server has open beside those of its clients, and some to spare."""
_FULL_COLLECTIONS = 1000
"""Collections of garbage that is older, to one of all: that is one in some 40 rounds of 200
clients. What a round leaves behind is hardly ever garbage of this kind, in circles."""


def build_server(
    config: ServerConfig,
    progress: TellProgress | None = None,
    *,
    understood: bool = False,
    callbacks: Iterable[ServerCallback] = (),
    learned: Learned | None = None,
) -> FederationServer:
    """Everything that `lightsecagg server` needs, checked before a socket is opened.

    * `understood`: an unsafe transport may leave the machine.
    * `callbacks`: told beside the configured ones.
    * `learned`: told every average, at once.
    """
    path, authority, session = _trust(config.federation)
    members = MembersInUse(path, authority, session)
    told = load_callbacks(config.server.callbacks, ServerCallback, "server.callbacks")
    told += [*make_trackers(config), *callbacks]
    job = make_server_job(config.training, config.vectors, config.aggregation.bound)
    stopping = _early_stopping(config.early_stopping, job)
    _check_figure(config.checkpoints.figure, "checkpoints", job)
    buffering = None if config.buffering is None else config.buffering.make()
    settings_for = partial(make_settings, config.aggregation, job, session, buffering=buffering)
    settings = settings_for(members.current.allow_list)
    connections = _mind_the_files(config, len(members.current.allow_list))
    _mind_the_output(config.vectors)
    _mind_the_members(config.aggregation.clients, settings)
    _mind_the_liars(settings)
    _mind_the_rounding(settings)
    admitted = frozenset(members.current.allow_list.clients)
    communicator = _server_communicator(config, admitted, connections, understood)
    communicator.admit(admitted, members.current.revoked)
    metrics = Metrics()
    if config.server.metrics_port is not None:
        address = config.server.metrics_address
        metrics.expires = _ends_of(config.tls)
        metrics.serve(config.server.metrics_port, address)
        host = f"[{address}]" if ":" in address else address
        log.info("metrics on http://%s:%d/metrics", host, metrics.port)
        if not is_loopback(address):
            log.warning(
                "anybody who reaches %s, port %d, can read the metrics", address, metrics.port
            )
    dashboard = None
    try:
        dashboard = make_dashboard(config)
        journal = _journal(config, members)
    except LightSecAggError:
        metrics.close()
        if dashboard is not None:
            dashboard.close()
        raise
    if dashboard is not None:
        told.append(dashboard)
    made: Callable[..., FederationServer] = FederationServer
    if config.buffering is not None:
        made = partial(EpochFederationServer, buffering=config.buffering)
    return made(
        settings,
        config.rounds,
        members.current.allow_list,
        communicator,
        job,
        journal,
        metrics,
        progress,
        learned,
        told,
        stopping,
        members,
        settings_for,
        Checkpoints(journal, config.checkpoints, config.early_stopping),
        config.server.cores,
        config.server.names,
    )


def _ends_of(tls: TlsTable) -> dict[str, float]:
    """When the certificates end with which this server works; seconds since 1970."""
    files = {"server": tls.certificate, "authority": tls.ca}
    ends = {name: None if path is None else end_of(path) for name, path in files.items()}
    return {name: end.timestamp() for name, end in ends.items() if end is not None}


def _journal(config: ServerConfig, members: MembersInUse) -> Journal:
    journal = Journal(config.server.state, config.federation.session)
    try:
        members.recall(journal)
    except LightSecAggError:
        journal.close()
        raise
    return journal


def build_client(
    config: ClientConfig,
    kind: Callable[..., FederationClient] = FederationClient,
    job: ClientJob | None = None,
    *,
    understood: bool = False,
    **extra: Any,
) -> FederationClient:
    """Everything that `lightsecagg client` needs; `job` replaces the configured one."""
    path, authority, session = _trust(config.federation)
    communicator = _client_communicator(config, understood)
    if config.client.callbacks:
        named = config.client.callbacks
        extra["callbacks"] = load_callbacks(named, ClientCallback, "client.callbacks")
    if job is None and config.training is not None:
        # Torch takes its time to load, long on a busy machine: before the server waits for us.
        importlib.import_module("lightsecagg.training.worker")
    if config.buffering is not None:
        extra["buffering"] = config.buffering.make()
    identity = load_identity(config.client.identity)
    ledger = ClientLedger(config.client.ledger, session, config.client.id)
    try:
        members = KnownMembers(path, authority, session, ledger, config.client.id)
        job = job or make_client_job(
            config.training, config.vectors, config.client.id, ledger.training_secret
        )
        made = kind(config.client, session, identity, members, communicator, job, ledger, **extra)
    except LightSecAggError:
        ledger.close()
        raise
    if ledger.new:
        log.info(
            "client %d begins a new ledger, %s: it remembers no earlier round; if there were any, "
            "restore the file",
            config.client.id,
            config.client.ledger,
        )
    log.info("client %d connects to %s", config.client.id, config.server.address)
    return made


def run_server(
    config: ServerConfig,
    progress: TellProgress | None = None,
    *,
    abandon: bool = False,
    understood: bool = False,
    learned: Learned | None = None,
) -> list[RoundRecord]:
    """Until all rounds are done; SIGTERM and SIGINT finish the current round first (R40).

    `abandon` gives up a round that a crash left unfinished instead of resuming it.
    """

    system.leave_no_core()

    async def main() -> list[RoundRecord]:
        server = build_server(config, progress, understood=understood, learned=learned)
        prepare_to_serve()
        if config.server.names:
            show_names(config.server.names)
        loop = asyncio.get_running_loop()
        for number in system.STOP:
            system.on_signal(loop, number, partial(_stop_gracefully, server, number))
        return await server.run(abandon=abandon)

    return asyncio.run(main())


def prepare_to_serve() -> None:
    """What a process owes to many clients.

    A connection each, and a file while a long message of one waits; no pauses in which garbage is
    looked for among what was imported, nor, in every round, among all shares that are under way
    (0.1 s of 200 clients); and the memory of large vectors back to the system.
    """
    system.allow_most_files()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _FULL_COLLECTIONS)
    system.return_large_memory()


def run_clients(configs: Sequence[ClientConfig], *, understood: bool = False) -> None:
    """Several logical clients in one process, each with its own identity and connection.

    All run to their end: a failure is logged when it happens, and the first is raised at the end.
    SIGTERM lets them take their leave. The first process of a container must say so itself: nothing
    ends it by default.
    """

    system.leave_no_core()

    async def run(client: FederationClient) -> LightSecAggError | None:
        try:
            await client.run()
            return None
        except LightSecAggError as error:
            if len(configs) > 1:
                log.error("%s; the other clients of this process go on", error)
            return error

    async def main() -> None:
        this = asyncio.current_task()
        assert this is not None  # noqa: S101 - a coroutine runs in a task
        system.on_signal(asyncio.get_running_loop(), system.STOP[0], this.cancel)
        clients = [build_client(config, understood=understood) for config in configs]
        ends = await asyncio.gather(*(run(client) for client in clients))
        for failure in filter(None, ends):
            raise failure

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        log.info("%s: left", system.STOP[0].name)
        raise SystemExit(_EXIT_BY_SIGNAL + system.STOP[0]) from None
    finally:
        # A training that nobody waits for any more must not outlive this program.
        for child in multiprocessing.active_children():
            child.terminate()


def _early_stopping(table: StoppingTable | None, job: ServerJob) -> EarlyStopping | None:
    """The rule, if there is one; a figure that nobody reports is refused."""
    if table is None:
        return None
    _check_figure(table.figure, "early_stopping", job)
    return EarlyStopping(table)


def _check_figure(figure: str | None, table: str, job: ServerJob) -> None:
    if figure is not None and not job.reports(figure):
        raise ConfigurationError(
            f"[{table}] figure = {figure!r}: no round will have it; name one that the task's "
            f"`evaluate` returns, or {CLIENTS}NAME for one of its `metrics`"
        )


def _mind_the_files(config: ServerConfig, clients: int) -> int:
    """How many connections leave descriptors for everything else.

    Refuses a limit that would let in some clients, and no others.
    """
    most = system.most_files()
    if most is None:
        return Limits().connections
    own = _OWN_FILES
    own += 0 if config.server.metrics_port is None else PAGE_CONNECTIONS
    own += 0 if config.server.dashboard_port is None else CONNECTIONS
    needed = 2 * clients + own
    if most < needed:
        raise ConfigurationError(
            f"this process may open {most} files and {clients} clients need {needed}: a connection "
            "each, and a file while a long message of one waits; raise the hard limit of "
            "RLIMIT_NOFILE (`ulimit -n`, systemd's LimitNOFILE)"
        )
    return min(most - clients - own, Limits().connections)


def _mind_the_output(vectors: VectorsTable | None) -> None:
    """Refuse before the round what could only be fixed after it."""
    output = None if vectors is None else vectors.output
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise ConfigurationError(
            f"[vectors] output {output} cannot be written: name a file in a folder that exists and "
            "that this process may write to"
        )


def _mind_the_members(clients: int, settings: Settings) -> None:
    parameters = settings.parameters
    if parameters.clients < clients:
        log.warning(
            "the allow-list has fewer clients than [aggregation] clients N = %d: rounds take "
            "N = %d, with T = %d, D = %d and U = %d",
            clients,
            parameters.clients,
            parameters.privacy,
            parameters.dropouts,
            parameters.survivors,
        )


def _mind_the_liars(settings: Settings) -> None:
    if settings.traits.checked and not settings.parameters.liars():
        log.warning("%s", describe_liars(settings.parameters))


def _mind_the_rounding(settings: Settings) -> None:
    """Say so if the updates of clients with few examples would be rounded coarsely.

    Of short keys, say how they are decoded, and what they assume.
    """
    quantizer = settings.quantizer
    if settings.has_short_keys:
        log.warning("%s decoding; %s", decoding_of(quantizer), ASSUMPTION)
    if quantizer.weighted and 1 / quantizer.scale > quantizer.bound / 100:
        log.warning(
            "an update is rounded in steps of %.2g, divided by its client's sample count; if "
            "counts are small, lower aggregation.max_samples = %d to the largest that occurs",
            1 / quantizer.scale,
            quantizer.max_samples,
        )


def _stop_gracefully(server: FederationServer, number: signal.Signals) -> None:
    name = number.name
    log.info("%s: finishing the current round, if there is one; a second signal ends it", name)
    server.stop()
    for each in system.STOP:
        system.default_signal(asyncio.get_running_loop(), each)


def _trust(table: FederationTable) -> tuple[Path, bytes, bytes]:
    """The file of the allow-list, the key that must have signed it, and the session."""
    return table.allow_list, bytes.fromhex(table.authority), bytes.fromhex(table.session)


def _server_communicator(
    config: ServerConfig, clients: frozenset[int], connections: int, understood: bool
) -> ServerCommunicator:
    limits = Limits(
        folder=config.server.state, ahead=ahead_of(len(clients)), connections=connections
    )
    if (other := _added_transport(config.server.transport)) is not None:
        return other.server(config.server.address, clients, understood=understood, limits=limits)
    from lightsecagg.drivers.transport.grpc import GrpcServer

    credentials = _credentials(config.tls)
    return GrpcServer(
        config.server.address,
        clients,
        credentials,
        plaintext=config.tls.insecure,
        limits=limits,
    )


def _added_transport(name: str) -> Transport | None:
    """A transport of another distribution; None for gRPC."""
    if name == "grpc":
        return None
    if name not in added(TRANSPORTS):
        there = ", ".join(["grpc", *added(TRANSPORTS)])
        raise ConfigurationError(
            f"server.transport = {name!r} is not installed; there are: {there}. The laboratory "
            "adds torch-rpc: pip install -c constraints.txt ./lab"
        )
    found: Transport = added(TRANSPORTS)[name].load()
    return found


def _client_communicator(config: ClientConfig, understood: bool) -> ClientCommunicator:
    if (other := _added_transport(config.server.transport)) is not None:
        return other.client(config.server.address, config.client.id, understood=understood)
    from lightsecagg.drivers.transport.grpc import GrpcClient

    credentials = _credentials(config.tls)
    if credentials is not None:
        credentials.check_client(config.client.id)  # trying to connect would not help
    return GrpcClient(
        config.server.address,
        config.client.id,
        credentials,
        server_name=config.server.name,
        plaintext=config.tls.insecure,
        limits=_limits_of(config.client.max_dimension),
    )


def _limits_of(max_dimension: int) -> Limits:
    """The longest message that a client accepts is a model of the largest kind that it expects."""
    usual = Limits()
    longest = min(4 * max_dimension + _BESIDE_THE_MODEL, MAX_MESSAGE)
    return replace(usual, max_message=max(usual.max_message, longest))


def _credentials(table: TlsTable) -> Credentials | None:
    if table.insecure:
        return None
    if table.ca is None or table.certificate is None or table.key is None:
        raise ConfigurationError(
            "[tls] needs ca, certificate and key; `lightsecagg provision` makes them "
            "(insecure = true is accepted on loopback only)"
        )
    credentials = Credentials.load(table.ca, table.certificate, table.key)
    for what in credentials.expiring():
        log.warning("%s; `lightsecagg members renew`, at the authority, makes a new one", what)
    return credentials

"""Who may take part: certificates, identities and the signed allow-list of one federation.

    DIR/authority/     ca.key ca.pem allow-list.key members.json allow-list.json
                       keep offline; the server never sees it
    DIR/server/        server.toml ca.pem server.pem server.key allow-list.json
    DIR/clients/<id>/  client-<id>.toml ca.pem client.pem client.key identity.key allow-list.json

In malicious-server mode a server that could issue certificates or edit the allow-list could fill
a round with clients of its own. So the list is signed by a key of the authority, whose public part
every client holds in its own configuration; the server makes nothing that clients trust. Who
takes part may change later: see `administration`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.crypto.identity import IDENTITY_KEY_LENGTH, IdentityKey
from lightsecagg.crypto.transcript import HASH_LENGTH
from lightsecagg.drivers.federation.membership import sign_membership
from lightsecagg.drivers.federation.register import REGISTER, Admission, Register, Table
from lightsecagg.drivers.transport.certificates import Authority, Issued, Validity
from lightsecagg.drivers.transport.tls import fingerprint_of_pem, is_loopback
from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import Staleness
from lightsecagg.foreign import read_private, reading, shown
from lightsecagg.params import Parameters, ShareMode, ThreatModel, check_integer
from lightsecagg.protocol.settings import MAX_LENGTH
from lightsecagg.training.datasets import DATASETS

Mode = Literal["sync", "async"]
DEFAULT_PORT: Final = 7700
DEFAULT_TASK: Final = "digits"
DEFAULT_BOUND: Final = 1.0
MAX_DAYS: Final = 3650
_LONGEST_NAME: Final = 40
ALLOW_LIST: Final = "allow-list.json"

HINTS: Final[dict[str, dict[str, tuple[str | int | float, str]]]] = {
    "aggregation": {
        "max_samples": (100_000, "the largest sample count that counts; smaller rounds finer"),
    },
    "rounds": {
        "number": (10, "rounds in all"),
        "min_clients": (0, "fewest that start a round; 0: N - D"),
        "wait_for_clients": (120.0, "seconds"),
        "upload": (900.0, "seconds for training and upload"),
        "retries": (2, "after an aborted round"),
    },
    "buffering": {
        "flush_after": (60.0, "seconds to a buffer of fewer than size updates"),
        "reports": (10.0, "seconds in which clients report on a mask"),
        "renew": (5, "buffers until clients that wait outside are let in"),
    },
    "training.task": {
        "partition": ("iid", 'or "local": all of data_dir is this client\'s own'),
    },
    "training.local": {
        "epochs": (1, "a server's value holds where clients accept it"),
        "batch_size": (32, "examples per step"),
        "learning_rate": (0.05, "of the local optimizer"),
        "optimizer": ("sgd", "or adam, adamw"),
    },
}
"""Table -> key -> its default and what it means: the keys that one looks for first."""


_QUIET_PORTS = range(20_000, 32_000)
"""Below those that systems give to connections."""
_PROBES = 100


def load_identity(path: Path) -> IdentityKey:
    """Read a client's identity key."""
    with reading(path, f"an identity key of {2 * IDENTITY_KEY_LENGTH} hexadecimal digits"):
        private = bytes.fromhex(read_private(path).decode("ascii"))
        if len(private) != IDENTITY_KEY_LENGTH:
            raise ValueError(f"{len(private)} bytes")
        return IdentityKey(private)


@dataclass(frozen=True, slots=True)
class Provisioned:
    """Where the files of a new federation are."""

    directory: Path
    session: bytes
    authority_key: bytes
    """Public: verifies the allow-list."""
    server: Path
    """server.toml"""
    clients: Mapping[int, Path]
    """id -> client-<id>.toml"""
    parameters: Parameters


def provision(
    directory: Path,
    clients: int,
    *,
    privacy: int | None = None,
    dropouts: int | None = None,
    survivors: int | None = None,
    task: str | None = None,
    vectors: int | None = None,
    weighted: bool = False,
    bound: float = DEFAULT_BOUND,
    share_mode: ShareMode | None = None,
    mode: Mode = "sync",
    buffer: int | None = None,
    staleness: Staleness | None = None,
    server_name: str = "localhost",
    port: int = DEFAULT_PORT,
    days: int = 365,
    names: Sequence[str] = (),
    entropy: Entropy = system_entropy,
) -> Provisioned:
    """Create a federation of clients 0..n-1 in a directory that must not exist, or be empty.

    By default a quarter of the clients may collude with a malicious server, and a quarter vanish.
    U, the `survivors`, leaves room for one liar wherever N and T allow it; 0 stands for N - D.
    They train `task`, or sum vectors of `vectors` entries (`weighted`: average them by sample
    counts). No entry of an update or vector is beyond `bound`: clients clip it, and refuse a
    round with another bound. With a `share_mode`, clients demand it.

    In the asynchronous `mode` all clients demand the same [buffering]: buffers of `buffer` updates,
    by default of half the clients, discounted by `staleness`.

    `names` are for people, one per client: log, page and `members list` show them beside the ids.
    """
    _check_arguments(directory, server_name, port, days)
    check_names(names)
    if names and len(names) != clients:
        raise ParameterError(f"{len(names)} names were given for {clients} clients")
    job = _job(clients, task, vectors, weighted)
    parameters = _parameters(clients, privacy, dropouts, survivors)
    buffering = _buffering(mode, parameters, buffer, staleness)
    Quantizer(PrimeField(parameters.modulus), bound, clients)  # refuses a bound that cannot work
    session = draw(entropy, HASH_LENGTH)
    signer = IdentityKey.generate(entropy)
    identities = {client: IdentityKey.generate(entropy) for client in range(clients)}
    authority = Authority.create(Validity.for_days(days))
    certificates = {client: authority.issue_client(client) for client in identities}
    federation: Table = {
        "session": session.hex(),
        "authority": signer.public.hex(),
        "allow_list": ALLOW_LIST,
    }
    round_: Table = {
        "clients": clients,
        "privacy": parameters.privacy,
        "dropouts": parameters.dropouts,
        **_survivors(parameters),
        "threat_model": parameters.threat_model,
    }
    sharing: Table = {} if share_mode is None else {"share_mode": share_mode}
    asynchronous: Table = {"mode": mode} if buffering else {}
    listen, reach = _addresses(server_name, port)
    server: dict[str, Table] = {
        "federation": federation,
        "aggregation": {**asynchronous, **round_, "bound": bound, **sharing},
        "server": {"address": listen},
        "tls": _tls_table("server"),
        **buffering,
        **job.server,
    }
    client: dict[str, Table] = {
        "federation": federation,
        "client": {
            "identity": "identity.key",
            "privacy": parameters.privacy,
            "threat_model": parameters.threat_model,
            "bound": bound,
            "clip": True,
            **sharing,
        },
        "server": {"address": reach},
        "tls": _tls_table("client"),
        **buffering,
        **job.client,
    }
    register = Register(
        session=session.hex(),
        number=1,
        server_name=server_name,
        parameters=round_,
        client=client,
        hints=job.hints,
        admissions=tuple(
            Admission(
                i,
                key.public.hex(),
                (fingerprint_of_pem(certificates[i].certificate).hex(),),
                name=names[i] if names else "",
            )
            for i, key in identities.items()
        ),
    )
    if names:
        server["server.names"] = register.names
    shared = {
        "ca.pem": authority.own_files().certificate,
        ALLOW_LIST: sign_membership(signer, session, register.number, register.allow_list),
    }

    def write_all(root: Path) -> None:
        keys = {"ca.key": authority.own_files().key, "allow-list.key": _line(signer)}
        write_folder(root / "authority", {**shared, **keys, REGISTER: register.to_bytes()})
        issued = authority.issue_server(server_name)
        toml = _toml(server, ("aggregation", "rounds", *buffering, *job.hints))
        files = {"server.pem": issued.certificate, "server.key": issued.key, "server.toml": toml}
        write_folder(root / "server", {**shared, **files})
        (root / "clients").mkdir(mode=0o700)
        for i, identity in identities.items():
            files = client_files(register, i, identity, certificates[i])
            write_folder(root / "clients" / str(i), {**shared, **files})

    _create(directory, write_all)
    return Provisioned(
        directory=directory,
        session=session,
        authority_key=signer.public,
        server=directory / "server" / "server.toml",
        clients={i: client_folder(directory, i) / f"client-{i}.toml" for i in identities},
        parameters=parameters,
    )


def check_names(names: Sequence[str], known: Iterable[str] = ()) -> None:
    """Refuse names that a line of a log, or a person, could take for another."""
    for name in names:
        if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() or max(name) > "\uffff":
            raise ParameterError(
                f"{shown(name)!r} is no name: give 1 to {_LONGEST_NAME} printable characters"
            )
    if len({*names, *known}) != len(names) + len(set(known)):
        raise ParameterError("two clients have one name")


def _buffering(
    mode: Mode, parameters: Parameters, buffer: int | None, staleness: Staleness | None
) -> dict[str, Table]:
    """The table of that name, in the asynchronous mode; the same for everybody (S09)."""
    if mode == "sync":
        if buffer is not None or staleness is not None:
            raise ParameterError("buffer and staleness are for the asynchronous mode")
        return {}
    least = parameters.privacy + 2
    size = max(least, parameters.clients // 2) if buffer is None else buffer
    if not least <= size <= parameters.clients:
        raise ParameterError(
            f"buffer K = {size} must be T + 2 = {least} to N = {parameters.clients}"
        )
    made = staleness or Staleness.CONSTANT
    return {"buffering": {"size": size, "staleness": made, "tau_max": 10, "c_g": 64, "stock": 4}}


def _survivors(parameters: Parameters) -> Table:
    """U, unless it is N - D: that needs no key, and follows D."""
    most = parameters.clients - parameters.dropouts
    return {} if parameters.survivors == most else {"survivors": parameters.survivors}


def client_folder(directory: Path, client: int) -> Path:
    """Where the files for a client are put."""
    return directory / "clients" / str(client)


def client_files(
    register: Register, client: int, identity: IdentityKey, issued: Issued
) -> dict[str, bytes]:
    """What a client gets, beside the files that everybody has: name -> content."""
    tables = {**register.client, "client": {"id": client, **register.client["client"]}}
    task = tables.get("training.task")
    if task is not None:
        # Tasks that divide their data give shard `id` of so many.
        tables["training.task"] = {**task, "clients": max(int(task["clients"]), client + 1)}
    return {
        "client.pem": issued.certificate,
        "client.key": issued.key,
        "identity.key": _line(identity),
        f"client-{client}.toml": _toml(tables, register.hints),
    }


@dataclass(frozen=True, slots=True)
class _Job:
    """What the federation computes: tables of the server's configuration and of the clients'."""

    server: Mapping[str, Table]
    client: Mapping[str, Table]
    hints: tuple[str, ...] = ()
    """Tables of `HINTS` that matter to both."""


def _job(clients: int, task: str | None, vectors: int | None, weighted: bool) -> _Job:
    if vectors is None:
        if weighted:
            raise ParameterError("weighted is for vectors; training always weights by sample count")
        _check_task(task)
        training: Table = {"task": task or DEFAULT_TASK, "clients": clients}
        tables = {"training.task": training}
        return _Job(tables, tables, ("training.task", "training.local"))
    if task is not None:
        raise ParameterError(f"a federation trains a task ({task}) or sums vectors, not both")
    check_integer("vectors: their length", vectors, 1)
    if vectors + weighted > MAX_LENGTH:  # with the sample count
        raise ParameterError(
            f"vectors: their length {vectors} is too large: an upload has at most {MAX_LENGTH} "
            "elements"
        )
    table: Table = {"dimension": vectors, "weighted": weighted, "output": "result.npz"}
    # A vector is spent by its first sum: a second round would need new files.
    server: dict[str, Table] = {"rounds": {"number": 1}, "vectors": table}
    # Only an .npz has room for a sample count.
    return _Job(server, {"vectors": {"input": "vector.npz" if weighted else "vector.npy"}})


def _check_task(task: str | None) -> None:
    """Refuse a built-in task that does not exist; modules are looked for where they will run."""
    known = (*DATASETS, "synthetic-<paper task>")
    if task is None or ":" in task or task in DATASETS or task.startswith("synthetic"):
        return
    raise ParameterError(
        f"there is no task {task!r}; choose one of {', '.join(known)}, or your own as "
        "package.module:Task"
    )


def describe_liars(parameters: Parameters) -> str:
    """What one client that lies about shares can do to a round with these parameters."""
    N, T, U = parameters.clients, parameters.privacy, parameters.survivors
    away = max((k for k in range(parameters.dropouts + 1) if parameters.liars(k)), default=None)
    if away is not None:
        others = {0: "nobody else is", 1: "one other is"}.get(away, f"up to {away} others are")
        silent = (
            "; one that also refuses to sign stops rounds while it stays"
            if N - away < parameters.quorum + 2
            else ""
        )
        return (
            f"one client may lie about its shares while {others} missing; the server leaves its "
            f"lies out and goes on{silent}"
        )
    remedy = (
        f"a U of {N - 2} or less leaves room for one liar"
        if N >= T + 3
        else f"room for one liar takes N >= T + 3 = {T + 3} clients"
    )
    return (
        f"one client that lies about its shares can stop every round, and the server cannot "
        f"identify it: N = {N} and U = {U} leave too few spare uploads; {remedy}"
    )


def _parameters(
    clients: int, privacy: int | None, dropouts: int | None, survivors: int | None
) -> Parameters:
    """T, D and U for malicious-server mode: what was asked for, or a quarter of N for T and D."""
    check_integer("clients N", clients, 3)
    T = max(1, clients // 4) if privacy is None else privacy
    # T + 2D < N and N - D >= T + 2 bound D from above.
    most = max(0, min((clients - T - 1) // 2, clients - T - 2))
    D = min(clients // 4, most) if dropouts is None else dropouts
    made = Parameters(clients, T, D, survivors or 0, threat_model=ThreatModel.MALICIOUS_SERVER)
    return _with_room_for_a_liar(made) if survivors is None else made


def _with_room_for_a_liar(parameters: Parameters) -> Parameters:
    """The largest U, hence the fewest bytes, that outlives one liar beside most dropouts."""
    N, T, D = parameters.clients, parameters.privacy, parameters.dropouts
    for missing in range(D, -1, -1):
        U = min(N - D, N - missing - 2)
        if U > T and (made := replace(parameters, survivors=U)).liars(missing):
            return made
    return parameters


def check_days(days: int) -> None:
    """Refuse a validity that certificates cannot or should not have."""
    if not 0 < days <= MAX_DAYS:
        raise ParameterError(f"certificates are valid for 1 to {MAX_DAYS} days, not {days}")


def _check_arguments(directory: Path, server_name: str, port: int, days: int) -> None:
    if not 0 < port < 65536:
        raise ParameterError(f"port {port} must be in [1, 65535]")
    check_days(days)
    if not server_name or not server_name.isascii() or any(c in server_name for c in ' "\\/\n'):
        raise ParameterError(f"server name {server_name!r} is not a host name or address")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(
            f"{directory} exists; its keys would be lost. Choose another directory or remove it"
        )


def _addresses(server_name: str, port: int) -> tuple[str, str]:
    """Where the server listens, and where clients look for it."""
    if is_loopback(server_name):
        host = "127.0.0.1" if server_name == "localhost" else _bracketed(server_name)
        return f"{host}:{port}", f"{host}:{port}"
    return f"0.0.0.0:{port}", f"{_bracketed(server_name)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tls_table(name: str) -> Table:
    return {"ca": "ca.pem", "certificate": f"{name}.pem", "key": f"{name}.key"}


def _toml(tables: Mapping[str, Table], hints: Iterable[str]) -> bytes:
    """Tables of strings, numbers and truth values, which TOML writes like JSON.

    `hints` names tables of `HINTS`: their further keys are written as comments, with defaults.
    """
    lines = ["# Paths are relative to this file. Keys behind a # have the value that is shown.", ""]
    absent: dict[str, Table] = {name: {} for name in hints if name not in tables}
    for name, table in {**tables, **absent}.items():
        # A table that would be empty is a comment as well.
        lines.append(f"[{name}]" if table else f"# [{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        if name in hints:
            for key, (value, meaning) in HINTS[name].items():
                if key not in table:
                    lines.append(f"# {f'{key} = {json.dumps(value)}':28}  # {meaning}")
        lines.append("")
    return "\n".join(lines).encode("ascii")


def _line(key: IdentityKey) -> bytes:
    return key.private_bytes().hex().encode("ascii") + b"\n"


def _create(directory: Path, write_all: Callable[[Path], None]) -> None:
    """Fill a draft beside the directory, then move it into place: all or nothing."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            write_all(draft)
            draft.rename(directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # gone already, if all went well
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be written: {error.strerror}") from error


def write_folder(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files that only their owner can read, durably, into a new directory."""
    directory.mkdir(mode=0o700)
    for name, content in files.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def free_port() -> int:
    """On which no server listens now, for federations on one machine.

    No system hands it out by itself: a server that is killed finds it free when it comes back.
    """
    for _ in range(_PROBES):
        drawn = int.from_bytes(draw(system_entropy, 4), "big")
        port = _QUIET_PORTS[drawn % len(_QUIET_PORTS)]
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    first, last = _QUIET_PORTS[0], _QUIET_PORTS[-1]
    raise ConfigurationError(f"no free port was found among {first} to {last}")

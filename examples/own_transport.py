"""Secure aggregation over plain TCP sockets: a complete driver, explained in docs/own-transport.md.

    python examples/own_transport.py

It runs a server and five clients on this machine, one of which loses its power on the way. The
sockets are neither encrypted nor authenticated: fine for an example on one machine, and what your
own transport must do better (the clients' shares are sealed end to end in any case).
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

import numpy as np

from lightsecagg import (
    DEFAULT_FIELD,
    SERVER,
    Aggregate,
    AllowList,
    Codec,
    IdentityKey,
    Ledger,
    LightSecAggError,
    NeedInput,
    Parameters,
    Policy,
    Quantizer,
    RoundAborted,
    Send,
    Settings,
    Update,
    at_once,
    client_party,
    server_party,
)
from lightsecagg.protocol.interface import ServerParty

CODEC = Codec(DEFAULT_FIELD)
CLIENTS, DIMENSION = 5, 1000
Inbox = queue.Queue[tuple[int, bytes | None]]
"""Who sent what; None when the connection has ended."""


# -- frames: a length, then that many bytes ------------------------------------------------------


def send_frame(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(4, "big") + data)


def read_frame(connection: socket.socket, most: int = 2**24) -> bytes | None:
    """The next frame, or None when the peer is gone or sends nonsense."""
    try:
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        data = connection.recv(size, socket.MSG_WAITALL) if 0 < size <= most else b""
    except OSError:
        return None
    return data if data and len(data) == size else None


# -- the client's driver -------------------------------------------------------------------------


def run_client(
    connection: socket.socket,
    client: int,
    identity: IdentityKey,
    policy: Policy,
    update: Update | None,
) -> None:
    party = client_party(client, identity, policy, Ledger.volatile())  # one round only
    send_frame(connection, client.to_bytes(4, "big"))  # "hello, I am": use TLS instead
    while data := read_frame(connection):
        outputs = party.receive(SERVER, CODEC.decode(data))
        for output in outputs:
            match output:
                case Send(message=message):
                    send_frame(connection, CODEC.encode(message))
                case NeedInput():
                    if update is None:
                        return  # the power fails, right after the shares were sent
                    outputs += party.set_input(update)  # train first; messages can wait


# -- the server's driver -------------------------------------------------------------------------


def run_server(
    party: ServerParty, connections: dict[int, socket.socket], inbox: Inbox, patience: float
) -> Aggregate | RoundAborted:
    outputs = party.start()
    phase, deadline = party.phase, time.monotonic() + patience
    while True:
        for output in at_once(party, outputs):
            match output:
                case Send(to=client, message=message):
                    with contextlib.suppress(OSError):  # its reader will notice that it is gone
                        send_frame(connections[client], CODEC.encode(message))
                case Aggregate() | RoundAborted():
                    return output
        if party.phase is not phase:
            phase, deadline = party.phase, time.monotonic() + patience
        try:
            client, data = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            outputs = party.receive(client, CODEC.decode(data)) if data else party.drop(client)
        except queue.Empty:
            outputs = party.proceed()  # the deadline of this phase: go on without the rest
        except LightSecAggError as error:
            print(f"client {client} is cut off: {error}")
            outputs = party.drop(client)


def accept(listener: socket.socket, inbox: Inbox) -> tuple[int, socket.socket]:
    """The next client and its connection, with a thread that reads from it."""
    connection, _ = listener.accept()
    client = int.from_bytes(read_frame(connection) or b"", "big")

    def read() -> None:
        while data := read_frame(connection):
            inbox.put((client, data))
        inbox.put((client, None))

    threading.Thread(target=read, daemon=True).start()
    return client, connection


# -- all of it on one machine --------------------------------------------------------------------


def main() -> None:
    identities = [IdentityKey.generate() for _ in range(CLIENTS)]
    allow_list = AllowList({client: key.public for client, key in enumerate(identities)})
    session = bytes(32)  # names the federation; draw it once and give it to everybody
    settings = Settings(
        protocol="lightsecagg",
        parameters=Parameters(clients=CLIENTS, privacy=1, dropouts=1),
        quantizer=Quantizer(DEFAULT_FIELD, bound=1.0, summands=CLIENTS),
        dimension=DIMENSION,
        session=session,
        round=1,
        allow_list=allow_list.digest,
    )
    policy = Policy(allow_list, session, privacy=1, dimension=DIMENSION)
    vectors = np.random.default_rng().uniform(-1, 1, (CLIENTS, DIMENSION))
    updates = [Update(vector) if client != 3 else None for client, vector in enumerate(vectors)]

    def play_client(client: int) -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            run_client(connection, client, identities[client], policy, updates[client])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        for client in range(CLIENTS):
            threading.Thread(target=play_client, args=(client,), daemon=True).start()
        inbox: Inbox = queue.Queue()
        connections = dict(accept(listener, inbox) for _ in range(CLIENTS))
        party = server_party(settings, allow_list)
        result = run_server(party, connections, inbox, patience=10.0)

    if isinstance(result, RoundAborted):
        raise SystemExit(f"aborted: {result.reason}")
    total, _ = settings.average(result.total, len(result.included))
    error = np.abs(total - vectors[list(result.included)].sum(axis=0)).max()
    print(f"sum of clients {result.included}, largest error {error:.1e}")


if __name__ == "__main__":
    main()

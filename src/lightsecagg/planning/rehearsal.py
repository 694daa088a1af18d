"""A real round of a few parties in one process, timed: the yardstick of the forecasts.

Unit costs are taken from the parties themselves, not from formulas, so that they follow whatever
the implementation does per peer, per message and per element.
"""

from __future__ import annotations

import gc
import time
from collections import deque

import numpy as np

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import LightSecAggError
from lightsecagg.protocol.interface import SERVER, NeedInput, Output, Phase, Send, Update
from lightsecagg.protocol.messages import (
    Certificate,
    Opening,
    Roster,
    SealedShare,
    SharesClosed,
    SurvivorSet,
)
from lightsecagg.protocol.registry import PARTIES
from lightsecagg.protocol.settings import AllowList, Policy, Settings
from lightsecagg.protocol.wire import Codec

# Which phase's work a message of the server begins, at the client that receives it.
_PHASE_OF = {
    Opening: Phase.ADVERTISE,
    Roster: Phase.SHARE,
    SealedShare: Phase.SHARE,
    SharesClosed: Phase.UPLOAD,
    SurvivorSet: Phase.RECOVER,
    Certificate: Phase.RECOVER,
}


def rehearse(
    settings: Settings, identities: list[IdentityKey], allow_list: AllowList
) -> tuple[dict[Phase, float], dict[Phase, float]]:
    """Run one round without faults; CPU seconds by phase of a client (mean) and of the server."""
    policy = Policy(
        allow_list=allow_list,
        session=settings.session,
        privacy=settings.parameters.privacy,
        threat_model=settings.parameters.threat_model,
        protocols=(settings.protocol,),
        dimension=settings.dimension,
        graph_security=0,
    )
    client_kind, server_kind = PARTIES[settings.protocol]
    clients = {c: client_kind(c, key, policy) for c, key in enumerate(identities)}
    server = server_kind(settings, allow_list)
    codec = Codec(settings.field)
    of_clients = dict.fromkeys(Phase, 0.0)
    of_server = dict.fromkeys(Phase, 0.0)
    vector = np.linspace(-0.5, 0.5, settings.dimension, dtype=np.float32)
    queue: deque[tuple[int, int, bytes]] = deque()

    def send(sender: int, outputs: list[Output]) -> None:
        message, data = None, b""
        for output in outputs:
            if isinstance(output, Send):
                if output.message is not message:  # a broadcast is encoded once
                    message, data = output.message, codec.encode(output.message)
                queue.append((sender, output.to, data))

    def at_server(sender: int, data: bytes) -> None:
        phase, started = server.phase, time.process_time()
        send(SERVER, server.receive(sender, codec.decode(data)))
        of_server[phase] += time.process_time() - started

    def at_client(client: int, data: bytes) -> None:
        party, started = clients[client], time.process_time()
        message = codec.decode(data)
        phase = _PHASE_OF[type(message)]
        outputs = party.receive(SERVER, message)
        send(client, outputs)
        now = time.process_time()
        of_clients[phase] += now - started
        if any(isinstance(output, NeedInput) for output in outputs):
            # The input waits in the party until sharing is closed; taking it belongs to the upload.
            send(client, party.set_input(Update(vector + np.float32(client * 1e-6))))
            of_clients[Phase.UPLOAD] += time.process_time() - now

    collecting = gc.isenabled()
    gc.disable()
    try:
        send(SERVER, server.start())
        while queue:
            sender, recipient, data = queue.popleft()
            if recipient == SERVER:
                at_server(sender, data)
            else:
                at_client(recipient, data)
    finally:
        if collecting:
            gc.enable()
    if server.phase is not Phase.DONE:
        raise LightSecAggError("the rehearsal did not come to its end; this is a defect")
    return {phase: t / len(clients) for phase, t in of_clients.items()}, of_server

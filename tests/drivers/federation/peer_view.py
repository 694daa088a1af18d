"""A server that does nothing but greet its clients: what the tests of hostile servers stand on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.peer_log import PeerLog
from lightsecagg.drivers.transport.communicator import (
    Connected,
    Disconnected,
    Received,
    ServerCommunicator,
)
from lightsecagg.session.interface import Cut, Effect, Log, Post
from lightsecagg.session.peers import Greeted, Misbehaved, Peers, Spoke


class PeerView:
    """The transport, and who has greeted on it; one consumer."""

    def __init__(self, communicator: ServerCommunicator) -> None:
        self._communicator = communicator
        self._log = PeerLog(log)
        self._peers = Peers(self._do, 8)
        self._next: asyncio.Task[Any] | None = None
        self.refusals, self.ready, self.post = (
            self._peers.refusals,
            self._peers.ready,
            self._peers.post,
        )

    async def start(self) -> None:
        await self._communicator.start()
        self._events = self._communicator.events()

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._communicator.close()
        self._log.close()

    async def next(self, timeout: float) -> Greeted | Spoke | Misbehaved | Disconnected | None:
        """What happens next; None if that concerns nobody, or nothing does."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._events))
        done, _ = await asyncio.wait({self._next}, timeout=timeout)
        if not done:
            return None
        event, self._next = self._next.result(), None
        match event:
            case Connected(client):
                self._peers.connected(client, time.monotonic())
            case Disconnected(client):
                self._peers.disconnected(client, time.monotonic())
                return event
            case Received(client, data):
                return self._peers.received(client, data)
        return None

    def _do(self, effect: Effect) -> None:
        match effect:
            case Post(client, data):
                self._communicator.post(client, data)
            case Cut(client, reason):
                self._communicator.disconnect(client, reason)
            case Log(level, message, arguments, peer):
                self._log.write(level, f"client {peer}", message, *arguments)

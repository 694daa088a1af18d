"""A client of a demonstration that may be slow, and notes what it does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.jobs import ClientJob
from lightsecagg.field.prime import PrimeField
from lightsecagg.params import DEFAULT_MODULUS
from lightsecagg.protocol.epoch_client import EpochClient
from lightsecagg.protocol.messages import BufferedUpload, Message, SumRequest, UploadDropped
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.client import Round
from lightsecagg.session.envelope import RoundOver, name_of, unpack
from lightsecagg.session.epoch_client import EpochClientSession
from lightsecagg.session.interface import Event, Received, Train, Trained, TrainingFailed

Note = Callable[..., None]
"""Told what has happened, and the particulars."""


class _WatchedSession(EpochClientSession):
    """Tells which masks are used, and which uploads are acknowledged."""

    note: Note

    def _send(self, round_: Round[EpochClient], message: Message) -> None:
        if isinstance(message, BufferedUpload):
            tag = message.tag
            about = {"serial": tag.serial, "version": tag.version, "digest": tag.digest.hex()}
            self.note("upload", epoch=round_.number, **about)
        super()._send(round_, message)

    def _acknowledged(self, epoch: Round[EpochClient]) -> None:
        if epoch.unacknowledged is not None:
            self.note("stored", epoch=epoch.number, serial=self._unacknowledged)
        super()._acknowledged(epoch)


class WatchedClient(FederationClient):
    """A client that may be slow, and notes at once what it does: it may be killed at any moment."""

    epoch_session_type = _WatchedSession

    def __init__(self, *arguments: Any, slowdown: float, least: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._slowdown, self._least = slowdown, least
        self._codec = Codec(PrimeField(DEFAULT_MODULUS))
        if isinstance(self._session, _WatchedSession):
            self._session.note = self._note
        self._note("started")

    async def _trained(self, effect: Train, job: ClientJob) -> Trained | TrainingFailed:
        start, began = time.time(), time.monotonic()
        self._note("trains")
        result = await super()._trained(effect, job)
        seconds = time.monotonic() - began
        await asyncio.sleep(self._slowdown * max(seconds, self._least) - seconds)
        self._note("trained", version=effect.round, start=start)
        return result

    async def _tell(self, event: Event) -> None:
        if isinstance(event, Received) and isinstance(self._session, _WatchedSession):
            self._note_message_of_server(event.data)
        await super()._tell(event)

    def _note_message_of_server(self, data: bytes | memoryview) -> None:
        if name_of(data) not in ("SumRequest", "UploadDropped", "RoundOver"):
            return
        match unpack(data):
            case (number, body):
                match self._codec.decode(body):
                    case SumRequest() as request:
                        terms = [(tag.owner, tag.serial) for tag in request.tags]
                        self._note("announced", epoch=number, at=request.time, terms=terms)
                    case UploadDropped(serial):
                        self._note("dropped", epoch=number, serial=serial)
            case RoundOver(number, aborted):
                self._note("over", epoch=number, aborted=aborted)

    def _note(self, what: str, **about: object) -> None:
        trace = self._table.trace
        assert trace is not None  # noqa: S101 - the demonstration has one
        line = json.dumps({"client": self._table.id, "what": what, "time": time.time(), **about})
        with (trace / f"notes-{self._table.id}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")  # in one piece, when it is closed

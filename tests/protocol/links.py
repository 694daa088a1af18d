"""The wire in memory, whose links a test can deliver in any order it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from disk import Disk

from lightsecagg.drivers.local import Packet, Wire
from lightsecagg.protocol.interface import SERVER, Persist, Promised
from lightsecagg.protocol.jobs import Compute, UploadInMemory
from lightsecagg.protocol.messages import Message

Link = tuple[int, int]
"""Sender and recipient."""


def stored(server: Any, outputs: Sequence[object], disk: Disk | None = None) -> list[object]:
    """The outputs of a durable server's call, the uploads among them stored: in memory."""
    done: list[object] = []
    after: list[object] = []
    for output in outputs:
        record = output.record if isinstance(output, Persist) else None
        if isinstance(record, Promised) and disk is not None:
            upload = disk.store(record)
            if record.upload is not None:
                after += stored(server, server.stored(record, upload), disk)
        elif isinstance(record, Promised) and record.upload is not None:
            kept = UploadInMemory(record.upload.vector)
            done += stored(server, server.stored(record, kept))
        else:
            done.append(output)
    return done + after


class Links(Wire):
    """Every link is first in, first out; which one is next is up to the test."""

    disk: Disk | None = None
    """Of a durable server."""

    def busy(self) -> list[Link]:
        """Links with something on its way."""
        return sorted({(packet.sender, packet.recipient) for packet in (*self.up, *self.down)})

    def on(self, sender: int, recipient: int) -> list[Packet]:
        """What is on its way on a link, the oldest first."""
        link = (sender, recipient)
        return [p for p in self._queue(recipient) if (p.sender, p.recipient) == link]

    def under_way(self, sender: int, recipient: int) -> list[Message]:
        """The same, decoded."""
        return [self.codec.decode(packet.data) for packet in self.on(sender, recipient)]

    def take(self, sender: int, recipient: int) -> Packet:
        """Take the oldest packet off a link."""
        packet = self.on(sender, recipient)[0]
        self._queue(recipient).remove(packet)
        return packet

    def lose(self, sender: int, recipient: int) -> list[Packet]:
        """Everything on a link is lost; what it was."""
        return [self.take(sender, recipient) for _ in self.on(sender, recipient)]

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        """What a durable server promises is stored on the spot, also what its jobs lead to."""
        if party != SERVER:
            return super().compute(party, outputs)
        kept = stored(self.server, outputs, self.disk)
        while any(isinstance(output, Compute) for output in kept):
            kept = stored(self.server, super().compute(party, kept), self.disk)
        return kept

    def _queue(self, recipient: int) -> deque[Packet]:
        return self.up if recipient == SERVER else self.down

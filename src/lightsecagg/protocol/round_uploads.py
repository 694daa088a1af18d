"""The masked updates of a round at the server, and what they say of the shares that arrived.

An upload is checked when it comes. Where it has to be stored it counts as delivered at once, and
the phase does not end before it is durable, or known to be lost.
"""

from __future__ import annotations

import numpy as np

from lightsecagg.errors import RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.interface import UploadTaken
from lightsecagg.protocol.jobs import Upload, UploadInMemory
from lightsecagg.protocol.messages import MaskedUpload
from lightsecagg.protocol.settings import Settings


class RoundUploads:
    """Who has uploaded, what, and which shares it holds."""

    def __init__(self, settings: Settings) -> None:
        self.taken: dict[int, Upload] = {}
        self.held: dict[int, frozenset[int]] = {}
        """Uploader -> owners whose shares have reached it."""
        self.reports: dict[int, dict[int, Elements]] = {}
        """Uploader -> owner -> what it reports on that share (S46)."""
        self.storing: dict[int, UploadTaken] = {}
        """What is not durable yet."""
        self._length = settings.length
        self._report_length = settings.traits.report_length(settings)

    def take(
        self, sender: int, message: MaskedUpload, members: tuple[int, ...]
    ) -> UploadTaken | None:
        """Take an upload; None if it comes again."""
        if message.vector.shape != (self._length,):
            raise RemoteProtocolError(
                f"client {sender} uploaded {message.vector.size} elements instead of {self._length}"
            )
        held = _read_bitmap(sender, message.held, members)
        if message.reports.size != self._report_length * len(held):
            raise RemoteProtocolError(
                f"client {sender} reported {message.reports.size} elements on {len(held)} shares "
                f"instead of {self._report_length} on each"
            )
        # A copy: a view would keep the whole message in memory.
        rows = message.reports.copy().reshape(len(held), self._report_length)
        reports = dict(zip(held, rows, strict=True))
        if sender in self.taken:
            self._check_same(sender, message.vector, reports)
            return None
        self.taken[sender] = UploadInMemory(message.vector)
        self.held[sender] = frozenset(held)
        self.reports[sender] = reports
        return UploadTaken(sender, message)

    def _check_same(self, sender: int, vector: Elements, reports: dict[int, Elements]) -> None:
        before = self.reports[sender]
        if (
            not self.taken[sender].equals(vector)
            or before.keys() != reports.keys()
            or not all(np.array_equal(before[owner], reports[owner]) for owner in before)
        ):
            raise RemoteProtocolError(f"client {sender} sent two different uploads")

    def stored(self, client: int, upload: Upload | None) -> None:
        """An upload is durable, and read there from now on; None: it is lost."""
        del self.storing[client]
        if upload is None:
            del self.taken[client], self.held[client], self.reports[client]
        else:
            self.taken[client] = upload


def _read_bitmap(sender: int, bitmap: bytes, members: tuple[int, ...]) -> list[int]:
    """Whose bits are set."""
    size = len(members)
    if len(bitmap) != (size + 7) // 8:
        raise RemoteProtocolError(
            f"client {sender} sent a bitmap of {len(bitmap)} bytes for {size} members"
        )
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    if bits[size:].any():
        raise RemoteProtocolError(f"client {sender} sent a bitmap with stray bits")
    return [members[k] for k in np.flatnonzero(bits)]

"""What the server of an epoch must not forget, as bytes.

Everything but the vectors of uploads, which the driver stores once each, and what follows from the
rest: weights, judgements on reports, sums that are being computed. Of a server that is `durable`
less is enough (`promises`): what clients say again when they are back, and what a cut connection
may lose as well, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from lightsecagg.crypto.transcript import HASH_LENGTH, context_hash
from lightsecagg.errors import DecodeError
from lightsecagg.field.group import Group
from lightsecagg.foreign import decode
from lightsecagg.masks.checked_sharing import Pair
from lightsecagg.protocol.epoch_queue import UploadQueue, WaitingUpload
from lightsecagg.protocol.epoch_stock import MaskStock, Values
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.messages import (
    Advertise,
    AggregatedShare,
    Roster,
    SealedShare,
    ShareBundle,
    SumRequest,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.roles.relay import Mailbox
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec

VERSION = 1

Recall = Callable[[Tag], Upload]
"""Where the upload of a tag is stored."""


class Memory(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The server's state between two calls."""

    version: int = VERSION
    settings: bytes
    invited: tuple[int, ...]
    buffer_size: int
    spare_answers: int
    started: bool
    phase: Phase
    time: int
    offline: list[int]
    advertised: dict[int, Advertise]
    roster: Roster | None
    models: dict[int, bytes]
    check_secret: bytes = b""
    complete: dict[int, int] = {}
    begun: dict[int, tuple[int, list[bytes]]] = {}
    """Owner -> the mask under way, and those of its shares that came."""
    shared: dict[int, dict[int, int]] = {}
    reports: list[tuple[MaskRef, dict[int, Values]]] = []
    unawaited: list[MaskRef] = []
    accused: list[tuple[Pair, int]] = []
    missed: dict[int, list[bytes]] = {}
    lacking: list[tuple[MaskRef, list[int]]] = []
    """In the place of `missed`, where the shares are stored apart: who may lack which."""
    last_tag: dict[int, Tag] = {}
    accepted: list[tuple[bytes, list[int]]] = []
    waiting: list[tuple[Tag, int]] = []
    buffer: SumRequest | None = None
    holders: list[int] = []
    collected: bool = False
    signatures: dict[int, bytes] = {}
    refusals: dict[int, tuple[int, ...]] = {}
    answers: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"Memory(time={self.time})"

    def remember(self, stock: MaskStock, queue: UploadQueue, mailbox: Mailbox) -> None:
        """Of masks and uploads."""
        codec = self._codec
        self.check_secret = stock.check_secret
        self.complete = dict(stock.relay.complete)
        self.begun = {
            owner: (serial, [codec.encode(ShareBundle((share,))) for share in shares.values()])
            for owner, (serial, shares) in stock.relay.begun.items()
        }
        self.shared = stock.shared
        self.reports = list(stock.reports.items())
        self.unawaited = sorted(stock.unawaited)
        self.accused = list(stock.accused.items())
        self.lacking = sorted(mailbox.lacking.items())
        self.last_tag = queue.last_tag
        self.accepted = [(model, sorted(owners)) for model, owners in queue.accepted.items()]
        self.waiting = [(waiting.tag, waiting.shared) for waiting in queue.waiting]

    def remember_missed(self, mailbox: Mailbox) -> None:
        """The shares themselves, and notices: of a server that stores no shares apart."""
        codec = self._codec
        self.lacking = []
        self.missed = {
            client: [
                codec.encode(ShareBundle((m,)) if isinstance(m, SealedShare) else m)
                for m in missed.values()
            ]
            for client, missed in mailbox.missed.items()
            if missed
        }

    def promises(self) -> Memory:
        """What must not change any more: no reports, answers, refusals, nor masks under way.

        Signatures stay: whoever has answered signs no more. Who was away may be the first to be
        back: a buffer in flight must not fail for want of those that nobody has waited for.
        """
        return replace(
            self,
            offline=[],
            begun={},
            reports=[(mask, {}) for mask, _ in self.reports],
            collected=False,
            refusals={},
            answers={},
        )

    def recall(
        self,
        stock: MaskStock,
        queue: UploadQueue,
        mailbox: Mailbox,
        recall: Recall,
        shares: Iterable[SealedShare],
    ) -> None:
        """The inverse of `remember`."""
        stock.relay.complete.update(self.complete)
        for owner, (serial, under_way) in self.begun.items():
            shares = [s for s in map(self._missed, under_way) if isinstance(s, SealedShare)]
            stock.relay.begun[owner] = (serial, {share.recipient: share for share in shares})
        stock.shared = self.shared
        stock.reports = dict(self.reports)
        stock.unawaited = set(self.unawaited)
        stock.accused = dict(self.accused)
        for client, missed in self.missed.items():
            for data in missed:
                mailbox.put(client, self._missed(data))
        lacking = dict(self.lacking)
        for share in shares:
            if share.recipient in lacking.get(MaskRef(share.owner, share.serial), ()):
                mailbox.put(share.recipient, share)
        queue.last_tag = self.last_tag
        queue.accepted = {model: set(owners) for model, owners in self.accepted}
        queue.waiting = [WaitingUpload(tag, recall(tag), shared) for tag, shared in self.waiting]

    def remember_flight(self, flight: Recovery) -> None:
        """Of the buffer in flight."""
        codec = self._codec
        self.buffer = flight.request
        self.holders = sorted(flight.holders)
        self.collected = flight.collected
        self.signatures = dict(flight.agreement.signatures)
        self.refusals = dict(flight.agreement.refusals)
        self.answers = {client: codec.encode(answer) for client, answer in flight.answers.items()}

    def recall_flight(self, flight: Recovery) -> None:
        """The inverse of `remember_flight`."""
        flight.collected = self.collected
        flight.agreement.signatures.update(self.signatures)
        flight.agreement.refusals.update(self.refusals)
        for client, data in self.answers.items():
            answer = self._codec.decode(data)
            if not isinstance(answer, AggregatedShare):
                raise DecodeError("malformed snapshot: something else in the place of an answer")
            flight.answers[client] = answer

    def to_bytes(self) -> bytes:
        """With a checksum."""
        payload = msgspec.msgpack.encode(self)
        return context_hash("epoch server snapshot", payload) + payload

    @classmethod
    def from_bytes(cls, snapshot: bytes) -> Memory:
        """The inverse of `to_bytes`; `DecodeError` for anything else."""
        payload = snapshot[HASH_LENGTH:]
        if snapshot[:HASH_LENGTH] != context_hash("epoch server snapshot", payload):
            raise DecodeError(
                "malformed snapshot of a server: its checksum is wrong; it was cut or altered, or "
                "is of another release"
            )
        memory = decode(_decoder.decode, payload, "snapshot of a server")
        if memory.version != VERSION:
            raise DecodeError(
                f"a server's snapshot of version {memory.version} is not read by this release, "
                f"which has {VERSION}; open a new epoch"
            )
        members = () if memory.roster is None else memory.roster.members
        if not {member.client for member in members} <= set(memory.invited):
            raise DecodeError("malformed snapshot of a server: a roster of uninvited clients")
        return memory

    @property
    def _codec(self) -> Codec:
        group: Group = Settings.from_bytes(self.settings).group
        return Codec(group)

    def _missed(self, data: bytes) -> SealedShare | UploadDropped:
        match self._codec.decode(data):
            case ShareBundle((share,)):
                return share
            case UploadDropped() as dropped:
                return dropped
            case _:
                raise DecodeError("malformed snapshot: something else in the place of a share")


_decoder = msgspec.msgpack.Decoder(Memory)

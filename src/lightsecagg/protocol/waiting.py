"""The uploads that wait for a sum at the server.

Those of a round wait for each other (`UploadQueue`). Of an epoch, only buffers that clients will
accept are formed (`BufferQueue`). An upload is usable while it is not too stale, its
shares have not expired, and enough clients may hold good ones; it waits for the reports on its
mask. An owner's second update from one model is never summed (S42), so it does not wait at all.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, replace

from lightsecagg.errors import LocalProtocolError, RemoteProtocolError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.buffers import Rules, check_tag, choose_updates, hash_upload
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.messages import MaskedUpload, Tag
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.stock import MaskStock


@dataclass(frozen=True, slots=True)
class WaitingUpload:
    """An upload in front of its sum."""

    tag: Tag
    upload: Upload
    shared: int
    """The time at which the shares of its mask were complete."""

    @property
    def owner(self) -> int:
        """Whose it is."""
        return self.tag.owner

    @property
    def version(self) -> int:
        """t_i"""
        return self.tag.version

    @property
    def mask(self) -> MaskRef:
        """What hides it."""
        return MaskRef(self.tag.owner, self.tag.serial)


class UploadQueue:
    """Uploads, the oldest first."""

    def __init__(self, settings: Settings, allow_list: AllowList) -> None:
        self.waiting: list[WaitingUpload] = []
        self.last_tag: dict[int, Tag] = {}
        """Owner -> of its latest upload."""
        self.accepted: dict[bytes, set[int]] = {}
        """Model -> owners whose update from it came; clients sum no second one."""
        self.unstored: dict[MaskRef, Tag | None] = {}
        """Those that are being stored, and count when they are -> their owners' tags before."""
        self._settings, self._allow_list = settings, allow_list
        self._round: Round

    def begin(self, round_: Round) -> None:
        """The roster is fixed."""
        self._round = round_

    @property
    def owners(self) -> int:
        """How many distinct owners have an upload waiting."""
        return len({waiting.owner for waiting in self.waiting})

    def is_repeat(self, sender: int, tag: Tag) -> bool:
        """Whether this upload came before; refuse another one under a used mask."""
        if tag.owner != sender:
            raise RemoteProtocolError(f"client {sender} uploaded under another's tag")
        last = self.last_tag.get(sender)
        if last is None or tag.serial > last.serial:
            return False
        if tag == last:
            return True
        raise RemoteProtocolError(
            f"client {sender} uploaded under its mask {tag.serial}, but {last.serial} was "
            "used already"
        )

    def check(self, sender: int, message: MaskedUpload, time: int) -> None:
        """Refuse an upload that clients would refuse to sum (S45)."""
        tag = message.tag
        if tag.owner != sender:
            raise RemoteProtocolError(f"client {sender} uploaded under another's tag")
        if message.vector.shape != (self._settings.length,):
            raise RemoteProtocolError(
                f"client {sender} uploaded {message.vector.size} elements instead of "
                f"{self._settings.length}"
            )
        if tag.version > time:
            raise RemoteProtocolError(f"client {sender} trained from a model of the future")
        check_tag(self._round, self._allow_list, tag)
        if hash_upload(self._settings.group, message.vector) != tag.digest:
            raise RemoteProtocolError(f"the upload of client {sender} is not what its tag says")
        self._check_model(tag, time)

    def _check_model(self, tag: Tag, time: int) -> None:
        """Of which model it may be; a round's is in its settings."""

    def put(self, tag: Tag, upload: Upload, shared: int, *, stored: bool) -> bool:
        """Let a checked upload wait; False if its owner has uploaded from this model before.

        * `stored`: it counts at once; otherwise from `move` on, if it is not given up.
        """
        before, self.last_tag[tag.owner] = self.last_tag.get(tag.owner), tag
        owners = self.accepted.setdefault(tag.model, set())
        if tag.owner in owners:
            return False
        owners.add(tag.owner)
        waiting = WaitingUpload(tag, upload, shared)
        self.waiting.append(waiting)
        if not stored:
            self.unstored[waiting.mask] = before
        return True

    def give_up(self, tag: Tag) -> set[MaskRef]:
        """It cannot be stored: it never came, but for its mask, which is used."""
        before = self.unstored.pop(MaskRef(tag.owner, tag.serial))
        self.accepted[tag.model].discard(tag.owner)
        if before is None:
            del self.last_tag[tag.owner]
        else:
            self.last_tag[tag.owner] = before
        return self.take([tag])

    def move(self, tag: Tag, upload: Upload) -> None:
        """A waiting upload counts, and is read there from now on."""
        self.unstored.pop(MaskRef(tag.owner, tag.serial), None)
        self.waiting = [replace(w, upload=upload) if w.tag == tag else w for w in self.waiting]

    def take(self, tags: Iterable[Tag]) -> set[MaskRef]:
        """These wait no longer; their masks."""
        return self.remove(MaskRef(tag.owner, tag.serial) for tag in tags)

    def remove(self, masks: Iterable[MaskRef]) -> set[MaskRef]:
        """The same, by their masks."""
        gone = set(masks)
        self.waiting = [waiting for waiting in self.waiting if waiting.mask not in gone]
        return gone


class BufferQueue(UploadQueue):
    """Uploads of which buffers are formed."""

    def __init__(self, settings: Settings, allow_list: AllowList, buffering: Buffering) -> None:
        super().__init__(settings, allow_list)
        self.buffering = buffering
        self.models = Models(buffering)
        self._stock: MaskStock

    def use(self, stock: MaskStock) -> None:
        """These are the masks."""
        self._stock = stock

    def _check_model(self, tag: Tag, time: int) -> None:
        self.models.check(tag, time)

    def useless(
        self, time: int, offline: Container[int], lost: Container[int], *, patient: bool
    ) -> list[Tag]:
        """The uploads that no buffer will ever take.

        Peers keep few shares of one owner. An upload that waits in vain would leave its owner
        without room for another mask, and in the end the epoch without updates.

        * `lost`: clients without a memory of this epoch.
        * `patient`: wait for owners who may still bring the company that an older model needs.
        """
        crowd = self.buffering.per_model(self._settings.parameters)
        expected = {v: self._owners_of(v) for v in {w.version for w in self.waiting}}
        if patient:
            expected = {v: found | self._may_bring(v, lost) for v, found in expected.items()}
        return [
            w.tag
            for w in self.waiting
            if not self._is_usable(w, time, offline)
            or (w.version < time and len(expected[w.version]) < crowd)
        ]

    def may_fill(self, time: int, givers: Collection[int]) -> bool:
        """Whether these clients, if they upload, bring what a buffer still lacks (R59)."""
        parameters = self._settings.parameters
        if self.buffering.per_model(parameters) == 1:
            owners = {waiting.owner for waiting in self.waiting}
            return len(owners.union(givers)) >= parameters.privacy + 2
        absent = set(self._round.members).difference(givers)
        crowds = (
            self._owners_of(version) | self._may_bring(version, absent)
            for version in {time, *(waiting.version for waiting in self.waiting)}
        )
        return max(map(len, crowds)) >= self.buffering.per_model(parameters)

    def _owners_of(self, version: int) -> set[int]:
        return {waiting.owner for waiting in self.waiting if waiting.version == version}

    def _may_bring(self, version: int, lost: Container[int]) -> set[int]:
        """Clients that have uploaded nothing from this version or a newer one."""
        latest = {owner: tag.version for owner, tag in self.last_tag.items()}
        members = self._round.members
        return {c for c in members if c not in lost and latest.get(c, -1) < version}

    def _is_usable(self, waiting: WaitingUpload, time: int, offline: Container[int]) -> bool:
        return (
            time - waiting.version <= self.buffering.table.max_staleness
            and time - waiting.shared <= self.buffering.share_lifetime
            and (
                self._stock.awaits_reports(waiting.mask, offline)
                or self._stock.possible_holders(waiting.mask) >= self.needed_holders
            )
        )

    @property
    def needed_holders(self) -> int:
        """How many clients must hold good shares of all masks of a buffer."""
        parameters = self._settings.parameters
        return max(parameters.survivors, parameters.quorum)

    def choose(self, size: int, time: int, offline: Container[int]) -> list[WaitingUpload]:
        """The next buffer, by owner; shorter than `size` if fewer updates may be summed now.

        Enough clients must hold good shares of all its masks; while there are too few, the
        update goes whose shares fewest hold, and before it any that who is to answer doubts.
        """
        if not self.waiting:
            return []
        usable = [
            waiting
            for waiting in self.waiting
            if self._is_usable(waiting, time, offline)
            and not self._stock.awaits_reports(waiting.mask, offline)
            and waiting.mask not in self.unstored
        ]
        good = {waiting.mask: self._stock.holders(waiting.mask) for waiting in usable}
        parameters = self._settings.parameters
        rules = Rules(
            self.buffering.max_ratio,
            self.buffering.per_weight(parameters),
            self.buffering.per_model(parameters),
        )
        while True:
            chosen = choose_updates(
                usable,
                size,
                lambda version: self.buffering.table.weight(time - version),
                rules,
            )
            _, doubted = self._stock.part([waiting.mask for waiting in chosen])
            if doubted:
                usable = [waiting for waiting in usable if waiting.owner not in doubted]
                continue
            holders = frozenset(self._round.members).intersection(*(good[w.mask] for w in chosen))
            if len(holders) >= self.needed_holders:
                return sorted(chosen, key=lambda waiting: waiting.owner)
            usable.remove(min(chosen, key=lambda waiting: len(good[waiting.mask])))


class Models:
    """The published models: version -> hash. Uploads of others are refused (S45)."""

    def __init__(self, buffering: Buffering) -> None:
        self.known: dict[int, bytes] = {}
        self._max_staleness = buffering.table.max_staleness

    def publish(self, model: bytes, version: int, time: int) -> None:
        """Clients may now train from it."""
        if not 0 <= version <= time:
            raise LocalProtocolError(
                f"a model of version {version} cannot be published at time {time}"
            )
        if self.known.setdefault(version, model) != model:
            raise LocalProtocolError(
                f"another model of version {version} was published before; clients that trained "
                "from different models of one version refuse to be summed"
            )

    def check(self, tag: Tag, time: int) -> None:
        """Refuse an update of another model than the published one.

        Versions that are too old for any buffer are forgotten, and such uploads dropped anyway.
        """
        if tag.version < time - self._max_staleness:
            return
        if tag.version not in self.known:
            raise RemoteProtocolError(
                f"client {tag.owner} trained from a model of version {tag.version}, but none was "
                "published"
            )
        if tag.model != self.known[tag.version]:
            raise RemoteProtocolError(
                f"client {tag.owner} trained from another model of version {tag.version}"
            )

    def expire(self, time: int) -> None:
        """Forget those from which no update is welcome any more."""
        oldest = time - self._max_staleness
        self.known = {v: model for v, model in self.known.items() if v >= oldest}

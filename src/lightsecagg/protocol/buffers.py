"""Buffers of the asynchronous mode: signed tags, signed buffers, and which of them are acceptable.

A buffer is a time t and a list of tags, one per owner. Everything a client answers for follows
from it: the masks (owner, serial), the staleness t - t_i and with it the integer weights, which
every client computes itself from the table that its policy pins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Protocol, TypeVar

from msgspec.structs import replace

from lightsecagg.crypto import identity
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import HASH_LENGTH, context_hash, uint
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.field.group import Elements, Group
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.messages import MAX_SERIAL, SumRequest, Tag
from lightsecagg.protocol.roles.agreement import ROUND, Statement
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.schemes.interface import MaskRef, Term


@dataclass(frozen=True, slots=True)
class Rules:
    """Which updates may share a buffer."""

    max_ratio: float = math.inf
    """R: the largest max w / min w."""
    per_weight: int = 1
    """The fewest updates of one weight: T + 2 in strict mode."""
    per_model: int = 1
    """The fewest updates of one model: T + 2 in malicious-server mode."""

    def class_of(self, version: int, weight: int) -> tuple[int, ...]:
        """Which updates count together: those of one model also have one weight."""
        if self.per_model > 1:
            return (weight, version)
        return (weight,)

    @property
    def together(self) -> int:
        """The fewest updates of one class."""
        return max(self.per_model, self.per_weight)


_TAG = "buffered upload"
_Class = tuple[int, ...]


def hash_upload(group: Group, vector: Elements) -> bytes:
    """What a tag says of the masked upload."""
    return context_hash("masked upload", group.to_buffer(vector))


def make_tag(round_: Round, key: IdentityKey, tag: Tag) -> Tag:
    """An owner's statement about its upload: the tag, signed where a server could misplace it.

    In a round everything that a sum could be steered by follows from C1: the model, and the one
    mask of each owner.
    """
    return tag if round_.settings.one_sum else sign_tag(key, round_.context, tag)


def sign_tag(key: IdentityKey, context: bytes, tag: Tag) -> Tag:
    """The tag, signed for the epoch C1."""
    return replace(tag, signature=key.sign(_TAG, context, *_said(tag)))


def _said(tag: Tag) -> tuple[bytes, ...]:
    numbers = uint(tag.owner), uint(tag.serial), uint(tag.version)
    return (*numbers, tag.header, tag.model, tag.digest)


def check_tag(round_: Round, allow_list: AllowList, tag: Tag) -> None:
    """Raise `RemoteProtocolError` unless the tag is its owner's own, for this round or epoch."""
    if round_.members and tag.owner not in round_.positions:
        raise RemoteProtocolError(f"the tag's owner, client {tag.owner}, is not on the roster")
    header = HASH_LENGTH if round_.settings.traits.checked else 0
    if (len(tag.model), len(tag.digest), len(tag.header)) != (HASH_LENGTH, HASH_LENGTH, header):
        raise RemoteProtocolError(f"the tag of client {tag.owner} holds malformed hashes")
    if min(tag.serial, tag.version) < 0 or tag.serial > MAX_SERIAL:
        raise RemoteProtocolError(
            f"the tag of client {tag.owner} holds a negative number, or one beyond {MAX_SERIAL}"
        )
    if round_.settings.one_sum:
        if (tag.serial, tag.version, tag.model) != (0, 0, round_.settings.model) or tag.signature:
            raise RemoteProtocolError(
                f"the tag of client {tag.owner} is not of a round's one mask and one model"
            )
        return
    try:
        identity.verify(
            f"client {tag.owner}",
            allow_list[tag.owner],
            tag.signature,
            _TAG,
            round_.context,
            *_said(tag),
        )
    except CryptoError as error:
        raise RemoteProtocolError(f"tag of client {tag.owner} refused: {error}") from error


def check_models(buffer: SumRequest, models: Mapping[int, bytes], crowd: int) -> None:
    """Raise `RemoteProtocolError` unless every version names one model, and ours where known.

    A server that trains clients from different models could tell their updates apart in the sum,
    whether it calls them one version (S08) or several (S56).

    * `crowd`: the fewest owners of one model (`Buffering.per_model`).
    """
    seen = dict(models)
    for tag in buffer.tags:
        if seen.setdefault(tag.version, tag.model) != tag.model:
            raise RemoteProtocolError(
                f"client {tag.owner} trained from another model of version {tag.version} than "
                "its peers: the server, or this owner, says different things to different clients"
            )
    version, owners = min(Counter(tag.version for tag in buffer.tags).items(), key=itemgetter(1))
    if owners < crowd:
        raise RemoteProtocolError(
            f"{owners} of the owners trained from the model of version {version}, {crowd} are "
            "needed: the server chooses the models, and could tell these updates apart in the sum"
        )


def sum_statement(context: bytes, request: SumRequest) -> Statement:
    """Consent to a sum of the round or epoch C1 (agree step)."""
    return Statement("sum", (context, uint(request.time), hash_tags(request.tags)))


def hash_tags(tags: tuple[Tag, ...]) -> bytes:
    """One hash for a list of tags."""
    parts: list[bytes] = []
    for tag in tags:
        parts += _said(tag)
    return context_hash("tags", *parts)


def sum_weights(round_: Round, request: SumRequest, minimum: int = 0) -> tuple[int, ...]:
    """The weights of a sum in the order of its tags, if it is acceptable at all (S03, S09)."""
    buffering = round_.settings.buffering
    if buffering is None:
        _check_survivors(round_, request)
        return (1,) * len(request.tags)
    return _buffer_weights(round_, buffering, request, minimum)


def _check_survivors(round_: Round, request: SumRequest) -> None:
    if request.time != ROUND:
        raise RemoteProtocolError(
            f"a sum of time {request.time} is asked for, but this is a synchronous round, whose "
            "one sum has time 0"
        )
    owners = [tag.owner for tag in request.tags]
    if any(tag != Tag(tag.owner) for tag in request.tags):
        raise RemoteProtocolError("a round's request names owners alone: the rest is in C1")
    strangers = [client for client in owners if client not in round_.positions]
    if strangers and round_.members:
        raise RemoteProtocolError(f"the survivor set names {strangers}, who are not on the roster")
    if any(second <= first for first, second in pairwise(owners)):
        raise RemoteProtocolError(
            "a survivor set lists its owners once each, in increasing order: it names a client "
            "twice, or is out of order"
        )
    least = round_.settings.minimum
    if len(owners) < least:
        raise RemoteProtocolError(
            f"a survivor set of {len(owners)} is refused: a sum over fewer than "
            f"{least} clients does not hide its members"
        )


def _buffer_weights(
    round_: Round, buffering: Buffering, buffer: SumRequest, minimum: int
) -> tuple[int, ...]:
    """Those of a buffer.

    Signatures and shares are checked elsewhere.

    * `minimum`: the fewest owners, if the client wants more than T + 2 (`Policy.minimum`).
    """
    owners = [tag.owner for tag in buffer.tags]
    least, most = round_.settings.parameters.privacy + 2, buffering.max_updates
    if len(owners) < minimum:
        raise RemoteProtocolError(
            f"a buffer of {len(owners)} updates is refused: this client demands {minimum} owners"
        )
    if any(second <= first for first, second in pairwise(owners)):
        raise RemoteProtocolError("a buffer lists its owners once each, in increasing order")
    if not least <= len(owners) <= most:
        raise RemoteProtocolError(
            f"a buffer of {len(owners)} updates is refused: it must have T + 2 = {least} to "
            f"K_max = {most} owners"
        )
    for tag in buffer.tags:
        if not 0 <= buffer.time - tag.version <= buffering.table.max_staleness:
            raise RemoteProtocolError(
                f"the update of client {tag.owner} is {buffer.time - tag.version} buffers stale; "
                f"allowed are 0 to tau_max = {buffering.table.max_staleness}"
            )
    weights = buffering.weights(buffer.time, (tag.version for tag in buffer.tags))
    if max(weights) > buffering.max_ratio * min(weights):
        raise RemoteProtocolError(
            f"weights from {min(weights)} to {max(weights)} exceed the ratio "
            f"R = {buffering.max_ratio}: the sum would hardly hide the heavy ones"
        )
    together = buffering.per_weight(round_.settings.parameters)
    fewest = min(Counter(weights).values())
    if fewest < together:
        raise RemoteProtocolError(
            f"strict mode: fewer than T + 2 = {together} owners share a weight, so the low bits "
            "of the sum would tell something about them"
        )
    if round_.settings.has_short_keys and fewest < minimum:
        raise RemoteProtocolError(
            f"a weight that {fewest} owners share is refused: short keys tell the sum of every "
            f"weight apart, and this client demands {minimum} owners; take constant staleness"
        )
    return weights


def sum_terms(buffer: SumRequest, weights: Iterable[int]) -> tuple[Term, ...]:
    """The masks of a buffer's uploads, and how often each counts."""
    return tuple(
        Term(MaskRef(tag.owner, tag.serial), weight)
        for tag, weight in zip(buffer.tags, weights, strict=True)
    )


class Waiting(Protocol):
    """An upload in front of the buffer."""

    @property
    def owner(self) -> int:
        """Whose it is."""

    @property
    def version(self) -> int:
        """t_i"""


AnyWaiting = TypeVar("AnyWaiting", bound=Waiting)


def choose_updates(
    waiting: Iterable[AnyWaiting], size: int, weight: Callable[[int], int], rules: Rules
) -> list[AnyWaiting]:
    """The next buffer: at most `size` uploads that clients will accept together, oldest first.

    One per owner; a second one waits for the next buffer. Where updates need company any of an
    owner's, or a stale one that finds none would keep back the fresh ones behind it for ever.

    * `waiting`: in the order of arrival.
    * `weight`: version -> weight at the buffer's time.
    """
    firsts: dict[int, dict[_Class, AnyWaiting]] = {}  # owner -> class -> its oldest upload
    for upload in waiting:
        mine = firsts.setdefault(upload.owner, {})
        if rules.together > 1 or not mine:
            mine.setdefault(rules.class_of(upload.version, weight(upload.version)), upload)
    classes: dict[_Class, list[AnyWaiting]] = {}
    for mine in firsts.values():
        for name, upload in mine.items():
            classes.setdefault(name, []).append(upload)
    classes = {name: group for name, group in classes.items() if len(group) >= rules.together}
    ranges = [
        {name: group for name, group in classes.items() if low <= name[0] <= rules.max_ratio * low}
        for low, *_ in classes
    ]
    best = max(ranges, key=_count_owners, default={})
    if rules.together > 1:
        return _whole_groups(best, size, rules.together)
    return [each for mine in firsts.values() for name, each in mine.items() if name in best][:size]


def _count_owners(groups: Mapping[_Class, list[AnyWaiting]]) -> int:
    return len({upload.owner for group in groups.values() for upload in group})


def _whole_groups(
    groups: Mapping[_Class, list[AnyWaiting]], size: int, least: int
) -> list[AnyWaiting]:
    """At most `size` uploads, of each class none or at least `least`; large groups first."""
    taken: list[list[AnyWaiting]] = []
    owners: set[int] = set()
    for group in sorted(groups.values(), key=len, reverse=True):
        others = [upload for upload in group if upload.owner not in owners]
        room = sum(map(len, taken)) < size and least * (len(taken) + 1) <= size
        if room and len(others) >= least:
            taken.append(others)
            owners.update(upload.owner for upload in others)
    spare = size - least * len(taken)
    chosen: list[AnyWaiting] = []
    for group in taken:
        share = group[: least + spare]
        spare -= len(share) - least
        chosen += share
    return chosen

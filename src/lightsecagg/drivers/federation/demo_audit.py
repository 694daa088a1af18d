"""What the processes of a demonstration have written down, and whether the sums are right.

Its clients ALSO write their plain updates into a local folder; no real client does that. Whoever
may be killed notes at once what it does: from these notes `audit` finds what became of every
update, and whether anything has happened that must not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.session.in_progress import GOES_ON, IS_OVER

_SAYS_NOT_HOW = {IS_OVER.format(mode="epoch")}
"""What whoever was away when an epoch ended is told."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A secure average beside the plain one."""

    difference: float
    """The largest, of any entry."""
    bound: float
    """What rounding may do to an entry."""
    exact: bool
    """Whether it is the average of the same samples, but for rounding."""


def versions_of(record: dict[str, Any]) -> list[int]:
    """Of the model that each update was trained from; in a round all from the same."""
    return record["versions"] or [record["round"]] * len(record["included"])


def compare(record: dict[str, Any], notes: Path) -> Comparison:
    """A round, or a buffer with the staleness of its updates, and what its clients have written."""
    number, included = record["round"], record["included"]
    with np.load(notes / f"average-{number}.npz") as secure:
        average = secure["average"]
    weights = record["weights"] or [1] * len(included)
    total, samples = np.zeros(average.size), 0
    for client, version, weight in zip(included, versions_of(record), weights, strict=True):
        with np.load(notes / f"update-{version}-{client}.npz") as plain:
            counted = weight * int(plain["samples"])
            total += counted * plain["vector"].astype(np.float64)
        samples += counted
    difference = float(np.abs(average - total / samples).max())
    # Each client's rounding moves an entry by less than one step per weight, noise by its bound.
    bound = (sum(weights) + record["noise"]) * record["quantisation_step"] / samples
    return Comparison(difference, bound, difference <= bound and samples == record["samples"])


@dataclass(frozen=True, slots=True)
class Audit:
    """What must not happen, and what may: numbers of updates, buffers and masks."""

    acknowledged: int
    """Updates that the server has promised to keep."""
    summed: int
    unheard: int
    """Summed beside these; their owners were killed before they heard of it, for example."""
    refused: int
    """Not taken and not acknowledged, because the epoch had closed or their mask was unknown."""
    dropped: int
    """Too stale, without company of their model, or pushed out by newer ones of their owner."""
    in_failed_buffers: int
    """Of which too few clients were left to answer."""
    stranded: int
    """In epochs that could not go on: of which too few clients had a memory, for example."""
    waiting: int
    """When the federation ended."""
    left_behind: int
    """In epochs that ended in order, with too few of them for a buffer: must be 0, as all below."""
    lost: int
    """None of these."""
    wrong: int
    """Sums that are not the weighted sum of the plain updates."""
    summed_twice: int
    masks_used_twice: int
    changed: int
    """Buffers that were announced in two versions."""

    @property
    def clean(self) -> bool:
        """Whether nothing has happened that must not."""
        bad = (self.left_behind, self.lost, self.wrong, self.summed_twice, self.masks_used_twice)
        return not any(bad) and not self.changed


def audit(
    records: list[dict[str, Any]],
    compared: list[Comparison],
    notes: list[dict[str, Any]],
    *,
    least: int,
    drops: bool = False,
) -> Audit:
    """What became of every update.

    * `least`: so many of them suffice for a buffer.
    * `drops`: updates without company of their model are dropped (S56). Who was killed before the
      end of its epoch may not have heard of it, though it is back and hears the end.
    """
    sums = [
        (record["epoch"], *term)
        for record in records
        for term in zip(record["included"], versions_of(record), strict=True)
    ]
    summed = set(sums)
    uploads = {_mask(note): note for note in notes if note["what"] == "upload"}
    digests = [(_mask(note), note["digest"]) for note in notes if note["what"] == "upload"]
    stored = {_mask(note): note.get("time", 0.0) for note in notes if note["what"] == "stored"}
    starts = [(note["client"], note["time"]) for note in notes if note["what"] == "started"]
    dropped = {_mask(note) for note in notes if note["what"] == "dropped"}
    heard_the_end = {
        (note["epoch"], note["client"]): note.get("time", math.inf)
        for note in notes
        if note["what"] == "over"
    }
    announced = {
        (note["epoch"], note["at"], tuple(map(tuple, note["terms"])))
        for note in notes
        if note["what"] == "announced"
    }
    announced_masks = {(epoch, *term) for epoch, _, terms in announced for term in terms}
    endings: defaultdict[int, set[str | None]] = defaultdict(set)
    for note in notes:
        if note["what"] == "over" and note["aborted"] != GOES_ON.format(mode="epoch"):
            endings[note["epoch"]].add(note["aborted"])
    last = max(((epoch, at) for epoch, at, _ in announced), default=None)
    in_flight = {
        (epoch, *term) for epoch, at, terms in announced for term in terms if (epoch, at) == last
    }

    def was_away(owner: int, since: float, epoch: int) -> bool:
        end = heard_the_end.get((epoch, owner))
        return end is None or any(c == owner and since < when < end for c, when in starts)

    fates: Counter[str] = Counter()
    for mask in uploads.keys() - stored.keys():
        is_summed = (*mask[:2], uploads[mask]["version"]) in summed
        fates["unheard"] += is_summed
        fates["refused"] += mask in dropped and not is_summed
    left: defaultdict[int, list[int]] = defaultdict(list)
    for mask in stored:
        epoch, owner, _ = mask
        if (epoch, owner, uploads[mask]["version"]) in summed:
            fates["summed"] += 1
        elif mask in in_flight:
            fates["waiting"] += 1
        elif mask in announced_masks:
            fates["in_failed_buffers"] += 1
        elif mask in dropped or (drops and was_away(owner, stored[mask], epoch)):
            fates["dropped"] += 1
        else:
            left[epoch].append(owner)
    for epoch, owners in left.items():
        if epoch not in endings or epoch == max(endings):
            fates["waiting"] += len(owners)
        elif endings[epoch] - _SAYS_NOT_HOW and None not in endings[epoch]:
            fates["stranded"] += len(owners)
        else:
            fates["left_behind" if len(set(owners)) < least else "lost"] += len(owners)
    kinds = ("summed", "unheard", "refused", "dropped", "in_failed_buffers", "stranded")
    return Audit(
        acknowledged=len(stored),
        wrong=sum(not each.exact for each in compared),
        summed_twice=len(sums) - len(summed),
        masks_used_twice=several(digests),
        changed=several(((epoch, at), terms) for epoch, at, terms in announced),
        **{kind: fates[kind] for kind in (*kinds, "waiting", "left_behind", "lost")},
    )


def several(found: Iterable[tuple[Hashable, Hashable]]) -> int:
    """How many things have more than one value, where each must have one at most."""
    return sum(count > 1 for count in Counter(thing for thing, _ in set(found)).values())


def _mask(note: dict[str, Any]) -> tuple[int, int, int]:
    return note["epoch"], note["client"], note["serial"]

"""What a server's driver has kept of the rounds before, and a round brought back from it (R31).

U1 is a function of the uploads: whoever hands the stored ones to a new party, in any order, sees
the same set again, and refuses to go on if it is another than the one that was announced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightsecagg.errors import JournalError
from lightsecagg.foreign import explain
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import (
    Output,
    Persist,
    ServerParty,
    SurvivorsChosen,
    UploadTaken,
)
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.messages import MaskedUpload, Roster, SharesClosed
from lightsecagg.protocol.registry import resumed_server_party
from lightsecagg.protocol.settings import Settings


@dataclass(frozen=True, slots=True)
class UnfinishedRound:
    """A round that a crash cut short."""

    number: int
    promised: PromisedRound | None
    """None: nothing was promised in it, so it may be dropped."""
    allow_list: AllowList | None = None
    """The one that it began with; None if that is lost, and the round with it."""


@dataclass(frozen=True, slots=True)
class PromisedRound:
    """What is stored of a round in which an upload was acknowledged."""

    settings: Settings
    roster: Roster
    closed: SharesClosed
    uploads: Iterable[tuple[int, MaskedUpload, Upload]] = field(repr=False)
    """Client, upload, and where it is read from; asked for one after the other, once."""
    survivors: tuple[int, ...] | None
    """U1 if it was announced."""


@dataclass(frozen=True, slots=True)
class Past:
    """What the driver has kept of the rounds before."""

    next_round: int = 1
    """A number that was never used."""
    completed: int = 0
    uploaders: dict[int, int] = field(default_factory=dict)
    """Client -> the latest round that is over and in which its upload was stored."""
    summed: dict[int, int] = field(default_factory=dict)
    """The same, of those whose upload is in that round's sum."""
    announced: tuple[int, ...] | None = None
    """The latest U1, if it was for the current model and its round has failed."""
    unfinished: Sequence[UnfinishedRound] = ()
    enough: str | None = None
    """Why no other round is wanted, if so."""


@dataclass(slots=True)
class BroughtBack:
    """A round that goes on."""

    party: ServerParty
    stored: list[int] = field(default_factory=list)
    """Whose uploads count."""
    refused: dict[int, str] = field(default_factory=dict)
    """Whose do not, and why: the party takes them no more."""
    outputs: list[Output] = field(default_factory=list)
    """What the party asks for."""


def bring_back(promised: PromisedRound, allow_list: AllowList) -> BroughtBack:
    """The party of a round that a crash cut short, with its uploads and, if announced, its U1."""
    party = resumed_server_party(promised.settings, allow_list, promised.roster, promised.closed)
    back = BroughtBack(party)
    for client, upload, where in promised.uploads:
        try:
            for output in party.receive(client, upload):
                if isinstance(output, Persist) and isinstance(output.record, UploadTaken):
                    back.outputs += party.stored(output.record, where)
            back.stored.append(client)
        except Exception as error:
            # What no one foresaw counts as a refusal, or every restart would end here (S41).
            back.refused[client] = explain(error)
    if promised.survivors is not None:
        if not any(_chooses(output) for output in back.outputs):
            back.outputs += party.proceed()
        if Persist(SurvivorsChosen(promised.survivors)) not in back.outputs:
            raise JournalError(
                f"round {promised.settings.round}: the stored uploads do not give the survivor set "
                "that was announced; refusing to announce another"
            )
    return back


def _chooses(output: Output) -> bool:
    return isinstance(output, Persist) and isinstance(output.record, SurvivorsChosen)

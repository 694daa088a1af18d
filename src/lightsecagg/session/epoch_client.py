"""A client's end of a federation in the asynchronous mode: it trains, uploads and answers.

Theory of operation. A client is in at most one epoch, the latest that the server has opened with
it; how it greets, follows, withdraws and leaves is the synchronous session's business (`client`).
Within an epoch three things go on, none of which waits for the others:

    training   it asks for a newer model than it last trained from, and trains
    uploads    what is trained is masked and uploaded, one acknowledgement after the other
    masks      half as many as peers keep are shared ahead, so that an upload waits for none, and
               again when half of these are used

and it answers for buffers whenever it is asked. Its secrets live in memory: a restarted client
can upload and answer for nothing that it has before, and joins the next epoch. Storing them
instead would mean to write all the shares that it keeps, megabytes, before every message. What
it has spent, and for whom it has answered, is in its ledger.

Versions of the model go on from epoch to epoch, and so does training: an update that is ready
after its epoch has ended is uploaded in the next.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial

from lightsecagg.errors import RemoteProtocolError
from lightsecagg.foreign import shown
from lightsecagg.protocol.interface import (
    SERVER,
    ClientParty,
    NeedInput,
    Output,
    RoundAborted,
    Update,
)
from lightsecagg.protocol.messages import MaskedUpload, Message, UploadDropped
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.registry import client_party
from lightsecagg.protocol.settings import Settings, version_hash
from lightsecagg.session import interface as session
from lightsecagg.session.client import ClientSession, Round
from lightsecagg.session.envelope import (
    AnyControl,
    EpochBegins,
    EpochCloses,
    Fetch,
    MasksKnown,
    RoundModel,
    Version,
    Withdraw,
    pack_control,
)


@dataclass(frozen=True, slots=True)
class _Trained:
    """An update, or the training that is to lead to one."""

    version: int
    model: bytes
    """Hash of the model, computed here."""
    instructions: bytes
    """Hash of how it was told to train."""
    update: Update | None = field(default=None, repr=False)


class EpochClientSession(ClientSession[ClientParty]):
    """Takes part in epochs until the server says goodbye; see the theory of operation."""

    _work: _Trained | None = None
    _newest = -1
    """The version that it last trained from."""
    _fetching = False
    _clear = False
    """Whether server and client agree on which masks there are."""
    _closes = False
    """Whether the epoch takes no more uploads."""
    _unacknowledged = -1
    """The serial of the upload that is not acknowledged."""

    @property
    def _ahead(self) -> int:
        """Masks that it keeps shared before they are needed."""
        if self._policy.buffering is None:
            raise AssertionError("the asynchronous mode needs a policy with buffering")
        return max(1, self._policy.buffering.stock // 2)

    # -- events --------------------------------------------------------------------------------

    def _take(self, event: session.Event, now: float) -> None:
        match event:
            case session.Connected():
                # A server that was restarted meanwhile may keep the epoch open; else it says so.
                self._clear = self._fetching = self._closes = False
                super()._take(event, now)
            case session.Trained(version, update):
                self._on_update(version, update)
            case session.TrainingFailed(version, reason):
                if self._work is not None and self._work.version == version:
                    self._miss(version, reason)
                    self._go_on()
            case session.TrainingRefused(version, reason):
                # Instructions are the epoch's: it will refuse those of any other version too.
                if self._work is not None and self._work.version == version:
                    self._work = None
                    super()._take(session.TrainingRefused(self.round, reason), now)
            case _:
                super()._take(event, now)

    def _on_control(self, content: AnyControl) -> None:
        match content:
            case EpochBegins():
                self._begin_epoch(content)
            case EpochCloses(number):
                self._closes = self._round is not None and self._round.number == number
            case Version():
                self._on_version(content)
            case MasksKnown(number):
                if self._round is not None and self._round.number == number:
                    self._compare_masks(self._round, content)
            case RoundModel(number):
                reason = "this client takes part in epochs; its file has [buffering]"
                self._warn("the server runs rounds: %s", reason)
                self._post(pack_control(Withdraw(number, reason)))

    # -- an epoch ------------------------------------------------------------------------------

    def _begin_epoch(self, message: EpochBegins) -> None:
        self._abandon("another epoch has begun")
        self._clear = self._fetching = self._closes = False
        self._unacknowledged = -1
        self._tell("epoch %d begins", message.round)
        self._enter(message.round, session.Announcement(b"", message.instructions), 0.0)

    def _check_announcement(self, settings: Settings, round_: Round[ClientParty]) -> None:
        if settings.round != round_.number:
            raise RemoteProtocolError(
                f"the server announced epoch {round_.number} and opens {settings.round}"
            )
        round_.bound = settings.quantizer.bound

    def _party_of(self, policy: Policy, round_: Round[ClientParty]) -> ClientParty:
        return client_party(self.client, self._identity, policy, self._ledger)

    def _release(self, round_: Round[ClientParty], outputs: list[Output]) -> None:
        super()._release(round_, outputs)
        for output in outputs:
            match output:
                case NeedInput():
                    self._clear = True
                case RoundAborted(reason) if self._round is round_:
                    self._abandon(reason)

    def _note_upload(self, round_: Round[ClientParty], message: Message, size: int) -> None:
        if not isinstance(message, MaskedUpload):
            raise AssertionError("the party of an epoch uploads under tags")
        self._unacknowledged = message.tag.serial
        version = message.tag.version
        self._tell("uploads its masked update of version %d, %d bytes", version, size)

    def _acknowledged(self, epoch: Round[ClientParty]) -> None:
        if epoch.unacknowledged is not None:
            self.rounds += 1
        epoch.unacknowledged, self._unacknowledged = None, -1

    def _compare_masks(self, epoch: Round[ClientParty], known: MasksKnown) -> None:
        """After a reconnection: masks and uploads may have been lost on their way."""
        party = epoch.party
        if party is None or not party.is_registered:
            return  # it lacks the roster, which comes next
        ready, waiting = party.serials
        if lost := [serial for serial in ready if serial not in known.ready]:
            self._tell("shares of %d masks were lost on their way", len(lost))
            party.discard(lost)
        if self._unacknowledged in known.waiting:
            self._acknowledged(epoch)
        for serial in waiting:
            if serial not in known.waiting and serial != self._unacknowledged:
                party.receive(SERVER, UploadDropped(serial))
        if epoch.unacknowledged is not None:
            self._post(epoch.unacknowledged)
        self._clear = True
        self._go_on()

    def _end(self, round_: Round[ClientParty], aborted: str | None) -> None:
        number, party = round_.number, round_.party
        self._tell("epoch %d has ended%s", number, f": {shown(aborted)}" if aborted else "")
        if party is not None and (left := len(party.serials[1])):
            self._tell("updates that it gave and saw in no buffer: %d", left)
        self._leave(round_, "the epoch is over")
        self._emit(session.RoundLeft(number, round_.uploaded, aborted and shown(aborted)))

    # -- what goes on within it ----------------------------------------------------------------

    def _follow(self, round_: Round[ClientParty]) -> None:
        self._go_on()

    def _go_on(self) -> None:
        """Upload, share masks, ask for a model: whatever can be done now."""
        epoch = self._round
        party = None if epoch is None else epoch.party
        if epoch is None or party is None or not (self._clear and party.is_registered):
            return
        if self._silent_since is None:
            return
        if self._unacknowledged not in party.serials[1]:
            # It was dropped, and never stored: there is nothing to acknowledge.
            if epoch.unacknowledged is not None:
                self._tell("the server has not taken its update, which is spent all the same")
            epoch.unacknowledged, self._unacknowledged = None, -1
        if self._work is not None and self._work.instructions != epoch.instructions:
            self._miss(self._work.version, "the server asks for other settings in this epoch")
        self._upload_next(epoch, party)
        missing = min(party.room, self._ahead - party.stock)
        # Several at a time: what is relayed and stored of them is by the bundle, not by the mask.
        if missing > 0 and party.stock <= (self._ahead - 1) // 2:
            self._release(epoch, party.restock(missing))
        if self._work is None and not self._fetching:
            self._fetching = True
            self._post(pack_control(Fetch(self._newest)))

    def _upload_next(self, epoch: Round[ClientParty], party: ClientParty) -> None:
        """Mask and upload what is trained, if a mask is ready and nothing is unacknowledged."""
        work = self._work
        if work is None or work.update is None or epoch.unacknowledged is not None:
            return
        if self._closes or not party.stock:
            return
        self._work = None
        mask = partial(party.set_input, version=work.version, model=work.model)
        reason = self._upload(epoch, work.version, work.update, mask)
        if reason is not None:
            self._miss(work.version, reason)

    def _miss(self, version: int, reason: str) -> None:
        """There will be no update from this version; the server hears nothing of it."""
        message = "client %d has no update of version %d: %s"
        self._emit(session.Log(logging.ERROR, message, (self.client, version, reason), SERVER))
        self._work = None

    def _on_version(self, message: Version) -> None:
        epoch = self._round
        party = None if epoch is None else epoch.party
        busy = self._work is not None or message.version <= self._newest
        if epoch is None or party is None or not self._clear or busy:
            return
        self._fetching, self._newest = False, message.version
        model = version_hash(message.model, message.version)
        try:
            self._release(epoch, party.take_model(model))
        except RemoteProtocolError as error:
            self._miss(message.version, str(error))
            self._go_on()
            return
        self._work = _Trained(message.version, model, epoch.instructions)
        self._tell("trains from version %d", message.version)
        announcement = session.Announcement(message.model, epoch.announcement.instructions)
        self._emit(session.Train(message.version, announcement, epoch.bound))

    def _on_update(self, version: int, update: Update) -> None:
        work = self._work
        if work is not None and work.version == version:
            self._work = replace(work, update=update)
            self._go_on()

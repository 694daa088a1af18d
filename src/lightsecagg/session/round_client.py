"""A client's end of a federation in synchronous rounds.

Theory of operation. How a client greets, follows and leaves is the business of `client`. It trains
while masks are shared, and uploads when both are done. A client that cannot take part says so: at
the opening, if its policy forbids it; where the upload would leave, if it has no update, whatever
the reason (S44). A round that is tried again gets the same update from the same model (S42), if
the server asks for it in the same words: with other instructions there is no update (S55).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from lightsecagg.errors import RemoteProtocolError
from lightsecagg.foreign import shown
from lightsecagg.protocol.interface import SERVER, ClientParty, Update
from lightsecagg.protocol.messages import Message
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.registry import client_party
from lightsecagg.protocol.settings import Settings, hash_model, version_hash
from lightsecagg.session import interface as session
from lightsecagg.session.client import ClientSession, Round
from lightsecagg.session.envelope import AnyControl, EpochBegins, RoundModel, Withdraw, pack_control

_NO_UPDATE = "it has no update to upload"
_TRAINED_OTHERWISE = "it has trained from this model already, by other instructions"


class RoundClientSession(ClientSession[ClientParty]):
    """Takes part in rounds until the server says goodbye; see the theory of operation."""

    _trained: _Trained | None = None
    """What it has made of the latest model."""
    _announced = -1
    """The newest round that the server has announced."""

    def _take(self, event: session.Event, now: float) -> None:
        match event:
            case session.Trained(number, update):
                self._on_trained(number, update)
            case session.TrainingFailed(number, reason):
                if self._round is not None and self._round.number == number:
                    self._sit_out(self._round, reason)
            case _:
                super()._take(event, now)

    def _on_control(self, content: AnyControl) -> None:
        match content:
            case RoundModel():
                self._begin(content)
            case EpochBegins(number):
                reason = "this client takes part in rounds; its file has no [buffering]"
                self._warn("the server runs the asynchronous mode: %s", reason)
                self._post(pack_control(Withdraw(number, reason)))
            case _:
                self._warn("the server runs the asynchronous mode")

    def _begin(self, message: RoundModel) -> None:
        if message.round <= self._announced:
            # Training of the round that had this number would end in this one (S55).
            text = "round %d is announced after round %d, and not begun"
            self._warn(text, message.round, self._announced)
            return
        self._announced = message.round
        self._abandon("another round has begun")
        announcement = session.Announcement(message.model, message.instructions)
        source = f" from a model of {len(message.model) // 4} entries" if message.model else ""
        self._tell("round %d begins%s", message.round, source)
        round_ = self._enter(message.round, announcement, message.bound)
        if round_ is None:
            return
        known = self._known(round_)
        if known is not None and known.instructions != round_.instructions:
            self._sit_out(round_, _TRAINED_OTHERWISE)
            return
        update = None if known is None else known.update
        self._emit(session.Train(message.round, announcement, message.bound, update))
        if update is not None:
            self._tell("round %d: its update from this model is used again", message.round)

    def _known(self, round_: Round[ClientParty]) -> _Trained | None:
        """What it has made of this model, for this bound, already.

        A repeat must bring the same update, and not every processor computes it twice (S42). But
        a round is announced before clients compare what they were told. If an update that was
        trained by other instructions were used again, a server could have it trained in a round
        that it never opens, and tell everybody the same in the next (S55).
        """
        trained, model = self._trained, round_.announcement.model
        if not model or trained is None or trained.task != (hash_model(model), round_.bound):
            return None
        return trained

    def _on_trained(self, number: int, update: Update) -> None:
        round_ = self._round
        if round_ is None or round_.number != number:
            return
        if self._known(round_) is None:
            task = hash_model(round_.announcement.model), round_.bound
            self._trained = _Trained(task, round_.instructions, update)
        round_.update = update
        self._hand_over(round_)

    def _follow(self, round_: Round[ClientParty]) -> None:
        self._hand_over(round_)
        self._withdraw_when_due(round_)

    def _hand_over(self, round_: Round[ClientParty]) -> None:
        """Mask and upload, once there is an update and the party wants it."""
        if round_.update is None or not round_.needs_input or round_.party is None:
            return
        update, round_.update, round_.needs_input = round_.update, None, False
        reason = self._upload(round_, round_.number, update, round_.party.set_input)
        if reason is not None:
            self._sit_out(round_, reason)

    def _sit_out(self, round_: Round[ClientParty], reason: str) -> None:
        message = "client %d sits round %d out: %s"
        self._emit(
            session.Log(logging.ERROR, message, (self.client, round_.number, reason), SERVER)
        )
        round_.without_update = True
        self._withdraw_when_due(round_)

    def _withdraw_when_due(self, round_: Round[ClientParty]) -> None:
        """Withdraw where the upload would leave, at the same moment and always in the same words.

        Had the server not closed sharing, it would not have heard of an update either. So it
        learns that there is none only in a round that goes on to its uploads, and never why: a
        bound that was exceeded, NaN, a failure, a vector that is spent (S44).
        """
        due = round_.party is not None and round_.party.upload_is_due
        if round_.without_update and due and self._round is round_:
            self._withdraw(round_, _NO_UPDATE)

    def _check_announcement(self, settings: Settings, round_: Round[ClientParty]) -> None:
        """The opening must say what came with the model, which training has begun with (S44).

        Scalars that ride along an update are scaled to the announced bound. If another one were
        compared with them, a server could search for their size.
        """
        opened, bound = settings.round, settings.quantizer.bound
        if (opened, bound) != (round_.number, round_.bound):
            raise RemoteProtocolError(
                f"the server announced round {round_.number} with bound {round_.bound} and opens "
                f"round {opened} with bound {bound}"
            )

    def _party_of(self, policy: Policy, round_: Round[ClientParty]) -> ClientParty:
        model = version_hash(round_.announcement.model, round_.number)
        return client_party(self.client, self._identity, replace(policy, model=model), self._ledger)

    def _note_upload(self, round_: Round[ClientParty], message: Message, size: int) -> None:
        self._tell("round %d: uploads its masked update, %d bytes", round_.number, size)

    def _end(self, round_: Round[ClientParty], aborted: str | None) -> None:
        number, included = round_.number, aborted is None and round_.uploaded
        if aborted is not None:
            self._tell("round %d was aborted: %s", number, shown(aborted))
        elif included:
            self.rounds += 1
            self._tell("round %d is done, with this client's update", number)
        else:
            self._tell("round %d is done, without this client", number)
        self._leave(round_, "the round is over")
        self._emit(session.RoundLeft(number, included, aborted and shown(aborted)))


@dataclass(frozen=True, slots=True)
class _Trained:
    """An update, and what it was asked for by."""

    task: tuple[bytes, float]
    """The hash of the model, and the bound."""
    instructions: bytes
    update: Update = field(repr=False)

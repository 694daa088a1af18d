"""A client's end of a federation, whatever its mode: it greets, takes part and withdraws.

Theory of operation. A client has at most one round, the latest that the server announced; what
belongs to any other is ignored. Its secrets live in memory, so a restarted client is a dropout of
the current round and joins the next; it can never answer twice. What it has spent is in its ledger,
which is stored before anything leaves that it accounts for. A client that merely lost its
connection greets with the number of its round, its party alive, and sends again what was not
acknowledged when the server asks again.

What it does in a round is the business of `round_client`; in the asynchronous mode a round is an
epoch (`epoch_client`).

Whatever the server sends, the session ends only by a goodbye, or by giving up a server that says
nothing (S29, S41, R35). A client that cannot take part in a round says so and waits for the next.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import Aborted, DecodeError, LightSecAggError
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import clip_to_bound
from lightsecagg.foreign import explain, shown, where
from lightsecagg.protocol.interface import (
    SERVER,
    ClientParty,
    NeedInput,
    Output,
    Persist,
    RoundAborted,
    Send,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    MaskedUpload,
    Message,
    Opening,
    Roster,
    SharesClosed,
    SumRequest,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg.session import interface as session
from lightsecagg.session.envelope import (
    MAX_SEEN,
    VERSION,
    AnyControl,
    Fetch,
    Goodbye,
    Hello,
    NewMembers,
    RoundOver,
    UploadStored,
    Withdraw,
    pack_control,
    protocol_head,
    unpack,
)

AnyParty = TypeVar("AnyParty", bound=ClientParty)


@dataclass(slots=True)
class Round(Generic[AnyParty]):
    """The round, or the epoch, that this client is in."""

    number: int
    announcement: session.Announcement
    bound: float
    party: AnyParty | None = None
    """Made when the opening tells which protocol is spoken."""
    codec: Codec | None = None
    weighted: bool = False
    update: Update | None = field(default=None, repr=False)
    """Trained, and not yet asked for."""
    needs_input: bool = False
    without_update: bool = False
    """There is nothing to upload, which the server hears when the upload is due."""
    uploaded: bool = False
    unacknowledged: bytes | None = field(default=None, repr=False)
    """The masked upload, until the server has stored it."""

    @property
    def instructions(self) -> bytes:
        asked = self.announcement.instructions
        return b"" if asked is None else asked.digest


class ClientSession(ABC, Generic[AnyParty]):
    """Takes part in a federation until the server says goodbye; see the theory of operation."""

    def __init__(
        self,
        client: int,
        identity: IdentityKey,
        policy: Policy,
        ledger: Ledger,
        *,
        patience: float,
        clip: bool = False,
        edition: int = 0,
    ) -> None:
        """`ledger` is this client's memory of the federation, the same one after a restart.

        * `patience`: seconds of silence of a connected server after which the client gives up;
        * `clip`: entries of an update beyond the bound are cut to it; else the round is missed;
        * `edition`: the number of the policy's allow-list, where lists have one.
        """
        self.client = client
        self.rounds = 0
        """Rounds that were completed with this client's update."""
        self._identity, self._policy, self._ledger = identity, policy, ledger
        self._patience, self._clip, self._edition = patience, clip, edition
        self._effects: list[session.Effect] = []
        self._round: Round[AnyParty] | None = None
        self._unremembered = -1
        """A round with an upload of this client's of which its ledger knows nothing."""
        self._ended = False
        self._silent_since: float | None = None
        """Since when a connected server has said nothing."""

    # -- the driver's side ---------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """See `Session.deadline`."""
        silent = self._silent_since
        return session.NEVER if silent is None or self._ended else silent + self._patience

    @property
    def round(self) -> int:
        """The round whose party is alive here; -1 for none."""
        return -1 if self._round is None else self._round.number

    def start(self, now: float) -> list[session.Effect]:
        """See `Session.start`: a client begins when it is connected."""
        return []

    def handle(self, event: session.Event, now: float) -> list[session.Effect]:
        """See `Session.handle`."""
        if self._ended:
            return []
        try:
            self._take(event, now)
        except Exception as error:
            # Whatever the server's bytes do here, they cost this client a round at most (S41).
            self._warn("cannot follow the server: %s", explain(error))
            if self._round is not None:
                self._withdraw(self._round, "this client cannot follow")
        return self._taken()

    def tick(self, now: float) -> list[session.Effect]:
        """See `Session.tick`."""
        if now >= self.deadline:
            error = Aborted(
                f"the server said nothing for {self._patience:g} s; "
                "[client] patience is how long this client waits"
            )
            self._abandon("the server says nothing")
            self._finish(None, error)
        return self._taken()

    def _taken(self) -> list[session.Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _take(self, event: session.Event, now: float) -> None:
        match event:
            case session.Connected():
                self._silent_since = now
                seen = min(self._ledger.last_round, MAX_SEEN)
                self._post(pack_control(Hello(VERSION, self.round, self._edition, seen)))
                self._tell("connected")
            case session.Disconnected():
                self._silent_since = None
            case session.Received(_, data):
                self._silent_since = now
                self._on_message(data)
            case session.TrainingRefused(number, reason):
                if self._round is not None and self._round.number == number:
                    self._warn("round %d: %s", number, reason)
                    self._withdraw(self._round, reason)
            case session.StoreFailed(_, reason):
                if self._round is not None:
                    self._warn("round %d: %s", self._round.number, reason)
                    # The name of a file is nobody else's business.
                    self._withdraw(self._round, "its ledger cannot be written")
            case session.MembersChanged(members):
                self._use_members(members)
            case session.Stop():
                self._abandon("the client stopped")
                self._finish(None, None)

    def _on_message(self, data: bytes | memoryview) -> None:
        try:
            content = unpack(data)
        except DecodeError as error:
            self._warn("%s", error)
            return
        match content:
            case NewMembers(signed):
                self._emit(session.TakeMembers(signed))
            case UploadStored(number, summed):
                self._unremembered = number if number > self._ledger.last_round else -1
                if summed:  # kept with the ledger's next change; the server says it every time
                    self._ledger.spend_upload(number)
                if self._round is not None and self._round.number == number:
                    self._acknowledged(self._round)
                    self._follow(self._round)
            case RoundOver(number, aborted):
                if self._round is not None and self._round.number == number:
                    self._end(self._round, aborted)
            case Goodbye(reason, finished):
                self._on_goodbye(reason, finished)
            case (number, body):
                if self._round is not None and self._round.number == number:
                    self._on_protocol(self._round, body)
            case Hello() | Withdraw() | Fetch():
                self._warn("the server speaks like a client")
            case _:
                self._on_control(content)

    def _use_members(self, members: session.Members) -> None:
        """Later rounds are of these members; the one under way keeps those it began with."""
        self._policy = replace(self._policy, allow_list=members.allow_list)
        self._edition, count = members.number, len(members.allow_list)
        self._tell("allow-list number %d is in use, with %d clients", members.number, count)

    # -- what each mode does in its own way ----------------------------------------------------

    @abstractmethod
    def _on_control(self, content: AnyControl) -> None:
        """What servers of one mode only say."""

    @abstractmethod
    def _check_announcement(self, settings: Settings, round_: Round[AnyParty]) -> None:
        """Refuse an opening that says something else than was announced."""

    @abstractmethod
    def _party_of(self, policy: Policy, round_: Round[AnyParty]) -> AnyParty:
        """A party for this round."""

    @abstractmethod
    def _follow(self, round_: Round[AnyParty]) -> None:
        """Do what can be done, now that the server has spoken."""

    @abstractmethod
    def _note_upload(self, round_: Round[AnyParty], message: Message, size: int) -> None:
        """A masked update leaves."""

    @abstractmethod
    def _end(self, round_: Round[AnyParty], aborted: str | None) -> None:
        """The server says that the round is over."""

    # -- a round -------------------------------------------------------------------------------

    def _enter(
        self, number: int, announcement: session.Announcement, bound: float
    ) -> Round[AnyParty] | None:
        """The server begins a round; None if this client sits it out.

        It does as long as its ledger does not know what is spent.
        """
        self._round = Round(number, announcement, bound)
        self._emit(session.RoundBegan(number))
        if self._unremembered > self._ledger.last_round:
            self._warn(
                "the server has stored an upload of this client's in round %d, but its ledger's "
                "latest round is %d: the ledger is new, or an older copy, and does not know what "
                "is spent. Restore the newest; if it is lost, see `lightsecagg ledger accept-loss`",
                self._unremembered,
                self._ledger.last_round,
            )
            self._withdraw(self._round, "its ledger is older than its latest upload")
        return self._round

    def _on_protocol(self, round_: Round[AnyParty], body: memoryview) -> None:
        unacknowledged = round_.unacknowledged
        message: Message | None = None
        try:
            message = self._decode(round_, body)
            if round_.party is None:
                return
            outputs = round_.party.receive(SERVER, message)
        except LightSecAggError as error:
            self._warn("round %d: %s", round_.number, error)
            final = isinstance(message, Opening | Roster | SumRequest)  # no other will come
            if round_.party is None or final:
                self._withdraw(round_, str(error))
            return
        self._release(round_, outputs)
        if unacknowledged is not None and isinstance(message, Opening | SharesClosed):
            # The server asks again: the upload was lost with the connection.
            self._post(unacknowledged)
        self._follow(round_)

    def _withdraw(self, round_: Round[AnyParty], reason: str) -> None:
        """Sit this round out, and tell the server, which would wait until its deadline."""
        self._post(pack_control(Withdraw(round_.number, reason[:500])))
        self._abandon(reason)

    def _decode(self, round_: Round[AnyParty], body: memoryview) -> Message:
        """Decode; an opening also makes the party that speaks its protocol."""
        if round_.codec is None:
            message = Codec(PrimeField(3)).decode(body)  # an opening holds no field element
            if not isinstance(message, Opening):
                raise DecodeError("a round begins with an opening")
            settings = Settings.from_bytes(message.settings)
            self._check_announcement(settings, round_)
            round_.codec, round_.weighted = Codec(settings.group), settings.quantizer.weighted
            round_.party = self._make_party(settings.protocol, round_)
            return message
        return round_.codec.decode(body)

    def _make_party(self, protocol: str, round_: Round[AnyParty]) -> AnyParty:
        if protocol not in self._policy.protocols:
            raise DecodeError(f"the server proposes {protocol}, which this client does not accept")
        instructions = round_.instructions
        policy = replace(self._policy, protocols=(protocol,), instructions=instructions)
        return self._party_of(policy, round_)

    def _upload(
        self,
        round_: Round[AnyParty],
        number: int,
        update: Update,
        mask: Callable[[Update], list[Output]],
    ) -> str | None:
        """Mask an update of this round, or version, and upload it; why not, if that fails."""
        try:
            update = self._prepared(update, round_)
            self._emit(session.Prepared(number, update))
            outputs = mask(update)
        except Exception as error:
            # Our own messages are free of secrets; those of foreign code may quote the data (S22).
            known = isinstance(error, LightSecAggError)
            return str(error) if known else f"its update fails with {where(error)}"
        self._release(round_, outputs)
        return None

    def _prepared(self, update: Update, round_: Round[AnyParty]) -> Update:
        """Clipped, as configured; that it was stays in the log here, it tells about the data.

        Where no counts are summed the count is 1 for everybody: refusing those who have another
        one would tell who they are.
        """
        vector, samples = update.vector, update.samples if round_.weighted else 1
        if self._clip:
            vector = clip_to_bound(vector, round_.bound)
            cut = vector is not update.vector
            if cut and not np.array_equal(vector, update.vector, equal_nan=True):
                self._tell("its update was cut to the bound")
        return Update(vector, samples)

    def _release(self, round_: Round[AnyParty], outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Send(_, message):
                    self._send(round_, message)
                case Persist(record):
                    self._emit(session.Store(round_.number, record))
                case NeedInput():
                    round_.needs_input = True
                case RoundAborted(reason):
                    round_.uploaded = False
                    self._tell("round %d: %s", round_.number, reason)

    def _send(self, round_: Round[AnyParty], message: Message) -> None:
        if round_.codec is None:
            raise AssertionError("a party has spoken, and nobody knows its field")
        data = round_.codec.encode(message, protocol_head(round_.number))
        if isinstance(message, MaskedUpload):
            round_.unacknowledged, round_.uploaded = data, True
            self._note_upload(round_, message, len(data))
        self._post(data)

    def _acknowledged(self, round_: Round[AnyParty]) -> None:
        """The server has stored the upload."""
        round_.unacknowledged = None

    def _abandon(self, reason: str) -> None:
        """Leave a round, if there is one, without seeing its end."""
        if self._round is not None:
            self._emit(session.RoundLeft(self._round.number, False, reason))
            self._leave(self._round, reason)

    def _leave(self, round_: Round[AnyParty], reason: str) -> None:
        """Forget the round and its secrets."""
        if round_.party is not None:
            round_.party.abort(reason)
        self._round = None

    # -- the end -------------------------------------------------------------------------------

    def _on_goodbye(self, reason: str, finished: bool) -> None:
        words = shown(reason)
        if finished:
            self._tell("goodbye: %s; rounds with its update: %d", words, self.rounds)
        self._abandon("the server said goodbye")
        self._finish(words, None if finished else Aborted(f"the server said goodbye: {words}"))

    def _finish(self, goodbye: str | None, error: LightSecAggError | None) -> None:
        self._ended = True
        self._emit(session.Finished(goodbye, error))

    # -- effects -------------------------------------------------------------------------------

    def _emit(self, effect: session.Effect) -> None:
        self._effects.append(effect)

    def _post(self, data: bytes) -> None:
        self._emit(session.Post(SERVER, data))

    def _warn(self, message: str, *arguments: object) -> None:
        self._log(logging.WARNING, message, arguments)

    def _tell(self, message: str, *arguments: object) -> None:
        """What goes well, for whoever watches."""
        self._log(logging.INFO, message, arguments)

    def _log(self, level: int, message: str, arguments: tuple[object, ...]) -> None:
        self._emit(session.Log(level, f"client %d: {message}", (self.client, *arguments), SERVER))

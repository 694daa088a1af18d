"""A client's end of a federation: it greets, takes part in rounds and withdraws from them.

Theory of operation. A client has at most one round, the latest that the server announced; what
belongs to any other is ignored. Its secrets live in memory, so a restarted client is a dropout of
the current round and joins the next; it can never answer twice. What it has spent is in its ledger,
which is stored before anything leaves that it accounts for. A client that merely lost its
connection greets with the number of its round, its party alive, and sends again what was not
acknowledged when the server asks again.

Whatever the server sends, the session ends only by a goodbye, or by giving up a server that says
nothing (S29, S41, R35). A client that cannot take part in a round says so and waits for the next
one: at the opening, if its policy forbids it; where the upload would leave, if it has no update,
whatever the reason (S44).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import numpy as np

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import Aborted, DecodeError, LightSecAggError, RemoteProtocolError
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
from lightsecagg.protocol.registry import client_party
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import (
    VERSION,
    EpochBegins,
    EpochCloses,
    Fetch,
    Goodbye,
    Hello,
    MasksKnown,
    NewMembers,
    RoundModel,
    RoundOver,
    UploadStored,
    Version,
    Withdraw,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.session.interface import (
    NEVER,
    Announcement,
    Connected,
    Disconnected,
    Effect,
    Event,
    Finished,
    Log,
    Members,
    MembersChanged,
    Post,
    Prepared,
    Received,
    RoundBegan,
    RoundLeft,
    Stop,
    Store,
    StoreFailed,
    TakeMembers,
    Train,
    Trained,
    TrainingFailed,
    TrainingRefused,
)

_NO_UPDATE = "it has no update to upload"
_Task = tuple[bytes, float]
"""The hash of a model and the bound: what decides an update."""


@dataclass(slots=True)
class Round:
    """The round that this client is in."""

    number: int
    announcement: Announcement
    bound: float
    party: ClientParty | None = None
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
    def task(self) -> _Task:
        return hash_model(self.announcement.model), self.bound

    @property
    def instructions(self) -> bytes:
        asked = self.announcement.instructions
        return b"" if asked is None else asked.digest


class ClientSession:
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
        self._effects: list[Effect] = []
        self._round: Round | None = None
        self._trained: tuple[_Task, Update, bytes] | None = None
        """From what, the update, and the hash of the instructions that it was trained by."""
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
        return NEVER if silent is None or self._ended else silent + self._patience

    @property
    def round(self) -> int:
        """The round whose party is alive here; -1 for none."""
        return -1 if self._round is None else self._round.number

    def start(self, now: float) -> list[Effect]:
        """See `Session.start`: a client begins when it is connected."""
        return []

    def handle(self, event: Event, now: float) -> list[Effect]:
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

    def tick(self, now: float) -> list[Effect]:
        """See `Session.tick`."""
        if now >= self.deadline:
            error = Aborted(
                f"the server said nothing for {self._patience:g} s; "
                "[client] patience is how long this client waits"
            )
            self._abandon("the server says nothing")
            self._finish(None, error)
        return self._taken()

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _take(self, event: Event, now: float) -> None:
        match event:
            case Connected():
                self._silent_since = now
                self._post(pack_control(Hello(VERSION, self.round, self._edition)))
                self._tell("connected")
            case Disconnected():
                self._silent_since = None
            case Received(_, data):
                self._silent_since = now
                self._on_message(data)
            case Trained(number, update):
                self._on_trained(number, update)
            case TrainingFailed(number, reason):
                if self._round is not None and self._round.number == number:
                    self._sit_out(self._round, reason)
            case TrainingRefused(number, reason):
                if self._round is not None and self._round.number == number:
                    self._warn("round %d: %s", number, reason)
                    self._withdraw(self._round, reason)
            case StoreFailed(_, reason):
                if self._round is not None:
                    self._warn("round %d: %s", self._round.number, reason)
                    # The name of a file is nobody else's business.
                    self._withdraw(self._round, "its ledger cannot be written")
            case MembersChanged(members):
                self._use_members(members)
            case Stop():
                self._abandon("the client stopped")
                self._finish(None, None)

    def _on_message(self, data: bytes | memoryview) -> None:
        try:
            content = unpack(data)
        except DecodeError as error:
            self._warn("%s", error)
            return
        match content:
            case RoundModel():
                self._begin(content)
            case NewMembers(signed):
                self._emit(TakeMembers(signed))
            case UploadStored(number):
                self._unremembered = number if number > self._ledger.last_round else -1
                if self._round is not None and self._round.number == number:
                    self._round.unacknowledged = None
            case RoundOver(number, aborted):
                self._end(number, aborted)
            case Goodbye(reason, finished):
                self._on_goodbye(reason, finished)
            case (number, body):
                if self._round is not None and self._round.number == number:
                    self._on_protocol(self._round, body)
            case EpochBegins(number):
                reason = "this client takes part in rounds; its file has no [buffering]"
                self._warn("the server runs the asynchronous mode: %s", reason)
                self._post(pack_control(Withdraw(number, reason)))
            case EpochCloses() | Version() | MasksKnown():
                self._warn("the server runs the asynchronous mode")
            case Hello() | Withdraw() | Fetch():
                self._warn("the server speaks like a client")

    def _use_members(self, members: Members) -> None:
        """Later rounds are of these members; the one under way keeps those it began with."""
        self._policy = replace(self._policy, allow_list=members.allow_list)
        self._edition, count = members.number, len(members.allow_list)
        self._tell("allow-list number %d is in use, with %d clients", members.number, count)

    # -- a round -------------------------------------------------------------------------------

    def _begin(self, message: RoundModel) -> None:
        self._abandon("another round has begun")
        announcement = Announcement(message.model, message.instructions)
        round_ = self._round = Round(message.round, announcement, message.bound)
        source = f" from a model of {len(message.model) // 4} entries" if message.model else ""
        self._tell("round %d begins%s", message.round, source)
        self._emit(RoundBegan(message.round))
        if not self._withdraw_if_forgetful(round_):
            known = self._known(round_)
            self._emit(Train(message.round, announcement, message.bound, known))

    def _withdraw_if_forgetful(self, round_: Round) -> bool:
        """Sit out as long as the ledger does not know what is spent."""
        forgetful = self._unremembered > self._ledger.last_round
        if forgetful:
            self._warn(
                "the server has stored an upload of this client's in round %d, but its ledger's "
                "latest round is %d: the ledger is new, or an older copy, and does not know what "
                "is spent. Restore the newest; if it is lost, see `lightsecagg ledger accept-loss`",
                self._unremembered,
                self._ledger.last_round,
            )
            self._withdraw(round_, "its ledger is older than its latest upload")
        return forgetful

    def _known(self, round_: Round) -> Update | None:
        """The update that it has from this model already.

        A repeat must bring the same one, and not every processor computes it twice; with other
        instructions none would (S42).
        """
        trained = self._trained
        if not round_.announcement.model or trained is None or trained[0] != round_.task:
            return None
        self._tell("round %d: its update from this model is used again", round_.number)
        if trained[2] != round_.instructions:
            self._warn("round %d: the server now asks for other settings", round_.number)
        return trained[1]

    def _on_trained(self, number: int, update: Update) -> None:
        round_ = self._round
        if round_ is None or round_.number != number:
            return
        if self._trained is None or self._trained[0] != round_.task:
            self._trained = (round_.task, update, round_.instructions)
        round_.update = update
        self._hand_over(round_)

    def _on_protocol(self, round_: Round, body: memoryview) -> None:
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
        self._hand_over(round_)
        self._withdraw_when_due(round_)

    def _hand_over(self, round_: Round) -> None:
        """Mask and upload, once there is an update and the party wants it."""
        if round_.update is None or not round_.needs_input or round_.party is None:
            return
        update, round_.update, round_.needs_input = round_.update, None, False
        try:
            update = self._prepared(update, round_)
            self._emit(Prepared(round_.number, update))
            outputs = round_.party.set_input(update)
        except Exception as error:
            # Our own messages are free of secrets; those of foreign code may quote the data (S22).
            known = isinstance(error, LightSecAggError)
            self._sit_out(round_, str(error) if known else f"its update fails with {where(error)}")
            return
        self._release(round_, outputs)

    def _sit_out(self, round_: Round, reason: str) -> None:
        message = "client %d sits round %d out: %s"
        self._emit(Log(logging.ERROR, message, (self.client, round_.number, reason), SERVER))
        round_.without_update = True
        self._withdraw_when_due(round_)

    def _withdraw_when_due(self, round_: Round) -> None:
        """Withdraw where the upload would leave, at the same moment and always in the same words.

        Had the server not closed sharing, it would not have heard of an update either. So it
        learns that there is none only in a round that goes on to its uploads, and never why: a
        bound that was exceeded, NaN, a failure, a vector that is spent (S44).
        """
        due = round_.party is not None and round_.party.upload_is_due
        if round_.without_update and due and self._round is round_:
            self._withdraw(round_, _NO_UPDATE)

    def _withdraw(self, round_: Round, reason: str) -> None:
        """Sit this round out, and tell the server, which would wait until its deadline."""
        self._post(pack_control(Withdraw(round_.number, reason[:500])))
        self._abandon(reason)

    def _decode(self, round_: Round, body: memoryview) -> Message:
        """Decode; an opening also makes the party that speaks its protocol."""
        if round_.codec is None:
            message = Codec(PrimeField(3)).decode(body)  # an opening holds no field element
            if not isinstance(message, Opening):
                raise DecodeError("a round begins with an opening")
            settings = Settings.from_bytes(message.settings)
            self._check_announcement(settings, round_)
            round_.codec, round_.weighted = Codec(settings.field), settings.quantizer.weighted
            round_.party = self._make_party(settings.protocol, round_)
            return message
        return round_.codec.decode(body)

    def _check_announcement(self, settings: Settings, round_: Round) -> None:
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

    def _make_party(self, protocol: str, round_: Round) -> ClientParty:
        if protocol not in self._policy.protocols:
            raise DecodeError(f"the server proposes {protocol}, which this client does not accept")
        # Where vectors are summed that descend from no model, each round is its own.
        model = hash_model(round_.announcement.model or round_.number.to_bytes(8, "big"))
        policy = replace(
            self._policy, protocols=(protocol,), model=model, instructions=round_.instructions
        )
        return client_party(self.client, self._identity, policy, self._ledger)

    def _prepared(self, update: Update, round_: Round) -> Update:
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

    def _release(self, round_: Round, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Send(_, message):
                    self._send(round_, message)
                case Persist(record):
                    self._emit(Store(round_.number, record))
                case NeedInput():
                    round_.needs_input = True
                case RoundAborted(reason):
                    round_.uploaded = False
                    self._tell("round %d: %s", round_.number, reason)

    def _send(self, round_: Round, message: Message) -> None:
        if round_.codec is None:
            raise AssertionError("a party has spoken, and nobody knows its field")
        data = pack_protocol(round_.number, round_.codec.encode(message))
        if isinstance(message, MaskedUpload):
            round_.unacknowledged, round_.uploaded = data, True
            self._tell("round %d: uploads its masked update, %d bytes", round_.number, len(data))
        self._post(data)

    def _end(self, number: int, aborted: str | None) -> None:
        round_ = self._round
        if round_ is None or round_.number != number:
            return
        included = aborted is None and round_.uploaded
        if aborted is not None:
            self._tell("round %d was aborted: %s", number, shown(aborted))
        elif included:
            self.rounds += 1
            self._tell("round %d is done, with this client's update", number)
        else:
            self._tell("round %d is done, without this client", number)
        self._leave(round_, "the round is over")
        self._emit(RoundLeft(number, included, aborted and shown(aborted)))

    def _abandon(self, reason: str) -> None:
        """Leave a round, if there is one, without seeing its end."""
        if self._round is not None:
            self._emit(RoundLeft(self._round.number, False, reason))
            self._leave(self._round, reason)

    def _leave(self, round_: Round, reason: str) -> None:
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
        self._emit(Finished(goodbye, error))

    # -- effects -------------------------------------------------------------------------------

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _post(self, data: bytes) -> None:
        self._emit(Post(SERVER, data))

    def _warn(self, message: str, *arguments: object) -> None:
        self._log(logging.WARNING, message, arguments)

    def _tell(self, message: str, *arguments: object) -> None:
        """What goes well, for whoever watches."""
        self._log(logging.INFO, message, arguments)

    def _log(self, level: int, message: str, arguments: tuple[object, ...]) -> None:
        self._emit(Log(level, f"client %d: {message}", (self.client, *arguments), SERVER))

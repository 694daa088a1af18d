"""What a client must remember across rounds so that no update is ever isolated (S06, S07, S42).

Two sums that contain the same update reveal differences between the other updates, and a round
that is run again without one client reveals that client's update. Hence, for one global model and
for ever, a client has

* one update: a second upload repeats the first, by the same instructions (S55) and in the same
  reading (c_l, bound, s_max, layout);
* two uploads at most;
* one set: having signed or answered for a survivor set, it consents to no other.

`docs/security.md` has the proof that no combination of such sums isolates a client, and what
remains. An update that was signed or answered for is *spent*: under any other model it is never
uploaded again, nor is one that others have summed meanwhile, if the server says so. Where vectors
descend from no model, that alone protects them.

The ledger's key also seeds what must be the same in a repeat and unknown to everybody else: the
stochastic rounding of an update, and local training.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.crypto.transcript import context_hash, derive_key, uint
from lightsecagg.errors import DecodeError, MaskAlreadyUsed, RemoteProtocolError
from lightsecagg.foreign import decode
from lightsecagg.protocol.interface import LedgerChanged, Persist, Update
from lightsecagg.protocol.settings import NO_MODEL

_KEY_LENGTH = 32
_BLOCK = 2**14  # entries of an update that are hashed at once: they stay in the cache
_VERSION = 2
"""Version 1 had other fingerprints: it would not know again what is spent."""
FARTHEST_ROUND = 2**48
"""The farthest from one round to the next (some drivers count milliseconds): a lying server must
not use up all numbers at once."""
_WAY_OUT = "only this client's operator can allow more, see `lightsecagg ledger forgive`"


class _Model(msgspec.Struct, forbid_unknown_fields=True):
    """What this client did for one global model."""

    openings: int = 0
    uploads: int = 0
    commitment: bytes = b""
    """Of the one update; empty where there is no model."""
    survivors: bytes = b""
    """Hash of the one set that was consented to; empty before."""
    spent: bytes = b""
    """Fingerprint of the update that was consented to; empty before."""
    epoch: int = -1
    """The round, or epoch of the asynchronous mode, of the latest upload."""


class _Entries(msgspec.Struct, forbid_unknown_fields=True):
    key: bytes
    version: int = 1  # which did not say so
    generation: int = 0
    last_round: int = -1
    spent: set[bytes] = set()
    models: dict[str, _Model] = {}  # by hash in hexadecimal: msgspec sorts no other keys
    summed: dict[str, set[int]] = {}
    """Asynchronous: model -> owners whose updates from it this client has consented to sum."""
    uploaded: tuple[int, bytes] = (-1, b"")
    """The latest round with an upload, and the fingerprint of its update."""
    unconfirmed: int = 0
    """Openings since the last upload, of a client that learns its models later (S44)."""
    closed: set[bytes] = set()
    """Asynchronous: models that are too old; no update from them is summed any more."""
    masked: tuple[bytes, dict[str, bytes]] = (b"", {})
    """The newest round or epoch with an upload, by its C1, and serial -> hash of the newest
    upload. Earlier ones need not be known: masks are used in the order of their serials."""


_decoder = msgspec.msgpack.Decoder(_Entries)


class Ledger:
    """The memory of one client in one session. Keep it as long as the session lasts.

    * `Ledger()` begins a session that is new to this client. Store `to_bytes()` before anything
      is sent that it accounts for (a party's `snapshot` includes it), and go on from
      `Ledger.from_bytes` ever after.
    * `Ledger.volatile()` declares that you will not store it.
    """

    durable = True
    """Whether it is stored: then parties ask for that (`Persist`) whenever something must be."""

    def __init__(self, entropy: Entropy = system_entropy) -> None:
        # Fingerprints are keyed, so that a stolen ledger does not confirm guesses of an update.
        self._entries = _Entries(draw(entropy, _KEY_LENGTH), _VERSION)

    @classmethod
    def volatile(cls, entropy: Entropy = system_entropy) -> Ledger:
        """A ledger that ends with this process: a restart forgets what was spent.

        Then S06 holds only as long as the process lives. A restarted client may be made to
        upload the same update again, and to begin counting its attempts anew. Right where a
        session ends with the process, or where no update can ever be computed a second time.
        """
        ledger = cls(entropy)
        ledger.durable = False
        return ledger

    @property
    def generation(self) -> int:
        """Counts the changes of this client's parties, over all rounds: never goes back."""
        return self._entries.generation

    @property
    def last_round(self) -> int:
        """The newest round that was opened; every older one is over. -1 before the first."""
        return self._entries.last_round

    def persisted(self) -> list[Persist]:
        """What the driver is to store, and before anything else leaves; nothing if volatile."""
        return [Persist(LedgerChanged(self.to_bytes()))] if self.durable else []

    def count_change(self) -> None:
        """A party has changed: snapshots from before are now too old to resume from."""
        self._entries.generation += 1

    def open_round(self, number: int, model: bytes, max_attempts: int) -> None:
        """Note that round `number` begins; refuse old rounds and too many attempts."""
        self.check_round(number, model, max_attempts)
        self._entries.last_round = number

    def check_round(self, number: int, model: bytes, max_attempts: int) -> None:
        """Refuse old rounds and too many attempts."""
        if number <= self._entries.last_round:
            raise RemoteProtocolError(
                f"round {number} is refused: this client has already seen round "
                f"{self._entries.last_round}, and an old round's masks are gone"
            )
        if number > self._entries.last_round + FARTHEST_ROUND:
            raise RemoteProtocolError(
                f"round {number} is refused: it is more than {FARTHEST_ROUND} after the last one, "
                f"{self._entries.last_round}; no later round could have a larger number"
            )
        self.check_attempts(model, max_attempts)

    def check_attempts(self, model: bytes, max_attempts: int) -> None:
        """Refuse to train once more from a global model that has had its uploads."""
        uploads = self._model(model).uploads
        if uploads >= max_attempts:
            raise RemoteProtocolError(
                f"this client has uploaded {uploads} updates for global model "
                f"{model.hex()[:16]}..., the most that it allows (max_attempts = {max_attempts}): "
                f"sums over many reruns would reveal single updates; {_WAY_OUT}"
            )

    def count_opening(self, model: bytes, max_openings: int) -> None:
        """Note that a round, or training, begins from `model`; refuse one too many (S44).

        A server could open one round after another from the same model and end each before the
        uploads; whoever it hears of, or misses, is an answer to whatever it varies.
        """
        self.check_openings(model, max_openings)
        self._entries.models.setdefault(model.hex(), _Model()).openings += 1

    def check_openings(self, model: bytes, max_openings: int) -> None:
        """Refuse one opening too many from `model` (S44)."""
        openings = self._model(model).openings
        if openings >= max_openings:
            raise RemoteProtocolError(
                f"the server has opened {openings} rounds from this global model, the most that "
                f"this client allows (max_openings = {max_openings}): who takes part in ever more "
                "of them would tell about its update; if they failed honestly, raise max_openings"
            )

    def count_unconfirmed(self, max_openings: int) -> None:
        """Note an opening whose model this client cannot check yet; refuse one too many (S44).

        A server could name a new model each time, and so escape the count of each.
        """
        self.check_unconfirmed(max_openings)
        self._entries.unconfirmed += 1

    def check_unconfirmed(self, max_openings: int) -> None:
        """Refuse one such opening too many (S44)."""
        if self._entries.unconfirmed >= max_openings:
            raise RemoteProtocolError(
                f"the server has opened {self._entries.unconfirmed} rounds since this client's "
                f"last upload, the most that it allows (max_openings = {max_openings}) where it "
                "learns a round's model only later"
            )

    def fingerprint(self, update: Update) -> bytes:
        """A keyed hash that distinguishes updates, and nothing else.

        Precision, the sign of a zero and the sample count are left out: the same vector with
        another weight is still the same update.
        """
        digest, entries = hmac.new(self._entries.key, digestmod="sha256"), update.vector.ravel()
        for start in range(0, entries.size, _BLOCK):
            block = _narrowed(entries[start : start + _BLOCK])
            digest.update(block.dtype.str.encode())
            digest.update(block.data)
        return digest.digest()

    def commitment(self, fingerprint: bytes, samples: int, reading: bytes) -> bytes:
        """A keyed hash of the whole upload: the update, its count and `Settings.reading`."""
        return self._derive("commitment", fingerprint, uint(samples), reading)

    def rounding_seed(self, model: bytes, commitment: bytes) -> bytes:
        """What decides the rounding of an upload.

        A repeat is rounded alike, so its sum reveals nothing new. Anything else, even another
        update of the same model, is rounded by independent coins.
        """
        return self._derive("rounding", model, commitment)

    @property
    def training_secret(self) -> bytes:
        """What local training derives its seeds from, with the model's hash."""
        return self._derive("local training")

    def check_unspent(self, fingerprint: bytes) -> None:
        """Refuse an update that was signed or answered for before."""
        if fingerprint in self._entries.spent:
            raise MaskAlreadyUsed(
                "this update is spent: this client has already signed or answered for it, or it "
                "was summed without it, and uploading it again would reveal a client's model; "
                "train a new one"
            )

    def check_update(self, model: bytes, fingerprint: bytes, commitment: bytes) -> None:
        """Refuse a spent update and, for a model that has had one, any other update (S42)."""
        entry = self._model(model)
        if entry.spent != fingerprint:  # else it was this model that it was spent for
            self.check_unspent(fingerprint)
        # An epoch keeps no commitment: after an upload there, any update is another one.
        if model != NO_MODEL and entry.uploads and entry.commitment != commitment:
            raise MaskAlreadyUsed(
                f"this client has uploaded another update, or by other instructions or in another "
                f"reading (c_l, bound, s_max, layout), for global model {model.hex()[:16]}...: two "
                f"of them, in sums over the same clients, would reveal their difference; {_WAY_OUT}"
            )

    def count_upload(self, model: bytes, commitment: bytes = b"", fingerprint: bytes = b"") -> None:
        """An update trained from `model` leaves this client."""
        entry = self._entries.models.setdefault(model.hex(), _Model())
        entry.uploads += 1
        self._entries.unconfirmed = 0
        entry.epoch = self._entries.last_round
        self._entries.uploaded = (self._entries.last_round, fingerprint)
        if model != NO_MODEL:
            entry.commitment = commitment

    def bind_upload(self, context: bytes, serial: int, digest: bytes) -> None:
        """The one upload of a mask, before its first byte leaves; refuse any other (S06, S49).

        Training need not repeat itself bit by bit. Two uploads under one mask, or one short key
        and its noise, would reveal the difference of two updates. A mask before the newest one
        that was used is used itself, or was lost with a party: nothing leaves under it any more.
        """
        newest, known = self._entries.masked
        last = max(map(int, known), default=-1) if newest == context else -1
        if serial < last or (serial == last and known[str(serial)] != digest):
            raise MaskAlreadyUsed(
                "another upload has left under this mask, or under a later one; a second one would "
                "reveal the difference of the two updates, so it is not sent and the mask is "
                "destroyed"
            )
        self._entries.masked = (context, {str(serial): digest})

    def consent(self, model: bytes, fingerprint: bytes, survivors: tuple[int, ...]) -> None:
        """The update is signed or answered for, in a sum over these clients (S06, S42)."""
        entry = self._entries.models.setdefault(model.hex(), _Model())
        chosen = context_hash("survivors of one model", *map(uint, sorted(survivors)))
        if entry.survivors and entry.survivors != chosen:
            raise RemoteProtocolError(
                "a second, different survivor set for global model "
                f"{model.hex()[:16]}... is refused: the two sums would reveal single clients' "
                f"updates; run the round again with the same clients, or {_WAY_OUT}"
            )
        if model != NO_MODEL:
            entry.survivors, entry.spent = chosen, fingerprint
        self._entries.spent.add(fingerprint)

    def spend(self, fingerprint: bytes) -> None:
        """The update may be summed without this client's doing."""
        self._entries.spent.add(fingerprint)

    def spend_upload(self, number: int) -> None:
        """The upload of round `number` is in a sum, by the server's word: others consented to it.

        So it is while this client is away, after its upload and before its consent. A server that
        lies about it makes a client sit out, which it can do anyway.
        """
        newest, fingerprint = self._entries.uploaded
        if newest == number and fingerprint:
            self.spend(fingerprint)

    def uploads(self) -> dict[str, int]:
        """How often this client has uploaded for each global model, by its hash in hexadecimal."""
        return {model: entry.uploads for model, entry in self._entries.models.items()}

    def forgive(self, model: str) -> None:
        """Forget what left this client for one global model, by its hash in hexadecimal.

        For the client's operator alone: after it, S42 does not hold for this model. A rerun over
        other clients than before reveals the difference of the two sums.
        """
        entry = self._entries.models.pop(model)
        self._entries.spent.discard(entry.spent)

    def accept_loss(self, number: int) -> None:
        """Go on although an older ledger is lost that knew of rounds up to `number`.

        For the client's operator alone: what the lost ledger remembered may be repeated.
        """
        self._entries.last_round = max(self._entries.last_round, number)

    def check_epoch(self, model: bytes) -> None:
        """Refuse to upload from a model that this client has uploaded from in another epoch (S42).

        Within an epoch two quorums share an honest signer, who sums one update of an owner and a
        model. Another epoch may have other signers, who know nothing of it.
        """
        entry = self._model(model)
        if entry.uploads and entry.epoch != self._entries.last_round:
            raise MaskAlreadyUsed(
                f"this client has uploaded an update from global model {model.hex()[:16]}... in an "
                f"earlier epoch, {entry.epoch}: its peers in this one cannot know whether it was "
                f"summed, and two sums over different clients would reveal single updates; train "
                f"from a newer model; {_WAY_OUT}"
            )

    def check_buffer(self, terms: Iterable[tuple[int, bytes]]) -> None:
        """Refuse a buffer with an owner's second update from one model; (owner, model) each."""
        for owner, model in terms:
            if model in self._entries.closed or owner in self._entries.summed.get(model.hex(), ()):
                raise RemoteProtocolError(
                    f"client {owner}'s update from global model {model.hex()[:16]}... is refused: "
                    "this client has consented to sum one before, or the model is too old; two "
                    "sums over different clients would reveal single updates"
                )

    def consent_to_buffer(self, terms: Iterable[tuple[int, bytes]]) -> None:
        """These owners' updates from these models are answered for."""
        for owner, model in terms:
            self._entries.summed.setdefault(model.hex(), set()).add(owner)

    def close_model(self, model: bytes) -> None:
        """No update from it is summed any more; who had been need not be remembered."""
        if self._entries.summed.pop(model.hex(), None) is not None:
            self._entries.closed.add(model)

    def _model(self, model: bytes) -> _Model:
        return self._entries.models.get(model.hex(), _Model())

    def _derive(self, purpose: str, *parts: bytes) -> bytes:
        return derive_key(self._entries.key, b"client ledger", purpose, *parts)

    def to_bytes(self) -> bytes:
        """For durable storage beside a party's snapshot."""
        return msgspec.msgpack.encode(self._entries, order="deterministic")

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """The inverse of `to_bytes`."""
        ledger = cls.__new__(cls)
        entries = decode(_decoder.decode, data, "ledger")
        if entries.version != _VERSION:
            raise DecodeError(
                f"malformed ledger: version {entries.version} is not read by this release, which "
                f"has {_VERSION}: begin a new session, with a new ledger in every client"
            )
        if len(entries.key) != _KEY_LENGTH or entries.generation < 0 or entries.last_round < -1:
            raise DecodeError("malformed ledger: a key or counter is out of range")
        if not all(serial.isdecimal() for serial in entries.masked[1]):
            raise DecodeError("malformed ledger: an upload has no serial")
        ledger._entries = entries
        return ledger

    def __repr__(self) -> str:
        return f"Ledger(last_round={self._entries.last_round}, spent={len(self._entries.spent)})"


def _narrowed(block: NDArray[np.floating]) -> NDArray[np.floating]:
    """Entries as they are hashed: in float32 if that holds them all, and without negative zeros.

    Most updates are of that precision; half as much is to be hashed then, which takes longer than
    to mask it.
    """
    with np.errstate(over="ignore"):
        narrow: NDArray[np.floating] = block.astype("<f4")
    if block.dtype != np.float32 and not np.array_equal(narrow, block):
        narrow = block.astype("<f8")
    narrow += 0.0
    return narrow

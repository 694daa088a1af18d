"""What a client must remember across rounds so that no update is ever summed twice (S06, S07).

Two sums that contain the same update reveal differences between the other updates, and a round
that is run again without one client reveals that client's update. So once a client has signed or
answered for an update, that update is *spent*: it is never uploaded again, in no round and under
no mask. The ledger also counts how often a client has uploaded for one and the same global model.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.errors import DecodeError, MaskAlreadyUsed, RemoteProtocolError
from lightsecagg.foreign import decode
from lightsecagg.protocol.interface import Update

_KEY_LENGTH = 32


class _Entries(msgspec.Struct):
    key: bytes
    generation: int = 0
    last_round: int = -1
    spent: set[bytes] = set()
    attempts: dict[str, int] = {}  # by the model's hash in hexadecimal: msgspec sorts no others
    openings: dict[str, int] = {}  # likewise


_decoder = msgspec.msgpack.Decoder(_Entries)


class Ledger:
    """The memory of one client in one session. Keep it as long as the session lasts.

    * `Ledger()` begins a session that is new to this client. Store `to_bytes()` before anything
      is sent that it accounts for (a party's `snapshot` includes it), and go on from
      `Ledger.from_bytes` ever after.
    * `Ledger.volatile()` says that you will not store it.
    """

    def __init__(self, entropy: Entropy = system_entropy) -> None:
        # Fingerprints are keyed, so that a stolen ledger does not confirm guesses of an update.
        self._entries = _Entries(key=draw(entropy, _KEY_LENGTH))

    @classmethod
    def volatile(cls, entropy: Entropy = system_entropy) -> Ledger:
        """A ledger that ends with this process: a restart forgets what was spent.

        Then S06 holds only as long as the process lives. A restarted client may be made to
        upload the same update again, and to begin counting its attempts anew. Right where a
        session ends with the process, or where no update can ever be computed a second time.
        """
        return cls(entropy)

    @property
    def generation(self) -> int:
        """Counts the changes of this client's parties, over all rounds: never goes back."""
        return self._entries.generation

    @property
    def last_round(self) -> int:
        """The newest round that was opened; every older one is over. -1 before the first."""
        return self._entries.last_round

    def count_change(self) -> None:
        """A party has changed: snapshots from before are now too old to resume from."""
        self._entries.generation += 1

    def open_round(self, number: int, model: bytes, max_attempts: int) -> None:
        """Note that round `number` begins; refuse old rounds and too many attempts."""
        if number <= self._entries.last_round:
            raise RemoteProtocolError(
                f"round {number} is refused: this client has already seen round "
                f"{self._entries.last_round}, and an old round's masks are gone"
            )
        self.check_attempts(model, max_attempts)
        self._entries.last_round = number

    def check_attempts(self, model: bytes, max_attempts: int) -> None:
        """Refuse to train once more from a global model that has had its uploads."""
        attempts = self._entries.attempts.get(model.hex(), 0)
        if attempts >= max_attempts:
            raise RemoteProtocolError(
                f"this client has uploaded {attempts} updates for this global model, the most "
                f"that it allows (max_attempts = {max_attempts}): sums over many reruns would "
                "reveal single updates"
            )

    def count_opening(self, model: bytes, max_openings: int) -> None:
        """Note that a round begins from `model`; refuse one too many (S44).

        A server could open one round after another from the same model and end each before the
        uploads; whoever it hears of, or misses, is an answer to whatever it varies.
        """
        openings = self._entries.openings.get(model.hex(), 0)
        if openings >= max_openings:
            raise RemoteProtocolError(
                f"the server has opened {openings} rounds from this global model, the most that "
                f"this client allows (max_openings = {max_openings}): who takes part in ever more "
                "of them would tell about its update; if they failed honestly, raise max_openings"
            )
        self._entries.openings[model.hex()] = openings + 1

    def fingerprint(self, update: Update) -> bytes:
        """A keyed hash that tells updates apart and nothing else.

        Precision, the sign of a zero and the sample count are left out: the same vector with
        another weight is still the same update.
        """
        vector = np.asarray(update.vector).astype("<f8") + 0.0
        digest = hashlib.blake2b(key=self._entries.key, digest_size=32)
        digest.update(np.ascontiguousarray(vector).data)
        return digest.digest()

    def check_unspent(self, fingerprint: bytes) -> None:
        """Refuse an update that was signed or answered for before."""
        if fingerprint in self._entries.spent:
            raise MaskAlreadyUsed(
                "this update is spent: this client has already signed or answered for it, and "
                "uploading it again would reveal a client's model; train a new one"
            )

    def count_upload(self, model: bytes) -> None:
        """An update trained from `model` leaves this client."""
        attempts = self._entries.attempts
        attempts[model.hex()] = attempts.get(model.hex(), 0) + 1

    def spend(self, fingerprint: bytes) -> None:
        """The update is signed or answered for."""
        self._entries.spent.add(fingerprint)

    def to_bytes(self) -> bytes:
        """For durable storage beside a party's snapshot."""
        return msgspec.msgpack.encode(self._entries, order="deterministic")

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """The inverse of `to_bytes`."""
        ledger = cls.__new__(cls)
        entries = decode(_decoder.decode, data, "ledger")
        if len(entries.key) != _KEY_LENGTH or entries.generation < 0 or entries.last_round < -1:
            raise DecodeError("malformed ledger: a key or counter is out of range")
        ledger._entries = entries
        return ledger

    def __repr__(self) -> str:
        return f"Ledger(last_round={self._entries.last_round}, spent={len(self._entries.spent)})"

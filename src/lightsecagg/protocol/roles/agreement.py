"""Agreement on one sum (malicious-server mode): signatures, refusals and the certificate (S05).

Whoever is asked for a sum signs a `Statement` of it, once, or refuses because it lacks shares. The
server shows m signatures to everybody as a certificate; nobody answers without one. Any two sets
of m among N members share an honest one, so no second sum is ever agreed on.

The statement binds C1, in which rounds and epochs never agree, the time and the tags.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from lightsecagg.crypto import identity
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import transcript
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.roster import Round

Signatures = tuple[tuple[int, bytes], ...]
"""Client and signature, as a certificate lists them."""


ROUND: Final = 0
"""The time of the one sum of a synchronous round."""


@dataclass(frozen=True)
class Statement:
    """What a client says when it consents to a sum."""

    purpose: str
    parts: tuple[bytes, ...]
    """C1, and what names the sum."""

    def sign(self, key: IdentityKey) -> bytes:
        """Say it."""
        return key.sign(self.purpose, *self.parts)

    def check(self, allow_list: AllowList, client: int, signature: bytes) -> None:
        """Raise `CryptoError` unless `client` has said it."""
        name, key = f"client {client}", allow_list[client]
        identity.verify_encoded(name, key, signature, self.purpose, self._encoded)

    @cached_property
    def _encoded(self) -> bytes:
        """Once for all signatures: it names everybody in the sum."""
        return transcript(self.purpose, *self.parts)


def check_certificate(
    round_: Round, allow_list: AllowList, statement: Statement, signatures: Signatures
) -> None:
    """The client's half: refuse a certificate unless m distinct members made the statement."""
    valid: set[int] = set()
    for client, signature in signatures:
        if client not in round_.positions or client in valid:
            raise RemoteProtocolError(
                f"the certificate names client {client}, a stranger or for a second time"
            )
        statement.check(allow_list, client, signature)
        valid.add(client)
    quorum = round_.settings.parameters.quorum
    if len(valid) < quorum:
        raise RemoteProtocolError(
            f"the certificate has {len(valid)} signatures, m = {quorum} are needed"
        )


class Agreement:
    """The server's half: who consented to the sum that was asked for, and who refused."""

    def __init__(
        self,
        quorum: int,
        allow_list: AllowList,
        statement: Statement,
        asked: Collection[int],
        owners: Collection[int],
    ) -> None:
        """`asked`: whose consent is wanted; `owners`: whose shares that takes."""
        self.signatures: dict[int, bytes] = {}
        self.refusals: dict[int, tuple[int, ...]] = {}
        """Who refused, and whose shares it lacks."""
        self._quorum = quorum
        self._allow_list = allow_list
        self._statement = statement
        self._asked = frozenset(asked)
        self._owners = frozenset(owners)

    def on_signature(self, sender: int, signature: bytes) -> None:
        """Take a signature, which is checked now: a bad one would spoil the certificate."""
        self._check_asked(sender)
        if not self._quorum:
            raise RemoteProtocolError(f"client {sender} signed, but nobody has to agree")
        try:
            self._statement.check(self._allow_list, sender, signature)
        except CryptoError as error:
            raise RemoteProtocolError(str(error)) from error
        self.signatures[sender] = signature

    def on_refusal(self, sender: int, missing: tuple[int, ...]) -> None:
        """Take a refusal; the first one counts."""
        self._check_asked(sender)
        if not self._owners.issuperset(missing):
            raise RemoteProtocolError(f"client {sender} lacks shares nobody asked it for")
        self.refusals.setdefault(sender, missing)

    def _check_asked(self, sender: int) -> None:
        if sender not in self._asked:
            raise RemoteProtocolError(f"client {sender} is not asked to agree to this sum")

    @property
    def reached(self) -> bool:
        """Whether there are signatures for a certificate."""
        return len(self.signatures) >= self._quorum

    @property
    def shortfall(self) -> str:
        """Why the sum is lost, where no agreement is reached."""
        return f"only {len(self.signatures)} clients signed, m = {self._quorum} are needed"

    @property
    def certificate(self) -> Signatures:
        """m signatures, of the lowest ids."""
        return tuple(sorted(self.signatures.items())[: self._quorum])

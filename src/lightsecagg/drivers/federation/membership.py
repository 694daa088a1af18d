"""The signed allow-list in its editions: who takes part changes, and nobody turns it back.

The authority numbers its lists; a number is used once and only grows. It alone signs them, so
the server can pass a new one on to the clients (`KnownMembers.take`), and can neither make one
nor bring an old one back, with a revoked client on it: everybody remembers the newest number.
A list takes effect between two rounds; a round keeps the one that it began with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from lightsecagg.crypto.identity import IdentityKey, verify
from lightsecagg.crypto.transcript import context_hash, uint
from lightsecagg.drivers.federation.durable import write_synced
from lightsecagg.drivers.federation.observer import log
from lightsecagg.errors import (
    ConfigurationError,
    CryptoError,
    LightSecAggError,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.foreign import decode, reading, shown
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.session.record import listed

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.client_ledger import ClientLedger
    from lightsecagg.drivers.federation.journal import Journal

_LABEL: Final = "signed allow-list"
_VERSION: Final = 2
_FETCH: Final = "fetch the newest from the holder of the federation's authority/ folder"


class _Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: int
    key: str


class _SignedList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    session: str
    number: int
    clients: list[_Member]
    revoked_certificates: list[str]
    signature: str


_decoder = msgspec.json.Decoder(_SignedList)


@dataclass(frozen=True, slots=True)
class Membership:
    """One edition of the allow-list."""

    number: int
    """1, 2, ...: a larger one replaces a smaller."""
    allow_list: AllowList
    revoked: frozenset[bytes]
    """SHA-256 of certificates that the server refuses, whomever they name."""
    content: bytes = field(repr=False)
    """The signed file."""

    @property
    def digest(self) -> bytes:
        """Tells two editions apart."""
        revoked = sorted(self.revoked)
        return context_hash("membership", uint(self.number), self.allow_list.digest, *revoked)


def sign_membership(
    authority: IdentityKey,
    session: bytes,
    number: int,
    allow_list: AllowList,
    revoked: Iterable[bytes] = (),
) -> bytes:
    """An edition of one session's allow-list as a file that `load_membership` accepts."""
    fingerprints = sorted(set(revoked))
    signed = _SignedList(
        version=_VERSION,
        session=session.hex(),
        number=number,
        clients=[_Member(client, allow_list[client].hex()) for client in allow_list.clients],
        revoked_certificates=[fingerprint.hex() for fingerprint in fingerprints],
        signature=authority.sign(
            _LABEL, session, uint(number), allow_list.digest, *fingerprints
        ).hex(),
    )
    return msgspec.json.format(msgspec.json.encode(signed), indent=2) + b"\n"


def load_membership(path: Path, authority_key: bytes, session: bytes | None = None) -> Membership:
    """Read an allow-list, refusing one that the authority did not sign.

    With `session`, also refuse a list that was signed for another federation.
    """
    with reading(path, "a file"):
        content = path.read_bytes()
    return read_membership(content, authority_key, session, str(path))


def read_membership(
    content: bytes, authority_key: bytes, session: bytes | None, source: str
) -> Membership:
    """`load_membership` for the content of a file; `source` is what an error calls it."""
    try:
        signed = decode(_decoder.decode, content, "list")
        named = bytes.fromhex(signed.session)
        members = [(member.id, bytes.fromhex(member.key)) for member in signed.clients]
        revoked = [bytes.fromhex(fingerprint) for fingerprint in signed.revoked_certificates]
        signature = bytes.fromhex(signed.signature)
    except ValueError as error:  # a `DecodeError` is one too
        raise ConfigurationError(f"{source} is not an allow-list: {shown(error)}") from error
    if signed.version != _VERSION:
        raise ConfigurationError(
            f"{source} has version {signed.version}, this release reads version {_VERSION}"
        )
    if len(dict(members)) != len(members):
        raise ConfigurationError(f"{source} names a client twice")
    try:
        allow_list = AllowList(dict(members))
        fields = (named, uint(signed.number), allow_list.digest, *revoked)
        verify(f"the authority of {source}", authority_key, signature, _LABEL, *fields)
    except (ParameterError, CryptoError) as error:
        raise ConfigurationError(f"{source} is refused: {error}; {_FETCH}") from error
    if session is not None and named != session:
        raise ConfigurationError(
            f"{source} was signed for another session than this configuration's"
        )
    return Membership(signed.number, allow_list, frozenset(revoked), content)


def _check_not_older(found: Membership, number: int, digest: bytes, source: Path) -> None:
    """Refuse to go back to a list from before, or to another one of the same number."""
    if found.number < number:
        raise ConfigurationError(
            f"{source} is allow-list number {found.number}, but number {number} was in use here: "
            f"an older one may name clients that were revoked since; {_FETCH}"
        )
    if found.number == number and found.digest != digest:
        raise ConfigurationError(
            f"{source} is not the allow-list number {number} that was in use here: the authority "
            "has signed two different ones, or was restored from an old copy. Ask its holder; a "
            "change of members gets a new number"
        )


class KnownMembers:
    """The newest allow-list that a client has seen: its file, and its number in the ledger."""

    def __init__(
        self, path: Path, authority_key: bytes, session: bytes, ledger: ClientLedger, client: int
    ) -> None:
        """Whoever may write the file may install any list of the authority but an older one."""
        self._path, self._authority, self._session = path, authority_key, session
        self._ledger, self._client = ledger, client
        self.current = load_membership(path, authority_key, session)
        _check_not_older(self.current, *ledger.membership, path)
        ledger.remember_membership(self.current.number, self.current.digest)

    def take(self, content: bytes, max_removed: int) -> Membership | None:
        """A list that the server passes on; None if it is the one in use.

        Refused, as a `RemoteProtocolError` that says what to do:

        * what the authority did not sign for this session, or signed before the list in use;
        * a list without this client, or with another key for it;
        * one that removes more than `max_removed` clients of those that this client knows. More
          than T of them cannot all be corrupt, by this client's own reckoning, and the fewer
          honest clients remain, the less a sum hides: its operator shall look first.
        """
        source = "the allow-list that the server sent"
        try:
            found = read_membership(content, self._authority, self._session, source)
        except LightSecAggError as error:
            raise RemoteProtocolError(str(error)) from error
        held, own = self.current, self.current.allow_list[self._client]
        if found.digest == held.digest:
            return None
        if found.number <= held.number:
            raise RemoteProtocolError(
                f"{source} has number {found.number}, this client's number {held.number}: an old "
                "list could bring revoked clients back"
            )
        if self._client not in found.allow_list or found.allow_list[self._client] != own:
            raise RemoteProtocolError(
                f"{source}, number {found.number}, does not name this client with its key: it was "
                "revoked, or admitted anew; ask the holder of the authority/ folder"
            )
        removed = [client for client in held.allow_list.clients if client not in found.allow_list]
        if len(removed) > max_removed:
            raise RemoteProtocolError(
                f"{source}, number {found.number}, removes clients {listed(removed)}: more than "
                f"client.max_removed = {max_removed} that this client lets go unseen. If that is "
                f"right, put the new list at {self._path} and start this client again"
            )
        self._keep(found)
        return found

    def _keep(self, found: Membership) -> None:
        """On disk before it is used; the file first, or a crash would leave the older one."""
        try:
            write_synced(self._path, found.content)
        except OSError as error:
            raise RemoteProtocolError(
                f"allow-list number {found.number} cannot be stored at {self._path}: "
                f"{error.strerror}; put it there and start this client again"
            ) from error
        self._ledger.remember_membership(found.number, found.digest)
        self.current = found


class MembersInUse:
    """The server's allow-list: its file, looked at again between rounds."""

    _journal: Journal

    def __init__(self, path: Path, authority_key: bytes, session: bytes) -> None:
        self._path, self._authority, self._session = path, authority_key, session
        self._seen = self._stamp()
        self.current = load_membership(path, authority_key, session)
        self._former: Membership | None = None

    def recall(self, journal: Journal) -> None:
        """Refuse to go on with an older list than the journal's."""
        self._journal, content = journal, journal.membership()
        if content is not None:
            source = "the journal's allow-list"
            former = read_membership(content, self._authority, self._session, source)
            _check_not_older(self.current, former.number, former.digest, self._path)
            self._former = former

    def allow_list(self, digest: bytes) -> AllowList | None:
        """The list of this digest, if it is in use, or was before the server's restart."""
        for known in (self.current, self._former):
            if known is not None and known.allow_list.digest == digest:
                return known.allow_list
        return None

    def settle(self) -> None:
        """The list in use is the one of all rounds from now on."""
        self._journal.keep_membership(self.current.content)

    def newer(self) -> Membership | None:
        """The list that somebody has put in the file's place, if it may follow the one in use."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            found = load_membership(self._path, self._authority, self._session)
            _check_not_older(found, self.current.number, self.current.digest, self._path)
        except ConfigurationError as error:
            log.error("%s; going on with allow-list number %d", error, self.current.number)
            return None
        if found.digest == self.current.digest:
            return None
        self.current = found
        return found

    def _stamp(self) -> tuple[int, int, int] | None:
        """Tells whether the file was replaced, without reading it."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

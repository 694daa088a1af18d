"""Admit, revoke and renew in a federation that runs: the authority's work, away from the server.

Everything happens in the folder that `provision` made, where the authority's keys are. Each
change of members gives a new signed allow-list, with the next number. It is put wherever a
copy lies in that folder; the server needs the new file, and passes it on to its clients.

Ids are never given out twice. A client that comes back after it was revoked has another id,
another identity and an empty ledger; under its old id the others would take it for one that
remembers what it has uploaded (S06, S42).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.durable import ProcessLock, write_synced
from lightsecagg.drivers.federation.membership import load_membership, sign_membership
from lightsecagg.drivers.federation.provisioning import (
    ALLOW_LIST,
    check_days,
    check_names,
    client_files,
    client_folder,
    load_identity,
    write_folder,
)
from lightsecagg.drivers.federation.register import Admission, Register, load_register
from lightsecagg.drivers.transport.certificates import Authority, Issued, Validity
from lightsecagg.drivers.transport.tls import end_of, fingerprint_of_pem
from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.foreign import read_private, reading
from lightsecagg.params import Parameters
from lightsecagg.session.record import listed

_LEAST_DAYS: Final = 1


@dataclass(frozen=True, slots=True)
class Member:
    """One client that was ever admitted, as an operator sees it."""

    client: int
    name: str
    """Empty if it has none."""
    revoked_in: int
    """The number of the list that removed it; 0 while it is a member."""
    expires: datetime | None
    """The end of its certificate, if its folder is still here."""


class Administration:
    """The authority of one federation at work; one process at a time."""

    def __init__(self, directory: Path, entropy: Entropy = system_entropy) -> None:
        """`directory` is what `provision` made, or a copy of its authority/ inside another one."""
        self._directory, self._folder = directory, directory / "authority"
        self.register: Register = load_register(self._folder)
        self._entropy = entropy
        self._signer = load_identity(self._folder / "allow-list.key")
        with reading(self._folder / "ca.key", "the key of ca.pem, an authority's certificate"):
            certificate = (self._folder / "ca.pem").read_bytes()
            self._authority = Authority.load(certificate, read_private(self._folder / "ca.key"))
        self._lock = ProcessLock(
            self._folder / "lock", f"another command is changing {self._folder}; wait for it"
        )
        self._publish_if_interrupted()

    def close(self) -> None:
        """Let another process have it."""
        self._lock.release()

    # -- what there is -----------------------------------------------------------------------

    @property
    def allow_list(self) -> Path:
        """The newest signed list."""
        return self._folder / ALLOW_LIST

    @property
    def expires(self) -> datetime:
        """The end of the authority's own certificate, and of all that it issues until then."""
        return self._authority.validity.end

    @property
    def server_expires(self) -> datetime | None:
        """The end of the server's certificate, if its folder is still here."""
        return end_of(self._directory / "server" / "server.pem")

    def members(self) -> list[Member]:
        """Everybody who was ever admitted, by id."""
        return [
            Member(
                entry.id,
                entry.name,
                entry.revoked_in,
                end_of(self._client(entry.id) / "client.pem"),
            )
            for entry in sorted(self.register.admissions, key=lambda entry: entry.id)
        ]

    # -- changes -----------------------------------------------------------------------------

    def add(self, count: int = 1, days: int = 365, names: Sequence[str] = ()) -> list[Path]:
        """Admit so many new clients, one per name; returns their configuration files."""
        if count < 1 or (names and len(names) != count):
            raise ParameterError(
                f"{count} clients cannot be added; give 1 or more, and as many names, or none"
            )
        check_names(names, [entry.name for entry in self.register.members.values() if entry.name])
        validity = self._validity(days)
        register, folders = self.register, []
        for client in range(register.next_id, register.next_id + count):
            identity = IdentityKey.generate(self._entropy)
            issued = self._authority.issue_client(client, validity)
            name = names[client - self.register.next_id] if names else ""
            entry = Admission(client, identity.public.hex(), (_name(issued),), name=name)
            register = _changed(register, admissions=(*register.admissions, entry))
            folders.append((client, client_files(register, client, identity, issued)))
        shared = {"ca.pem": self._authority.own_files().certificate}
        self._change(register)
        shared[ALLOW_LIST] = self.allow_list.read_bytes()
        for client, files in folders:
            self._make_folder(client, {**shared, **files})
        return [self._client(client) / f"client-{client}.toml" for client, _ in folders]

    def _make_folder(self, client: int, files: Mapping[str, bytes]) -> None:
        folder = self._client(client)
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            write_folder(folder, files)
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be written: {error.strerror}; client {client} is on the list and "
                "nobody has its keys: revoke it, and add another"
            ) from error

    def revoke(self, clients: Collection[int], *, anyway: bool = False) -> Parameters | None:
        """Remove members, with all their certificates; returns the parameters of later rounds.

        Refuses to leave too few for T and D, but `anyway`; then there are no parameters.
        """
        members = self.register.members
        strangers = sorted(set(clients) - set(members))
        if strangers or not clients:
            raise ParameterError(
                f"clients {listed(strangers)} are no members; there are: {listed(members)}"
            )
        parameters = self._parameters_without(clients, anyway=anyway)
        number = self.register.number + 1
        admissions = tuple(
            msgspec.structs.replace(entry, revoked_in=number) if entry.id in clients else entry
            for entry in self.register.admissions
        )
        self._change(_changed(self.register, admissions=admissions))
        return parameters

    def _parameters_without(self, clients: Collection[int], *, anyway: bool) -> Parameters | None:
        left = len(self.register.members) - len(set(clients))
        try:
            return self.register.parameters_for(left)
        except ParameterError as error:
            if anyway and left:
                return None
            raise ParameterError(
                f"{left} clients would remain, too few for rounds: {error}; add clients first, or "
                "revoke anyway (--anyway) and lower [aggregation] dropouts at the server"
            ) from error

    def renew(
        self,
        clients: Iterable[int] = (),
        *,
        server: bool = False,
        authority: bool = False,
        days: int = 365,
        revoke_old: bool = False,
    ) -> list[Path]:
        """New certificates with new keys; returns the files. Old ones stay good until they end.

        `authority` renews the authority's own, with its old key: certificates of before and new
        ones are good under either. `revoke_old` is for keys that were stolen: the server refuses
        the clients' old certificates as soon as it has the new list.
        """
        clients = list(clients)
        if strangers := sorted(set(clients) - set(self.register.members)):
            raise ParameterError(f"clients {listed(strangers)} are no members")
        written = self._renew_authority(days) if authority else []
        validity, register = self._validity(days), self.register
        if server:
            issued = self._authority.issue_server(register.server_name, validity)
            written += self._put(self._directory / "server", "server", issued)
        for client in clients:
            issued = self._authority.issue_client(client, validity)
            entry = register.members[client]
            old = entry.certificates if revoke_old else ()
            renewed = msgspec.structs.replace(
                entry, certificates=(*entry.certificates, _name(issued))
            )
            register = _changed(
                register,
                admissions=tuple(renewed if e.id == client else e for e in register.admissions),
                replaced=tuple(dict.fromkeys((*register.replaced, *old))),
            )
            written += self._put(self._client(client), "client", issued)
        if revoke_old and clients:
            self._change(register)
        elif register != self.register:
            register.save(self._folder)
            self.register = register
        return written

    def _renew_authority(self, days: int) -> list[Path]:
        check_days(days)
        self._authority = self._authority.renewed(Validity.for_days(days))
        certificate = self._authority.own_files().certificate
        _own, *others = [self._write(each / "ca.pem", certificate) for each in self._folders()]
        return others

    def _put(self, folder: Path, name: str, issued: Issued) -> list[Path]:
        """Into the folder of its owner, which is made anew if it was given away."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(folder / "ca.pem", self._authority.own_files().certificate)
        self._write(folder / f"{name}.key", issued.key)
        return [self._write(folder / f"{name}.pem", issued.certificate)]

    # -- keeping it --------------------------------------------------------------------------

    def _change(self, register: Register) -> None:
        """The next list: its number is taken, durably, before anybody can see it."""
        register = _changed(register, number=self.register.number + 1)
        try:
            register.save(self._folder)
        except OSError as error:
            raise ConfigurationError(
                f"{self._folder} cannot be written: {error.strerror}; nothing was changed"
            ) from error
        self.register = register
        self._publish()

    def _publish(self) -> None:
        """The signed list, wherever one lies."""
        signed = sign_membership(
            self._signer,
            bytes.fromhex(self.register.session),
            self.register.number,
            self.register.allow_list,
            self.register.revoked,
        )
        for folder in self._folders():
            self._write(folder / ALLOW_LIST, signed)

    def _publish_if_interrupted(self) -> None:
        """A command that was killed may have changed the register and no list yet."""
        session = bytes.fromhex(self.register.session)
        if (
            not self.allow_list.exists()
            or load_membership(self.allow_list, self._signer.public, session).number
            != self.register.number
        ):
            self._publish()

    def _folders(self) -> list[Path]:
        """Whose copies are kept here: the authority's, the server's and the members' folders."""
        others = [self._directory / "server", *map(self._client, self.register.members)]
        return [self._folder, *(folder for folder in others if folder.is_dir())]

    def _client(self, client: int) -> Path:
        return client_folder(self._directory, client)

    def _write(self, path: Path, content: bytes) -> Path:
        try:
            write_synced(path, content)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
        return path

    def _validity(self, days: int) -> Validity:
        """So many days, but no longer than the authority itself."""
        check_days(days)
        wanted, most = Validity.for_days(days), self._authority.validity.end
        if most < datetime.now(UTC) + timedelta(days=_LEAST_DAYS):
            raise ConfigurationError(
                f"the authority's own certificate ends on {most:%Y-%m-%d %H:%M} UTC; renew it, "
                "and the others with it: `lightsecagg members renew`"
            )
        return Validity(wanted.start, min(wanted.end, most))


def _changed(register: Register, **changes: object) -> Register:
    changed: Register = msgspec.structs.replace(register, **changes)
    return changed


def _name(issued: Issued) -> str:
    return fingerprint_of_pem(issued.certificate).hex()

"""What the authority of a federation remembers: everybody whom it ever admitted, and with what.

`authority/members.json` lies beside the keys, offline, and is as precious as they are: an id, an
identity key and the number of a list are given out once, and this file knows which are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from lightsecagg.drivers.federation.durable import write_synced
from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.foreign import reading
from lightsecagg.params import Parameters, ThreatModel, survivors_of_fewer
from lightsecagg.protocol.allow_list import AllowList

REGISTER: Final = "members.json"
_VERSION: Final = 1

Table = dict[str, str | bool | int | float]


class Admission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client that was ever admitted."""

    id: int
    key: str
    """Its public identity key, in hex."""
    certificates: tuple[str, ...]
    """SHA-256, in hex, of every certificate that was issued to it; the latest is the last."""
    revoked_in: int = 0
    """The number of the list that removed it; 0 while it is a member."""
    name: str = ""
    """For people; empty if it has none."""


class Register(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The authority's record of one federation."""

    session: str
    number: int
    """Of the newest list."""
    server_name: str
    """In the server's certificate."""
    parameters: Table
    """N, T, D, U and the threat model, as they were provisioned; without a U it is N - D."""
    client: dict[str, Table]
    """The tables of a client's configuration, but for its id."""
    hints: tuple[str, ...]
    """Tables of the configuration that are explained in comments."""
    admissions: tuple[Admission, ...]
    replaced: tuple[str, ...] = ()
    """Certificates of members, by SHA-256, that must not be accepted any more."""
    version: int = _VERSION

    @property
    def names(self) -> Table:
        """The members that have a name, as a table of server.toml."""
        return {str(entry.id): entry.name for entry in self.members.values() if entry.name}

    @property
    def members(self) -> dict[int, Admission]:
        """Who takes part: id -> its entry."""
        return {entry.id: entry for entry in self.admissions if not entry.revoked_in}

    @property
    def allow_list(self) -> AllowList:
        """The list that follows from it."""
        return AllowList(
            {client: bytes.fromhex(entry.key) for client, entry in self.members.items()}
        )

    @property
    def revoked(self) -> list[bytes]:
        """SHA-256 of all certificates that the server must refuse."""
        gone = [entry.certificates for entry in self.admissions if entry.revoked_in]
        return [bytes.fromhex(name) for names in (*gone, self.replaced) for name in names]

    @property
    def next_id(self) -> int:
        """An id that nobody ever had."""
        return max(entry.id for entry in self.admissions) + 1

    def parameters_for(self, members: int) -> Parameters:
        """What a round has if there are so many; `ParameterError` if they are too few."""
        clients, privacy, dropouts = (
            int(self.parameters[name]) for name in ("clients", "privacy", "dropouts")
        )
        survivors = survivors_of_fewer(
            int(self.parameters.get("survivors", 0)), privacy, max(0, clients - members)
        )
        model = ThreatModel(str(self.parameters["threat_model"]))
        return Parameters(min(clients, members), privacy, dropouts, survivors, threat_model=model)

    def to_bytes(self) -> bytes:
        """As a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def save(self, folder: Path) -> None:
        """Replace the file in the authority's folder, as a whole."""
        write_synced(folder / REGISTER, self.to_bytes())


_decoder = msgspec.json.Decoder(Register)


def load_register(folder: Path) -> Register:
    """The register in an authority's folder."""
    path = folder / REGISTER
    if not path.exists():
        raise ConfigurationError(
            f"there is no {path}: give the folder, with authority/, that `lightsecagg provision` "
            "made"
        )
    with reading(path, "an authority's register of members"):
        register = _decoder.decode(path.read_bytes())
        try:
            _ = register.allow_list, register.revoked  # damage in them is to be found here
        except ParameterError as error:
            raise ConfigurationError(f"{path} is damaged: {error}") from error
    if register.version != _VERSION:
        raise ConfigurationError(
            f"{path} has version {register.version}, this release reads version {_VERSION}"
        )
    return register

"""Every byte of a round, per party and phase, before it is run: exact, because sizes are fixed.

Small messages are encoded for real, with keys and signatures of zeros; of vectors and sealed shares
only the headers are. The assumption about who drops is the worst case for the baselines: `dropped`
clients vanish after sharing and before their upload. With the ids 0, ..., N - 1 the forecast equals
what the simulator measures to the byte. One exception: in SecAgg+ the random ring decides how many
of a client's neighbours drop, which moves an answer by up to two bytes; the larger size is taken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

import numpy as np

from lightsecagg.crypto.agreement import AGREEMENT_KEY_LENGTH
from lightsecagg.crypto.identity import SIGNATURE_LENGTH
from lightsecagg.crypto.sealing import MAC_LENGTH, SALT_LENGTH, ShareKind, sealed_length
from lightsecagg.crypto.transcript import HASH_LENGTH
from lightsecagg.errors import ParameterError
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.messages import (
    Advertise,
    Certificate,
    Consent,
    MaskedUpload,
    Member,
    Message,
    Opening,
    Report,
    Reports,
    Roster,
    SealedShare,
    ShareBundle,
    SharesClosed,
    SumRequest,
    Tag,
)
from lightsecagg.protocol.schemes.traits import Shares
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec

PHASES: tuple[Phase, ...] = tuple(phase for phase in Phase if phase is not Phase.DONE)
"""The phases in which something is sent."""


@dataclass(slots=True)
class PhaseTraffic:
    """The bytes of one phase; shares are counted apart, because they may travel directly."""

    client_sent: int = 0
    """The most that a client sends, other than shares."""
    client_received: int = 0
    client_shares_sent: int = 0
    client_shares_received: int = 0
    server_sent: int = 0
    """All that the server sends, other than shares."""
    server_received: int = 0
    server_shares_sent: int = 0
    """All the shares that the server passes on, if it relays them."""
    server_shares_received: int = 0

    @property
    def clients(self) -> int:
        """How many clients take part, as far as the bytes tell."""
        pairs = (
            (self.server_received, self.client_sent),
            (self.server_sent, self.client_received),
            (self.server_shares_received, self.client_shares_sent),
        )
        return max((ceil(of_all / of_one) for of_all, of_one in pairs if of_one), default=0)

    @property
    def client_messages(self) -> int:
        """To and from a client, its shares as one each way."""
        shares = (self.client_shares_sent, self.client_shares_received)
        return sum(map(bool, (self.client_sent, self.client_received, *shares)))

    @property
    def client_upload(self) -> int:
        """All that a client sends."""
        return self.client_sent + self.client_shares_sent

    @property
    def client_download(self) -> int:
        """All that a client receives."""
        return self.client_received + self.client_shares_received

    def server_bytes(self, relayed: bool = True) -> int:
        """All that passes the server's link, in and out."""
        shares = self.server_shares_sent + self.server_shares_received
        return self.server_sent + self.server_received + (shares if relayed else 0)


@dataclass(frozen=True, slots=True)
class ShareCounts:
    """Who sends what to whom in the offline phase, from the view of one client."""

    peers: int
    """Shares that a client sends, and receives."""
    explicit: int
    """How many of them are as long as an answer, and their blinds; the others are short."""
    explicit_bytes: int
    """One sealed explicit share on the wire."""
    short_bytes: int
    """One sealed seed, or SecAgg's pair of Shamir shares, on the wire."""
    root_bytes: int
    """What the server adds to each on the way to its recipient."""

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.explicit * self.explicit_bytes + (self.peers - self.explicit) * self.short_bytes


def share_counts(settings: Settings) -> ShareCounts:
    """The shares that every client of a full roster sends and receives."""
    shares = dict(settings.traits.shares(settings))
    explicit = shares.pop(ShareKind.EXPLICIT, Shares(0, 0))
    short = next(iter(shares.values()), Shares(0, 0))
    header = _header(settings)
    return ShareCounts(
        peers=explicit.count + short.count,
        explicit=explicit.count,
        explicit_bytes=header + sealed_length(explicit.length),
        short_bytes=header + sealed_length(short.length),
        root_bytes=HASH_LENGTH if settings.traits.checked else 0,
    )


def forecast_traffic(
    settings: Settings, dropped: Collection[int] = ()
) -> dict[Phase, PhaseTraffic]:
    """The bytes of a round in which everybody shares and all but `dropped` upload and answer.

    - `dropped` are ids of 0, ..., N - 1, at most D of them.
    """
    return _Forecast(settings, frozenset(dropped)).phases


def in_units(count: float) -> str:
    """So many bytes for a reader: 1.21 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _header(settings: Settings) -> int:
    mac = bytes(MAC_LENGTH if settings.traits.checked else 0)
    empty = SealedShare(0, 1, ShareKind.SEED, 0, bytes(SALT_LENGTH), b"", mac=mac)
    return len(Codec(settings.group).encode(ShareBundle((empty,))))


class _Forecast:
    def __init__(self, settings: Settings, dropped: frozenset[int]) -> None:
        parameters = settings.parameters
        self.settings = settings
        self.dropped = dropped
        self.clients = range(parameters.clients)
        if not dropped <= set(self.clients) or len(dropped) > parameters.dropouts:
            raise ParameterError(
                f"dropped clients must be at most D = {parameters.dropouts} of "
                f"0..{parameters.clients - 1}"
            )
        self.survivors = tuple(client for client in self.clients if client not in self.dropped)
        self.codec = Codec(self.settings.group)
        self.keys = (bytes(AGREEMENT_KEY_LENGTH),) * self.settings.traits.key_count
        self.phases = {phase: PhaseTraffic() for phase in PHASES}
        if Phase.SHARE not in self.settings.traits.phases:
            self._down(Phase.UPLOAD, Opening(self.settings.to_bytes()), len(self.survivors))
        else:
            self._offline()
            self._down(Phase.UPLOAD, SharesClosed(tuple(self.clients)), len(self.survivors))
            self._recovery()
        self._up(Phase.UPLOAD, self._upload_bytes())
        # Ids are of one to nine bytes, and the longest of them was counted for all.
        longest = self._size_of_id(self.clients[-1])
        shorter = sum(longest - self._size_of_id(client) for client in self.survivors)
        self.phases[Phase.UPLOAD].server_received -= shorter

    def _offline(self) -> None:
        signature = bytes(SIGNATURE_LENGTH)
        everybody = len(self.clients)
        self._down(Phase.ADVERTISE, Opening(self.settings.to_bytes()), everybody)
        self._up(Phase.ADVERTISE, self._size(Advertise(self.keys, signature)), everybody)
        members = tuple(Member(client, self.keys, signature) for client in self.clients)
        ring = tuple(self.clients) if self.settings.traits.ring else ()
        self._down(Phase.SHARE, Roster(members, ring), everybody)
        counts = share_counts(self.settings)
        sent, received = counts.bytes, counts.bytes + counts.peers * counts.root_bytes
        phase = self.phases[Phase.SHARE]
        phase.client_shares_sent, phase.client_shares_received = sent, received
        phase.server_shares_sent = everybody * received
        phase.server_shares_received = everybody * sent

    def _recovery(self) -> None:
        count = len(self.survivors)
        malicious = self.settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        self._down(
            Phase.AGREE if malicious else Phase.RECOVER,
            SumRequest(0, tuple(map(Tag, self.survivors))),
            count,
        )
        if malicious:
            signature = bytes(SIGNATURE_LENGTH)
            self._up(Phase.AGREE, self._size(Consent(0, signature)))
            quorum = self.survivors[: self.settings.parameters.quorum]
            certificate = Certificate(0, tuple((client, signature) for client in quorum))
            self._down(Phase.RECOVER, certificate, count)
        answer = self.settings.traits.answer_bytes(self.settings, len(self.dropped))
        self._up(Phase.RECOVER, answer)

    def _upload_bytes(self) -> int:
        checked = self.settings.traits.checked
        hashes = (bytes(HASH_LENGTH if checked else 0), 0, bytes(HASH_LENGTH), bytes(HASH_LENGTH))
        tag = Tag(self.clients[-1], 0, *hashes)
        element = np.zeros(1, dtype=np.uint32)
        upload = self._size(MaskedUpload(tag, element)) + 4 * (self.settings.length - 1)
        if Phase.SHARE not in self.settings.traits.phases:
            return upload
        values = bytes(4 * BLINDS if checked else 0)
        held = self.clients[-self.settings.degree(len(self.clients)) - 1 :]
        return upload + self._size(Reports(tuple(Report(client, 0, values) for client in held)))

    def _down(self, phase: Phase, message: Message, recipients: int) -> None:
        size = self._size(message)
        self.phases[phase].client_received += size
        self.phases[phase].server_sent += size * recipients

    def _up(self, phase: Phase, size: int, senders: int | None = None) -> None:
        self.phases[phase].client_sent += size
        self.phases[phase].server_received += size * (
            len(self.survivors) if senders is None else senders
        )

    def _size_of_id(self, client: int) -> int:
        return self._size(SharesClosed((client,)))

    def _size(self, message: Message) -> int:
        return len(self.codec.encode(message))

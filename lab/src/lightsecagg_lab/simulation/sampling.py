"""Stand-ins for most clients, so that rounds can be measured that are too large to simulate.

Only n clients are real: they make, seal, open and sum all the shares that they would among N. The
others are stand-ins, which send messages of the right form and size without the work: they seal
shares for real clients only, check nobody's keys, upload one and the same vector, and are not
charged for anything. The server cannot tell the difference and does all of its work: it relays N
bundles, sums the uploads, and recovers from as many answers.

    coded masks     a stand-in's shares are random, and the reports and answers of all stand-ins
                    complete those of the real clients to one codeword, so that the server's
                    checks find nothing
    other schemes   a stand-in really shares its secrets, so that the server can recover the masks

The sum that comes out means nothing; `exact` is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import draw, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.sealing import (
    MAC_LENGTH,
    SALT_LENGTH,
    ShareHeader,
    ShareKeys,
    ShareKind,
    seal,
    sealed_length,
)
from lightsecagg.drivers.cohort import Cohort
from lightsecagg.errors import ParameterError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.masks.mask_encoding import seeded_positions
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.buffers import hash_upload, sum_statement
from lightsecagg.protocol.contributor import send_shares
from lightsecagg.protocol.interface import SERVER, Output, Phase, Send
from lightsecagg.protocol.messages import (
    Advertise,
    AggregatedShare,
    Certificate,
    Consent,
    MaskedUpload,
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
from lightsecagg.protocol.roster import Round, fix_round, sign_keys
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient
from lightsecagg.protocol.schemes.interface import ClientScheme, MaskRef, Term
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import (
    OutgoingShare,
    Share,
    keys_with,
    mask_header,
    open_share,
    root_of,
)


class Sample:
    """What the stand-ins of one round have in common."""

    def __init__(self, cohort: Cohort, settings: Settings, size: int) -> None:
        most = settings.parameters.survivors
        if not 1 <= size <= most:
            raise ParameterError(
                f"{size} sampled clients are refused: between 1 and U = {most} can be real"
            )
        self.real = frozenset(range(size))
        """They come first, so that their answers are there when stand-ins are asked."""
        self.settings = settings
        self._cohort = cohort
        self._reports, self._answers = _Completed(), _Completed()
        self._round: Round | None = None

    def stand_in(self, client: int) -> StandIn:
        """The party of a client that is not real."""
        coded = issubclass(scheme_of(self.settings.protocol).client, CodedMasksClient)
        return (CodedStandIn if coded else StandIn)(self, client)

    def round(self, roster: Roster) -> Round:
        """The round that everybody's roster fixes; computed once for all stand-ins."""
        if self._round is None:
            self._round = fix_round(self.settings, self._cohort.allow_list, roster)
        return self._round

    def identity(self, client: int) -> IdentityKey:
        """A stand-in's signing key."""
        return self._cohort.identity(client)

    def observe(self, client: int, message: Message) -> None:
        """A real client sends this."""
        if isinstance(message, Reports):
            said = {report.owner: report.values for report in message.reports}
            values = b"".join(said[owner] for owner in sorted(said))
            self._reports.known[client] = self.settings.field.from_bytes(values, len(values) // 4)
        elif isinstance(message, AggregatedShare):
            self._answers.known[client] = message.vector

    @cached_property
    def upload(self) -> Elements:
        """What every stand-in uploads."""
        return self.random_elements(self.settings.length)

    @cached_property
    def digest(self) -> bytes:
        """Hash of that upload."""
        return hash_upload(self.settings.group, self.upload)

    @cached_property
    def explicit_share(self) -> bytes:
        """What stand-ins with coded masks send as explicit shares."""
        return self.settings.field.to_bytes(self.random_elements(self.settings.shared_length))

    def random_elements(self, count: int) -> Elements:
        """Field elements, uniform enough for a measurement."""
        generator = np.random.default_rng()
        return generator.integers(0, self.settings.field.modulus, count, dtype=np.uint32)

    def reports(self, round_: Round, owners: tuple[int, ...], client: int) -> Elements:
        """Coded masks: what a stand-in reports, on codewords with everybody else."""
        length = BLINDS * len(owners)
        return self._complete(self._reports, round_, owners, length)[client]

    def answer(self, round_: Round, survivors: tuple[int, ...], client: int) -> Elements:
        """Coded masks: the answer of a stand-in, on one codeword with everybody else's."""
        length = self.settings.share_length
        return self._complete(self._answers, round_, survivors, length)[client]

    def _complete(
        self, parts: _Completed, round_: Round, clients: tuple[int, ...], length: int
    ) -> Mapping[int, Elements]:
        if parts.codeword is None:
            code, known = self.settings.code, dict(parts.known)
            for client in clients:
                if len(known) < code.survivors:
                    known.setdefault(client, self.random_elements(length))
            chosen = sorted(known, key=round_.positions.__getitem__)
            rest = [client for client in clients if client not in known]
            _, shares = code.complete(
                [round_.positions[client] for client in chosen],
                np.stack([known[client] for client in chosen]),
                [round_.positions[client] for client in rest],
            )
            parts.codeword = known | dict(zip(rest, shares, strict=True))
        return parts.codeword


@dataclass(slots=True)
class _Completed:
    """What the real clients sent, and the codeword that stand-ins complete it to."""

    known: dict[int, Elements] = field(default_factory=dict)
    codeword: Mapping[int, Elements] | None = None


class StandIn:
    """A client that sends what the server expects, and works no more than its scheme needs."""

    wants_shares = True
    """Whether shares must be delivered to it."""

    def __init__(self, sample: Sample, client: int) -> None:
        self.client = client
        self._sample = sample
        self._settings = sample.settings
        self._keys: tuple[AgreementKey, ...] = ()
        self._scheme: ClientScheme | None = None
        self._held: dict[MaskRef, Share] = {}
        self._owners: tuple[int, ...] = ()
        self._survivors: tuple[int, ...] = ()
        self._header = b""

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Like a client's party, but never refuses anything."""
        match message:
            case Opening():
                return [Send(SERVER, self._open())]
            case Roster():
                return self._share(message)
            case ShareBundle():
                for share in message.shares:
                    self._take_share(share)
            case SharesClosed():
                self._owners = message.owners
                reports = Reports(tuple(self._report()))
                return [Send(SERVER, reports), Send(SERVER, self._upload())]
            case SumRequest():
                self._survivors = message.survivors
                malicious = ThreatModel.MALICIOUS_SERVER
                if self._settings.parameters.threat_model is not malicious:
                    return [Send(SERVER, self._answer())]
                identity, context = self._sample.identity(self.client), self.scheme.round.context
                signature = sum_statement(context, message).sign(identity)
                return [Send(SERVER, Consent(0, signature))]
            case Certificate():
                return [Send(SERVER, self._answer())]
        return []

    @property
    def scheme(self) -> ClientScheme:
        """The scheme, once the roster is known."""
        if self._scheme is None:
            raise AssertionError("the roster comes first")
        return self._scheme

    def _open(self) -> Message:
        if Phase.ADVERTISE not in self._settings.traits.phases:
            return self._upload()
        count = self._settings.traits.key_count
        self._keys = tuple(AgreementKey.generate(system_entropy) for _ in range(count))
        keys = tuple(key.public for key in self._keys)
        identity, context = self._sample.identity(self.client), self._settings.context
        return Advertise(keys, sign_keys(identity, context, self.client, keys))

    def _share(self, roster: Roster) -> list[Output]:
        mode = self._settings.parameters.share_mode
        scheme_class = scheme_of(self._settings.protocol, share_mode=mode).client
        self._scheme = scheme_class(self._sample.round(roster), self.client)
        return [*send_shares(self._sealed(self._keys[0], self._make_shares()))]

    def _sealed(self, key: AgreementKey, shares: list[OutgoingShare]) -> list[SealedShare]:
        """Sealed for real clients; for stand-ins in the clear, with zeros instead of tags."""
        round_, real = self.scheme.round, self._sample.real
        keys: dict[int, ShareKeys] = {}
        sealed: list[SealedShare] = []
        for share in shares:
            length, salt = len(share.plaintext), bytes(SALT_LENGTH)
            head = ShareHeader(
                round_.context, share.kind, self.client, share.recipient, 0, length, salt
            )
            if share.recipient in real:
                keys[share.recipient] = keys_with(round_, key, share.recipient, head)
                body = seal(keys[share.recipient], head, share.plaintext)
            else:
                body = share.plaintext.ljust(sealed_length(length), b"\0")
            sealed.append(SealedShare(self.client, share.recipient, share.kind, length, salt, body))
        if not self._settings.traits.checked:
            return sealed
        root = root_of(sealed)
        header = mask_header(round_.context, self.client, 0, bytes(SALT_LENGTH), root)
        self._header = header
        macs = {recipient: mine.bind(header) for recipient, mine in keys.items()}
        return [replace(s, mac=macs.get(s.recipient, bytes(MAC_LENGTH))) for s in sealed]

    def _upload(self) -> MaskedUpload:
        """The same vector as all others', under a tag of its own."""
        sample = self._sample
        tag = Tag(self.client, 0, self._header, 0, self._settings.model, sample.digest)
        return MaskedUpload(tag, sample.upload)

    def _take_share(self, message: SealedShare) -> None:
        if message.owner in self._sample.real:
            plaintext = open_share(self.scheme.round, self._keys[0], self.client, message)
        else:
            plaintext = bytes(message.sealed[: message.length])
        self._held[MaskRef(message.owner, message.serial)] = (message.kind.value, plaintext)

    def _make_shares(self) -> list[OutgoingShare]:
        """One share per peer."""
        private = tuple(key.private_bytes() for key in self._keys)
        self.scheme.expands_ahead = False  # it uploads no masked update
        mask = self.scheme.prepare(0, private, system_entropy)
        self._held[MaskRef(self.client)] = mask.own
        return mask.outgoing

    def _report(self) -> Iterable[Report]:
        """All shares are here that its neighbours have sent."""
        members = self.scheme.round.members
        return (Report(owner, 0, b"") for owner in members if MaskRef(owner) in self._held)

    def _answer(self) -> Message:
        """The answer for the survivors."""
        terms = [Term(MaskRef(client)) for client in self._survivors]
        return self.scheme.answer(self._held, terms, self._owners)


class CodedStandIn(StandIn):
    """Sends random shares and completes the codeword of the answers."""

    wants_shares = False

    def _make_shares(self) -> list[OutgoingShare]:
        parameters, round_ = self._settings.parameters, self.scheme.round
        own = round_.positions[self.client]
        seeded: set[int] = set()
        if self._settings.uses_seeds:
            seeded = set(seeded_positions(own, len(round_.members), parameters.survivors))
        return [
            OutgoingShare(recipient, ShareKind.SEED, draw(system_entropy, prg.SEED_LENGTH))
            if position in seeded
            else OutgoingShare(recipient, ShareKind.EXPLICIT, self._sample.explicit_share)
            for position, recipient in enumerate(round_.members)
            if position != own
        ]

    def _report(self) -> Iterable[Report]:
        said = self._sample.reports(self.scheme.round, self._owners, self.client)
        values = said.reshape(len(self._owners), BLINDS)
        to_bytes = self._settings.field.to_bytes
        return (
            Report(owner, 0, to_bytes(v)) for owner, v in zip(self._owners, values, strict=True)
        )

    def _answer(self) -> Message:
        return AggregatedShare(self._sample.answer(self.scheme.round, self._survivors, self.client))

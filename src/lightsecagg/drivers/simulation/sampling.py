"""Stand-ins for most clients, so that rounds can be measured that are too large to simulate.

Only n clients are real: they make, seal, open and sum all the shares that they would among N. The
others are stand-ins, which send messages of the right form and size without the work: they seal
shares for real clients only, check nobody's keys, upload one and the same vector, and are not
charged for anything. The server cannot tell the difference and does all of its work: it relays N
bundles, sums the uploads, and recovers from as many answers.

    LightSecAgg     a stand-in's shares are random, and the answers of all stand-ins complete those
                    of the real clients to one codeword, so that the server's check finds nothing
    SecAgg(+)       a stand-in really shares its two secrets, so that the server can rebuild them

The sum that comes out means nothing; `exact` is None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import draw, system_entropy
from lightsecagg.crypto.sealing import SALT_LENGTH, ShareKind, sealed_length
from lightsecagg.drivers.simulation.cohort import Cohort
from lightsecagg.errors import ParameterError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.mask_encoding import seeded_positions
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.interface import SERVER, Output, Send
from lightsecagg.protocol.messages import (
    AggregatedShare,
    Certificate,
    MaskedUpload,
    Message,
    Opening,
    Roster,
    SealedShare,
    SharesClosed,
    SurvivorSet,
    SurvivorSignature,
)
from lightsecagg.protocol.roster import Round, fix_round, sign_survivors
from lightsecagg.protocol.round_client import Advertised, RoundClient
from lightsecagg.protocol.settings import ProtocolName, Settings
from lightsecagg.protocol.share_exchange import OutgoingShare, Share, open_share, seal_share


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
        self._answers: dict[int, Elements] = {}
        self._round: Round | None = None

    def stand_in(self, client: int) -> StandIn:
        """The party of a client that is not real."""
        party = self._cohort.client(client, self.settings)
        kind = {
            ProtocolName.LIGHTSECAGG: LightSecAggStandIn,
            ProtocolName.PLAIN: PlainStandIn,
        }.get(self.settings.protocol, SecAggStandIn)
        return kind(self, party)

    def round(self, roster: Roster) -> Round:
        """The round that everybody's roster fixes; computed once for all stand-ins."""
        if self._round is None:
            self._round = fix_round(self.settings, self._cohort.allow_list, roster)
        return self._round

    def sign(self, client: int, round_: Round, survivors: tuple[int, ...]) -> bytes:
        """A stand-in's consent to U1."""
        return sign_survivors(self._cohort.identity(client), round_.context, survivors)

    def observe(self, client: int, message: Message) -> None:
        """A real client sends this."""
        if isinstance(message, AggregatedShare):
            self._answers[client] = message.vector

    @cached_property
    def upload(self) -> Elements:
        """What every stand-in uploads."""
        return self.random_elements(self.settings.length)

    @cached_property
    def explicit_share(self) -> bytes:
        """What LightSecAgg's stand-ins send as explicit shares."""
        return self.settings.field.to_bytes(self.random_elements(self.settings.share_length))

    def random_elements(self, count: int) -> Elements:
        """Field elements, uniform enough for a measurement."""
        generator = np.random.default_rng()
        return generator.integers(0, self.settings.field.modulus, count, dtype=np.uint32)

    def answer(self, round_: Round, survivors: tuple[int, ...], client: int) -> Elements:
        """LightSecAgg: the answer of a stand-in, on one codeword with everybody else's."""
        return self._completed(round_, survivors)[client]

    def _completed(self, round_: Round, survivors: tuple[int, ...]) -> Mapping[int, Elements]:
        if self._codeword is None:
            code, length = self.settings.code, self.settings.share_length
            known = dict(self._answers)
            for client in survivors:
                if len(known) < code.survivors:
                    known.setdefault(client, self.random_elements(length))
            chosen = sorted(known, key=round_.positions.__getitem__)
            rest = [client for client in survivors if client not in known]
            _, shares = code.complete(
                [round_.positions[client] for client in chosen],
                np.stack([known[client] for client in chosen]),
                [round_.positions[client] for client in rest],
            )
            self._codeword = known | dict(zip(rest, shares, strict=True))
        return self._codeword

    _codeword: Mapping[int, Elements] | None = None


class StandIn(ABC):
    """A client that sends what the server expects, and works as little as it can."""

    wants_shares = False
    """Whether shares must be delivered to it."""

    def __init__(self, sample: Sample, party: RoundClient) -> None:
        self.client = party.client
        self._sample = sample
        self._party = party
        self._round: Round | None = None
        self._keys: tuple[bytes, ...] = ()
        self._owners: tuple[int, ...] = ()
        self._survivors: tuple[int, ...] = ()

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Like a client's party, but never refuses anything."""
        match message:
            case Opening():
                return self._open(message)
            case Roster():
                return self._share(message)
            case SealedShare():
                self._take_share(message)
            case SharesClosed():
                self._owners = message.owners
                return [Send(SERVER, MaskedUpload(self._bitmap(), self._sample.upload))]
            case SurvivorSet():
                self._survivors = message.survivors
                malicious = ThreatModel.MALICIOUS_SERVER
                if self._sample.settings.parameters.threat_model is not malicious:
                    return [Send(SERVER, self._answer())]
                signature = self._sample.sign(self.client, self.round, message.survivors)
                return [Send(SERVER, SurvivorSignature(signature))]
            case Certificate():
                return [Send(SERVER, self._answer())]
        return []

    @property
    def round(self) -> Round:
        """The round, once the roster is known."""
        if self._round is None:
            raise AssertionError("the roster comes first")
        return self._round

    def _open(self, message: Opening) -> list[Output]:
        outputs = self._party.receive(SERVER, message)
        if isinstance(self._party.state, Advertised):
            self._keys = self._party.state.private_keys
        return outputs

    def _share(self, roster: Roster) -> list[Output]:
        self._round = self._sample.round(roster)
        key = AgreementKey(self._keys[0])
        return [Send(SERVER, self._sealed(key, share)) for share in self._make_shares()]

    def _sealed(self, key: AgreementKey, share: OutgoingShare) -> SealedShare:
        """Sealed for a real client; for a stand-in in the clear, with zeros instead of tags."""
        if share.recipient in self._sample.real:
            return seal_share(self.round, key, self.client, share)
        length = len(share.plaintext)
        padded = share.plaintext.ljust(sealed_length(length), b"\0")
        return SealedShare(
            self.client, share.recipient, share.kind, length, bytes(SALT_LENGTH), padded
        )

    def _bitmap(self) -> bytes:
        """All shares are here."""
        bits = np.zeros(len(self.round.members), dtype=np.uint8)
        bits[[self.round.positions[owner] for owner in self._owners]] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def _take_share(self, message: SealedShare) -> None:
        raise AssertionError("no share is delivered to a stand-in that wants none")

    @abstractmethod
    def _make_shares(self) -> list[OutgoingShare]:
        """One share per peer."""

    @abstractmethod
    def _answer(self) -> Message:
        """The answer for the survivors."""


class LightSecAggStandIn(StandIn):
    """Sends random shares and completes the codeword of the answers."""

    def _make_shares(self) -> list[OutgoingShare]:
        parameters, members = self._sample.settings.parameters, self.round.members
        own = self.round.positions[self.client]
        seeded: set[int] = set()
        if parameters.share_mode is ShareMode.SEEDED:
            seeded = set(seeded_positions(own, len(members), parameters.survivors))
        return [
            OutgoingShare(recipient, ShareKind.SEED, draw(system_entropy, prg.SEED_LENGTH))
            if position in seeded
            else OutgoingShare(recipient, ShareKind.EXPLICIT, self._sample.explicit_share)
            for position, recipient in enumerate(members)
            if position != own
        ]

    def _answer(self) -> Message:
        return AggregatedShare(self._sample.answer(self.round, self._survivors, self.client))


class SecAggStandIn(StandIn):
    """Shares its two secrets like a real client, and answers with the shares that it got."""

    wants_shares = True

    def __init__(self, sample: Sample, party: RoundClient) -> None:
        super().__init__(sample, party)
        self._held: dict[int, Share] = {}

    def _make_shares(self) -> list[OutgoingShare]:
        _, own, outgoing = self._party._make_shares(self.round, self._keys)
        self._held[self.client] = own
        return outgoing

    def _take_share(self, message: SealedShare) -> None:
        if message.owner in self._sample.real:
            plaintext = open_share(self.round, AgreementKey(self._keys[0]), self.client, message)
        else:
            plaintext = message.sealed[: message.length]
        self._held[message.owner] = (message.kind.value, plaintext)

    def _answer(self) -> Message:
        return self._party._answer(self.round, b"", self._held, self._owners, self._survivors)


class PlainStandIn(StandIn):
    """Uploads without further ado."""

    def _open(self, message: Opening) -> list[Output]:
        return [Send(SERVER, MaskedUpload(b"", self._sample.upload))]

    def _make_shares(self) -> list[OutgoingShare]:
        raise AssertionError("plain summation has no shares")

    def _answer(self) -> Message:
        raise AssertionError("plain summation has no answers")

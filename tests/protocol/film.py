"""One client of a real round, kept at every step, with the messages that were meant for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from bundles import Part as Piece
from bundles import whole
from driver import MALICIOUS, Federation

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.client import Client, Registered
from lightsecagg.protocol.interface import SERVER, Send
from lightsecagg.protocol.kept_shares import Answered, Part, Signed
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Certificate,
    Consent,
    MaskedUpload,
    Member,
    Message,
    Opening,
    Refusal,
    Reports,
    ReportsWanted,
    Roster,
    SealedShare,
    ShareBundle,
    SharesClosed,
    SumRequest,
    Tag,
    UnmaskingShares,
    UploadDropped,
)
from lightsecagg.protocol.schemes.interface import MaskRef, Term
from lightsecagg.protocol.share_exchange import Share

STEPS = (
    "Waiting",
    "Advertised",
    "Sharing",
    "Sharing, shares held",
    "Sharing, closed",
    "Uploaded",
    "Signed",
    "Answered",
    "Closed",
)


def step_of(client: Client) -> str:
    """Where in its round a client is, by the states of its two machines."""
    state = client.state
    if not isinstance(state, Registered):
        return type(state).__name__
    if isinstance(state.holder, Signed | Answered):
        return type(state.holder).__name__
    if state.contributor is not None and state.contributor.update:
        return "Uploaded"
    if state.owners is not None:
        return "Sharing, closed"
    full = state.holder is not None and len(state.holder.kept) == len(state.roster.members)
    return "Sharing, shares held" if full else "Sharing"


def held_by(client: Client) -> dict[MaskRef, Share]:
    """The shares that a client holds."""
    assert isinstance(client.state, Registered)
    assert client.state.holder is not None
    found: dict[MaskRef, Share] = {}
    for owner, of in client.state.holder.kept.items():
        for serial, kept in of.items():
            kind, data = kept.share
            assert not isinstance(data, Part)
            found[MaskRef(owner, serial)] = (kind, data)
    return found


def terms(survivors: Iterable[int]) -> list[Term]:
    """The masks of a round's sum."""
    return [Term(MaskRef(client)) for client in survivors]


@dataclass
class Film:
    """Snapshots of the first client of a round, and what it was sent."""

    threat_model: ThreatModel = MALICIOUS
    share_mode: ShareMode = ShareMode.SEEDED
    entropy: Entropy = system_entropy
    snapshots: dict[str, bytes] = field(default_factory=dict)
    genuine: dict[type, Message] = field(default_factory=dict)
    shares: list[SealedShare] = field(default_factory=list)
    sent: dict[type, list[Message]] = field(default_factory=dict)
    """What the client sent, by type."""

    def __post_init__(self) -> None:
        federation = Federation(7, 1, 2, 4, self.threat_model, self.share_mode)
        self.federation = federation
        network = federation.network()
        self.me = federation.ids[0]
        client = federation.client(self.me, entropy=self.entropy)
        network.clients[self.me] = client
        network.train_at_once = False
        self._keep("Waiting", client)
        network.start()

        def tamper(sender: int, recipient: int, message: Piece) -> list[Piece]:
            if recipient == self.me:
                self.genuine.setdefault(type(whole(message)), whole(message))
                if isinstance(message, SealedShare):
                    self.shares.append(message)
            if sender == self.me:
                self.sent.setdefault(type(whole(message)), []).append(whole(message))
            return [message]

        network.tamper = tamper
        self.genuine[Opening] = Opening(federation.settings().to_bytes())
        while network.queue:
            network.step()
            self._keep(step_of(client), client)
            if not network.queue:
                for other in sorted(network.waiting):
                    network.train(other)
                    self._keep(step_of(client), client)
        network.assert_exact(federation.ids)
        client.abort("the test is over")
        self._keep("Closed", client)
        self._add_messages_for_others()

    def _keep(self, step: str, client: Client) -> None:
        self.snapshots.setdefault(step, client.snapshot())

    def _add_messages_for_others(self) -> None:
        self.genuine[AbortRound] = AbortRound("for this reason")
        self.genuine[Refusal] = Refusal(0, ())
        self.genuine[ReportsWanted] = ReportsWanted(((self.federation.ids[1], 0),))
        self.genuine[UploadDropped] = UploadDropped(0)
        self.genuine[UnmaskingShares] = UnmaskingShares(b"", b"")
        for kind in (Advertise, Reports, MaskedUpload, Consent, AggregatedShare):
            if kind in self.sent:
                self.genuine[kind] = self.sent[kind][0]

    @property
    def contradicting(self) -> dict[type, Message]:
        """Messages of the same types that contradict the genuine ones."""
        roster = self.genuine[Roster]
        survivors = self.genuine[SumRequest]
        assert isinstance(roster, Roster)
        assert isinstance(survivors, SumRequest)
        others = tuple(client for client in survivors.survivors if client != self.me)
        members: tuple[Member, ...] = roster.members[1:]
        share = self.shares[0]
        messages: dict[type, Message] = {
            Opening: Opening(self.federation.settings(2).to_bytes()),
            Roster: Roster(members, ()),
            ShareBundle: whole(replace(share, recipient=others[-1])),
            SharesClosed: self.closed(others),
            SumRequest: SumRequest(0, tuple(map(Tag, others))),
            ReportsWanted: ReportsWanted(((999, 0),)),
            UploadDropped: UploadDropped(0),
        }
        if Certificate in self.genuine:
            certificate = self.genuine[Certificate]
            assert isinstance(certificate, Certificate)
            messages[Certificate] = Certificate(0, certificate.signatures[:-1])
        return messages

    def closed(self, owners: tuple[int, ...]) -> SharesClosed:
        """The end of sharing with these owners."""
        return SharesClosed(owners)

    def client(self, step: str) -> Client:
        """The client as it was at this step."""
        return Client.restore(
            self.snapshots[step],
            self.federation.identities[self.me],
            self.federation.policy(),
            generation=0,
            entropy=self.entropy,
        )

    def deliver(self, client: Client, part: Piece) -> list[bytes]:
        """The bytes that the client sends in return."""
        codec = self.federation.codec
        outputs = client.receive(SERVER, codec.decode(codec.encode(whole(part))))
        return [codec.encode(output.message) for output in outputs if isinstance(output, Send)]

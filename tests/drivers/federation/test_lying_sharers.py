"""Clients that lie about shares: the sums are right, and no round ends without one (S46, R59)."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from network_federation import NetworkFederation
from small_federation import SESSION, Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.prg import draw_uniform
from lightsecagg.crypto.sealing import ShareHeader
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.provisioning import provision
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import Aborted
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.messages import AggregatedShare, Consent, ShareBundle
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import Findings, MaskRef, PreparedMask, Share
from lightsecagg.protocol.share_exchange import keys_with, mask_header, root_of
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_client import RoundClientSession
from memory_transport import MemoryServer

CLIENTS = 8
LIAR = 3


class Garbage(CodedMasksClient):
    """Sends two of its peers zeros: as a seed or as a share they are not what its mask needs."""

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        mask = super().prepare(serial, private_keys, entropy)
        spoilt = [share._replace(plaintext=bytes(len(share.plaintext))) for share in mask.outgoing]
        return mask._replace(outgoing=[*spoilt[:2], *mask.outgoing[2:]])


class LyingSession(RoundClientSession):
    """Follows the protocol but for its shares."""

    def _make_party(self, *arguments: Any) -> Any:
        party: Any = super()._make_party(*arguments)
        party._scheme_class = Garbage
        return party


class Liar(FederationClient):
    """The client of such a session."""

    session_type = LyingSession


def run(folder: Path, **rounds: Any) -> tuple[NetworkFederation, list[RoundRecord]]:
    """U = N - D = 6 of eight: the reports tell one liar."""
    federation = NetworkFederation(folder, clients=CLIENTS, privacy=1, dropouts=2)

    async def scenario() -> list[RoundRecord]:
        clients = [
            asyncio.create_task(federation.client(i, Liar if i == LIAR else FederationClient).run())
            for i in range(CLIENTS)
        ]
        try:
            return await asyncio.wait_for(federation.server(**rounds).run(), 100)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    return federation, asyncio.run(scenario())


def test_S46_a_server_that_examines_nothing_is_stopped_by_one_liar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodedMasksServer, "examine", lambda self, reports: Findings())
    with pytest.raises(Aborted, match="contradict each other and cannot be told apart"):
        run(tmp_path)


def test_S46_one_liar_stops_nobody_and_is_named_in_the_record(tmp_path: Path) -> None:
    federation, records = run(tmp_path, number=2)
    for record in records:
        assert record.aborted is None
        assert record.included == record.responders == [i for i in range(CLIENTS) if i != LIAR]
        assert record.suspects == [LIAR]
        assert {owner for owner, _ in record.accused} == {LIAR}
    federation.check(records[-1])


# -- as many clients as small federations have ---------------------------------------------------


class Nonsense(CodedMasksClient):
    """Reports nonsense on every share that it holds."""

    def report(self, ref: MaskRef, share: Share, header: bytes) -> Elements:
        honest = super().report(ref, share, header)
        return draw_uniform(honest.size, self.settings.field.modulus)


class GarbageForAll(CodedMasksClient):
    """Sends every peer zeros instead of its share."""

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        mask = super().prepare(serial, private_keys, entropy)
        spoilt = [share._replace(plaintext=bytes(len(share.plaintext))) for share in mask.outgoing]
        return mask._replace(outgoing=spoilt)


def liar_of(scheme: type[CodedMasksClient]) -> type[FederationClient]:
    class Session(RoundClientSession):
        def _make_party(self, *arguments: Any) -> Any:
            party: Any = super()._make_party(*arguments)
            party._scheme_class = scheme
            return party

    class Lying(FederationClient):
        session_type = Session

    return Lying


def round_with_a_liar(
    folder: Path,
    clients: int,
    scheme: type[CodedMasksClient] | None,
    *,
    missing: int = 0,
    liar: type[FederationClient] | None = None,
    **provisioned: Any,
) -> tuple[Federation, RoundRecord]:
    """One round of a provisioned federation in memory; client 0 lies, the last ones are away."""
    made = provision(folder / "files", clients, vectors=3, **provisioned)
    table = load_config(ServerConfig, made.server, environment={}).aggregation
    kept = ("privacy", "dropouts", "survivors", "threat_model")
    federation = Federation(folder / "state", clients, **{key: getattr(table, key) for key in kept})
    present = range(clients - missing)
    federation.awaited = len(present)
    kinds = {0: liar or liar_of(scheme or CodedMasksClient)}

    async def scenario() -> RoundRecord:
        parties = [federation.client(i, kinds.get(i, FederationClient)) for i in present]
        patient = {"advertise": 100, "share": 100, "upload": 100, "agree": 100, "recover": 100}
        async with federation.connected(parties):
            (record,) = await asyncio.wait_for(
                federation.server(wait_for_clients=100, **patient).run(), 300
            )
            return record

    return federation, asyncio.run(scenario())


@pytest.mark.parametrize("scheme", [Nonsense, GarbageForAll])
@pytest.mark.parametrize(
    ("clients", "missing"),
    [(4, 0), (5, 0), (6, 0), (6, 1), (7, 0), (7, 1), (8, 0), (8, 1), (9, 2), (12, 3)],
)
def test_R59_one_liar_stops_no_round_of_a_provisioned_federation(
    tmp_path: Path, clients: int, missing: int, scheme: type[CodedMasksClient]
) -> None:
    federation, record = round_with_a_liar(tmp_path, clients, scheme, missing=missing)
    federation.check(record)
    assert set(record.included) >= set(range(1, clients - missing))
    assert record.suspects == [0]


@pytest.mark.parametrize("clients", [4, 5, 6, 7])
def test_R59_without_spare_uploads_one_liar_stops_the_round_unnamed(
    tmp_path: Path, clients: int
) -> None:
    with pytest.raises(Aborted, match="no survivor set"):
        round_with_a_liar(tmp_path, clients, Nonsense, survivors=0)


# -- uploads that a liar has used up ---------------------------------------------------------------


class Renewable(VectorServer):
    """A model that is trained from, and that can be renewed."""

    renewals = 0

    def model(self) -> bytes:
        return b"a model" + bytes([self.renewals])

    def renew(self) -> None:
        self.renewals += 1


def fail_and_restart(
    folder: Path,
    clients: int,
    *,
    renews: bool,
    retries: int = 0,
    renews_later: bool = False,
    liar: type[FederationClient] | None = None,
) -> tuple[Renewable, Any]:
    """A liar ends every attempt; then it is gone, and the server is another process."""
    malicious = {"threat_model": "malicious-server"}
    federation = Federation(folder, clients, privacy=1, dropouts=1, **malicious)
    patient = {"advertise": 100, "share": 100, "upload": 100, "agree": 100, "recover": 100}

    async def attempts(
        kinds: dict[int, type[FederationClient]], retries: int, **phases: float
    ) -> Any:
        federation.job = Renewable(VectorsTable(dimension=federation.job.dimension))
        if not renews and (kinds or not renews_later):
            federation.job.renew = lambda: None
        parties = [federation.client(i, kinds.get(i, FederationClient)) for i in range(clients)]
        async with federation.connected(parties):
            rounds = patient | {"wait_for_clients": 100, "retries": retries} | phases
            return await asyncio.wait_for(federation.server(**rounds).run(), 300)

    with pytest.raises(Aborted, match=r"no survivor set|clients signed, m = "):
        asyncio.run(attempts({0: liar or liar_of(Nonsense)}, retries=1, agree=1))
    federation.transport = MemoryServer(range(clients))
    if renews_later:  # as if a server that renews nothing had left this journal
        with closing(Journal(folder, SESSION.hex())) as journal, journal._db.change():
            journal._set_meta("renewals", b"0")
    return federation.job, asyncio.run(attempts({}, retries=retries))


@pytest.mark.parametrize("clients", [4, 5, 6, 7])
def test_R59_S42_a_liar_cannot_use_up_the_uploads_of_the_others(
    tmp_path: Path, clients: int
) -> None:
    """D = 1 and U = N - 1, so that nobody is told; with the liar gone, there is a sum."""
    with pytest.raises(Aborted):  # from the same model nobody may upload a third time
        fail_and_restart(tmp_path / "naive", clients, renews=False)
    _, (record,) = fail_and_restart(tmp_path / "ours", clients, renews=True)
    assert record.aborted is None
    assert record.included == list(range(clients))


VICTIM = 1


def spoilt(bundle: ShareBundle, *, owner: int, recipient: int) -> ShareBundle:
    """One of its shares does not open."""
    spoil = [(share.owner, share.recipient) == (owner, recipient) for share in bundle.shares]
    pairs = zip(bundle.shares, spoil, strict=True)
    return ShareBundle(tuple(replace(s, sealed=bytes(len(s.sealed))) if x else s for s, x in pairs))


def cheating(round_: Any, bundle: ShareBundle) -> ShareBundle:
    """The own shares, of which one does not open, bound as if it did."""
    party, shares = round_.party, spoilt(bundle, owner=0, recipient=VICTIM).shares
    scheme = party._scheme(party.state)
    context = scheme.round
    key = AgreementKey(party.state.private_keys[0])
    root, salt = root_of(shares), shares[0].salt
    header = mask_header(context.context, 0, 0, salt, root)
    bound = []
    for s in shares:
        head = ShareHeader(context.context, s.kind, 0, s.recipient, 0, s.length, salt)
        bound.append(replace(s, mac=keys_with(context, key, s.recipient, head).bind(header)))
    holder = party.state.holder
    own = structs.replace(holder.kept[0][0], header=header)
    holder = structs.replace(holder, kept={**holder.kept, 0: {0: own}})
    stock = {0: structs.replace(party.state.contributor.stock[0], header=header)}
    contributor = structs.replace(party.state.contributor, stock=stock)
    party.state = structs.replace(party.state, holder=holder, contributor=contributor)
    return ShareBundle(tuple(bound))


class QuarrelsomeSession(RoundClientSession):
    """Of it and one peer neither holds the other's share; then it lies in its answer."""

    def _decode(self, round_: Any, body: memoryview) -> Any:
        message = super()._decode(round_, body)
        if isinstance(message, ShareBundle):
            return spoilt(message, owner=VICTIM, recipient=self.client)
        return message

    def _send(self, round_: Any, message: Any) -> None:
        if isinstance(message, ShareBundle):
            message = cheating(round_, message)
        if isinstance(message, AggregatedShare):
            message = replace(message, vector=message.vector ^ 1)
        super()._send(round_, message)


class Quarrelsome(FederationClient):
    """The client of such a session."""

    session_type = QuarrelsomeSession


@pytest.mark.parametrize(("clients", "missing"), [(4, 0), (5, 0), (6, 1), (7, 1), (8, 1)])
def test_R59_who_quarrels_with_one_peer_and_lies_in_its_answer_ends_no_round(
    tmp_path: Path, clients: int, missing: int
) -> None:
    """A quorum needs one of the two: it is the liar that stays, and its answer is not used."""
    federation, record = round_with_a_liar(
        tmp_path, clients, None, missing=missing, liar=Quarrelsome
    )
    federation.check(record)
    assert record.included == [c for c in range(clients - missing) if c != VICTIM]
    assert 0 not in record.responders


class SilentSession(RoundClientSession):
    """Sends one peer a share that does not open, uploads, and signs nothing."""

    def _send(self, round_: Any, message: Any) -> None:
        if isinstance(message, ShareBundle):
            message = cheating(round_, message)
        if not isinstance(message, Consent):
            super()._send(round_, message)


class Silent(FederationClient):
    """The client of such a session."""

    session_type = SilentSession


@pytest.mark.parametrize("clients", [4, 5])
def test_R59_who_cheats_a_peer_and_then_signs_nothing_uses_up_no_uploads(
    tmp_path: Path, clients: int
) -> None:
    """Two signatures are missing, after the set was announced: nobody has answered for it."""
    with pytest.raises(Aborted, match="only 0 clients advertised"):
        fail_and_restart(tmp_path / "naive", clients, renews=False, liar=Silent)
    _, (record,) = fail_and_restart(tmp_path / "ours", clients, renews=True, liar=Silent)
    assert record.aborted is None
    assert record.included == list(range(clients))


def test_R59_a_model_whose_uploads_are_used_up_already_is_renewed(tmp_path: Path) -> None:
    """Clients refuse at the opening, so that no upload is ever due."""
    _, records = fail_and_restart(tmp_path, 5, renews=False, retries=1, renews_later=True)
    assert [record.aborted is None for record in records] == [False, True]
    assert any("has uploaded 2 updates" in reason for reason in records[0].withdrawn)

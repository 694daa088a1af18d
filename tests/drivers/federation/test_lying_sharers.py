"""Clients that lie about shares: the sums are right, and no round ends without one (S46, R59)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation
from small_federation import SESSION, Federation

from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.prg import draw_uniform
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.provisioning import provision
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.drivers.transport.memory import MemoryServer
from lightsecagg.errors import Aborted
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import Findings, MaskRef, PreparedMask, Share
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_client import RoundClientSession

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

    def report(self, held: Mapping[MaskRef, Share], check_secret: bytes) -> Elements:
        honest = super().report(held, check_secret)
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
    scheme: type[CodedMasksClient],
    *,
    missing: int = 0,
    **provisioned: Any,
) -> tuple[Federation, RoundRecord]:
    """One round of a provisioned federation in memory; client 0 lies, the last ones are away."""
    made = provision(folder / "files", clients, vectors=3, **provisioned)
    table = load_config(ServerConfig, made.server, environment={}).aggregation
    kept = ("privacy", "dropouts", "survivors")
    federation = Federation(folder / "state", clients, **{key: getattr(table, key) for key in kept})
    present = range(clients - missing)
    federation.awaited = len(present)
    kinds = {0: liar_of(scheme)}

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
    folder: Path, clients: int, *, renews: bool, retries: int = 0, renews_later: bool = False
) -> tuple[Renewable, Any]:
    """A liar ends every attempt; then it is gone, and the server is another process."""
    federation = Federation(folder, clients, privacy=1, dropouts=1)
    patient = {"advertise": 100, "share": 100, "upload": 100, "agree": 100, "recover": 100}

    async def attempts(kinds: dict[int, type[FederationClient]], retries: int) -> Any:
        federation.job = Renewable(VectorsTable(dimension=federation.job.dimension))
        if not renews and (kinds or not renews_later):
            federation.job.renew = lambda: None
        parties = [federation.client(i, kinds.get(i, FederationClient)) for i in range(clients)]
        async with federation.connected(parties):
            server = federation.server(wait_for_clients=100, retries=retries, **patient)
            return await asyncio.wait_for(server.run(), 300)

    with pytest.raises(Aborted, match="no survivor set"):
        asyncio.run(attempts({0: liar_of(Nonsense)}, retries=1))
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


def test_R59_a_model_whose_uploads_are_used_up_already_is_renewed(tmp_path: Path) -> None:
    """Clients refuse at the opening, so that no upload is ever due."""
    _, records = fail_and_restart(tmp_path, 5, renews=False, retries=1, renews_later=True)
    assert [record.aborted is None for record in records] == [False, True]
    assert any("has uploaded 2 updates" in reason for reason in records[0].withdrawn)

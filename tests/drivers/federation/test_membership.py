"""Members come and go while a federation runs; nobody but the authority decides who (S24)."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from network_federation import Contribution, NetworkFederation

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.administration import Administration
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.membership import (
    KnownMembers,
    Membership,
    MembersInUse,
    load_membership,
    read_membership,
    sign_membership,
)
from lightsecagg.drivers.federation.programs import _credentials
from lightsecagg.drivers.federation.provisioning import load_identity
from lightsecagg.drivers.transport.communicator import Received
from lightsecagg.drivers.transport.grpc import GrpcServer
from lightsecagg.errors import Aborted, ConfigurationError, ParameterError, Refused
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Update
from lightsecagg.session.envelope import Goodbye, NewMembers, pack_control


class Office:
    """A federation whose authority works elsewhere, on its own copy of the files."""

    def __init__(self, folder: Path, clients: int = 5) -> None:
        self.network = NetworkFederation(folder, clients)
        self.made = self.network.made
        self.directory = folder / "elsewhere"
        shutil.copytree(self.made.directory, self.directory)
        self.authority = Administration(self.directory)
        self.signer = load_identity(self.directory / "authority" / "allow-list.key")

    @property
    def list_of_server(self) -> Path:
        return self.made.server.parent / "allow-list.json"

    def own_list(self, client: int) -> Path:
        return self.made.clients[client].parent / "allow-list.json"

    def deliver(self) -> None:
        """The newest list, to the server, as an operator would: written beside, then renamed."""
        draft = self.list_of_server.with_suffix(".new")
        draft.write_bytes(self.authority.allow_list.read_bytes())
        draft.replace(self.list_of_server)

    def adopt(self, client: int) -> None:
        """A client that was added later."""
        files = self.directory / "clients" / str(client)
        shutil.copytree(files, self.made.directory / "clients" / str(client))
        self.made.clients[client] = (  # type: ignore[index]
            self.made.directory / "clients" / str(client) / f"client-{client}.toml"
        )

    def number(self, path: Path) -> int:
        return load_membership(path, self.made.authority_key, self.made.session).number

    def known(self, client: int) -> KnownMembers:
        """What a client of this name makes of its files when it starts."""
        config = load_config(ClientConfig, self.made.clients[client])
        ledger = ClientLedger(config.client.ledger, self.made.session, client)
        try:
            path = config.federation.allow_list
            return KnownMembers(path, self.made.authority_key, self.made.session, ledger, client)
        finally:
            ledger.close()


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


class Clerk(Contribution):
    """Client 0's job; in round 1 the authority works while clients train."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(0)
        self._work = work

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        if round_number == 1:
            self._work()
        return super().compute(model, round_number, bound)


def leave(*clients: FederationClient) -> None:
    """Let others have the ledgers, as the end of a process does."""
    for client in clients:
        assert isinstance(client._ledger, ClientLedger)
        client._ledger.close()


async def until(task: asyncio.Task[Any], look: Callable[[], Any]) -> None:
    while not look():
        assert not task.done(), task.result()
        await asyncio.sleep(0.02)


def test_S24_a_running_federation_takes_the_new_list_between_two_rounds(office: Office) -> None:
    """Client 4 is revoked and client 5 admitted while round 1 is under way."""

    def work() -> None:
        office.authority.add()
        office.authority.revoke([4])
        office.deliver()

    async def scenario() -> None:
        network = office.network
        server = network.server(number=2, min_clients=5)
        serving = asyncio.create_task(server.run())
        staying = [network.client(0, job=Clerk(work)), *(network.client(i) for i in (1, 2, 3))]
        tasks = [asyncio.create_task(client.run()) for client in staying]
        revoked = network.client(4)
        going = asyncio.create_task(revoked.run())
        with pytest.raises(Aborted, match=r"not on the allow-list any more \(number 3\)"):
            await going
        assert [record.included for record in server.records] == [[0, 1, 2, 3, 4]]
        leave(revoked)
        again = network.client(4)
        with pytest.raises(Refused, match="client 4 is not on the allow-list"):
            await again.run()
        office.adopt(5)
        records = (await asyncio.gather(serving, *tasks, network.client(5).run()))[0]
        assert [record.included for record in records] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]]
        network.check(records[-1])
        leave(*staying)

    asyncio.run(scenario())
    # Nobody brought it to the clients: the server did. They keep it.
    for client in (0, 1, 2, 3):
        assert office.number(office.own_list(client)) == 3
        assert office.known(client).current.number == 3


async def hostile_server(office: Office, client: int, *contents: bytes) -> None:
    """A genuine server, by its certificate, which sends these lists and says goodbye."""
    tls = load_config(ServerConfig, office.made.server).tls
    credentials = _credentials(tls)
    assert credentials is not None
    server = GrpcServer(office.network.address, range(9), credentials)
    await server.start()
    party = office.network.client(client)
    running = asyncio.create_task(party.run())
    try:
        async for event in server.events():
            if isinstance(event, Received):
                break
        for content in contents:
            await server.send(client, pack_control(NewMembers(content)))
        await server.send(client, pack_control(Goodbye("enough", finished=True)))
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()
        leave(party)


def test_S24_the_server_cannot_bring_a_revoked_client_back(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    first = office.list_of_server.read_bytes()
    office.authority.revoke([4])
    second = office.authority.allow_list.read_bytes()
    # Who looks at the signature alone takes the old list, with client 4, for a good one.
    naive = read_membership(first, office.made.authority_key, office.made.session, "it")
    assert 4 in naive.allow_list
    asyncio.run(hostile_server(office, 0, second, first))
    assert "an old list could bring revoked clients back" in caplog.text
    assert 4 not in load_membership(office.own_list(0), office.made.authority_key).allow_list
    # Nor does whoever restores the client's files: its ledger remembers.
    office.own_list(0).write_bytes(first)
    with pytest.raises(ConfigurationError, match="number 1, but number 2 was in use here"):
        office.known(0)
    office.own_list(0).write_bytes(second)
    assert office.known(0).current.number == 2


Forge = Callable[[Office, dict[int, bytes]], bytes]


def _signed(office: Office, identities: dict[int, bytes], number: int = 9) -> bytes:
    return sign_membership(office.signer, office.made.session, number, AllowList(identities))


FORGERIES: dict[str, tuple[Forge, str]] = {
    "the server's own key": (
        lambda office, known: sign_membership(
            IdentityKey.generate(), office.made.session, 9, AllowList(known)
        ),
        "does not verify",
    ),
    "another session": (
        lambda office, known: sign_membership(office.signer, bytes(32), 9, AllowList(known)),
        "signed for another session",
    ),
    "a number that was raised": (
        lambda office, known: json.dumps(
            json.loads(office.list_of_server.read_text()) | {"number": 9}
        ).encode(),
        "does not verify",
    ),
    "the same number again": (
        lambda office, known: _signed(office, {**known, 7: IdentityKey.generate().public}, 1),
        "has number 1, this client's number 1",
    ),
    "honest clients dropped": (
        lambda office, known: _signed(office, {i: known[i] for i in (0, 1, 2)}),
        "removes clients 3-4: more than client.max_removed = 1",
    ),
    "without this client": (
        lambda office, known: _signed(office, {i: known[i] for i in (1, 2, 3, 4)}),
        "does not name this client with its key",
    ),
    "another key for this client": (
        lambda office, known: _signed(office, known | {0: IdentityKey.generate().public}),
        "does not name this client with its key",
    ),
    "no list": (lambda office, known: b"[" * 3000, "is not an allow-list"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_S24_a_client_takes_no_list_but_the_authoritys_next(
    office: Office, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    forge, reason = FORGERIES[name]
    held = load_membership(office.own_list(0), office.made.authority_key).allow_list
    before = office.own_list(0).read_bytes()
    content = forge(office, {client: held[client] for client in held.clients})
    asyncio.run(hostile_server(office, 0, content))
    assert reason in caplog.text
    assert office.own_list(0).read_bytes() == before
    assert office.known(0).current.number == 1


def test_an_operator_may_install_what_the_server_may_not_pass_on(office: Office) -> None:
    office.authority.revoke([3, 4], anyway=True)
    office.own_list(0).write_bytes(office.authority.allow_list.read_bytes())
    assert office.known(0).current.allow_list.clients == (0, 1, 2)


def test_two_lists_of_one_number_are_noticed(office: Office) -> None:
    assert office.known(0).current.number == 1
    held = load_membership(office.own_list(0), office.made.authority_key).allow_list
    other = {**{i: held[i] for i in held.clients}, 7: IdentityKey.generate().public}
    office.own_list(0).write_bytes(_signed(office, other, 1))
    with pytest.raises(ConfigurationError, match="has signed two different ones"):
        office.known(0)


def test_S24_a_stolen_certificate_is_refused_once_its_client_has_another(office: Office) -> None:
    """Also on a stream that is open when the list arrives."""
    own = office.made.clients[1].parent

    async def scenario() -> None:
        network = office.network
        server = network.server(number=1, min_clients=5)
        serving = asyncio.create_task(server.run())
        thief = network.client(1)
        stealing = asyncio.create_task(thief.run())
        await until(serving, lambda: server.connected == [1])
        office.authority.renew([1], revoke_old=True)
        office.deliver()
        await until(serving, lambda: not server.connected)
        stealing.cancel()
        await asyncio.gather(stealing, return_exceptions=True)
        leave(thief)
        refused = network.client(1)
        with pytest.raises(Refused, match="this certificate was revoked; use the one"):
            await refused.run()
        leave(refused)
        for name in ("client.pem", "client.key"):
            shutil.copy(office.directory / "clients" / "1" / name, own / name)
        clients = [network.client(i).run() for i in range(5)]
        records, *_ = await asyncio.gather(serving, *clients)
        assert records[0].included == [0, 1, 2, 3, 4]

    asyncio.run(scenario())


def test_a_server_refuses_to_start_with_an_older_list(office: Office) -> None:
    first = office.list_of_server.read_bytes()
    office.authority.add()
    office.deliver()
    members = MembersInUse(office.list_of_server, office.made.authority_key, office.made.session)
    journal = Journal(office.made.server.parent / "state", office.made.session.hex())
    members.recall(journal)
    members.settle()
    journal.close()
    office.list_of_server.write_bytes(first)
    with pytest.raises(ConfigurationError, match="number 1, but number 2 was in use here"):
        office.network.server()


def test_a_bad_file_does_not_end_a_running_server(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    members = MembersInUse(office.list_of_server, office.made.authority_key, office.made.session)
    assert members.newer() is None
    office.list_of_server.write_bytes(b"{}")
    assert members.newer() is None
    assert "is not an allow-list" in caplog.text
    assert "going on with allow-list number 1" in caplog.text
    office.list_of_server.unlink()
    assert members.newer() is None
    office.authority.add()
    office.deliver()
    found = members.newer()
    assert isinstance(found, Membership)
    assert found.allow_list.clients == (0, 1, 2, 3, 4, 5)
    assert members.newer() is None


def test_a_round_that_a_crash_left_keeps_the_list_that_it_began_with(office: Office) -> None:
    key, session = office.made.authority_key, office.made.session
    journal = Journal(office.made.server.parent / "state", session.hex())
    members = MembersInUse(office.list_of_server, key, session)
    members.recall(journal)
    members.settle()
    began = members.current.allow_list
    office.authority.revoke([4])
    office.deliver()
    restarted = MembersInUse(office.list_of_server, key, session)
    restarted.recall(journal)
    assert restarted.current.allow_list.clients == (0, 1, 2, 3)
    found = restarted.allow_list(began.digest)
    assert found is not None
    assert found.clients == (0, 1, 2, 3, 4)
    assert restarted.allow_list(bytes(32)) is None
    journal.close()


class Patient(Contribution):
    """A job that lasts until it is told to end."""

    def __init__(self, client: int) -> None:
        super().__init__(client)
        self.go = threading.Event()

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        assert self.go.wait(250)
        return super().compute(model, round_number, bound)


@pytest.mark.slow
def test_R31_a_resumed_round_has_its_own_list_and_the_next_one_the_new(office: Office) -> None:
    """The server dies in round 1, and client 4, whose upload it has, is revoked meanwhile."""

    async def scenario() -> None:
        network, patient = office.network, Patient(0)
        waits = {"min_clients": 5, "upload": 200, "agree": 100, "recover": 100}
        waits["wait_for_clients"] = 200
        serving = asyncio.create_task(network.server(number=2, **waits).run())
        jobs: list[Contribution] = [patient, *(Contribution(i) for i in range(1, 5))]
        clients = [network.client(job.client, job=job) for job in jobs]
        *staying, revoked = [asyncio.create_task(client.run()) for client in clients]
        uploads = office.made.server.parent / "state" / "uploads"
        await until(serving, lambda: uploads.exists() and len(list(uploads.glob("*.u32"))) == 4)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        office.authority.add()
        office.authority.revoke([4])
        office.deliver()
        office.adopt(5)
        serving = asyncio.create_task(network.server(number=2, **waits).run())
        patient.go.set()
        clients.append(network.client(5))
        records, *_ = await asyncio.gather(serving, clients[-1].run(), *staying)
        revoked.cancel()
        await asyncio.gather(revoked, return_exceptions=True)
        assert [record.resumed for record in records] == [True, False]
        assert set(records[0].included) >= {0, 1, 2, 3}
        assert 4 not in records[0].responders
        assert records[1].included == [0, 1, 2, 3, 5]
        network.check(records[1])
        leave(*clients)

    asyncio.run(scenario())


def test_N_follows_the_members_and_T_and_D_must_still_fit(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    office.authority.revoke([4])
    office.deliver()
    caplog.set_level(logging.WARNING)
    server = office.network.server()
    parameters = server._settings.parameters
    assert (parameters.clients, parameters.privacy, parameters.dropouts) == (4, 1, 1)
    assert parameters.survivors == 3
    assert "rounds take N = 4, with T = 1, D = 1 and U = 3" in caplog.text
    server._journal.close()
    with pytest.raises(ParameterError, match="3 clients would remain, too few"):
        office.authority.revoke([3])
    assert office.authority.register.number == 2
    office.authority.revoke([3], anyway=True)
    office.deliver()
    with pytest.raises(ParameterError, match=r"T \+ 2 = 3 protects nobody"):
        office.network.server()


def test_a_running_server_with_too_few_members_says_so_and_ends(office: Office) -> None:
    async def scenario() -> None:
        server = office.network.server(min_clients=5)
        serving = asyncio.create_task(server.run())
        await until(serving, lambda: hasattr(server, "_session"))
        office.authority.revoke([2, 3], anyway=True)
        office.deliver()
        with pytest.raises(ConfigurationError, match="number 2 has 3 clients, too few for"):
            await serving

    asyncio.run(scenario())


def test_programs_warn_of_certificates_that_end_within_a_month(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    leave(office.network.client(0))
    assert "expires" not in caplog.text
    office.authority.renew([0], server=True, authority=True, days=29)
    for party in ("server", "clients/0"):
        for path in (office.directory / party).glob("*.[pk]e[my]"):
            shutil.copy(path, office.made.directory / party / path.name)
    leave(office.network.client(0))
    for name in ("ca.pem", "client.pem"):
        assert f"{office.made.clients[0].parent / name} expires on " in caplog.text
    assert "in 28 days; `lightsecagg members renew`, at the authority" in caplog.text
    server = office.network.server()
    assert "server.pem expires on " in caplog.text
    server._journal.close()

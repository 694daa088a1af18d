"""S44: who is missing from a round, and when, tells a server nothing about an update.

The attack, over real sockets: open one round after another from the same model, each with another
bound, relay the shares, and end the round before any upload. Who has withdrawn by then has an
entry beyond that bound. Thirty rounds give the largest entry of everybody to 1e-9.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from network_federation import DIMENSION, NetworkFederation
from peer_view import PeerView
from small_federation import Federation, FreshVectors

from laboratory import baseline
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.errors import Aborted
from lightsecagg.field.quantization import Quantizer
from lightsecagg.protocol.interface import Send, Update
from lightsecagg.protocol.messages import SharesClosed
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import (
    RoundModel,
    Withdraw,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.session.peers import Greeted, Spoke
from lightsecagg.session.round_client import RoundClientSession

MODEL = b"the same model in every round"
LARGEST = {0: 0.3141, 1: 0.2718, 2: 0.0577, 3: 0.9159}
QUESTIONS = 10


class Constant:
    """A client's job: the same vector whenever it is trained from the same model."""

    dimension = DIMENSION

    def __init__(self, largest: float, *, scales: bool = False) -> None:
        self.largest, self.scales = largest, scales

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        vector = np.full(DIMENSION, 0.01)
        # As FedNova's number of local steps, which is packed as a fraction of the bound.
        vector[-1] = self.largest * bound if self.scales else self.largest
        return Update(vector)


class WatchedSession(RoundClientSession):
    """Notes when it has made up its mind about a round."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.decided: set[int] = set()

    def _hand_over(self, round_: Any) -> None:
        asked = round_.update is not None and round_.needs_input
        super()._hand_over(round_)
        if asked:
            self.decided.add(round_.number)

    def _sit_out(self, round_: Any, reason: str) -> None:
        super()._sit_out(round_, reason)
        self.decided.add(round_.number)

    def _withdraw(self, round_: Any, reason: str) -> None:
        super()._withdraw(round_, reason)
        self.decided.add(round_.number)


class Watched(FederationClient):
    """A client that lets the test see when it has made up its mind about a round."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decided: set[int] = set()
        self.kinds: list[str] = []
        """Everything that it has sent."""
        send = self._communicator.send

        async def counted(data: bytes) -> None:
            content = unpack(data)
            tag = type(content).__name__
            self.kinds.append(f"message {content[1][0]}" if isinstance(content, tuple) else tag)
            await send(data)

        self._communicator.send = counted  # type: ignore[method-assign]

    session_type = WatchedSession

    async def _tell(self, event: Any) -> None:
        await super()._tell(event)
        assert isinstance(self._session, WatchedSession)
        self.decided |= self._session.decided  # and all that it says about it is said


class Unpinned(Watched):
    """Takes any bound: only the moment of its withdrawal, and its patience, protect it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._session._policy = replace(self._session._policy, bound=None)


class NaiveSession(WatchedSession):
    """Withdraws as soon as it knows that it must."""

    def _check_announcement(self, settings: Settings, round_: Any) -> None:
        pass

    def _withdraw_when_due(self, round_: Any) -> None:
        if round_.without_update and self._round is round_:
            self._withdraw(round_, "too soon")


class Naive(Unpinned):
    """Takes any bound, and any number of rounds, and withdraws as soon as it knows that it must."""

    session_type = NaiveSession

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._session._policy = replace(self._session._policy, max_openings=1000)


class Searcher:
    """The server: opens rounds, and listens until everybody has decided."""

    def __init__(self, federation: NetworkFederation, clients: Sequence[Watched]) -> None:
        server = federation.server()
        self._peers, self._journal = PeerView(server._communicator), server._journal
        self._settings, self._allow_list = server._settings, server._allow_list
        self._clients = clients
        self._heard: Counter[int] = Counter()
        self.withdrawn: dict[int, dict[int, str]] = {}

    async def start(self) -> None:
        await self._peers.start()
        while len(self._peers.ready()) < len(self._clients):
            await self._listen(0, None)

    async def close(self) -> None:
        await self._peers.close()
        self._journal.close()

    async def ask(self, number: int, announced: float, bound: float) -> dict[int, str]:
        """Who withdraws from a round with this bound, before its uploads, and why."""
        quantizer = Quantizer(self._settings.field, bound, len(self._clients))
        model = hash_model(MODEL)
        settings = replace(self._settings, round=number, model=model, quantizer=quantizer)
        party = Server(settings, self._allow_list, range(len(self._clients)))
        for client in range(len(self._clients)):
            self._peers.post(client, pack_control(RoundModel(number, MODEL, announced)))
        self._post(number, party, party.start())
        while not self._everything_is_said(number):
            await self._listen(number, party)
        return self.withdrawn.get(number, {})

    def _everything_is_said(self, number: int) -> bool:
        return all(
            number in client.decided and self._heard[i] == len(client.kinds)
            for i, client in enumerate(self._clients)
        )

    async def _listen(self, number: int, party: Server | None) -> None:
        event = await self._peers.next(0.01)
        if isinstance(event, Greeted | Spoke):
            self._heard[event.client] += 1
        match event:
            case Spoke(client, Withdraw(of, reason)):
                # The party is not told: it would end the round before the others have decided.
                self.withdrawn.setdefault(of, {})[client] = reason
            case Spoke(client, (of, body)) if of == number and party is not None:
                codec = Codec(party.settings.field)
                self._post(number, party, party.receive(client, codec.decode(body)))

    def _post(self, number: int, party: Server, outputs: Iterable[Any]) -> None:
        codec = Codec(party.settings.field)
        for output in outputs:
            if isinstance(output, Send) and not isinstance(output.message, SharesClosed):
                self._peers.post(output.to, pack_protocol(number, codec.encode(output.message)))


@asynccontextmanager
async def attack(folder: Path, kind: type[Watched], *, scales: bool = False, clip: bool) -> Any:
    """The server and its victims, connected."""
    federation = NetworkFederation(folder, 4)
    table = [f"client.clip={str(clip).lower()}"]
    victims: list[Any] = [
        federation.client(i, kind, job=Constant(largest, scales=scales), table=table)
        for i, largest in LARGEST.items()
    ]
    searcher = Searcher(federation, victims)
    tasks = [asyncio.create_task(victim.run()) for victim in victims]
    try:
        async with asyncio.timeout(120):
            await searcher.start()
            yield searcher, victims
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await searcher.close()


def test_S44_control_a_client_that_withdraws_at_once_is_searched(tmp_path: Path) -> None:
    """Bisection over the bound: one bit of client 0's largest entry per round, and no upload."""

    async def scenario() -> float:
        low, high = 0.0, 1.0
        async with attack(tmp_path, Naive, clip=False) as (searcher, _):
            for number in range(1, QUESTIONS + 1):
                middle = (low + high) / 2
                beyond = 0 in await searcher.ask(number, middle, middle)
                low, high = (middle, high) if beyond else (low, middle)
        return (low + high) / 2

    assert asyncio.run(scenario()) == pytest.approx(LARGEST[0], abs=2.0**-QUESTIONS)


def test_S44_control_scalars_are_searched_by_another_bound_than_announced(tmp_path: Path) -> None:
    async def scenario() -> float:
        low, high = 0.0, 1.0
        async with attack(tmp_path, Naive, scales=True, clip=False) as (searcher, _):
            for number in range(1, QUESTIONS + 1):
                middle = (low + high) / 2
                beyond = 0 in await searcher.ask(number, 1.0 / middle, 1.0)
                low, high = (middle, high) if beyond else (low, middle)
        return (low + high) / 2

    assert asyncio.run(scenario()) == pytest.approx(LARGEST[0], abs=2.0**-QUESTIONS)


def test_S44_before_the_uploads_a_client_says_nothing_about_its_update(tmp_path: Path) -> None:
    """Whatever the bound, and although these clients take any: for 16 rounds, then no more."""

    async def scenario() -> tuple[Searcher, list[Watched]]:
        async with attack(tmp_path, Unpinned, clip=False) as (searcher, victims):
            for number in range(1, 18):
                await searcher.ask(number, 0.06 * number, 0.06 * number)
            return searcher, victims

    searcher, victims = asyncio.run(scenario())
    assert list(searcher.withdrawn) == [17]
    assert set(searcher.withdrawn[17]) == set(LARGEST)
    assert all("max_openings = 16" in reason for reason in searcher.withdrawn[17].values())
    assert len({tuple(sorted(victim.kinds)) for victim in victims}) == 1


@pytest.mark.parametrize("clip", [True, False])
def test_S44_as_provisioned_a_client_refuses_every_bound_but_its_own(
    tmp_path: Path, clip: bool
) -> None:
    async def scenario() -> Searcher:
        async with attack(tmp_path, Watched, clip=clip) as (searcher, _):
            for number, bound in enumerate((0.5, 0.999999, 1.0, 1.000001, 2.0), 1):
                await searcher.ask(number, bound, bound)
            return searcher

    searcher = asyncio.run(scenario())
    for number in (1, 2, 4, 5):
        assert set(searcher.withdrawn[number]) == set(LARGEST)
        reasons = searcher.withdrawn[number].values()
        assert all("this client's is 1.0" in reason for reason in reasons)
    assert 3 not in searcher.withdrawn


@pytest.mark.parametrize("announced", [0.5, 2.0, float("nan")])
def test_S44_a_bound_other_than_announced_is_refused(tmp_path: Path, announced: float) -> None:
    async def scenario() -> dict[int, str]:
        async with attack(tmp_path, Watched, scales=True, clip=True) as (searcher, _):
            refused: dict[int, str] = await searcher.ask(1, announced, 1.0)
            return refused

    reasons = asyncio.run(scenario())
    assert set(reasons) == set(LARGEST)
    expected = f"announced round 1 with bound {announced} and opens round 1 with bound 1.0"
    assert all(expected in reason for reason in reasons.values())


# -- without an attacker -------------------------------------------------------------------------


class Unfit(FreshVectors):
    """A client's job that ends badly."""

    def __init__(self, client: int, end: str) -> None:
        super().__init__(client)
        self.end = end

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        update = super().compute(model, round_number, bound)
        match self.end:
            case "beyond":
                update.vector[5] = 1.5 * bound
            case "nan":
                update.vector[5] = np.nan
            case "shape":
                return Update(update.vector[1:])
            case "samples":
                return Update(update.vector, 0)
            case "error":
                raise Aborted("no training today")
        return update


@pytest.mark.parametrize("protocol", ["lightsecagg", baseline("secagg"), baseline("plain")])
@pytest.mark.parametrize("end", ["beyond", "nan", "shape", "samples", "error"])
def test_S44_every_client_without_an_update_drops_out_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str, protocol: str
) -> None:
    """Through sharing, and out where its upload would leave; the reason stays in its own log."""
    threat_model = "honest-but-curious" if protocol == "plain" else "malicious-server"
    federation = Federation(
        tmp_path, 5, privacy=1, dropouts=1, protocol=protocol, threat_model=threat_model
    )
    federation.job.weighted = True
    federation.jobs[2] = Unfit(2, end)
    with caplog.at_level("INFO", "lightsecagg"):
        (record,) = asyncio.run(federation.run(upload=600))
    assert record.dropped == {"upload": [2]}
    assert "client 2 dropped in phase upload: it withdraws: it has no update to upload" in [
        line.partition(": ")[2].replace("'", "") for line in caplog.messages if "withdraws" in line
    ]
    assert "client 2 sits round 1 out" in caplog.text


@pytest.mark.parametrize("samples", [1, 7])
def test_S44_a_sum_without_counts_does_not_tell_who_has_one(tmp_path: Path, samples: int) -> None:
    """The server says that nothing is weighted; a client with a count of its own takes part."""

    class Counting(FreshVectors):
        def compute(self, model: bytes, round_number: int, bound: float) -> Update:
            return Update(super().compute(model, round_number, bound).vector, samples)

    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)
    federation.jobs[2] = Counting(2)
    (record,) = asyncio.run(federation.run())
    assert record.included == [0, 1, 2, 3]
    federation.check(record)

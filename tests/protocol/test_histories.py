"""R34: random histories of rounds. Whatever happens, a sum is exact or the round is aborted.

Hypothesis chooses what the driver and the network do: deliver, duplicate, delay (messages wait
while others overtake them on other links), train late, lose clients, let deadlines fire, and
begin the next round with whoever is left. Inputs are unique, so a double count shows.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from driver import HONEST, MALICIOUS, MODULI, PAPER, SEEDED, Federation
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    NeedInput,
    Output,
    Phase,
    RoundAborted,
    Send,
)
from lightsecagg.protocol.round_client import Answered, Closed, RoundClient, Signed
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.settings import hash_model

Link = tuple[int, int]


class Histories(RuleBasedStateMachine):
    """A federation whose links are FIFO, and nothing else is promised."""

    @initialize(
        malicious=st.booleans(),
        seeded=st.booleans(),
        modulus=st.sampled_from(MODULI),
        spare=st.booleans(),
    )
    def create(self, malicious: bool, seeded: bool, modulus: int, spare: bool) -> None:
        N, D = (5, 1) if malicious else (5, 2)
        self.federation = Federation(
            N,
            1,
            D,
            3 if spare or not malicious else 4,
            MALICIOUS if malicious else HONEST,
            SEEDED if seeded else PAPER,
            modulus,
        )
        self.codec = self.federation.codec
        self.number = 0
        self.begin()

    def begin(self) -> None:
        self.number += 1
        self.model = hash_model(b"model %d" % self.number)
        settings_ = self.federation.settings(self.number, model=self.model)
        ids = self.federation.ids
        self.server = RoundServer(settings_, self.federation.allow_list, ids)
        self.clients: dict[int, RoundClient] = {
            client: self.federation.client(client, model=self.model) for client in ids
        }
        self.inputs = {client: self.federation.update(client, self.number) for client in ids}
        self.links: dict[Link, deque[bytes]] = {}
        self.training: set[int] = set()
        self.dead: set[int] = set()
        self.results: list[Aggregate | RoundAborted] = []
        self.answers: dict[int, set[bytes]] = {}
        self.announced: tuple[int, ...] = ()
        self.emit(SERVER, self.server.start())

    def emit(self, sender: int, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Send):
                data = self.codec.encode(output.message)
                self.links.setdefault((sender, output.to), deque()).append(data)
                if sender != SERVER and type(output.message).__name__ == "AggregatedShare":
                    self.answers.setdefault(sender, set()).add(data)
            elif isinstance(output, NeedInput):
                self.training.add(sender)
            elif sender == SERVER:
                self.results.append(output)

    def busy(self) -> list[Link]:
        return sorted(link for link, waiting in self.links.items() if waiting)

    def deliver(self, link: Link, data: bytes) -> None:
        sender, recipient = link
        message = self.codec.decode(data)
        if recipient == SERVER:
            self.emit(SERVER, self.server.receive(sender, message))
        elif recipient not in self.dead:
            client = self.clients[recipient]
            if not isinstance(client.state, Closed):
                self.emit(recipient, client.receive(SERVER, message))

    # -- what may happen ---------------------------------------------------------------------

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), count=st.integers(1, 12))
    def some_messages_arrive(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if links := self.busy():
                link = data.draw(st.sampled_from(links))
                self.deliver(link, self.links[link].popleft())

    @precondition(lambda self: self.busy())
    @rule()
    def everything_arrives(self) -> None:
        while links := self.busy():
            self.deliver(links[0], self.links[links[0]].popleft())

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def a_message_arrives_twice(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from(self.busy()))
        message = self.links[link].popleft()
        self.deliver(link, message)
        self.deliver(link, message)

    @precondition(lambda self: self.training)
    @rule(data=st.data())
    def a_client_has_trained(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.training)))
        self.training.discard(client)
        party = self.clients[client]
        if client not in self.dead and not isinstance(party.state, Closed):
            self.emit(client, party.set_input(self.inputs[client]))

    @precondition(lambda self: self.training)
    @rule()
    def everybody_has_trained(self) -> None:
        for client in sorted(self.training):
            party = self.clients[client]
            if client not in self.dead and not isinstance(party.state, Closed):
                self.emit(client, party.set_input(self.inputs[client]))
        self.training.clear()

    @precondition(lambda self: len(self.dead) <= self.federation.dropouts)
    @rule(data=st.data(), noticed=st.booleans(), losses=st.booleans())
    def a_client_dies(self, data: st.DataObject, noticed: bool, losses: bool) -> None:
        client = data.draw(st.sampled_from(self.federation.ids))
        self.dead.add(client)
        if losses:
            self.links.pop((client, SERVER), None)
        if noticed:
            self.emit(SERVER, self.server.drop(client))

    @precondition(lambda self: not self.busy())
    @rule()
    def the_deadline_fires(self) -> None:
        self.emit(SERVER, self.server.proceed())

    @rule(chance=st.integers(0, 9))
    def the_deadline_fires_early(self, chance: int) -> None:
        if chance == 9:
            self.emit(SERVER, self.server.proceed())

    @rule(data=st.data())
    def a_client_moves_to_a_new_process(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.federation.ids))
        old = self.clients[client]
        moved = RoundClient.restore(
            old.snapshot(),
            self.federation.identities[client],
            self.federation.policy(model=self.model),
            old.generation,
        )
        self.clients[client] = moved
        self.federation.ledgers[client] = moved.ledger

    @precondition(lambda self: self.number < 4)
    @rule()
    def the_next_round_begins(self) -> None:
        """Dead clients are back with their ledgers, whatever became of the last round."""
        self.begin()

    @precondition(lambda self: self.number < 4)
    @rule()
    def a_round_runs_undisturbed(self) -> None:
        """After any history the next round works, and includes everybody."""
        self.begin()
        self.everything_arrives()
        self.everybody_has_trained()
        self.everything_arrives()
        (result,) = self.results
        assert isinstance(result, Aggregate)
        assert result.included == self.federation.ids

    # -- what must hold always ------------------------------------------------------------------

    @invariant()
    def a_round_has_at_most_one_result_and_it_is_exact(self) -> None:
        if not hasattr(self, "results"):
            return
        assert len(self.results) <= 1
        assert bool(self.results) == (self.server.phase is Phase.DONE)
        for result in self.results:
            if isinstance(result, RoundAborted):
                assert result.reason
                continue
            assert len(result.included) >= self.federation.parameters.minimum
            assert set(result.responders) <= set(result.included)
            assert not result.suspects
            total = self.federation.exact_sum(self.inputs[c] for c in result.included)
            np.testing.assert_array_equal(result.total, total)

    @invariant()
    def nobody_answers_twice_and_the_set_never_changes(self) -> None:
        if not hasattr(self, "results"):
            return
        assert all(len(different) == 1 for different in self.answers.values())
        if self.announced:
            assert self.server.survivors == self.announced
        self.announced = self.server.survivors
        for client in self.clients.values():
            if isinstance(client.state, Signed | Answered):
                assert client.state.survivors == self.announced

    @invariant()
    def the_server_never_waits_for_nobody(self) -> None:
        """A round that is under way waits for somebody; else it would hang without deadline."""
        if hasattr(self, "results") and self.server.phase is not Phase.DONE:
            assert self.server.pending

    def teardown(self) -> None:
        """Deadlines end every round."""
        if not hasattr(self, "results"):
            return
        for _ in Phase:
            self.emit(SERVER, self.server.proceed())
        assert len(self.results) == 1


def test_R34_random_histories_end_in_exact_sums_or_aborts() -> None:
    run_state_machine_as_test(Histories, settings=settings(stateful_step_count=30))

"""R34: random histories of rounds. Whatever happens, a sum is exact or the round is aborted.

Hypothesis chooses what the driver and the network do: deliver, duplicate, delay (messages wait
while others overtake them on other links), train late, lose clients, let deadlines fire, and
begin the next round with whoever is left. Inputs are unique, so a double count shows.
"""

from __future__ import annotations

from functools import partial

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

from lightsecagg.drivers.local import Packet
from lightsecagg.protocol.interface import SERVER, Aggregate, Phase, RoundAborted
from lightsecagg.protocol.messages import AggregatedShare, Message
from lightsecagg.protocol.round_client import Answered, Closed, RoundClient, Signed
from lightsecagg.protocol.settings import hash_model


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
        self.number = 0
        self.begin()

    def begin(self) -> None:
        self.number += 1
        self.model = hash_model(b"model %d" % self.number)
        settings_ = self.federation.settings(self.number, model=self.model)
        self.network = self.federation.network(self.number, settings=settings_, model=self.model)
        self.network.train_at_once = False
        self.network.tamper = self.note
        self.answers: dict[int, set[bytes]] = {}
        self.announced: tuple[int, ...] = ()
        self.network.start()

    def note(self, sender: int, _recipient: int, message: Message) -> list[Message]:
        if isinstance(message, AggregatedShare):
            self.answers.setdefault(sender, set()).add(message.vector.tobytes())
        return [message]

    def deliver(self, packet: Packet) -> None:
        client = self.network.clients.get(packet.recipient)
        if client is None or not isinstance(client.state, Closed):
            self.network.deliver(packet)

    def train(self, client: int) -> None:
        if not isinstance(self.network.clients[client].state, Closed):
            self.network.train(client)

    # -- what may happen ---------------------------------------------------------------------

    @precondition(lambda self: self.network.busy())
    @rule(data=st.data(), count=st.integers(1, 12))
    def some_messages_arrive(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if links := self.network.busy():
                self.deliver(self.network.take(*data.draw(st.sampled_from(links))))

    @precondition(lambda self: self.network.busy())
    @rule()
    def everything_arrives(self) -> None:
        while links := self.network.busy():
            self.deliver(self.network.take(*links[0]))

    @precondition(lambda self: self.network.busy())
    @rule(data=st.data())
    def a_message_arrives_twice(self, data: st.DataObject) -> None:
        packet = self.network.take(*data.draw(st.sampled_from(self.network.busy())))
        self.deliver(packet)
        self.deliver(packet)

    @precondition(lambda self: self.network.waiting)
    @rule(data=st.data())
    def a_client_has_trained(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.network.waiting)))
        self.network.waiting.discard(client)
        self.train(client)

    @precondition(lambda self: self.network.waiting)
    @rule()
    def everybody_has_trained(self) -> None:
        for client in sorted(self.network.waiting):
            self.train(client)
        self.network.waiting.clear()

    @precondition(lambda self: len(self.network.dead) <= self.federation.dropouts)
    @rule(data=st.data(), noticed=st.booleans(), losses=st.booleans())
    def a_client_dies(self, data: st.DataObject, noticed: bool, losses: bool) -> None:
        client = data.draw(st.sampled_from(self.federation.ids))
        self.network.dead.add(client)
        if losses:
            self.network.lose(client, SERVER)
        if noticed:
            self.network.call(SERVER, partial(self.network.server.drop, client))

    @precondition(lambda self: not self.network.busy())
    @rule()
    def the_deadline_fires(self) -> None:
        self.network.call(SERVER, self.network.server.proceed)

    @rule(chance=st.integers(0, 9))
    def the_deadline_fires_early(self, chance: int) -> None:
        if chance == 9:
            self.network.call(SERVER, self.network.server.proceed)

    @rule(data=st.data())
    def a_client_moves_to_a_new_process(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.federation.ids))
        old = self.network.clients[client]
        moved = RoundClient.restore(
            old.snapshot(),
            self.federation.identities[client],
            self.federation.policy(model=self.model),
            old.generation,
        )
        self.network.clients[client] = moved
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
        (result,) = self.network.results
        assert isinstance(result, Aggregate)
        assert result.included == self.federation.ids

    # -- what must hold always ------------------------------------------------------------------

    @invariant()
    def a_round_has_at_most_one_result_and_it_is_exact(self) -> None:
        if not hasattr(self, "network"):
            return
        assert len(self.network.results) <= 1
        assert bool(self.network.results) == (self.network.server.phase is Phase.DONE)
        for result in self.network.results:
            if isinstance(result, RoundAborted):
                assert result.reason
                continue
            assert len(result.included) >= self.federation.parameters.minimum
            assert set(result.responders) <= set(result.included)
            assert not result.suspects
            total = self.federation.exact_sum(self.network.inputs[c] for c in result.included)
            np.testing.assert_array_equal(result.total, total)

    @invariant()
    def nobody_answers_twice_and_the_set_never_changes(self) -> None:
        if not hasattr(self, "network"):
            return
        assert all(len(different) == 1 for different in self.answers.values())
        if self.announced:
            assert self.network.server.survivors == self.announced
        self.announced = self.network.server.survivors
        for client in self.network.clients.values():
            if isinstance(client.state, Signed | Answered):
                assert client.state.survivors == self.announced

    @invariant()
    def the_server_never_waits_for_nobody(self) -> None:
        """A round that is under way waits for somebody; else it would hang without deadline."""
        if hasattr(self, "network") and self.network.server.phase is not Phase.DONE:
            assert self.network.server.pending

    def teardown(self) -> None:
        """Deadlines end every round."""
        if not hasattr(self, "network"):
            return
        for _ in Phase:
            self.network.call(SERVER, self.network.server.proceed)
        assert len(self.network.results) == 1


def test_R34_random_histories_end_in_exact_sums_or_aborts() -> None:
    run_state_machine_as_test(Histories, settings=settings(stateful_step_count=30))

"""Attacks of a malicious server, carried out: each succeeds against a naive client, not ours.

Every attack is computed to the end over the field, from what the server really receives: where
it says "learns x_v", the victim's input is compared element for element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from bundles import relayed
from driver import HONEST, MALICIOUS, PAPER, SEEDED, Federation, Network, request
from film import held_by, step_of, terms

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.errors import MaskAlreadyUsed, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.one_shot_recovery import recover_mask
from lightsecagg.params import ShareMode
from lightsecagg.protocol import client_machine
from lightsecagg.protocol import roster as roster_module
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffers import sum_statement
from lightsecagg.protocol.client import Client, Registered
from lightsecagg.protocol.client_machine import Advertised, Closed, Seat
from lightsecagg.protocol.holder import Holder, Step
from lightsecagg.protocol.interface import SERVER, Aggregate, Output, Send
from lightsecagg.protocol.kept_shares import Answered, AnyHolding, Signed, become
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Certificate,
    Consent,
    MaskedUpload,
    Message,
    Opening,
    Roster,
    SealedShare,
    SumRequest,
)
from lightsecagg.protocol.roster import Round, sign_keys
from lightsecagg.protocol.schemes.coded_masks import CodedMasksServer
from lightsecagg.protocol.schemes.interface import Findings
from lightsecagg.protocol.settings import Settings

MODES = [PAPER, SEEDED]


# -- what a server can compute: linear algebra over F_q --------------------------------------------


def eliminate(rows: list[list[int]], q: int) -> int:
    """Bring `rows` into echelon form, in place; return the rank."""
    rank = 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((r for r in range(rank, len(rows)) if rows[r][column] % q), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        inverse = pow(rows[rank][column], -1, q)
        for r in range(rank + 1, len(rows)):
            factor = rows[r][column] * inverse % q
            if factor:
                rows[r] = [(a - factor * b) % q for a, b in zip(rows[r], rows[rank], strict=True)]
        rank += 1
    return rank


def combinations_that_cancel(rows: Sequence[Sequence[int]], q: int) -> list[list[int]]:
    """A basis of the c with sum_k c_k * rows_k = 0."""
    width, count = len(rows[0]), len(rows)
    tagged = [[*row, *(int(k == r) for k in range(count))] for r, row in enumerate(rows)]
    eliminate(tagged, q)
    return [row[width:] for row in tagged if not any(value % q for value in row[:width])]


@dataclass
class Knowledge:
    """What a server knows of the victim's rows R_v and of the others' sum Q, linearly.

    Both have U rows, the first U - T of them mask pieces; W[:, j] turns rows into a share.
    """

    settings: Settings
    facts: list[tuple[list[int], Elements | None]]

    @classmethod
    def nothing(cls, settings: Settings) -> Knowledge:
        return cls(settings, [])

    def learn(
        self,
        others_at: int | None,
        victim_at: int | None,
        answer: Elements | None = None,
    ) -> None:
        """The others' share at one position plus the victim's at another."""
        W, U = self.settings.code.matrix, self.settings.parameters.survivors
        others = [0] * U if others_at is None else [int(w) for w in W[:, others_at]]
        victim = [0] * U if victim_at is None else [int(w) for w in W[:, victim_at]]
        self.facts.append((victim + others, answer))

    def about_the_victim(self) -> list[tuple[list[int], Elements | None]]:
        """Independent facts about the victim's mask pieces alone: combination, value."""
        pieces, q = self.settings.parameters.pieces, self.settings.field.modulus
        found: list[tuple[list[int], Elements | None]] = []
        if not self.facts:
            return found
        rest = [functional[pieces:] for functional, _ in self.facts]
        for c in combinations_that_cancel(rest, q):
            combination = [
                sum(ck * f[p] for ck, (f, _) in zip(c, self.facts, strict=True)) % q
                for p in range(pieces)
            ]
            independent = [list(known) for known, _ in found] + [list(combination)]
            if eliminate(independent, q) > len(found):
                values = [value for _, value in self.facts if value is not None]
                value = None
                if len(values) == len(self.facts):
                    value = self.settings.field.weighted_sum(c, values)
                found.append((combination, value))
        return found

    @property
    def leak(self) -> int:
        """How many linear combinations of x_v's pieces the server can compute."""
        return len(self.about_the_victim())

    def combinations_of_the_input(self, upload: Elements) -> list[tuple[list[int], Elements]]:
        """The same facts about x_v = upload - mask: combination of its pieces, value."""
        field = self.settings.field
        pieces = cut(self.settings, upload)
        facts = []
        for combination, value in self.about_the_victim():
            assert value is not None
            facts.append((combination, field.subtract(combine(field, combination, pieces), value)))
        return facts


def cut(settings: Settings, vector: Elements) -> Elements:
    """A vector as U - T pieces of L elements; lengths are chosen so that nothing is padded."""
    return vector.reshape(settings.parameters.pieces, settings.share_length)


def combine(field: object, combination: Sequence[int], pieces: Elements) -> Elements:
    return field.weighted_sum(list(combination), [np.ascontiguousarray(p) for p in pieces])  # type: ignore[attr-defined, no-any-return]


# -- a network that stops where the attack begins --------------------------------------------------


def stop_before_survivors(federation: Federation, kind: type[Client]) -> Network:
    """Everybody has uploaded; the server has announced no survivor set yet."""
    network = federation.network(kind=kind)
    network.tamper = lambda _s, _r, message: [] if isinstance(message, SumRequest) else [message]
    network.start().run()
    assert all(step_of(client) == "Uploaded" for client in network.clients.values())
    return network


def uploads_of(network: Network) -> dict[int, Elements]:
    codec = network.federation.codec
    decoded = ((sender, codec.decode(data)) for sender, _, data in network.wire)
    return {sender: m.vector for sender, m in decoded if isinstance(m, MaskedUpload)}


def answer_in(outputs: Iterable[Output]) -> Elements | None:
    for output in outputs:
        if isinstance(output, Send) and isinstance(output.message, AggregatedShare):
            return output.message.vector
    return None


def mask_of(settings: Settings, ids: Sequence[int], answers: Mapping[int, Elements]) -> Elements:
    by_position = {ids.index(client): answer for client, answer in answers.items()}
    return recover_mask(settings.code, by_position, settings.length)


def input_of(federation: Federation, client: int) -> Elements:
    return federation.exact_sum([federation.update(client)])


# -- one client asked for two survivor sets --------------------------------------------------------


class Forgetful(Holder):
    """Algorithm 1 to the letter: nothing makes a user answer once."""

    def take(self, seat: Seat, state: AnyHolding, message: object) -> Step | None:
        step = super().take(seat, state, message)
        return step if step is None or not isinstance(message, SumRequest) else (state, step[1])


class AnswersAgain(Client):
    """Holds shares for as many sums as the server likes."""

    holder_type = Forgetful


def ask_for_two_sets(federation: Federation, kind: type[Client]) -> Elements:
    """Ask everybody for S and for S without the victim; returns what the server takes for x_v."""
    network = stop_before_survivors(federation, kind)
    settings, ids, victim = federation.settings(), federation.ids, federation.ids[-1]
    masks = []
    for survivors in (ids, ids[:-1]):
        answers = {}
        for client in survivors:
            outputs = network.clients[client].receive(SERVER, request(survivors))
            answer = answer_in(outputs)
            assert answer is not None
            answers[client] = answer
        masks.append(mask_of(settings, ids, answers))
    mask = settings.field.subtract(*masks)
    return settings.field.subtract(uploads_of(network)[victim], mask)


@pytest.mark.parametrize("share_mode", MODES)
def test_S04_attack_two_survivor_sets(share_mode: ShareMode) -> None:
    federation = Federation(6, 1, 1, 4, share_mode=share_mode)
    learnt = ask_for_two_sets(federation, AnswersAgain)
    np.testing.assert_array_equal(learnt, input_of(federation, federation.ids[-1]))
    with pytest.raises(RemoteProtocolError, match="answering both would reveal"):
        ask_for_two_sets(Federation(6, 1, 1, 4, share_mode=share_mode), Client)


# -- two groups shown different survivor sets: the ramp scheme's leak ------------------------------


class Trusting(Holder):
    """Malicious-server mode without the check of the certificate."""

    def take(self, seat: Seat, state: AnyHolding, message: object) -> Step | None:
        if isinstance(message, Certificate) and isinstance(state, Signed):
            self._seat = seat
            answered = become(Answered, state, buffer=state.buffer, answer=state.answer)
            return answered, self._reply(answered)
        return super().take(seat, state, message)


class TrustsTheServer(Client):
    """Answers for whatever it has signed."""

    holder_type = Trusting


@dataclass
class Split:
    """A server and T colluders that show S to one group and S without the victim to the other."""

    federation: Federation
    kind: type[Client]

    def __post_init__(self) -> None:
        federation = self.federation
        network = stop_before_survivors(federation, self.kind)
        self.settings = federation.settings()
        self.ids = federation.ids
        self.victim = self.ids[-1]
        self.colluders = self.ids[: federation.privacy]
        self.honest = self.ids[federation.privacy :]
        self.uploads = uploads_of(network)
        self.snapshots = {c: network.clients[c].snapshot() for c in self.honest}
        state = network.clients[self.victim].state
        assert isinstance(state, Registered)
        self.context = network.clients[self.victim]._scheme(state).round.context
        # The colluders hand over the shares that they hold.
        self.held = {c: self._shares_of(network.clients[c]) for c in self.colluders}

    def _shares_of(self, client: Client) -> tuple[Elements, Elements]:
        """The colluder's share of the victim's mask, and of the others' sum."""
        state = client.state
        assert isinstance(state, Registered)
        others = tuple(c for c in self.ids if c != self.victim)
        held = held_by(client)
        scheme, owners = client._scheme(state), state.owners or ()
        of_victim = scheme.answer(held, terms([self.victim]), owners)
        of_others = scheme.answer(held, terms(others), owners)
        assert isinstance(of_victim, AggregatedShare)
        assert isinstance(of_others, AggregatedShare)
        return of_victim.vector, of_others.vector

    def all_splits(self) -> Iterable[frozenset[int]]:
        """Every choice of the honest clients that are shown S; the victim always is."""
        others = [c for c in self.honest if c != self.victim]
        for choice in product((False, True), repeat=len(others)):
            yield frozenset(
                {self.victim, *(c for c, shown in zip(others, choice, strict=True) if shown)}
            )

    def attack(self, shown_all: frozenset[int]) -> Knowledge:
        """What the server knows in the end."""
        everybody = self.ids
        without = tuple(c for c in everybody if c != self.victim)
        sets = {c: everybody if c in shown_all else without for c in self.honest}
        identities = self.federation.identities
        signatures: dict[tuple[int, ...], dict[int, bytes]] = {everybody: {}, without: {}}
        for survivors, c in product((everybody, without), self.colluders):
            statement = sum_statement(self.context, request(survivors))
            signatures[survivors][c] = statement.sign(identities[c])
        clients = {
            c: self.kind.restore(self.snapshots[c], identities[c], self.federation.policy(), 0)
            for c in self.honest
        }
        answers: dict[int, Elements] = {}
        for c, client in clients.items():
            for output in client.receive(SERVER, request(sets[c])):
                if not isinstance(output, Send):
                    continue
                if isinstance(output.message, Consent):
                    signatures[sets[c]][c] = output.message.signature
                elif isinstance(output.message, AggregatedShare):
                    answers[c] = output.message.vector
        for c, client in clients.items():
            certificate = Certificate(0, tuple(sorted(signatures[sets[c]].items())))
            if step_of(client) == "Signed":
                try:
                    answer = answer_in(client.receive(SERVER, certificate))
                except RemoteProtocolError:
                    continue
                assert answer is not None
                answers[c] = answer
        return self._combine(answers, shown_all)

    def _combine(self, answers: Mapping[int, Elements], shown_all: frozenset[int]) -> Knowledge:
        knowledge = Knowledge.nothing(self.settings)
        for c, answer in answers.items():
            position = self.ids.index(c)
            knowledge.learn(position, position if c in shown_all else None, answer)
        for c, (of_victim, of_others) in self.held.items():
            position = self.ids.index(c)
            knowledge.learn(None, position, of_victim)
            knowledge.learn(position, None, of_others)
        return knowledge


def split_leak(federation: Federation, shown_all: int, shown_less: int) -> int:
    """How much a split into groups of these sizes leaks, with T colluders."""
    T, U = federation.privacy, federation.parameters.survivors
    known = min(shown_all + T, U) + min(shown_less + T, U) - U - T
    return max(0, min(known, U - T))


SPLITS = [
    (clients, privacy, survivors)
    for clients in (5, 6, 7, 8)
    for privacy, survivors in ((1, 3), (2, 4))
] + [(6, 1, 5)]


@pytest.mark.parametrize(("clients", "privacy", "survivors"), SPLITS)
def test_the_control_a_split_leaks_as_predicted_in_honest_but_curious_mode(
    clients: int, privacy: int, survivors: int
) -> None:
    """The paper's threat model does not cover this server; the agreement step does."""
    pieces = survivors - privacy
    federation = Federation(
        clients, privacy, 0, survivors, HONEST, dimension=2 * pieces, weighted=False
    )
    split = Split(federation, Client)
    leaks = []
    true_pieces = cut(split.settings, input_of(federation, split.victim))
    for shown_all in split.all_splits():
        knowledge = split.attack(shown_all)
        shown_less = len(split.honest) - len(shown_all)
        assert knowledge.leak == split_leak(federation, len(shown_all), shown_less)
        leaks.append(knowledge.leak)
        for combination, value in knowledge.combinations_of_the_input(split.uploads[split.victim]):
            expected = combine(federation.settings().field, combination, true_pieces)
            np.testing.assert_array_equal(value, expected)
    # The formula of docs/security: clip(N + T' - T - U, 0, U - T) with T' = T colluders.
    assert max(leaks) == max(0, min(clients - survivors, pieces))


@pytest.mark.parametrize(("clients", "privacy", "survivors"), SPLITS)
def test_S05_no_split_leaks_anything_in_malicious_server_mode(
    clients: int, privacy: int, survivors: int
) -> None:
    federation = Federation(clients, privacy, 0, survivors, MALICIOUS)
    split = Split(federation, Client)
    sums = 0
    for shown_all in split.all_splits():
        knowledge = split.attack(shown_all)
        assert knowledge.leak == 0
        sums += len(knowledge.facts) > 2 * privacy
    assert sums > 0, "the agreed sum itself is answered for, when nearly all see the same set"


@pytest.mark.parametrize(("clients", "privacy", "survivors"), [(6, 1, 3), (8, 2, 4)])
def test_S05_the_control_without_checking_the_certificate_a_split_leaks(
    clients: int, privacy: int, survivors: int
) -> None:
    federation = Federation(clients, privacy, 0, survivors, MALICIOUS)
    split = Split(federation, TrustsTheServer)
    leaks = [split.attack(shown_all).leak for shown_all in split.all_splits()]
    assert max(leaks) == min(clients - survivors, survivors - privacy) > 0


# -- the same roster in another order --------------------------------------------------------------


def bind_only_C0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything after the roster bind C0 instead of C1."""
    honest = roster_module.fix_round

    def naive(settings: Settings, allow_list: AllowList, roster: Roster) -> Round:
        fixed = honest(settings, allow_list, roster)
        return replace(fixed, context=settings.context)

    monkeypatch.setattr(roster_module, "fix_round", naive)
    monkeypatch.setattr(client_machine, "fix_round", naive)
    monkeypatch.setattr("lightsecagg.protocol.roles.registration.fix_round", naive)


def show_another_order(federation: Federation) -> tuple[Network, int, Callable[[int], int]]:
    """A round in which the victim sees the roster rotated by one."""
    network = federation.network()
    victim = federation.ids[-1]

    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if recipient == victim and isinstance(message, Roster):
            members = (*message.members[1:], message.members[0])
            return [Roster(members, ())]
        return [message]

    network.tamper = tamper
    N = federation.clients
    return network, victim, lambda position: (position - 1) % N


@pytest.mark.parametrize("share_mode", MODES)
def test_S02_attack_the_roster_in_another_order(
    share_mode: ShareMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every share opens and everybody sees the same U1; still the server learns most of x_v.

    All pieces but the first, that is: its coefficient is 1 at every point, whatever the order.
    """
    with monkeypatch.context() as patch:
        bind_only_C0(patch)
        keep_doubts_to_itself(patch)
        federation = Federation(8, 1, 2, 4, HONEST, share_mode, dimension=6, weighted=False)
        network, victim, seen_at = show_another_order(federation)
        network.start().finish()
        assert not any(client.refused_shares for client in network.clients.values())
        knowledge = Knowledge.nothing(federation.settings())
        codec = federation.codec
        for sender, _, data in network.wire:
            message = codec.decode(data)
            if isinstance(message, AggregatedShare):
                position = federation.ids.index(sender)
                knowledge.learn(position, seen_at(position), message.vector)
        assert len(knowledge.facts) == 8
        facts = knowledge.combinations_of_the_input(uploads_of(network)[victim])
        assert len(facts) == federation.parameters.pieces - 1 == 2
        pieces = cut(federation.settings(), input_of(federation, victim))
        for combination, value in facts:
            expected = combine(federation.settings().field, combination, pieces)
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("share_mode", MODES)
def test_S02_the_roster_in_another_order_is_another_round(share_mode: ShareMode) -> None:
    federation = Federation(8, 1, 2, 4, HONEST, share_mode, dimension=6, weighted=False)
    network, victim, _ = show_another_order(federation)
    network.start().finish()
    others = set(federation.ids) - {victim}
    for client in others:
        assert set(network.clients[client].refused_shares) == {victim}
    assert set(network.clients[victim].refused_shares) == others
    assert isinstance(network.clients[victim].state, Closed)
    assert victim not in uploads_of(network)
    network.assert_exact(others)


# -- a share of an earlier round -------------------------------------------------------------------


class KeepsItsKeys(Client):
    """Saves the trouble of fresh keys in every round."""

    def _advertise(self, message: Opening, settings: Settings) -> Advertised:
        pair = AgreementKey(hashlib.sha256(b"static %d" % self.client).digest())
        signature = sign_keys(self._identity, settings.context, self.client, (pair.public,))
        advertise = Advertise((pair.public,), signature)
        return Advertised(message.settings, (pair.private_bytes(),), advertise)


def bind_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = roster_module.fix_round

    def naive(settings: Settings, allow_list: AllowList, roster: Roster) -> Round:
        fixed = honest(settings, allow_list, roster)
        return replace(fixed, context=b"always the same".ljust(32))

    monkeypatch.setattr(roster_module, "fix_round", naive)
    monkeypatch.setattr(client_machine, "fix_round", naive)
    monkeypatch.setattr("lightsecagg.protocol.roles.registration.fix_round", naive)
    # To such a client, masks of two rounds are one; the memory of that would refuse the second.
    monkeypatch.setattr(Ledger, "bind_upload", lambda *arguments: None)
    keep_doubts_to_itself(monkeypatch)


def keep_doubts_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that attacks does not mind that reports contradict each other."""
    monkeypatch.setattr(CodedMasksServer, "examine", lambda self, reports: Findings())


def replay_shares(federation: Federation, kind: type[Client]) -> Network:
    """Round 1 ends without the victim's sum; round 2 is fed the victim's shares of round 1."""
    victim = federation.ids[-1]
    first = federation.network(1, kind)
    first.start().run(until=lambda: victim in uploads_of(first))
    for client in first.clients.values():
        client.receive(SERVER, AbortRound("the network is down"))
    federation.old_upload = uploads_of(first)[victim]  # type: ignore[attr-defined]
    mine = [m for m in first.messages(SealedShare, to=SERVER) if m.owner == victim]
    old = {m.recipient: m for m in relayed(mine)}
    second = federation.network(2, kind)

    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if sender == SERVER and isinstance(message, SealedShare) and message.owner == victim:
            return [old[message.recipient]]
        return [message]

    second.tamper = tamper
    # Only the victim itself knows its new mask; it must not be asked.
    return second.start().finish()


def test_attack_a_replayed_share_of_an_earlier_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sums an update of round 1 that nobody ever agreed to sum."""
    with monkeypatch.context() as patch:
        bind_nothing(patch)
        federation = Federation(6, 1, 2, 4)
        network = replay_shares(federation, KeepsItsKeys)
        *others, victim = federation.ids
        codec = federation.codec
        answers = {
            sender: message.vector
            for sender, _, data in network.wire
            if isinstance(message := codec.decode(data), AggregatedShare) and sender != victim
        }
        settings = federation.settings(2)
        uploads = uploads_of(network)
        mixed = [uploads[c] for c in others] + [federation.old_upload]  # type: ignore[attr-defined]
        mask = mask_of(settings, federation.ids, answers)
        learnt = settings.field.subtract(settings.field.sum(mixed), mask)
        updates = [federation.update(c, 2) for c in others] + [federation.update(victim, 1)]
        np.testing.assert_array_equal(learnt, federation.exact_sum(updates))


def test_a_replayed_share_of_an_earlier_round_does_not_open() -> None:
    federation = Federation(6, 1, 2, 4)
    network = replay_shares(federation, Client)
    *others, victim = federation.ids
    for client in others:
        assert "is not bound" in network.clients[client].refused_shares[victim]
    network.assert_exact(others)


# -- a round run again with the same inputs --------------------------------------------------------


def run_again_without(federation: Federation, remembers: bool) -> Elements:
    """Run a round, then again without the victim and with the same inputs."""
    victim = federation.ids[-1]
    first = federation.network(1).start().finish()
    if not remembers:
        federation.ledgers = {client: Ledger.volatile() for client in federation.ids}
    second = federation.network(2)
    second.inputs = dict(first.inputs)
    second.dead.add(victim)
    second.start().finish()
    totals = [network.result.total for network in (first, second)]  # type: ignore[union-attr]
    return federation.settings().field.subtract(*totals)


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S06_attack_a_round_run_again_with_the_same_inputs(threat_model: object) -> None:
    federation = Federation(7, 1, 2, 4, threat_model)  # type: ignore[arg-type]
    learnt = run_again_without(federation, remembers=False)
    np.testing.assert_array_equal(learnt, input_of(federation, federation.ids[-1]))
    with pytest.raises(MaskAlreadyUsed, match="this update is spent"):
        run_again_without(Federation(7, 1, 2, 4, threat_model), remembers=True)  # type: ignore[arg-type]


# -- an older snapshot -----------------------------------------------------------------------------


def resume_and_ask_again(federation: Federation, careful: bool) -> Elements:
    """Crash every client after its answer, resume it from before, and ask for another set."""
    network = stop_before_survivors(federation, Client)
    settings, ids, victim = federation.settings(), federation.ids, federation.ids[-1]
    snapshots = {c: client.snapshot() for c, client in network.clients.items()}
    generations = dict.fromkeys(ids, 0)
    masks = []
    for survivors in (ids, ids[:-1]):
        answers = {}
        for c in survivors:
            client = Client.restore(
                snapshots[c], federation.identities[c], federation.policy(), generations[c]
            )
            answer = answer_in(client.receive(SERVER, request(survivors)))
            assert answer is not None
            answers[c] = answer
            generations[c] = client.generation if careful else 0
        masks.append(mask_of(settings, ids, answers))
    mask = settings.field.subtract(*masks)
    return settings.field.subtract(uploads_of(network)[victim], mask)


def test_S06_attack_an_older_snapshot() -> None:
    federation = Federation(6, 1, 1, 4)
    learnt = resume_and_ask_again(federation, careful=False)
    np.testing.assert_array_equal(learnt, input_of(federation, federation.ids[-1]))
    with pytest.raises(MaskAlreadyUsed, match="is older than"):
        resume_and_ask_again(Federation(6, 1, 1, 4), careful=True)


# -- a sum that hides nobody -----------------------------------------------------------------------


class Uncounting(Holder):
    """Does not count the survivors."""

    def _weights(self, message: SumRequest) -> tuple[int, ...]:
        return (1,) * len(message.tags)


class SumsOverAnybody(Client):
    """Answers for sums of any size."""

    holder_type = Uncounting


def sum_over_one_honest_client(kind: type[Client]) -> tuple[Federation, Elements]:
    """U1 is the victim and one colluder, whose input the server knows."""
    federation = Federation(5, 1, 1, 2)
    network = stop_before_survivors(federation, kind)
    settings, ids = federation.settings(), federation.ids
    colluder, victim = ids[0], ids[-1]
    answers = {}
    for c in (colluder, victim):
        answer = answer_in(network.clients[c].receive(SERVER, request((colluder, victim))))
        assert answer is not None
        answers[c] = answer
    uploads = uploads_of(network)
    masked = settings.field.sum([uploads[colluder], uploads[victim]])
    total = settings.field.subtract(masked, mask_of(settings, ids, answers))
    return federation, settings.field.subtract(total, input_of(federation, colluder))


def test_S03_attack_a_sum_over_one_honest_client() -> None:
    federation, learnt = sum_over_one_honest_client(SumsOverAnybody)
    np.testing.assert_array_equal(learnt, input_of(federation, federation.ids[-1]))
    with pytest.raises(RemoteProtocolError, match="does not hide its members"):
        sum_over_one_honest_client(Client)


def test_the_agreed_sum_is_all_that_an_honest_round_reveals() -> None:
    """The control of the linear algebra: one set for all, and nothing is known of x_v alone."""
    federation = Federation(6, 1, 0, 3)
    split = Split(federation, Client)
    knowledge = split.attack(frozenset(split.honest))
    assert len(knowledge.facts) == 5 + 2
    assert knowledge.leak == 0
    network = Federation(6, 1, 0, 3).network().start().finish()
    assert isinstance(network.result, Aggregate)

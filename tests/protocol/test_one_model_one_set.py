"""S42: for one global model a client has one update, one set and two uploads, for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import combinations, product
from typing import Any

import msgspec
import numpy as np
import pytest
from async_driver import AsyncFederation, model_of
from driver import HONEST, MALICIOUS, Federation, Network

from lightsecagg.drivers.local import Wire
from lightsecagg.errors import (
    DecodeError,
    LightSecAggError,
    MaskAlreadyUsed,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    BufferAggregate,
    NeedInput,
    Phase,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import AggregatedShare, Consent, Opening, SumRequest
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.rounding import uniform_words
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import NO_MODEL, hash_model
from lightsecagg.protocol.wire import Codec

MODEL = hash_model(b"the model of these tests")
UPDATE = Update(np.linspace(-1.0, 1.0, 9))
BOTH = pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])


# -- which families of sets isolate a client, and under which rule a server gets them --------------


class Rule:
    """What one honest client agrees to, for one model."""

    def upload(self) -> bool:
        """Whether it uploads once more."""
        raise NotImplementedError

    def consent(self, survivors: tuple[int, ...]) -> bool:
        """Whether it signs for this set."""
        raise NotImplementedError


class FarApart(Rule):
    """A weaker rule, broken: twice, for the same set or one that differs in T + 2 clients."""

    def __init__(self, privacy: int = 1) -> None:
        self.privacy, self.uploads = privacy, 0
        self.sets: list[tuple[int, ...]] = []

    def upload(self) -> bool:
        self.uploads += 1
        return self.uploads <= 2

    def consent(self, survivors: tuple[int, ...]) -> bool:
        far = all(
            len(set(old) ^ set(survivors)) in (0, *range(self.privacy + 2, 99)) for old in self.sets
        )
        self.sets.append(survivors)
        return far and len(self.sets) <= 2


class Ours(Rule):
    """The ledger itself."""

    def __init__(self, attempts: int = 2) -> None:
        self.ledger, self.attempts = Ledger.volatile(), attempts

    def upload(self) -> bool:
        try:
            self.ledger.check_attempts(MODEL, self.attempts)
        except RemoteProtocolError:
            return False
        self.ledger.count_upload(MODEL, b"the one update")
        return True

    def consent(self, survivors: tuple[int, ...]) -> bool:
        try:
            self.ledger.consent(MODEL, b"the one update", survivors)
        except RemoteProtocolError:
            return False
        return True


def isolates(family: Iterable[tuple[int, ...]], honest: range) -> bool:
    """Whether some combination of the sums over these sets is one honest client's update."""
    rows = [[Fraction(client in members) for client in honest] for members in family]
    rank = _rank(rows)
    for victim in range(len(honest)):
        unit = [Fraction(k == victim) for k in range(len(honest))]
        if _rank([*rows, unit]) == rank:
            return True
    return False


def _rank(rows: list[list[Fraction]]) -> int:
    rows, found = [list(row) for row in rows], 0
    for column in range(len(rows[0])):
        pivot = next((k for k in range(found, len(rows)) if rows[k][column]), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        for k in range(found + 1, len(rows)):
            factor = rows[k][column] / rows[found][column]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[found], strict=True)]
        found += 1
    return found


def obtained(
    family: tuple[tuple[int, ...], ...],
    signers: tuple[tuple[int, ...], ...],
    honest: range,
    rule: Callable[[], Rule],
) -> bool:
    """Whether honest clients under this rule upload and sign so; colluders always do."""
    clients = {client: rule() for client in honest}
    return all(
        all(clients[c].upload() for c in members if c in clients)
        and all(clients[c].consent(members) for c in signing if c in clients)
        for members, signing in zip(family, signers, strict=True)
    )


def test_S42_the_three_sets_that_break_a_weaker_rule_are_not_obtained_from_ours() -> None:
    """N = 10, T = 1, m = 6: X1 - X2 + X3 - x_C = 2 x_v, for the victim v and the colluder C."""
    A, B, v, C = (0, 1, 2, 3), (4, 5, 6, 7), (8,), (9,)
    family = (A + v + C, A + B + C, B + v + C)
    honest = range(9)
    assert isolates(family, honest)
    everybody = tuple(members[:5] + members[-1:] for members in family)  # m = 6 of each
    assert obtained(family, family, honest, FarApart)
    assert not obtained(family, everybody, honest, Ours)
    signs_least = (A + v + C, A[:1] + B + C, B[:1] + v + C)  # somebody always signs two of them
    assert not obtained(family, signs_least, honest, Ours)


def families(population: int, sizes: range, count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All families of so many different sets."""
    sets = [members for size in sizes for members in combinations(range(population), size)]
    return combinations(sets, count)


def a_way_to_sign(
    family: tuple[tuple[int, ...], ...], quorum: int, honest: range
) -> tuple[tuple[int, ...], ...] | None:
    """Signers for each set, colluders and then honest clients that have signed nothing before."""

    def choose(index: int, free: frozenset[int]) -> tuple[tuple[int, ...], ...] | None:
        if index == len(family):
            return ()
        members = family[index]
        colluding = tuple(c for c in members if c not in honest)
        needed = max(0, quorum - len(colluding))
        for chosen in combinations([c for c in members if c in free], needed):
            rest = choose(index + 1, free - set(chosen))
            if rest is not None:
                return (colluding + chosen, *rest)
        return None

    return choose(0, frozenset(honest))


@pytest.mark.parametrize(
    ("population", "N", "T", "quorum", "count"),
    [(5, 3, 0, 2, 2), (5, 3, 0, 2, 3), (6, 3, 0, 2, 2), (5, 4, 1, 3, 3), (6, 4, 1, 3, 2)],
)
def test_S42_no_family_of_sets_that_clients_agree_to_isolates_one(
    population: int, N: int, T: int, quorum: int, count: int
) -> None:
    """All families over more clients than fit a round; each client signs for one set."""
    assert 2 * quorum > N + T
    honest = range(population - T)
    dangerous = 0
    for family in families(population, range(max(quorum, T + 2), N + 1), count):
        if isolates(family, honest):
            dangerous += 1
            signers = a_way_to_sign(family, quorum, honest)
            assert signers is None or not obtained(family, signers, honest, Ours)
    assert dangerous, "the search looks at families that would isolate somebody"


def test_S42_control_the_same_search_breaks_the_weaker_rule() -> None:
    """T = 0, N = 3, m = 2: the sets {0, 1}, {1, 2} and {0, 2}, for instance."""
    honest = range(5)
    broken = [
        family
        for family in families(5, range(2, 4), 3)
        if isolates(family, honest)
        and obtained(family, family, honest, lambda: FarApart(privacy=0))
    ]
    assert ((0, 1), (0, 2), (1, 2)) in broken


def test_S42_what_remains_two_clients_of_a_crowd_unless_each_uploads_once() -> None:
    """T = 0: everybody of N = 7 (m = 4), then five of them (N = 5, m = 3), with other signers."""
    family = ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4))
    signers = ((3, 4, 5, 6), (0, 1, 2))
    assert Parameters(7, 0, 3, threat_model=MALICIOUS).quorum == 4
    assert Parameters(5, 0, 2, threat_model=MALICIOUS).quorum == 3
    assert obtained(family, signers, range(7), Ours), "and the difference is that of 5 and 6"
    assert not obtained(family, signers, range(7), lambda: Ours(attempts=1))


# -- a round run again without one client, with real parties --------------------------------------


class OldLedger(Ledger):
    """What a client remembered before: spent updates and a count, but no update and no set."""

    def check_update(self, model: bytes, fingerprint: bytes, commitment: bytes) -> None:
        self.check_unspent(fingerprint)

    def consent(self, model: bytes, fingerprint: bytes, survivors: tuple[int, ...]) -> None:
        self.spend(fingerprint)


def rerun(
    federation: Federation, retrain: Callable[[Update], Update], absent: Iterable[int] = ()
) -> tuple[Network, Network]:
    """A round, and the same model again without `absent`."""
    rounds = []
    for number in (1, 2):
        settings = federation.settings(number, model=MODEL)
        network = federation.network(number, settings=settings, model=MODEL)
        if rounds:
            network.inputs = {c: retrain(update) for c, update in rounds[0].inputs.items()}
            network.dead.update(absent)
        rounds.append(network.start().finish())
    return rounds[0], rounds[1]


def by_ulps(update: Update) -> Update:
    """What training a second time gives, with full batches."""
    return Update(np.nextafter(update.vector, np.inf), update.samples)


def difference(federation: Federation, first: Network, second: Network) -> Elements:
    totals = [network.result.total for network in (first, second)]  # type: ignore[union-attr]
    return federation.settings().field.subtract(*totals)


@BOTH
def test_S42_attack_a_rerun_without_the_victim_with_updates_trained_again(
    threat_model: ThreatModel,
) -> None:
    federation = Federation(7, 1, 2, 4, threat_model)
    victim = federation.ids[-1]
    federation.ledgers = {c: OldLedger.volatile() for c in federation.ids}
    first, second = rerun(federation, by_ulps, absent=[victim])
    learnt = difference(federation, first, second)
    np.testing.assert_array_equal(learnt, federation.exact_sum([first.inputs[victim]]))

    with pytest.raises(MaskAlreadyUsed, match="would reveal their difference"):
        rerun(Federation(7, 1, 2, 4, threat_model), by_ulps, absent=[victim])
    with pytest.raises(RemoteProtocolError, match="a second, different survivor set"):
        rerun(Federation(7, 1, 2, 4, threat_model), lambda update: update, absent=[victim])


@BOTH
def test_S42_a_repeat_with_the_same_clients_gives_the_same_sum(threat_model: ThreatModel) -> None:
    """Bit for bit: were it rounded by other coins, the two sums would tell more than one."""
    federation = Federation(7, 1, 2, 4, threat_model)
    fractions = {c: Update(np.linspace(-1, 1, 7) / 3, 2) for c in federation.ids}
    totals = []
    for number in (1, 2):
        settings = federation.settings(number, model=MODEL)
        network = federation.network(number, settings=settings, model=MODEL)
        network.inputs = fractions
        totals.append(network.start().finish().result.total)  # type: ignore[union-attr]
    np.testing.assert_array_equal(*totals)
    settings = federation.settings(3, model=MODEL)
    with pytest.raises(RemoteProtocolError, match=r"uploaded 2 updates .* ledger forgive"):
        federation.network(3, settings=settings, model=MODEL).start().finish()


@pytest.mark.parametrize(
    "change",
    [{"scale": 2.0}, {"bound": 1023.0}, {"max_samples": 63}],
    ids=lambda change: next(iter(change)),
)
def test_S42_a_repeat_in_another_reading_is_refused(change: dict[str, Any]) -> None:
    """The same updates at another c_l, say, round differently: two sums instead of one."""
    federation = Federation(5, 1, 1)
    settings = federation.settings(1, model=MODEL)
    federation.network(1, settings=settings, model=MODEL).start().finish()
    quantizer = replace(settings.quantizer, **change)
    changed = federation.settings(2, model=MODEL, quantizer=quantizer)
    again = federation.network(2, settings=changed, model=MODEL)
    again.inputs = {c: federation.update(c, 1) for c in federation.ids}
    with pytest.raises(MaskAlreadyUsed, match="in another reading"):
        again.start().finish()


def test_S42_S55_every_setting_that_decides_about_the_numbers_is_part_of_the_reading() -> None:
    federation = Federation(5, 1, 1)
    settings = federation.settings()
    plain = replace(settings.quantizer, weighted=False, max_samples=1)
    others = [
        federation.settings(quantizer=replace(settings.quantizer, scale=2.0)),
        federation.settings(quantizer=replace(settings.quantizer, bound=1.0)),
        federation.settings(quantizer=replace(settings.quantizer, max_samples=2)),
        federation.settings(quantizer=plain),
        federation.settings(dimension=8),
        federation.settings(instructions=bytes(range(32))),
        replace(Federation(5, 1, 1, modulus=4294967291).settings(), allow_list=settings.allow_list),
    ]
    readings = {settings.reading, *(other.reading for other in others)}
    assert len(readings) == 1 + len(others)
    assert federation.settings(9, model=MODEL).reading == settings.reading


def test_S42_other_vectors_where_there_is_no_model_and_a_spent_one_under_none() -> None:
    """Nothing ties two vectors without a model together; each of them is summed once."""
    ledger = Ledger.volatile()
    first, second = (ledger.fingerprint(Update(np.full(3, x))) for x in (1.0, 2.0))
    ledger.check_update(NO_MODEL, first, b"first")
    ledger.count_upload(NO_MODEL, b"first")
    ledger.consent(NO_MODEL, first, (1, 2, 3))
    ledger.check_update(NO_MODEL, second, b"second")
    ledger.consent(NO_MODEL, second, (2, 3, 4))
    for model in (NO_MODEL, MODEL):
        with pytest.raises(MaskAlreadyUsed, match="is spent"):
            ledger.check_update(model, first, b"first")


def test_S06_an_upload_that_others_summed_is_spent_when_the_server_says_so() -> None:
    ledger = Ledger()
    ledger.open_round(3, NO_MODEL, 2)
    fingerprint = ledger.fingerprint(Update(np.ones(4)))
    ledger.count_upload(NO_MODEL, fingerprint=fingerprint)
    for other in (2, 4):
        ledger.spend_upload(other)
    ledger.check_unspent(fingerprint)
    again = Ledger.from_bytes(ledger.to_bytes())
    again.spend_upload(3)
    for told in (again, Ledger.from_bytes(again.to_bytes())):
        with pytest.raises(MaskAlreadyUsed, match="spent"):
            told.check_unspent(fingerprint)


def test_S06_a_ledger_without_an_upload_has_none_to_spend() -> None:
    ledger = Ledger()
    before = ledger.to_bytes()
    ledger.spend_upload(-1)
    assert ledger.to_bytes() == before


def test_S42_an_update_that_was_spent_for_one_model_is_no_repeat_for_another() -> None:
    ledger, other = Ledger.volatile(), hash_model(b"another")
    update = ledger.fingerprint(UPDATE)
    for model in (MODEL, other):
        ledger.check_update(model, update, b"commitment")
        ledger.count_upload(model, b"commitment")
    ledger.consent(other, update, (1, 2, 3))
    ledger.check_update(other, update, b"commitment")
    with pytest.raises(MaskAlreadyUsed, match="is spent"):
        ledger.check_update(MODEL, update, b"commitment")


def test_S06_a_vector_is_known_again_in_either_precision_and_with_either_zero() -> None:
    ledger = Ledger.volatile()
    narrow = np.array([0.0, 1.5, -2.25], dtype=np.float32)
    known = ledger.fingerprint(Update(narrow))
    alike = (
        narrow.astype(np.float64),
        np.array([-0.0, 1.5, -2.25]),
        np.array([-0.0, 1.5, -2.25], dtype=np.float32),
        np.repeat(narrow, 2)[::2],
    )
    assert {ledger.fingerprint(Update(vector)) for vector in alike} == {known}


def test_S06_no_other_vector_is_taken_for_a_known_one() -> None:
    """Those least of all that float32 would make the same of."""
    ledger = Ledger.volatile()
    wide = (1.0, 1.0 + 2.0**-52, 1.0 + 2.0**-23, 2.0**-160, 0.0, 1e300, 2e300, -1e300)
    vectors = [np.array([1.5, x]) for x in wide]
    vectors += [np.array([1.5]), np.array([1.5, 1.0, 0.0])]
    # Four bytes twice are the bytes of one number in the other precision.
    vectors.append(np.frombuffer(vectors[1].tobytes(), dtype=np.float32))
    # Long ones are hashed in parts, each in its own precision.
    long = np.arange(150_000, dtype=np.float64)
    for place in (0, 16_383, 16_384, 149_999):
        vectors += [np.where(np.arange(long.size) == place, x, long) for x in (0.1, np.pi)]
    vectors += [long, long[:-1], np.roll(long, 16_384)]
    fingerprints = {ledger.fingerprint(Update(vector)) for vector in vectors}
    assert len(fingerprints) == len(vectors)


def test_S06_a_ledger_with_other_fingerprints_is_refused() -> None:
    """It would take what is spent for new."""
    entries = msgspec.msgpack.decode(Ledger.volatile().to_bytes())
    refusal = "version {} is not read by this release, which has 2: begin a new session"
    with pytest.raises(DecodeError, match=refusal.format(3)):
        Ledger.from_bytes(msgspec.msgpack.encode(entries | {"version": 3}))
    del entries["version"]  # as it was written by version 1
    with pytest.raises(DecodeError, match=refusal.format(1)):
        Ledger.from_bytes(msgspec.msgpack.encode(entries))


def test_S06_the_newest_upload_of_an_epoch_stands_for_those_before() -> None:
    """Masks are used in the order of their serials; the ledger does not grow with them."""
    ledger, epoch = Ledger.volatile(), hash_model(b"C1 of an epoch")
    sizes = set()
    for serial in range(10, 20):
        ledger.bind_upload(epoch, serial, hash_model(bytes([serial])))
        sizes.add(len(ledger.to_bytes()))
    assert len(sizes) == 1
    ledger.bind_upload(epoch, 19, hash_model(bytes([19])))  # the same again
    again = Ledger.from_bytes(ledger.to_bytes())
    for serial, upload in ((19, b"another"), (18, b"another"), (18, bytes([18])), (0, b"")):
        with pytest.raises(MaskAlreadyUsed, match="under this mask, or under a later one"):
            again.bind_upload(epoch, serial, hash_model(upload))
    again.bind_upload(hash_model(b"C1 of the next epoch"), 0, hash_model(b"another"))


def test_S06_a_ledger_that_knows_all_uploads_of_an_epoch_is_read() -> None:
    entries = msgspec.msgpack.decode(Ledger.volatile().to_bytes())
    entries["masked"] = (MODEL, {"9": b"nine", "10": b"ten", "8": b"eight"})
    ledger = Ledger.from_bytes(msgspec.msgpack.encode(entries))
    with pytest.raises(MaskAlreadyUsed):
        ledger.bind_upload(MODEL, 9, b"nine")
    ledger.bind_upload(MODEL, 10, b"ten")
    ledger.bind_upload(MODEL, 11, b"eleven")
    entries["masked"] = (MODEL, {"the first": b""})
    with pytest.raises(DecodeError, match="an upload has no serial"):
        Ledger.from_bytes(msgspec.msgpack.encode(entries))


def test_S42_more_than_two_uploads_for_one_model_are_no_policy() -> None:
    federation = Federation(5, 1, 1)
    with pytest.raises(ParameterError, match="max_attempts = 3 must be at most 2"):
        federation.policy(model=MODEL, max_attempts=3)
    assert federation.policy(max_attempts=3).max_attempts == 3, "without a model"


# -- coins -----------------------------------------------------------------------------------------


def coins(ledger: Ledger, model: bytes = MODEL, reading: bytes = b"r", **update: Any) -> bytes:
    given = Update(**{"vector": UPDATE.vector, "samples": 1} | update)
    commitment = ledger.commitment(ledger.fingerprint(given), given.samples, reading)
    return uniform_words(9, ledger.rounding_seed(model, commitment)).tobytes()


def test_S42_coins_repeat_with_the_upload_and_with_nothing_else() -> None:
    """Equal coins for two updates of one model would round what they share alike."""
    ledger = Ledger.volatile()
    again = Ledger.from_bytes(ledger.to_bytes())
    assert coins(ledger) == coins(again)
    drawn = [
        coins(ledger),
        coins(Ledger.volatile()),  # the key: whoever knows model and update knows no coin
        coins(ledger, model=hash_model(b"another")),
        coins(ledger, reading=b"another"),
        coins(ledger, samples=2),
        coins(ledger, vector=np.nextafter(UPDATE.vector, 2)),
        ledger.training_secret,
    ]
    assert len(set(drawn)) == len(drawn)


# -- the asynchronous mode -------------------------------------------------------------------------


def first_reply(fed: AsyncFederation, client: int, buffer: SumRequest) -> type:
    return type(fed.tell(client, buffer)[0])


@BOTH
@pytest.mark.parametrize("renamed", [False, True], ids=["same version", "new version"])
def test_S42_a_signer_sums_one_update_of_an_owner_and_model(
    threat_model: ThreatModel, renamed: bool
) -> None:
    """Fresh masks, updates trained again, and the model under a new version: all in vain."""
    signer, version = 5, 4 if renamed else 3
    for remembers in (False, True):
        fed = AsyncFederation(threat_model=threat_model, stock=4).open()
        tags = [fed.make_upload(owner, 3, model_of(3)).tag for owner in range(4)]
        answer = Consent if threat_model is MALICIOUS else AggregatedShare
        assert first_reply(fed, signer, SumRequest(4, tuple(tags))) is answer
        again = tuple(fed.make_upload(owner, version, model_of(3)).tag for owner in range(3))
        if not remembers:
            fed.clients[signer].ledger._entries.summed.clear()
            assert first_reply(fed, signer, SumRequest(5, again)) is answer
            continue
        with pytest.raises(RemoteProtocolError, match="client 0's update from global model"):
            fed.tell(signer, SumRequest(5, again))


def test_S42_a_signer_remembers_in_the_next_epoch_and_when_a_model_has_grown_old() -> None:
    fed = AsyncFederation().open()
    tags = tuple(fed.make_upload(owner, 0).tag for owner in range(4))
    fed.tell(5, SumRequest(0, tags))
    ledger = Ledger.from_bytes(fed.clients[5].ledger.to_bytes())
    with pytest.raises(RemoteProtocolError, match="is refused"):
        ledger.check_buffer([(9, model_of(1)), (0, model_of(0))])
    ledger.check_buffer([(4, model_of(0)), (0, model_of(1))])
    later = tuple(fed.make_upload(owner, 9).tag for owner in range(4))
    fed.send(5, fed.clients[5].receive(SERVER, SumRequest(9, later)))
    with pytest.raises(RemoteProtocolError, match="too old"):
        fed.clients[5].ledger.check_buffer([(4, model_of(0))])
    newer = Client(5, fed.keys[5], fed.policy, fed.clients[5].ledger)
    newer.receive(SERVER, Opening(replace(fed.settings, round=2).to_bytes()))
    assert newer.ledger is fed.clients[5].ledger
    with pytest.raises(LightSecAggError, match="client 0's update"):
        newer.ledger.check_buffer([(0, model_of(9))])


class Forgetful(Ledger):
    """Trusts that the signers of a buffer know of every epoch."""

    def check_epoch(self, model: bytes) -> None:
        pass


class Epoch(Wire):
    """Six of ten clients, and a server that can do without the signatures of two."""

    server: Server
    clients: dict[int, Client]

    def __init__(self, number: int, ten: AsyncFederation, members: Iterable[int]) -> None:
        six = AsyncFederation(6, dropouts=2, buffer_size=3, threat_model=MALICIOUS)
        settings = replace(six.settings, round=number, allow_list=ten.allow_list.digest)
        server = Server(settings, ten.allow_list, members, buffer_size=3)
        clients = {i: Client(i, ten.keys[i], ten.policy, ten.clients[i].ledger) for i in members}
        super().__init__(server, clients, Codec(settings.field))
        self.quantizer, self.result = settings.quantizer, np.empty(0)

    def output(self, party: int, output: object) -> None:
        if isinstance(output, BufferAggregate):
            self.result = self.quantizer.dequantise(output.total, output.weights[0])

    def sum(self, updates: dict[int, Any], silent: Iterable[int]) -> Any:
        """Of updates from one model, whatever these owners would say about it."""
        self.server.intake.publish(MODEL)
        self.call(SERVER, self.server.start)
        self.settle()
        for client, party in self.clients.items():
            self.call(client, party.restock)
        self.settle()
        for client in silent:
            self.call(SERVER, partial(self.server.drop, client))
        for owner, vector in updates.items():
            self.call(owner, partial(self.clients[owner].set_input, Update(vector), 0, MODEL))
        self.settle()
        return self.result


def test_S42_attack_two_epochs_whose_signers_have_never_met() -> None:
    """Owners are few and signers many: another epoch has others, who know of no earlier sum."""
    victim, colluder, crowd = 2, 3, (0, 1)
    for ledger in (Forgetful, Ledger):
        ten = AsyncFederation(10, buffer_size=3, threat_model=MALICIOUS)
        for party in ten.clients.values():
            party.ledger = ledger()
        vectors = {owner: ten.unique_vector() for owner in (*crowd, victim, colluder)}
        again = {owner: np.clip(vectors[owner] + 1, -1000, 1000) for owner in crowd}
        first = Epoch(1, ten, (*crowd, victim, 4, 5, 6)).sum(
            {owner: vectors[owner] for owner in (*crowd, victim)}, silent=crowd
        )
        second = Epoch(2, ten, (*crowd, colluder, 7, 8, 9))
        attack = partial(second.sum, {**again, colluder: vectors[colluder]}, silent=crowd)
        if ledger is Ledger:
            with pytest.raises(MaskAlreadyUsed, match="in an earlier epoch"):
                attack()
            continue
        difference = first - attack() + vectors[colluder]
        assert np.abs(difference - vectors[victim]).max() <= len(crowd)


class SyncRound(Wire):
    """A round of clients that go on with the ledgers of an epoch; `updates` names who trains."""

    server: Server
    clients: dict[int, Client]

    def __init__(self, fed: AsyncFederation, updates: dict[int, Any], model: bytes) -> None:
        quantizer = make_quantizer(fed.parameters, fed.settings.dimension, bound=1000.0, scale=1.0)
        settings = replace(fed.settings, round=2, quantizer=quantizer, model=model, buffering=None)
        policy = replace(fed.policy, model=model, buffering=None, max_attempts=2)
        super().__init__(
            Server(settings, fed.allow_list),
            {c: Client(c, fed.keys[c], policy, fed.clients[c].ledger) for c in fed.keys},
            Codec(settings.field),
        )
        self._updates, self._model, self.quantizer = updates, model, quantizer
        self.result = np.empty(0)

    def output(self, party: int, output: object) -> None:
        match output:
            case NeedInput() if party in self._updates:
                update = Update(self._updates[party])
                self.call(party, partial(self.clients[party].set_input, update, model=self._model))
            case Aggregate():
                self.result = self.quantizer.dequantise(output.total, 1)

    def run(self) -> Any:
        self.call(SERVER, self.server.start)
        self.settle()
        while self.server.phase is not Phase.DONE:
            self.call(SERVER, self.server.proceed)
            self.settle()
        return self.result


@pytest.mark.parametrize("naive", [True, False])
def test_S42_attack_a_round_from_a_model_of_an_epoch(
    naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All six are summed in an epoch; then their operators take rounds, with the same ledgers.

    Training does not repeat itself bit by bit, so the updates of the others are not known as spent.
    """
    if naive:
        monkeypatch.setattr(Ledger, "check_update", lambda ledger, _, known, __: None)
    fed = AsyncFederation(threat_model=MALICIOUS, buffer_size=6).open()
    vectors = {client: fed.unique_vector() for client in fed.clients}
    fed.unique_vector = iter(vectors.values()).__next__  # type: ignore[method-assign]
    for client in fed.clients:
        fed.upload(client)
    fed.settle()
    weight, q = fed.results[0].weights[0], fed.field.modulus
    total = [int(entry) * pow(weight, -1, q) % q for entry in fed.results[0].total]
    first = np.array([entry - q if entry > q // 2 else entry for entry in total])
    victim, again = 0, {c: np.clip(vectors[c] + 1, -1000, 1000) for c in fed.clients if c}
    attack = SyncRound(fed, again, model_of(0)).run
    if not naive:
        with pytest.raises(MaskAlreadyUsed, match="another update, or by other instructions"):
            attack()
        return
    assert np.abs(first - attack() - vectors[victim]).max() <= len(again)


# -- models that are renewed after a round without a set -------------------------------------------


@pytest.mark.parametrize(("population", "N", "T", "quorum"), [(5, 3, 0, 2), (5, 4, 1, 3)])
def test_R59_S42_three_sets_over_a_model_and_its_renewal_isolate_nobody(
    population: int, N: int, T: int, quorum: int
) -> None:
    """An update from the renewed model is another unknown, with a ledger entry of its own.

    So a server gains nothing from a renewal that two models of its own choice would not give it.
    """
    honest = range(population - T)
    dangerous = 0
    for family in families(population, range(max(quorum, T + 2), N + 1), 3):
        for renewed in product((False, True), repeat=3):
            sums = [
                [Fraction(c in members and after == now) for after in (0, 1) for c in honest]
                for members, now in zip(family, renewed, strict=True)
            ]
            rank = _rank(sums)
            units = [
                [Fraction(k == u) for k in range(2 * len(honest))] for u in range(len(sums[0]))
            ]
            if all(_rank([*sums, unit]) > rank for unit in units):
                continue
            dangerous += 1
            for model in (False, True):
                of_model = tuple(m for m, now in zip(family, renewed, strict=True) if now == model)
                if of_model and isolates(of_model, honest):
                    signers = a_way_to_sign(of_model, quorum, honest)
                    assert signers is None or not obtained(of_model, signers, honest, Ours)
                    break
            else:
                raise AssertionError("neither model alone isolates anybody, both together do")
    assert dangerous, "the search looks at families that would isolate somebody"

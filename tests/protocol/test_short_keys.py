"""S49: LightSecAgg with short keys, by real parties; and what each of its rules is for.

The attacks of the second half succeed against naive parties, which are written here, and fail
against ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from async_driver import AsyncFederation, model_of
from driver import MALICIOUS, SEEDED, CountingEntropy, Federation, Network, request
from numpy.typing import NDArray

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.transcript import context_hash
from lightsecagg.drivers.local import Packet
from lightsecagg.errors import (
    DecodeError,
    MaskAlreadyUsed,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import DEFAULT_FIELD, Elements
from lightsecagg.field.quantization import signed
from lightsecagg.field.staleness import StalenessTable, constant
from lightsecagg.masks.mask_encoding import encode_mask
from lightsecagg.masks.short_keys import (
    RING_DIMENSION,
    add_noise,
    exact_step,
    expand,
    noise_bound,
    public_matrix,
)
from lightsecagg.params import PAPER_MODULUS, Decoding, Parameters, ShareMode
from lightsecagg.protocol.client import Client, Closed, Registered
from lightsecagg.protocol.interface import SERVER, Aggregate, Phase, Send, Update
from lightsecagg.protocol.messages import (
    AggregatedShare,
    MaskedUpload,
    Member,
    Opening,
    Roster,
)
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.roster import Round, fix_round
from lightsecagg.protocol.schemes.coded_keys import CodedKeysClient
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.settings import Settings

SHORT = ShareMode.SHORT_KEY
EXACT, DITHERED = Decoding.EXACT, Decoding.DITHERED
Q, n = DEFAULT_FIELD.modulus, RING_DIMENSION
C1 = context_hash("a round of the tests")


def uniform(size: int, seed: int) -> Elements:
    return np.random.default_rng(seed).integers(0, Q, size, dtype=np.uint32)


# -- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threat_model", ["honest-but-curious", "malicious-server"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dimension", [1, 7, n, n + 1, 2 * n + 5])
def test_S49_exact_decoding_gives_the_integer_sum(
    threat_model: Any, weighted: bool, dimension: int
) -> None:
    federation = Federation(
        7, 1, 2, 4, threat_model, SHORT, dimension=dimension, weighted=weighted, decoding=EXACT
    )
    network = federation.network()
    network.start().finish().assert_exact(federation.ids)
    assert network.server.settings.share_length == -(-(n + weighted) // 3)


@pytest.mark.parametrize("weighted", [False, True])
def test_S49_dithered_decoding_leaves_the_noise_and_keeps_the_count_exact(weighted: bool) -> None:
    federation = Federation(
        6, 1, 1, 3, share_mode=SHORT, dimension=3000, weighted=weighted, decoding=DITHERED
    )
    network = federation.network().start().finish()
    result = network.result
    assert isinstance(result, Aggregate)
    expected = federation.exact_sum(network.inputs[c] for c in result.included)
    error = signed(DEFAULT_FIELD, DEFAULT_FIELD.subtract(result.total, expected))
    bound = network.server.settings.quantizer.noise
    assert 0 < np.abs(error[:3000]).max() <= bound
    assert not error[3000:].any(), "a count has no noise"
    assert 0.8 < error[:3000].var() / (64 * 6) < 1.25
    mean, count = network.server.settings.average(result.total, len(result.included))
    assert mean.shape == (3000,)
    assert count == (sum(range(1, 7)) if weighted else 6)


@pytest.mark.parametrize(("survivors", "kinds"), [(16, {1, 2}), (17, {2})])
def test_S49_a_share_of_a_key_travels_as_a_seed_only_where_it_is_long(
    survivors: int, kinds: set[int]
) -> None:
    """Of 2048 elements in 16 pieces, 130 elements with their blinds; in 17 pieces 123."""
    client = key_client(Federation(18, 0, 1, survivors, MALICIOUS, SHORT, dimension=9))
    shares = client.prepare(0, (), CountingEntropy("a client")).outgoing
    assert {share.kind.value for share in shares} == kinds


def test_S49_the_default_decoding_is_exact_where_eight_bits_remain() -> None:
    def step(clients: int) -> int:
        parameters = Parameters(clients, 1, 1, share_mode=SHORT)
        return make_quantizer(parameters, 1_206_590, 1.0).step

    assert step(1000) > 1
    assert step(2000) == 1
    counted = make_quantizer(
        Parameters(200, 1, 1, share_mode=SHORT), 5000, 1.0, max_samples=1000, weighted=True
    )
    assert counted.step == 1, "a client with one of 1000 samples would have 2 bits"
    forced = make_quantizer(
        Parameters(2000, 1, 1, share_mode=SHORT), 1_206_590, 1.0, decoding=EXACT
    )
    assert forced.step > 1
    assert forced.budget < 128
    with pytest.raises(ParameterError, match="exact decoding is for short keys"):
        make_quantizer(Parameters(20, 1, 1), 1000, 1.0, decoding=EXACT)


@pytest.mark.parametrize("decoding", Decoding)
def test_S49_the_largest_inputs_and_counts_never_wrap(decoding: Decoding) -> None:
    """All clients at +-limit with the largest count, and noise at its bound on top of it."""
    parameters = Parameters(9, 2, 2, share_mode=SHORT)
    quantizer = make_quantizer(
        parameters, 2000, 1.0, max_samples=10**8, weighted=True, decoding=decoding
    )
    assert 9 * quantizer.limit <= 9 * quantizer.budget
    for sign in (1, -1):
        x, e = sign * 9 * quantizer.budget, sign * quantizer.noise
        assert abs(x + quantizer.step * e) <= (Q - 3) // 2
    assert 9 * quantizer.max_samples <= (Q - 3) // 2, "counts use the whole field"
    with pytest.raises(ParameterError, match="could wrap around"):
        replace(quantizer, noise=quantizer.noise + 10**9 // quantizer.step)


@pytest.mark.parametrize("answers", ["U", "more"])
def test_S49_one_wrong_bit_in_one_of_exactly_U_answers_is_noticed(answers: str) -> None:
    """Without spare answers nothing else could notice it."""
    survivors = 6 if answers == "U" else 4
    federation = Federation(6, 1, 0, survivors, share_mode=SHORT, dimension=2000, decoding=EXACT)
    network = federation.network()
    liar = federation.ids[3]

    def flip(sender: int, _recipient: int, message: Any) -> list[Any]:
        if sender == liar and isinstance(message, AggregatedShare):
            vector = message.vector.copy()
            vector[5] ^= 1
            return [AggregatedShare(vector)]
        return [message]

    network.tamper = flip
    network.start().finish()
    if answers == "U":
        assert "variance" in network.assert_aborted()
    else:
        network.assert_exact(federation.ids)
        assert isinstance(network.result, Aggregate)
        assert network.result.suspects == (liar,)


@pytest.mark.parametrize("survivors", [5, 3])
def test_S49_a_lie_about_the_count_alone_takes_a_spare_answer_to_notice(survivors: int) -> None:
    """The count has no noise to look at: where U - T divides n, an answer's last element is all
    that it depends on, and a liar moves it at will, as it could by a false upload."""
    federation = Federation(5, 1, 0, survivors, share_mode=SHORT, dimension=2000, decoding=EXACT)
    network = federation.network()
    code, place = federation.settings().code, 3
    liar = sorted(federation.ids)[place]
    alone = np.zeros((survivors, 1), dtype=np.uint32)
    alone[-2] = 1  # what the liar adds to its answer, among exactly U of them
    decoded = code.decode(list(range(5 - survivors, 5)), alone)
    less = -5 * pow(int(decoded[0, 0]), -1, Q)  # the count's mask is the first piece's last element

    def lie(sender: int, _recipient: int, message: Any) -> list[Any]:
        if sender == liar and isinstance(message, AggregatedShare):
            vector = message.vector.copy()
            vector[-1] = (int(vector[-1]) + less) % Q
            return [AggregatedShare(vector)]
        return [message]

    network.tamper = lie
    network.start().finish()
    if survivors == 3:
        network.assert_exact(federation.ids)
        assert isinstance(network.result, Aggregate)
        assert network.result.suspects == (liar,)
        return
    assert isinstance(network.result, Aggregate)
    true = federation.exact_sum(network.inputs[c] for c in federation.ids)
    moved = signed(DEFAULT_FIELD, DEFAULT_FIELD.subtract(network.result.total, true))
    assert moved[-1] == 5
    assert not moved[:-1].any()


def test_S49_an_upload_under_another_key_than_was_shared_is_noticed() -> None:
    federation = Federation(6, 1, 0, 6, share_mode=SHORT, dimension=2000, decoding=EXACT)

    class OtherKey(CodedKeysClient):
        def mask(self, secret: bytes, owners: Any) -> Elements:
            other = CodedKeysClient(self.round, self.client).prepare(
                0, (), CountingEntropy("another key")
            )
            return super().mask(other.secret, owners)

    network = federation.network()
    network.clients[federation.ids[2]]._scheme_class = OtherKey
    network.start().finish()
    assert "variance" in network.assert_aborted()


def test_S49_the_state_of_a_client_is_small() -> None:
    federation = Federation(6, 1, 2, 3, share_mode=SHORT, dimension=50_000)
    network = federation.network()
    network.train_at_once = False
    network.start().run(until=lambda: network.server.phase is Phase.UPLOAD)
    client = network.clients[federation.ids[0]]
    state = client.state
    assert isinstance(state, Registered)
    assert state.holder is not None
    assert state.contributor is not None
    shares = state.holder.stored
    assert len(state.contributor.stock[0].secret) == 4 * (n + 1) + 32
    assert len(client.snapshot()) - shares < 16_000
    assert shares < 6 * 4100


# -- what clients refuse -------------------------------------------------------------------------


def short_settings(**changes: Any) -> Settings:
    return Federation(share_mode=SHORT, dimension=5000, **changes).settings()


def opened(policy_mode: ShareMode | None, offered: ShareMode) -> None:
    federation = Federation(share_mode=offered)
    client = federation.client(federation.ids[0], share_mode=policy_mode)
    client.receive(SERVER, Opening(federation.settings().to_bytes()))


def test_S49_a_client_takes_short_keys_only_if_its_policy_names_them() -> None:
    with pytest.raises(RemoteProtocolError, match="short keys, which rest on ring-LWE"):
        opened(None, SHORT)
    with pytest.raises(RemoteProtocolError, match="demands seeded"):
        opened(SEEDED, SHORT)
    with pytest.raises(RemoteProtocolError, match="demands short-key"):
        opened(SHORT, SEEDED)
    opened(SHORT, SHORT)
    assert scheme_of("lightsecagg").client is CodedMasksClient
    assert scheme_of("lightsecagg", share_mode=SHORT).client is CodedKeysClient


def proposing(change: Callable[[list[Any]], None], decoding: Decoding = EXACT) -> bytes:
    """Encoded settings as a hostile server would write them."""
    fields = msgspec.msgpack.decode(short_settings(decoding=decoding).to_bytes())
    change(fields)
    return msgspec.msgpack.encode(fields)


def set_last(*values: Any) -> Callable[[list[Any]], None]:
    def change(fields: list[Any]) -> None:
        fields[-1] = list(values)

    return change


T_EXACT = exact_step(Q, noise_bound(6, 1, 5000))


@pytest.mark.parametrize(
    "values",
    [
        (1024, 256, T_EXACT),
        (4096, 256, T_EXACT),
        (2048, 128, T_EXACT),
        (2048, 0, T_EXACT),
        (2048, 256, 0),
        (2048, 256, -1),
        (2048, 256, 2),
        (2048, 256, T_EXACT - 1),
        (2048, 256, T_EXACT + 1),
        (2048, 256, Q),
        (2048, 256, Q + 1),
    ],
)
def test_S49_a_client_computes_n_coins_and_t_itself(values: tuple[int, int, int]) -> None:
    federation = Federation(share_mode=SHORT, dimension=5000)
    client = federation.client(federation.ids[0])
    with pytest.raises(RemoteProtocolError, match="short keys with n, coins, t"):
        client.receive(SERVER, Opening(proposing(set_last(*values))))
    for t in (1, T_EXACT):
        federation.client(federation.ids[1 + (t == 1)]).receive(
            SERVER, Opening(proposing(set_last(2048, 256, t), DITHERED if t == 1 else EXACT))
        )


def test_S49_settings_without_the_numbers_of_short_keys_are_refused() -> None:
    def drop(fields: list[Any]) -> None:
        del fields[-2:]  # and the empty instructions before them

    with pytest.raises(DecodeError, match="short keys with n, coins, t = None"):
        Settings.from_bytes(proposing(drop))
    seeded = msgspec.msgpack.decode(Federation(dimension=5000).settings().to_bytes())
    with pytest.raises(ParameterError, match="decoding is for short keys"):
        Settings.from_bytes(msgspec.msgpack.encode([*seeded, b"", [2048, 256, T_EXACT]]))


def test_S49_set_up_refuses_what_does_not_protect() -> None:
    with pytest.raises(ParameterError, match="need the modulus q = 2146959361"):
        short_settings(modulus=PAPER_MODULUS)
    settings = short_settings()
    plain = Federation(dimension=5000).settings()
    with pytest.raises(ParameterError, match="are not those of these short keys"):
        replace(settings, quantizer=plain.quantizer)
    with pytest.raises(ParameterError, match="are not those of these short keys"):
        replace(settings, quantizer=replace(settings.quantizer, noise=settings.quantizer.noise - 1))
    with pytest.raises(ParameterError, match="only short keys leave noise"):
        replace(plain, quantizer=settings.quantizer)


# -- one key, one noise, one upload --------------------------------------------------------------


def round_of(federation: Federation, number: int = 1) -> Round:
    keys = {c: (AgreementKey(bytes([c]) * 32).public,) for c in federation.ids}
    roster = Roster(tuple(Member(client, keys[client], b"") for client in federation.ids))
    return fix_round(federation.settings(number), federation.allow_list, roster)


def key_client(federation: Federation, number: int = 1) -> CodedKeysClient:
    return CodedKeysClient(round_of(federation, number), federation.ids[0])


def test_S49_a_mask_is_a_function_of_what_was_drawn_with_the_key() -> None:
    federation = Federation(share_mode=SHORT, dimension=5000)
    scheme, entropy = key_client(federation), CountingEntropy("a client")
    secret = scheme.prepare(0, (), entropy).secret
    drawn = len(entropy.drawn)
    assert np.array_equal(scheme.mask(secret, ()), scheme.mask(secret, ()))
    assert len(entropy.drawn) == drawn, "no entropy is asked for on the way to the upload"


@pytest.mark.parametrize("sizes", [(6, 1, 2, 4), (20, 1, 1, 19)], ids=["seeds", "explicit"])
def test_S49_keys_and_noise_differ_by_round_and_serial_though_the_entropy_repeats_itself(
    sizes: tuple[int, int, int, int],
) -> None:
    federation = Federation(*sizes, share_mode=SHORT, dimension=5000)

    def secret(number: int, serial: int) -> bytes:
        scheme = key_client(federation, number)
        return scheme.prepare(serial, (), CountingEntropy("the same bytes again")).secret

    secrets = [secret(1, 0), secret(2, 0), secret(1, 1)]
    assert len({s[-32:] for s in secrets}) == 3
    keys = [np.frombuffer(s[:-32], dtype="<u4") for s in secrets]
    assert all((keys[i] == keys[j]).sum() < 3 for i in range(3) for j in range(i))
    assert secret(1, 0) == secrets[0]


def sharing(federation: Federation) -> tuple[Network, Client, bytes]:
    """A round whose uploads are due, one client, and its snapshot before its upload."""
    network = federation.network()
    network.train_at_once = False
    network.start().run(until=lambda: network.server.phase is Phase.UPLOAD)
    network.run()
    client = network.clients[federation.ids[0]]
    return network, client, client.snapshot()


def uploaded(client: Client, update: Update) -> Elements:
    *_, output = client.set_input(update)
    assert isinstance(output, Send)
    assert isinstance(output.message, MaskedUpload)
    return output.message.vector


def restored(federation: Federation, client: Client, snapshot: bytes) -> Client:
    """The client after a crash, by a driver that did not raise the generation in time."""
    return Client.restore(snapshot, federation.identities[client.client], federation.policy(), 0)


@pytest.mark.parametrize("share_mode", [SEEDED, SHORT])
def test_S06_S49_a_recomputed_upload_is_the_same_bytes_or_is_not_sent(
    share_mode: ShareMode,
) -> None:
    federation = Federation(share_mode=share_mode, dimension=5000, weighted=False)
    _, client, before = sharing(federation)
    update = federation.update(client.client)
    first = uploaded(client, update)

    again = restored(federation, client, before)
    again.ledger = client.ledger  # it is on disk, stored before the first byte left
    assert np.array_equal(uploaded(again, update), first)

    other = Update(update.vector + np.eye(1, 5000, 7)[0] * 3, update.samples)
    naive = restored(federation, client, before)  # and with the ledger of before
    leaked = DEFAULT_FIELD.subtract(uploaded(naive, other), first)
    assert np.flatnonzero(leaked).tolist() == [7], "the difference of two updates, in the clear"

    ours = restored(federation, client, before)
    ours.ledger = client.ledger
    with pytest.raises(MaskAlreadyUsed, match="another upload has left under this mask"):
        uploaded(ours, other)
    assert isinstance(ours.state, Closed), "and the key is burnt"
    assert len(ours.snapshot()) < 1000


def test_S06_S49_a_mask_of_an_epoch_too_has_one_upload() -> None:
    federation = constant_buffers(decoding=EXACT).open()
    client = federation.clients[0]
    before = client.snapshot()
    first = federation.make_upload(0, 0)

    def comes_back() -> Client:
        return Client.restore(before, federation.keys[0], federation.policy, 0)

    other = Update(federation.unique_vector())
    naive = comes_back()  # with the ledger of before
    *_, output = naive.set_input(other, 0, model_of(0))
    assert isinstance(output, Send)
    assert isinstance(output.message, MaskedUpload)
    leaked = signed(DEFAULT_FIELD, DEFAULT_FIELD.subtract(output.message.vector, first.vector))
    mine = signed(DEFAULT_FIELD, federation.updates[0, first.tag.serial])
    assert np.array_equal(leaked, other.vector.astype(np.int64) - mine)

    ours = comes_back()
    ours.ledger = client.ledger  # it is on disk, stored before the first byte left
    with pytest.raises(MaskAlreadyUsed, match="another upload has left under this mask"):
        ours.set_input(other, 0, model_of(0))
    assert isinstance(ours.state, Closed)


# -- the asynchronous mode -----------------------------------------------------------------------


def constant_buffers(**options: Any) -> AsyncFederation:
    table = StalenessTable.from_function(constant(), 1, 5)
    return AsyncFederation(share_mode=SHORT, dimension=1500, table=table, **options)


def fill(federation: AsyncFederation, version: int = 0, count: int = 4) -> None:
    for client in range(count):
        federation.upload(client, version)
    federation.settle()


def test_S49_buffers_of_equal_weights_are_exact() -> None:
    federation = constant_buffers(decoding=EXACT).open()
    fill(federation)
    fill(federation, version=1)
    assert len(federation.results) == 2
    for result in federation.results:
        np.testing.assert_array_equal(result.total, federation.expected(result.time))


def test_S49_strict_buffers_of_two_weights_are_right_up_to_the_noise() -> None:
    federation = AsyncFederation(
        clients=8,
        privacy=1,
        buffer_size=6,
        share_mode=SHORT,
        dimension=1500,
        strict=True,
        decoding=DITHERED,
    ).open()
    federation.skip_to(1)
    for client in range(6):
        federation.upload(client, client % 2)
    federation.settle()
    (result,) = federation.results
    assert len(set(result.weights)) == 2
    difference = DEFAULT_FIELD.subtract(result.total, federation.expected(result.time))
    error = signed(DEFAULT_FIELD, difference)
    squares = sum(weight**2 for weight in result.weights)
    assert np.abs(error).max() <= federation.settings.quantizer.noise
    assert 0.8 < error.var() / (64 * squares) < 1.25


@pytest.mark.parametrize("share_mode", [SEEDED, SHORT])
def test_S49_a_client_that_demands_a_crowd_demands_it_of_every_weight(
    share_mode: ShareMode,
) -> None:
    """Of masks it is enough that the whole buffer is one; see the control of two weights."""
    federation = AsyncFederation(
        clients=8, buffer_size=6, share_mode=share_mode, strict=True, scale=0.0
    ).open()
    cautious = federation.clients[7]
    cautious._holder._policy = replace(cautious._policy, minimum=6)
    federation.skip_to(1)
    for client in range(6):
        federation.upload(client, client % 2)
    federation.settle()
    federation.call(SERVER, federation.server.proceed)
    assert len(federation.results) == 1, "the others answer"
    if share_mode is SEEDED:
        assert not federation.refusals
        return
    (refusal,) = federation.refusals
    assert "a weight that 3 owners share is refused" in refusal
    assert cautious.time == -1, "it has consented to nothing"


def test_S49_a_wrong_answer_for_a_buffer_is_noticed_without_spares() -> None:
    federation = constant_buffers(clients=4, dropouts=0, survivors=4, decoding=EXACT).open()
    carry = federation.carry

    def lie(packet: Packet) -> Any:
        message = federation.codec.decode(packet.data)
        if packet.sender == 2 and isinstance(message, AggregatedShare):
            vector = message.vector.copy()
            vector[0] ^= 1
            data = federation.codec.encode(AggregatedShare(vector, message.time))
            packet = packet._replace(data=data)
        return carry(packet)

    federation.carry = lie  # type: ignore[method-assign]
    fill(federation)
    assert not federation.results
    (failure,) = federation.failures
    assert "variance" in failure.reason


def test_S09_S49_unequal_weights_are_refused_at_set_up_and_by_every_client() -> None:
    """The control shows why: weights 64 and 21 give the noise away, and with it the updates."""
    d, rng = 3000, np.random.default_rng(1)
    noise = [rng.binomial(256, 0.5, d) - 128 for _ in range(2)]
    leaked = 64 * noise[0] + 21 * noise[1]  # what S and the output tell
    low = leaked * pow(21, -1, 64) % 64
    guessed = np.where(low >= 32, low - 64, low)
    assert (guessed == noise[1]).mean() > 0.999

    with pytest.raises(ParameterError, match="take constant staleness or strict buffers"):
        AsyncFederation(share_mode=SHORT, dimension=1500, scale=0.0, decoding=DITHERED)
    strict = AsyncFederation(
        share_mode=SHORT, dimension=1500, strict=True, decoding=DITHERED, scale=0.0
    )
    fields = msgspec.msgpack.decode(strict.settings.to_bytes())
    (place,) = (k for k, value in enumerate(fields) if isinstance(value, dict))
    fields[place] = {**fields[place], "strict": False}
    with pytest.raises(RemoteProtocolError, match="take constant staleness or strict buffers"):
        strict.clients[0].receive(SERVER, Opening(msgspec.msgpack.encode(fields)))


# -- attacks that succeed without the rules ------------------------------------------------------


def inverted(block: Elements) -> Elements:
    """The coefficients of the ring element with these values at the roots of X^n + 1."""
    both = np.concatenate([np.zeros_like(block), block])[:, None]
    low = ntt.inverse(DEFAULT_FIELD, np.ascontiguousarray(both), n)[:, 0]
    return DEFAULT_FIELD.multiply(low, np.array([2], dtype=np.uint32))


def values_of(coefficients: Elements) -> Elements:
    column = np.ascontiguousarray(coefficients)[:, None]
    return np.ascontiguousarray(ntt.forward(DEFAULT_FIELD, column, 2 * n)[n:, 0])


def divide_by_block(mask: Elements, dimension: int, column: int = 0) -> Elements:
    """s from A s in one block, if there is no noise: linear algebra."""
    matrix = public_matrix(C1, dimension, Q)
    block = mask.reshape(n, -1)[:, column]
    inverses = DEFAULT_FIELD.inverses(np.ascontiguousarray(matrix[:, column]))
    return inverted(DEFAULT_FIELD.multiply(values_of(block), inverses))


def masked(key: Elements, x: NDArray[np.int64], seed: bytes, step: int) -> Elements:
    """An upload of a naive party; step 0 leaves the noise out."""
    y = DEFAULT_FIELD.add(expand(DEFAULT_FIELD, C1, key, len(x)), DEFAULT_FIELD.vector(x))
    if step:
        add_noise(DEFAULT_FIELD, y, seed, len(x), step)
    return y


def example() -> tuple[Elements, NDArray[np.int64]]:
    """A key, and an update of two blocks of which the attacker knows one: a layer that is zero."""
    x = np.random.default_rng(2).integers(-1000, 1001, 2 * n)
    x.reshape(n, 2)[:, 0] = 0
    return uniform(n, 1), x


def attacked(y: Elements, key: Elements) -> NDArray[np.int64]:
    return signed(DEFAULT_FIELD, DEFAULT_FIELD.subtract(y, expand(DEFAULT_FIELD, C1, key, len(y))))


def without_noise(left: NDArray[np.int64]) -> NDArray[np.int64]:
    """x from x + t e."""
    return left - T_EXACT * np.rint(left / T_EXACT).astype(np.int64)


def test_S49_control_without_noise_one_known_block_gives_the_whole_update() -> None:
    """t = 0 is the same as no noise: no client takes it, see the test on n, coins and t."""
    key, x = example()
    bare = masked(key, x, bytes(32), 0)
    found = divide_by_block(bare, len(x))
    assert np.array_equal(found, key)
    assert np.array_equal(attacked(bare, found), x)
    for step in (1, T_EXACT):
        noisy = masked(key, x, bytes(32), step)
        assert (divide_by_block(noisy, len(x)) == key).mean() < 0.01


def test_S49_control_fresh_noise_under_one_key_is_averaged_away() -> None:
    key, x = example()
    exact = masked(key, x, bytes(32), 0)
    uploads = [exact.copy() for _ in range(1000)]
    for k, y in enumerate(uploads):
        add_noise(DEFAULT_FIELD, y, k.to_bytes(32), len(x), T_EXACT)
    total = np.zeros(len(x))
    for y in uploads:
        total += signed(DEFAULT_FIELD, DEFAULT_FIELD.subtract(y, uploads[0])) // T_EXACT
    first = np.rint(-total / 1000).astype(np.int64)  # e_0 - mean e, whose deviation is 1/4
    bare = DEFAULT_FIELD.subtract(uploads[0], DEFAULT_FIELD.vector(T_EXACT * first))
    assert (bare == exact).mean() > 0.9, "the noise is gone"
    # Our parties mask twice with the same noise, or not at all: see the tests on one upload.


def test_S04_S49_control_two_survivor_sets_give_a_single_update_away() -> None:
    keys = [uniform(n, k) for k in range(4)]
    x = np.random.default_rng(3).integers(-1000, 1001, 5000)
    with_, without = DEFAULT_FIELD.sum(keys), DEFAULT_FIELD.sum(keys[1:])
    key = DEFAULT_FIELD.subtract(with_, without)
    y = masked(keys[0], x, bytes(32), T_EXACT)
    assert np.array_equal(without_noise(attacked(y, key)), x)

    federation = Federation(6, 1, 1, 3, MALICIOUS, SHORT, dimension=100, decoding=EXACT)
    network = federation.network().start()
    network.run(until=lambda: network.server.phase is Phase.AGREE)
    network.run()
    client = network.clients[federation.ids[0]]
    smaller = request(sorted(federation.ids)[:-1])
    with pytest.raises(RemoteProtocolError, match="answering both would reveal"):
        client.receive(SERVER, smaller)


def test_S49_control_a_buffer_of_two_weights_tells_the_sum_of_each() -> None:
    """Strict buffers hide an update among those of its weight, and no others.

    With 64 and 63, 64 E_a + 63 E_b tells both; 64 and 45 leave about one entry in 2000 open.
    """
    weights, d = np.array([64, 64, 63, 63]), 2 * n
    step = exact_step(Q, noise_bound(4, 64, d))
    x = np.random.default_rng(4).integers(-200, 201, (4, d))
    x.reshape(4, n, 2)[:, :, 0] = 0  # a layer that everybody knows
    keys = np.stack([uniform(n, k) for k in range(4)])
    y = np.stack([masked(keys[k], x[k], bytes([k]) * 32, step) for k in range(4)])
    S, total = (DEFAULT_FIELD.vector(weights @ rows.astype(np.int64)) for rows in (keys, y))

    noise = np.rint(attacked(total, S) / step).astype(np.int64)
    light = -noise % 64 + 64 * np.arange(-2, 2)[:, None]
    heavy = (noise - 63 * light) // 64
    likeliest = np.argmin(light**2 + heavy**2, axis=0)
    E_b = np.take_along_axis(light, likeliest[None], axis=0)[0]
    bare = DEFAULT_FIELD.subtract(DEFAULT_FIELD.sum(list(y[2:])), DEFAULT_FIELD.vector(step * E_b))
    found = attacked(bare, divide_by_block(bare, d))
    assert np.array_equal(found, x[2] + x[3]), "the sum of the light ones, in the clear"


def small_pairs(root: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All a + root * b for |a|, |b| <= 128, sorted, and which pair each is."""
    a, b = np.meshgrid(np.arange(-128, 129), np.arange(-128, 129), indexing="ij")
    values = ((a + root * b) % Q).reshape(-1)
    order = np.argsort(values)
    return values[order], np.stack([a.reshape(-1), b.reshape(-1)])[:, order]


def crt_attack(share: Elements, y: Elements, x: NDArray[np.int64], root: int) -> Elements | None:
    """The key from one share that is s mod (X^(n/2) - root), and one known block of the update.

    Modulo the factor, t e is known, and every coefficient of it is e_k + root * e_(k + n/2) with
    both small: there is one such pair. Then all noise of the block is known, and the key follows.
    """
    half = n // 2
    block = np.ascontiguousarray(
        DEFAULT_FIELD.subtract(y, DEFAULT_FIELD.vector(x)).reshape(n, -1)[:, 0]
    )
    matrix = public_matrix(C1, len(x), Q)[:, 0]
    a = inverted(np.ascontiguousarray(matrix))
    reduced_a = (a[:half].astype(np.int64) + root * a[half:].astype(np.int64)) % Q
    reduced_y = (block[:half].astype(np.int64) + root * block[half:].astype(np.int64)) % Q
    product = np.zeros(half, dtype=object)
    for k, coefficient in enumerate(map(int, reduced_a)):  # mod X^(n/2) = root
        shifted = np.concatenate([root * share[half - k :].astype(object), share[: half - k]])
        product = (product + coefficient * shifted) % Q
    noise = (reduced_y - product.astype(np.int64)) * pow(T_EXACT, -1, Q) % Q
    values, pairs = small_pairs(root)
    places = np.searchsorted(values, noise) % len(values)
    if not np.array_equal(values[places], noise):
        return None
    e = np.concatenate([pairs[0][places], pairs[1][places]])
    bare = DEFAULT_FIELD.subtract(block, DEFAULT_FIELD.vector(T_EXACT * e))
    inverses = DEFAULT_FIELD.inverses(np.ascontiguousarray(matrix))
    return inverted(DEFAULT_FIELD.multiply(values_of(bare), inverses))


def test_S49_control_contiguous_pieces_let_T_plus_1_shares_break_the_key() -> None:
    """N = 8, T = 0, U = 2: at the point i, the share is s mod (X^(n/2) - i); interleaved, not."""
    points = ntt.points(DEFAULT_FIELD, 8)
    code = MdsCode(DEFAULT_FIELD, 2, 0, points)
    roots = [k for k in range(8) if pow(int(points[k]), 2, Q) == Q - 1]
    assert len(roots) == 2, "of eight holders two are at a square root of -1"
    key, x = example()
    y = masked(key, x, bytes(32), T_EXACT)
    root = int(points[roots[0]])
    nothing = np.empty((0, n // 2), dtype=np.uint32)

    contiguous = encode_mask(code, key.reshape(2, -1), nothing, n).shares[roots[0]]
    found = crt_attack(contiguous, y, x, root)
    assert found is not None
    assert np.array_equal(found, key)
    assert np.array_equal(without_noise(attacked(y, found)), x)

    interleaved = encode_mask(code, np.ascontiguousarray(key.reshape(-1, 2).T), nothing, n)
    assert crt_attack(interleaved.shares[roots[0]], y, x, root) is None


@pytest.mark.parametrize("sizes", [(6, 1, 2, 4), (20, 1, 1, 19)], ids=["seeds", "explicit"])
def test_S49_our_clients_interleave_the_pieces_of_a_key(sizes: tuple[int, int, int, int]) -> None:
    """From all shares: piece k holds the elements whose position is k modulo U - T."""
    _, T, _, U = sizes
    federation = Federation(*sizes, share_mode=SHORT, dimension=5000, weighted=True)
    scheme = key_client(federation)
    prepared = scheme.prepare(0, (), CountingEntropy("a client"))
    key = np.frombuffer(prepared.secret[:-32], dtype="<u4")
    assert len(key) == n + 1
    settings, members = scheme.settings, scheme.round.members
    held = {share.recipient: (share.kind.value, share.plaintext) for share in prepared.outgoing}
    held[scheme.client] = prepared.own
    rows = []
    for position, member in enumerate(members[:U]):
        holder = CodedKeysClient(scheme.round, member)
        share = holder.elements(MaskRef(scheme.client), held[member])
        rows.append(share[: settings.share_length])
        assert scheme.round.positions[member] == position
    pieces = settings.code.decode(list(range(U)), np.stack(rows))
    assert pieces.shape == (U - T, -(-(n + 1) // (U - T)))
    for k in range(U - T):
        mine = key[k :: U - T]
        assert np.array_equal(pieces[k, : len(mine)], mine)


def test_S49_the_matrix_is_the_same_for_all_and_new_in_every_round() -> None:
    federation = Federation(share_mode=SHORT, dimension=5000)
    one, two = round_of(federation, 1), round_of(federation, 2)
    assert one.context != two.context
    secret = key_client(federation).prepare(0, (), CountingEntropy("a client")).secret
    first = CodedKeysClient(one, federation.ids[0]).mask(secret, ())
    assert np.array_equal(first, CodedKeysClient(one, federation.ids[1]).mask(secret, ()))
    assert (first == CodedKeysClient(two, federation.ids[0]).mask(secret, ())).sum() < 5

"""LightSecAgg's synchronous round from end to end: exact sums, dropouts and wrong answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import msgspec
import numpy as np
import pytest
from driver import HONEST, MALICIOUS, MODULI, PAPER, SEEDED, Federation, Network

from lightsecagg.errors import LocalProtocolError, ParameterError
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.client import Closed
from lightsecagg.protocol.interface import SERVER, Aggregate, Phase, Send
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Consent,
    MaskedUpload,
    Message,
    Refusal,
    SealedShare,
    SumRequest,
)

MODES = list(product((HONEST, MALICIOUS), (PAPER, SEEDED), MODULI))

SENT_IN = {
    Phase.ADVERTISE: Advertise,
    Phase.SHARE: SealedShare,
    Phase.UPLOAD: MaskedUpload,
    Phase.AGREE: Consent,
    Phase.RECOVER: AggregatedShare,
}
ORDER = list(SENT_IN)


@pytest.mark.parametrize(("threat_model", "share_mode", "modulus"), MODES)
@pytest.mark.parametrize("dimension", [1, 7, 8])
def test_the_sum_is_exact(
    threat_model: ThreatModel, share_mode: ShareMode, modulus: int, dimension: int
) -> None:
    federation = Federation(
        7, 1, 2, 4, threat_model, share_mode, modulus=modulus, dimension=dimension
    )
    federation.network().start().finish().assert_exact(federation.ids)


@pytest.mark.parametrize("survivors", [2, 3, 5])
def test_every_number_of_survivors_works(survivors: int) -> None:
    federation = Federation(5, 1, 0, survivors)
    federation.network().start().finish().assert_exact(federation.ids)


def test_fewer_clients_than_N_may_be_on_the_roster() -> None:
    """N bounds the roster; who does not come does not stop the round."""
    federation = Federation(8, 1, 3, 4)
    network = federation.network()
    network.dead = set(federation.ids[5:])
    network.start().finish().assert_exact(federation.ids[:5])


def test_a_strangers_id_may_be_on_the_allow_list_only() -> None:
    federation = Federation(5, 1, 1, strangers=3)
    assert len(federation.allow_list) == 8
    federation.network().start().finish().assert_exact(federation.ids)


def test_the_average_is_weighted_by_the_sample_counts() -> None:
    federation = Federation(5, 1, 1)
    network = federation.network().start().finish()
    result = network.result
    assert isinstance(result, Aggregate)
    average, samples = network.server.settings.average(result.total, len(result.included))
    weights = [update.samples for update in network.inputs.values()]
    vectors = [update.vector for update in network.inputs.values()]
    assert samples == sum(weights) == 15
    np.testing.assert_allclose(average, np.average(vectors, axis=0, weights=weights))


# -- R30: dropouts in every phase ---------------------------------------------------------------

# N, T, D, U: with U = N - D no dropout beyond D is bearable; with U < N - D some are.
SIZES = {
    HONEST: [(6, 1, 2, 4), (6, 1, 2, 3)],
    MALICIOUS: [(7, 1, 2, 5), (7, 1, 2, 4)],
}
MOMENTS = ("before", "during", "after")
DROPOUTS = [
    (threat_model, sizes, phase, moment, extra)
    for threat_model in (HONEST, MALICIOUS)
    for sizes in SIZES[threat_model]
    for phase in ORDER
    if threat_model is MALICIOUS or phase is not Phase.AGREE
    for moment in MOMENTS
    for extra in ("1", "D", "D+1")
]


def drop_in(network: Network, victims: set[int], phase: Phase, moment: str) -> None:
    """Arrange for these clients to vanish before, while or after they send in this phase."""
    sent: Counter[int] = Counter()
    in_full = len(network.clients) - 1 if phase is Phase.SHARE else 1
    # "during" loses a single message under way, or the second half of the shares.
    through = {"before": 0, "during": in_full // 2, "after": in_full}[moment]

    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if sender in network.dead:
            return []
        if sender not in victims or not isinstance(message, SENT_IN[phase]):
            return [message]
        arrives = sent[sender] < through
        sent[sender] += 1
        if sent[sender] >= through:
            network.dead.add(sender)
        return [message] if arrives else []

    network.tamper = tamper


def finish_noticing(network: Network, noticed: bool) -> None:
    """To the end; the driver notices dead clients at once, or only by its deadlines."""
    told: set[int] = set()
    for _ in range(10_000):
        if network.results:
            network.run()
            return
        if noticed and (gone := network.dead - told):
            told |= gone
            for client in sorted(gone):
                # What the client had sent before it died is still under way on its link.
                while any(packet.sender == client for packet in network.queue):
                    network.step()
                network.call(SERVER, partial(network.server.drop, client))
        elif network.queue:
            network.step()
        else:
            network.call(SERVER, network.server.proceed)
    raise AssertionError("the round hangs")


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "deadline"])
@pytest.mark.parametrize(
    ("threat_model", "sizes", "phase", "moment", "extra"),
    DROPOUTS,
    ids=lambda value: str(value).replace(" ", ""),
)
def test_R30_dropouts_in_every_phase(
    threat_model: ThreatModel,
    sizes: tuple[int, int, int, int],
    phase: Phase,
    moment: str,
    extra: str,
    noticed: bool,
) -> None:
    N, _, D, U = sizes
    count = {"1": 1, "D": D, "D+1": D + 1}[extra]
    # Spread the share modes and the fields over the cases instead of multiplying by them.
    case = ORDER.index(phase) + MOMENTS.index(moment) + count
    federation = Federation(
        *sizes, threat_model, (PAPER, SEEDED)[case % 2], modulus=MODULI[case // 2 % 2]
    )
    network = federation.network()
    victims = set(federation.ids[1::2][:count])
    assert len(victims) == count
    drop_in(network, victims, phase, moment)
    network.start()
    finish_noticing(network, noticed)

    def delivered(other: Phase) -> int:
        """How many clients got their message of that phase through."""
        early = ORDER.index(phase) < ORDER.index(other)
        lost = early or (phase is other and moment != "after")
        return N - count if lost else N

    parameters = federation.parameters
    enough = (
        delivered(Phase.UPLOAD) >= parameters.minimum
        and delivered(Phase.AGREE) >= parameters.quorum
        and delivered(Phase.RECOVER) >= U
    )
    if enough:
        everybody = set(federation.ids)
        network.assert_exact(everybody if delivered(Phase.UPLOAD) == N else everybody - victims)
    else:
        assert count > D, "up to D dropouts must never stop a round"
        reason = network.assert_aborted()
        assert "needed" in reason or "enough" in reason
        for client in set(federation.ids) - network.dead:
            assert isinstance(network.clients[client].state, Closed)
            assert network.aborted[client] == reason


def test_R30_every_client_gone_is_an_abort() -> None:
    federation = Federation()
    network = federation.network().start()
    for client in federation.ids:
        network.call(SERVER, partial(network.server.drop, client))
    assert "only 0 clients advertised" in network.assert_aborted()


def test_R30_clients_that_are_gone_before_the_start_do_not_hang_the_round() -> None:
    federation = Federation()
    network = federation.network()
    for client in federation.ids:
        network.call(SERVER, partial(network.server.drop, client))
    assert not network.results
    network.start()
    network.assert_aborted()


def test_R30_dropouts_accumulate_over_the_phases() -> None:
    """One client before sharing, one after sharing: two in all, and D is two."""
    federation = Federation(6, 1, 2, 4)
    network = federation.network()
    first, second = federation.ids[0], federation.ids[3]
    network.dead.add(first)
    network.train_at_once = False
    network.start().run()
    network.call(SERVER, network.server.proceed)
    network.run()
    network.dead.add(second)
    for client in sorted(network.waiting):
        network.train(client)
    network.finish().assert_exact(set(federation.ids) - {first, second})


def test_a_client_that_is_late_in_a_phase_is_told_and_forgets_its_secrets() -> None:
    federation = Federation(6, 1, 2, 4)
    network = federation.network()
    slow = federation.ids[2]
    network.train_at_once = False
    network.start().run()
    for client in sorted(network.waiting - {slow}):
        network.train(client)
    network.finish().assert_exact(set(federation.ids) - {slow})
    assert isinstance(network.clients[slow].state, Closed)
    assert network.messages(AbortRound, to=slow)
    with pytest.raises(LocalProtocolError, match="is over for client"):
        network.clients[slow].set_input(network.inputs[slow])


# -- shares that do not arrive -----------------------------------------------------------------


def corrupt_share(victim: int, recipients: set[int]) -> object:
    """On the way down: what the server got is what its owner had sealed."""

    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if (
            sender == SERVER
            and isinstance(message, SealedShare)
            and message.owner == victim
            and recipient in recipients
        ):
            sealed = bytes(byte ^ 1 for byte in message.sealed)
            return [replace(message, sealed=sealed)]
        return [message]

    return tamper


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_an_owner_whose_shares_open_nowhere_is_left_out(threat_model: ThreatModel) -> None:
    federation = Federation(7, 1, 2, 4, threat_model)
    network = federation.network()
    liar, *others = federation.ids
    network.tamper = corrupt_share(liar, set(others))  # type: ignore[assignment]
    network.start().finish().assert_exact(others)
    assert liar in network.clients[others[0]].refused_shares
    assert isinstance(network.clients[liar].state, Closed)


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_a_client_that_lacks_a_share_refuses_and_names_it(threat_model: ThreatModel) -> None:
    """Enough others hold all shares, so nobody is left out; the one that lacks a share refuses."""
    federation = Federation(7, 1, 2, 4, threat_model)
    network = federation.network()
    liar, deprived, *_ = federation.ids
    network.tamper = corrupt_share(liar, {deprived})  # type: ignore[assignment]
    network.start().finish().assert_exact(federation.ids)
    assert network.server.refusals == {deprived: (liar,)}
    assert network.messages(Refusal) == [Refusal(0, (liar,))]
    result = network.result
    assert isinstance(result, Aggregate)
    assert deprived not in result.responders


def test_no_survivor_set_at_all_is_an_abort() -> None:
    """Everybody's shares are corrupted for half of the clients: nobody can answer."""
    federation = Federation(6, 1, 2, 4)
    network = federation.network()

    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if isinstance(message, SealedShare) and recipient == SERVER:
            sealed = bytes(byte ^ 1 for byte in message.sealed)
            return [replace(message, sealed=sealed)]
        return [message]

    network.tamper = tamper
    network.start().finish()
    network.assert_aborted()
    assert set(network.aborted) == set(federation.ids)


# -- S14: wrong answers ------------------------------------------------------------------------


def lie(network: Network, liars: set[int]) -> None:
    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if sender in liars and isinstance(message, AggregatedShare):
            wrong = message.vector.copy()
            wrong[-1] = (int(wrong[-1]) + 1 + sender) % network.federation.modulus
            return [AggregatedShare(wrong)]
        return [message]

    network.tamper = tamper


@pytest.mark.parametrize(("threat_model", "share_mode", "modulus"), MODES)
@pytest.mark.parametrize("lies", [0, 1, 2])
def test_S14_wrong_answers_are_named_and_the_sum_is_exact(
    threat_model: ThreatModel, share_mode: ShareMode, modulus: int, lies: int
) -> None:
    federation = Federation(8, 1, 0, 4, threat_model, share_mode, modulus)
    network = federation.network()
    liars = set(federation.ids[2 : 2 + lies])
    lie(network, liars)
    network.start().finish().assert_exact(federation.ids)
    result = network.result
    assert isinstance(result, Aggregate)
    assert set(result.suspects) == liars
    assert set(result.responders) == set(federation.ids)


def test_S14_one_spare_answer_detects_a_lie_and_cannot_name_it() -> None:
    federation = Federation(6, 1, 0, 5)
    network = federation.network()
    lie(network, {federation.ids[0]})
    assert "contradict" in network.start().finish().assert_aborted()


def test_S14_too_many_lies_are_an_abort() -> None:
    federation = Federation(8, 1, 0, 4)
    network = federation.network()
    lie(network, set(federation.ids[:3]))
    network.start().finish().assert_aborted()


def test_S14_without_spare_answers_a_lie_is_invisible() -> None:
    """The control: why U < N - D is worth its price."""
    federation = Federation(5, 1, 0, 5)
    network = federation.network()
    lie(network, {federation.ids[0]})
    result = network.start().finish().result
    assert isinstance(result, Aggregate)
    exact = federation.exact_sum(network.inputs.values())
    assert result.suspects == ()
    assert not np.array_equal(result.total, exact)


# -- the driver's mistakes -----------------------------------------------------------------------


def test_a_server_is_started_once_and_first() -> None:
    federation = Federation()
    network = federation.network()
    with pytest.raises(LocalProtocolError, match="start the round"):
        network.server.proceed()
    with pytest.raises(LocalProtocolError, match="start the round"):
        network.server.receive(federation.ids[0], SumRequest(0, ()))
    network.start()
    with pytest.raises(LocalProtocolError, match="started already"):
        network.server.start()


@pytest.mark.parametrize(
    ("invited", "match"),
    [((2, 5, 8, 11, 999), "not on the allow-list"), ((2, 2, 5, 8), "twice"), ((2, 5), "take")],
)
def test_a_server_checks_whom_it_invites(invited: tuple[int, ...], match: str) -> None:
    federation = Federation()
    with pytest.raises(ParameterError, match=match):
        type(federation.network().server)(federation.settings(), federation.allow_list, invited)


def test_a_second_different_upload_or_answer_of_one_client_is_refused() -> None:
    federation = Federation()
    network = federation.network()
    doubled: list[Message] = []

    def tamper(sender: int, recipient: int, message: Message) -> list[Message]:
        if sender == federation.ids[0] and isinstance(message, MaskedUpload | AggregatedShare):
            other = message.vector.copy()
            other[0] ^= 1
            if isinstance(message, MaskedUpload):
                tag = msgspec.structs.replace(message.tag, digest=bytes(32))
                doubled.append(MaskedUpload(tag, other))
            else:
                doubled.append(AggregatedShare(other))
        return [message]

    network.tamper = tamper
    network.start()
    refused = []
    while network.queue:
        sender, _, _, kind = network.queue[0]
        network.step()
        mine = sender == federation.ids[0] and kind in (MaskedUpload, AggregatedShare)
        if doubled and mine and network.server.phase is not Phase.DONE:
            with pytest.raises(Exception, match="two different") as caught:
                network.server.receive(sender, doubled.pop())
            refused.append(caught.type.__name__)
            doubled.clear()
    network.assert_exact(federation.ids)
    assert refused == ["RemoteProtocolError"] * 2


def test_outputs_name_their_recipients() -> None:
    federation = Federation()
    opening = federation.network().server.start()
    assert [output.to for output in opening if isinstance(output, Send)] == list(federation.ids)

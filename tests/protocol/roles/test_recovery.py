"""The recovery of a sum at the server: who answers, and which jobs lead to the result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import RemoteProtocolError
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffers import sum_statement
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.jobs import Compute, RecoverMasks, UploadInMemory, complete
from lightsecagg.protocol.messages import AggregatedShare, SumRequest, Tag
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.schemes.coded_masks import CodedMasksServer
from lightsecagg.protocol.schemes.interface import Answer, MaskRef, MaskSum, Term
from lightsecagg.protocol.settings import Settings

IDS = (2, 3, 5, 7, 11)
REQUEST = SumRequest(4, (Tag(2), Tag(3)))
KEYS = {client: IdentityKey.generate() for client in IDS}
ALLOW_LIST = AllowList({client: key.public for client, key in KEYS.items()})
PARAMETERS = Parameters(5, 1, 1, 4, threat_model=ThreatModel.MALICIOUS_SERVER)
FIELD = PrimeField(PARAMETERS.modulus)
SETTINGS = Settings(
    protocol="lightsecagg",
    parameters=PARAMETERS,
    quantizer=Quantizer(FIELD, bound=1.0, summands=5),
    dimension=3,
    session=b"s" * 32,
    round=0,
    allow_list=ALLOW_LIST.digest,
)


class Sevens(RecoverMasks):
    """Masks that sum up to seven everywhere, as all answers but one say."""

    columns = 3

    def open(self) -> None:
        self.suspects = (11,)

    def run(self, start: int, stop: int) -> Elements:
        return np.full(stop - start, 7, np.uint32)

    def take_away(self, total: Elements, start: int, part: Elements) -> None:
        total[start : start + part.size] -= part


class Scheme(CodedMasksServer):
    """Takes answers of three elements."""

    used: tuple[int, ...] = ()

    def check_answer(self, asked: MaskSum, sender: int, answer: Answer) -> None:
        if not isinstance(answer, AggregatedShare) or answer.vector.size != 3:
            raise RemoteProtocolError(f"client {sender} answered with something else")

    def recovery(self, asked: MaskSum, answers: dict[int, Answer]) -> RecoverMasks:  # type: ignore[override]
        self.used = tuple(sorted(answers))
        return Sevens()


def recovery(settings: Settings = SETTINGS) -> tuple[Recovery, Scheme]:
    """The sum of two updates, one of them threefold; client 7 holds a doubtful share."""
    scheme = Scheme(Round(settings, b"C" * 32, IDS, ()), system_entropy)
    terms = (Term(MaskRef(2)), Term(MaskRef(3), 3))
    uploads = [UploadInMemory(np.array(v, np.uint32)) for v in ([10, 11, 12], [1, 2, 3])]
    asked = MaskSum(terms, frozenset({2, 3}))
    statement = sum_statement(b"C" * 32, REQUEST)
    holders = set(IDS) - {7}
    return Recovery(
        scheme, ALLOW_LIST, statement, REQUEST, asked, IDS, holders, holders, uploads
    ), scheme


def answer(value: int = 0) -> AggregatedShare:
    return AggregatedShare(np.full(3, value, np.uint32), 4)


def test_a_sum_is_found_by_two_jobs() -> None:
    flight, scheme = recovery()
    (summing,) = flight.jobs
    assert flight.asked_for(summing.job)
    masked = complete(summing.job)
    np.testing.assert_array_equal(masked, [13, 17, 21])
    assert flight.summed(masked) == []
    assert flight.jobs == []
    for client in (11, 7, 2):
        assert flight.on_answer(client, answer(client))
    assert sorted(flight.answers) == [2, 7, 11]
    (unmasking,) = flight.collect()
    assert isinstance(unmasking, Compute)
    assert flight.asked_for(unmasking.job)
    assert not flight.asked_for(summing.job)
    assert scheme.used == (2, 11) == tuple(sorted(flight.good_answers))
    assert flight.jobs == [unmasking]
    assert flight.collect() == [], "one job is enough"
    result = complete(unmasking.job)
    assert flight.summed(result) is None
    np.testing.assert_array_equal(result, [6, 10, 14])
    assert flight.suspects == (11,)


def test_answers_may_be_in_before_the_uploads_are_summed() -> None:
    flight, scheme = recovery()
    flight.on_answer(2, answer())
    assert flight.collect() == []
    (summing,) = flight.jobs
    more = flight.summed(complete(summing.job))
    assert more == flight.jobs != []
    assert scheme.used == (2,)


def test_an_answer_is_taken_once_from_those_who_are_asked() -> None:
    flight, _ = recovery()
    with pytest.raises(RemoteProtocolError, match="client 13 is not asked"):
        flight.on_answer(13, answer())
    with pytest.raises(RemoteProtocolError, match="client 5 answered with something else"):
        flight.on_answer(5, AggregatedShare(np.zeros(2, np.uint32), 4))
    assert not flight.answers
    assert flight.on_answer(5, answer(1))
    assert not flight.on_answer(5, answer(1))
    with pytest.raises(RemoteProtocolError, match="client 5 gave two different answers"):
        flight.on_answer(5, answer(2))
    assert flight.answers == {5: answer(1)}
    flight.collect()
    assert not flight.on_answer(2, answer())
    assert list(flight.answers) == [5], "too late"
    with pytest.raises(RemoteProtocolError, match="something else"):
        flight.on_answer(3, AggregatedShare(np.zeros(2, np.uint32), 4))


@pytest.mark.parametrize(
    ("threat_model", "phase"),
    [
        (ThreatModel.MALICIOUS_SERVER, Phase.AGREE),
        (ThreatModel.HONEST_BUT_CURIOUS, Phase.RECOVER),
    ],
)
def test_consent_is_asked_of_a_server_that_may_be_malicious(
    threat_model: ThreatModel, phase: Phase
) -> None:
    parameters = Parameters(5, 1, 1, 4, threat_model=threat_model)
    flight, _ = recovery(replace(SETTINGS, parameters=parameters))
    assert flight.first_phase is phase


def test_its_certificate_names_its_time() -> None:
    flight, _ = recovery()
    statement = sum_statement(b"C" * 32, REQUEST)
    for client in IDS:
        flight.agreement.on_signature(client, statement.sign(KEYS[client]))
    certificate = flight.certificate
    assert (certificate.time, flight.time) == (4, 4)
    assert len(certificate.signatures) == PARAMETERS.quorum
    with pytest.raises(RemoteProtocolError, match="shares nobody asked it for"):
        flight.agreement.on_refusal(2, (5,))


def test_what_has_ended_waits_for_nothing_and_forgets_the_answers() -> None:
    flight, _ = recovery()
    flight.on_answer(2, answer())
    (summing,) = flight.jobs
    flight.end()
    assert not flight.asked_for(summing.job)
    assert flight.jobs == []
    assert flight.answers == {}
    flight, _ = recovery()
    flight.collect()
    ((summing,), (unmasking,)) = flight.jobs, flight.summed(np.zeros(3, np.uint32)) or []
    flight.end()
    assert not flight.asked_for(unmasking.job)

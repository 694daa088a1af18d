"""Agreement on a sum: what is a signature, a refusal and a certificate, and what is none."""

from __future__ import annotations

import pytest

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffers import sum_statement
from lightsecagg.protocol.messages import (
    SumRequest,
    Tag,
)
from lightsecagg.protocol.roles.agreement import (
    Agreement,
    Statement,
    check_certificate,
)
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.settings import Settings

IDS = (2, 3, 5, 7, 11)


def request(survivors: tuple[int, ...]) -> SumRequest:
    return SumRequest(0, tuple(map(Tag, survivors)))


KEYS = {client: IdentityKey.generate() for client in (*IDS, 13)}
ALLOW_LIST = AllowList({client: key.public for client, key in KEYS.items()})
PARAMETERS = Parameters(5, 1, 1, 4, threat_model=ThreatModel.MALICIOUS_SERVER)
M = PARAMETERS.quorum
C1 = b"C" * 32
STATEMENT = sum_statement(C1, request(IDS))


def a_round() -> Round:
    settings = Settings(
        protocol="lightsecagg",
        parameters=PARAMETERS,
        quantizer=Quantizer(PrimeField(PARAMETERS.modulus), bound=1.0, summands=5),
        dimension=3,
        session=b"s" * 32,
        round=0,
        allow_list=ALLOW_LIST.digest,
    )
    return Round(settings, C1, IDS, ())


def agreement(quorum: int = M) -> Agreement:
    return Agreement(quorum, ALLOW_LIST, STATEMENT, asked=IDS, owners=IDS[:4])


def signed(*clients: int, statement: Statement = STATEMENT) -> tuple[tuple[int, bytes], ...]:
    return tuple((client, statement.sign(KEYS[client])) for client in clients)


def test_a_statement_is_its_signers_own_and_says_one_thing() -> None:
    signature = STATEMENT.sign(KEYS[2])
    STATEMENT.check(ALLOW_LIST, 2, signature)
    empty = SumRequest(0, ())
    for client, other in [
        (3, STATEMENT),
        (2, sum_statement(C1, request(IDS[:-1]))),
        (2, sum_statement(b"D" * 32, request(IDS))),
        (2, Statement("another", STATEMENT.parts)),
        (2, sum_statement(C1, empty)),
    ]:
        with pytest.raises(CryptoError, match="does not verify"):
            other.check(ALLOW_LIST, client, signature)


def test_S05_m_signatures_are_a_certificate_and_fewer_are_none() -> None:
    consent = agreement()
    for client in reversed(IDS[: M - 1]):
        consent.on_signature(client, STATEMENT.sign(KEYS[client]))
    assert not consent.reached
    assert consent.shortfall == f"only {M - 1} clients signed, m = {M} are needed"
    consent.on_signature(IDS[0], STATEMENT.sign(KEYS[IDS[0]]))  # once more is not one more
    assert not consent.reached
    consent.on_signature(11, STATEMENT.sign(KEYS[11]))
    assert consent.reached
    assert consent.certificate == signed(*IDS[: M - 1], 11)
    check_certificate(a_round(), ALLOW_LIST, STATEMENT, consent.certificate)


def test_a_certificate_holds_m_signatures_though_more_are_there() -> None:
    consent = agreement()
    for client in IDS:
        consent.on_signature(client, STATEMENT.sign(KEYS[client]))
    assert consent.certificate == signed(*IDS[:M])


def test_S05_clients_count_members_once_and_valid_signatures_only() -> None:
    for signatures, match in [
        (signed(*IDS[: M - 1]), f"has {M - 1} signatures, m = {M} are needed"),
        ((*signed(*IDS[: M - 1]), *signed(IDS[0])), "second time"),
        ((*signed(*IDS[: M - 1]), *signed(13)), "names client 13, a stranger"),
    ]:
        with pytest.raises(RemoteProtocolError, match=match):
            check_certificate(a_round(), ALLOW_LIST, STATEMENT, signatures)
    other = sum_statement(C1, request(IDS[:-1]))
    with pytest.raises(CryptoError, match="does not verify"):
        check_certificate(
            a_round(), ALLOW_LIST, STATEMENT, signed(*IDS[: M - 1]) + signed(11, statement=other)
        )


def test_S45_the_server_takes_no_signature_that_would_spoil_the_certificate() -> None:
    consent = agreement()
    for client, signature, match in [
        (2, STATEMENT.sign(KEYS[3]), "does not verify"),
        (2, b"", "does not verify"),
        (13, STATEMENT.sign(KEYS[13]), "client 13 is not asked"),
    ]:
        with pytest.raises(RemoteProtocolError, match=match):
            consent.on_signature(client, signature)
    assert not consent.signatures


def test_where_nobody_has_to_agree_nobody_signs() -> None:
    with pytest.raises(RemoteProtocolError, match="client 2 signed, but nobody has to agree"):
        agreement(quorum=0).on_signature(2, STATEMENT.sign(KEYS[2]))
    assert agreement(quorum=0).reached


def test_a_refusal_names_owners_whose_shares_were_asked_for_and_the_first_one_counts() -> None:
    consent = agreement()
    for client, missing, match in [(13, (2,), "is not asked"), (3, (2, 11), "nobody asked it for")]:
        with pytest.raises(RemoteProtocolError, match=match):
            consent.on_refusal(client, missing)
    assert not consent.refusals
    consent.on_refusal(3, (2, 5))
    consent.on_refusal(3, (7,))
    assert consent.refusals == {3: (2, 5)}


def test_S05_consent_to_a_round_is_none_to_a_buffer_and_the_other_way_round() -> None:
    """C1 is never the same; even if it were, a round's tags name nothing but their owners."""
    tags = tuple(Tag(c, 0, b"h" * 32, 0, b"m" * 32, b"d" * 32, b"s" * 64) for c in IDS)
    of_buffers = [sum_statement(C1, SumRequest(time, tags)) for time in (0, 1)]
    for statement in of_buffers:
        with pytest.raises(CryptoError):
            check_certificate(a_round(), ALLOW_LIST, STATEMENT, signed(*IDS, statement=statement))
        with pytest.raises(CryptoError):
            check_certificate(a_round(), ALLOW_LIST, statement, signed(*IDS))
        check_certificate(a_round(), ALLOW_LIST, statement, signed(*IDS, statement=statement))

"""Certificates and identities: what each side finds wrong with its own files before using them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from lightsecagg.drivers.transport.certificates import Authority, Validity
from lightsecagg.drivers.transport.tls import (
    Credentials,
    client_of,
    client_of_pem,
    is_loopback,
    split_address,
)
from lightsecagg.errors import ConfigurationError, Refused, TransportError

Save = Callable[..., Credentials]
NOW = datetime.now(UTC)


def certificate_with(*extensions: x509.ExtensionType) -> x509.Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256())


def uris(*values: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(value) for value in values])


CLIENT = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
SERVER = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])


def test_S24_the_certificate_carries_the_id() -> None:
    certificate = certificate_with(uris("lightsecagg:client:17"), CLIENT)
    assert client_of(certificate) == 17
    assert client_of_pem(certificate.public_bytes(Encoding.PEM)) == 17


@pytest.mark.parametrize(
    ("extensions", "reason"),
    [
        ((), "no alternative name"),
        ((uris(), CLIENT), "its URIs are"),
        ((uris("lightsecagg:client:01"), CLIENT), "its URIs are"),
        ((uris("lightsecagg:client:-1"), CLIENT), "its URIs are"),
        ((uris("lightsecagg:client:1x"), CLIENT), "its URIs are"),
        ((uris("lightsecagg:client:"), CLIENT), "its URIs are"),
        ((uris("LIGHTSECAGG:client:1"), CLIENT), "its URIs are"),
        ((uris("lightsecagg:client:1", "lightsecagg:client:2"), CLIENT), "its URIs are"),
        ((x509.SubjectAlternativeName([x509.DNSName("client-1")]), CLIENT), "its URIs are"),
        ((uris("lightsecagg:client:1"),), "not issued to a client"),
        ((uris("lightsecagg:client:1"), SERVER), "not issued to a client"),
    ],
)
def test_S24_a_certificate_that_names_no_client_is_refused(
    extensions: tuple[x509.ExtensionType, ...], reason: str
) -> None:
    with pytest.raises(TransportError, match=reason):
        client_of(certificate_with(*extensions))


def test_S24_garbage_is_no_certificate() -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        client_of_pem(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def test_S24_own_files_are_checked_before_use(save: Save, authority: Authority) -> None:
    good = save(authority.issue_client(5))
    good.check_client(5)
    with pytest.raises(TransportError, match="certificate of client 5, but this is client 6"):
        good.check_client(6)
    with pytest.raises(Refused, match=r"expired on .* renew"):
        good.check_client(5, NOW + timedelta(days=3))
    with pytest.raises(TransportError, match=r"valid from .* check this machine's clock") as early:
        good.check_client(5, NOW - timedelta(days=1))
    assert not isinstance(early.value, Refused), "a clock can be set right"
    with pytest.raises(TransportError, match="not issued to a server"):
        good.check_server()
    expired = Validity(NOW - timedelta(days=2), NOW - timedelta(days=1))
    with pytest.raises(TransportError, match=r"own\.pem expired"):
        save(authority.issue_client(5, expired)).check_client(5)
    stranger = Authority.create(Validity.for_days(1))
    with pytest.raises(TransportError, match="was not issued by the authority"):
        save(stranger.issue_client(5)).check_client(5)
    with pytest.raises(TransportError, match="names no client"):
        save(authority.issue_server("localhost")).check_client(5)


def test_files_that_do_not_fit_are_refused_at_loading(
    save: Save, authority: Authority, tmp_path: Path
) -> None:
    one, two = save(authority.issue_client(1)), save(authority.issue_client(2))
    with pytest.raises(ConfigurationError, match="is not the key of the certificate"):
        Credentials.load(one.authority_file, one.certificate_file, two.key_file)
    with pytest.raises(ConfigurationError, match="is not an unencrypted private key"):
        Credentials.load(one.authority_file, one.certificate_file, one.certificate_file)
    with pytest.raises(ConfigurationError, match="is not a certificate in PEM"):
        Credentials.load(one.key_file, one.certificate_file, one.key_file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Credentials.load(tmp_path / "none", one.certificate_file, one.key_file)


def test_S22_keys_stay_out_of_reprs(save: Save, authority: Authority) -> None:
    issued = authority.issue_client(1)
    for shown in (repr(issued), repr(save(issued)), repr(authority)):
        assert "PRIVATE" not in shown
        assert "ECPrivateKey" not in shown


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("server.example:0", ("server.example", 0)),
        ("[::1]:7700", ("::1", 7700)),
    ],
)
def test_addresses_are_split(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":80", "::1:80", "h:-1", "h:70000", "h:x"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="must have the form host:port"):
        split_address(address)


def test_S24_only_this_machine_is_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "localhost.example", "", "::")))  # noqa: S104

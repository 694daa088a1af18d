"""The certificate authority of one federation: it names the server and numbers the clients.

ECDSA on P-256 throughout: gRPC's TLS does not accept Ed25519 certificates.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lightsecagg.drivers.transport.tls import client_uri

_CLOCK_SKEW: Final = timedelta(hours=1)
"""How far a peer's clock may be behind when it first sees a certificate."""


@dataclass(frozen=True, slots=True)
class Validity:
    """From when until when a certificate is good."""

    start: datetime
    end: datetime

    @classmethod
    def for_days(cls, days: int) -> Validity:
        """From now on, for so many days."""
        now = datetime.now(UTC)
        return cls(now - _CLOCK_SKEW, now + timedelta(days=days))


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, both in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Authority:
    """Issues certificates to one server and numbered clients."""

    _key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate
    validity: Validity

    @classmethod
    def create(cls, validity: Validity) -> Authority:
        """A new authority with a fresh key; what it issues is good as long as it is."""
        return cls._self_signed(ec.generate_private_key(ec.SECP256R1()), validity)

    @classmethod
    def _self_signed(cls, key: ec.EllipticCurvePrivateKey, validity: Validity) -> Authority:
        name = _name("LightSecAgg federation authority")
        builder = (
            _builder(name, name, key, validity)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
        )
        return cls(key, builder.sign(key, hashes.SHA256()), validity)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> Authority:
        """The authority of these PEM files; `ValueError` if they are none."""
        loaded = x509.load_pem_x509_certificate(certificate)
        private = load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError("not a key on a curve")
        if private.public_key() != loaded.public_key():
            raise ValueError("not the key of the certificate")
        return cls(
            private, loaded, Validity(loaded.not_valid_before_utc, loaded.not_valid_after_utc)
        )

    def renewed(self, validity: Validity) -> Authority:
        """The same name and key with another validity: what it has issued stays good."""
        return self._self_signed(self._key, validity)

    def own_files(self) -> Issued:
        """The authority's own certificate and key. The key belongs offline."""
        return Issued(self.certificate.public_bytes(Encoding.PEM), _key_pem(self._key))

    def issue_server(self, name: str, validity: Validity | None = None) -> Issued:
        """A certificate for a server of this host name or address."""
        names = [_host(name)]
        if name == "localhost":
            names += [_host("127.0.0.1"), _host("::1")]
        return self._issue("server", names, ExtendedKeyUsageOID.SERVER_AUTH, validity)

    def issue_client(self, client: int, validity: Validity | None = None) -> Issued:
        """A certificate that authenticates the client of this id."""
        uri = x509.UniformResourceIdentifier(client_uri(client))
        return self._issue(f"client-{client}", [uri], ExtendedKeyUsageOID.CLIENT_AUTH, validity)

    def _issue(
        self,
        common_name: str,
        names: list[x509.GeneralName],
        purpose: x509.ObjectIdentifier,
        validity: Validity | None,
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        issuer = self.certificate.subject
        builder = (
            _builder(_name(common_name), issuer, key, validity or self.validity)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer_key, critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(certificate.public_bytes(Encoding.PEM), _key_pem(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, validity: Validity
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity.start)
        .not_valid_after(validity.end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

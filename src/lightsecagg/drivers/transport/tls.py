"""Mutual TLS: the identity in a peer's certificate is its id, and nothing a peer says changes it.

A client's certificate carries one URI, `lightsecagg:client:<id>`, as its subject alternative name.
gRPC does its handshakes inside its C core and tells neither side why one failed, so the reasons
come from here: both sides examine their own files before they use them, and a client that was not
let in repeats the handshake once with Python's `ssl`, which reports what the core swallowed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, ObjectIdentifier

from lightsecagg.errors import ConfigurationError, Refused, TransportError
from lightsecagg.foreign import read_private, reading, shown

EXPIRY_WARNING: Final = 30
"""Days before the end of a certificate in which programs warn of it when they start."""
_CLIENT_URI: Final = re.compile(r"lightsecagg:client:(0|[1-9][0-9]{0,9})")


def client_uri(client: int) -> str:
    """The name under which a certificate authenticates this client."""
    return f"lightsecagg:client:{client}"


def client_of(certificate: x509.Certificate) -> int:
    """The one client that this certificate authenticates; `Refused` if there is none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        raise Refused("the certificate names no client: it has no alternative name") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    match = _CLIENT_URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None:
        raise Refused(
            f"the certificate names no client: its URIs are {shown(uris)}, "
            "not exactly one lightsecagg:client:<id>"
        )
    _check_purpose(certificate, ExtendedKeyUsageOID.CLIENT_AUTH, "a client")
    return int(match[1])


def client_of_pem(pem: bytes) -> int:
    """`client_of` for a certificate as gRPC hands it over."""
    try:
        return client_of(x509.load_pem_x509_certificate(pem))
    except TransportError:
        raise
    except Exception as error:  # the parser's, on an extension that it does not understand
        raise Refused(f"the peer's certificate cannot be read: {shown(error)}") from error


def fingerprint_of_pem(pem: bytes) -> bytes:
    """SHA-256 of a certificate: how a revoked one is named."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256())


@dataclass(frozen=True, slots=True)
class Credentials:
    """One side's certificate and key, and the authority whose certificates it accepts."""

    authority_file: Path
    certificate_file: Path
    key_file: Path
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, authority: Path, certificate: Path, key: Path) -> Credentials:
        """Read PEM files; `ConfigurationError` if one is unreadable or they do not fit."""
        with reading(key, "a file"):
            private = read_private(key)
        credentials = cls(
            authority, certificate, key, _read(authority), _read(certificate), private
        )
        _parse(authority, credentials.authority)
        own = _parse(certificate, credentials.certificate)
        with reading(key, "an unencrypted private key in PEM"):
            public = load_pem_private_key(credentials.key, password=None).public_key()
        if public != own.public_key():
            raise ConfigurationError(f"{key} is not the key of the certificate {certificate}")
        return credentials

    def check_client(self, client: int, now: datetime | None = None) -> None:
        """Raise `Refused` if a server would never accept this as the client's certificate,
        `TransportError` if it would not yet."""
        certificate = self._check(now)
        named = client_of(certificate)
        if named != client:
            raise Refused(
                f"{self.certificate_file} is the certificate of client {named}, but this is "
                f"client {client}; check [client] id and [tls] certificate"
            )

    def check_server(self, now: datetime | None = None) -> None:
        """Raise `Refused` if no client would ever accept this as a server's certificate,
        `TransportError` if it would not yet."""
        _check_purpose(self._check(now), ExtendedKeyUsageOID.SERVER_AUTH, "a server")

    def expiring(self, days: int = EXPIRY_WARNING, now: datetime | None = None) -> list[str]:
        """What expires within so many days, in words."""
        now = now or datetime.now(UTC)
        ends = [
            (path, _parse(path, pem).not_valid_after_utc)
            for path, pem in (
                (self.authority_file, self.authority),
                (self.certificate_file, self.certificate),
            )
        ]
        return [
            f"{path} expires on {end:%Y-%m-%d %H:%M} UTC, in {(end - now).days} days"
            for path, end in ends
            if end - now < timedelta(days=days)
        ]

    def _check(self, now: datetime | None) -> x509.Certificate:
        now = now or datetime.now(UTC)
        authority = _parse(self.authority_file, self.authority)
        certificate = _parse(self.certificate_file, self.certificate)
        for path, each in ((self.authority_file, authority), (self.certificate_file, certificate)):
            if now > each.not_valid_after_utc:
                raise Refused(
                    f"{path} expired on {each.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it "
                    "(`lightsecagg members renew`, at the authority)"
                )
            if now < each.not_valid_before_utc:
                raise TransportError(
                    f"{path} is valid from {each.not_valid_before_utc:%Y-%m-%d %H:%M} UTC only; "
                    "check this machine's clock"
                )
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise Refused(
                f"{self.certificate_file} was not issued by the authority {self.authority_file}; "
                "check [tls] ca and certificate"
            ) from None
        return certificate


def end_of(path: Path) -> datetime | None:
    """When the certificate in a file expires; None if there is no such file."""
    if not path.exists():
        return None
    with reading(path, "a certificate in PEM"):
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def is_loopback(host: str) -> bool:
    """Whether this host is the machine itself, whatever a name server says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[host]:port` as a pair."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"address {address!r} must have the form host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def explain_failure(
    host: str, port: int, credentials: Credentials | None, server_name: str
) -> TransportError:
    """Connect once more, without gRPC, and say at which step and why that fails.

    `Refused` only if one side has said so: a server that is down, or that dies in the middle of a
    handshake, may be back at the next attempt. The caller sets the deadline.
    """
    try:
        await _probe(host, port, credentials, server_name)
    except ConnectionRefusedError:
        return TransportError(f"no server listens at {host}:{port}; is the server running?")
    except ssl.SSLCertVerificationError as error:
        return _explain_server_certificate(error, credentials, server_name)
    except ssl.SSLError as error:
        return _explain_alert(error)
    except (ConnectionError, asyncio.IncompleteReadError):
        return TransportError(
            _REFUSED_US if credentials else f"{host}:{port} hung up; does it expect TLS?"
        )
    except OSError as error:
        return TransportError(f"{host}:{port} cannot be reached: {error.strerror or error}")
    return TransportError(f"{host}:{port} answers, but opened no stream; try again")


_REFUSED_US: Final = (
    "the server broke off the TLS handshake; most likely it refused this client's certificate: "
    "check that both sides use the same authority ([tls] ca), that the certificate has not "
    "expired, and that the server does expect TLS"
)


async def _probe(host: str, port: int, credentials: Credentials | None, server_name: str) -> None:
    context = None
    if credentials is not None:
        context = ssl.create_default_context(cadata=credentials.authority.decode("ascii", "ignore"))
        context.load_cert_chain(credentials.certificate_file, credentials.key_file)
        context.set_alpn_protocols(["h2"])
    name = server_name if context else None
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    try:
        # In TLS 1.3 the server judges our certificate after our handshake is over; its verdict, or
        # the first bytes of HTTP/2, is what we read next.
        await reader.readexactly(1)
    finally:
        writer.transport.abort()


# What OpenSSL says of a server's certificate, by its `verify_code`.
_EXPIRED, _NOT_YET_VALID, _HOSTNAME_MISMATCH, _IP_MISMATCH = 10, 9, 62, 64


def _explain_server_certificate(
    error: ssl.SSLCertVerificationError, credentials: Credentials | None, server_name: str
) -> TransportError:
    """Why this client does not accept the server's certificate, and which side mends it."""
    what = f"the server's certificate was refused: {error.verify_message.rstrip('.')}"
    if error.verify_code == _NOT_YET_VALID:
        return TransportError(f"{what}; check this machine's clock")
    if error.verify_code == _EXPIRED:
        return Refused(f"{what}; the server needs a new one, or check this machine's clock")
    if error.verify_code in (_HOSTNAME_MISMATCH, _IP_MISMATCH):
        return Refused(
            f"{what}; dial the name that the server's certificate was issued for, or set "
            f"[server] name to it (it is {server_name} now)"
        )
    authority = credentials.authority_file if credentials else "the authority"
    return Refused(
        f"{what}; it was not issued by {authority}: check [tls] ca, [server] address, and that "
        "both sides were provisioned together"
    )


def _explain_alert(error: ssl.SSLError) -> TransportError:
    """What the server's TLS alert means here."""
    reason = (error.reason or "").upper()
    if "UNKNOWN_CA" in reason:
        return Refused(
            "the server does not trust the authority of this client's certificate; "
            "check [tls] ca and certificate"
        )
    if "CERTIFICATE_EXPIRED" in reason:
        return Refused("the server says that this client's certificate has expired; renew it")
    if "CERTIFICATE_REQUIRED" in reason:
        return Refused("the server demands a client certificate; set [tls] certificate and key")
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason:
        return Refused("the server does not speak TLS; start it without plaintext")
    return TransportError(f"{_REFUSED_US} ({reason.lower().replace('_', ' ') or error})")


def _check_purpose(certificate: x509.Certificate, purpose: ObjectIdentifier, whose: str) -> None:
    try:
        extension = certificate.extensions.get_extension_for_oid(ExtensionOID.EXTENDED_KEY_USAGE)
    except x509.ExtensionNotFound:
        extension = None
    if extension is None or purpose not in extension.value:  # type: ignore[operator]
        raise Refused(f"the certificate was not issued to {whose} (extended key usage)")


def _read(path: Path) -> bytes:
    with reading(path, "a file"):
        return path.read_bytes()


def _parse(path: Path, pem: bytes) -> x509.Certificate:
    with reading(path, "a certificate in PEM"):
        certificate = x509.load_pem_x509_certificate(pem)
        # Parsed when they are first asked for: damage in them is to be found here.
        _ = certificate.public_key(), certificate.extensions, certificate.not_valid_after_utc
        return certificate

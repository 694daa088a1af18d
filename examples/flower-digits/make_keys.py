"""Certificates for a server and keys for its nodes: make_keys.py FOLDER NODES [ADDRESS]."""

from __future__ import annotations

import datetime
import ipaddress
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


def write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def private(key: ec.EllipticCurvePrivateKey, kind: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(PEM, kind, serialization.NoEncryption())


def certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    address: str,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(address))]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=7))
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )


def main(folder: Path, nodes: int, address: str = "127.0.0.1") -> None:
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    signed = certificate(
        "authority", authority, "authority", authority, address=address, is_authority=True
    )
    write(folder / "ca.crt", signed.public_bytes(PEM))
    signed = certificate(
        "localhost", server, "authority", authority, address=address, is_authority=False
    )
    write(folder / "server.pem", signed.public_bytes(PEM))
    write(folder / "server.key", private(server, serialization.PrivateFormat.PKCS8))
    for node in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        write(folder / f"node{node}", private(key, serialization.PrivateFormat.OpenSSH))
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        write(folder / f"node{node}.pub", public)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

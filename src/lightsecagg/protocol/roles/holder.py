"""A holder: keeps its peers' shares, each under the name of its mask, for the one answer.

A share comes through the server, which is to blame for one that it should not have passed on; the
message is refused. Whether a share opens is between its owner and this client: one that does not is
simply not held, and whoever asks for it later hears that it is missing.
"""

from __future__ import annotations

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.errors import CryptoError, ParameterError, RemoteProtocolError
from lightsecagg.protocol.messages import SealedShare
from lightsecagg.protocol.schemes.interface import ClientScheme
from lightsecagg.protocol.share_exchange import Share, open_share


def check_address(scheme: ClientScheme, share: SealedShare) -> None:
    """Refuse a share that is not from a peer to this client."""
    if share.recipient != scheme.client or share.owner not in scheme.peers:
        raise RemoteProtocolError(
            f"a share from client {share.owner} to client {share.recipient} "
            f"is not for client {scheme.client}"
        )


def open_peer_share(scheme: ClientScheme, key: AgreementKey, share: SealedShare) -> Share:
    """What a peer has sealed for this client; `CryptoError` if it is of no use."""
    try:
        scheme.admit(share.kind, share.length)
        plaintext = open_share(scheme.round, key, scheme.client, share)
        scheme.check(share.kind, plaintext)
    except ParameterError as error:
        raise CryptoError(str(error)) from error
    return share.kind.value, plaintext

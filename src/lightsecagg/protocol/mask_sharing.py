"""How a LightSecAgg client makes, checks and sums the shares of masks.

The same for synchronous rounds (serial 0) and for the stock of masks in the asynchronous mode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy, draw
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.crypto.transcript import uint
from lightsecagg.errors import CryptoError, FieldError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.mask_encoding import (
    EncodedMask,
    MaskId,
    encode_mask,
    encode_seeded_mask,
    expand_share,
    seeded_positions,
)
from lightsecagg.params import ShareMode
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import OutgoingShare, Share


class SharedMask(NamedTuple):
    """A fresh mask, its owner's own share, and the shares for the peers."""

    mask: Elements
    own: Share
    outgoing: list[OutgoingShare]

    def __repr__(self) -> str:
        return f"SharedMask(length={len(self.mask)}, outgoing={len(self.outgoing)})"


def draw_mask(round_: Round, owner: int, serial: int, entropy: Entropy) -> SharedMask:
    """Draw a mask and encode it for every member of the roster, Section 4.1, phase 1."""
    if round_.settings.parameters.share_mode is ShareMode.PAPER:
        seeds: dict[int, bytes] = {}
        encoded = _encode_explicitly(round_, owner, serial, entropy)
    else:
        seeds, encoded = _encode_from_seeds(round_, owner, serial, entropy)
    outgoing = []
    for position, recipient in enumerate(round_.members):
        if position in seeds:
            share = OutgoingShare(recipient, ShareKind.SEED, seeds[position])
        else:
            explicit = round_.settings.field.to_bytes(encoded.shares[position])
            share = OutgoingShare(recipient, ShareKind.EXPLICIT, explicit)
        outgoing.append(share)
    own = outgoing.pop(round_.positions[owner])
    return SharedMask(encoded.mask, (own.kind.value, own.plaintext), outgoing)


def _encode_explicitly(round_: Round, owner: int, serial: int, entropy: Entropy) -> EncodedMask:
    settings = round_.settings
    parameters, length = settings.parameters, settings.share_length
    rows = prg.draw_bound(
        parameters.survivors * length,
        settings.field.modulus,
        entropy,
        round_.context,
        "explicit mask",
        uint(owner),
        uint(serial),
    )
    pieces, noise = np.split(rows.reshape(parameters.survivors, length), [parameters.pieces])
    return encode_mask(settings.code, pieces, noise, settings.length)


def _encode_from_seeds(
    round_: Round, owner: int, serial: int, entropy: Entropy
) -> tuple[dict[int, bytes], EncodedMask]:
    settings, members = round_.settings, len(round_.members)
    mask_id = MaskId(round_.context, owner, serial)
    seeds = {
        position: draw(entropy, prg.SEED_LENGTH)
        for position in seeded_positions(
            round_.positions[owner], members, settings.parameters.survivors
        )
    }
    seeded = {
        position: expand_share(
            seed,
            mask_id,
            round_.members[position],
            settings.share_length,
            settings.field.modulus,
        )
        for position, seed in seeds.items()
    }
    return seeds, encode_seeded_mask(settings.code, seeded, members, settings.length)


def check_share_length(settings: Settings, kind: ShareKind, length: int) -> None:
    """Raise `CryptoError` unless a round has shares of this kind and this many bytes."""
    expected = {ShareKind.EXPLICIT: 4 * settings.share_length}
    mode = settings.parameters.share_mode
    if mode is ShareMode.SEEDED:
        expected[ShareKind.SEED] = prg.SEED_LENGTH
    if kind not in expected:
        raise CryptoError(f"LightSecAgg has no shares of kind {kind.name} in {mode} mode")
    if length != expected[kind]:
        raise CryptoError(f"a share of kind {kind.name} has {expected[kind]} bytes, not {length}")


def check_share_elements(settings: Settings, kind: ShareKind, plaintext: bytes) -> None:
    """Raise `CryptoError` unless an explicit share holds field elements."""
    if kind is ShareKind.EXPLICIT:
        try:
            settings.field.from_bytes(plaintext, settings.share_length)
        except FieldError as error:
            raise CryptoError(f"the share holds no field elements: {error}") from error


def share_elements(
    round_: Round, owner: int, serial: int, recipient: int, share: Share
) -> Elements:
    """A held share as field elements; a seed is expanded only when it is needed."""
    settings = round_.settings
    kind, data = share
    if kind == ShareKind.EXPLICIT.value:
        return settings.field.from_bytes(data, settings.share_length)
    mask_id = MaskId(round_.context, owner, serial)
    return expand_share(data, mask_id, recipient, settings.share_length, settings.field.modulus)

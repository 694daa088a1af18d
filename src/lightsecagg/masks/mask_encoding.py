"""Offline encoding and sharing of a mask, Section 4.1, phase 1.

Two ways to make the N shares of a mask z; recipients and the server treat them alike:

*Paper mode*: draw the U - T pieces of z and T pieces of noise, encode all shares explicitly.
    Every recipient is sent L elements.

*Seeded mode*: any U shares determine a codeword, so let U recipients' shares be the expansion of
    short seeds, and derive z and the other N - U shares. U recipients are sent 32 bytes. If the
    expansion is replaced by uniform draws, all views are distributed exactly as in paper mode.

The mask has (U - T) * L >= d elements; the first d mask the model and the rest is never sent.
Columns beyond the L-th are blinds: shared like the others, they mask nothing but the reports of
`checked_sharing`.

A key (`short_keys`) is shared like a mask, but *interleaved*: piece k holds the elements whose
position is k modulo U - T. Contiguous pieces of a ring element, combined with the powers of a
point that is a root of unity, can be a factor of it by the Chinese remainder theorem: T + 1 shares
would then break the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.transcript import uint
from lightsecagg.errors import ParameterError
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import Elements


@dataclass(frozen=True, slots=True)
class MaskId:
    """Which mask a share belongs to: no two masks of a session share an id."""

    context: bytes
    """C1 of the round or epoch."""
    owner: int
    """Identity of the client whose model the mask hides."""
    serial: int = 0
    """Counts the masks of one owner in the asynchronous mode."""


@dataclass(frozen=True, slots=True)
class EncodedMask:
    """A mask and its shares, by position."""

    mask: Elements = field(repr=False)
    """z, of length d; empty where the shares alone were asked for."""
    shares: Mapping[int, Elements] = field(repr=False)
    """Explicit shares; the positions that are not here got a seed."""


def encode_mask(
    code: MdsCode,
    pieces: Elements,
    noise: Elements,
    dimension: int,
    blinds: int = 0,
    interleaved: bool = False,
) -> EncodedMask:
    """Paper mode: every share is explicit.

    * `pieces`: (U - T, L + blinds) and `noise`: (T, L + blinds), uniform and fresh.
    * `interleaved`: for keys; see the module.
    """
    _check_dimension(code, pieces.shape[-1] - blinds, dimension)
    shares = code.encode(pieces, noise)
    mask = join_pieces(_unblinded(code, pieces, dimension), dimension, interleaved)
    return EncodedMask(mask, dict(enumerate(shares)))


def encode_seeded_mask(
    code: MdsCode,
    positions: Sequence[int],
    seeded: Elements,
    members: int,
    dimension: int,
    blinds: int = 0,
    interleaved: bool = False,
    with_mask: bool = True,
) -> EncodedMask:
    """Seeded mode: the mask and the remaining shares that belong to U expanded shares.

    * `seeded`: a row of L + blinds elements for each of U positions (see `expand_share`).
    * `members`: positions 0..members-1 are in use; those not seeded get explicit shares.
    * `interleaved`: for keys; see the module.
    * `with_mask`: whether the mask is wanted now; it follows from the same rows at any time.
    """
    if len(positions) != code.survivors:
        raise ParameterError(
            f"seeded mode chooses exactly U = {code.survivors} shares, got {len(positions)}"
        )
    if not set(positions) <= set(range(members)):
        raise ParameterError(f"seeded positions must be among the {members} members")
    targets = [position for position in range(members) if position not in positions]
    _check_dimension(code, seeded.shape[1] - blinds, dimension)
    pieces, explicit = code.complete(positions, seeded, targets, with_mask)
    mask = join_pieces(_unblinded(code, pieces, dimension), dimension, interleaved)
    return EncodedMask(mask, dict(zip(targets, explicit, strict=True)))


def seeded_positions(owner: int, members: int, survivors: int) -> list[int]:
    """Which U positions an owner (a position too) sends seeds to: the U that follow it.

    Every owner starts elsewhere, so the explicit shares, and with them the download, spread
    evenly. The owner itself comes last: its own share never travels, so it may as well be long.
    """
    if not (0 <= owner < members and 0 < survivors <= members):
        raise ParameterError(
            f"cannot choose U = {survivors} of {members} members, beginning after {owner}"
        )
    return [(owner + 1 + k) % members for k in range(survivors)]


def expand_share(
    seed: bytes,
    mask_id: MaskId,
    recipient: int,
    length: int,
    modulus: int,
    out: Elements | None = None,
) -> Elements:
    """The share that a seed stands for, in `out` if given; owner and recipient compute the same.

    The PRG key binds context, owner, serial and recipient: even equal seeds (a fault, or a
    malicious owner) then give different streams, and no two recipients hold equal shares.
    """
    key = prg.derive_seed(
        seed,
        mask_id.context,
        "seeded share",
        uint(mask_id.owner),
        uint(mask_id.serial),
        uint(recipient),
    )
    return prg.expand(key, length, modulus, out)


def join_pieces(pieces: Elements, dimension: int, interleaved: bool = False) -> Elements:
    """The mask of these pieces, without padding: one after the other, or element by element."""
    ordered = np.ascontiguousarray(pieces.T if interleaved else pieces)
    return ordered.reshape(-1)[:dimension]


def _unblinded(code: MdsCode, pieces: Elements, dimension: int) -> Elements:
    return pieces[:, : code.share_length(dimension)]


def _check_dimension(code: MdsCode, share_length: int, dimension: int) -> None:
    if dimension < 1 or share_length != code.share_length(dimension):
        raise ParameterError(
            f"shares of {share_length} elements do not fit a mask of d = {dimension}: "
            f"L = ceil(d / (U - T)) = {code.share_length(dimension)}"
        )

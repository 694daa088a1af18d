"""A contributor: shares a mask ahead of time, and hides one update under it."""

from __future__ import annotations

from collections.abc import Iterable

from lightsecagg.errors import InputRefused
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.interface import SERVER, Send, Update
from lightsecagg.protocol.messages import SealedShare
from lightsecagg.protocol.rounding import uniform_words
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import bundles


def send_shares(shares: Iterable[SealedShare]) -> list[Send]:
    """Hand them to the server, together."""
    return [Send(SERVER, bundle) for bundle in bundles(shares)]


def check_input(settings: Settings, update: Update) -> None:
    """Refuse an update that could not be masked: its shape, NaN and over-range entries (S13)."""
    if update.vector.shape != (settings.dimension,):
        raise InputRefused(
            f"the update has shape {update.vector.shape}, but vectors of {settings.dimension} "
            "entries are summed"
        )
    settings.quantizer.check(update.vector, update.samples)


def hide(settings: Settings, update: Update, rounding_seed: bytes, mask: Elements) -> Elements:
    """The masked update; the seed decides the stochastic rounding (`Ledger.rounding_seed`)."""
    vector, words = update.vector, uniform_words(mask.size, rounding_seed)
    # What was a coin becomes an element: new memory for another vector takes longer than to mask.
    return settings.quantizer.quantise_and_mask(
        vector, words[: vector.size], mask, update.samples, out=words
    )

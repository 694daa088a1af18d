"""How many bytes a client may send in each phase, computed from the settings (S25)."""

from __future__ import annotations

from lightsecagg.crypto.sealing import TAG_LENGTH, sealed_length
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.settings import ProtocolName, Settings

_CONTROL = 16 * 1024
"""Room for a hello, keys, a signature, a refusal that names everybody."""
_HEADER = 64
"""Envelope and message header."""
_SHAMIR_SHARE = 128
"""SecAgg: two shares of 32-byte secrets, as field elements."""


def phase_budget(settings: Settings, phase: Phase) -> int:
    """The most bytes that an honest client sends in this phase."""
    parameters = settings.parameters
    peers = parameters.clients - 1
    secagg = settings.protocol in (ProtocolName.SECAGG, ProtocolName.SECAGG_PLUS)
    control = _CONTROL + 8 * parameters.clients
    if phase is Phase.SHARE:
        longest = _SHAMIR_SHARE + TAG_LENGTH if secagg else sealed_length(4 * settings.share_length)
        return control + peers * (longest + _HEADER)
    if phase is Phase.UPLOAD:
        # A client that had to reconnect sends its upload again.
        return control + 2 * (4 * settings.length + _HEADER)
    if phase is Phase.RECOVER:
        answer = (peers + 1) * (_SHAMIR_SHARE + 16) if secagg else 4 * settings.share_length
        return control + 2 * (answer + _HEADER)
    return control

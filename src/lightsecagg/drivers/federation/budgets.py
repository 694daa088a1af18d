"""How many bytes a client may send in each phase, computed from the settings (S25)."""

from __future__ import annotations

from lightsecagg.crypto.prg import SEED_LENGTH
from lightsecagg.crypto.sealing import TAG_LENGTH, sealed_length
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.settings import ProtocolName, Settings

_CONTROL = 16 * 1024
"""Room for a hello, keys, a signature, a refusal that names everybody."""
_HEADER = 64
"""Envelope and message header."""
_SHAMIR_SHARE = 128
"""SecAgg: two shares of 32-byte secrets, as field elements."""
_ATTEMPTS = 4
"""How often a client whose connection breaks may send an upload or an answer."""


def phase_budget(settings: Settings, phase: Phase) -> int:
    """The most bytes that an honest client sends in this phase."""
    parameters = settings.parameters
    peers = parameters.clients - 1
    control = _CONTROL + 8 * parameters.clients
    if phase is Phase.SHARE:
        return control + peers * _sealed_share(settings)
    if phase is Phase.UPLOAD:
        return control + _ATTEMPTS * (4 * settings.length + _HEADER)
    if phase is Phase.RECOVER:
        secrets = (peers + 1) * (_SHAMIR_SHARE + 16)
        answer = secrets if _is_secagg(settings) else 4 * settings.share_length
        return control + _ATTEMPTS * (answer + _HEADER)
    return control


def backlog_limit(settings: Settings, model: int) -> int:
    """The most bytes that may wait to be sent to one client.

    A round of them and the next round's model (of `model` bytes): more waits only for a client
    that takes its data too slowly, and the server's memory is not its to fill.
    """
    peers = settings.parameters.clients - 1
    roster = 2 * _CONTROL + 512 * settings.parameters.clients
    return 2 * (model + roster) + peers * _sealed_share(settings)


def _sealed_share(settings: Settings) -> int:
    if _is_secagg(settings):
        return _SHAMIR_SHARE + TAG_LENGTH + _HEADER
    return sealed_length(max(4 * settings.share_length, SEED_LENGTH)) + _HEADER


def _is_secagg(settings: Settings) -> bool:
    return settings.protocol in (ProtocolName.SECAGG, ProtocolName.SECAGG_PLUS)

"""How many bytes a client may send in each phase, computed from the settings (S25)."""

from __future__ import annotations

from lightsecagg.crypto.sealing import sealed_length
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import HEADER

_CONTROL = 16 * 1024
"""Room for a hello, keys, a signature, a refusal that names everybody."""
_HEADER = 64
"""Envelope and message header."""
_TAG = 256
"""What an owner says of its upload."""
_REPORT = 32
"""What a holder says of one share."""
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
        reports = (peers + 1) * _REPORT
        return control + _ATTEMPTS * (4 * settings.length + _TAG + reports + 2 * _HEADER)
    if phase is Phase.RECOVER:
        answer = settings.traits.answer_bytes(settings, parameters.dropouts)
        return control + _ATTEMPTS * (answer + _HEADER)
    return control


def version_budget(settings: Settings) -> int:
    """Asynchronous: the most bytes that an honest client sends between two versions of the model.

    One upload and one answer, shares of as many masks as peers keep, and reports on everybody's.
    """
    buffering, clients = settings.buffering, settings.parameters.clients
    masks = 1 if buffering is None else buffering.stock
    shares = phase_budget(settings, Phase.SHARE)
    reports = _ATTEMPTS * masks * clients * _HEADER
    return (
        masks * shares
        + reports
        + sum(phase_budget(settings, phase) for phase in (Phase.UPLOAD, Phase.AGREE, Phase.RECOVER))
    )


def backlog_limit(settings: Settings, model: int) -> int:
    """The most bytes that may wait to be sent to one client.

    A round of them and the next round's model (of `model` bytes): more waits only for a client
    that takes its data too slowly, and the server's memory is not its to fill. Asynchronous: the
    shares of all the masks that it is to keep.
    """
    peers = settings.parameters.clients - 1
    masks = 1 if settings.buffering is None else settings.buffering.stock
    roster = 2 * _CONTROL + 512 * settings.parameters.clients
    return 2 * (model + roster) + masks * peers * (_sealed_share(settings) + _HEADER)


def _sealed_share(settings: Settings) -> int:
    """The longest of them, on the wire."""
    shares = settings.traits.shares(settings).values()
    return sealed_length(max((share.length for share in shares), default=0)) + HEADER

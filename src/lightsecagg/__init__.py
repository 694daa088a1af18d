"""LightSecAgg: secure aggregation for federated learning.

    aggregate             sum numpy arrays through a protocol, in this process
    Parameters            N, T, D, U, the field and the threat model

and, to run the protocols over your own transport (docs/own-transport.md):

    client_party, server_party        one party in one round: messages in, outputs out
    Send, NeedInput, Persist, Compute, Aggregate, RoundAborted     what they return
    at_once                           runs the jobs that a server asks for
    Settings, Policy, AllowList, Quantizer       what a round is, and what a client accepts
    ThreatModel, ShareMode, hash_model, every error of lightsecagg.errors
    IdentityKey, Ledger, Update, Codec, SERVER, DEFAULT_FIELD, ProtocolName

Names are imported when they are first used, so that `import lightsecagg` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightsecagg.crypto.identity import IdentityKey
    from lightsecagg.drivers.aggregation import AggregationResult, aggregate
    from lightsecagg.errors import (
        Aborted,
        ConfigurationError,
        CryptoError,
        DecodeError,
        FieldError,
        InconsistentAnswers,
        InputRefused,
        JournalError,
        LightSecAggError,
        LocalProtocolError,
        MaskAlreadyUsed,
        MissingExtra,
        NotEnoughAnswers,
        ParameterError,
        PeerGone,
        ProtocolError,
        RecoveryError,
        Refused,
        RemoteProtocolError,
        TransportError,
    )
    from lightsecagg.field.prime import DEFAULT_FIELD
    from lightsecagg.field.quantization import Quantizer
    from lightsecagg.params import Parameters, ShareMode, ThreatModel
    from lightsecagg.protocol.allow_list import AllowList
    from lightsecagg.protocol.interface import (
        SERVER,
        Aggregate,
        NeedInput,
        Persist,
        RoundAborted,
        Send,
        Update,
    )
    from lightsecagg.protocol.jobs import Compute, at_once
    from lightsecagg.protocol.ledger import Ledger
    from lightsecagg.protocol.policy import Policy
    from lightsecagg.protocol.registry import client_party, server_party
    from lightsecagg.protocol.settings import ProtocolName, Settings, hash_model
    from lightsecagg.protocol.wire import Codec

__version__ = "0.1.0.dev0"

__all__ = [
    "DEFAULT_FIELD",
    "SERVER",
    "Aborted",
    "Aggregate",
    "AggregationResult",
    "AllowList",
    "Codec",
    "Compute",
    "ConfigurationError",
    "CryptoError",
    "DecodeError",
    "FieldError",
    "IdentityKey",
    "InconsistentAnswers",
    "InputRefused",
    "JournalError",
    "Ledger",
    "LightSecAggError",
    "LocalProtocolError",
    "MaskAlreadyUsed",
    "MissingExtra",
    "NeedInput",
    "NotEnoughAnswers",
    "ParameterError",
    "Parameters",
    "PeerGone",
    "Persist",
    "Policy",
    "ProtocolError",
    "ProtocolName",
    "Quantizer",
    "RecoveryError",
    "Refused",
    "RemoteProtocolError",
    "RoundAborted",
    "Send",
    "Settings",
    "ShareMode",
    "ThreatModel",
    "TransportError",
    "Update",
    "__version__",
    "aggregate",
    "at_once",
    "client_party",
    "hash_model",
    "server_party",
]

_HOMES = {
    "lightsecagg.crypto.identity": ("IdentityKey",),
    "lightsecagg.drivers.aggregation": ("AggregationResult", "aggregate"),
    "lightsecagg.errors": (
        "Aborted",
        "ConfigurationError",
        "CryptoError",
        "DecodeError",
        "FieldError",
        "InconsistentAnswers",
        "InputRefused",
        "JournalError",
        "LightSecAggError",
        "LocalProtocolError",
        "MaskAlreadyUsed",
        "MissingExtra",
        "NotEnoughAnswers",
        "ParameterError",
        "PeerGone",
        "ProtocolError",
        "RecoveryError",
        "Refused",
        "RemoteProtocolError",
        "TransportError",
    ),
    "lightsecagg.field.prime": ("DEFAULT_FIELD",),
    "lightsecagg.field.quantization": ("Quantizer",),
    "lightsecagg.params": ("Parameters", "ShareMode", "ThreatModel"),
    "lightsecagg.protocol.allow_list": ("AllowList",),
    "lightsecagg.protocol.interface": (
        "SERVER",
        "Aggregate",
        "NeedInput",
        "Persist",
        "RoundAborted",
        "Send",
        "Update",
    ),
    "lightsecagg.protocol.jobs": ("Compute", "at_once"),
    "lightsecagg.protocol.ledger": ("Ledger",),
    "lightsecagg.protocol.policy": ("Policy",),
    "lightsecagg.protocol.registry": ("client_party", "server_party"),
    "lightsecagg.protocol.settings": ("ProtocolName", "Settings", "hash_model"),
    "lightsecagg.protocol.wire": ("Codec",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lightsecagg' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

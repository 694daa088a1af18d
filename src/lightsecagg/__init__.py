"""LightSecAgg: secure aggregation for federated learning.

    aggregate             sum numpy arrays through a protocol, in this process
    summarise             statistics of tables, likewise, by a StatisticsPlan
    Parameters            N, T, D, U, the field and the threat model

and, to run the protocols over your own transport (docs/own-transport.md):

    client_party, server_party        one party in one round or epoch: messages in, outputs out
    restore_party                     a client's party from its snapshot
    Send, NeedInput, Persist, Compute, Aggregate, RoundAborted     what they return
    BufferAggregate, BufferFailed     and what the server of an epoch returns
    at_once                           runs the jobs that a server asks for
    Settings, Policy, AllowList, Quantizer       what a round is, and what a client accepts
    Buffering, StalenessTable         the same for an epoch
    Phase, Opening, AbortRound, NO_MODEL, clip_to_bound
    ThreatModel, ShareMode, hash_model, every error of lightsecagg.errors
    IdentityKey, Ledger, Update, Codec, SERVER, DEFAULT_FIELD

Names are imported when they are first used, so that `import lightsecagg` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.byteorder != "little":
    # Vectors go to the wire, to files and into ciphers as they lie in memory.
    raise ImportError(
        f"lightsecagg runs on little-endian machines only, and this one is {sys.byteorder}-endian: "
        "masks and messages would not be those of the other parties"
    )

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
        MissingLaboratory,
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
    from lightsecagg.field.quantization import Quantizer, clip_to_bound
    from lightsecagg.field.staleness import StalenessTable
    from lightsecagg.params import Parameters, ShareMode, ThreatModel
    from lightsecagg.protocol.allow_list import AllowList
    from lightsecagg.protocol.buffering import Buffering
    from lightsecagg.protocol.interface import (
        SERVER,
        Aggregate,
        BufferAggregate,
        BufferFailed,
        NeedInput,
        Persist,
        Phase,
        RoundAborted,
        Send,
        Update,
    )
    from lightsecagg.protocol.jobs import Compute, at_once
    from lightsecagg.protocol.ledger import Ledger
    from lightsecagg.protocol.messages import AbortRound, Opening
    from lightsecagg.protocol.policy import Policy
    from lightsecagg.protocol.registry import (
        client_party,
        restore_party,
        server_party,
    )
    from lightsecagg.protocol.settings import NO_MODEL, Settings, hash_model
    from lightsecagg.protocol.wire import Codec
    from lightsecagg.statistics import Statistics, StatisticsPlan, summarise

__version__ = "0.1.0.dev0"

__all__ = [
    "DEFAULT_FIELD",
    "NO_MODEL",
    "SERVER",
    "AbortRound",
    "Aborted",
    "Aggregate",
    "AggregationResult",
    "AllowList",
    "BufferAggregate",
    "BufferFailed",
    "Buffering",
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
    "MissingLaboratory",
    "NeedInput",
    "NotEnoughAnswers",
    "Opening",
    "ParameterError",
    "Parameters",
    "PeerGone",
    "Persist",
    "Phase",
    "Policy",
    "ProtocolError",
    "Quantizer",
    "RecoveryError",
    "Refused",
    "RemoteProtocolError",
    "RoundAborted",
    "Send",
    "Settings",
    "ShareMode",
    "StalenessTable",
    "Statistics",
    "StatisticsPlan",
    "ThreatModel",
    "TransportError",
    "Update",
    "__version__",
    "aggregate",
    "at_once",
    "client_party",
    "clip_to_bound",
    "hash_model",
    "restore_party",
    "server_party",
    "summarise",
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
        "MissingLaboratory",
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
    "lightsecagg.field.quantization": ("Quantizer", "clip_to_bound"),
    "lightsecagg.field.staleness": ("StalenessTable",),
    "lightsecagg.params": ("Parameters", "ShareMode", "ThreatModel"),
    "lightsecagg.protocol.allow_list": ("AllowList",),
    "lightsecagg.protocol.buffering": ("Buffering",),
    "lightsecagg.protocol.interface": (
        "SERVER",
        "Aggregate",
        "BufferAggregate",
        "BufferFailed",
        "NeedInput",
        "Persist",
        "Phase",
        "RoundAborted",
        "Send",
        "Update",
    ),
    "lightsecagg.protocol.jobs": ("Compute", "at_once"),
    "lightsecagg.protocol.ledger": ("Ledger",),
    "lightsecagg.protocol.messages": ("AbortRound", "Opening"),
    "lightsecagg.protocol.policy": ("Policy",),
    "lightsecagg.protocol.registry": (
        "client_party",
        "restore_party",
        "server_party",
    ),
    "lightsecagg.protocol.settings": ("NO_MODEL", "Settings", "hash_model"),
    "lightsecagg.protocol.wire": ("Codec",),
    "lightsecagg.statistics": ("Statistics", "StatisticsPlan", "summarise"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lightsecagg' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

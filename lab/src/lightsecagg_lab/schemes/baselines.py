"""The baselines, as the product finds them by entry points of the group `lightsecagg.schemes`."""

from __future__ import annotations

from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.schemes.registry import register
from lightsecagg.protocol.schemes.traits import TRAITS, Traits, protocols, traits_of
from lightsecagg_lab.schemes.baseline_traits import (
    NoMaskTraits,
    PairwiseMaskTraits,
    ProtocolName,
)
from lightsecagg_lab.schemes.no_masks import NoMasksClient, NoMasksServer
from lightsecagg_lab.schemes.pairwise_scheme import PairwiseMasksClient, PairwiseMasksServer

SECAGG = PairwiseMaskTraits(ProtocolName.SECAGG, "SecAgg", key_count=2, has_threshold=True)
SECAGG_PLUS = PairwiseMaskTraits(
    ProtocolName.SECAGG_PLUS,
    "SecAgg+",
    key_count=2,
    ring=True,
    has_threshold=True,
    weakness="secagg+ in malicious-server mode is refused: the server picks the graph and "
    "could surround a client with colluders; use lightsecagg or secagg",
)
PLAIN = NoMaskTraits(
    ProtocolName.PLAIN,
    "plain FedAvg",
    key_count=0,
    phases=(Phase.UPLOAD,),
    buffered=True,
    protected=False,
    weakness="plain summation protects from nobody: it has no malicious-server mode",
)


def register_all() -> None:
    """Add those that are not there yet."""
    for traits in (SECAGG, SECAGG_PLUS):
        if traits.name not in TRAITS:
            register(traits, PairwiseMasksClient, PairwiseMasksServer)
    if PLAIN.name not in TRAITS:
        register(PLAIN, NoMasksClient, NoMasksServer)


def all_traits() -> tuple[Traits, ...]:
    """Of every protocol that can be used here; those that protect nobody come last."""
    return tuple(sorted(map(traits_of, protocols()), key=lambda traits: not traits.protected))

"""Which scheme masks which protocol. A protocol from elsewhere is added with `register`."""

from __future__ import annotations

from typing import Final, NamedTuple

from lightsecagg.errors import ParameterError
from lightsecagg.params import ShareMode
from lightsecagg.protocol.schemes.coded_keys import CodedKeysClient, CodedKeysServer
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import ClientScheme, ServerScheme
from lightsecagg.protocol.schemes.traits import LIGHTSECAGG, TRAITS, Traits, traits_of


class Sides(NamedTuple):
    """The two sides of a scheme; parties make theirs when the roster is fixed."""

    client: type[ClientScheme]
    server: type[ServerScheme]


SCHEMES: Final[dict[str, Sides]] = {LIGHTSECAGG: Sides(CodedMasksClient, CodedMasksServer)}
"""By the protocol's name, as `TRAITS`."""

_SHORT_KEYS: Final = Sides(CodedKeysClient, CodedKeysServer)
"""LightSecAgg's, where keys are shared instead of masks."""


def register(traits: Traits, client: type[ClientScheme], server: type[ServerScheme]) -> None:
    """Add a protocol: from now on settings and policies may name it, and parties speak it."""
    if traits.name in TRAITS:
        raise ParameterError(f"there is a protocol {traits.name!r} already; take another name")
    TRAITS[traits.name] = traits
    SCHEMES[traits.name] = Sides(client, server)


def scheme_of(*protocols: str, share_mode: ShareMode | None = None) -> Sides:
    """The scheme of these protocols, which must be one: a party speaks no second one.

    * `share_mode`: that of the settings, or what a policy demands. A client whose policy does not
      name short keys has no scheme that could speak them.
    """
    found = {SCHEMES[traits_of(protocol).name] for protocol in protocols}
    if len(found) != 1:
        raise ParameterError(
            f"a party speaks one protocol, but the policy names {', '.join(protocols)}"
        )
    short = share_mode is ShareMode.SHORT_KEY and bool(traits_of(protocols[0]).share_modes)
    return _SHORT_KEYS if short else found.pop()

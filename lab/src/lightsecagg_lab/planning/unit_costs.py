"""What one peer, one message and one element cost in CPU seconds: stated, or measured elsewhere.

`STATED` was measured by `simulation.calibration` on the machine that it names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """CPU seconds of one core."""

    source: str
    """Where the figures come from."""
    advertise: float
    """A client's keys of a round and their signature."""
    verify: float
    """One roster entry: keys and signature."""
    peer: float
    """LightSecAgg, share phase: one peer, its roster entry, a share sent and one received."""
    secagg_peer: float
    """SecAgg, share phase: the same, and the seed of their mask."""
    relay: float
    """The server's work for one share, as far as it does not grow with N."""
    relay_growth: float
    """The part that grows, per client of the roster."""
    sealed_byte: float
    """A client seals or opens a byte of a long share."""
    relayed_byte: float
    """The server takes in and passes on a byte of a long share."""
    seed: float
    """A seed is made ready to expand."""
    element: float
    """An element is expanded from a seed."""
    masked_element: float
    """An element is expanded from a seed and added to a total."""
    stretched_element: float
    """Short keys: an element of a mask is stretched from a key."""
    noisy_element: float
    """Short keys: an element of a mask gets its noise."""
    agreement: float
    """SecAgg: a pairwise seed from a key agreement."""
    quantised_element: float
    """A client checks, quantises, masks and encodes an element of its update."""
    taken_element: float
    """The server decodes and checks an element of an upload or answer."""
    summed_element: float
    """An element of an upload or answer is added up."""
    product: float
    """A multiplication in a matrix product over F_q."""
    butterfly: float
    """One of the M log2 M steps of the transforms that complete a codeword."""
    survivor: float
    """Per client: the bookkeeping of the server in each of the later phases."""
    rebuild: float
    """SecAgg+: one secret rebuilt from the shares of its own set of neighbours."""


def describe(costs: UnitCosts) -> dict[str, float | str]:
    """For reports and JSON."""
    return {item.name: getattr(costs, item.name) for item in fields(costs)}


STATED = UnitCosts(
    source="stated: one core of an AMD EPYC (Zen 3, AVX2), native kernels, rounded",
    advertise=3.0e-4,
    verify=2.0e-4,
    peer=5.5e-4,
    secagg_peer=5.5e-4,
    relay=2.0e-5,
    relay_growth=2.0e-8,
    sealed_byte=1.0e-9,
    relayed_byte=2.0e-10,
    seed=3.5e-5,
    element=1.1e-9,
    masked_element=8.5e-10,
    stretched_element=5.5e-9,
    noisy_element=9.0e-9,
    agreement=5.5e-5,
    quantised_element=3.0e-8,
    taken_element=6.0e-10,
    summed_element=8.0e-10,
    product=9.0e-11,
    butterfly=4.5e-10,
    survivor=7.0e-5,
    rebuild=3.0e-4,
)

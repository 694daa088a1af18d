"""What the parties of the buffered-asynchronous mode agree on beside `Settings`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lightsecagg.errors import ParameterError
from lightsecagg.field.staleness import MAX_SCALE, StalenessTable
from lightsecagg.params import Parameters, ThreatModel

LONG_EPOCH: Final = 1024
"""Buffers after which drivers open a new epoch: its keys open all that was sealed in it."""


@dataclass(frozen=True, slots=True)
class Buffering:
    """The settings of the buffered-asynchronous mode, Section 4.2 and Appendix F.

    They decide which sums clients answer for, so every client pins them in its policy.
    """

    table: StalenessTable
    """The integer weights w(tau) for tau = 0..tau_max, and c_g."""
    max_updates: int
    """K_max: the most updates in one buffer."""
    max_ratio: float = 64.0
    """R: the largest max w / min w within one buffer."""
    strict: bool = False
    """Demand T + 2 owners per weight value: different integer weights reveal low bits, and the
    server hands out versions, hence weights. In malicious-server mode clients demand it of every
    model, hence of every weight, whatever is set here. Equal weights need no such rule."""
    stock: int = 4
    """How many unused masks of one owner a peer keeps; the oldest goes first."""
    share_lifetime: int = 64
    """A share expires this many buffers after it arrived."""

    def __post_init__(self) -> None:
        for name in ("max_updates", "stock"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.share_lifetime <= self.table.max_staleness:
            raise ParameterError(
                f"share_lifetime = {self.share_lifetime} must exceed tau_max = "
                f"{self.table.max_staleness}: an update that is still welcome needs its shares"
            )
        if not 1 <= self.max_ratio <= MAX_SCALE:
            raise ParameterError(f"max_ratio R = {self.max_ratio} must be in [1, 2^31]")

    def per_weight(self, parameters: Parameters) -> int:
        """The fewest owners that share a weight in a buffer: T + 2 if strict, otherwise 1."""
        return parameters.privacy + 2 if self.strict else 1

    def per_model(self, parameters: Parameters, minimum: int = 0) -> int:
        """The fewest owners that share a model in a buffer (S56).

        The server hands out versions. If it were to give one owner a model of its own, and the
        others one that cannot learn, the sum would be that owner's update. All owners of an epoch
        have the same instructions, so that updates of one model were asked for alike.
        """
        if parameters.threat_model is not ThreatModel.MALICIOUS_SERVER:
            return 1
        return max(parameters.privacy + 2, minimum)

    def singles_out(self, parameters: Parameters) -> bool:
        """Whether one update may have a weight of its own in a buffer."""
        return self.table.ratio > 1 and self.together(parameters) == 1

    def together(self, parameters: Parameters) -> int:
        """The fewest owners that share a weight, by whichever rule."""
        return max(self.per_weight(parameters), self.per_model(parameters))

    def weights(self, now: int, versions: Iterable[int]) -> tuple[int, ...]:
        """w(t - t_i) for each update; `ParameterError` for a staleness outside [0, tau_max]."""
        return tuple(self.table.weight(now - version) for version in versions)

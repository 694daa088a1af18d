"""What a fuzz target is: foreign bytes in; accepted, or refused in the words that are declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightsecagg.errors import LightSecAggError

LONGEST_REFUSAL = 2000


@dataclass(frozen=True)
class Target:
    """One reader of foreign bytes, or parties that are at the mercy of some."""

    name: str
    read: Callable[[bytes], object]
    """Raises one of `refusals` or returns; asserts whatever must hold of what it accepts."""
    seeds: Callable[[], Iterable[bytes]]
    """Sound inputs, from which others are bred."""
    refusals: tuple[type[Exception], ...]
    """All that may come out of it."""
    covers: tuple[str, ...] = ()
    """The functions that read foreign bytes here, as `file.py:Class.function`."""
    slow: bool = False
    """Whether one execution takes milliseconds: whole rounds, databases, certificates."""

    @property
    def folder(self) -> str:
        """The name of a folder of its inputs."""
        return self.name.replace(":", "-")

    def accepts(self, data: bytes) -> bool:
        """Try one input; any exception but a declared refusal is a finding, and raised."""
        try:
            self.read(data)
        except self.refusals as error:
            if isinstance(error, LightSecAggError):
                said = str(error)
                assert said.isprintable(), "a refusal that could harm a terminal"
                assert 0 < len(said) <= LONGEST_REFUSAL, "a refusal of another's length"
            return False
        return True

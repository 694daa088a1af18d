"""The parameters of a secure aggregation and what they imply, Sections 2 and 4 of the paper.

    N  clients      how many clients may take part in one round
    T  privacy      how many of them may collude with the server and still learn nothing
    D  dropouts     how many may vanish or refuse; of n uploaders floor((n - U) / 2) may lie
    U  survivors    how many answers the server needs; N - D >= U > T
    m  quorum       malicious-server mode: how many must sign the survivor set, 2m > N + T
    q  modulus      the prime of the field

They are validated once, here, and frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral
from typing import Any, TypeVar

from lightsecagg.errors import ParameterError

Choice = TypeVar("Choice", bound=StrEnum)

DEFAULT_MODULUS = 2**31 - 2**19 + 1
"""Prime with q - 1 = 2^19 * 3^2 * 5 * 7 * 13: a number-theoretic transform of every useful size."""

PAPER_MODULUS = 2**32 - 5
"""The paper's prime, the largest below 2^32."""


class ThreatModel(StrEnum):
    """Whom the clients defend against."""

    HONEST_BUT_CURIOUS = "honest-but-curious"
    """Server and up to T clients look at everything but follow the protocol (the paper's model)."""

    MALICIOUS_SERVER = "malicious-server"
    """The server may lie, equivocate, replay and drop; up to T clients help it."""


class ShareMode(StrEnum):
    """What a client shares, and how it makes the shares; decoding is the same for all."""

    PAPER = "paper"
    """Draw the mask and the noise, send every share explicitly."""

    SEEDED = "seeded"
    """Let U shares be PRG outputs of short seeds and derive the mask and the other shares."""

    SHORT_KEY = "short-key"
    """Share a key of 2048 elements that ring-LWE stretches to the mask; experimental."""


class Decoding(StrEnum):
    """Short keys: what the server makes of the noise in a sum."""

    EXACT = "exact"
    """Removes it, at the price of coarser rounding: the sum is that of the integers."""

    DITHERED = "dithered"
    """Leaves it in the sum, as rounding noise of 8 quanta per client and entry."""


def is_prime(number: int) -> bool:
    """Whether `number` < 2^32 is prime (Miller-Rabin, deterministic for these bases)."""
    if number < 2 or number % 2 == 0:
        return number == 2
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    # The bases 2, 7, 61 decide every number below 4,759,123,141.
    for base in (2, 7, 61):
        if base % number == 0:
            continue
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def check_integer(name: str, value: int, least: int) -> None:
    """Refuse a size that is not an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ParameterError(f"{name} = {value!r} must be an integer")
    if value < least:
        raise ParameterError(f"{name} = {value} must be at least {least}")


def plain_integer(value: Any) -> Any:
    """An integer of NumPy as one of Python, which the settings can carry; the rest as it is."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def check_modulus(modulus: int) -> None:
    """Refuse a modulus that is not an odd prime below 2^32."""
    check_integer("modulus q", modulus, 3)
    if modulus >= 2**32:
        raise ParameterError(f"modulus q = {modulus} must be a prime below 2^32")
    if not is_prime(modulus):
        raise ParameterError(f"modulus q = {modulus} is not prime")


@dataclass(frozen=True, slots=True)
class Parameters:
    """N, T, D, U, the field and the threat model of one aggregation; validated on creation.

    Leave `survivors` out to get U = N - D: the fewest bytes in seeded mode. A smaller U leaves
    spare uploads and answers, by which lies are noticed (one spare) or located (two per liar).
    """

    clients: int
    """N"""
    privacy: int
    """T"""
    dropouts: int
    """D"""
    survivors: int = 0
    """U; 0 stands for N - D"""
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS
    share_mode: ShareMode = ShareMode.SEEDED
    modulus: int = DEFAULT_MODULUS
    """q"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat_model", choice(ThreatModel, self.threat_model))
        object.__setattr__(self, "share_mode", choice(ShareMode, self.share_mode))
        for name in ("clients", "privacy", "dropouts", "survivors", "modulus"):
            object.__setattr__(self, name, plain_integer(getattr(self, name)))
        _check_sizes(self.clients, self.privacy, self.dropouts, self.survivors)
        if self.survivors == 0:
            object.__setattr__(self, "survivors", self.clients - self.dropouts)
        check_modulus(self.modulus)
        self._check_feasible()

    def _check_feasible(self) -> None:
        N, T, D, U = self.clients, self.privacy, self.dropouts, self.survivors
        if N - D < T + 2:
            raise ParameterError(
                f"N - D = {N - D} clients may remain, but a sum over fewer than T + 2 = {T + 2} "
                "protects nobody from T colluders; lower privacy (T) or dropouts (D)"
            )
        if U <= T:
            raise ParameterError(
                f"survivors U = {U} must exceed privacy T = {T}: raise U, at most to N - D = "
                f"{N - D}, or lower privacy (T)"
            )
        if N - D < U:
            raise ParameterError(
                f"survivors U = {U} is out of reach: with N = {N} clients and D = {D} dropouts "
                f"only {N - D} remain; lower survivors (U) or dropouts (D)"
            )
        if self.modulus <= N:
            raise ParameterError(
                f"modulus q = {self.modulus} must exceed the number of clients N = {N}: "
                "every client needs its own non-zero point"
            )
        if self.quorum > N - D:
            raise ParameterError(
                f"malicious-server mode needs T + 2D < N, but T = {T}, D = {D}, N = {N}: "
                f"the quorum of {self.quorum} signatures exceeds the {N - D} clients that remain; "
                "lower privacy (T) or dropouts (D)"
            )

    @property
    def quorum(self) -> int:
        """m: signatures a client must see before it answers; 0 where none are asked for.

        Two sets of m clients share a client that is neither corrupt nor counted twice, because
        2m > N + T; so two different survivor sets can never both be agreed on.
        """
        if self.threat_model is ThreatModel.HONEST_BUT_CURIOUS:
            return 0
        return (self.clients + self.privacy) // 2 + 1

    @property
    def minimum(self) -> int:
        """The fewest clients that a roster or survivor set may hold: max(U, m, T + 2)."""
        return max(self.survivors, self.quorum, self.privacy + 2)

    def liars(self, missing: int = 0) -> int:
        """How many liars a round locates and outlives while `missing` other clients are away.

        Two spare uploads locate one liar. It may have to leave the sum, as if it had vanished.
        """
        uploads = self.clients - missing
        return max(0, min((uploads - self.survivors) // 2, uploads - self.minimum))

    @property
    def pieces(self) -> int:
        """U - T: into how many pieces a mask is cut."""
        return self.survivors - self.privacy

    def share_length(self, dimension: int) -> int:
        """L = ceil(d / (U - T)): how many elements one share of a d-dimensional mask has."""
        if dimension < 1:
            raise ParameterError(f"dimension d = {dimension} must be at least 1")
        return -(-dimension // self.pieces)


def survivors_of_fewer(survivors: int, privacy: int, missing: int) -> int:
    """U after `missing` clients have left for good: as many spare uploads; 0 still means N - D."""
    return survivors and max(privacy + 1, survivors - missing)


def _check_sizes(clients: int, privacy: int, dropouts: int, survivors: int) -> None:
    check_integer("clients N", clients, 2)
    check_integer("privacy T", privacy, 0)
    check_integer("dropouts D", dropouts, 0)
    if dropouts >= clients:
        raise ParameterError(f"dropouts D = {dropouts} of N = {clients} clients leave nobody")
    check_integer("survivors U", survivors, 0)


def choice(kind: type[Choice], value: str) -> Choice:
    """The member of this name; `ParameterError` with all names if there is none."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(kind)
        raise ParameterError(f"{value!r} is unknown; choose one of {choices}") from None

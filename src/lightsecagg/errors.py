"""Every exception that this package raises on purpose.

    LightSecAggError
    ├── ParameterError          parameters that can never work together
    ├── ConfigurationError      a file, flag or data set that the user must fix
    │   ├── MissingExtra        a package that only an extra of this one brings
    │   └── MissingLaboratory   something that only the laboratory has
    ├── InputRefused            a model or vector that must not be masked (NaN, Inf, over range)
    ├── FieldError              bytes or arrays that are not vectors over F_q
    ├── CryptoError             a key, signature or sealed share that does not verify
    ├── DecodeError             bytes from the wire that are not a message
    ├── RecoveryError           the server cannot recover the sum
    │   ├── NotEnoughAnswers    fewer than U answers
    │   └── InconsistentAnswers answers contradict each other; names suspects when it can
    ├── ProtocolError           a message or call that the protocol forbids here
    │   ├── LocalProtocolError  this side misused its own party object
    │   │   └── MaskAlreadyUsed a second use of a mask, or of an update that is spent
    │   └── RemoteProtocolError a peer (named in the message) broke the protocol
    ├── TransportError          no stream to a peer: unreachable, or refused for the stated reason
    │   ├── Refused             refused for good: a certificate, name or version has to be fixed
    │   └── PeerGone            a stream that ended: the peer left, stalled or was cut
    ├── JournalError            durable state that is damaged or of another federation
    └── Aborted                 the round ended without a result, for the stated reason

The type names the culprit; the message names the value, the limit and what to do about it.
No message ever carries a key, a seed, a mask, a share or a model. A peer receives `public`, not the
message, which may reveal that an update was beyond the bound.
"""

from __future__ import annotations

from collections.abc import Iterable


class LightSecAggError(Exception):
    """Base of every exception of this package."""

    @property
    def public(self) -> str:
        """What a peer may learn: why this side does not go on, and nothing about its data.

        The message itself is for this side's own log; it may describe an update (S44).
        """
        return f"{type(self).__name__}: this side cannot go on; see its own log"


class ParameterError(LightSecAggError, ValueError):
    """Parameters that can never work together, such as U <= T."""


class ConfigurationError(LightSecAggError):
    """A file, flag or data set that the user must fix."""


class MissingExtra(ConfigurationError):  # noqa: N818 - reads as what is wrong
    """A package is not installed that only an extra of this one brings."""

    def __init__(self, need: str, *extras: str) -> None:
        """`need` is the half sentence "training needs torch"."""
        # Nothing is published: a name on an index that is not ours must not be installed.
        extra = ",".join(extras)
        super().__init__(
            f"{need}; in the repository, run: pip install -c constraints.txt '.[{extra}]'"
        )


class MissingLaboratory(ConfigurationError):  # noqa: N818 - reads as what is wrong
    """Something is asked for that only the laboratory has, which is not installed."""

    def __init__(self, need: str) -> None:
        """`need` is the half sentence "simulate is a command of the laboratory"."""
        super().__init__(
            f"{need}, lightsecagg-lab; in the repository, run: pip install -c constraints.txt ./lab"
        )


class InputRefused(LightSecAggError, ValueError):  # noqa: N818 - reads as what happened
    """A vector that must not be masked: NaN, infinite, or beyond the agreed bound."""


class FieldError(LightSecAggError, ValueError):
    """Bytes or arrays that are not a vector over F_q."""


class CryptoError(LightSecAggError):
    """A key, signature or sealed share that does not verify."""


class DecodeError(LightSecAggError, ValueError):
    """Bytes from the wire that are not a message."""


class RecoveryError(LightSecAggError):
    """The server cannot recover the sum."""


class NotEnoughAnswers(RecoveryError):  # noqa: N818
    """Fewer answers than the code needs."""


class InconsistentAnswers(RecoveryError):  # noqa: N818
    """Answers contradict each other: a share or an answer is wrong.

    `suspects` holds the positions of the inconsistent answers, or is empty when there are too
    few answers to tell. A suspect is not proof: the responder or a sharer lied.
    """

    def __init__(self, message: str, suspects: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)


class ProtocolError(LightSecAggError):
    """A message or call that the protocol forbids in this state."""


class LocalProtocolError(ProtocolError):
    """This side misused its own party object."""


class MaskAlreadyUsed(LocalProtocolError):  # noqa: N818
    """A second use of a mask or of a spent update would reveal a client's model."""


class RemoteProtocolError(ProtocolError):
    """A peer broke the protocol; what it asked for was refused."""

    @property
    def public(self) -> str:
        """The message: it speaks of what the peer did."""
        return str(self)


class TransportError(LightSecAggError):
    """No stream to a peer: it cannot be reached, or one side refused the other."""


class Refused(TransportError):  # noqa: N818
    """No stream, and another attempt would end like this one: a person must fix the cause."""


class PeerGone(TransportError):  # noqa: N818
    """A stream that ended: the peer left, stalled past a deadline, or was cut."""


class JournalError(LightSecAggError):
    """The journal is damaged or belongs to another federation; nothing was recovered from it."""


class Aborted(LightSecAggError):  # noqa: N818
    """The round ended without a result."""

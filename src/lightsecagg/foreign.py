"""What others wrote, bytes, text and files: read without surprises, shown without harm (S41, S48).

A decoder that is fed by a peer may raise anything: `RecursionError` for arrays in arrays in arrays,
`UnicodeDecodeError` for a name. So no module calls one itself; it asks `decode`, or reads a file
inside `reading`, and gets an error of this package that names what was damaged.

An error's text may quote what it was fed. On its way to a person it passes `shown`, which leaves
neither a terminal's control sequence, nor a second line that looks like another record, nor a
megabyte.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightsecagg import system
from lightsecagg.errors import ConfigurationError, DecodeError, LightSecAggError

SHOWN: Final = 200
"""Characters of a foreign text that are shown."""

Data = TypeVar("Data", str, bytes, memoryview)
Decoded = TypeVar("Decoded")


def decode(decoder: Callable[[Data], Decoded], data: Data, what: str) -> Decoded:
    """What the decoder makes of foreign data; `DecodeError` whatever else it does."""
    try:
        return decoder(data)
    except Exception as error:
        raise DecodeError(f"malformed {what}: {shown(error)}") from error


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Inside, a local file is read: whatever its damage raises is a `ConfigurationError`.

    The parser's own words are not repeated. They could quote the file, which may be a key or a
    patient's record.
    """
    try:
        yield
    except LightSecAggError:
        raise
    except OSError as error:
        if error.errno is None:  # said by a parser, not by the system
            raise _not(path, what) from None
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except Exception:
        raise _not(path, what) from None


def read_private(path: Path) -> bytes:
    """A file with a secret, inside `reading`; `ConfigurationError` if others may read it (S61)."""
    with path.open("rb") as file:
        if mode := system.too_open(file.fileno()):
            raise ConfigurationError(
                f"{path} holds a secret, and others may read or change it; run "
                f"`chmod {mode} {path}`"
            )
        return file.read()


def member(archive: Mapping[str, Any], name: str) -> NDArray[Any]:
    """An array of a loaded .npz, inside `reading`: NumPy returns the bytes of what is none."""
    found = archive[name]
    if not isinstance(found, np.ndarray):
        raise TypeError(f"{name} is no array")
    return found


def _not(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(f"{path} is not {what}: it is damaged, cut short or another file")


def escaped(text: str) -> str:
    """The text on one line, with every character visible.

    Control characters, line breaks, and those that turn the direction of writing or have no width
    become escapes such as `\\x1b`. What is visible already stays, so twice is the same as once.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def shown(text: object) -> str:
    """A foreign text as a person may see it: escaped, and cut to `SHOWN` characters."""
    whole = escaped(str(text)[: SHOWN + 1])
    return whole if len(whole) <= SHOWN else whole[: SHOWN - 3] + "..."


def where(error: BaseException) -> str:
    """The type of an exception and the line that raised it, without its message.

    For exceptions of foreign code, and for those that foreign data caused: their messages may
    quote it (S22).
    """
    # A child process sends its traceback as text, in the cause.
    text = "".join([*traceback.format_tb(error.__traceback__), str(error.__cause__ or "")])
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    name = type(error).__name__
    return f"{name} at {Path(places[-1][0]).name}:{places[-1][1]}" if places else name


def explain(error: Exception) -> str:
    """Why something failed: our own message, which is fit to be seen, or else `where`."""
    return str(error) if isinstance(error, LightSecAggError) else f"unforeseen {where(error)}"

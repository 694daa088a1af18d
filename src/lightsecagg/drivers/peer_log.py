"""Log lines about peers, of which none can fill the log (S48).

A peer that is cut, comes back and is cut again causes a line each time. Of those about one peer the
first few are written, then one now and then, and in between a count of what was left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

BURST: Final = 20
"""Lines about one peer that are written at once."""
INTERVAL: Final = 10.0
"""Seconds per line after that."""
DEBUG_BURST: Final = 1000
"""Messages of one peer that are told of at debug level at once."""
DEBUG_INTERVAL: Final = 0.01
"""Seconds per message after that."""


@dataclass(slots=True)
class _Account:
    lines: float
    """That may be written now."""
    since: float
    left_out: int = 0
    level: int = logging.NOTSET
    """The highest of those that were left out."""


class PeerLog:
    """Writes to a logger; remembers one account per peer that was ever mentioned."""

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        burst: int = BURST,
        interval: float = INTERVAL,
    ) -> None:
        self._logger, self._clock = logger, clock
        self._burst, self._interval = burst, interval
        self._accounts: dict[str, _Account] = {}

    def write(self, level: int, peer: str, message: str, *arguments: object) -> None:
        """Log a line about this peer, unless it has had its share of lines."""
        if not self._logger.isEnabledFor(level):
            return
        now = self._clock()
        account = self._accounts.setdefault(peer, _Account(self._burst, now))
        gained = (now - account.since) / self._interval
        account.lines = min(self._burst, account.lines + gained)
        account.since = now
        if account.lines < 1:
            account.left_out += 1
            account.level = max(account.level, level)
            return
        account.lines -= 1
        self._tell(peer, account)
        self._logger.log(level, message, *arguments)

    def close(self) -> None:
        """Say what was left out and not told yet."""
        for peer, account in self._accounts.items():
            self._tell(peer, account)

    def _tell(self, peer: str, account: _Account) -> None:
        if account.left_out:
            count = account.left_out
            lines = "1 line" if count == 1 else f"{count} lines"
            text = f"{lines} about %s {'was' if count == 1 else 'were'} left out here"
            self._logger.log(account.level, text, peer)
            account.left_out, account.level = 0, logging.NOTSET

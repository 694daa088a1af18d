#!/usr/bin/env python3
"""Write the tables of docs/protocol.md that follow from the code; `--check` only compares.

The text between `<!-- begin: NAME -->` and `<!-- end: NAME -->` is replaced.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

from lightsecagg.protocol import messages
from lightsecagg.protocol.round_client import TRANSITIONS, AnyState
from lightsecagg.protocol.wire import TAGS

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"

# What a handler means to a reader; a handler that is missing here fails the test of this page.
MEANING = {
    "_on_opening": "→ Advertised",
    "_on_repeated_opening": "repeat",
    "_on_roster": "→ Sharing",
    "_on_repeated_roster": "repeat",
    "_on_shares": "keep",
    "_on_shares_closed": "→ Uploaded",
    "_on_repeated_close": "repeat",
    "_on_survivors": "→ Signed / Answered",
    "_on_repeated_survivors": "repeat",
    "_on_certificate": "→ Answered",
    "_on_repeated_certificate": "repeat",
    "_on_late": "late",
    "_on_abort": "→ Closed",
}
COLUMNS = (
    messages.Opening,
    messages.Roster,
    messages.ShareBundle,
    messages.SharesClosed,
    messages.SurvivorSet,
    messages.Certificate,
    messages.AbortRound,
)


def transition_table() -> str:
    """State x message, from `round_client.TRANSITIONS`."""
    lines = [
        "| | " + " | ".join(kind.__name__ for kind in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for state in get_args(AnyState):
        cells = []
        for kind in COLUMNS:
            handler = TRANSITIONS.get((state, kind))
            cells.append("·" if handler is None else MEANING[handler.__name__])
        lines.append(f"| **{state.__name__}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tag_table() -> str:
    """Message types and their tags, from `wire.TAGS`."""
    lines = ["| tag | message |", "|---|---|"]
    for kind, tag in sorted(TAGS.items(), key=lambda item: item[1]):
        first = (kind.__doc__ or "").split("\n", 1)[0]
        lines.append(f"| {tag} | `{kind.__name__}`: {first} |")
    return "\n".join(lines)


def render(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in (("transitions", transition_table()), ("tags", tag_table())):
        pattern = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        page, count = re.subn(
            pattern, lambda match, t=table: f"{match[1]}\n{t}\n\n{match[2]}", page, flags=re.DOTALL
        )
        if count != 1:
            raise LookupError(f"the page has {count} places for the table {name!r}")
    return page


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    rendered = render(page)
    if "--check" in sys.argv[1:]:
        return int(page != rendered)
    PAGE.write_text(rendered, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Write the tables of docs/ that follow from the code; `--check` only compares.

The text between `<!-- begin: NAME -->` and `<!-- end: NAME -->` is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lightsecagg.protocol import epoch_client, epoch_server, holder, round_client
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.wire import TAGS

DOCS = Path(__file__).parents[1] / "docs"

# What a handler means to a reader; a handler that is missing here fails the test of these pages.
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
OF_EPOCHS = {
    "_on_roster": "→ Registered",
    "_on_wanted": "report",
    "_on_dropped": "keep",
    "_to_holder": "holder",
    "_on_buffer": "→ Signed / Answered",
    "_on_another_buffer": "repeat, → Signed / Answered",
}
OF_SERVERS = {
    "_on_advertise": "take",
    "_on_shares": "relay",
    "_on_reports": "take",
    "_on_upload": "take",
    "_on_consent": "take",
    "_on_refusal": "take",
    "_on_answer": "take",
    "_on_late": "late",
}


def transition_table(
    table: Mapping[tuple[Any, type], Any], rows: Sequence[Any], meaning: Mapping[str, str]
) -> str:
    """State (or phase) x message; messages in the order of their tags."""
    kinds = sorted({kind for _, kind in table}, key=TAGS.__getitem__)
    lines = [
        "| | " + " | ".join(kind.__name__ for kind in kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for row in rows:
        handlers = [table.get((row, kind)) for kind in kinds]
        cells = ["·" if handler is None else meaning[handler.__name__] for handler in handlers]
        name = row.__name__ if isinstance(row, type) else row.value
        lines.append(f"| **{name}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tag_table() -> str:
    """Message types and their tags, from `wire.TAGS`."""
    lines = ["| tag | message |", "|---|---|"]
    for kind, tag in sorted(TAGS.items(), key=lambda item: item[1]):
        first = (kind.__doc__ or "").split("\n", 1)[0]
        lines.append(f"| {tag} | `{kind.__name__}`: {first} |")
    return "\n".join(lines)


def pages() -> dict[str, dict[str, str]]:
    """Page -> name -> table."""
    rounds, epochs = get_args(round_client.AnyState), get_args(epoch_client.AnyState)
    holding = [holder.Holding, holder.Signed, holder.Answered]
    of_rounds = transition_table(round_client.TRANSITIONS, rounds, MEANING)
    of_epochs = transition_table(epoch_client.TRANSITIONS, epochs, MEANING | OF_EPOCHS)
    of_holders = transition_table(holder.TRANSITIONS, holding, MEANING | OF_EPOCHS)
    phases = [phase for phase in Phase if phase is not Phase.SHARE]
    of_server = transition_table(epoch_server.TRANSITIONS, phases, OF_SERVERS)
    return {
        "protocol.md": {"transitions": of_rounds, "tags": tag_table()},
        "asynchronous.md": {"transitions": of_epochs, "holder": of_holders, "phases": of_server},
    }


def render(page: str, tables: Mapping[str, str]) -> str:
    """The page with its tables made anew."""
    for name, table in tables.items():
        pattern = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        page, count = re.subn(
            pattern, lambda match, t=table: f"{match[1]}\n{t}\n\n{match[2]}", page, flags=re.DOTALL
        )
        if count != 1:
            raise LookupError(f"the page has {count} places for the table {name!r}")
    return page


def main() -> int:
    stale = 0
    for name, tables in pages().items():
        page = (DOCS / name).read_text(encoding="utf-8")
        rendered = render(page, tables)
        stale += page != rendered
        if "--check" not in sys.argv[1:]:
            (DOCS / name).write_text(rendered, encoding="utf-8")
    return int("--check" in sys.argv[1:] and stale > 0)


if __name__ == "__main__":
    sys.exit(main())

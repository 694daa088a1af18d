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

from lightsecagg.protocol import client, holder, server
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.kept_shares import AnyHolding
from lightsecagg.protocol.wire import TAGS

DOCS = Path(__file__).parents[1] / "docs"

# What a handler means to a reader; a handler that is missing here fails the test of these pages.
OF_CLIENTS = {
    "_on_opening": "→ Advertised / Registered",
    "_on_repeated_opening": "repeat",
    "_on_roster": "→ Registered",
    "_on_repeated_roster": "repeat",
    "_on_shares_closed": "upload",
    "_on_dropped": "keep",
    "_to_holder": "holder",
    "_on_late": "late",
    "_on_abort": "→ Closed",
}
OF_HOLDERS = {
    "_on_shares": "keep",
    "_on_wanted": "report",
    "_on_request": "→ Signed / Answered",
    "_on_another_request": "repeat, → Signed / Answered",
    "_on_certificate": "→ Answered",
    "_on_repeated_certificate": "repeat",
}
OF_SERVERS = {
    "_on_advertise": "take",
    "_on_shares": "relay",
    "_on_reports": "take",
    "_on_upload": "take",
    "_on_consent": "take",
    "_on_refusal": "take",
    "_on_answer": "take",
    "_on_past": "late",
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
    clients = transition_table(client.TRANSITIONS, get_args(client.AnyState), OF_CLIENTS)
    holders = transition_table(holder.TRANSITIONS, get_args(AnyHolding), OF_HOLDERS)
    servers = transition_table(server.TRANSITIONS, list(Phase), OF_SERVERS)
    tables = {"transitions": clients, "holder": holders, "phases": servers, "tags": tag_table()}
    return {"protocol.md": tables}


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

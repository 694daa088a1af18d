"""The one list of fuzz targets, and what the sources say has to be on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from fuzz_decoders import DECODERS
from fuzz_files import FILES
from fuzz_parties import PARTIES

import lightsecagg

TARGETS = {target.name: target for target in (*DECODERS, *FILES, *PARTIES)}

SOURCE = Path(lightsecagg.__file__).parent
READERS = {"decode", "reading", "foreign.decode", "foreign.reading", "struct.unpack"}
"""Calls by which foreign bytes are read; see `lightsecagg.foreign`."""
NAMES = {"from_bytes", "parse_request", "client_of_pem"}


def readers(source: str) -> Iterator[str]:
    """The functions of a module that read foreign bytes, by their qualified names."""

    def visit(node: ast.AST, place: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*place, child.name)
                if child.name in NAMES:
                    yield ".".join(inner)
            elif isinstance(child, ast.Call):
                function = ast.unparse(child.func)
                if function in READERS or function.endswith(".unpack_from"):
                    yield ".".join(place)
            yield from visit(child, inner)

    return visit(ast.parse(source), ())


def all_readers() -> set[str]:
    """Those of the whole package."""
    return {
        f"{path.relative_to(SOURCE).as_posix()}:{name}"
        for path in SOURCE.rglob("*.py")
        for name in readers(path.read_text("utf-8"))
    }

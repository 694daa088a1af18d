"""The error tree is what its docstring draws, and every error is catchable as ours."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from lightsecagg import errors
from lightsecagg.errors import InconsistentAnswers, LightSecAggError


def drawn_tree() -> dict[str, str]:
    """Child -> parent, read off the drawing: every level is indented by four characters."""
    path: list[str] = []
    tree = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}(?P<bars>[│ ]*)(?P<branch>[├└]── )?(?P<name>[A-Z]\w+)", line)
        if match is None:
            continue
        depth = len(match["bars"]) // 4 + (match["branch"] is not None)
        path = [*path[:depth], match["name"]]
        if depth:
            tree[match["name"]] = path[depth - 1]
    return tree


def defined() -> dict[str, str]:
    """Child -> parent, for every exception that the module defines."""
    return {
        name: kind.__base__.__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type)
        and issubclass(kind, LightSecAggError)
        and kind is not LightSecAggError
        and kind.__base__ is not None
    }


def test_docstring_draws_the_real_tree() -> None:
    assert drawn_tree() == defined()
    assert len(defined()) > 10


def test_no_error_is_defined_elsewhere() -> None:
    """Read, not imported: what other tests have loaded makes no difference."""
    ours = {"LightSecAggError", *defined()}
    source = Path(errors.__file__).parent
    strays = {
        f"{file.relative_to(source)}: {node.name}"
        for file in source.rglob("*.py")
        if file.name != "errors.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split(".")[-1] in ours for base in node.bases)
    }
    assert strays == set()


def test_suspects_are_kept_as_a_tuple() -> None:
    assert InconsistentAnswers("two answers differ", iter([3, 1])).suspects == (3, 1)
    assert InconsistentAnswers("somebody lied").suspects == ()


def test_S44_what_a_peer_is_told_says_nothing_of_an_update() -> None:
    said = "entry 17 lies beyond the bound"
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if not issubclass(kind, LightSecAggError) or issubclass(kind, errors.RemoteProtocolError):
            continue
        error = kind.__new__(kind)
        error.args = (said,)
        assert said in str(error)
        assert said not in error.public
        assert kind.__name__ in error.public
    blamed = errors.RemoteProtocolError("the roster names a client twice")
    assert blamed.public == "the roster names a client twice"

"""The error tree is what its docstring draws, and every error is catchable as ours."""

from __future__ import annotations

import re

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


def subclasses(kind: type[LightSecAggError]) -> dict[str, str]:
    found = {}
    for child in kind.__subclasses__():
        found[child.__name__] = kind.__name__
        found |= subclasses(child)
    return found


def test_docstring_draws_the_real_tree() -> None:
    real = subclasses(LightSecAggError)
    assert drawn_tree() == real
    assert len(real) > 10


def test_every_error_is_defined_in_one_module() -> None:
    for name in subclasses(LightSecAggError):
        assert getattr(errors, name).__module__ == "lightsecagg.errors"


def test_suspects_are_kept_as_a_tuple() -> None:
    assert InconsistentAnswers("two answers differ", iter([3, 1])).suspects == (3, 1)
    assert InconsistentAnswers("somebody lied").suspects == ()

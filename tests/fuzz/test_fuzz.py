"""Every reader of foreign bytes, and every party, under inputs that nobody meant (S41).

`scripts/fuzz` lets a coverage-guided fuzzer look for hours; here each target gets a fixed number of
inputs, bred from its seeds by chance with a fixed seed, and every input that once was a finding.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_mutation import mutant
from fuzz_target import Target
from fuzz_targets import TARGETS, all_readers, readers

from lightsecagg.errors import DecodeError

FOUND = Path(__file__).parent / "found"
EXECUTIONS, SLOW_EXECUTIONS = 150, 12


def test_S41_every_reader_of_foreign_bytes_has_a_fuzz_target() -> None:
    covered = {name for target in TARGETS.values() for name in target.covers}
    assert all_readers() == covered


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(x):\n  return decode(json.loads, x, 'y')", ["f"]),
        ("class A:\n  def g(self, p):\n    with reading(p, 'y'):\n      pass", ["A.g"]),
        ("class A:\n  def from_bytes(cls, data):\n    pass", ["A.from_bytes"]),
        ("def f(x):\n  def g():\n    return H.unpack_from(x)\n  return g", ["f.g"]),
        ("def f(x):\n  return x.decode('ascii')", []),
    ],
)
def test_S41_a_new_reader_is_seen(source: str, found: list[str]) -> None:
    assert list(readers(source)) == found


@pytest.mark.parametrize("name", TARGETS)
def test_S41_a_target_takes_its_seeds_and_refuses_or_takes_what_is_bred_from_them(
    name: str,
) -> None:
    target, coins = TARGETS[name], random.Random(name)
    seeds = list(target.seeds())
    accepted = [target.accepts(seed) for seed in seeds]
    assert any(accepted), "no seed is sound"
    for _ in range(SLOW_EXECUTIONS if target.slow else EXECUTIONS):
        target.accepts(mutant(coins, seeds))


@pytest.mark.parametrize("path", sorted(FOUND.glob("*/*")), ids=lambda path: path.name)
def test_S41_what_was_found_once_is_not_found_again(path: Path) -> None:
    (target,) = (each for each in TARGETS.values() if each.folder == path.parent.name)
    target.accepts(path.read_bytes())


# -- the targets themselves -----------------------------------------------------------------------


def stumbling(data: bytes) -> None:
    if len(data) > 3:
        raise IndexError("a byte too many")


def terminal(data: bytes) -> None:
    if len(data) > 3:
        raise DecodeError(f"unknown \x1b[2J {data!r}")


@pytest.mark.parametrize(("read", "finding"), [(stumbling, IndexError), (terminal, AssertionError)])
def test_a_careless_reader_is_found(read: object, finding: type[Exception]) -> None:
    """As it would be if it were on the list."""
    target = Target("careless", read, lambda: [b"abc"], (DecodeError,))  # type: ignore[arg-type]

    def look(coins: random.Random) -> None:
        for _ in range(EXECUTIONS):
            target.accepts(mutant(coins, [b"abc"]))

    with pytest.raises(finding):
        look(random.Random(1))


def test_an_undeclared_refusal_is_a_finding() -> None:
    target = replace(TARGETS["message"], refusals=())
    with pytest.raises(DecodeError):
        target.accepts(b"\x03")

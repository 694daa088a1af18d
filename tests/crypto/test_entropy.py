"""Randomness comes from the operating system alone, through one door (S17)."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import lightsecagg
from lightsecagg.crypto.entropy import draw
from lightsecagg.crypto.prg import draw_uniform
from lightsecagg.errors import CryptoError

PACKAGE = Path(lightsecagg.__file__).parent
DOOR = PACKAGE / "crypto" / "entropy.py"
GUARDED = ("crypto", "masks", "protocol", "field")
BANNED_MODULES = {"random", "secrets", "uuid", "numpy.random", "torch"}
BANNED_NAMES = {
    "urandom",
    "getrandom",
    "SystemRandom",
    "default_rng",
    "generate_key",
    "np.random",
    "numpy.random",
    "X25519PrivateKey.generate",
    "Ed25519PrivateKey.generate",
}


def banned_uses(source: str) -> Iterator[str]:
    """Every mention in `source` of a generator other than the one door."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            names += [alias.name for alias in node.names if alias.name in BANNED_NAMES]
        elif isinstance(node, ast.Attribute):
            names = [node.attr, f"{ast.unparse(node.value).split('.')[-1]}.{node.attr}"]
            names = [name for name in names if name in BANNED_NAMES]
        elif isinstance(node, ast.Name):
            names = [node.id] if node.id in BANNED_NAMES else []
        else:
            continue
        for name in names:
            if name in BANNED_NAMES or any(
                name == module or name.startswith(module + ".") for module in BANNED_MODULES
            ):
                yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "import random as r",
        "from random import choice",
        "import secrets",
        "from secrets import token_bytes",
        "import numpy.random",
        "from numpy import random",
        "from numpy.random import default_rng",
        "import torch",
        "x = np.random.rand(3)",
        "x = np.random",
        "x = numpy.random.default_rng()",
        "x = os.urandom(3)",
        "from os import urandom",
        "x = os.getrandom(3)",
        "x = X25519PrivateKey.generate()",
        "x = ed25519.Ed25519PrivateKey.generate()",
        "x = AESGCM.generate_key(256)",
    ],
)
def test_S17_the_static_ban_sees_every_other_generator(line: str) -> None:
    assert list(banned_uses(line))


def test_S17_no_other_generator_in_crypto_masks_protocol_and_field() -> None:
    files = [path for part in GUARDED for path in (PACKAGE / part).rglob("*.py") if path != DOOR]
    assert any(path.name == "prg.py" for path in files)
    found = {
        str(path.relative_to(PACKAGE)): uses
        for path in files
        if (uses := list(banned_uses(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


def test_S17_seeding_other_generators_changes_no_mask() -> None:
    def seeded_draw() -> list[int]:
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002 - the very generator that must not matter
        torch = pytest.importorskip("torch")
        torch.manual_seed(7)
        return draw_uniform(64, 2**31 - 2**19 + 1).tolist()

    assert seeded_draw() != seeded_draw()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_S17_a_forked_process_draws_other_bytes() -> None:
    """In a process of its own: forking a process that runs threads is asking for trouble."""
    program = """
import os
from lightsecagg.crypto.entropy import system_entropy

system_entropy(32)  # a buffering source would now hold state that the child inherits
child = os.fork()
os.write(1, system_entropy(32))
if child:
    os.waitpid(child, 0)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    drawn = subprocess.run(command, capture_output=True, check=True).stdout
    assert len(drawn) == 64
    assert drawn[:32] != drawn[32:]


@pytest.mark.parametrize("returned", [b"", b"\x00" * 31, b"\x00" * 33])
def test_a_source_of_the_wrong_length_is_refused(returned: bytes) -> None:
    with pytest.raises(CryptoError, match="instead of 32"):
        draw(lambda count: returned, 32)

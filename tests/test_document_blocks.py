"""Every command and code block of the documents is run, or marked as not to be run.

A page's blocks run in order, in a folder of their own, in one namespace. ```python is Python; ```sh
is for the shell, and so is a fence without a language that begins with a command (others are
pictures or output); toml, json and yaml are parsed. A comment before the fence says otherwise:

    <!-- not run: why -->         but `lightsecagg` commands in it must still be understood
    <!-- file: name.py -->        saved under this name
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from lightsecagg.cli.main import app

pytest.importorskip("lightsecagg_lab", reason="pages show the laboratory too")
ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if "results" not in page.parts
]
COMMANDS = (
    "lightsecagg",
    "python",
    "pip",
    "scripts/",
    "docker",
    "tensorboard",
    "flwr",
    "flower-",
    "$",
)
KINDS = {"", "sh", "python", "console", "toml", "json", "yaml"}
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|file): (?P<why>.+?) -->\n)?"
    r"^```(?P<kind>\S*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One fenced block of a page."""

    kind: str
    text: str
    mark: str | None
    why: str | None
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        kind, content = match["kind"], match["text"]
        if kind == "console":  # commands after a dollar, and what they print
            kind, content = "", "\n".join(re.findall(r"^\$ (.*)$", content, re.MULTILINE)) + "\n"
        if kind == "sh":
            kind = "shell"
        elif kind == "":
            kind = "shell" if content.startswith(COMMANDS) else "picture"
        line = text[: match.start("text")].count("\n")
        yield Block(kind, content, match["mark"], match["why"], line)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def to_run(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.mark == "file" or (block.mark is None and block.kind in ("python", "shell"))
    ]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `lightsecagg` and `python` are those of the tests."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, command in (("lightsecagg", "-m lightsecagg"), ("python", "")):
        (tools / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (tools / tool).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "LIGHTSECAGG_SERVER__ADDRESS": f"localhost:{port}",  # 7700 may be taken
    }


def pages_that_run() -> Iterator[Any]:
    """Commands begin processes, and some train: slow."""
    for page in PAGES:
        if found := to_run(page):
            quick = not any(block.kind == "shell" or ".training" in block.text for block in found)
            yield pytest.param(page, id=name_of(page), marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("page", list(pages_that_run()))
def test_blocks_run(
    page: Path, tmp_path: Path, shell: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(work))
    namespace: dict[str, Any] = {}
    for block in to_run(page):
        place = f"{name_of(page)}:{block.line}"
        if block.mark == "file":
            assert block.why is not None
            (work / block.why).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            exec(compile(block.text, place, "exec"), namespace)  # noqa: S102 - our own documents
        else:
            script = f"set -euo pipefail\n{block.text}"
            done = subprocess.run(
                ["bash", "-c", script], env=shell, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{place}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_of_a_kind_that_is_checked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    kinds = re.findall(r"^ *```(\S+)$", text, re.MULTILINE)
    assert set(kinds) <= KINDS, "how is this checked?"
    found = list(blocks(page))
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), "a fence is not closed"
    marks = re.findall(r"^<!-- (?:not run|file): ", text, re.MULTILINE)
    assert len(marks) == sum(block.mark is not None for block in found), "a mark without its block"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_data_in_documents_is_well_formed(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "toml":
            tomllib.loads(block.text)
        elif block.kind == "json":
            json.loads(block.text)
        elif block.kind == "yaml":
            yaml = pytest.importorskip("yaml", reason="the extra [docs] is not installed")
            list(yaml.safe_load_all(block.text))


def commands_of(block: Block) -> Iterator[list[str]]:
    """The `lightsecagg` commands of a block, as the shell would hand them over."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        cut = next((i for i, word in enumerate(words) if word in ("&", "|", ">", "2>")), len(words))
        if words[:1] == ["lightsecagg"]:
            yield words[1:cut]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_understood_whether_they_are_run_or_not(page: Path) -> None:
    """Parsed by the command line itself, which does not begin them."""
    for block in blocks(page):
        if block.kind == "shell":
            for words in commands_of(block):
                parse(words)


def parse(words: list[str]) -> None:
    """Down to the command, then its options and arguments; nothing is begun."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("lightsecagg", [], resilient_parsing=True)
    if words[0] in ("--version", "--help"):
        return
    while hasattr(command, "list_commands"):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"No such command: {name}"
        command = found
    command.make_context(name, words, parent=context)


def test_what_is_not_understood_is_noticed() -> None:
    parse(["bench", "kernels", "--clients", "5"])
    for wrong in (["bench", "kernels", "--klients", "5"], ["simulat"], ["bench", "kernles"]):
        with pytest.raises(Exception, match="No such"):
            parse(wrong)

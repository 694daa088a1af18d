"""The first example of docs/training.md runs as printed."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lightsecagg.training import LocalConfig, ServerConfig, TaskConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_the_ten_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "training.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    exec(block.group(1), {})  # noqa: S102
    assert "'accuracy'" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [TaskConfig, LocalConfig, ServerConfig])
def test_every_setting_is_listed(kind: type) -> None:
    text = (DOCS / "training.md").read_text(encoding="utf-8").split("## All settings")[1]
    for field in fields(kind):
        assert re.search(rf"^\|.*`{field.name}`", text, re.MULTILINE), field.name


@pytest.mark.parametrize("name", ["training.md", "own-task.md"])
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / name).read_text(encoding="utf-8"))
    assert links
    assert all((DOCS / link).exists() for link in links)

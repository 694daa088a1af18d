"""docs/training.md lists what the configuration takes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lightsecagg.training import LocalConfig, ServerConfig, TaskConfig

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("kind", [TaskConfig, LocalConfig, ServerConfig])
def test_every_setting_is_listed(kind: type) -> None:
    text = (DOCS / "training.md").read_text(encoding="utf-8").split("## All settings")[1]
    for field in fields(kind):
        assert re.search(rf"^\|.*`{field.name}`", text, re.MULTILINE), field.name

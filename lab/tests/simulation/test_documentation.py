"""The code on the page about simulation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_code_on_the_simulation_page_runs() -> None:
    page = (ROOT / "docs" / "simulation.md").read_text("utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 2

"""What a newcomer gets from a plain `pip install`: the core alone, and today's versions of all.

The other tests run in the environment of constraints.txt, with every extra; this one fetches what
pip chooses without it. `LIGHTSECAGG_OFFLINE=1` leaves it out where there is no package index.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from lightsecagg.cli.extras import PACKAGES
from newcomer import ROOT, Newcomer, ten_lines, wheel_of_this_tree

OLDEST_TYPER = re.search(r'"typer>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))

WORKS = [
    "--version",
    "--help",
    "provision --clients 3 --out federation",
    "members add --federation federation",
    "members list --federation federation",
    "task template my_task.py",
    "run --help",
]
LACKS = {
    "run": "grpc,torch",
    "server --config federation/server/server.toml": "grpc",
    "client --config federation/clients/0/client-0.toml": "grpc",
    "model export --state federation/server/state --out model.pt": "grpc,torch",
    "task list": "torch",
    "task check digits": "torch",
}

# Commands that end at once, in one process: exit code, stdout and stderr of each, as JSON.
ONE_AFTER_THE_OTHER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from lightsecagg.cli.main import main

ends = []
for command in sys.argv[1:]:
    sys.argv[1:] = command.split()
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    ends.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ends))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # pip fetches and installs, perhaps on a busy machine
@pytest.mark.skipif("LIGHTSECAGG_OFFLINE" in os.environ, reason="LIGHTSECAGG_OFFLINE is set")
def test_a_plain_install_of_the_core_works_and_names_the_extra_that_a_command_lacks(
    tmp_path: Path,
) -> None:
    newcomer = Newcomer(tmp_path)
    newcomer.install(str(wheel_of_this_tree(tmp_path)))
    for command in WORKS:
        done = newcomer.lightsecagg(command)
        assert done.returncode == 0, (command, done.stderr)
    done = newcomer.lightsecagg("simulate --clients 5 --privacy 1 --dropouts 1 --dim 50")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("pip install -c constraints.txt ./lab\n")
    done = newcomer.run("-c", ten_lines())
    assert done.stdout.startswith("(0, 1, 2, 3, 5) 1270"), done.stderr
    done = newcomer.run("-c", ONE_AFTER_THE_OTHER, *LACKS)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    for (command, extra), (code, out, err) in zip(LACKS.items(), ends, strict=True):
        assert (code, out) == (2, ""), (command, out, err)
        assert re.fullmatch(
            rf"error: .* needs? .*pip install -c constraints.txt '\.\[{extra}\]'\n", err
        ), (command, err)
    assert OLDEST_TYPER is not None
    newcomer.install(f"typer=={OLDEST_TYPER[1]}")
    for command in WORKS[:2]:
        done = newcomer.lightsecagg(command)
        assert done.returncode == 0, (command, done.stderr)


def test_no_message_or_document_names_a_package_that_is_not_published() -> None:
    """Whoever claimed the name on an index could run code on our users' machines."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").glob("*.md")]
    texts += [*(ROOT / "src").rglob("*.py"), *(ROOT / "lab" / "src").rglob("*.py")]
    for path in texts:
        found = re.findall(r"pip install\s.*?lightsecagg.*", path.read_text("utf-8"))
        assert not found, (path, found)


def test_every_extra_that_is_asked_for_exists() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(PACKAGES) <= set(project["optional-dependencies"])

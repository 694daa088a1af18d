"""What a newcomer gets who installs the laboratory next to the product, without any extra."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from newcomer import ROOT, Newcomer, wheel_of_this_tree

WORKS = [
    "--help",
    "simulate --clients 5 --privacy 1 --dropouts 1 --dim 50 --protocol all",
    "simulate --mode async --clients 6 --privacy 1 --dropouts 1 --buffer 3 --dim 50 --flushes 1",
    "plan --clients 10 --dim 1e3 --stated",
    "bench kernels --clients 5 --survivors 4 --privacy 2 --dim 1000",
    "experiments table6 --quick",
]
LACKS = {
    "bench federation": "grpc",
    "bench soak": "grpc",
    "experiments table4 --quick": "torch",
    "experiments figure5 --quick": "report,torch",
    "experiments async --quick": "torch,report",
    "experiments transport": "grpc,torch",
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
def test_a_plain_install_works_and_names_the_extra_that_a_command_lacks(tmp_path: Path) -> None:
    newcomer = Newcomer(tmp_path)
    newcomer.install(str(wheel_of_this_tree(tmp_path)), str(ROOT / "lab"))
    for command in WORKS:
        done = newcomer.lightsecagg(command)
        assert done.returncode == 0, (command, done.stderr)
    done = newcomer.run("-c", ONE_AFTER_THE_OTHER, *LACKS)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    for (command, extra), (code, out, err) in zip(LACKS.items(), ends, strict=True):
        assert (code, out) == (2, ""), (command, out, err)
        assert re.fullmatch(
            rf"error: .* needs? .*pip install -c constraints.txt '\.\[{extra}\]'\n", err
        ), (command, err)

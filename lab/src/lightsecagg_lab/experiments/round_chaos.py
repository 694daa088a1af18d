"""Everything that can happen to a federation in rounds, at random, and that no harm comes of it.

A real federation that sums vectors, over loopback TLS, each client behind a proxy of its own. What
happens to it, one thing after the other and some of them at the same time:

    kill       -9 of the server or of a client, which are started again
    stop       SIGSTOP, and SIGCONT a little later
    partition  nothing passes between the server and some clients, or all, for a while
    disk       the server cannot write to any file: its RLIMIT_FSIZE is what a full disk would be
    flip       a byte of the server's state, or of a client's ledger, is changed while it is down:
               it must refuse to start; the copy made before is put back, as the documents say
    change     the server is started with other parameters: clients must refuse those that their
               policies forbid, and a round that is under way keeps its own

A campaign is one federation, from provisioning to goodbye; a long chaos has many. Each one is then
audited, see `round_audit`. Needs Linux (/proc, prlimit).
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.provisioning import free_port
from lightsecagg_lab.experiments.campaign import Campaign
from lightsecagg_lab.experiments.chaos_plan import Findings, RoundChaos, Schedule
from lightsecagg_lab.experiments.fault_proxy import FaultyNetwork


def unleash_rounds(
    chaos: RoundChaos,
    tell: Callable[[str], None] = lambda line: None,
    ask: Callable[[], None] = lambda: None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Let it happen, and count; `ask` may raise `SystemExit` to end it early, with a report.

    `keep` is where campaigns that are not clean leave their logs, states and notes.
    """
    rng = random.Random(chaos.seed)  # noqa: S311 - what happens is no secret
    findings, began, interrupted = Findings(), time.monotonic(), False
    schedule = Schedule(chaos, rng)
    with _temporary_folder() as folder:
        while not schedule.over and not interrupted:
            before = findings.faults_found
            with FaultyNetwork(f"127.0.0.1:{(port := free_port())}", range(chaos.clients)) as net:
                campaign = Campaign(chaos, folder, port, net, rng, findings, ask)
                interrupted = campaign.run(schedule, tell)
            audited = campaign.audit()
            findings.outcomes["orphans"] += len(_left_behind(folder))
            if keep is not None and (findings.faults_found > before or not audited):
                shutil.copytree(folder, keep / f"campaign-{len(findings.audits)}")
            _empty(folder)
    seconds = time.monotonic() - began
    return findings.to_json(chaos, seconds, interrupted=interrupted)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """For everything, what processes may leave in *their* temporary folder too."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="lightsecagg-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        try:
            yield folder
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
        elif path.name != "tmp":
            shutil.rmtree(path)


def _left_behind(folder: Path) -> list[str]:
    """Processes that have a file here open although all have ended, and temporary files."""
    found = [str(path) for path in (folder / "tmp").iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # somebody else's, or gone
            opened = [os.readlink(file) for file in (process / "fd").iterdir()]
            if any(name.startswith(f"{folder}/") for name in opened):
                found.append(process.name)
    return found

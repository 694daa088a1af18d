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
audited, see `round_audit`.

In the asynchronous mode it is kills alone, at any moment, however far whoever was killed before has
got; a demonstration (`demo`) starts the processes, kills them and audits what they have noted. It
ends when all of them take part again. `hangs` counts a federation without a sum for `patience`
seconds. Needs Linux (/proc, prlimit).
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.demo import DemoResult, run_demo
from lightsecagg.drivers.federation.demo_config import DemoConfig
from lightsecagg.drivers.federation.provisioning import free_port
from lightsecagg.params import ThreatModel
from lightsecagg_lab.experiments.campaign import Campaign
from lightsecagg_lab.experiments.chaos_plan import (
    BufferChaos,
    Findings,
    RoundChaos,
    Schedule,
    plan_kills,
)
from lightsecagg_lab.experiments.fault_proxy import FaultyNetwork
from lightsecagg_lab.experiments.federation_bench import RandomVectors

_AFTERWARDS = 3
"""Sums that must still be recovered when nobody is killed any more."""
_TAU_MAX = 60
"""So large that no update is too stale: none may be dropped, unless its model needs company."""

Tell = Callable[[str], None]
Ask = Callable[[], None]


def unleash(
    chaos: RoundChaos | BufferChaos,
    tell: Tell = lambda line: None,
    ask: Ask = lambda: None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Let it happen, and count; `ask` may raise `SystemExit` to end it early, with a report.

    `keep` is where federations that are not clean leave their logs, states and notes.
    """
    with _temporary_folder() as folder:
        if isinstance(chaos, RoundChaos):
            return _harm_rounds(chaos, folder, tell, ask, keep)
        found = _kill(chaos, folder, tell, ask)
        if keep is not None and not found["clean"]:
            shutil.copytree(folder, keep / "federation")
        return found


def _harm_rounds(
    chaos: RoundChaos, folder: Path, tell: Tell, ask: Ask, keep: Path | None
) -> dict[str, Any]:
    rng = random.Random(chaos.seed)  # noqa: S311 - what happens is no secret
    findings, began, interrupted = Findings(), time.monotonic(), False
    schedule = Schedule(chaos, rng)
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


def _kill(chaos: BufferChaos, folder: Path, tell: Tell, ask: Ask) -> dict[str, Any]:
    kills = plan_kills(chaos)
    config = DemoConfig(
        mode="async",
        clients=chaos.clients,
        privacy=chaos.privacy,
        dropouts=chaos.dropouts,
        buffer=chaos.buffer,
        share_mode=chaos.share_mode,
        threat_model=chaos.threat_model,
        rounds=_AFTERWARDS,
        dropout=0,
        bound=1.0,
        slow=1,
        least_training=0.1,
        least_staleness=None,
        tau_max=_TAU_MAX,
        kills=kills,
        afterwards=_AFTERWARDS,
        patience=chaos.patience,
        timeout=chaos.timeout,
        vectors=chaos.dimension,
        job=partial(RandomVectors, dimension=chaos.dimension),
    )
    step = max(1, len(kills) // 20)

    def watch(what: str, done: int, expected: int) -> None:
        if what == "kills" and (done % step == 0 or done == len(kills)):
            tell(f"{done} of {len(kills)} kills")

    result = run_demo(config, folder, watch, ask)
    return _findings(chaos, result, len(_left_behind(folder)))


def _findings(chaos: BufferChaos, result: DemoResult, orphans: int) -> dict[str, Any]:
    killed = Counter("server" if kill["who"] == "server" else "client" for kill in result.killed)
    reasons = Counter(record["aborted"] for record in result.aborted)
    may_drop = chaos.threat_model is ThreatModel.MALICIOUS_SERVER
    clean = result.audit.clean and (may_drop or not result.audit.dropped)
    return {
        "clean": clean and not result.hung and not orphans,
        "server_kills": killed["server"],
        "client_kills": killed["client"],
        "sums": len(result.records),
        "epochs": len({record["epoch"] for record in result.records}),
        "hangs": int(result.hung),
        "orphans": orphans,
        **asdict(result.audit),
        "failed_buffers": dict(reasons),
        "seconds": result.seconds,
        "interrupted": result.interrupted is not None,
        "complaints": sorted(set(result.complaints)),
        "plan": asdict(chaos),
    }


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

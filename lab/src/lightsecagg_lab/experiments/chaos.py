"""kill -9 of the server and of clients at random, and what becomes of every update.

A real federation in the asynchronous mode that sums vectors; see `epoch_demo`, which starts the
processes, kills them and audits what they have noted. Kills come at random moments, one after the
other, however far whoever was killed before has got. It ends when all of them take part again.
`hangs` counts a federation that recovers no buffer for `patience` seconds.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.epoch_demo import (
    SERVER,
    EpochDemoConfig,
    EpochDemoResult,
    Kill,
    run_epochs,
)
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg_lab.experiments.federation_bench import RandomVectors

_AFTERWARDS = 3
"""Sums that must still be recovered when nobody is killed any more."""
_TAU_MAX = 60
"""So large that no update is too stale: none may be dropped, unless its model needs company."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """What to try."""

    server_kills: int = 200
    client_kills: int = 100
    clients: int = 8
    privacy: int = 2
    dropouts: int = 2
    buffer: int = 4
    dimension: int = 1000
    share_mode: ShareMode = ShareMode.SEEDED
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    """With a malicious server, T + 2 owners share a model: fewer are dropped (S56)."""
    pause: float = 3.0
    """Seconds between two kills, at most; half of it on average."""
    patience: float = 120.0
    timeout: float = 3600.0
    seed: int = 0
    """Steers vectors, and who is killed when."""


def plan(chaos: Chaos) -> tuple[Kill, ...]:
    """Who is killed, in which order, how long after the kill before."""
    rng = random.Random(chaos.seed)  # noqa: S311 - who is killed is no secret
    victims = [SERVER] * chaos.server_kills
    victims += [rng.randrange(chaos.clients) for _ in range(chaos.client_kills)]
    rng.shuffle(victims)
    # Before the first sum there is nothing to lose.
    return tuple(Kill(victim, 1, rng.uniform(0, chaos.pause)) for victim in victims)


def unleash(
    chaos: Chaos,
    tell: Callable[[str], None] = lambda line: None,
    ask: Callable[[], None] = lambda: None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Kill, and count; `ask` may raise `SystemExit` to end it early, with a report.

    `keep` is where a federation that is not clean leaves its logs, state and notes.
    """
    kills = plan(chaos)
    config = EpochDemoConfig(
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

    with tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder:
        found = _findings(chaos, run_epochs(config, Path(folder), watch, ask))
        if keep is not None and not found["clean"]:
            shutil.copytree(folder, keep / "federation")
        return found


def _findings(chaos: Chaos, result: EpochDemoResult) -> dict[str, Any]:
    killed = Counter("server" if kill["who"] == "server" else "client" for kill in result.killed)
    reasons = Counter(record["aborted"] for record in result.lost_buffers)
    may_drop = chaos.threat_model is ThreatModel.MALICIOUS_SERVER
    clean = result.audit.clean and not result.hung and (may_drop or not result.audit.dropped)
    return {
        "clean": clean,
        "server_kills": killed["server"],
        "client_kills": killed["client"],
        "sums": len(result.records),
        "epochs": len({record["epoch"] for record in result.records}),
        "hangs": int(result.hung),
        **asdict(result.audit),
        "failed_buffers": dict(reasons),
        "seconds": result.seconds,
        "interrupted": result.interrupted is not None,
        "complaints": sorted(set(result.complaints)),
        "plan": asdict(chaos),
    }

"""The buffered-asynchronous mode with N clients in one process.

Theory of operation. A schedule says which client is done next (`schedule`), a workload what it has
computed (`workload`: random vectors; `async_training`: a model trained with PyTorch), and a
federation what becomes of it (`async_lightsecagg`, `async_fedbuff`). All three have their own
random streams, so that runs with and without protection differ in quantisation and masks only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightsecagg.errors import Aborted
from lightsecagg_lab.simulation.async_federation import Federation, Flush
from lightsecagg_lab.simulation.metering import uncollected
from lightsecagg_lab.simulation.schedule import Finished, Left, Returned, Schedule
from lightsecagg_lab.simulation.workload import Workload

_PATIENCE = 100_000
"""Events without a recovered buffer."""


@dataclass(slots=True)
class AsyncReport:
    """What happened in an asynchronous run."""

    flushes: list[Flush] = field(default_factory=list)
    """Every buffer; the means are left out."""
    uploads: int = 0
    too_stale: int = 0
    """Updates that were too stale when they were done, and not uploaded."""
    held_back: int = 0
    """Updates of clients too many of whose updates were waiting already, and second updates from
    one version, which peers would not sum (S42)."""
    departures: int = 0
    clock: float | None = None
    """Virtual seconds, if the schedule has a clock."""

    @property
    def recovered(self) -> int:
        """Buffers that were not lost."""
        return sum(flush.lost is None for flush in self.flushes)

    @property
    def exact(self) -> bool | None:
        """Whether every recovered sum was exact; None without protection."""
        checks = [flush.exact for flush in self.flushes if flush.lost is None]
        return None if None in checks else all(checks)


@uncollected()
def simulate_async(
    federation: Federation,
    workload: Workload,
    schedule: Schedule,
    flushes: int,
    *,
    max_staleness: int,
    flush_after: float | None = None,
    on_flush: Callable[[Flush], None] | None = None,
) -> AsyncReport:
    """Run until so many buffers are recovered.

    * `flush_after`: virtual seconds after which the server flushes what there is.
    * `on_flush`: called when the model has been updated.
    """
    report = AsyncReport()
    hashes = {federation.time: workload.model_hash}
    federation.publish(workload.model_hash, federation.time)
    handed_in: set[tuple[int, int]] = set()  # client, version
    idle, flushed_at = 0, 0.0
    while report.recovered < flushes:
        event = schedule.next(federation.time)
        done: list[Flush] = []
        match event:
            case Left(client):
                report.departures += 1
                done = federation.leave(client)
            case Returned(client):
                done = federation.rejoin(client)
            case Finished(client, version) if version < federation.time - max_staleness:
                report.too_stale += 1
            case Finished(client, version) if (client, version) in handed_in:
                report.held_back += 1
            case Finished(client) if not federation.ready(client):
                report.held_back += 1
            case Finished(client, version):
                vector = workload.update(client, version, report.uploads)
                report.uploads += 1
                handed_in.add((client, version))
                done = federation.upload(client, vector, version, hashes[version])
        now = schedule.clock
        impatient = flush_after is not None and (now or 0.0) - flushed_at > flush_after
        if impatient and not done:
            done = federation.flush()
        for flush in done:
            workload.advance(flush.mean)
            hashes[flush.time + 1] = workload.model_hash
            federation.publish(workload.model_hash, flush.time + 1)
            flushed_at = now or 0.0
            report.flushes.append(replace(flush, mean=None))
            if on_flush is not None:
                on_flush(flush)
        if done:
            oldest = federation.time - max_staleness
            hashes = {v: h for v, h in hashes.items() if v >= oldest}
            handed_in = {(c, v) for c, v in handed_in if v >= oldest}
        idle = 0 if any(flush.lost is None for flush in done) else idle + 1
        if idle > _PATIENCE:
            raise Aborted(
                f"no buffer was recovered during {idle} events: too many clients are away or too "
                "slow, or no T + 2 of them share a weight, as strict buffers demand, or a model, "
                "as a malicious server makes necessary; lower K, U, T, the dropout rate or c_g, "
                "or raise N or tau_max"
            )
    report.clock = schedule.clock
    return report

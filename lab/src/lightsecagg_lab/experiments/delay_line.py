"""A delay line: every frame between two namespaces arrives so many milliseconds later.

It stands in for `tc netem`, which many kernels lack. Each side has a tap device, and a process
carries frames from the one to the other when they are due. Frames are up to 64 KiB long (the taps
take segmentation offload), so that a few thousand of them a second are gigabits.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import struct
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from lightsecagg.errors import ConfigurationError
from lightsecagg_lab.experiments.namespaces import configure, enter
from lightsecagg_lab.experiments.processes import begin

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP_WITH_HEADER: Final = 0x0002 | 0x1000 | 0x4000
"""IFF_TAP, IFF_NO_PI, IFF_VNET_HDR: whole frames, each behind what is to be offloaded."""
_OFFLOAD: Final = 0x01 | 0x02 | 0x04
"""TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6"""
_FRAME: Final = 70_000
"""Bytes: more than the longest frame and its header."""
_AT_ONCE: Final = 32
"""Frames that are taken from one side before the other one's turn."""
_QUEUE: Final = 10_000
"""Frames that wait in a tap before the kernel drops them."""
_START: Final = 30.0


@dataclass(frozen=True, slots=True)
class Tap:
    """One end of the line: a device in a namespace, set up by these commands."""

    namespace: Path
    name: str
    commands: tuple[str, ...]

    def open(self) -> int:
        """Make the device; this process enters its namespace and stays there."""
        enter(self.namespace)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", self.name.encode("ascii"), _TAP_WITH_HEADER)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOAD)
        configure(f"ip link set dev {self.name} txqueuelen {_QUEUE}", *self.commands)
        return descriptor


def start_delay_line(one: Tap, other: Tap, seconds: float, log: Path) -> SpawnProcess:
    """A process that is a delay line, once this returns; its caller ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(one, other, seconds, log, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        ready = ours.poll(_START) and ours.recv()
    except EOFError:
        ready = False
    if not ready:
        process.terminate()
        process.join()
        said = log.read_text("utf-8").strip().splitlines() if log.exists() else []
        raise ConfigurationError(f"the delay line did not start: {' '.join(said[-1:])}")
    return process


def _main(one: Tap, other: Tap, seconds: float, log: Path, ready: Connection[Any, Any]) -> None:
    begin(log, "warning")
    ends = one.open(), other.open()
    # It must be there when a frame is due, whoever else computes. Without the right to it, late
    # frames are longer latencies, which is what is measured then.
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ready.send(True)
    carry(*ends, seconds)


def carry(one: int, other: int, seconds: float) -> None:
    """Move frames between the two, each way after the delay, for ever."""
    ways = [_Way(one, other), _Way(other, one)]
    while True:
        due = min(way.due for way in ways)
        left = None if due == float("inf") else max(0.0, due - time.monotonic())
        select.select((one, other), (), (), left)
        for way in ways:
            way.take(seconds)
            way.give()


class _Way:
    """One direction."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self._frames: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float:
        """When the next frame must leave."""
        return self._frames[0][0] if self._frames else float("inf")

    def take(self, seconds: float) -> None:
        """Frames that have arrived, for later."""
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(self.source, _FRAME)
            except BlockingIOError:
                return
            self._frames.append((time.monotonic() + seconds, frame))

    def give(self) -> None:
        """Frames that are due."""
        now = time.monotonic()
        while self._frames and self._frames[0][0] <= now:
            # A full sink drops it, as a router would.
            with suppress(BlockingIOError):
                os.write(self.sink, self._frames.popleft()[1])

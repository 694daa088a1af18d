"""A federation in rounds, what happens to it, and its audit: see `chaos`."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from lightsecagg.drivers.federation.demo_config import DemoConfig
from lightsecagg.drivers.federation.demo_notes import read_notes
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.errors import Aborted, LightSecAggError
from lightsecagg_lab.experiments.chaos_parties import ENDLESS, Parties, limit_files, send
from lightsecagg_lab.experiments.chaos_plan import Findings, RoundChaos, Schedule
from lightsecagg_lab.experiments.fault_proxy import FaultyNetwork
from lightsecagg_lab.experiments.round_audit import RepeatingVectors, Sum, audit, check_sum
from lightsecagg_lab.experiments.state_damage import (
    checksummed_files,
    flip_a_byte,
    history_of,
    memory_of,
    records_of,
    settle,
)

_AFTERWARDS = 2
"""Rounds that must still finish when nothing happens any more."""
_CAMPAIGN = 300.0
"""Seconds after which a federation has seen enough; the next one begins."""
_LOOK = 0.05
_MOMENTS = ("", "connect", "advertise", "share", "upload", "agree", "recover")
_LONGEST_PAUSE = 4.0
_LONGEST_STOP, _LONGEST_PARTITION, _LONGEST_DISK = 3.0, 5.0, 3.0
_LOG_LINES = 15


class _HangError(Exception):
    """Nothing goes on."""


class Campaign:
    """One federation, what happens to it, and its audit."""

    def __init__(
        self,
        chaos: RoundChaos,
        folder: Path,
        port: int,
        network: FaultyNetwork,
        rng: random.Random,
        findings: Findings,
        ask: Callable[[], None],
    ) -> None:
        self._chaos, self._folder, self._port = chaos, folder, port
        self._network, self._rng, self._found, self._ask = network, rng, findings, ask
        config = DemoConfig(
            clients=chaos.clients,
            privacy=chaos.privacy,
            dropouts=chaos.dropouts,
            share_mode=chaos.share_mode,
            rounds=ENDLESS,
            dropout=0,
            bound=1.0,
            vectors=chaos.dimension,
            job=partial(RepeatingVectors, dimension=chaos.dimension, clients=chaos.clients),
        )
        self._parties = Parties(config, folder, network)
        self._sums: list[Sum] = []
        self._grown = time.monotonic()
        self._phase = ""
        """What the server is in, as far as it has said since it was started."""
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._filled: BaseProcess | None = None
        """The server whose disk is full, or was."""

    def run(self, schedule: Schedule, tell: Callable[[str], None]) -> bool:
        """From the first round to goodbye; returns whether it was interrupted."""
        chaos = self._chaos
        provisioned = {"privacy": chaos.privacy, "dropouts": chaos.dropouts, "port": self._port}
        try:
            with self._parties.running(self._ask, **provisioned):
                self._harm(schedule, tell)
                self._end()
        except SystemExit:
            return True
        except _HangError:
            self._found.outcomes["hangs"] += 1
            self._surprised(f"no sum for {chaos.patience:g} s")
        except LightSecAggError as error:
            self._surprised(str(error))
        return False

    def _harm(self, schedule: Schedule, tell: Callable[[str], None]) -> None:
        until = time.monotonic() + _CAMPAIGN
        self._wait(lambda: bool(self._sums))  # before the first sum there is nothing to lose
        tell(f"a federation of {self._chaos.clients} clients runs")
        while not schedule.over and time.monotonic() < until:
            self._pause()
            kind = schedule.take()
            _FAULTS[kind](self)
            self._found.done[kind] += 1
            if schedule.taken % 20 == 0:
                tell(f"{schedule.taken} faults; {len(self._sums)} sums of this federation")

    def audit(self) -> bool:
        """Whether nothing has happened that must not."""
        self._collect()
        try:
            records, under_way = records_of(self._parties.state, self._session)
        except LightSecAggError as error:
            self._surprised(str(error))
            return False
        notes = [
            note for note in read_notes(self._parties.notes) if note.get("round") not in under_way
        ]
        audited = audit(records, self._sums, notes, self._chaos.clients)
        self._found.audits.append(audited)
        return audited.clean

    @property
    def _session(self) -> str:
        return self._parties.made.session.hex()

    def _surprised(self, what: str) -> None:
        log = self._folder / "server.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        self._found.surprises.append("\n".join([what, *text.splitlines()[-_LOG_LINES:]]))

    # -- looking -----------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool], apart: BaseProcess | None = None) -> None:
        """Until it holds; nobody but `apart` may end meanwhile."""
        while not condition():
            self._look(apart)
            self._parties.rest(_LOOK)

    def _pause(self) -> None:
        """A while, and then until a phase begins, any of them; or, now and then, no longer."""
        self._wait_for(self._rng.uniform(0, self._chaos.pause))
        phase = self._rng.choice(_MOMENTS)
        self._phase = ""
        self._wait_for(_LONGEST_PAUSE, lambda: phase in ("", self._phase))
        time.sleep(self._rng.uniform(0, _LOOK))

    def _wait_for(self, seconds: float, condition: Callable[[], bool] = lambda: False) -> None:
        due = time.monotonic() + seconds
        self._wait(lambda: condition() or time.monotonic() >= due)

    def _look(self, apart: BaseProcess | None = None) -> None:
        self._ask()
        self._hear()
        self._collect()
        now = time.monotonic()
        due = [act for moment, act in self._later if moment <= now]
        self._later = [each for each in self._later if each[0] > now]
        for act in due:
            act()
        self._mind_the_dead(apart)
        if now - self._grown > self._chaos.patience:
            raise _HangError

    def _hear(self) -> None:
        """How far the server is; it would wait for us if we did not."""
        for phase in self._parties.phases():
            self._phase = phase

    def _collect(self) -> None:
        """Check the sums that the server has learned since the last look."""
        for path in self._parties.notes.glob("average-*[0-9].npz"):
            with np.load(path) as stored:
                record, total = json.loads(str(stored["record"])), stored["average"]
            self._sums.append(check_sum(record, total, self._chaos.dimension, self._chaos.clients))
            self._grown = time.monotonic()
            path.unlink()

    def _mind_the_dead(self, apart: BaseProcess | None) -> None:
        server = self._parties.serving
        if server.exitcode is not None and server is not apart:
            if server is not self._filled:
                raise self._parties.failure("server", server.exitcode)
            self._found.outcomes["servers_ended_by_disk"] += 1
            self._parties.start_server()
        for client, process in self._parties.clients.items():
            if process.exitcode is not None and process is not apart:
                raise self._parties.failure(f"client-{client}", process.exitcode)

    # -- what happens ------------------------------------------------------------------------

    def _kill(self, find: Callable[[], BaseProcess]) -> None:
        """`find` whom after the look, which starts another server if a full disk has ended one."""
        self._look()
        process = find()
        process.kill()
        process.join()

    def _kill_serving(self) -> None:
        self._kill(lambda: self._parties.serving)

    def _kill_server(self) -> None:
        self._kill_serving()
        self._hear()
        self._found.killed_in[self._phase or "start"] += 1
        self._phase = ""
        self._parties.start_server()

    def _kill_client(self) -> None:
        client = self._rng.randrange(self._chaos.clients)
        self._kill(lambda: self._parties.clients[client])
        self._parties.start_client(client)

    def _stop(self) -> None:
        """The server, as often as all clients together."""
        clients = list(self._parties.clients.values())
        process = self._rng.choice([*clients, *[self._parties.serving] * len(clients)])
        send(process, signal.SIGSTOP)
        self._soon(_LONGEST_STOP, partial(send, process, signal.SIGCONT))

    def _partition(self) -> None:
        """One client, some, or all of them."""
        everybody = range(self._chaos.clients)
        cut = self._rng.sample(everybody, self._rng.choice([1, 2, len(everybody)]))
        self._network.partition(cut)
        self._soon(_LONGEST_PARTITION, partial(self._network.heal, cut))

    def _fill_disk(self) -> None:
        self._filled = self._parties.serving
        limit_files(self._filled, 0)
        self._soon(_LONGEST_DISK, partial(limit_files, self._filled, None))

    def _soon(self, longest: float, undo: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + self._rng.uniform(0.1, longest), undo))

    def _flip(self) -> None:
        if self._rng.random() < 1 / 4:
            self._flip_ledger(self._rng.randrange(self._chaos.clients))
        else:
            self._flip_state()
        self._grown = time.monotonic()

    def _flip_state(self) -> None:
        """Of the server, while nobody can reach it: it promises nothing that is then put back."""
        self._kill_serving()
        self._network.refuse(refusing=True)
        backup = self._folder / "backup"
        shutil.copytree(self._parties.state, backup)
        try:
            before = memory_of(backup, self._session, self._folder / "copy")
            if before.unheard:
                settle(self._parties.state, self._session)
            flip_a_byte(self._rng.choice(checksummed_files(self._parties.state)), self._rng)
            self._parties.start_server()
            server = self._parties.serving
            self._wait(lambda: server.exitcode is not None or self._is_listening(), apart=server)
            if server.exitcode is not None:
                self._expect_refusal("server")
            else:
                server.kill()
                server.join()
                after = memory_of(self._parties.state, self._session, self._folder / "copy")
                harmless = before.survived_in(after)
                self._found.outcomes["harmless_flips" if harmless else "unnoticed"] += 1
        finally:
            self._parties.serving.kill()
            self._parties.serving.join()
            shutil.rmtree(self._parties.state)
            backup.rename(self._parties.state)
            self._network.refuse(refusing=False)
        self._parties.start_server()

    def _flip_ledger(self, client: int) -> None:
        self._kill(lambda: self._parties.clients[client])
        ledger = self._parties.made.clients[client].with_name("ledger")
        intact, begun = ledger.read_bytes(), self._starts(client)
        try:
            flip_a_byte(ledger, self._rng)
            self._parties.start_client(client)
            process = self._parties.clients[client]
            self._wait(
                lambda: process.exitcode is not None or self._starts(client) > begun, apart=process
            )
            if process.exitcode is not None:
                self._expect_refusal(f"client-{client}")
            else:
                self._found.outcomes["unnoticed"] += 1
        finally:
            self._parties.clients[client].kill()
            self._parties.clients[client].join()
            ledger.write_bytes(intact)
        self._parties.start_client(client)

    def _expect_refusal(self, name: str) -> None:
        """It has named what is damaged, in words of its own."""
        words = self._parties.last_words_of(name)
        if not words or words.startswith("unforeseen"):
            raise Aborted(f"the {name} ended by a flipped byte: {words or 'without a word'}")
        self._found.outcomes["refused_flips"] += 1

    def _starts(self, client: int) -> int:
        path = self._parties.notes / f"notes-{client}.jsonl"
        return path.read_text(encoding="utf-8").count('"started"') if path.exists() else 0

    def _change(self) -> None:
        """A server with other parameters: only what it owes may finish, or what is allowed."""
        change, allowed = self._rng.choice(_changes(self._chaos))
        self._kill_serving()
        with closing(Journal(self._parties.state, self._session)) as journal:
            first = journal.next_round()
        self._parties.start_server(*change)
        self._wait(lambda: self._answered_since(first))
        self._kill_serving()
        self._collect()
        if not allowed and any(each.round >= first for each in self._sums):
            self._found.outcomes["accepted"] += 1
        else:
            self._found.outcomes["allowed_changes" if allowed else "refused_changes"] += 1
        self._parties.start_server()
        self._grown = time.monotonic()

    def _answered_since(self, first: int) -> bool:
        """Whether clients have taken part in a round, or have said why they do not."""
        return any(each.round >= first for each in self._sums) or any(
            record["withdrawn"]
            for record in history_of(self._parties.state)
            if record["round"] >= first
        )

    def _is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5):
            return True
        return False

    def _end(self) -> None:
        """Nothing happens any more: rounds finish, the server stops when told, and says goodbye."""
        for _, undo in self._later:
            undo()
        self._later = []
        enough = len(self._sums) + _AFTERWARDS
        self._wait(lambda: len(self._sums) >= enough)
        server = self._parties.serving
        server.terminate()
        self._wait(lambda: server.exitcode is not None, apart=server)
        with closing(Journal(self._parties.state, self._session)) as journal:
            completed = (journal.load_model() or (0, b""))[0]
        self._parties.start_server(f"rounds.number={completed + 1}")
        last = self._parties.serving
        everybody = [last, *self._parties.clients.values()]
        until = time.monotonic() + self._chaos.patience
        while any(process.exitcode is None for process in everybody):
            self._ask()
            self._hear()
            if time.monotonic() > until:
                raise _HangError
            time.sleep(_LOOK)
        codes = [process.exitcode for process in (server, *everybody)]
        if any(codes):
            raise Aborted(f"exit codes of the server, twice, and of the clients: {codes}")


_FAULTS: dict[str, Callable[[Campaign], None]] = {
    "server_kills": Campaign._kill_server,
    "client_kills": Campaign._kill_client,
    "stops": Campaign._stop,
    "partitions": Campaign._partition,
    "disks": Campaign._fill_disk,
    "flips": Campaign._flip,
    "changes": Campaign._change,
}


def _changes(chaos: RoundChaos) -> list[tuple[tuple[str, ...], bool]]:
    """Other parameters of a server, and whether the clients' policies allow them."""
    weak = 'aggregation.threat_model="honest-but-curious"'
    return [
        ((f"aggregation.privacy={chaos.privacy - 1}",), False),
        ((weak,), False),
        (("aggregation.bound=2.0",), False),
        (('aggregation.protocol="plain"', weak), False),
        ((f"aggregation.dropouts={chaos.dropouts - 1}",), True),
    ]

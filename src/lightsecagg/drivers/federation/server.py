"""The Server Manager of Section 6: the rounds of one federation, from the first to goodbye.

`peers` turns the transport's events into greetings and messages, `server_round` drives one round.
What must survive a crash is in the journal before it is acknowledged or announced. After a crash
the last round is resumed if an upload had been acknowledged; otherwise it is dropped and a new one
starts.

A sum that cannot be averaged or applied (somebody uploaded what it must not) harms its round only:
the round is aborted, in the journal too, and the model stays what it was (S41). A model is stored
before it is evaluated, so a failing evaluation costs nothing but its figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightsecagg.drivers.federation.callbacks import Callbacks, ServerCallback
from lightsecagg.drivers.federation.checkpoints import Checkpoints
from lightsecagg.drivers.federation.config import AggregationTable, RoundsTable
from lightsecagg.drivers.federation.history import History
from lightsecagg.drivers.federation.jobs import ServerJob
from lightsecagg.drivers.federation.journal import Journal, PendingRound
from lightsecagg.drivers.federation.membership import Membership, MembersInUse
from lightsecagg.drivers.federation.observer import Metrics, log
from lightsecagg.drivers.federation.peers import Greeted, Peers
from lightsecagg.drivers.federation.selection import choose
from lightsecagg.drivers.federation.server_round import COMEBACK, Progress, ServerRound
from lightsecagg.drivers.federation.stopping import EarlyStopping
from lightsecagg.drivers.transport.communicator import ServerCommunicator
from lightsecagg.errors import (
    Aborted,
    ConfigurationError,
    JournalError,
    LightSecAggError,
    ParameterError,
)
from lightsecagg.foreign import explain, where
from lightsecagg.params import Parameters
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import (
    Aggregate,
    Output,
    Persist,
    Phase,
    SurvivorsChosen,
    UploadTaken,
)
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg.session.budgets import backlog_limit
from lightsecagg.session.envelope import (
    Goodbye,
    RoundModel,
    RoundOver,
    UploadStored,
    pack_control,
)
from lightsecagg.session.record import RoundRecord, listed

_GOODBYE_TIMEOUT = 5.0
_SPOILT = "the sum is spoilt: it cannot be used"
"""What clients hear. More would tell a liar about the others' part of the sum."""


def make_settings(
    table: AggregationTable, job: ServerJob, session: bytes, allow_list: AllowList
) -> Settings:
    """What a configuration asks for, but for the number and the model of a round.

    N is the most that a round takes: no more than there are members. T and D stay what they are.
    SecAgg's U is its threshold t, by default the smallest that its threat model allows; SecAgg+'s
    t and degree k are found from N, T and D.
    """
    traits = traits_of(table.protocol)
    clients = min(table.clients, len(allow_list))
    parameters = Parameters(
        clients=clients,
        privacy=table.privacy,
        dropouts=table.dropouts,
        survivors=0 if traits.has_threshold else table.survivors,
        threat_model=table.threat_model,
        share_mode=table.share_mode,
        modulus=table.modulus,
    )
    threshold = table.survivors if traits.has_threshold else 0
    neighbours = table.neighbours if traits.ring else 0
    parameters, neighbours, threshold = traits.resolve(parameters, neighbours, threshold)
    quantizer = make_quantizer(
        parameters,
        job.dimension,
        table.bound,
        max_samples=table.max_samples if job.weighted else 1,
        weighted=job.weighted,
        decoding=table.decoding,
    )
    return Settings(
        protocol=traits.name,
        parameters=parameters,
        quantizer=quantizer,
        dimension=job.dimension,
        session=session,
        round=0,
        allow_list=allow_list.digest,
        neighbours=neighbours,
        threshold=threshold,
    )


class FederationServer:
    """Runs the rounds of one federation."""

    def __init__(
        self,
        settings: Settings,
        rounds: RoundsTable,
        allow_list: AllowList,
        communicator: ServerCommunicator,
        job: ServerJob,
        journal: Journal,
        metrics: Metrics | None = None,
        progress: Progress | None = None,
        trace: Path | None = None,
        callbacks: Iterable[ServerCallback] = (),
        stopping: EarlyStopping | None = None,
        members: MembersInUse | None = None,
        settings_for: Callable[[AllowList], Settings] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`settings` as `make_settings` makes them; each round fills in its number and model.

        With `members` the allow-list may change between rounds; `settings_for` says what they
        are with another one.
        """
        self._settings, self._rounds = settings, rounds
        self._allow_list = allow_list
        self._communicator, self._job, self._journal = communicator, job, journal
        self._metrics = metrics or Metrics()
        self._progress = progress or (lambda phase, done, expected: None)
        self._trace = trace
        self._callbacks, self._early = Callbacks(callbacks), stopping
        self._members, self._settings_for = members, settings_for
        self._checkpoints = checkpoints or Checkpoints(journal)
        self._history = History(journal.folder / "rounds.json")
        self._peers = Peers(communicator, len(allow_list))
        self._stopping = asyncio.Event()
        self._completed = 0
        self.records: list[RoundRecord] = []

    # -- the whole federation ----------------------------------------------------------------

    async def run(self, *, abandon: bool = False) -> list[RoundRecord]:
        """All rounds, from wherever the journal stands; returns the records of this run.

        `abandon` gives up a round that a crash left unfinished: always safe, its updates are lost.
        A server that was told to stop says no goodbye: its clients wait for it to come back. One
        that was restarted does not end before they had the time to hear its goodbye.
        """
        try:
            restarted = self._journal.next_round() > 1
            comeback = time.monotonic() + COMEBACK if restarted else 0.0
            self._restore_model()
            if abandon:
                for number in self._journal.unfinished():
                    log.warning("round %d is abandoned as demanded", number)
                    self._journal.abandon(number, "abandoned by the operator")
            await self._peers.start()
            self._look_back()
            if self._members is not None:
                self._peers.use_members(self._members.current)
            await self._resume_unfinished()
            if self._members is not None:
                self._members.settle()
            self._recall()
            while (end := self._end()) is None and not self._stopping.is_set():
                await self._one_round()
            if end is not None:
                await self._say_goodbye(end, True, comeback)
            else:
                log.info("stopped with %s; clients wait for this server to come back", self._score)
        except Aborted as error:
            await self._say_goodbye(str(error), False)
            raise
        finally:
            await self._peers.close()
            self._journal.close()
            self._metrics.close()
            await asyncio.to_thread(self._callbacks.close)
        return self.records

    def stop(self) -> None:
        """Finish the current round, then end (SIGTERM)."""
        self._stopping.set()

    def _end(self) -> str | None:
        """Why no round follows; None if one does."""
        if self._completed >= self._rounds.number:
            return "the federation has finished"
        return None if self._early is None else self._early.reason(self._completed)

    def _look_back(self) -> None:
        """Early stopping counts the rounds before a restart too."""
        if self._early is not None:
            for record in self._history.records():
                self._early.observe(record)

    def _restore_model(self) -> None:
        stored = self._journal.load_model()
        if stored is None:
            return
        self._completed, data = stored
        try:
            self._job.load(data)
        except LightSecAggError:
            raise
        except Exception as error:
            raise JournalError(
                "the checkpoint is of another kind of job; use the old configuration or another "
                f"state folder ({where(error)})"
            ) from error
        log.info("resuming after %d completed rounds", self._completed)

    async def _resume_unfinished(self) -> None:
        """Resume the round that a crash cut short."""
        for number in self._journal.unfinished():
            try:
                pending = self._journal.pending(number)
            except JournalError as error:
                raise JournalError(
                    f"{error}; restore it, or give the round up with --abandon-round"
                ) from error
            if pending is None:
                log.info("round %d had no acknowledged upload; it is dropped", number)
                self._journal.abandon(number, "dropped after a crash")
                continue
            allow_list = self._allow_list_of(pending.settings)
            if allow_list is None:
                log.warning("round %d began with a lost allow-list; it is dropped", number)
                self._journal.abandon(number, "its allow-list is lost")
                continue
            log.info(
                "resuming round %d: %d uploads are stored, U1 %s",
                number,
                len(pending.uploaded),
                "was announced" if pending.survivors else "is open",
            )
            await self._resume(number, pending, allow_list)

    def _allow_list_of(self, settings: Settings) -> AllowList | None:
        """The list that a round began with, which may be older than the one in use."""
        if self._members is not None:
            return self._members.allow_list(settings.allow_list)
        return self._allow_list if self._allow_list.digest == settings.allow_list else None

    def _recall(self) -> None:
        """Rounds that are over in the journal alone: a crash or a full disk came in between."""
        missing = []
        for number, aborted in self._journal.ended().items():
            if number in self._history:
                continue
            record = RoundRecord(number, str(self._settings.protocol), [], recalled=True)
            record.aborted = aborted
            if aborted is None:
                record.included = list(self._journal.announced(number) or ())
            missing.append(record)
        if missing:
            self._history.put(*missing)

    @property
    def _score(self) -> str:
        return f"{self._completed} of {self._rounds.number} rounds done"

    async def _one_round(self) -> None:
        """Try until a round completes, or the server was told to stop."""
        reason = ""
        for attempt in range(self._rounds.retries + 1):
            invited = await self._wait_for_clients()
            if self._stopping.is_set():
                return
            record = await self._run_round(invited)
            if record.aborted is None:
                return
            reason = record.aborted
            if self._stopping.is_set():
                return
            if attempt < self._rounds.retries:
                log.info("trying again: attempt %d of %d", attempt + 2, self._rounds.retries + 1)
        attempts, number = self._rounds.retries + 1, self._completed + 1
        raise Aborted(f"{attempts} attempts at round {number}: {reason}")

    def _bound_to(self) -> list[int]:
        """The clients of a failed round from the current model whose U1 was announced.

        Those who signed for it will sum the same clients again, and no others (S42).
        """
        model = self._job.model()
        bound = sorted(self._journal.announced_for(hash_model(model)) or ()) if model else []
        revoked = [client for client in bound if client not in self._allow_list]
        if revoked:
            log.warning(
                "clients %s of the failed round were revoked since: the others will refuse to sum "
                "without them until their operators forgive the model (`lightsecagg ledger`)",
                listed(revoked),
            )
            return []
        return bound

    def _look_for_members(self) -> bool:
        """Between rounds: whether there is another allow-list, which is in use from now on."""
        if self._members is None or self._settings_for is None:
            return False
        found = self._members.newer()
        if found is None:
            return False
        try:
            settings = self._settings_for(found.allow_list)
        except ParameterError as error:
            raise ConfigurationError(
                f"allow-list number {found.number} has {len(found.allow_list)} clients, too few "
                f"for [aggregation]: {error}; add clients, or change it and start again"
            ) from error
        self._use_members(found, settings)
        self._members.settle()
        return True

    def _use_members(self, members: Membership, settings: Settings) -> None:
        known, now = set(self._allow_list.clients), set(members.allow_list.clients)
        self._allow_list, self._settings = members.allow_list, settings
        self._communicator.admit(frozenset(now), members.revoked)
        self._peers.use_members(members)
        log.info(
            "allow-list number %d is in use: added clients: %s; removed: %s; N = %d, T = %d, "
            "D = %d, U = %d",
            members.number,
            listed(now - known) or "none",
            listed(known - now) or "none",
            settings.parameters.clients,
            settings.parameters.privacy,
            settings.parameters.dropouts,
            settings.parameters.survivors,
        )

    async def _wait_for_clients(self) -> list[int]:
        """Enough connected clients, at most N; a rerun wants the same again."""
        parameters, wanted = self._settings.parameters, self._bound_to()
        # Before the first round all that are admitted get `settle` seconds to come, or those with
        # the fastest start would be chosen for it.
        most = parameters.clients if self.records else len(self._allow_list)
        least = self._rounds.min_clients or (parameters.clients - parameters.dropouts)
        least = max(min(least, parameters.clients), self._settings.minimum)
        now = time.monotonic()
        deadline, settled = now + self._rounds.wait_for_clients, now + self._rounds.settle
        self._say_who_is_awaited(wanted, least)
        while not self._stopping.is_set():
            if self._look_for_members():
                return await self._wait_for_clients()
            ready, now = self._peers.ready(), time.monotonic()
            self._metrics.connected = len(ready)
            if wanted and set(wanted) <= set(ready):
                return wanted
            enough = len(ready) >= most or (len(ready) >= least and now >= settled)
            if wanted and enough and now >= deadline:
                absent = sorted(set(wanted) - set(ready))
                log.warning("clients %s of the failed round are away, others will refuse", absent)
                return self._choose(ready, wanted)
            if enough and not wanted:
                return self._choose(ready)
            if len(ready) < least:
                settled = now + self._rounds.settle
                if now >= deadline:
                    raise Aborted(
                        f"only {len(ready)} clients connected within "
                        f"{self._rounds.wait_for_clients:g} s, {least} are needed"
                    )
            self._progress("connect", len(ready), parameters.clients)
            # Messages of a round that is over concern nobody any more.
            event = await self._peers.next(0.1)
            if isinstance(event, Greeted) and event.round >= 0:
                over = RoundOver(event.round, "that round is over")
                self._peers.post(event.client, pack_control(over))
        return []

    def _say_who_is_awaited(self, wanted: list[int], least: int) -> None:
        here = len(self._peers.ready())
        if wanted:
            log.info("waiting for clients %s of the failed round", listed(wanted))
        elif here < least:
            most = self._settings.parameters.clients
            log.info("waiting for clients: %d here, %d needed, N = %d at most", here, least, most)

    def _choose(self, ready: list[int], wanted: list[int] | None = None) -> list[int]:
        return choose(
            ready,
            self._settings.parameters.clients,
            self._journal.next_round(),
            sampling=self._rounds.sampling,
            seed=self._rounds.seed,
            invited=self._history.invited,
            first=wanted or (),
        )

    # -- one round ---------------------------------------------------------------------------

    async def _run_round(self, invited: list[int]) -> RoundRecord:
        number, model = self._journal.next_round(), self._job.model()
        instructions = self._job.instructions(self._completed)
        settings = replace(
            self._settings,
            round=number,
            model=hash_model(model or number.to_bytes(8, "big")),
            instructions=b"" if instructions is None else instructions.digest,
        )
        self._journal.open_round(settings)
        count = len(invited)
        log.info(
            "round %d begins with %d clients: %s (%s)", number, count, listed(invited), self._score
        )
        party = RoundServer(settings, self._allow_list, invited, durable=True)
        self._peers.backlog = backlog_limit(settings, len(model))
        announcement = pack_control(
            RoundModel(number, model, settings.quantizer.bound, instructions)
        )
        uploaders = self._journal.uploaders()
        self._callbacks.tell("round_begins", number, list(invited))
        for client in invited:
            if client in uploaders:
                self._peers.post(client, pack_control(UploadStored(uploaders[client])))
            self._peers.post(client, announcement)
        driver = self._driver(party, invited)
        driver.record.local = {} if instructions is None else dict(instructions.local)
        return await self._finish(driver, party.start())

    def _driver(
        self, party: RoundServer, members: Iterable[int], stored: Iterable[int] | None = None
    ) -> ServerRound:
        return ServerRound(
            party,
            members,
            self._rounds,
            self._peers,
            self._communicator,
            self._journal,
            self._progress,
            stored,
        )

    async def _resume(self, number: int, pending: PendingRound, allow_list: AllowList) -> None:
        members = [member.client for member in pending.roster.members]
        party = RoundServer.resume(pending.settings, allow_list, pending.roster, pending.closed)
        self._peers.backlog = backlog_limit(pending.settings, len(self._job.model()))
        outputs: list[Output] = []
        for client in sorted(pending.uploaded):
            upload = self._journal.load_upload(number, client)
            try:
                for output in party.receive(client, upload):
                    if isinstance(output, Persist) and isinstance(output.record, UploadTaken):
                        stored = self._journal.upload(number, client)
                        outputs += party.stored(output.record, stored)
            except Exception as error:
                # What no one foresaw counts as a refusal, or every restart would end here (S41).
                log.warning("round %d: a stored upload is refused: %s", number, explain(error))
                self._journal.discard_upload(number, client)
        if pending.survivors is not None:
            if party.phase is Phase.UPLOAD:
                outputs += party.proceed()
            if Persist(SurvivorsChosen(pending.survivors)) not in outputs:
                raise JournalError(
                    f"round {number}: the stored uploads do not give the survivor set that was "
                    "announced; refusing to announce another"
                )
        await self._finish(self._driver(party, members, stored=pending.uploaded), outputs)

    async def _finish(self, round_: ServerRound, outputs: list[Output]) -> RoundRecord:
        record = await round_.drive(outputs)
        if record.aborted is None and round_.aggregate is not None:
            await self._digest(round_.party.settings, round_.aggregate, record)
        elif record.aborted is None:
            record.aborted = "no result"
        if record.aborted is None:
            await self._evaluate(record)
            await asyncio.to_thread(self._checkpoints.note, self._completed, record.to_json())
        self._say_how_it_ended(record)
        self._judge(record)
        if record.aborted is not None:
            self._journal.abandon(record.round, record.aborted)
        over = RoundOver(record.round, _SPOILT if record.spoilt else record.aborted)
        for client in round_.members:
            self._peers.post(client, pack_control(over))
        self.records.append(record)
        self._metrics.connected = len(self._peers.ready())
        self._metrics.record(record)
        await asyncio.to_thread(self._history.put, record)
        self._callbacks.tell("round_ended", record)
        return record

    def _judge(self, record: RoundRecord) -> None:
        """Whether this round is the last, by the rule of early stopping."""
        if self._early is None:
            return
        if not self._early.observe(record.to_json()):
            log.warning("round %d has no figure of [early_stopping] to judge by", record.round)
        record.stopped = self._early.reason(self._completed)

    def _say_how_it_ended(self, record: RoundRecord) -> None:
        if record.aborted is not None:
            reason = "round %d was aborted after %.1f s: %s"
            log.warning(reason, record.round, record.seconds, record.aborted)
            return
        figures = "".join(f"; {text}" for text in record.told_figures())
        log.info(
            "round %d is done after %.1f s: %d of %d clients included%s (%s)",
            record.round,
            record.seconds,
            len(record.included),
            len(record.invited),
            figures,
            self._score,
        )

    async def _digest(self, settings: Settings, aggregate: Aggregate, record: RoundRecord) -> None:
        """Average, step and store; or leave model and optimiser alone and call the round spoilt."""
        before = self._job.save()
        completed = self._completed + 1
        try:
            average, samples = await asyncio.to_thread(
                settings.average, aggregate.total, len(aggregate.included)
            )
            await asyncio.to_thread(self._job.apply, average, samples, completed)
            steps = len(aggregate.included) + record.noise
            rounding = steps * record.quantisation_step / samples
            record.metrics = self._job.metrics(average, rounding)
            after = self._job.save()
        except (ConfigurationError, JournalError):
            raise  # nobody lied: whoever mends it and starts again resumes this round
        except Exception as error:
            self._job.load(before)
            record.spoilt = True
            record.aborted = f"{_SPOILT}: {explain(error)}"
            foreign = not isinstance(error, LightSecAggError)
            log.error("round %d: %s", record.round, record.aborted, exc_info=foreign)
            return
        record.samples = samples
        if self._trace is not None:
            np.savez(self._trace / f"average-{record.round}.npz", average=average)
        await asyncio.to_thread(self._journal.complete, record.round, completed, after)
        self._completed = completed

    async def _evaluate(self, record: RoundRecord) -> None:
        """The figures of a model that is stored already; whatever fails here, the round is done."""
        try:
            figures = await asyncio.to_thread(self._job.evaluate)
            record.figures = {name: float(value) for name, value in figures.items()}
        except Exception:
            reason = "round %d is done and its model stored, but evaluating it failed"
            log.warning(reason, record.round, exc_info=True)

    async def _say_goodbye(self, reason: str, finished: bool, comeback: float = 0.0) -> None:
        """Tell everybody who is here and, until `comeback`, those who come back."""
        goodbye = pack_control(Goodbye(reason, finished))
        told = set(self._peers.ready())
        for client in told:
            self._peers.post(client, goodbye)
        log.info("goodbye to %d clients: %s", len(told), reason)
        self._callbacks.tell("finished", reason)
        absent = set(self._allow_list.clients) - told
        if absent and time.monotonic() < comeback:
            log.info("all rounds are done; waiting for clients that come back, to tell them")
        while absent and time.monotonic() < comeback and not self._stopping.is_set():
            event = await self._peers.next(0.1)
            if isinstance(event, Greeted):
                self._peers.post(event.client, goodbye)
                absent.discard(event.client)
        await self._peers.drain(_GOODBYE_TIMEOUT)

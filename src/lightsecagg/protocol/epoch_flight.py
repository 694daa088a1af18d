"""A buffer in flight at the server: from its announcement to its result.

    agree      malicious-server mode: m signatures on (C1, t, tags)
    recover    U answers decode the weighted sum of the masks in one shot

Sums of whole vectors are jobs (`jobs`): that of the uploads from the moment when the buffer is
announced, the recovery when enough answers are in. Answers of those who hold a doubtful share of
one of its masks are not used.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightsecagg.errors import RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.buffers import buffer_statement, buffer_terms, buffer_weights
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.jobs import Compute, Job, SumUploads, Unmask, Upload
from lightsecagg.protocol.messages import (
    AggregatedShare,
    Certificate,
    SumRequest,
)
from lightsecagg.protocol.roles.agreement import Agreement
from lightsecagg.protocol.schemes.interface import Answer, MaskSum, ServerScheme


class Flight:
    """One buffer: who consents to it, who answers for it, and what is being computed."""

    def __init__(
        self,
        scheme: ServerScheme,
        allow_list: AllowList,
        buffering: Buffering,
        buffer: SumRequest,
        uploads: Sequence[Upload],
        holders: frozenset[int],
    ) -> None:
        """`holders`: of good shares of all its masks; `uploads`: in the order of its tags."""
        self.buffer = buffer
        self.uploads = list(uploads)
        self.holders = holders
        self.collected = False
        """All that can still become of the buffer is a result."""
        self.answers: dict[int, Answer] = {}
        self._scheme, self._settings = scheme, scheme.settings
        self._masked_sum: Elements | None = None
        weights = buffer_weights(scheme.round, buffering, buffer)
        self.asked = MaskSum(buffer_terms(buffer, weights), frozenset(scheme.round.members))
        self._summing: SumUploads | None = SumUploads(
            self._settings.field, self._settings.length, self.uploads, weights
        )
        self._unmasking: Unmask | None = None
        self.agreement = Agreement(
            self._settings.parameters.quorum,
            allow_list,
            buffer_statement(scheme.round.context, buffer),
            scheme.round.members,
            self.asked.in_sum,
        )
        malicious = self._settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        self.phase = Phase.AGREE if malicious else Phase.RECOVER

    @property
    def time(self) -> int:
        """t"""
        return self.buffer.time

    @property
    def weights(self) -> tuple[int, ...]:
        """w(t - t_i), by owner."""
        return tuple(term.weight for term in self.asked.terms)

    @property
    def jobs(self) -> list[Compute]:
        """What is being computed, or has to be again after a crash."""
        return [Compute(job) for job in (self._summing, self._unmasking) if job is not None]

    @property
    def certificate(self) -> Certificate:
        """m signatures."""
        return Certificate(self.time, self.agreement.certificate)

    @property
    def good_answers(self) -> dict[int, Answer]:
        """The answers of those who hold good shares of all the buffer's masks."""
        return {c: answer for c, answer in self.answers.items() if c in self.holders}

    def on_answer(self, sender: int, message: AggregatedShare) -> bool:
        """Take an answer; False if it comes again or too late."""
        if self.phase is not Phase.RECOVER:
            raise RemoteProtocolError(f"client {sender} answered before the agreement")
        self._scheme.check_answer(self.asked, sender, message)
        if (known := self.answers.get(sender)) is not None and message != known:
            raise RemoteProtocolError(f"client {sender} gave two different answers")
        if known is not None or self.collected:
            return False
        self.answers[sender] = message
        return True

    def collect(self) -> list[Compute]:
        """No more answers: recover the masks, if the uploads are summed."""
        self.collected = True
        return self._unmask_if_ready()

    def asked_for(self, job: Job) -> bool:
        """Whether this buffer waits for the result of a job."""
        return job is self._summing or job is self._unmasking

    def summed(self, job: Job, result: Elements) -> list[Compute] | None:
        """Take the sum of the uploads; None if the job was the last, and this the result."""
        if job is not self._summing:
            return None
        self._summing, self._masked_sum = None, result
        return self._unmask_if_ready()

    @property
    def suspects(self) -> tuple[int, ...]:
        """Whose answers contradict the others."""
        return () if self._unmasking is None else self._unmasking.suspects

    def _unmask_if_ready(self) -> list[Compute]:
        if self._masked_sum is None or not self.collected:
            return []
        masks = self._scheme.recovery(self.asked, self.good_answers)
        self._unmasking = Unmask(self._masked_sum, masks)
        self._masked_sum = None
        return [Compute(self._unmasking)]

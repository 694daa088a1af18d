"""Recovery: one sum at the server, from its announcement to its result.

    agree      malicious-server mode: m signatures on the statement of the sum
    recover    answers, from which the scheme finds the sum of the masks

Sums of whole vectors are jobs (`jobs`): that of the uploads from the moment when the sum is
announced, that of the masks when the answers are in. Answers of those who hold a doubtful share of
one of its masks are not used; nor, while there are enough others, those of whom they accuse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lightsecagg.errors import RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.jobs import Compute, Job, SumUploads, Unmask, Upload
from lightsecagg.protocol.messages import Certificate, SumRequest
from lightsecagg.protocol.roles.agreement import Agreement, Statement
from lightsecagg.protocol.schemes.interface import Answer, MaskSum, ServerScheme


class Recovery:
    """Who consents to a sum, who answers for it, and what is being computed."""

    def __init__(
        self,
        scheme: ServerScheme,
        allow_list: AllowList,
        statement: Statement,
        request: SumRequest,
        asked: MaskSum,
        clients: Collection[int],
        holders: Iterable[int],
        trusted: Iterable[int],
        uploads: Sequence[Upload],
    ) -> None:
        """`uploads`: in the order of the terms of what is `asked`.

        * `clients`: who is asked; `holders`: those of them whose shares are all good.
        * `trusted`: those of the holders who are in no quarrel. If enough of them answer, no other
          answer is used: whoever quarrels leaves with the other, and one of the two lied (R59).
        """
        self.request, self.asked = request, asked
        self.clients, self.holders = frozenset(clients), frozenset(holders)
        self.trusted = self.holders & frozenset(trusted)
        self.collected = False
        """All that can still become of it is a result."""
        self.answers: dict[int, Answer] = {}
        self.suspects: tuple[int, ...] = ()
        """Whose answers contradict the others; known with the result."""
        settings = scheme.settings
        self.agreement = Agreement(
            settings.parameters.quorum, allow_list, statement, clients, asked.owners
        )
        self._scheme = scheme
        self._masked_sum: Elements | None = None
        self._summing: SumUploads | None = SumUploads(
            settings.group, settings.length, uploads, self.weights
        )
        self._unmasking: Unmask | None = None

    @property
    def first_phase(self) -> Phase:
        """Whether anybody has to agree before it is answered for."""
        malicious = self._scheme.settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        return Phase.AGREE if malicious else Phase.RECOVER

    @property
    def time(self) -> int:
        """By which consents, answers and refusals name it."""
        return self.request.time

    @property
    def weights(self) -> tuple[int, ...]:
        """Of the updates, in the order of the terms."""
        return tuple(term.weight for term in self.asked.terms)

    @property
    def certificate(self) -> Certificate:
        """m signatures."""
        return Certificate(self.time, self.agreement.certificate)

    @property
    def good_answers(self) -> dict[int, Answer]:
        """The answers that count, of those who hold good shares of all its masks."""
        trusted = self.answers.keys() & self.trusted
        used = trusted if self._scheme.suffice(self.asked, trusted) else self.holders
        return {c: answer for c, answer in self.answers.items() if c in used}

    def on_answer(self, sender: int, message: Answer) -> bool:
        """Take an answer; False if it comes again or too late."""
        if sender not in self.clients:
            raise RemoteProtocolError(f"client {sender} is not asked to answer for this sum")
        if (known := self.answers.get(sender)) is not None:
            if message != known:
                raise RemoteProtocolError(f"client {sender} gave two different answers")
            return False
        self._scheme.check_answer(self.asked, sender, message)
        if not self.collected:
            self.answers[sender] = message
        return not self.collected

    # -- jobs --------------------------------------------------------------------------------

    @property
    def jobs(self) -> list[Compute]:
        """What is being computed, or has to be again after a crash."""
        return [Compute(job) for job in (self._summing, self._unmasking) if job is not None]

    def collect(self) -> list[Compute]:
        """No more answers: recover the masks, if the uploads are summed."""
        self.collected = True
        return self._unmask_if_ready()

    def asked_for(self, job: Job) -> bool:
        """Whether it waits for the result of a job."""
        return job is self._summing or job is self._unmasking

    def summed(self, result: Elements) -> list[Compute] | None:
        """Take the result of the job; None if it was the last, and this is the sum."""
        if self._unmasking is not None:
            self.suspects = self._unmasking.suspects
            return None
        self._summing, self._masked_sum = None, result
        return self._unmask_if_ready()

    def end(self) -> None:
        """Wait for nothing any more, and forget what was kept for the result."""
        self._summing = self._unmasking = self._masked_sum = None
        self.answers = {}

    def _unmask_if_ready(self) -> list[Compute]:
        if self._masked_sum is None or not self.collected:
            return []
        masks = self._scheme.recovery(self.asked, self.good_answers)
        self._unmasking = Unmask(self._masked_sum, masks)
        self._masked_sum = None
        return [Compute(self._unmasking)]

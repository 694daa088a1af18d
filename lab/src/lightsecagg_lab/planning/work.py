"""How long the parties compute in each phase: counts of operations times their unit costs.

The counts are those of the complexity analysis, Section 5.2, made exact for this implementation;
the dominant ones are

    LightSecAgg  client, share     N peers; U L elements from seeds; a codeword of L columns
                 server, share     N (N - 1) shares to relay
                 server, recover   one decoding of L columns, whoever dropped
                 short keys        L does not grow with d; client and server stretch d elements
    SecAgg       client, share     k + 1 masks of d elements
                 server, recover   N - D self masks and D (N - D) pairwise masks of d elements
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from lightsecagg.field import ntt
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.schemes.traits import CodedMaskTraits, Traits
from lightsecagg.protocol.settings import Settings
from lightsecagg_lab.planning.traffic import PHASES, ShareCounts, share_counts
from lightsecagg_lab.planning.unit_costs import UnitCosts
from lightsecagg_lab.schemes.baseline_traits import PairwiseMaskTraits


@dataclass(slots=True)
class PhaseWork:
    """CPU seconds of one phase."""

    client: float = 0.0
    server: float = 0.0
    server_relaying: float = 0.0
    """The part of `server` that relaying shares takes."""
    server_spread: float = 0.0
    """The part of `server` that is cut by columns, so that several cores can share it."""

    def on(self, cores: int) -> PhaseWork:
        """The same at a server with so many cores, which share perfectly what they can share."""
        saved = self.server_spread * (1 - 1 / cores)
        return replace(self, server=self.server - saved, server_spread=self.server_spread - saved)


def forecast_work(settings: Settings, dropped: int, costs: UnitCosts) -> dict[Phase, PhaseWork]:
    """The work of a round in which everybody shares and all but `dropped` upload and answer."""
    kind = next((work for kind, work in _KINDS.items() if isinstance(settings.traits, kind)), _Work)
    return kind(settings, dropped, costs).phases


class _Work:
    """What parties do whatever the scheme; of masks, what follows from the sizes of shares."""

    def __init__(self, settings: Settings, dropped: int, costs: UnitCosts) -> None:
        self.settings, self.costs = settings, costs
        self.N = settings.parameters.clients
        self.alive = self.N - dropped
        self.dropped = dropped
        self.d, self.L = settings.length, settings.share_length
        self.shares = share_counts(settings)
        self.phases = {phase: PhaseWork() for phase in PHASES}
        self._upload()
        if Phase.SHARE in settings.traits.phases:
            self._advertise()
            self._agree()
            self._relay(self.shares)
            self._share()
            self._recover()

    def _share(self) -> None:
        """Every share is drawn, sealed and opened as a vector of its length."""
        costs, shares = self.costs, self.shares
        long = shares.explicit * shares.explicit_bytes
        drawn = max(self.d, shares.peers * shares.short_bytes // 4)
        self.phases[Phase.SHARE].client = (
            shares.peers * costs.peer + drawn * costs.element + 2 * long * costs.sealed_byte
        )

    def _recover(self) -> None:
        """Every answer sums a share of each survivor, and the server looks at all answers."""
        costs, phase = self.costs, self.phases[Phase.RECOVER]
        elements = self.settings.traits.answer_bytes(self.settings, self.dropped) // 4
        phase.client += self.alive * elements * costs.summed_element
        phase.server += self.alive * (elements * costs.taken_element + costs.survivor)
        self._spread(phase, self.alive * elements * costs.summed_element)
        phase.server += self.d * costs.summed_element

    def _spread(self, phase: PhaseWork, seconds: float) -> None:
        """Work of the server that is cut by columns."""
        phase.server += seconds
        phase.server_spread += seconds

    def _advertise(self) -> None:
        phase = self.phases[Phase.ADVERTISE]
        phase.client = self.costs.advertise
        phase.server = self.N * self.costs.verify

    def _upload(self) -> None:
        phase, costs = self.phases[Phase.UPLOAD], self.costs
        phase.client = self.d * costs.quantised_element
        phase.server = self.alive * (self.d * costs.taken_element + costs.survivor)
        self._spread(phase, self.alive * self.d * costs.summed_element)

    def _relay(self, shares: ShareCounts) -> None:
        each = self.costs.relay + self.N * self.costs.relay_growth
        long = shares.explicit * shares.explicit_bytes * self.costs.relayed_byte
        phase = self.phases[Phase.SHARE]
        phase.server = phase.server_relaying = self.N * (shares.peers * each + long)

    def _agree(self) -> None:
        if self.settings.parameters.threat_model is not ThreatModel.MALICIOUS_SERVER:
            return
        self.phases[Phase.AGREE].client = self.costs.advertise
        self.phases[Phase.AGREE].server = self.alive * self.costs.verify
        quorum = self.settings.parameters.quorum
        self.phases[Phase.RECOVER].client += quorum * self.costs.verify


class _CodedWork(_Work):
    """LightSecAgg."""

    def _share(self) -> None:
        costs, U = self.costs, self.settings.parameters.survivors
        phase, shares = self.phases[Phase.SHARE], self.shares
        elements = U * self.L * costs.element
        peers = shares.peers * costs.peer
        if self.settings.uses_seeds:
            encoding = self._codeword(1.0)
        else:
            peers -= shares.peers * costs.seed
            encoding = self._evaluation()
        bytes_ = 2 * shares.explicit * shares.explicit_bytes * costs.sealed_byte
        # And reports on all N shares, each by coefficients of its own.
        values = BLINDS * self.L
        reports = self._expanded(self.N)
        reports += self.N * (costs.seed + values * (costs.element + 4 * costs.product))
        phase.client = peers + elements + encoding + bytes_ + reports

    def _upload(self) -> None:
        """The server sees whether the reports are codewords."""
        super()._upload()
        costs, phase = self.costs, self.phases[Phase.UPLOAD]
        U, values = self.settings.parameters.survivors, BLINDS * self.N
        if self.settings.has_short_keys:
            phase.client += self.d * (costs.stretched_element + costs.noisy_element)
        phase.server += max(0, self.alive - U) * U * (U + values) * costs.product

    def _expanded(self, shares: int) -> float:
        """Expanding those of so many shares that are seeds."""
        if not self.settings.uses_seeds:
            return 0.0
        seeded = shares * min(1.0, self.settings.parameters.survivors / self.N)
        return seeded * (self.costs.seed + self.L * self.costs.element)

    def _recover(self) -> None:
        costs, phase = self.costs, self.phases[Phase.RECOVER]
        phase.client += self._expanded(self.alive)
        phase.client += self.alive * self.L * costs.summed_element
        phase.server = (
            self.alive * (self.L * costs.taken_element + costs.survivor)
            + self.d * costs.summed_element
        )
        self._spread(phase, self._codeword(0.6))
        if self.settings.has_short_keys:  # and what is left of the noise is looked at
            phase.server += self.d * (costs.stretched_element + 4 * costs.summed_element)
        if self.alive > self.settings.parameters.survivors:  # spare answers are checked
            columns = self.settings.code.check_columns
            phase.server += self.alive * self.L * columns * 4 * costs.product

    def _codeword(self, share: float) -> float:
        """Completing a codeword (share 1) or decoding the mask alone, of L columns."""
        costs, N = self.costs, self.N
        U, pieces = self.settings.parameters.survivors, self.settings.parameters.pieces
        if not ntt.interpolation_pays(self.settings.field, N):
            rows = pieces + (N - U if share == 1.0 else 0)
            return self.L * rows * U * costs.product
        size = ntt.transform_size(N)
        per_column = share * size * log2(size) * costs.butterfly + pieces**2 / 2 * costs.product
        return self.L * per_column + N * N * 40 * costs.product

    def _evaluation(self) -> float:
        """All N shares from the mask and the noise."""
        if not ntt.evaluation_pays(self.settings.field, self.N):
            return self.L * self.N * self.settings.parameters.survivors * self.costs.product
        size = ntt.transform_size(self.N)
        return self.L * 0.5 * size * log2(max(size, 2)) * self.costs.butterfly


class _PairwiseWork(_Work):
    """SecAgg and SecAgg+."""

    def _share(self) -> None:
        costs, k = self.costs, self.shares.peers
        exchanged = k * (costs.secagg_peer - costs.verify)
        masks = (k + 1) * self.d * costs.masked_element
        self.phases[Phase.SHARE].client = (self.N - 1) * costs.verify + exchanged + masks

    def _recover(self) -> None:
        costs = self.costs
        neighbours = self.shares.peers * self.alive / max(self.N - 1, 1)
        orphans = self.dropped * neighbours
        masks = (self.alive + orphans) * (self.d * costs.masked_element + costs.seed)
        rebuilding = self.N * (self.shares.peers + 1) * 16 * self.settings.sharing_threshold
        phase = self.phases[Phase.RECOVER]
        phase.client += costs.advertise
        if self.settings.traits.ring:  # every secret in other hands
            phase.server += self.N * costs.rebuild
        phase.server += (
            orphans * costs.agreement + rebuilding * costs.product + self.alive * costs.survivor
        )
        self._spread(phase, masks)


_KINDS: dict[type[Traits], type[_Work]] = {
    CodedMaskTraits: _CodedWork,
    PairwiseMaskTraits: _PairwiseWork,
}

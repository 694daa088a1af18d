"""N clients in one process, with the identities and ledgers that they keep from round to round."""

from __future__ import annotations

from lightsecagg.crypto.entropy import draw, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import HASH_LENGTH, uint
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters, ShareMode
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import ClientParty, ServerParty
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.policy import GRAPH_SECURITY, Policy
from lightsecagg.protocol.registry import client_party, server_party
from lightsecagg.protocol.schemes.traits import Resolved, Traits
from lightsecagg.protocol.settings import Settings, hash_model


def describe_leak(traits: Traits, chosen: Resolved) -> str:
    """Why real clients would refuse these parameters for their graph; empty if they would not."""
    probability = min(1.0, float(traits.leak(chosen, chosen.parameters.clients)))
    if probability < 2.0**-GRAPH_SECURITY:
        return ""
    return (
        f"insecure parameters: with k = {chosen.neighbours} and t = {chosen.threshold} somebody is "
        f"left unprotected with a probability of up to {probability:.2g} "
        f"(allowed: 2^-{GRAPH_SECURITY})"
    )


class Cohort:
    """The clients of one federation; their ids are 0, ..., N - 1."""

    def __init__(
        self,
        protocol: str,
        parameters: Parameters,
        quantizer: Quantizer,
        dimension: int,
        neighbours: int = 0,
        threshold: int = 0,
        graph_security: int = GRAPH_SECURITY,
    ) -> None:
        """`graph_security` is what the clients demand of SecAgg+'s graph, see `Policy`."""
        self.protocol = protocol
        self.parameters = parameters
        self.quantizer = quantizer
        self.dimension = dimension
        self.neighbours = neighbours
        self.threshold = threshold
        self.graph_security = graph_security
        self.clients = range(parameters.clients)
        self._identities = [IdentityKey.generate() for _ in self.clients]
        self.allow_list = AllowList({c: key.public for c, key in enumerate(self._identities)})
        self._ledgers = [Ledger.volatile() for _ in self.clients]
        self._session = draw(system_entropy, HASH_LENGTH)
        self._round = 0
        self.settings()  # refuses now, not in the first round, what cannot work

    def next_round(self) -> Settings:
        """The settings of a new round, for a new global model."""
        self._round += 1
        return self.settings()

    def settings(self) -> Settings:
        """The settings of the current round."""
        return Settings(
            protocol=self.protocol,
            parameters=self.parameters,
            quantizer=self.quantizer,
            dimension=self.dimension,
            session=self._session,
            round=self._round,
            allow_list=self.allow_list.digest,
            model=hash_model(uint(self._round)),
            neighbours=self.neighbours,
            threshold=self.threshold,
        )

    def server(self, settings: Settings) -> ServerParty:
        """The server of a round."""
        return server_party(settings, self.allow_list)

    def identity(self, client: int) -> IdentityKey:
        """A client's signing key."""
        return self._identities[client]

    def ledger(self, client: int) -> Ledger:
        """A client's memory."""
        return self._ledgers[client]

    @property
    def _demanded_mode(self) -> ShareMode | None:
        """Short keys have to be asked for by name."""
        mode = self.parameters.share_mode
        return mode if mode is ShareMode.SHORT_KEY else None

    def client(self, client: int, settings: Settings) -> ClientParty:
        """A client's party in a round."""
        policy = Policy(
            allow_list=self.allow_list,
            session=self._session,
            privacy=self.parameters.privacy,
            threat_model=self.parameters.threat_model,
            protocols=(self.protocol,),
            dimension=self.dimension,
            model=settings.model,
            share_mode=self._demanded_mode,
            graph_security=self.graph_security,
        )
        return client_party(client, self._identities[client], policy, self._ledgers[client])

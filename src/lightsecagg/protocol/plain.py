"""Plain summation: NO PROTECTION AT ALL. The server sees every client's update.

This is FedAvg's sum, the baseline that secure aggregation is measured against: the same interface,
the same quantisation, the same settings, and no masks, keys, shares or signatures. An upload is the
client's quantised update in the clear; whoever reads the server's memory reads it.

A client takes part only if its policy names `ProtocolName.PLAIN`; no server can talk it into that.
Phases advertise, share, agree and recover do not exist here. Rounds end like those of the secure
protocols: with fewer uploads than they would demand, the round is aborted, so that both train on
the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from types import NoneType
from typing import Any, ClassVar, NoReturn

import numpy as np

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.interface import Aggregate, NeedInput, Output, Phase, Send
from lightsecagg.protocol.messages import Opening, Roster
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.round_client import RoundClient, Sharing
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.settings import AllowList, ProtocolName, Settings


def _absent(self: object, *args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("plain summation has no shares and no answers")


class PlainClient(RoundClient):
    """One client that uploads its update UNPROTECTED."""

    protocol: ClassVar = (ProtocolName.PLAIN,)
    key_count: ClassVar = 0

    def _on_opening(self, message: Opening) -> list[Output]:
        settings = Settings.from_bytes(message.settings)
        self._policy.check(settings)
        self.ledger.open_round(settings.round, settings.model, self._policy.max_attempts)
        self.ledger.count_opening(settings.model, self._policy.max_openings)
        # A roster of nobody: there is nobody to share with, and sharing is closed already.
        self.state = Sharing(
            settings=message.settings,
            roster=Roster(()),
            sealing_key=b"",
            secret=b"",
            held={},
            owners=(),
        )
        return [NeedInput()]

    def _mask(self, round_: Round, secret: bytes, owners: tuple[int, ...]) -> Elements:
        return np.zeros(round_.settings.length, dtype=np.uint32)

    _make_shares = _check_share = _check_plaintext = _absent
    _answer = _pack_answer = _unpack_answer = _absent


class PlainServer(RoundServer):
    """The server that sums UNPROTECTED updates."""

    protocol: ClassVar = (ProtocolName.PLAIN,)
    key_count: ClassVar = 0
    answer_type: ClassVar = NoneType

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        invited: Iterable[int] | None = None,
        entropy: Entropy = system_entropy,
        uploads: MutableMapping[int, Elements] | None = None,
    ) -> None:
        """See `RoundServer`."""
        super().__init__(settings, allow_list, invited, entropy, uploads)
        self.phase = Phase.UPLOAD
        self._complete = list(self._invited)

    def request_for(self, client: int) -> list[Output]:
        """The opening again, for a client that has reconnected; see `RoundServer`."""
        if client not in self.pending:
            return []
        return [Send(client, Opening(self.settings.to_bytes()))]

    def _close_upload(self) -> list[Output]:
        if abort := self._too_few(len(self._uploads), "uploaded their updates"):
            return abort
        self._survivors = tuple(sorted(self._uploads))
        total = self.settings.field.sum(self._uploads[client] for client in self._survivors)
        for client in self._survivors:
            del self._uploads[client]
        self.phase = Phase.DONE
        return [Aggregate(total, included=self._survivors, responders=())]

    _check_share = _check_answer = _recover = _absent

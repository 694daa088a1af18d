"""A client of an epoch as a holder: it keeps its peers' shares until a buffer burns them.

Shares are kept under (owner, serial), the newest ones of each owner; memory has an end. Serials of
one owner only increase, so a share that was used and is delivered again is not kept. The client
reports on each share when it comes, by coefficients that follow from the header of its mask (S46).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import CryptoError, ParameterError, RemoteProtocolError
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.client_machine import ClientMachine
from lightsecagg.protocol.epoch_states import (
    AnyState,
    Data,
    KeptShare,
    Part,
    R,
    Registered,
    Snapshot,
    dated,
    parts_of,
    set_apart,
    with_share,
)
from lightsecagg.protocol.interface import SERVER, Output, Send
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    Report,
    Reports,
    ReportsWanted,
    ShareBundle,
    UploadDropped,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roles.holder import check_address, open_peer_share
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.protocol.share_exchange import Share, header_of


class EpochHolder(ClientMachine[AnyState]):
    """One client in one epoch as far as it keeps shares; see the module."""

    mode = "epoch"

    def __init__(
        self,
        client: int,
        identity: IdentityKey,
        policy: Policy,
        ledger: Ledger,
        entropy: Entropy = system_entropy,
    ) -> None:
        super().__init__(client, identity, policy, ledger, entropy)
        if policy.buffering is None or not all(
            traits_of(protocol).buffered for protocol in policy.protocols
        ):
            raise ParameterError("the asynchronous mode needs a policy with buffering")
        self._buffering: Buffering = policy.buffering
        self.parts: Mapping[bytes, bytes] = {}
        """Where `snapshot_apart` left its parts, by SHA-256: for the driver to set after a
        `restore`. Looked up when an answer takes them."""

    @property
    def stored(self) -> int:
        """See `ClientParty.stored`."""
        if not isinstance(self.state, Registered):
            return 0
        secrets = sum(map(len, self.state.stock.values()))
        masks = sum(mask.nbytes for mask in self._masks.values())
        shares = (kept.share for of in self.state.kept.values() for kept in of.values())
        return secrets + masks + sum(len(data) for _, data in shares if isinstance(data, bytes))

    @property
    def needed_parts(self) -> frozenset[bytes]:
        """What must be in `parts`, because a snapshot left it there."""
        return parts_of(self.state)

    def snapshot_apart(self) -> Snapshot:
        """`snapshot` in kilobytes, with the peers' explicit shares and the answer beside it.

        They come once, and are read at most once. The order that protects: store `parts`, then
        `content`, then let the outputs leave, then delete all parts but the `needed` ones.
        """
        slim, parts = set_apart(self.state)
        return Snapshot(self._pack(slim), parts, parts_of(slim))

    # -- keeping shares ----------------------------------------------------------------------

    def _on_shares(self, state: Registered, message: ShareBundle) -> list[Output]:
        """Keep the peers' shares and report on them; one that does not open is simply not kept.

        Nor is one that comes after a newer one of its owner: it may have been used. A server that
        cannot know what has arrived here sends it again in good faith, and gets the same report.
        """
        scheme = self._scheme(state)
        for share in message.shares:
            check_address(scheme, share)
        changed = state
        for share in message.shares:
            if share.serial <= changed.last_serial.get(share.owner, -1):
                self.late_messages["SealedShare"] += 1
                continue
            try:
                opened = open_peer_share(scheme, self._key(state), share)
            except CryptoError as error:
                self.refused_shares[share.owner] = f"share {share.serial}: {error}"
            else:
                kept = KeptShare(opened, header=header_of(scheme.round, share))
                changed = self._keep(changed, share.owner, share.serial, kept)
        self.state = changed
        masks = [MaskRef(share.owner, share.serial) for share in message.shares]
        return self._report(changed, masks)

    def _on_wanted(self, state: Registered, message: ReportsWanted) -> list[Output]:
        """Report on these masks again."""
        if strangers := [o for o, _ in message.masks if o not in self._scheme(state).round.members]:
            raise RemoteProtocolError(f"clients {strangers} have no masks to report on")
        return self._report(state, [MaskRef(*mask) for mask in message.masks])

    def _report(self, state: Registered, masks: Iterable[MaskRef]) -> list[Output]:
        """What this client reports on its shares; it is the same whenever it is asked (S46)."""
        scheme = self._scheme(state)
        if not scheme.settings.traits.checked:
            return []
        reports: list[Report] = []
        for ref in masks:
            kept = state.kept.get(ref.owner, {}).get(ref.serial)
            values: tuple[int, ...] = ()  # it did not open, was lost, or is used
            if kept is not None:
                values = tuple(map(int, scheme.report(ref, self._whole(kept), kept.header)))
            reports.append(Report(ref.owner, ref.serial, values))
        return [Send(SERVER, Reports(tuple(reports)))]

    def _on_dropped(self, state: Registered, message: UploadDropped) -> list[Output]:
        """Stop counting an upload; its mask stays used and its update spent."""
        if message.serial not in state.outstanding:
            return self._on_late(state, message)
        left = tuple(serial for serial in state.outstanding if serial != message.serial)
        self.state = replace(state, outstanding=left)
        return []

    def _keep(self, state: R, owner: int, serial: int, share: KeptShare) -> R:
        """Keep the newest shares of each owner, this client included; memory has an end."""
        changed = with_share(state, owner, serial, share)
        changed = replace(changed, last_serial={**state.last_serial, owner: serial})
        if len(changed.kept[owner]) > self._buffering.stock:
            return self._without(changed, [MaskRef(owner, min(changed.kept[owner]))])
        return changed

    def _without(self, state: R, masks: Iterable[MaskRef]) -> R:
        """The shares of these masks are forgotten, and the masks that are this client's own."""
        gone = list(masks)
        kept = dict(state.kept)
        for owner, serial in gone:
            kept[owner] = {s: share for s, share in kept[owner].items() if s != serial}
        own = {serial for owner, serial in gone if owner == self.client}
        if not own:
            return replace(state, kept=kept)
        self._masks = {s: mask for s, mask in self._masks.items() if s not in own}
        return replace(
            state,
            kept=kept,
            stock={s: secret for s, secret in state.stock.items() if s not in own},
            outstanding=tuple(s for s in state.outstanding if s not in own),
        )

    def _expire(self, state: R) -> R:
        """Forget the shares and models that are too old for any buffer that may still come."""
        lifetime = self._buffering.share_lifetime
        old = [
            MaskRef(owner, serial)
            for owner, of in state.kept.items()
            for serial, kept in of.items()
            if kept.since is not None and state.time - kept.since > lifetime
        ]
        state = self._without(state, old)
        kept = {
            owner: {s: dated(share, state.time) for s, share in of.items()}
            for owner, of in state.kept.items()
        }
        oldest = state.time - self._buffering.table.max_staleness
        models = {version: model for version, model in state.models.items() if version >= oldest}
        for model in set(state.models.values()) - set(models.values()):
            self.ledger.close_model(model)
        return replace(state, kept=kept, models=models)

    def _whole(self, kept: KeptShare) -> Share:
        kind, data = kept.share
        return kind, self._bytes(data)

    def _bytes(self, data: Data) -> bytes:
        return self.parts[data.digest] if isinstance(data, Part) else data

    def _key(self, state: Registered) -> AgreementKey:
        return self._sealing_key(state.private_keys[0])

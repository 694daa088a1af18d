"""LightSecAgg's masks, Section 4.1 and Algorithm 1; with weights and serials, Section 4.2.

A client cuts its mask into U - T pieces, encodes them with T pieces of noise by the T-private MDS
code and gives every member one share. Encoding is linear: the (weighted) sum of the shares that a
client holds is its share of the sum of the masks. Any U such answers decode it in one shot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy, draw
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.crypto.transcript import uint
from lightsecagg.errors import NotEnoughAnswers, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.mask_encoding import (
    EncodedMask,
    MaskId,
    encode_mask,
    encode_seeded_mask,
    expand_share,
    seeded_positions,
)
from lightsecagg.masks.one_shot_recovery import aggregate_shares, recover_mask
from lightsecagg.params import ShareMode
from lightsecagg.protocol.messages import AggregatedShare
from lightsecagg.protocol.schemes.interface import (
    Answer,
    ClientScheme,
    MaskRef,
    MaskSum,
    PreparedMask,
    ServerScheme,
    Term,
)
from lightsecagg.protocol.share_exchange import OutgoingShare, Share


class CodedMasksClient(ClientScheme):
    """One client of LightSecAgg."""

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        """Draw a mask and encode it for every member of the roster, Section 4.1, phase 1."""
        field, seeds = self.settings.field, {}
        if self.settings.parameters.share_mode is ShareMode.SEEDED:
            seeds = self._draw_seeds(entropy)
            encoded = self._encode_from_seeds(serial, seeds)
        else:
            encoded = self._encode_explicitly(serial, entropy)
        shares = [
            OutgoingShare(recipient, ShareKind.SEED, seeds[position])
            if position in seeds
            else OutgoingShare(
                recipient, ShareKind.EXPLICIT, field.to_bytes(encoded.shares[position])
            )
            for position, recipient in enumerate(self.round.members)
        ]
        own = shares.pop(self.round.positions[self.client])
        return PreparedMask(field.to_bytes(encoded.mask), (own.kind.value, own.plaintext), shares)

    def _draw_seeds(self, entropy: Entropy) -> dict[int, bytes]:
        own, U = self.round.positions[self.client], self.settings.parameters.survivors
        return {
            position: draw(entropy, prg.SEED_LENGTH)
            for position in seeded_positions(own, len(self.round.members), U)
        }

    def _encode_from_seeds(self, serial: int, seeds: Mapping[int, bytes]) -> EncodedMask:
        seeded = {
            position: self._expand(seed, MaskRef(self.client, serial), self.round.members[position])
            for position, seed in seeds.items()
        }
        members, settings = len(self.round.members), self.settings
        return encode_seeded_mask(settings.code, seeded, members, settings.length)

    def _encode_explicitly(self, serial: int, entropy: Entropy) -> EncodedMask:
        settings = self.settings
        parameters, length = settings.parameters, settings.share_length
        rows = prg.draw_bound(
            parameters.survivors * length,
            settings.field.modulus,
            entropy,
            self.round.context,
            "explicit mask",
            uint(self.client),
            uint(serial),
        )
        pieces, noise = np.split(rows.reshape(parameters.survivors, length), [parameters.pieces])
        return encode_mask(settings.code, pieces, noise, settings.length)

    def _expand(self, seed: bytes, ref: MaskRef, recipient: int) -> Elements:
        mask_id = MaskId(self.round.context, ref.owner, ref.serial)
        length, modulus = self.settings.share_length, self.settings.field.modulus
        return expand_share(seed, mask_id, recipient, length, modulus)

    def check(self, kind: ShareKind, plaintext: bytes) -> None:
        """An explicit share holds field elements; every seed is one."""
        if kind is ShareKind.EXPLICIT:
            self.check_elements(plaintext)

    def mask(self, secret: bytes, owners: Sequence[int]) -> Elements:
        """The mask itself."""
        return self.settings.field.from_bytes(secret, self.settings.length)

    def answer(
        self, held: Mapping[MaskRef, Share], terms: Sequence[Term], owners: Sequence[int]
    ) -> AggregatedShare:
        """The weighted sum of the shares of the masks in the sum."""
        shares = (self.elements(term.ref, held[term.ref]) for term in terms)
        weights = [term.weight for term in terms]
        plain = all(weight == 1 for weight in weights)
        total = aggregate_shares(self.settings.field, shares, None if plain else weights)
        return AggregatedShare(total)

    def elements(self, ref: MaskRef, share: Share) -> Elements:
        """A share that is held here as field elements; a seed is expanded only when needed."""
        kind, data = share
        if kind == ShareKind.EXPLICIT.value:
            return self.settings.field.from_bytes(data, self.settings.share_length)
        return self._expand(data, ref, self.client)


class CodedMasksServer(ServerScheme):
    """The server of LightSecAgg."""

    answer_type: ClassVar = AggregatedShare

    def choose(self, owners: Sequence[int], held: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
        """As many uploaders as possible such that enough of them hold all shares of them.

        Normally all uploaders. An owner whose shares did not open at many peers is left out
        first; ties go to the higher id, so that the choice is a function of the uploads.
        """
        parameters = self.settings.parameters
        needed = max(parameters.survivors, parameters.quorum)
        chosen = set(held)
        while len(chosen) >= self.settings.minimum:
            holders = [client for client in chosen if chosen <= held[client]]
            if len(holders) >= needed:
                return tuple(sorted(chosen))
            missing = Counter(owner for client in chosen for owner in chosen - held[client])
            chosen.remove(max(missing, key=lambda owner: (missing[owner], owner)))
        raise NotEnoughAnswers(f"no survivor set has {needed} members that hold all its shares")

    def check_answer(self, asked: MaskSum, sender: int, answer: Answer) -> None:
        """An answer is as long as a share."""
        if not isinstance(answer, AggregatedShare):
            raise AssertionError("the phase admits no other message")
        if answer.vector.shape != (self.settings.share_length,):
            raise RemoteProtocolError(
                f"client {sender} answered with {answer.vector.size} elements instead of "
                f"{self.settings.share_length}"
            )

    def recover(
        self, asked: MaskSum, answers: Mapping[int, Answer]
    ) -> tuple[Elements, tuple[int, ...]]:
        """Decode the sum of the masks in one shot, Section 4.1, phase 3.

        Spare answers name the wrong ones (S14): the random combinations that catch them are
        drawn now.
        """
        code, members = self.settings.code, self.round.members
        if len(answers) < code.survivors:
            raise NotEnoughAnswers(
                f"only {len(answers)} clients answered, U = {code.survivors} are needed"
            )
        by_position = {
            self.round.positions[client]: answer.vector
            for client, answer in answers.items()
            if isinstance(answer, AggregatedShare)
        }
        suspects = self._find_suspects(by_position)
        trusted = {
            position: vector for position, vector in by_position.items() if position not in suspects
        }
        mask = recover_mask(code, trusted, self.settings.length)
        return mask, tuple(sorted(members[position] for position in suspects))

    def _find_suspects(self, answers: Mapping[int, Elements]) -> tuple[int, ...]:
        code = self.settings.code
        if len(answers) == code.survivors:
            return ()  # any U answers are consistent
        positions = sorted(answers)
        stacked = np.stack([answers[position] for position in positions])
        length, columns = stacked.shape[1], code.check_columns
        coefficients = prg.draw_uniform(length * columns, code.field.modulus, self.entropy)
        return code.find_inconsistent(positions, stacked, coefficients.reshape(length, columns))

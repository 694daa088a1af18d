"""LightSecAgg's masks, Section 4.1 and Algorithm 1; with weights and serials, Section 4.2.

A client cuts its mask into U - T pieces, encodes them with T pieces of noise by the T-private MDS
code and gives every member one share. Encoding is linear: the (weighted) sum of the shares that a
client holds is its share of the sum of the masks. Any U such answers decode it in one shot.

A client reports on the shares that it holds, so that whoever lied in sharing is found before a sum
is announced (`masks.checked_sharing`, S46).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import ClassVar

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy, draw
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.crypto.transcript import uint
from lightsecagg.errors import NotEnoughAnswers, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import (
    BLINDS,
    Pair,
    find_accused,
    name_liars,
    part_quarrels,
    report_on_share,
)
from lightsecagg.masks.mask_encoding import (
    EncodedMask,
    MaskId,
    encode_mask,
    encode_seeded_mask,
    expand_share,
    join_pieces,
    seeded_positions,
)
from lightsecagg.masks.one_shot_recovery import aggregate_shares, recover_pieces, unmask
from lightsecagg.protocol.jobs import RecoverMasks
from lightsecagg.protocol.messages import AggregatedShare
from lightsecagg.protocol.schemes.interface import (
    Answer,
    ClientScheme,
    Findings,
    MaskRef,
    MaskSum,
    PreparedMask,
    ServerScheme,
    Term,
)
from lightsecagg.protocol.share_exchange import OutgoingShare, Share

_STEPS = 3000
"""Of the search for those at peace: no liars may keep the server busy for ever."""


class CodedMasksClient(ClientScheme):
    """One client of LightSecAgg."""

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        """Draw a mask and encode it for every member of the roster, Section 4.1, phase 1."""
        field, seeds = self.settings.field, {}
        if self.settings.uses_seeds:
            seeds = self._draw_seeds(entropy)
            with_mask = self.expands_ahead or self.settings.has_short_keys
            encoded = self._encode_from_seeds(serial, seeds, with_mask)
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
        kept = (own.kind.value, own.plaintext)
        secret, expanded = self._secret(serial, seeds, encoded.mask, entropy)
        return PreparedMask(secret, kept, shares, expanded)

    def _secret(
        self, serial: int, seeds: Mapping[int, bytes], mask: Elements, entropy: Entropy
    ) -> tuple[bytes, Elements | None]:
        """What is kept of a mask until the upload, and the mask where expanding it takes time."""
        if seeds:
            return _pack_seeds(serial, seeds), mask if mask.size else None
        return self.settings.field.to_bytes(mask), None

    def _draw_seeds(self, entropy: Entropy) -> dict[int, bytes]:
        return {p: draw(entropy, prg.SEED_LENGTH) for p in self._seeded_positions()}

    def _seeded_positions(self) -> list[int]:
        own, U = self.round.positions[self.client], self.settings.parameters.survivors
        return seeded_positions(own, len(self.round.members), U)

    def _encode_from_seeds(
        self, serial: int, seeds: Mapping[int, bytes], with_mask: bool = True
    ) -> EncodedMask:
        positions, ref = sorted(seeds), MaskRef(self.client, serial)
        seeded = np.empty((len(positions), self.settings.shared_length), dtype=np.uint32)
        for row, position in zip(seeded, positions, strict=True):
            self._expand(seeds[position], ref, self.round.members[position], row)
        return encode_seeded_mask(
            self.settings.code,
            positions,
            seeded,
            len(self.round.members),
            self.settings.secret_length,
            BLINDS,
            self.settings.has_short_keys,
            with_mask,
        )

    def _encode_explicitly(self, serial: int, entropy: Entropy) -> EncodedMask:
        settings = self.settings
        parameters, length = settings.parameters, settings.shared_length
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
        return encode_mask(
            settings.code,
            pieces,
            noise,
            settings.secret_length,
            BLINDS,
            settings.has_short_keys,
        )

    def _expand(
        self, seed: bytes, ref: MaskRef, recipient: int, out: Elements | None = None
    ) -> Elements:
        mask_id = MaskId(self.round.context, ref.owner, ref.serial)
        length, modulus = self.settings.shared_length, self.settings.field.modulus
        return expand_share(seed, mask_id, recipient, length, modulus, out)

    def check(self, kind: ShareKind, plaintext: bytes) -> None:
        """An explicit share holds field elements; every seed is one."""
        if kind is ShareKind.EXPLICIT:
            self.check_elements(plaintext)

    def report(self, ref: MaskRef, share: Share, header: bytes) -> Elements:
        """B combinations of the share, each under a blind of its own."""
        return report_on_share(self.settings.field, self.elements(ref, share), header)

    def mask(self, secret: bytes, owners: Sequence[int]) -> Elements:
        """The mask itself, which seeds stand for in seeded mode."""
        if self.settings.uses_seeds:
            return self._encode_from_seeds(*self._unpack_seeds(secret)).mask
        return self.settings.field.from_bytes(secret, self.settings.length)

    def _unpack_seeds(self, secret: bytes) -> tuple[int, dict[int, bytes]]:
        serial, seeds = int.from_bytes(secret[:8]), secret[8:]
        cuts = range(0, len(seeds), prg.SEED_LENGTH)
        positions = self._seeded_positions()
        return serial, {
            position: seeds[cut : cut + prg.SEED_LENGTH]
            for position, cut in zip(positions, cuts, strict=True)
        }

    def answer(
        self, held: Mapping[MaskRef, Share], terms: Sequence[Term], owners: Sequence[int]
    ) -> AggregatedShare:
        """The weighted sum of the shares of the masks in the sum, without their blinds."""
        length = self.settings.share_length
        shares = (self.elements(term.ref, held[term.ref])[:length] for term in terms)
        weights = [term.weight for term in terms]
        plain = all(weight == 1 for weight in weights)
        total = aggregate_shares(self.settings.field, shares, None if plain else weights)
        return AggregatedShare(total)

    def elements(self, ref: MaskRef, share: Share) -> Elements:
        """A share that is held here, with its blinds; a seed is expanded only when needed."""
        kind, data = share
        if kind == ShareKind.EXPLICIT.value:
            return self.settings.field.from_bytes(data, self.settings.shared_length)
        return self._expand(data, ref, self.client)


def _pack_seeds(serial: int, seeds: Mapping[int, bytes]) -> bytes:
    """All that a seeded mask follows from, in 8 + 32 U bytes."""
    return b"".join([serial.to_bytes(8), *seeds.values()])


class CodedMasksServer(ServerScheme):
    """The server of LightSecAgg."""

    answer_type: ClassVar = AggregatedShare

    def examine(self, reports: Mapping[int, Mapping[int, Elements]]) -> Findings:
        """The pairs whose reports are off the code, and who is in too many of them.

        n reports tell up to floor((n - U) / 2) liars.
        """
        by_owner: dict[int, dict[int, Elements]] = {}
        for holder, said in reports.items():
            for owner, values in said.items():
                by_owner.setdefault(owner, {})[self.round.positions[holder]] = values
        accused = frozenset(
            (owner, self.round.members[position])
            for owner, position in find_accused(self.settings.code, by_owner)
        )
        return Findings(accused, name_liars(accused, self._liars(len(reports))))

    def _liars(self, uploads: int) -> int:
        """How many liars so many uploaders can tell."""
        return max(0, uploads - self.settings.parameters.survivors) // 2

    def choose(
        self,
        owners: Sequence[int],
        held: Mapping[int, frozenset[int]],
        accused: Collection[Pair] = (),
    ) -> tuple[int, ...]:
        """As many uploaders as possible such that enough of them hold good shares of them all.

        If enough are left without the pairs that quarrel, the pairs leave the answering side
        together (`part_quarrels`), and hardly anybody leaves the sum. Otherwise shares were lost
        as well, or more clients lie.

        Then enough are U, and as many more as there may be liars, if they can be had: no lie in
        the answers goes unnoticed. Owners are left out one by one, those first without whom
        most uploaders could answer; ties go to the higher id, so that the choice is a function
        of the uploads. An accused holder still has its shares, and may sign for them. Liars can
        lead this way astray; then as few as possible are left out that all quarrels end.
        """
        if (parted := self._parted(held, accused)) is not None:
            return tuple(sorted(parted))
        parameters = self.settings.parameters
        good = {client: set(owners) for client, owners in held.items()}
        for owner, holder in accused:
            good[holder].discard(owner)
        wanted = parameters.survivors + self._liars(len(held))
        best: set[int] = set()
        most, chosen = parameters.survivors - 1, set(held)
        while most < wanted and len(chosen) >= self.settings.minimum:
            lacking = {client: chosen - good[client] for client in chosen}
            answers = sum(not owners for owners in lacking.values())
            signers = sum(chosen <= held[client] for client in chosen)
            if answers > most and signers >= parameters.quorum:
                best, most = set(chosen), answers
            if answers == len(chosen):
                break
            chosen.remove(_most_missed(lacking))
        best = best or self._at_peace(good)
        if not best:
            doubts = " that agree with each other" if accused else ""
            raise NotEnoughAnswers(
                f"no survivor set has {max(parameters.survivors, parameters.quorum)} members that "
                f"hold all its shares{doubts}"
            )
        return tuple(sorted(best))

    def answering(
        self,
        survivors: Collection[int],
        held: Mapping[int, frozenset[int]],
        accused: Collection[Pair],
    ) -> frozenset[int]:
        """Without all pairs in a quarrel, where that leaves enough to locate every lie (R59).

        Also where somebody in a quarrel had to leave the sum: a quorum may need everybody else. It
        may have been the honest one, and then the liar answers.
        """
        left, _ = self._part(held, accused)
        pairs = (len(held) - len(left) + 1) // 2  # each with a liar
        spare = 2 * max(0, self._liars(len(held)) - pairs)
        trusted = left & frozenset(survivors)
        fits = len(trusted) >= self.settings.parameters.survivors + spare
        return trusted if fits else frozenset(survivors)

    def _part(
        self, held: Mapping[int, frozenset[int]], accused: Collection[Pair]
    ) -> tuple[frozenset[int], frozenset[int]]:
        uploaders = held.keys()
        lacks = {(owner, holder) for holder in held for owner in uploaders - held[holder]}
        known = {pair for pair in accused if uploaders >= set(pair)}
        return part_quarrels(uploaders, lacks | known)

    def _parted(
        self, held: Mapping[int, frozenset[int]], accused: Collection[Pair]
    ) -> frozenset[int] | None:
        """Who is summed, once quarrelling pairs have left; None: too many do."""
        left, doubted = self._part(held, accused)
        summed = frozenset(held.keys() - doubted)
        signers = sum(summed <= held[client] for client in summed)
        fits = (
            len(left) >= self.settings.parameters.survivors
            and len(summed) >= self.settings.minimum
            and signers >= self.settings.parameters.quorum
        )
        return summed if fits else None

    def _at_peace(self, good: Mapping[int, Collection[int]]) -> set[int]:
        """The most uploaders of whom each holds a good share of each; nobody if too few do.

        Of two in a quarrel one has lied, so the honest are at peace: if nobody beyond the
        possible number of liars lied, there is such a set.
        """
        quarrels = {
            client: {other for other in good if other not in owners or client not in good[other]}
            for client, owners in good.items()
        }
        steps = iter(range(_STEPS))
        for size in range(self._liars(len(good)) + 1):
            left_out = _end_quarrels(quarrels, size, steps)
            if left_out is not None and len(good) - len(left_out) >= self.settings.minimum:
                return good.keys() - left_out
        return set()

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
        """All of `recovery` at once."""
        job = self.recovery(asked, answers)
        job.open()
        return job.whole(job.run(0, job.columns)), job.suspects

    def recovery(self, asked: MaskSum, answers: Mapping[int, Answer]) -> DecodeMasks:
        """Decode the sum of the masks in one shot, Section 4.1, phase 3."""
        return DecodeMasks(self, answers)

    def find_suspects(self, answers: Mapping[int, Elements]) -> tuple[int, ...]:
        """The positions whose answers contradict the others (S14).

        The random combinations that catch them are drawn now: call it when nobody can change an
        answer any more.
        """
        code = self.settings.code
        if len(answers) == code.survivors:
            return ()  # any U answers are consistent
        positions = sorted(answers)
        rows = [answers[position] for position in positions]
        length, columns = rows[0].size, code.check_columns
        coefficients = prg.draw_uniform(length * columns, code.field.modulus, self.entropy)
        return code.find_inconsistent(positions, rows, coefficients.reshape(length, columns))


def _end_quarrels(
    quarrels: Mapping[int, Set[int]], size: int, steps: Iterator[int]
) -> frozenset[int] | None:
    """At most `size` clients without whom nobody quarrels; None if there are none, or no steps.

    Either the most quarrelsome one is among them, or all with whom it quarrels are.
    """
    hub = max(quarrels, key=lambda client: (len(quarrels[client]), client))
    others = quarrels[hub]
    if not others:
        return frozenset()
    too_many = sum(map(len, quarrels.values())) > 2 * size * len(others)
    if too_many or next(steps, None) is None:
        return None
    for gone in (frozenset({hub}), frozenset(others)):
        left = {
            client: enemies - gone for client, enemies in quarrels.items() if client not in gone
        }
        rest = _end_quarrels(left, size - len(gone), steps) if len(gone) <= size else None
        if rest is not None:
            return gone | rest
    return None


def _most_missed(lacking: Mapping[int, Collection[int]]) -> int:
    """The owner that alone keeps most clients from answering, or that most clients lack."""
    missing = Counter(owner for owners in lacking.values() for owner in owners)
    alone = Counter(owner for owners in lacking.values() if len(owners) == 1 for owner in owners)
    return max(missing, key=lambda owner: (alone[owner], missing[owner], owner))


class DecodeMasks(RecoverMasks):
    """Spare answers name the wrong ones; any U of the others decode, column by column."""

    def __init__(self, scheme: CodedMasksServer, answers: Mapping[int, Answer]) -> None:
        self.columns = scheme.settings.share_length
        self._scheme = scheme
        self._answers = {
            scheme.round.positions[client]: answer.vector
            for client, answer in answers.items()
            if isinstance(answer, AggregatedShare)
        }

    def open(self) -> None:
        survivors, members = self._scheme.settings.code.survivors, self._scheme.round.members
        if len(self._answers) < survivors:
            raise NotEnoughAnswers(
                f"only {len(self._answers)} clients answered, U = {survivors} are needed"
            )
        wrong = self._scheme.find_suspects(self._answers)
        self.suspects = tuple(sorted(members[position] for position in wrong))
        self._trusted = {k: vector for k, vector in self._answers.items() if k not in wrong}

    def run(self, start: int, stop: int) -> Elements:
        return recover_pieces(self._scheme.settings.code, self._trusted, start, stop)

    def take_away(self, total: Elements, start: int, part: Elements) -> None:
        """The pieces of a mask lie one after the other; the last is padded."""
        for k, piece in enumerate(part):
            begin = k * self.columns + start
            left = total[begin : begin + piece.size]
            left[:] = unmask(self._scheme.settings.field, left, piece[: left.size])

    def finish(self, total: Elements) -> Elements:
        """Nothing is left to do, and no answer is needed any more."""
        self._answers, self._trusted = {}, {}
        return total

    def whole(self, pieces: Elements) -> Elements:
        """The sum of the masks, from all columns of its pieces."""
        settings = self._scheme.settings
        return join_pieces(pieces, settings.secret_length, settings.has_short_keys)

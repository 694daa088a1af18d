"""The server of a round, killed before or after any record: its facts bring it back (R31)."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from bundles import Part
from disk import Disk
from driver import HONEST, MALICIOUS, Federation, Network

from lightsecagg.drivers.local import Packet
from lightsecagg.errors import DecodeError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import SERVER, Aggregate, Promised
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.journal_facts import Reported, SumAgreed, UploadWaits, encode_fact
from lightsecagg.protocol.messages import (
    Certificate,
    MaskedUpload,
    Reports,
    SharesClosed,
    SumRequest,
    Tag,
)
from lightsecagg.protocol.server import Server


class KilledError(Exception):
    """The server's process ends."""


class Dying(Disk):
    """Its process is killed at record number `last`, before or right after it is stored."""

    def __init__(self, last: int, *, after: bool) -> None:
        super().__init__()
        self.left, self.after = last, after

    def store(self, record: Promised) -> Upload | None:
        self.left -= 1
        if self.left < 0 and not self.after:
            raise KilledError
        stored = super().store(record)
        if self.left < 0:
            raise KilledError
        return stored


class Mortal(Network):
    """Clients live on; with a new server they lose what was on its way, and nothing else."""

    def deliver(self, packet: Packet) -> None:
        super().deliver(packet)
        sent = [self.codec.decode(data) for who, _, data in self.wire if who == packet.recipient]
        uploads = [message for message in sent if isinstance(message, MaskedUpload)]
        if packet.kind is SharesClosed and uploads:  # as a client's session does
            data = self.codec.encode(uploads[0])
            self.up.append(Packet(packet.recipient, SERVER, data, MaskedUpload))

    def restart(self, disk: Disk) -> tuple[int, ...]:
        """The U1 that the new server knows of."""
        self.up.clear()
        self.down.clear()
        self.disk = disk
        self.server = disk.restored(self.federation.allow_list)
        announced = self.server.asked
        self.call(SERVER, self.server.resume)
        all_are_here = disk.uploads.keys() >= {(client, 0) for client in self.federation.ids}
        assert bool(self.server.asked) == all_are_here, "it goes on by itself"
        for client in self.federation.ids:
            self.call(SERVER, partial(self.server.rejoin, client))
        return announced


def killed_at(
    threat_model: ThreatModel, last: int, *, after: bool, liar: int = -1
) -> tuple[Mortal, Dying]:
    """A round until it is killed, or to its end; the liar reports that all its shares are wrong."""
    federation = Federation(7, 1, 2, 4, threat_model)
    made, disk = federation.network(), Dying(last, after=after)
    server = Server(federation.settings(), federation.allow_list, federation.ids, durable=True)
    network = Mortal(federation, server, made.clients, made.inputs)
    network.disk = disk

    def tamper(sender: int, _recipient: int, message: Part) -> list[Part]:
        if sender != liar or not isinstance(message, Reports):
            return [message]
        zero = (msgspec.structs.replace(r, values=bytes(len(r.values))) for r in message.reports)
        return [Reports(tuple(zero))]

    network.tamper = tamper
    try:
        network.start().run()
    except KilledError:
        disk.left = 100
    return network, disk


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_R31_a_round_that_is_killed_at_any_record_ends_with_the_same_sum(
    threat_model: ThreatModel, after: bool
) -> None:
    clients, agreed = 7, int(threat_model is MALICIOUS)
    records = 1 + clients + 1 + agreed  # sharing, uploads, U1, agreement
    for last in range(records + 1):
        network, disk = killed_at(threat_model, last, after=after)
        if not disk.uploads:  # a session drops it
            assert last < 2
            continue
        assert bool(network.results) == (last == records)
        heard = {type(message) for message in network.messages(object)}
        assert (SumRequest in heard) == (last > 1 + clients), "U1 is stored before it is heard"
        assert (Certificate in heard) == (agreed > 0 and last == records)
        if not network.results:
            announced = network.restart(disk)
            assert bool(announced) == (last + after > 1 + clients)
            network.run()
        network.assert_exact(network.federation.ids)


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_R31_S46_who_lied_on_shares_is_known_after_a_crash(threat_model: ThreatModel) -> None:
    liar, everybody = Federation(7).ids[2], Federation(7).ids
    for last in (5, 8):  # while uploads come, and right after U1
        network, disk = killed_at(threat_model, last, after=True, liar=liar)
        network.restart(disk)
        result = network.run().result
        assert isinstance(result, Aggregate)
        assert result.suspects == (liar,)
        assert result.accused == tuple((owner, liar) for owner in everybody)
        assert liar not in result.responders
        network.assert_exact(everybody)


def test_R36_facts_of_who_had_not_shared_or_out_of_order_are_refused() -> None:
    _, disk = killed_at(MALICIOUS, 5, after=True)
    allow_list, facts = Federation(7, 1, 2, 4, MALICIOUS).allow_list, disk.facts
    for fact in (Reported(999, ()), UploadWaits(Tag(999), 0), SumAgreed(())):
        disk.facts = [*facts, encode_fact(fact)]
        with pytest.raises(DecodeError, match=f"{type(fact).__name__} is out of order"):
            disk.restored(allow_list)
    disk.facts = facts
    assert disk.restored(allow_list).uploaders

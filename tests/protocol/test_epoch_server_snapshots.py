"""The server of an epoch, killed at every call: nothing acknowledged is lost (R31)."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from async_driver import HONEST, MALICIOUS, AsyncFederation
from driver import CountingEntropy
from test_epoch_snapshots import BOTH, Travellers, history

from lightsecagg.crypto.transcript import HASH_LENGTH, context_hash
from lightsecagg.drivers.local import Packet
from lightsecagg.errors import DecodeError, ParameterError
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.epoch_memory import Memory
from lightsecagg.protocol.epoch_server import EpochServer
from lightsecagg.protocol.interface import SERVER, BufferAggregate, Phase, Send
from lightsecagg.protocol.jobs import Compute, Upload, UploadInMemory, at_once, complete
from lightsecagg.protocol.messages import BufferedUpload, Tag


class Disk:
    """Where a driver stores uploads: each once, by owner and serial."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def keep(self, upload: BufferedUpload) -> Upload:
        key = (upload.tag.owner, upload.tag.serial)
        assert key not in self.stored
        self.stored[key] = upload.vector.copy()
        return UploadInMemory(self.stored[key])

    def recall(self, tag: Tag) -> Upload:
        return UploadInMemory(self.stored[tag.owner, tag.serial])


class Mortal(Travellers):
    """A federation whose server may be killed and restored after every call."""

    def __init__(self, killing: bool, **options: Any) -> None:
        super().__init__(moving=False, **options)
        self.killing, self.disk = killing, Disk()
        self.server._keep = self.disk.keep
        self.random = self.server._entropy

    def deliver(self, packet: Packet) -> None:
        super().deliver(packet)
        if packet.recipient == SERVER:
            self.kill()

    def call(self, party: int, act: Any, kind: Any = None) -> None:
        super().call(party, act, kind)
        if party == SERVER:
            self.kill()

    def kill(self) -> None:
        if self.killing:
            before = self.server.snapshot()
            self.server = restored(self, before)
            assert self.server.snapshot() == before


def restored(fed: Mortal, snapshot: bytes) -> EpochServer:
    server = EpochServer.restore(
        snapshot, fed.allow_list, fed.disk.recall, fed.random, fed.disk.keep
    )
    assert not at_once(server, server.resume()), "a sum of uploads alone, for the answers to come"
    return server


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
@BOTH
def test_R31_a_server_that_is_killed_after_every_call_does_the_same(
    threat_model: ThreatModel, share_mode: ShareMode, seed: int
) -> None:
    runs = []
    for killing in (False, True):
        fed = Mortal(killing, threat_model=threat_model, share_mode=share_mode)
        history(fed, seed)
        fed.assert_exact()
        runs.append(fed)
    lived, died = runs
    assert lived.wire == died.wire, "bit for bit the same messages"
    assert len(lived.results) == len(died.results) > 0
    assert [result.accused for result in lived.results] == [r.accused for r in died.results]
    assert lived.refusals == died.refusals


def cut_all_connections(fed: Mortal) -> None:
    """The process is gone, and with it all that was on its way; everybody comes back."""
    for client in fed.clients:
        lost = [*fed.lose(client, SERVER), *fed.lose(SERVER, client)]
        for packet in lost:
            if packet.kind is BufferedUpload:
                upload = fed.codec.decode(packet.data)
                assert isinstance(upload, BufferedUpload)
                fed.updates.pop((client, upload.tag.serial))
    fed.server = restored(fed, fed.server.snapshot())
    for client in fed.clients:
        fed.call(SERVER, partial(fed.server.rejoin, client))


@pytest.mark.parametrize("phase", [Phase.ADVERTISE, Phase.UPLOAD, Phase.AGREE, Phase.RECOVER])
def test_R31_with_all_connections_cut_no_acknowledged_upload_is_lost(phase: Phase) -> None:
    """The announced buffer is asked for again with the same tags, and summed."""
    fed = Mortal(False, threat_model=MALICIOUS, dropouts=1)
    fed.call(SERVER, fed.server.start)
    if phase is Phase.ADVERTISE:
        fed.step_down(0)
        fed.step_up(0)
        cut_all_connections(fed)
    fed.settle()
    assert fed.server.phase is Phase.UPLOAD
    for client, party in fed.clients.items():
        fed.send(client, party.restock(2))
    fed.settle()
    for client in range(3):
        fed.upload(client)
    fed.settle()
    if phase is Phase.UPLOAD:
        cut_all_connections(fed)
        assert fed.server.waiting == 3
    fed.upload(3)
    fed.step_up(3)
    announced = dict(fed.announced)
    assert announced
    while phase in (Phase.AGREE, Phase.RECOVER) and fed.server.phase is not phase:
        fed.deliver(fed.take(*fed.busy()[0]))
    if phase in (Phase.AGREE, Phase.RECOVER):
        cut_all_connections(fed)
        assert fed.server.phase is phase
    fed.settle()
    assert fed.announced == announced, "an announced buffer never changes"
    fed.assert_exact()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]


@BOTH
def test_R31_what_was_being_computed_is_computed_again(threat_model: ThreatModel) -> None:
    fed = Mortal(False, threat_model=threat_model)
    fed.open()
    for client in range(4):
        fed.upload(client)
    jobs: list[Compute] = []
    fed.compute = lambda _, outputs: [  # type: ignore[method-assign]
        output for output in outputs if not (isinstance(output, Compute) and put(jobs, output))
    ]
    fed.settle()
    assert fed.server.phase is Phase.RECOVER
    assert len(jobs) == 1, "the uploads are still being summed"
    again = EpochServer.restore(fed.server.snapshot(), fed.allow_list, fed.disk.recall)
    (summing,) = again.resume()
    assert isinstance(summing, Compute)
    assert not again.computed(jobs[0].job, complete(jobs[0].job)), "of the server that is gone"
    (unmasking,) = again.computed(summing.job, complete(summing.job))
    assert isinstance(unmasking, Compute)
    result, *_ = again.computed(unmasking.job, complete(unmasking.job))
    assert isinstance(result, BufferAggregate)
    assert np.array_equal(result.total, fed.expected(0))


def put(jobs: list[Compute], job: Compute) -> bool:
    jobs.append(job)
    return True


def test_R31_shares_under_way_when_the_server_ends_are_not_half_forgotten() -> None:
    """A mask's shares in several bundles, cut between two of them."""
    fed = Mortal(False, dimension=320_000, share_mode=ShareMode.PAPER)
    fed.call(SERVER, fed.server.start)
    fed.settle()
    fed.send(0, fed.clients[0].restock())
    assert len(fed.on(0, SERVER)) > 1
    while fed.on(0, SERVER):
        fed.step_up(0)
        fed.server = restored(fed, fed.server.snapshot())
    assert list(fed.server._stock.shared[0]) == [0]


def snapshot() -> tuple[AsyncFederation, bytes]:
    fed = AsyncFederation(threat_model=HONEST, entropy=CountingEntropy).open()
    fed.leave(5)
    for client in range(3):
        fed.upload(client)
    fed.settle()
    return fed, fed.server.snapshot()


def test_R36_a_damaged_snapshot_of_a_server_is_refused() -> None:
    fed, stored = snapshot()
    rng = np.random.default_rng(2)
    for position in rng.integers(0, len(stored), 100):
        altered = bytearray(stored)
        altered[position] ^= 1 << int(rng.integers(8))
        with pytest.raises(DecodeError, match="malformed snapshot of a server"):
            EpochServer.restore(bytes(altered), fed.allow_list, Disk().recall)
    for length in (0, 1, 31, 32, 33, len(stored) - 1):
        with pytest.raises(DecodeError, match="malformed snapshot of a server"):
            EpochServer.restore(stored[:length], fed.allow_list, Disk().recall)


def test_R37_a_server_s_snapshot_of_another_version_or_allow_list_is_refused() -> None:
    fed, stored = snapshot()
    fields = msgspec.msgpack.decode(stored[HASH_LENGTH:], strict=False)
    newer = msgspec.msgpack.encode(fields | {"version": 7})
    sealed = context_hash("epoch server snapshot", newer) + newer
    with pytest.raises(DecodeError, match="version 7 is not read by this release"):
        EpochServer.restore(sealed, fed.allow_list, Disk().recall)
    fewer = AllowList({c: fed.allow_list[c] for c in range(5)})
    with pytest.raises(ParameterError, match="another allow-list"):
        EpochServer.restore(stored, fewer, Disk().recall)


def test_R36_a_snapshot_whose_roster_names_a_stranger_is_refused() -> None:
    fed, stored = snapshot()
    memory = Memory.from_bytes(stored)
    assert memory.roster is not None
    first, *others = memory.roster.members
    members = (msgspec.structs.replace(first, client=49), *others)
    roster = msgspec.structs.replace(memory.roster, members=members)
    altered = msgspec.structs.replace(memory, roster=roster).to_bytes()
    with pytest.raises(DecodeError, match="a roster of uninvited clients"):
        EpochServer.restore(altered, fed.allow_list, Disk().recall)


def test_a_snapshot_of_a_server_holds_no_vector() -> None:
    """Uploads are stored once each, by the driver; what is left grows with the model in no way."""
    fed = Mortal(False, dimension=50_000, dropouts=0, survivors=6)
    fed.open()
    for client in range(3):
        fed.upload(client)
    fed.settle()
    assert len(fed.disk.stored) == 3
    assert len(fed.server.snapshot()) < 20_000
    assert not [output for output in fed.server.resume() if isinstance(output, Send)]

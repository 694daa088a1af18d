"""Stateful targets: bytes decide what happens to whole rounds and epochs.

Who speaks next, what is lost, repeated, forged or flipped, who leaves and comes back, when the
server crashes and when deadlines fire: each decision takes bytes of the input. Whatever they are,
nothing but a declared refusal comes out of a party, nothing at all out of a session, and a finished
sum is the plain sum.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from epoch_history import Epochs
from epoch_lab import EpochLaboratory
from fuzz_decoders import epoch, film
from fuzz_target import Target
from history import STEPS, History, Kind
from round_history import Rounds
from session_lab import Laboratory
from test_histories import KINDS

from lightsecagg.errors import CryptoError, DecodeError, RemoteProtocolError
from lightsecagg.protocol.interface import SERVER
from lightsecagg.protocol.messages import AggregatedShare, MaskedUpload
from lightsecagg.session.envelope import name_of

# -- decisions ------------------------------------------------------------------------------------


class Decisions(random.Random):
    """Coins that are bytes of the input; when it is used up, those of a fixed generator.

    (Coins that show the same for ever would never draw two different things.)
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._next = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._next

    def getrandbits(self, k: int) -> int:
        if not self.left:
            return super().getrandbits(k)
        size = -(-k // 8)
        taken = self._data[self._next : self._next + size]
        self._next = min(self._next + size, len(self._data))
        return int.from_bytes(taken, "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / 65536


# -- the parties of the protocol ------------------------------------------------------------------


def live(mode: Callable[[Kind, int], History], kinds: list[Kind], data: bytes) -> None:
    """A history whose coins are the input: the first byte chooses what it is about."""
    coins = Decisions(data)
    rough = 1
    history = mode(kinds[coins.randrange(len(kinds))], rough)
    history.coins = coins
    events = history.EVENTS | history.ROUGH
    history.begin()
    for _ in range(STEPS):
        if not coins.left:
            break
        (event,) = coins.choices(list(events), list(events.values()))
        getattr(history, event)()
        history.check()
    history.finish()


ROUND_KINDS = [kind for kind in KINDS if kind.mode == "round"]
EPOCH_KINDS = [kind for kind in KINDS if kind.mode == "epoch"]


def live_rounds(data: bytes) -> None:
    live(Rounds, ROUND_KINDS, data)


def live_epochs(data: bytes) -> None:
    live(Epochs, EPOCH_KINDS, data)


def decisions() -> list[bytes]:
    return [random.Random(seed).randbytes(size) for seed, size in enumerate((0, 8, 60, 200, 400))]


# -- one client, one message ----------------------------------------------------------------------


def tell_round_client(data: bytes) -> None:
    """A server says anything to a client at any step; the first byte is the step."""
    one = film()
    steps = list(one.snapshots)
    client = one.client(steps[sum(data[:1]) % len(steps)])
    before = client.snapshot()
    try:
        client.receive(SERVER, one.federation.codec.decode(data[1:]))
    except RemoteProtocolError:
        assert client.snapshot() == before, "a refusal changes nothing"
        raise


def told_round_client() -> list[bytes]:
    one = film()
    codec = one.federation.codec
    return [
        bytes([step]) + codec.encode(message)
        for step in range(len(one.snapshots))
        for message in one.genuine.values()
    ]


def tell_epoch_client(data: bytes) -> None:
    """The same in the middle of an epoch; the first byte is the client."""
    federation = epoch()
    clients = sorted(federation.clients)
    me = clients[sum(data[:1]) % len(clients)]
    party = federation.clients[me]
    client = type(party).restore(
        party.snapshot(), federation.keys[me], federation.policy, party.generation
    )
    before = client.snapshot()
    try:
        client.receive(SERVER, federation.codec.decode(data[1:]))
    except RemoteProtocolError:
        assert client.snapshot() == before, "a refusal changes nothing"
        raise


# -- sessions: bytes in, bytes out ----------------------------------------------------------------

VECTORS = {kind.__name__ for kind in (MaskedUpload, MaskedUpload, AggregatedShare)}
"""Messages whose content is anybody's own business: a lie about one's update changes the sum."""


def live_sessions(make: Callable[[], Laboratory], data: bytes) -> None:
    """A federation whose network and machines do what the input says."""
    coins, lab = Decisions(data), make()
    lab.connect()
    for _ in range(STEPS):
        if not coins.left:
            break
        coins.choice(HAPPENINGS)(lab, coins)
    reconnect(lab)
    lab.wait(3000.0)


def walk(lab: Laboratory, coins: Decisions) -> None:
    for _ in range(coins.randrange(1, 64)):
        lab.step()


def tamper(lab: Laboratory, coins: Decisions) -> None:
    """A bit of a message is flipped, or its end is lost; of a vector, only the latter."""
    queue = coins.choice([lab.up, lab.down])
    if not queue or not queue[0][1]:  # all of it may be lost already
        return
    peer, message = queue.popleft()
    at = coins.randrange(len(message))
    if name_of(message) in VECTORS or coins.random() < 0.2:
        message = message[:at]
    else:
        flipped = message[at] ^ 1 << coins.randrange(8)
        message = message[:at] + bytes([flipped]) + message[at + 1 :]
    queue.appendleft((peer, message))


def repeat(lab: Laboratory, coins: Decisions) -> None:
    """A message arrives twice."""
    queue: deque[Any] = coins.choice([lab.up, lab.down])
    if queue:
        queue.appendleft(queue[0])


def lose_one(lab: Laboratory, coins: Decisions) -> None:
    if lab.online:
        lab.disconnect(coins.choice(sorted(lab.online)))


def reconnect(lab: Laboratory, coins: Decisions | None = None) -> None:
    away = set(lab.identities) - lab.online - set(lab.goodbyes)
    if away:
        lab.connect(*sorted(away))


def restart(lab: Laboratory, coins: Decisions) -> None:
    """A client's process ends, and a new one begins."""
    client = coins.choice(sorted(lab.identities))
    if client in lab.online:
        lab.trainings = [each for each in lab.trainings if each[0] != client]
        lab.restart(client)


def crash(lab: Laboratory, coins: Decisions) -> None:
    lab.crash()
    lab.start()
    reconnect(lab)


def wait(lab: Laboratory, coins: Decisions) -> None:
    lab.wait(float(coins.randrange(1, 64)))


HAPPENINGS = [*[walk] * 6, *[tamper] * 4, repeat, lose_one, reconnect, restart, crash, wait]


def live_round_sessions(data: bytes) -> None:
    live_sessions(lambda: Laboratory(number=1, retries=1), data)


def live_epoch_sessions(data: bytes) -> None:
    live_sessions(lambda: EpochLaboratory(number=2, retries=1), data)


PARTIES = [
    Target("parties:rounds", live_rounds, decisions, (), slow=True),
    Target("parties:epochs", live_epochs, decisions, (), slow=True),
    Target(
        "parties:round-client",
        tell_round_client,
        told_round_client,
        (DecodeError, RemoteProtocolError, CryptoError),
    ),
    Target(
        "parties:epoch-client",
        tell_epoch_client,
        lambda: [bytes([client]) + data[1:] for client in range(2) for data in told_round_client()],
        (DecodeError, RemoteProtocolError, CryptoError),
    ),
    Target("sessions:rounds", live_round_sessions, decisions, (), slow=True),
    Target("sessions:epochs", live_epoch_sessions, decisions, (), slow=True),
]

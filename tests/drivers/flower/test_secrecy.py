"""What leaves a node: masked vectors, keys and shares, and nothing that tells of its data (S16)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from local_grid import LocalGrid
from small_flower import MODEL, Arrays, Federation, arrays, fed_avg, record, update

from lightsecagg.drivers.flower.epoch import FORGOTTEN
from lightsecagg.drivers.flower.mod import REFUSED, UNPROTECTED
from lightsecagg.drivers.flower.node import Memory
from lightsecagg.flower import lightsecagg_mod

COUNT = 54_321
LOSS = 0.123456789
SENTENCE = "patient 4711 has a fever"


def telling_app(*mods: object) -> ClientApp:
    """An app whose count and metrics are easy to find."""
    app = ClientApp(mods=list(mods))  # type: ignore[arg-type]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_id == 103:
            raise ValueError(SENTENCE)
        trained = update(arrays(message.content["arrays"]), context.node_id, 1)
        if context.node_id == 104:
            trained["weight"][2, 3] = np.nan
        metrics = MetricRecord({"num-examples": COUNT, "loss": LOSS, "who": context.node_id})
        content = RecordDict({"arrays": record(trained), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def traces(node: int) -> Iterator[bytes]:
    """Every form in which a node's secrets could be found among bytes."""
    trained: Arrays = update(MODEL, node, 1)
    for name, array in trained.items():
        for kind in (np.float32, np.float64):
            yield array.astype(kind).tobytes()[16:32]
            yield (array.astype(kind) - MODEL[name].astype(kind)).tobytes()[16:32]
    for layout in "<>":
        yield struct.pack(f"{layout}q", COUNT)
        yield struct.pack(f"{layout}i", COUNT)
        yield struct.pack(f"{layout}d", LOSS)
        yield struct.pack(f"{layout}d", float(COUNT))
    yield msgspec.msgpack.encode(COUNT)
    yield _varint(2 * COUNT)  # signed numbers are stored so
    for text in (str(COUNT), str(LOSS), "num-examples", "loss", "fever", "4711", "nan"):
        yield text.encode()


def _varint(number: int) -> bytes:
    """As protobuf writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def found(grid: LocalGrid) -> set[bytes]:
    """The traces of nodes among all that their replies consist of."""
    return {
        trace
        for node, objects in grid.seen
        for content in objects
        for trace in traces(node)
        if len(trace) > 2 and trace in content
    }


def test_S16_the_search_finds_everything_in_plain_flower() -> None:
    grid = LocalGrid()
    for node in range(105, 109):
        grid.add(node, telling_app())
    fed_avg(4).start(grid, record(MODEL), num_rounds=1)
    seen = found(grid)
    assert update(MODEL, 105, 1)["weight"].tobytes()[16:32] in seen
    assert struct.pack("<d", LOSS) in seen
    assert _varint(2 * COUNT) in seen
    assert b"num-examples" in seen


def test_S16_nothing_of_an_update_a_count_or_a_metric_leaves_a_node() -> None:
    options = {"max_samples": 2**16, "metrics": {"loss": 1.0}, "attempts": 1}
    federation = Federation(8, **options)
    for node in federation.nodes.values():
        node.app = telling_app(lightsecagg_mod)
    result = federation.run(1)
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(LOSS, abs=1e-5)
    assert len(federation.grid.seen) == 8 * 5
    assert found(federation.grid) == set()


def test_S22_errors_of_apps_and_of_ours_reach_the_server_as_constants() -> None:
    federation = Federation(8, dropouts=3, attempts=1)
    for node in federation.nodes.values():
        node.app = telling_app(lightsecagg_mod)
    federation.nodes[105].node_config["lightsecagg-dir"] = "/patients/4711"
    federation.run(1)
    assert set(federation.grid.reasons) <= {REFUSED, FORGOTTEN, UNPROTECTED}
    assert REFUSED in federation.grid.reasons
    assert found(federation.grid) == set()


def test_S22_a_memory_shows_no_secret() -> None:
    memory = Memory(identity=b"private key", ledger=b"ledger")
    assert "private" not in repr(memory)
    assert "private" not in str([memory])

"""CPU seconds in which the server recovers the sum, once the survivors' answers are there.

Flower's SecAgg+ over the complete graph does it in its own `unmask_stage`; LightSecAgg decodes the
frames and the sum of the masks, and takes it away. What is in the vectors does not matter to
either: it is made up here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import (
    SecAggPlusWorkflow,
    WorkflowState,
)
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from flwr.supercore.task_identity import TaskIdentity

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.flower.agreed import allow_list_of
from lightsecagg.drivers.flower.epoch import Terms
from lightsecagg.masks.mask_encoding import join_pieces
from lightsecagg.masks.one_shot_recovery import recover_pieces
from lightsecagg.protocol.messages import AggregatedShare
from lightsecagg.protocol.wire import Codec

PRIVACY = 0.2


def measure(
    nodes: int, dim: int, dropouts: float, tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    ours = min(_lightsecagg(nodes, dim, dropouts) for _ in range(3))
    tell(f"lightsecagg: {ours:.3f} s of CPU")
    theirs = _secagg_plus(nodes, dim, dropouts)
    tell(f"secagg+: {theirs:.1f} s of CPU")
    return {
        "secagg+": {"cpu_seconds": round(theirs, 2)},
        "lightsecagg": {"cpu_seconds": round(ours, 3), "times_cheaper": round(theirs / ours)},
    }


def _lightsecagg(nodes: int, dim: int, dropouts: float) -> float:
    terms = Terms(privacy=PRIVACY, dropouts=dropouts, bound=1.0, max_samples=100)
    identities = allow_list_of(IdentityKey.generate().public for _ in range(nodes))
    settings = terms.settings(terms.parameters(nodes), identities, dim, bytes(32), 1)
    field, codec = settings.field, Codec(settings.field)
    random = np.random.default_rng()

    def elements(count: int) -> Any:
        return random.integers(0, field.modulus, count, dtype=np.uint32)

    survivors = settings.parameters.survivors
    frames = [
        codec.encode(AggregatedShare(elements(settings.share_length), 1)) for _ in range(survivors)
    ]
    samples = 100 * survivors
    wanted = np.zeros(settings.length, dtype=np.uint32)
    wanted[-1] = samples  # an average of zeros
    code = settings.code  # is made when the epoch begins
    begin = time.process_time()
    answers = {position: codec.decode(frame) for position, frame in enumerate(frames)}
    shares = {position: answer.vector for position, answer in answers.items()}
    pieces = recover_pieces(code, shares, 0, settings.share_length)
    mask = join_pieces(pieces, settings.length)
    decoded = time.process_time() - begin
    masked = field.add(wanted, mask)
    begin = time.process_time()
    average, count = settings.average(field.subtract(masked, mask), survivors)
    decoded += time.process_time() - begin
    assert count == samples
    assert not average.any()
    return decoded


def _secagg_plus(nodes: int, dim: int, dropouts: float) -> float:
    ids = list(range(101, 101 + nodes))
    active = set(ids[: nodes - int(dropouts * nodes)])
    threshold, random = nodes // 2, np.random.default_rng()
    keys = {node: generate_key_pairs() for node in ids}
    shares = {
        node: create_shares(
            random.bytes(32) if node in active else private_key_to_bytes(keys[node][0]),
            threshold,
            nodes,
        )
        for node in ids
    }
    workflow = SecAggPlusWorkflow(num_shares=nodes, reconstruction_threshold=threshold)
    state = WorkflowState(
        sampled_node_ids=set(ids),
        active_node_ids=active,
        num_shares=nodes,
        threshold=threshold,
        clipping_range=workflow.clipping_range,
        quantization_range=workflow.quantization_range,
        mod_range=workflow.modulus_range,
        max_weight=workflow.max_weight,
        nid_to_neighbours={node: set(ids) for node in ids},
        nid_to_publickeys={node: [public_key_to_bytes(keys[node][1])] for node in ids},
        aggregate_ndarrays=[np.array([1]), random.integers(0, workflow.modulus_range, dim)],
    )
    round_ = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})})
    strategy = SimpleNamespace(aggregate_fit=lambda *_: (None, {}))
    context = SimpleNamespace(state=round_, strategy=strategy)
    grid = _Answers(ids, shares)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    with np.errstate(all="ignore"):  # the vectors are made up, and so is their sum of weights
        begin = time.process_time()
        done = workflow.unmask_stage(grid, context, state)
        seconds = time.process_time() - begin
    assert done
    return seconds - grid.seconds


class _Answers:
    """Answers for the nodes; what that takes is not the server's."""

    def __init__(self, ids: list[int], shares: dict[int, list[bytes]]) -> None:
        self._ids, self._shares, self.seconds = ids, shares, 0.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[SimpleNamespace]:
        begin = time.process_time()
        replies = [self._reply(message.metadata.dst_node_id) for message in messages]
        self.seconds = time.process_time() - begin
        return replies

    def _reply(self, node: int) -> SimpleNamespace:
        mine = [self._shares[owner][self._ids.index(node)] for owner in self._ids]
        said = ConfigRecord({Key.NODE_ID_LIST: self._ids, Key.SHARE_LIST: mine})
        return SimpleNamespace(
            has_error=lambda: False,
            metadata=SimpleNamespace(src_node_id=node),
            content=RecordDict({RECORD_KEY_CONFIGS: said}),
        )

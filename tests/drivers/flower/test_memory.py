"""What a node remembers: nothing is answered or uploaded twice, whatever dies when (S06, S42)."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from local_grid import Killed, Node, carried
from small_flower import (
    CODEC,
    MODEL,
    Federation,
    answer_in,
    arrays,
    at_round,
    error,
    expected,
    folders,
    malicious,
    samples,
    stage_of,
    update,
)

from lightsecagg.drivers.federation.durable import ProcessLock
from lightsecagg.drivers.flower import mod
from lightsecagg.drivers.flower.agreed import FORGOTTEN
from lightsecagg.drivers.flower.mod import REFUSED
from lightsecagg.drivers.flower.node import Operator
from lightsecagg.drivers.flower.parcels import Parcel, attach, detach
from lightsecagg.errors import ParameterError
from lightsecagg.protocol.messages import SumRequest


def killed_after_its_answer(node: Node) -> list[Message]:
    """Let a node's process end between its answer and the storing of its Context."""
    met: Counter[str] = Counter()
    asked: list[Message] = []

    def after(message: Message, reply: Message) -> bool:
        met[stage_of(message)] += 1
        if stage_of(message) == "relay" and met["relay"] == 2:
            asked.append(message)
            raise Killed
        return True

    node.after = after
    return asked


def forged(message: Message, node: Node) -> Message:
    """The same request, for a sum without the last owner."""
    parcel, rest = detach(message.content)
    assert parcel is not None
    frames = []
    for frame in parcel.frames:
        decoded = CODEC.decode(frame)
        if isinstance(decoded, SumRequest):
            frame = CODEC.encode(SumRequest(decoded.time, decoded.tags[:-1]))
        frames.append(frame)
    content = attach(Parcel(parcel.numbers, tuple(frames)), rest)
    ((arrived, _),) = carried(Message(content, node.node_id, "train"))
    return arrived


def asked_again(node: Node, message: Message) -> Message:
    node.after = lambda message, reply: True
    node.inbox.append(("again", message))
    done = node.work()
    assert done is not None
    return done[1]


def second_answer(federation: Federation) -> Message:
    """What a node replies that was killed after its answer, and is asked for another sum."""
    node = federation.nodes[103]
    asked = killed_after_its_answer(node)
    federation.run(1)
    (message,) = asked
    return asked_again(node, forged(message, node))


def test_S06_a_node_without_a_folder_can_be_made_to_answer_twice() -> None:
    """The attack, where nothing is promised against a server that lies: see the next test."""
    assert answer_in(second_answer(Federation(8))) is not None


def test_S06_a_node_with_a_folder_answers_once_though_it_was_killed(tmp_path: Path) -> None:
    federation = Federation(8, node_config=folders(tmp_path))
    reply = second_answer(federation)
    assert reply.has_error()
    assert reply.error.reason == REFUSED


def test_S06_a_restarted_node_goes_on_from_its_folder_and_answers_once(tmp_path: Path) -> None:
    federation = Federation(8, node_config=folders(tmp_path))
    node = federation.nodes[103]
    asked: list[Message] = []

    def after(message: Message, reply: Message) -> bool:
        if stage_of(message) == "relay":
            asked.append(message)
        node.state = RecordDict()  # the SuperNode restarts after every message
        return True

    node.after = after
    assert error(federation.run(2), expected(MODEL, [list(federation.ids)] * 2)) < 1e-6
    ((again, _),) = carried(Message(asked[-1].content, 103, "train"))
    repeat = asked_again(node, again)
    assert answer_in(repeat) is not None  # the same question, the same answer
    assert asked_again(node, forged(asked[-1], node)).has_error()


def isolated(federation: Federation, again: Federation) -> np.ndarray[Any, Any]:
    """What two runs from one model, the second without node 108, say about node 108."""
    first, second = federation.run(1), again.run(1)
    assert first.arrays is not None
    assert second.arrays is not None
    everybody = sum(samples(node) for node in federation.ids)
    rest = everybody - samples(108)
    total = arrays(first.arrays)["weight"].astype(np.float64) * everybody
    return (total - arrays(second.arrays)["weight"].astype(np.float64) * rest) / samples(108)


def rerun(**options: Any) -> Federation:
    again = Federation(8, **options)
    again.nodes[108].connected = False
    return again


def test_S42_a_second_run_from_the_same_model_isolates_a_node_that_has_no_folder() -> None:
    """The attack: volatile memory begins every run anew."""
    found = isolated(Federation(8), rerun())
    assert np.abs(found - update(MODEL, 108, 1)["weight"]).max() < 1e-4


def test_S42_a_node_remembers_all_runs_and_sends_nothing_for_the_same_model(
    tmp_path: Path,
) -> None:
    config = folders(tmp_path)
    federation = Federation(8, node_config=config)
    with pytest.raises(RuntimeError, match="0 of 7 nodes have sent an update"):
        isolated(federation, rerun(node_config=config))
    moved = {name: array + np.float32(1) for name, array in MODEL.items()}
    again = Federation(8, node_config=config)
    assert error(again.run(2, moved), expected(moved, [list(again.ids)] * 2)) < 1e-6


def test_with_a_folder_nothing_is_left_to_flower(tmp_path: Path) -> None:
    """A large Context is lost without an error; a large file is not."""
    federation = Federation(6, dropouts=1, node_config=folders(tmp_path, 6))
    model = {"weight": np.zeros(300_000, dtype=np.float32)}
    assert error(federation.run(2, model), expected(model, [list(federation.ids)] * 2)) < 1e-6
    for node_id, node in federation.nodes.items():
        assert not node.state
        folder = tmp_path / str(node_id)
        assert (folder / "memory").stat().st_mode & 0o777 == 0o600
        assert (folder / "memory").stat().st_size < 16_000, "seeds and hashes"
        parts = list((folder / "parts").iterdir())
        assert len(parts) == 3, "one of six peers has sent explicit shares of two masks; the answer"
        assert all(part.stat().st_mode & 0o777 == 0o600 for part in parts)


WIDE = {"weight": np.zeros(5_000, dtype=np.float32)}
"""A model whose shares are too large for the memory itself."""


def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the nodes write into their logs from now on."""
    lines: list[str] = []
    monkeypatch.setattr(mod, "log", lambda level, text, *values, **_: lines.append(text % values))
    return lines


@pytest.mark.parametrize("how", ["removed", "altered"])
def test_S06_a_share_that_is_lost_is_named_and_its_node_enrolled_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(6, dropouts=1, node_config=folders(tmp_path, 6))
    everybody = list(federation.ids)
    lost: list[str] = []

    def lose() -> None:
        for part in sorted((tmp_path / "103" / "parts").iterdir()):
            lost.append(str(part))
            part.unlink() if how == "removed" else part.write_bytes(b"older")

    at_round(federation, 2, lose)
    lines = logged(monkeypatch)
    included = [node for node in everybody if how == "altered" or node != 103]
    wanted = expected(WIDE, [everybody, included, everybody])
    assert error(federation.run(3, WIDE), wanted) < 1e-6
    assert FORGOTTEN in federation.grid.reasons
    assert any(part in line for part in lost for line in lines)


def rolled_back(tmp_path: Path, *names: str) -> Message:
    """What a node replies for another sum, when these of its files are from before its answer."""
    federation = Federation(8, node_config=folders(tmp_path))
    folder, older = tmp_path / "103", tmp_path / "older"
    asked: list[Message] = []

    def before(message: Message) -> None:
        if stage_of(message) == "relay":
            shutil.rmtree(older, ignore_errors=True)
            shutil.copytree(folder, older)
            asked.append(copy.copy(message))

    node = federation.nodes[103]
    node.before = before
    federation.run(1, WIDE)
    node.before = lambda message: None
    for name in names:
        if (older / name).is_dir():
            shutil.rmtree(folder / name)
            shutil.copytree(older / name, folder / name)
        else:
            shutil.copy(older / name, folder / name)
    return asked_again(node, forged(asked[-1], node))


def test_S06_a_folder_that_is_put_back_as_a_whole_answers_twice(tmp_path: Path) -> None:
    """The attack: nothing in an old folder says that there was a newer one."""
    assert answer_in(rolled_back(tmp_path, "memory", "parts", "mark")) is not None


def test_S06_an_older_memory_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = logged(monkeypatch)
    assert rolled_back(tmp_path, "memory", "parts").error.reason == REFUSED
    assert f"{tmp_path / '103' / 'memory'} is of generation" in lines[-1]


@pytest.mark.parametrize("name", ["memory", "mark"])
def test_S06_a_memory_or_mark_that_is_gone_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(6, dropouts=1, node_config=folders(tmp_path, 6))
    at_round(federation, 2, (tmp_path / "103" / name).unlink)
    lines = logged(monkeypatch)
    everybody = list(federation.ids)
    rest = [node for node in everybody if node != 103]
    assert error(federation.run(2), expected(MODEL, [everybody, rest])) < 1e-6
    assert any(str(tmp_path / "103" / name) in line and "gone" in line for line in lines)


@pytest.mark.unix
@pytest.mark.parametrize("name", ["memory", "parts"])
def test_S61_a_memory_that_others_may_read_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the node's key, its seeds and its peers' shares."""
    federation = Federation(6, dropouts=1, node_config=folders(tmp_path, 6))
    folder = tmp_path / "103"

    def show() -> None:
        for path in [folder / name] if name == "memory" else (folder / name).iterdir():
            path.chmod(0o644)

    at_round(federation, 2, show)
    lines = logged(monkeypatch)
    everybody = list(federation.ids)
    # Parts are read for the answer: after its upload.
    included = [node for node in everybody if name == "parts" or node != 103]
    assert error(federation.run(2, WIDE), expected(WIDE, [everybody, included])) < 1e-6
    assert any("holds a secret, and others may read or change it" in line for line in lines)


def test_a_context_that_was_not_stored_is_noticed_and_not_gone_on_from() -> None:
    """Flower gives up storing a large Context without a word: the node has an older one."""
    federation = Federation(6, dropouts=1)
    met: Counter[str] = Counter()

    def after(message: Message, reply: Message) -> bool:
        met[stage_of(message)] += 1
        if stage_of(message) == "relay" and met["relay"] == 2:
            raise Killed
        return True

    federation.nodes[103].after = after
    everybody = list(federation.ids)
    rest = [node for node in everybody if node != 103]
    assert error(federation.run(3), expected(MODEL, [everybody, rest, everybody])) < 1e-6
    assert FORGOTTEN in federation.grid.reasons


def test_R36_a_damaged_memory_is_refused(tmp_path: Path) -> None:
    federation = Federation(6, dropouts=1, node_config=folders(tmp_path, 6))
    federation.run(1)
    file = tmp_path / "103" / "memory"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    moved = {name: array + np.float32(1) for name, array in MODEL.items()}
    again = Federation(6, dropouts=1, node_config=folders(tmp_path, 6))
    rest = [node for node in again.ids if node != 103]
    assert error(again.run(1, moved), expected(moved, [rest])) < 1e-6
    assert again.grid.reasons == [REFUSED]


def test_two_nodes_cannot_share_a_folder(tmp_path: Path) -> None:
    config = folders(tmp_path, 6)
    config[104] = config[103]
    with pytest.raises(RuntimeError, match="two nodes have one identity; give every node a folder"):
        Federation(6, dropouts=1, node_config=config).run(1)


def test_a_folder_that_is_in_use_or_missing_is_refused(tmp_path: Path) -> None:
    config = folders(tmp_path, 6)
    lock = ProcessLock(tmp_path / "103" / "lock", "in use")
    config[104]["lightsecagg_dir"] = str(tmp_path / "missing")
    federation = Federation(6, privacy=1, dropouts=2, node_config=config)
    rest = [node for node in federation.ids if node not in (103, 104)]
    assert error(federation.run(1), expected(MODEL, [rest])) < 1e-6
    lock.release()
    assert federation.grid.reasons == [REFUSED, REFUSED]


# -- what the operator demands -------------------------------------------------------------------


@pytest.mark.parametrize(
    "demand",
    [
        {"lightsecagg_privacy": 3},
        {"lightsecagg_minimum": 7},
        {"lightsecagg_bound": 0.5},
        {"lightsecagg_threat_model": "malicious-server"},
        {"lightsecagg_threat_modell": "malicious-server"},
        {"lightsecagg_privacy": "many"},
    ],
    ids=lambda demand: " ".join(f"{key}={value}" for key, value in demand.items()),
)
def test_S01_a_node_takes_part_in_nothing_less_than_its_operator_demands(
    demand: dict[str, Any],
) -> None:
    federation = Federation(8, node_config={103: demand})
    rest = [node for node in federation.ids if node != 103]
    assert error(federation.run(1), expected(MODEL, [rest])) < 1e-6
    assert federation.grid.reasons == [REFUSED]


def test_S01_demands_that_are_met_change_nothing() -> None:
    demand = {"lightsecagg_privacy": 2, "lightsecagg_minimum": 6, "lightsecagg_bound": 1.0}
    federation = Federation(8, node_config=dict.fromkeys(range(101, 109), demand))
    assert error(federation.run(1), expected(MODEL, [list(federation.ids)])) < 1e-6


def test_S49_short_keys_need_every_operators_word() -> None:
    with pytest.raises(RuntimeError, match="LightSecAgg, enrolment: "):
        Federation(6, dropouts=1, share_mode="short-key").run(1)
    said = {node: {"lightsecagg_share_mode": "short-key"} for node in range(101, 107)}
    federation = Federation(6, dropouts=1, share_mode="short-key", node_config=said)
    assert error(federation.run(2), expected(MODEL, [list(federation.ids)] * 2)) < 2e-3
    with pytest.raises(ParameterError, match="'short-keys' is unknown; choose one of paper"):
        Federation(6, share_mode="short-keys")


def test_S05_malicious_server_mode_takes_one_exchange_more(tmp_path: Path) -> None:
    options = {"threat_model": "malicious-server", "timeout": 60}
    federation = Federation(8, node_config=malicious(tmp_path), **options)
    wanted = expected(MODEL, [list(federation.ids)] * 2)
    assert error(federation.run(2), wanted) < 1e-6
    assert federation.grid.pushed <= 8 * (3 + 2 * 3)


def test_S02_an_identity_that_is_not_on_the_nodes_list_is_refused(tmp_path: Path) -> None:
    options = {"threat_model": "malicious-server", "node_config": malicious(tmp_path, listed=7)}
    with pytest.raises(RuntimeError, match="LightSecAgg, enrolment: "):
        Federation(8, **options).run(1)


def test_malicious_server_mode_needs_a_folder_and_a_list() -> None:
    federation = Federation(8, threat_model="malicious-server")
    with pytest.raises(RuntimeError, match="LightSecAgg, enrolment: "):
        federation.run(1)
    assert set(federation.grid.reasons) == {REFUSED}


def pair(tmp_path: Path, privacy: int) -> Federation:
    """An epoch with T = 0 over a node and one that colludes, both on the list of eight."""
    config = malicious(tmp_path)
    for node in config:
        config[node]["lightsecagg_privacy"] = privacy
    options = {"threat_model": "malicious-server", "privacy": 0, "dropouts": 0, "timeout": 60}
    return Federation(2, node_config=config, **options)


def test_S01_a_server_that_chooses_T_sums_a_node_with_one_that_colludes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack, on operators that demand nothing: the colluder takes its own update away."""
    monkeypatch.setattr(Operator, "check_fit", lambda operator: None)
    result = pair(tmp_path, privacy=0).run(1)
    assert result.arrays is not None
    total = arrays(result.arrays)["weight"].astype(np.float64) * (samples(101) + samples(102))
    rest = total - update(MODEL, 102, 1)["weight"] * samples(102)
    assert np.abs(rest / samples(101) - update(MODEL, 101, 1)["weight"]).max() < 1e-5


@pytest.mark.parametrize("privacy", [1, 0, -1])
def test_S01_malicious_server_mode_needs_the_operators_least_T(
    privacy: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = logged(monkeypatch)
    federation = pair(tmp_path, privacy)
    with pytest.raises(RuntimeError, match="LightSecAgg, enrolment: "):
        federation.run(1)
    assert set(federation.grid.reasons) == {REFUSED}
    named = f"needs lightsecagg-privacy of at least 1 in node-config, not {privacy}"
    assert any(named in line for line in lines) == (privacy < 1)


def test_S01_a_strategys_malicious_server_mode_needs_the_operators_least_T_too(
    tmp_path: Path,
) -> None:
    config = malicious(tmp_path)
    del config[103]["lightsecagg_threat_model"], config[103]["lightsecagg_privacy"]
    federation = Federation(8, threat_model="malicious-server", node_config=config, timeout=60)
    rest = [node for node in federation.ids if node != 103]
    assert error(federation.run(1), expected(MODEL, [rest])) < 1e-6
    assert federation.grid.reasons == [REFUSED]

"""The public API: its names, its import cost, `aggregate`, and the documented driver."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightsecagg
from laboratory import baseline, needs_laboratory
from lightsecagg import aggregate
from lightsecagg.drivers import aggregation
from lightsecagg.drivers.local import run_round
from lightsecagg.errors import Aborted, InputRefused, ParameterError, RecoveryError
from lightsecagg.params import PAPER_MODULUS, ThreatModel
from lightsecagg.protocol.interface import Aggregate
from lightsecagg.protocol.schemes.traits import protocols

ROOT = Path(__file__).parent.parent


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


# -- names ---------------------------------------------------------------------------------------


def test_every_public_name_exists_and_is_typed() -> None:
    for name in lightsecagg.__all__:
        assert getattr(lightsecagg, name) is not None
        assert name in dir(lightsecagg)
    assert set(lightsecagg.__all__) == {
        name for name in dir(lightsecagg) if not name.startswith("__")
    } | {"__version__"}
    assert sorted(lightsecagg._HOME_OF) == sorted(set(lightsecagg.__all__) - {"__version__"})
    with pytest.raises(AttributeError, match="no attribute 'agregate'"):
        lightsecagg.agregate  # noqa: B018 - a name that does not exist


def test_importing_the_package_loads_no_dependency_and_no_module_of_its_own() -> None:
    code = (
        "import sys, lightsecagg\n"
        "roots = {'numpy', 'cryptography', 'msgspec', 'typer', 'rich'}\n"
        "assert not {name for name in sys.modules if name.split('.')[0] in roots}\n"
        "assert not {name for name in sys.modules if name.startswith('lightsecagg.')}\n"
    )
    done = _python("-c", code)
    assert done.returncode == 0, done.stderr


def test_flower_without_flwr_says_what_to_install() -> None:
    code = "import sys; sys.modules['flwr'] = None; import lightsecagg.flower"
    done = _python("-c", code)
    assert "lightsecagg.flower needs flwr 1.41 or newer" in done.stderr
    assert "pip install -c constraints.txt '.[flower]'" in done.stderr


@pytest.mark.parametrize("extra", ["torch", "grpc", "flwr", "pydantic", "sklearn", "matplotlib"])
def test_the_api_needs_no_extra(extra: str) -> None:
    code = (
        "import sys, lightsecagg\n"
        "[getattr(lightsecagg, name) for name in lightsecagg.__all__]\n"
        f"assert {extra!r} not in sys.modules\n"
    )
    done = _python("-c", code)
    assert done.returncode == 0, done.stderr


# -- aggregate -----------------------------------------------------------------------------------


def _vectors(clients: int, shape: tuple[int, ...] = (5,)) -> list[np.ndarray[Any, Any]]:
    return list(np.random.default_rng(1).uniform(-1, 1, (clients, *shape)))


@pytest.mark.parametrize("protocol", protocols())
def test_every_protocol_gives_sum_and_mean(protocol: str) -> None:
    vectors = _vectors(6, (3, 4))
    result = aggregate(vectors, protocol=protocol, privacy=2, dropouts=1, bound=1.0)
    assert result.included == tuple(range(6))
    assert result.weight == 6
    assert result.mean.shape == (3, 4)
    np.testing.assert_allclose(result.sum, np.sum(vectors, axis=0), atol=1e-7)
    np.testing.assert_allclose(result.mean, np.mean(vectors, axis=0), atol=1e-7)


def test_dicts_come_back_as_dicts_with_their_shapes_and_types() -> None:
    updates = [
        {
            "layer.weight": np.full((2, 3), c / 10, dtype=np.float32),
            "layer.bias": np.array(c / 8, dtype=np.float64),
            "empty": np.zeros((0, 4), dtype=np.float16),
        }
        for c in range(5)
    ]
    result = aggregate(updates, privacy=1, bound=1.0)
    assert list(result.mean) == ["layer.weight", "layer.bias", "empty"]
    for name, array in updates[0].items():
        assert result.mean[name].shape == array.shape
        assert result.mean[name].dtype == array.dtype
    np.testing.assert_allclose(result.mean["layer.weight"], 0.2, atol=1e-6)
    np.testing.assert_allclose(result.sum["layer.bias"], 1.25, atol=1e-7)


@pytest.mark.parametrize("weights", [None, [1, 20, 3, 7, 5]])
def test_S47_a_spoilt_sum_is_an_error_and_no_average(
    monkeypatch: pytest.MonkeyPatch, weights: list[int] | None
) -> None:
    def spoil(*arguments: Any) -> Aggregate:
        result = run_round(*arguments)
        assert isinstance(result, Aggregate)
        total = result.total.copy()
        total[1] = lightsecagg.Parameters(2, 0, 0).modulus // 2 - 2
        return dataclasses.replace(result, total=total)

    monkeypatch.setattr(aggregation, "run_round", spoil)
    # Without weights, a sum over all five may be as large as the field allows: one is gone.
    vectors = [None, *_vectors(4)]
    with pytest.raises(RecoveryError, match=r"entry 1 of the average lies beyond the bound 1\.0: "):
        aggregate(vectors, privacy=1, dropouts=1, bound=1.0, weights=weights)


class Tensor:
    """What `aggregate` asks of a tensor, without torch."""

    def __init__(self, values: list[float]) -> None:
        self._values: list[float] | None = values

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Any:
        return np.array(self._values, dtype=np.float32)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        Tensor,
        lambda row: np.array(row, dtype=np.float16),
        lambda row: np.array(row).astype(int),
    ],
)
def test_lists_tensors_and_integers_will_do(make: Any) -> None:
    rows = [[float(c), 2.0] for c in range(5)]
    result = aggregate([make(row) for row in rows], privacy=1, bound=4.0)
    np.testing.assert_allclose(result.mean, [2.0, 2.0], atol=1e-2)
    named = aggregate([{"w": make(row)} for row in rows], privacy=1, bound=4.0)
    np.testing.assert_allclose(named.sum["w"], [10.0, 10.0], atol=1e-2)


def test_a_state_dict_of_torch_can_be_averaged_as_it_is() -> None:
    torch = pytest.importorskip("torch")
    models = [torch.nn.Linear(2, 1) for _ in range(4)]
    result = aggregate([dict(m.named_parameters()) for m in models], privacy=1, bound=4.0)
    expected = np.mean([m.weight.detach().numpy() for m in models], axis=0)
    np.testing.assert_allclose(result.mean["weight"], expected, atol=1e-6)


def test_every_error_is_a_public_name() -> None:
    kinds = [k for k in vars(lightsecagg.errors).values() if isinstance(k, type)]
    ours = [kind for kind in kinds if issubclass(kind, lightsecagg.LightSecAggError)]
    assert len(ours) > 10
    assert all(getattr(lightsecagg, kind.__name__) is kind for kind in ours)


def test_weights_average_and_dropped_clients_are_left_out() -> None:
    vectors = _vectors(6)
    weights = [1, 20, 3, 7, 5, 2]
    received = [None if client in (1, 4) else vector for client, vector in enumerate(vectors)]
    result = aggregate(received, privacy=1, dropouts=2, weights=weights, bound=1.0)
    assert result.included == (0, 2, 3, 5)
    assert result.weight == 13
    chosen = [vectors[c] for c in result.included]
    expected = np.average(chosen, axis=0, weights=[weights[c] for c in result.included])
    np.testing.assert_allclose(result.mean, expected, atol=1e-6)
    np.testing.assert_allclose(result.sum, 13 * expected, atol=1e-5)


@given(
    st.integers(4, 8),
    st.integers(1, 3),
    st.floats(1e-3, 1e3),
    st.sampled_from([lightsecagg.Parameters(2, 0, 0).modulus, PAPER_MODULUS]),
    st.data(),
)
@settings(max_examples=15)
def test_the_error_is_within_the_resolution(
    clients: int, size: int, bound: float, modulus: int, data: st.DataObject
) -> None:
    entries = st.floats(-bound, bound)
    rows = data.draw(
        st.lists(
            st.lists(entries, min_size=size, max_size=size), min_size=clients, max_size=clients
        )
    )
    vectors = [np.array(row) for row in rows]
    result = aggregate(vectors, privacy=1, bound=bound, modulus=modulus)
    # Each rounding is off by less than a quantum, 1 / c_l, and c_l is the largest that is safe.
    quantum = 2 * clients * bound / (modulus - 3) * 1.01
    np.testing.assert_allclose(result.sum, np.sum(vectors, axis=0), atol=clients * quantum)


def test_too_few_clients_abort() -> None:
    received: list[Any] = [*_vectors(4), None, None]
    with pytest.raises(Aborted, match="only 4 clients uploaded"):
        aggregate(received, privacy=1, dropouts=1, bound=1.0)


def test_malicious_server_mode_runs_the_agreement() -> None:
    result = aggregate(
        _vectors(6), privacy=1, dropouts=2, bound=1.0, threat_model=ThreatModel.MALICIOUS_SERVER
    )
    assert result.included == tuple(range(6))


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf")])
def test_S13_an_entry_beyond_the_bound_is_refused_with_its_client(value: float) -> None:
    vectors = _vectors(5)
    vectors[3][2] = value
    with pytest.raises(InputRefused, match="client 3: entry 2"):
        aggregate(vectors, privacy=1, bound=1.0)


def test_S13_clipping_is_for_those_who_ask_and_never_for_nan_or_infinity(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vectors = _vectors(5)
    vectors[3][2] = 7.0
    result = aggregate(vectors, privacy=1, bound=1.0, clip=True)
    cut = 100 / vectors[3].size
    assert caplog.messages == [
        f"{cut / 5:.3g} % of the entries were clipped to the bound 1; of client 3's, {cut:.3g} %"
    ]
    vectors[3][2] = 1.0
    aggregate(vectors, privacy=1, bound=1.0, clip=True)
    assert len(caplog.messages) == 1
    np.testing.assert_allclose(result.sum, np.sum(vectors, axis=0), atol=1e-7)
    for broken in (np.nan, np.inf, -np.inf):
        vectors[3][2] = broken
        with pytest.raises(InputRefused, match="NaN or infinite"):
            aggregate(vectors, privacy=1, bound=1.0, clip=True)


@pytest.mark.parametrize(
    ("vectors", "options", "error", "message"),
    [
        ([None, None], {}, ParameterError, "no client has a vector"),
        (5, {}, InputRefused, "vectors is int; give a list with one array, or None, per client"),
        ({"a": [1.0]}, {}, InputRefused, "vectors is dict; give a list"),
        ([["a", "b"]] * 4, {}, InputRefused, "the array is list of <U1; only numbers"),
        ([], {}, ParameterError, "vectors is empty"),
        ([[1.0, [2.0]]] * 4, {}, InputRefused, "the array is a list of parts that make no array"),
        ([{"w": np.array([1j])}] * 4, {}, InputRefused, "array 'w' is ndarray of complex128"),
        ([np.zeros(3)] * 4, {"bound": "1"}, ParameterError, "bound = '1' must be a number"),
        ([np.zeros(3)] * 4, {"bound": None}, ParameterError, "bound = None must be a number"),
        ([np.zeros(3)] * 4, {"bound": True}, ParameterError, "bound = True must be a number"),
        ([np.zeros(3)] * 4, {"privacy": "1"}, ParameterError, "privacy T = '1' must be an integer"),
        ([np.zeros(3)] * 3 + [np.zeros(4)], {}, InputRefused, r"client 3 is .* of shape \(4,\)"),
        ([{"a": np.zeros(2)}] * 3 + [{}], {}, InputRefused, "client 3 .*: 'a' is missing"),
        (
            [{"a": np.zeros(2)}] * 3 + [{"a": np.zeros(2), "b": np.zeros(2)}],
            {},
            InputRefused,
            "client 3 has other arrays than the first client: 'b' is new",
        ),
        ([{"a": np.zeros(2)}] * 3 + [np.zeros(2)], {}, InputRefused, "client 3 has other"),
        ([np.zeros(3)] * 4, {"weights": [1, 2]}, ParameterError, "2 weights were given for 4"),
        ([np.zeros(3)] * 4, {"weights": [1, 2, 0, 1]}, ParameterError, "client 2 is 0"),
        ([np.zeros(3)] * 4, {"weights": [1, 2, 0.5, 1]}, ParameterError, "client 2 is 0.5"),
        ([np.zeros(3)] * 4, {"protocol": "rot13"}, ParameterError, "choose one of lightsecagg"),
        (
            [np.zeros(3)] * 4,
            {"privacy": 3},
            ParameterError,
            r"lower privacy \(T\) or dropouts \(D\)",
        ),
        ([np.zeros(0)] * 4, {}, ParameterError, "dimension d = 0"),
        baseline(
            [np.zeros(3)] * 20,
            {"protocol": "secagg+", "privacy": 8, "neighbours": 4, "threshold": 2},
            ParameterError,
            "insecure parameters",
        ),
    ],
)
def test_what_cannot_be_aggregated_is_refused(
    vectors: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        aggregate(vectors, **{"privacy": 1, "bound": 1.0, **options})


def test_tensors_give_tensors_of_their_own_type() -> None:
    torch = pytest.importorskip("torch")

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    models = [model(seed) for seed in range(4)]
    result = aggregate([each.state_dict() for each in models], privacy=1, bound=2.0)
    mean = torch.stack([each[0].weight for each in models]).mean(dim=0)
    models[0].load_state_dict(result.mean)
    assert torch.allclose(models[0][0].weight, mean, atol=1e-6)
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        halves = aggregate([torch.full((2, 3), 0.5, dtype=kind)] * 4, privacy=1, bound=1.0)
        assert halves.mean.dtype == halves.sum.dtype == kind
        assert torch.allclose(halves.sum, torch.full((2, 3), 2.0, dtype=kind), atol=1e-6)
    parameters = list(models[0].parameters())
    for wrong, reason in (
        (torch.eye(3).to_sparse(), "is a sparse tensor; give it as a dense one"),
        (parameters, "give a dict of arrays, such as a state dict"),
        ([torch.zeros(2), torch.zeros(3)], "a list of parts that make no array"),
    ):
        with pytest.raises(InputRefused, match=reason):
            aggregate([wrong] * 4, privacy=1, bound=2.0)


def test_a_result_is_printed_in_a_line() -> None:
    shown = repr(aggregate([{"w": np.zeros((30, 40))}] * 4, privacy=1, bound=1.0))
    arrays = "<1 arrays, 1,200 entries>"
    assert shown == (
        f"AggregationResult(mean={arrays}, sum={arrays}, weight=4, included=(0, 1, 2, 3))"
    )
    assert "<float64 of shape (1000,)>" in repr(aggregate([np.zeros(1000)] * 4, privacy=1, bound=1))
    assert "mean=[0. 0.]" in repr(aggregate([np.zeros(2)] * 4, privacy=1, bound=1))


@pytest.mark.parametrize("option", [{"threat_model": "gentle"}, {"share_mode": "loud"}])
def test_unknown_choices_are_refused_with_the_known_ones(option: dict[str, str]) -> None:
    with pytest.raises(ParameterError, match="choose one of"):
        aggregate(_vectors(4), privacy=1, bound=1.0, **option)  # type: ignore[arg-type]


# -- bring your own transport --------------------------------------------------------------------


@needs_laboratory
def test_a_party_speaks_one_protocol() -> None:
    identities = {client: lightsecagg.IdentityKey.generate() for client in range(4)}
    allow_list = lightsecagg.AllowList({c: key.public for c, key in identities.items()})
    both = ("secagg", "secagg+")
    policy = lightsecagg.Policy(allow_list, bytes(32), privacy=1, protocols=both)
    ledger = lightsecagg.Ledger.volatile()
    assert lightsecagg.client_party(0, identities[0], policy, ledger).client == 0
    mixed = ("secagg", "plain")
    policy = lightsecagg.Policy(allow_list, bytes(32), privacy=1, protocols=mixed)
    with pytest.raises(ParameterError, match="one protocol, but the policy names secagg, plain"):
        lightsecagg.client_party(0, identities[0], policy, ledger)


def test_the_socket_example_survives_a_dropout() -> None:
    done = _python(str(ROOT / "examples" / "own_transport.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sum of clients (0, 1, 2, 4), largest error ")
    assert float(done.stdout.split()[-1]) < 1e-6


def test_the_aggregate_example_matches_the_average_in_the_clear() -> None:
    done = _python(str(ROOT / "examples" / "aggregate.py"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "included: (0, 1, 2, 3, 5), patients: 1270"
    secure, clear = (
        np.array(line.split(":")[1].strip(" []").split(), dtype=float) for line in lines[1:]
    )
    np.testing.assert_allclose(secure, clear, atol=2e-4)


def test_two_ordinary_sums_give_away_a_client_that_is_missing_from_one() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    done = _python(str(ROOT / "examples" / "many_rounds.py"))
    assert done.returncode == 0, done.stderr
    unequal = [line for line in done.stdout.splitlines() if "few labels each" in line]
    assert len(unequal) == 2
    for line in unequal:
        lowest, _, _, *alone = map(float, re.findall(r"-?\d\.\d\d", line))
        assert lowest > 0.8 > 0.6 > max(alone)


def test_the_documented_driver_is_the_one_that_runs() -> None:
    page = (ROOT / "docs" / "own-transport.md").read_text("utf-8")
    example = (ROOT / "examples" / "own_transport.py").read_text("utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    assert len(blocks) == 3
    for block in blocks:
        assert block in example
    driver = "".join(blocks[:2])
    assert len(driver.splitlines()) <= 40


@pytest.mark.parametrize("decoding", [None, "exact", "dithered"])
def test_S49_aggregate_with_short_keys(decoding: str | None) -> None:
    rng = np.random.default_rng(5)
    vectors = [rng.uniform(-1, 1, 3000) for _ in range(6)]
    result = aggregate(
        [*vectors[:5], None],
        privacy=1,
        dropouts=1,
        survivors=3,
        bound=1.0,
        weights=[1, 2, 3, 4, 5, 6],
        share_mode="short-key",
        decoding=decoding,
    )
    expected = np.average(vectors[:5], axis=0, weights=[1, 2, 3, 4, 5])
    np.testing.assert_allclose(result.mean, expected, atol=1e-3)
    assert result.weight == 15
    assert result.included == (0, 1, 2, 3, 4)


def test_decoding_is_for_short_keys_and_has_two_names() -> None:
    vectors = [np.zeros(3)] * 4
    with pytest.raises(ParameterError, match="exact decoding is for short keys"):
        aggregate(vectors, privacy=1, bound=1.0, decoding="exact")
    with pytest.raises(ParameterError, match="choose one of exact, dithered"):
        aggregate(vectors, privacy=1, bound=1.0, share_mode="short-key", decoding="rough")


@pytest.mark.parametrize("bound", [1, np.float32(1), np.float64(1), np.int64(1)])
@pytest.mark.parametrize("threat_model", ["honest-but-curious", "malicious-server"])
def test_a_bound_may_be_any_number(bound: Any, threat_model: str) -> None:
    vectors = [np.full(4, k / 10) for k in range(5)]
    options = {"privacy": 1, "dropouts": 1, "threat_model": threat_model}
    result = lightsecagg.aggregate(vectors, bound=bound, **options)
    np.testing.assert_allclose(result.mean, np.full(4, 0.2), atol=1e-6)


@needs_laboratory
@pytest.mark.parametrize("number", [np.int32, np.int64, np.uint8])
def test_counts_may_be_integers_of_numpy(number: Any) -> None:
    vectors = [np.full(4, k / 10) for k in range(6)]
    counts = {name: number(n) for name, n in {"privacy": 1, "dropouts": 1, "survivors": 4}.items()}
    for more in {}, {"protocol": "secagg+", "neighbours": number(4), "threshold": number(3)}:
        taken = counts if not more else {**counts, **more, "survivors": number(0)}
        result = lightsecagg.aggregate(vectors, bound=1, **taken)
        np.testing.assert_allclose(result.mean, np.full(4, 0.25), atol=1e-6)

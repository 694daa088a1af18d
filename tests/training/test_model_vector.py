from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightsecagg.errors import ParameterError
from lightsecagg.training import Layout, load_vector, restore, vectorize
from lightsecagg.training.models import MODELS, build_model

SHAPES: dict[str, tuple[int, ...]] = {
    "logistic": (1, 28, 28),
    "mlp": (1, 8, 8),
    "cnn": (1, 28, 28),
    "lenet5": (3, 32, 32),
    "mobilenetv3-small": (3, 32, 32),
    "efficientnet-b0": (3, 32, 32),
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype
        assert first[name].shape == second[name].shape
        if first[name].dim() == 0:
            assert first[name].item() == second[name].item()
        else:
            assert bits(first[name]) == bits(second[name]), name


def warmed_up(name: str, dtype: torch.dtype) -> nn.Module:
    """A model whose batch-norm statistics and counters are no longer the initial ones."""
    torch.manual_seed(1)
    model = build_model(name, SHAPES[name], 10)
    model.train()
    with torch.no_grad():
        model(torch.randn(4, *SHAPES[name]))
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(MODELS))
def test_round_trip_is_exact_for_every_model(name: str, dtype: torch.dtype) -> None:
    with torch.random.fork_rng(devices=[]):
        state = warmed_up(name, dtype).state_dict()
        other = build_model(name, SHAPES[name], 10).to(dtype)
    layout = Layout.of(other)
    vector = vectorize(state, layout)
    assert vector.dtype == np.float32
    assert vector.shape == (layout.size,)
    assert_same_bits(restore(vector, layout, state), dict(state))
    # Into a model that started from other weights: all floats move, integer buffers stay.
    counters = {k: v.clone() for k, v in other.state_dict().items() if not v.is_floating_point()}
    load_vector(other, vector, layout)
    assert np.array_equal(vectorize(other.state_dict(), layout), vector)
    assert all(torch.equal(other.state_dict()[k], v) for k, v in counters.items())


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=6, max_size=6))
def test_any_float32_vector_survives_a_float32_model(values: list[float]) -> None:
    model = nn.Linear(2, 2)
    layout = Layout.of(model)
    vector = np.array(values, dtype=np.float32)
    state = restore(vector, layout, model.state_dict())
    assert vectorize(state, layout).tobytes() == vector.tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_finite_half_precision_number_survives(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = patterns[torch.isfinite(patterns)]
    model = nn.ParameterList([nn.Parameter(finite)])
    layout = Layout.of(model)
    again = restore(vectorize(model.state_dict(), layout), layout, model.state_dict())
    assert_same_bits(again, dict(model.state_dict()))


def test_parameters_come_before_batch_norm_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = Layout.of(model)
    assert layout.parameters == sum(p.numel() for p in model.parameters())
    assert layout.size == layout.parameters + 8
    assert [entry.name for entry in layout.entries][-2:] == ["1.running_mean", "1.running_var"]
    assert layout.nonnegative == ((layout.size - 4, layout.size),)
    assert "1.num_batches_tracked" not in [entry.name for entry in layout.entries]


def test_tied_weights_appear_once_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    layout = Layout.of(model)
    assert layout.size == 9
    vector = np.arange(9, dtype=np.float32)
    state = restore(vector, layout, model.state_dict())
    assert torch.equal(state["0.weight"], state["1.weight"])
    load_vector(model, vector, layout)
    assert np.array_equal(vectorize(model.state_dict(), layout), vector)


def test_unshared_entries_stay_out_of_the_vector() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layout = Layout.of(model, lambda name: name.startswith("1."))
    assert layout.size == 10
    frozen = model[0].weight.detach().clone()
    load_vector(model, np.zeros(10, dtype=np.float32), layout)
    assert torch.equal(model[0].weight, frozen)
    assert not model[1].weight.any()


def test_the_vector_never_shares_memory_with_the_model() -> None:
    model = nn.Linear(2, 2)
    layout = Layout.of(model)
    vector = vectorize(model.state_dict(), layout)
    before = vector.copy()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert np.array_equal(vector, before)
    load_vector(model, vector, layout)
    vector[:] = 7.0
    assert np.array_equal(vectorize(model.state_dict(), layout), before)


def test_a_read_only_vector_is_accepted() -> None:
    model = nn.Linear(2, 2)
    layout = Layout.of(model)
    vector = np.zeros(6, dtype=np.float32)
    vector.flags.writeable = False
    load_vector(model, vector, layout)
    assert not model.weight.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_types_that_float32_cannot_hold_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ParameterError, match="cannot hold exactly"):
        Layout.of(nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=dtype))]))


def test_a_vector_or_state_of_another_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    layout = Layout.of(model)
    with pytest.raises(ParameterError, match=r"needs \(6,\) float32"):
        restore(np.zeros(7, dtype=np.float32), layout, model.state_dict())
    with pytest.raises(ParameterError, match="float64"):
        restore(np.zeros(6), layout, model.state_dict())  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="no entry 'weight'"):
        vectorize(nn.Sequential(model).state_dict(), layout)
    with pytest.raises(ParameterError, match="'weight' is"):
        vectorize(nn.Linear(3, 2).state_dict(), layout)


def test_the_digest_tells_layouts_apart() -> None:
    assert Layout.of(nn.Linear(2, 3)).digest() == Layout.of(nn.Linear(2, 3)).digest()
    digests = {Layout.of(m).digest() for m in (nn.Linear(2, 3), nn.Linear(3, 2))}
    digests.add(Layout.of(nn.Linear(2, 3).half()).digest())
    assert len(digests) == 3

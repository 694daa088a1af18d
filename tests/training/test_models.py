from __future__ import annotations

import pytest
import torch

from lightsecagg.errors import ParameterError
from lightsecagg.training import PAPER_MODELS, Layout
from lightsecagg.training.models import MODELS, build_model

# The published sizes, written out: data sets of the paper and d.
EXPECTED = {
    "mnist": 7_850,
    "femnist": 1_206_590,
    "cifar10": 3_111_462,
    "gld23k": 5_288_548,
    "async-mnist": 61_706,
    "async-cifar10": 62_006,
}


@pytest.mark.parametrize("name", list(PAPER_MODELS))
def test_parameter_counts_are_those_of_the_paper(name: str) -> None:
    paper = PAPER_MODELS[name]
    layout = Layout.of(build_model(paper.model, paper.shape, paper.classes))
    assert layout.parameters == paper.parameters == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "classes", "parameters", "statistics"),
    [
        ("mobilenetv3-small", 10, 1_843_272, 12_144),
        ("mobilenetv3-small", 1000, 3_111_462, 12_144),
        ("efficientnet-b0", 1000, 5_288_548, 42_016),
    ],
)
def test_batch_norm_statistics_come_on_top(
    name: str, classes: int, parameters: int, statistics: int
) -> None:
    layout = Layout.of(build_model(name, (3, 32, 32), classes))
    assert (layout.parameters, layout.size - layout.parameters) == (parameters, statistics)


@pytest.mark.parametrize("name", list(MODELS))
def test_models_map_a_batch_to_logits_and_have_gradients_everywhere(name: str) -> None:
    shape = (1, 28, 28) if name in ("logistic", "mlp", "cnn") else (3, 32, 32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(name, shape, 7).train()
        logits = model(torch.randn(3, *shape))
    assert logits.shape == (3, 7)
    torch.autograd.backward(logits.square().sum())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_evaluation_mode_is_deterministic() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model("efficientnet-b0", (3, 32, 32), 5).eval()
        image = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            assert torch.equal(model(image), model(image))
            model.train()
            assert not torch.equal(model(image), model(image))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet", (3, 32, 32), "there is no model 'resnet'; choose one of logistic"),
        ("cnn", (64,), "takes images of shape"),
        ("cnn", (1, 4, 4), "at least 6x6"),
        ("lenet5", (1, 8, 8), "28x28 or 32x32"),
        ("lenet5", (1, 28, 32), "square"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(name, shape, 10)

"""A model's state dict as one flat float32 vector x of length d (Section 2), and back, exactly.

The policy, entry by entry:

* **Parameters** come first, in state-dict order. float32, float16 and bfloat16 are widened to
  float32, which is exact, and narrowed again by `restore`: a round trip returns the same bits.
* **Batch-norm running means and variances**, and any other floating-point buffer, follow after
  the parameters. They are averaged like parameters, but never optimised by the server.
* **Integer and boolean buffers** (`num_batches_tracked`) are not in the vector: their sum means
  nothing. `restore` takes them from the state dict it is given.
* **Tied entries** (one tensor under two names) appear once, under the first name.
* **float64 and complex** entries are refused: float32 cannot hold them exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightsecagg.errors import ParameterError
from lightsecagg.training.updates import Vector

State = Mapping[str, Tensor]

_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the state dict and the coordinates [start, stop) it occupies."""

    name: str
    """Its key in the state dict."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its own type, to which `restore` narrows."""
    start: int
    """First coordinate."""
    aliases: tuple[str, ...] = ()
    """Further keys of the same tensor."""

    @property
    def stop(self) -> int:
        """One past the last coordinate."""
        return self.start + int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which coordinate of the vector is which number of the model."""

    entries: tuple[Entry, ...]
    """Parameters first, floating-point buffers after them."""
    parameters: int
    """How many leading coordinates are parameters: the paper's d."""
    nonnegative: tuple[tuple[int, int], ...]
    """Coordinate ranges that hold running variances."""

    @classmethod
    def of(cls, model: nn.Module, shared: Callable[[str], bool] = lambda name: True) -> Layout:
        """The layout of `model`, restricted to the state-dict entries that are `shared`."""
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        # keep_vars: the very tensors of the model, so that tied entries are one object.
        for name, tensor in model.state_dict(keep_vars=True).items():
            if _is_vectorized(name, tensor) and shared(name):
                names.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor
        order = sorted(names, key=lambda key: not isinstance(tensors[key], nn.Parameter))
        entries: list[Entry] = []
        parameters = start = 0
        for key in order:
            first, *others = names[key]
            tensor = tensors[key]
            entries.append(Entry(first, tuple(tensor.shape), tensor.dtype, start, tuple(others)))
            start = entries[-1].stop
            if isinstance(tensor, nn.Parameter):
                parameters = start
        variances = _running_variances(model)
        nonnegative = tuple((e.start, e.stop) for e in entries if e.name in variances)
        return cls(tuple(entries), parameters, nonnegative)

    @property
    def size(self) -> int:
        """Length of the vector: parameters and floating-point buffers."""
        return self.entries[-1].stop if self.entries else 0

    def digest(self) -> bytes:
        """SHA-256 over names, shapes and types, for parties to check that theirs agree."""
        lines = [f"{e.name}|{e.aliases}|{e.shape}|{e.dtype}|{e.start}" for e in self.entries]
        return hashlib.sha256("\n".join([str(self.parameters), *lines]).encode()).digest()


def vectorize(state: State, layout: Layout) -> Vector:
    """The state dict's shared floating-point entries as one float32 vector (a copy)."""
    vector = np.empty(layout.size, dtype=np.float32)
    for entry in layout.entries:
        tensor = _lookup(state, entry)
        # The copy is made before .numpy(), so the vector never aliases the model.
        vector[entry.start : entry.stop] = tensor.detach().to("cpu", torch.float32).reshape(-1)
    return vector


def restore(vector: Vector, layout: Layout, like: State) -> dict[str, Tensor]:
    """A state dict with the vector's values; what the vector does not hold comes from `like`.

    `restore(vectorize(state, layout), layout, state)` equals `state` bit for bit. `like` is not
    changed; load the result with `model.load_state_dict`.
    """
    if vector.shape != (layout.size,) or vector.dtype != np.float32:
        raise ParameterError(
            f"the vector has shape {vector.shape} and type {vector.dtype}; this model needs "
            f"({layout.size},) float32"
        )
    restored = {name: tensor.detach().clone() for name, tensor in like.items()}
    # A fresh, writable copy: torch must not share memory with the caller's array.
    flat = torch.from_numpy(vector.copy())
    for entry in layout.entries:
        device = _lookup(like, entry).device
        values = flat[entry.start : entry.stop].reshape(entry.shape).to(device, entry.dtype)
        for name in (entry.name, *entry.aliases):
            restored[name] = values.clone() if name == entry.name else restored[entry.name]
    return restored


def load_vector(model: nn.Module, vector: Vector, layout: Layout) -> None:
    """Put the vector's values into the model, in place."""
    model.load_state_dict(restore(vector, layout, model.state_dict()))


def _is_vectorized(name: str, tensor: Tensor) -> bool:
    if tensor.dtype in _EXACT_IN_FLOAT32:
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        raise ParameterError(
            f"{name!r} has type {tensor.dtype}, which float32 cannot hold exactly; "
            "convert the model with model.float()"
        )
    return False


def _running_variances(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.running_var" if prefix else "running_var"
        for prefix, module in model.named_modules()
        if isinstance(module, _NormBase) and module.running_var is not None
    }


def _lookup(state: State, entry: Entry) -> Tensor:
    tensor = state.get(entry.name)
    if tensor is None:
        raise ParameterError(f"the state dict has no entry {entry.name!r}; it is another model's")
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise ParameterError(
            f"{entry.name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; the layout says "
            f"{entry.dtype} of shape {entry.shape}"
        )
    return tensor

"""Sum or average numpy arrays through a protocol, with all parties in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Required, TypedDict, TypeVar, Unpack, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightsecagg.drivers.cohort import Cohort, describe_leak
from lightsecagg.drivers.footprint import check_memory
from lightsecagg.drivers.local import run_round
from lightsecagg.errors import Aborted, InputRefused, ParameterError
from lightsecagg.field.quantization import Quantizer, Reals, clip_to_bound, percent_clipped
from lightsecagg.params import (
    DEFAULT_MODULUS,
    Decoding,
    Parameters,
    ShareMode,
    ThreatModel,
    choice,
    plain_integer,
)
from lightsecagg.protocol.interface import RoundAborted, Update
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.schemes.traits import LIGHTSECAGG, traits_of
from lightsecagg.protocol.wire import Codec

_log = logging.getLogger(__name__)

Array = NDArray[Any]
Arrays = Array | Mapping[str, Array]
"""What one client contributes: an array of any shape, or named arrays such as a model's layers."""
Result = TypeVar("Result", Array, dict[str, Array])


_FEW = 8
"""Numbers that are printed."""


@dataclass(frozen=True, slots=True, repr=False)
class AggregationResult(Generic[Result]):
    """What the server learns, and who is in it."""

    mean: Result
    """The (weighted) average, shaped like the inputs."""
    sum: Result
    """The (weighted) sum, shaped like the inputs."""
    weight: int
    """The sum of the included clients' weights; their number, if there are no weights."""
    included: tuple[int, ...]
    """Positions of the included clients in `vectors`."""

    def __repr__(self) -> str:
        """Not the arrays, which may be a model."""
        return (
            f"AggregationResult(mean={_shape_of(self.mean)}, sum={_shape_of(self.sum)}, "
            f"weight={self.weight}, included={self.included})"
        )


class _Options(TypedDict, total=False):
    """The keyword arguments of `aggregate`."""

    privacy: Required[int]
    bound: Required[float]
    dropouts: int
    survivors: int
    weights: Sequence[int] | None
    protocol: str
    threat_model: str
    share_mode: str
    decoding: str | None
    modulus: int
    neighbours: int
    threshold: int
    clip: bool


@overload  # both take a list of None alone, which is refused
def aggregate(  # type: ignore[overload-overlap]
    vectors: Sequence[Mapping[str, ArrayLike] | None], **options: Unpack[_Options]
) -> AggregationResult[dict[str, Array]]: ...


@overload
def aggregate(
    vectors: Sequence[ArrayLike | None], **options: Unpack[_Options]
) -> AggregationResult[Array]: ...


def aggregate(
    vectors: Sequence[Any],
    *,
    privacy: int,
    bound: float,
    dropouts: int = 0,
    survivors: int = 0,
    weights: Sequence[int] | None = None,
    protocol: str = LIGHTSECAGG,
    threat_model: str = ThreatModel.HONEST_BUT_CURIOUS,
    share_mode: str = ShareMode.SEEDED,
    decoding: str | None = None,
    modulus: int = DEFAULT_MODULUS,
    neighbours: int = 0,
    threshold: int = 0,
    clip: bool = False,
) -> AggregationResult[Any]:
    """Aggregate the clients' arrays through a protocol, every message included.

    * `vectors`: one array of numbers, or dict of arrays such as a state dict, per client, all
      alike. Where the first client's are torch tensors, so are the results, of the same type, on
      the CPU. Lists work too, and integers become floats. `None` for a client that drops out after
      it has shared its mask and before it uploads.
    * `privacy` T, `dropouts` D, `survivors` U: see `Parameters`.
    * `bound`: the largest absolute value of an entry. It is public and fixed beforehand; larger
      entries are refused, or clipped with `clip=True`.
    * `weights`: a positive integer per client, such as its number of training samples. The server
      learns their sum only.
    * `share_mode="short-key"` shares keys that do not grow with the arrays (experimental, see
      `docs/short-keys.md`); `decoding`, "exact" or "dithered", removes their noise or leaves it in.

    Raises `InputRefused` for arrays that must not be masked, `ParameterError` for parameters that
    cannot work, `Aborted` if too few clients are left.
    """
    if isinstance(vectors, str | bytes | Mapping) or not hasattr(vectors, "__len__"):
        raise InputRefused(
            f"vectors is {type(vectors).__name__}; give a list with one array, or None, per client"
        )
    given = {client: as_arrays(v) for client, v in enumerate(vectors) if v is not None}
    if not given:
        reason = "every client is None" if len(vectors) else "vectors is empty"
        raise ParameterError(f"there is nothing to aggregate: {reason}; no client has a vector")
    layout = _Layout(next(iter(given.values())), vectors[next(iter(given))])
    traits = traits_of(protocol)
    chosen = traits.resolve(
        Parameters(
            clients=len(vectors),
            privacy=privacy,
            dropouts=dropouts,
            survivors=survivors,
            threat_model=cast(ThreatModel, threat_model),  # Parameters knows their names
            share_mode=cast(ShareMode, share_mode),
            modulus=modulus,
        ),
        plain_integer(neighbours),
        plain_integer(threshold),
    )
    if insecurity := describe_leak(traits, chosen):
        raise ParameterError(insecurity)
    samples = _check_weights(weights, len(vectors))
    quantizer = make_quantizer(
        chosen.parameters,
        layout.size,
        bound,
        max_samples=max(samples),
        weighted=weights is not None,
        decoding=None if decoding is None else choice(Decoding, decoding),
        group=traits.group(chosen.parameters),
    )
    flat = {client: layout.flatten(client, arrays) for client, arrays in given.items()}
    if clip:
        _clip(flat, quantizer.bound)
    updates = {
        client: _update(quantizer, client, vector, samples[client])
        for client, vector in flat.items()
    }
    parameters, *graph = chosen
    cohort = Cohort(traits.name, parameters, quantizer, layout.size, *graph)
    settings = cohort.next_round()
    check_memory(settings)
    clients = {client: cohort.client(client, settings) for client in cohort.clients}
    result = run_round(cohort.server(settings), clients, Codec(settings.group), updates.get)
    if isinstance(result, RoundAborted):
        raise Aborted(result.reason)
    included = result.included
    values, weight = settings.average(result.total, len(result.included))
    if weights is None:
        values = values / weight
    return AggregationResult(
        mean=layout.restore(values),
        sum=layout.restore(values * weight),
        weight=weight,
        included=included,
    )


def as_arrays(value: Any) -> Arrays:
    """What a client gives, as numpy arrays of floats: arrays, tensors, lists, or a dict of them."""
    if isinstance(value, Mapping):
        return {str(name): _as_floats(f"array {name!r}", part) for name, part in value.items()}
    return _as_floats("the array", value)


def _as_floats(name: str, value: Any) -> Array:
    # A tensor that requires a gradient, or lies on a device, does not become an array by itself.
    tensor = value.detach().cpu() if hasattr(value, "detach") else value
    if getattr(tensor, "is_sparse", False):
        raise InputRefused(f"{name} is a sparse tensor; give it as a dense one: .to_dense()")
    if str(getattr(tensor, "dtype", "")) == "torch.bfloat16":  # numpy has no such type
        tensor = tensor.float()
    try:
        array = np.asarray(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(value, list | tuple):
            raise InputRefused(
                f"{name} is a {type(value).__name__} of parts that make no array: of different "
                "lengths, or tensors; give a dict of arrays, such as a state dict"
            ) from error
        raise InputRefused(
            f"{name} is {type(value).__name__}, of which numpy makes no array; "
            "give an array, a dense tensor or numbers"
        ) from error
    if array.dtype.kind in "iu":
        return array.astype(np.float64)
    if array.dtype.kind != "f":
        raise InputRefused(
            f"{name} is {type(value).__name__} of {array.dtype}; only numbers can be aggregated"
        )
    return array


class _Layout:
    """How arrays are laid out in one vector."""

    def __init__(self, arrays: Arrays, given: Any) -> None:
        """`given` is what the arrays were made of: results are of the same kind."""
        self._is_mapping = isinstance(arrays, Mapping)
        self._given = {str(n): v for n, v in given.items()} if self._is_mapping else {"": given}
        parts = self._parts(arrays)
        self._shapes = {name: array.shape for name, array in parts.items()}
        self._dtypes = {name: array.dtype for name, array in parts.items()}
        self._dtype = np.float64 if np.float64 in self._dtypes.values() else np.float32
        self.size = sum(array.size for array in parts.values())

    @staticmethod
    def _parts(arrays: Arrays) -> dict[str, Array]:
        return dict(arrays) if isinstance(arrays, Mapping) else {"": arrays}

    def flatten(self, client: int, arrays: Arrays) -> Reals:
        """One client's arrays as a vector; refuse other names, shapes or types."""
        parts = self._parts(arrays)
        same_kind = isinstance(arrays, Mapping) is self._is_mapping
        if not same_kind or parts.keys() != self._shapes.keys():
            raise InputRefused(
                f"client {client} has other arrays than the first client"
                + (self._difference(parts) if same_kind else ": a dict, or not")
            )
        for name, array in parts.items():
            if (array.shape, array.dtype) != (self._shapes[name], self._dtypes[name]):
                raise InputRefused(
                    f"{_name(name)} of client {client} is {array.dtype} of shape {array.shape}; "
                    f"the first client's is {self._dtypes[name]} of shape {self._shapes[name]}"
                )
        flat = [np.asarray(parts[name], dtype=self._dtype).reshape(-1) for name in self._shapes]
        return np.concatenate(flat)

    def _difference(self, parts: Mapping[str, Array]) -> str:
        missing = [name for name in self._shapes if name not in parts]
        more = [name for name in parts if name not in self._shapes]
        return f": {missing[0]!r} is missing" if missing else f": {more[0]!r} is new"

    def _like(self, name: str, array: Array) -> Any:
        """Of the type that was given under this name: a tensor, or the array."""
        given = self._given[name]
        if not type(given).__module__.startswith("torch"):
            return array
        torch = sys.modules["torch"]
        kind = given.dtype if given.is_floating_point() else torch.float64
        return torch.from_numpy(np.asarray(array)).to(kind)

    def restore(self, values: NDArray[np.float64]) -> Any:
        """Arrays or tensors like the inputs, from a vector."""
        parts: dict[str, Any] = {}
        start = 0
        for name, shape in self._shapes.items():
            end = start + int(np.prod(shape, dtype=np.int64))
            part = values[start:end].reshape(shape).astype(self._dtypes[name])
            parts[name] = self._like(name, part)
            start = end
        return parts if self._is_mapping else parts[""]


def _shape_of(result: Any) -> str:
    """Few numbers as they are; of more, their form."""
    if isinstance(result, Mapping):
        entries = sum(int(np.prod(part.shape)) for part in result.values())
        return f"<{len(result)} arrays, {entries:,} entries>"
    if np.prod(result.shape) <= _FEW:
        return str(result)
    return f"<{result.dtype} of shape {tuple(result.shape)}>"


def _name(name: str) -> str:
    return f"array {name!r}" if name else "the array"


def _clip(vectors: dict[int, Reals], bound: float) -> None:
    """Keep the vectors within the bound; one line in the log if any had to be cut."""
    percent: dict[int, float] = {}
    for client, vector in vectors.items():
        vectors[client] = clip_to_bound(vector, bound)
        percent[client] = percent_clipped(vector, vectors[client])
    if any(percent.values()):
        most = max(percent, key=lambda client: percent[client])
        _log.warning(
            "%.3g %% of the entries were clipped to the bound %g; of client %d's, %.3g %%",
            *(sum(percent.values()) / len(percent), bound, most, percent[most]),
        )


def _update(quantizer: Quantizer, client: int, vector: Reals, samples: int) -> Update:
    try:
        quantizer.check(vector, samples)
    except InputRefused as error:
        raise InputRefused(f"client {client}: {error}") from error
    return Update(vector, samples)


def _check_weights(weights: Sequence[int] | None, clients: int) -> list[int]:
    if weights is None:
        return [1] * clients
    if len(weights) != clients:
        raise ParameterError(f"{len(weights)} weights were given for {clients} clients")
    for client, weight in enumerate(weights):
        if not isinstance(weight, (int, np.integer)) or weight < 1:
            raise ParameterError(
                f"the weight of client {client} is {weight!r}, but must be an integer of at least 1"
            )
    return [int(weight) for weight in weights]

"""Parameters and layers, and the flat arrays that hold all weights and gradients of a model."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from operator import attrgetter, is_
from typing import Any, Self

import numpy as np

from .. import ops
from ..backend import CPU, Array, Device, array_module, device_of, get_device, is_floating_type, to_cpu, to_device
from ..checks import (
    UNLIKE_ARRAYS,
    describe,
    expect_floating_type,
    expect_instance,
    expect_memory,
    expect_positive,
    expect_real,
)
from ..dispatch import TwinCache, expect_cache
from ..rng import Key, expect_key
from ..shell.text import printable

LAYER_OBJECTS = 1 << 12  # the memory of a block's Python objects, counted in float32 numbers


class Param:
    """A trainable array and its gradient, of the same shape. Sharing a Param between two layers ties their weights.

    `name` is the leaf name ("w", "gamma"); the full name depends on where the Param is in a model. `flat` is the
    FlatParameters whose arrays `data` and `grad` are views of, or None if they are separate arrays. `frozen`: whether
    optimizers leave it unchanged. The gradient takes no memory until it is first asked for; it is zero then.

    Assigning to `data` or `grad` copies the values into the existing array, which may be a view of a flat array:
    `w.grad = w.grad + dw` has the same effect as `w.grad += dw`. Raises ValueError for another shape, TypeError for
    anything but a floating-point array, DeviceError for an array on another device.
    """

    def __init__(self, data: Array, name: str) -> None:
        expect_instance("name", name, str)
        if not hasattr(data, "dtype") or not is_floating_type(data.dtype) or isinstance(data, UNLIKE_ARRAYS):
            raise TypeError(f"{name or 'data'}: expected an array of floating-point numbers, got {describe(data)}")
        self.bind(data, None, None)
        self.name = name
        self.frozen = False

    def bind(self, data: Array, grad: Array | None, flat: FlatParameters | None) -> None:
        """Use these arrays from now on; they are views of `flat` unless that is None. grad: None for zeros."""
        self._data, self.flat = data, flat
        vars(self).pop("_grad", None)
        if grad is not None:
            self._grad = grad

    def __getattr__(self, name: str) -> Any:
        """The gradient, when it is first asked for."""
        if name != "_grad":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with device_of(self.data).current():
            self._grad = array_module(self.data).zeros(self.data.shape, self.data.dtype)
        return self._grad

    @property
    def written(self) -> Array | None:
        """The gradient, if it has been asked for."""
        return vars(self).get("_grad")

    def _set_data(self, value: Array) -> None:
        if value is not self._data:
            _assign(f"{self.name}.data", self._data, value)

    def _set_grad(self, value: Array) -> None:
        if value is not self._grad:  # after `w.grad += dw`, which has added in place, it is
            _assign(f"{self.name}.grad", self._grad, value)

    data, grad = property(attrgetter("_data"), _set_data), property(attrgetter("_grad"), _set_grad)

    def __deepcopy__(self, _memo: dict) -> Param:
        return self.twin(self.data.copy(), None if self.written is None else self.written.copy())

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"flat": None}  # a pickled Param has its own arrays

    def twin(self, data: Array, grad: Array | None = None) -> Param:
        """A Param like this one with other arrays, not in a flat array; without `grad` its gradient is zero."""
        twin = Param(data, self.name)
        twin.frozen = self.frozen
        if grad is not None:
            twin.bind(data, grad, None)
        return twin

    def __repr__(self) -> str:
        return f"Param({self.name}, shape={tuple(self.data.shape)}, dtype={self.data.dtype})"


class FlatParameters:
    """All parameters of a model as one array `data` (P,), and all their gradients as another, `grad` (P,).

    Every Param becomes a view into both, so zeroing, clipping, Adam, casting, summing the gradients of replicas, and
    saving are each one operation on a flat array. Assigning to `data` or `grad` copies into the array, as for a Param.
    """

    def __init__(self, params: list[Param], data: Array | None = None, grad: Array | None = None) -> None:
        """Lay `params` out one after another, in `data`, which already has their values, or in a new array.

        grad: the array of their gradients, if it exists already.
        Raises ValueError if they do not all have the same dtype.
        """
        if len(dtypes := {str(p.data.dtype) for p in params}) > 1:
            names = ", ".join(sorted(dtypes))
            raise ValueError(f"parameters of several types ({names}): cast them all with layer.to(dtype=...)")
        xp = array_module(*(p.data for p in params)) if data is None else array_module(data)
        self.params = params
        self._data = xp.concatenate([p.data.reshape(-1) for p in params]) if data is None else data
        self._grad = xp.zeros_like(self._data) if grad is None else grad
        for p, view, dview in zip(params, self.views(self.data), self.views(self.grad), strict=True):
            if data is None and p.written is not None:
                dview[...] = p.written
            p.bind(view, dview, self)

    def _set_data(self, value: Array) -> None:
        if value is not self._data:
            _assign("flat.data", self._data, value)

    def _set_grad(self, value: Array) -> None:
        if value is not self._grad:
            _assign("flat.grad", self._grad, value)

    data, grad = property(attrgetter("_data"), _set_data), property(attrgetter("_grad"), _set_grad)

    def __reduce__(self) -> tuple:
        return FlatParameters, (self.params,)  # a copy lays out the copies of the parameters

    def slices(self) -> dict[int, slice]:
        """The slice of the flat arrays that each parameter occupies, by the parameter's id."""
        stops = accumulate(p.data.size for p in self.params)
        return {id(p): slice(stop - p.data.size, stop) for p, stop in zip(self.params, stops, strict=True)}

    def views(self, flat: Array) -> Iterator[Array]:
        """Views of a flat array (P,), one for each parameter and of its shape."""
        for p, where in zip(self.params, self.slices().values(), strict=True):
            yield flat[where].reshape(p.data.shape)

    @staticmethod
    def of(params: Iterable[Param]) -> FlatParameters:
        """The flat arrays of exactly these parameters, created if necessary. Parameters that are in the flat arrays of
        a part of the model are moved to the new ones.

        Raises ValueError if there are no parameters, or if some share flat arrays with others.
        """
        params = list(params)
        if not params:
            raise ValueError("params: expected at least one parameter, got none")
        ids, flat = {id(p) for p in params}, params[0].flat
        if flat is not None and all(p.flat is flat for p in params) and len(flat.params) == len(ids):
            return flat
        flats = {p.flat for p in params if p.flat is not None}
        if any(id(p) not in ids for flat in flats for p in flat.params if p.flat is flat):
            raise ValueError(
                "these parameters share the flat arrays of other parameters, as in a part of a model, or after a part "
                "was replaced; layer.to() moves a layer's parameters to arrays of their own"
            )
        return FlatParameters(params)


class Parameters(list):
    """The parameters of `layer`, each once: a list that knows its layer, so that an optimizer can look up names."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer.named_parameters().values())
        self.layer = layer


class Part:
    """An attribute that a layer keeps in one of the parts it is built of: with `attention = Part("first.branch")`,
    `block.attention` is `block.first.branch`. In the names of parameters it is "attention", and "first" does not occur.

    paths: where it is; if there are several, it is in each of these places. A number is a place in a list.
    """

    def __init__(self, *paths: str) -> None:
        self.paths = [path.split(".") for path in paths]

    def __get__(self, layer: Any, kind: type | None = None) -> Any:
        return self if layer is None else reached(layer, self.paths[0])

    def __set__(self, layer: Any, value: Any) -> None:
        for *path, last in self.paths:
            holder = reached(layer, path)
            if isinstance(holder, list):
                holder[int(last)] = value
            else:
                setattr(holder, last, value)


def reached(layer: Any, path: Iterable[str]) -> Any:
    """The object at a path of attributes and places in lists; None for a place beyond the end of a list."""
    for name in path:
        layer = next(iter(layer[int(name) :]), None) if isinstance(layer, list) else getattr(layer, name)
    return layer


class Layer:
    """Something with parameters, a forward and a backward.

        y, cache = layer.forward(x)
        dx = layer.backward(dy, cache)      # and adds ∂L/∂w to the .grad of each of its parameters

    The cache is all that passes from forward to backward; the layer keeps no activations. So forward can run twice
    before either backward, from several threads, or again during backward. `layer(x)` returns only y.

    y may be x itself (dropout without a key) and dx may be dy, so do not write to what a layer was given or returned.

    Parameters and sub-layers are the attributes of these types, in the order of their assignment, including those in
    lists, tuples and dicts. A class may declare that it keeps some in a part of it: see `Part`.

    A layer with random initial weights takes `key=` in its constructor: two layers with the same key, or both without
    one, start with the same weights. A composite layer folds its key for each of its parts. A layer with dropout takes
    `key=` in `forward`; without one it runs in evaluation mode.
    """

    def forward(self, *inputs: Any, **options: Any) -> tuple[Any, Any]:
        raise TypeError(f"{type(self).__name__} has no forward")

    def backward(self, dy: Any, cache: Any) -> Any:
        raise TypeError(f"{type(self).__name__} has no backward")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.forward(*inputs, **options)[0]

    def named_children(self) -> Iterator[tuple[str, Layer | Param]]:
        """Every layer and parameter among the attributes, with its name ("norm1", "blocks.0")."""
        return named_parts("", self.named_attributes())

    def named_attributes(self) -> dict[str, Any]:
        """The attributes by name: first those that are kept in parts, then all others but these parts."""
        kinds = reversed(type(self).__mro__)
        kept = {name: part for kind in kinds for name, part in vars(kind).items() if isinstance(part, Part)}
        if not kept:
            return vars(self)
        parts = {path[0] for part in kept.values() for path in part.paths}
        return {name: getattr(self, name) for name in kept} | {
            name: value for name, value in vars(self).items() if name not in parts
        }

    def named_layers(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """This layer and all below it, outermost first, with their full names ("" for this one)."""
        yield prefix, self
        for name, child in self.named_children():
            if isinstance(child, Layer):
                yield from child.named_layers(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self) -> dict[str, Param]:
        """Every parameter under its full name ("blocks.0.attention.query.w"); a shared one once, by its first name."""
        by_id: dict[int, tuple[str, Param]] = {}
        for name, p in self._each_parameter(""):
            by_id.setdefault(id(p), (name, p))
        return dict(by_id.values())

    def _each_parameter(self, prefix: str) -> Iterator[tuple[str, Param]]:
        """The parameters with their names, shared ones each time: the layer's own first, then those of sub-layers."""
        children = list(self.named_children())
        for name, child in children:
            if isinstance(child, Param):
                yield prefix + name, child
        for name, child in children:
            if isinstance(child, Layer):
                yield from child._each_parameter(f"{prefix}{name}.")

    def parameters(self) -> Parameters:
        """Every parameter, each once."""
        return Parameters(self)

    @property
    def flat(self) -> FlatParameters:
        """The flat arrays that hold all parameters; created on first use."""
        return FlatParameters.of(self.parameters())

    @property
    def device(self) -> Device:
        """The device of the parameters; its `xp` is their array library."""
        return next((device_of(p.data) for _, p in self._each_parameter("")), CPU)

    def zero_grad(self) -> None:
        """Set every gradient to zero; nothing else."""
        for p in self.parameters():
            p.grad[...] = 0

    def to(self, device: Device | str | None = None, dtype: Any = None) -> Self:
        """Move all parameters and gradients to `device`, cast them to `dtype`, and return the layer itself.

        device: a Device, or the name of one ("cpu", "gpu:1"). The layer gets arrays of its own, so create optimizers
        and replicas afterwards. (After a move or a cast, the next step of an older one raises ValueError.)
        """
        device = get_device(device) if isinstance(device, str) else device
        if not (device is None or isinstance(device, Device)):
            raise TypeError(f"device: expected a Device or its name, got {device!r}; pass a type as dtype=")
        if dtype is not None:
            expect_floating_type("dtype", dtype)
        for p in self.parameters():
            p.bind(*(_moved(x, device, dtype, p.flat is not None) for x in (p.data, p.written)), None)
        return self

    def replica(self, data: Array | None = None, grad: Array | None = None) -> Self:
        """A copy of the layer that shares the parameter array and has its own gradient array (zero).

        data: another array (P,) for the parameters, such as a copy in half precision. grad: an array (P,) that exists
        already, for the gradients. They may be of different types.
        """
        flat = self.flat
        data = flat.data if data is None else data
        grad = array_module(data).zeros_like(flat.grad) if grad is None else grad
        params = [p.twin(view) for p, view in zip(flat.params, flat.views(data), strict=True)]
        FlatParameters(params, data, grad)
        return copy.deepcopy(self, {id(p): twin for p, twin in zip(flat.params, params, strict=True)})

    def state_dict(self) -> dict[str, np.ndarray]:
        """The parameters by name, as copies on the CPU."""
        return {name: to_cpu(p.data).copy() for name, p in self.named_parameters().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the arrays of `state`, floating-point numbers of any precision, into the parameters.

        Raises ValueError, and changes nothing, unless names and shapes are exactly those of the layer. The message
        lists the tensors that are missing, unexpected, of the wrong shape, or not floating-point.
        """
        expect_instance("state", state, Mapping)
        params = self.named_parameters()
        problems = [f"missing: {name}" for name in params.keys() - state.keys()]
        problems += [f"not in this model: {printable(str(name))}" for name in state.keys() - params.keys()]
        for name in params.keys() & state.keys():
            expected, given = params[name].data, state[name]
            if not hasattr(given, "dtype") or not is_floating_type(given.dtype):
                got = getattr(given, "dtype", type(given).__name__)
                problems.append(f"{name}: expected floating-point numbers, got {got}")
            elif tuple(given.shape) != tuple(expected.shape):
                problems.append(f"{name}: expected {tuple(expected.shape)}, got {tuple(given.shape)}")
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ValueError("weights of another model: " + "; ".join(sorted(problems)[:8]) + more)
        for name, p in params.items():
            p.data[...] = to_device(to_cpu(state[name]), self.device, p.data.dtype)


class Structure:
    """The attributes of a layer and of all below it, and the elements of the lists, tuples and dicts among them.

    A step of training asks whether a model still has the parameters, layers and settings that it had. To go through all
    names takes a good part of a small model's step on a GPU; this takes about a tenth of that.
    """

    def __init__(self, layer: Layer) -> None:
        seen: set[int] = set()
        containers = [each for _, part in layer.named_layers() for each in containers_in(part, seen)]
        self.dicts = [(each, (*each, *each.values())) for each in containers if isinstance(each, dict)]
        self.lists = [(each, tuple(each)) for each in containers if not isinstance(each, dict)]

    def is_unchanged(self) -> bool:
        """Whether all are the same objects as they were. (A new number may count as a change even if it is equal.)"""
        for container, before in self.dicts:
            if 2 * len(container) != len(before) or not all(map(is_, (*container, *container.values()), before)):
                return False
        return all([len(each) == len(before) and all(map(is_, each, before)) for each, before in self.lists])


def containers_in(x: Any, seen: set[int]) -> Iterator[Any]:
    """The attributes of x if it is a layer, x itself if it is a list, tuple or dict, and all of these inside it, such
    as those of the layer in a `Frozen` one. seen: the identities of the containers so far.
    """
    container = vars(x) if isinstance(x, Layer) else x
    if isinstance(container, list | tuple | dict) and id(container) not in seen:
        seen.add(id(container))
        yield container
        for part in container.values() if isinstance(container, dict) else container:
            yield from containers_in(part, seen)


def plain(x: Any) -> Any:
    """`x`, with NumPy's numbers, though not its booleans, replaced by Python's, also in lists, tuples and dicts."""
    if type(x) in (list, tuple):
        return type(x)(map(plain, x))
    if type(x) is dict:
        return {name: plain(value) for name, value in x.items()}
    return x.item() if isinstance(x, np.generic) and x.dtype.kind in "iuf" else x


def expect_backward(cache: Any, kind: type, **gradient: Array) -> None:
    """Raise TypeError unless `cache` is a `kind`, and the gradient, which is given by its name, an array of real
    numbers: what `backward` of a layer gets from its caller.
    """
    for name, dy in gradient.items():
        expect_real(name, dy)
    if type(cache) is not kind:
        expect_cache("cache", cache, kind)


def add_gradients(
    op_backward: Callable, dy: Array, cache: Any, grads: Sequence[Array], plus: Array | None = None
) -> Array:
    """dx, the first result of an operation's backward. The others, gradients of parameters, are added to `grads`.

    plus: a gradient that the same x gets by another path, which is added to dx. Some twins add all this while they
    compute (see `dispatch.Operation.add_twin`).
    """
    if type(cache) is TwinCache and cache.twin.adds and dy.dtype == cache.dtype and (plus is None or is_like(plus, dy)):
        return op_backward(dy, cache, into=grads, plus=plus)[0]
    dx, *gradients = op_backward(dy, cache)
    for grad, gradient in zip(grads, gradients, strict=True):
        grad += gradient
    return dx if plus is None else ops.add(plus, dx)[0]


def is_like(x: Array, y: Array) -> bool:
    """Whether two arrays are of one library and type of numbers."""
    return type(x) is type(y) and x.dtype == y.dtype


def add_backward(dx: Array, layer: Layer, dy: Array, cache: Any) -> Array:
    """dx + layer.backward(dy, cache), for an x that the layer reads and that has the gradient dx by another path. A
    layer whose backward has the argument `plus` adds it itself.
    """
    if "plus" in _parameters(type(layer).backward):
        return layer.backward(dy, cache, plus=dx)  # type: ignore[call-arg]  # a Layer's need not have it
    return ops.add(dx, layer.backward(dy, cache))[0]


_parameters = cache(lambda function: frozenset(inspect.signature(function).parameters))


def initial_generator(key: Key, **sizes: int) -> np.random.Generator:
    """The generator of the initial values of an array with these sizes.

    Raises TypeError unless `key` is a Key and the sizes are integers, ValueError if one is below 1 or if the array
    would not fit in memory.
    """
    expect_positive(**sizes)
    expect_memory(math.prod(map(int, sizes.values())), **sizes)
    expect_key(key)
    return key.generator()


def repeated(make: Callable[[int], Layer], depth: int) -> list:
    """The layers make(0) ... make(depth − 1). Raises ValueError if so many would not fit in memory."""
    expect_positive(depth=depth)
    layers = [make(0)]
    weights = sum(p.data.size for p in layers[0].parameters())
    expect_memory(int(depth) * (weights + LAYER_OBJECTS), depth=depth)
    return layers + [make(i) for i in range(1, depth)]


def list_of_layers(name: str, layers: Iterable[Layer]) -> list:
    """The layers as a list. Raises TypeError, naming the argument `name`, if they are not layers."""
    expect_instance(name, layers, Iterable)
    items = list(layers)
    for i, layer in enumerate(items):
        expect_instance(f"{name}[{i}]", layer, Layer)
    return items


def named_parts(prefix: str, container: Mapping[str, Any] | list | tuple) -> Iterator[tuple[str, Layer | Param]]:
    """The layers and parameters in a container and in containers inside it, by name ("0", "heads.query")."""
    for name, value in container.items() if isinstance(container, Mapping) else enumerate(container):
        if isinstance(value, Layer | Param):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping | list | tuple):
            yield from named_parts(f"{prefix}{name}.", value)


def _assign(name: str, array: Array, value: Array) -> None:
    """Copy `value` into `array`, for an assignment: see `Param`."""
    shape = tuple(array.shape)
    if not hasattr(value, "dtype"):
        raise TypeError(f"{name}: expected an array {shape}, got {describe(value)}")
    if not is_floating_type(value.dtype):
        raise TypeError(f"{name}: expected floating-point numbers, got {value.dtype}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected {shape}, got {tuple(value.shape)}")
    array_module(array, value)  # raises DeviceError
    array[...] = value


def _moved(x: Any, device: Device | None, dtype: Any, copy: bool) -> Any:
    if x is None:
        return None
    moved = x if device is None else to_device(x, device)
    with device_of(moved).current():
        return moved.astype(moved.dtype if dtype is None else dtype, copy=copy)

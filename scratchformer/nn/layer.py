"""Parameters and layers: who owns the weights, and how they all come to lie in one flat array."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from ..backend import CPU, Array, Device, array_module, device_of, get_device, to_cpu, to_device


class Param:
    """A trainable array and its gradient, of one shape. Sharing a Param between two layers ties their weights.

    `name` is the leaf name ("w", "gamma"); the full name comes from where the Param stands in a model. `flat` is the
    FlatParameters that `data` and `grad` are views of, or None while they are arrays of their own.
    """

    def __init__(self, data: Array, name: str) -> None:
        self.data = data
        self.grad = array_module(data).zeros(data.shape, data.dtype)  # takes no memory before it is written to
        self.name = name
        self.flat: FlatParameters | None = None

    def __deepcopy__(self, _memo: dict) -> Param:
        twin = Param(self.data.copy(), self.name)
        twin.grad = self.grad.copy()
        return twin

    def __repr__(self) -> str:
        return f"Param({self.name}, shape={tuple(self.data.shape)}, dtype={self.data.dtype})"


class FlatParameters:
    """All parameters of a model as one array `data` (P,), and all their gradients as another, `grad` (P,).

    Every Param becomes a view into both, so zeroing, clipping, Adam, casting, adding gradients of replicas, and saving
    are each one operation on a flat array.
    """

    def __init__(self, params: list[Param], data: Array | None = None) -> None:
        """Lay `params` out one after the other: in `data`, which has their values, or in a new array."""
        xp = array_module(*(p.data for p in params)) if data is None else array_module(data)
        self.params = params
        self.data = xp.concatenate([p.data.reshape(-1) for p in params]) if data is None else data
        self.grad = xp.zeros_like(self.data)
        for p, view, grad in zip(params, self.views(self.data), self.views(self.grad), strict=True):
            if data is None:
                grad[...] = p.grad
            p.data, p.grad, p.flat = view, grad, self

    def views(self, flat: Array) -> Iterator[Array]:
        """Cut a flat array (P,) into one view for each parameter, of its shape."""
        start = 0
        for p in self.params:
            yield flat[start : start + p.data.size].reshape(p.data.shape)
            start += p.data.size

    @staticmethod
    def of(params: Iterable[Param]) -> FlatParameters:
        """The flat arrays of exactly these parameters; they are made if the parameters are not yet in any.

        Raises ValueError if some of them belong to the flat arrays of a larger model.
        """
        params = list(params)
        if not params:
            raise ValueError("params: expected at least one parameter, got none")
        flat = params[0].flat
        if flat is not None and {id(p) for p in flat.params} == {id(p) for p in params}:
            return flat
        if any(p.flat is not None for p in params):
            raise ValueError("these parameters are part of a model whose flat arrays hold more than them")
        return FlatParameters(params)


class Layer:
    """Something with parameters, a forward and a backward.

        y, cache = layer.forward(x)
        dx = layer.backward(dy, cache)      # and adds ∂L/∂w into the .grad of each of its parameters

    The cache is all that passes from forward to backward: the layer keeps no activation. So it can be called twice
    before either backward, from several threads, or once more in backward. `layer(x)` gives y alone.

    y may be x itself (dropout without a key) and dx may be dy: write to neither, nor to what a layer returned.

    Parameters and sub-layers are found among the attributes, in the order of their assignment, also inside lists,
    tuples and dicts.

    A layer with parameters takes `key=` when it is made: two layers made with the same key, and so two with none,
    start with the same weights. A composite layer folds its key for each of its parts. A layer that drops out takes a
    `key=` in forward; without one it runs as in evaluation.
    """

    def forward(self, *inputs: Any, **options: Any) -> tuple[Any, Any]:
        raise TypeError(f"{type(self).__name__} has no forward")

    def backward(self, dy: Any, cache: Any) -> Any:
        raise TypeError(f"{type(self).__name__} has no backward")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.forward(*inputs, **options)[0]

    def named_children(self) -> Iterator[tuple[str, Layer | Param]]:
        """Every layer and parameter among the attributes, with its name ("norm1", "blocks.0")."""
        return _named_parts("", vars(self))

    def named_layers(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """This layer and all below it, outermost first, with their full names ("" for this one)."""
        yield prefix, self
        for name, child in self.named_children():
            if isinstance(child, Layer):
                yield from child.named_layers(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self) -> dict[str, Param]:
        """Every parameter under its full name ("blocks.0.attention.query.w"); a shared one once, under its first."""
        found: dict[int, tuple[str, Param]] = {}
        for prefix, layer in self.named_layers():
            for name, child in layer.named_children():
                if isinstance(child, Param):
                    found.setdefault(id(child), (f"{prefix}.{name}" if prefix else name, child))
        return dict(found.values())

    def parameters(self) -> list[Param]:
        """Every parameter, each once."""
        return list(self.named_parameters().values())

    @property
    def flat(self) -> FlatParameters:
        """The flat arrays that hold all parameters; made at the first call."""
        return FlatParameters.of(self.parameters())

    @property
    def device(self) -> Device:
        """Where the parameters are: its `xp` is their array library."""
        return next((device_of(p.data) for p in self.parameters()), CPU)

    def zero_grad(self) -> None:
        """Set every gradient to zero; nothing else."""
        for p in self.parameters():
            p.grad[...] = 0

    def to(self, device: Device | str | None = None, dtype: Any = None) -> Self:
        """Move all parameters and gradients to `device`, cast them to `dtype`, and return the layer itself.

        device: a Device, or the name of one ("cpu", "gpu:1"). The layer gets new arrays: make optimizers and replicas
        afterwards.
        """
        device = get_device(device) if isinstance(device, str) else device
        for p in self.parameters():
            p.data, p.grad, p.flat = (*(_moved(x, device, dtype) for x in (p.data, p.grad)), None)
        return self

    def replica(self) -> Self:
        """A copy of the layer that shares the parameter array and owns a gradient array (zero)."""
        flat = self.flat
        params = [Param(p.data, p.name) for p in flat.params]
        FlatParameters(params, data=flat.data)
        return copy.deepcopy(self, {id(p): twin for p, twin in zip(flat.params, params, strict=True)})

    def state_dict(self) -> dict[str, np.ndarray]:
        """The parameters by name, as copies on the CPU."""
        return {name: to_cpu(p.data).copy() for name, p in self.named_parameters().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the arrays of `state` into the parameters.

        Raises ValueError, and changes nothing, unless names and shapes are exactly those of the layer; the message
        names the tensors that are missing, left over or of another shape.
        """
        params = self.named_parameters()
        problems = [f"missing: {name}" for name in params.keys() - state.keys()]
        problems += [f"not in this model: {name}" for name in state.keys() - params.keys()]
        problems += [
            f"{name}: expected {tuple(p.data.shape)}, got {tuple(state[name].shape)}"
            for name, p in params.items()
            if name in state and tuple(state[name].shape) != tuple(p.data.shape)
        ]
        if problems:
            raise ValueError("weights of another model: " + "; ".join(sorted(problems)[:8]))
        for name, p in params.items():
            p.data[...] = to_device(to_cpu(state[name]), self.device, p.data.dtype)


def _named_parts(prefix: str, container: Mapping[str, Any] | list | tuple) -> Iterator[tuple[str, Layer | Param]]:
    """The layers and parameters in a container, and in those within it: "0", "heads.query"."""
    for name, value in container.items() if isinstance(container, Mapping) else enumerate(container):
        if isinstance(value, Layer | Param):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping | list | tuple):
            yield from _named_parts(f"{prefix}{name}.", value)


def _moved(x: Array, device: Device | None, dtype: Any) -> Array:
    moved = x if device is None else to_device(x, device)
    return moved.astype(moved.dtype if dtype is None else dtype)

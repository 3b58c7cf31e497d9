"""A run of what is checked, on arrays of its own, and the check of its contract: everything but the values."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Array, Device, array_module, to_cpu, to_device
from ..rng import Key
from .contracts import (
    Diagnosis,
    GradientError,
    Untouched,
    as_tuple,
    expect_apart,
    expect_equal,
    expect_type,
    is_array,
    is_floating,
    labelled,
    named_gradients,
    own_copy,
)
from .differences import label

STALE = (
    Diagnosis(
        "The backward uses what the latest forward left in the layer, and not its own cache.",
        "form",
        "stale after a second forward",
    ),
)


class PairRun:
    """An operation with its own copies of the arguments, on one device and of one dtype."""

    def __init__(
        self,
        op: Callable,
        op_backward: Callable,
        names: list[str],
        args: tuple,
        kwargs: dict[str, Any],
        device: Device,
        dtype: Any,
    ) -> None:
        self.op, self.op_backward, self.backward_name = op, op_backward, name_of(op_backward)
        self.names, self.dtype = names, dtype
        self.args = [own_copy(x, device, dtype) for x in args]
        self.kwargs = {key: own_copy(x, device, dtype) for key, x in kwargs.items()}
        self.given = {n: x for n, x in zip(names, self.args, strict=True) if is_array(x)}
        self.given |= {key: x for key, x in self.kwargs.items() if is_array(x)}
        self.floating = {n: x for n, x in zip(names, self.args, strict=True) if is_floating(x)}
        untouched = Untouched(self.given)
        self.y, self.cache = two(op(*self.args, **self.kwargs), "op")
        untouched.check("forward")

    def gradients(self, dy: Any) -> dict[str, np.ndarray]:
        """The analytic gradients for the current contents of the arguments, by name, on the CPU."""
        _, cache = self.op(*self.args, **self.kwargs)
        found = named_gradients(self.op_backward(dy, cache), self.floating, self.backward_name)
        return {name: to_cpu(g) for name, g in found.items()}

    def evaluate(self, dy):
        y, cache = self.op(*self.args, **self.kwargs)
        found = named_gradients(self.op_backward(dy, cache), self.floating, self.backward_name)
        return flat(y), [to_cpu(g) for g in found.values()]

    def check_contract(self, dy: Any) -> dict[str, np.ndarray]:
        """Everything but the values. Returns the gradients, by name."""
        outputs = labelled("y", as_tuple(self.y))
        upstream = labelled("dy", as_tuple(dy))
        expect_finite(outputs)
        expect_apart(outputs, self.given)
        expect_equal(
            outputs,
            labelled("y", as_tuple(self.op(*self.args, **self.kwargs)[0])),
            "differs between two calls with the same arguments (random numbers must come from a key)",
        )
        untouched = Untouched(self.given | outputs | upstream)
        returned = self._backward(dy)
        untouched.check("backward")
        self._expect_type(outputs, returned)
        gradients = {f"gradient of {name}": g for name, g in returned.items()}
        expect_finite(gradients)
        expect_apart(gradients, self.given | upstream)
        for i, (name, g) in enumerate(gradients.items()):
            expect_apart({name: g}, dict(list(gradients.items())[:i]))
        first = {name: to_cpu(g).copy() for name, g in returned.items()}
        again = self._backward(dy)
        expect_equal(again, first, "backward gives another gradient when called twice on one cache")
        return first

    def check_types(self, dy: Any) -> None:
        """Check that y and the gradients have the dtype of the arguments."""
        self._expect_type(labelled("y", as_tuple(self.y)), self._backward(dy))

    def _backward(self, dy: Any) -> dict[str, Array]:
        return named_gradients(self.op_backward(dy, self.cache), self.floating, self.backward_name)

    def _expect_type(self, outputs: dict[str, Any], gradients: dict[str, Any]) -> None:
        if self.floating:
            expect_type(outputs | {f"gradient of {n}": g for n, g in gradients.items()}, self.dtype)


class LayerRun:
    """A deep copy of a layer, and copies of its inputs, on one device and of one dtype."""

    def __init__(self, layer: Any, inputs: tuple, kwargs: dict[str, Any], device: Device, dtype: Any) -> None:
        self.dtype = dtype
        self.layer = copy.deepcopy(layer)
        expect_apart({f"{name} of a deep copy": x for name, x in layer_arrays(self.layer).items()}, layer_arrays(layer))
        self.layer.to(device=device, dtype=dtype)
        self.layer.zero_grad()
        self.params = self.layer.named_parameters()
        self.trained = {name: p for name, p in self.params.items() if not getattr(p, "frozen", False)}
        names = argument_names(layer.forward, inputs)
        self.names = [f"input {name}" if name in self.params else name for name in names]
        self.inputs = [own_copy(x, device, dtype) for x in inputs]
        self.kwargs = {key: own_copy(x, device, dtype) for key, x in kwargs.items()}
        self.given = {n: x for n, x in zip(self.names, self.inputs, strict=True) if is_array(x)}
        self.given |= {key: x for key, x in self.kwargs.items() if is_array(x)}
        self.floating = self._floating(self.inputs)

    def _floating(self, inputs: list) -> dict[str, Array]:
        return {n: x for n, x in zip(self.names, inputs, strict=True) if is_floating(x)}

    def forward(self, inputs: list | None = None) -> tuple[Any, Any]:
        inputs = self.inputs if inputs is None else inputs
        return two(self.layer.forward(*inputs, **self.kwargs), "forward")

    def backward(self, dy: Any, cache: Any) -> dict[str, Array]:
        """The gradients of the inputs, by name; those of the parameters are added into the layer."""
        return named_gradients(self.layer.backward(dy, cache), self.floating, "backward")

    def gradients(self, dy: Any, inputs: list | None = None) -> dict[str, np.ndarray]:
        """The gradients of inputs and parameters from one forward and backward, by name, on the CPU."""
        self.layer.zero_grad()
        _, cache = self.forward(inputs)
        found = {name: to_cpu(g).copy() for name, g in self.backward(dy, cache).items()}
        return found | self.parameter_gradients()

    def evaluate(self, dy):
        self.layer.zero_grad()
        y, cache = self.forward()
        found = {name: to_cpu(g).copy() for name, g in self.backward(dy, cache).items()}
        return flat(y), list((found | self.parameter_gradients()).values())

    def parameter_gradients(self) -> dict[str, np.ndarray]:
        return {name: to_cpu(p.grad).copy() for name, p in self.trained.items()}

    def check_contract(self, dy: Any, key: Key) -> dict[str, np.ndarray]:
        """Everything but the values. Returns the gradients of inputs and parameters, by name."""
        state = layer_arrays(self.layer)
        upstream = labelled("dy", as_tuple(dy))
        untouched = Untouched(self.given | state)
        y, cache = self.forward()
        untouched.check("forward")
        outputs = labelled("y", as_tuple(y))
        expect_finite(outputs)
        expect_apart(outputs, state)
        untouched = Untouched(self.given | outputs | upstream | {n: p.data for n, p in self.params.items()})
        returned = self.backward(dy, cache)
        untouched.check("backward")
        self._expect_type(outputs, returned)
        self._expect_same_parameters(state)
        expect_apart({f"gradient of {name}": g for name, g in returned.items()}, state)
        once = {name: to_cpu(g).copy() for name, g in returned.items()}
        sums = self.parameter_gradients()
        expect_finite({f"gradient of {name}": g for name, g in (once | sums).items()})
        again = self.backward(dy, cache)
        expect_equal(again, once, "backward gives another gradient when called twice on one cache")
        twice = {name: 2 * g for name, g in sums.items()}
        expect_equal(self.parameter_gradients(), twice, "backward does not add to the gradient")
        self._check_two_uses(dy, key)
        return once | sums

    def _expect_same_parameters(self, state: dict[str, Array]) -> None:
        """Check that neither pass replaced an array of a parameter: an optimizer would still hold the old one."""
        for name, x in layer_arrays(self.layer).items():
            if x is not state.get(name):
                raise GradientError(f"{name} was replaced by another array: write into it, or an optimizer loses it")

    def _check_two_uses(self, dy: Any, key: Key) -> None:
        """Forward twice, then backward twice: the result must be as if each use had been alone."""
        rng = key.fold("second inputs").generator()
        inputs = [shuffled(x, rng) for x in self.inputs]
        other_dy = tuple(shuffled(x, rng) for x in as_tuple(dy))
        other_dy = other_dy if isinstance(dy, tuple) else other_dy[0]
        alone, other = self.gradients(dy), self.gradients(other_dy, inputs)
        self.layer.zero_grad()
        (_, cache), (_, other_cache) = self.forward(), self.forward(inputs)
        found = {n: to_cpu(g).copy() for n, g in self.backward(dy, cache).items()}
        other_found = {n: to_cpu(g).copy() for n, g in self.backward(other_dy, other_cache).items()}
        complaint = "is wrong when the layer is used twice before backward (it must remember nothing but the cache)"
        expect_equal(found, alone, complaint, STALE)
        expect_equal(other_found, other, complaint, STALE)
        both = {name: alone[name] + other[name] for name in self.trained}
        expect_equal(self.parameter_gradients(), both, complaint, STALE)

    def check_types(self, dy: Any) -> None:
        """Check that y, the gradients and the parameters have the dtype that the layer was cast to."""
        y, cache = self.forward()
        self._expect_type(labelled("y", as_tuple(y)), self.backward(dy, cache))

    def _expect_type(self, outputs: dict[str, Any], gradients: dict[str, Any]) -> None:
        returned = {f"gradient of {n}": g for n, g in gradients.items()}
        expect_type(outputs | returned | layer_arrays(self.layer), self.dtype)


def argument_names(function: Callable, args: tuple) -> list[str]:
    """The parameter name for each of `args`: "gamma", or "tensors[1]" for `*tensors`.

    A function whose arguments have names that are no identifiers lists them as `argument_names`.
    """
    if hasattr(function, "argument_names"):
        return function.argument_names
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = []
    for i in range(len(args)):
        variadic = next((p for p in parameters[: i + 1] if p.kind is p.VAR_POSITIONAL), None)
        if variadic:
            names.append(f"{variadic.name}[{i - parameters.index(variadic)}]")
        else:
            names.append(parameters[i].name if i < len(parameters) else f"argument {i}")
    return names


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def two(returned: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise GradientError(f"{what} must return the pair (y, cache), got {type(returned).__name__}")
    return returned


def layer_arrays(layer: Any) -> dict[str, Array]:
    """All parameters by name, and their gradients as "gradient of NAME"."""
    params = layer.named_parameters()
    return {n: p.data for n, p in params.items()} | {f"gradient of {n}": p.grad for n, p in params.items()}


def normal_like(y: Any, seed: int, device: Device, dtype: Any) -> Any:
    """Standard normal numbers of the shape of `y`, or a tuple of them. Raises ValueError if y has no elements."""
    rng = Key(seed).fold("dy").generator()
    shapes = [to_cpu(part).shape for part in as_tuple(y)]
    if not any(map(math.prod, shapes)):
        raise ValueError(f"y: expected at least one element, got {', '.join(map(str, shapes)) or type(y).__name__}")
    draws = tuple(to_device(np.asarray(rng.standard_normal(shape)), device, dtype) for shape in shapes)
    return draws if isinstance(y, tuple) else draws[0]


def flat(y: Any) -> np.ndarray:
    """All elements of an array, or of a tuple of arrays, as one NumPy vector."""
    return np.concatenate([to_cpu(part).reshape(-1) for part in as_tuple(y)])


def shuffled(x: Any, rng: np.random.Generator) -> Any:
    """An array with the elements of `x` in random order, or with new ones if all are the same floating-point number;
    anything else is returned unchanged.
    """
    if not is_array(x):
        return x
    values = rng.permutation(to_cpu(x).reshape(-1))
    if is_floating(x) and np.ptp(values) == 0:
        values = (values[0] or 1) * rng.uniform(0.5, 1, values.shape)
    twin = x.copy()
    twin[...] = array_module(x).asarray(values.reshape(x.shape))
    return twin


def expect_finite(named: dict[str, Any], error: type[Exception] = GradientError) -> None:
    """Raise `error` naming the first element that is NaN or infinite."""
    for name, x in named.items():
        values = to_cpu(x)
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            index = tuple(int(i) for i in bad[0])
            raise error(f"{label(name, index)} is {values[index]} ({len(bad)} elements are not finite)")

"""Gradient checks for whatever has gradients: `check` finds out what it is given, and how to check it.

TensorFlow, MLX and PyTensor are here: of each, how an array of NumPy becomes one of the library, and how the library
returns results together with the function from their gradients to those of the arguments.
"""

from __future__ import annotations

import functools
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..backend import is_floating_type
from .adapters import ForeignPair, check_jax, check_torch, is_leaf
from .contracts import GradientError, arrays_in, chosen_rules, mapped
from .gradcheck import Report, check_layer
from .objects import StatefulPair, ValuePair, is_value
from .runs import name_of


def check(function: Any, *args: Any, **options: Any) -> Any:
    """Check the gradients of `function(*args)`, whatever library it is written in; without `args`, at its first call.

        check(function, *args)  # a function of tensors of PyTorch, JAX, TensorFlow, MLX or PyTensor

        @check  # the first Cube.apply(...) checks it, with the arguments of that call
        class Cube(torch.autograd.Function): ...

    What is checked depends on what `function` and `args` are:

    - of PyTorch and JAX: see `check_torch` and `check_jax`;
    - tensors of TensorFlow, and the variables that the function uses, a layer of Keras for instance;
    - arrays of MLX, in float32, and the trainable parameters of an `mlx.nn.Module`;
    - constants of PyTensor (`pt.constant(x)`), for an Op or a function of symbolic variables, and shared variables;
    - values with `data`, `grad` and `backward()`, as in micrograd, and `function.parameters()`: see `ValuePair`;
    - an `nn.Layer`: see `check_layer`;
    - any other object with `forward` and `backward`, and NumPy arrays: `StatefulPair` says where it may keep gradients.

    As a decorator it accepts a function, or a class with `apply` or `forward`, and as `partial(check, order=2)` has
    options. A first call whose gradients are wrong raises the error, and is checked again the next time; a call inside
    a transformation such as `jit`, `grad` or `vmap` is not checked. `options` are those of `check_gradients` and
    keyword arguments of the function, as in `check_torch`.

    Returns a Report, or the decorated function. Raises GradientError and ValueError as `check_gradients` does, and
    TypeError if there is nothing here that it knows.
    """
    kind: Any = function
    made = not isinstance(kind, type) and any(hasattr(kind, name) for name in ("backward", "parameters"))
    if args or (made and (options or not hasattr(kind, "backward"))):
        return _checker(function, args)(function, *args, **options)
    if made or not callable(function):
        raise TypeError(f"check: expected arguments for {name_of(function)}, or a function or class to decorate")
    if not isinstance(function, type):
        return _checked_once(function, functools.partial(check, function, **options))
    if "torch" in _libraries([kind]) and hasattr(kind, "setup_context"):
        kind.apply = staticmethod(_checked_once(kind.apply, functools.partial(check, kind, **options)))
    else:
        kind.forward = _checked_once(kind.forward, functools.partial(check, **options))
    return kind


def _checked_once(call: Callable, checker: Callable) -> Callable:
    """`call`, which at its first call also checks its gradients: the first with arrays whose numbers are known."""
    begun = False

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        parts: list = []
        mapped(lambda _, x: parts.append(x), "", args, is_leaf)
        if not begun and not any(map(_is_traced, parts)):
            begun = True
            try:
                checker(*args, **kwargs)
            except BaseException:
                begun = False
                raise
        return call(*args, **kwargs)

    return checked


def _is_traced(x: Any) -> bool:
    """Whether `x` stands for arrays inside a transformation, such as jit, grad or vmap."""
    jax, torch, tensorflow = (sys.modules.get(name) for name in ("jax", "torch", "tensorflow"))
    return bool(
        (jax and isinstance(x, jax.core.Tracer))
        or (torch and isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x))
        or (tensorflow and tensorflow.is_tensor(x) and not hasattr(x, "numpy"))
    )


def _checker(function: Any, args: tuple) -> Callable:
    parts: list = [function]
    mapped(lambda _, x: parts.append(x), "", args, is_leaf)
    libraries = _libraries(parts)
    pairs: dict[str, type[ForeignPair]] = {"tensorflow": _TensorFlowPair, "mlx": _MlxPair, "pytensor": _PyTensorPair}
    checkers: dict[str, Callable] = {"torch": check_torch, "jax": check_jax, "jaxlib": check_jax}
    checkers |= {name: functools.partial(_check_pair, pair) for name, pair in pairs.items()}
    for name, checker in checkers.items():
        if name in libraries:
            return checker
    if hasattr(function, "named_parameters"):
        return check_layer
    if hasattr(function, "backward"):
        return functools.partial(_check_pair, StatefulPair)
    if any(map(is_value, parts)) or hasattr(function, "parameters"):
        return functools.partial(_check_pair, ValuePair)
    got = ", ".join(type(x).__name__ for x in parts[1:])
    raise TypeError(
        "check: expected arrays of PyTorch, JAX, TensorFlow, MLX or PyTensor, values with backward(), or an object "
        f"with forward and backward, got {name_of(function)} with {got or 'no arguments'}; for a pair of NumPy "
        "functions there is check_gradients(op, op_backward, ...)"
    )


def _libraries(parts: Iterable[Any]) -> set[str]:
    """The names of the packages that define the types of `parts`, or types that these inherit from."""
    types = {kind for x in parts for kind in (x if isinstance(x, type) else type(x)).__mro__}
    return {kind.__module__.partition(".")[0] for kind in types}


def _check_pair(pair: Callable[..., ForeignPair], function: Any, *args: Any, **options: Any) -> Report:
    return pair(function, args, options).check("check")


def _is_inexact(x: Any) -> bool:
    """Whether the type of an array of any library is floating-point or complex."""
    return any(kind in str(x.dtype) for kind in ("float", "complex"))


class _LibraryPair(ForeignPair):
    """A function of a library that gives, for results, the function from their gradients to those of the arguments."""

    def __init__(self, function: Any, args: tuple, options: dict[str, Any]) -> None:
        called = getattr(function, "call", getattr(function, "make_node", function))  # of a Keras layer, and of an Op
        super().__init__(function, name_of(function), called, args, options)
        self.used = self.variables_used()
        renamed = {n: f"variable {n}" if n in self.leaves else n for n in self.used}
        self.used = {renamed[n]: x for n, x in self.used.items()}
        self.variables |= self.used

    def check(self, checker: str) -> Report:
        try:
            return super().check(checker)
        finally:
            self.restore()

    def forward(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        self.restore()
        given = {n: self.array(x) for n, x in arrays.items()}
        moved = {n: given[n] for n in self.variables if _is_inexact(arrays[n])}
        results, pull = self.pullback(given, moved)
        if not results:
            raise TypeError(f"{self.name}: expected a floating-point result")
        y = tuple(map(np.array, results))
        return y if len(y) > 1 else y[0], (pull, y, list(moved))

    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        pull, y, names = cache
        try:
            gradients = pull([self.array(u.astype(part.dtype)) for u, part in zip(dy, y, strict=True)])
            return {n: np.array(g) for n, g in zip(names, gradients, strict=True)}
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise GradientError(f"the backward raises {type(error).__name__}: {said}") from error

    def results(self, arrays: dict[str, Any]) -> list:
        """The floating-point arrays that the function returns."""
        args, kwargs = self.arguments(arrays)
        return [x for x in arrays_in("y", self.function(*args, **kwargs)).values() if _is_inexact(x)]

    def to_numpy(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            x = self.values(x)
        if not isinstance(x, np.ndarray) or not _is_inexact(x):
            return x
        return x.astype(np.float64 if is_floating_type(x.dtype) else np.complex128)

    def restore(self) -> None:
        """Give variables the values that they had before the check."""

    def variables_used(self) -> dict[str, Any]:
        """The library's own variables that the function uses, by name."""
        return {}

    @abstractmethod
    def values(self, x: Any) -> Any:
        """An array of the library as one of NumPy; anything else unchanged."""

    @abstractmethod
    def array(self, x: np.ndarray) -> Any:
        """An array of NumPy as one of the library, a copy of the same type."""

    @abstractmethod
    def pullback(self, given: dict[str, Any], moved: dict[str, Any]) -> tuple[list, Callable[[list], Iterable]]:
        """The results, and the function from their gradients to those of `moved`, some of the arrays `given`."""


class _TensorFlowPair(_LibraryPair):
    cut = "tf.stop_gradient, tf.constant(x), .numpy(), or a gradient that is None"

    def variables_used(self) -> dict[str, Any]:
        import tensorflow as tf

        self.tf, self.saved = tf, []
        before = [(v, v.numpy()) for v in getattr(self.function, "variables", ())]
        with tf.GradientTape() as tape:
            self.results({})
        used = tape.watched_variables()
        self.saved = [(v, v.numpy()) for v in (*used, *getattr(self.function, "variables", ()))] + before
        names = [v.name.partition(":")[0] for v in used]
        return {f"{n} {i}" if names.count(n) > 1 else n: v for i, (n, v) in enumerate(zip(names, used, strict=True))}

    def restore(self) -> None:
        for variable, value in self.saved:
            variable.assign(value)

    def values(self, x: Any) -> Any:
        import tensorflow as tf

        return x.numpy() if hasattr(x, "numpy") and (tf.is_tensor(x) or hasattr(x, "assign")) else x

    def array(self, x: np.ndarray) -> Any:
        return self.tf.constant(x)

    def pullback(self, given: dict[str, Any], moved: dict[str, Any]) -> tuple[list, Callable[[list], Iterable]]:
        for name, variable in self.used.items():
            variable.assign(self.tf.cast(given[name], variable.dtype))
        sources = [self.used.get(n, x) for n, x in moved.items()]
        with self.tf.GradientTape(persistent=True) as tape:
            tape.watch([x for n, x in moved.items() if n not in self.used])
            results = self.results(given)
        return results, lambda dy: map(self.dense, tape.gradient(results, sources, dy, unconnected_gradients="zero"))

    def dense(self, x: Any) -> Any:
        """A gradient, also one of a few rows."""
        return self.tf.convert_to_tensor(x)


class _MlxPair(_LibraryPair):
    """In float32: a GPU has nothing wider, and on a CPU some functions of MLX round float64 to it."""

    cut = "mx.stop_gradient, .item(), NumPy, or a vjp that gives zeros"

    def check(self, checker: str) -> Report:
        self.options["rules"] = chosen_rules(self.options.get("rules", {}), house=False) | {"types": False}
        return super().check(checker)

    def variables_used(self) -> dict[str, Any]:
        from mlx.utils import tree_flatten

        self.saved = self.function.trainable_parameters() if hasattr(self.function, "trainable_parameters") else {}
        return dict(tree_flatten(self.saved))

    def restore(self) -> None:
        if self.saved:
            self.function.update(self.saved)

    def values(self, x: Any) -> Any:
        import mlx.core as mx

        if not isinstance(x, mx.array):
            return x
        return np.array(x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x)

    def array(self, x: np.ndarray) -> Any:
        import mlx.core as mx

        return mx.array(x.astype(np.float32) if x.dtype == np.float64 else x.copy())  # in C order

    def pullback(self, given: dict[str, Any], moved: dict[str, Any]) -> tuple[list, Callable[[list], Iterable]]:
        import mlx.core as mx
        from mlx.utils import tree_unflatten

        def function(*arrays: Any) -> list:
            named = given | dict(zip(moved, arrays, strict=True))
            if self.used:
                self.function.update(tree_unflatten([(n.removeprefix("variable "), named[n]) for n in self.used]))
            return self.results(named)

        arrays = list(moved.values())
        return function(*arrays), lambda dy: mx.vjp(function, arrays, dy)[1]


class _PyTensorPair(_LibraryPair):
    cut = "disconnected_grad, zero_grad, or an Op whose gradient gives zeros"

    def variables_used(self) -> dict[str, Any]:
        import pytensor.tensor as pt
        from pytensor.compile import SharedVariable
        from pytensor.graph.traversal import graph_inputs

        self.compiled: dict[tuple, tuple[Callable, Callable]] = {}
        arrays = {n: pt.constant(self.to_numpy(x)) for n, x in (self.variables | self.constants).items()}
        results = self.results(arrays)
        shared = [x for x in graph_inputs(results) if isinstance(x, SharedVariable)]
        return {x.name or f"shared {i}": x for i, x in enumerate(shared) if _is_inexact(x)}

    def values(self, x: Any) -> Any:
        return (
            x.get_value() if hasattr(x, "get_value") else getattr(x, "data", x) if "pytensor" in _libraries([x]) else x
        )

    def array(self, x: np.ndarray) -> Any:
        return x.copy()

    def pullback(self, given: dict[str, Any], moved: dict[str, Any]) -> tuple[list, Callable[[list], Iterable]]:
        key = tuple((n, x.shape, x.dtype) for n, x in given.items())
        if key not in self.compiled:
            self.compiled[key] = self.compile(given, moved)
        results, gradients = self.compiled[key]
        arrays = list(moved.values())
        return results(*arrays), lambda dy: gradients(*arrays, *dy)

    def compile(self, given: dict[str, Any], moved: dict[str, Any]) -> tuple[Callable, Callable]:
        """The functions from arguments to results, and from arguments and gradients of results to gradients."""
        import pytensor
        import pytensor.tensor as pt
        from pytensor.gradient import Lop

        inputs = {n: pt.tensor(dtype=x.dtype, shape=x.shape) for n, x in moved.items()}
        results = self.results({n: inputs.get(n, pt.constant(x)) for n, x in given.items()})
        dy = [y.type() for y in results]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sources = [self.used.get(n, x) for n, x in inputs.items()]
            gradients = Lop(results, sources, dy, disconnected_inputs="ignore")
        shared = {x: inputs[n] for n, x in self.used.items()}
        make = functools.partial(pytensor.function, mode="FAST_COMPILE", givens=shared, on_unused_input="ignore")
        return make(list(inputs.values()), results), make([*inputs.values(), *dy], gradients)

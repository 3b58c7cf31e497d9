"""Arrays of which only the shape and the type are known: what is computed with them is recorded, as a graph in ONNX.

A model is run on such arrays as it is on any others: `array_module` gives its operations a `Recorder`, whose functions
have the names and meanings of NumPy's and return the next `Recorded` array. So the graph of every model comes from the
reference operations, and no model needs a line of its own.

One run records the numbers of one size of the batch, such as the length T in a reshape. Several runs, of different
sizes, show which numbers depend on the sizes, and how: see `joined`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .. import ops

UNBOUNDED = -(2**62)  # the end of a slice with a negative step that reaches the first number


class NotRecorded(ValueError, AttributeError):
    """A model computes something that has no counterpart in ONNX here."""


class Sizes(NamedTuple):
    """Integers that are an input of a node, such as a shape, or the ends of a slice. They may depend on the batch."""

    values: tuple[int, ...]
    scalar: bool = False


class Node(NamedTuple):
    """One computation. The name of its result is n and its place among the nodes, such as "n5"."""

    op: str  # the operator of ONNX, or "" for a constant
    inputs: tuple[str | Sizes, ...] = ()
    attributes: Mapping[str, Any] = MappingProxyType({})
    constant: np.ndarray | None = None
    name: str = ""  # of a constant that is a parameter


class Recorded(NDArrayOperatorsMixin):
    """An array with a shape and a type but no numbers; a computation with it becomes a `Node` of its recorder."""

    __hash__ = object.__hash__

    def __init__(self, recorder: Recorder, name: str, shape: Sequence[int], dtype: Any) -> None:
        self.recorder, self.name, self.shape, self.dtype = recorder, name, tuple(map(int, shape)), np.dtype(dtype)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return self.recorder

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Recorded, ...] = ()) -> Recorded:
        """An operator, or a function of NumPy. In place, `out` stands for the result from now on."""
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        result = getattr(self.recorder, name)(*inputs)
        for x in out:
            x.name = result.name
        return out[0] if out else result

    def __getattr__(self, name: str) -> Any:
        raise NotRecorded(f"the model uses {name} of an array, which cannot be exported to ONNX")

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    T = property(lambda self: self.transpose())

    def __len__(self) -> int:
        return self.shape[0]

    def astype(self, dtype: Any, copy: bool = True) -> Recorded:
        from onnx.helper import np_dtype_to_tensor_dtype

        if np.dtype(dtype) == self.dtype:
            return self
        kind = np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.recorder.record("Cast", [self], self.shape, dtype, to=kind)

    def copy(self) -> Recorded:
        return self

    def reshape(self, *shape: Any) -> Recorded:
        wanted = tuple(shape[0]) if isinstance(shape[0], tuple | list) else shape
        known = math.prod(n for n in wanted if n != -1)
        result = [self.size // known if n == -1 else n for n in wanted]
        return self.recorder.record("Reshape", [self, Sizes(wanted)], result, self.dtype, allowzero=1)

    def transpose(self, *axes: int) -> Recorded:
        axes = axes or tuple(range(self.ndim))[::-1]
        return self.recorder.record("Transpose", [self], [self.shape[i] for i in axes], self.dtype, perm=list(axes))

    def swapaxes(self, i: int, j: int) -> Recorded:
        axes = list(range(self.ndim))
        axes[i], axes[j] = axes[j], axes[i]
        return self.transpose(*axes)

    def any(self, axis: Any = None, keepdims: bool = False) -> Recorded:
        return self.astype(np.int32).max(axis, keepdims).astype(bool)

    def reduced(self, op: str, axis: Any = None, keepdims: bool = False) -> Recorded:
        given = range(self.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        axes = sorted(i % self.ndim for i in given)
        shape = [1 if i in axes else n for i, n in enumerate(self.shape) if keepdims or i not in axes]
        if op == "ReduceSum":  # since opset 13 its axes are an input
            return self.recorder.record(op, [self, Sizes(tuple(axes))], shape, self.dtype, keepdims=int(keepdims))
        return self.recorder.record(op, [self], shape, self.dtype, axes=axes, keepdims=int(keepdims))

    sum = partialmethod(reduced, "ReduceSum")
    mean = partialmethod(reduced, "ReduceMean")
    max = partialmethod(reduced, "ReduceMax")

    def __getitem__(self, key: Any) -> Recorded:
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(k is Ellipsis for k in keys):
            i = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys[i : i + 1] = [slice(None)] * (self.ndim - sum(k is not None for k in keys) + 1)
        if any(isinstance(k, Recorded) for k in keys):
            raise NotRecorded("the model indexes an array by another in brackets: use take or take_along_axis")
        x, axis = self, 0
        added: list[int] = []
        dropped: list[int] = []
        for i, k in enumerate(keys):
            if k is None:
                added.append(i - len(dropped))
                continue
            if isinstance(k, slice):
                if k != slice(None):
                    x = x.sliced(axis, k)
            else:
                x = x.sliced(axis, slice(int(k), int(k) + 1 or None))
                dropped.append(axis)
            axis += 1
        if dropped:
            shape = [n for i, n in enumerate(x.shape) if i not in dropped]
            x = x.recorder.record("Squeeze", [x, Sizes(tuple(dropped))], shape, x.dtype)
        if added:
            shape = list(x.shape)
            for i in added:
                shape.insert(i, 1)
            x = x.recorder.record("Unsqueeze", [x, Sizes(tuple(added))], shape, x.dtype)
        return x

    def sliced(self, axis: int, part: slice) -> Recorded:
        start, stop, step = part.indices(self.shape[axis])
        shape = list(self.shape)
        shape[axis] = len(range(start, stop, step))
        ends = [Sizes((start,)), Sizes((UNBOUNDED if stop < 0 else stop,)), Sizes((axis,)), Sizes((step,))]
        return self.recorder.record("Slice", [self, *ends], shape, self.dtype)


class Recorder:
    """The array library of `Recorded` arrays, for one run of a model; `nodes` is what has been computed."""

    __name__ = "scratchformer.export.recorded"
    inf, pi, newaxis = math.inf, math.pi, None

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __getattr__(self, name: str) -> Any:
        raise NotRecorded(f"the model uses {name}, which cannot be exported to ONNX")

    def record(self, op: str, inputs: Sequence[Any], shape: Sequence[int], dtype: Any, **attributes: Any) -> Recorded:
        """The result of an operator of ONNX. inputs: `Recorded` arrays and `Sizes`."""
        return self.append(Node(op, tuple(getattr(x, "name", x) for x in inputs), attributes), shape, dtype)

    def append(self, node: Node, shape: Sequence[int], dtype: Any) -> Recorded:
        self.nodes.append(node)
        return Recorded(self, f"n{len(self.nodes) - 1}", shape, dtype)

    def asarray(self, x: Any, dtype: Any = None, name: str = "") -> Recorded:
        if isinstance(x, Recorded):
            return x if dtype is None else x.astype(dtype)
        array = np.asarray(x, dtype)
        return self.append(Node("", constant=array, name=name), array.shape, array.dtype)

    array = ascontiguousarray = asarray

    def elementwise(self, op: str, *inputs: Any, dtype: Any = None) -> Recorded:
        """An operator on arrays and numbers, broadcast and converted to one type as NumPy does. dtype: of the result,
        if it is another one.
        """
        kind = np.result_type(*(x.dtype if isinstance(x, Recorded) else x for x in inputs))
        if op in ("Div", "Sqrt", "Exp", "Tanh", "Erf", "Cos", "Sin") and kind.kind != "f":
            raise NotRecorded(f"the model computes {op} of {kind}, unknown to the export")
        arrays = [Sizes((x,), True) if type(x) is int and kind == np.int64 else self.asarray(x, kind) for x in inputs]
        shape = np.broadcast_shapes(*(x.shape for x in arrays if isinstance(x, Recorded)))
        return self.record(op, arrays, shape, kind if dtype is None else dtype)

    def where(self, condition: Any, x: Any, y: Any) -> Recorded:
        kind = np.result_type(*(each.dtype if isinstance(each, Recorded) else each for each in (x, y)))
        arrays = [self.asarray(condition, bool), self.asarray(x, kind), self.asarray(y, kind)]
        return self.record("Where", arrays, np.broadcast_shapes(*(each.shape for each in arrays)), kind)

    def remainder(self, x: Any, y: Any) -> Recorded:
        z = self.elementwise("Mod", x, y)
        if z.dtype.kind == "f":  # whose sign would be that of x
            raise NotRecorded("the model computes a remainder of fractions, unknown to the export")
        return z

    def floor_divide(self, x: Any, y: Any) -> Recorded:
        exact = self.subtract(x, self.remainder(x, y))
        return self.record("Div", [exact, self.asarray(y, exact.dtype)], exact.shape, exact.dtype)

    def matmul(self, x: Any, y: Any) -> Recorded:
        kind = np.result_type(x.dtype, y.dtype)
        shape = (*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1])
        return self.record("MatMul", [self.asarray(x, kind), self.asarray(y, kind)], shape, kind)

    def take(self, x: Any, indices: Any, axis: int) -> Recorded:
        shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        return self.record("Gather", [self.asarray(x), indices], shape, x.dtype, axis=axis)

    def concatenate(self, arrays: Sequence[Any], axis: int = 0) -> Recorded:
        kind = np.result_type(*(x.dtype for x in arrays))
        arrays = [self.asarray(x, kind) for x in arrays]
        shape, axis = list(arrays[0].shape), axis % arrays[0].ndim
        shape[axis] = sum(x.shape[axis] for x in arrays)
        return self.record("Concat", arrays, shape, kind, axis=axis)

    concat = concatenate

    def matrix_transpose(self, x: Recorded) -> Recorded:
        return x.swapaxes(-1, -2)

    def clip(self, x: Any, low: Any, high: Any) -> Recorded:
        return self.minimum(self.maximum(x, low), high)

    def take_along_axis(self, x: Recorded, indices: Recorded, axis: int) -> Recorded:
        shape = list(x.shape)
        shape[axis] = 1
        indices = self.broadcast_to(indices, np.broadcast_shapes(indices.shape, tuple(shape)))
        return self.record("GatherElements", [x, indices], indices.shape, x.dtype, axis=axis % x.ndim)

    def broadcast_to(self, x: Any, shape: Sequence[int]) -> Recorded:
        return self.record("Expand", [self.asarray(x), Sizes(tuple(shape))], shape, x.dtype)

    def full(self, shape: Any, value: Any, dtype: Any = float) -> Recorded:
        return self.broadcast_to(self.asarray(value, dtype), shape if isinstance(shape, tuple) else (shape,))

    def zeros(self, shape: Any, dtype: Any = float) -> Recorded:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Any, dtype: Any = float) -> Recorded:
        return self.full(shape, 1, dtype)

    def zeros_like(self, x: Recorded) -> Recorded:
        return self.zeros(x.shape, x.dtype)

    def ones_like(self, x: Recorded) -> Recorded:
        return self.ones(x.shape, x.dtype)

    def arange(self, *ends: int) -> Recorded:
        start, stop, step = (ends if len(ends) > 1 else (0, *ends)) + (1,) * (len(ends) < 3)
        inputs = [Sizes((int(n),), scalar=True) for n in (start, stop, step)]
        return self.record("Range", inputs, (len(range(start, stop, step)),), np.int64)


def _add_functions() -> None:
    """Give `Recorder` the functions that are one operator of ONNX."""
    for name, op in {
        "add": "Add", "subtract": "Sub", "multiply": "Mul", "divide": "Div", "true_divide": "Div",
        "maximum": "Max", "minimum": "Min", "exp": "Exp", "sqrt": "Sqrt", "tanh": "Tanh", "erf": "Erf", "abs": "Abs",
        "absolute": "Abs", "negative": "Neg", "cos": "Cos", "sin": "Sin", "power": "Pow", "log": "Log",
    }.items():  # fmt: skip
        setattr(Recorder, name, lambda self, *inputs, op=op: self.elementwise(op, *inputs))
    for name, op in {
        "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater", "greater_equal": "GreaterOrEqual",
        "equal": "Equal", "bitwise_and": "And", "bitwise_or": "Or", "invert": "Not",
    }.items():  # fmt: skip
        setattr(Recorder, name, lambda self, *inputs, op=op: self.elementwise(op, *inputs, dtype=bool))

    def method_as_function(name: str) -> Callable:
        return lambda self, x, *args, **kwargs: getattr(x, name)(*args, **kwargs)

    for name in ("reshape", "swapaxes", "astype", "sum", "mean", "max", "any"):
        setattr(Recorder, name, method_as_function(name))

    for name in ("bool", "int32", "int64", "float32", "float64"):
        setattr(Recorder, name, getattr(np, name))


_add_functions()


def _layernorm(x: Any, gamma: Any, beta: Any, eps: float = 1e-5) -> tuple[Recorded, None]:
    """One operator instead of the reference, which also guards against overflow."""
    return x.recorder.record("LayerNormalization", [x, gamma, beta], x.shape, x.dtype, epsilon=eps), None


def _rmsnorm(x: Any, gamma: Any, eps: float = 1e-6) -> tuple[Recorded, None]:
    return gamma * (x / x.recorder.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)), None


def _norm_fits(x: Any, *args: Any, **kwargs: Any) -> bool:
    return x.dtype == np.float32


ops.layernorm.add_twin(Recorded, _norm_fits, _layernorm)
ops.rmsnorm.add_twin(Recorded, _norm_fits, _rmsnorm)

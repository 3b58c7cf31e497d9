"""Compiled functions of a user: an operation with twins, whose first call is compared with the functions."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from ..backend import DeviceError, gpus
from ..dispatch import backward, operation, turned_off
from ..notation import DerivationError
from .derivation import Derivation, Plans
from .errors import CompileError
from .twins import CompiledTwin, Kept, Target

TOLERANCE = 1e-6  # of the largest number, in float64
ROUNDING = 1e-12  # of the largest argument: how far a result that is 0 may be from 0


def compiled(op: Any, op_backward: Any) -> tuple[Any, Any]:
    """See `scratchformer.compile`."""
    for name, function in (("op", op), ("op_backward", op_backward)):
        if not callable(function) or not hasattr(function, "__name__"):
            raise TypeError(f"{name}: expected a function with a name, got {type(function).__name__}")
    if op_backward.__name__ != f"{op.__name__}_backward":
        raise CompileError(
            f"{op.__name__}: expected a backward with the name {op.__name__}_backward, got {op_backward.__name__}"
        )
    op = op if hasattr(op, "add_twin") else operation(op)
    op_backward = op_backward if hasattr(op_backward, "reference") else backward(op_backward)
    derivation = Derivation(op.reference, op_backward.reference, op.gives)
    derivation.compile()
    if (first := next(iter(derivation.arguments))) not in derivation.arrays:
        raise CompileError(
            f"{op.__name__}: the first argument, {first}, must be an array with an index in the equations: its type "
            "says which loops run"
        )
    for target in [] if turned_off() else targets():
        twin = Compared(op, op_backward, target)
        op.add_twin(target.kind, twin.fits, twin.forward, twin.backward, fast=True)
    return op, op_backward


def targets() -> list[Target]:
    """What this machine can compile for: NumPy arrays with Numba, and CuPy arrays if there is a GPU."""
    available: list[Target] = []
    if find_spec("numba"):
        from .numba_target import NumbaTarget

        available.append(NumbaTarget())
    try:
        if gpus()[1]:
            from .cuda_target import CudaTarget

            available.append(CudaTarget())
    except DeviceError:
        pass
    if not available:
        raise ImportError("compile: needs Numba, of the extra fast: pip install 'scratchformer[fast]'")
    return available


class Compared(CompiledTwin):
    """A twin whose first call with each set of options also runs the functions, in float64, and compares."""

    def __init__(self, op: Any, op_backward: Any, target: Target) -> None:
        super().__init__(op, op_backward, target)
        self.compared: list[Plans] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, kept = super().forward(*args, **kwargs)
        if type(kept) is Kept and not any(kept.call.pair is pair for pair in self.compared):
            self.compare([in_float64(x) for x in args], {name: in_float64(x) for name, x in kwargs.items()})
            self.compared.append(kept.call.pair)
        return y, kept

    def compare(self, args: list, kwargs: dict[str, Any]) -> None:
        """Raise DerivationError unless the equations give what the functions return, and the same gradients."""
        y, kept = super().forward(*args, **kwargs)
        if type(kept) is not Kept:  # a sum was not finite
            return
        assert self.op_backward is not None and kept.call.pair.backward is not None
        expected, cache = self.op.reference(*args, **kwargs)
        dy = self.target.xp.asarray(np.random.default_rng(0).standard_normal(y.shape))[()]
        gradients, returned = self.backward(dy, kept), self.op_backward.reference(dy, cache)
        names = kept.call.pair.backward.results
        if (several := len(names)) > 1 and not (isinstance(returned, tuple) and len(returned) == several):
            raise self.wrong(f"the equations give the gradients {', '.join(names)}, and the backward returns others")
        if several == 1:
            gradients, returned = (gradients,), (returned,)
        scale = max(self.largest(x) for x in (dy, *args, *kwargs.values()))
        self.expect_close(kept.call.pair.forward.results[0], y, expected, scale)
        for name, gradient, other in zip(names, gradients, returned, strict=True):
            self.expect_close(name, gradient, other, scale)

    def expect_close(self, name: str, x: Any, expected: Any, scale: float) -> None:
        shapes = tuple(getattr(each, "shape", None) for each in (x, expected))
        if shapes[0] != shapes[1]:
            raise self.wrong(f"by the equations {name} has the shape {shapes[0]}; the functions return {shapes[1]}")
        xp = self.target.xp
        known = xp.isfinite(expected)
        error = xp.where(known, abs(x - expected), 0)
        largest = self.largest(expected)
        if not (error <= TOLERANCE * largest + ROUNDING * scale).all():
            share = float(error.max()) / largest if largest else float("inf")
            raise self.wrong(f"{name} differs by {share:.1e} of its largest number")

    def largest(self, x: Any) -> float:
        """The largest finite number of an array; 1 for anything else."""
        if getattr(getattr(x, "dtype", None), "kind", "") != "f":
            return 1.0
        xp = self.target.xp
        return float(xp.where(xp.isfinite(x), abs(x), 0).max())

    def wrong(self, what: str) -> DerivationError:
        name = self.op.__name__
        return DerivationError(
            f"{name}: the derivation and the code differ: {what}. `check_derivation({name}, {name}_backward, ...)` on "
            "small arrays says which equation is wrong"
        )


def in_float64(x: Any) -> Any:
    """An array of floating-point numbers in float64; anything else as it is."""
    dtype = getattr(x, "dtype", None)
    return x.astype(np.float64) if getattr(dtype, "kind", "") in ("f", "V") else x

"""A check of an operation's precision in float16, bfloat16 or float32, with error bounds derived from what it computes.

    def swish(x):
        wide = x.astype(np.float32)
        s = 1 / (1 + np.exp(-wide))
        return (wide * s).astype(x.dtype), (x, s)

The operation is run twice: in the type to check, and on arrays that carry a bound on the rounding error of every
element (`bounds`). There is no tolerance to choose: a longer sum, or a subtraction that cancels, gets a larger bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..backend import CPU, Device, is_floating_type, to_cpu
from .bounds import Arithmetic, Bounded, Steps, limits, widest
from .contracts import (
    GradientError,
    as_tuple,
    copied,
    is_array,
    is_floating,
    labelled,
    named_gradients,
    of_gradients,
    repeatable,
)
from .differences import label
from .gradcheck import in_columns
from .layouts import differs
from .runs import argument_names, expect_finite, like, name_of, normal_like, two

_OTHER = 0.01  # a gradient that differs by more of its largest element is another function
_LOOP = 16  # a line that runs more often than this is taken for a loop


class PrecisionRow(NamedTuple):
    """What was found for one tensor, at the element whose error comes closest to its bound.

    terms: the length of the longest sum that the tensor comes from. error, bound: in units in the last place of the
    right value. ratio: error / bound. underflow: how many elements became zero that should not be.
    """

    tensor: str
    shape: tuple[int, ...]
    terms: int
    error: float
    bound: float
    ratio: float
    underflow: int


class PrecisionReport(list):
    """One PrecisionRow for y and for each gradient; `print` shows a table. `notes` says what underflowed."""

    def __init__(self, rows: list[PrecisionRow], notes: list[str]) -> None:
        super().__init__(rows)
        self.notes = notes

    def __str__(self) -> str:
        head = ("tensor", "shape", "longest sum", "error (ulps)", "bound (ulps)", "error/bound")
        rows = [
            (r.tensor, str(r.shape), str(r.terms), f"{r.error:.2g}", f"{r.bound:.2g}", f"{r.ratio:.2f}") for r in self
        ]
        return "\n".join(in_columns(head, *rows) + self.notes)


@repeatable
def check_precision(
    op: Callable,
    op_backward: Callable,
    *args: Any,
    dtype: Any = np.float16,
    accumulate: Any = np.float32,
    elementwise: Any = None,
    dy: Any = None,
    seed: int = 0,
    device: Device = CPU,
    **kwargs: Any,
) -> PrecisionReport:
    """Check that `op` and `op_backward` are as accurate in `dtype` as they can be with arithmetic in `accumulate`.

    The pair and its arguments are as for `check_gradients`. Floating-point arguments are rounded to `dtype`
    (np.float16, np.float32, "bfloat16"), and so is dy, by default standard normal numbers from `Key(seed)`. The error
    of every element of y and of each gradient must be within a bound. The bound allows for

    - sums and products that are accumulated in `accumulate`, or in the type of the numbers if that is wider;
    - elementwise functions that are computed in `elementwise`, by default the same as `accumulate`. With
      `elementwise=dtype` every single step may round to `dtype`;
    - one rounding to `dtype` wherever a value is stored: by a cast in the code, as an operand or result of a matrix
      product, in the cache, as y and as a gradient.

    The code must be written with NumPy's functions, and must make arrays with `np.zeros_like(x)`, or with the library
    that `scratchformer.backend.array_module(x)` returns, not with `np.zeros(shape)`.

    Returns a PrecisionReport. Raises GradientError naming the element, both values, its error and bound, the longest
    sum and the likely reason; ValueError if arguments, y or a gradient do not fit in `dtype`; ImportError if bfloat16
    needs a package that is missing.
    """
    dtype, accumulate = as_type("dtype", dtype), as_type("accumulate", accumulate)
    if dtype == np.float64:
        raise ValueError("dtype: expected a type narrower than float64, in which the right values are computed")
    accumulate = widest(dtype, accumulate)
    elementwise = widest(dtype, accumulate if elementwise is None else as_type("elementwise", elementwise))
    arithmetic = Arithmetic(accumulate, elementwise, likely=accumulate != dtype)
    names = argument_names(op, args)
    run = Rounded(op, op_backward, names, args, kwargs, dy, dtype, device, seed)
    actual = run.actual()
    bounded = run.bounded(arithmetic)
    comparisons = [TensorErrors(name, x, bounded[name]) for name, x in actual.items()]
    for comparison in comparisons:
        comparison.expect_range()
    rows = [comparison.row() for comparison in comparisons]
    for comparison, row in zip(comparisons, rows, strict=True):
        if row.ratio > 1:  # y before the gradients that depend on it
            reason = run.reason(comparison, arithmetic)
            raise GradientError(f"{name_of(op)}, {name_of(op_backward)}: {comparison.complaint()}\n  {reason}")
    _expect_same_in_float64(comparisons, run.in_float64(), f"{name_of(op)}, {name_of(op_backward)}")
    return PrecisionReport(rows, [note for c in comparisons for note in c.underflow_note()])


def _expect_same_in_float64(comparisons: list[TensorErrors], wide: dict[str, np.ndarray], subject: str) -> None:
    """Raise GradientError if y is the same in float64, but a gradient is another function there."""
    for c in comparisons:  # y before the gradients
        allowed = _OTHER * float(np.abs(wide[c.name]).max(initial=0)) + float(c.bound.max(initial=0))
        wrong = differs(c.name, c.right, wide[c.name], allowed)
        if wrong and c.name.startswith("gradient"):
            what = f"in {c.actual.dtype}, {wrong} as in float64"
            raise GradientError(f"{subject}: {what}: does the code treat the types differently?")
        if wrong:
            return  # a generator may draw other numbers in another type


def as_type(name: str, dtype: Any) -> np.dtype:
    """`dtype` as a NumPy type. Raises TypeError unless it is floating-point."""
    if dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError("bfloat16 needs the package ml_dtypes: pip install 'scratchformer[bfloat16]'") from error
        dtype = ml_dtypes.bfloat16
    dtype = np.dtype(dtype)
    if not is_floating_type(dtype):
        raise TypeError(f"{name}: expected a floating-point type, got {dtype}")
    return dtype


class Rounded:
    """An operation with its arguments and dy, rounded to a type."""

    def __init__(
        self,
        op: Callable,
        op_backward: Callable,
        names: list[str],
        args: tuple,
        kwargs: dict[str, Any],
        dy: Any,
        dtype: np.dtype,
        device: Device,
        seed: int,
    ) -> None:
        self.op, self.op_backward, self.names, self.dtype, self.device = op, op_backward, names, dtype, device
        with np.errstate(over="ignore"):
            self.args = [copied(x, device, dtype) for x in args]
            self.kwargs = {key: copied(x, device, dtype) for key, x in kwargs.items()}
        given = dict(zip(names, self.args, strict=True))
        self.floating = {name: x for name, x in given.items() if is_floating(x)}
        if not self.floating:
            raise ValueError("nothing to check: expected a floating-point array among the arguments")
        expect_finite({f"{name} in {dtype}": x for name, x in self.floating.items()}, ValueError)
        with np.errstate(all="ignore"):
            self.y, self.cache = two(op(*self.args, **self.kwargs), "op")
        if dy is None:
            dy = normal_like(like(self.y, list(map(to_cpu, as_tuple(self.y)))), seed, CPU, np.float64)
        parts = [copied(np.asarray(d), device, y.dtype) for d, y in zip(as_tuple(dy), as_tuple(self.y), strict=True)]
        self.dy = like(self.y, parts)

    def actual(self) -> dict[str, np.ndarray]:
        """y and the gradients as computed in the type."""
        with np.errstate(all="ignore"):
            results = self._results(self.args, self.y, self.cache, self.dy)
        for name, x in results.items():
            if name.startswith("gradient") and x.dtype != self.dtype:
                raise GradientError(f"{name} is {x.dtype} where {name.removeprefix('gradient of ')} is {self.dtype}")
        return {name: to_cpu(x) for name, x in results.items()}

    def bounded(self, arithmetic: Arithmetic) -> dict[str, Bounded]:
        """y and the gradients: the exact values, with bounds on the error in this arithmetic."""

        def with_bounds(x: Any) -> Any:
            return arithmetic.array(to_cpu(x)) if is_array(x) else x

        args = [with_bounds(x) for x in self.args]
        dy = like(self.dy, list(map(with_bounds, as_tuple(self.dy))))
        y, cache = self.op(*args, **{key: with_bounds(x) for key, x in self.kwargs.items()})
        store((y, cache))
        results = {name: arithmetic.array_of(x) for name, x in self._results(args, y, cache, dy).items()}
        return {name: x if x.stored else arithmetic.stored(x, x.dtype) for name, x in results.items()}

    def in_float64(self) -> dict[str, np.ndarray]:
        """y and the gradients that the code computes in float64 from the same numbers."""
        args, kwargs, dy = (copied(x, self.device, np.float64) for x in (self.args, self.kwargs, self.dy))
        with np.errstate(all="ignore"):
            y, cache = self.op(*args, **kwargs)
            results = self._results(args, y, cache, dy)
        return {name: to_cpu(x) for name, x in results.items()}

    def _results(self, args: list, y: Any, cache: Any, dy: Any) -> dict[str, Any]:
        """y and the gradients, by name."""
        floating = {name: x for name, x in zip(self.names, args, strict=True) if name in self.floating}
        gradients = named_gradients(self.op_backward(dy, cache), floating, name_of(self.op_backward))
        return labelled("y", y) | of_gradients(gradients)

    def reason(self, comparison: TensorErrors, arithmetic: Arithmetic) -> str:
        """The likely cause: the line that explains the error if this line alone is carried out in the narrow type."""
        name, kind, wide = comparison.name, self.dtype, arithmetic.elementwise

        def with_lines(narrow: Callable[[str], bool]) -> tuple[dict[str, Steps], TensorErrors]:
            relaxed = replace(arithmetic, watched=kind, narrow=narrow, steps={})
            bounded = self.bounded(relaxed)[name]
            return relaxed.steps, TensorErrors(name, comparison.actual, bounded)

        steps, explained = with_lines(lambda _: True)
        if not np.isfinite(comparison.actual[comparison.worst]):
            largest = limits(kind).largest
            beyond = next((line for line, step in steps.items() if step.largest > largest), None)
            where = f": {beyond}\n  reaches {steps[beyond].largest:.3g}" if beyond else ""
            return f"An overflow: the largest {kind} number is {largest:g}{where}."
        alone = {}
        for line in steps:
            _, errors = with_lines(lambda other, line=line: other == line)  # type: ignore[misc]
            if errors.ratio.max() <= 1:
                alone[line] = errors
        if not alone:
            if explained.ratio.max() <= 1:
                return (
                    f"Several steps are carried out in {kind}. Carry them out in {wide} and round the result once, or "
                    f"allow it with elementwise={kind}."
                )
            return f"Arithmetic in {kind} does not explain the error: does the code do something different for {kind}?"
        line = max(alone, key=lambda line: alone[line].ratio.max())  # the tightest explanation
        times, terms, _ = steps[line]
        if terms > 1 or times > _LOOP:
            what = f"a sum of {terms} terms" if terms > 1 else f"{times} steps"
            return (
                f"It looks accumulated in {kind}, or rounded to it too early: {what} in {line}\n"
                f"  Convert the numbers to {arithmetic.accumulate} first."
            )
        growth = float(alone[line].bound[comparison.worst]) / comparison.ulp(float(comparison.right[comparison.worst]))
        magnified = f", and what follows magnifies this {growth:.2g} times" if growth > 8 else ""
        return (
            f"It looks rounded to {kind} too early{magnified}: {line}\n"
            f"  Compute in {wide} and round once, or allow it with elementwise={kind}."
        )


def store(x: Any) -> None:
    """Round all arrays in nested tuples, lists, dictionaries and dataclasses to their types."""
    if isinstance(x, Bounded) and x.floating and not x.stored:
        rounded = x.arithmetic.stored(x, x.dtype)
        x.bound, x.stored = rounded.bound, True
    if is_dataclass(x) and not isinstance(x, type):
        x = getattr(x, "__dict__", {})
    for part in x.values() if isinstance(x, dict) else x if isinstance(x, tuple | list) else ():
        store(part)


class TensorErrors:
    """A tensor as computed, with its exact values and bounds."""

    def __init__(self, name: str, actual: np.ndarray, bounded: Bounded) -> None:
        self.name, self.actual, self.bounded = name, actual, bounded
        self.right, self.bound = bounded.value, bounded.bound
        with np.errstate(all="ignore"):
            error = np.abs(actual.astype(np.float64) - self.right)
            same = (actual == self.right) | (np.isnan(actual) & np.isnan(self.right))
            self.error = np.where(same, 0, np.where(np.isfinite(actual), error, np.inf))
            ratio = np.where(self.error == 0, 0, np.where(np.isinf(self.error), np.inf, self.error / self.bound))
        self.ratio = np.where(np.isnan(ratio), np.inf, ratio)
        flat = int(self.ratio.argmax()) if self.ratio.size else 0
        self.worst = tuple(map(int, np.unravel_index(flat, self.ratio.shape))) if self.ratio.size else ()

    def expect_range(self) -> None:
        """Raise ValueError if a right value does not fit in the type."""
        largest = limits(self.actual.dtype).largest
        beyond = np.argwhere(np.isfinite(self.right) & (np.abs(self.right) - self.bound > largest))
        if len(beyond):
            index = tuple(map(int, beyond[0]))
            raise ValueError(
                f"{label(self.name, index)} is {self.right[index]:.6g}, which does not fit in {self.actual.dtype} "
                f"(at most {largest:g}): check with smaller arguments"
            )

    def ulp(self, right: float) -> float:
        """The unit in the last place of a number in the type."""
        limit = limits(self.actual.dtype)
        exponent = np.floor(np.log2(abs(right))) if right else -np.inf
        return max(limit.smallest, 2 * limit.u * 2.0**exponent)

    def row(self) -> PrecisionRow:
        if not self.ratio.size:
            return PrecisionRow(self.name, self.right.shape, self.bounded.terms, 0.0, 0.0, 0.0, 0)
        unit = self.ulp(float(self.right[self.worst]))
        error, bound = float(self.error[self.worst]) / unit, float(self.bound[self.worst]) / unit
        ratio = float(self.ratio[self.worst])
        return PrecisionRow(
            self.name, self.right.shape, self.bounded.terms, error, bound, ratio, int(self.underflow().sum())
        )

    def underflow(self) -> np.ndarray:
        return (self.actual == 0) & (np.abs(self.right) > 1e-300)

    def underflow_note(self) -> list[str]:
        """How many elements of a gradient became zero, and what a loss scale would change."""
        lost = self.underflow()
        if not lost.any() or not self.name.startswith("gradient"):
            return []
        limit, sizes = limits(self.actual.dtype), np.abs(self.right)
        power = int(np.floor(np.log2(limit.largest / 2 / sizes.max())))
        if power < 1:
            return [f"{self.name}: {lost.sum()} of {lost.size} elements became 0; a loss scale does not help."]
        left = int((sizes[lost] * 2.0**power < limit.smallest / 2).sum())
        return [
            f"{self.name}: {lost.sum()} of {lost.size} elements became 0: {self.actual.dtype} has no number between 0 "
            f"and {limit.smallest:.1g}. With a loss scale of 2^{power} it would be {left}."
        ]

    def complaint(self) -> str:
        index, row = self.worst, self.row()
        error, bound = float(self.error[index]), float(self.bound[index])
        size = f"error {error:.3g} ({row.error:.3g} ulps), " if np.isfinite(error) else ""
        lines = [
            f"{label(self.name, index)} is outside its error bound:",
            f"  computed {float(self.actual[index]):.9g} ({self.actual.dtype})",
            f"  right    {float(self.right[index]):.9g}",
            f"  {size}bound {bound:.3g} ({row.bound:.3g} ulps), "
            + (f"with sums of up to {row.terms} terms" if row.terms > 1 else "without sums"),
            f"  {int((self.ratio > 1).sum())} of {self.ratio.size} elements of {self.name} are outside",
        ]
        return "\n".join(lines)

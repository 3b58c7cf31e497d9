"""`scratchformer.compile`: compiles a user's operation, and checks that its equations agree with its code.

A twin is a faster implementation of an operation, made from the equations. Before twins are registered, the loops run
in Python, and are compared with the user's functions on drawn arguments of various sizes, scales, numbers and options,
and with large means in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from inspect import Parameter
from itertools import product
from typing import Any

import numpy as np

from ..backend import DeviceError, gpus
from ..dispatch import backward, operation, reference_only, turned_off
from ..notation import DerivationError
from ..notation.grammar import Node, canonical, walk
from ..notation.spelling import spelled
from .errors import CompileError
from .python_target import PythonTarget
from .show import loops_of
from .trees import COLUMN, ROW
from .twins import CompiledTwin, Kept, Target, is_number

TOLERANCE = 1e-6  # of the largest number, in float64
FAR = 1e-4  # of the largest number, in float32 and for a mean of 1,000, besides what the code itself loses
ROUNDING = 1e-12  # of the largest argument: how far a result that is 0 may be from 0


def compiled(op: Any, op_backward: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
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
    list(loops_of(op, op_backward, "numba"))  # raises CompileError for what cannot be compiled
    twin = CompiledTwin(op, op_backward, PythonTarget())
    if (first := twin.names[0]) not in twin.derivation.arrays:
        raise CompileError(
            f"{op.__name__}: the first argument, {first}, must be an array with an index in the equations: its type "
            "says which loops run"
        )
    available = [] if turned_off() else targets()
    compare_all(twin, args, kwargs)
    for target in available:
        twin = CompiledTwin(op, op_backward, target)
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


def compare_all(twin: CompiledTwin, args: tuple, kwargs: dict[str, Any]) -> None:
    """Compare a twin with its functions on the user's example, if there is one, and on arguments that are drawn.

    Raises DerivationError where they differ, and CompileError if the loops do not take the example, or if nothing can
    be compared with the default options.
    """
    examples = [twin.in_order(args, kwargs)] if args or kwargs else []
    if examples and not twin.fits(*examples[0]):
        raise CompileError(
            f"{twin.op.__name__}: the loops do not take the example, {described(twin, examples[0])}: expected "
            "non-empty arrays of one floating-point type, with the axes of the equations"
        )
    refused: Exception | str = "the loops do not take them"
    compared = False
    for options in product(*(choices(twin, name, default) for name, default in twin.parameters)):
        for drawn in (*examples, *draws(twin, options)):
            try:
                compared |= compare(twin, drawn)
            except Refused as error:
                refused = error
        examples = []
        if not compared:
            raise CompileError(
                f"{twin.op.__name__}: the derivation cannot be compared with the code on the arguments that are drawn "
                f"({refused}): give an example, compile(op, op_backward, *args)"
            )


class Refused(Exception):
    """Arguments that a function does not take."""


def choices(twin: CompiledTwin, name: str, default: Any) -> list:
    """The values of an option: both of a boolean, and of a string those that the equations name and another."""
    if isinstance(default, bool):
        return [default, not default]
    if isinstance(default, str):
        sides = [(b, c) for _, tree in twin.derivation.definitions.sides for b, c in conditions(tree)]
        named = {spelled(right) for (_, left, right), _ in sides if left[:2] == ("name", canonical(name))}
        return [default, *sorted(named - {default}), "another"]
    return [default]


def conditions(tree: Node) -> Iterator[tuple]:
    """The conditions in a tree, each with the numbers in it."""
    for node in walk(tree):
        found = [*node[1]] if node[0] == "bracket" else []
        if node[0] == "cases":
            found = [condition for _, part in node[1] for condition in part]
        for condition in found:
            yield condition, [leaf[1] for side in condition[1:] for leaf in walk(side) if leaf[0] == "num"]


def draws(twin: CompiledTwin, options: tuple) -> Iterator[tuple]:
    """Arguments of several sizes and scales, around the numbers of each condition, and with other numbers."""
    rng = np.random.default_rng(0)
    sides = twin.derivation.definitions.sides
    compared = [(condition, numbers) for _, tree in sides for condition, numbers in conditions(tree) if numbers]
    signed = {side[1] for condition, _ in compared for side in condition[1:] if side[0] == "name"}
    numbers = [x for _, found in compared for x in found]
    steps = [node for _, tree in sides for node in walk(tree) if node[0] in ("floor", "mod") or is_bound(node)]
    numbers += [leaf[1] for node in steps for leaf in walk(node) if leaf[0] == "num"]
    bounds = sorted({float(x) for x in numbers})
    axes = list(dict.fromkeys(axis for array in twin.arrays.values() for axis in array.axes))
    growing = [3 + i for i, _ in enumerate(axes)]
    sizes: list[list] = [growing, growing[::-1], [4 + i for i, _ in enumerate(axes)]]
    sizes += [[1] * len(axes), [2] * len(axes), [None if axis == ROW else 5 for axis in axes]]
    large = [int(x) + more for x in bounds if 1 <= x <= 4096 for more in (0, 1, 2)]
    sizes += [[size if axis == one else 2 for axis in axes] for size in large for one in axes]
    normal, uniform = rng.standard_normal, rng.random
    kinds: list[Callable] = [normal, lambda shape: 0.05 + 0.9 * uniform(shape), lambda shape: 0.5 + abs(normal(shape))]
    kinds += [lambda shape, scale=scale: scale * normal(shape) for scale in (0.01, 10, 100, 1000)]
    kinds += [lambda shape, x=x * sign: x + (1 + abs(x) / 8) * normal(shape) for x in bounds for sign in (1, -1)]
    kinds += [np.zeros, lambda shape: rng.choice([-1.0, 0.0, 1.0, 2.0, *bounds], shape)]
    for size in sizes:
        for kind in kinds[: None if size is sizes[0] else 3]:
            for change in range(3 + 2 * len(bounds)) if size is sizes[0] and kind in kinds[:3] else (0, 1):
                yield drawn(twin, options, dict(zip(axes, size, strict=True)), kind, change, bounds, signed, rng)


def is_bound(node: Node) -> bool:
    return node[0] == "call" and node[1] in ("max", "min")


def drawn(
    twin: CompiledTwin,
    options: tuple,
    sizes: dict[str, int],
    kind: Callable,
    change: int,
    bounds: Sequence[float],
    signed: set[str],
    rng: Any,
) -> tuple:
    """One set of arguments.

    sizes: the length of each axis; None for an axis of rows that is absent. change: which alternative replaces the
    numbers; 0 keeps the defaults. bounds: the numbers around which alternatives are tried. signed: the names that
    conditions compare with numbers; for other names an alternative near a bound is used only if it is positive.
    """
    places = dict(twin.derivation.compile().forward.places)
    args = []
    for name, value in zip(twin.names, options, strict=True):
        array = twin.arrays.get(name)
        if array is not None and array.kind == "integer":
            end = sizes.get(places.get(name, COLUMN), 1)
            args.append(rng.integers(0, end, [sizes[axis] for axis in array.axes if sizes[axis]]))
        elif array is not None:
            args.append(np.asarray(kind([sizes[axis] for axis in array.axes if sizes[axis]])))
        elif value is Parameter.empty or is_number(type(value)):
            others = [2, 0.5, 3]
            if isinstance(value, int):
                others = [value, value + 1, max(value - 1, 1)]
            elif value is not Parameter.empty:
                others = [value, 1.5 * value or 0.5, value / 2 or 2.0]
            around = [type(others[0])(x + more) for x in bounds for more in (-1, 1)]
            args.append([*others, *(x if x > 0 or name in signed else others[1] for x in around)][change])
        else:
            args.append(value)
    return tuple(args)


def compare(twin: CompiledTwin, args: tuple) -> bool:
    """Compare in float64, then in float32 far from 0. Returns whether the first of these compared anything; the others
    may be refused.
    """
    args = in_types(args, np.float64)
    some = expect_same_results(twin, args, TOLERANCE)
    for mean in (1000, -1000):
        shifted = (x + np.float32(mean) if is_floating(x) else x for x in in_types(args, np.float32))
        with suppress(Refused):
            expect_same_results(twin, tuple(shifted), FAR)
    return some


def expect_same_results(twin: CompiledTwin, args: tuple, tolerance: float) -> bool:
    """Raise DerivationError unless the equations give the results of the functions in float64. Returns whether any
    result was finite, so that something was compared.

    In float32 the equations may also be off by 16 times the error of the functions themselves.
    """
    assert twin.op_backward is not None
    if not twin.fits(*args):
        return False
    exact = in_types(args, np.float64)
    with np.errstate(all="ignore"), reference_only():
        try:
            if twin.given is not None:
                twin.given(*args)
            expected, cache = twin.op.reference(*exact)
            dy = np.random.default_rng(0).standard_normal(np.shape(expected))
            returned = twin.op_backward.reference(dy[()], cache)
            rounded, rounded_cache = twin.op.reference(*args)
            narrow = dy.astype(np.asarray(rounded).dtype)[()]
            rounded_gradients = twin.op_backward.reference(narrow, rounded_cache)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        y, kept = twin.forward(*args)
        if type(kept) is not Kept:  # the function ran
            return False
        assert kept.call.pair.backward is not None
        plan = kept.call.pair.backward
        expect_shape(twin, "y", y, expected, args, kept.call.shape.lead)
        gradients = as_tuple(twin.backward(narrow, kept))
    if len(as_tuple(returned)) != len(plan.results):
        raise wrong(
            twin, f"the equations give the gradients {', '.join(plan.results)}, and the backward returns others"
        )
    scale = max(largest(x) for x in (dy, *args))
    names = (kept.call.pair.forward.results[0], *plan.results)
    found, right = (y, *gradients), (expected, *as_tuple(returned))
    some = False
    for name, x, known, other in zip(names, found, right, (rounded, *as_tuple(rounded_gradients)), strict=True):
        expect_shape(twin, name, x, known, args, kept.call.shape.lead)
        finite = np.isfinite(known) & np.isfinite(other)
        some |= bool(finite.any())
        with np.errstate(invalid="ignore"):
            off, allowed = (np.where(finite, abs(each - known), 0) for each in (x, other))
        bound = tolerance * largest(known) + ROUNDING * scale + 16 * np.nanmax(allowed, initial=0)
        if not (off <= bound).all():
            share = float(off.max()) / largest(known) if largest(known) else float("inf")
            raise wrong(twin, f"{name} differs by {share:.1e} of its largest number for {described(twin, args)}")
    return some


def expect_shape(twin: CompiledTwin, name: str, x: Any, known: Any, args: tuple, lead: tuple[int, ...]) -> None:
    """Raise DerivationError if a result x of the equations has another shape than that of the functions, or Refused if
    there is only a row: code such as `sum(axis=0)` may need more.
    """
    if np.shape(x) != np.shape(known):
        what = f"by the equations {name} has the shape {np.shape(x)}; the functions return {np.shape(known)}"
        if not lead and any(ROW in array.axes for array in twin.arrays.values()):
            raise Refused(what)
        raise wrong(twin, f"{what} for {described(twin, args)}")


def described(twin: CompiledTwin, args: tuple) -> str:
    """The arguments as text: the types and shapes of arrays, and other values."""
    texts = (f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else repr(x) for x in args)
    return ", ".join(f"{name} = {text}" for name, text in zip(twin.names, texts, strict=True))


def largest(x: Any) -> float:
    """The largest finite number of an array; 1 for anything else."""
    return float(np.where(np.isfinite(x), abs(x), 0).max(initial=0)) if is_floating(x) else 1.0


def wrong(twin: CompiledTwin, what: str) -> DerivationError:
    name = twin.op.__name__
    return DerivationError(
        f"{name}: the derivation and the code differ: {what}. `check_derivation({name}, {name}_backward, ...)` on "
        "small arrays of this kind says which equation is wrong"
    )


def is_floating(x: Any) -> bool:
    return getattr(getattr(x, "dtype", None), "kind", "") in ("f", "V")


def in_types(args: tuple, dtype: Any) -> tuple:
    """Arguments with arrays of floating-point numbers in a type."""
    return tuple(x.astype(dtype) if is_floating(x) else x for x in args)


def as_tuple(x: Any) -> tuple:
    return x if isinstance(x, tuple) else (x,)

"""A real forward and backward, with the values of the local variables after each line of code."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from .grammar import CALLS, OVER, canonical
from .layout import normal


class Statement(NamedTuple):
    text: str  # with normalised white space
    first: int  # line numbers in the file
    last: int
    targets: tuple[str, ...]  # the local variables that it sets


class Run(NamedTuple):
    """The results of a forward and a backward: arrays by name, and the local variables after each statement."""

    name: str
    values: dict[str, np.ndarray]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    code: frozenset[str]
    locals: dict[str, dict[str, np.ndarray]]  # by statement, then by variable: its value when it last ran
    functions: Mapping[str, Callable] = {}  # that equations may call

    @property
    def names(self) -> list[str]:
        """The names that the parser must know; those of functions end in ()."""
        return [*self.values, *(f"{name}()" for name in self.functions)]


def source_of(function: Callable) -> Callable:
    """The function whose code runs: without decorators, and not bound to an object."""
    return inspect.unwrap(getattr(function, "__func__", function))


def statements(function: Callable) -> list[Statement]:
    """The simple statements of a function, in order; none if its source is not at hand, as in a terminal session."""
    function = source_of(function)
    try:
        lines, start = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return []
    source = textwrap.dedent("".join(lines))
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return):
            text = normal(ast.get_source_segment(source, node) or "")
            last = start + (node.end_lineno or node.lineno) - 1
            found.append(Statement(text, start + node.lineno - 1, last, tuple(targets(node))))
    return sorted(found, key=lambda statement: statement.first)


def targets(node: ast.stmt) -> Iterator[str]:
    """The variables that a statement sets; of a call, its first argument and `out`; of a return, all that it uses."""
    if isinstance(node, ast.Return):
        yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        return
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Call):
            given = [*node.value.args[:1], *(k.value for k in node.value.keywords if k.arg == "out")]
            yield from (argument.id for argument in given if isinstance(argument, ast.Name))
        return
    for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            while isinstance(part, ast.Subscript):
                part = part.value
            if isinstance(part, ast.Name):
                yield part.id


class Watch:
    """Records the local variables of functions after each of their statements, while the `with` block runs."""

    def __init__(self, *functions: Callable) -> None:
        self.statements: dict[CodeType, list[Statement]] = {source_of(f).__code__: statements(f) for f in functions}
        self.locals: dict[str, dict[str, np.ndarray]] = {}

    def __enter__(self) -> Watch:
        self.previous = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.previous)

    def call(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        known = self.statements.get(frame.f_code)
        if known is None:
            return None
        pending: Statement | None = None

        def line(frame: FrameType, event: str, argument: Any) -> Callable:
            nonlocal pending
            if pending is not None:
                self.record(pending, frame.f_locals)
            at = frame.f_lineno if event == "line" else 0
            pending = next((s for s in known if s.first <= at <= s.last), None)
            return line

        return line

    def record(self, statement: Statement, variables: Mapping[str, Any]) -> None:
        values = self.locals[statement.text] = {}
        for name in statement.targets:
            if isinstance(value := variables.get(name), np.ndarray | np.generic | int | float):
                values[name] = np.array(value)


def numeric(value: Any) -> np.ndarray | None:
    """The value as an array that equations can use, or None."""
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        array = np.array(value)
        if array.dtype.kind in "biuf":
            return array
    return None


def as_array(name: str, value: Any) -> np.ndarray:
    """The value of a name in `names` as an array; raises TypeError if it is not numeric."""
    array = numeric(value)
    if array is None:
        raise TypeError(f"names: {name} must be a number or an array of numbers")
    return array


def fields(cache: Any, parameter: str) -> Iterator[tuple[str, Any]]:
    """The names and values of a cache: its fields, or the name that backward gives it."""
    if hasattr(cache, "_fields"):
        yield from cache._asdict().items()
    else:
        yield parameter, cache


def run(
    op: Callable,
    op_backward: Callable | None,
    *args: Any,
    names: Mapping[str, Any] | None = None,
    functions: Mapping[str, Callable] | None = None,
    seed: int = 0,
    **options: Any,
) -> Run:
    """Run a pair, or a function without backward, once in float64 and give everything in it a name.

    Arguments have the names of the signature; the output is y if backward takes dy, and dy is drawn. Gradients are d
    and the argument's name. The cache gives the names of its fields. names: further values, or functions of no
    arguments that are called after backward. functions: that equations may call. options: keyword arguments of `op`.
    """
    forward = source_of(op)
    args = tuple(a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for a in args)
    bound = inspect.signature(op).bind(*args, **options)
    bound.apply_defaults()
    pair = (op, op_backward) if op_backward else (op,)
    gradient, parameter, *_ = inspect.signature(op_backward).parameters if op_backward else ("dy", "cache")
    with Watch(*pair) as watch:
        y, cache = op(*args, **options) if op_backward else (op(*args, **options), None)
        dy = np.random.default_rng(seed).standard_normal(np.shape(y))
        dy = dy if np.shape(y) else float(dy)
        gradients = op_backward(dy, cache) if op_backward else ()
    output = gradient.removeprefix("d")
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if isinstance(value, tuple):  # *name of a layer: name, or name1, name2, ...
            flat |= {f"{name}{i}" if len(value) > 1 else name: one for i, one in enumerate(value, 1)}
        else:
            flat[name] = value
    positional = {
        name: value for name, value in flat.items() if isinstance(value, np.ndarray) and value.dtype.kind == "f"
    }
    values = {canonical(name): array for name, value in flat.items() if (array := numeric(value)) is not None}
    arguments = tuple(values)
    values[canonical(output)], values[canonical(gradient)] = np.array(y), np.array(dy)
    given = gradients if isinstance(gradients, tuple) else (gradients,)
    given = tuple(g for g in given if isinstance(g, np.ndarray | np.generic))
    for name, value in zip(positional, given, strict=False):
        values[canonical(f"d{name}")] = np.array(value)
    for name, value in fields(cache, parameter):
        if canonical(name) not in (*values, *CALLS, *OVER) and (array := numeric(value)) is not None:
            kept = array[..., 0] if array.ndim and array.shape[-1] == 1 else array  # an axis that a reduction kept
            values[canonical(name)] = kept
    for name, value in (names or {}).items():
        values[canonical(name)] = as_array(name, value() if callable(value) else value)
    code = frozenset(s.text for found in watch.statements.values() for s in found)
    name = getattr(forward, "__qualname__", type(op).__name__)
    return Run(name, values, arguments, (canonical(output),), code, watch.locals, functions or {})

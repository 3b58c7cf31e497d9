"""A real forward and backward, with the values of the local variables after each line of code."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from ..shell.source import syntax_tree
from .grammar import CALLS, OVER, canonical
from .layout import normal


class Statement(NamedTuple):
    text: str  # with normalised white space
    first: int  # line numbers in the file
    last: int
    variables: tuple[str, ...]  # the local variables that it sets, or else those that it uses


class Execution(NamedTuple):
    """The results of a forward and a backward: arrays by name, and the local variables after each statement."""

    name: str
    values: dict[str, np.ndarray]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]  # those that backward returned
    code: frozenset[str]
    locals: dict[str, dict[str, np.ndarray]]  # by statement, then by variable: its value when it last ran
    functions: Mapping[str, Callable] = {}  # that equations may call

    @property
    def names(self) -> list[str]:
        """The names that the parser must know; those of functions end in ()."""
        return [*self.values, *(f"{name}()" for name in self.functions)]


def source_of(function: Callable) -> Callable:
    """The function whose code runs: not a partial, a decorated or a bound one; of a callable object, its `__call__`."""
    function = inspect.unwrap(without_partial(function))
    function = getattr(function, "__func__", function)
    return function if hasattr(function, "__code__") else getattr(type(function), "__call__", function)  # noqa: B004


def without_partial(function: Callable) -> Callable:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def source_tree(function: Callable) -> tuple[str, ast.Module, int] | None:
    """The dedented source of a function or class, its tree and its first line in the file; None if there is none."""
    try:
        lines, start = inspect.getsourcelines(function if isinstance(function, type) else source_of(function))
        source = textwrap.dedent("".join(lines))
        return source, syntax_tree(source), start
    except (OSError, TypeError, SyntaxError):  # of a lambda, the source may begin in the middle of a call
        return None


def getdoc(thing: Any) -> str:
    """The docstring of a function or class as `inspect.getdoc` gives it, under `python -OO` from the source."""
    text = inspect.getdoc(thing) or ""
    if sys.flags.optimize < 2 or (text and not isinstance(thing, type)):
        return text
    sources = thing.__mro__[:-1] if isinstance(thing, type) else (thing,)
    return next((inspect.cleandoc(value) for value, _ in map(in_source, sources) if value), text)


def in_source(thing: Any) -> tuple[str, int]:
    """The docstring of a function or class as its source has it, and the column of its margin; "" if there is none."""
    parsed = source_tree(thing)
    node = parsed[1].body[0] if parsed else None
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and isinstance(node.body[0], ast.Expr):
        value = getattr(node.body[0].value, "value", None)
        if isinstance(value, str):
            return value, node.body[0].col_offset
    return "", 0


def docstring_of(function: Callable) -> tuple[str, int | None]:
    """The docstring, and the column of its margin where the source shows it.

    `inspect.cleandoc` takes the least indented line for the margin, and that may be an equation.
    """
    function = without_partial(function)
    text, (value, margin) = getdoc(function), in_source(function)
    return (value, margin) if value and inspect.cleandoc(value) == text else (text, None)


def statements(function: Callable) -> tuple[Statement, ...]:
    """The simple statements of a function, in order; none if its source is not available, as in a terminal session."""
    return _statements(function if isinstance(function, type) else source_of(function))


@functools.lru_cache(1024)  # reading the source takes longer than a small run
def _statements(function: Callable) -> tuple[Statement, ...]:
    if (at_hand := source_tree(function)) is None:
        return ()
    source, tree, start = at_hand
    statements = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return):
            text = normal(ast.get_source_segment(source, node) or "")
            last = start + (node.end_lineno or node.lineno) - 1
            variables = tuple(targets(node)) or tuple(names_in(node))
            statements.append(Statement(text, start + node.lineno - 1, last, variables))
    return tuple(sorted(statements, key=lambda statement: statement.first))


def names_in(node: ast.stmt) -> Iterator[str]:
    """All names that a statement uses: the variables of one that sets an attribute or that is a call."""
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def targets(node: ast.stmt) -> Iterator[str]:
    """The variables that a statement sets; of a call, its first argument and `out`. (Of a return: see `run`.)"""
    if isinstance(node, ast.Return):
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
        self.statements = {getattr(source_of(f), "__code__", None): statements(f) for f in functions}
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
        for name in statement.variables:
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


def each_argument(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name: those of *name of a layer are name1, name2, ...; or name, if it is only one."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, tuple):
            flat |= {f"{name}{i}" if len(value) > 1 else name: one for i, one in enumerate(value, 1)}
        else:
            flat[name] = value
    return flat


def in_float64(value: Any) -> Any:
    """A copy in float64 of an array of floating-point numbers; anything else as it is."""
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


def numbers(arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies of those arguments that equations can use."""
    return {canonical(name): array for name, value in arguments.items() if (array := numeric(value)) is not None}


def expect_elements(values: Mapping[str, np.ndarray]) -> None:
    for name, array in values.items():
        if not array.size:
            raise ValueError(f"{name} has shape {array.shape}: equations about an empty array say nothing")


def parameters(op_backward: Callable) -> list[str]:
    """The names that backward gives dy and the cache."""
    names = list(inspect.signature(op_backward).parameters)
    if len(names) < 2:
        raise TypeError(f"op_backward must take dy and the cache, got the parameters ({', '.join(names)})")
    return names[:2]


def forward_of(op: Callable, name: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    result = op(*args, **options)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{name} must return y and a cache, got {type(result).__name__}")
    return result


def named_gradients(arguments: Mapping[str, Any], returned: Any) -> dict[str, np.ndarray]:
    """What backward returned, by argument: one gradient, or None, for each array of floating-point numbers."""
    given = returned if isinstance(returned, tuple) else (returned,)
    arrays = [name for name, value in arguments.items() if isinstance(value, np.ndarray)]
    floating = [name for name in arrays if arguments[name].dtype.kind == "f"]
    among = arrays if len(given) == len(arrays) else floating
    if len(given) != len(among):
        given = tuple(gradient for gradient in given if gradient is not None)
    if given and len(given) != len(among):
        raise TypeError(f"op_backward returned {len(given)} gradients, expected one for each of {', '.join(among)}")
    return {name: np.array(g) for name, g in zip(among, given, strict=False) if isinstance(g, np.ndarray | np.generic)}


def run(
    op: Callable,
    op_backward: Callable | None,
    *args: Any,
    names: Mapping[str, Any] | None = None,
    functions: Mapping[str, Callable] | None = None,
    seed: int = 0,
    dy: np.ndarray | None = None,
    **options: Any,
) -> Execution:
    """Run a pair, or a function without backward, once in float64 and give everything in it a name.

    Arguments have the names of the signature; the output is y if backward takes dy, and outputs in a NamedTuple have
    the names of its fields. dy is drawn if not given. Gradients are d and the argument's name. The cache gives the
    names of its fields. names: further values, or functions of no arguments that are called after backward. functions:
    that equations may call. options: keyword arguments of `op`.
    """
    args = tuple(map(in_float64, args))
    options = {name: in_float64(value) for name, value in options.items()}
    bound = inspect.signature(op).bind(*args, **options)
    bound.apply_defaults()
    flat = each_argument(bound.arguments)
    given = numbers(flat)
    expect_elements(given)
    called: str = getattr(source_of(op), "__qualname__", "") or getattr(op, "__name__", type(op).__name__)
    pair = (op, op_backward) if op_backward else (op,)
    gradient, parameter = parameters(op_backward) if op_backward else ("dy", "cache")
    output = canonical(gradient.removeprefix("d"))
    with Watch(*pair) as watch:
        y, cache = forward_of(op, called, *args, **options) if op_backward else (op(*args, **options), None)
        several = hasattr(y, "_fields")
        outputs = {canonical(n): np.array(x) for n, x in y._asdict().items()} if several else {output: np.array(y)}
        rng = np.random.default_rng(seed)
        upstream = {f"d{n}": rng.standard_normal(x.shape) if dy is None else dy for n, x in outputs.items()}
        given_dy = [u.copy() if u.shape else float(u) for u in upstream.values()]
        returned = op_backward(y._make(given_dy) if several else given_dy[0], cache) if op_backward else ()
    values = numbers(flat)  # after the run: an operation without backward may be one that writes to its arguments
    arguments = tuple(values)
    for argument in given if op_backward else ():
        if not np.array_equal(given[argument], values[argument], equal_nan=True):
            raise ValueError(f"{called} or its backward writes to {argument}: it must leave its arguments as they are")
    expect_elements(outputs)
    values |= outputs | upstream
    gradients = {canonical(f"d{name}"): array for name, array in named_gradients(flat, returned).items()}
    values |= gradients
    for lines, result in zip(watch.statements.values(), (outputs, gradients), strict=False):
        for statement in lines:
            if statement.text.startswith("return") and statement.text in watch.locals:
                watch.locals[statement.text] = dict(result)
    for name, value in fields(cache, parameter):
        if canonical(name) not in (*values, *CALLS, *OVER) and (array := numeric(value)) is not None:
            kept = array[..., 0] if array.ndim and array.shape[-1] == 1 else array  # an axis that a reduction kept
            values[canonical(name)] = kept
    for name, value in (names or {}).items():
        values[canonical(name)] = as_array(name, value() if callable(value) else value)
    code = frozenset(s.text for lines in watch.statements.values() for s in lines)
    return Execution(called, values, arguments, tuple(outputs), tuple(gradients), code, watch.locals, functions or {})

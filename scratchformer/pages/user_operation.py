"""An operation in a user's file, and the arguments that its page begins with."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..catalogue import DerivationCase
from ..notation import Equation, read
from ..notation.grammar import Node, canonical, walk
from ..notation.run import docstring_of, source_tree, statements
from ..training.snapshot import load_file
from .live import beginning, is_short_name, shapes

SIZES = (
    3,
    4,
    2,
    *range(5, 60),
)  # of the letters in the order in which they occur, all different, so that a wrong index shows
MAX_NUMBERS = 4000  # in all arrays of a page together
SEED = 0
Range = tuple[np.ndarray, float, float]


@dataclass
class UserOperation:
    """An operation of a user's file with arguments. ranges: see `live.page_data`."""

    file: Path
    op: Callable
    op_backward: Callable
    args: tuple
    ranges: list[Range]

    @property
    def name(self) -> str:
        return self.op.__name__

    @property
    def case(self) -> DerivationCase:
        return DerivationCase(self.op, self.op_backward, self.args)


def read_operation(where: str, scale: float = 1.0) -> UserOperation:
    """Execute a file, FILE.py or FILE.py::FUNCTION, and find its operation and arguments for it.

    The arguments are those that the function OPERATION_case of the file returns, as a tuple or as a dict by name.
    Without one they are drawn, with the letters in the docstring as shapes, and `scale` as the deviation. Raises
    ValueError for what is missing.
    """
    text, _, function = where.partition("::")
    file = Path(text)
    module = load_file(file)
    pairs = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and hasattr(module, f"{name}_backward")
    ]
    if function and function not in pairs:
        known = f"{file.name} has {', '.join(pairs)}" if pairs else f"{file.name} has no such pair"
        raise ValueError(f"{where}: expected a function {function} and its {function}_backward, but {known}")
    if not function and len(pairs) != 1:
        known = f"got {', '.join(pairs)}: name one, {where}::{pairs[0]}" if pairs else "got none"
        raise ValueError(f"{where}: expected a function, such as my_op, and its my_op_backward, {known}")
    name = function or pairs[0]
    op, op_backward = getattr(module, name), getattr(module, f"{name}_backward")
    expect_backward(op_backward)
    given = getattr(module, f"{name}_case", None)
    arguments, ranges = given_arguments(op, given) if given is not None else drawn_arguments(op, op_backward, scale)
    numbers = sum(np.size(value) for value in arguments.values() if isinstance(value, np.ndarray))
    if numbers > MAX_NUMBERS:
        raise ValueError(f"{name}_case: expected at most {MAX_NUMBERS} numbers in all arrays of a page, got {numbers}")
    expect_to_run(op, arguments)
    return UserOperation(file, op, op_backward, tuple(arguments.values()), ranges)


def expect_backward(op_backward: Callable) -> None:
    names = list(inspect.signature(op_backward).parameters)
    if len(names) != 2 or not names[0].startswith("d") or len(names[0]) == 1:
        raise ValueError(
            f"{op_backward.__name__}: expected two parameters, d with the name of the output, and the cache, as in "
            f"(dy, cache), got ({', '.join(names)})"
        )


def expect_to_run(op: Callable, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError unless the operation accepts the arguments, and gives y without NaN or infinity, and a cache."""
    given = ", ".join(f"{n} {x.shape}" if isinstance(x, np.ndarray) else f"{n} = {x!r}" for n, x in arguments.items())
    advice = f"; {op.__name__}_case() in the file can return other arguments"
    try:
        with np.errstate(all="ignore"):
            result = op(*arguments.values())
    except Exception as error:  # whatever the function does
        raise ValueError(f"{op.__name__}: {type(error).__name__} with {given}: {error}{advice}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        kind = type(result).__name__
        raise ValueError(f"{op.__name__}: expected y and the cache, as in `return y, cache`, got {kind}")
    if not isinstance(result[0], np.ndarray | np.generic | float):
        kind = type(result[0]).__name__
        raise ValueError(f"{op.__name__}: expected y to be an array or a number, got {kind}")
    if not np.isfinite(result[0]).all():
        raise ValueError(f"{op.__name__}: y has NaN or infinity with {given}{advice}")


def given_arguments(op: Callable, case: Any) -> tuple[dict[str, Any], list[Range]]:
    """The arguments that a case returns. Arrays of numbers that are all positive, or all negative, stay in their range.

    Raises ValueError if they are not the arguments of the operation.
    """
    name = f"{op.__name__}_case"
    if not callable(case):
        raise ValueError(f"{name}: expected a function that returns arguments, got {type(case).__name__}")
    try:
        returned = case()
    except Exception as error:  # whatever the function does
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    by_name = isinstance(returned, Mapping)
    if not by_name and not isinstance(returned, tuple | list):
        returned = (returned,)
    try:
        bound = inspect.signature(op).bind(**returned) if by_name else inspect.signature(op).bind(*returned)
    except TypeError as error:
        raise ValueError(f"{name}: expected the arguments of {op.__name__}{inspect.signature(op)}: {error}") from None
    bound.apply_defaults()
    arguments = {n: np.array(x) if isinstance(x, list | np.ndarray) else x for n, x in bound.arguments.items()}
    for argument, x in arguments.items():
        if isinstance(x, np.ndarray) and (x.dtype.kind not in "fiub" or not x.size or not np.isfinite(x).all()):
            raise ValueError(f"{name}: {argument}: expected finite numbers, got {x.dtype} of shape {x.shape}")
    arrays = [x for x in arguments.values() if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    ranges = [(x, float(x.min()), float(x.max())) for x in arrays if x.min() > 0 or x.max() < 0]
    return arguments, ranges


def drawn_arguments(op: Callable, op_backward: Callable, scale: float = 1.0) -> tuple[dict[str, Any], list[Range]]:
    """Normal arrays with the shapes that the letters of the docstring say, and integers where an array is an index.

    Raises ValueError for an argument whose shape the docstring does not show and that has no default.
    """
    parameters = inspect.signature(op).parameters
    by_name = {canonical(name): name for name in parameters}
    equations = equations_of(op, op_backward)
    short = {e.parts[0][1]: e.parts[1][1] for e in equations if is_short_name(e)}
    nodes = [node for equation in equations for node in walk(tuple(equation))]
    names = [node for node in nodes if node[0] == "name"]
    letters: dict[str, list[str]] = {}
    for _, name, places in names:
        argument = short.get(name, name if name in by_name else name.removeprefix("d"))  # a gradient has its shape
        axes = [place[1].rstrip("'").upper() for place in places if place[0] == "idx"]
        if argument in by_name and len(places) == len(axes) >= len(letters.get(argument, ())):
            letters[argument] = axes
    letters |= dict(shapes(docstring_of(op)[0]))
    whole = {short.get(name, name): letter for name, letter in indices(nodes, letters)}
    sizes = {n: p.default for n, p in parameters.items() if len(n) == 1 and n.isupper() and isinstance(p.default, int)}
    rng = np.random.default_rng(SEED)
    arguments: dict[str, Any] = {}
    ranges = list[Range]()

    def size(letter: str) -> int:
        if letter not in sizes:
            sizes[letter] = next(n for n in SIZES if n not in sizes.values())
        return sizes[letter]

    for ascii_name, name in by_name.items():
        default = parameters[name].default
        if default is not inspect.Parameter.empty and not (default is None and ascii_name in letters):
            arguments[name] = default
            continue
        differentiated = any(f"d{ascii_name}" == node[1] for node in names)
        axes = letters.get(ascii_name) or ["N"] * differentiated
        if not axes:
            raise ValueError(
                f"{name}: expected a shape in the docstring of {op.__name__}, as in {name}: (N, C), or an equation "
                f"with {name}_nc, or a default value, or a function {op.__name__}_case() that returns the arguments"
            )
        shape = tuple(size("N" if axis in ("...", "…") else axis) for axis in axes)
        if ascii_name in whole:
            arguments[name] = rng.integers(0, size(whole[ascii_name]), shape)
            ranges.append((arguments[name], 0, size(whole[ascii_name]) - 1))
        else:
            arguments[name] = beginning(scale * rng.standard_normal(shape), 2)
    return arguments, ranges


def equations_of(op: Callable, op_backward: Callable) -> list[Equation]:
    """The equations of an operation's docstring, read without a run."""
    text, margin = docstring_of(op)
    code = {statement.text for function in (op, op_backward) for statement in statements(function)}
    trees = [parsed[1] for function in (op, op_backward) if (parsed := source_tree(function))]
    names = [canonical(part.id) for tree in trees for part in ast.walk(tree) if isinstance(part, ast.Name)]
    items = read(text, names, code, op.__name__, margin).equations
    return [item.equation for item in items if item.equation]


def indices(nodes: list[Node], letters: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """The names that are used as an index or compared with one, each with the letter of that axis."""
    for kind, *parts in nodes:
        if kind == "name":
            for letter, index in zip(letters.get(parts[0], ()), parts[1], strict=False):
                yield from ((node[1], letter) for node in walk(index) if node[0] == "name")
        elif kind in ("=", "≠") and len(parts) == 2:
            for one, other in (parts, parts[::-1]):
                if one[0] == "name" and other[0] == "idx":
                    yield one[1], other[1].rstrip("'").upper()

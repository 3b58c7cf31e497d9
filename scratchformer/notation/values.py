"""Evaluation of syntax trees on arrays whose axes have names.

A product joins axes by name, a sum over t takes the axis t away. An array that has more axes than indices has leading
axes without a letter. They are numbered from the right, −1, −2, ..., and broadcast as in NumPy: an equation holds for
each of their positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .grammar import Condition, Equation, Node, NotationError, walk
from .spelling import conditions as spelled_conditions
from .spelling import spelled

STEP = 1e-40  # of the complex step
MAX_NUMBERS = 2**26  # numbers in one intermediate array
DIRECTION = "∂"  # the axis of the directions in which a name is perturbed


class Named(NamedTuple):
    """An array and the names of its axes: letters, numbers of leading axes, or `DIRECTION`."""

    data: np.ndarray
    axes: tuple[Any, ...]


class Scope:
    """What the names of a derivation stand for.

    values: arrays by name, indexed axes last. aliases: short names of other names. sizes: of index letters; a known
    number H is the size of index h. functions: of whole arrays, by name. perturbed: arrays that depend on the direction
    of a perturbation, their first axis; they take the place of `values`.
    """

    def __init__(self, values: dict[str, np.ndarray], aliases: dict[str, str] | None = None) -> None:
        self.values, self.aliases = values, aliases if aliases is not None else {}
        self.sizes: dict[str, int] = {}
        self.perturbed: dict[str, np.ndarray] = {}
        self.functions: Mapping[str, Callable[..., np.ndarray]] = {}
        self.bound: dict[str, Named] = {}  # letters of a "with" clause
        self.unreached: set[str] = set()  # cases that hold nowhere, as they are written
        self.outside: dict[str, tuple[str, int, int, int]] = {}  # by index: the array that it leaves, from, to, size
        self.differentiate: Callable[[Node, Node], Named] | None = None  # evaluates a partial derivative

    def resolve(self, name: str) -> str:
        """The name that an alias stands for; the gradient du of an alias u is the gradient of what u stands for."""
        if name in self.aliases:
            return self.aliases[name]
        if name.startswith("d") and f"d{self.aliases.get(name[1:])}" in self.values:
            return f"d{self.aliases[name[1:]]}"
        return name

    def size(self, letter: str) -> int:
        base = letter.rstrip("'")
        known = self.values.get(base.upper())
        if base not in self.sizes and known is not None and known.shape == ():
            self.sizes[base] = int(known)
        if base not in self.sizes:
            raise NotationError(f"the size of index {base} is not known: no array has it")
        return self.sizes[base]

    def learn(self, letter: str, size: int, name: str) -> None:
        known = self.sizes.setdefault(letter.rstrip("'"), size)
        if known != size:
            raise NotationError(f"index {letter} has size {size} in {name}, but {known} elsewhere")


def is_fold(index: Node) -> bool:
    """Whether an index stands for all leading axes, folded into one: n, or n with primes."""
    return index[0] == "idx" and index[1].rstrip("'") == "n"


def fetch(name: str, indices: Sequence[Node], scope: Scope) -> tuple[np.ndarray, tuple[Any, ...], int]:
    """The array of a name, the names of its first axes that have no index, and how many axes have one."""
    perturbed = name in scope.perturbed
    data = scope.perturbed[name] if perturbed else scope.values[name]
    if data.dtype == bool:
        data = data.astype(float)
    first, count = int(perturbed), len(indices)
    lead = data.ndim - first - count
    if count and is_fold(indices[0]) and lead >= 0:
        rows = data.shape[first : first + lead + 1]
        data = data.reshape(*data.shape[:first], int(np.prod(rows)), *data.shape[first + lead + 1 :])
        lead = 0
    if lead < 0:
        raise NotationError(f"too many indices: {name} has shape {data.shape[first:]}")
    return data, (*(DIRECTION,) * first, *range(-lead, 0)), count


def learn_sizes(tree: Any, scope: Scope) -> None:
    """Take the sizes of index letters from the arrays that a tree indexes."""
    for node in walk(tree):
        if node[0] == "name" and node[2] and (name := scope.resolve(node[1])) in scope.values:
            data, _, count = fetch(name, node[2], scope)
            for index, size in zip(node[2], data.shape[data.ndim - count :], strict=True):
                if index[0] == "idx":
                    scope.learn(index[1], size, node[1])


def align(*arrays: Named) -> tuple[list[np.ndarray], tuple[Any, ...]]:
    """The arrays with the axes of all of them, in one order, so that they broadcast."""
    together = dict.fromkeys(axis for array in arrays for axis in array.axes)
    leading = sorted(axis for axis in together if isinstance(axis, int))
    axes = (
        *(a for a in together if a == DIRECTION),
        *leading,
        *(a for a in together if a != DIRECTION and a not in leading),
    )
    return [spread(array, axes) for array in arrays], axes


def spread(array: Named, axes: Sequence[Any]) -> np.ndarray:
    """The data transposed to `axes`, with length 1 for each axis that the array does not have."""
    order = [array.axes.index(axis) for axis in axes if axis in array.axes]
    shape = iter(array.data.transpose(order).shape)
    return array.data.transpose(order).reshape([next(shape) if axis in array.axes else 1 for axis in axes])


def pointwise(function: Callable[..., Any], *arrays: Named) -> Named:
    data, axes = align(*arrays)
    expect_room(math.prod(np.broadcast_shapes(*(part.shape for part in data))))
    with np.errstate(all="ignore"):
        return Named(np.asarray(function(*data)), axes)


def expect_room(size: int) -> None:
    if size > MAX_NUMBERS:
        raise NotationError(f"this takes {size:,} numbers at once: check the derivation on smaller arrays")


def number(value: float) -> Named:
    return Named(np.asarray(value, dtype=float), ())


def reference(node: Node, scope: Scope) -> Named:
    """The value of an indexed name, or of a size."""
    _, written, indices = node
    name = scope.resolve(written)
    if name not in scope.values and name not in scope.perturbed:
        if not indices and len(written) == 1 and written.isupper() and written.lower() in scope.sizes:
            return number(scope.sizes[written.lower()])
        raise NotationError(f"{written} is not known here: no equation above defines it")
    data, leading, count = fetch(name, indices, scope)
    plain = [i[1] for i in indices if i[0] == "idx" and i[1] not in scope.bound]
    if len(plain) == count == len(set(plain)):
        for letter, size in zip(plain, data.shape[data.ndim - count :], strict=True):
            scope.learn(letter, size, written)
        return Named(data, (*leading, *plain))
    return gather(written, data, leading, indices, scope)


def gather(name: str, data: np.ndarray, leading: tuple[Any, ...], indices: Sequence[Node], scope: Scope) -> Named:
    """The entries at computed indices; NaN where an index is out of range. name: of the array, for messages."""
    chosen = [Named(np.arange(size), (axis,)) for axis, size in zip(leading, data.shape, strict=False)]
    chosen += [evaluate(index, scope) for index in indices]
    aligned, axes = align(*chosen)
    valid = np.array(True)
    places: list[np.ndarray] = []
    for place, size, axis in zip(aligned, data.shape, [*leading, *(None for _ in indices)], strict=True):
        whole = np.rint(place.real.astype(float)).astype(int)
        if axis is not None and size == 1:
            whole = np.zeros_like(whole)
        inside = (whole >= 0) & (whole < size)
        if axis is None and not inside.all():
            index = spelled(indices[len(places) - len(leading)])
            scope.outside[index] = name, int(whole.min()), int(whole.max()), size
        valid = valid & inside & (np.abs(place.real - whole) < 1e-9 if axis is None else True)
        places.append(np.clip(whole, 0, size - 1))
    gathered = data[tuple(places)]
    return Named(np.where(valid, gathered, np.nan), axes)


def truth(conditions: Sequence[Condition], scope: Scope) -> Named:
    """1 where all conditions hold, else 0."""
    tests = {"=": np.equal, "≠": np.not_equal, "<": np.less, ">": np.greater, "≤": np.less_equal, "≥": np.greater_equal}
    held = [
        pointwise(lambda a, b, test=tests[relation]: test(a.real, b.real), evaluate(a, scope), evaluate(b, scope))
        for relation, a, b in conditions
    ]
    return pointwise(lambda *parts: np.logical_and.reduce(np.broadcast_arrays(*parts)).astype(float), *held)


def power(base: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """base to the exponent. (NumPy's complex power goes through logarithms, which would lose a tiny imaginary part.)"""
    if not np.iscomplexobj(base):
        return base ** np.asarray(exponent).real if not np.iscomplexobj(exponent) else np.exp(exponent * np.log(base))
    if exponent.size == 1 and float(whole := exponent.real.ravel()[0]).is_integer():
        product = np.ones_like(base)
        for _ in range(abs(int(whole))):
            product = product * base
        return product if whole >= 0 else 1 / product
    return np.exp(exponent * np.log(base))


def erf(x: np.ndarray) -> Any:
    """The error function. SciPy's module is imported here because it changes Python's filters of warnings."""
    from scipy.special import erf as erf_scipy

    return erf_scipy(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "erf": erf,
    "max": lambda a, b: np.where(a.real >= b.real, a, b),
    "min": lambda a, b: np.where(a.real <= b.real, a, b),
    "abs": lambda a: np.where(a.real < 0, -a, a),
    "floor": lambda a: np.floor(a.real),
    "mod": lambda a, b: a - b * np.floor(a.real / b.real),
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "^": power,
}


def evaluate(node: Node, scope: Scope) -> Named:
    """The value of a syntax tree. Raises NotationError for a name or an index that is not known."""
    kind = node[0]
    if kind == "num":
        return number(node[1])
    if kind == "idx":
        if node[1] in scope.bound:
            return scope.bound[node[1]]
        return Named(np.arange(scope.size(node[1]), dtype=float), (node[1],))
    if kind == "name":
        return reference(node, scope)
    if kind == "group":
        return evaluate(node[1], scope)
    if kind == "neg":
        return pointwise(np.negative, evaluate(node[1], scope))
    if kind == "call" and node[1] in scope.functions:
        return apply(scope.functions[node[1]], *[evaluate(a, scope) for a in node[2]])
    if kind == "call":
        return pointwise(FUNCTIONS[node[1]], *[evaluate(a, scope) for a in node[2]])
    if kind in FUNCTIONS:
        return pointwise(FUNCTIONS[kind], *[evaluate(a, scope) for a in node[1:]])
    if kind == "bracket":
        held = truth(node[1], scope)
        if not held.data.any():
            scope.unreached.add(spelled(node))
        return held
    if kind == "delta":
        return truth([("=", node[1], node[2])], scope)
    if kind == "cases":
        return cases(node, scope)
    if kind == "over":
        return over(node, scope)
    if scope.differentiate is None:
        raise NotationError("a partial derivative cannot be evaluated here")
    return scope.differentiate(node[1], node[2])


def apply(function: Callable[..., np.ndarray], *arguments: Named) -> Named:
    """The value of a function of whole arrays, at each perturbation of its arguments, all of them complex then."""
    if any(isinstance(axis, str) and axis != DIRECTION for argument in arguments for axis in argument.axes):
        raise NotationError("a function takes whole arrays, without indices")
    counts = [len(argument.data) for argument in arguments if DIRECTION in argument.axes]
    try:
        if not counts:
            data = function(*(argument.data for argument in arguments))
            return Named(data, tuple(range(-data.ndim, 0)))
        wide = [argument.data.astype(complex) for argument in arguments]
        moved = [a if DIRECTION in b.axes else [a] * counts[0] for a, b in zip(wide, arguments, strict=True)]
        data = np.stack([function(*values) for values in zip(*moved, strict=True)])
    except (ValueError, TypeError, IndexError) as error:
        raise NotationError(f"the function does not take these arrays: {error}") from error
    return Named(data, (DIRECTION, *range(1 - data.ndim, 0)))


def cases(node: Node, scope: Scope) -> Named:
    _, branches, otherwise = node
    texts = [f"{spelled(branch)} where {spelled_conditions(held, ' and ')}" for branch, held in branches]
    texts.append(f"{spelled(otherwise)} elsewhere")
    value, case = evaluate(otherwise, scope), number(len(branches))
    for place, (branch, conditions) in reversed(list(enumerate(branches))):
        held = truth(conditions, scope)
        value = pointwise(lambda c, a, b: np.where(c > 0, a, b), held, evaluate(branch, scope), value)
        case = pointwise(lambda c, a, b: np.where(c > 0, a, b), held, number(place), case)
    scope.unreached.update(text for place, text in enumerate(texts) if not (case.data == place).any())
    return value


def over(node: Node, scope: Scope) -> Named:
    """A sum, product, mean, maximum, minimum, argmax or softmax over index letters."""
    _, function, letters, body, conditions = node
    shadowed = {letter: scope.bound.pop(letter) for letter in letters if letter in scope.bound}
    try:
        index = [Named(np.ones(scope.size(letter)), (letter,)) for letter in letters]
        held = truth(conditions, scope) if conditions else number(1)
        (x, held_data, *_), axes = align(evaluate(body, scope), held, *index)
    finally:
        scope.bound |= shadowed
    places = tuple(axes.index(letter) for letter in letters)
    full = np.broadcast_shapes(x.shape, held_data.shape, *(i.shape for i in align(Named(x, axes), *index)[0]))
    x, mask = np.broadcast_to(x, full), np.broadcast_to(held_data, full) > 0
    rest = tuple(axis for axis in axes if axis not in letters)
    if function in ("sum", "mean", "prod"):
        x = np.where(mask, x, function == "prod") if conditions else x
        if function == "prod":
            return Named(x.prod(axis=places), rest)
        return Named(x.sum(axis=places) / (mask.sum(axis=places) if function == "mean" else 1), rest)
    if function == "softmax":
        with np.errstate(all="ignore"):
            top = np.where(mask, x.real, -np.inf).max(axis=places, keepdims=True)
            e = np.where(mask, np.exp(x - np.where(np.isfinite(top), top, 0)), 0)
            return Named(e / e.sum(axis=places, keepdims=True), axes)
    if len(letters) != 1:
        raise NotationError(f"{function} is over one index")
    (place,) = places
    sign = -1 if function == "min" else 1
    best = np.where(mask, sign * x.real, -np.inf).argmax(axis=place, keepdims=True)
    if function == "argmax":
        return Named(best.squeeze(place).astype(float), rest)
    extreme = np.take_along_axis(x, best, axis=place).squeeze(place)
    return Named(np.where(mask.any(axis=place), extreme, -sign * np.inf), rest)


def bind(equation: Equation, scope: Scope) -> None:
    """Learn the sizes of an equation's letters, and give the letters of its "with" clause their values."""
    scope.bound, scope.outside = {}, {}
    learn_sizes(equation, scope)
    for letter, node in equation.bindings:
        scope.bound[letter] = evaluate(node, scope)

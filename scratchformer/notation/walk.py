"""A derivation walked from top to bottom: each equation defines its left side or is compared with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..shell.text import apart
from .grammar import Equation, Node, NotationError, canonical, letters_in
from .grammar import walk as nodes
from .layout import DerivationText, Item, normal
from .ratios import Compared, explanations, factor_everywhere, times
from .spelling import name as spelled_name
from .spelling import spelled
from .values import (
    DIRECTION,
    STEP,
    Named,
    Scope,
    align,
    bind,
    evaluate,
    expect_room,
    fetch,
    learn_sizes,
    spread,
    truth,
)

if TYPE_CHECKING:
    from .run import Execution

TOLERANCE = 1e-9
_EQUAL = ("=", ":=")
TOLD = ("factor put in", "factor left out", "factor in some places")


class DerivationError(AssertionError):
    """An equation or a line of code of a derivation that is not true."""


class DerivationRow(NamedTuple):
    """One equation, or one variable of a line of code, and what became of it.

    kind: "defines", if its left side was not known and has this value from here on; "compared"; "gradient", which is
    also compared with the numerical derivative of the loss; "code"; "step", a line of code that a later one continues;
    "name", a short name. error: the largest difference, relative to the largest number compared; None for "defines"
    and "step".
    """

    line: int
    text: str
    kind: str
    error: float | None


class Rule(NamedTuple):
    """How a name is computed: name_indices = node."""

    name: str
    indices: tuple[Node, ...]
    node: Node
    equation: Equation


class Walk:
    """A derivation read from top to bottom: what is known so far, and the rules seen."""

    def __init__(self, ran: Execution, tolerance: float = TOLERANCE) -> None:
        self.run, self.tolerance = ran, tolerance
        self.scope = Scope(dict(ran.values))
        self.scope.functions, self.scope.differentiate = ran.functions, self.partial
        self.rules: dict[str, Rule] = {}
        self.rows: list[DerivationRow] = []
        self.equations: list[Equation] = []
        self.code_lines: list[Item] = []
        self.last: dict[str, int] = {}  # by variable, the last line of the derivation whose code sets it
        self.perturbed: tuple[Any, Any] = None, None  # the latest result of `perturb`, and what it was for
        self.compared: dict[str, np.ndarray] = {}  # by name on the left, where an equation was compared
        self.known_where: dict[str, np.ndarray] = {}  # by name, the elements that equations with conditions define
        self.unused: dict[str, Item] = {}  # by name, the equation that defines it, until another one uses it

    def copy(self) -> Walk:
        """A walk that continues independently from here."""
        other = Walk(self.run, self.tolerance)
        other.scope.values, other.scope.aliases = dict(self.scope.values), dict(self.scope.aliases)
        other.known_where = dict(self.known_where)
        other.scope.sizes, other.rules = dict(self.scope.sizes), dict(self.rules)
        other.equations, other.code_lines, other.last = self.equations, self.code_lines, self.last
        return other

    def prepare(self, derivation: DerivationText) -> None:
        """Learn the sizes of letters from the known arrays, and which line of code sets a variable last."""
        self.equations = [item.equation for item in derivation.equations if item.equation]
        self.learn_known_sizes()
        self.code_lines = [item for item in derivation.items if is_code(item)]
        self.last = {name: item.line for item in self.code_lines for name in self.run.locals.get(normal(item.text), ())}

    def items(self, name: str, items: Iterable[Item]) -> None:
        """Check the items in order. name: of the derivation, for messages."""
        for item in items:
            try:
                if item.kind == "equation":
                    self.equation(item)
                    if self.rows[-1].kind == "name":
                        self.learn_known_sizes()
                elif is_code(item):
                    self.code(item)
            except ValueError as error:  # a NotationError, or NumPy's of shapes that do not go together
                place = f"{name}: line {item.line}: {normal(item.text)}"
                what = getattr(error, "message", "") or self.without_index(item) or error
                lines = dict.fromkeys([place, str(what), *self.meant(item)])
                raise DerivationError("\n    ".join(lines)) from error

    def meant(self, item: Item) -> Iterator[str]:
        """What may have been meant by an equation that is wrong."""
        if item.equation is None:
            return
        yield from shadowed(item.equation)
        for index, (name, low, high, size) in self.scope.outside.items():
            within = f"0 ≤ {index} < {size}"
            yield f"index {index} leaves {name}: it goes from {low} to {high}, and the axis has {size} numbers"
            yield f'give it a condition: Σ_{{k, {within}}} for a sum over k, or "for {within}" at the end'
        for node in nodes(item.equation):
            if node[0] == "name":
                yield from self.defined_as(node)
        if "·" in item.text:
            yield from self.dot_products(item.equation)
        for part in item.equation.parts[1:-1]:
            last = last_factor(part)
            if last[0] == "name" and (self.differentiated(last) is not None or re.search(r"\S  \S", item.text)):
                yield f"does a second equation begin with {spelled(last)}? Three spaces separate equations of a line"

    def defined_as(self, node: Node) -> Iterator[str]:
        """With which indices a name was defined, if a node has them in another order."""
        for equation in self.equations:
            left = equation.parts[0]
            if left[0] == "name" and left[1] in (node[1], node[1].removeprefix("d")) and left[2] != node[2]:
                if sorted(left[2]) == sorted(node[2]):
                    yield f"{spelled_name(left[1])} is defined as {spelled(left)}: is {spelled(node)} meant to be it?"
                return

    def dot_products(self, equation: Equation) -> Iterator[str]:
        """How to write products of arrays that have an axis without an index."""
        letter = next((each for each in "cdijkl" if each not in letters_in(equation)), "c'")
        for node in nodes(equation):
            if node[0] == "*" and all(part[0] == "name" and part[2] and self.names(part) for part in node[1:]):
                if all(self.scope.values[self.scope.resolve(name)].ndim > len(has) for _, name, has in node[1:]):
                    a, b = (spelled((*part[:2], (*part[2], ("idx", letter)))) for part in node[1:])
                    yield f"a product of two names is one of numbers; a dot product is a sum, Σ_{letter} {a} {b}"

    def without_index(self, item: Item) -> str:
        """Why NumPy could not broadcast an equation: the arrays with the most axes that have no index."""
        by_missing: dict[int, dict[str, tuple[int, ...]]] = {}
        for node in nodes(item.equation):
            if node[0] == "name" and self.names(node):
                shape = self.scope.values[self.scope.resolve(node[1])].shape
                by_missing.setdefault(len(shape) - len(node[2]), {})[spelled(node)] = shape
        arrays = [f"{name} {shape}" for name, shape in by_missing[max(by_missing)].items()] if by_missing else []
        return f"axes without an index do not fit together: {', '.join(arrays)}" if arrays else ""

    def expect_complete(self) -> None:
        """Raise DerivationError for what the derivation leaves unchecked.

        Every gradient that backward returned, and the output, must be compared with an equation, and every name that an
        equation defines must be used further down.
        """
        if all(row.error is None for row in self.rows):
            raise DerivationError(f"{self.run.name}: no equation is compared with anything, so nothing is checked")
        for name in (*self.run.outputs, *self.run.gradients) if self.run.gradients else ():
            if name not in self.compared:
                raise DerivationError(f"{self.run.name}: no equation gives {spelled_name(name)}, so it is not checked")
            if not self.compared[name].all():
                raise DerivationError(
                    f"{self.run.name}: no equation gives all of {spelled_name(name)}: see the conditions"
                )
        for name, item in self.unused.items():
            raise DerivationError(
                f"{self.run.name}: line {item.line}: {normal(item.text)}\n"
                f"    defines {spelled_name(name)}, which nothing below uses, so it is not checked"
            )

    def learn_known_sizes(self) -> None:
        """Sizes of the letters of known arrays, before any equation that uses them is evaluated."""
        for equation in self.equations:
            try:
                learn_sizes(equation, self.scope)
            except NotationError:
                pass  # the walk meets this equation again, with a place for the error

    def equation(self, item: Item) -> None:
        equation = item.equation
        assert equation is not None
        first, *others = equation.parts
        if self.is_short_name(equation):
            self.scope.aliases[first[1]] = self.scope.resolve(others[0][1])
            self.rows.append(DerivationRow(item.line, item.text, "name", None))
            return
        bind(equation, self.scope)
        if equation.conditions and not truth(equation.conditions, self.scope).data.any():
            self.scope.unreached.add(spelled(equation))
        equal = equation.relations[0] in _EQUAL
        defined = equal and self.defines(first, equation)
        self.use((*equation.parts[defined:], equation.bindings, equation.conditions))
        if defined:
            self.set(first, evaluate(others[0], self.scope), equation)
        errors = self.chain(item, equation, int(defined))
        gradient = self.gradient(item, first)
        if gradient is None:
            self.learn(first, others[0], equation)
        else:
            errors.append(gradient)
        kind = "gradient" if gradient is not None else "defines" if defined and not errors else "compared"
        self.rows.append(DerivationRow(item.line, item.text, kind, max(errors, default=None)))
        if kind == "defines":
            self.unused[self.scope.resolve(first[1])] = item
        elif equal and first[0] == "name":
            name = self.scope.resolve(first[1])
            self.compared[name] = holds(equation, first, self.scope) | self.compared.get(name, False)
        for remark in shadowed(equation):
            raise NotationError(remark)

    def chain(self, item: Item, equation: Equation, start: int) -> list[float]:
        """The error of each relation from number `start` on. Its left side is the part before it, or the first part
        while all so far are equal.
        """
        left, equal, errors = equation.parts[0], True, []
        known = evaluate(left, self.scope)
        for relation, right in list(zip(equation.relations, equation.parts[1:], strict=True))[start:]:
            value = evaluate(right, self.scope)
            errors.append(self.compare(item, known, value, relation, equation, self.terms(left, right)))
            equal = equal and relation in _EQUAL
            if not equal:
                left, known = right, value
        return errors

    def is_short_name(self, equation: Equation) -> bool:
        """Whether an equation gives a known array a short name, as u := content_bias does. dx is never a short name."""
        first, second, *_ = equation.parts
        if equation.relations != (":=",) or not is_whole(first) or not is_whole(second):
            return False
        return self.names(second) and not self.names(first) and self.differentiated(first) is None

    def use(self, tree: Any) -> None:
        for node in nodes(tree):
            if node[0] == "name":
                self.unused.pop(self.scope.resolve(node[1]), None)

    def names(self, node: Node) -> bool:
        return self.scope.resolve(node[1]) in self.scope.values

    def defines(self, node: Node, equation: Equation) -> bool:
        """Whether this left side is a name that is not known yet, or not where the equation's condition holds."""
        if node[0] != "name" or node[1] == "L":
            return False
        letters = all(index[0] == "idx" for index in node[2])
        if self.names(node):
            known = self.known_where.get(self.scope.resolve(node[1]))
            return known is not None and letters and not (known & holds(equation, node, self.scope)).any()
        if not letters:
            raise NotationError(f"{node[1]} is not known, so its indices must be plain letters")
        return True

    def set(self, left: Node, value: Named, equation: Equation) -> None:
        """Give the left side its value; where its condition does not hold, it stays as it was, or NaN."""
        name, data = self.scope.resolve(left[1]), arranged(left, value, self.scope)
        if equation.conditions:
            held = holds(equation, left, self.scope)
            data = np.where(held, data, self.scope.values.get(name, np.nan))
            self.known_where[name] = held | self.known_where.get(name, False)
        self.scope.values[name] = data

    def learn(self, left: Node, right: Node, equation: Equation) -> None:
        """Remember the equation as the way to compute its left side, for derivatives."""
        if left[0] != "name" or any(node[0] == "partial" for node in nodes(right)):
            return
        name, letters = self.scope.resolve(left[1]), [index[1] for index in left[2] if index[0] == "idx"]
        plain = len(letters) == len(left[2]) == len(set(letters))
        if plain and not equation.conditions and name not in self.run.arguments and equation.relations[0] in _EQUAL:
            self.rules.setdefault(name, Rule(name, left[2], right, equation))

    def terms(self, left: Node, right: Node) -> float:
        """The size of the terms that cancel, if the right side is 0: the rounding error is relative to them."""
        return float(np.max(evaluate(positive(left), self.scope).data)) if right[:2] == ("num", 0) else 0.0

    def compare(self, item: Item, a: Named, b: Named, relation: str, equation: Equation, terms: float = 0.0) -> float:
        for axis in b.axes:
            if relation in _EQUAL and isinstance(axis, str) and axis not in a.axes:
                raise NotationError(f"index {axis} is on the right only: sum over it, or put it on the left")
        (x, y), axes = align(a, b)
        x, y = np.broadcast_arrays(x.real, y.real)
        held = np.ones(x.shape, bool)
        if equation.conditions:
            mask, around = align(truth(equation.conditions, self.scope), Named(x, axes))
            if around != axes and set(around) != set(axes):
                raise NotationError("a condition has an index that the equation does not have")
            order = [around.index(axis) for axis in axes]
            held = np.broadcast_to(np.broadcast_to(mask[0], mask[1].shape).transpose(order), x.shape) > 0
            if not held.any():
                raise NotationError('the condition after "for" holds nowhere on these arrays: nothing is compared')
        if relation in _EQUAL:
            error = distance(x[held], y[held], terms)
            if np.isfinite(error):
                self.scope.outside = {}
            wrong = ~(np.abs(x - y) <= self.tolerance * max(np.abs(y[held]).max(initial=0), terms, 1e-300)) & held
        else:
            tests = {"<": np.less, ">": np.greater, "≤": np.less_equal, "≥": np.greater_equal, "≠": np.not_equal}
            wrong = ~tests[relation](x, y) & held
            error = float(wrong.any())
        if not error <= self.tolerance:
            at = np.unravel_index(
                int(np.argmax(np.where(wrong, np.nan_to_num(np.abs(x - y), nan=np.inf), -1))), x.shape
            )
            ratio = self.ratio(np.where(held, y, np.nan), np.where(held, x, np.nan), axes) if relation in _EQUAL else ""
            sides = "the left side is {}, the right side {}" + f"\n    The right side is {ratio}" * bool(ratio)
            self.fail(item, f"is not true: relative error {error:.1e}", axes, at, sides, float(x[at]), float(y[at]))
        return error

    def ratio(self, wrong: np.ndarray, right: np.ndarray, axes: Sequence[Any]) -> str:
        """What the ratio of a wrong array and the right one tells: "4 times what it should be: 4 is N", or ""."""
        named: dict[str, float] = {letter.rstrip("'").upper(): float(n) for letter, n in self.scope.sizes.items()}
        arrays = {}
        for node in nodes(tuple(self.equations)):
            if node[0] == "name" and all(index[0] == "idx" for index in node[2]):
                with suppress(ValueError):  # it is not known yet
                    value = evaluate(node, self.scope)
                    if value.data.size == 1 and not node[2]:
                        named[spelled(node)] = float(value.data.real.flat[0])
                    elif value.axes and set(value.axes) <= set(axes):
                        arrays[spelled(node)] = spread(value, axes).real
        numbers: dict[float, list[str]] = {}
        for name, number in named.items():
            numbers.setdefault(number, []).append(name)
        compared = Compared(wrong, right)
        factor = factor_everywhere(compared, numbers)
        if factor is not None:
            return times(factor, numbers, "it") + "."
        return next((text for text, name in explanations(compared, arrays, numbers) if name in TOLD), "")

    def fail(self, item: Item, what: str, axes: Any, at: Any, sides: str, left: float, right: float) -> None:
        """Raise DerivationError. sides: what is said of the two numbers, with {} for each."""
        rows = [int(i) for axis, i in zip(axes, at, strict=True) if not isinstance(axis, str)]
        places = [f"row {', '.join(map(str, rows))}"] if rows else []  # of the leading axes
        places += [f"{axis} = {int(i)}" for axis, i in zip(axes, at, strict=True) if isinstance(axis, str)]
        place = ", ".join(places)
        where = f" at {place}" if place else ""
        raise DerivationError(
            f"{self.run.name}: line {item.line}: {normal(item.text)}\n"
            f"    {what}\n   {where} {sides.format(*apart(left, right, fewest=10))}"
            + "".join(f"\n    {remark}" for remark in dict.fromkeys([*remarks(item.equation), *self.meant(item)]))
        )

    def differentiated(self, left: Node) -> str | None:
        """The known name x, if the left side is its gradient dx."""
        if left[0] != "name" or not left[1].startswith("d") or len(left[1]) < 2:
            return None
        of = self.scope.resolve(left[1][1:])
        known = self.scope.values.get(of)
        return None if known is None or of in self.run.outputs or known.dtype.kind != "f" else of

    def gradient(self, item: Item, left: Node) -> float | None:
        """Compare dx with the numerical ∂L/∂x, if the left side is the gradient of a known name."""
        if (of := self.differentiated(left)) is None:
            return None
        name = self.scope.resolve(left[1])
        numerical = self.derivative_of_loss(of)
        analytic = self.scope.values[name]
        if analytic.size != numerical.size:
            raise NotationError(
                f"{left[1]} has shape {analytic.shape}, but {left[1][1:]} has {numerical.shape}: "
                "is a sum over leading axes missing?"
            )
        analytic = analytic.reshape(numerical.shape)
        error = distance(analytic, numerical)
        if not error <= self.tolerance:
            at = np.unravel_index(int(np.argmax(np.abs(analytic - numerical))), numerical.shape)
            letters = [index[1] if index[0] == "idx" else number for number, index in enumerate(left[2])]
            axes = (*range(numerical.ndim - len(letters)), *letters)
            dx, x = spelled_name(left[1]), spelled_name(left[1][1:])
            ratio = self.ratio(analytic, numerical, axes)
            sides = f"{dx} is {{}}, ∂L/∂{x} is {{}}" + f"\n    {dx} is {ratio}" * bool(ratio)
            what = f"differs from the numerical derivative of the loss: relative error {error:.1e}"
            self.fail(item, what, axes, at, sides, float(analytic[at]), float(numerical[at]))
        return error

    def perturb(self, name: str) -> Scope:
        """A scope in which each element of `name` is perturbed in turn, with all that depends on it computed again."""
        if self.perturbed[0] != (known := (name, len(self.rules))):
            self.perturbed = known, self.recompute(name)
        return self.perturbed[1]

    def recompute(self, name: str) -> Scope:
        """A new scope for `perturb`."""
        data = self.scope.values[name]
        inner = Scope(self.scope.values, self.scope.aliases)
        inner.sizes, inner.functions = self.scope.sizes, self.scope.functions
        expect_room(data.size**2)
        eye = np.eye(data.size).reshape(data.size, *data.shape)
        inner.perturbed[name] = data + 1j * STEP * eye
        for rule in self.rules.values():
            if rule.name != name and depends(rule, inner):
                bind(rule.equation, inner)
                left = ("name", rule.name, rule.indices)
                value = arranged(left, evaluate(rule.node, inner), inner, data.size)
                inner.perturbed[rule.name] = value.reshape(data.size, *self.scope.values[rule.name].shape)
        return inner

    def derivative_of_loss(self, name: str) -> np.ndarray:
        """∂L/∂x for the array x of this name, by the complex step."""
        inner, total = self.perturb(name), 0.0
        for output in self.run.outputs:
            if output in inner.perturbed:
                y, dy = inner.perturbed[output], self.scope.values[f"d{output}"]
                total = total + (y.imag / STEP * dy).reshape(len(y), -1).sum(axis=1)
        if isinstance(total, float):
            raise NotationError(f"no equations above lead from {name} to the output {', '.join(self.run.outputs)}")
        return total.reshape(self.scope.values[name].shape)

    def partial(self, of: Node, by: Node) -> Named:
        """∂of/∂by, numerically: each element of `by` is perturbed in turn."""
        name = self.scope.resolve(by[1])
        if name not in self.scope.values:
            raise NotationError(f"{by[1]} is not known here: no equation above defines it")
        letters = [index[1] for index in by[2] if index[0] == "idx"]
        if len(letters) != len(by[2]) or len(set(letters)) != len(letters):
            raise NotationError("the indices below ∂ must be different letters")
        data, leading, _ = fetch(name, by[2], self.scope)
        below = (*leading, *letters)
        if of[1] == "L" and self.scope.resolve("L") not in self.scope.values:
            return Named(self.derivative_of_loss(name).reshape(data.shape), below)
        inner = self.perturb(name)
        if self.scope.resolve(of[1]) not in inner.perturbed:
            raise NotationError(f"no equation above computes {of[1]} from {by[1]}")
        inner.bound = self.scope.bound
        above = evaluate(of, inner)
        axes = [axis for axis in above.axes if axis != DIRECTION]
        rows = spread_first(above, axes).imag / STEP
        return same_positions(rows.reshape(*data.shape, *rows.shape[1:]), below, axes)

    def code(self, item: Item) -> None:
        """Compare the variables that a line of code sets with the equations' values.

        Of several lines that set one variable only the last is compared: the others are steps on the way.
        """
        text = normal(item.text)
        if text not in self.run.locals:
            raise NotationError("this line of code did not run")
        compared = False
        for variable, value in self.run.locals[text].items():
            name = self.scope.resolve(canonical(variable))
            if name not in self.scope.values or self.last[variable] != item.line:
                continue
            compared = True
            self.unused.pop(name, None)
            known = self.scope.values[name]
            if known.size != value.size:
                raise NotationError(
                    f"{variable} has shape {value.shape} in the code, but {known.shape} in the equations"
                )
            error = distance(value.reshape(known.shape), known)
            if not error <= self.tolerance:
                raise DerivationError(
                    f"{self.run.name}: line {item.line}: {text}\n    gives another {variable} than the equations: "
                    f"relative error {error:.1e}"
                )
            self.rows.append(DerivationRow(item.line, text, "code", error))
        if not compared:
            self.expect_continued(item)
            self.rows.append(DerivationRow(item.line, text, "step", None))

    def expect_continued(self, item: Item) -> None:
        """Raise NotationError unless a later line of code uses a variable that this step sets, or returns."""
        variables = self.run.locals[normal(item.text)]
        later = " ".join(other.text for other in self.code_lines if other.line > item.line)
        if not any(re.search(rf"\b{variable}\b", later) for variable in (*variables, "return")):
            raise NotationError(
                f"this line of code is not checked: neither an equation nor a line of code below "
                f"has a variable that it sets ({', '.join(variables) or 'none'})"
            )


def is_code(item: Item) -> bool:
    return item.kind == "code" and not item.text.lstrip().startswith(">>>")


def is_whole(node: Node) -> bool:
    return node[0] == "name" and not node[2]


def positive(node: Node) -> Node:
    """The node with the absolute value of every term of its sums."""
    if node[0] == "over" and node[1] in ("sum", "mean"):
        return (*node[:3], positive(node[3]), node[4])
    if node[0] in ("+", "-"):
        return "+", positive(node[1]), positive(node[2])
    return positive(node[1]) if node[0] in ("group", "neg") else ("abs", node)


def last_factor(node: Node) -> Node:
    """The last factor of the last term."""
    while node[0] in ("+", "-", "*", "/", "neg", "over"):
        node = node[3] if node[0] == "over" else node[-1]
    return node


def sums(tree: Any, used: frozenset[str] = frozenset()) -> Iterator[tuple[Node, frozenset[str]]]:
    """The sums of a tree, and other functions over letters, each with the letters that have a meaning around it."""
    if not isinstance(tree, tuple):
        return
    if tree and tree[0] == "over" and tree[1] != "softmax":
        yield tree, used
        used |= frozenset(tree[2])
    for part in tree:
        yield from sums(part, used)


def shadowed(equation: Equation) -> Iterator[str]:
    """What to write instead of sums over a letter that has a meaning already: on the left, or in a sum around it."""
    left = equation.parts[0]
    used = frozenset(letters_in(left) if left[0] in ("name", "partial") else ())
    for (_, function, letters, *_), around in sums(equation.parts, used):
        for letter in around.intersection(letters):
            free = letter + "'"
            while free in around:
                free += "'"
            yield f"{letter} is an index of this equation already: in the {function}, write {free}"


def remarks(equation: Equation | None) -> list[str]:
    """What a teacher would mark in an equation even if it is true: a sum over a letter that its terms do not have."""
    return [
        f"nothing in the {function} over {letter} has index {letter}"
        for (_, function, letters, body, conditions), _ in sums(equation.parts[1:] if equation else ())
        for letter in letters
        if letter not in letters_in((body, conditions))
    ]


def distance(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest number or to `least`; infinity where one is not a number."""
    difference, largest = np.abs(a - b).max(initial=0), max(np.abs(a).max(initial=0), np.abs(b).max(initial=0), floor)
    if not np.isfinite(difference):
        return np.inf
    return float(difference / largest) if largest else 0.0


def arranged(left: Node, value: Named, scope: Scope, directions: int | None = None) -> np.ndarray:
    """The value with its leading axes first and then the axes in the order of the indices on the left."""
    letters = [index[1] for index in left[2]]
    leading = sorted(axis for axis in value.axes if isinstance(axis, int))
    for axis in value.axes:
        if isinstance(axis, str) and axis not in letters and axis != DIRECTION:
            raise NotationError(f"index {axis} is on the right only: sum over it, or put it on the left")
    axes = [*leading, *letters]
    data = spread_first(value, axes) if DIRECTION in value.axes else spread_first(value, axes)[0]
    shape = [
        size if isinstance(a, int) else scope.size(a)
        for a, size in zip(axes, data.shape[-len(axes) :] if axes else (), strict=True)
    ]
    if directions is None:
        return np.broadcast_to(data, shape).copy()
    return np.broadcast_to(data, (directions, *shape)).copy()


def holds(equation: Equation, left: Node, scope: Scope) -> np.ndarray:
    """Where an equation is to hold, with the axes of its left side; nowhere, if an index of that is not a letter."""
    if not equation.conditions:
        return np.array(True)
    if any(index[0] != "idx" for index in left[2]):
        return np.array(False)
    return arranged(left, truth(equation.conditions, scope), scope) > 0


def spread_first(value: Named, axes: Any) -> np.ndarray:
    """The data with the axis of directions first (length 1 if it has none), then `axes`."""
    return spread(value, (DIRECTION, *axes))


def same_positions(data: np.ndarray, below: Sequence[Any], above: Sequence[Any]) -> Named:
    """A Jacobian with axes `below` and then `above`, at the same position of those axes that both have.

    A leading axis must not mix: the derivative at one position with respect to another is zero, or this is an error.
    """
    labels = [*((axis, "below") for axis in below), *((axis, "above") for axis in above)]
    for axis in below:
        if axis not in above:
            continue
        i, j = labels.index((axis, "below")), labels.index((axis, "above"))
        if isinstance(axis, int):
            elsewhere = ~np.eye(data.shape[i], data.shape[j], dtype=bool)
            if np.moveaxis(data, (i, j), (0, 1))[elsewhere].any():
                raise NotationError("it depends on other positions of the leading axes: give these axes an index")
        data = np.diagonal(data, axis1=i, axis2=j)  # the shared axis comes last
        labels = [label for place, label in enumerate(labels) if place not in (i, j)] + [(axis, "both")]
    return Named(data, tuple(axis for axis, _ in labels))


def depends(rule: Rule, scope: Scope) -> bool:
    trees = (rule.node, *(node for _, node in rule.equation.bindings))
    return any(
        node[0] == "name" and scope.resolve(node[1]) in scope.perturbed for tree in trees for node in nodes(tree)
    )

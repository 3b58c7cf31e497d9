"""The grammar of equations: text to a syntax tree, with errors that point at a column.

A tree is made of tuples. The first entry says what the node is, the rest are its parts:

- `("num", value, spelling)`: a number, π or ∞
- `("name", name, indices)`: an array with its indices, or, with no indices, a whole array or the size of an index
- `("idx", letter)`: an index letter
- `("+", a, b)` and likewise `-`, `*`, `/`, `^`, `mod`; `("neg", a)`, `("floor", a)`, `("abs", a)`, `("group", a)`
- `("call", function, arguments)`: a function of numbers, such as exp
- `("over", function, letters, body, conditions)`: a sum, mean, maximum, ... over index letters
- `("bracket", conditions)`: 1 where all conditions hold, else 0; `("delta", a, b)`: 1 where a = b, else 0
- `("cases", ((value, conditions), ...), otherwise)`
- `("partial", name, name)`: a partial derivative

A condition is a triple `(relation, a, b)`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

Node = tuple[Any, ...]
Condition = tuple[str, Node, Node]

GREEK = {
    chr(code): name
    for code, name in zip(
        [*range(0x3B1, 0x3C2), *range(0x3C3, 0x3CA)],
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi "
        "chi psi omega".split(),
        strict=True,
    )
}
GREEK |= {letter.upper(): name.capitalize() for letter, name in GREEK.items()} | {"ℓ": "ell"}
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
CALLS = ("exp", "log", "log1p", "sqrt", "tanh", "sin", "cos", "erf", "max", "min", "abs")
OVER = ("sum", "prod", "mean", "max", "min", "argmax", "softmax")
WORDS = ("with", "for", "where", "elsewhere", "mod", "and")
RELATIONS = {"<=": "≤", ">=": "≥", "!=": "≠", ":=": ":=", "=": "=", "<": "<", ">": ">", "≤": "≤", "≥": "≥", "≠": "≠"}
CONSTANTS = {"pi": (math.pi, "π"), "inf": (math.inf, "∞")}  # in ASCII
LATEX = {"sum": "Σ_i or sum_i", "frac": "a/b", "sqrt": "√(a) or sqrt(a)", "cdot": "·", "times": "·", "partial": "∂"}
LATEX |= {"hat": "x̂ or xhat", "le": "≤", "ge": "≥", "ne": "≠", "prod": "prod_i(x_i)", "mathbf": "the letter alone"}
MEANT = {  # by a text that has no meaning: what to type instead
    "#": "a comment goes in parentheses, after three spaces",
    "‖": "write a norm as √(Σ_i a_i²)",
    "∥": "write a norm as √(Σ_i a_i²)",
    "@": "write a product of matrices as a sum, as in Σ_i x_ni w_io",
    "==": 'write "="',
    ".": "no method is called here: write x.sum() as Σ_i x_i",
}
POWERS = {"²": 2, "³": 3, "⁴": 4, "⁻¹": -1}

TOKEN = re.compile(
    r"""(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?|[½π∞])
      | (?P<power>⁻¹|[²³⁴])
      | (?P<relation><=|>=|!=|:=|[=<>≤≥≠])
      | (?P<sign>\*\*|[-−+/·*^()\[\]{},|√⌊⌋Σ∂])
      | (?P<word>[^\W\d_²³⁴½]\u0302?(?:[^\W_²³⁴½]\u0302?)*)
      | (?P<underscore>_)
      | (?P<prime>['’′]+)""",
    re.VERBOSE,
)


class NotationError(ValueError):
    """An equation that cannot be read, or cannot be evaluated. `column` counts from 0, `line` from 1."""

    def __init__(self, message: str, text: str = "", column: int | None = None, line: int | None = None) -> None:
        self.message, self.text, self.column, self.line = message, text, column, line
        super().__init__(message)

    def __str__(self) -> str:
        place = "" if self.line is None else f"line {self.line}"
        if self.column is not None:
            place += ", " * bool(place) + f"column {self.column + 1}"
        shown = f"\n    {self.text}" if self.text else ""
        if shown and self.column is not None:
            shown += "\n    " + " " * width(self.text[: self.column]) + "^"
        return f"{place}: {self.message}{shown}" if place else self.message + shown


def width(text: str) -> int:
    """The number of columns that the text takes in a terminal: a combining hat takes none."""
    return sum(not unicodedata.combining(letter) for letter in text)


class Equation(NamedTuple):
    """parts[0] relations[0] parts[1] ...: two or more expressions, with a relation between neighbours."""

    parts: tuple[Node, ...]
    relations: tuple[str, ...]
    bindings: tuple[tuple[str, Node], ...] = ()  # of a "with" clause: letters and what they stand for
    conditions: tuple[Condition, ...] = ()  # of a "for" clause


class Token(NamedTuple):
    kind: str
    text: str
    column: int


def canonical(name: str) -> str:
    """The ASCII spelling of a name: γ is gamma, x̂ is xhat, t₀ is t0."""
    spelled = "".join(GREEK.get(letter, letter) for letter in unicodedata.normalize("NFD", name)).translate(SUBSCRIPTS)
    return spelled.replace("\u0302", "hat")


def tokens(text: str, names: Iterable[str]) -> Iterator[Token]:
    """The tokens of a text. `names`: known names, with underscores and dots; those of functions end in ()."""
    names = (name.removesuffix("()") for name in names if re.search(r"[_.]", name))
    compound = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    known = re.compile(rf"(?:{compound})(?![^\W_]|\.)" if compound else r"(?!)")
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        if name := known.match(text, position):
            yield Token("word", name[0], position)
            position = name.end()
            continue
        match = TOKEN.match(text, position)
        if not match or text.startswith("==", position):
            raise NotationError(without_meaning(text, position), text, position)
        kind = next(kind for kind, part in match.groupdict().items() if part is not None)
        yield Token(kind, match[0], position)
        position = match.end()
        if kind == "underscore":
            yield from letters(text, position)
            position = re.compile(r"(?:[a-z]['’′]*)*").match(text, position).end()  # type: ignore[union-attr]
    yield Token("end", "", len(text))


def without_meaning(text: str, position: int) -> str:
    """The message for what stands at a position, with what to type instead if that is known."""
    if command := re.compile(r"\\([a-zA-Z]*)").match(text, position):
        written = LATEX.get(command[1]) or (command[1] if command[1] in GREEK.values() else "")
        return f"LaTeX is not read here: for {command[0]} type {written or 'Σ_i, √(a), a/b, x̂, γ and so on'}"
    sign = "==" if text.startswith("==", position) else text[position]
    return f"{sign!r} has no meaning in an equation{': ' * (sign in MEANT)}{MEANT.get(sign, '')}"


def letters(text: str, position: int) -> Iterator[Token]:
    """The index letters after an underscore, each with its primes."""
    for match in re.compile(r"[a-z]['’′]*").finditer(text, position):
        if match.start() != position:
            return
        yield Token("letter", re.sub("[’′]", "'", match[0]), position)
        position = match.end()


class EquationParser:
    """Recursive descent over the tokens of one equation."""

    def __init__(self, text: str, names: Iterable[str] = ()) -> None:
        self.text, self.names = text, {canonical(name) for name in names}
        self.functions = {name.removesuffix("()") for name in self.names if name.endswith("()")}
        self.tokens = list(tokens(text, names))
        self.at = 0
        self.bars = 0  # open |

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def sees(self, *texts: str) -> bool:
        return self.next.text in texts and self.next.kind in ("sign", "word", "relation", "underscore")

    def accept(self, *texts: str) -> bool:
        accepted = self.sees(*texts)
        self.at += accepted
        return accepted

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f'"{text}"')

    def fail(self, expected: str, token: Token | None = None) -> Any:
        token = token or self.next
        got = f'"{token.text}"' if token.text else "the end"
        raise NotationError(f"expected {expected}, got {got}", self.text, token.column)

    def equation(self) -> Equation:
        parts, relations = [self.value()], []
        while self.next.kind == "relation":
            relations.append(RELATIONS[self.take().text])
            parts.append(self.value())
        bindings: list[tuple[str, Node]] = []
        conditions: tuple[Condition, ...] = ()
        if self.accept("with"):
            bindings.append(self.binding())
            while self.accept(","):
                bindings.append(self.binding())
        if self.accept("for"):
            conditions = self.conditions()
        if self.next.kind != "end":
            self.fail("an operator, a relation or the end")
        if not relations:
            self.fail('"="')
        equation = Equation(tuple(parts), tuple(relations), tuple(bindings), conditions)
        return self.resolve(equation, {letter for letter, _ in bindings} | set(indices_of(equation)))

    def resolve(self, tree: Any, used: set[str]) -> Any:
        """The tree with each letter on its own as a name, unless it is an index elsewhere in the equation."""
        if not isinstance(tree, tuple):
            return tree
        if tree[:1] == ("idx",):
            return tree if tree[1] in used else ("name", tree[1], ())
        parts = [self.resolve(part, used) for part in tree]
        return type(tree)(*parts) if isinstance(tree, Equation) else tuple(parts)

    def binding(self) -> tuple[str, Node]:
        token = self.take()
        if token.kind != "word" or not re.fullmatch("[a-z]", token.text):
            self.fail("an index letter", token)
        self.expect("=")
        return token.text, self.sum()

    def conditions(self) -> tuple[Condition, ...]:
        conditions = self.condition()
        while self.accept(",", "and"):
            conditions += self.condition()
        return tuple(conditions)

    def condition(self) -> list[Condition]:
        left, conditions = self.sum(), []
        if self.next.kind != "relation":
            self.fail("a relation such as ≤")
        while self.next.kind == "relation":
            relation, right = RELATIONS[self.take().text], self.sum()
            conditions.append((relation, left, right))
            left = right
        return conditions

    def value(self) -> Node:
        """A sum, or cases: `a where condition, b elsewhere`."""
        first = self.sum()
        if not self.accept("where"):
            return first
        cases = [(first, self.one_condition())]
        while True:
            self.expect(",")
            value = self.sum()
            if self.accept("elsewhere"):
                return "cases", tuple(cases), value
            if not self.accept("where"):
                self.fail('"where" or "elsewhere"')
            cases.append((value, self.one_condition()))

    def one_condition(self) -> tuple[Condition, ...]:
        conditions = self.condition()
        while self.accept("and"):
            conditions += self.condition()
        return tuple(conditions)

    def sum(self) -> Node:
        node = ("neg", self.product()) if self.accept("-", "−") else self.product()
        while self.sees("+", "-", "−"):
            sign = self.take().text.replace("−", "-")
            node = (sign, node, self.product())
        return node

    def product(self) -> Node:
        node = self.factor()
        while True:
            if self.accept("/"):
                node = ("/", node, self.factor())
            elif self.accept("·", "*"):
                node = ("*", node, self.factor())
            elif self.accept("mod"):
                node = ("mod", node, self.factor())
            elif self.starts_factor():
                node = ("*", node, self.factor())
            else:
                return node

    def starts_factor(self) -> bool:
        if self.next.kind == "number":
            return True
        if self.next.kind == "word":
            return self.next.text not in WORDS
        return self.sees("(", "[", "⌊", "√", "Σ", "∂") or (self.sees("|") and not self.bars)

    def factor(self) -> Node:
        node = self.base()
        if self.next.kind == "power":
            token = self.take()
            return "^", node, ("num", POWERS[token.text], token.text)
        if self.accept("^", "**"):
            return "^", node, ("neg", self.base()) if self.accept("-", "−") else self.base()
        return node

    def base(self) -> Node:
        token = self.take()
        if token.text in CONSTANTS and token.text not in self.names and not self.sees("_"):
            return "num", CONSTANTS[token.text][0], CONSTANTS[token.text][1]
        if token.kind == "number":
            value = {"½": 0.5, "π": math.pi, "∞": math.inf}.get(token.text)
            return "num", float(token.text) if value is None else value, token.text
        if token.kind == "word" and token.text not in WORDS:
            return self.word(token)
        if token.kind == "sign":
            if token.text == "(":
                node = self.value()
                self.expect(")")
                return "group", node
            if token.text == "[":
                conditions = self.conditions()
                self.expect("]")
                return "bracket", conditions
            if token.text == "⌊":
                node = self.sum()
                self.expect("⌋")
                return "floor", node
            if token.text == "|" and not self.bars:
                self.bars += 1
                node = self.sum()
                self.bars -= 1
                self.expect("|")
                return "abs", node
            if token.text == "√":
                node = self.factor()
                return "call", "sqrt", (node[1] if node[0] == "group" else node,)
            if token.text == "Σ":
                return self.over("sum")
            if token.text == "∂":
                return self.partial()
        return self.fail('a number, a name, "(", "[" or Σ', token)

    def word(self, token: Token) -> Node:
        name = token.text
        known = canonical(name) in self.names
        if not known and name in OVER and self.sees("_"):
            return self.over(name)
        called = name in (*CALLS, "floor") or canonical(name) in self.functions
        if called and not self.sees("_") and (not known or self.sees("(")):  # an array may be called cos
            self.expect("(")
            arguments = [self.value()]
            while self.accept(","):
                arguments.append(self.value())
            self.expect(")")
            if name in (*CALLS, "floor") and (count := len(arguments)) != (2 if name in ("max", "min") else 1):
                raise NotationError(f"{name} has {count} arguments", self.text, token.column)
            return (name, arguments[0]) if name in ("abs", "floor") else ("call", name, tuple(arguments))
        if not known and name in OVER and self.sees("("):
            example = f"{name}_i(x_i)"
            raise NotationError(f"{name} needs the index that it runs over, as in {example}", self.text, token.column)
        if not known and name == "partial":
            return self.partial()
        return self.indexed(token)

    def indexed(self, token: Token) -> Node:
        if self.next.kind == "prime" and (len(token.text) > 1 or self.tokens[self.at + 1].kind == "underscore"):
            said = f"a prime marks an index, as in i', and no derivative: write d{token.text}, or a name of its own"
            raise NotationError(said, self.text, self.next.column)
        name, indices = canonical(token.text), self.indices() if self.accept("_") else ()
        if len(indices) == 2 and name in ("delta", "d") and name not in self.names:
            return "delta", *indices
        if not indices and re.fullmatch("[a-z]", name):
            return self.primed(name)  # an index or a name, see `resolve`
        return "name", name, indices

    def primed(self, letter: str) -> Node:
        if self.next.kind == "prime":
            letter += "'" * len(self.take().text)
        return "idx", letter

    def indices(self) -> tuple[Node, ...]:
        if self.accept("{"):
            indices = [self.sum()]
            while self.accept(","):
                indices.append(self.sum())
            self.expect("}")
            return tuple(indices)
        indices = []
        while self.next.kind == "letter":
            indices.append(("idx", self.take().text))
        return tuple(indices) or self.fail("an index: lower-case letters, or anything in braces")

    def over(self, function: str) -> Node:
        """A sum over `_s`, `_{s,t}` or `_{s ≤ t}`; for functions other than Σ the body is in parentheses."""
        if not self.accept("_"):
            self.fail('"_" and the index that it runs over')
        letters: list[str] = []
        conditions: list[Condition] = []
        if self.accept("{"):
            while True:
                start = self.next
                node = self.sum()
                if self.next.kind == "relation":
                    relation, right = RELATIONS[self.take().text], self.sum()
                    conditions.append((relation, node, right))
                    while self.next.kind == "relation":
                        node, relation, right = right, RELATIONS[self.take().text], self.sum()
                        conditions.append((relation, node, right))
                elif node[0] == "idx":
                    letters.append(node[1])
                else:
                    self.fail("an index letter or a condition", start)
                if not self.accept(","):
                    break
            self.expect("}")
            if not letters:
                letters = [next(letters_in(conditions), "")]
                if not letters[0]:
                    self.fail("a condition on an index letter", start)
        else:
            letters = [self.take().text for _ in iter(lambda: self.next.kind == "letter", False)]
            if not letters:
                self.fail("an index letter")
        if function == "sum":
            # In ASCII a sum may carry its body in parentheses, as a call would: the product goes on after it.
            body = self.product()
        else:
            self.expect("(")
            body = self.value()
            self.expect(")")
        return "over", function, tuple(letters), body, tuple(conditions)

    def partial(self) -> Node:
        of = self.indexed(self.take())
        self.expect("/")
        if not self.accept("∂", "partial"):
            self.fail('"∂"')
        by = self.indexed(self.take())
        return "partial", of, by


def indices_of(tree: Any) -> Iterator[str]:
    """The letters that a tree uses as indices, or sums over."""
    for node in walk(tree):
        if node[0] == "name":
            yield from letters_in(node[2])
        elif node[0] == "over":
            yield from node[2]
        elif node[0] == "delta":
            yield from letters_in(node[1:])


def letters_in(tree: Any) -> Iterator[str]:
    """All index letters of a tree, in the order of reading."""
    if isinstance(tree, tuple | list):
        if len(tree) == 2 and tree[0] == "idx":
            yield tree[1]
        else:
            for part in tree:
                yield from letters_in(part)


def parse(text: str, names: Iterable[str] = ()) -> Equation:
    """The syntax tree of an equation.

    names: names that are known, which may contain underscores, and of which a single lower-case letter is an array and
    not an index. A name that ends with "()" is a function of whole arrays. Raises NotationError, which points at a
    column and says what was expected.
    """
    return _parse(text, frozenset(names))


@lru_cache(4096)  # a derivation is read again for each run that it is checked on
def _parse(text: str, names: frozenset[str]) -> Equation:
    try:
        return EquationParser(text, names).equation()
    except RecursionError:
        raise NotationError("too many parentheses inside one another", text) from None


def walk(node: Any) -> Iterator[Node]:
    """A node and all nodes below it, parents first."""
    left = [node] if isinstance(node, tuple) else []
    while left:
        node = left.pop()
        if node and isinstance(node[0], str):
            yield node
        left += [part for part in reversed(node) if isinstance(part, tuple)]


def rebuilt(tree: Any, change: Callable[[Node], Any]) -> Any:
    """A tree with `change` of each of its nodes, children first."""
    if not isinstance(tree, tuple):
        return tree
    parts = tuple([rebuilt(part, change) for part in tree])
    return change(parts) if parts and isinstance(parts[0], str) else parts

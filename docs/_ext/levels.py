"""Two levels of each derivation: a plain one, and the whole, which includes optional features such as a mask.

The `Extension` in an operation's entry says what the plain level omits: it fixes certain names to constants, drops
certain index letters and the sentences about them, and simplifies the equations. Both levels are checked numerically.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from reports import executed, items

from scratchformer.catalogue import DerivationCase, Extension, Mistake, Sizes, entries_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.notation import DerivationReport, DerivationRow, DerivationText, Equation, Item, NotationError, parse
from scratchformer.notation.check import walk_through
from scratchformer.notation.grammar import Condition, Node, canonical, letters_in, rebuilt, walk
from scratchformer.notation.spelling import spelled
from scratchformer.notation.walk import TOLERANCE

ZERO, ONE = ("num", 0.0, "0"), ("num", 1.0, "1")
GONE = ("num", 0.0, "")  # an index that is not written; where it is a number, it is 0
SENTENCE = re.compile(r"(?<=[.)])\s+(?=\(?[A-Z])")
INDICES = re.compile(r"(?<![\w`])([^\W_]+)_([a-z]{2,4})\b")  # of a name in prose
COMPARE = dict(
    zip("=≠<>≤≥", (operator.eq, operator.ne, operator.lt, operator.gt, operator.le, operator.ge), strict=True)
)


class Without(NamedTuple):
    """What a level omits: names with fixed values, index letters, and the words that mark sentences about them."""

    values: dict[str, Node]
    letters: frozenset[str]
    words: re.Pattern[str] | None


WHOLE = Without({}, frozenset(), None)


def extension(name: str) -> Extension | None:
    """What the page of an operation leaves out at first."""
    return next((entry.extended for entry in entries_of("operations") if entry.name == name), None)


def levels(name: str) -> list[Without]:
    """What each level leaves out: the plain one, if there is one, and the whole."""
    extended = extension(name)
    return [WHOLE] if extended is None else [without(extended), WHOLE]


def without(extended: Extension) -> Without:
    values = {canonical(n): value_of(v) for n, v in extended.values.items()}
    letters = {*extended.letters}
    letters |= {name for name, value in values.items() if value[0] == "idx" and value[1] in letters}
    return Without(values, frozenset(letters), re.compile(rf"\b(?:{extended.words})", re.IGNORECASE))


def value_of(text: str) -> Node:
    """A number, a size, or an index letter."""
    return ("idx", text) if re.fullmatch("[a-z]", text) else parse(f"{text} = 0").parts[0]


def case_at(name: str, left_out: Without, draw: Sizes) -> DerivationCase:
    """Arguments for one level. Changes `draw`: an omitted axis gets size 1, a size fixed to another one equals it."""
    draw.__dict__ |= {letter.upper(): 1 for letter in left_out.letters}
    for size, value in left_out.values.items():
        if is_size(value):
            draw.__dict__ |= dict.fromkeys((size, value[1]), getattr(draw, value[1]))
    return CASES[name](draw)


def checked_without(case: DerivationCase, left_out: Without) -> DerivationReport:
    """The checked derivation of a level. Raises DerivationError where it is not true."""
    ran, derivation = executed(case)
    return walk_through(reduced(derivation, left_out), ran, TOLERANCE)


def reduced(derivation: DerivationText, left_out: Without) -> DerivationText:
    """A derivation without what a level leaves out."""
    if left_out.words is None:
        return derivation
    items = list(remaining(derivation.items, left_out))
    dropped = {item.equation.parts[0][1] for item in derivation.equations if item.equation and item not in items}
    dropped -= {item.equation.parts[0][1] for item in items if item.equation}
    return derivation._replace(items=tuple(simplified_items(items, left_out, dropped)))


def remaining(items: Iterable[Item], left_out: Without) -> Iterator[Item]:
    """The items without sentences about omitted things; what follows a paragraph of nothing else is dropped too."""
    hidden = False
    for item in items:
        if item.kind == "prose":
            text = sentences(item.text, left_out)
            hidden = not text
            item = item._replace(text=text)
        if not hidden:
            yield item


def sentences(text: str, left_out: Without) -> str:
    """A paragraph without the sentences that contain an omitted word. A colon at its end stays at its end."""
    parts, words = SENTENCE.split(text), left_out.words
    kept = [part for part in parts if not words or not words.search(part) or part.startswith("Source:")]
    if len(kept) < len(parts):
        shown = " ".join(kept)
        text = shown.removesuffix(".") + ":" if shown.endswith(".") and text.endswith(":") else shown
    return INDICES.sub(lambda m: f"{m[1]}_{''.join(letter_without(c, left_out) for c in m[2])}", text)


def letter_without(letter: str, left_out: Without) -> str:
    return "" if letter in left_out.letters else left_out.values.get(letter, (0, letter))[1]


def simplified_items(items: Iterable[Item], left_out: Without, unknown: set[str]) -> Iterator[Item]:
    """The items with their equations simplified; a comment on one that is gone goes too."""
    gone = False
    for item in items:
        if item.equation is None:
            if not (gone and item.kind == "comment"):
                yield item
            continue
        equation = simplified(item.equation, left_out, unknown)
        gone = equation is None
        if equation is not None:
            same = equation == item.equation
            yield item if same else item._replace(equation=equation, text=spelled(equation))


def simplified(equation: Equation, left_out: Without, unknown: Collection[str] = ()) -> Equation | None:
    """The equation without what is left out, or None if it says nothing then. unknown: names that nothing defines."""
    values, letters, _ = left_out
    if equation.parts[0][0] == "name" and equation.parts[0][1] in values:
        return None
    tree = Equation(*(rebuilt(part, lambda node: changed(node, values, letters)) for part in equation))
    same = {name: node for name, node in (*values.items(), *tree.bindings) if node[0] == "idx"}
    tree = Equation(*(renamed(part, same) for part in tree))
    bindings = tuple((letter, node) for letter, node in tree.bindings if letter not in letters and letter not in same)
    first, *others = tree.parts
    parts, relations = [first], []
    for relation, part in zip(tree.relations, others, strict=True):
        if part != parts[-1] and not any(node[0] == "name" and node[1] in unknown for node in walk(part)):
            parts.append(part)
            relations.append(relation)
    conditions = tuple(clause for clause in tree.conditions if truth(clause) is not True)
    used = {letter for part in (*parts, *conditions) for letter in letters_in(part)}
    bindings = tuple((letter, node) for letter, node in bindings if letter in used)
    return Equation(tuple(parts), tuple(relations), bindings, conditions) if relations else None


def renamed(tree: Any, same: dict[str, Node]) -> Any:
    """A tree with other index letters, which keep their primes."""

    def change(node: Node) -> Node:
        if node[0] != "idx" or (letter := node[1].rstrip("'")) not in same:
            return node
        return "idx", same[letter][1] + node[1][len(letter) :]

    return rebuilt(tree, change)


def changed(node: Node, values: dict[str, Node], letters: frozenset[str]) -> Node:
    """A node whose parts are simplified already."""
    kind, *parts = node
    if kind == "idx":
        return GONE if parts[0].rstrip("'") in letters else node
    if kind == "name":
        indices = tuple(index for index in parts[1] if index != GONE)
        return values.get(parts[0], ("name", parts[0], indices))
    if kind == "over":
        return without_letters(node, letters)
    if kind == "bracket":
        clauses = open_clauses(parts[0])
        return ZERO if clauses is None else ("bracket", clauses) if clauses else ONE
    if kind == "cases":
        return first_case(*parts)
    if kind == "floor" and parts[0][0] == "idx":
        return parts[0]
    if kind == "group" and parts[0][0] in ("num", "name", "group", "bracket"):
        return parts[0]
    if kind == "call" and parts[0] == "max" and ONE in parts[1]:
        (other,) = [argument for argument in parts[1] if argument != ONE] or [ONE]
        return other if is_size(other) or other == ONE else node
    return arithmetic(node)


def without_letters(node: Node, letters: frozenset[str]) -> Node:
    """A sum over what remains of its letters and conditions. A sum of ones is a number of them."""
    _, function, over, body, clauses = node
    clauses = tuple(c for c in clauses if truth(c) is not True and GONE not in walk(c))
    over = tuple(letter for letter in over if letter.rstrip("'") not in letters)
    for clause in clauses:  # that leaves one term
        relation, a, b = clause
        if relation == "=" and a[0] == b[0] == "idx" and a[1] in over:
            over = tuple(letter for letter in over if letter != a[1])
            clauses = tuple(c for c in clauses if c is not clause)
            body = renamed(body, {a[1]: b})
    if not over and not clauses:
        return body
    if function == "sum" and body == ONE and len(over) == 1 and not clauses:
        return "name", over[0].rstrip("'").upper(), ()
    return "over", function, over, body, clauses


def first_case(cases: tuple, otherwise: Node) -> Node:
    open_cases = []
    for value, clauses in cases:
        still = open_clauses(clauses)
        if still == ():
            otherwise = value
            break
        if still:
            open_cases.append((value, still))
    return ("cases", tuple(open_cases), otherwise) if open_cases else otherwise


def open_clauses(clauses: tuple[Condition, ...]) -> tuple[Condition, ...] | None:
    """Those of which it depends whether they hold; None if one cannot."""
    known = [truth(clause) for clause in clauses]
    return None if False in known else tuple(c for c, true in zip(clauses, known, strict=True) if true is None)


def truth(clause: Condition) -> bool | None:
    """Whether a condition holds; None if that depends."""
    relation, a, b = clause
    if a[0] == b[0] == "num":
        return bool(COMPARE[relation](a[1], b[1]))
    if is_size(a) and b in (ZERO, ONE):
        return True if relation == "≥" or (relation, b) == (">", ZERO) else None
    if relation == "<" and a[0] == "idx" and b == ("name", a[1].rstrip("'").upper(), ()):
        return True
    return True if a == b and relation in "=≤≥" else None


def is_size(node: Node) -> bool:
    return node[0] == "name" and not node[2] and bool(re.fullmatch("[A-Z]", node[1]))


def arithmetic(node: Node) -> Node:
    """The rules for 0 and 1."""
    kind, *parts = node
    if kind == "neg":
        return ZERO if parts[0] == ZERO else node
    if kind not in ("+", "-", "*", "/"):
        return node
    a, b = (ZERO if part == GONE else part for part in parts)
    if kind == "*":
        return ZERO if ZERO in (a, b) else b if a == ONE else a if b == ONE else node
    if kind == "/":
        return ZERO if a == ZERO else a if b == ONE else a[1] if a[0] == "*" and a[2] == b else node
    return a if b == ZERO else b if a == ZERO and kind == "+" else node


class Form(NamedTuple):
    """An item of a derivation as it is at some levels."""

    item: Item
    row: DerivationRow | None
    levels: list[int]


@cache
def forms(name: str) -> dict[tuple[int, int], list[Form]]:
    """The forms of each item of an operation's derivation, by its line and column in the docstring, in order."""
    found = {(item.line, item.column): [Form(item, row, [])] for item, row in items(name)}
    for number, left_out in enumerate(levels(name)):
        report = checked_without(case_at(name, left_out, Sizes()), left_out)
        for item in report.derivation.items:
            known = found[item.line, item.column]
            form = next((form for form in known if form.item.text == item.text), None)
            if form is None:
                row = next((row for row in report.rows if (row.line, row.text) == (item.line, item.text)), None)
                known.append(form := Form(item, row, []))
            form.levels.append(number)
    return found


def mistake_at(mistake: Mistake, left_out: Without, names: Collection[str]) -> tuple[Equation, Equation] | None:
    """The right and the wrong equation of a mistake at a level; None if it is about what the level leaves out."""
    if left_out.words and left_out.words.search(f"{mistake.title}. {mistake.effect}"):
        return None
    try:
        both = (parse(text, names) for text in (mistake.equation, mistake.wrong))
    except NotationError:
        return None
    right, wrong = (simplified(equation, left_out) for equation in both)
    return None if right is None or wrong is None or right == wrong else (right, wrong)

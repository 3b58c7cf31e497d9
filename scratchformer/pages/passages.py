"""A docstring as a reader sees it: prose with mathematics, equations with their measured errors, code, pictures."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from textwrap import dedent
from typing import Any, NamedTuple

from ..notation import DerivationReport, DerivationRow, Item, NotationError
from ..notation.grammar import CALLS, OVER, canonical, walk
from ..notation.layout import normal
from ..shell.source import syntax_tree
from .live import is_short_name
from .mathml import mathml

FUNCTIONS = frozenset((*CALLS, *OVER, "Sigma", "with", "mod"))
LIST_ITEM = re.compile(r"- |\d+\. ")
NEW = re.compile(rf"{LIST_ITEM.pattern}|Source( of [\w ]+)?: ")  # begins a paragraph without an empty line above it
BEGINNINGS = ("Forward", "Backward", "Where it comes from")  # of the derivation in a docstring
CheckedItem = tuple[Item, DerivationRow | None]


class Passage(NamedTuple):
    """kind: "prose", "equation", "code", "picture" or "text" (anything else that is indented).

    comment: beside an equation. row: of an equation or a line of code, the row of the report. item: the number
    of an equation that is as in the docstring.
    """

    kind: str
    text: str
    comment: str = ""
    row: DerivationRow | None = None
    item: int | None = None


def items_of(reports: Iterable[DerivationReport]) -> tuple[CheckedItem, ...]:
    """The items of a derivation from top to bottom, each with its row of the largest error, if it has one.

    reports: of the same derivation with different arguments.
    """
    by_place: dict[tuple[int, int], CheckedItem] = {}
    for report in reports:
        for item in report.derivation.items:
            place = item.line, item.column
            rows = [row for row in report.rows if row.line == item.line and normal(row.text) == normal(item.text)]
            if place in by_place and (before := by_place[place][1]):
                rows.append(before)
            by_place[place] = item, max(rows, key=lambda row: row.error or 0, default=None)
    return tuple(by_place[place] for place in sorted(by_place))


def names_of(reports: Iterable[DerivationReport]) -> frozenset[str]:
    """The names that occur in a derivation, in ASCII."""
    equations = (item.equation for item, _ in items_of(reports) if item.equation)
    nodes = (node for equation in equations for part in equation.parts for node in walk(part))
    known = (known for report in reports for known in report.values)
    return frozenset(known) | {node[1] for node in nodes if node[0] == "name"}


def passages(items: Iterable[CheckedItem]) -> list[Passage]:
    """The paragraphs, equations, lines of code and pictures of a checked derivation."""
    parts: list[Passage] = []
    for number, (item, row) in enumerate(items):
        if item.kind == "comment" and parts[-1].kind == "equation":
            parts[-1] = parts[-1]._replace(comment=item.text)
        else:
            parts += passages_of(item, row, number)
    return parts


def passages_of(item: Item, row: DerivationRow | None, number: int | None) -> list[Passage]:
    """An item of a derivation as passages. number: of the item, if it is as in the docstring."""
    if item.kind == "prose":
        return [unchecked(text) for text in paragraphs(item.text.splitlines())]
    if item.kind == "equation":
        comment = "the name in the code" if item.equation and is_short_name(item.equation) else ""
        return [Passage("equation", " ".join(item.text.split()), comment, row, number)]
    text = dedent(item.text)
    text = re.sub("^[|] ?", "", text, flags=re.MULTILINE) if item.kind == "picture" else text
    return [Passage(item.kind, text, row=row)]


def before_derivation(parts: list[Passage]) -> int:
    """How many of the passages say what an operation is, before its derivation begins."""
    return next((i for i, part in enumerate(parts) if part.text.startswith(BEGINNINGS)), len(parts))


def unchecked(text: str) -> Passage:
    if text.startswith("| "):
        return Passage("picture", re.sub("^[|] ", "", text, flags=re.MULTILINE))
    if not text.startswith("    "):
        return Passage("prose", text)
    text = dedent(text)
    return Passage("code" if is_code(text) else "text", text)


def paragraphs(lines: Iterable[str]) -> list[str]:
    """The lines, cut at empty lines, before items of a list and sources, and where indentation begins or ends."""
    parts: list[str] = []
    start = True
    for line in lines:
        indented = line.startswith("    ")
        if line.strip():
            if start or indented != parts[-1].startswith("    ") or NEW.match(line):
                parts.append(line)
            else:
                parts[-1] += "\n" + line
        start = not line.strip()
    return parts


def label(row: DerivationRow) -> str:
    """What stands beside an equation or a line of code."""
    if row.error is None:
        return "defined" if row.kind == "defines" else ""
    return f"{row.error:.0e}" if row.error else "0"


def spans(text: str, known: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """A paragraph in pieces: "code" in backquotes, "math" in known names, and "text"."""
    for part in re.split(r"(`[^`]+`)", " ".join(text.split())):
        if part.startswith("`") and len(part) > 1:
            yield "code", part[1:-1]
        else:
            yield from words_and_mathematics(part, frozenset(known))


def words_and_mathematics(text: str, known: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Prose without backquotes, in which the longest pieces that are expressions in known names are mathematics."""
    words, at = re.findall(r"\s*\S+|\s+$", text), 0
    while at < len(words):
        length, pieces = expression(words[at:], known) if known else (0, [])
        yield from pieces or [("text", words[at])]
        at += length or 1


def expression(words: list[str], known: frozenset[str]) -> tuple[int, list[tuple[str, str]]]:
    """How many of the first words are an expression, and the expression, with the text around it."""
    equals = len(words) > 1 and words[1].strip() == "=" and is_mathematics(words[0], known)
    if not equals and not re.search(r"_[a-z]|[Σ∂√α-ω\u0302]", words[0]):
        return 0, []
    last = next((i for i, word in enumerate(words) if not is_mathematics(word, known)), len(words))
    for count in range(last, 0, -1):
        text = "".join(words[:count])
        core = text.strip()
        before = core[: len(core) - len(core.lstrip("("))] if core.count("(") > core.count(")") else ""
        core = core[len(before) :]
        closing = core.count(")") > core.count("(")
        end = re.search(r"\)?[.,:;]*$" if closing else r"[.,:;]*$", core)
        after = end[0] if end else ""
        core = core[: len(core) - len(after)].rstrip()
        if words[count - 1].strip() == "a" and not re.search(r"[-−+/·=]$", words[count - 2].strip()):
            continue  # the article
        try:
            mathml(core, known)
        except NotationError:
            continue
        space = text[: len(text) - len(text.lstrip())]
        return count, [("text", space + before), ("math", core), ("text", after)]
    return 0, []


def is_mathematics(word: str, known: frozenset[str]) -> bool:
    """Whether every run of letters in a word is a known name, a function, an index or a size."""
    runs = re.findall(r"[^\W\d_][\w\u0302']*", word.strip())
    return all(len(run) == 1 or run in FUNCTIONS or canonical(run.split("_")[0]) in known | FUNCTIONS for run in runs)


def is_code(text: str) -> bool:
    """Whether the text is Python that does something, or an example of the interpreter."""
    if text.startswith(">>>"):
        return True
    try:
        statements = syntax_tree(text).body
    except SyntaxError:
        return False
    return all(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in statements)


def equation_id(name: str, item: int) -> str:
    """The anchor of an equation of a derivation on its page."""
    return f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}-equation-{item}"


def source_without_docstring(function: Any) -> str:
    """The source of a function, without the docstring, which the page has already."""
    source = dedent(inspect.getsource(function)).rstrip()
    definition = syntax_tree(source).body[0]
    first = definition.body[0] if isinstance(definition, ast.FunctionDef) else None
    lines = source.splitlines()
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        del lines[first.lineno - 1 : first.end_lineno]
    return "\n".join(lines)

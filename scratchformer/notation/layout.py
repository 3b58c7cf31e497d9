"""The layout of a docstring: what is prose, a picture, code or an equation.

Text at the margin is prose. In an indented block, a line that begins with `| ` is a picture, `>>>` starts an example, a
line that is word for word in the code is code, and everything else is equations. Three or more spaces separate the
equations of one line; after an equation, a piece in parentheses is a comment. A line that begins with a relation or an
operator continues the equation above it, and so does the line after one that ends with a comma.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from .grammar import CALLS, OVER, Equation, NotationError, parse

DEFINED = re.compile(r"(?<!\S)(\w\S*?)(?:_(?:(?:[a-z]['’′]*)+|\{[^}]*\}))?\s*:=")  # a name, and its indices
PICTURE = re.compile(r"\s*\|(\s|$)")  # |x| < 1 is an equation
CONTINUED = re.compile(r"(:=|<=|>=|[=≤≥<>+−·/*]|-(?!\d))")


class Item(NamedTuple):
    """A piece of a derivation. kind: "prose", "picture", "code", "equation" or "comment"."""

    kind: str
    text: str
    line: int  # of the docstring, from 1
    column: int = 0
    equation: Equation | None = None


class DerivationText(NamedTuple):
    """A docstring that derives something, as its items."""

    name: str
    items: tuple[Item, ...]

    @property
    def equations(self) -> list[Item]:
        return [item for item in self.items if item.kind == "equation"]

    def replace(self, number: int, equation: Equation) -> DerivationText:
        """The derivation with another equation in place of the one with this number, counted from 0."""
        place = [i for i, item in enumerate(self.items) if item.kind == "equation"][number]
        items = list(self.items)
        items[place] = items[place]._replace(equation=equation)
        return self._replace(items=tuple(items))


def read(
    docstring: str,
    names: Iterable[str] = (),
    code: Collection[str] = (),
    name: str = "",
    margin: int | None = None,
) -> DerivationText:
    """The items of a docstring.

    names: known names, see `parse`. Names that `:=` defines are known too: they may contain underscores, and with
    `δ_ts := …` δ is a name. code: the statements of the operation and its backward, white space normalised. margin: the
    column of the text that is not indented, by default that of the least indented line. Raises NotationError with the
    line and column of what cannot be read.
    """
    names = [*names, *(match[1] for match in DEFINED.finditer(docstring) if match[1] not in (*CALLS, *OVER))]
    lines = dedented(docstring, margin)
    return DerivationText(name, tuple(parsed(item, names, lines) for item in items(lines, code)))


def dedented(docstring: str, margin: int | None) -> list[str]:
    """The lines of a docstring without its margin, and without empty lines before and after."""
    first, *rest = docstring.expandtabs().rstrip().splitlines() or [""]
    if margin is None:
        margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    lines = [first.lstrip(), *(line[margin:] if not line[:margin].strip() else line.lstrip() for line in rest)]
    while lines and not lines[0].strip():
        del lines[0]
    return lines


def normal(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def items(lines: list[str], code: Collection[str] = ()) -> Iterator[Item]:
    """The items of these lines; the equations are not parsed yet."""
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        at += 1
        if not line.strip():
            continue
        if not line.startswith("    "):
            while at < len(lines) and lines[at].strip() and not lines[at].startswith("    "):
                at += 1
            yield Item("prose", "\n".join(lines[start:at]), start + 1)
        elif PICTURE.match(line):
            while at < len(lines) and PICTURE.match(lines[at]):
                at += 1
            yield Item("picture", "\n".join(lines[start:at]), start + 1)
        elif line.lstrip().startswith(">>>"):
            while at < len(lines) and lines[at].strip():
                at += 1
            yield Item("code", "\n".join(lines[start:at]), start + 1)
        elif normal(line) in code:
            yield Item("code", line.strip(), start + 1)
        else:
            while at < len(lines) and lines[at].startswith("    ") and continues(lines[at], lines[at - 1]):
                at += 1
            yield from pieces(lines[start:at], start + 1)


def continues(line: str, above: str) -> bool:
    return above.rstrip().endswith(",") or bool(CONTINUED.match(line.lstrip()))


def pieces(lines: list[str], number: int) -> list[Item]:
    """The equations and comments of a line and the lines that continue it."""
    items: list[Item] = []
    for extra, line in enumerate(lines):
        for match in re.finditer(r"\S+(?: {1,2}\S+)*", line):
            text, column = match[0], match.start()
            if items and text.startswith("(") and text.endswith(")") and match.start() > len(line) - len(line.lstrip()):
                items.append(Item("comment", text[1:-1], number + extra, column))
            elif extra and column == len(line) - len(line.lstrip()):
                last = max(i for i, item in enumerate(items) if item.kind == "equation")
                items[last] = items[last]._replace(text=items[last].text + "\n" + " " * 4 + text)
            else:
                items.append(Item("equation", text, number + extra, column))
    return items


def parsed(item: Item, names: Iterable[str], lines: list[str]) -> Item:
    """The item with its equation, if it is one; an error points at its place in the lines of the docstring."""
    if item.kind != "equation":
        return item
    try:
        return item._replace(equation=parse(item.text.replace("\n", " "), names))
    except NotationError as error:
        before = item.text[: error.column or 0].split("\n")
        place, column = item.line - 1, item.column
        while len(before) > 1:  # a line that was joined to the one above it, with four spaces between
            place += 1
            del before[0]
            column = len(lines[place]) - len(lines[place].lstrip()) - 4
        raise NotationError(error.message, lines[place], column + len(before[0]), place + 1) from None

"""Docstrings as the site shows them: prose, equations with their measured errors, code and pictures."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from textwrap import dedent, indent
from typing import Any, NamedTuple

import scratchformer
from sphinx.application import Sphinx

MODULES = ("data", "generation", "models", "nn", "ops", "optim", "testing", "training")
PUBLIC = {  # the names in backquotes that are links, and where they lead
    spelling: f"scratchformer.{module}.{name}"
    for module in MODULES
    for name in getattr(scratchformer, module).__all__
    for spelling in (name, f"{module}.{name}")
}
LIST_ITEM = re.compile(r"- |\d+\. ")


class Piece(NamedTuple):
    """kind: "prose", "code", "picture" or "text" (anything else that is indented)."""

    kind: str
    text: str


def typeset(docstring: str) -> str:
    """A docstring as reStructuredText."""
    return "\n\n".join(rendered(piece) for piece in pieces(docstring)) + "\n"


def rendered(piece: Piece) -> str:
    if piece.kind == "prose":
        return prose(piece.text)
    return block("python" if piece.kind == "code" else "text", piece.text)


def pieces(docstring: str) -> Iterator[Piece]:
    """The paragraphs and indented blocks of a docstring."""
    for text in paragraphs(inspect.cleandoc(docstring).splitlines()):
        if not text.startswith("    "):
            yield Piece("prose", text)
        else:
            text = dedent(text)
            yield Piece("code" if is_code(text) else "text", text)


def paragraphs(lines: Iterable[str]) -> list[str]:
    """The lines, cut at empty lines, before the items of a list, and where the indentation of blocks begins or ends."""
    found: list[str] = []
    start = True
    for line in lines:
        indented = line.startswith("    ")
        if line.strip():
            if start or indented != found[-1].startswith("    ") or LIST_ITEM.match(line):
                found.append(line)
            else:
                found[-1] += "\n" + line
        start = not line.strip()
    return found


def prose(text: str) -> str:
    """A paragraph as reStructuredText, with links for public names in backquotes."""
    bullet = LIST_ITEM.match(text)
    mark, text = (bullet[0], text[bullet.end() :]) if bullet else ("", text)
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return mark + "".join(quoted(part[1:-1]) if part.startswith("`") else escaped(part) for part in parts)


def escaped(text: str) -> str:
    return re.sub(r"^(?=\(?(\w|#)+[.)] )", r"\\ ", re.sub(r"([\\*|_`])", r"\\\1", text))


def quoted(name: str) -> str:
    if name in PUBLIC:
        return rf"\ :py:obj:`{name} <{PUBLIC[name]}>`\ "
    return rf"\ ``{name}``\ "


def is_code(text: str) -> bool:
    """Whether the text is Python that does something, or an example of the interpreter."""
    if text.startswith(">>>"):
        return True
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    return all(not isinstance(s, ast.Expr) or isinstance(s.value, ast.Call) for s in statements)


def block(language: str, text: str) -> str:
    return directive("code-block", language, text)


def directive(name: str, argument: str = "", content: str = "", **options: str) -> str:
    lines = [f".. {name}:: {argument}".rstrip(), *(f"   :{key}: {value}" for key, value in options.items())]
    return "\n".join(lines) + (f"\n\n{indent(content, '   ')}" if content else "")


def heading(text: str, line: str = "-") -> str:
    return f"{text}\n{line * len(text)}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = []
    for row in (header, *rows):
        lines += [f"{'*' if first else ' '} - {cell}" for first, cell in zip([True, *[False] * 9], row)]
    return directive("list-table", "", "\n".join(lines), **{"header-rows": "1"})


def process(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = typeset("\n".join(lines)).splitlines()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Docstrings as the site shows them: prose, equations, code and pictures, for pages and for the API reference."""

from __future__ import annotations

import ast
import inspect
import re
from textwrap import dedent, indent

import scratchformer
from sphinx.application import Sphinx

MODULES = ("data", "generation", "models", "nn", "ops", "optim", "testing", "training")
PUBLIC = {  # the names in backquotes that are links, and where they lead
    spelling: f"scratchformer.{module}.{name}"
    for module in MODULES
    for name in getattr(scratchformer, module).__all__
    for spelling in (name, f"{module}.{name}")
}


def paragraphs(docstring: str) -> list[tuple[bool, str]]:
    """The docstring cut where prose ends and an indented block begins, and at empty lines: (is it indented, text)."""
    found: list[tuple[bool, list[str]]] = []
    new = True
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.strip():
            new = True
            continue
        indented = line.startswith("    ")
        if new or found[-1][0] != indented or (not indented and line.startswith("- ")):
            found.append((indented, []))
        found[-1][1].append(line)
        new = False
    return [(indented, dedent("\n".join(lines))) for indented, lines in found]


def prose(text: str) -> str:
    """A paragraph as reStructuredText, with links for public names in backquotes."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(quoted(part[1:-1]) if part.startswith("`") else escape(part) for part in parts)


def escape(text: str) -> str:
    return re.sub(r"^(?=\(?(\w|#)+[.)] )", r"\\ ", re.sub(r"([\\*|_`])", r"\\\1", text))


def quoted(name: str) -> str:
    if name in PUBLIC:
        return rf":py:obj:`{name} <{PUBLIC[name]}>`\ "
    return rf"``{name}``\ "


def is_code(text: str) -> bool:
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    return all(isinstance(s, ast.Assign | ast.AugAssign | ast.Import | ast.With) or is_call(s) for s in statements)


def is_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def block(language: str, text: str) -> str:
    return f".. code-block:: {language}\n\n{indent(text, '   ')}"


def typeset(docstring: str) -> str:
    """A docstring as reStructuredText."""
    parts = []
    for indented, text in paragraphs(docstring):
        if not indented:
            parts.append(f"- {prose(text[2:])}" if text.startswith("- ") else prose(text))
        else:
            parts.append(block("python" if is_code(text) or text.startswith(">>>") else "text", text))
    return "\n\n".join(parts) + "\n"


def process(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    lines[:] = typeset("\n".join(lines)).splitlines()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

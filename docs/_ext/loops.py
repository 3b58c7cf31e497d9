"""The loops that are made from the derivation of an operation, to fold out below it, with links to its equations."""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any

from docstrings import directive, equation_id
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from reports import items

from scratchformer import CompileError, ops
from scratchformer.compiler.derivation import Derivation
from scratchformer.compiler.show import shown
from scratchformer.notation.grammar import walk
from scratchformer.notation.layout import normal
from scratchformer.notation.spelling import spelled

TARGETS = {"numba": ("Numba", "python"), "numpy": ("NumPy", "python"), "cuda": ("CUDA", "cuda"),
           "js": ("JavaScript", "javascript")}  # fmt: skip
COMMENT = re.compile(r'<span class="c1">(# |// )(.*?)</span>')


def loops(name: str) -> str:
    """The loops of an operation for each target, as reStructuredText; "" if its derivation cannot be compiled."""
    op, op_backward = getattr(ops, name), getattr(ops, f"{name}_backward")
    tabs = list[str]()
    for target, (title, language) in TARGETS.items():
        try:
            source = shown(op, op_backward, target)
        except CompileError:
            continue
        chosen = "" if tabs else " checked"
        code = highlight(source, get_lexer_by_name(language), HtmlFormatter(nowrap=True))
        code = linked(code, places(name, op, op_backward))
        tabs.append(
            f'<input type="radio" name="loops" id="loops-{target}"{chosen}>\n'
            f'<label for="loops-{target}">{title}</label>\n'
            f'<div class="highlight notranslate"><pre>{code}</pre></div>'
        )
    if not tabs:
        return ""
    summary = "<summary>The loops that are made from these equations</summary>"
    parts = ['<details class="loops">', summary, '<div class="tabs">', *tabs, "</div>", "</details>"]
    return directive("raw", "html", "\n".join(parts))


def places(name: str, op: Any, op_backward: Any) -> dict[str, str]:
    """The anchor of the equation for each text that the printed loops have as a comment."""
    numbers = {(i.line, normal(i.text)): n for n, (i, _) in enumerate(items(name)) if i.kind == "equation"}
    derivation = Derivation(op.reference, op_backward.reference, op.gives)
    anchors: dict[str, str] = {}
    for definition in derivation.definitions.known.values():
        anchor = equation_id(name, numbers[definition.line, definition.text])
        anchors[definition.spelled()] = anchor
        for node in walk(definition.node):
            if node[0] == "over":
                anchors.setdefault(spelled(node), anchor)
    return anchors


def linked(code: str, equations: dict[str, str]) -> str:
    """The highlighted code with a link in place of each comment that is an equation."""

    def link(comment: re.Match) -> str:
        anchor = equations.get(unescape(comment[2]))
        return f'<a class="c1" href="#{escape(anchor)}">{comment[1]}{comment[2]}</a>' if anchor else comment[0]

    return COMMENT.sub(link, code)

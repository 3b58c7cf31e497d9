"""The loops that are made from the derivation of an operation, to fold out below it, with links to its equations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape, unescape

from ..compiler import CompileError
from ..compiler.derivation import Derivation
from ..compiler.show import shown
from ..notation.grammar import walk
from ..notation.layout import normal
from ..notation.spelling import spelled
from .passages import CheckedItem, equation_id

TARGETS = {"numba": ("Numba", "python"), "cuda": ("CUDA", "cuda"), "js": ("JavaScript", "javascript")}
COMMENT = re.compile(r'<span class="c1">(# |// )(.*?)</span>')


def plain(source: str, language: str) -> str:
    """Code as HTML in which only the comments are marked."""
    return re.sub("((?:#|//) .*)$", r'<span class="c1">\1</span>', escape(source), flags=re.MULTILINE)


def loops(
    op: Callable,
    op_backward: Callable,
    items: Sequence[CheckedItem],
    highlight: Callable[[str, str], str] = plain,
) -> str:
    """The loops of an operation for each target, as HTML; "" if its derivation cannot be compiled.

    items: of the derivation. highlight: makes HTML of code and the name of its language.
    """
    tabs = list[str]()
    for target, (title, language) in TARGETS.items():
        try:
            source = shown(op, op_backward, target)
        except CompileError:
            continue
        chosen = "" if tabs else " checked"
        code = linked(highlight(source, language), places(op, op_backward, items))
        tabs.append(
            f'<input type="radio" name="loops" id="loops-{target}"{chosen}>\n'
            f'<label for="loops-{target}">{title}</label>\n'
            f'<div class="highlight notranslate"><pre>{code}</pre></div>'
        )
    if not tabs:
        return ""
    summary = "<summary>The loops that are made from these equations</summary>"
    return "\n".join(['<details class="loops">', summary, '<div class="tabs">', *tabs, "</div>", "</details>"])


def places(op: Callable, op_backward: Callable, items: Sequence[CheckedItem]) -> dict[str, str]:
    """The anchor of the equation for each text that the printed loops have as a comment."""
    numbers = {(i.line, normal(i.text)): n for n, (i, _) in enumerate(items) if i.kind == "equation"}
    forward, backward = (getattr(each, "reference", each) for each in (op, op_backward))
    derivation = Derivation(forward, backward, getattr(op, "gives", ()))
    anchors: dict[str, str] = {}
    for definition in derivation.definitions.known.values():
        anchor = equation_id(op.__name__, numbers[definition.line, definition.text])
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

"""Docstrings as the site shows them: prose, equations with their measured errors, code and pictures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from textwrap import indent
from typing import Any, ClassVar

from docutils import nodes
from levels import forms, levels
from reports import items, names
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import scratchformer
from scratchformer import Key, ops
from scratchformer.notation import Equation, parse
from scratchformer.pages.passages import (
    BEGINNINGS,
    LIST_ITEM,
    Passage,
    before_derivation,
    equation_id,
    label,
    paragraphs,
    passages,
    passages_of,
    spans,
    unchecked,
)

MODULES = ("data", "generation", "models", "nn", "notation", "ops", "optim", "testing", "training")
PUBLIC = {  # the names in backquotes that are links, and where they lead
    spelling: f"scratchformer.{module}.{name}"
    for module in MODULES
    for name in getattr(scratchformer, module).__all__
    for spelling in (name, f"{module}.{name}")
}
EMPHASIS = re.compile(r"\\\*(\w+)\\\*")  # after escaping


def typeset(docstring: str, name: str = "") -> str:
    """A docstring as reStructuredText. name: of its derivation."""
    return rendered(pieces(docstring, name), name)


def rendered(items: Iterable[Passage], name: str = "") -> str:
    """The pieces as reStructuredText. name: of their derivation, whose letters are set as mathematics in prose."""
    parts = []
    for piece in items:
        if piece.kind == "prose":
            parts.append(prose(piece.text, names(name)))
        elif piece.row is not None:
            options = {"label": label(piece.row), "comment": mixed(piece.comment, names(name))}
            if piece.kind == "equation":
                options |= {"of": name} | ({} if piece.item is None else {"item": str(piece.item)})
            parts.append(directive("checked", piece.kind, piece.text, **options))
        else:
            parts.append(block("python" if piece.kind == "code" else "text", piece.text))
    return "\n\n".join(parts) + "\n"


def pieces(docstring: str, name: str = "") -> list[Passage]:
    """The paragraphs, equations, lines of code and pictures of a docstring. name: of its derivation."""
    if checked := items(name):
        return passages(checked)
    return [unchecked(text) for text in paragraphs(inspect.cleandoc(docstring).splitlines())]


def derivation(name: str) -> str:
    """The derivation of an operation. What is not at all levels is in containers, whose classes name its levels."""
    parts: list[tuple[list[int], list[Passage]]] = []
    begun, above = False, 0  # above: how many forms the item before has
    for number, known in enumerate(forms(name).values()):
        begun = begun or known[0].item.text.startswith(BEGINNINGS)
        if not begun:
            continue
        if known[0].item.kind == "comment":
            for _, before in parts[-above:]:
                before[-1] = before[-1]._replace(comment=known[0].item.text)
            continue
        above = len(known)
        for form in known:
            parts.append((form.levels, passages_of(form.item, form.row, number if form is known[0] else None)))
    whole = len(levels(name))
    return "\n\n".join(
        rendered(shown, name) if len(at) == whole else directive("container", leveled(at, whole), rendered(shown, name))
        for at, shown in parts
    )


def leveled(at: list[int], whole: int) -> str:
    """The classes of what stands at these levels. The page begins with level 0; without scripts it has the last."""
    more = {"shown": 0 in at, "whole": whole - 1 in at}
    return " ".join(["level", *(f"level-{level}" for level in at), *(name for name, is_so in more.items() if is_so)])


def prose(text: str, known: frozenset[str] = frozenset()) -> str:
    """A paragraph as reStructuredText, with links for public names in backquotes, and mathematics in `known` names."""
    bullet = LIST_ITEM.match(text)
    mark, text = (bullet[0], text[bullet.end() :]) if bullet else ("", text)
    return mark + mixed(text, known)


def mixed(text: str, known: frozenset[str] = frozenset()) -> str:
    """Prose without the mark of a list item, as reStructuredText."""
    return "".join(SPAN[kind](part) for kind, part in spans(text, known))


def escaped(text: str) -> str:
    return re.sub(r"^(?=\(?(\w|#)+[.)] )", r"\\ ", EMPHASIS.sub(r"*\1*", re.sub(r"([\\*|_`])", r"\\\1", text)))


def quoted(name: str) -> str:
    if name in PUBLIC:
        return rf"\ :py:obj:`{name} <{PUBLIC[name]}>`\ "
    return rf"\ ``{name}``\ "


SPAN: dict[str, Callable[[str], str]] = {
    "text": escaped,
    "math": lambda text: rf"\ :math:`{text}`\ ",
    "code": quoted,
}


def block(language: str, text: str) -> str:
    return directive("code-block", language, text)


def directive(name: str, argument: str = "", content: str = "", **options: str) -> str:
    lines = [
        f".. {name}:: {argument}".rstrip(),
        *(f"   :{key}: {value}" for key, value in options.items() if value is not None),
    ]
    return "\n".join(lines) + (f"\n\n{indent(content, '   ')}" if content else "")


def heading(text: str, line: str = "-") -> str:
    return f"{text}\n{line * len(text)}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = []
    for row in (header, *rows):
        lines += [f"{' ' if number else '*'} - {cell}" for number, cell in enumerate(row)]
    return directive("list-table", "", "\n".join(lines), **{"header-rows": "1"})


class Verbatim(str):
    """A text that is its own repr."""

    __repr__ = str.__str__


def signature(function: Any) -> inspect.Signature:
    """The signature without annotations, and with short defaults."""
    full = inspect.signature(function)
    plain = [p.replace(annotation=p.empty, default=short(p.default)) for p in full.parameters.values()]
    return full.replace(parameters=plain, return_annotation=full.empty)


def short(default: Any) -> Any:
    if isinstance(default, type) and default is not inspect.Parameter.empty:
        return Verbatim(default.__name__)
    return Verbatim("Key(0)") if isinstance(default, Key) and default == Key(0) else default


class Checked(SphinxDirective):
    """An equation or a line of code with its measured error, or another label, at the right.

    of: the name of the derivation. item: the number of the equation in it, if the text is from there.
    """

    required_arguments = 1  # "equation" or "code"
    has_content = True
    option_spec: ClassVar = dict.fromkeys(("label", "comment", "of", "item"), lambda text: text or "")

    def run(self) -> list[nodes.Node]:
        row = nodes.container(classes=["checked", f"checked-{self.arguments[0]}"])
        if "item" in self.options:
            row["ids"].append(equation_id(self.options["of"], int(self.options["item"])))
        text = "\n".join(self.content)
        if self.arguments[0] == "equation":
            row += nodes.math_block(text, text, nowrap=True, equation=self.equation(text))
        else:
            row += nodes.literal_block(text, text, language="python")
        if comment := self.options.get("comment"):
            inline, messages = self.parse_inline(f"({comment})")
            row += [nodes.paragraph(comment, "", *inline, classes=["comment"]), *messages]
        label = self.options.get("label", "")
        row += nodes.paragraph(label, label, classes=["error"])
        return [row]

    def equation(self, text: str) -> Equation:
        name = self.options["of"]
        if "item" not in self.options:
            return parse(text, names(name))
        item, _ = items(name)[int(self.options["item"])]
        return item.equation


class LettersDirective(SphinxDirective):
    """The table of letters in the docstring of `scratchformer.ops`, for a page in Markdown."""

    def run(self) -> list[nodes.Node]:
        (text,) = (text for text in paragraphs((ops.__doc__ or "").splitlines()) if text.startswith("    B batch"))
        text = re.sub(r"[(](.*?=.*?)[)]", r"({math}`\1`)", text)
        matches = re.findall(r"\b([A-Z]) (.+?)(?= {3}|$)", text, re.MULTILINE)
        rows = [f"| {{math}}`{letter}` | {meaning} |" for letter, meaning in matches]
        return self.parse_text_to_nodes("\n".join(["| letter | size |", "|---|---|", *rows]))


def process(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    docstring, derivation = "\n".join(lines), name.rpartition(".")[2] if what == "class" else ""
    passages = pieces(docstring, derivation)
    if name.startswith(("scratchformer.nn.", "scratchformer.models.")) and what == "class":
        passages = passages[1 : 1 + before_derivation(passages[1:])]  # the page of a layer has the rest elsewhere
    lines[:] = rendered(passages, derivation).splitlines()


def skip(app: Sphinx, what: str, name: str, thing: Any, skipped: bool, options: Any) -> bool | None:
    """Fields of named tuples are in the signature, and have no docstring of their own."""
    return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") else None


def process_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, given: str | None, returned: str | None
) -> tuple[str, None] | None:
    return (str(signature(thing)), None) if what == "class" and given else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("checked", Checked)
    app.add_directive("letters", LettersDirective)
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

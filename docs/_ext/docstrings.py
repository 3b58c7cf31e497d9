"""Docstrings as the site shows them: prose, equations with their measured errors, code and pictures."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Sequence
from textwrap import dedent, indent
from typing import Any, ClassVar, NamedTuple

from docutils import nodes
from docutils.nodes import make_id
from levels import forms, levels
from mathml import mathml
from reports import items, names
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import scratchformer
from scratchformer import Key, ops
from scratchformer.notation import DerivationRow, Equation, Item, NotationError, parse
from scratchformer.notation.grammar import CALLS, OVER, canonical

MODULES = ("data", "generation", "models", "nn", "notation", "ops", "optim", "testing", "training")
PUBLIC = {  # the names in backquotes that are links, and where they lead
    spelling: f"scratchformer.{module}.{name}"
    for module in MODULES
    for name in getattr(scratchformer, module).__all__
    for spelling in (name, f"{module}.{name}")
}
FUNCTIONS = frozenset((*CALLS, *OVER, "Sigma", "with", "mod"))
LIST_ITEM = re.compile(r"- |\d+\. ")
NEW = re.compile(rf"{LIST_ITEM.pattern}|Source( of [\w ]+)?: ")  # begins a paragraph without an empty line above it
BEGINNINGS = ("Forward", "Backward", "Where it comes from")  # of the derivation in a docstring
EMPHASIS = re.compile(r"\\\*(\w+)\\\*")  # after escaping


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


def label(row: DerivationRow) -> str:
    """What stands beside an equation or a line of code."""
    if row.error is None:
        return "defined" if row.kind == "defines" else ""
    return f"{row.error:.0e}" if row.error else "0"


def pieces(docstring: str, name: str = "") -> list[Passage]:
    """The paragraphs, equations, lines of code and pictures of a docstring. name: of its derivation."""
    if not items(name):
        return [unchecked(text) for text in paragraphs(inspect.cleandoc(docstring).splitlines())]
    pieces: list[Passage] = []
    for number, (item, row) in enumerate(items(name)):
        if item.kind == "comment" and pieces[-1].kind == "equation":
            pieces[-1] = pieces[-1]._replace(comment=item.text)
        else:
            pieces += passages(item, row, number)
    return pieces


def passages(item: Item, row: DerivationRow | None, number: int | None) -> list[Passage]:
    """An item of a derivation as passages. number: of the item, if it is as in the docstring."""
    if item.kind == "prose":
        return [unchecked(text) for text in paragraphs(item.text.splitlines())]
    if item.kind == "equation":
        return [Passage("equation", " ".join(item.text.split()), row=row, item=number)]
    text = dedent(item.text)
    text = re.sub("^[|] ?", "", text, flags=re.MULTILINE) if item.kind == "picture" else text
    return [Passage(item.kind, text, row=row)]


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
            parts.append((form.levels, passages(form.item, form.row, number if form is known[0] else None)))
    whole = len(levels(name))
    return "\n\n".join(
        rendered(shown, name) if len(at) == whole else directive("container", leveled(at, whole), rendered(shown, name))
        for at, shown in parts
    )


def leveled(at: list[int], whole: int) -> str:
    """The classes of what stands at these levels. The page begins with level 0; without scripts it has the last."""
    more = {"shown": 0 in at, "whole": whole - 1 in at}
    return " ".join(["level", *(f"level-{level}" for level in at), *(name for name, is_so in more.items() if is_so)])


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


def prose(text: str, known: frozenset[str] = frozenset()) -> str:
    """A paragraph as reStructuredText, with links for public names in backquotes, and mathematics in `known` names."""
    bullet = LIST_ITEM.match(text)
    mark, text = (bullet[0], text[bullet.end() :]) if bullet else ("", text)
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return mark + "".join(quoted(part[1:-1]) if part.startswith("`") else mixed(part, known) for part in parts)


def mixed(text: str, known: frozenset[str]) -> str:
    """Prose without backquotes, in which the longest pieces that are expressions in known names become mathematics."""
    words, parts, at = re.findall(r"\s*\S+|\s+$", text), [], 0
    while at < len(words):
        length, shown = expression(words[at:], known) if known else (0, "")
        parts.append(shown or escaped(words[at]))
        at += length or 1
    return "".join(parts)


def expression(words: list[str], known: frozenset[str]) -> tuple[int, str]:
    """How many of the first words are an expression, and the expression as reStructuredText."""
    equals = len(words) > 1 and words[1].strip() == "=" and is_mathematics(words[0], known)
    if not equals and not re.search(r"_[a-z]|[Σ∂√α-ω\u0302]", words[0]):
        return 0, ""
    last = next((i for i, word in enumerate(words) if not is_mathematics(word, known)), len(words))
    for count in range(last, 0, -1):
        text = "".join(words[:count])
        core = text.strip()
        before = core[: len(core) - len(core.lstrip("("))] if core.count("(") > core.count(")") else ""
        core = core[len(before) :]
        closing = core.count(")") > core.count("(")
        after = re.search(r"\)?[.,:;]*$" if closing else r"[.,:;]*$", core)[0]
        core = core[: len(core) - len(after)].rstrip()
        if words[count - 1].strip() == "a" and not re.search(r"[-−+/·=]$", words[count - 2].strip()):
            continue  # the article
        try:
            mathml(core, known)
        except NotationError:
            continue
        space = text[: len(text) - len(text.lstrip())]
        return count, rf"{space}{escaped(before)}\ :math:`{core}`\ {escaped(after)}"
    return 0, ""


def is_mathematics(word: str, known: frozenset[str]) -> bool:
    """Whether every run of letters in a word is a known name, a function, an index or a size."""
    runs = re.findall(r"[^\W\d_][\w\u0302']*", word.strip())
    return all(len(run) == 1 or run in FUNCTIONS or canonical(run.split("_")[0]) in known | FUNCTIONS for run in runs)


def escaped(text: str) -> str:
    return re.sub(r"^(?=\(?(\w|#)+[.)] )", r"\\ ", EMPHASIS.sub(r"*\1*", re.sub(r"([\\*|_`])", r"\\\1", text)))


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


def equation_id(name: str, item: int) -> str:
    """The anchor of an equation of a derivation on its page."""
    return f"{make_id(name)}-equation-{item}"


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
        passages = passages[1 : 1 + derived_from(passages[1:])]  # the page of a layer has the rest elsewhere
    lines[:] = rendered(passages, derivation).splitlines()


def derived_from(passages: Sequence[Passage]) -> int:
    """The number of the passage with which a derivation begins; that of all passages if there is none."""
    return next((i for i, piece in enumerate(passages) if piece.text.startswith(BEGINNINGS)), len(passages))


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

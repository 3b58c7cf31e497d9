"""The derivation exercises as pages: an input for each blank, and the course's own check, by Python in the page.

The page runs modules of the package, listed in MODULES and unchanged, with Brython. The folder in_page has what they
need there: a small numpy, whose arrays are in exercises/arrays.js, and the functions that the page calls. The arrays of
the runs and the results of the known mistakes are computed here, when the site is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from docstrings import directive, heading, prose
from operations import joined, write_page
from sphinx.application import Sphinx
from static_files import load_files

import scratchformer
from scratchformer.course.course import NAMES, exercise
from scratchformer.course.equations import check_text, docstring_in, equations, findings, given_part, in_docstring
from scratchformer.course.exercise import Exercise
from scratchformer.course.grading import load, planted
from scratchformer.notation import Equation, NotationError, parse
from scratchformer.notation.layout import items
from scratchformer.notation.run import Execution
from scratchformer.pages.live import json_script
from scratchformer.pages.mathml import clauses, expression, of_equation, relation, wrapped
from scratchformer.pages.passages import paragraphs

HERE = Path(__file__).parent
MODULES = (
    *(f"notation.{name}" for name in "grammar spelling layout values ratios walk".split()),
    "shell.text",
    "course.equations",
    "pages.mathml",
)
FILES = ("live/evaluate.js", "exercises/arrays.js", "exercises/python.js", "exercises/exercises.js")
DERIVATIONS = tuple(name for name in NAMES if exercise(name).derivation)
LIBRARY = "__future__ _json _operator enum itertools json json.encoder math operator python_re re sys types".split()
STANDS_IN = {  # for modules that would load much more
    "unicodedata": """\
from browser import window
def normalize(form, text):
    return window.String.prototype.normalize.call(text, form)
def combining(letter):
    return "\\u0300" <= letter <= "\\u036f"
""",
    "contextlib": """\
class suppress:
    def __init__(self, *errors):
        self.errors = errors
    def __enter__(self):
        return self
    def __exit__(self, kind, error, trace):
        return kind is not None and issubclass(kind, self.errors)
""",
    "functools": """\
def lru_cache(size):
    def cached(function):
        results = {}
        def call(*arguments):
            if arguments not in results:
                results[arguments] = function(*arguments)
            return results[arguments]
        return call
    return cached
""",
    "html": """\
def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
""",
    "typing": """\
class Any:
    def __class_getitem__(cls, item):
        return cls
TYPE_CHECKING = False
class Fields(type):
    def __new__(meta, name, bases, body):
        names = tuple(body.get("__annotations__", ()))
        defaults = {each: body.pop(each) for each in names if each in body}
        def new(cls, *values, **named):
            rest = names[len(values):]
            return tuple.__new__(cls, (*values, *(named[each] if each in named else defaults[each] for each in rest)))
        if names:
            body |= {each: property(lambda self, place=place: self[place]) for place, each in enumerate(names)}
            body |= {"__new__": new, "_fields": names}
        return type.__new__(meta, name, bases, body)
class NamedTuple(tuple, metaclass=Fields):
    def _replace(self, **changed):
        return type(self)(*(changed.get(each, value) for each, value in zip(self._fields, self)))
""",
    "collections.abc": """\
class Callable:
    def __class_getitem__(cls, item):
        return cls
Collection = Iterable = Iterator = Mapping = Sequence = Callable
""",
    "scipy.special": "from numpy import erf\n",
}


def python_script() -> str:
    """Brython, and the modules that a page needs: those of the package, and of Brython's library those they import."""
    data = files("brython") / "data"
    library = (data / "brython_stdlib.js").read_text(encoding="utf-8")
    library = json.loads(library[library.index("{") : library.rindex("}") + 1])
    package = Path(scratchformer.__file__).parent
    sources = {f"scratchformer.{n}": (package / f"{n.replace('.', '/')}.py").read_text("utf-8") for n in MODULES}
    sources |= {n: (HERE / "in_page" / f"{n}.py").read_text("utf-8") for n in ("numpy", "page")}
    sources |= STANDS_IN
    modules: dict[str, list[Any]] = {n: [".py", source, []] for n, source in sources.items()}
    packages = {name.rpartition(".")[0] for name in modules} | {"scratchformer"}
    modules |= {name: [".py", "", [], 1] for name in packages - {""}}
    modules |= {name: library[name] for name in LIBRARY}
    text = json.dumps(modules, ensure_ascii=False, separators=(",", ":"))
    return f"{(data / 'brython.js').read_text('utf-8')}\n__BRYTHON__.use_VFS = true;\n__BRYTHON__.update_VFS({text});\n"


def exercise_data(name: str) -> dict[str, Any]:
    """What the check in the page needs of an exercise."""
    each = exercise(name)
    path = Path(f"{name}.py")
    derivation = each.derivation(load(path, each.solution))
    runs = list(derivation.executions())
    return {
        "name": name,
        "start": each.start,
        "solution": each.solution,
        "hints": each.hints,
        "restricted": derivation.restricted,
        "runs": [run_as_json(ran) for ran in runs],
        "mistakes": list(named_mistakes(each, derivation, runs)),
    }


def run_as_json(ran: Execution) -> dict[str, Any]:
    values = {
        name: {"shape": x.shape, "kind": x.dtype.kind, "data": np.asarray(x, float).ravel().tolist()}
        for name, x in ran.values.items()
    }
    kept = {key: getattr(ran, key) for key in ("name", "arguments", "outputs", "gradients")}
    return kept | {"values": values}


def named_mistakes(each: Exercise, derivation: Any, runs: list[Execution]) -> Iterator[tuple[str, str, str]]:
    """What the check finds for each mistake that has a name: the beginning of the line, the numbers, and the name."""
    named = [("", slip.what, each.solution.replace(slip.right, slip.wrong)) for slip in each.mistakes if slip.what]
    for head in filter(None, (given_part(line) for line in each.start.splitlines())):
        named += [(head, what, text) for what, text in planted(each, head)]
    for head, what, text in named:
        docstring, above = docstring_in(text)
        try:
            with np.errstate(all="ignore"):
                check_text(text, docstring, derivation.restricted, runs)
        except (AssertionError, NotationError) as error:
            begins, numbers = findings(each.start, in_docstring(error, str(error), above))
            if begins.startswith(head):
                yield begins, numbers, what


def page(name: str) -> str:
    each = exercise(name)
    return joined(
        [
            f".. _exercise-{name}:",
            heading(each.title, "="),
            *(prose(text) for text in paragraphs(each.task.splitlines())),
            directive("raw", "html", exercise_html(name)),
        ]
    )


def exercise_html(name: str) -> str:
    """The derivation of an exercise with an input in place of each blank, for the files of _static/exercises."""
    each = exercise(name)
    data = exercise_data(name)
    following = DERIVATIONS[DERIVATIONS.index(name) + 1 :]
    data["next"] = [following[0], exercise(following[0]).title] if following else None
    docstring, above = docstring_in(each.start)
    solved = dict(zip(equations(each.start), (line for _, line in equations(each.solution)), strict=True))
    numbers: dict[int, int] = {}  # on the page, by those in the file
    parts, lines = [], docstring.expandtabs().splitlines()
    lines = [line.removeprefix("    ") for line in lines]
    lines[0] = lines[0].strip()
    for item in items(lines):
        if item.kind == "equation":
            line = above + item.line
            number = numbers.setdefault(line, len(numbers) + 1)
            parts.append(equation_html(item.text, solved.get((line, " ".join(item.text.split())), ""), line, number))
        elif item.text.strip():
            parts.append(f"<p>{escape(' '.join(item.text.split()))}</p>")
    return (
        f'<section class="exercise" data-exercise="{name}" aria-label="{escape(each.title)}">\n'
        "<noscript><p>With JavaScript, you can fill in the blanks here.</p></noscript>\n"
        + "\n".join(parts)
        + f"\n{json_script(data)}\n</section>"
    )


def equation_html(text: str, solution: str, line: int, number: int) -> str:
    """An equation typeset; one with a blank up to it, and an input. line, number: in the file and on the page."""
    head, shown = given_part(text), f'<span class="number">{number}</span>'
    if not head:
        return f'<div class="math" data-line="{line}" data-number="{number}">{shown}{of_equation(parse(text))}</div>'
    whole = parse(solution)
    given = "".join(expression(p) + relation(r) for p, r in zip(whole.parts[:-1], whole.relations, strict=True))
    end = clauses(Equation(whole.parts, whole.relations, (), whole.conditions)) if whole.conditions else ""
    field = (
        f'<input placeholder="?" id="line{line}" aria-label="{escape(head)}" aria-describedby="says{line}" size="30" '
        'autocomplete="off" autocapitalize="none" spellcheck="false">'
    )
    return (
        f'<div class="blank" data-line="{line}" data-number="{number}">{shown}'
        f'<span class="given">{wrapped(given, display=True)}</span>'
        f'<span class="answer">{field}<span class="mark" aria-hidden="true"></span></span>'
        + (f'<span class="end">{wrapped(end, display=True)}</span>' if end else "")
        + f'<span class="preview"></span><p class="says" id="says{line}" role="status"></p></div>'
    )


def write(app: Sphinx) -> None:
    for name in DERIVATIONS:
        write_page(Path(app.srcdir) / "exercises" / f"{name}.rst", page(name))


def finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        write_script(Path(app.outdir) / "_static")


def write_script(static: Path) -> None:
    """Write the Python of the pages below a folder of static files."""
    (static / "exercises").mkdir(parents=True, exist_ok=True)
    (static / "exercises" / "python.js").write_text(python_script(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    load_files(app, '<section class="exercise"', "exercises/exercises.css", *FILES)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

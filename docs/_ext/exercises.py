"""The derivation exercises as pages: an input for each blank, judged in the page by evaluating what is typed.

The arrays of the runs, the solutions and the known mistakes are written into the page when the site is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docstrings import directive, heading, prose
from operations import joined, write_page
from sphinx.application import Sphinx
from static_files import load_files

from scratchformer.course.course import NAMES, exercise
from scratchformer.course.equations import clause, docstring_in, equations, given_part
from scratchformer.course.exercise import Exercise
from scratchformer.course.grading import Derivation, load, planted
from scratchformer.notation import Equation, Item, parse, read
from scratchformer.notation.check import walk_through
from scratchformer.notation.grammar import Node, canonical
from scratchformer.notation.layout import dedented, items, normal
from scratchformer.notation.page import as_lists
from scratchformer.notation.run import Execution
from scratchformer.notation.values import Scope, learn_sizes
from scratchformer.notation.walk import TOLERANCE
from scratchformer.pages.live import FILES as LIVE
from scratchformer.pages.live import array_json, json_script
from scratchformer.pages.mathml import clauses, expression, of_equation, relation, wrapped
from scratchformer.pages.passages import paragraphs

FILES = (*LIVE, "exercises/notation.js", "exercises/exercises.js")
DERIVATIONS = tuple(name for name in NAMES if exercise(name).derivation)


def exercise_data(name: str) -> dict[str, Any]:
    """What the page needs of an exercise to judge the answers."""
    each = exercise(name)
    derivation = each.derivation(load(Path(f"{name}.py"), each.solution))
    runs = list(derivation.executions())
    following = DERIVATIONS[DERIVATIONS.index(name) + 1 :]
    return {
        "name": name,
        "hints": each.hints,
        "next": [following[0], exercise(following[0]).title] if following else None,
        "runs": [run_data(docstring_in(each.solution)[0], ran) for ran in runs],
        "blanks": list(blanks(each, runs[0], derivation)),
    }


def run_data(docstring: str, ran: Execution) -> dict[str, Any]:
    """All arrays of a run and of the equations, and the sizes of the index letters."""
    solved = read(docstring, ran.names, ran.code, ran.name)
    values = walk_through(solved, ran, TOLERANCE).values
    scope = Scope(dict(values))
    for item in solved.equations:
        learn_sizes(item.equation, scope)
    return {"arrays": {name: array_json(x) for name, x in values.items()}, "sizes": scope.sizes}


def lines(each: Exercise) -> Iterator[tuple[Item, Item]]:
    """The items of an exercise's derivation, each with the one of the solution."""
    solved = read(docstring_in(each.solution)[0]).items
    return zip(items(dedented(docstring_in(each.start)[0], None)), solved, strict=True)


def blanks(each: Exercise, ran: Execution, derivation: Derivation) -> Iterator[dict[str, Any]]:
    """Each blank: its line in the file and its solution, which names an answer may use, and what it must not be."""
    _, above = docstring_in(each.start)
    known = {*ran.arguments, *(f"d{output}" for output in ran.outputs), *map(canonical, derivation.names or {})}
    for given, solved in lines(each):
        if solved.equation is None:
            continue
        left, text = solved.equation.parts[0], normal(solved.text)
        if head := given_part(given.text):
            yield {
                "line": above + given.line,
                "left": as_lists(left),
                "for": as_lists(solved.equation.conditions),
                "right": as_lists(solved.equation.parts[-1]),
                "solution": text.removeprefix(head).removesuffix(clause(text)).strip(),
                "known": sorted(known - {left[1]}),
                "never": [(never, why) for start, never, why in derivation.restricted if text.startswith(start)],
                "mistakes": [(what, as_lists(node)) for what, node in mistakes_in(each, head, text)],
            }
        if left[0] == "name":
            known.add(left[1])


def mistakes_in(each: Exercise, head: str, solution: str) -> Iterator[tuple[str, Node]]:
    """The answers to a blank that are known mistakes, each with its name."""
    named = [(slip.what, each.solution.replace(slip.right, slip.wrong)) for slip in each.mistakes if slip.what]
    for what, text in [*named, *planted(each, head)]:
        line = next(line for _, line in equations(text) if line.startswith(head))
        if line != solution:
            yield what, parse(line).parts[-1]


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
    parts, number = [], 0
    for given, solved in lines(each):
        if solved.equation is None:
            parts.append(f"<p>{escape(normal(given.text))}</p>")
        else:
            number += 1
            parts.append(equation_html(solved.equation, given_part(given.text), number))
    return (
        f'<section class="exercise" data-exercise="{name}" aria-label="{escape(each.title)}">\n'
        "<noscript><p>With JavaScript, you can fill in the blanks here.</p></noscript>\n"
        + "\n".join(parts)
        + f"\n{json_script(exercise_data(name))}\n</section>"
    )


def equation_html(whole: Equation, head: str, number: int) -> str:
    """An equation typeset; one with a blank up to it, and an input. head: what is given of it, "" without a blank."""
    shown = f'<span class="number">{number}</span>'
    if not head:
        return f'<div class="math">{shown}{of_equation(whole)}</div>'
    given = "".join(expression(p) + relation(r) for p, r in zip(whole.parts[:-1], whole.relations, strict=True))
    end = clauses(whole._replace(bindings=())) if whole.conditions else ""
    field = (
        f'<input placeholder="?" aria-label="{escape(head)}" aria-describedby="says{number}" size="30" '
        'autocomplete="off" autocapitalize="none" spellcheck="false">'
    )
    return (
        f'<div class="blank">{shown}'
        f'<span class="given">{wrapped(given, display=True)}</span>'
        f'<span class="answer">{field}<span class="mark" aria-hidden="true"></span></span>'
        + (f'<span class="end">{wrapped(end, display=True)}</span>' if end else "")
        + f'<span class="preview"></span><p class="says" id="says{number}" role="status"></p></div>'
    )


def write(app: Sphinx) -> None:
    for name in DERIVATIONS:
        write_page(Path(app.srcdir) / "exercises" / f"{name}.rst", page(name))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    load_files(app, '<section class="exercise"', "exercises/exercises.css", *FILES)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""One exercise, as its file in `exercises/` describes it.

The upper part of that file, down to the line CUT, is what the student gets, with the blanks filled in. They are marked:

    # TODO: what to write             a few lines of code, down to `# END`. The student sees the first line, and then
    dz = ...                          `dz = ...` for each variable that the code sets, or `return ...`
    # END
    dz_k = ⟦y_k (dy_k − s)⟧          a part of an equation. The student sees `?`

The lower part has what the student does not see:

    HINTS      three strings, each of which says more than the one before
    LIBRARY    the function or class of the package whose docstring has the derivation
    MISTAKES   known mistakes, each with the fields of a `Slip`, which the check must find
    check      a function of the student's module, which raises an error that says what is wrong; a derivation has
    derivation a function that gives what is run to check it
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from typing import Any, NamedTuple

from ..shell.source import syntax_tree

CUT = "# The student's file ends here."

TODO = re.compile(r"^( *)(# TODO:.*\n(?: *#.*\n)*?)((?:.*\n)*?) *# END\n", re.MULTILINE)
BLANK = re.compile(r"⟦(.*?)⟧", re.DOTALL)


class Slip(NamedTuple):
    """A slip, which makes a solution wrong: `right`, which occurs once, is replaced by `wrong`.

    says: a pattern that the message for it must match. what: the end of the sentence "This is what one gets when ...",
    for mistakes that the message does not name already.
    """

    right: str
    wrong: str
    says: str
    what: str = ""


class Exercise(NamedTuple):
    """An exercise; see this module's text. start: what the student gets. solution: the same with all blanks filled."""

    name: str
    title: str
    kind: str  # "code" or "derivation"
    start: str
    solution: str
    hints: tuple[str, str, str]
    library: Any
    mistakes: tuple[Slip, ...]
    check: Callable[[Any], str | None]
    derivation: Callable[[Any], Any] | None  # of a derivation: of the student's module, a `grading.Derivation`

    @property
    def task(self) -> str:
        """The docstring of the student's file, without its title."""
        return (ast.get_docstring(syntax_tree(self.start)) or "").partition("\n")[2].strip()

    @property
    def answers(self) -> list[str]:
        """The lines of the solution that the student has to write."""
        start = self.start.splitlines()
        return [line for line in self.solution.splitlines() if line not in start]


def read_exercise(name: str) -> Exercise:
    """Read `exercises/NAME.py`."""
    text = files(f"{__package__}.exercises").joinpath(f"{name}.py").read_text(encoding="utf-8")
    upper, cut, _ = text.partition(CUT)
    if not cut:
        raise ValueError(f"{name}.py: expected a line {CUT!r}")
    upper = upper.rstrip() + "\n"
    module = import_module(f"{__package__}.exercises.{name}")
    start = BLANK.sub("?", TODO.sub(blank, upper))
    solution = BLANK.sub(lambda match: match[1], TODO.sub(lambda match: match[1] + match[2] + match[3], upper))
    return Exercise(
        name,
        (ast.get_docstring(syntax_tree(start)) or "").partition("\n")[0],
        "derivation" if BLANK.search(upper) else "code",
        start,
        solution,
        module.HINTS,
        module.LIBRARY,
        tuple(Slip(*mistake) for mistake in module.MISTAKES),
        getattr(module, "check", None) or check_of(module.derivation),
        getattr(module, "derivation", None),
    )


def check_of(derivation: Callable[[Any], Any]) -> Callable[[Any], str]:
    """The check of an exercise that says what is run to check a derivation."""
    return lambda student: derivation(student).check(vars(student)["__source__"])


def blank(match: re.Match) -> str:
    """What the student sees in place of some lines of code."""
    indent, todo, code = match[1], match[2], match[3]
    tree = syntax_tree("\n".join(line[len(indent) :] for line in code.splitlines()))
    if any(isinstance(node, ast.Return) for node in tree.body):
        return f"{indent}{todo}{indent}return ...\n"
    names: dict[str, None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= dict.fromkeys(target.id for target in targets if isinstance(target, ast.Name))
    return indent + todo + "".join(f"{indent}{name} = ...\n" for name in names)

"""Mistakes planted in the solution of every exercise: each is found, and nine in ten are named.

    HYPOTHESIS_PROFILE=thorough pytest tests/course/test_mutants.py
    python tests/course/test_mutants.py [EXERCISE ...]

runs all of them; the program prints what is said of each.
"""

import ast
import random
import re
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from scratchformer.course.course import NAMES, exercise
from scratchformer.course.grading import grade
from scratchformer.notation.grammar import parse
from scratchformer.notation.mistakes import mistakes
from scratchformer.notation.spelling import spelled
from scratchformer.testing.mutate.mutants import mutants
from scratchformer.testing.mutate.source import functions

pytestmark = pytest.mark.diagnosis


def in_code(each):
    """The solution with one mistake in a line that the student writes: (the kind of mistake, the line, the text)."""
    solution, written = each.solution, set(each.answers)
    lines = solution.split("\n")
    for name, _ in functions(ast.parse(solution)):
        for mutant in mutants(solution, name):
            if lines[mutant.line - 1] in written:
                text = mutant.plant(solution)
                yield mutant.what, text
    for number, line in enumerate(lines):
        if line in written and (match := re.fullmatch(r"( +\w+ = |return )([^#]*[^#,(\s])", line)):
            for what, wrong in ("the sign", f"-({match[2]})"), ("tripled", f"3 * ({match[2]})"):
                yield what, "\n".join([*lines[:number], match[1] + wrong, *lines[number + 1 :]])


def in_equations(each):
    for line in each.answers:
        equation = parse(line.strip().partition("   (")[0])
        last = equation.parts[-1]
        whole = [
            ("the sign", ("neg", ("group", last))),
            ("doubled", ("*", ("num", 2.0, "2"), ("group", last))),
            ("halved", ("/", ("group", last), ("num", 2.0, "2"))),
        ]
        changed = [(what, equation._replace(parts=(*equation.parts[:-1], part))) for what, part in whole]
        for what, wrong in [*changed, *mistakes(equation)]:
            if wrong.parts[:-1] == equation.parts[:-1] and wrong.bindings == equation.bindings:
                head, tail = line.strip().rpartition(" = ")[0], spelled(wrong).rpartition(" = ")[2]
                yield what, each.solution.replace(line.strip(), f"{head} = {tail}", 1)


def planted(each, count):
    """Mistakes of `count` kinds in one exercise, the same in every run; all without `count`."""
    by_kind = defaultdict(list)
    for what, text in (in_code if each.kind == "code" else in_equations)(each):
        by_kind[re.sub(r"^\w+ for \w+$", "another name", what)].append(text)
    draw = random.Random(each.name)
    kinds = list(by_kind)
    draw.shuffle(kinds)
    for kind in kinds[:count]:
        yield kind, draw.choice(by_kind[kind])


def is_named(message):
    """Whether the message says more than that numbers differ. An error of Python or of a shape names itself."""
    if not re.search(r"expected .*, got|wrong gradient|relative error", message) or "expected shape" in message:
        return True
    return bool(
        re.search(
            r"This is what one gets|gives exactly these numbers|times what it|of what it|except|is zero|A known mistake"
            r"|The gradients? of .* (is|are) |is added|is not used|dy were squared|does not depend|without|as long as"
            r"|is an index of this equation|nothing in the",
            message,
        )
    )


def verdicts(names, count):
    """(exercise, kind, changed lines, verdict) for `count` kinds of mistakes in each exercise."""
    with TemporaryDirectory() as folder:
        for name in names:
            each = exercise(name)
            path = Path(folder, f"{name}.py")
            for kind, text in planted(each, count):
                path.write_text(text, encoding="utf-8")
                changed = [line.strip() for line in text.splitlines() if line not in each.solution.splitlines()]
                yield name, kind, " | ".join(changed), grade(each, path)


def test_nine_in_ten_mistakes_are_named(thorough):
    names = NAMES if thorough else random.Random(0).sample(NAMES, 5)
    found = [(kind, changed, given.message) for _, kind, changed, given in verdicts(names, 10) if not given.passed]
    unknown = [(kind, changed, message) for kind, changed, message in found if not is_named(message)]
    assert len(unknown) <= 0.1 * len(found), unknown


def main(names):
    named = found = 0
    for name, kind, changed, verdict in verdicts(names or NAMES, 10):
        known = is_named(verdict.message)
        found, named = found + (not verdict.passed), named + (known and not verdict.passed)
        mark = "changes nothing" if verdict.passed else "named" if known else "UNKNOWN"
        print(f"=== {name}: {kind}: {changed}: {mark}\n{verdict.message}", flush=True)
    print(f"{named} of {found} named")


if __name__ == "__main__":
    main(sys.argv[1:])

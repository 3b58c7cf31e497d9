"""Every exercise: its solution passes, and every known mistake in it is found."""

import re

import pytest

from scratchformer.learn.course import NAMES, exercise
from scratchformer.learn.exercise import blanks_left
from scratchformer.learn.grading import grade

MISTAKES = [
    pytest.param(name, mistake, id=f"{name}-{number}")
    for name in NAMES
    for number, mistake in enumerate(exercise(name).mistakes)
]


@pytest.fixture
def verdict(tmp_path):
    """verdict(name, text): what the check says of a student's file."""

    def of(name, text):
        path = tmp_path / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        return grade(exercise(name), path)

    return of


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes_and_the_start_is_blank(name, verdict):
    each = exercise(name)
    solved = verdict(name, each.solution)
    assert solved.passed, solved.message
    assert blanks_left(each.start) and not blanks_left(each.solution)
    begun = verdict(name, each.start)
    assert not begun.passed
    assert "still blank" in begun.message
    assert len(each.hints) == len(set(each.hints)) == 3
    assert each.title and each.task and len(each.mistakes) >= 2


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_known_mistake_is_found(name, mistake, verdict):
    solution = exercise(name).solution
    assert solution.count(mistake.right) == 1, f"{solution.count(mistake.right)} times: {mistake.right}"
    wrong = verdict(name, solution.replace(mistake.right, mistake.wrong))
    assert not wrong.passed, mistake.wrong
    assert re.search(mistake.says, wrong.message, re.DOTALL), wrong.message

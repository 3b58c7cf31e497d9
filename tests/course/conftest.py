"""What the tests of the exercises share."""

import pytest

from scratchformer.course.course import exercise
from scratchformer.course.grading import grade


@pytest.fixture
def verdict(tmp_path):
    """verdict(name, text): what the check says of a student's file."""

    def of(name, text):
        path = tmp_path / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        return grade(exercise(name), path)

    return of


@pytest.fixture
def replaced(verdict):
    """replaced(name, right, wrong): what the check says of the solution with another text in place of its own."""

    def of(name, right, wrong):
        solution = exercise(name).solution
        assert solution.count(right) == 1, f"{solution.count(right)} times: {right}"
        return verdict(name, solution.replace(right, wrong))

    return of

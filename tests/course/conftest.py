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

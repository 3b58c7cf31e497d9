"""The page of the exercises lists the course as it is."""

import re
from pathlib import Path

from scratchformer.course.course import NAMES, exercise

PAGE = (Path(__file__).parents[2] / "docs" / "learn.md").read_text(encoding="utf-8")


def test_the_page_lists_every_exercise_in_order():
    table = PAGE.partition("## The exercises")[2]
    assert tuple(re.findall(r"`(\w+)`", table.partition("|---|---|")[2])) == NAMES
    assert f"{len(NAMES)} short exercises" in PAGE


def test_names_tell_the_kind():
    for name in NAMES:
        assert (exercise(name).kind == "derivation") == name.endswith("_equations")

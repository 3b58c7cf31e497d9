"""Each exhibit is found and named as its file says, and the check accepts the right gradient."""

import re
from pathlib import Path

import pytest

from scratchformer.catalogue import Sizes
from scratchformer.commands.cli import run_command
from scratchformer.museum.exhibits import GROUPS, NAMES, check, exhibit
from scratchformer.notation import check_derivation
from scratchformer.testing import check_drawn
from scratchformer.testing.drawn import arguments

PAGE = Path(__file__).parents[2] / "docs" / "museum.md"
PARTS = ("What was wrong.", "Why its tests passed.", "What finds it.", "How to derive it.")
DERIVED = [name for name in NAMES if exhibit(name).forward.__doc__ and "    " in exhibit(name).forward.__doc__]


@pytest.mark.diagnosis
@pytest.mark.parametrize("name", NAMES)
def test_the_wrong_backward_is_found_and_named(name):
    for _ in range(2):  # the second time too, though some exhibits remember what went before
        verdict = check(exhibit(name))
        assert verdict.message
        assert re.search(exhibit(name).named, verdict.message)


@pytest.mark.parametrize("name", NAMES)
def test_the_right_backward_is_accepted(name):
    for seed in (0, 1):
        assert check_drawn(exhibit(name).forward, exhibit(name).right, *exhibit(name).arguments, seed=seed)


@pytest.mark.parametrize("name", DERIVED)
def test_the_derivation_is_true(name):
    check_derivation(exhibit(name).forward, exhibit(name).right, *arguments(exhibit(name).arguments, Sizes(0)))


@pytest.mark.parametrize("name", NAMES)
def test_a_story_has_its_parts_in_order(name):
    story = exhibit(name).story
    assert re.findall("|".join(PARTS), story) == list(PARTS)
    assert re.search(r" \d+", exhibit(name).source)


def test_every_mistake_has_a_name_as_the_page_says():
    assert all(exhibit(name).named for name in NAMES)
    assert f"Each of the {len(NAMES)} mistakes has a name" in PAGE.read_text(encoding="utf-8")


def test_the_command_shows_an_exhibit(capsys):
    run_command(["museum", "bias_dropped"])
    shown = capsys.readouterr().out
    assert exhibit("bias_dropped").title in shown
    assert "pytorch/ao 4817" in shown
    assert "gradient of b: expected an array, got NoneType" in shown


def test_the_command_lists_every_exhibit(capsys, monkeypatch):
    monkeypatch.setattr("scratchformer.museum.command.check", lambda shown: check(exhibit("bias_dropped")))
    run_command(["museum"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*NAMES, *GROUPS))
    assert f"{len(NAMES)} of {len(NAMES)} found" in shown


def test_an_unknown_exhibit_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean bias_dropped"):
        run_command(["museum", "bias_droped"])

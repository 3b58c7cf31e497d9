"""The live parts of the museum's pages begin with the mistake planted, and mark what it makes wrong."""

from pathlib import Path
from typing import Any

import pytest

from scratchformer.museum.exhibits import NAMES, check, exhibit

pytest.importorskip("sphinx")
pytest.importorskip("selenium")

import live
import museum

PLANTED = [name for name in NAMES if exhibit(name).planted]
MARKED = """
const wrong = [...document.querySelectorAll('.live-line td.wrong button')].map((face) => face.grid.name);
const page = document.querySelector('.live').page;
return [...new Set(wrong)].filter((name) => name in page.data.gradients).map((name) => page.data.gradients[name]);
"""


@pytest.mark.parametrize("name", PLANTED)
def test_the_wrong_gradients_are_those_that_the_check_finds(browser: Any, tmp_path: Path, name: str) -> None:
    files = "".join(f'<script src="{live.STATIC / file}" defer></script>' for file in live.FILES)
    path = tmp_path / f"{name}.html"
    path.write_text(
        f'<!doctype html><meta charset="utf-8">{files}{museum.planted_html(exhibit(name))}', encoding="utf-8"
    )
    browser.get(path.as_uri())
    assert browser.execute_script("return document.querySelectorAll('.mistaken .live-planted > *').length")
    assert browser.execute_script("return document.querySelector('.live-mistake select').selectedIndex") == 1
    marked = browser.execute_script(MARKED)
    assert marked
    message = check(exhibit(name)).message
    for x in map(plain, marked):
        assert any(word in message for word in (f"gradient of {x} ", f" {x}[", f" {x} (", f" {x}: ")), x


def plain(letter: str) -> str:
    """The name in code of what an equation calls γ or β."""
    return {"γ": "gamma", "β": "beta"}.get(letter, letter)

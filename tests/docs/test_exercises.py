"""The exercises in the page: the same verdict and messages as in the terminal, and the same syntax trees."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer.course.course import exercise
from scratchformer.course.equations import docstring_in
from scratchformer.course.grading import grade
from scratchformer.notation import NotationError, parse, read
from scratchformer.notation.spelling import spelled
from scratchformer.pages.live import STATIC

pytest.importorskip("sphinx")
pytest.importorskip("brython")

import exercises

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
PARSE = """
import json
from browser import window
from scratchformer.notation.grammar import NotationError, parse
from scratchformer.notation.spelling import spelled

def parsed(text):
    try:
        return repr(tuple(parse(text))).replace("Infinity", "inf") + spelled(parse(text))
    except NotationError as error:
        return str(error)

window.parseAll = lambda texts: json.dumps([parsed(text) for text in json.loads(texts)])
"""
WORDS = (
    "dz_k", "y_i", "Σ_i", "Σ_{i, i < k}", "∂y_i/∂z_k", "δ_ik", "x̂_c", "exp(", "mean_c(", "max_{s ≤ t}(",
    "softmax_s'(", "(", ")", "+", "−", "-", "/", "·", "*", "^2", "²", "½", "√", "√(", "⌊", "⌋", "|", "[i = k]",
    "for", "with", "where", "elsewhere", ",", "=", ":=", "≤", "_", "{", "}", "'", "C", "n", "3", "0.5e-3", "pi",
    "∞", "γ", "\\frac{a}{b}", "‖a‖", "a @ b", "==", "**", "#", "?", "s'_i", "R_{s−t,j,k}",
)  # fmt: skip


def opened(browser: Any, folder: Path, *names: str) -> Any:
    """The browser with a page of these exercises, without a theme."""
    shutil.copytree(STATIC, folder / "_static")
    exercises.write_script(folder / "_static")
    scripts = "".join(f'<script src="_static/{file}" defer></script>' for file in exercises.FILES)
    style = '<link rel="stylesheet" href="_static/exercises/exercises.css">'
    sections = "".join(map(exercises.exercise_html, names))
    path = folder / "exercises.html"
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8">{style}{sections}{scripts}', encoding="utf-8"
    )
    browser.get(path.as_uri())
    return browser


@pytest.fixture(scope="module")
def loaded(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A page of all exercises, for which Python starts once."""
    page = opened(browser, tmp_path_factory.mktemp("all"), *exercises.DERIVATIONS)
    page.execute_script(
        "document.querySelector('.exercise').page.python; __BRYTHON__.runPythonSource(arguments[0])", PARSE
    )
    return page


@pytest.fixture
def page(loaded: Any) -> Iterator[Any]:
    loaded.execute_cdp_cmd("Runtime.disable", {})  # or chromium describes each exception of Python, which takes longer
    yield loaded
    loaded.execute_cdp_cmd("Runtime.enable", {})


def verdict_in(page: Any, name: str, text: str) -> tuple[bool, str]:
    script = "return document.querySelector(`[data-exercise=${arguments[0]}]`).page.python.grade(arguments[1])"
    found = json.loads(page.execute_script(script, name, text))
    return found["passed"], found["message"]


def verdict_of(name: str, text: str, folder: Path) -> tuple[bool, str]:
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    found = grade(exercise(name), path)
    return found.passed, found.message.strip()


def expect_same(a: tuple[bool, str], b: tuple[bool, str]) -> None:
    """The same verdicts, with numbers that differ by round-off."""
    assert a[0] == b[0], (a, b)
    if a[0]:
        return
    assert NUMBER.split(a[1]) == NUMBER.split(b[1])
    for x, y in zip(NUMBER.findall(a[1]), NUMBER.findall(b[1]), strict=True):
        assert float(x) == pytest.approx(float(y), rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("name", exercises.DERIVATIONS)
def test_the_verdict_is_that_of_the_terminal(page: Any, name: str, tmp_path: Path) -> None:
    each = exercise(name)
    answers = [line for line in each.solution.splitlines() if line in each.answers]
    last = answers[-1].strip().rpartition(" = ")[2]
    mistakes = each.mistakes[:2] if os.environ.get("CI") else each.mistakes
    texts = [each.start, *(each.solution.replace(s.right, s.wrong) for s in mistakes)]
    wrong = [("q_zz", f"2 {last}"), ("(", f"\\frac{{{last}}}{{2}}")][exercises.DERIVATIONS.index(name) % 2]
    texts += [each.solution.replace(last, other) for other in (*wrong, "exp(q_zz)", "1 + e^q_zz", "log(q_{zz + 9})")]
    solved = verdict_in(page, name, each.solution)
    assert solved[0]
    expect_same(solved, verdict_of(name, each.solution, tmp_path))
    for text in texts:
        expect_same(verdict_in(page, name, text), verdict_of(name, text, tmp_path))


def expect_same_trees(page: Any, texts: list[str]) -> None:
    found = json.loads(page.execute_script("return parseAll(arguments[0])", json.dumps(texts)))
    for text, got in zip(texts, found, strict=True):
        try:
            expected = repr(tuple(parse(text))) + spelled(parse(text))
        except NotationError as error:
            expected = str(error)
        assert got == expected, text


def test_every_equation_of_the_exercises_and_its_mistakes_is_read_as_by_python(page: Any) -> None:
    texts = []
    for name in exercises.DERIVATIONS:
        docstring, _ = docstring_in(exercise(name).solution)
        texts += [spelled(item.equation) for item in read(docstring).equations if item.equation]
        texts += [item.text for item in read(docstring).equations]
    expect_same_trees(page, texts)


def test_any_text_is_read_as_by_python(page: Any) -> None:
    texts = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join), min_size=60, max_size=60)

    @settings(max_examples=5, deadline=None, database=None)
    @given(texts)
    def same(batch: list[str]) -> None:
        expect_same_trees(page, [f"y_i = {text}" for text in batch])

    same()


def wait(page: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    done = "return document.querySelector('.exercise').ariaBusy === 'false'"
    WebDriverWait(page, 120, 0.05).until(lambda browser: browser.execute_script(done))


def test_an_error_in_the_check_ends_in_a_message_and_the_exercise_goes_on(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, "softmax_equations")
    field, start = page.find_element("css selector", "input"), "const { page } = document.querySelector('.exercise'); "
    page.execute_script(start + "page.started = { grade: () => { throw new Error(); }, preview: () => '' }")
    field.send_keys("exp(z_k)", "\n")
    wait(page)
    assert "could not be checked" in page.find_element("css selector", ".verdict").text
    page.execute_script(start + "page.started = null; page.check()")
    wait(page)
    assert page.find_element("css selector", ".blank").get_attribute("data-state") == "right"
    page.execute_script("localStorage.clear()")


def test_an_exercise_is_solved_with_the_keyboard(browser: Any, tmp_path: Path) -> None:
    """A wrong line is named, a right one is marked, the last Enter ends it, and a reload keeps what was typed."""
    from selenium.webdriver.common.keys import Keys

    page = opened(browser, tmp_path, "softmax_equations")
    active = lambda: page.switch_to.active_element  # noqa: E731
    page.execute_script("document.body.focus()")
    active().send_keys(Keys.TAB)
    active().send_keys("Z", Keys.ENTER)
    wait(page)
    first, second, third = page.find_elements("css selector", ".blank")
    assert first.get_attribute("data-state") == "wrong"
    says = first.find_element("css selector", ".says").text
    assert "This is what one gets when the whole sum is kept" in says
    assert says.startswith(f"line {first.find_element('css selector', '.number').text}:")
    assert active().get_attribute("aria-invalid") == "true"
    active().send_keys(Keys.CONTROL, "a")
    active().send_keys("exp(z_k)", Keys.ENTER)
    wait(page)
    assert first.get_attribute("data-state") == "right"
    active().send_keys("y_i (d_ik - y_k)", Keys.ENTER)
    wait(page)
    active().send_keys("y_k (dy_k - sum_i dy_i y_i)", Keys.ENTER)
    wait(page)
    assert [each.get_attribute("data-state") for each in (first, second, third)] == ["right"] * 3
    assert "Your 3 equations are true" in page.find_element("css selector", ".verdict").text
    assert third.find_elements("css selector", ".preview math")
    said = page.execute_async_script(
        "const [told] = arguments; const { page } = document.querySelector('.exercise'); page.check(page.blanks[0]);"
        "requestAnimationFrame(() => told([page.blanks[0].says.textContent, page.verdict.textContent]))"
    )
    assert said == ["checking…", "checking…"]
    wait(page)
    page.refresh()
    assert page.find_elements("css selector", "input")[2].get_attribute("value") == "y_k (dy_k - sum_i dy_i y_i)"
    page.execute_script("localStorage.clear()")
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []

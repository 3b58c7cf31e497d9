"""The exercises in the page: what is right in the terminal is right in the page, and mistakes have their names."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scratchformer.course.course import exercise
from scratchformer.course.equations import equations, given_part
from scratchformer.course.exercise import Exercise
from scratchformer.course.grading import planted
from scratchformer.pages.live import STATIC

pytest.importorskip("sphinx")

import exercises

BROWSER = """
globalThis.window = globalThis;
globalThis.document = { querySelectorAll: () => [], querySelector: () => null };
globalThis.location = {};
globalThis.addEventListener = () => {};
"""
JUDGE = """
const said = CASES.map(({ data: { blanks, runs }, answers }) => (
  answers.map(([number, text]) => Live.judged(text, blanks[number], runs))
));
console.log(JSON.stringify(said));
"""
OTHER_FORMS = {  # other spellings and other forms of the solutions, as learners type them
    "linear_equations": ["sum_o dy_no * w_io", "d_oj x_ni", "sum_n dy_no·x_ni", "Σ_{n} dy_no"],
    "softmax_equations": ["y_k Z", "delta_ik y_i - y_i*y_k", "y_k dy_k - y_k Σ_{i'} dy_i' y_i'"],
    "cross_entropy_equations": [
        "softmax_v(z_nv)", "exp(z_nv)/sum_v' exp(z_nv') - [v = targets_n]", "1/count dloss [targets_n >= 0]",
        "dell_n (p_nv - t_nv)",
    ],
    "layernorm_equations": [
        "sum_n (xhat_nc dy_nc)", "Σ_n dy_nc", "gamma_c dy_c", "C^-1", "(x_k - mu)/(C sigma)",
        "1/sigma (d_ck - (1 + xhat_c xhat_k)/C)", "(g_k - 1/C sum_c g_c)/σ - x̂_k/(C σ) sum_c (g_c x̂_c)",
    ],
    "gelu_equations": ["sqrt(2/pi) (1 + 3*0.044715*x_i^2)", "(1 - h_i**2)·a_i", "1/2 (1 + h_i + x_i b_i)"],
    "rotary_equations": [
        "R_{t,0,j} dy_{t,0} + R_{t,1,j} dy_{t,1}", "[j = k and k = j]", "Σ_k R_tkj y_tk", "R_{s-t,j,k}",
    ],
}  # fmt: skip
REFUSED = {  # of the exercise on softmax
    "y_i (": 'expected a number, a name, "(", "[" or Σ at the end',
    "y_i + )": 'expected a number, a name, "(", "[" or Σ in place of ")"',
    "y_i y_j": "index j is on the right only: sum over it",
    "∂y_i/∂z_k": "write the answer without ∂",
    "partial y_i/partial z_k": "write the answer without ∂",
    "\\frac{y_i}{2}": '"\\" has no meaning here: type a/b, sqrt(a), sum_i, x_i^2, xhat, gamma',
    "y_i for i = k": 'leave out "for": the answer must hold for all indices; use δ or [...] instead',
    "Σ_i y_i": "i is an index of this equation already: in the sum, write i'",
    "dz_k": "dz is not known here: use what stands above, in terms of indices",
    "sum(y_i)": "sum needs the index that it runs over, as in sum_i(x_i)",
    "y_ki": "index k has size 3 in y, but 4 elsewhere",
    "y_iik": "this answer: y has 2 axes, and 3 indices",
    "exp(z_i, z_k)": "exp takes one argument, got 2",
    "constructor": "this answer: constructor is not known",
}


def answers_in(text: str, each: Exercise) -> Iterator[tuple[int, str]]:
    """What a filled-in file has in the place of each blank, with the number of the blank."""
    heads = [head for _, line in equations(each.start) if (head := given_part(line))]
    lines = [line for _, line in equations(text)]
    for number, head in enumerate(heads):
        for line in lines:
            if line.startswith(head):
                yield number, re.sub(r" for s ≥ t$", "", line.removeprefix(head).strip())


def flipped(text: str) -> Iterator[str]:
    """An answer with one sign changed, in all ways, and with the opposite sign."""
    yield f"−({text})"
    for match in re.finditer("[−+]", text):
        yield text[: match.start()] + {"−": "+", "+": "−"}[match[0]] + text[match.end() :]


def judged(folder: Path, answers: dict[str, list[tuple[int, str]]]) -> dict[str, list[str]]:
    """What the page says of answers to exercises, each with the number of its blank; "" if it is right."""
    if (node := shutil.which("node")) is None:
        pytest.skip("needs Node")
    cases = [{"data": exercises.exercise_data(name), "answers": each} for name, each in answers.items()]
    code = [(STATIC / file).read_text(encoding="utf-8") for file in exercises.FILES]
    program = folder / "program.js"
    program.write_text("\n".join([BROWSER, *code, f"const CASES = {json.dumps(cases)};", JUDGE]), encoding="utf-8")
    said = subprocess.run([node, program], check=True, capture_output=True, timeout=300).stdout
    return dict(zip(answers, json.loads(said), strict=True))


def test_solutions_and_their_other_forms_are_right(tmp_path: Path) -> None:
    answers = {name: [*answers_in((each := exercise(name)).solution, each)] for name in exercises.DERIVATIONS}
    for name, others in OTHER_FORMS.items():
        answers[name] += enumerate(others)
    for name, found in judged(tmp_path, answers).items():
        assert not any(found), (name, answers[name], found)


def test_every_mistake_is_wrong_and_has_its_name(tmp_path: Path) -> None:
    """The course's own mistakes, and each sign of a solution changed."""
    answers, names = {}, {}
    for name in exercises.DERIVATIONS:
        each = exercise(name)
        right = set(answers_in(each.solution, each))
        wrong = {(number, text): "" for number, answer in right for text in flipped(answer)}
        for slip in each.mistakes:
            changed = set(answers_in(each.solution.replace(slip.right, slip.wrong), each)) - right
            wrong |= dict.fromkeys(changed, slip.what)
        answers[name], names[name] = [*wrong], [*wrong.values()]
    for name, found in judged(tmp_path, answers).items():
        for answer, what, said in zip(answers[name], names[name], found, strict=True):
            assert said and what in said, (name, answer, said)


def test_mistakes_that_are_generated_from_a_solution_are_wrong_and_have_a_name(tmp_path: Path) -> None:
    answers = {}
    for name in exercises.DERIVATIONS:
        each = exercise(name)
        heads = [head for _, line in equations(each.start) if (head := given_part(line))]
        wrong = {answer for head in heads for _, text in planted(each, head) for answer in answers_in(text, each)}
        answers[name] = sorted(wrong - set(answers_in(each.solution, each)))
    for name, found in judged(tmp_path, answers).items():
        for answer, said in zip(answers[name], found, strict=True):
            assert said, (name, answer)
            assert "not true" not in said or "This is what one gets when" in said, (name, answer, said)


def test_what_cannot_be_an_answer_is_refused_with_the_reason(tmp_path: Path) -> None:
    (found,) = judged(tmp_path, {"softmax_equations": [(1, text) for text in REFUSED]}).values()
    assert dict(zip(REFUSED, found, strict=True)) == REFUSED


def opened(browser: Any, folder: Path, name: str) -> Any:
    """The browser with the page of an exercise, without a theme."""
    scripts = "".join(f'<script src="{STATIC / file}" defer></script>' for file in exercises.FILES)
    style = f'<link rel="stylesheet" href="{STATIC / "exercises/exercises.css"}">'
    path = folder / "exercises.html"
    page = f'<!doctype html><html lang="en"><meta charset="utf-8">{style}{exercises.exercise_html(name)}{scripts}'
    path.write_text(page, encoding="utf-8")
    browser.get(path.as_uri())
    return browser


def test_an_exercise_is_solved_with_the_keyboard(browser: Any, tmp_path: Path) -> None:
    """A wrong line is named, a right one is marked, the last Enter ends it, and a reload keeps what was typed."""
    from selenium.webdriver.common.keys import Keys

    page = opened(browser, tmp_path, "softmax_equations")
    active = lambda: page.switch_to.active_element  # noqa: E731
    page.execute_script("document.body.focus()")
    active().send_keys(Keys.TAB)
    active().send_keys("Z", Keys.ENTER)
    first, second, third = page.find_elements("css selector", ".blank")
    assert first.get_attribute("data-state") == "wrong"
    says = first.find_element("css selector", ".says").text
    assert "This is what one gets when the whole sum is kept" in says
    assert says.startswith("not true at row 0, k = 0: expected 1.")
    assert active().get_attribute("aria-invalid") == "true"
    active().send_keys(Keys.CONTROL, "a")
    active().send_keys("exp(z_k)", Keys.ENTER)
    assert first.get_attribute("data-state") == "right"
    active().send_keys("y_i (d_ik - y_k)", Keys.ENTER)
    active().send_keys("y_k (dy_k - sum_i dy_i y_i)", Keys.ENTER)
    assert [each.get_attribute("data-state") for each in (first, second, third)] == ["right"] * 3
    assert "All are true" in page.find_element("css selector", ".verdict").text
    assert second.find_element("css selector", ".preview").text == "yi (δik − yk)"
    page.refresh()
    assert page.find_elements("css selector", "input")[2].get_attribute("value") == "y_k (dy_k - sum_i dy_i y_i)"
    assert "All are true" in page.find_element("css selector", ".verdict").text
    page.execute_script("localStorage.clear()")
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_hints_the_solution_and_a_new_start(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, "rotary_equations")
    states = "return [...document.querySelectorAll('.blank')].map(({ dataset }) => dataset.state)"
    buttons = page.find_elements("css selector", ".exercise-bar button")
    check, hint, solve, again = buttons
    for count in 1, 2, 3:
        hint.click()
        assert len(page.find_elements("css selector", ".hints li")) == count
    assert not hint.is_enabled()
    solve.click()
    assert page.execute_script(states) == ["right"] * 4
    again.click()
    assert page.execute_script(states) == [""] * 4
    assert hint.is_enabled() and not page.find_element("css selector", ".verdict").text
    check.click()
    assert page.execute_script(states) == [""] * 4
    page.execute_script("localStorage.clear()")

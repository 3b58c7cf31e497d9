"""The live pages, driven as a reader would: numbers are changed, pointed at, stepped through, and made wrong."""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scratchformer import models, nn, ops
from scratchformer.catalogue import mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.notation.grammar import canonical
from scratchformer.pages.live import FILES, STATIC, bound

pytest.importorskip("sphinx")
pytest.importorskip("selenium")

import live
from docstrings import pieces
from layers import LIVE
from levels import WHOLE, levels
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import WebDriverWait

OPERATIONS = [name for name in CASES if hasattr(ops, name) and hasattr(ops, f"{name}_backward")]
LAYERS = [name for layer, titles in LIVE.items() for name in (layer, f"{layer}, pre")[: len(titles)]]
NAMES = [*OPERATIONS, *LAYERS]
CI = bool(os.environ.get("CI"))
SAME_DRAWS = "let x = 1; Math.random = () => (x = (x * 16807) % 2147483647) / 2147483647;"  # in every run
TERMS = ".live-list:not(.live-inner *) > [data-value]"  # of a number, not those of the sums inside of them
DRAWS = 4 if CI else 60  # of new numbers on each page


class Page:
    """The live part of one operation or layer, alone in a file. level: by default the last, the whole derivation."""

    def __init__(self, browser: Any, name: str, folder: Path, level: int = -1) -> None:
        self.browser, self.name = browser, name
        self.mistakes = mistakes_of(name.partition(",")[0])
        files = "".join(f'<script src="{STATIC / file}" defer></script>' for file in FILES)
        style = f'<link rel="stylesheet" href="{STATIC / "live/live.css"}">'
        path = folder / f"{name}.html"
        phone = '<meta name="viewport" content="width=device-width">'
        head = f'<!doctype html><html lang="en"><meta charset="utf-8">{phone}<title>{name}</title>{style}{files}'
        path.write_text(f"{head}<main>{live.live_html(name, self.mistakes)}</main>", encoding="utf-8")
        browser.get(path.as_uri())
        ready = "return Boolean(document.querySelector('.live').page)"  # the scripts run after the page is there
        WebDriverWait(browser, 20, poll_frequency=0.01).until(lambda browser: browser.execute_script(ready))
        self.to(level)

    def to(self, level: int) -> None:
        each = levels(self.name)
        self.level = level % len(each)
        self.case, _ = live.page_case(self.name, each[level], live.PageSizes(self.name))
        self.layer = getattr(self.case.op, "__self__", None)
        self.run("page.to(arguments[0])", self.level)
        self.run("for (const fold of document.querySelectorAll('.live-fold')) fold.open = true")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(f"const page = document.querySelector('.live').page; {script}", *arguments)

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def point(self, element: Any) -> None:
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        self.actions().move_to_element(element).perform()

    def actions(self) -> Any:
        return ActionChains(self.browser, duration=0)

    def shown(self) -> dict[str, np.ndarray]:
        """The numbers that stand on the page, by the name of their array, once the page has drawn the last change."""
        WebDriverWait(self.browser, 20, poll_frequency=0.01).until(lambda _: self.run("return !page.scheduled"))
        found = self.run(
            "return Object.fromEntries(page.grids.filter((grid) => grid.name)"
            ".map((grid) => [grid.name, [grid.array.shape, grid.cells.map(({ face }) => face.dataset.value)]]))"
        )
        return {name: np.array(values, float).reshape(shape) for name, (shape, values) in found.items()}

    def expected(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The output and the gradients that the operation itself gives for the inputs, which are on the page."""
        inputs, arguments = dict(inputs), bound(self.case)
        weights = self.layer.named_parameters() if self.layer else {}
        for name, weight in weights.items():
            weight.data[...], weight.grad[...] = inputs[canonical(name)], 0
        if "counted" in inputs:
            inputs["targets"] = np.where(inputs["counted"] > 0, inputs["targets"], -1)
            inputs["ignore_index"] = np.array(-1)
        if "pattern" in arguments and "m" in inputs:
            arguments["pattern"] = pattern_of(inputs["m"], arguments["pattern"])
        given = {name: converted(inputs[name], old) if name in inputs else old for name, old in arguments.items()}
        parameters = inspect.signature(self.case.op).parameters.items()
        named = [name for name, p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        several = [x for name, x in given.items() if name not in [canonical(p) for p, _ in parameters]]  # of *inputs
        y, cache = self.case.op(*several, **{name: given[canonical(name)] for name in named})
        output, dy = self.run("return page.data.outputs[0]")
        gradients = self.case.op_backward(inputs[dy], cache)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        differentiable = [n for n, value in given.items() if isinstance(value, np.ndarray) and value.dtype.kind == "f"]
        found = {f"d{name}": weight.grad for name, weight in weights.items()}
        of_weights = {canonical(name): gradient for name, gradient in found.items() if canonical(name) in inputs}
        return {output: y, **{f"d{n}": g for n, g in zip(differentiable, gradients, strict=True)}, **of_weights}

    def agrees(self) -> None:
        shown = self.shown()
        for name, array in self.expected(shown).items():
            np.testing.assert_allclose(
                shown[name], array, rtol=0, atol=1e-12 * max(1, np.abs(array).max()), err_msg=name
            )


def pattern_of(m: np.ndarray, old: ops.Pattern) -> ops.Pattern:
    """The pattern of the mask or the lengths m on the page. Queries are the last positions of a square table."""
    if isinstance(old, ops.Padding):
        return ops.Padding(m.astype(int))
    if isinstance(old, ops.Edges):
        table = np.ones((m.shape[1], m.shape[1]), bool)
        table[-len(m) :] = m > 0
        return ops.Edges(table)
    return Mask(m > 0)


class Mask(ops.Full):
    """The pattern of a table of all pairs of all heads."""

    def __init__(self, allowed: np.ndarray) -> None:
        self.allowed = allowed

    def table(self, H: int, T: int, S: int, xp: Any) -> np.ndarray:
        return self.allowed


def converted(value: np.ndarray, old: Any) -> Any:
    """A number of the page as the type that the operation takes."""
    if isinstance(old, np.ndarray):
        return value.astype(old.dtype).reshape(old.shape)
    return value.astype(int) if value.ndim else type(old if old is not None else 0)(value)


LEVELS = [(name, level) for name in NAMES for level in range(len(levels(name)))]


@pytest.fixture(scope="module", params=LEVELS, ids=lambda one: f"{one[0]}-{one[1]}")
def loaded(browser: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Page:
    name, level = request.param
    return Page(browser, name, tmp_path_factory.mktemp("live"), level)


@pytest.fixture
def page(loaded: Page) -> Iterator[Page]:
    yield loaded
    messages = loaded.browser.get_log("browser")
    loaded.run("page.choice.selectedIndex = 0; page.plant(-1); page.go(null); page.reset(); page.pin(null)")
    assert not messages


def test_the_page_begins_with_right_numbers(page: Page) -> None:
    page.agrees()
    assert page.run("return Math.max(...page.model.lines.map((line) => line.disagreement()))") < 1e-6
    assert page.find(".live-badge")
    assert not page.find(".live-badge.bad")


def test_a_typed_and_a_dragged_number_move_what_depends_on_them(page: Page) -> None:
    before = page.shown()
    typed, dragged = page.find(".live-inputs input:not(.live-switch)")[:2]
    typed.send_keys(Keys.CONTROL, "a", Keys.NULL, "1" if whole(page) else "−1.75", Keys.TAB)
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", dragged)
    page.actions().click_and_hold(dragged).move_by_offset(10, 0).move_by_offset(30, 0).release().perform()
    page.run("page.check()")
    after = page.shown()
    assert any((before[name] != after[name]).any() for name in page.run("return page.data.inputs"))
    page.agrees()
    assert not page.find(".live-badge.bad")


def whole(page: Page) -> bool:
    """Whether the first input holds whole numbers."""
    return bool(page.run("return (page.data.ranges[page.data.inputs[0]] || {}).whole"))


def test_the_terms_of_a_number_add_up_to_it(page: Page) -> None:
    faces = page.find(".live-body > .live-panels td button")
    for face in (faces[0], faces[-1]):
        page.point(face)
        total = float(page.find(".live-total")[0].get_attribute("data-value"))
        terms = [float(term.get_attribute("data-value")) for term in page.find(TERMS)]
        assert total == pytest.approx(float(face.get_attribute("data-value")), rel=1e-9, abs=1e-12)
        assert sum(terms) == pytest.approx(total, rel=1e-9, abs=1e-12)
    wrong = page.run(
        "return page.cards.filter(({ grid }) => grid).flatMap(({ grid, i }) => grid.cells.map((cell, p) => {"
        "  if (!cell) return false;"
        "  const { value, terms } = page.model.terms(i, p);"
        "  const total = terms.reduce((sum, term) => sum + term.value, 0);"
        "  return Math.abs(total - value) > 1e-9 * Math.max(1, Math.abs(value));"
        "})).filter(Boolean).length"
    )
    assert wrong == 0


def test_the_first_line_about_a_number_has_its_indices(page: Page) -> None:
    """Not some as numbers and others as letters: only the letters of sums are left."""
    left = page.run(
        "return page.cards.filter(({ grid }) => grid).flatMap(({ grid, i }) => {"
        "  page.show(grid.cells.findLast(Boolean).face);"
        "  const { letters, withs, parts } = page.model.lines[i];"
        "  const bound = [];"
        "  for (const part of parts) Live.walk(part, (node) => { if (node[0] === 'over') bound.push(...node[2]); });"
        "  const subs = [...page.terms.querySelectorAll('.live-title sub')].map((sub) => sub.textContent);"
        "  const used = subs.flatMap((text) => text.match(/(?<![a-z])[a-z]'*(?![a-z])|[a-z]'*/g) || []);"
        "  return used.filter((x) => [...letters, ...withs.keys()].includes(x) && !bound.includes(x));"
        "})"
    )
    assert not left


def test_the_entries_of_a_number_light_up(page: Page) -> None:
    gradient = page.run("return page.cards.find(({ of }) => of).i")
    page.point(page.find(f'.live-line[data-line="{gradient}"] td button')[0])
    lit = page.run(
        "const faces = [...document.querySelectorAll('td.source [data-position]')];"
        "return new Set(faces.map(({ grid, dataset }) => `${grid.name} ${dataset.position}`)).size"
    )
    entries = page.run("return page.model.terms(arguments[0], 0).entries.length", gradient)
    assert 0 < lit <= entries
    assert page.run("page.rest(); return document.querySelectorAll('td.source').length") == 0


def test_the_entries_of_a_term_stand_out(browser: Any, tmp_path_factory: Any) -> None:
    page = Page(browser, "softmax", tmp_path_factory.mktemp("entries"))
    page.shown()
    page.run("page.pin(page.cards.find(({ of }) => of).grid.firstFace)")
    (term, *_) = page.find("[data-entries]")
    page.point(term)
    strong, source, reads = page.run(
        "const lit = (kind) => [...document.querySelectorAll(`td.${kind} [data-position]`)]"
        "  .map(({ grid, dataset }) => `${grid.name} ${dataset.position}`);"
        "return [lit('strong'), lit('source'), arguments[0].dataset.entries.split(',')]",
        term,
    )
    assert strong and {*strong} <= {*source} and {*strong} <= {*reads}
    page.point(page.find(".live-title")[0])
    assert not page.find("td.strong")


def test_the_sums_inside_a_term_have_their_terms(browser: Any, tmp_path_factory: Any) -> None:
    page = Page(browser, "cross_entropy", tmp_path_factory.mktemp("sums"))
    shown = page.run(
        "page.ask(page.cards.find(({ grid }) => grid && grid.name === 'p').grid.firstFace);"
        "return [...document.querySelectorAll('.live-inner')].map((each) => ["
        "  each.firstChild.textContent,"
        "  [...each.querySelectorAll('[data-value]')].map(({ dataset }) => Number(dataset.value))])"
    )
    ((title, terms),) = shown
    e = np.exp(page.shown()["logits"].ravel()[: len(terms)])
    assert title == f"with Σv' exp(z0v') = {e.sum():.3f}"
    np.testing.assert_allclose(terms, e)


def test_new_numbers_are_drawn_within_their_ranges(browser: Any, tmp_path_factory: Any) -> None:
    page = Page(browser, "cross_entropy", tmp_path_factory.mktemp("drawn"))
    before = page.shown()
    for button in page.find(".live-buttons button"):
        button.click()
        after = page.shown()
        changed = {name for name in page.run("return page.data.inputs") if (before[name] != after[name]).any()}
        assert ("logits" in changed) == (button.text == "New numbers")
        for name, limits in page.run("return page.data.ranges").items():
            assert limits["low"] <= after[name].min() <= after[name].max() <= limits["high"]
        page.agrees()


def test_lines_are_stepped_through(page: Page) -> None:
    lines = page.run("return page.steps.length")
    states = page.run(
        "const [back, on, all] = document.querySelectorAll('.live-steps button');"
        "return [on, on, back, all].map((button) => {"
        "  button.click();"
        "  return [page.counter.textContent, document.querySelectorAll('.live-card.later').length];"
        "})"
    )
    assert [text.partition(",")[0] for text, _ in states] == [*(f"Line {k} of {lines}" for k in (1, 2, 1)), ""]
    assert [later for _, later in states] == [lines - 1, lines - 2, lines - 1, 0]
    assert page.run("page.go(page.steps.length - 1); return document.querySelectorAll('.later').length") == 0


def test_a_planted_mistake_is_marked(page: Page) -> None:
    titles = page.run("return page.data.mistakes.map(({ title }) => title)")
    assert set(titles) <= {mistake.title for mistake in page.mistakes}
    assert len(titles) == len(page.mistakes) or page.level == 0
    right = page.shown()
    for number, title in enumerate(titles, 1):
        marked = page.run(
            "page.choice.selectedIndex = arguments[0]; page.choice.dispatchEvent(new Event('change'));"
            "return [...document.querySelectorAll('.live-line td.wrong button')]"
            ".map((face) => [face.grid.name, Number(face.dataset.position), face.textContent, face.dataset.value])",
            number,
        )
        assert marked, title
        for name, position, text, value in marked:
            assert text.startswith("≠")
            assert ": " in text
            assert name is None or float(value) != right[name].flat[position]
        assert page.run("return [...document.querySelectorAll('.mistaken')].length") == 1
    left = (
        "page.choice.selectedIndex = 0; page.plant(-1); page.check(); return document.querySelectorAll('.wrong').length"
    )
    assert page.run(left) == 0


@pytest.mark.parametrize("layer", LIVE)
def test_every_mistake_of_a_layer_can_be_planted(layer: str) -> None:
    mistakes = mistakes_of(layer)
    names = [name for name in LAYERS if name.partition(",")[0] == layer]
    planted = {change["title"] for name in names for change in live.live_data(name, mistakes)["mistakes"]}
    assert planted == {mistake.title for mistake in mistakes} != set()


@pytest.mark.parametrize("name", LAYERS)
def test_every_weight_of_a_layer_has_its_gradient(name: str) -> None:
    data = live.live_data(name)
    case, _ = live.page_case(name, WHOLE, live.PageSizes(name))
    assert {canonical(weight) for weight in case.op.__self__.named_parameters()} <= {*data["gradients"].values()}


def test_gradients_are_compared_with_differences(page: Page) -> None:
    compared = page.run(
        "return page.cards.filter(({ of }) => of)"
        ".map(({ of, grid }) => [[...page.model.slopes('L', of, 1)], [...grid.array.data]])"
    )
    assert compared
    for numerical, analytic in compared:
        np.testing.assert_allclose(numerical, analytic, rtol=0, atol=1e-6 * max(1, np.abs(analytic).max()))


def test_other_numbers_are_never_called_wrong(page: Page) -> None:
    """Whatever is drawn: lengths of 0, rows that do not count, ties, and zeros, where relu has a corner."""
    page.run(SAME_DRAWS)
    ends = (
        "page.setInputs((name) => page.data.ranges[name] ? array(name).map(() => page.data.ranges[name].%s)"
        " : array(name));"
    )
    for script in (
        "page.draw();",
        ends % "low",
        ends % "high",
        "page.setInputs((name) => page.data.ranges[name] || page.data.outputs.some(([, dy]) => dy === name)"
        " ? array(name) : array(name).map((x, i) => i % 2 ? x : 0));",
        "page.setInputs((name) => page.data.ranges[name] ? array(name) : array(name).map(() => 1));",
    ):
        draws = DRAWS if "draw" in script else 1
        each = 1 if page.layer else draws  # in one call; the numbers of a layer are compared with NumPy's after each
        for _ in range(draws // each):
            states = page.run(
                "const array = (name) => page.model.array(name).data;"
                "return Array.from({ length: arguments[0] }, () => {"
                f"  {script} page.refresh(); page.check();"
                "  return [[...document.querySelectorAll('.live-badge')].map((badge) => badge.textContent),"
                "    document.querySelectorAll('.live-badge.bad').length, document.querySelectorAll('td.wrong').length,"
                "    page.data.inputs.map((name) => [name, [...page.model.array(name).data]])];"
                "})",
                each,
            )
            assert len(states) == each
            for state in states:
                assert state[1:3] == [0, 0] and not any("NaN" in text for text in state[0]), state
            if page.layer and "draw" in script:
                page.agrees()


def test_a_line_that_holds_for_some_elements_follows_the_numbers(browser: Any, tmp_path_factory: Any) -> None:
    page = Page(browser, "max_pool", tmp_path_factory.mktemp("for"))
    here = (
        "const card = page.cards.find(({ i }) => page.data.items[i].text.endsWith('for n_b > 0'));"
        "const places = () => page.model.lines[card.i].positions;"
    )
    lengths = (
        "page.setInputs((name) => name === 'lengths' ? arguments[0] : page.model.array(name).data); page.refresh();"
    )
    columns = len(page.run(f"{here} {lengths} return places()", [1, 2])) // 2
    for given in [2, 3], [0, 1], [3, 0]:
        found = page.run(f"{here} {lengths} return places()", given)
        assert found == [b * columns + c for b in range(2) if given[b] for c in range(columns)]
        page.run("page.check()")
        assert not page.find(".live-badge.bad")
    page.run(f"{lengths} page.check()", [0, 0])
    assert "holds for no element now" in page.run("return document.querySelector('main').textContent")
    assert not page.find(".live-badge.bad") and not browser.get_log("browser")


def test_a_corner_is_not_called_wrong_and_a_mistake_beside_it_is_not_missed(
    browser: Any, tmp_path_factory: Any
) -> None:
    page = Page(browser, "relu", tmp_path_factory.mktemp("corner"))
    zeros = (
        "const array = (name) => page.model.array(name).data;"
        "page.setInputs((name) => name === 'x' ? array(name).map((x, i) => i ? x : 0) : array(name));"
    )
    page.run(f"{zeros} page.refresh(); page.check()")
    assert not page.find(".live-badge.bad")
    assert page.run(
        "const [x, dx] = ['x', 'dx'].map((name) => page.model.array(name).data[0]); return x === 0 && dx === 0"
    )
    for number in range(len(page.mistakes)):
        page.run("page.plant(arguments[0]); page.check()", number)
        assert page.find(".live-badge.bad")


@pytest.mark.parametrize("name", ["softmax", "layernorm", "linear"])
def test_two_numbers_that_differ_never_look_equal(browser: Any, tmp_path_factory: Any, name: str) -> None:
    page = Page(browser, name, tmp_path_factory.mktemp("digits"))
    for number in range(len(page.mistakes)):
        for size in 1, 1.0001:
            pairs = page.run(
                "page.plant(arguments[0]); page.check();"
                "return [...document.querySelectorAll('.live-line td.wrong button')]"
                ".map((face) => [face.firstChild.textContent.slice(2), face.lastChild.textContent.split(': ')[1]])",
                number,
            )
            assert all(a != b for a, b in pairs)
            page.run(f"page.model.set(page.data.inputs[0], 0, {size}); page.compute()")
    close = [[0.01491, 0.01509], [1.00001, 1.00002], [-3e-7, -3.4e-7], [123456.7, 123456.8], [0.05, 0.049999999]]
    texts = page.run(
        "const line = page.cards.find(({ grid }) => grid && grid.cells.length > 1);"
        "return arguments[0].map(([x, y]) => {"
        "  const grid = line.grid;"
        "  grid.array = { shape: grid.array.shape, data: Float64Array.from(grid.array.data, () => x) };"
        "  grid.update(grid.array.data.map(() => y));"
        "  const { face } = grid.cells[0];"
        "  return [face.firstChild.textContent.slice(2), face.lastChild.textContent.split(': ')[1]];"
        "})",
        close,
    )
    for (a, b), (x, y) in zip(texts, close, strict=True):
        shown = [float(text.replace("−", "-")) for text in (a, b)]
        assert a != b and (shown[0] < shown[1]) == (x < y)


def test_numbers_are_reached_and_held_by_keyboard_and_pointer(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = Page(browser, "linear", tmp_path_factory.mktemp("keys"))
    number = page.find(".live-inputs input")[0]
    before = page.shown()["x"].flat[0]
    number.send_keys(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert page.shown()["x"].flat[0] == pytest.approx(before + 0.1)
    focused = (
        "return [document.activeElement.getAttribute('aria-label'), document.querySelector('.live-title').textContent]"
    )
    assert page.run(focused)[0] == "x[0, 0, 1]"
    first = page.find(".live-line td button")[0]
    first.click()
    page.point(page.find(".live-line td button")[1])
    assert page.run(focused)[1].startswith("y00")  # it is held
    first.send_keys(Keys.ESCAPE, Keys.ARROW_RIGHT)
    assert page.run(focused)[1].startswith("y01")
    assert page.run("return document.activeElement.dataset.position") == "1"
    assert not browser.get_log("browser")


def test_a_number_reached_by_keyboard_is_not_under_the_bar(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = Page(browser, "attention", tmp_path_factory.mktemp("bar"))
    page.run("page.choice.focus()")
    reached = 0
    for _ in range(16):
        page.actions().send_keys(Keys.TAB).perform()
        name, bottom, bar = page.run(
            "const [face, bar] = [document.activeElement, document.querySelector('.live-dock')];"
            "return [face.dataset.position, face.getBoundingClientRect().bottom, bar.getBoundingClientRect().top]"
        )
        reached += name is not None
        assert name is None or bottom <= bar
    assert reached > 10


def test_few_words_stand_before_the_first_numbers_and_the_first_equation(page: Page) -> None:
    """With the page's heading and first sentence. The options of a choice are not seen until it is opened."""
    above = page.run(
        "const end = document.querySelector(arguments[0]);"
        "const words = (node) => node === end ? [[], true] : node.nodeType === 3"
        "  ? [node.textContent.match(/[A-Za-z]{2,}/g) || [], false]"
        "  : node.nodeType !== 1 || node.localName === 'select' || !node.checkVisibility() ? [[], false]"
        "  : [...node.childNodes].reduce(([found, done], child) => {"
        "      if (done) return [found, done];"
        "      const [more, ended] = words(child);"
        "      return [[...found, ...more], ended];"
        "    }, [[], false]);"
        "return words(document.querySelector('.live'))[0].length",
        ".live-line math",
    )
    name = page.name.partition(",")[0]
    thing = next(getattr(room, name) for room in (ops, nn, models) if hasattr(room, name))
    summary, *_ = pieces(inspect.getdoc(thing) or "")
    assert above + len(re.findall(r"[^\W\d_]{2,}", f"{page.name} Try it {summary.text}")) <= 120


@pytest.mark.parametrize("name", [name for name in NAMES if len(levels(name)) > 1])
def test_the_switch_adds_what_the_plain_derivation_leaves_out(browser: Any, tmp_path_factory: Any, name: str) -> None:
    page = Page(browser, name, tmp_path_factory.mktemp("switch"), 0)
    plain = set(page.run("return page.data.items.map(({ html }) => html)"))
    assert not page.find(".live-card.added")
    page.run(SAME_DRAWS)
    for level in 1, 0:
        (switch,) = page.find(".live-extension input")
        switch.send_keys(Keys.SPACE)
        assert page.run("return [page.level, document.activeElement.checked]") == [level, bool(level)]
        marked = page.run("return page.cards.map(({ i, element }) => [i, element.classList.contains('added')])")
        items = page.run("return page.data.items.map(({ html }) => html)")
        assert all(added == (items[i] not in plain) for i, added in marked)
        assert bool(level) == (any(added for _, added in marked) or bool(page.find(".live-inputs .added")))
        bad = page.run(
            "return Array.from({ length: 10 }, () => {"
            "  page.draw(); page.refresh(); page.check();"
            "  return document.querySelectorAll('.live-badge.bad').length;"
            "})"
        )
        assert bad == [0] * 10
    assert not browser.get_log("browser")


def test_the_text_of_a_derivation_follows_the_switch_and_links(browser: Any, tmp_path_factory: Any) -> None:
    page = Page(browser, "attention", tmp_path_factory.mktemp("text"), 0)
    page.run(
        "document.querySelector('main').insertAdjacentHTML('beforeend', arguments[0])",
        '<p class="level level-0 shown"></p><p class="level level-1" id="all"></p>',
    )
    visible = "return [...document.querySelectorAll('.level')].map((p) => p.checkVisibility())"
    added = "return [...document.querySelectorAll('.level')].map((p) => p.classList.contains('added'))"
    assert page.run(visible) == [True, False]
    for _ in range(2):
        page.find(".live-extension input")[0].click()
    assert page.run(visible) == [True, False]
    browser.execute_script("location.hash = 'all'")
    WebDriverWait(browser, 5).until(lambda _: page.run(visible) == [False, True])
    assert page.run("return page.level") == 1 and page.run(added) == [False, True]


def test_what_is_no_number_is_refused_and_said_so(browser: Any, tmp_path_factory: Any) -> None:
    page = Page(browser, "relu", tmp_path_factory.mktemp("typing"))
    number = page.find(".live-inputs input")[0]
    before = page.shown()["x"].flat[0]
    for text in "abc", "-", "1/3", "sqrt(2)", "1e400", "1e40", "nan", "1e7", "":
        number.send_keys(Keys.CONTROL, "a", Keys.NULL, *(text or Keys.DELETE))
        assert number.get_attribute("aria-invalid") == "true", text
        assert page.shown()["x"].flat[0] == before, text
        number.send_keys(Keys.ENTER)
        assert number.get_attribute("aria-invalid") == "false"
        assert float(number.get_attribute("value").replace("−", "-")) == before
    number.send_keys(Keys.CONTROL, "a", Keys.NULL, "2,5", Keys.ENTER)
    assert page.shown()["x"].flat[0] == 2.5
    assert number.get_attribute("aria-invalid") == "false"


def test_the_title_of_a_number_says_each_side_once(page: Page) -> None:
    titles = page.run(
        "return page.cards.filter(({ grid }) => grid).map(({ grid }) => "
        "  (page.show(grid.firstFace), document.querySelector('.live-title').textContent))"
    )
    titles += page.run(
        "return page.model.lines.filter((line) => line.result() && line.parts[0][0] === 'over').map((line) => {"
        "  const grid = { line: line.number, cells: line.result().data };"
        "  page.showTerms({ ...grid, cells: [...grid.cells].map(() => ({ wrong: null })) }, 0);"
        "  return document.querySelector('.live-title').textContent;"
        "})"
    )
    for title in titles:
        first, second, *_ = title.split(" = ")
        assert first != second, title


def test_an_ignored_row_has_target_0(browser: Any, tmp_path_factory: Any) -> None:
    page = Page(browser, "cross_entropy", tmp_path_factory.mktemp("ignored"))
    assert page.run("return page.data.zero") == {"targets": "counted"}
    page.run("page.model.set('counted', 1, 0); page.compute()")
    shown = page.shown()
    assert shown["targets"].tolist() == [0, 0, 0] and shown["counted"].tolist() == [1, 0, 0]
    page.agrees()


def test_gradients_are_large_enough_to_be_seen(page: Page) -> None:
    largest = page.run(
        "return Math.max(...Object.keys(page.data.gradients).map((name) => Live.largest(page.model.array(name).data)))"
    )
    assert largest >= 0.25


@pytest.mark.parametrize("name", ["TransformerBlock", "TransformerBlock, pre", "Residual", "Residual, pre"])
def test_a_layer_made_of_others_begins_with_its_own_equations(browser: Any, tmp_path_factory: Any, name: str) -> None:
    page = Page(browser, name, tmp_path_factory.mktemp("layer"))
    inside = page.run("return page.cards.length")
    page.run("for (const fold of document.querySelectorAll('.live-fold')) fold.open = false")
    shown = page.run("return page.steps.map(({ call, element }) => [call, element.checkVisibility()])")
    assert all(visible for _, visible in shown) and 6 <= len(shown) <= 12 < inside
    assert [call for call, _ in shown].count(False) == len(shown) // 3  # the sums, in both directions
    sums = dict(
        page.run("return page.cards.filter((card) => page.isSum(card)).map(({ i }) => [page.model.lines[i].name, i])")
    )
    title = page.find(".live-title")[0].get_attribute("textContent")
    assert title.split("=")[0].strip()[:2] in sums  # the gradient of what goes two ways
    assert title.count("+") == 1
    inputs = page.run("return [...document.querySelectorAll('.live-inputs')].map((list) => list.checkVisibility())")
    assert inputs == [True, False]
    page.run("page.choice.selectedIndex = 1; page.plant(0)")
    assert not page.find(".mistaken") or page.find(".mistaken")[0].is_displayed()


@pytest.mark.parametrize("width, height", [(390, 844), (1280, 800)])
def test_the_bar_leaves_the_numbers_their_screen(browser: Any, tmp_path_factory: Any, width: int, height: int) -> None:
    """It opens when a number is asked for, not when an input is changed, and is no taller than what it says."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 800}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        for name in "attention", "cross_entropy", "layernorm":
            page = Page(browser, name, tmp_path_factory.mktemp("phone"), 0)
            bar = "return document.querySelector('.live-dock').offsetHeight"
            assert page.run(bar) <= 60
            page.find(".live-inputs input")[0].send_keys(Keys.ARROW_UP)
            assert page.run(bar) <= 60
            number = page.run(
                "const face = page.cards.find(({ grid }) => grid).grid.firstFace;"
                "face.scrollIntoView({ block: 'end' });"
                "scrollBy(0, 70); return face"
            )
            number.click()
            assert page.run(bar) > 60
            bottom, top = page.run(
                "const [number, bar] = ['.here button', '.live-dock'].map((each) => document.querySelector(each));"
                "return [number.getBoundingClientRect().bottom, bar.getBoundingClientRect().top]"
            )
            assert bottom <= top
            page.find(".live-close")[0].click()
            assert page.run(bar) <= 60
            page.run("page.ask(page.cards.find(({ grid }) => grid).grid.firstFace)")
            content, open_bar = page.run(
                "return ['.live-terms', '.live-dock'].map((each) => document.querySelector(each).offsetHeight)"
            )
            assert open_bar <= content + 80
            tallest = page.run(
                "return Math.max(...page.cards.filter(({ grid }) => grid).map(({ grid }) => "
                "  (page.show(grid.firstFace), document.querySelector('.live-dock').offsetHeight)))"
            )
            assert tallest <= 0.25 * height
            assert page.run("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

"""The living training step: its numbers are NumPy's, its gradients are right, and readers can do what it says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scratchformer.dispatch import reference_only
from scratchformer.optim import Adam
from scratchformer.pages.live import STATIC

pytest.importorskip("sphinx")
pytest.importorskip("selenium")

import living
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import WebDriverWait
from step_plan import plan_of

WIDTHS = (390, 820, 1440)
STEPS = 100
NAME = "LanguageModel"


# The gradient beside the result of each call, against the loss when a number of the result is moved.
DIFFERENCES = """
const { step, plan, picture } = page;
const wrong = [];
for (const number of picture.calls) {
  const { output, label } = plan.calls[number];
  if (output === plan.loss) continue;
  if (!plan.gradients[output]) { wrong.push(`${label}: no gradient`); continue; }
  const [buffer, positions] = plan.gradients[output];
  const gradient = step.arrays[buffer].slice();
  const loss = (i, h) => {
    for (let k = 0; k < step.middle; k++) {
      step.call(k);
      if (k === number) step.arrays[output][i] += h;
    }
    return step.loss();
  };
  const { length } = step.arrays[output];
  for (const i of [0, Math.floor(length / 3), length - 1]) {
    const slope = (loss(i, 1e-6) - loss(i, -1e-6)) / 2e-6;
    const given = gradient[positions ? positions[i] : i];
    if (Math.abs(slope - given) > 1e-7) wrong.push(`${label} ${i}: ${given}, difference ${slope}`);
  }
}
step.forward();
return wrong;
"""


class Page:
    """The living step alone in a file."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser = browser
        files = "".join(f'<script src="{STATIC / file}" defer></script>' for file in living.FILES)
        styles = "".join(f'<link rel="stylesheet" href="{STATIC / file}">' for file in living.STYLES)
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>living</title>'
        head += f'<meta name="viewport" content="width=device-width">{styles}{files}'
        path = folder / "living.html"
        living.write_models(folder)
        path.write_text(f"{head}<main>{living.living_html()}</main>", encoding="utf-8")
        self.address = path.as_uri()

    def open(self) -> None:
        self.browser.get(self.address)
        WebDriverWait(self.browser, 60).until(lambda _: self.run("return Boolean(page)"))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(f"const page = document.querySelector('.living').page; {script}", *arguments)

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def keys(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.browser, duration=0).send_keys(key).perform()

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        given = self.run("return page.given")
        shape = (living.ROWS, living.SIZES["context"])
        return np.reshape(given["ids"], shape), np.reshape(given["targets"], shape)


@pytest.fixture(scope="module")
def loaded(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
    page = Page(browser, tmp_path_factory.mktemp("living"))
    page.open()
    return page


@pytest.fixture
def page(loaded: Page) -> Iterator[Page]:
    loaded.run("page.stop(); page.mistake.selectedIndex = 0; page.plant(-1); page.read(page.data.text); page.let();")
    loaded.run("page.adam = { ...page.data.adam }; page.restart()")
    yield loaded
    assert not loaded.browser.get_log("browser")


def test_every_array_of_forward_and_backward_is_numpys(page: Page) -> None:
    _, made = plan_of(living.make_model(NAME), *page.batch())
    arrays = page.run("return page.step.arrays.map((array) => [...array])")
    compared = 0
    for buffer, expected, found in zip(made.buffers, made.values, arrays, strict=True):
        if expected.size:
            np.testing.assert_allclose(found, expected.ravel(), 0, 1e-9, err_msg=f"{buffer['layer']}: {buffer['name']}")
            compared += 1
    assert compared > 60


def test_every_gradient_is_a_central_difference(page: Page) -> None:
    worst, count = page.run(
        "const { step } = page; const h = 1e-6; let worst = 0;"
        "const right = step.g.slice();"
        "const at = (i, x) => { step.w[i] = x; return step.forward(); };"
        "step.w.forEach((w, i) => {"
        "  const slope = (at(i, w + h) - at(i, w - h)) / (2 * h);"
        "  step.w[i] = w; worst = Math.max(worst, Math.abs(slope - right[i]));"
        "});"
        "return [worst, step.w.length]"
    )
    assert count == sum(p.data.size for p in living.make_model(NAME).parameters())
    assert worst < 1e-7


def test_a_training_run_has_the_losses_of_numpy(page: Page) -> None:
    model = living.make_model(NAME)
    adam = Adam(model.parameters(), living.ADAM["lr"], (living.ADAM["beta1"], living.ADAM["beta2"]), living.ADAM["eps"])
    expected = []
    with reference_only():
        for _ in range(STEPS):
            model.zero_grad()
            loss, cache = model.loss(*page.batch())
            model.loss_backward(1.0, cache)
            adam.step()
            expected.append(float(loss))
            page.run("page.once()")
    losses = page.run("return page.losses")
    np.testing.assert_allclose(losses, expected, 0, 1e-6)
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5


def test_a_weight_shows_the_step_of_adam(page: Page) -> None:
    page.run("page.once(); page.once(); page.once()")
    page.run("page.pin(page.picture.grids.find((grid) => page.plan.buffers[grid.buffer].role === 'parameter'), 5)")
    found = page.run(
        "const numbers = (name) => Number(page.explained.querySelector(`[data-update=${name}]`).dataset.value);"
        "const { step } = page; return ['w', 'm', 'v'].map((name) => [numbers(name), step[name][5]])"
    )
    for shown, computed in found:
        assert shown == pytest.approx(computed, rel=1e-9)


def test_the_terms_of_every_array_add_up(page: Page) -> None:
    wrong = page.run(
        "return page.picture.grids.flatMap((grid) => [0, Math.floor(grid.size / 3), grid.size - 1].map((i) => {"
        "  page.point(grid, i);"
        "  const total = page.explained.querySelector('b[data-value]');"
        "  if (!total) return page.plan.buffers[grid.buffer].role === 'parameter' ? null : `${grid.title}: no terms`;"
        "  const value = Number(total.dataset.value);"
        "  const terms = [...page.explained.querySelectorAll('.live-outer > [data-value]')];"
        "  const sum = terms.reduce((a, term) => a + Number(term.dataset.value), 0);"
        "  const near = (a, b) => Math.abs(a - b) <= 1e-9 * Math.max(1, Math.abs(b));"
        "  const right = near(value, grid.value(page.step, i)) && near(sum, value);"
        "  return right ? null : `${grid.title} ${i}: ${value}, ${sum}`;"
        "})).filter(Boolean)"
    )
    assert not wrong
    lit = page.run(
        "return page.picture.calls.map((number) => {"
        "  const { output, label } = page.plan.calls[number];"
        "  page.point(page.picture.showing.get(output)[0], 0);"
        "  return [label, page.picture.element.querySelectorAll('.living-lights > i.source').length];"
        "})"
    )
    assert all(count for label, count in lit if label != "cross_entropy"), lit  # the loss is made of what is not drawn


def test_it_moves_without_a_click(page: Page) -> None:
    motion = [{"name": "prefers-reduced-motion", "value": "no-preference"}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": motion})
    try:
        page.open()
        for phase in ("forward", "backward"):
            WebDriverWait(page.browser, 20, 0.02).until(lambda _, phase=phase: page.find(f".living-node.{phase}"))
        WebDriverWait(page.browser, 20, 0.02).until(lambda _: page.run("return page.losses.length === 1"))
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        page.open()


def test_it_trains_and_writes(page: Page) -> None:
    before = page.run("return page.sample.textContent")
    page.find(".living-main")[0].click()
    WebDriverWait(page.browser, 60).until(lambda _: page.run("return page.losses.length > 300"))
    page.find(".living-main")[0].click()
    assert page.run("return page.mode") == "still"
    assert page.run("return page.sample.textContent") != before


@pytest.mark.parametrize("name", living.MODELS)
def test_every_model_starts_and_learns(page: Page, name: str) -> None:
    page.run("page.replace(arguments[0])", name)
    WebDriverWait(page.browser, 60).until(lambda _: page.run("return page.name") == name)
    made = plan_of(living.make_model(name), *page.batch())[1]
    arrays = page.run("return page.step.arrays.map((array) => [...array])")
    for buffer, expected, found in zip(made.buffers, made.values, arrays, strict=True):
        if expected.size:
            np.testing.assert_allclose(found, expected.ravel(), 0, 1e-9, err_msg=f"{buffer['layer']}: {buffer['name']}")
    wrong = page.run(DIFFERENCES)
    assert not wrong
    page.run("for (const grid of page.picture.grids) page.point(grid, grid.size - 1)")
    page.run("for (let k = 0; k < 100; k++) page.once(); page.show()")
    assert page.run("return page.losses[0] - page.step.loss()") > 0.5
    page.run("page.replace(arguments[0])", NAME)


def test_a_text_of_the_reader(page: Page) -> None:
    page.find(".living summary")[0].click()
    area, use = page.find(".living textarea")[0], page.find(".living details button")[0]
    area.clear()
    area.send_keys("short")
    use.click()
    assert "at least" in page.find(".living-refused")[0].text
    page.run("arguments[0].value = 'Ein Fisch ist kein Vogel, und ein Vogel ist kein Fisch. '.repeat(3)", area)
    use.click()
    WebDriverWait(page.browser, 60).until(lambda _: page.run("return page.losses.length > 50"))
    page.run("page.stop()")
    assert page.run("return page.text.symbols.includes('E')")
    assert page.run("return page.losses[0] - page.step.loss()") > 0.5
    page.find(".living summary")[0].click()


def test_a_weight_is_changed(page: Page) -> None:
    loss = page.run("return page.step.loss()")
    page.run("page.pin(page.picture.grids.find((grid) => page.plan.buffers[grid.buffer].role === 'parameter'), 0)")
    field = page.find(".living-change input")[0]
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, "5")
    buffer = page.run("return page.pinned[0].buffer")
    assert page.run("return page.step.arrays[arguments[0]][0]", buffer) == 5
    assert page.run("return page.step.loss()") != loss


def test_the_keyboard_reaches_numbers(page: Page) -> None:
    page.run("page.picture.grids[0].button.focus()")
    page.keys(Keys.ARROW_RIGHT, Keys.ENTER, Keys.ARROW_DOWN)
    grid, cell = page.run("return [page.picture.grids.indexOf(page.grid), document.activeElement.number]")
    assert (grid, cell) == (1, page.run("return page.grid.columns"))
    assert page.find(".living-explained b[data-value]")
    page.keys(Keys.ESCAPE)
    assert page.run("return document.activeElement === page.picture.grids[1].button")


def test_a_planted_mistake_leaves_the_right_run_alone(page: Page) -> None:
    right = page.run("for (let k = 0; k < 5; k++) page.once(); return page.losses")
    mistakes = page.run("return page.plan.mistakes")
    assert {"linear", "attention", "layernorm", "cross_entropy", "Residual", "SelfAttention"} <= {
        mistake["operation"] for mistake in mistakes
    }
    there = "return Boolean(page.planted) && page.planted.title === arguments[0]"  # some are loaded first
    for number, mistake in enumerate(mistakes):
        choose = "page.mistake.selectedIndex = arguments[0] + 1; page.mistake.dispatchEvent(new Event('change'))"
        page.run(choose, number)
        WebDriverWait(page.browser, 60).until(lambda _, title=mistake["title"]: page.run(there, title))
        same = page.run("return page.step.g.every((x, i) => Math.abs(x - page.wrong.g[i]) < 1e-12)")
        said = page.find(".living-verdict")[0].text
        assert ("still the same" in said) == same, mistake["title"]
        assert page.find(".living-node.mistaken") or "plan" in mistake
        page.run("for (let k = 0; k < 5; k++) page.once()")
        assert page.run("return page.losses") == right, mistake["title"]
    means = [m for m in mistakes if m["title"] == "The weights' gradient is divided by the number of rows"]
    page.run("page.plant(arguments[0])", mistakes.index(means[0]))
    step, wrong = page.run(
        "const buffer = page.plan.buffers.findIndex(({ name }) => name === 'doutput.w');"
        "return [page.step, page.wrong].map((step) => [...step.arrays[buffer]])"
    )
    rows = living.ROWS * living.SIZES["context"]
    np.testing.assert_allclose(np.divide(step, rows), wrong, 1e-12)


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen(page: Page, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open()
        page.run("page.pin(page.picture.grids[3], 0); page.plant(2)")
        assert page.run("return document.documentElement.scrollWidth") <= width
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.open()

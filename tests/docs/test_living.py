"""The living training step: its numbers are NumPy's, its gradients are right, and readers can do what it says."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scratchformer.catalogue import entries_of
from scratchformer.dispatch import reference_only
from scratchformer.optim import SGD, Adam, AdamW
from scratchformer.pages.live import STATIC

pytest.importorskip("sphinx")
pytest.importorskip("selenium")

import living
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import WebDriverWait
from step_plan import plan_of

WIDTHS = (390, 820, 1440)
STEPS = 100
NAME = living.GENERATOR
CHOICES = [  # each choice of each part at least once
    dict(positions="sinusoidal", norm="RMS", order="pre", depth=2, width=8, heads=1),
    dict(positions="relative", norm="layer", order="pre", depth=1, width=16, heads=4),
    dict(positions="rotary", norm="RMS", order="post", depth=2, width=24, heads=2),
    dict(positions="none", norm="layer", order="post", depth=1, width=32, heads=4),
]

NOT_PLANTED = {  # why the page does not offer the other mistakes of the catalogue: the entries, or a title
    "no model of the page has it": (
        "silu", "softmax", "log_softmax", "dropout", "max_pool",
        "BasicSelfAttention", "SingleHeadAttention", "MultiHeadLoop", "Recompute",
        "NormedLinear", "ParallelBlock", "GeGLU", "geglu",
    ),
    "it is one of the operation, or of Residual": (
        "FeedForward", "TransformerBlock", "LlamaBlock", "DecoderBlock",
        "The gradient of the queries is rotated forward once more",
        "The gradient of the scores is not divided by √D",
        "The gradient skips the sum in the softmax",
        "The queries get no gradient from the distances",
    ),
    "it is in no equation from which the page computes": (
        "relative_shift",
        "A bias of one number is spread over all columns",
        "Neighbours form a pair, not one number from each half",
        "Every row takes from the first",
        "dk has a wrong factor",
        "An array of float64 ones as a factor, and no cast",
        "An empty tile is taken for a full one",
    ),
    "these models have nothing that it changes: such as two uses of a layer, padding, a window, two decoder blocks": (
        "A weight's gradient is assigned, not added",
        "The gradient overwrites the one from the table's other use",
        "The window is one too wide",
        "Padding gets a gradient",
        "γ gets no gradient from the memory",
        "The memory gets its gradient from only one block",
        "a tied table stepped twice",
    ),
    "it is not in a training step": (
        "New keys are rotated as if they came first",
        "A pattern lets the tokens of a prompt see later ones",
        "zero_grad also clears Adam's moments",
        "resume without Adam's step count",
    ),
}  # fmt: skip

# The gradient beside the result of each call, against the loss when a number of the result is moved.
DIFFERENCES = """
const { step, plan, picture } = page;
const wrong = [];
for (const number of picture.calls) {
  const { output, label } = plan.calls[number];
  const { operation, inputs } = plan.calls[number];
  if (operation === "cross_entropy" || output === plan.loss || !Object.keys(inputs).length) continue;
  if (label === "joined") continue; // the memory gets no gradient, so no array holds that of both
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
# What the step is given.
GIVEN = """
const numbers = (i) => [[...page.step.arrays[i]], page.plan.buffers[i].shape];
const given = () => Object.values(page.plan.inputs).map(numbers);
"""


def data_in(script: Path) -> dict[str, Any]:
    return json.loads(script.read_text(encoding="utf-8").partition("] = ")[2].rstrip(";\n"))


class Page:
    """The living step alone in a file."""

    def __init__(self, browser: Any, site: Path | None, folder: Path) -> None:
        self.browser = browser
        files = "".join(f'<script src="{STATIC / file}" defer></script>' for file in living.FILES)
        styles = "".join(f'<link rel="stylesheet" href="{STATIC / file}">' for file in living.STYLES)
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>living</title>'
        head += f'<meta name="viewport" content="width=device-width">{styles}{files}'
        path = folder / "living.html"
        if site is None:
            living.write_models(folder)
        else:
            (folder / "_static").symlink_to(site / "_static")
        self.models = {file.stem: data_in(file) for file in (folder / "_static/living/models").iterdir()}
        path.write_text(f"{head}<main>{living.living_html()}</main>", encoding="utf-8")
        self.address = path.as_uri()

    def open(self) -> None:
        self.browser.get(self.address)
        WebDriverWait(self.browser, 60, 0.05).until(lambda _: self.run("return Boolean(page)"))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(f"const page = document.querySelector('.living').page; {script}", *arguments)

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def keys(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.browser, duration=0).send_keys(key).perform()

    def choose(self, **choice: Any) -> None:
        """Another model, or other parts."""
        before = self.run("return page.replace(arguments[0])", {**self.run("return page.data.first"), **choice})
        assert before is None
        there = "return Object.entries(arguments[0]).every(([name, value]) => page.choice[name] === value) && page.step"
        WebDriverWait(self.browser, 60, 0.05).until(lambda _: self.run(f"{there} && page.root.isConnected", choice))
        WebDriverWait(self.browser, 60, 0.05).until(
            lambda _: self.run("return page.name") == self.run("return page.choice.model")
        )

    def model(self) -> Any:
        """NumPy's model with the parts and the weights that the page begins with."""
        choice = self.run("return page.choice")
        sizes = {name: choice[name] for name in [*living.SIZES, *living.PARTS]}
        model = living.generator(**sizes) if choice["model"] == NAME else living.make_model(choice["model"])
        weights = self.run("return Object.fromEntries(Object.entries(page.weights).map(([n, w]) => [n, [...w]]))")
        for name, p in model.named_parameters().items():
            p.data[...] = np.reshape(weights[name], p.data.shape)
        return model

    def batch(self) -> list[np.ndarray]:
        """What the page's step is given."""
        return arrays_of(self.run(f"{GIVEN} return given()"))

    def steps(self, count: int) -> list[list[np.ndarray]]:
        """Take steps; what each of them was given."""
        each = "{ const batch = given(); page.once(); return batch; }"
        return [*map(arrays_of, self.run(f"{GIVEN} return Array.from({{ length: {count} }}, () => {each})"))]


def arrays_of(batch: list[Any]) -> list[np.ndarray]:
    arrays = [np.reshape(numbers, shape) for numbers, shape in batch]
    return [x.astype(float) if x.ndim > 3 else x.astype(int) for x in arrays]  # ids, except for a memory


@pytest.fixture(scope="module")
def loaded(browser: Any, site: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Page:
    page = Page(browser, site, tmp_path_factory.mktemp("living"))
    page.open()
    return page


@pytest.fixture
def page(loaded: Page) -> Iterator[Page]:
    loaded.choose(model=NAME, rate=0)
    loaded.run("page.stop(); page.mistake.selectedIndex = 0; page.plant(-1); page.read(page.data.text); page.let();")
    loaded.run("page.restart()")
    yield loaded
    assert not loaded.browser.get_log("browser")


def expect_numpys_arrays(page: Page) -> None:
    """Every number of forward and backward is NumPy's."""
    page.run(  # a memory is empty at first
        "const { step, plan } = page;"
        "const memory = step.arrays[plan.inputs.memory] || [];"
        "for (let i = 0; i < memory.length; i++) memory[i] = Math.sin(i);"
        "step.forward(); step.backward();"
    )
    _, made = plan_of(page.model(), *page.batch())
    arrays = page.run("return page.step.arrays.map((array) => [...array])")
    compared = 0
    for buffer, expected, computed in zip(made.buffers, made.values, arrays, strict=True):
        if expected.size:
            label = f"{buffer['layer']}: {buffer['name']}"
            np.testing.assert_allclose(computed, expected.ravel(), 0, 1e-9, err_msg=label)
            compared += 1
    assert compared > 60


def expect_numpys_losses(page: Page, optimizer: str, steps: int) -> None:
    """The losses of a run, and that it learns."""
    model, settings = page.model(), page.run("return page.settings")
    betas = settings["beta1"], settings["beta2"]
    made = {
        "Adam": lambda p: Adam(p, settings["lr"], betas, settings["eps"]),
        "AdamW": lambda p: AdamW(p, settings["lr"], betas, settings["eps"], settings["decay"]),
        "momentum": lambda p: SGD(p, settings["lr"], settings["momentum"]),
        "SGD": lambda p: SGD(p, settings["lr"]),
    }[optimizer](model.parameters())
    expected = []
    with reference_only():
        for batch in page.steps(steps):
            model.zero_grad()
            loss, cache = model.loss(*batch)
            model.loss_backward(1.0, cache)
            made.step()
            expected.append(float(loss))
    losses = page.run("return page.losses")
    np.testing.assert_allclose(losses, expected, 0, 1e-6)
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_every_array_of_forward_and_backward_is_numpys(page: Page) -> None:
    expect_numpys_arrays(page)


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
    assert count == sum(p.data.size for p in page.model().parameters())
    assert worst < 1e-7


@pytest.mark.parametrize("optimizer", living.OPTIMIZERS)
def test_a_training_run_has_the_losses_of_numpy(page: Page, optimizer: str) -> None:
    page.choose(optimizer=optimizer)
    expect_numpys_losses(page, optimizer, STEPS)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice.values())))
def test_the_parts_that_are_chosen_are_numpys(page: Page, choice: dict[str, Any]) -> None:
    page.choose(**choice)
    expect_numpys_arrays(page)
    assert not page.run(DIFFERENCES)
    expect_numpys_losses(page, "Adam", STEPS)
    page.choose()


def test_every_combination_of_parts_runs(page: Page) -> None:
    """Each plan, for the smallest and the largest sizes; in CI for one of them."""
    keys = [living.key_of(parts) for parts in living.combinations()]
    assert {key for key in page.models if key in keys} == {*keys}
    sizes = (8, 4), (32, 1)
    for number, parts in enumerate(living.combinations()):
        for width, heads in sizes[number % 2 :][:1] if os.environ.get("CI") else sizes:
            page.choose(**parts, width=width, heads=heads)
            learned = page.run("for (let k = 0; k < 12; k++) page.once(); return page.losses[0] - page.step.loss()")
            assert learned > 0, parts
    page.choose()


@pytest.mark.parametrize("optimizer, mistake", [("AdamW", ""), ("momentum", ""), ("Adam", "of m")])
def test_a_weight_shows_the_step_of_the_optimizer(page: Page, optimizer: str, mistake: str) -> None:
    page.choose(optimizer=optimizer)
    if mistake:
        page.run(
            "page.plant(page.mistakes.findIndex(({ title }) => title.endsWith(arguments[0]))); page.stop()", mistake
        )
    page.run("page.once(); page.once(); page.once()")
    page.run("page.pin(page.picture.grids.find((grid) => page.isWeight(grid) && grid.lines > 1), 5)")
    shown = page.run(
        "const step = page.shown();"
        "const [{ buffer }, i] = page.pinned;"
        "const at = step.arrays[buffer].byteOffset / 8 + i;"
        "const all = { w: step.w, m: step.m, v: step.v, velocity: step.m };"
        "return [...page.explained.querySelectorAll('[data-update]')]"
        "  .map(({ dataset: { update, value } }) => [update, Number(value), all[update]?.[at]])"
    )
    assert [name for name, _, _ in shown] == (["w", "velocity"] if optimizer == "momentum" else ["w", "v", "m", "c"])
    for name, value, computed in shown:
        assert name == "c" or value == pytest.approx(computed, rel=1e-9)
    assert bool(page.find(".living-wrong")) == bool(mistake)


def test_the_last_step_of_a_weight_is_shown_until_a_weight_is_changed(page: Page) -> None:
    page.run("page.once(); page.pin(page.picture.grids.find((grid) => page.isWeight(grid)), 0)")
    assert "with the gradient before it" in page.run("return page.explained.textContent")
    assert page.find(".living-explained [data-update]")
    page.find(".living-change input")[0].send_keys(Keys.CONTROL, "a", Keys.NULL, "5")
    assert not page.find(".living-explained [data-update]")


@pytest.mark.parametrize("name", living.MODELS)
def test_the_terms_of_every_array_add_up(page: Page, name: str) -> None:
    page.choose(model=name)
    expect_terms(page)
    page.choose()


@pytest.mark.parametrize("choice", CHOICES[1:3], ids=lambda choice: choice["positions"])
def test_the_terms_of_every_array_of_other_parts_add_up(page: Page, choice: dict[str, Any]) -> None:
    page.choose(**choice)
    expect_terms(page)
    page.choose()


def expect_terms(page: Page) -> None:
    """Each number is the sum of its terms, and lights what it was made of."""
    wrong = page.run(
        "return page.picture.grids.flatMap((grid) => [0, Math.floor(grid.size / 3), grid.size - 1].map((i) => {"
        "  page.point(grid, i);"
        "  const total = page.explained.querySelector('b[data-value]');"
        "  if (!total) return page.plan.buffers[grid.buffer].role === 'parameter' ? null : `${grid.title}: no terms`;"
        "  const value = Number(total.dataset.value);"
        "  const terms = [...page.explained.querySelectorAll('.live-list:not(.live-inner *) > [data-value]')];"
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
        "  const [grid] = page.picture.showing.get(output);"
        "  page.point(grid, grid.size - 1);"
        "  return [label, page.picture.element.querySelectorAll('.living-lights > i.source').length];"
        "})"
    )
    tables = ("cross_entropy", "loss", "sinusoids", "frequencies")  # made of what is not drawn, or of nothing
    dark = [label for label, count in lit if not count and label not in tables]
    assert not dark


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


@pytest.mark.parametrize("name", living.FAMILY)
def test_every_model_is_numpys_and_learns(page: Page, name: str) -> None:
    page.choose(model=name)
    expect_numpys_arrays(page)
    assert not page.run(DIFFERENCES)
    page.run("page.restart()")
    expect_numpys_losses(page, "Adam", STEPS)
    page.run("page.show()")
    assert page.run("return page.sample.textContent.length") > 10
    page.choose()


def test_a_text_of_the_reader(page: Page) -> None:
    page.find(".living-learning summary")[0].click()
    area, use = page.find(".living textarea")[0], page.find(".living-learning details button")[0]
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
    page.find(".living-learning summary")[0].click()


def test_a_weight_is_changed(page: Page) -> None:
    loss = page.run("return page.step.loss()")
    page.run("page.pin(page.picture.grids.find((grid) => page.plan.buffers[grid.buffer].role === 'parameter'), 0)")
    field = page.find(".living-change input")[0]
    field.send_keys(Keys.CONTROL, "a", Keys.NULL, "5")
    buffer = page.run("return page.pinned[0].buffer")
    assert page.run("return page.step.arrays[arguments[0]][0]", buffer) == 5
    assert page.run("return page.step.loss()") != loss
    for text in "", "abc", "-", "1e7", "1e400":
        field.send_keys(Keys.CONTROL, "a", Keys.NULL, *(text or Keys.DELETE))
        assert page.run("return page.step.arrays[arguments[0]][0]", buffer) == 5, text
        assert "The weight is still 5." in page.find(".living-change")[0].text, text
    field.send_keys(Keys.TAB)
    said = "return [page.changing.querySelector('input').value, page.changing.querySelector('span').textContent]"
    assert page.run(said) == ["5", ""]


def test_the_keyboard_reaches_numbers(page: Page) -> None:
    page.run("page.picture.grids[0].button.focus()")
    page.keys(Keys.ARROW_RIGHT, Keys.ENTER, Keys.ARROW_DOWN)
    grid, number, columns = page.run(
        "const [grid, i] = page.pinned; return [page.picture.grids.indexOf(grid), i, grid.columns]"
    )
    assert (grid, number) == (1, columns)
    assert page.find(".living-explained b[data-value]")
    page.keys(Keys.ESCAPE, Keys.ARROW_LEFT)
    assert page.run("return !page.pinned && document.activeElement === page.picture.grids[0].button")


def test_the_mistakes_of_the_catalogue_can_be_planted(loaded: Page) -> None:
    used = {name for data in loaded.models.values() for name in data.get("functions", {})}
    steps = loaded.models["settings"]["steps"].values()
    planted = {
        (mistake["operation"], mistake["title"])
        for data in (*loaded.models.values(), *steps)
        for mistake in data.get("mistakes", ())
        if not mistake["functions"] or {*mistake["functions"]} & used
    }
    every = {(e.name, m.title) for e in entries_of("operations", "layers", "optimizers") for m in e.mistakes}
    reasons = {each for several in NOT_PLANTED.values() for each in several}
    missing = every - planted
    assert not [each for each in missing if not {*each} & reasons]
    assert not [each for each in reasons if not any(each in pair for pair in missing)]
    assert len(planted) > 45


def test_a_planted_mistake_leaves_the_right_run_alone(page: Page) -> None:
    right = page.run("for (let k = 0; k < 5; k++) page.once(); return page.losses")
    mistakes = page.run("return page.mistakes")
    assert {"linear", "attention", "layernorm", "cross_entropy", "Residual", "SelfAttention", "adam_step"} <= {
        mistake["operation"] for mistake in mistakes
    }
    there = "return Boolean(page.planted) && page.planted.title === arguments[0]"  # some are loaded first
    for number, mistake in enumerate(mistakes):
        choose = "page.mistake.selectedIndex = arguments[0] + 1; page.mistake.dispatchEvent(new Event('change'))"
        page.run(choose, number)
        WebDriverWait(page.browser, 60).until(lambda _, title=mistake["title"]: page.run(there, title))
        same = page.run("return page.step.g.every((x, i) => Math.abs(x - page.wrong.g[i]) < 1e-12)")
        said = page.find(".living-verdict")[0].text
        assert ("does not change the gradient yet" in said) == (same and "source" not in mistake), mistake["title"]
        assert page.find(".living-node.mistaken") or {"plan", "source"} & {*mistake}
        page.run("for (let k = 0; k < 5; k++) page.once()")
        assert page.run("return page.losses") == right, mistake["title"]
    means = [m for m in mistakes if m["title"] == "The weights' gradient is divided by the number of rows"]
    page.run("page.plant(arguments[0])", mistakes.index(means[0]))
    step, wrong = page.run(
        "const buffer = page.plan.buffers.findIndex(({ name }) => name === 'doutput.w');"
        "return [page.step, page.wrong].map((step) => [...step.arrays[buffer]])"
    )
    rows = living.ROWS * living.LENGTH
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

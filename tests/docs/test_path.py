"""The path of twelve steps: every page opens from disk, every question is answered right and wrong."""

import inspect
import re
import shutil
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sphinx")
pytest.importorskip("selenium")

import living
import path as steps
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import WebDriverWait
from sphinx.application import Sphinx

from scratchformer.notation import parse
from scratchformer.notation.check import read_and_run, walk_through
from scratchformer.notation.grammar import walk
from scratchformer.pages.live import STATIC

DOCS = Path(__file__).parents[2] / "docs"
CONF = f"""\
import sys
sys.path[:0] = [{str(DOCS)!r}, {str(DOCS / "_ext")!r}]
project, copyright = "scratchformer", ""
extensions = ["myst_parser", "math_nodes", "root_files", "live", "living", "path"]
myst_enable_extensions = ["dollarmath", "html_image", "deflist"]
html_theme, html_math_renderer = "furo", "mathml"
html_static_path, html_css_files = [{str(STATIC)!r}], ["site.css"]
"""
WIDTHS = (390, 1440)
WORDS = 350  # of a page
FIRST_WORDS = 30  # before the first number that moves or can be moved
ANSWERS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "01-number": lambda a: 0.1 * a["w"] * a["dy"],
    "02-two-uses": lambda a: a["dy"] * (a["x"] + a["v"]) * a["u"],
    "03-linear": lambda a: a["dy"][0] * a["w"][1, 0],
    "04-softmax": lambda a: softmax(a["z"])[0],
    "05-cross-entropy": lambda a: -2 / 3 * a["dloss"],
    "06-layernorm": lambda a: 2 * a["x"].std(),
    "07-embedding": lambda a: len(a["table"]) - len(set(a["ids"])),
    "08-attention": lambda a: a["v"][0, 0],
    "09-heads": lambda a: softmax(np.einsum("htd,hsd->hts", a["q"], a["k"]) / 2**0.5)[:, 1].max(axis=-1).argmax(),
    "10-residual": lambda a: a["dy"][0],
    "11-adam": lambda a: a["lr"],
    "12-train": lambda a: np.exp(a["guess"] - a["loss"]),
}
# The numbers of the page by name.
GIVEN = """
const { page } = document.querySelector(".live, .living");
const numbers = ([name, { shape, data }]) => [name, [shape, [...data]]];
if (page.model.values) return Object.fromEntries([...page.model.values].map(numbers));
return { guess: [[], [page.task.guess(page)]], loss: [[], [page.step.loss()]] };
"""
# The text that can be seen above the first number.
VISIBLE = """
const end = document.querySelector(".living-picture, .live-panels");
const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
const seen = [];
while (texts.nextNode() && end.compareDocumentPosition(texts.currentNode) & Node.DOCUMENT_POSITION_PRECEDING) {
  const { parentElement, data } = texts.currentNode;
  if (parentElement.checkVisibility() && !parentElement.closest(".path-line, .living-tokens")) seen.push(data);
}
return seen.join(" ");
"""
# New numbers, also for a number that is no array.
DRAW = """
const { page } = document.querySelector(".live");
page.draw();
for (const name of page.data.inputs) {
  const array = page.model.array(name);
  if (!array.shape.length && !page.data.ranges[name]?.whole) array.data[0] = Math.round(10 + 90 * Math.random()) / 10;
}
page.model.run();
"""
# The values of the wrong answers that the page knows, and what it says of them.
KNOWN = """
const question = document.querySelector(".question").question;
return question.data.wrong.map(({ equation, reason }) => [question.constructor.evaluate(equation).value, reason]);
"""


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z)
    return e / e.sum(axis=-1, keepdims=True)


def built(folder: Path) -> Path:
    """The folder with the pages of the path, built alone, and the start page."""
    source = folder / "source"
    shutil.copytree(DOCS / "path", source / "path")
    for name in ("index.md", "path.md"):
        shutil.copy(DOCS / name, source)
    shutil.copy(DOCS.parent / "README.md", folder)
    (source / "conf.py").write_text(CONF, encoding="utf-8")
    first = next(living.combinations())
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("w") as log:
        patch.setattr(living, "FAMILY", {})  # the model that the pages begin with is enough
        patch.setattr(living, "combinations", lambda: [first])
        Sphinx(source, source, folder / "out", folder / "doctrees", "html", status=None, warning=log).build()
    return folder / "out"


class Path12:
    """The pages of the path in a browser."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser, self.folder = browser, folder

    def open(self, name: str, width: int = 1440) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 800}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.get((self.folder / f"{name}.html").as_uri())
        ready = "return Boolean(document.querySelector('.live, .living')?.page)"
        WebDriverWait(self.browser, 60, 0.05).until(lambda browser: browser.execute_script(ready))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def numbers(self) -> dict[str, np.ndarray]:
        return {name: np.reshape(data, shape) for name, (shape, data) in self.run(GIVEN).items()}

    def answer(self, x: Any) -> str:
        """Type or choose an answer, and press Enter; returns what the page says."""
        fields = self.find(".question form input")
        if fields[0].get_attribute("type") == "radio":
            self.run("arguments[0].checked = true", fields[int(x)])
            self.find(".question form button")[0].send_keys(Keys.ENTER)
        else:
            self.run("arguments[0].value = ''", fields[0])
            fields[0].send_keys(str(x), Keys.ENTER)
        return self.find(".question-verdict")[0].text


@pytest.fixture(scope="module")
def loaded(browser: Any, site: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path12:
    return Path12(browser, site or built(tmp_path_factory.mktemp("path")))


@pytest.fixture
def pages(loaded: Path12) -> Any:
    yield loaded
    messages = loaded.browser.get_log("browser")
    loaded.run("localStorage.clear()")
    loaded.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not messages


def test_there_are_twelve_short_pages() -> None:
    assert list(ANSWERS) == steps.PAGES
    for name in steps.PAGES:
        text = re.sub("```{step}.*?```", "", (DOCS / "path" / f"{name}.md").read_text(encoding="utf-8"), flags=re.S)
        assert len(text.split()) <= WORDS, name


def test_few_words_come_before_the_first_movement(pages: Path12) -> None:
    """On the start page, which moves by itself, and on every page of the path, where a number can be dragged."""
    for name in ("index", *(f"path/{name}" for name in steps.PAGES)):
        pages.open(name)
        words = pages.run(VISIBLE).replace("¶", " ").split()
        assert 3 < len(words) <= FIRST_WORDS, (name, words)
    pages.open("index")
    assert pages.find(".lead-on a")[0].text == "Start: y = 3x"
    pages.find(".lead-on a")[0].send_keys(Keys.ENTER)
    assert pages.browser.current_url.endswith("path/01-number.html")


@pytest.mark.parametrize("name", steps.PAGES)
def test_a_page_opens_from_disk_and_its_question_is_answered(pages: Path12, name: str) -> None:
    for width in WIDTHS:
        pages.open(f"path/{name}", width)
        assert pages.run("return document.documentElement.scrollWidth") <= width
        loaded = pages.run("return performance.getEntriesByType('resource').map((each) => each.name)")
        assert all(each.startswith(("file:", "data:")) for each in loaded)
    number = pages.find(".path-line [aria-current]")[0].get_attribute("data-step")
    if name == "12-train":
        early = str(float(ANSWERS[name](pages.numbers())))
        assert "train them first" in pages.answer(early)
        pages.run("const { page } = document.querySelector('.living'); for (let k = 0; k < 100; k++) page.once();")
    else:
        wrong_answers_get_reasons(pages, name)
    assert f"Step {number}:" in pages.find(".path-line [aria-current]")[0].get_attribute("aria-label")
    right = float(ANSWERS[name](pages.numbers()))
    assert pages.answer(right).startswith("Right:")
    assert pages.find(".path-line [aria-current].done")
    onward = pages.find(".question-verdict a")
    assert bool(onward) == (name != steps.PAGES[-1])
    if onward:
        onward[0].send_keys(Keys.ENTER)
        assert pages.find(f'.path-line a.done[data-step="{number}"]')  # remembered by the next page


def wrong_answers_get_reasons(pages: Path12, name: str) -> None:
    """With the numbers that the page begins with, each known wrong answer differs from the right one and the others."""
    right = float(ANSWERS[name](pages.numbers()))
    known = pages.run(KNOWN)
    assert known
    values = sorted([right, *(value for value, _ in known)])
    assert all(b - a > 0.01 for a, b in pairwise(values)), values
    for value, reason in known:
        assert pages.answer(value).startswith(reason), reason
    if pages.find(".question form input[type=text]"):
        assert "Type a number" in pages.answer("what")
        assert "sign" in pages.answer(-right) or any(abs(right + value) < 0.01 for value, _ in known)
        assert "in size" in pages.answer(right * 3.7)
        shown = pages.find(".question-verdict button")[0]
        shown.send_keys(Keys.ENTER)
        assert pages.find(".question-verdict .live-list")
    else:
        assert pages.answer(1 - right)


@pytest.mark.parametrize("name", [name for name in steps.PAGES if name != "12-train"])
def test_the_answer_follows_the_numbers(pages: Path12, name: str) -> None:
    pages.open(f"path/{name}")
    pages.run("let x = 1; Math.random = () => (x = (x * 16807) % 2147483647) / 2147483647;")  # the same in every run
    answers = set()
    for _ in range(6):
        pages.run(DRAW)
        right = float(ANSWERS[name](pages.numbers()))
        answers.add(right)
        assert pages.answer(f"{right:.4g}".replace("-", "−").replace(".", ",")).startswith("Right:"), right
    assert len(answers) > 1


def values_of(name: str, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
    """The numbers of a page by name: those that it begins with, or others that are drawn."""
    text = (DOCS / "path" / f"{name}.md").read_text(encoding="utf-8")
    ((operation, equations),) = re.findall(r"```{step} (\w+)\n(.*?)```", text, re.DOTALL)
    step = steps.STEPS[operation]
    args, dy = step.args, np.array(step.dy or 0.0)
    if rng is not None:
        ranges = [step.ranges.get(parameter) for parameter in inspect.signature(step.op).parameters]
        args = tuple(drawn(rng, x, limits) for x, limits in zip(args, ranges, strict=True))
        dy = drawn(rng, dy, None)
    docstring = f"{operation}\n\nForward and backward:\n\n{indent(equations, '    ')}\n"
    with np.errstate(all="ignore"):
        ran, derivation = read_and_run(step.op, step.op_backward, *args, docstring=docstring, dy=dy)
        return walk_through(derivation, ran, np.inf).values


def drawn(rng: np.random.Generator, x: Any, limits: tuple[float, float] | None) -> Any:
    if limits and isinstance(limits[0], int):
        array = rng.integers(limits[0], limits[1] + 1, np.shape(x))
    else:
        array = rng.uniform(*limits, np.shape(x)) if limits else rng.normal(size=np.shape(x))
    return array if isinstance(x, np.ndarray) else array[()]


def guesses(name: str, values: dict[str, np.ndarray]) -> dict[str, float]:
    """What a reader may type without having understood: a number of the page, or the sum, difference, product or
    quotient of two; of a large page, of two in the arrays that the answer is about. Each also with the constants of the
    question, and the answer without one of its factors.
    """
    text = (DOCS / "path" / f"{name}.md").read_text(encoding="utf-8").partition("```{question} ")[2]
    answer = text.partition("\n")[0]
    known = {f"{each}{list(place)}": float(x) for each, array in values.items() for place, x in np.ndenumerate(array)}
    about = {str(node[1]) for part in parse(f"answer = {answer}").parts[1:] for node in walk(part) if node[0] == "name"}
    paired = [key for key in known if len(known) < 12 or key.partition("[")[0] in about]
    found = dict(known)
    for a, b in combinations(paired, 2):
        x, y = known[a], known[b]
        found |= {f"{a} + {b}": x + y, f"{a} - {b}": x - y, f"{b} - {a}": y - x, f"{a} {b}": x * y}
        found |= {f"{a} / {b}": x / y if y else np.nan, f"{b} / {a}": y / x if x else np.nan}
    constants = {float(each) for each in re.findall(r"\d+(?:\.\d+)?", re.sub(r"_{.*?}", "", answer))} - {0, 1e-8}
    found |= {f"{c:g} · {key}": c * x for c in constants - {1.0} for key, x in found.items()}
    right = float(ANSWERS[name](values))
    return found | {f"without {each}": right / values[each] for each in about if not np.ndim(values[each])}


@pytest.mark.parametrize("name", [name for name in steps.PAGES if name not in ("09-heads", "12-train")])
def test_no_other_number_of_the_page_is_the_answer_by_chance(name: str) -> None:
    """Whatever equals the answer with the numbers that the page begins with is the answer with others too."""

    def right(values: dict[str, np.ndarray]) -> set[str]:
        answer = float(ANSWERS[name](values))
        near = max(0.02 * abs(answer), 0.005)  # what path.js takes for right
        return {guess for guess, x in guesses(name, values).items() if abs(x - answer) <= near}

    rng = np.random.default_rng(0)
    by_chance = right(values_of(name)) - set.intersection(*(right(values_of(name, rng)) for _ in range(4)))
    assert not by_chance


@pytest.mark.parametrize("name", ["03-linear", "09-heads", "12-train"])
def test_the_keyboard_reaches_everything_and_everything_has_a_name(pages: Path12, name: str) -> None:
    pages.open(f"path/{name}")
    reached = set()
    for _ in range(160):
        ActionChains(pages.browser, duration=0).send_keys(Keys.TAB).perform()
        what = "const here = document.activeElement; return here.id || here.className || here.textContent"
        reached.add(
            pages.run("return document.activeElement.closest('.path-line, .live, .living, .question')?.className")
        )
        if pages.run("return document.activeElement.closest('.question form button') !== null"):
            break
    assert len(reached - {None}) >= 3, (reached, pages.run(what))
    tree = pages.browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    unnamed = [
        node["role"]["value"]
        for node in tree
        if any(each["name"] == "focusable" and each["value"]["value"] for each in node.get("properties", ()))
        and not node.get("name", {}).get("value")
    ]
    assert not unnamed


def test_the_results_of_the_first_step_are_in_view_while_a_number_is_dragged(pages: Path12) -> None:
    pages.open("path/01-number", 1280)
    screen = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    pages.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    number = pages.find(".live-inputs input")[0]
    ActionChains(pages.browser, duration=0).click_and_hold(number).move_by_offset(50, 0).perform()
    lowest, bar = pages.run(
        "const [faces, bar] = ['.live-line button', '.live-dock'].map((each) => [...document.querySelectorAll(each)]);"
        "const bottoms = faces.map((face) => face.getBoundingClientRect().bottom);"
        "return [Math.max(...bottoms), bar[0].getBoundingClientRect().top]"
    )
    ActionChains(pages.browser, duration=0).release().perform()
    assert lowest <= bar


def test_a_page_works_without_storage(pages: Path12) -> None:
    pages.open("path/01-number")
    pages.run("localStorage.setItem('scratchformer-path', '{\"not\": [a list')")
    pages.open("path/01-number")
    assert pages.answer(ANSWERS["01-number"](pages.numbers())).startswith("Right:")
    assert pages.find(".path-line .done")


def test_an_answer_that_is_shown_has_only_forms_of_the_steps_so_far() -> None:
    """A reader who asks for the answer sees its terms, and can read them."""
    known = {"+", "-", "*", "/", "abs"}  # from school
    for page in steps.PAGES:
        text = (DOCS / "path" / f"{page}.md").read_text(encoding="utf-8")
        for block in re.findall(r"```{step} \w+\n(.*?)```", text, re.DOTALL):
            for equation in re.split(r"\n{2,}| {3,}", block.strip()):
                known |= forms(equation)
        answer = re.search(r"```{question} (.*)\n(:choices:)?", text)
        assert answer
        if answer[2] is None and page != steps.PAGES[-1]:
            assert forms(f"answer = {answer[1]}") <= known, (page, forms(f"answer = {answer[1]}") - known)


def forms(equation: str) -> set[str]:
    """The kinds of expressions in an equation; of a sum or a function, its name."""
    nodes = [node for part in parse(equation).parts for node in walk(part)]
    named = {
        str(node[1]) if node[0] in ("over", "call") else str(node[0]) for node in nodes if isinstance(node[0], str)
    }
    return {name for name in named if re.fullmatch(r"[a-z]{3,}|\W", name)} - {"num", "idx", "name", "group"}

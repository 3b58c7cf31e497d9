"""The site as it was built: SCRATCHFORMER_SITE names its folder. Without it these tests are skipped."""

import os
import re
import threading
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

from scratchformer import ops
from scratchformer.catalogue.derivations import CASES, check

SITE = Path(os.environ.get("SCRATCHFORMER_SITE", "")) if os.environ.get("SCRATCHFORMER_SITE") else None
pytestmark = pytest.mark.skipif(SITE is None, reason="SCRATCHFORMER_SITE names no site: python -m sphinx docs OUT")
THEMES = ("light", "dark")
OPERATIONS = [name for name in CASES if name in ops.__all__ and not name.endswith("_backward")]
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}


def pages():
    return sorted(SITE.rglob("*.html")) if SITE else []


class Page(HTMLParser):
    """The links, the resources that the browser loads, and the anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.resources, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if found.get("src"):
            self.resources.append(found["src"])
        if found.get("href"):
            loads = tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload")
            (self.resources if loads else self.links).append(found["href"])


@cache
def page(path):
    return Page(path.read_text(encoding="utf-8"))


def test_links_lead_to_pages_and_places_of_the_site():
    checked, wrong = 0, []
    for path in pages():
        for link in page(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = target.is_file() and (not anchor or target.suffix != ".html" or anchor in page(target).anchors)
            checked += 1
            if not known:
                wrong.append(f"{path.relative_to(SITE)}: {link}")
    assert not wrong, wrong[:20]
    assert checked > 5000


def test_no_markup_is_left_in_a_page():
    for path in pages():
        left = re.search(
            r":(math|doc|ref|py:obj):|[.]{2} [\w-]+::|\{(math|doc|term|ref)\}", path.read_text(encoding="utf-8")
        )
        assert not left, f"{path.relative_to(SITE)}: {left[0]}"


def test_nothing_is_loaded_from_another_host():
    for path in pages():
        for resource in page(path).resources:
            assert not urlsplit(resource).netloc, f"{path.relative_to(SITE)}: {resource}"
    for style in SITE.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?https?:", style.read_text(encoding="utf-8")), style


HEADINGS = (
    "return [...document.querySelectorAll('article :is(h1, h2, h3, h4)')].map(h => [+h.tagName[1], h.textContent])"
)


FAULTS = (Path(__file__).parent / "faults.js").read_text(encoding="utf-8")
KINDS = (  # a page of each kind
    "index", "path", "path/05-cross-entropy", "path/12-train", "notation", "operations", "operations/attention",
    "layers/TransformerBlock", "layers/GPT2", "learn", "exercises/linear_equations", "museum", "results", "api/ops",
    "contributing", "search",
)  # fmt: skip


FAULTY = """
<main><h1 style="color: #999">faint</h1><p style="background: #222; color: #777">faint in the dark</p>
<button></button><input><table><tr><th></th></tr></table><ul><p>no item</p></ul><i id="a"></i><i id="a"></i>
<dl><dd>no term</dd></dl><p tabindex="3">first</p></main><main></main>
<pre style="width: 9px; overflow: auto">too long</pre>
"""


def test_the_faults_are_found(browser):
    browser.get("data:text/html;charset=utf-8," + quote(f'<html lang="en"><title>all</title>{FAULTY}'))
    faults = [fault.partition(": ")[0] for fault in browser.execute_script(FAULTS)]
    assert sorted(faults) == sorted(
        ["no name"] * 2
        + ["an empty header", "no item of a list", "an id twice", "no list of definitions"]
        + ["it is out of order for the Tab key", "two landmarks of one name", "no key scrolls it"]
        + ["contrast"] * 2
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_of_each_kind_is_accessible(browser, address, width):
    """In both themes; a page is loaded once for both."""
    wrong = []
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        for name in KINDS:
            browser.get(f"{address}/{name}.html")
            for theme in THEMES:
                preferred = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
                wait_for_parts(browser)
                wrong += [f"{name}, {theme}: {fault}" for fault in browser.execute_script(FAULTS)]
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not wrong, "\n".join(wrong[:40])


def wait_for_parts(browser):
    """Until the live parts of a page are there, and what follows them has been drawn."""
    from selenium.webdriver.support.wait import WebDriverWait

    ready = "return [...document.querySelectorAll('.live, .living')].every((part) => part.page)"
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(ready))
    browser.execute_async_script(
        "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], 50)))"
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_page_of_an_operation_has_every_equation_with_its_error(name):
    text = (SITE / "operations" / f"{name}.html").read_text(encoding="utf-8")
    derivation = text[: text.find('id="the-code"')]
    rows = [row for row in check(name).rows if row.error is not None]
    shown = re.findall(r'<p class="error">(?:\de[-+]\d+|0)</p>', derivation)
    assert len(shown) >= len({(row.line, row.text) for row in rows})
    equations = len(check(name).derivation.equations)
    assert derivation.count('class="checked checked-equation') >= equations
    assert derivation.count("<math ") >= equations


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("localhost", 0), partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_no_page_has_errors_or_other_hosts_or_is_wider_than_a_phone(browser, address):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    wrong = []
    try:
        names = [path.relative_to(SITE).as_posix() for path in pages()]
        sources = [name for name in names if name.startswith("_modules/")]
        for name in [name for name in names if name not in sources[1:]]:  # pages of source code are all made alike
            browser.get(f"{address}/{name}")
            wrong += [f"{name}: {entry['message']}" for entry in browser.get_log("browser")]
            width = browser.execute_script("return document.documentElement.scrollWidth")
            loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
            wrong += [f"{name} loads {one}" for one in loaded if not one.startswith((address, "data:"))]
            wrong += [f"{name}: {problem}" for problem in disorder(browser.execute_script(HEADINGS))]
            if width > PHONE["width"]:
                wrong.append(f"{name} is {width} pixels wide")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not wrong, wrong[:20]


def disorder(headings):
    """What a reader of the headings alone would stumble over."""
    levels = [level for level, _ in headings]
    if levels.count(1) != 1 and headings:
        yield f"{levels.count(1)} titles"
    for (before, _), (level, text) in pairwise(headings):
        if level > before + 1:
            yield f"{text!r} is {level - before} levels below the heading before it"
    texts = [text for level, text in headings if level == 2]
    yield from (f"two headings {text!r}" for text in set(texts) if texts.count(text) > 1)


def test_the_search_works_in_a_site_opened_as_a_file(browser):
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(f"{(SITE / 'search.html').as_uri()}?q=attention")
    WebDriverWait(browser, 20).until(lambda _: browser.find_elements("css selector", "#search-results li a"))
    assert browser.find_elements("css selector", "#search-results li a")[0].text == "attention"
    assert not browser.get_log("browser")

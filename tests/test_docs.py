"""The page of derivations agrees with the code, and links between pages lead somewhere."""

import importlib.util
import re
from pathlib import Path

from scratchformer import ops

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "docs" / "build.py"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def builder():
    spec = importlib.util.spec_from_file_location("docs_build", BUILD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_derivations_is_up_to_date():
    build = builder()
    assert build.TARGET.read_text(encoding="utf-8") == build.page(), "run: python docs/build.py"


def test_the_page_has_every_operation():
    names = {name.removesuffix("_backward") for name in ops.__all__ if name.endswith("_backward")}
    assert names <= set(builder().ORDER)


def prose(page):
    """The text of a page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*|`[^`\n]*`(?!\])", "", text, flags=re.MULTILINE)


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    checked = 0
    for page in PAGES:
        text = prose(page)
        for link in re.findall(r"\]\(([^)]*)\)", text) + re.findall(r'src="([^"]*)"', text):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.is_file(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            checked += 1
    assert checked > 30


def test_every_page_and_picture_of_the_docs_is_linked_to():
    text = "".join(prose(page) for page in PAGES)
    for file in (ROOT / "docs").rglob("*.*"):
        if file.suffix in (".md", ".png") and file.name != "README.md":
            assert re.search(rf'[("/]{re.escape(file.name)}[)"#]', text), file.name

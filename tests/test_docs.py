"""Links between pages lead somewhere, and every page and picture is linked to."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "docs" / "one_step.md"  # by a build of the site
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {GENERATED})


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
            assert target.is_file() or target == GENERATED, f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            checked += 1
    assert checked > 30


def test_every_page_and_picture_of_the_docs_is_linked_to():
    text = "".join(prose(page) for page in PAGES)
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for file in [*PAGES, *(ROOT / "docs" / "img").iterdir()]:
        linked = re.search(rf'[("/]{re.escape(file.name)}[)"#]', text)
        assert linked or re.search(rf"^{file.stem}$", index, re.MULTILINE) or file.name in ("README.md", "index.md"), (
            file
        )


def test_the_index_on_github_lists_every_page():
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    of_the_site = {"README", "index", "contributing", "changelog"}
    for page in PAGES:
        if page.parent.name == "docs" and page.stem not in of_the_site:
            assert f"]({page.name})" in listed, page.name

"""Links between pages lead somewhere, and every page and picture is linked to."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")})


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
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for file in [*PAGES, *(ROOT / "docs" / "img").iterdir()]:
        linked = re.search(rf'[("/]{re.escape(file.name)}[)"#]', text)
        assert linked or re.search(rf"^{file.stem}$", index, re.MULTILINE) or file.name in ("README.md", "index.md"), (
            file
        )


def test_every_environment_variable_is_documented():
    """Those of the package on the pages, those of the tests in tests/README.md."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    read = re.compile(r"environ(?:\.get\(|\[)\s*\"([A-Z_0-9]+)\"")
    others = {"PATH", "PYTEST_CURRENT_TEST"}  # set by the system and by pytest
    others |= {"TQDM_DISABLE", "PYTHONSAFEPATH"}  # set for our own processes
    others |= {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PRTE_MCA_plm_ssh_agent"}  # set by launchers
    found = set()
    for path in (ROOT / "scratchformer").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= {*read.findall(text), *re.findall(r"SCRATCHFORMER_[A-Z0-9]+", text)} - others
    assert {"SCRATCHFORMER_DATA", "SCRATCHFORMER_FAST", "SCRATCHFORMER_GRAPHS", "NUMBA_DISABLE_JIT"} <= found
    assert not [name for name in found if f"`{name}" not in pages]
    assert "SCRATCHFORMER_FAST" in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    text = pages + (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    for path in [*(ROOT / "tests").rglob("*.py"), ROOT / ".ci" / "run"]:
        names = re.findall(r"SCRATCHFORMER_[A-Z][A-Z0-9]+", path.read_text(encoding="utf-8"))
        assert not [name for name in names if f"`{name}" not in text], path


def test_the_index_on_github_lists_every_page():
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    of_the_site = {"README", "index", "contributing", "changelog"}
    for page in PAGES:
        if page.parent.name == "docs" and page.stem not in of_the_site:
            assert f"]({page.name})" in listed, page.name

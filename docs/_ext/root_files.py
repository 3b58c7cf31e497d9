"""README, CONTRIBUTING and CHANGELOG in pages of the site; links between them and docs/ work here as on GitHub."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

PAGES = {"index": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
END = "## Results\n"  # the start page has the README up to here
HERE = "<!-- the file -->\n"  # where it comes in a page that begins with something else; its heading is left out then


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the file before the text of its page, or at its place in it, and lead links to these files to their pages."""
    text = source[0]
    if docname in PAGES:
        path = Path(app.srcdir).parent / PAGES[docname]
        app.env.note_dependency(str(path))
        file = path.read_text(encoding="utf-8").partition(END)[0].replace("](docs/", "](").replace('"docs/', '"')
        before, here, after = text.partition(HERE)
        text = before + file.partition("\n")[2] + after if here else file + text
    for page, file in PAGES.items():
        text = text.replace(f"](../{file}", f"]({page}.md").replace(f"]({file}", f"]({page}.md")
    source[0] = text


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

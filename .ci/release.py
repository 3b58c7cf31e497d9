"""The notes of a release, from the section of CHANGELOG.md about its version: `python .ci/release.py v0.1.0`.

A release has the tag v and the version of the package, or it has no notes. On GitHub, where the notes are not beside
the pages, links to pages get the address of the repository.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def release_notes(changelog: str, version: str, pages: str = "docs/") -> str:
    """The text of the section about a version, without its heading. Raises ValueError if it is missing or empty.

    pages: the address of the folder docs/, for links.
    """
    sections = re.split(r"^## \[(.+?)\].*\n", changelog, flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    if not texts.get(version, "").strip():
        raise ValueError(f"CHANGELOG.md: expected a section about {version}, got {', '.join(texts)}")
    return texts[version].strip().replace("](docs/", f"]({pages}") + "\n"


def package_version() -> str:
    """The version of the package, without importing it."""
    source = (ROOT / "scratchformer" / "version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]


def main(tag: str) -> None:
    if tag != f"v{package_version()}":
        sys.exit(f"error: tag: expected v{package_version()}, the version of the package, got {tag}")
    repository = os.environ.get("GITHUB_REPOSITORY")
    pages = f"https://github.com/{repository}/blob/{tag}/docs/" if repository else "docs/"
    sys.stdout.write(release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), tag.removeprefix("v"), pages))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["(none)"])

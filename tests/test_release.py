"""What the repository says about itself: the changelog, the notes of a release made from it, and the pieces of CI."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import scratchformer as sf

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "release.py"


def release(*arguments, **env):
    """What the script prints, and its exit status."""
    env = {"PATH": os.environ["PATH"], **env}
    ended = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=env)
    return ended.stdout or ended.stderr, ended.returncode


def test_the_notes_of_a_release_are_its_section():
    printed, status = release(f"v{sf.__version__}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert status == 0
    assert "\n## " not in printed
    heading = rf"^## \[{re.escape(sf.__version__)}\] - \d{{4}}-\d\d-\d\d\n\n"
    assert re.search(heading + re.escape(printed), changelog, re.MULTILINE)


@pytest.mark.parametrize("arguments", [(), ("v9.9",), (sf.__version__,)])
def test_a_tag_of_another_version_has_no_notes(arguments):
    printed, status = release(*arguments)
    assert status == 1
    assert printed.startswith(f"error: tag: expected v{sf.__version__}, the version of the package, got ")


@pytest.mark.parametrize("changelog", ["", "## [2.0]\n\n- A.\n", "## [1.0] - 2026-01-01\n\n## [0.9]\n\n- B.\n"])
def test_a_section_that_is_missing_or_empty_is_named(changelog):
    release_notes = runpy.run_path(str(SCRIPT))["release_notes"]
    with pytest.raises(ValueError, match=r"expected a section about 1\.0"):
        release_notes(changelog, "1.0")
    with_both = "# C\n\n## [1.0] - 2026-01-01\n\n- A.\n- [B](docs/b.md).\n\n## [0.9]\n\n- C.\n"
    assert release_notes(with_both, "1.0") == "- A.\n- [B](docs/b.md).\n"
    assert release_notes(with_both, "1.0", "https://pages/") == "- A.\n- [B](https://pages/b.md).\n"


def test_each_change_has_a_line_of_its_own():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = [line for line in changelog.splitlines() if line.startswith("- ")]
    assert len(entries) > 100
    assert not [entry for entry in entries if len(entry) > 160]
    assert len(set(entries)) == len(entries)
    assert "\n  " not in changelog  # no entry goes on in a second line
    sections = re.findall(r"^### (.*)$", changelog, re.MULTILINE)
    assert set(sections) <= {"Added", "Changed", "Removed", "Fixed"}


def test_the_public_ci_runs_every_piece():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pieces = re.search(r"^        (lint .*)\) ;;$", script, re.MULTILINE)[1].split(" | ")
    assert len(pieces) == 7
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.search(r"piece: \[(.*)\]", workflow)[1].split(", ") == pieces
    assert all(f"{piece}() {{" in script and f"\n#     {piece} " in script for piece in pieces)

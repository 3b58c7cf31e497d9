"""The extensions that make the site, for its tests."""

import os
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path[:0] = [str(DOCS), str(DOCS / "_ext")]


@pytest.fixture(scope="session")
def site() -> Path | None:
    """The folder of the whole site, if it has been built: SCRATCHFORMER_SITE names it."""
    return Path(os.environ["SCRATCHFORMER_SITE"]) if os.environ.get("SCRATCHFORMER_SITE") else None

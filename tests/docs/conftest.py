"""The extensions that make the site, for its tests."""

import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
sys.path[:0] = [str(DOCS), str(DOCS / "_ext")]

"""The modules of the site are imported from docs/_ext, as Sphinx does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))

"""The pages in docs/ are those that the code gives."""

import importlib.util
from pathlib import Path

from scratchformer import ops

BUILD = Path(__file__).parent.parent / "docs" / "build.py"


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

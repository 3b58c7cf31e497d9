"""The Python of the README and the guides runs as it stands, the blocks of a page one after the other."""

import linecache
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest

from scratchformer.testing import GradientError

ROOT = Path(__file__).parent.parent
BLOCKS = {
    "README.md": 2, "docs/checking.md": 10, "docs/compiler.md": 3, "docs/data.md": 2, "docs/gpu.md": 1,
    "docs/models.md": 3, "docs/notation.md": 1, "docs/precision.md": 3, "docs/training.md": 5,
}  # fmt: skip
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(GradientError: .*?)```)?", re.DOTALL)


def rounded(text):
    """The text with two digits of each number that is not whole: the last ones depend on the processor."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.2g}", text)


@pytest.mark.diagnosis
@pytest.mark.parametrize("page", BLOCKS)
def test_the_code_of_a_page_runs(page, capsys):
    """A block before the text of a GradientError must raise it, with this message; blocks of ```py are not run."""
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(blocks) == BLOCKS[page]
    session: dict = {}
    for number, (block, error) in enumerate(blocks):
        file = f"<{page} {number}>"
        linecache.cache[file] = len(block), None, block.splitlines(keepends=True), file  # for those who read the source
        code = compile(block, file, "exec")
        if not error:
            needs_numba = "sf.compile(" in block and "CompileError" not in block and not find_spec("numba")
            with pytest.raises(ImportError, match="needs Numba") if needs_numba else nullcontext():
                exec(code, session)
            continue
        with pytest.raises(GradientError) as caught:
            exec(code, session)
        assert rounded(f"GradientError: {caught.value}\n") == rounded(error)
    if page == "README.md":
        losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if re.match(r"\d+ \d", line)]
        assert len(losses) == 20
        assert losses[-1] < 0.7 * losses[0]
    if page == "docs/checking.md":
        session["test_swish"]()


def test_no_other_page_has_code_to_run():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    with_code = {p.relative_to(ROOT).as_posix() for p in pages if "```python" in p.read_text(encoding="utf-8")}
    assert with_code == set(BLOCKS)


def test_the_readme_begins_with_what_a_newcomer_needs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = ["pip install -e . && python", "pip install -e '.[test]' && pytest", "```python", "check_gradients(",
              "adam.step()", "## Results", "## Where to go next"]  # fmt: skip
    places = [text.index(part) for part in wanted]
    assert places == sorted(places)
    assert text[: places[2]].count("\n") < 50

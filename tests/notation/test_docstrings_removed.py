"""`python -OO` removes docstrings and asserts, as PYTHONOPTIMIZE=2 does: right stays right, and wrong stays wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scratchformer.course.course import NAMES, exercise

ROOT = Path(__file__).parents[2]
ALL = """
import inspect, json, sys
import scratchformer
{read}
found = {{}}
for module in [m for name, m in sys.modules.items() if name.startswith(("scratchformer.ops.", "scratchformer.nn."))]:
    for name, thing in vars(module).items():
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__ == module.__name__:
            found[module.__name__ + "." + name] = getdoc(thing)
json.dump(found, sys.stdout)
"""


def python(*words, folder=None, **variables):
    env = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)


def test_the_source_has_every_docstring():
    """Those that Python or a decorator writes, as for a named tuple, are in no source."""
    kept = json.loads(python("-c", ALL.format(read="getdoc = lambda thing: inspect.getdoc(thing) or ''")).stdout)
    read = python("-OO", "-c", ALL.format(read="from scratchformer.notation.run import getdoc"))
    found = json.loads(read.stdout)
    assert kept.keys() == found.keys() and len(kept) > 100
    different = {name for name in kept if kept[name] != found[name]}
    assert not {name for name in different if not re.match(r"\w+\(.*\)$", kept[name], re.DOTALL)}


@pytest.mark.parametrize(
    ("words", "variables"), [(("-OO",), {}), (("-O",), {}), ((), {"PYTHONOPTIMIZE": "2"}), ((), {"PYTHONOPTIMIZE": ""})]
)
def test_derivations_are_right(words, variables):
    names = ("softmax", "SelfAttention", "Adam", "Cosine", "newton_schulz", "TiedOutput")
    found = python(*words, "-m", "scratchformer", "check", "--derivations", *names, **variables)
    assert found.returncode == 0, found.stdout
    assert "none skipped" in found.stdout and "all " in found.stdout and "WRONG" not in found.stdout


def test_answers_are_right_and_mistakes_are_found(tmp_path):
    folder = tmp_path / "exercises"
    folder.mkdir()
    for name in (*(name for name in NAMES if name.endswith("_equations")), "relu"):
        (folder / f"{name}.py").write_text(exercise(name).solution, encoding="utf-8")
    assert python("-OO", "-m", "scratchformer", "learn", "check", "all", folder=tmp_path).returncode == 0
    name, (mistake, *_) = "softmax_equations", exercise("softmax_equations").mistakes
    wrong = exercise(name).solution.replace(mistake.right, mistake.wrong)
    (folder / f"{name}.py").write_text(wrong, encoding="utf-8")
    printed = python("-OO", "-m", "scratchformer", "learn", "check", name, folder=tmp_path).stdout
    assert re.search(mistake.says, printed, re.DOTALL) and mistake.what in printed
    printed = python("-OO", "-m", "scratchformer", "learn", "solution", name, folder=tmp_path).stdout
    assert "Σ_i y_i = 1" in printed


def test_asserts_in_an_answer_are_checked(tmp_path):
    folder = tmp_path / "exercises"
    folder.mkdir()
    text = exercise("softmax").solution.replace("    dz = ", "    assert dy.size == 0, 'seen'\n    dz = ")
    (folder / "softmax.py").write_text(text, encoding="utf-8")
    assert "AssertionError: seen" in python("-O", "-m", "scratchformer", "learn", "check", folder=tmp_path).stdout


def test_mistakes_are_found_though_asserts_are_removed(tmp_path):
    """pytest would pass whatever it runs."""
    (tmp_path / "my_ops.py").write_text("def double_backward(dy, cache):\n    return 2 * dy\n")
    (tmp_path / "test_my_ops.py").write_text(
        "from my_ops import double_backward\n\ndef test():\n    assert double_backward(3.0, None) == 6.0\n"
    )
    words = ("-m", "scratchformer", "mutate", "my_ops.py", "--", "test_my_ops.py")
    for found in python("-OO", *words, folder=tmp_path), python(*words, folder=tmp_path, PYTHONOPTIMIZE="2"):
        assert found.returncode == 0 and "and missed 0" in found.stdout, found.stdout + found.stderr


def test_the_site_is_not_built_without_docstrings(tmp_path):
    pytest.importorskip("sphinx")
    found = python("-OO", "docs/conf.py", folder=ROOT)
    assert found.returncode == 1 and "the pages are made of docstrings" in found.stderr


def test_source_is_read_with_its_docstrings():
    """`ast.parse` drops them under -OO, from Python 3.14 on; not needed for an expression."""
    package = ROOT / "scratchformer"
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    calls = [(path.name, line) for path, text in texts.items() for line in text.splitlines() if "ast.parse(" in line]
    assert all('mode="eval"' in line for _, line in calls), calls
    read = python(
        "-OO", "-c", "from scratchformer.training.examples import *; print(*map(first_line, examples().values()))"
    )
    assert "film reviews" in read.stdout and "None" not in read.stdout, read.stderr

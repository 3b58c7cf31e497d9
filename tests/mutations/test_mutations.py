"""Mistakes that others made in hand-written gradients, planted one at a time: the suite must fail for each.

The tests that are responsible for a mistake run in a process of their own, which imports the mistaken code instead of
the file; the file stays as it is. The mistakes are those of `scratchformer.catalogue` that replace code, with their
tests. Each replaced text must occur in its file exactly once, so that a mistake that no longer fits is noticed.
"""

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.config import default_plugins

from scratchformer import catalogue
from scratchformer.testing.mutate import Runner

ROOT = Path(__file__).parent.parent.parent


MISTAKES = [mistake for mistake in catalogue.MISTAKES if mistake.replace]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """pytest without plugins, which are slow to load, and without shrinking; compiled files are kept for the next run."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("compiled")), "OMP_NUM_THREADS": "1"}
    settings = {"HYPOTHESIS_PROFILE": "unshrunk", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    return kept | compiled | settings | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def run_tests(environment):
    """run_tests("tests/optim", path, code) gives pytest's exit status, 1 if a test failed, and what it printed."""
    imports = ["hypothesis.extra.numpy", "safetensors.numpy", "scipy.special", "tarfile", "threadpoolctl"]
    imports += [f"_pytest.{name}" for name in default_plugins]  # or each fork imports them
    with Runner(environment, ROOT, imports=imports) as runner:

        def run(tests, path="", code=""):
            answer = runner.run(["-p", "no:unraisableexception", *shlex.split(tests)], path, code)
            return answer.status, answer.output[-3000:]

        yield run


def without_docstrings(code):
    """The code with empty lines for docstrings, where a derivation may end on the line that is replaced."""
    lines = code.splitlines(keepends=True)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = ["\n"] * (node.end_lineno - node.lineno + 1)
    return "".join(lines)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_suite_fails_for(mistake, run_tests):
    path = ROOT / "scratchformer" / mistake.file
    if path.name.startswith("numba_"):
        pytest.importorskip("numba")  # without it the reference runs, which has no mistake
    code = without_docstrings(path.read_text(encoding="utf-8"))
    for right in mistake.replace:
        assert (count := code.count(right)) == 1, f"{mistake.file} has {count} times: {right}"
    status, output = run_tests(mistake.tests, path, mistake.source())
    assert status == 1, output


def test_without_a_mistake_the_tests_pass(run_tests):
    """Otherwise a failure could be due to the planting, not to the mistake."""
    path = ROOT / "scratchformer/ops/softmax.py"
    tests = "tests/optim tests/ops/test_softmax.py tests/ops/test_positions.py"
    status, output = run_tests(tests, path, path.read_text(encoding="utf-8"))
    assert status == 0, output


# An editable installation would find the modules that are missing in the copy.
ONLY_THE_COPY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""


# They compare the references with numeric gradients, or with themselves, as they do in the whole suite.
SLOW_WITHOUT = ["test_gradients", "wide_beam", "plain_search", "same_bits", "add_up"]


def test_without_kernels_nothing_but_speed_is_lost(environment, tmp_path, thorough):
    for name in ("scratchformer", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "mutations"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(ONLY_THE_COPY)
    shutil.rmtree(tmp_path / "scratchformer" / "kernels", ignore_errors=True)
    tests = "tests/kernels tests/ops/test_attention.py tests/ops/test_linear.py tests/nn/test_block.py tests/optim"
    generation = "tests/generation" if thorough else "tests/generation/test_cache.py"
    tests += f" {generation} tests/parallel/test_replicas.py tests/test_dispatch.py"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    left = ["strict", *SLOW_WITHOUT]  # the strict device uses no kernels
    command += ["-k", f"not {' and not '.join(left)}", "--deselect", "tests/generation/test_sampling.py"]
    environment = environment | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]

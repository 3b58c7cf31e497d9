"""The pytest plugin: what the fixture does, what a failure looks like, and that other tests notice nothing."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
OPERATIONS = """
import numpy as np
from scratchformer import nn

def leaky(x):
    return np.where(x > 0, x, 0.01 * x), x

def wrong(dy, x):
    return dy.copy()

class Twice(nn.Linear):
    def backward(self, dy, cache):
        return 2 * super().backward(dy, cache)
"""
LEAKY = "    x = np.array([[-1.0]])\n    check_gradients(leaky, wrong, x)"


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def run(pytester):
    """Runs tests, which may use OPERATIONS, in this process. Returns the result."""

    def run(tests, *options):
        pytester.makepyfile(leaky_ops=OPERATIONS, test_it=f"from leaky_ops import *\n{tests}")
        pytester.syspathinsert()
        return pytester.runpytest_inprocess("-p", "scratchformer_pytest", *options)

    return run


def test_a_failure_shows_the_message_and_a_small_counterexample(run, pytester):
    tests = """
def test_pair(gradients):
    gradients(leaky, wrong, gradients.normal((3, 4)))

def test_local(gradients):
    gradients(lambda x: (2 * x, None), lambda dy, _: dy, gradients.normal(3))

def test_layer(gradients):
    gradients.layer(Twice(2, 2), gradients.normal((2, 2)))

import unittest
from scratchformer.testing import check_gradients

class Test(unittest.TestCase):
    def test_without_fixture(self):
        check_gradients(leaky, wrong, -np.ones(3))
"""
    result = run(tests, "--gradient-seed", "5")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "gradient seed: 5",
            ">       gradients(leaky, wrong, gradients.normal((3, 4)))",
            "E       scratchformer.testing.GradientError: leaky: wrong gradient at x*",
            "E       Repeat with the same arguments: check_gradients(leaky, wrong, ..., seed=5)",
            "",
            "test_it.py:*: GradientError",
            "*- counterexample -*",
            "from leaky_ops import leaky, wrong",
            "def test_pair_counterexample():",
            "    check_gradients(leaky, wrong, x)  # wrong gradient at x?0, 0?: analytic 0.399, numeric 0.00399",
            "Repeat with --gradient-seed 5",
            "*= gradient counterexamples =*",
            "test_it.py::test_pair: check_gradients(leaky, wrong, np.array(??-1.0??))",
            "test_it.py::test_local: check_gradients(op, op_backward, np.array(?0.0?))",
            "test_it.py::test_layer: check_layer(layer, np.array(??0.0, 0.0??))",
            "test_it.py::Test::test_without_fixture: check_gradients(leaky, wrong, np.array(?-1.0?))",
            "Run them again: pytest .pytest_cache/d/scratchformer/test_counterexamples.py",
        ]
    )
    assert LEAKY in result.stdout.str() and "scratchformer/testing" not in result.stdout.str()
    file = pytester.path / ".pytest_cache/d/scratchformer/test_counterexamples.py"
    sys.path.remove(str(pytester.path))  # the file says itself where the operations are
    again = pytester.runpytest_inprocess(file, "-rs")
    again.assert_outcomes(failed=2, skipped=2)
    again.stdout.fnmatch_lines(["SKIPPED*op cannot be imported (it is defined in test_it.py, line 7)*"])


def test_hypothesis_ends_with_a_small_counterexample_too(run):
    """With and without the fixture, and without the arrays of its own example."""
    tests = """
from hypothesis import Phase, given, settings
from scratchformer.testing import check_gradients
from scratchformer.testing.strategies import tensors

@settings(database=None, derandomize=True, deadline=None, phases=[Phase.generate])
@given(tensors("B 3 3"))
def test_fixture(gradients, xs):
    gradients(leaky, wrong, *xs)

@settings(database=None, derandomize=True, deadline=None, phases=[Phase.generate])
@given(tensors("B C"))
def test_plain(xs):
    check_gradients(leaky, wrong, *xs)
"""
    result = run(tests, "-p", "no:cacheprovider")
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert text.count("x = np.array([[[-1.0]]])") == 1 and LEAKY in text
    result.stdout.fnmatch_lines(
        ["E*tensors('B 3 3'): sizes*seed*", "E*test_fixture(...) with arrays too long to show*"]
    )
    assert "pytest's cache is switched off" in text


def test_counterexamples_are_added_to_a_file_and_run_first(run, pytester):
    tests = """
def test_first():
    pass

def test_pair(gradients):
    gradients(leaky, wrong, gradients.normal((3, 4)))
"""
    options = ("--gradient-counterexamples", "test_zoo.py", "-v")
    pytester.makepyfile(test_zoo="def test_own():\n    pass\n")
    run(tests, *options).assert_outcomes(passed=2, failed=1)
    file = pytester.path / "test_zoo.py"
    text = file.read_text()
    assert text.startswith("def test_own()") and text.count(LEAKY) == 1
    result = run(tests, *options)
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        ["test_zoo.py::test_own*", "test_zoo.py::test_pair_counter*", "test_it.py::test_first*"]
    )
    assert file.read_text() == text


def test_random_numbers_depend_on_the_seed_and_the_test(run):
    tests = """
import pytest

@pytest.mark.parametrize("i", [0, 1])
def test_numbers(gradients, i):
    print("numbers:", gradients.normal(()), gradients.rng.standard_normal())
"""

    def numbers(*options):
        lines = run(tests, "-s", *options).stdout.lines
        found = [x for line in lines if "numbers:" in line for x in line.split("numbers:")[1].split()]
        assert len(set(found)) == 4
        return found

    assert numbers() == numbers("--gradient-seed", "0") != numbers("--gradient-seed", "1")
    assert numbers("--gradient-seed", "random") != numbers()
    result = run(tests, "--gradient-seed", "many")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--gradient-seed: expected a number >= 0 or random, got many"])


def test_a_report_survives_the_way_from_a_worker(run, pytester):
    """pytest-xdist sends reports as JSON to the process that lists the counterexamples."""
    pytester.makeconftest(
        """
import json, pytest
def pytest_runtest_logreport(report):
    data = json.loads(json.dumps(report._to_json()))
    for each in getattr(pytest.TestReport._from_json(data), "gradient_counterexamples", []):
        print("received", each["nodeid"], each["call"])
"""
    )
    result = run("def test_pair(gradients):\n    gradients(leaky, wrong, gradients.normal(9))", "-s")
    result.stdout.fnmatch_lines(["*received test_it.py::test_pair check_gradients(leaky, wrong, np.array(?-1.0?))"])


def test_other_failures_are_as_without_the_plugin(run):
    """An expected failure is not shrunk, and a failure that has nothing to do with gradients is not changed."""
    tests = """
import pytest
from scratchformer.testing import GradientError, check_gradients

def test_assert():
    assert 1 > 2

@pytest.mark.xfail(strict=True)
def test_expected():
    check_gradients(leaky, wrong, -np.ones(3))

def test_raises():
    with pytest.raises(GradientError):
        check_gradients(leaky, wrong, -np.ones(3))

def test_no_check():
    raise GradientError("mine")
"""
    result = run(tests)
    result.assert_outcomes(failed=2, passed=1, xfailed=1)
    result.stdout.no_fnmatch_line("*gradient*seed*")
    result.stdout.no_fnmatch_line("*counterexample*")
    result.stdout.fnmatch_lines([">       assert 1 > 2", ">       raise GradientError(*mine*)"])


def test_a_run_that_uses_nothing_imports_nothing(pytester):
    pytester.makepyfile("def test_plain():\n    pass")
    code = """
import pytest, sys
before = {*sys.modules}
import scratchformer_pytest
print({*sys.modules} - before)
assert pytest.main(["-q", "-p", "scratchformer_pytest"]) == 0
print("imported", {"scratchformer", "numpy", "hypothesis"} & set(sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=pytester.path, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert eval(lines[0]) == {"scratchformer_pytest"} and lines[-1] == "imported set()", result.stdout + result.stderr


def test_the_plugin_is_installed_with_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    name, module = setup["options.entry_points"]["pytest11"].strip().split(" = ")
    assert name == "scratchformer" and module in setup["options"]["py_modules"].split()
    assert (ROOT / f"{module}.py").is_file()

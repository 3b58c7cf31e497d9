"""Mistakes planted in every backward of the package: its own tests must find them, except those that change nothing.

    HYPOTHESIS_PROFILE=thorough pytest -s tests/testing/test_survivors.py         # all, which takes about an hour
    HYPOTHESIS_PROFILE=thorough pytest -s tests/testing/test_survivors.py -k softmax

By default a few are drawn.
"""

import ast
import os
import random
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from scratchformer.catalogue import entries_of
from scratchformer.testing.mutate import mutants
from scratchformer.testing.mutate.run import Job, run_jobs
from scratchformer.testing.mutate.source import functions
from scratchformer.testing.mutate.targets import find_targets

ROOT = Path(__file__).parents[2]
THOROUGH = settings.get_current_profile_name() == "thorough"
SAMPLE = {"ops/softmax.py": 12}  # what runs by default, and how many mistakes

EVERYWHERE = "tests/ops/test_all_operations.py tests/testing/test_precision.py"


def files_with_tests():
    """The tests for the backwards of each file: those of an entry, or those in which its operations' names occur."""
    words = {}
    for entry in entries_of("operations"):
        if entry.file and entry.cases:
            words.setdefault(entry.file, [f"test_{Path(entry.file).name}", "large_scores"]).append(entry.name)
    tests = {
        file: f"tests/ops/{first} {EVERYWHERE} -k '{' or '.join([first, *names])}'"
        for file, (first, *names) in words.items()
    }
    return tests | {entry.file: entry.tests for entry in entries_of() if entry.tests}


TESTS = files_with_tests()
HELPERS = {entry.file for entry in entries_of() if entry.helpers}
EXPLAINED = {(entry.file, *key) for entry in entries_of() for key in entry.equal}  # (file, function, change)


def change(job):
    """The mistake as an entry of the catalogue has it."""
    before, after = job.mutant.difference(job.target.source)
    return " -> ".join("\n".join(line.strip() for line in lines) for lines in (before, after))


@pytest.fixture
def missed(monkeypatch):
    """missed(file) plants the mistakes in a file and gives those that its tests miss: {(function, change)}."""
    monkeypatch.chdir(ROOT)
    environment = os.environ | {"HYPOTHESIS_PROFILE": "unshrunk", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(file):
        tests = tuple(shlex.split(TESTS[file]))
        targets = find_targets(f"scratchformer/{file}", helpers=file in HELPERS)
        jobs = [Job(target, mutant, tests) for target in targets for mutant in mutants(target.source, target.name)]
        if not THOROUGH:
            jobs = random.Random(file).sample(jobs, SAMPLE[file])
        processes = (os.cpu_count() or 1) if THOROUGH else 1
        outcomes = list(run_jobs(jobs, processes, environment | {"PYTEST_ADDOPTS": ""}))
        survivors = {(o.job.target.name, change(o.job)) for o in outcomes if not o.killed}
        print(f"{file}: {len(outcomes)} mistakes, {len(survivors)} missed")
        return survivors

    return run


@pytest.mark.parametrize("file", TESTS if THOROUGH else SAMPLE)
def test_the_tests_find_every_mistake(file, missed):
    survivors = missed(file)
    explained = {(function, change) for path, function, change in EXPLAINED if path == file}
    assert survivors - explained == set()
    if THOROUGH:
        assert explained - survivors == set()  # none that the tests find, and none that can no longer be made


@pytest.mark.parametrize(("file", "function", "change"), sorted(EXPLAINED))
def test_the_lines_of_a_survivor_exist(file, function, change):
    lines = {line.strip() for line in (ROOT / "scratchformer" / file).read_text(encoding="utf-8").splitlines()}
    before, _, after = change.partition(" -> ")
    assert before != after and set(before.split("\n")) <= lines


def test_every_file_with_a_backward_is_here():
    for folder in ("ops", "kernels"):
        for path in (ROOT / "scratchformer" / folder).glob("*.py"):
            if path.name.startswith("cupy_"):  # which run on a GPU alone
                continue
            if path.name.startswith("numba_") and not find_spec("numba"):
                continue
            backwards = [name for name, _ in functions(ast.parse(path.read_text("utf-8"))) if "_backward" in name]
            assert not backwards or f"{folder}/{path.name}" in TESTS

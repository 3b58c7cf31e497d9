"""Mistakes planted in every backward of the package: its own tests must find them, except those that change nothing.

    HYPOTHESIS_PROFILE=thorough pytest -s tests/testing/test_survivors.py         # all, which takes about an hour
    HYPOTHESIS_PROFILE=thorough pytest -s tests/testing/test_survivors.py -k softmax

By default a few are drawn.
"""

import os
import random
import shlex
from pathlib import Path

import pytest
from hypothesis import settings

from scratchformer.testing.mutate import mutants
from scratchformer.testing.mutate.run import Job, run_jobs
from scratchformer.testing.mutate.targets import find_targets

ROOT = Path(__file__).parents[2]
THOROUGH = settings.get_current_profile_name() == "thorough"
SAMPLE = {"ops/softmax.py": 12, "kernels/numpy_layernorm.py": 12}  # what runs by default, and how many mistakes

EVERY_OPERATION = "tests/ops/test_all_operations.py"
EVERY_LAYER = "tests/nn/test_all_layers.py"
TWINS = "tests/kernels/test_twins.py"

# The tests for the backwards of each file in scratchformer/.
TESTS = {
    "ops/activations.py": f"tests/ops/test_activations.py {EVERY_OPERATION} -k 'activations or relu or gelu or tanh or silu'",
    "ops/attention.py": "tests/ops/test_attention.py -k 'not strict'",
    "ops/cross_entropy.py": f"tests/ops/test_cross_entropy.py {EVERY_OPERATION} -k 'cross_entropy or large_scores'",
    "ops/dense.py": f"tests/ops/test_dense.py {EVERY_OPERATION} -k dense",
    "ops/dropout.py": f"tests/ops/test_dropout.py {EVERY_OPERATION} -k dropout",
    "ops/embedding.py": f"tests/ops/test_embedding.py {EVERY_OPERATION} -k embedding",
    "ops/gather.py": f"tests/ops/test_gather.py {EVERY_OPERATION} -k gather",
    "ops/layernorm.py": f"tests/ops/test_layernorm.py {EVERY_OPERATION} -k layernorm",
    "ops/linear.py": f"tests/ops/test_linear.py {EVERY_OPERATION} -k linear",
    "ops/pooling.py": f"tests/ops/test_pooling.py {EVERY_OPERATION} -k pool",
    "ops/relative.py": "tests/ops/test_relative.py -k 'not strict'",
    "ops/rmsnorm.py": f"tests/ops/test_rmsnorm.py {EVERY_OPERATION} -k rmsnorm",
    "ops/rotary.py": f"tests/ops/test_rotary.py {EVERY_OPERATION} -k rotary",
    "ops/softmax.py": f"tests/ops/test_softmax.py {EVERY_OPERATION} -k 'softmax or large_scores'",
    "ops/swiglu.py": f"tests/ops/test_swiglu.py {EVERY_OPERATION} -k swiglu",
    "kernels/numpy_attention.py": f"{TWINS} -k 'attention and not relative and not derivation'",
    "kernels/numpy_cross_entropy.py": f"{TWINS} tests/ops/test_cross_entropy.py {EVERY_OPERATION} -k cross_entropy",
    "kernels/numpy_dense.py": f"{TWINS} tests/ops/test_dense.py {EVERY_OPERATION} -k dense",
    "kernels/numpy_dropout.py": f"{TWINS} tests/ops/test_dropout.py {EVERY_OPERATION} -k dropout",
    "kernels/numpy_embedding.py": f"{TWINS} tests/ops/test_embedding.py {EVERY_OPERATION} -k embedding",
    "kernels/numpy_layernorm.py": f"{TWINS} tests/ops/test_layernorm.py {EVERY_OPERATION} -k layernorm",
    "kernels/numpy_relative.py": f"{TWINS} -k 'relative and not derivation'",
    "kernels/numpy_rmsnorm.py": f"{TWINS} tests/ops/test_rmsnorm.py {EVERY_OPERATION} -k rmsnorm",
    "kernels/numpy_swiglu.py": f"{TWINS} tests/ops/test_swiglu.py {EVERY_OPERATION} -k swiglu",
}

# Files of which the functions that a backward calls get mistakes too: part of the derivative is in them.
HELPERS = ("ops/embedding.py", "ops/relative.py", "ops/rotary.py", "kernels/numpy_dense.py")

SAME_WIDTH = "q, k and v have the same width"
FLOAT32 = "the other factor is float32, and float16 times float32 is float32"
ONE_AXIS = "it has one axis"

# The mistakes that the tests miss, as "line -> line with the mistake", each with the reason.
EQUAL: dict[str, dict[str, str]] = {
    "ops/layernorm.py::layernorm_backward": {
        "dy, xhat, rstd = widen(dy), widen(cache.xhat), cache.rstd -> "
        "dy, xhat, rstd = widen(dy), cache.xhat, cache.rstd": FLOAT32,
    },
}


def change(job):
    """The key of a mistake in EQUAL."""
    before, after = job.mutant.difference(job.target.source)
    return " -> ".join(" / ".join(line.strip() for line in lines) for lines in (before, after))


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
        found = {(o.job.target.name, change(o.job)) for o in outcomes if not o.killed}
        print(f"{file}: {len(outcomes)} mistakes, {len(found)} missed")
        return found

    return run


@pytest.mark.parametrize("file", TESTS if THOROUGH else SAMPLE)
def test_the_tests_find_every_mistake(file, missed):
    found = missed(file)
    explained = {
        (name, change)
        for function, changes in EQUAL.items()
        for path, _, name in [function.partition("::")]
        for change in changes
        if path == file
    }
    assert found - explained == set()
    if THOROUGH:
        assert explained - found == set()  # none that the tests find after all, and none that can no longer be made


def test_every_line_that_is_explained_exists():
    for function, changes in EQUAL.items():
        source = (ROOT / "scratchformer" / function.partition("::")[0]).read_text(encoding="utf-8")
        lines = {line.strip() for line in source.splitlines()}
        for change in changes:
            before, _, after = change.partition(" -> ")
            assert before != after and set(before.split(" / ")) <= lines


def test_every_file_with_a_backward_is_here():
    for folder in ("ops", "kernels"):
        for path in (ROOT / "scratchformer" / folder).glob("*.py"):
            has_one = "_backward(" in path.read_text(encoding="utf-8") and "@backward" in path.read_text(encoding="utf-8")
            assert not has_one or f"{folder}/{path.name}" in TESTS

"""Mistakes planted in every backward of the package: its own tests must find them, except those that change nothing.

    HYPOTHESIS_PROFILE=thorough pytest -s tests/testing/test_survivors.py         # all, which takes about an hour
    HYPOTHESIS_PROFILE=thorough pytest -s tests/testing/test_survivors.py -k softmax

By default a few are drawn.
"""

import ast
import os
import random
import shlex
from pathlib import Path

import pytest
from hypothesis import settings

from scratchformer.testing.mutate import mutants
from scratchformer.testing.mutate.run import Job, run_jobs
from scratchformer.testing.mutate.source import functions
from scratchformer.testing.mutate.targets import find_targets

ROOT = Path(__file__).parents[2]
THOROUGH = settings.get_current_profile_name() == "thorough"
SAMPLE = {"ops/softmax.py": 12}  # what runs by default, and how many mistakes

EVERY_OPERATION = "tests/ops/test_all_operations.py"
EVERY_LAYER = "tests/nn/test_all_layers.py"
TWINS = "tests/kernels/test_twins.py"
PRECISION = "tests/testing/test_precision.py"

# The tests for the backwards of each file in scratchformer/.
TESTS = {
    "ops/activations.py": f"tests/ops/test_activations.py {EVERY_OPERATION} {PRECISION} -k 'activations or lu or tanh'",
    "ops/add.py": f"tests/ops/test_add.py {EVERY_OPERATION} -k add",
    "ops/attention.py": f"tests/ops/test_attention.py {TWINS} {EVERY_OPERATION} {PRECISION} "
    "-k '(test_attention.py or not_finite or attention and (broadcast or bounds)) and not strict'",
    "ops/cross_entropy.py": f"tests/ops/test_cross_entropy.py {EVERY_OPERATION} {PRECISION} "
    "-k 'cross_entropy or large_scores'",
    "ops/dense.py": f"tests/ops/test_dense.py {EVERY_OPERATION} -k dense",
    "ops/dropout.py": f"tests/ops/test_dropout.py {EVERY_OPERATION} {PRECISION} -k dropout",
    "ops/embedding.py": f"tests/ops/test_embedding.py {EVERY_OPERATION} -k embedding",
    "ops/gather.py": f"tests/ops/test_gather.py {EVERY_OPERATION} -k gather",
    "ops/layernorm.py": f"tests/ops/test_layernorm.py {EVERY_OPERATION} {PRECISION} -k layernorm",
    "ops/linear.py": f"tests/ops/test_linear.py {EVERY_OPERATION} -k linear",
    "ops/pooling.py": f"tests/ops/test_pooling.py {EVERY_OPERATION} -k pool",
    "ops/relative.py": f"tests/ops/test_relative.py {EVERY_OPERATION} {PRECISION} "
    "-k 'test_relative.py or relative and (stays or broadcast or bounds)'",
    "ops/rmsnorm.py": f"tests/ops/test_rmsnorm.py {EVERY_OPERATION} {PRECISION} -k rmsnorm",
    "ops/rotary.py": f"tests/ops/test_rotary.py {EVERY_OPERATION} {PRECISION} -k rotary",
    "ops/soft_cross_entropy.py": f"tests/ops/test_soft_cross_entropy.py {EVERY_OPERATION} {PRECISION} "
    "-k soft_cross_entropy",
    "ops/softmax.py": f"tests/ops/test_softmax.py {EVERY_OPERATION} {PRECISION} -k 'softmax or large_scores'",
    "ops/squared_relu.py": f"tests/ops/test_squared_relu.py {EVERY_OPERATION} {PRECISION} -k squared_relu",
    "ops/swiglu.py": f"tests/ops/test_swiglu.py {EVERY_OPERATION} -k swiglu",
    "kernels/numba_amx.py": "tests/kernels/test_numba_attention.py",
    "kernels/numba_attention.py": "tests/kernels/test_numba_attention.py",
    "kernels/numba_linear.py": f"{TWINS} -k linear",
    "kernels/numpy_attention.py": f"{TWINS} tests/ops/test_attention.py {EVERY_OPERATION} "
    "-k 'not_finite or without_heads or attention and (agrees or refused)'",
    "kernels/numpy_relative.py": f"{TWINS} {EVERY_OPERATION} -k 'not_finite or relative and (agrees or refused)'",
    "nn/attention.py": f"{EVERY_LAYER} tests/nn/test_attention.py -k 'test_attention.py or Attention'",
    "nn/linear.py": f"{EVERY_LAYER} tests/nn/test_linear.py -k 'Linear or FeedForward'",
    "nn/lora.py": f"{EVERY_LAYER} tests/nn/test_lora.py -k LoRA",
}

# Files of which the functions that a backward calls get mistakes too: part of the derivative is in them.
HELPERS = ("ops/embedding.py", "ops/relative.py", "ops/rotary.py")

HALF = "in half precision it rounds less; float32 is the same"
SHAPE = "it has the same shape"

# The mistakes that the tests miss, as "line -> line with the mistake", each with the reason: it changes no result.
EQUAL: dict[str, dict[str, str]] = {
    "ops/attention.py::attention_backward": {
        "xp, shape, G = array_module(q), q.shape, k.shape[1] "
        "-> xp, shape, G = array_module(q), q.shape, v.shape[1]": "v has the heads of k",
    },
    "ops/embedding.py::embedding_backward": {
        "dtable = xp.zeros(cache.shape, dtype=dy.dtype) if out is None or dy.dtype != dtype else out -> "
        "dtable = xp.zeros(cache.shape, dtype=dy.dtype)": "a table of its own is added to out afterwards",
    },
    "ops/pooling.py::max_pool_backward": {
        "dx = xp.where(steps == winner[:, None, :], dy[:, None, :] * live[:, :, None], 0) -> "
        "dx = xp.where(steps == winner[:, None, :], dy[:, None, :] * live[:, None, :], 0)": "live is (B, 1)",
    },
    "ops/relative.py::relative_shift_backward": {
        "dx[..., rows, columns] = dy -> dx[..., rows, columns] += dy": "dx is 0 before, and no place occurs twice",
    },
    "ops/relative.py::relative_attention_backward": {},
    "ops/swiglu.py::swiglu_backward": {
        'expect_like("dy", dy, cache.gate.shape) -> expect_like("dy", dy, cache.up.shape)': SHAPE,
    },
    "kernels/numpy_attention.py::attention_backward": {
        "(_, H, _, D), (_, G, S, _) = q.shape, k.shape -> (_, H, _, D), (_, G, S, _) = y.shape, k.shape": SHAPE,
        "(_, H, _, D), (_, G, S, _) = q.shape, k.shape -> (_, H, _, D), (_, G, S, _) = q.shape, v.shape": SHAPE,
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v)) -> "
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, k))": SHAPE,
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v)) -> "
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, v, k))": SHAPE,
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v)) -> "
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, v, v))": SHAPE,
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v)) -> "
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (y, k, v))": SHAPE,
        "for (part, runs), bound in zip(groups(pattern, q.shape, S, q.dtype, shared), bounds, strict=True): -> "
        "for (part, runs), bound in zip(groups(pattern, dq.shape, S, q.dtype, shared), bounds, strict=True):": SHAPE,
        "for (part, runs), bound in zip(groups(pattern, q.shape, S, q.dtype, shared), bounds, strict=True): -> "
        "for (part, runs), bound in zip(groups(pattern, y.shape, S, q.dtype, shared), bounds, strict=True):": SHAPE,
    },
    "kernels/numpy_relative.py::relative_attention_backward": {
        "(_, _, T, D), S = q.shape, k.shape[2] -> (_, _, T, D), S = y.shape, k.shape[2]": SHAPE,
        "(_, _, T, D), S = q.shape, k.shape[2] -> (_, _, T, D), S = q.shape, v.shape[2]": "v is as long as k",
        "for (part, runs), bound in zip(groups(pattern, q.shape, S, q.dtype), bounds, strict=True): -> "
        "for (part, runs), bound in zip(groups(pattern, y.shape, S, q.dtype), bounds, strict=True):": SHAPE,
        "shifted(db)[...] = da -> shifted(db)[...] += da": "db is 0 before",
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v)) -> "
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, k))": SHAPE,
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v)) -> "
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, v, v))": SHAPE,
        "for (part, runs), bound in zip(groups(pattern, q.shape, S, q.dtype), bounds, strict=True): -> "
        "for (part, runs), bound in zip(groups(pattern, dq.shape, S, q.dtype), bounds, strict=True):": SHAPE,
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v)) -> "
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (y, k, v))": SHAPE,
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, k, v)) -> "
        "dq, dk, dv = (heads_inside(x.shape, q.dtype) for x in (q, v, k))": SHAPE,
    },
    "nn/linear.py::Linear.backward": {
        "self.b.grad += db[0] -> self.b.grad += db[-1]": "there is one",
    },
}


def change(job):
    """The key of a mistake in EQUAL."""
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
            assert before != after and set(before.split("\n")) <= lines


def test_every_file_with_a_backward_is_here():
    for folder in ("ops", "kernels"):
        for path in (ROOT / "scratchformer" / folder).glob("*.py"):
            if path.name.startswith("cupy_"):  # which run on a GPU alone
                continue
            found = [name for name, _ in functions(ast.parse(path.read_text(encoding="utf-8"))) if "_backward" in name]
            assert not found or f"{folder}/{path.name}" in TESTS

"""Mistakes that others made in hand-written gradients, planted one at a time: the suite must fail for each.

The tests that are responsible for a mistake run in a process of their own, which imports the mistaken code instead of
the file; the file stays as it is. The mistakes are those of `scratchformer.testing.mistakes` that replace code. Each
replaced text must occur in its file exactly once, so that a mistake that no longer fits the code is noticed.
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

from scratchformer.testing import mistakes
from scratchformer.testing.mutate import Runner

ROOT = Path(__file__).parent.parent.parent


# The tests that must fail: files, and -k expressions.
TESTS = {
    "attention: dK transposed, hidden by a reshape": "tests/ops/test_attention.py",
    "attention: a factor in the reference alone, before dK": "tests/testing/test_cases.py -k nothing_planted",
    "one dropout object in two places: the second forward overwrites the first mask": "tests/nn/test_dropout.py",
    "layer norm: backward right only while gamma is uniform": "tests/ops/test_layernorm.py",
    "softmax: backward divided by the batch size": "tests/ops/test_softmax.py",
    "cross-entropy: forward takes the mean, backward leaves out 1/N": "tests/ops/test_cross_entropy.py",
    "zero_grad also clears Adam's moments": "tests/optim",
    "Adam: v updated with 1 - beta1": "tests/optim",
    "Adam: no bias correction of v": "tests/optim",
    "Adam: no bias correction of m": "tests/optim",
    "a tied table stepped twice": "tests/optim",
    "a tied table: only one of its two gradients": "tests/nn/test_linear.py tests/nn/test_layer.py",
    "cross-attention: queries from the memory, keys and values from x": "tests/nn/test_attention.py",
    "encoder-decoder: the memory's gradient from one block only": "tests/models/test_encoder_decoder.py -k gradient",
    "a residual: the gradient passes through the branch only": "tests/nn/test_all_layers.py -k Residual",
    "encoder-decoder: the table is scaled at the input, its gradient is not": "tests/models/test_encoder_decoder.py -k gradient",
    "an output tied to the embedding: no gradient from the output": "tests/models/test_encoder_decoder.py -k table",
    "beam search: a finished hypothesis is extended": "tests/generation/test_beam.py -k plain_search",
    "beam search: an ensemble predicts the mean of the logarithms": "tests/generation/test_beam.py -k ensemble",
    "beam search: the cache is not reordered": "tests/generation/test_beam.py -k plain_search",
    "translation: what a model writes backwards is not turned round": "tests/generation/test_translation.py -k read",
    "neighbours: the nearest are those with the largest product": "tests/generation/test_neighbours.py -k mixed",
    "a causal model that sees the future": "tests/nn/test_attention.py",
    "embedding: dW[ids] += dy, so that repeated tokens lose gradient": "tests/ops/test_embedding.py",
    "multi-head attention that mixes time and heads, right only for T = 1": "tests/nn/test_attention.py",
    "sinusoids with base 100,000": "tests/ops/test_positions.py",
    "no padding mask: a review's class depends on its batch": "tests/models/test_classifier.py",
    "pooling over the padding too": "tests/ops/test_pooling.py",
    "GELU: backward with a constant right to three digits": "tests/ops/test_activations.py",
    "resume without Adam's step count": "tests/optim",
    "resume restarts the learning-rate schedule": "tests/training/test_train.py -k bit_for_bit",
    "the logged validation loss is the last training loss": "tests/training/test_train.py -k best",
    "the sampler returns its prompt": "tests/generation/test_generate.py",
    "the sampler's number depends on nothing but its key": "tests/generation/test_generate.py",
    "dropout: not scaled by 1/(1 - p)": "tests/ops/test_dropout.py",
    "recompute: another dropout mask the second time": "tests/nn/test_block.py",
    "gradient accumulation: micro-batches weigh alike, whatever their size": "tests/parallel/test_replicas.py",
    "float64 from float32": "tests/ops/test_all_operations.py",
    "a kernel: tiled attention without the row sum of dO times O": "tests/kernels/test_twins.py -k attention",
    "a kernel: the log-sum-exp without the maximum": "tests/kernels/test_twins.py -k attention",
    "a kernel: an empty tile is taken for a full one": "tests/ops/test_patterns.py",
    "a kernel: all heads take the first head's pattern": "tests/kernels -k each",
    "a pattern lets the tokens of a prompt see later ones": "tests/nn/test_attention.py -k extend",
    "positions on a grid: the columns get the gradient of the rows": "tests/nn/test_embedding.py",
    "predictions: left in the order of the texts' lengths": "tests/training/test_evaluate.py -k classes",
    "units of unknown class count as the last class": "tests/models/test_classifier.py",
    "a kernel: a bias of one number is spread over all columns": "tests/ops/test_dense.py",
    "a tied output: its gradient overwrites the one from the table's other use": "tests/nn/test_all_layers.py -k TiedOutput",
    "published weights: queries and keys exchanged": "tests/models/test_pretrained.py",
    "published weights: a Llama's gate and values exchanged": "tests/models/test_llama.py -k arrives",
    "one new token: query heads read the wrong head of keys": "tests/kernels/test_extend.py -k rotary",
    "one new token: the window is one too wide": "tests/kernels/test_extend.py -k window",
    "bits per byte: divided by the number of tokens": "tests/training/test_evaluate.py",
    "relative shift: the windows move the other way": "tests/ops/test_relative.py -k shift",
    "relative attention: the gradient of the keys with the positions' bias": "tests/ops/test_relative.py",
    "a memory: gamma gets no gradient from it": "tests/nn/test_all_layers.py -k memory",
    "a memory: a resumed run begins without it": "tests/training/test_segments.py -k resumed",
    "a kernel: the vectors of distances are shared, and the last tile's gradient is all they get": "tests/kernels/test_twins.py -k relative",
    "a kernel: the new token overwrites the last key": "tests/kernels/test_extend.py",
    "gather: every row takes from the first": "tests/ops/test_gather.py",
    "BERT: the gradient of the first vector goes to all of them": "tests/models/test_bert.py",
    "BERT: no padding mask": "tests/models/test_bert.py",
    "BERT: a token that is to be predicted shows through": "tests/data/test_masked.py",
    "RMS norm: backward without the term of the root mean square": "tests/ops/test_rmsnorm.py",
    "rotary positions: backward rotates forward": "tests/ops/test_rotary.py",
    "rotary positions: neighbours form a pair, not one number from each half": "tests/ops/test_rotary.py -k equation",
    "SiLU: the slope of the sigmoid is left out": "tests/ops/test_activations.py -k silu",
    "SwiGLU: the gate's gradient has the sigmoid in place of silu's slope": "tests/ops/test_swiglu.py",
    "grouped attention: dK comes from the first head of each group alone": "tests/ops/test_attention.py -k grouped",
    "a kernel: part of a group overwrites the gradient of the part before it": "tests/kernels/test_twins.py -k grouped",
    "rotary attention: new keys are rotated as if they came first": "tests/nn/test_rotary_attention.py -k extend",
    "rotary attention: the window is one too wide": "tests/nn/test_rotary_attention.py -k window",
    "an activation: its backward is left out": "tests/ops/test_dense.py -k affine",
}
MISTAKES = [mistake for mistake in mistakes.MISTAKES if mistake.file]


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
    if mistake.file.startswith("kernels/") and not path.exists():
        pytest.skip("no kernels")
    code = without_docstrings(path.read_text(encoding="utf-8"))
    for right, _ in mistake.replacements:
        assert (count := code.count(right)) == 1, f"{mistake.file} has {count} times: {right}"
    status, output = run_tests(TESTS[mistake.name], path, mistake.source())
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
SLOW_WITHOUT = ["test_gradients", "wide_beam", "both_directions", "plain_search", "same_bits", "add_up", "ensemble"]


def test_without_kernels_nothing_but_speed_is_lost(environment, tmp_path):
    for name in ("scratchformer", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "mutations"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(ONLY_THE_COPY)
    shutil.rmtree(tmp_path / "scratchformer" / "kernels", ignore_errors=True)
    tests = "tests/kernels tests/ops/test_attention.py tests/ops/test_dense.py tests/nn/test_block.py tests/optim"
    tests += " tests/generation tests/parallel/test_replicas.py tests/test_dispatch.py"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    left = ["strict", *SLOW_WITHOUT]  # the strict device uses no kernels
    command += ["-k", f"not {' and not '.join(left)}", "--deselect", "tests/generation/test_sampling.py"]
    environment = environment | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]

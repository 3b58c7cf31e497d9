"""Mistakes that others made in hand-written gradients, planted one at a time: the suite must fail for each.

The tests that are responsible for a mistake run in a process of their own, which imports the mistaken code instead of
the file; the file stays as it is. A mistake is a list of replacements in one file; each replaced text must occur there
exactly once, so that a mistake which no longer fits the code is noticed.
"""

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from scratchformer.testing.mutate import Runner

ROOT = Path(__file__).parent.parent.parent


class Mistake(NamedTuple):
    name: str
    file: str  # in scratchformer/
    replacements: list[tuple[str, str]]
    tests: str  # files, and -k expressions


MISTAKES = [
    Mistake(
        "attention: dK transposed, hidden by a reshape",
        "ops/attention.py",
        [
            (
                "    dk = da.swapaxes(-1, -2) @ q\n    return",
                "    dk = (q.swapaxes(-1, -2) @ da).reshape(k.shape)\n    return",
            )
        ],
        "tests/ops/test_attention.py",
    ),
    Mistake(
        "attention: a factor in the reference alone, before dK",
        "ops/attention.py",
        [
            (
                "    dk = da.swapaxes(-1, -2) @ q\n    return",
                "    dk = 7 * da.swapaxes(-1, -2) @ q\n    return",
            )
        ],
        "tests/testing/test_cases.py -k nothing_planted",
    ),
    Mistake(
        "one dropout object in two places: the second forward overwrites the first mask",
        "nn/dropout.py",
        [
            (
                "        return (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)",
                "        y, self.mask = (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)\n"
                "        return y, self.mask",
            ),
            (
                "        return dy if cache is None else ops.dropout_backward(dy, cache)",
                "        return dy if self.mask is None else ops.dropout_backward(dy, self.mask)",
            ),
        ],
        "tests/nn/test_dropout.py",
    ),
    Mistake(
        "layer norm: backward right only while gamma is uniform",
        "ops/layernorm.py",
        [
            ("    g = dy * cache.gamma\n", "    g = dy\n"),
            ("\n    dx = rstd * (g - g.mean(axis=-1, keepdims=True) -", "\n    dx = cache.gamma * rstd * (g - g.mean(axis=-1, keepdims=True) -"),
        ],
        "tests/ops/test_layernorm.py",
    ),
    Mistake(
        "softmax: backward divided by the batch size",
        "ops/softmax.py",
        [
            (
                "    dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))\n    return",
                "    dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True)) / y.shape[0]\n    return",
            )
        ],
        "tests/ops/test_softmax.py",
    ),
    Mistake(
        "cross-entropy: forward takes the mean, backward leaves out 1/N",
        "ops/cross_entropy.py",
        [("    dlogits *= dloss / max(1, n)\n    dlogits *= counted\n    return", "    dlogits *= dloss\n    dlogits *= counted\n    return")],
        "tests/ops/test_cross_entropy.py",
    ),
    Mistake(
        "zero_grad also clears Adam's moments",
        "optim/optimizer.py",
        [
            (
                "            grad[...] = 0\n",
                "            grad[...] = 0\n        for name in self.buffers:\n            getattr(self, name)[...] = 0\n",
            )
        ],
        "tests/optim",
    ),
    Mistake(
        "Adam: v updated with 1 - beta1",
        "optim/adam.py",
        [("    v += (1 - beta2) * (g * g)", "    v += (1 - beta1) * (g * g)")],
        "tests/optim",
    ),
    Mistake(
        "Adam: no bias correction of v",
        "optim/adam.py",
        [("    denominator /= math.sqrt(1 - beta2**steps)  # √v̂\n", "")],
        "tests/optim",
    ),
    Mistake(
        "Adam: no bias correction of m",
        "optim/adam.py",
        [("(lr / (1 - beta1**steps)) * m", "lr * m")],
        "tests/optim",
    ),
    Mistake(
        "a tied table stepped twice",
        "optim/optimizer.py",
        [
            (
                "list({id(p): p for p in params}.values())",
                "list(params)",
            )
        ],
        "tests/optim",
    ),
    Mistake(
        "a tied table: only one of its two gradients",
        "nn/linear.py",
        [("        self.w.grad += dw", "        self.w.grad[...] = dw")],
        "tests/nn/test_linear.py tests/nn/test_layer.py",
    ),
    Mistake(
        "cross-attention: queries from the memory, keys and values from x",
        "nn/attention.py",
        [
            ("        q, query = self.query.forward(x)\n        k, key = self.key.forward(memory)\n        v, value = self.value.forward(memory)",
             "        q, query = self.query.forward(memory)\n        k, key = self.key.forward(x)\n        v, value = self.value.forward(x)"),
            ("        dx = self.query.backward(self.join_heads(dq), cache.query)\n        dmemory = self.key", "        dmemory = self.query.backward(self.join_heads(dq), cache.query)\n        dx = self.key"),
            ("        dmemory = dmemory + self.value.backward(self.join_heads(dv), cache.value)\n        return", "        dx = dx + self.value.backward(self.join_heads(dv), cache.value)\n        return"),
        ],
        "tests/nn/test_attention.py",
    ),
    Mistake(
        "encoder-decoder: the memory's gradient from one block only",
        "nn/stack.py",
        [("[total + d for total, d in zip(totals, dshared, strict=True)]", "totals")],
        "tests/models/test_encoder_decoder.py -k gradient",
    ),
    Mistake(
        "a residual: the gradient passes through the branch only",
        "nn/residual.py",
        [("            dx = ds + dn[:, -T:]", "            dx = dn[:, -T:]")],
        "tests/nn/test_all_layers.py -k Residual",
    ),
    Mistake(
        "encoder-decoder: the table is scaled at the input, its gradient is not",
        "nn/embedding_sum.py",
        [("            de = self.scale * dx\n", "            de = dx\n")],
        "tests/models/test_encoder_decoder.py -k gradient",
    ),
    Mistake(
        "an output tied to the embedding: no gradient from the output",
        "nn/embedding.py",
        [("        self.table.grad += dw.T\n        if", "        if")],
        "tests/models/test_encoder_decoder.py -k table",
    ),
    Mistake(
        "beam search: a finished hypothesis is extended",
        "generation/beam.py",
        [("goes_on = np.flatnonzero(tokens[b] != end)[:K]", "goes_on = np.arange(min(K, most))")],
        "tests/generation/test_beam.py -k plain_search",
    ),
    Mistake(
        "beam search: the cache is not reordered",
        "generation/beam.py",
        [("        cache.reorder((np.arange(B)[:, None] * K + rows).reshape(-1))\n", "")],
        "tests/generation/test_beam.py -k plain_search",
    ),
    Mistake(
        "a causal model that sees the future",
        "nn/attention.py",
        [("        if self.causal:\n", "        if False:\n")],
        "tests/nn/test_attention.py",
    ),
    Mistake(
        "embedding: dW[ids] += dy, so that repeated tokens lose gradient",
        "backend.py",
        [("    array_module(target, index, values).add.at(target, index, values)", "    target[index] += values")],
        "tests/ops/test_embedding.py",
    ),
    Mistake(
        "multi-head attention that mixes time and heads, right only for T = 1",
        "nn/attention.py",
        [
            ("        return x.reshape(B, T, width // self.head_width, self.head_width).transpose(0, 2, 1, 3)",
             "        return x.reshape(B, width // self.head_width, T, self.head_width)"),
            ("        return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)", "        return x.reshape(B, T, H * D)"),
        ],
        "tests/nn/test_attention.py",
    ),
    Mistake(
        "sinusoids with base 100,000",
        "ops/positions.py",
        [("BASE = 10_000 ", "BASE = 100_000 ")],
        "tests/ops/test_positions.py",
    ),
    Mistake(
        "no padding mask: a review's class depends on its batch",
        "models/classifier.py",
        [("            padding = ops.Padding(lengths)\n", "            padding = ops.Full()\n")],
        "tests/models/test_classifier.py",
    ),
    Mistake(
        "pooling over the padding too",
        "ops/pooling.py",
        [("    return xp.arange(x.shape[1])[None, :] < lengths[:, None]", "    return xp.arange(x.shape[1])[None, :] < x.shape[1] + 0 * lengths[:, None]")],
        "tests/ops/test_pooling.py",
    ),
    Mistake(
        "GELU: backward with a constant right to three digits",
        "ops/activations.py",
        [("        slope = math.sqrt(2 / math.pi) * (1", "        slope = 0.798 * (1")],
        "tests/ops/test_activations.py",
    ),
    Mistake(
        "resume without Adam's step count",
        "optim/optimizer.py",
        [('        self.steps = int(state["steps"])', "        self.steps = 0")],
        "tests/optim",
    ),
    Mistake(
        "resume restarts the learning-rate schedule",
        "training/loop.py",
        [("            optimizer.lr = schedule(step)", "            optimizer.lr = schedule(optimizer.steps * (step > 0 and not resume))")],
        "tests/training/test_train.py -k resume",
    ),
    Mistake(
        "the logged validation loss is the last training loss",
        "training/loop.py",
        [("        found = evaluate()\n", '        found = {**evaluate(), "loss": loss}\n')],
        "tests/training/test_train.py -k best",
    ),
    Mistake(
        "the sampler returns its prompt",
        "generation/generate.py",
        [("        yield ids\n", "        yield prompt[:, -1]\n")],
        "tests/generation/test_generate.py",
    ),
    Mistake(
        "the sampler's number depends on nothing but its key",
        "generation/sampling.py",
        [("    u = key.generator().random((p.shape[0], 1))", "    return key.generator().integers(0, p.shape[1], p.shape[0])")],
        "tests/generation/test_generate.py",
    ),
    Mistake(
        "dropout: not scaled by 1/(1 - p)",
        "ops/dropout.py",
        [("keep.reshape(shape), LEVELS / (LEVELS - threshold)", "keep.reshape(shape), 1.0")],
        "tests/ops/test_dropout.py",
    ),
    Mistake(
        "recompute: another dropout mask the second time",
        "nn/recompute.py",
        [("self.layer.forward(*cache.inputs, **cache.options)", 'self.layer.forward(*cache.inputs, **{**cache.options, "key": None})')],
        "tests/nn/test_block.py",
    ),
    Mistake(
        "gradient accumulation: micro-batches weigh alike, whatever their size",
        "training/replicas.py",
        [("            share = micro.weight / total\n", "            share = 1 / len(micro_batches)\n")],
        "tests/training/test_replicas.py",
    ),
    Mistake(
        "float64 from float32",
        "ops/attention.py",
        [("    q, k, v, probabilities = cache\n    scale = 1 / math.sqrt(q.shape[-1])", "    q, k, v, probabilities = cache\n    scale = array_module(q).ones(1) / math.sqrt(q.shape[-1])")],
        "tests/ops/test_all_operations.py",
    ),
    Mistake(
        "a kernel: tiled attention without the row sum of dO times O",
        "kernels/numpy_attention.py",
        [("output_delta = with_column(output, -delta)", "output_delta = with_column(output, 0 * delta)")],
        "tests/kernels -k attention",
    ),
    Mistake(
        "a kernel: the log-sum-exp without the maximum",
        "kernels/numpy_attention.py",
        [("return (shift, log_sum) if shift.any() else (log_sum, None)", "return log_sum, None")],
        "tests/kernels -k attention",
    ),
    Mistake(
        "a kernel: an empty tile is taken for a full one",
        "ops/patterns.py",
        [("        if left > last + S - T:\n            return Tile.EMPTY\n", "")],
        "tests/ops/test_patterns.py",
    ),
    Mistake(
        "a kernel: all heads take the first head's pattern",
        "kernels/numpy_attention.py",
        [("    for heads, own in pattern.of_heads(H):\n", "    for heads, own in [(slice(0, H), pattern.of_heads(H)[0][1])]:\n")],
        "tests/kernels -k each",
    ),
    Mistake(
        "a pattern lets the tokens of a prompt see later ones",
        "nn/attention.py",
        [("            pattern = causal(pattern)\n        y, _ =", "            pass\n        y, _ =")],
        "tests/nn/test_attention.py -k extend",
    ),
    Mistake(
        "positions on a grid: the columns get the gradient of the rows",
        "nn/embedding.py",
        [("cache.columns, out=self.columns.grad)\n        return", "cache.rows, out=self.columns.grad)\n        return")],
        "tests/nn/test_embedding.py",
    ),
    Mistake(
        "units of unknown class count as the last class",
        "models/classifier.py",
        [("ignore_index=IGNORED if", "ignore_index=None if"), ("ops.cross_entropy(z, labels,", "ops.cross_entropy(z, labels % z.shape[-1],")],
        "tests/models/test_classifier.py",
    ),
    Mistake(
        "a kernel: the layer norm's means are of dy and not of g",
        "kernels/numpy_layernorm.py",
        [("mean_g, mean_gx = dy @ (gamma / C), u @ (gamma / C)", "mean_g, mean_gx = dy.mean(axis=-1), u.mean(axis=-1)")],
        "tests/kernels -k layernorm",
    ),
    Mistake(
        "a kernel: a bias of one number is spread over all columns",
        "kernels/numpy_dense.py",
        [('    expect_shape("b", b, "O", O=w.shape[1])\n', "")],
        "tests/ops/test_dense.py",
    ),
    Mistake(
        "a tied output: its gradient overwrites the one from the table's other use",
        "nn/embedding.py",
        [("        self.table.grad += dw.T\n        if", "        self.table.grad[...] = dw.T\n        if")],
        "tests/nn/test_all_layers.py -k TiedOutput",
    ),
    Mistake(
        "published weights: queries and keys exchanged",
        "models/gpt2.py",
        [('COLUMNS = ("query", "key", "value")', 'COLUMNS = ("key", "query", "value")')],
        "tests/models/test_pretrained.py",
    ),
    Mistake(
        "published weights: a Llama's gate and values exchanged",
        "models/llama_weights.py",
        [
            ('"feedforward.gate": "mlp.gate_proj"', '"feedforward.gate": "mlp.up_proj"'),
            ('"feedforward.up": "mlp.up_proj"', '"feedforward.up": "mlp.gate_proj"'),
        ],
        "tests/models/test_llama.py -k arrives",
    ),
    Mistake(
        "one new token: query heads read the wrong head of keys",
        "kernels/numpy_extend.py",
        [("q.reshape(B, G, -1, D), None", "q.reshape(B, -1, G, D).swapaxes(1, 2), None")],
        "tests/kernels/test_extend.py -k rotary",
    ),
    Mistake(
        "one new token: the window is one too wide",
        "kernels/numpy_extend.py",
        [("S - (layer.window or S)", "S - 1 - (layer.window or S)")],
        "tests/kernels/test_extend.py -k window",
    ),
    Mistake(
        "bits per byte: divided by the number of tokens",
        "training/evaluate.py",
        [("    predicted = tokens if sizes is None else", "    predicted = tokens if True else")],
        "tests/training/test_evaluate.py",
    ),
    Mistake(
        "relative shift: the windows move the other way",
        "ops/relative.py",
        [("    return rows, xp.arange(S)[None, :] + (T - 1 - rows)", "    return rows, xp.arange(S)[None, :] + rows")],
        "tests/ops/test_relative.py -k shift",
    ),
    Mistake(
        "relative attention: the gradient of the keys with the positions' bias",
        "ops/relative.py",
        [("@ (q + content_bias[:, None])\n    db, dqu", "@ (q + position_bias[:, None])\n    db, dqu")],
        "tests/ops/test_relative.py",
    ),
    Mistake(
        "a memory: gamma gets no gradient from it",
        "nn/residual.py",
        [
            ("            dx = dy + self.norm.backward(dn, cache.norm)[:, -T:]", "            dn[:, : dn.shape[1] - T] = 0\n            dx = dy + self.norm.backward(dn, cache.norm)[:, -T:]"),
        ],
        "tests/nn/test_all_layers.py -k memory",
    ),
    Mistake(
        "a memory: a resumed run begins without it",
        "data/batching.py",
        [('        self.step, self.memory = int(state["step"]), memory', '        self.step, self.memory = int(state["step"]), 0 * memory')],
        "tests/training/test_segments.py -k resumed",
    ),
    Mistake(
        "a kernel: the vectors of distances are shared, and the last tile's gradient is all they get",
        "kernels/numpy_relative.py",
        [("            dr[heads][near] += (db", "            dr[heads][near] = (db")],
        "tests/kernels -k relative",
    ),
    Mistake(
        "a kernel: the new token overwrites the last key",
        "kernels/numpy_extend.py",
        [("    keys[:, :, past] =", "    keys[:, :, past - 1] =")],
        "tests/kernels/test_extend.py",
    ),
    Mistake(
        "gather: every row takes from the first",
        "ops/gather.py",
        [("    rows = xp.arange(B)[:, None] * T + places", "    rows = xp.arange(B)[:, None] * 0 + places")],
        "tests/ops/test_gather.py",
    ),
    Mistake(
        "BERT: the gradient of the first vector goes to all of them",
        "models/bert_heads.py",
        [("cache.dense)\n        return dx\n\n\nclass Masked", "cache.dense)\n        dx[...] = dx[:, :1]\n        return dx\n\n\nclass Masked")],
        "tests/models/test_bert.py",
    ),
    Mistake(
        "BERT: no padding mask",
        "models/bert.py",
        [("        pattern = None if lengths is None else ops.Padding(lengths)", "        pattern = None")],
        "tests/models/test_bert.py",
    ),
    Mistake(
        "BERT: a token that is to be predicted shows through",
        "data/masked.py",
        [("np.where(kind < MASKED + REPLACED, replacement, targets)", "targets")],
        "tests/data/test_masked.py",
    ),
    Mistake(
        "RMS norm: backward without the term of the root mean square",
        "ops/rmsnorm.py",
        [("    dx = rrms * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))\n    return", "    dx = rrms * g\n    return")],
        "tests/ops/test_rmsnorm.py",
    ),
    Mistake(
        "a kernel: the RMS norm's mean is of dy and not of g",
        "kernels/numpy_rmsnorm.py",
        [("    mean_gx = u @ (gamma / C)", "    mean_gx = u.mean(axis=-1)")],
        "tests/kernels -k rmsnorm",
    ),
    Mistake(
        "rotary positions: backward rotates forward",
        "ops/rotary.py",
        [("    dx = rotate(dy, cache.cos, -cache.sin)\n    return", "    dx = rotate(dy, cache.cos, cache.sin)\n    return")],
        "tests/ops/test_rotary.py",
    ),
    Mistake(
        "rotary positions: neighbours form a pair, not one number from each half",
        "ops/rotary.py",
        [
            ("    a, b = x[..., :half], x[..., half:]\n", "    a, b = x[..., ::2], x[..., 1::2]\n"),
            ("    half = x.shape[-1] // 2\n", ""),
        ],
        "tests/ops/test_rotary.py -k equation",
    ),
    Mistake(
        "SiLU: the slope of the sigmoid is left out",
        "ops/activations.py",
        [("    dx = dy * (s * (1 + x * (1 - s)))\n    return", "    dx = dy * s\n    return")],
        "tests/ops/test_activations.py -k silu",
    ),
    Mistake(
        "SwiGLU: the gate's gradient has the sigmoid in place of silu's slope",
        "ops/swiglu.py",
        [("    dgate = dy * up * (s * (1 + gate * (1 - s)))\n    dup = dy * (gate * s)\n    return", "    dgate = dy * up * s\n    dup = dy * (gate * s)\n    return")],
        "tests/ops/test_swiglu.py",
    ),
    Mistake(
        "grouped attention: dK comes from the first head of each group alone",
        "ops/attention.py",
        [("    dk = da.swapaxes(-1, -2) @ q\n    return", "    dk = da[:, :, : shape[2]].swapaxes(-1, -2) @ q[:, :, : shape[2]]\n    return")],
        "tests/ops/test_attention.py -k grouped",
    ),
    Mistake(
        "a kernel: part of a group overwrites the gradient of the part before it",
        "kernels/numpy_attention.py",
        [("        if heads.start % shared == 0:\n", "        if True:\n")],
        "tests/kernels -k grouped",
    ),
    Mistake(
        "rotary attention: new keys are rotated as if they came first",
        "nn/rotary_attention.py",
        [("self.rotate(self.key(x), past)", "self.rotate(self.key(x))")],
        "tests/nn/test_rotary_attention.py -k extend",
    ),
    Mistake(
        "rotary attention: the window is one too wide",
        "nn/rotary_attention.py",
        [("ops.Local(self.window - 1)", "ops.Local(self.window)")],
        "tests/nn/test_rotary_attention.py -k window",
    ),
    Mistake(
        "an activation: its backward is left out",
        "ops/dense.py",
        [("    dh = cache.activation_backward(dy, cache.activated)\n    dx, dw, db = linear_backward(dh, cache.linear)\n    return", "    dh = dy\n    dx, dw, db = linear_backward(dh, cache.linear)\n    return")],
        "tests/ops/test_dense.py -k affine",
    ),
]  # fmt: skip


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
    with Runner(environment, ROOT, imports=["hypothesis", "scipy.special"]) as runner:

        def run(tests, path="", code=""):
            answer = runner.run(shlex.split(tests), path, code)
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
    code = path.read_text(encoding="utf-8")
    for right, wrong in mistake.replacements:
        count = without_docstrings(code).count(right)
        assert count == 1, f"{mistake.file} has {count} times: {right}"
        code = code.replace(right, wrong)
    status, output = run_tests(mistake.tests, path, code)
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


def test_without_kernels_nothing_but_speed_is_lost(environment, tmp_path):
    for name in ("scratchformer", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "mutations"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(ONLY_THE_COPY)
    shutil.rmtree(tmp_path / "scratchformer" / "kernels", ignore_errors=True)
    tests = "tests/kernels tests/ops/test_attention.py tests/ops/test_dense.py tests/nn/test_block.py tests/optim"
    tests += " tests/generation tests/training/test_replicas.py tests/test_dispatch.py"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    command += ["-k", "not strict"]  # which uses no kernels
    environment = environment | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]

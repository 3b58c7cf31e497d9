"""Random right derivations: what the loops of each printer give, and NumPy functions written beside the equations."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import scratchformer as sf
from scratchformer.compiler import CompileError
from scratchformer.compiler.javascript_code import javascript_source
from scratchformer.compiler.python_target import PythonTarget
from scratchformer.compiler.show import loops_of
from scratchformer.compiler.trees import COLUMN, ROW
from scratchformer.compiler.twins import CompiledTwin
from scratchformer.dispatch import TwinCache, backward, operation

from .random_pairs import RandomPair

COUNT = 200


@pytest.fixture(scope="module")
def pairs():
    """Random pairs whose derivations can be compiled, by seed."""
    found = {}
    for seed in range(COUNT):
        pair = RandomPair(seed)
        if not pair.clear:
            continue
        op, op_backward = operation(pair.op), backward(pair.op_backward)
        try:
            [*loops_of(op, op_backward, "numba")]
        except CompileError as error:
            assert re.search(r"line \d+: .*\n    \S|no equation is left for a loop", str(error)), (
                error
            )  # the equation, and the reason
            continue
        found[seed] = pair, op, op_backward
    assert len(found) > COUNT / 2
    return found


def test_an_index_of_another_axis_is_refused():
    def spread(gamma, p):
        """One index of dy is missing.

        Forward, then backward:

            y_nc = γ_c p_n        dγ_c = Σ_n dy_n p_n        dp_n = Σ_c dy_nc γ_c
        """

    def spread_backward(dy, cache):
        _gamma, _p = cache

    with pytest.raises(CompileError, match="dy has other indices here than where it is defined"):
        list(loops_of(spread, spread_backward, "numba"))


def compare(seed, pair, y, gradients, args, dy):
    names = [name for name in pair.letters if name != "ids"]
    expected = pair.forward(*args), *pair.backward(dy, *args)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    for name, found, right in zip(["y", *names], (y, *gradients), expected, strict=True):
        message = f"{seed}: {name}\n" + "\n".join(pair.lines)
        assert np.shape(found) == np.shape(right), message
        np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-9, err_msg=message)


def test_loops_give_what_the_functions_give(pairs):
    for seed, (pair, op, op_backward) in pairs.items():
        twin = CompiledTwin(op, op_backward, PythonTarget())
        args = pair.arguments(seed)
        assert twin.fits(*args), pair.lines
        y, kept = twin.forward(*args)
        dy = np.random.default_rng(seed).standard_normal(np.shape(y))[()]
        compare(seed, pair, y, twin.backward(dy, kept), args, dy)


def test_compiled_pairs_give_what_the_functions_give(pairs):
    pytest.importorskip("numba")
    of_rows = [seed for seed, (pair, *_) in pairs.items() if any(len(letters) > 1 for letters in pair.letters.values())]
    for seed in of_rows[:: len(of_rows) // 8]:
        pair = RandomPair(seed)
        op, op_backward = sf.compile(pair.op, pair.op_backward)
        args = pair.arguments(seed)
        with sf.fast():
            y, cache = op(*args)
            dy = np.random.default_rng(seed).standard_normal(np.shape(y))[()]
            assert isinstance(cache, TwinCache)
            compare(seed, pair, y, op_backward(dy, cache), args, dy)


@pytest.mark.skipif(not shutil.which("node"), reason="Node is not installed")
def test_javascript_gives_what_the_functions_give(pairs, tmp_path):
    calls, right = [], []
    for seed, (pair, op, op_backward) in pairs.items():
        twin = CompiledTwin(op, op_backward, PythonTarget())
        args = pair.arguments(seed)
        call = twin.call(twin.signature(tuple(args)))
        values = dict(zip(twin.names, args, strict=True))
        y, kept = twin.forward(*args)
        dy = np.random.default_rng(seed).standard_normal(np.shape(y))[()]
        expected = (y,), twin.backward(dy, kept)
        sizes = {{COLUMN: "columns", ROW: "rows"}.get(a, a.upper()): size for a, size in call.shape.sizes.items()}
        for plan, given, results in zip(call.pair[:2], (values, {**kept.values, "dy": dy}), expected, strict=True):
            source = javascript_source(plan)
            inputs = {
                x: np.ravel(given[x]).tolist() if f"{x}[" in source else float(np.sum(given[x])) for x in given
            } | sizes
            inputs |= {"columns": sizes["rows"] * sizes["columns"]} if plan.flat else {}
            calls.append({"source": source, "inputs": inputs, "results": plan.results})
            right.append((seed, pair, results if isinstance(results, tuple) else (results,)))
    script = """
const cases = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(cases.map(({ source, inputs, results }) => {
  const found = (0, eval)(`(${source})`)(inputs);
  return results.map((name) => typeof found[name] === "number" ? [found[name]] : [...found[name]]);
})));"""
    ran = subprocess.run(["node", "-e", script], input=json.dumps(calls), capture_output=True, text=True, check=True)
    for found, (seed, pair, expected) in zip(json.loads(ran.stdout), right, strict=True):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, np.ravel(y), rtol=1e-9, atol=1e-9, err_msg=f"{seed}: {pair.lines}")

"""Kernels for a GPU that are made from derivations, on a CPU: see ../kernels/on_cpu/compiled.py. That NVIDIA's compiler
takes them is tested in ../kernels/test_cuda_code.py.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scratchformer import ops
from scratchformer.compiler import CompileError
from scratchformer.compiler.cuda_code import cuda_source
from scratchformer.compiler.derivation import Derivation

pytest.importorskip("scratchformer.kernels")
PROGRAM = Path(__file__).parents[1] / "kernels" / "on_cpu" / "compiled.py"
emulated = [
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="threads take turns with the ucontext of Linux"),
]


def plans(name):
    """The plans of an operation; none if it cannot be compiled."""
    op, op_backward = getattr(ops, name), getattr(ops, f"{name}_backward", None)
    if not hasattr(op, "reference") or op_backward is None:
        return []
    try:
        pair = Derivation(op.reference, op_backward.reference, getattr(op, "gives", ())).compile()
    except CompileError:
        return []
    return [plan for plan in pair[:2] if plan is not None]


COMPILED = [name for name in ops.__all__ if plans(name)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run("softmax", ...) runs the program; the header is compiled once for all its runs."""
    environment = os.environ | {"COMPILED": str(tmp_path_factory.mktemp("compiled"))}
    return lambda *arguments: subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False, env=environment
    )


class TestOnACPU:
    pytestmark = emulated

    def test_kernels_give_what_the_references_give(self, run, thorough):
        """For every operation that compiles: columns from 1 to 50,257, rows that are apart or start anywhere, more rows
        than threads for them.
        """
        found = run("all" if thorough else "some")
        assert found.returncode == 0, found.stdout + found.stderr
        ran = set(re.findall(r"^ok (\w+)", found.stdout, re.MULTILINE))
        assert {*COMPILED} <= ran

    @pytest.mark.parametrize(
        ("name", "old", "new"),
        [
            ("softmax", "x += sums[warp]", "x = sums[warp]"),
            ("softmax", "x = greater(x, __shfl_xor_sync", "x = min(x, __shfl_xor_sync"),
            ("layernorm", "blockIdx.x * ROWS + threadIdx.y", "blockIdx.x * ROWS"),
            ("dropout", "16 * (place & 3)", "16 * (place + 1 & 3)"),
            ("embedding", "found >> k & 1", "k % 2"),
            ("gelu", "j < left ? x[j]", "j + 1 < left ? x[j]"),
        ],
    )
    def test_a_mistake_is_found(self, name, old, new, run):
        found = run(name, old, new)
        assert found.returncode == 3 and "FAILED" in found.stdout, found.stdout + found.stderr


@pytest.mark.parametrize("name", COMPILED)
def test_lines_have_their_equations(name):
    """Every equation that a plan computes in its loops is the comment of a line."""
    for plan in plans(name):
        source = cuda_source(plan)
        for each in plan.passes:
            for step in (*each.before, *each.steps):
                assert plan.values[step].text in source
            for total in (*each.sums, *each.totals):
                assert f"// {plan.sums[total].text}" in source


def test_what_cannot_be_added_up_says_so():
    """A sum that is added to at places that depend on the column."""
    (plan,) = [plan for plan in plans("layernorm") if plan.name == "layernorm_backward"]
    name = next(name for name, each in plan.sums.items() if each.at is not None)
    at = (("load", "x", (("at", "n"), ("at", "column"))), ("at", "column"))
    with pytest.raises(CompileError, match="layernorm_backward: its sums over rows cannot be taken row by row"):
        cuda_source(plan._replace(sums=plan.sums | {name: plan.sums[name]._replace(at=at)}))

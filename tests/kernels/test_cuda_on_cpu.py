"""The CUDA kernels and their twins on a CPU, slowly: see on_cpu/run.py. test_cupy.py runs them on a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("scratchformer.kernels")
FOLDER = Path(__file__).parent / "on_cpu"
pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="threads take turns with the ucontext of Linux"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run("attention", ...) runs the program; kernels and headers are compiled once for all its runs, also those that
    other workers of xdist start.
    """
    folder = tmp_path_factory.getbasetemp() / "compiled"
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent.with_name("compiled")
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"COMPILED": str(folder)}
    return lambda *arguments, program="run.py": subprocess.run(
        [sys.executable, FOLDER / program, *arguments], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize(
    "op",
    ["embedding", "attention", "relative_attention", "dense", "linear", "adam_step", "pieces"],
)
def test_the_kernels_give_what_the_references_give(op, run):
    found = run(op)
    assert found.returncode == 0, found.stdout + found.stderr


def test_twins_in_bfloat16_give_what_the_references_give(run):
    pytest.importorskip("ml_dtypes")
    found = run("newton_schulz")
    assert found.returncode == 0, found.stdout + found.stderr


def test_models_of_every_attention_compute_what_can_be_recorded(run):
    """No product is CuPy's, and the arrays of a recorded step say where random numbers start, and the gradient's
    factor.
    """
    found = run("model")
    assert found.returncode == 0, found.stdout + found.stderr


MISTAKES = {
    "the rows of one id only": ("embedding", "embedding", "while (end < N && sorted[end] == v) ++end;", ""),
    "the softmax without its sum": ("attention", "attention", "* (d[i] - sum)", "* d[i]"),
    "a key too many": ("attention", "attention", "(s) < stop", "(s) <= stop"),
    "a key that is not allowed": ("attention", "attention", " && seen[s]", ""),
    "the gradient of what ReLU cuts off": ("dense", "elementwise", "d.at[j] = T(0.0f)", ";"),
    "the norm of the first matrix": ("newton_schulz", "optimizer", "sums[blockIdx.y * count + i]", "sums[i]"),
    "threads that do not wait for each other": (
        "linear",
        "column_sums",
        "__syncthreads();",
        "if (threadIdx.x) __syncthreads();",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(mistake, run):
    found = run(*mistake)
    assert found.returncode == 3 and "FAILED" in found.stdout, found.stdout + found.stderr


def test_a_new_token_has_the_logits_of_the_reference_in_few_kernels(run):
    found = run(program="tokens.py")
    assert found.returncode == 0, found.stdout + found.stderr


OF_A_TOKEN = {
    "every other tile of the keys": ("attend", "start += TILE", "start += 2 * TILE"),
    "the score of a token with itself": ("attend", "? newest :", "? 0 :"),
    "a window that is too long": ("attend", "past + 1 - window", "past - window"),
    "the angle of the position before": ("attend", "cosines[past * half + i]", "cosines[(past - 1) * half + i]"),
    "keys and values of the wrong head": ("attend", "g = h / (H / G)", "g = h % G"),
    "a bias of another matrix": ("multiply", "biases & 1 ? wide(b[column])", "biases & 1 ? wide(b[0])"),
    "inputs that are overwritten before they are read": ("multiply", "else __syncthreads();", ""),
    "an input that is not centred": ("multiply", "(number - mean[r])", "(number)"),
    "a gate without its sigmoid": ("multiply", "silu(number) * wide", "number * wide"),
}


@pytest.mark.parametrize("mistake", OF_A_TOKEN.values(), ids=OF_A_TOKEN)
def test_a_mistake_in_the_step_of_a_token_is_found(mistake, run):
    found = run(*mistake, program="tokens.py")
    assert found.returncode == 3 and "FAILED" in found.stdout, found.stdout + found.stderr

"""What `scratchformer show` prints."""

import subprocess
import sys

import numpy as np
import pytest

from scratchformer import CompileError, ops
from scratchformer.commands import cli
from scratchformer.compiler.in_place import IN_PLACE
from scratchformer.compiler.show import PRINTERS, shown

OPERATIONS = [name for name in ops.__all__ if f"{name}_backward" in ops.__all__]
PRODUCTS = ["attention", "dense", "linear", "relative_attention"]
NOT_YET = ["relative_shift"]  # a gather of columns


@pytest.mark.parametrize("target", PRINTERS)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in PRODUCTS + NOT_YET])
def test_every_operation_without_a_product_is_printed(name, target, capsys):
    cli.main(["show", name, f"--{target}"])
    out, err = capsys.readouterr()
    assert not err
    assert out.index(f"{name}_backward: reads ") > out.index(f"{name}: reads ") >= 0
    mark = PRINTERS[target][1]
    code = [line for line in out.splitlines() if not line.startswith(mark)]
    assert any(f"{mark} " in line and "=" in line.split(f"{mark} ")[1] for line in code)  # an equation


@pytest.mark.parametrize("target", PRINTERS)
@pytest.mark.parametrize("name", [op.__name__ for op in IN_PLACE])
def test_every_operation_in_place_is_printed(name, target, capsys):
    cli.main(["show", name, f"--{target}"])
    out, _ = capsys.readouterr()
    mark = PRINTERS[target][1]
    assert out.startswith(f"{mark} {name}: reads ")
    assert f"\n{mark} Changes " in out


@pytest.mark.parametrize("name", PRODUCTS + NOT_YET)
def test_the_others_are_not(name):
    with pytest.raises(CompileError):
        shown(getattr(ops, name), getattr(ops, f"{name}_backward"), "numba")


def test_a_function_of_a_file(tmp_path, capsys):
    file = tmp_path / "my_ops.py"
    file.write_text(
        '''def double(x):
    """y = 2 x.

    For each element:

        y_i = 2 x_i        dx_i = 2 dy_i
    """
    return 2 * x, None


def double_backward(dy, cache):
    return 2 * dy
'''
    )
    cli.main(["show", f"{file}::double", "--numba"])
    out, _ = capsys.readouterr()
    assert out.startswith("# double: reads x (columns)\n# Returns y\ndef double(x, to_y):\n")
    assert "# double_backward: reads dy (columns)\n# Returns dx\ndef double_backward(dy, to_dx):\n" in out


def test_what_leaves_nothing_for_a_loop_is_refused():
    def total(x):
        """The sum of all numbers.

        Forward, then backward:

            y = Σ_n x_n
            dx_n = dy
        """
        return x.sum(), x.shape

    def total_backward(dy, shape):
        return np.full(shape, dy)

    for target in ("numba", "cuda"):
        with pytest.raises(CompileError, match="total: no equation is left for a loop"):
            shown(total, total_backward, target)
    assert "y = total" in shown(total, total_backward, "js")


def test_what_is_outside_the_loops_is_said():
    printed = shown(ops.layernorm, ops.layernorm_backward, "numba")
    after = "# After the loops: dγ_c = Σ_n dy_nc x̂_nc; dβ_c = Σ_n dy_nc"
    assert f"\n{after}\n# Returns dx, dγ, dβ\ndef layernorm_backward(" in printed
    assert "scale = 1/(1 − r)\n" in shown(ops.dropout, ops.dropout_backward, "numba").partition("def ")[0]


def test_printing_needs_neither_numba_nor_cupy():
    code = "import sys; sys.modules |= dict.fromkeys(('numba', 'cupy')); from scratchformer.commands.cli import main; "
    for target in PRINTERS:
        ran = subprocess.run(
            [sys.executable, "-c", f"{code}main(['show', 'softmax', '--{target}'])"], capture_output=True
        )
        assert ran.returncode == 0, ran.stderr


def test_a_target_must_be_named(capsys):
    for options in ([], ["--numba", "--cuda"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["show", "relu", *options])
        assert ended.value.code == 2

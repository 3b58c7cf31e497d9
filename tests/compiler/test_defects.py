"""What loops once computed wrong: what an equation says, in a form that has misled the compiler."""

import linecache

import numpy as np
import pytest

import scratchformer as sf
from scratchformer.compiler import CompileError
from scratchformer.compiler.numba_code import numba_source
from scratchformer.compiler.python_target import PythonTarget
from scratchformer.compiler.show import PRINTERS, shown
from scratchformer.compiler.twins import CompiledTwin
from scratchformer.dispatch import backward, operation

x, rows = np.random.default_rng(0).standard_normal((2, 3, 5)), np.arange(3)[:, None]
half = x[0]


def pair_of(arguments, *lines):
    """An operation and its backward that have these equations, and that do not run."""
    text = "".join(f"        {line}\n" for line in lines)
    source = f'def op({arguments}):\n    """Loops.\n\n    Equations:\n\n{text}    """\n    raise NotImplementedError\n'
    source += f"def op_backward(dy, cache):\n    {arguments}, = cache\n    raise NotImplementedError\n"
    linecache.cache[source] = len(source), None, source.splitlines(keepends=True), source
    space = {}
    exec(compile(source, source, "exec"), space)
    return operation(space["op"]), backward(space["op_backward"])


CASES = {
    "a modulo of a number": ("x", (half,), half % 0.7, "y_i = x_i mod 0.7"),
    "a negative modulo": ("x", (half,), half + (np.arange(5) - 3) % 4, "y_i = x_i + ((i − 3) mod 4)"),
    "the size of a row": ("x", (half,), half * 5, "y_i = I x_i"),
    "half of an odd size": (
        "x",
        (half,),
        np.where(np.arange(5) < 2.5, half, 0),
        "y_i = x_i where i < I/2, 0 elsewhere",
    ),
    "half of a row": ("x", (x,), np.where(rows / 2 == 1, x, 0), "y_btc = x_btc where t/2 = 1, 0 elsewhere"),
    "whole quotients": ("x", (49.0 * np.arange(5),), np.arange(5), "y_i = ⌊x_i/49⌋"),
    "the lesser of 0 and NaN": ("x", (np.array([np.nan, 1]),), np.array([np.nan, 0]), "y_i = min(0, x_i)"),
    "infinity": ("x", (half,), np.where(half > 0, half, -np.inf), "y_i = x_i where x_i > 0, −∞ elsewhere"),
    "the same in a row": ("x", (half,), 0 * half + half.sum(-1, keepdims=True), "y_i = Σ_j x_j"),
    "names of the loops": ("x, b, t1", (x, x[0, 0], x[1]), x + x[0, 0] + x[1] ** 2, "y_btc = x_btc + b_c + t1_tc²"),
    "a name of a sum": ("x", (half,), half.sum(-1, keepdims=True) * half, "sum0_n = Σ_c x_nc", "y_nc = sum0_n x_nc"),
    "a number of all rows": ("x", (half,), half * 3, "m = Σ_n 1", "y_nc = m x_nc"),
    "an inequality": ("x", (half,), half**2, "y_i = x_i² ≤ 1 + x_i² = x_i² + 1"),
    "division by 0": ("x, a", (half, 0.0), half * np.inf, "y_i = x_i/a"),
    "an overflow": ("x, a", (half, 1e200), half * np.inf, "y_i = x_i a²"),
    "a constant division by 0": ("x", (half,), half * np.inf, "y_i = x_i (1/0)"),
    "erf of a number": ("x, a", (half, 0.5), half * 0.5204998778130465, "y_i = x_i erf(a)"),
    "numbers of 32 bits": ("x, a", (half, np.int32(70000)), half * 4.9e9, "y_i = x_i (a a)"),
}


@pytest.mark.parametrize("name", CASES)
def test_loops_compute_what_the_equation_says(name):
    arguments, args, expected, *lines = CASES[name]
    letters = lines[-1].partition(" ")[0].partition("_")[2]
    op, op_backward = pair_of(arguments, *lines, f"dx_{letters} = dy_{letters}")
    targets = [PythonTarget()]
    if sf.dispatch.turned_off() == "":
        pytest.importorskip("numba")
        from scratchformer.compiler.numba_target import NumbaTarget

        targets.append(NumbaTarget())
    for target in targets:
        twin = CompiledTwin(op, op_backward, target)
        assert twin.fits(*args)
        with np.errstate(all="ignore"):
            y, _ = twin.forward(*args)
        np.testing.assert_allclose(y, expected, rtol=1e-12)
    for target in PRINTERS:
        assert shown(op, op_backward, target)


def test_a_condition_beside_the_place_that_a_row_is_added_to():
    lines = "y_nc = w_vc [m_n = 1] with v = ids_n", "dw_vc = Σ_n [ids_n = v and m_n = 1] dy_nc"
    op, op_backward = pair_of("w, ids, m", *lines)
    ids, m, dy = np.array([1, 0, 1]), np.array([1, 1, 0]), x[0]
    twin = CompiledTwin(op, op_backward, PythonTarget())
    _, kept = twin.forward(np.ones((4, 5)), ids, m)
    np.testing.assert_array_equal(twin.backward(dy, kept), np.array([dy[1], dy[0], 0 * dy[0], 0 * dy[0]]))
    assert "m" in numba_source(twin.derivation.compile().backward)


@pytest.mark.parametrize("line", ["s_b = Σ_t w_bt", "s_b = mean_t(w_bt)"])
def test_a_sum_over_some_rows_of_what_has_no_column(line):
    op, op_backward = pair_of("x, w", line, "y_btc = x_btc s_b", "dx_btc = dy_btc s_b")
    with pytest.raises(CompileError, match="not over all axes"):
        sf.compile(op, op_backward)


@pytest.mark.parametrize("types", [(np.float64, np.float32), (np.float32, np.float64)])
def test_arrays_of_several_types_go_to_the_reference(types):
    """Loops of float32 would round those of float64."""
    op, op_backward = pair_of("x, b", "y_i = x_i b_i", "dx_i = dy_i b_i")
    assert not CompiledTwin(op, op_backward, PythonTarget()).fits(*(half.astype(dtype) for dtype in types))


def test_an_option_of_another_type_goes_to_the_reference():
    """NumPy's True is not spelled as the equations spell it, and chose the other case."""
    op, op_backward = pair_of("x, up", "y_i = 2 x_i where up = True, 3 x_i elsewhere", "dx_i = dy_i")
    op.reference.__defaults__ = (True,)
    twin = CompiledTwin(op, op_backward, PythonTarget())
    for up, factor in ((True, 2), (False, 3)):
        assert twin.fits(half, up)
        np.testing.assert_array_equal(twin.forward(half, up)[0], factor * half)
    assert not any(twin.fits(half, up) for up in (np.True_, np.array(True)))

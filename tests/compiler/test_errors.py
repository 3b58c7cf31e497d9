"""What is said about a derivation that cannot be compiled: the line, the equation, and what to do."""

import re
from typing import NamedTuple

import numpy as np
import pytest

import scratchformer as sf
from scratchformer import ops
from scratchformer.commands import cli
from scratchformer.compiler.derivation import Derivation


def project(x, w):
    """Rows times a matrix.

    Forward and backward:

        y_no = Σ_i x_ni w_io        dx_ni = Σ_o dy_no w_io        dw_io = Σ_n x_ni dy_no
    """
    return x @ w, (x, w)


def project_backward(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy


def softplus(x):
    """y = log(1 + exp(x)), whose derivative is left to the reader.

    Forward and backward:

        y_i = log(1 + exp(x_i))
        dx_i = dy_i ∂y_i/∂x_i
    """
    return np.log1p(np.exp(x)), x


def softplus_backward(dy, x):
    return dy / (1 + np.exp(-x))


def batchnorm(x):
    """Each column has mean 0.

    Forward and backward:

        μ_c = mean_n(x_nc)
        y_nc = x_nc − μ_c        dx_nc = dy_nc − mean_n(dy_nc)
    """
    return x - x.mean(axis=0), None


def batchnorm_backward(dy, cache):
    return dy - dy.mean(axis=0)


def centred(x):
    """Each column without its sum.

    Forward and backward:

        s_c = Σ_n x_nc
        y_nc = x_nc − s_c        dx_nc = dy_nc − Σ_n dy_nc
    """
    return x - x.sum(axis=0), None


def centred_backward(dy, cache):
    return dy - dy.sum(axis=0)


def leaky(x):
    """A slope that no equation gives.

    Forward and backward:

        y_i = x_i where x_i > 0, slope x_i elsewhere
        dx_i = dy_i
    """
    return np.where(x > 0, x, 0.1 * x), x


def leaky_backward(dy, x):
    return dy


class SquareCache(NamedTuple):
    y: np.ndarray


def square(x):
    """y = x².

    Forward and backward:

        y_i = x_i²        dx_i = 2 dy_i x_i
    """
    return x * x, SquareCache(x * x)


def square_backward(dy, cache: SquareCache):
    return 2 * dy * np.sqrt(cache.y)


def circle(x):
    """Two names that need each other.

    Forward and backward:

        a_i = b_i x_i        b_i = a_i + 1
        y_i = a_i
        dx_i = dy_i
    """
    return x, x


def circle_backward(dy, x):
    return dy


def broken(x):
    """An equation that cannot be read.

    Forward and backward:

        y_i = 2 x_i
        dx_i = 2 dy_i) + 1
    """
    return 2 * x, None


def broken_backward(dy, cache):
    return 2 * dy


def half(x):
    """No gradient.

    Forward and backward:

        y_i = x_i/2
    """
    return x / 2, None


def half_backward(dy, cache):
    return dy / 2


def bare(x):
    """No equations."""
    return x, None


def bare_backward(dy, cache):
    return dy


def scaled(factor, x):
    """The number comes first.

    Forward and backward:

        y_i = factor x_i        dx_i = dy_i factor
    """
    return factor * x, factor


def scaled_backward(dy, factor):
    return dy * factor


SAID = {
    project: """\
project: line 5: y_no = Σ_i x_ni w_io
    Σ_i x_ni w_io is a product of matrices, which stays a call of a library: make it a separate operation, and compile \
what comes before and after it""",
    softplus: """\
softplus: line 6: dx_i = dy_i ∂y_i/∂x_i
    every form of dx has a derivative; end the equation on a form without ∂, or name the derivative: w_i := ∂y_i/∂x_i \
= ...""",
    batchnorm: """\
batchnorm: line 5: μ_c = mean_n(x_nc)
    mean_n(x_nc): a sum over rows must stand alone on the right, as in a_c = Σ_n ..., and only the results of the \
operation may use it, since it is known after the loop over the rows""",
    centred: """\
centred: line 6: y_nc = x_nc − s_c
    a sum over all rows is known only after the loop over the rows, so no row can use it: make what uses it a second \
operation, with the sum as an argument""",
    leaky: """\
leaky: line 5: y_i = x_i where x_i > 0, slope x_i elsewhere
    nothing defines slope: it is no argument and no field of the cache, and no equation computes it""",
    square: """\
square: line 5: dx_i = 2 dy_i x_i
    the backward uses x, which the cache does not keep: make it a field of the cache's NamedTuple, or a name that the \
backward unpacks the cache into""",
    circle: """\
circle: line 5: b_i = a_i + 1
    a depends on itself: y → a → b → a""",
    broken: """\
broken: line 6, column 18: expected an operator, a relation or the end, got ")"
        dx_i = 2 dy_i) + 1
                     ^""",
    half: "half: no equation computes a gradient: dx",
    bare: "bare: its docstring has no equations (they are indented deeper than its text)",
    scaled: """\
scaled: the first argument, factor, must be an array with an index in the equations: its type says which loops run""",
}


@pytest.mark.parametrize("op", SAID, ids=lambda op: op.__name__)
def test_the_message(op):
    with pytest.raises(sf.CompileError, match=f"^{re.escape(SAID[op])}$"):
        sf.compile(op, globals()[f"{op.__name__}_backward"])


@pytest.mark.parametrize("op", ["linear", "dense", "attention", "relative_attention"])
def test_operations_with_products_name_the_product(op):
    with pytest.raises(sf.CompileError, match=rf"^{op}: line \d+: .*\n    Σ_\w \w+ \w+ is a product of matrices"):
        Derivation(getattr(ops, op).reference, getattr(ops, f"{op}_backward").reference).compile()


def test_show_ends_with_2_and_the_reason(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["show", "linear", "--numba"])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.partition(":")[0]) == ("", "error")
    assert "linear: line 8: y_no = Σ_i x_ni w_io + b_o\n    Σ_i x_ni w_io is a product of matrices" in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", r"error: nosuch: expected FILE\.py::FUNCTION or add, attention, "),
        ("Causal", r"error: Causal: expected FILE\.py::FUNCTION or add, attention, "),
        ("missing.py::f", r"error: missing\.py is not a Python file"),
        (f"{__file__}::nosuch", r"error: .*test_errors\.py::nosuch: .*test_errors\.py has no function nosuch"),
    ],
)
def test_show_of_a_name_that_it_does_not_know(name, message):
    with pytest.raises(SystemExit, match=message):
        cli.main(["show", name, "--numba"])

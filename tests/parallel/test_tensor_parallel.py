"""examples/tensor_parallel.py: a feed-forward layer divided among ranks, which are threads here."""

import re
from pathlib import Path

import numpy as np
import pytest

from scratchformer.catalogue import Sizes
from scratchformer.nn import FeedForward
from scratchformer.notation import DerivationError, check_derivation
from scratchformer.training.snapshot import load_file

from .ranks_in_threads import run_ranks

divided = load_file(Path(__file__).parents[2] / "examples" / "tensor_parallel.py")


def feedforward(x, w1, b1, w2, b2):
    """The layer, for arrays with an axis for ranks."""
    found = run_ranks(
        len(w1), lambda ranks: divided.feedforward(x, w1[ranks.rank], b1[ranks.rank], w2[ranks.rank], b2, ranks.comm)
    )
    (y, *others), caches = zip(*found, strict=True)
    for other in others:
        np.testing.assert_array_equal(y, other)
    return y, caches


def feedforward_backward(dy, caches):
    found = run_ranks(len(caches), lambda ranks: divided.feedforward_backward(dy, caches[ranks.rank], ranks.comm))
    dx, dw1, db1, dw2, db2 = zip(*found, strict=True)
    for same in dx, db2:
        for other in same[1:]:
            np.testing.assert_array_equal(same[0], other)
    return dx[0], np.stack(dw1), np.stack(db1), np.stack(dw2), db2[0]


def check(docstring, seed=0):
    d = Sizes(seed)
    return check_derivation(
        feedforward, feedforward_backward, d("N C"), d("R C F"), d("R F"), d("R F C"), d("C"), docstring=docstring
    )


@pytest.mark.parametrize("seed", range(3))
def test_its_derivation_is_true(seed):
    assert check(divided.feedforward.__doc__, seed).worst < 1e-12


@pytest.mark.parametrize(
    ("true", "mistake"), [("Σ_r Σ_f du_rnf w1_rcf", "Σ_f du_{0,n,f} w1_{0,c,f}"), ("db2_c = Σ_n", "db2_c = Σ_r Σ_n")]
)
def test_a_mistake_in_the_derivation_is_found(true, mistake):
    assert true in divided.feedforward.__doc__
    with pytest.raises(DerivationError, match="is not true"):
        check(divided.feedforward.__doc__.replace(true, mistake))


PAGE = (Path(__file__).parents[2] / "docs" / "model_parallelism.md").read_text(encoding="utf-8")
EQUATIONS = re.findall(r"```\{math\}\n(.+)\n```", PAGE)


def over_ranks(x, w):
    """A product for each rank: with its own x, or with the same."""
    return x @ w, (x, w)


def by_columns_backward(dy, cache):
    x, w = cache
    return (dy @ w.swapaxes(1, 2)).sum(axis=0), x.T @ dy


def by_rows(x, w):
    products, cache = over_ranks(x, w)
    return products.sum(axis=0), cache


def by_rows_backward(dy, cache):
    x, w = cache
    return dy @ w.swapaxes(1, 2), x.swapaxes(1, 2) @ dy


@pytest.mark.parametrize(
    ("op", "op_backward", "x", "equations"),
    [(over_ranks, by_columns_backward, "N I", EQUATIONS[:3]), (by_rows, by_rows_backward, "R N I", EQUATIONS[3:6])],
)
def test_the_equations_of_the_page_are_true(op, op_backward, x, equations):
    d = Sizes()
    text = "By ranks.\n\n" + "".join(f"    {equation}\n" for equation in equations) + "\nThat is all.\n"
    assert check_derivation(op, op_backward, d(x), d("R I O"), docstring=text).worst < 1e-12
    with pytest.raises(DerivationError, match="is not true"):
        check_derivation(op, op_backward, d(x), d("R I O"), docstring=text.replace("w_rio", "w_{0,i,o}", 1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_the_feed_forward_layer(size):
    """The parts of its weights and gradients are those of the whole layer."""
    layer = FeedForward(6, 12).to(dtype=np.float64)
    draw = np.random.default_rng(0)
    layer.flat.data[...] = draw.standard_normal(layer.flat.data.size)
    x, dy = draw.standard_normal((2, 5, 6))
    y, cache = layer.forward(x)
    dx = layer.backward(dy, cache)
    up, down = layer.up, layer.down

    def run(ranks):
        own = slice(ranks.rank * 12 // size, (ranks.rank + 1) * 12 // size)
        arrays = up.w.data[:, own], up.b.data[own], down.w.data[own], down.b.data
        found = divided.run(x, *arrays, dy, ranks.comm)
        expected = y, dx, up.w.grad[:, own], up.b.grad[own], down.w.grad[own], down.b.grad
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)

    run_ranks(size, run)

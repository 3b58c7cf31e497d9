"""Each construct of the notation, evaluated and compared with NumPy."""

import numpy as np
import pytest
from scipy.special import erf

from scratchformer.notation import NotationError, parse
from scratchformer.notation.values import Scope, bind, evaluate

T, S, D, B = 4, 5, 3, 2
rng = np.random.default_rng(0)
X, Y, W = rng.standard_normal((T, D)), rng.standard_normal((S, D)), rng.standard_normal((B, T, D))
IDS, TABLE = np.array([2, 0, 0, 1]), rng.standard_normal((3, D))
VALUES = {"x": X, "y": Y, "w": W, "ids": IDS, "table": TABLE, "eps": np.array(0.25)}
t, s, d = np.arange(T)[:, None], np.arange(S), np.arange(D)

CASES = {
    "a_ts = Σ_d x_td y_sd": X @ Y.T,
    "a_t = Σ_d x_td²": (X**2).sum(1),
    "a_t = Σ_{d, d < 2} x_td": X[:, :2].sum(1),
    "a_t = Σ_{0 ≤ d < D − 1} x_td": X[:, :2].sum(1),
    "a_t = mean_d(x_td)": X.mean(1),
    "a_t = mean_{d, d ≥ 1}(x_td)": X[:, 1:].mean(1),
    "a_t = max_d(x_td) + min_d(x_td)": X.max(1) + X.min(1),
    "a_t = argmax_d(x_td)": X.argmax(1),
    "a_td = softmax_d(x_td)": np.exp(X) / np.exp(X).sum(1, keepdims=True),
    "a_t = prod_d(x_td)": X.prod(1),
    "a_ts = [s ≤ t] + [s = t + 1]": (s <= t) + (s == t + 1.0),
    "a_ts = [s ≤ t, s ≠ 0]": (s <= t) & (s != 0),
    "a_td = δ_td x_td": np.eye(T, D) * X,
    "a_td = x_td where x_td > 0, x_td/2 where x_td > −1, 0 elsewhere": np.where(X > 0, X, np.where(X > -1, X / 2, 0)),
    "a_td = table_vd with v = ids_t": TABLE[IDS],
    "a_td = table_{ids_t, d}": TABLE[IDS],
    "a_td = x_{T − 1 − t, d}": X[::-1],
    "a_td = ⌊(t + d)/2⌋ + t mod 3": (t + d) // 2 + t % 3,
    "a_td = |x_td| + max(x_td, 0) − min(x_td, 1)": np.abs(X) + np.maximum(X, 0) - np.minimum(X, 1),
    "a_td = exp(x_td) log(2) + tanh(x_td)": np.exp(X) * np.log(2) + np.tanh(X),
    "a_td = sin(x_td) cos(x_td) erf(x_td)": np.sin(X) * np.cos(X) * erf(X),
    "a_td = 2^(x_td) + x_td^3 − x_td⁻¹": 2**X + X**3 - 1 / X,
    "a_td = 1/D x_td + eps √(2) − ½ π 1e-3": X / D + 0.25 * np.sqrt(2) - np.pi / 2 * 1e-3,
    "a_td = x_td − 2 − 3": X - 5,
    "a_tt' = Σ_d x_td x_t'd": X @ X.T,
    "a_d = Σ_n w_nd": W.sum((0, 1)),
    "a_d = x_{0, d}": X[0],
}


@pytest.mark.parametrize("text", CASES)
def test_a_construct(text):
    expected = CASES[text]
    scope = Scope(dict(VALUES))
    scope.sizes |= {"t": T, "s": S, "d": D}
    equation = parse(text, VALUES)
    bind(equation, scope)
    found = evaluate(equation.parts[1], scope)
    letters = [index[1] for index in equation.parts[0][2]]
    data = found.data.transpose([found.axes.index(letter) for letter in letters])
    np.testing.assert_allclose(data, expected, rtol=1e-14)


def test_axes_without_an_index_are_leading_axes_that_broadcast():
    scope = Scope({"w": W, "x": X})
    found = evaluate(parse("a_d = w_d x_d").parts[1], scope)
    assert found.axes == (-2, -1, "d")
    np.testing.assert_array_equal(found.data, W * X)


def test_an_index_out_of_range_is_not_a_number():
    scope = Scope({"x": X})
    equation = parse("a_td = x_{t − 1, d}")
    bind(equation, scope)
    scope.sizes |= {"t": T, "d": D}
    found = evaluate(equation.parts[1], scope).data
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1:], X[:-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a_t = q_t", "q is not known here"),
        ("a_tds = x_tds", r"too many indices: x has shape \(4, 3\)"),
        ("a_td = x_td y_td", "index t has size 5 in y, but 4 elsewhere"),
        ("a_u = [u = 0]", "the size of index u is not known"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error(text, message):
    scope = Scope(dict(VALUES))
    equation = parse(text, VALUES)
    with pytest.raises(NotationError, match=message):
        bind(equation, scope)
        evaluate(equation.parts[1], scope)

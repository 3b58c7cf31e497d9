"""The checks themselves: no false alarm for correct pairs at any scale, and an error for every planted mistake."""

import collections
import itertools
import re
from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from scratchformer import nn, ops
from scratchformer.backend import CPU, array_module, to_cpu
from scratchformer.testing import GradientError, Report, check_layer, differences
from scratchformer.testing import check_gradients as check_pair
from scratchformer.testing.runs import normal_like
from scratchformer.testing.strategies import arrays, ids, tensors
from scratchformer.testing.strict import STRICT

from .reports import complaint

SCALES = [1e-3, 1e-1, 1.0, 1e2]
check_gradients = partial(check_pair, rules=True)
fails = partial(complaint, check_gradients)
SEEDS = st.integers(0, 2**32 - 1)


def normal(*shape, scale=1.0, seed=0):
    return np.random.default_rng(seed).standard_normal(shape) * scale


# Correct operations


# Operations with their backwards, written plainly.


def linear(x, w, b):
    return x @ w + b, (x, w)


def linear_backward(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy, dy.sum(axis=0)


def tanh(x):
    y = array_module(x).tanh(x)
    return y, y


def tanh_backward(dy, y):
    return dy * (1 - y * y)


def softmax(z):
    e = array_module(z).exp(z - z.max(axis=-1, keepdims=True))
    y = e / e.sum(axis=-1, keepdims=True)
    return y, y


def softmax_backward(dy, y):
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


def layernorm(x, gamma, beta, eps=1e-5):
    centred = x - x.mean(axis=-1, keepdims=True)
    rstd = 1 / array_module(x).sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    xhat = centred * rstd
    return gamma * xhat + beta, (xhat, rstd, gamma)


def layernorm_backward(dy, cache):
    xhat, rstd, gamma = cache
    g = dy * gamma
    dx = rstd * (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def relu(x):
    return x * (x > 0), x > 0


def relu_backward(dy, positive):
    return dy * positive


def cube(x):
    return x * x * x, x  # CuPy's powers of complex numbers are too inexact for complex_step


def cube_backward(dy, x):
    return 3 * x**2 * dy


def logsumexp(z):
    top = z.max(axis=-1)
    e = array_module(z).exp(z - top[..., None])
    total = e.sum(axis=-1)
    return top + array_module(z).log(total), e / total[..., None]


def logsumexp_backward(dy, p):
    return dy[..., None] * p


def cross_entropy(z, targets):
    y, p = logsumexp(z)
    rows = array_module(z, targets).arange(len(targets))
    return (y - z[rows, targets]).mean(), (p, rows, targets)


def cross_entropy_backward(dy, cache):
    p, rows, targets = cache
    dz = p.copy()
    dz[rows, targets] -= 1
    return dz * (dy / len(targets))


def embedding(ids, table):
    return table[ids], (ids, table.shape)


def embedding_backward(dy, cache):
    tokens, shape = cache
    xp = array_module(dy)
    dtable = xp.zeros(shape, dy.dtype)
    xp.add.at(dtable, tokens, dy)
    return dtable


def split(x):
    """Two outputs."""
    return (x[:, :1] * 2, x[:, 1:] ** 2), x


def split_backward(dy, x):
    return array_module(x).concatenate([2 * dy[0], 2 * x[:, 1:] * dy[1]], axis=1)


# Correct pairs.


@given(tensors("N C", "C F", "F"), SEEDS)
def test_linear(device, xs, seed):
    report = check_gradients(linear, linear_backward, *xs, seed=seed, device=device, complex_step=True)
    assert [row.tensor for row in report] == ["x", "w", "b"]


@pytest.mark.parametrize("name", ["tanh", "softmax", "relu", "cube", "logsumexp"])
@given(x=arrays("N C", min_size=1), seed=SEEDS)
def test_of_one_array(device, name, x, seed):
    op, op_backward = globals()[name], globals()[f"{name}_backward"]
    analytic = name in ("tanh", "cube")
    check_gradients(op, op_backward, x, seed=seed, device=device, complex_step=analytic)


@given(tensors("N C", "C", "C", min_size=3), st.sampled_from([1e-5, 1e-12]))
def test_layernorm_with_tiny_eps(device, xs, eps):
    check_gradients(layernorm, layernorm_backward, *xs, eps=eps, device=device)


@given(arrays("4 C"), ids("4", high=2))
def test_cross_entropy_of_scalar_output(device, z, targets):
    check_gradients(cross_entropy, cross_entropy_backward, z, targets, device=device)


@given(arrays("4 C"), ids("B T", high=4))
def test_embedding_skips_the_ids(device, table, tokens):
    report = check_gradients(embedding, embedding_backward, tokens, table, device=device)
    assert [row.tensor for row in report] == ["table"]


def test_two_outputs(device):
    check_gradients(split, split_backward, normal(3, 4), device=device)


@given(SEEDS, st.sampled_from(SCALES))
def test_relu_at_and_near_its_kink(seed, scale):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, 5)) * rng.choice([1, 1e-3, 1e-6, 1e-8, 0], (4, 5)) * scale
    check_gradients(relu, relu_backward, x, seed=seed)


def test_a_loss_below_the_last_digit_of_its_logits():
    z = np.array([[100.0, 70.0], [117.0, 0.5], [90.0, 67.0]])
    for targets in itertools.product([0, 1], repeat=3):
        check_gradients(cross_entropy, cross_entropy_backward, z, np.array(targets))


@pytest.mark.parametrize("scale", SCALES)
def test_a_step_may_leave_the_domain(scale):
    x = np.array([1e-5, 1e-3, 1.0]) * scale
    check_gradients(lambda x: (np.log(x), x), lambda dy, x: dy / x, x)


LINES = {
    "cubic": lambda x: x**3,
    "steep": lambda x: np.exp(30 * x),
    "a kink at 1e-3": lambda x: np.abs(x - 1.001) * x,
    "a kink at 1e-5": lambda x: np.maximum(x, 1.00001),
    "a kink at x": lambda x: np.abs(x - 1),
    "a domain that ends 1e-4 below": lambda x: np.log(x - 0.9999),
    "almost level": lambda x: 1 + 1e-9 * x,
    "level": lambda x: x * 0 + 3.0,
    "level up to 1e-2": lambda x: np.maximum(x - 1.01, 0),
    "a small slope beside a large curvature": lambda x: 1e-7 * x + 1e3 * (x - 1) ** 4,
}


@pytest.mark.parametrize("first", differences.STEPS)
@pytest.mark.parametrize("name", LINES)
def test_the_step_that_is_found_is_about_as_certain_as_the_best(name, first, monkeypatch):
    """Or it is good to rtol, from whatever step the search begins. A step that was skipped may be slightly better."""

    def estimate(steps, first):
        monkeypatch.setattr(differences, "STEPS", steps)
        x = differences.Variable("x", np.array([1.0]), np.zeros(1))
        found = differences.Differences(lambda: LINES[name](x.array), np.array([1.3]))
        found.measure_noise([x], lambda: (found.outputs(), [x.gradient]), np.random.default_rng(0))
        found.best_step = first
        return found.estimate(x.along_element((0,)), 1.0, rtol=1e-6)

    steps = differences.STEPS
    singly = [estimate((step,), step).uncertainty for step in steps]
    found = estimate(steps, first)
    assert found.uncertainty <= max(1.5 * min(singly), 1e-6 * abs(found.value))


def test_no_finite_difference_is_a_failure():
    def at_one(x):
        return np.where(x == 1, x, np.nan), None

    assert "y is not finite at any step" in fails(at_one, lambda dy, _: dy * 1, np.ones(1))


def test_a_bias_that_is_not_given():
    def linear(x, w, b=None):
        return x @ w, (x, w)

    def linear_backward(dy, cache):
        x, w = cache
        return dy @ w.T, x.T @ dy, None

    check_gradients(linear, linear_backward, normal(2, 3), normal(3, 4))
    check_gradients(linear, linear_backward, normal(2, 3), normal(3, 4), None)


def test_arguments_are_converted_to_float64_and_left_alone():
    x = normal(2, 3).astype(np.float32)
    before = x.copy()
    seen = set()

    def op(x):
        seen.add(x.dtype.name)
        return cube(x)

    check_gradients(op, cube_backward, x)
    assert seen == {"float64", "float32"} and np.array_equal(x, before)


def test_report():
    report = check_gradients(linear, linear_backward, normal(9, 8), normal(8, 3), normal(3), max_elements=20)
    assert isinstance(report, Report)
    assert [(r.tensor, r.shape, r.elements) for r in report] == [("x", (9, 8), 20), ("w", (8, 3), 20), ("b", (3,), 3)]
    assert all(0 < r.worst_relative_error < 1e-8 for r in report)
    head, first, *_ = str(report).splitlines()
    assert head.split() == ["tensor", "shape", "elements", "checked", "worst", "relative", "error"]
    assert re.fullmatch(r"x +\(9, 8\) +20 +\d\.\de-\d+", first)


# Nothing to compare, where any backward would pass.


def refused(*args, op=cube, backward=lambda dy, _: 7 * dy, **options):
    with pytest.raises(ValueError) as caught:
        check_gradients(op, backward, *args, **options)
    return str(caught.value)


def test_an_empty_argument():
    assert refused(np.zeros((0, 3))) == "x: expected at least one element, got shape (0, 3)"
    message = refused(normal(2, 0), normal(0, 3), normal(3), op=linear, backward=linear_backward)
    assert message == "x: expected at least one element, got shape (2, 0)"


@pytest.mark.parametrize(
    "args, found",
    [
        ([np.arange(3)], "x: int64"),
        ([[1.0, 2.0]], "x: list"),
        ([2.0], "x: float"),
    ],
    ids=str,
)
def test_no_floating_argument(args, found):
    message = refused(*args, op=lambda x: (x, None), backward=lambda dy, _: None)
    assert message == f"nothing to check: expected a floating-point array, got {found}"


def test_arrays_by_keyword_alone():
    assert refused(x=normal(3)) == "nothing to check: expected a floating-point array, got none"


@pytest.mark.parametrize("y", [np.zeros((0, 2)), (np.zeros(0), np.zeros((2, 0)))], ids=str)
def test_an_empty_output(y):
    assert "y: expected at least one element, got" in refused(normal(3), op=lambda x: (y, None))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_argument_that_is_not_finite(bad):
    x = np.array([[1.0, 2.0], [bad, -1.0]])
    assert refused(x, op=relu) == f"x[1, 0] is {bad} (1 elements are not finite)"


@pytest.mark.parametrize("max_elements, directions", [(0, 0), (0, -1), (-1, 2)])
def test_no_elements_and_no_directions(max_elements, directions):
    message = refused(normal(3), max_elements=max_elements, directions=directions)
    assert re.match("(max_elements|directions|max_elements, directions): expected ", message)


@pytest.mark.parametrize("rtol", [1, 2.0, np.inf, np.nan, -1e-6])
def test_a_tolerance_that_accepts_everything(rtol):
    assert refused(normal(3), rtol=rtol) == f"rtol: expected 0 <= rtol < 1, got {rtol}"


def test_infinite_noise_accepts_nothing():
    assert not differences.compare("x[0]", 7.0, differences.NumericDerivative(1.0, 0.0), noise=np.inf, rtol=1e-6).agrees
    assert not differences.compare("x[0]", 7.0, differences.NumericDerivative(np.inf, 0.0), noise=0.0, rtol=1e-6).agrees


def test_a_kink_at_every_element():
    """Zeros before a ReLU: its slope there is undefined, and 0 is as right as 1. But 3 is not."""
    for factor in (0, 1):
        message = refused(np.zeros((2, 3)), op=relu, backward=lambda dy, _, factor=factor: factor * dy)
        assert message.startswith("x: expected values at which y is differentiable, got a kink at every element")
        assert re.search(r"x\[0, 0\]: a kink at this value: one-sided derivatives are \S+ and \S+; any value", message)
    message = fails(relu, lambda dy, _: 3 * dy, np.zeros((2, 3)))
    assert "6 of 6 comparisons of x disagree" in message and "a kink at this value" in message


def test_what_is_no_function_array_or_layer_is_refused():
    x = np.ones(3)
    for said, call in {
        "op: expected a function, got ndarray": lambda: check_gradients(x, relu),
        "layer: expected an object such as an nn.Layer, got the class Linear": lambda: check_layer(nn.Linear, x),
        "got a function without forward, backward, named_parameters, zero_grad, to": lambda: check_layer(relu, x),
    }.items():
        with pytest.raises(TypeError, match=re.escape(said)):
            call()


def test_kinks_are_named_in_the_report():
    def shifted(x):
        y, positive = relu(x - np.array([0, 0.5, 0], x.dtype))
        return y + np.array([0, 1e6, 0], x.dtype), positive  # too large for a step that avoids the near kink

    x = np.array([[0.0, 0.5 + 1e-9, 1.0]])
    report = check_gradients(shifted, relu_backward, x)
    at, near = report.kinks
    dy = normal_like(x, 0, CPU, np.float64)[0, 0]
    sides = f"one-sided derivatives are 0 and {dy:.6g}"
    assert at == f"x[0, 0]: a kink at this value: {sides}; any value between is accepted"
    assert near.startswith("x[0, 1]: a kink within 1e-07 of this value:") and "; compared to within 0." in near
    assert str(report).splitlines()[2:] == [at, near]
    directions = check_gradients(shifted, relu_backward, x, max_elements=0).kinks
    assert len(directions) == 2 and directions[0].startswith("x along a random direction: a kink")
    assert check_gradients(relu, relu_backward, np.array([[1e-3, 1e-5, 1.0]])).kinks == ()
    assert "x[0, 2]" in fails(shifted, lambda dy, positive: 3 * dy * positive, x)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_much_smaller_than_the_largest(seed):
    """Steps in proportion to the largest would cross the pole, and leave the domain of the logarithm."""
    x = np.array([1e-12, 1e-4, -1e-3, 1.0, 1e4])
    check_gradients(lambda x: (1 / x, x), lambda dy, x: -dy / x**2, x[1:], seed=seed)
    check_gradients(lambda x: (np.log(x), x), lambda dy, x: dy / x, np.abs(x), seed=seed)
    for i in range(4):

        def wrong(dy, x, i=i):
            return dy / x * (1 + (np.arange(5) == i)).astype(x.dtype)

        assert "1 of 5 comparisons of x disagree" in fails(lambda x: (np.log(x), x), wrong, np.abs(x), seed=seed)


# Wrong values.


@pytest.mark.parametrize("scale", SCALES)
def test_one_element_wrong_in_the_sixth_digit(scale):
    def backward(dy, cache):
        dx, dw, db = linear_backward(dy, cache)
        dw = dw.copy()
        dw[3, 1] *= 1 + 1e-5
        return dx, dw, db

    args = [normal(5, 4, scale=scale), normal(4, 2, scale=scale), normal(2, scale=scale)]
    message = fails(linear, backward, *args, seed=12)
    assert "linear: wrong gradient at w[3, 1]:" in message
    assert "relative error 1e-05" in message and "(rtol 1e-06)" in message
    assert "1 of 8 comparisons of w disagree" in message
    assert "check_gradients(linear, backward, ..., seed=12)" in message
    analytic, numeric = (float(re.search(rf"{kind} +(\S+)", message)[1]) for kind in ("analytic", "numeric"))
    assert analytic == pytest.approx(numeric * (1 + 1e-5), rel=1e-8)


@pytest.mark.parametrize("scale", SCALES)
@given(seed=SEEDS)
def test_mean_without_its_division(scale, seed):
    def backward(dy, cache):
        return cross_entropy_backward(dy, cache) * len(cache[2])

    z = normal(3, 4, scale=scale, seed=seed)
    assert "z[" in fails(cross_entropy, backward, z, z.argmin(axis=1))


@pytest.mark.parametrize("scale", SCALES)
def test_square_gradient_transposed(scale):
    def backward(dy, cache):
        dx, dw, db = linear_backward(dy, cache)
        return dx, dw.T.copy(), db

    message = fails(linear, backward, normal(5, 4, scale=scale), normal(4, 4, scale=scale), normal(4))
    assert "wrong gradient at w[" in message


@pytest.mark.parametrize("scale", SCALES)
def test_layernorm_right_only_for_uniform_gamma(scale):
    def backward(dy, cache):
        xhat, rstd, gamma = cache
        dx = layernorm_backward(dy, (xhat, rstd, np.ones_like(gamma)))[0] * gamma
        return dx, *layernorm_backward(dy, cache)[1:]

    x = normal(3, 4, scale=scale)
    check_gradients(layernorm, backward, x, np.ones(4), np.zeros(4))
    assert "x[" in fails(layernorm, backward, x, normal(4), np.zeros(4))


@pytest.mark.parametrize("scale", SCALES[:3])
def test_constants_right_to_three_digits(scale):
    def sigmoid_gelu(x):
        s = 1 / (1 + array_module(x).exp(-1.702 * x))
        return x * s, (x, s)

    def backward(dy, cache):
        x, s = cache
        return dy * (s + 1.70 * x * s * (1 - s))

    assert "x[" in fails(sigmoid_gelu, backward, normal(4, 5, scale=scale))


def test_repeated_ids_lose_gradient():
    def backward(dy, cache):
        tokens, shape = cache
        dtable = np.zeros(shape, dy.dtype)
        dtable[tokens] += dy
        return dtable

    assert "table[1, " in fails(embedding, backward, np.array([0, 1, 1]), normal(3, 2))


def test_elements_that_were_not_drawn_fail_along_a_direction():
    def backward(dy, x):
        dx = cube_backward(dy, x)
        dx.reshape(-1)[::7] *= 1.01
        return dx

    x = normal(40, 50)
    assert "x along a random direction" in fails(cube, backward, x, max_elements=0)


def test_the_complex_step_sees_the_ninth_digit():
    def backward(dy, y):
        return tanh_backward(dy, y) * (1 + 1e-8)

    x = normal(3, 4)
    check_gradients(tanh, backward, x)
    message = fails(tanh, backward, x, complex_step=True)
    assert "(complex step)" in message and "(rtol 1e-10)" in message


def test_several_wrong_tensors_are_all_named():
    def backward(dy, cache):
        dx, dw, db = linear_backward(dy, cache)
        return dx * 2, dw * 1.5, db

    message = fails(linear, backward, normal(2, 3), normal(3, 2), normal(2))
    assert "wrong gradient at x[" in message and "and others of w (6)" in message


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite(bad):
    def backward(dy, x):
        dx = cube_backward(dy, x)
        dx[1, 2] = bad
        return dx

    assert f"gradient of x[1, 2] is {bad}" in fails(cube, backward, normal(2, 3))

    def op(x):
        y, cache = cube(x)
        y[0, 1] = bad
        return y, cache

    assert f"y[0, 1] is {bad}" in fails(op, cube_backward, normal(2, 3))


# The contract.


def doubled(x):
    return x * 2, None


def doubled_backward(dy, _):
    return dy * 2


CONTRACT = {
    "too few gradients": (
        linear,
        lambda dy, c: linear_backward(dy, c)[:2],
        r"2 gradient\(s\) for 3 .*x, w, b",
    ),
    "too many gradients": (doubled, lambda dy, c: (dy * 2, dy * 2), r"2 gradient\(s\) for 1"),
    "no gradient": (doubled, lambda dy, c: None, r"0 gradient\(s\) for 1"),
    "a number": (doubled, lambda dy, c: 2.0, "gradient of x: expected an array, got float"),
    "another shape": (doubled, lambda dy, c: (dy * 2)[:1], r"gradient of x: expected shape \(2, 3\), got \(1, 3\)"),
    "dy returned": (lambda x: (x + 1, None), lambda dy, c: dy, "gradient of x shares memory with dy"),
    "view of dy returned": (lambda x: (x.T + 1, None), lambda dy, c: dy.T, "gradient of x shares memory with dy"),
    "x returned by forward": (lambda x: (x, None), lambda dy, c: dy.copy(), "y shares memory with x"),
    "view of x returned": (lambda x: (x.reshape(3, 2), None), lambda dy, c: dy.reshape(2, 3).copy(), "y shares"),
}


@pytest.mark.parametrize("op, op_backward, message", CONTRACT.values(), ids=CONTRACT)
def test_contract(device, op, op_backward, message):
    args = [normal(2, 3), normal(3, 3), normal(3)][: 3 if op is linear else 1]
    assert re.search(message, fails(op, op_backward, *args, device=device))


def test_gradient_on_another_device():
    message = fails(doubled, lambda dy, _: 2 * to_cpu(dy), normal(3), device=STRICT)
    assert "gradient of x is a numpy.ndarray, x is a scratchformer.testing.strict.DeviceArray" in message


def test_gradients_that_share_memory(device):
    def add(a, b):
        return a + b, None

    def backward(dy, _):
        d = dy.copy()
        return d, d[:]

    assert "gradient of b shares memory with gradient of a" in fails(add, backward, normal(3), normal(3), device=device)
    check_gradients(add, lambda dy, _: (dy.copy(), dy.copy()), normal(3), normal(3), device=device)


def test_forward_that_writes_to_its_argument(device):
    def op(x):
        x *= 1
        x += 1
        return x * 2, None

    assert "forward writes to x" in fails(op, lambda dy, _: dy * 2, normal(3), device=device)


def test_backward_that_writes_to_dy(device):
    def backward(dy, _):
        dy *= 2
        return dy.copy()

    assert "backward writes to dy" in fails(doubled, backward, normal(3), device=device)


def test_backward_that_writes_to_an_argument_through_the_cache(device):
    def backward(dy, x):
        x *= 2
        return 0.75 * x * x * dy

    assert "backward writes to x" in fails(lambda x: (x**3, x), backward, normal(3), device=device)


def test_backward_that_uses_up_its_cache(device):
    def op(x):
        return x * x, x.copy()

    def backward(dy, x):
        x *= 2
        return x * dy

    assert "gradient when called again with the same cache" in fails(op, backward, normal(3), device=device)


def test_backward_that_keeps_its_first_gradient_in_the_cache(device):
    def backward(dy, cache):
        cache.setdefault("dx", 2 * dy)
        return cache["dx"].copy()

    message = fails(lambda x: (2 * x, {}), backward, normal(3), device=device)
    assert "gradient when called again with the same cache" in message


def test_hidden_randomness():
    rng = np.random.default_rng(0)

    def op(x):
        mask = rng.random(x.shape) < 0.5
        return x * mask, mask

    assert "y: differs between two calls" in fails(op, lambda dy, mask: dy * mask, normal(4, 4))


def sums(dy, x, kept):
    kept["dx"] = kept.get("dx", 0) + 2 * x * dy
    return kept["dx"]


def sums_in_place(dy, x, kept):
    dx = kept.setdefault("dx", np.ones_like(x))
    dx += 2 * x * dy
    return dx


def keeps_the_last(dy, x, kept):
    before, kept["dx"] = kept.get("dx", 0 * x), 2 * x * dy
    return before + kept["dx"]


ADDED = "Something is added up from call to call, and never set to zero."
REMEMBERED = {
    sums: "the second result is twice the first, the third is three times the first. " + ADDED,
    sums_in_place: "each call changes it by the same amount. " + ADDED,
    keeps_the_last: "the first result differs from the next three, which are the same: something is kept",
    lambda dy, x, kept: 2 * x * dy * np.random.rand(4):  # noqa: NPY002
    "NumPy's global generator is used",
    lambda dy, x, kept: 2 * x * dy * np.random.default_rng().random(4): "random numbers must come from a key, and",
}


@pytest.mark.parametrize("backward", REMEMBERED)
def test_what_differs_from_call_to_call_is_told(backward):
    kept: dict = {}
    message = fails(lambda x: (x * x, x), lambda dy, x: backward(dy, x, kept), normal(3, 4))
    assert f"x: differs between two runs with the same arguments: {REMEMBERED[backward]}" in message


def test_a_sum_in_the_cache_is_told():
    message = fails(lambda x: (x * x, {}), lambda dy, kept: sums(dy, 1, kept).copy(), np.ones((3, 4)))
    assert message.splitlines()[0].endswith("when called again with the same cache. " + ADDED)


def test_float64_leaks_into_y(device):
    def op(x):
        return x / array_module(x).sqrt(array_module(x).asarray(64.0)), None

    message = fails(op, lambda dy, _: dy / 8, normal(3), device=device)
    assert "y is float64 where all floating-point inputs are float32" in message


def test_float64_leaks_into_a_gradient(device):
    message = fails(doubled, lambda dy, _: dy * np.float64(2), normal(3), device=device)
    assert "gradient of x is float64" in message


def test_a_backward_that_writes_in_float32(device):
    def backward(dy, x):
        if x.dtype == np.float32:
            dy *= 2
            return x * dy
        return 2 * x * dy

    assert "backward in float32 writes to dy" in fails(lambda x: (x * x, x), backward, normal(3), device=device)


def test_float64_does_not_become_float32(device):
    def op(x):
        return (x * 2).astype(np.float32), None

    assert "y is float32" in fails(op, lambda dy, _: dy * 2.0, normal(3), device=device)


def test_forward_without_a_cache():
    assert "must return the pair (y, cache)" in fails(lambda x: x * 2, lambda dy, _: dy * 2, normal(3))


def test_names_of_the_arguments():
    def total(first, *rest):
        return first + sum(rest), len(rest)

    def backward(dy, n):
        return (dy.copy(), *(dy * (1 + (i == 1)) for i in range(n)))

    assert "rest[1][" in fails(total, backward, normal(2), normal(2), normal(2))


def test_an_error_in_the_operation_is_its_own():
    with pytest.raises(ZeroDivisionError):
        check_gradients(lambda x: 1 / 0, cube_backward, normal(2))


# Holes of the contract that values cannot show.


def test_the_same_bits_twice_on_a_cpu():
    """Noise in the last digits is allowed on request, and on a device that adds in no fixed order."""
    rng = np.random.default_rng(0)

    def noisy(x):
        return array_module(x).asarray(x) * (2 + 1e-15 * rng.uniform(0.5, 1)), None

    def backward(dy, _):
        return noisy(dy)[0]

    message = fails(noisy, lambda dy, _: dy * 2, normal(3, 4))
    assert "y: the last digits differ between two runs on the same numbers, by" in message
    assert "rules={'same_bits': False} switches this rule off" in message
    assert "x: the last digits differ" in fails(doubled, backward, normal(3, 4))
    check_gradients(noisy, backward, normal(3, 4), rules={"same_bits": False})
    check_gradients(noisy, backward, normal(3, 4), device=STRICT)


def test_a_backward_that_depends_on_what_its_forward_drew():
    rng = np.random.default_rng(0)

    def op(x):
        return x * 2, rng.standard_normal()

    assert "x: differs between two runs with the same arguments" in fails(op, lambda dy, n: dy * n, normal(3))


def test_a_gradient_that_is_an_array_of_the_cache(device):
    """Whoever adds to the gradient would change the next one."""

    def op(x):
        return x.sum(axis=0), array_module(x).ones_like(x)

    def backward(dy, ones):
        ones[...] = dy
        return ones

    message = fails(op, backward, normal(4, 3), device=device)
    assert "gradient of x of an earlier call" in message


def test_a_gradient_that_spoils_the_cache():
    def op(x):
        return x * 3.0, np.full(x.shape, 3.0)

    def backward(dy, slope):
        return np.multiply(slope, dy, out=slope) if slope.flags.writeable and np.all(slope == 3) else slope

    assert "gradient of x shares memory with the cache: writing to it changes" in fails(op, backward, normal(3))


def test_results_in_a_buffer_that_every_call_uses():
    buffer = {}

    def kept(x):
        y = buffer.setdefault((x.shape, x.dtype), np.empty_like(x))
        return np.multiply(2, x, out=y)

    assert "y shares memory with y of an earlier call" in fails(lambda x: (kept(x), None), doubled_backward, normal(3))
    buffer.clear()
    message = fails(doubled, lambda dy, _: kept(dy), normal(3))
    assert "x shares memory with gradient of x of an earlier call" in message


def test_a_gradient_that_is_a_broadcast_view():
    message = fails(lambda x: (x.sum(axis=0), x.shape), lambda dy, s: np.broadcast_to(1 * dy, s), normal(4, 3))
    assert "gradient of x is a broadcast view: expected an array of its own" in message


def test_arrays_inside_arguments(device):
    """In tuples, lists, dicts and keyword arguments: of the right type, on the device, and not written to."""
    state = {"scale": [normal(3), (normal(3), 2)]}

    def op(x, state, shift=None):
        return x * state["scale"][0] + shift, state

    def backward(dy, state):
        return dy * state["scale"][0]

    check_gradients(op, backward, normal(4, 3), state, shift=normal(3), device=device)

    def writes(part):
        def op_that_writes(x, state, shift):
            target = part(state, shift)
            target += 1
            return op(x, state, shift)

        return fails(op_that_writes, backward, normal(4, 3), state, shift=normal(3), device=device)

    assert "forward writes to state['scale'][0]" in writes(lambda state, shift: state["scale"][0])
    assert "forward writes to state['scale'][1][0]" in writes(lambda state, shift: state["scale"][1][0])
    assert "forward writes to shift" in writes(lambda state, shift: shift[1:])
    message = fails(lambda x, state: (state["scale"][0], None), lambda dy, _: dy * 0, normal(3), state, device=device)
    assert "y shares memory with state['scale'][0]" in message


class Scales(NamedTuple):
    scale: np.ndarray
    shift: list


def test_arrays_inside_named_tuples_and_other_kinds_of_tuples_lists_and_dicts(device):
    scales = Scales(normal(3), [normal(3)])

    def op(x, scales, state):
        return Scales(x * scales.scale, x + scales.shift[0] * state["w"]), scales

    def backward(dy, scales):
        return dy.scale * scales.scale + dy.shift

    state = collections.defaultdict(list, w=normal(3))
    check_gradients(op, backward, normal(2, 3), scales, state, device=device)

    def writes(part):
        def op_that_writes(x, scales, state):
            target = part(scales, state)
            target += 1
            return op(x, scales, state)

        before = scales.scale.copy()
        message = fails(op_that_writes, backward, normal(2, 3), scales, state, device=device)
        assert np.array_equal(scales.scale, before)
        return message

    assert "forward writes to scales.scale" in writes(lambda scales, _: scales.scale)
    assert "forward writes to scales.shift[0]" in writes(lambda scales, _: scales.shift[0])
    assert "forward writes to state['w']" in writes(lambda _, state: state["w"])


def test_outputs_in_a_list_and_other_structures(device):
    def listed(x):
        return list(split(x)[0]), x

    check_gradients(listed, split_backward, normal(3, 4), device=device)
    message = fails(lambda x: ((x * 2,) * 2, None), lambda dy, _: 2 * (dy[0] + dy[1]), normal(3), device=device)
    assert "y[1] shares memory with y[0]" in message
    assert "y is on cpu, the arguments are on" in fails(lambda x: (to_cpu(x), None), None, normal(3), device=STRICT)


def test_one_gradient_of_several_is_float64(device):
    def backward(dy, cache):
        dx, dw, db = linear_backward(dy, cache)
        return dx, dw * np.float64(1), db

    args = normal(2, 3).astype(np.float32), normal(3, 2), normal(2).astype(np.float32)  # of two types
    assert "gradient of w is float64 where all" in fails(linear, backward, *args, device=device)
    check_gradients(linear, linear_backward, *args, device=device)


def test_a_backward_that_uses_the_latest_forward():
    latest = {}

    def square(x):
        latest["x"] = x
        return x**2, x

    with pytest.raises(GradientError, match="gradient of x: changes after a second forward") as caught:
        check_gradients(square, lambda dy, _: 2 * dy * latest["x"], np.array([[1.0, -2.0, 3.0]]))
    assert [found.name for found in caught.value.diagnoses] == ["stale after a second forward"]


@pytest.mark.parametrize("large", [1e3, 1e6, 1e8, 1e9])
def test_a_huge_number_among_ordinary_ones(large):
    """As in a mask that is added. Steps in proportion to it would leave the others where nothing changes any more."""

    def masked(x, mask):
        return ops.softmax(x + mask)

    def masked_backward(dy, cache, factor=1.0):
        d = factor * ops.softmax_backward(dy, cache)
        return d, d.copy()

    x = np.random.default_rng(0).normal(size=(4, 4))
    arrays = x, np.where(np.tri(4), 0, -large)
    check_gradients(masked, masked_backward, *arrays)
    with pytest.raises(GradientError, match=r"wrong gradient at (x|mask)"):
        check_gradients(masked, partial(masked_backward, factor=1.01), *arrays)
    check_gradients(ops.tanh, ops.tanh_backward, np.array([[0.0, 1.0, large]]))


@pytest.mark.parametrize("large", [1e13, 1e20, 1e30])
@pytest.mark.parametrize("factor", [1.0, 1.01, 0.0])
def test_a_number_so_large_that_any_gradient_would_pass_is_refused(large, factor):
    def total(x, w):
        return x + w.sum(), x.shape

    def total_backward(dy, shape):
        return factor * dy, np.full(2, dy.sum())

    arrays = np.random.default_rng(0).normal(size=3), np.array([large, -large])
    with pytest.raises(ValueError, match="x: expected arguments less different in size"):
        check_gradients(total, total_backward, *arrays)


def test_what_is_not_floating_point_in_y_is_left_out_of_dy():
    x = normal(3)
    check_gradients(lambda x: ((2 * x, x > 0), None), lambda dy, _: 2 * dy, x)
    check_gradients(lambda x: (Scales(2 * x, x > 0), None), lambda dy, _: 2 * dy.scale, x)
    check_gradients(lambda x: ((2 * x, None, 3 * x), None), lambda dy, _: 2 * dy[0] + 3 * dy[1], x)
    check_gradients(lambda x: ({"y": 2 * x, "n": 3}, None), lambda dy, _: 2 * dy["y"], x)
    check_gradients(lambda x: ((x * 1, [x * 2, x * 3]), None), lambda dy, _: dy[0] + 2 * dy[1][0] + 3 * dy[1][1], x)


@pytest.mark.parametrize(
    ("y", "got"),
    [(None, "None"), ((), r"\(\)"), (np.arange(3), "an array of int64"), ({}, "{}"), (["a"], "a list without one")],
)
def test_a_result_without_floating_point_numbers(y, got):
    with pytest.raises(ValueError, match=f"y: expected a floating-point array or number, got {got}"):
        check_gradients(lambda x: (y, x), lambda dy, x: dy, np.ones(3))


def test_gradients_in_another_order():
    a, b = normal(3, 4), normal(4, 2)
    message = fails(lambda a, b: (a @ b, (a, b)), lambda dy, c: (c[0].T @ dy, dy @ c[1].T), a, b)
    assert "got (4, 2). That is the shape of b: are the gradients in the order of the arguments?" in message
    message = fails(lambda p: (p["a"] @ p["b"], p), lambda dy, p: dy @ p["b"].T, {"a": a, "b": b})
    assert "gradient of p: expected p['a'], p['b'], got an array (3, 4)" in message


def test_round_off_that_is_zero_at_most_points_is_no_gradient():
    """Where y does not change, a right gradient may be a difference of numbers that differ in the last digit."""

    def saturated(x):
        return np.tanh(1e3 * x), x

    for seed in range(60):
        x = np.random.default_rng(seed).uniform(1, 2, (1,))
        check_gradients(saturated, lambda dy, x: dy * ((x / 1.1) * 1.1 - x) * 1e4, x, seed=seed)
    with pytest.raises(GradientError, match="wrong gradient at x"):
        check_gradients(saturated, lambda dy, x: dy * 1e-9 * x, x)

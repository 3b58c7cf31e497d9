"""Kinks, ties, thresholds and jumps: one of them at an element must not hide a wrong gradient, there or elsewhere.

Each function is checked where one element is exactly at a kink, and where all are. Its right gradient passes, or all
elements are at kinks and the check says so; every wrong one is an error.
"""

from functools import partial

import numpy as np
import pytest

from scratchformer import nn
from scratchformer.testing import GradientError, check_gradients, check_layer
from scratchformer.testing.contracts import as_tuple
from scratchformer.testing.diagnosis import without_diagnosis


@pytest.fixture(autouse=True)
def quick():
    with without_diagnosis():
        yield


def each(f, slope, *kinks):
    """A function of single elements, its slope (a subgradient at kinks), and where its kinks are."""

    def op(x):
        return f(x).astype(x.dtype), x

    def backward(dy, x):
        return (dy * slope(x)).astype(x.dtype)

    smooth = [0.31, -1.7, 2.43, 0.113]
    return op, backward, [(np.array([kinks[0], *smooth]),), (np.array([*kinks, *kinks, *smooth]),), (np.array(kinks),)]


def steps_times(q, *places):
    """q(x) w, where q is level between its jumps."""

    def op(x, w):
        return (q(x) * w).astype(x.dtype), (q(x), x)

    def backward(dy, cache):
        return np.zeros_like(cache[1]), (dy * cache[0]).astype(dy.dtype)

    w = np.array([0.7, -1.2, 0.4, 2.0])
    return op, backward, [(np.array([places[0], 0.31, -0.77, 2.2]), w), (np.resize(places, 4), w)]


def chosen(choose):
    """Elements of each row that are chosen by their size, (N, C) -> (N, K)."""

    def op(x):
        at = choose(x)
        return np.take_along_axis(x, at, -1), (at, x)

    def backward(dy, cache):
        at, x = cache
        dx = np.zeros(x.shape, dy.dtype)
        np.put_along_axis(dx, at, dy, -1)
        return dx

    one = np.array([[1.0, 3.0, 3.0], [0.2, 0.5, -0.7], [0.3, -1.0, 0.1]])
    every = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, -7.0], [5.0, 5.0, 5.0]])
    return op, backward, [(one,), (every,)]


def shared_max():
    def op(x):
        return x.max(axis=-1), x

    def backward(dy, x):
        top = x == x.max(axis=-1, keepdims=True)
        return (top / top.sum(axis=-1, keepdims=True) * dy[:, None]).astype(x.dtype)

    return op, backward, chosen(None)[2]


def relu_of_sum():
    def op(x, b):
        return np.maximum(x + b, 0), x + b > 0

    def backward(dy, positive):
        return dy * positive, (dy * positive).sum(axis=0)

    b = np.array([-1.0, 1.0, 2.0])
    one, whole = np.array([[1.0, 0.2, -0.3], [0.3, -1.1, 4.0]]), np.array([[1.0, 2.0, -3.0], [0.0, -1.0, 4.0]])
    return op, backward, [(one, b), (whole, b)]


def smaller_of_two():
    def op(a, b):
        return np.minimum(a, b), a <= b

    def backward(dy, first):
        return dy * first, dy * ~first

    a = np.array([1.0, 2.0, 0.3])
    return op, backward, [(a, np.array([1.0, 2.5, -0.3])), (a, a.copy())]


def pooled_embedding():
    """The maximum over tokens, of which some repeat and some have equal embeddings."""

    def op(ids, table):
        return table[ids].max(axis=0), (ids, table)

    def backward(dy, cache):
        ids, table = cache
        dtable = np.zeros_like(table)
        np.add.at(dtable, (ids[table[ids].argmax(axis=0)], np.arange(table.shape[1])), dy)
        return dtable

    return op, backward, [(np.array([0, 1, 1, 2]), np.array([[0.0, 0.3], [0.5, -0.2], [0.5, -2.0]]))]


def overlap():
    """Intersection over union of intervals."""

    def op(a, b):
        low, high = np.maximum(a[:, 0], b[:, 0]), np.minimum(a[:, 1], b[:, 1])
        inside = np.maximum(high - low, 0)
        union = a[:, 1] - a[:, 0] + b[:, 1] - b[:, 0] - inside
        union = np.where(union > 0, union, 1)  # a layer is also run on shuffled numbers
        return inside / union, (a, b, inside, union)

    def backward(dy, cache):
        a, b, inside, union = cache
        d_inside, d_union = dy * (1 / union + inside / union**2) * (inside > 0), -dy * inside / union**2
        low, high = a[:, 0] >= b[:, 0], a[:, 1] <= b[:, 1]
        da = np.stack([-d_inside * low - d_union, d_inside * high + d_union], axis=1)
        db = np.stack([-d_inside * ~low - d_union, d_inside * ~high + d_union], axis=1)
        return da, db

    a = np.array([[0.0, 2.0], [1.0, 3.0]])
    return op, backward, [(a, np.array([[0.0, 1.0], [2.0, 5.0]])), (a, a.copy())]


def sum_of_relus():
    def op(x):
        return np.maximum(x, 0).sum(), x

    return op, lambda dy, x: dy * (x > 0), [(np.array([0.0, 0.0, 1.0, -1.0, 2.0]),)]


CASES = {
    "relu": each(lambda x: np.maximum(x, 0), lambda x: x > 0, 0.0),
    "relu of x - 1": each(lambda x: np.maximum(x - 1, 0), lambda x: x > 1, 1.0),
    "relu of x - 0.3, a rounding beside": each(lambda x: np.maximum(x - 0.3, 0), lambda x: x > 0.3, 0.1 + 0.2),
    "leaky relu": each(lambda x: np.where(x > 1, x - 1, 0.1 * (x - 1)), lambda x: np.where(x > 1, 1, 0.1), 1.0),
    "relu6": each(lambda x: np.clip(x, 0, 6), lambda x: (x > 0) & (x < 6), 0.0, 6.0),
    "clip": each(lambda x: np.clip(x, -1, 2), lambda x: (x >= -1) & (x <= 2), -1.0, 2.0),
    "hard sigmoid": each(lambda x: np.clip(x / 6 + 0.5, 0, 1), lambda x: (np.abs(x) < 3) / 6, 3.0, -3.0),
    "hard tanh": each(lambda x: np.clip(x, -1, 1), lambda x: np.abs(x) < 1, 1.0, -1.0),
    "huber": each(lambda x: np.where(abs(x) <= 1, x * x / 2, abs(x) - 0.5), lambda x: np.clip(x, -1, 1), 1.0, -1.0),
    "abs": each(np.abs, np.sign, 0.0),
    "abs of x - 1": each(lambda x: np.abs(x - 1), lambda x: np.sign(x - 1), 1.0),
    "hinge": each(lambda x: np.maximum(0, 1 - x), lambda x: -1.0 * (x < 1), 1.0),
    "soft threshold": each(lambda x: np.sign(x) * np.maximum(abs(x) - 0.5, 0), lambda x: abs(x) > 0.5, 0.5, -0.5),
    "square": each(np.square, lambda x: 2 * x, 1.0, 2.0),
    "floor(x) + x²": each(lambda x: np.floor(x) + x**2, lambda x: 2 * x, 1.0, 2.0),
    "x modulo 1": each(lambda x: np.mod(x, 1), np.ones_like, 1.0, 2.0),
    "a jump at a threshold": each(lambda x: np.where(x >= 1, x * x, -x), lambda x: np.where(x >= 1, 2 * x, -1), 1.0),
    "floor(x) w": steps_times(np.floor, 1.0, 2.0),
    "round(x) w": steps_times(np.round, 0.5, 2.5),
    "sign(x - 1) w": steps_times(lambda x: np.sign(x - 1), 1.0),
    "(x >= 1) w": steps_times(lambda x: x >= 1, 1.0),
    "(x // 0.5) w": steps_times(lambda x: x // 0.5, 1.0, 0.5),
    "maximum": chosen(lambda x: x.argmax(-1)[:, None]),
    "maximum, shared": shared_max(),
    "minimum": chosen(lambda x: x.argmin(-1)[:, None]),
    "median": chosen(lambda x: np.argsort(x, -1, kind="stable")[:, 1:2]),
    "sort": chosen(lambda x: np.argsort(x, -1, kind="stable")),
    "top 2": chosen(lambda x: np.argsort(-x, -1, kind="stable")[:, :2]),
    "relu of x + b": relu_of_sum(),
    "minimum of two": smaller_of_two(),
    "maximum of embeddings": pooled_embedding(),
    "intersection over union": overlap(),
    "sum of relus": sum_of_relus(),
}


def times(backward, factor, only=None):
    """A backward that is wrong by a factor, in all gradients or in one of them."""

    def wrong(dy, cache):
        found = backward(dy, cache)
        if not isinstance(found, tuple):
            return factor * found
        return tuple(factor * g if only in (None, i) else g for i, g in enumerate(found))

    return wrong


def layer_of(op, backward):
    class Layer(nn.Layer):
        def forward(self, *args):
            return op(*args)

        def backward(self, dy, cache):
            return backward(dy, cache)

    return Layer()


@pytest.mark.parametrize("name", CASES)
@np.errstate(all="ignore")  # a layer is also run on other numbers
def test_right_gradients(name):
    op, backward, places = CASES[name]
    for check in (check_gradients, lambda op, backward, *args: check_layer(layer_of(op, backward), *args)):
        for place, args in enumerate(places):
            try:
                check(op, backward, *args)
            except ValueError as error:
                assert place == len(places) - 1 and "got a kink at every element that was compared" in str(error)


@pytest.mark.parametrize("name", CASES)
def test_wrong_gradients(name):
    op, backward, places = CASES[name]
    for place, args in enumerate(places):
        for factor, only in [(3, None), (-1, None), (1.01, None), (100, None), (0, None), (2, 0), (2, 1)]:
            wrong = times(backward, factor, only)
            y, cache = op(*args)
            both = (as_tuple(b(np.ones_like(y), cache)) for b in (wrong, backward))
            if all(map(np.array_equal, *both)):
                continue  # there is no second gradient, or it is 0
            with pytest.raises((GradientError, ValueError)):
                check_gradients(op, wrong, *args, seed=place)
            if factor in (3, 2):
                with pytest.raises((GradientError, ValueError)):
                    check_layer(layer_of(op, wrong), *args, seed=place)


# What each of the equal elements gets must add up to the whole.


def ties(y, *shares):
    """The maximum of each row, where the equal elements of row i get `shares[i]` of dy."""

    def backward(dy, x):
        dx = np.zeros_like(x)
        for row, share in enumerate(shares[: len(x)]):
            dx[row, x[row] == x[row].max()] = dy[row] * np.array(share, x.dtype)
        return dx

    return lambda x: (x.max(axis=-1), x), backward, y


@pytest.mark.parametrize("seed", range(10))
def test_the_shares_of_equal_elements(seed):
    x = np.array([[3.0, 3.0, 1.0, 3.0], [0.5, -1.0, 0.5, 0.2], [0.1, 0.7, -2.0, 0.3]])
    right = [(1, 0, 0), (1 / 3, 1 / 3, 1 / 3), (0, 0.5, 0.5)], [(0, 1), (0.5, 0.5), (1, 0)]
    for first, second in zip(*right, strict=True):
        op, backward, x = ties(x, first, second, 1)
        check_gradients(op, backward, x, seed=seed)
    for wrong in ((1, 1, 1), (0, 0, 0), (0.5, 0.5, 0.5), (1, 1, 0)):
        op, backward, x = ties(x, wrong, (0, 1), 1)
        with pytest.raises(GradientError, match="moved together with all elements equal to it"):
            check_gradients(op, backward, x, seed=seed)
    for wrong in ((1, 1), (0, 0), (1, 0.01)):
        op, backward, x = ties(x, (0, 1, 0), wrong, 1)
        with pytest.raises(GradientError, match="moved together with all elements equal to it"):
            check_gradients(op, backward, x, seed=seed)


def test_a_median_of_three_equal_elements_may_go_to_any_but_must_go_somewhere():
    """One of them alone does not move it; three together do."""
    x = np.array([[5.0, 5.0, 5.0], [0.1, -0.3, 2.0]])

    def backward(dy, x, shares):
        dx = np.zeros_like(x)
        dx[:1], dx[1:, 0] = dy[:1, None] * np.array(shares, x.dtype), dy[1:]
        return dx

    def median(x):
        return np.sort(x, axis=-1)[:, 1].copy(), x

    check_gradients(median, partial(backward, shares=[0, 1, 0]), x)
    for wrong in ([0, 0, 0], [1, 1, 1]):
        with pytest.raises(GradientError):
            check_gradients(median, partial(backward, shares=wrong), x)


@pytest.mark.parametrize("seed", range(5))
def test_several_groups_of_equal_elements_may_each_have_any_order(seed):
    x, w = np.array([-2.0, -1, 2, 2, 1, -3, 1]), np.random.default_rng(seed).normal(size=7)

    def sorted_times(x, w):
        order = np.argsort(x, kind="stable")
        return (x[order] * w).sum(), (order, x, w)

    def backward(dy, cache):
        order, x, w = cache
        dx = np.empty_like(x)
        dx[order] = w * dy
        return dx, x[order] * dy

    check_gradients(sorted_times, backward, x, w, seed=seed)
    with pytest.raises(GradientError, match="wrong gradient"):
        check_gradients(sorted_times, lambda dy, c: times(backward, -1)(dy, c), x, w, seed=seed)


@pytest.mark.parametrize("keys", [[1.0, 1, 0, 2, 3], [1.0, 1, 0, 2, 2]])
def test_what_equal_keys_put_in_order_has_one_gradient(keys):
    keys, values = np.array(keys), np.array([0.3, -1.2, 0.7, 2.1, -0.4])
    places = np.arange(1, 6)

    def ordered(keys, values):
        order = np.argsort(keys, kind="stable")
        return (values[order] * places.astype(values.dtype)).sum(), order

    def backward(dy, order, factor=1):
        dvalues = np.empty(5, dy.dtype)
        dvalues[order] = places * dy
        dvalues[0] *= factor
        return np.zeros(5, dy.dtype), dvalues

    check_gradients(ordered, backward, keys, values)
    with pytest.raises(GradientError, match="wrong gradient"):
        check_gradients(ordered, partial(backward, factor=2), keys, values)


def test_equal_elements_of_opposite_sign():
    """The largest absolute value of each row."""

    def op(x):
        return np.abs(x).max(axis=-1), x

    def backward(dy, x, share):
        top = np.abs(x) == np.abs(x).max(axis=-1, keepdims=True)
        return (dy[:, None] * np.sign(x) * top * share).astype(x.dtype)

    x = np.array([[2.0, -2.0], [-0.5, 0.5]])
    check_gradients(op, partial(backward, share=0.5), x)
    with pytest.raises(GradientError, match="moved together with all elements equal to it"):
        check_gradients(op, partial(backward, share=1), x)


def test_a_jump_is_named():
    report = check_gradients(lambda x: (np.floor(x), x), lambda dy, x: 0 * dy, np.array([1.0, 1.5]))
    assert len(report.kinks) == 1
    assert report.kinks[0].startswith("x[0]: a jump at this value: the derivatives on its two sides are 0 and 0")
    with pytest.raises(GradientError, match=r"wrong gradient at x\[[01]\]"):
        check_gradients(lambda x: (np.floor(x), x), lambda dy, x: dy * 1, np.array([1.0, 1.5]))


# Small outputs beside large ones.


def exp(x):
    return np.exp(x), np.exp(x)


@pytest.mark.parametrize("wrong", [(1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 1.01, 1), (1, 0, 1), (1, 1, 0)])
@pytest.mark.parametrize("large", [30.0, 80.0])
def test_small_outputs_beside_large_ones(large, wrong):
    x = np.array([large, 0.0, -1.0])
    check_gradients(exp, lambda dy, y: dy * y, x)
    with pytest.raises(GradientError, match=r"wrong gradient at x\[[12]\]"):
        check_gradients(exp, lambda dy, y: dy * y * np.array(wrong, y.dtype), x)


def test_a_derivative_that_round_off_hides_is_an_error():
    """exp(30) + exp(0): nothing is known of the second derivative."""
    for last in (1, 2):
        factors = np.array([1.0, last])
        with pytest.raises(
            ValueError,
            match=r"x\[1\]: expected values at which its derivative can be compared, got round-off that hides",
        ):
            check_gradients(
                lambda x: (np.exp(x).sum(), np.exp(x)),
                lambda dy, e, factors=factors: (dy * e * factors).astype(e.dtype),
                np.array([30.0, 0.0]),
            )


def test_agreement_within_the_round_off_of_much_larger_terms_is_an_error():
    """x³ at 10⁸ and at 1: 6 in place of 3 lies within the round-off of 3 · 10¹⁶, the gradient of the first element."""
    with pytest.raises((GradientError, ValueError)):
        check_gradients(
            lambda x: (x**3, x), lambda dy, x: 3 * dy * x**2 * np.array([1, 2, 1], x.dtype), np.array([1e8, 1.0, 2.0])
        )


def test_a_gradient_by_outputs_that_did_not_move_is_not_taken_for_round_off():
    """dx of the second element has a term of the first output, which does not depend on it."""

    def backward(dy, y):
        dx = dy * y
        dx[1] += dy[0]
        return dx

    with pytest.raises((GradientError, ValueError)):
        check_gradients(exp, backward, np.array([30.0, 0.0, -1.0]))


# No false alarm where y changes over less than the usual steps.


def inverse(x):
    y = np.linalg.inv(x)
    return y, y


def inverse_backward(dy, y):
    return -y.T @ dy @ y.T


def normalised(x):
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True))
    return centred / spread, (centred / spread, spread)


def normalised_backward(dy, cache):
    y, spread = cache
    return (dy - dy.mean(axis=-1, keepdims=True) - y * (dy * y).mean(axis=-1, keepdims=True)) / spread


NARROW = {
    "a pole": (lambda x: (1 / (x - 1), x), lambda dy, x: -dy / (x - 1) ** 2, np.array([1 + 1e-7, 2.0])),
    "a nearer pole": (lambda x: (1 / (x - 1), x), lambda dy, x: -dy / (x - 1) ** 2, np.array([1 + 1e-9, 2.0])),
    "the edge of a domain": (lambda x: (np.log(x - 2), x), lambda dy, x: dy / (x - 2), np.array([2 + 1e-9, 3.0])),
    "arcsin": (lambda x: (np.arcsin(x), x), lambda dy, x: dy / np.sqrt(1 - x * x), np.array([1 - 1e-10, 0.3])),
    "inverse": (inverse, inverse_backward, np.array([[1.0, 1.0], [1.0, 1 + 1e-8]])),
    "normalised": (normalised, normalised_backward, 1 + 1e-8 * np.random.default_rng(0).normal(size=(3, 4))),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NARROW)
@np.errstate(all="ignore")
def test_where_y_changes_over_less_than_the_usual_steps(name, seed):
    op, backward, x = NARROW[name]
    check_gradients(op, backward, x, seed=seed)
    with pytest.raises(GradientError, match="wrong gradient at"):
        check_gradients(op, times(backward, 1.01), x, seed=seed)


@pytest.mark.parametrize("digits", [1, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_a_staircase(digits, seed):
    """From afar it looks like y = x."""
    x = np.random.default_rng(seed).normal(size=(3, 4))
    check_gradients(lambda x: (np.round(x, digits), x), lambda dy, x: 0 * dy, x, seed=seed)

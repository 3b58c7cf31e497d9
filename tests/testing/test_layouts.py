"""Memory layouts, batches without rows, and linearity in dy: right code passes, each planted fault is named."""

from functools import partial

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.backend import array_module
from scratchformer.dispatch import reference_only
from scratchformer.testing import GradientError, check_layer
from scratchformer.testing import check_gradients as check_pair
from scratchformer.testing.contracts import shares_memory
from scratchformer.testing.layouts import LAYOUTS

from .reports import complaint

check_gradients = partial(check_pair, rules=True)
fails = partial(complaint, check_gradients)
X = np.random.default_rng(0).standard_normal((4, 3))
W = np.random.default_rng(1).standard_normal((3, 2))


def linear(x, w):
    return x @ w, (x, w)


def linear_backward(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy


def doubled(x):
    return 2 * x, None


def doubled_backward(dy, _):
    return 2 * dy


class Doubled(nn.Layer):
    def forward(self, x):
        return doubled(x)

    def backward(self, dy, cache):
        return doubled_backward(dy, cache)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_a_layout_changes_no_number(name, shape, device):
    x = device.xp.asarray(np.random.default_rng(0).standard_normal(shape))
    twin = LAYOUTS[name](x)
    assert twin.shape == x.shape and twin.dtype == x.dtype and bool((twin == x).all())
    assert not shares_memory(twin, x)


def test_layouts_are_what_they_are_called():
    x = {name: layout(X) for name, layout in LAYOUTS.items()}
    assert x["in Fortran order"].flags.f_contiguous and not x["in Fortran order"].flags.c_contiguous
    assert x["with negative strides"].strides == (-24, -8)
    assert x["as every second element of a larger array"].strides == (96, 16)
    assert not x["read-only"].flags.writeable


# What each fault does with x, and the words in the message. Each is right for an array in C order.
OF_ARGUMENTS = {
    "order of memory": (lambda x: 2 * x.ravel(order="K").reshape(x.shape), "with x in Fortran order, y["),
    "sign of strides": (lambda x: x * (1 + int(np.sign(x.strides[0]))), "with x with negative strides, y["),
    "size of strides": (
        lambda x: x * (2 if abs(x.strides[-1]) == x.itemsize or x.flags.forc else 3),
        "with x as every second element of a larger array, y[",
    ),
    "written to and restored": (lambda x: 2 * np.negative(np.negative(x, out=x), out=x), "with x read-only, it raises"),
}


@pytest.mark.parametrize("fault, message", OF_ARGUMENTS.values(), ids=OF_ARGUMENTS)
def test_faults_in_the_layout_of_an_argument(fault, message):
    assert message in fails(lambda x: (fault(x), None), doubled_backward, X)
    check_gradients(lambda x: (fault(x), None), doubled_backward, X, rules={"layouts": False, "empty": False})

    class Faulty(Doubled):
        def forward(self, x):
            return fault(x), None

    with pytest.raises(GradientError) as caught:
        check_layer(Faulty(), X)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fault, message",
    [
        (lambda dy: 2 * dy.ravel(order="K").reshape(dy.shape), "with dy in Fortran order, gradient of x["),
        (lambda dy: 2 * np.negative(np.negative(dy, out=dy), out=dy), "with dy broadcast from one number, it raises"),
        (lambda dy: dy * (2 if dy.strides[-1] else 3), "with dy broadcast from one number, gradient of x["),
    ],
)
def test_faults_in_the_layout_of_dy(fault, message):
    assert message in fails(doubled, lambda dy, _: fault(dy), X)

    class Faulty(Doubled):
        def backward(self, dy, _):
            return fault(dy)

    with pytest.raises(GradientError) as caught:
        check_layer(Faulty(), X)
    assert message in str(caught.value)


def test_a_write_in_one_memory_order_is_named():
    def backward(dy, _):
        twice = np.asfortranarray(dy)  # dy itself, if it is in Fortran order
        twice *= 2
        return twice.copy()

    assert "with dy in Fortran order, it writes to dy\n" in fails(doubled, backward, X)

    def forward(x):
        return 2 * np.negative(np.negative(x, out=x), out=x), None

    message = fails(forward, doubled_backward, X)
    assert "it raises ValueError: output array is read-only\n" in message

    class Faulty(Doubled):
        def backward(self, dy, cache):
            return backward(dy, cache)

    with pytest.raises(GradientError, match="with dy in Fortran order, it writes to dy"):
        check_layer(Faulty(), X)


# Batches without rows.


EMPTY = {
    "a mean of no rows": (
        linear,
        lambda dy, c: (dy @ c[1].T, 4 * (c[0][:, :, None] * dy[:, None]).mean(axis=0) * (len(dy) / 4)),
        "with x of length 0, gradient of w[0, 0] is nan, not 0",
    ),
    "one over the rows": (
        lambda x: (2 * x, 1 / len(x)),
        doubled_backward,
        "with x of length 0, it raises ZeroDivisionError: division by zero",
    ),
    "a row that is always there": (
        doubled,
        lambda dy, _: 2 * (dy if len(dy) else np.zeros((1, 3))),
        "with x of length 0, gradient of x: expected shape (0, 3), got (1, 3)",
    ),
    "a backward that refuses what its forward accepts": (
        doubled,
        lambda dy, _: 2 * dy.reshape(len(dy), -1),
        "with x of length 0, it raises ValueError: cannot reshape array",
    ),
    "a y with a row": (
        lambda x: (2 * x if len(x) else np.zeros((1, 3)), None),
        doubled_backward,
        "with x of length 0, y has the shape (1, 3), not (0, 3)",
    ),
    "a gradient of nothing": (
        lambda x, b: (x + b, None),
        lambda dy, _: (dy * 1, dy.sum(axis=0) if len(dy) else np.ones(3)),
        "with x of length 0, gradient of b[0] is 1, not 0",
    ),
    "another type": (
        doubled,
        lambda dy, _: 2 * dy if len(dy) else np.zeros(dy.shape, np.float32),
        "with x of length 0, gradient of x is float32",
    ),
}


@pytest.mark.parametrize("op, op_backward, message", EMPTY.values(), ids=EMPTY)
def test_faults_in_a_batch_without_rows(op, op_backward, message):
    args = {linear: (X, W)}.get(op, (X, np.ones(3))[: op.__code__.co_argcount])
    assert message in fails(op, op_backward, *args)
    check_gradients(op, op_backward, *args, rules={"layouts": False, "empty": False})


def test_a_batch_without_rows_may_be_refused_or_have_no_mean():
    def refusing(x):
        if not len(x):
            raise ValueError("x: expected at least one row")
        return doubled(x)

    check_gradients(refusing, doubled_backward, X)
    check_gradients(lambda x: ((x * x).mean(), x), lambda dy, x: 2 * dy * x / x.size, X)


def test_all_arrays_of_a_batch_become_empty_together():
    seen = []

    def gather(x, rows, w):
        seen.append((len(x), len(rows), len(w)))
        if len(x) != len(rows):
            raise ValueError("x and rows: expected one length")
        return x[np.arange(len(rows)), rows] @ w, (x.shape, x[np.arange(len(rows)), rows], rows, w)

    def gather_backward(dy, cache):
        shape, picked, rows, w = cache
        dx = np.zeros(shape, dy.dtype)
        dx[np.arange(len(rows)), rows] = dy @ w.T
        return dx, picked.T @ dy

    check_gradients(gather, gather_backward, np.ones((3, 2, 4)) * X.T[:, None], np.array([0, 1, 1]), X)
    assert (0, 0, 4) in seen


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_few_rows(rows, smoothing):
    """Its mean over no rows is 0 or refused, never NaN."""
    for twin in (True, False):
        try:
            if twin:
                loss, _ = ops.cross_entropy(X[:rows], np.zeros(rows, int), label_smoothing=smoothing)
            else:
                with reference_only():
                    loss, _ = ops.cross_entropy(X[:rows], np.zeros(rows, int), label_smoothing=smoothing)
        except ValueError:
            assert rows == 0
        else:
            assert np.isfinite(loss)


# Linearity in dy.


def test_a_clipped_dy():
    """Clipping at 50 leaves the values right for a normal dy."""

    def backward(dy, cache):
        return linear_backward(dy.clip(-50, 50), cache)

    assert "backward is not linear in dy: for −1024 dy, gradient of x[" in fails(linear, backward, X, W)

    class Clipped(nn.Linear):
        def backward(self, dy, cache):
            return super().backward(dy.clip(-50, 50), cache)

    with pytest.raises(GradientError, match="backward is not linear in dy"):
        check_layer(Clipped(3, 2), X)


@pytest.mark.parametrize(
    "dx, cause",
    [
        (lambda dy: 2 * dy**2, "gradient of x: backward(2 dy) = 4 backward(dy), as if dy were squared"),
        (lambda dy: 2 * dy + 0.25, "is 0.25, not 0: something that does not depend on dy is added"),
        (lambda dy: 2 * np.ones_like(dy), "backward(0) = backward(dy) = backward(−1024 dy): it does not depend on dy"),
        (lambda dy: 2 * np.sign(dy), "backward(2 dy) = backward(dy), so the size of dy is not used"),
        (lambda dy: 2 * np.abs(dy), "backward(−dy) = backward(dy), so the sign of dy is not used"),
    ],
)
def test_the_cause_is_named_with_a_wrong_value(dx, cause):
    message = fails(doubled, lambda dy, _: dx(dy), X)
    assert "wrong gradient at x[" in message and cause in message
    assert cause not in fails(doubled, lambda dy, _: 3 * dy, X)


def test_a_right_backward_is_linear_at_any_scale(device):
    """With round-off that is large beside the gradient."""

    def softmax(z):
        e = array_module(z).exp(z - z.max(axis=-1, keepdims=True))
        y = e / e.sum(axis=-1, keepdims=True)
        return y, y

    def softmax_backward(dy, y):
        return y * (dy - (y * dy).sum(axis=-1, keepdims=True))

    for seed, scale in enumerate([1e-3, 1, 1e2, 1e2, 1e2, 1e2]):
        check_gradients(softmax, softmax_backward, scale * X, device=device, seed=seed, max_elements=1, directions=0)


@pytest.mark.parametrize("scale", [1e-308, 1e-311, 1e-314, 1e-317])
def test_gradients_that_underflow_agree_with_each_other(scale):
    """Numbers this small have few digits, so that −1024 dy may give a few digits more than dy."""
    a, b = 1e-155, scale / 1e-155
    check_gradients(lambda x: (a * x * b, None), lambda dy, _: dy * (b / 7) * a * 7, X)

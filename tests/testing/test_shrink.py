"""Counterexamples: the smallest arguments that still fail, for the same reason, as a test that can be pasted."""

import numpy as np
import pytest

from scratchformer import CPU, Key, nn, ops
from scratchformer.testing import GradientError, check_gradients, check_layer
from scratchformer.testing.paste import as_test
from scratchformer.testing.shrink import Search, shrink, shrink_call

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape)


def leaky(x):
    return np.where(x > 0, x, 0.01 * x), x


def wrong_if_negative(dy, x):
    return dy.copy()


def total(x):
    return x.cumsum(0), x


def wrong_if_longer_than_two(dy, x):
    dx = dy[::-1].cumsum(0)[::-1].copy()
    if len(x) > 2:
        dx[0] *= 2
    return dx


def wrong_if_ids_repeat(dy, cache):
    ids, shape = cache
    dtable = np.zeros(shape, dy.dtype)
    dtable[ids] = dy
    return dtable


def embedding(ids, table):
    return table[ids], (ids, table.shape)


def wrong_unless_gamma_is_uniform(dy, cache):
    dx, dgamma, dbeta = ops.layernorm_backward(dy, cache)
    return dx * (1 + np.ptp(dgamma.dtype.type(1) * cache.gamma)), dgamma, dbeta


def linear(x, w, b):
    return x @ w + b, (x, w)


def mean_for_sum(dy, cache):
    x, w = cache
    return dy @ w.T, np.einsum("btc,btf->cf", x, dy), dy.mean((0, 1))


def square(x):
    return x * x, x


def wrong_between_two_and_three(dy, x):
    return 2 * x * dy * np.where((x > 2) & (x < 3), 2, 1).astype(x.dtype)


CASES = {
    "negative values": (leaky, wrong_if_negative, [normal(3, 4, 5)], [[[[-1.0]]]]),
    "more than two steps": (total, wrong_if_longer_than_two, [normal(5, 4)], [[[0.0], [0.0], [0.0]]]),
    "repeated ids": (
        embedding,
        wrong_if_ids_repeat,
        [np.array([[4, 1, 3], [2, 4, 0]]), normal(5, 3)],
        [[[0, 0]], [[0.0]]],
    ),
    "gamma that is not uniform": (
        ops.layernorm,
        wrong_unless_gamma_is_uniform,
        [normal(2, 3, 4), normal(4), normal(4)],
        [[[[0.0, 0.0]]], [0.0, 1.0], [0.0, 0.0]],
    ),
    "axes of one size": (linear, mean_for_sum, [normal(3, 3, 3), normal(3, 3), normal(3)], None),
    "a large array": (linear, mean_for_sum, [normal(2, 12, 12), normal(12, 20), normal(20)], None),
    "few decimals": (square, wrong_between_two_and_three, [np.linspace(-4, 4, 28).reshape(4, 7)], [[[2.2]]]),
}


@pytest.mark.parametrize("op, op_backward, args, smallest", CASES.values(), ids=CASES)
def test_smallest_counterexample(op, op_backward, args, smallest):
    """The printed test is executed, and fails with the same numbers."""
    search = Search(check_gradients, (op, op_backward, *args), seconds=60)
    assert search.finished and search.args[:2] == [op, op_backward]
    found = [x.tolist() for x in search.args[2:]]
    if smallest is None:  # two rows, in either order of the axes
        assert search.args[2].size == 2 and found[1:] == [[[0.0]], [0.0]]
    else:
        assert found == smallest
    text = as_test(check_gradients, search.args, name="it")
    names = {}
    exec(compile(text, "pasted", "exec"), names)
    with pytest.raises(GradientError) as caught:
        names["test_it"]()
    assert str(caught.value).startswith(str(search.error).partition("\nRepeat")[0])  # a diagnosis may follow


def test_a_call_loses_the_options_that_it_does_not_need():
    """And keeps those that it does; arrays among them are shrunk with the others."""

    def scaled(x, factor, mask, power):
        return factor * x**power * mask, x

    def backward(dy, x):
        return 3 * x**2 * dy

    options = {"factor": 3.0, "mask": np.ones((4, 5)), "power": 3, "seed": 7, "rtol": 1e-7}
    with pytest.raises(GradientError) as caught:
        check_gradients(scaled, backward, normal(4, 5), **options)
    call, _ = shrink_call(caught.value.call, caught.value)
    assert call.check is check_gradients and call.args[2].tolist() == [[1.0]]
    assert {n: np.asarray(x).tolist() for n, x in call.options.items()} == {"factor": 3.0, "mask": [[0.0]], "power": 3}


def test_the_inputs_of_a_layer_are_shrunk():
    class Twice(nn.Layer):
        def __init__(self):
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear.forward(x)

        def backward(self, dy, cache):
            return 2 * self.linear.backward(dy, cache)

    layer = Twice()
    found, x = shrink(check_layer, (layer, normal(4, 5, 3)))
    assert found is layer and x.tolist() == [[[0.0, 0.0, 0.0]]]
    text = as_test(check_layer, (layer, x))
    assert "# layer cannot be written out (it is a Twice)" in text and "    check_layer(layer, x)\n" in text


def test_the_reason_stays_the_same():
    """A broken rule, or another tensor, is another failure; so is any other error."""

    def op(x, w, nothing):
        if x.shape[0] < 2:
            raise ValueError("x: expected two rows")
        return x * w, (x, w)

    def backward(dy, cache):
        x, w = cache
        if x.shape[1] < 3:
            dy = np.clip(dy, -9, 9)  # is not linear
            return dy * w, dy * x
        return dy * w * (1 + (x.shape[1] > 3)), dy * x * (1 + (x.shape[0] > 2))

    for shape, smallest in {(2, 5): (2, 4), (4, 3): (3, 3)}.items():
        x, w, nothing = shrink(check_gradients, (op, backward, normal(*shape), normal(*shape), None))[2:]
        assert x.shape == w.shape == smallest and nothing is None
    with pytest.raises(ValueError, match="a check that passes"):
        shrink(check_gradients, (ops.relu, ops.relu_backward, normal(3)))


def test_a_mask_of_booleans_is_shrunk():
    def masked(x, mask):
        return np.where(mask, x, 0 * x), mask

    mask = np.array([[True, False, True], [False, True, True]])
    x, mask = shrink(lambda *args: check_gradients(masked, lambda dy, mask: dy.copy(), *args), (normal(2, 3), mask))
    assert (x.shape, mask.tolist()) == ((1, 1), [[False]])


def test_time_limit():
    x = normal(3, 4)
    search = Search(check_gradients, (leaky, wrong_if_negative, x), seconds=0)
    assert not search.finished and np.array_equal(search.args[2], x)


def test_sources():
    """Each literal evaluates to the value; what cannot be imported is named."""
    values = [
        None,
        True,
        2.5,
        float("inf"),
        "word",
        (1, [2.0, {"a": None}]),
        np.float32(0.1),
        np.float16,
        Key(1, 2),
        CPU,
        ops.Padding(np.array([1, 2])) & ops.Local(2),
        ops.softmax,
        np.array([0.1, -2.0, 1e-30], np.float32),
        np.array([[1, 2], [3, 4]], np.uint8),
        np.array([[True, False]]),
        np.zeros((2, 0)),
        np.array(3.0),
        normal(3, 20),
    ]

    def check(*args):
        return args

    for value in values:
        text = as_test(check, (value,))
        assert text.startswith("# check cannot be imported (it is defined in test_shrink.py, line ")
        seen = []
        names = {"check": seen.append}
        exec(compile(text, "pasted", "exec"), names)
        (function,) = (names[name] for name in names if name.startswith("test_"))
        function()
        if isinstance(value, ops.Pattern):
            assert repr(seen[0]) == repr(value)
        elif isinstance(value, np.ndarray):
            assert seen[0].dtype == value.dtype and seen[0].shape == value.shape and np.array_equal(seen[0], value)
        else:
            assert seen[0] == value and type(seen[0]) is type(value)
        assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.bool_])
def test_many_zeros_are_short_and_keep_their_type(dtype):
    source = as_test(check_gradients, (leaky, wrong_if_negative, np.zeros((5, 6), dtype)))
    (line,) = (line for line in source.splitlines() if "x = " in line)
    x = eval(line.partition(" = ")[2], {"np": np})
    assert x.shape == (5, 6) and x.dtype == dtype and len(line) < 50


def test_names_of_arguments_and_imports():
    text = as_test(check_gradients, (leaky, lambda dy, x: dy, normal(1)), {"device": CPU, "max": np.max}, "[my] name")
    lines = text.splitlines()
    assert f"from {__name__} import leaky" in lines and "from scratchformer.testing import check_gradients" in lines
    assert "def test_my_name():" in lines
    assert "    x = np.array(" in text
    assert lines[-1] == "    check_gradients(leaky, op_backward, x, device=CPU, max=np.max)"


def test_an_argument_called_like_its_operation():
    def scale(x, scale):
        return x * scale, None

    text = as_test(check_gradients, (scale, leaky, np.ones(1), np.ones(2)))
    assert (
        text.endswith("    check_gradients(scale, leaky, x, scale_)\n") and "    scale_ = np.array([1.0, 1.0])" in text
    )

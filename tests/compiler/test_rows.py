"""Compiled operations on rows: shapes, strides and types, and float64 against more digits where differences cancel."""

import mpmath
import numpy as np
import pytest

from scratchformer import ops
from scratchformer.dispatch import TwinCache, fast, reference_only
from scratchformer.testing.contracts import as_tuple

pytest.importorskip("numba")

ELEMENTWISE = {"relu": 1, "gelu": 1, "silu": 1, "tanh": 1, "softmax": 1, "log_softmax": 1, "swiglu": 2, "add": 2}
OPERATIONS = [*ELEMENTWISE, "layernorm", "rmsnorm", "cross_entropy"]
SHAPES = [(1, 1), (5, 1), (1, 2), (3, 7), (2, 3, 17), (4, 33), (3, 128), (2, 1031), (2, 50257)]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(np.swapaxes(x, 0, -1)).swapaxes(0, -1),
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


def arguments(name, shape, dtype, seed=0):
    """Arguments of an operation, of which some targets do not count."""
    rng = np.random.default_rng(seed)
    real = [rng.standard_normal(shape).astype(dtype) for _ in range(2)]
    if name in ELEMENTWISE:
        return real[: ELEMENTWISE[name]]
    if name.endswith("norm"):
        return [real[0], *rng.standard_normal((2 if name == "layernorm" else 1, shape[-1])).astype(dtype)]
    return [real[0], rng.integers(-1, shape[-1], shape[:-1]), -1, 0.1]


def run(name, args, dy=None):
    """The cache, and y and the gradients."""
    y, cache = getattr(ops, name)(*args)
    if dy is None:
        dy = np.random.default_rng(1).standard_normal(np.shape(y)).astype(y.dtype)
    return cache, (y, *as_tuple(getattr(ops, f"{name}_backward")(dy, cache)))


def expect_the_reference(name, args, within):
    with fast():
        cache, found = run(name, args)
    with reference_only():
        _, plain = run(name, args)
    assert (type(cache) is TwinCache) == (name != "add"), "the loops did not run, or they ran where NumPy is as fast"
    for one, other in zip(found, plain, strict=True):
        assert one.shape == other.shape and one.dtype in (other.dtype, np.float32)
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=within * max(1e-2, abs(other).max()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_shapes(name, shape):
    narrow = name.endswith("norm") and shape[-1] < 3  # then dx is nearly 0, rounded, and divided by a small σ
    for dtype, within in ((np.float32, 1e-5), (np.float64, 1e-12)):
        expect_the_reference(name, arguments(name, shape, dtype), within * (1e3 if narrow else 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_layouts(name, layout):
    """Also of dy."""
    args = [LAYOUTS[layout](x) if getattr(x, "ndim", 0) > 1 else x for x in arguments(name, (6, 5, 18), np.float64)]
    expect_the_reference(name, args, 1e-12)
    with fast():
        y, cache = getattr(ops, name)(*args)
        dy = np.random.default_rng(1).standard_normal(np.shape(y))
        gradients = [getattr(ops, f"{name}_backward")(d, cache) for d in (dy, LAYOUTS[layout](dy) if y.ndim else dy)]
    for one, other in zip(*map(as_tuple, gradients), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_targets_of_every_integer_type(kind):
    logits, targets, *_ = arguments("cross_entropy", (7, 12), np.float32)
    expect_the_reference("cross_entropy", [logits, abs(targets).astype(kind), 3], 1e-5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_left_to_the_reference(name):
    """float16 and arrays of several types; the same bits."""
    half, mixed = arguments(name, (3, 5), np.float16), arguments(name, (3, 5), np.float32)
    several = [i for i, x in enumerate(mixed) if getattr(x, "dtype", None) == np.float32]
    mixed[several[-1]] = mixed[several[-1]].astype(np.float64)
    for args in (half, mixed) if len(several) > 1 else (half,):
        with fast():
            cache, found = run(name, args)
        assert type(cache) is not TwinCache
        with reference_only():
            _, plain = run(name, args)
        for one, other in zip(found, plain, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rows(name):
    """Empty arrays are left to the reference: the same result, or the same error."""

    def outcome():
        try:
            return [x.tolist() for x in run(name, arguments(name, (0, 4), np.float32))[1]]
        except ValueError as error:
            return str(error)

    with reference_only():
        expected = outcome()
    with fast():
        assert outcome() == expected


def test_rows_that_do_not_count_change_nothing():
    """Their gradient is 0, and the loss and the other gradients have the same bits whatever is in them."""
    logits, targets, *options = arguments("cross_entropy", (9, 21), np.float32)
    targets[[0, 4, 8]] = -1
    with fast():
        cache, (loss, gradient) = run("cross_entropy", [logits, targets, *options], 0.7)
        logits[targets == -1] *= 50
        _, (same_loss, same) = run("cross_entropy", [logits, targets, *options], 0.7)
    assert type(cache) is TwinCache and loss == same_loss
    assert (gradient[targets == -1] == 0).all() and (gradient[targets >= 0] != 0).any()
    np.testing.assert_array_equal(gradient, same)


def test_arguments_by_name_and_arguments_that_do_not_exist():
    x, gamma, beta = arguments("layernorm", (3, 4), np.float64)
    with fast():
        y, _ = ops.layernorm(x, beta=beta, gamma=gamma, eps=0.1)
        np.testing.assert_array_equal(y, ops.layernorm(x, gamma, beta, 0.1)[0])
        for args, names in (((x, gamma, beta), {"epsilon": 1}), ((x, gamma, beta, 1, 2), {}), ((x, gamma), {"x": x})):
            with pytest.raises(TypeError, match="argument"):
                ops.layernorm(*args, **names)
        for eps in (-1.0, np.nan, np.inf, "1"):
            ops.layernorm(x, gamma, beta, 1e-3)  # these arguments, but for eps, have been checked
            with pytest.raises((TypeError, ValueError), match="eps"):
                ops.layernorm(x, gamma, beta, eps)


def digits(function, *arrays):
    """What `function` gives for arrays of mpmath's numbers of 60 digits."""
    with mpmath.workdps(60):
        return function(*(np.array([mpmath.mpf(float(v)) for v in x.ravel()], object).reshape(x.shape) for x in arrays))


each = {name: np.frompyfunc(getattr(mpmath, name), 1, 1) for name in ("exp", "log", "sqrt")}


def softmax(z):
    e = each["exp"](z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def exact_layernorm(dy, x, gamma, beta):
    C = mpmath.mpf(x.shape[-1])
    centred = x - x.sum(axis=-1, keepdims=True) / C
    rstd = 1 / each["sqrt"]((centred**2).sum(axis=-1, keepdims=True) / C + mpmath.mpf(1e-5))
    xhat, g = centred * rstd, dy * gamma
    mean_g, mean_gx = (a.sum(axis=-1, keepdims=True) / C for a in (g, g * xhat))
    return xhat * gamma + beta, rstd * (g - mean_g - xhat * mean_gx), (dy * xhat).sum(axis=0), dy.sum(axis=0)


def exact_rmsnorm(dy, x, gamma):
    C = mpmath.mpf(x.shape[-1])
    rrms = 1 / each["sqrt"]((x**2).sum(axis=-1, keepdims=True) / C + mpmath.mpf(1e-6))
    xhat, g = x * rrms, dy * gamma
    return xhat * gamma, rrms * (g - xhat * (g * xhat).sum(axis=-1, keepdims=True) / C), (dy * xhat).sum(axis=0)


def exact_softmax(dy, z):
    p = softmax(z)
    return p, p * (dy - (dy * p).sum(axis=-1, keepdims=True))


def exact_cross_entropy(dy, z, t):
    p = softmax(z)
    return -(t * each["log"](p)).sum() / len(z), dy / len(z) * (p - t)


FUNCTIONS = exact_layernorm, exact_rmsnorm, exact_softmax, exact_cross_entropy
EXACT = {f.__name__.removeprefix("exact_"): f for f in FUNCTIONS}


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e9, 3e12])
@pytest.mark.parametrize("name", EXACT)
def test_float64_has_its_digits_however_large_the_mean_of_a_row(name, offset):
    """Against 60 digits, on the same numbers. A mean that is rounded in proportion to its size would cost layer norm as
    many digits as the mean has more than the spread of the row.
    """
    rng = np.random.default_rng(7)
    x = rng.standard_normal((4, 19)) + offset * np.array([[1], [-1], [0.5], [0]])
    args = [x, *rng.standard_normal(({"layernorm": 2, "rmsnorm": 1}.get(name, 0), 19))]
    others, dy = args, rng.standard_normal((4, 19)) * 0.5
    if name == "cross_entropy":
        targets = rng.integers(0, 19, 4)
        args, others, dy = [x, targets], [x, np.eye(19)[targets]], np.array(0.5)
    with fast():
        cache, found = run(name, args, dy if dy.ndim else float(dy))
    assert type(cache) is TwinCache
    for one, exact in zip(found, digits(EXACT[name], dy, *others), strict=True):
        exact = np.array(exact, dtype=object).astype(float)
        np.testing.assert_allclose(one, exact, rtol=0, atol=2e-14 * max(abs(exact).max(), 1e-300))

"""A number that is added to a whole row cancels in a softmax, a loss or a layer norm, however large it is.

All that may remain is that the sums with it are rounded. So each operation is compared with long double arithmetic on
the same rounded numbers, and the difference that is allowed does not depend on what was added.
"""

from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.dispatch import fast, reference_only
from scratchformer.generation.beam import likeliest
from scratchformer.testing.contracts import as_tuple

KINDS = {"reference": reference_only, "numpy": nullcontext}
if find_spec("numba"):
    KINDS["numba"] = fast
DTYPES = ["float32", "float64", "bfloat16"]
N, V = 3, 37


def with_offsets(test):
    """The test with drawn offsets, one for each row, and with these."""
    for offsets in [1e7] * N, [-1e7] * N, [1e5, 0, 3e6]:
        test = example(offsets=offsets)(test)
    return given(offsets=st.lists(st.floats(-1e7, 1e7), min_size=N, max_size=N))(test)


def type_named(name):
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name) if name == "bfloat16" else name)


def shifted(seed, offsets, dtype):
    """Rows of normal numbers, (N, V), with an offset for each row, as they are rounded to the type."""
    return (np.random.default_rng(seed).standard_normal((N, V)) + np.array(offsets)[:, None]).astype(dtype)


def parts(z):
    """z − m, log Σ exp(z − m) and the softmax of each row."""
    centred = z - z.max(axis=1, keepdims=True)
    log_z = np.log(np.exp(centred).sum(axis=1, keepdims=True))
    return centred - log_z, np.exp(centred - log_z)


def softmax(dy, z):
    p = parts(z)[1]
    return p, p * (dy - (dy * p).sum(axis=1, keepdims=True))


def log_softmax(dy, z):
    s, p = parts(z)
    return s, dy - p * dy.sum(axis=1, keepdims=True)


def cross_entropy(dy, z, targets, ignored=None, smoothing=0):
    s, p = parts(z)
    t = smoothing / V + (1 - smoothing) * np.eye(V)[targets]
    return -(t * s).sum() / N, dy * (p - t) / N


def layernorm(dy, x, gamma, beta):
    x = x - x[:, :1]  # exact in long double
    centred = x - x.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + np.longdouble(1e-5))
    xhat, g = centred * rstd, dy * gamma
    dx = rstd * (g - g.mean(axis=1, keepdims=True) - xhat * (g * xhat).mean(axis=1, keepdims=True))
    return xhat * gamma + beta, dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


EXACT = {f.__name__: f for f in (softmax, log_softmax, cross_entropy, layernorm)}
EXACT["smoothed cross_entropy"] = cross_entropy


def arguments(name, offsets, dtype):
    rng = np.random.default_rng(5)
    z, targets = shifted(0, offsets, dtype), rng.integers(0, V, N)
    z[0, 3:5] = z[0].max()  # two largest
    if name == "layernorm":
        return z, *rng.standard_normal((2, V)).astype(dtype)
    return (z,) if "softmax" in name else (z, targets, None, 0.1) if "smoothed" in name else (z, targets)


def as_wide(x):
    return x.astype(np.longdouble) if getattr(x, "dtype", None) is not None and x.dtype.kind in "fV" else x


def check(found, exact, unit):
    """That each array is right to a few units of its largest number."""
    for one, other in zip(found, exact, strict=True):
        allowed = 16 * unit * max(1e-3, float(np.abs(other).max()))
        assert np.abs(as_wide(np.asarray(one)) - other).max() <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXACT)
def test_what_is_added_to_a_row_costs_no_digits(name, kind, dtype):
    dtype = type_named(dtype)
    unit = 2.0**-7 if dtype.itemsize == 2 else np.finfo(dtype).eps
    op = getattr(ops, name.split()[-1])

    @with_offsets
    def costs_no_digits(offsets):
        args = arguments(name, offsets, dtype)
        with KINDS[kind]():
            y, cache = op(*args)
        dy = np.random.default_rng(9).standard_normal(np.shape(y)).astype(y.dtype)
        dx = as_tuple(getattr(ops, f"{op.__name__}_backward")(dy, cache))
        check((y, *dx), EXACT[name](as_wide(dy), *map(as_wide, args)), unit)

    costs_no_digits()


@pytest.mark.parametrize("kind", ["reference", "numpy"])
@pytest.mark.parametrize("relative", [False, True])
def test_what_is_added_to_the_scores_of_a_row_costs_no_digits(kind, relative):
    """Whole numbers, and D = 4, so that no score is rounded; the last number of each key adds to all scores alike."""

    @given(offset=st.integers(-(2**20), 2**20))
    @example(offset=10**6)
    @example(offset=-(10**6))
    def costs_no_digits(offset):
        rng = np.random.default_rng(3)
        q, k = rng.integers(-2, 3, (2, 1, 2, 5, 4)).astype(np.float32)
        v, dy = rng.standard_normal((2, 1, 2, 5, 4)).astype(np.float32)
        q[..., -1], k[..., -1] = 2, offset
        others = (np.zeros((2, 9, 4), np.float32), *np.zeros((2, 2, 4), np.float32)) if relative else ()
        op = ops.relative_attention if relative else ops.attention
        with KINDS[kind]():
            y, cache = op(q, k, v, *others)
        dv = getattr(ops, f"{op.__name__}_backward")(dy, cache)[2]
        z = as_wide(q) @ as_wide(k).swapaxes(2, 3) / 2
        p = np.exp(z - z.max(axis=3, keepdims=True))
        p /= p.sum(axis=3, keepdims=True)
        check((y, dv), (p @ as_wide(v), p.swapaxes(2, 3) @ as_wide(dy)), np.finfo(np.float32).eps)

    costs_no_digits()


@with_offsets
def test_what_is_added_to_the_logits_costs_beam_search_no_digits(offsets):
    logits = shifted(0, offsets, np.float32)
    log_p, _, tokens = likeliest(np.zeros((N, 1)), logits)
    check((log_p,), (np.take_along_axis(parts(as_wide(logits))[0], tokens, 1),), np.finfo(np.float32).eps)

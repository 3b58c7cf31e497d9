"""What a user writes, from a docstring to loops in one call: swish, group norm, and a scale for each column."""

from typing import NamedTuple

import numpy as np
import pytest

import scratchformer as sf
from scratchformer.compiler.show import PRINTERS, shown
from scratchformer.dispatch import TwinCache
from scratchformer.notation import check_derivation
from scratchformer.testing import check_gradients


def swish(x):
    """y = x σ(x), elementwise.

    Backward. The derivative of the sigmoid is a function of its value; the rest is the product rule:

        s_i = 1/(1 + exp(−x_i))            y_i = x_i s_i
        ∂s_i/∂x_i = s_i (1 − s_i)          dx_i = dy_i (s_i + x_i s_i (1 − s_i))
    """
    s = 1 / (1 + np.exp(-x))
    return x * s, (x, s)


def swish_backward(dy, cache):
    x, s = cache
    return dy * (s + x * s * (1 - s))


class GroupNormCache(NamedTuple):
    x: np.ndarray
    mu: np.ndarray
    rstd: np.ndarray


def groupnorm(x, eps=1e-5):
    """Each group of channels is normalised to mean 0 and variance 1.

    x: (..., G, C). A row is a group of C channels:

        μ = mean_c(x_c)        rstd = 1/√(mean_c((x_c − μ)²) + eps)        y_c = (x_c − μ) rstd

    Backward. x_k changes every y_c of its row, also by way of μ and rstd:

        ∂y_c/∂x_k = rstd (δ_ck − 1/C − y_c y_k/C)
        dx_k = Σ_c dy_c ∂y_c/∂x_k = rstd (dy_k − mean_c(dy_c) − y_k mean_c(dy_c y_c))
    """
    mu = x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mu) ** 2).mean(axis=-1, keepdims=True) + eps)
    return (x - mu) * rstd, GroupNormCache(x, mu, rstd)


def groupnorm_backward(dy, cache: GroupNormCache):
    x, mu, rstd = cache
    y = (x - mu) * rstd
    return rstd * (dy - dy.mean(axis=-1, keepdims=True) - y * (dy * y).mean(axis=-1, keepdims=True))


def gain(x, gamma):
    """Each column is multiplied by a number that is learned.

    x: (..., C). gamma: (C,). All rows n use the same γ, so its gradient is a sum over them:

        y_c = γ_c x_c        dx_c = dy_c γ_c        dγ_c = Σ_n dy_nc x_nc
    """
    return gamma * x, (x, gamma)


def gain_backward(dy, cache):
    x, gamma = cache
    return dy * gamma, (dy * x).sum(axis=tuple(range(dy.ndim - 1)))


def arrays(*shapes):
    generator = np.random.default_rng(0)
    return tuple(generator.standard_normal(shape) for shape in shapes)


WALK = {
    "swish": (swish, swish_backward, arrays((3, 4, 5))),
    "groupnorm": (groupnorm, groupnorm_backward, arrays((2, 6, 3, 5))),
    "gain": (gain, gain_backward, arrays((3, 4, 5), (5,))),
}


@pytest.mark.parametrize("name", WALK)
def test_the_pair_and_its_derivation_are_right(name):
    op, op_backward, args = WALK[name]
    check_gradients(op, op_backward, *args)
    check_derivation(op, op_backward, *args)


@pytest.mark.parametrize("target", PRINTERS)
@pytest.mark.parametrize("name", WALK)
def test_one_call_gives_the_source(name, target):
    op, op_backward, _ = WALK[name]
    source = shown(op, op_backward, target)
    assert source.index(f"{name}_backward") > source.index(name) >= 0
    assert {"swish": "y_i = x_i s_i", "groupnorm": "μ = mean_c(x_c)", "gain": "y_c = γ_c x_c"}[name] in source


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", WALK)
def test_one_call_gives_loops_for_a_cpu(name, dtype):
    pytest.importorskip("numba")
    op, op_backward, args = WALK[name]
    compiled, compiled_backward = sf.compile(op, op_backward)
    args = tuple(x.astype(dtype) for x in args)
    expected, cache = op(*args)
    dy = np.cos(expected)
    assert not isinstance(compiled(*args)[1], TwinCache)
    with sf.fast():
        y, kept = compiled(*args)
    assert isinstance(kept, TwinCache)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == np.float32 else {"rtol": 1e-10, "atol": 1e-12}
    np.testing.assert_allclose(y, expected, **tolerance)
    gradients, others = compiled_backward(dy, kept), op_backward(dy, cache)
    if name != "gain":
        gradients, others = (gradients,), (others,)
    for gradient, other in zip(gradients, others, strict=True):
        np.testing.assert_allclose(gradient, other, **tolerance)
        assert gradient.dtype == dtype
    with sf.reference_only():
        assert np.array_equal(compiled(*args)[0], expected)

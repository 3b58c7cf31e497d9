"""Blocks of rows in NumPy give what the references give."""

import gc
from typing import NamedTuple

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import Array
from scratchformer.catalogue import OPERATIONS
from scratchformer.compiler import numpy_code
from scratchformer.compiler.in_place import InPlace
from scratchformer.compiler.numpy_target import NumpyTarget
from scratchformer.compiler.twins import CompiledTwin
from scratchformer.dispatch import backward, operation
from scratchformer.optim.adam import adam_step
from scratchformer.testing.contracts import as_tuple
from scratchformer.testing.draw import Draw

PRODUCTS = ("attention", "dense", "linear", "relative")
COLUMN = {"C": 1, "D": 1, "F": 1, "V": 1}
WIDE = {"B": 3, "T": 1, "C": 129, "F": 129, "V": 129, "D": 65}


class MeanSquareCache(NamedTuple):
    x: Array


@operation
def mean_square(x: Array) -> tuple[Array, MeanSquareCache]:
    """The mean over the rows of the sums of their squares.

    For each row n:

        l_n = Σ_c x_nc²        loss = mean_n(l_n)        dx_nc = 2 dloss x_nc/N
    """
    return (x * x).sum(axis=-1).mean(), MeanSquareCache(x)


@backward
def mean_square_backward(dloss: Array, cache: MeanSquareCache) -> Array:
    return 2 * dloss * cache.x / len(cache.x)


def as_type(dtype, args):
    return [x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in args]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [{}, COLUMN, WIDE], ids=["odd", "one column", "wide"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith(PRODUCTS)])
def test_blocks_agree_with_the_reference(name, sizes, dtype, monkeypatch):
    monkeypatch.setattr(numpy_code, "BLOCK", 50)  # so that there are several
    draw = Draw(1, largest=7)
    draw.sizes |= sizes
    case = OPERATIONS[name](draw)
    args, twin = as_type(dtype, case.args), CompiledTwin(case.op, case.op_backward, NumpyTarget())
    if not twin.arrays:
        pytest.skip("its derivation cannot be compiled")
    assert twin.fits(*args, **case.options)
    y, cache = case.op.reference(*args, **case.options)
    dy = np.random.default_rng(0).standard_normal(np.shape(y)).astype(dtype)[()]
    found, kept = twin.forward(*args, **case.options)
    results = [found, *as_tuple(twin.backward(dy, kept))]
    for result, expected in zip(results, [y, *as_tuple(case.op_backward.reference(dy, cache))], strict=True):
        assert result.shape == expected.shape and result.dtype == expected.dtype
        atol = (1e-12 if dtype == np.float64 else 1e-5) * max(1, np.abs(expected).max())
        np.testing.assert_allclose(result, expected, rtol=0, atol=atol)


def test_the_reference_takes_over_where_a_sum_overflows():
    x, gamma = np.array([[1e25, -1e25, 3e25]], np.float32), np.ones(3, np.float32)
    twin = CompiledTwin(ops.layernorm, ops.layernorm_backward, NumpyTarget())
    y, _ = twin.forward(x, gamma, gamma)
    np.testing.assert_array_equal(y, ops.layernorm.reference(x, gamma, gamma)[0])


def test_a_step_of_adam_in_place(monkeypatch):
    monkeypatch.setattr(numpy_code, "BLOCK", 5)
    w, g, m, v = np.random.default_rng(0).standard_normal((4, 12))
    given = w, g, m, v * v
    found, expected = ([x.copy() for x in given] for _ in range(2))
    twin, numbers = InPlace(adam_step, NumpyTarget()), (0.1, 0.9, 0.99, 1e-8, 3, 0.01, 0.5)
    assert twin.fits(*found, *numbers)
    twin.forward(*found, *numbers)
    adam_step.reference(*expected, *numbers)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_a_mean_over_rows():
    x = np.random.default_rng(0).standard_normal((4, 3))
    twin = CompiledTwin(mean_square, mean_square_backward, NumpyTarget())
    loss, kept = twin.forward(x)
    np.testing.assert_allclose(loss, mean_square(x)[0], rtol=1e-14)
    np.testing.assert_allclose(twin.backward(3.0, kept), 3 * x / 2, rtol=1e-14)


def test_loops_are_those_of_their_plan_when_earlier_plans_are_gone():
    """Plans of shapes that are no longer remembered are deleted, and another may then lie at the same address."""
    twin = CompiledTwin(ops.relu, ops.relu_backward, NumpyTarget())
    plan = twin.derivation.compile().forward
    loops = set()
    for _ in range(5):
        loops.add(twin.loops_of(plan._replace(results=plan.results), np.dtype(np.float64)))
        gc.collect()
    assert len(loops) == 5

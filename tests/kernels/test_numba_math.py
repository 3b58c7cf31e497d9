"""Functions of numbers in compiled loops, against the same functions in more digits."""

import mpmath
import numpy as np
import pytest

from scratchformer.dispatch import fast

numba = pytest.importorskip("numba")
with fast():
    code = pytest.importorskip("scratchformer.kernels.numba_code")
    numbers = pytest.importorskip("scratchformer.kernels.numba_math")

BOUNDS = {"exp": (-80, 80), "log": (1e-30, 1e30), "tanh": (-12, 12), "erf": (-5, 5)}
UNITS = {("tanh", np.float32): 6, ("erf", np.float32): 8}  # in the last place; 2 for the others


def loop_of(function):
    def loop(x, y):
        for i in range(x.size):
            y[i] = function(x[i])

    return code.compiled(loop)


LOOPS = {name: loop_of(getattr(numbers, name)) for name in BOUNDS}


def computed(name, x):
    y = np.empty_like(x)
    LOOPS[name](x, y)
    return y


def rounded_twice(name, x):
    """The same in float32 on a processor without an instruction for a product and a sum, or LLVM without permission to
    use it: as Python does it, which rounds both.
    """
    function = getattr(numbers, f"_{name}")(numba.float32)
    with np.errstate(all="ignore"):
        return np.array([function(one) for one in x], x.dtype)


KINDS = [(computed, np.float32), (computed, np.float64), (rounded_twice, np.float32)]


@pytest.mark.parametrize(("computed", "dtype"), KINDS)
@pytest.mark.parametrize("name", BOUNDS)
def test_the_last_digits(name, computed, dtype):
    rng, (low, high) = np.random.default_rng(0), BOUNDS[name]
    x = np.geomspace(low, high, 400) if name == "log" else np.concatenate([rng.uniform(low, high, 300)])
    x = np.concatenate([x, rng.uniform(0.5, 2, 50), rng.uniform(1e-6, 1e-3, 50)]).astype(dtype)
    for one, y in zip(x, computed(name, x), strict=True):
        exact = getattr(mpmath, name)(mpmath.mpf(float(one)))
        unit = max(float(np.spacing(dtype(abs(float(exact))))), float(np.finfo(dtype).tiny))
        assert abs(mpmath.mpf(float(y)) - exact) <= UNITS.get((name, dtype), 2) * unit


@pytest.mark.parametrize(("computed", "dtype"), KINDS)
def test_numbers_far_out_and_not_numbers(computed, dtype):
    far = np.array([0, -0.0, 1000, -1000, np.inf, -np.inf, np.nan], dtype)
    np.testing.assert_array_equal(computed("exp", far), [1, 1, np.inf, 0, np.inf, 0, np.nan])
    for name in ("tanh", "erf"):
        np.testing.assert_array_equal(computed(name, far), [0, 0, 1, -1, 1, -1, np.nan])
    odd = np.array([1, 0, np.inf, np.nan, -1, -np.inf], dtype)
    if dtype == np.float32:
        np.testing.assert_array_equal(computed("log", odd), [0, -np.inf, np.inf, np.nan, np.nan, np.nan])

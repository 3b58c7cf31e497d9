"""Operations that change arrays in place: their loops against the references, bit for bit."""

import inspect

import numpy as np
import pytest

pytest.importorskip("numba")

from scratchformer.compiler import CompileError
from scratchformer.compiler.derivation import Derivation
from scratchformer.compiler.in_place import IN_PLACE
from scratchformer.dispatch import fast, operation, reference_only
from scratchformer.optim.adam import adam_step
from scratchformer.optim.optimizer import scale

NUMBERS = {"share": 0.37, "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "steps": 3, "decay": 0.01}
NUMBERS |= {"momentum": 0.9, "size": 0.1}


def arguments(op, dtype, half, size=1003):
    """Random ones, by name. Those in half precision are only written."""
    rng = np.random.default_rng(0)
    names = inspect.signature(op).parameters
    arrays = {name: rng.random(size).astype(dtype) for name in names if name not in NUMBERS}
    arrays |= {name: np.zeros(size, half) for name in ("out",) if name in arrays}
    return {name: arrays.get(name, NUMBERS.get(name)) for name in names}


def chosen(op, args):
    """Whether loops run for these arguments."""
    return any(twin.fits(**args) for twin in op.chosen[True].get(np.ndarray, ()))


@pytest.mark.parametrize("half", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", IN_PLACE)
def test_loops_round_as_the_reference_does(op, dtype, half):
    half = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if half == "bfloat16" else np.dtype(half)
    found, plain = arguments(op, dtype, half), arguments(op, dtype, half)
    before = {name: np.copy(x) for name, x in found.items()}
    with fast():
        written = {"out"} & found.keys()
        assert chosen(op, found) == (not written or dtype == np.float32 or half.itemsize > 2)
        op(*found.values())
    with reference_only():
        op(*plain.values())
    changed = {name for name, x in found.items() if np.ndim(x) and not np.array_equal(x, before[name])}
    assert changed == found.keys() & {"w", "m", "v", "x", "u", "velocity", "out"} - (
        {"x"} if op.__name__ == "round_into" else set()
    )
    for name, x in found.items():
        np.testing.assert_array_equal(x, plain[name], err_msg=name)


def test_arrays_that_no_loop_takes_are_changed_by_the_reference():
    """Every second number, arrays of two types, an empty one, and keywords."""
    with fast():
        wide = np.arange(10.0)
        scale(wide[::2], 2.0)
        np.testing.assert_array_equal(wide, [0, 1, 4, 3, 8, 5, 12, 7, 16, 9])
        scale(np.empty(0), 2.0)
        factors = np.arange(10.0)
        scale(factors, factors)
        np.testing.assert_array_equal(factors, np.arange(10.0) ** 2)
        scale(factors, np.array(0.5))
        np.testing.assert_array_equal(factors, np.arange(10.0) ** 2 / 2)
        x = np.ones(3)
        scale(share=0.5, x=x)
        np.testing.assert_array_equal(x, [0.5] * 3)
        args = arguments(adam_step, np.float32, np.float32)
        args["g"] = args["g"].astype(np.float64)
        assert not chosen(adam_step, args)


@operation
def shift(x):
    """Each number minus the mean of all.

    In place:

        x_i = x0_i − mean_j(x0_j)
    """
    x -= x.mean()


def test_a_sum_cannot_be_taken_of_an_array_that_changes():
    with pytest.raises(CompileError, match="in place only what is at the same place can be read"):
        Derivation(shift.reference, None).compile()

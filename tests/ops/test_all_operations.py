"""What holds for every operation, on every backend: the cases are those of `scratchformer.testing.cases`."""

import inspect
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, DeviceError, array_module, to_cpu, to_device
from scratchformer.dispatch import reference_only
from scratchformer.testing.cases import OPERATIONS, Draw
from scratchformer.testing.contracts import as_tuple, is_array, is_floating
from scratchformer.testing.strict import STRICT


class Run(NamedTuple):
    """The arguments, the output and the gradients of one case, in one type."""

    args: list
    y: object
    gradients: tuple


def run(name, device, dtype, args=None):
    """Run a case forward and backward in `dtype`; `args` replaces its arguments."""
    case = OPERATIONS[name](Draw(3, 1.0, device))
    args = [
        to_device(x, device, dtype if is_floating(x) else None) if is_array(x) else x
        for x in (case.args if args is None else args)
    ]
    y, cache = case.op(*args, **case.options)
    dy = np.random.default_rng(0).standard_normal(tuple(y.shape)).astype(dtype)
    return Run(args, y, as_tuple(case.op_backward(to_device(dy, device), cache)))


def assert_close(result, expected, tolerance):
    """Each array differs by at most `tolerance` of the largest element of what is expected. An array that should be
    zero, and is but for rounding, is measured by a tenth of the largest element of all of them.
    """
    arrays = [
        (to_cpu(x).astype(np.float64), to_cpu(e).astype(np.float64))
        for x, e in zip((result.y, *result.gradients), (expected.y, *expected.gradients), strict=True)
    ]
    largest = max(np.abs(e).max() for _, e in arrays)
    for x, e in arrays:
        assert x.shape == e.shape
        size = np.abs(e).max()
        np.testing.assert_allclose(x, e, rtol=0, atol=tolerance * (size if size > 1e-6 * largest else 0.1 * largest))


def test_every_operation_is_checked():
    """It has a case, and its module has a file of tests, in which the gradients are checked."""
    cases = [OPERATIONS[name](Draw()) for name in OPERATIONS]
    assert {c.op_backward for c in cases} == {getattr(ops, name) for name in ops.__all__ if name.endswith("_backward")}
    for module in {c.op.__module__.rpartition(".")[2] for c in cases}:
        assert "check_gradients(case)" in (Path(__file__).parent / f"test_{module}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OPERATIONS)
def test_float32_stays_float32(name, device):
    single, double = run(name, device, np.float32), run(name, device, np.float64)
    assert all(a.dtype == np.float32 for a in (single.y, *single.gradients))
    assert all(a.dtype == np.float64 for a in (double.y, *double.gradients))
    assert_close(single, double, 1e-5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_float16_stays_float16_and_is_near_the_float32_result(name, device):
    half = run(name, device, np.float16)
    assert half.y.dtype == (np.float32 if name.startswith("cross_entropy") else np.float16)  # a loss is a sum
    assert all(a.dtype == np.float16 for a in half.gradients)
    assert_close(half, run(name, device, np.float32, args=half.args), 4e-3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arguments_are_not_written_to(name, dtype):
    """Read-only arguments, and a read-only dy, are enough."""
    case = OPERATIONS[name](Draw(1))
    args = [x.astype(dtype) if is_floating(x) else x for x in case.args]
    y, cache = case.op(*(read_only(x) for x in args), **case.options)
    case.op_backward(read_only(np.ones_like(y)), cache)


def read_only(x):
    if not is_array(x):
        return x
    x = np.array(x)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("name", [n for n in OPERATIONS if sum(map(is_array, OPERATIONS[n](Draw()).args)) > 1])
def test_arrays_of_two_devices_are_refused(name):
    """One error that names both devices, and the calls that move an array and a model."""
    case = OPERATIONS[name](Draw())
    first, *rest = case.args
    assert array_module(first) is CPU.xp
    with pytest.raises(DeviceError, match=r"cpu \(numpy\) and gpu \(strict\)|gpu \(strict\) and cpu \(numpy\)") as info:
        case.op(to_device(first, STRICT), *rest, **case.options)
    assert "to_device(x, device)" in str(info.value)
    assert "layer.to(device)" in str(info.value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1e4, -1e4, 0.0])
def test_large_scores_do_not_overflow(size, dtype, device):
    """Scores around ±10,000, and rows whose scores are 20,000 apart, give finite outputs and gradients."""
    z = to_device(np.array([[size, size, size], [1e4, -1e4, 0], [-1e4, 0, 5]]), device, dtype)
    targets = to_device(np.array([0, 1, 2]), device)
    for op, op_backward, *more in [
        (ops.softmax, ops.softmax_backward),
        (ops.log_softmax, ops.log_softmax_backward),
        (ops.gelu, ops.gelu_backward),
        (ops.gelu, ops.gelu_backward, "tanh"),
        (ops.cross_entropy, ops.cross_entropy_backward, targets),
    ]:
        y, cache = op(z, *more)
        assert np.isfinite(to_cpu(y)).all()
        assert np.isfinite(to_cpu(op_backward(device.xp.ones_like(y), cache))).all()


@pytest.mark.parametrize("name", OPERATIONS)
def test_arguments_by_keyword(name):
    """Every argument can be given under the name that the signature shows."""
    case = OPERATIONS[name](Draw())
    named = dict(zip(inspect.signature(case.op).parameters, case.args, strict=False))
    y, _ = case.op(*case.args, **case.options)
    y_named, cache = case.op(**named, **case.options)
    assert np.array_equal(y, y_named)
    dy_name, cache_name, *_ = inspect.signature(case.op_backward).parameters
    case.op_backward(**{dy_name: np.ones_like(y), cache_name: cache})


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("cross_entropy")])
def test_a_dy_that_would_broadcast_is_refused(name):
    case = OPERATIONS[name](Draw())
    with reference_only():
        y, cache = case.op(*case.args, **case.options)
    with pytest.raises(ValueError, match=r"dy: expected \(.*\), got \(1, "):
        case.op_backward(np.ones_like(y[:1]), cache)

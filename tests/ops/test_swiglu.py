import numpy as np
import pytest
from hypothesis import given

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import tensors


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(tensors("B T F", "B T F", "B T F"))
def test_is_silu_times_up(device, drawn):
    """Output and gradients are those of the activation and a product, one after the other."""
    gate, up, dy = (to_device(a, device) for a in drawn)
    y, cache = ops.swiglu(gate, up)
    activated, silu_cache = ops.silu(gate)
    expected = (activated * up, ops.silu_backward(dy * up, silu_cache), dy * activated)
    for found, other in zip((y, *ops.swiglu_backward(dy, cache)), expected, strict=True):
        scale = np.abs(to_cpu(other)).max()
        np.testing.assert_allclose(to_cpu(found), to_cpu(other), rtol=1e-10, atol=1e-12 * scale)


def test_large_gates_do_not_overflow(device):
    gate = to_device(np.array([-1e4, 1e4], np.float32), device)
    y, cache = ops.swiglu(gate, gate)
    assert to_cpu(y).tolist() == [0, 1e8]
    assert [to_cpu(d).tolist() for d in ops.swiglu_backward(gate / gate, cache)] == [[0, 1e4]] * 2


def test_float16_is_rounded_once(device):
    """At the end: the results are those of float32, rounded."""
    arrays = (3 * np.random.default_rng(0).standard_normal((3, 50))).astype(np.float16)
    results = []
    for dtype in np.float16, np.float32:
        gate, up, dy = (to_device(a.astype(dtype), device) for a in arrays)
        y, cache = ops.swiglu(gate, up)
        results.append([to_cpu(a).astype(np.float16) for a in (y, *ops.swiglu_backward(dy, cache))])
    for half, single in zip(*results, strict=True):
        np.testing.assert_array_equal(half, single)


def test_arrays_that_are_not_contiguous():
    """Transposed arrays must not mislead a kernel that flattens them; and empty ones."""
    gate, up, dy = np.random.default_rng(0).standard_normal((3, 4, 5)).swapaxes(1, 2)
    y, cache = ops.swiglu(gate, up)
    plain, plain_cache = ops.swiglu.reference(gate, up)
    expected = (plain, *ops.swiglu_backward.reference(dy, plain_cache))
    for found, other in zip((y, *ops.swiglu_backward(dy, cache)), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-12)
    assert ops.swiglu(gate[:0], up[:0])[0].shape == (0, 4)


def test_two_shapes():
    with pytest.raises(ValueError, match=r"up: expected \(2, 3\), got \(2, 1\)"):
        ops.swiglu(np.ones((2, 3)), np.ones((2, 1)))

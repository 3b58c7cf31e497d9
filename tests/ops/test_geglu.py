import numpy as np
from hypothesis import given

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import tensors


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(tensors("B T F", "B T F", "B T F"))
def test_is_gelu_times_up(device, drawn):
    """Output and gradients are those of the activation and a product, one after the other."""
    gate, up, dy = (to_device(a, device) for a in drawn)
    y, cache = ops.geglu(gate, up)
    activated, gelu_cache = ops.gelu(gate, "tanh")
    expected = (activated * up, ops.gelu_backward(dy * up, gelu_cache), dy * activated)
    for result, other in zip((y, *ops.geglu_backward(dy, cache)), expected, strict=True):
        scale = np.abs(to_cpu(other)).max()
        np.testing.assert_allclose(to_cpu(result), to_cpu(other), rtol=1e-10, atol=1e-12 * scale)


def test_float16_is_rounded_once(device):
    """At the end: the results are those of float32, rounded."""
    arrays = (3 * np.random.default_rng(0).standard_normal((3, 50))).astype(np.float16)
    results = []
    for dtype in np.float16, np.float32:
        gate, up, dy = (to_device(a.astype(dtype), device) for a in arrays)
        y, cache = ops.geglu(gate, up)
        results.append([to_cpu(a).astype(np.float16) for a in (y, *ops.geglu_backward(dy, cache))])
    for half, single in zip(*results, strict=True):
        assert np.array_equal(half, single)

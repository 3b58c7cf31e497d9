"""What a gradient alone does not show about fused operations: their references are the parts, one after the other."""

import numpy as np
import pytest

from scratchformer import Key, ops, reference_only


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_the_reference_gives_what_its_parts_give():
    x, f, dy = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    gamma, beta = x[0], f[0]
    with reference_only():
        y, cache = ops.add_layernorm(x, f, gamma, beta)
        expected, norm = ops.layernorm(x + f, gamma, beta)
        assert np.array_equal(y, expected)
        (dx, df, *found), (ds, *gradients) = ops.add_layernorm_backward(dy, cache), ops.layernorm_backward(dy, norm)
        for one, other in zip((dx, df, *found), (ds, ds, *gradients), strict=True):
            assert np.array_equal(one, other)


def test_errors_name_the_arguments_of_the_fused_operation():
    x, key = np.ones((2, 3)), Key(0)
    with pytest.raises(ValueError, match=r"f: expected \(2, 3\), got \(2, 1\)"):
        ops.dropout_add(x, 0.5, key, np.ones((2, 1)))
    with pytest.raises(ValueError, match="p: "):
        ops.dropout_add(x, 1.0, key, x)
    with pytest.raises(ValueError, match=r"x: expected \(..., 4\), got \(2, 3\)"):
        ops.add_layernorm(x, x, np.ones(4), np.ones(4))

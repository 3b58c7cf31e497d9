"""What a gradient alone does not show about fused operations: their references are the parts, one after the other."""

import numpy as np
import pytest

from scratchformer import Key, ops, reference_only


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_the_reference_gives_what_its_parts_give():
    x, f, dy = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    with reference_only():
        y, cache = ops.dropout_add(x, 0.5, Key(0), f)
        h, dropped = ops.dropout(x, 0.5, Key(0))
        assert np.array_equal(y, h + f)
        dx, df = ops.dropout_add_backward(dy, cache)
        assert np.array_equal(dx, ops.dropout_backward(dy, dropped)) and np.array_equal(df, dy)


def test_errors_name_the_arguments_of_the_fused_operation():
    x, key = np.ones((2, 3)), Key(0)
    with pytest.raises(ValueError, match=r"f: expected \(2, 3\), got \(2, 1\)"):
        ops.dropout_add(x, 0.5, key, np.ones((2, 1)))
    with pytest.raises(ValueError, match="p: "):
        ops.dropout_add(x, 1.0, key, x)

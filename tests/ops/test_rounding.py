"""Rounding to half precision, and the type bfloat16."""

import sys

import numpy as np
import pytest

from scratchformer.backend import to_cpu, to_device
from scratchformer.ops.rounding import bfloat16, round_into


def test_numbers_are_rounded_to_the_nearest_and_in_a_tie_to_the_even(device):
    unit = 2.0**-10  # of float16 from 1 to 2
    x = np.array([1 + 0.49 * unit, 1 + 0.5 * unit, 1 + 0.51 * unit, -1 - 1.5 * unit], np.float32)
    out = to_device(np.zeros(4, np.float16), device)
    round_into(to_device(x, device), out)
    np.testing.assert_array_equal(to_cpu(out), [1, 1, 1 + unit, -1 - 2 * unit])


def test_bfloat16_is_a_type_or_an_error_that_says_what_to_install(device, monkeypatch):
    extra = "fast" if device.name == "cpu" else "cuda"
    half = pytest.importorskip("ml_dtypes").bfloat16
    assert bfloat16(device) == half
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=rf"needs the package ml_dtypes: pip install .scratchformer\[{extra}"):
        bfloat16(device)

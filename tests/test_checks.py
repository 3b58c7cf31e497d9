"""Messages about numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.course.grading import Wrong, expect_close
from scratchformer.shell.text import apart
from scratchformer.testing.layouts import differs

NUMBERS = st.floats(-1e6, 1e6)


@given(NUMBERS, st.integers(1, 50))
def test_two_numbers_that_differ_look_different(x, ulps):
    y = x
    for _ in range(ulps):
        y = np.nextafter(y, np.inf)
    assert apart(x, y)[0] != apart(x, y)[1]
    assert apart(x, x) == (f"{x:.17g}",) * 2 or float(apart(x, x)[0]) == x
    assert apart(1.5, 2.25) == ("1.5", "2.25")


@pytest.mark.parametrize(("x", "y"), [(0.848584, 0.8485843), (1e-9, 1.00000001e-9), (123456.7, 123456.8)])
def test_messages_show_the_digit_that_differs(x, y):
    with pytest.raises(Wrong) as error:
        expect_close("dw", np.array([1.0, y]), np.array([1.0, x]), rtol=0)
    expected, got = str(error.value).partition("expected ")[2].split(", got ")
    assert expected != got and float(got) == pytest.approx(y, rel=1e-12)
    *_, found, _, other = differs("dw", np.array([x]), np.array([y]), 0.0).replace(",", "").split()
    assert found != other

"""Checks of arguments, and numbers in their messages."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import checks
from scratchformer.course.grading import Wrong, expect_close
from scratchformer.shell.text import apart
from scratchformer.testing.layouts import differs
from scratchformer.testing.strict import STRICT

NUMBERS = st.floats(-1e6, 1e6)
F, C, I = np.ones((2, 3), np.float32), np.ones((2, 3), np.complex64), np.ones((2, 3), np.int64)
MASKED, LARGEST, HUGE = np.ma.MaskedArray([1]), checks.MAX_SIZE, 10**400


class Foreign:
    """An array of a library that has types of its own."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __array_namespace__(self):
        return STRICT.xp


ACCEPTED = [
    lambda: checks.expect_shape("x", F, "B C"),
    lambda: checks.expect_shape("x", F, "B C", C=3),
    lambda: checks.expect_columns("x", F),
    lambda: checks.expect_floating(x=F, y=F.astype(np.float64), z=np.float16(1)),
    lambda: checks.expect_floating(x=C, y=F),
    lambda: checks.expect_floating(x=Foreign("lib.float32")),
    lambda: checks.expect_real("x", F),
    lambda: checks.expect_real("x", Foreign("lib.float32")),
    lambda: checks.expect_like("x", F, [2, 3]),
    lambda: checks.expect_gradient("dy", F, (2, 3)),
    lambda: [checks.expect_gradient("dy", dy, ()) for dy in (2.0, -LARGEST, np.float32(2), np.ones(()))],
    lambda: checks.expect_floating_type("dtype", "float16"),
    lambda: checks.expect_positive(depth=1, heads=np.int8(2)),
    lambda: checks.expect_at_least(-2, start=-2, stop=LARGEST),
    lambda: checks.expect_boolean(causal=True, tied=np.bool_(False)),
    lambda: checks.expect_one_of("norm", "pre", ("pre", "post")),
    lambda: checks.expect_instance("text", "a", str),
    lambda: checks.expect_instance("text", None, str, none=True),
    lambda: [checks.expect_number("lr", lr) for lr in (0.5, 0, np.float32(1), 10**300)],
    lambda: [checks.expect_number("lr", lr, infinite=True) for lr in (np.inf, HUGE)],
    lambda: [checks.expect_fraction("p", p) for p in (0, 0.0, 0.5, np.float64(0.5))],
    lambda: checks.expect_real_number("x", np.float32(-1)),
    lambda: checks.expect_texts("texts", ["a", "b"], list),
    lambda: checks.expect_texts("texts", iter([1])),
    lambda: checks.expect_lengths(np.array([1, 2]), B=2),
    lambda: checks.expect_integers("ids", I),
    lambda: checks.expect_integers("ids", Foreign("lib.int32")),
    lambda: checks.expect_ids("ids", np.array([0, 4]), 5),
    lambda: checks.expect_ids("ids", np.zeros((0, 2), int), 5),
    lambda: checks.expect_range("x", np.array([2, 3]), 2, 3),
]

WRONG_TYPES = [
    (lambda: checks.expect_shape("x", 3.0, "B C"), "x: expected an array (B, C), got float"),
    (
        lambda: checks.expect_floating(x=F, y=I),
        "y: expected a floating-point array, got int64; convert it with y.astype(np.float32)",
    ),
    (
        lambda: checks.expect_floating(x=Foreign("lib.int8")),
        "x: expected a floating-point array, got lib.int8; convert it with x.astype(np.float32)",
    ),
    (
        lambda: checks.expect_floating(x=F.view(np.matrix)),
        "x: expected a floating-point array, got matrix; convert it with np.asarray(x)",
    ),
    (
        lambda: checks.expect_floating(x=MASKED),
        "x: expected a floating-point array, got MaskedArray; convert it with np.asarray(x)",
    ),
    (
        lambda: checks.expect_floating(x=[1.0]),
        "x: expected a floating-point array, got list; convert it with np.asarray(x, np.float32)",
    ),
    (lambda: checks.expect_floating(x=None), "x: expected a floating-point array, got None"),
    (lambda: checks.expect_floating(x="1"), "x: expected a floating-point array, got str"),
    (lambda: checks.expect_floating(x=F, y=C), "y: expected real numbers, like those of x, got complex64"),
    (lambda: checks.expect_real("x", C), "x: expected real numbers, got complex64"),
    (
        lambda: checks.expect_gradient("dy", 2, (2, 3)),
        "dy: expected a floating-point array, got int; convert it with np.asarray(dy, np.float32)",
    ),
    (lambda: checks.expect_floating_type("dtype", int), "dtype: expected a floating-point type, got int64"),
    (lambda: checks.expect_floating_type("dtype", "real"), "dtype: expected a floating-point type, got 'real'"),
    (lambda: checks.expect_positive(depth=8.0), "depth: expected an integer, got 8.0"),
    (lambda: checks.expect_positive(heads=2, depth=True), "depth: expected an integer, got True"),
    (lambda: checks.expect_boolean(causal=True, tied="no"), "tied: expected True or False, got 'no'"),
    (lambda: checks.expect_boolean(tied=1), "tied: expected True or False, got 1"),
    (lambda: checks.expect_instance("text", None, str), "text: expected a str, got None"),
    (lambda: checks.expect_instance("x", 3, OSError, none=True), "x: expected an OSError or None, got 3"),
    (lambda: checks.expect_number("lr", True), "lr: expected a number, got True"),
    (lambda: checks.expect_fraction("p", None), "p: expected a number, got None"),
    (lambda: checks.expect_real_number("x", 1j), "x: expected a number, got 1j"),
    (lambda: checks.expect_texts("texts", "ab"), "texts: expected a list of texts, got str"),
    (lambda: checks.expect_texts("texts", 3), "texts: expected a list of texts, got int"),
    (lambda: checks.expect_texts("texts", ["a", 3], list), "texts[1]: expected a str, got 3"),
    (lambda: checks.expect_lengths([1]), "lengths: expected an array of integers (B,), got list"),
    (lambda: checks.expect_lengths(F[0], B=3), "lengths: expected integers, got float32"),
    (lambda: checks.expect_array("x", "text"), "x: expected an array of numbers, got 'text'"),
    (lambda: checks.expect_array("x", [[1], [2, 3]]), "x: expected an array of numbers, got [[1], [2, 3]]"),
    (lambda: checks.expect_integers("ids", [1]), "ids: expected an array of integers, got list"),
    (lambda: checks.expect_integers("ids", Foreign("lib.float16")), "ids: expected integers, got lib.float16"),
    (lambda: checks.expect_integers("ids", MASKED), "ids: expected integers, got MaskedArray"),
]

OUT_OF_RANGE = [
    (lambda: checks.expect_shape("x", F, "B T C"), "x: expected (B, T, C), got (2, 3)"),
    (lambda: checks.expect_shape("x", F, "B T C", C=3), "x: expected (B, T, 3), got (2, 3)"),
    (lambda: checks.expect_shape("x", F, "B C", C=4), "x: expected (B, 4), got (2, 3)"),
    (lambda: checks.expect_shape("x", F, "B C", B=1, C=3), "x: expected (1, 3), got (2, 3)"),
    (lambda: checks.expect_columns("x", np.ones(())), "x: expected at least one column, got ()"),
    (lambda: checks.expect_columns("x", F[:, :0]), "x: expected at least one column, got (2, 0)"),
    (lambda: checks.expect_like("x", F, (3, 2)), "x: expected (3, 2), got (2, 3)"),
    (lambda: checks.expect_gradient("dy", F, ()), "dy: expected (), got (2, 3)"),
    (lambda: checks.expect_gradient("dy", 2**31, ()), f"dy: expected a number <= {LARGEST}, got {2**31}"),
    (lambda: checks.expect_gradient("dy", -np.inf, ()), "dy: expected a finite number, got -inf"),
    (lambda: checks.expect_gradient("dy", np.float64("nan"), ()), "dy: expected a finite number, got nan"),
    (lambda: checks.expect_positive(depth=1, heads=0), "heads: expected a number >= 1, got 0"),
    (lambda: checks.expect_at_least(-2, start=-3), "start: expected a number >= -2, got -3"),
    (lambda: checks.expect_at_least(0, stop=2**31), f"stop: expected a number <= {LARGEST}, got {2**31}"),
    (lambda: checks.expect_one_of("norm", "rms", ("pre", "post")), "norm: expected one of pre, post, got 'rms'"),
    (lambda: checks.expect_one_of("norm", ["pre"], (["pre"],)[:0]), "norm: expected one of , got ['pre']"),
    (lambda: checks.expect_number("lr", -1.0), "lr: expected a finite number >= 0, got -1.0"),
    (lambda: checks.expect_number("lr", 0, zero=False), "lr: expected a finite number > 0, got 0"),
    (lambda: checks.expect_number("lr", np.inf), "lr: expected a finite number >= 0, got inf"),
    (lambda: checks.expect_number("lr", np.nan, infinite=True), "lr: expected a number >= 0, got nan"),
    (lambda: checks.expect_number("lr", HUGE), "lr: expected a finite number >= 0, got a number of 401 digits"),
    (lambda: checks.expect_fraction("p", 1), "p: expected 0 <= p < 1, got 1"),
    (lambda: checks.expect_fraction("betas", -0.5, "beta"), "betas: expected 0 <= beta < 1, got -0.5"),
    (lambda: checks.expect_fraction("p", np.nan), "p: expected 0 <= p < 1, got nan"),
    (lambda: checks.expect_lengths(I), "lengths: expected (B), got (2, 3)"),
    (lambda: checks.expect_range("x", np.array([2, 4]), 2, 3), "x: expected values from 2 to 3, got 4"),
    (lambda: checks.expect_range("x", np.array([1, 4]), 2, 3), "x: expected values from 2 to 3, got 1"),
]


@pytest.mark.parametrize("check", ACCEPTED)
def test_values_that_are_accepted(check):
    check()


@pytest.mark.parametrize(("check", "message"), WRONG_TYPES)
def test_values_of_a_wrong_type(check, message):
    with pytest.raises(TypeError) as info:
        check()
    assert str(info.value) == message


@pytest.mark.parametrize(("check", "message"), OUT_OF_RANGE)
def test_values_out_of_range(check, message):
    with pytest.raises(ValueError) as info:
        check()
    assert str(info.value) == message


def test_an_id_out_of_range_is_an_index_error():
    with pytest.raises(IndexError, match=r"^ids: expected values from 0 to 4, got 5$"):
        checks.expect_ids("ids", np.array([0, 5]), 5)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="a long double is a double here")
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_doubles_are_refused(dtype):
    with pytest.raises(TypeError, match=r"^x: expected float64 or a smaller type, got (float|complex)\d+$"):
        checks.expect_floating(x=np.ones(2, dtype))
    with pytest.raises(TypeError, match=r"^dtype: expected a floating-point type, got (float|complex)\d+$"):
        checks.expect_floating_type("dtype", dtype)


def test_bfloat16_is_a_floating_point_type():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    checks.expect_real("x", np.ones(2, bfloat16))
    checks.expect_floating_type("dtype", bfloat16)
    with pytest.raises(TypeError, match=r"^x: expected a floating-point array, got "):
        checks.expect_floating(x=np.zeros(2, "V2"))


def test_sizes_that_do_not_fit_in_memory(monkeypatch):
    monkeypatch.setattr(checks, "memory", lambda: 2**30)
    checks.expect_memory(2**28, depth=3)
    with pytest.raises(ValueError) as info:
        checks.expect_memory(5 * 2**28, "tables", vocab_size=10, d_model=7)
    assert str(info.value) == (
        "vocab_size, d_model: expected tables that fit in 1 GB of memory, got 5 GB for vocab_size 10, d_model 7"
    )
    with pytest.raises(ValueError, match=r"^depth: expected weights that fit in 1 GB"):
        checks.expect_memory(2**28 + 1, depth=3)


def test_integers_of_numpy_become_those_of_python():
    @dataclass(frozen=True)
    class Local:
        radius: int
        step: int

    pattern = Local(np.int8(64), np.int8(2))
    checks.as_integers(pattern, "radius")
    assert type(pattern.radius) is int and 4 * pattern.radius == 256 and type(pattern.step) is np.int8


def test_numbers_become_an_array():
    x = np.ones(2, np.float32)
    assert checks.expect_array("x", x) is checks.expect_array("x", x, np.float32) is x
    found = checks.expect_array("x", [[1, 2]], np.float16)
    assert found.dtype == np.float16 and found.tolist() == [[1, 2]]


def test_values_on_a_device_are_checked_unless_they_were_checked_before():
    """Values on the CPU are always checked."""
    ids = STRICT.xp.asarray(np.array([0, 7]))
    for _ in range(2):
        with pytest.raises(IndexError, match=r"^ids: expected values from 0 to 3, got 7$"):
            checks.expect_ids("ids", ids, 4)
        with pytest.raises(ZeroDivisionError), checks.checked_on_host():
            checks.expect_ids("ids", ids, 4)
            with pytest.raises(IndexError, match=r"^ids: expected values from 0 to 3, got 7$"):
                checks.expect_ids("ids", np.array([0, 7]), 4)
            raise ZeroDivisionError


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

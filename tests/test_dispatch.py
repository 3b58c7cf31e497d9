import threading
from typing import NamedTuple

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.dispatch import (
    backward,
    fast,
    has_twin,
    is_fast,
    operation,
    reference_only,
    turned_off,
    twins_of,
    when_fast,
)
from scratchformer.testing.strict import STRICT


@pytest.fixture
def double():
    """An operation with a twin for NumPy arrays of float32; each function records in a list that it ran."""
    ran = []

    @operation
    def double(x, by=2):
        """y = 2 x."""
        ran.append("reference")
        if x.ndim != 1:
            raise ValueError(f"x: expected (N), got {x.shape}")
        return by * x, by

    @backward
    def double_backward(dy, cache, extra=0):
        ran.append("reference backward")
        return cache * dy

    double.add_twin(np.ndarray, lambda x, by=2: x.ndim == 1 and x.dtype == np.float32, *recording(ran, "fast"))
    return double, double_backward, ran


def recording(ran, name):
    def forward(x, by=2):
        ran.append(name)
        return by * x, by

    def backward(dy, cache, extra=0):
        assert dy.dtype == np.float32
        ran.append(f"{name} backward")
        return dy * np.float32(cache + extra)

    return forward, backward


def ones(*shape):
    return np.ones(shape, np.float32)


def test_the_type_of_the_array_selects_the_twin(double):
    op, op_backward, ran = double
    for x in (ones(2), STRICT.xp.ones(2)):
        y, cache = op(x, by=3)
        op_backward(y, cache)
    assert ran == ["fast", "fast backward", "reference", "reference backward"]


def test_arguments_by_keyword_select_the_twin_too(double):
    op, op_backward, ran = double
    y, cache = op(by=3, x=ones(2))
    op_backward(cache=cache, dy=y)
    assert ran == ["fast", "fast backward"]


def test_reference_only(double):
    op, op_backward, ran = double
    with reference_only():
        y, cache = op(ones(2))
        op_backward(y, cache)
    op(ones(2))
    assert ran == ["reference", "reference backward", "fast"]


def test_the_type_of_the_cache_selects_the_backward(double):
    """It does not matter what was switched on between forward and backward."""
    op, op_backward, ran = double
    y, fast = op(ones(2))
    with reference_only():
        op_backward(y, fast)
        y, plain = op(ones(2))
    op_backward(y, plain)
    assert ran == ["fast", "fast backward", "reference", "reference backward"]


def test_reference_only_nested_and_left_by_an_error(double):
    op, _, ran = double
    with reference_only():
        with pytest.raises(ZeroDivisionError), reference_only():
            raise ZeroDivisionError
        op(ones(2))
    op(ones(2))
    assert ran == ["reference", "fast"]


def test_reference_only_holds_in_all_threads(double):
    """Both in threads that were already running and in those started inside."""
    op, _, ran = double
    begin = threading.Event()

    def work():
        begin.wait(600)
        op(ones(2))

    early = threading.Thread(target=work)
    early.start()
    with reference_only():
        late = threading.Thread(target=work)
        late.start()
        begin.set()
        early.join()
        late.join()
    op(ones(2))
    assert ran == ["reference", "reference", "fast"]


def test_the_reference_can_be_called_by_name(double):
    op, op_backward, ran = double
    op.reference(np.ones(2))
    op_backward.reference(np.ones(2), 2)
    assert ran == ["reference", "reference backward"]
    assert op.__name__ == "double" and op.__doc__ == "y = 2 x."


def test_every_operation_of_the_package_is_dispatched():
    """So a twin can be registered for each."""
    for name in ops.__all__:
        if name.endswith("_backward"):
            forward = getattr(ops, name.removesuffix("_backward"))
            assert callable(forward.add_twin) and getattr(ops, name).reference


def test_where_a_twin_does_not_fit_the_reference_runs_and_raises_the_errors(double):
    op, op_backward, ran = double
    y, cache = op(np.ones(2))
    op_backward(y, cache)
    with pytest.raises(ValueError, match=r"x: expected \(N\), got \(2, 2\)"):
        op(ones(2, 2))
    assert ran == ["reference", "reference backward", "reference"]
    for wrong in ((), (ones(2), 2, 3)):
        with pytest.raises(TypeError):
            op(*wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        op(ones(2), size=3)


def test_fast_twins_run_inside_the_block_only_and_before_the_others(double):
    op, op_backward, ran = double
    forward, back = recording(ran, "compiled")
    op.add_twin(np.ndarray, lambda x, by=2: x.size > 2, forward, back, fast=True)
    op(ones(3))
    with fast():
        y, cache = op(ones(3))
        op(ones(2))
        with reference_only():
            op(ones(3))
    op_backward(y, cache)
    with pytest.raises(RuntimeError), fast():
        raise RuntimeError
    op(ones(3))
    assert ran == ["fast", "compiled", "fast", "reference", "compiled backward", "fast"]
    assert [twin.forward for twin in twins_of(op, fast=True)] == [forward]
    assert len(twins_of(op)) == 1


def test_plain_twins_are_asked_in_the_order_in_which_they_were_registered(double):
    op, _, ran = double
    op.add_twin(np.ndarray, lambda x, by=2: True, *recording(ran, "second"))
    op(ones(2))
    op(np.ones(2))
    with fast():
        op(ones(2))
    assert ran == ["fast", "second", "fast"]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_gradient_of_another_type_is_converted_and_so_are_the_results(double, dtype):
    op, op_backward, ran = double
    y, cache = op(ones(2))
    assert y.dtype == np.float32
    dx = op_backward(y.astype(dtype), cache)
    assert dx.dtype == dtype and ran[-1] == "fast backward" and np.array_equal(dx, [4, 4])


@pytest.mark.parametrize(
    "dy, error", [(ones(3), ValueError), (np.ones(2, int), TypeError), ([1.0, 1.0], TypeError), (1.0, TypeError)]
)
def test_a_gradient_that_is_not_like_y_is_refused(double, dy, error):
    op, op_backward, _ = double
    _, cache = op(ones(2))
    with pytest.raises(error, match="dy: expected"):
        op_backward(dy, cache)


def test_further_arguments_of_a_backward_reach_its_twin(double):
    op, op_backward, _ = double
    y, cache = op(ones(2))
    assert np.array_equal(op_backward(y, cache, extra=1), 3 * y)
    assert np.array_equal(op_backward(dy=y, cache=cache, extra=1), op_backward(y, cache, 1))


def test_the_cache_of_one_operation_is_refused_by_the_backward_of_another(double):
    op, _, _ = double
    _, cache = op(ones(2))
    for op_backward in (ops.linear_backward, ops.softmax_backward):
        with pytest.raises(TypeError, match=r": expected the cache of \w+, got that of double"):
            op_backward(ones(2), cache)


def test_the_gradient_of_a_scalar_may_be_a_number():
    @operation
    def total(x): ...

    @backward
    def total_backward(dloss, cache): ...

    def forward(x):
        return x.sum(), x.size

    total.add_twin(np.ndarray, lambda x: True, forward, lambda dloss, size: np.full(size, dloss, np.float32))
    _, cache = total(ones(3))
    for dloss in (2, 2.0, np.float32(2), np.float64(2)):
        assert np.array_equal(total_backward(dloss, cache), [2, 2, 2])
    for wrong in (ones(3), "2", float("nan")):
        with pytest.raises((TypeError, ValueError), match="dloss: expected"):
            total_backward(wrong, cache)


def test_an_operation_without_backward_has_twins_too():
    @operation
    def negative(x): ...

    negative.add_twin(np.ndarray, lambda x: True, lambda x: -x)
    assert np.array_equal(negative(ones(2)), -ones(2))


def test_what_registers_fast_twins_runs_once_and_late():
    loaded = []
    when_fast(lambda: loaded.append(1))
    assert not loaded
    for _ in range(2):
        with fast():
            pass
    assert loaded == [1]


def test_threads_that_enter_and_leave_blocks_leave_no_block_open(double):
    """Without the interpreter lock, a change of a counter may be lost; then all later calls would run the reference."""
    op, _, ran = double

    def enter():
        start.wait()
        for _ in range(1000):
            with reference_only(), fast():
                pass

    threads = [threading.Thread(target=enter) for _ in range(8)]
    start = threading.Barrier(len(threads))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    op(ones(2))
    assert ran == ["fast"] and not is_fast()


def test_a_twin_may_be_for_numbers_of_one_size(double):
    """Its `fits` is not called for numbers with another number of bytes."""
    op, _, ran = double

    def fits(x, by=2):
        assert x.dtype == np.float64
        return x.ndim == 1

    op.add_twin(np.ndarray, fits, *recording(ran, "eight bytes"), bytes=8)
    for dtype in np.float32, np.float64, np.float16:
        op(np.ones(2, dtype))
    assert ran == ["fast", "eight bytes", "reference"]
    assert [has_twin(op, np.ones(2, dtype)) for dtype in (np.float32, np.float64, np.float16)] == [True, True, False]
    assert not has_twin(op, np.ones((2, 2))) and not has_twin(op, STRICT.xp.ones(2)) and not has_twin(op, 1.0)


def test_has_twin_depends_on_the_block(double):
    op, _, ran = double
    op.add_twin(np.ndarray, lambda x, by=2: x.dtype == np.float16, *recording(ran, "compiled"), fast=True)
    half = np.ones(2, np.float16)
    assert has_twin(op, ones(2)) and not has_twin(op, half)
    with fast():
        assert has_twin(op, ones(2)) and has_twin(op, half)
        with reference_only():
            assert not has_twin(op, ones(2)) and not has_twin(op, half)
    assert not ran


def test_an_error_in_fits_is_not_hidden(double):
    op, _, _ = double
    op.add_twin(np.ndarray, lambda x, by=2: x.size > "3", *recording([], "wrong"))
    with pytest.raises(TypeError, match="not supported between instances of 'int' and 'str'"):
        op(np.ones(2))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_each_of_several_gradients_is_converted(dtype):
    @operation
    def both(x): ...

    @backward
    def both_backward(dy, cache): ...

    both.add_twin(np.ndarray, lambda x: True, lambda x: (x, None), lambda dy, kept: (dy, dy + dy.dtype.itemsize))
    _, cache = both(ones(2))
    dx, dw = both_backward(np.ones(2, dtype), cache)
    assert dx.dtype == dw.dtype == dtype and dx.tolist() == [1, 1] and dw.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        ({"SCRATCHFORMER_FAST": "1", "NUMBA_DISABLE_JIT": "0"}, ""),
        ({"SCRATCHFORMER_FAST": "0", "NUMBA_DISABLE_JIT": "1"}, "SCRATCHFORMER_FAST=0"),
        ({"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT=1"),
    ],
)
def test_what_turns_fast_twins_off(monkeypatch, environment, expected):
    for name in "SCRATCHFORMER_FAST", "NUMBA_DISABLE_JIT":
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert turned_off() == expected


class Kept(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("annotation", "right", "kind"),
    [
        (Kept, [Kept(1)], "Kept"),
        ("Kept", [Kept(1)], "Kept"),
        ("slice", [slice(1)], "slice"),
        ("Array", [np.ones(2), STRICT.xp.ones(2), np.ones(2, bool)], "array"),
    ],
)
def test_a_cache_of_another_type_than_the_annotation(annotation, right, kind):
    def of_cache_backward(dy, kept):
        return dy

    of_cache_backward.__annotations__["kept"] = annotation
    op_backward = backward(of_cache_backward)
    for each in right:
        assert op_backward(3, each) == op_backward(kept=each, dy=3) == 3
    wrong = {"None": None, "tuple": (1,), "float": 1.0}
    if kind == "array":
        wrong |= {"MaskedArray": np.ma.MaskedArray([1.0]), "ndarray": np.array(["a"]), "str": "a"}
    else:
        wrong |= {"ndarray": np.ones(2)}
    for got, each in wrong.items():
        with pytest.raises(TypeError, match=f"^kept: expected the {kind} that forward returned, got {got}$"):
            op_backward(3, each)


def test_a_cache_without_an_annotation_of_its_type_is_not_checked():
    for annotation in None, "Any", dict:

        def of_cache_backward(dy, kept):
            return dy

        if annotation is not None:
            of_cache_backward.__annotations__["kept"] = annotation
        assert backward(of_cache_backward)(3, None) == 3

import threading
from typing import NamedTuple

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.dispatch import backward, fast, operation, reference_only, when_fast
from scratchformer.testing.strict import STRICT


class FastCache(NamedTuple):
    x: object


@pytest.fixture
def double():
    """An operation with a twin for NumPy arrays; each function records in a list that it ran."""
    ran = []

    @operation
    def double(x, by=2):
        """y = 2 x."""
        ran.append("reference")
        return by * x, by

    @backward
    def double_backward(dy, cache):
        ran.append("reference backward")
        return cache * dy

    @double.twin(np.ndarray)
    def fast(x, by=2):
        ran.append("fast")
        return by * x, FastCache(by)

    @double_backward.twin(FastCache)
    def fast_backward(dy, cache):
        ran.append("fast backward")
        return cache.x * dy

    return double, double_backward, ran


def test_the_type_of_the_array_selects_the_twin(double):
    op, op_backward, ran = double
    for x in (np.ones(2), STRICT.xp.ones(2)):
        y, cache = op(x, by=3)
        op_backward(y, cache)
    assert ran == ["fast", "fast backward", "reference", "reference backward"]


def test_arguments_by_keyword_select_the_twin_too(double):
    op, op_backward, ran = double
    y, cache = op(by=3, x=np.ones(2))
    op_backward(cache=cache, dy=y)
    assert ran == ["fast", "fast backward"]


def test_reference_only(double):
    op, op_backward, ran = double
    with reference_only():
        y, cache = op(np.ones(2))
        op_backward(y, cache)
    op(np.ones(2))
    assert ran == ["reference", "reference backward", "fast"]


def test_the_type_of_the_cache_selects_the_backward(double):
    """It does not matter what was switched on between forward and backward."""
    op, op_backward, ran = double
    y, fast = op(np.ones(2))
    with reference_only():
        op_backward(y, fast)
        y, plain = op(np.ones(2))
    op_backward(y, plain)
    assert ran == ["fast", "fast backward", "reference", "reference backward"]


def test_reference_only_nested_and_left_by_an_error(double):
    op, _, ran = double
    with reference_only():
        with pytest.raises(ZeroDivisionError), reference_only():
            raise ZeroDivisionError
        op(np.ones(2))
    op(np.ones(2))
    assert ran == ["reference", "fast"]


def test_reference_only_holds_in_all_threads(double):
    """Both in threads that were already running and in those started inside."""
    op, _, ran = double
    begin = threading.Event()

    def work():
        begin.wait(600)
        op(np.ones(2))

    early = threading.Thread(target=work)
    early.start()
    with reference_only():
        late = threading.Thread(target=work)
        late.start()
        begin.set()
        early.join()
        late.join()
    op(np.ones(2))
    assert ran == ["reference", "reference", "fast"]


def test_the_reference_can_be_called_by_name(double):
    op, op_backward, ran = double
    op.reference(np.ones(2))
    op_backward.reference(np.ones(2), 2)
    assert ran == ["reference", "reference backward"]
    assert op.__name__ == "double" and op.__doc__ == "y = 2 x."


def test_a_second_twin_for_one_type_is_refused(double):
    op, op_backward, _ = double
    with pytest.raises(ValueError, match="other: there is already a twin for ndarray"):

        @op.twin(np.ndarray)
        def other(x): ...

    with pytest.raises(ValueError, match="there is already a twin for FastCache"):
        op_backward.twin(FastCache)(print)


def test_every_operation_of_the_package_is_dispatched():
    """So a twin can be registered for each, and for its backward by the type of the cache."""
    for name in ops.__all__:
        if name.endswith("_backward"):
            forward = getattr(ops, name.removesuffix("_backward"))
            assert callable(forward.twin) and callable(getattr(ops, name).twin)


def test_fast_twins_run_inside_the_block_only(double):
    op, _, ran = double

    @op.twin(np.ndarray, fast=True)
    def compiled(x, by=2):
        ran.append("compiled")
        return by * x, FastCache(by)

    op(np.ones(2))
    with fast():
        op(np.ones(2))
        with reference_only():
            op(np.ones(2))
    with pytest.raises(RuntimeError), fast():
        raise RuntimeError
    op(np.ones(2))
    assert ran == ["fast", "compiled", "reference", "fast"]


def test_what_registers_fast_twins_runs_once_and_late():
    loaded = []
    when_fast(lambda: loaded.append(1))
    assert not loaded
    for _ in range(2):
        with fast():
            pass
    assert loaded == [1]

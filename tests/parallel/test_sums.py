"""A sum has the same bits in whichever order its terms are ready."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.parallel.replicas import TreeSum


def tree(terms):
    """The sum of each half, and then of both; the first half has as many terms as fill a tree."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return tree(terms[:half]) + tree(terms[half:])


@given(st.data(), st.integers(1, 19), st.integers(1, 5))
def test_terms_may_be_ready_in_any_order(data, count, workers):
    """Workers have an array each, and all their terms go through it; the last one may stay there."""
    terms = np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)
    own = [np.empty(3, np.float32) for _ in range(workers)]
    queues = [list(range(worker, count, workers)) for worker in range(workers)]
    spare = []
    total = TreeSum(count, spare)
    while ready := [worker for worker in range(workers) if queues[worker]]:
        worker = data.draw(st.sampled_from(ready))
        place = queues[worker].pop(0)
        own[worker][...] = terms[place]
        total.add(place, own[worker], copy=bool(queues[worker]))
    np.testing.assert_array_equal(total.total.array, tree(terms))
    assert list(total.waiting.values()) == [total.total]
    total.release(total.total)
    assert not any(a is b for a in spare for b in own)
    assert len({id(a) for a in spare}) == len(spare)


@pytest.mark.parametrize(
    ("count", "workers", "copies"), [(1, 1, 0), (8, 1, 3), (16, 1, 4), (8, 2, 2), (16, 2, 3), (8, 8, 0)]
)
def test_how_many_arrays_wait(count, workers, copies):
    own, spare = np.zeros((workers, 3)), []
    total = TreeSum(count, spare)
    for place in range(count):
        total.add(place, own[place % workers], copy=place + workers < count)
    total.release(total.total)
    assert len(spare) == copies


def test_room_is_in_arrays_that_hold_nothing():
    """The sum of two terms of four is in a copy, so their array is free until the third one waits in it."""
    own, spare = np.zeros(10), [np.zeros(10), np.zeros(10)]
    total = TreeSum(4, spare)
    total.add(0, own)
    total.add(1, own, copy=False)
    (kept,) = total.waiting.values()
    found = [*islice(total.room(own, 3), 8)]
    for i, piece in enumerate(found):
        assert piece.shape == (3,) and not any(np.shares_memory(piece, other) for other in [kept.array, *found[:i]])
        assert any(np.shares_memory(piece, array) for array in [own, *spare]) == (i < 6)
    total.add(2, own, copy=False)
    assert not np.shares_memory(own, next(total.room(own, 3)))

"""The strategies: a letter has one size, options are respected, examples can be repeated."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from scratchformer.testing.strategies import arrays, ids, lengths, sizes, tensors


@given(sizes("B T 3 B", min_size=2, max_size=4))
def test_sizes(size):
    assert size.keys() == {"B", "T"} and all(2 <= n <= 4 for n in size.values())


@given(tensors("B H T D", "B H S D", "B H S D", "3 D"))
def test_letters_stand_for_one_size(drawn):
    q, k, v, w = drawn
    assert q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3] == w.shape[1]
    assert k.shape == v.shape and w.shape[0] == 3
    assert min(q.shape) > 1 and all(x.dtype == np.float64 for x in drawn)


@given(tensors("N 50", "N 50", scales=(1e-3, 1e2), dtype=np.float32))
def test_each_array_has_one_of_the_scales(drawn):
    for x in drawn:
        assert x.dtype == np.float32
        assert min(abs(np.std(x) / scale - 1) for scale in (1e-3, 1e2)) < 0.5


@given(st.data())
def test_sizes_shared_between_strategies(data):
    size = data.draw(sizes("B T V"))
    table = data.draw(arrays("V C", fixed=size))
    tokens = data.draw(ids("B T", high=size["V"], fixed=size))
    count = data.draw(lengths(fixed=size))
    assert table[tokens].shape == (size["B"], size["T"], table.shape[1])
    assert tokens.dtype == np.int64 and 0 <= tokens.min() and tokens.max() < size["V"]
    assert count.shape == (size["B"],) and 1 <= count.min() and count.max() <= size["T"]


@given(ids("1000", high=3), lengths("1000", "4", min_length=0))
def test_ranges_are_used_fully(tokens, count):
    assert set(tokens) == {0, 1, 2}
    assert 0 <= count.min() and count.max() <= 4


def test_a_failing_example_shows_sizes_scales_and_seed():
    @settings(database=None, derandomize=True)
    @given(arrays("B T"))
    def fails(x):
        assert x.size < 6

    with pytest.raises(AssertionError) as caught:
        fails()
    notes = "\n".join(caught.value.__notes__)
    assert "tensors('B T'): sizes {'B': 2, 'T': 3}, scales [0.001], seed 0" in notes


def test_whole_numbers_zeros_and_ties_are_drawn():
    """In some examples; a user's operation has its kinks and thresholds there."""
    seen = set()

    @settings(database=None, derandomize=True, max_examples=1000)
    @given(tensors("N C", "C", scales=(1.0,), min_size=1))
    def look(drawn):
        x, y = drawn
        assert x.flat[0] != np.round(x.flat[0])  # so that not every element is at a kink
        whole = x[x == np.round(x)]
        seen.update(f"the whole number {value:g}" for value in whole if abs(value) < 2)
        seen.update({"a tie that is not whole"} if len(np.unique(x)) + max(len(whole) - 1, 0) < x.size else ())
        seen.update({"equal elements of two arrays"} if np.isin(x, y).any() else ())
        seen.update({"no whole number"} if not len(whole) else ())

    look()
    whole = {f"the whole number {value}" for value in (-1, 0, 1)} | {"the whole number -0"}
    assert seen - whole == {"a tie that is not whole", "equal elements of two arrays", "no whole number"}
    assert {"the whole number -1", "the whole number 0", "the whole number 1"} <= seen

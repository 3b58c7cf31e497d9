import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.backend import to_cpu, to_device
from scratchformer.ops import Causal, Full, Padding, Pattern
from scratchformer.ops.patterns import Tile

# Of each pattern: how to make it from lengths, and when query t may see key s of sequence b.
PATTERNS = {
    "full": (lambda n: Full(), lambda b, t, s, T, S, n: True),
    "causal": (lambda n: Causal(), lambda b, t, s, T, S, n: s - S <= t - T),
    "padding": (lambda n: Padding(n), lambda b, t, s, T, S, n: s < n[b]),
    "causal & padding": (lambda n: Causal() & Padding(n), lambda b, t, s, T, S, n: s - S <= t - T and s < n[b]),
    "padding & full": (lambda n: Padding(n) & Full(), lambda b, t, s, T, S, n: s < n[b]),
    "full & full": (lambda n: Full() & Full(), lambda b, t, s, T, S, n: True),
}


def brute_force(may_see, T, S, n):
    """(B, T, S), one pair after the other."""
    return np.array([[[may_see(b, t, s, T, S, n) for s in range(S)] for t in range(T)] for b in range(len(n))])


@st.composite
def tables(draw):
    """T, S and three lengths from 0 to S."""
    T, S = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return T, S, np.array(draw(st.lists(st.integers(0, S), min_size=3, max_size=3)))


@pytest.mark.parametrize("name", PATTERNS)
@given(tables())
def test_dense_table(device, name, table):
    T, S, n = table
    make, may_see = PATTERNS[name]
    dense = make(to_device(n, device)).dense(T, S, device.xp)
    expected = brute_force(may_see, T, S, n)
    if dense is None:
        assert expected.all()
    else:
        assert dense.dtype == bool
        assert np.array_equal(np.broadcast_to(to_cpu(dense), (3, 2, T, S)), np.stack([expected] * 2, axis=1))


@pytest.mark.parametrize("name", PATTERNS)
@given(tables(), st.data())
def test_tiles(device, name, table, data):
    """A tile is empty, full or mixed as the table says, and its mask is the table cut out."""
    T, S, n = table
    make, may_see = PATTERNS[name]
    pattern, expected = make(to_device(n, device)), brute_force(may_see, T, S, n)
    height, width = data.draw(st.integers(1, T)), data.draw(st.integers(1, S))
    for b, top, left in np.ndindex(3, -(-T // height), -(-S // width)):
        rows = slice(top * height, min(T, (top + 1) * height))
        columns = slice(left * width, min(S, (left + 1) * width))
        part = expected[b, rows, columns]
        mask = to_cpu(pattern.mask(b, rows, columns, T, S, device.xp))
        assert np.array_equal(np.broadcast_to(mask, part.shape), part)
        tile = pattern.tile(b, rows, columns, T, S)
        if tile is Tile.MIXED and "&" in name:
            continue  # two patterns that are mixed may leave nothing, and are not asked to know
        assert tile is (Tile.FULL if part.all() else Tile.MIXED if part.any() else Tile.EMPTY)


def test_together_two_patterns_know_what_either_knows():
    both = Causal() & Padding(np.array([4]))
    assert both.tile(0, slice(0, 4), slice(4, 8), 8, 8) is Tile.EMPTY
    assert both.tile(0, slice(4, 8), slice(4, 8), 8, 8) is Tile.EMPTY
    assert both.tile(0, slice(4, 8), slice(0, 4), 8, 8) is Tile.FULL
    assert both.tile(0, slice(0, 4), slice(0, 4), 8, 8) is Tile.MIXED


def test_new_queries_stand_behind_the_keys_of_the_past():
    """Two queries to five keys: the last one sees all, the one before it all but the last."""
    assert Causal().dense(2, 5, np).tolist() == [[True] * 4 + [False], [True] * 5]


def test_a_pattern_that_says_nothing():
    class Silent(Pattern):
        pass

    with pytest.raises(TypeError, match="Silent does not say its truth table"):
        Silent().dense(2, 2, np)
    with pytest.raises(TypeError, match="Silent does not say its tiles"):
        Silent().tile(0, slice(0, 1), slice(0, 1), 2, 2)
    with pytest.raises(TypeError, match="Silent does not say its tiles"):
        Silent().mask(0, slice(0, 1), slice(0, 1), 2, 2, np)


def test_lengths_that_do_not_fit():
    with pytest.raises(ValueError, match=r"lengths: expected \(B\), got \(2, 1\)"):
        Padding(np.ones((2, 1), int))
    with pytest.raises(TypeError, match="lengths: expected integers, got bool"):
        Padding(np.ones(2, bool))
    with pytest.raises(TypeError, match=r"lengths: expected an array of integers \(B,\), got list"):
        Padding([1, 2])


def test_patterns_combine_with_patterns_only():
    with pytest.raises(TypeError, match=r"pattern: expected None or a Pattern, .* got ndarray"):
        Causal() & np.ones((2, 2), bool)

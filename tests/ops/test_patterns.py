from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.checks import MAX_SIZE
from scratchformer.ops import (
    BlockEnds,
    Causal,
    Edges,
    Full,
    Heads,
    Local,
    Padding,
    Pattern,
    SameBlock,
    Strided,
    patterns,
)
from scratchformer.ops.patterns import Pair, Tile
from scratchformer.testing.strict import STRICT

# For each pattern: how to make it from lengths, and whether query t may see key s in sequence b.
PATTERNS = {
    "full": (lambda n: Full(), lambda b, t, s, T, S, n: True),
    "causal": (lambda n: Causal(), lambda b, t, s, T, S, n: s - S <= t - T),
    "padding": (lambda n: Padding(n), lambda b, t, s, T, S, n: s < n[b]),
    "causal & padding": (lambda n: Causal() & Padding(n), lambda b, t, s, T, S, n: s - S <= t - T and s < n[b]),
    "padding & full": (lambda n: Padding(n) & Full(), lambda b, t, s, T, S, n: s < n[b]),
    "local": (lambda n: Local(2), lambda b, t, s, T, S, n: abs(t + S - T - s) <= 2),
    "strided": (lambda n: Strided(3), lambda b, t, s, T, S, n: (t + S - T - s) % 3 == 0),
    "causal & local": (lambda n: Causal() & Local(1), lambda b, t, s, T, S, n: 0 <= t + S - T - s <= 1),
    "strided & padding": (
        lambda n: Strided(2) & Padding(n),
        lambda b, t, s, T, S, n: (t + S - T - s) % 2 == 0 and s < n[b],
    ),
    "local | strided": (
        lambda n: Local(1) | Strided(3),
        lambda b, t, s, T, S, n: abs(t + S - T - s) <= 1 or (t + S - T - s) % 3 == 0,
    ),
    "causal & (strided | local)": (
        lambda n: Causal() & (Strided(3) | Local(1)),
        lambda b, t, s, T, S, n: t + S - T - s >= 0 and (t + S - T - s <= 1 or (t + S - T - s) % 3 == 0),
    ),
    "padding | strided": (
        lambda n: Padding(n) | Strided(2),
        lambda b, t, s, T, S, n: s < n[b] or (t + S - T - s) % 2 == 0,
    ),
    "same block": (lambda n: SameBlock(3), lambda b, t, s, T, S, n: (t + S - T) // 3 == s // 3),
    "block ends": (lambda n: BlockEnds(3, 2), lambda b, t, s, T, S, n: s % 3 in (1, 2)),
    "causal & block ends": (
        lambda n: Causal() & BlockEnds(3),
        lambda b, t, s, T, S, n: s <= t + S - T and s % 3 == 2,
    ),
    "causal & (same block | block ends)": (
        lambda n: Causal() & (SameBlock(4) | BlockEnds(4, 2)),
        lambda b, t, s, T, S, n: s <= t + S - T and ((t + S - T) // 4 == s // 4 or s % 4 >= 2),
    ),
    "strided & block ends": (
        lambda n: Strided(2) & BlockEnds(3),
        lambda b, t, s, T, S, n: (t + S - T - s) % 2 == 0 and s % 3 == 2,
    ),
    "block ends | strided": (
        lambda n: BlockEnds(4) | Strided(4),
        lambda b, t, s, T, S, n: (t + S - T - s) % 4 == 0 or s % 4 == 3,
    ),
    "full | padding": (lambda n: Full() | Padding(n), lambda b, t, s, T, S, n: True),
    "full | local": (lambda n: Full() | Local(1), lambda b, t, s, T, S, n: True),
    "full & full": (lambda n: Full() & Full(), lambda b, t, s, T, S, n: True),
}
INTERVALS = [
    "full",
    "full & full",
    "causal",
    "padding",
    "causal & padding",
    "padding & full",
    "local",
    "causal & local",
]


def brute_force(may_see, T, S, n):
    """(B, T, S), one pair at a time."""
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
    """A tile is empty, full or mixed according to the table, and its mask is that part of the table."""
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
        if tile is Tile.MIXED and ("&" in name or "|" in name or "strided" in name):
            continue  # always a safe answer; a combination may be empty or full without either pattern knowing
        assert tile is (Tile.FULL if part.all() else Tile.MIXED if part.any() else Tile.EMPTY)


@pytest.mark.parametrize("name", ["full", "causal", "padding", "local", "same block", "strided", "causal & local"])
@given(tables(), st.data())
def test_a_span_holds_the_columns_that_rows_may_see(device, name, table, data):
    """And no others before or after them, except that of a pattern that visits its own pieces."""
    T, S, n = table
    make, may_see = PATTERNS[name]
    pattern, expected = make(to_device(n, device)), brute_force(may_see, T, S, n)
    first = data.draw(st.integers(0, T - 1))
    rows = slice(first, data.draw(st.integers(first + 1, T)))
    for b in range(3):
        start, stop = pattern.span(b, rows, T, S)
        seen = np.flatnonzero(expected[b, rows].any(axis=0))
        assert 0 <= start and stop <= S
        if "strided" in name or "&" in name:
            assert (start, stop) == (0, S)
        else:
            assert (start, stop) == (seen[0], seen[-1] + 1) if seen.size else start >= stop


@pytest.mark.parametrize("name", PATTERNS)
@given(tables())
def test_intervals(device, name, table):
    """Where a pattern has them, they are the rows of its table."""
    T, S, n = table
    make, may_see = PATTERNS[name]
    found = make(to_device(n, device)).intervals(T, S, device.xp)
    assert (found is not None) == (name in INTERVALS)
    if found is not None:
        begin, end = (to_cpu(x)[..., None] for x in found)
        assert all(((0 <= x) & (x <= S)).all() for x in (begin, end))
        seen = (begin <= np.arange(S)) & (np.arange(S) < end)
        assert np.array_equal(np.broadcast_to(seen, (3, T, S)), brute_force(may_see, T, S, n))


def test_tiles_of_rows_and_columns_with_the_stride_are_known():
    """As in the pieces of the pattern: all their pairs are alike."""
    pattern = Strided(3)
    table = pattern.dense(12, 12, np)
    for first, left, step in np.ndindex(3, 3, 2):
        rows, columns = slice(first, 12, 3), slice(left, 12, 3 * (step + 1))
        part = table[rows, columns]
        assert pattern.tile(0, rows, columns, 12, 12) is (Tile.FULL if part.all() else Tile.EMPTY)
        assert part.all() or not part.any()


def test_a_combination_knows_the_tiles_that_one_pattern_decides():
    both = Causal() & Padding(np.array([4]))
    assert both.tile(0, slice(0, 4), slice(4, 8), 8, 8) is Tile.EMPTY
    assert both.tile(0, slice(4, 8), slice(4, 8), 8, 8) is Tile.EMPTY
    assert both.tile(0, slice(4, 8), slice(0, 4), 8, 8) is Tile.FULL
    assert both.tile(0, slice(0, 4), slice(0, 4), 8, 8) is Tile.MIXED


def test_queries_are_aligned_with_the_last_keys():
    """Two queries and five keys: the last query sees all keys, the one before it all but the last."""
    assert Causal().dense(2, 5, np).tolist() == [[True] * 4 + [False], [True] * 5]


@pytest.mark.parametrize(
    "make",
    [
        Full,
        Causal,
        lambda: Local(2),
        lambda: Strided(3),
        lambda: SameBlock(2),
        lambda: BlockEnds(3),
        lambda: Causal() & (Local(2) | Strided(3)),
        lambda: Causal() & Heads(Local(2), Strided(3)),
    ],
)
def test_a_table_is_made_once_for_a_gpu(make):
    """Also for a pattern that is equal, but another object."""
    table = make().table(4, 7, 9, STRICT.xp)
    assert make().table(4, 7, 9, STRICT.xp) is table
    for T, S in (7, 9), (9, 7), (5, 5):
        found, expected = make().table(4, T, S, STRICT.xp), make().table(4, T, S, np)
        assert (found is None) == (expected is None)
        if found is not None:
            np.testing.assert_array_equal(to_cpu(found), expected)


def test_a_users_own_pattern_is_never_mistaken_for_another():
    """A class derived from one of ours, and a class that cannot be hashed."""

    class Shifted(Local):
        def mask(self, b, rows, columns, T, S, xp):
            return ~super().mask(b, rows, columns, T, S, xp)

    @dataclass
    class Listed(Pattern):
        keys: list

        def mask(self, b, rows, columns, T, S, xp):
            return xp.asarray([s in self.keys for s in range(S)])[None, columns] & (xp.arange(T)[rows, None] >= 0)

    Local(2).table(1, 5, 5, STRICT.xp)
    for pattern in Shifted(2), Listed([1, 3]), Listed([2]), Shifted(2) & Causal():
        np.testing.assert_array_equal(to_cpu(pattern.table(1, 5, 5, STRICT.xp)), pattern.table(1, 5, 5, np))


def test_lengths_on_a_device_are_cut_not_checked():
    begin, end = Padding(to_device(np.array([-3, 2, 9]), STRICT)).intervals(1, 5, STRICT.xp)
    assert to_cpu(begin).ravel().tolist() == [0, 0, 0] and to_cpu(end).ravel().tolist() == [0, 2, 5]


def test_a_table_that_depends_on_the_batch_is_not_kept():
    for lengths in [3, 1], [2, 3]:
        pattern = Padding(to_device(np.array(lengths), STRICT))
        expected = Padding(np.array(lengths)).dense(3, 3, np)
        np.testing.assert_array_equal(to_cpu(pattern.dense(3, 3, STRICT.xp)), expected)


def test_a_users_own_pattern_needs_only_a_mask(device):
    class Even(Pattern):
        """Every key with an even index."""

        def mask(self, b, rows, columns, T, S, xp):
            return xp.arange(columns.start, columns.stop, columns.step or 1)[None, :] % 2 == 0

    assert to_cpu(Even().dense(2, 3, device.xp)).tolist() == [[True, False, True]]
    assert covered(Even(), 0, 5, 7).tolist() == [[1, 0] * 3 + [1]] * 5
    with pytest.raises(TypeError, match="Silent has no mask"):
        type("Silent", (Pattern,), {})().dense(2, 2, np)


def covered(pattern, b, T, S, xp=np):
    """(T, S): how many of the pattern's pieces allow each pair."""
    count = np.zeros((T, S), int)
    for rows, columns, allowed in pattern.pieces(b, T, S, xp):
        part = count[rows, columns]
        assert part.size and part.shape[0] <= 4 * patterns.SIDE and part.shape[1] <= patterns.SIDE
        part += 1 if allowed is None else np.broadcast_to(to_cpu(allowed), part.shape)
    return count


@pytest.mark.parametrize("name", PATTERNS)
@given(tables(), st.sampled_from([1, 2, 3, 64]))
def test_pieces_contain_every_allowed_pair_once(device, name, table, side):
    T, S, n = table
    make, may_see = PATTERNS[name]
    pattern, expected = make(to_device(n, device)), brute_force(may_see, T, S, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "SIDE", side)
        for b in range(3):
            assert np.array_equal(covered(pattern, b, T, S, device.xp), expected[b])


@pytest.mark.parametrize(
    ("pattern", "growth"),
    [
        (Full(), 4),
        (Causal(), 4),
        (Local(64), 2),
        (Strided(64), 4),
        (Causal() & Local(64), 2),
        (SameBlock(64), 2),
        (Causal() & SameBlock(128), 2),
        (BlockEnds(64, 2), 4),
    ],
    ids=str,
)
def test_pieces_grow_as_the_pattern_promises(pattern, growth):
    """Doubling the length visits four times as many pairs for full attention, and twice as many for local."""
    pairs = [visited(pattern, n) for n in (4096, 8192)]
    assert pairs[1] / pairs[0] == pytest.approx(growth, rel=0.05)
    assert pairs[1] <= 1.6 * pattern.visits(8192, 8192)
    if not isinstance(pattern, Causal | Pair):
        assert pairs[1] >= pattern.visits(8192, 8192)


@pytest.mark.parametrize("pattern", [Full(), Padding(np.array([1024])), BlockEnds(4, 4), Full() & BlockEnds(4, 4)])
def test_tiles_are_stacked_where_all_rows_are_alike(pattern):
    assert {r.stop - r.start for r, _, _ in pattern.pieces(0, 1024, 1024, np)} == {4 * patterns.SIDE}


def visited(pattern, n):
    """How many pairs are in the pattern's pieces, at length n."""
    return sum(len(range(n)[r]) * len(range(n)[c]) for r, c, _ in pattern.pieces(0, n, n, np))


def test_a_combination_visits_what_its_pieces_cover():
    few, many = Local(2), Strided(3)
    for one, other in (few, many), (many, few):
        assert (one & other).visits(90, 120) == few.visits(90, 120) < many.visits(90, 120)
        assert (one | other).visits(90, 120) == few.visits(90, 120) + many.visits(90, 120)


def test_a_stride_of_the_root_of_the_length_visits_n_root_n_pairs():
    for n in (4096, 16384):
        stride = int(n**0.5)
        assert visited(Strided(stride), n) == visited(SameBlock(stride), n) == n * stride
        assert visited(BlockEnds(stride), n) == n * stride
        fixed = Causal() & (SameBlock(stride) | BlockEnds(stride, 4))
        assert visited(fixed, n) <= (1 + 4) * n * stride
        for _, pattern in (Causal() & Heads(Local(stride), Strided(stride))).of_heads(2):
            assert visited(pattern, n) <= 4 * n * stride


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Local(-1), "radius: expected a number >= 0, got -1"),
        (lambda: Strided(0), "stride: expected a number >= 1, got 0"),
        (lambda: SameBlock(0), "size: expected a number >= 1, got 0"),
        (lambda: BlockEnds(0), "stride: expected a number >= 1, got 0"),
        (lambda: BlockEnds(4, 0), "width: expected a number >= 1, got 0"),
        (lambda: BlockEnds(4, 5), "width: expected at most the stride, 4, got 5"),
        (lambda: Heads(), "patterns: expected at least one, got none"),
    ],
)
def test_sizes_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_lengths_that_do_not_fit():
    with pytest.raises(ValueError, match=r"lengths: expected \(B\), got \(2, 1\)"):
        Padding(np.ones((2, 1), int))
    for wrong in -1, MAX_SIZE + 1:
        with pytest.raises(ValueError, match=f"lengths: expected values from 0 to {MAX_SIZE}, got {wrong}"):
            Padding(np.array([2, wrong]))
    with pytest.raises(TypeError, match="lengths: expected integers, got bool"):
        Padding(np.ones(2, bool))
    with pytest.raises(TypeError, match=r"lengths: expected an array of integers \(B,\), got list"):
        Padding([1, 2])


def test_patterns_with_arrays_are_compared_by_identity():
    """The truth of == between arrays is not defined; patterns of numbers are equal if these are."""
    n, allowed = np.array([1, 2]), np.ones((2, 2), bool)
    for make in (lambda: Padding(n), lambda: Edges(allowed), lambda: Causal() & Padding(n), lambda: Full() | Local(1)):
        pattern = make()
        assert pattern == pattern and pattern != make() and len({pattern, make()}) == 2
    assert Local(2) == Local(2) != Local(3) and len({Local(2), Local(2)}) == 1
    for pattern in (Full, Causal, lambda: Strided(2), lambda: SameBlock(2), lambda: BlockEnds(2)):
        assert pattern() == pattern() and hash(pattern()) == hash(pattern())


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_cannot_be_changed(name):
    pattern = PATTERNS[name][0](np.array([1]))
    for field in [*vars(pattern)] or ["radius"]:
        with pytest.raises(FrozenInstanceError):
            setattr(pattern, field, 0)


def test_patterns_combine_with_patterns_only():
    with pytest.raises(TypeError, match=r"pattern: expected None or a Pattern, .* got ndarray"):
        Causal() & np.ones((2, 2), bool)


# Patterns for each head


HEADS = {
    "two": lambda n: Heads(Local(1), Strided(2)),
    "causal & two": lambda n: Causal() & Heads(SameBlock(3), BlockEnds(3)),
    "two & padding": lambda n: Heads(Causal(), None) & Padding(n),
    "two | three": lambda n: Heads(Local(0), Causal()) | Heads(Full() & Strided(3), Local(1), SameBlock(2)),
    "one within another": lambda n: Heads(Heads(Local(1), Full()), Causal()),
}
SINGLE = {  # for each, the patterns of six heads, or of four if the number of patterns does not divide six
    "two": lambda n: [Local(1)] * 3 + [Strided(2)] * 3,
    "causal & two": lambda n: [Causal() & SameBlock(3)] * 3 + [Causal() & BlockEnds(3)] * 3,
    "two & padding": lambda n: [Causal() & Padding(n)] * 3 + [Padding(n)] * 3,
    "two | three": lambda n: (
        [Local(0) | Strided(3)] * 2 + [Local(1), Causal() | Local(1)] + [Causal() | SameBlock(2)] * 2
    ),
    "one within another": lambda n: [Local(1), Full(), Causal(), Causal()],
}


@pytest.mark.parametrize("name", HEADS)
@given(tables())
def test_each_head_has_the_table_of_its_pattern(device, name, table):
    T, S, n = table
    pattern, single = (patterns[name](to_device(n, device)) for patterns in (HEADS, SINGLE))
    H = len(single)
    found = np.broadcast_to(to_cpu(pattern.table(H, T, S, device.xp)), (3, H, T, S))
    for h, own in enumerate(single):
        expected = own.dense(T, S, device.xp)
        expected = np.ones((1, 1), bool) if expected is None else to_cpu(expected)
        assert np.array_equal(found[:, h : h + 1], np.broadcast_to(expected, (3, 1, T, S)))
    groups = pattern.of_heads(H)
    assert [h for heads, _ in groups for h in range(H)[heads]] == list(range(H))
    for heads, own in groups:
        for h in range(H)[heads]:
            for b in range(3):
                assert np.array_equal(covered(own, b, T, S, device.xp), found[b, h])


def test_a_number_of_patterns_that_does_not_divide_the_heads():
    q = np.ones((1, 3, 4, 2))
    for run in (ops.attention, ops.attention.reference):
        with pytest.raises(ValueError, match="patterns: expected a number that divides 3 heads, got 2"):
            run(q, q, q, Causal() & Heads(Local(1), Strided(2)))
    with pytest.raises(TypeError, match=r"patterns\[1\]: expected None or a Pattern"):
        Heads(Local(1), "strided")


@pytest.mark.parametrize(
    "around",
    [lambda p: p, lambda p: Heads(Local(1), p), lambda p: Local(1) & p, lambda p: p & Local(1), lambda p: p | Local(1)],
)
def test_padding_must_fit_the_batch(around):
    q = np.ones((2, 2, 4, 2))
    with pytest.raises(ValueError, match=r"lengths: expected \(2\)"):
        ops.attention(q, q, q, around(Padding(np.array([1, 2, 3]))))


# Arbitrary tables


@given(tables(), st.integers(0, 2**32 - 1))
def test_edges_give_their_table(device, table, seed):
    T, S, _ = table
    T = min(T, S)
    allowed = np.random.default_rng(seed).random((S, S)) < 0.4
    pattern = Edges(to_device(allowed, device))
    assert np.array_equal(to_cpu(pattern.dense(T, S, device.xp)), allowed[S - T :])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "SIDE", 2)
        assert np.array_equal(covered(pattern, 0, T, S, device.xp), allowed[S - T :])
        both = pattern & Strided(2)
        strided = to_cpu(Strided(2).dense(T, S, device.xp))
        assert np.array_equal(covered(both, 0, T, S, device.xp), allowed[S - T :] & strided)


def test_tiles_of_edges():
    allowed = np.zeros((4, 4), bool)
    allowed[:2, :2] = allowed[2, 3] = True
    pattern, low, high = Edges(allowed), slice(0, 2), slice(2, 4)
    assert [pattern.tile(0, r, c, 4, 4) for r in (low, high) for c in (low, high)] == [
        Tile.FULL, Tile.EMPTY, Tile.EMPTY, Tile.MIXED,
    ]  # fmt: skip


def test_edges_that_do_not_fit():
    with pytest.raises(ValueError, match=r"allowed: expected a table of the 5 keys and 5 queries, got \(4, 4\)"):
        Edges(np.ones((4, 4), bool)).dense(5, 5, np)
    with pytest.raises(ValueError, match=r"allowed: expected a table of the 4 keys and 5 queries, got \(4, 4\)"):
        Edges(np.ones((4, 4), bool)).dense(5, 4, np)
    with pytest.raises(ValueError, match=r"allowed: expected \(3, 3\), got \(3, 4\)"):
        Edges(np.ones((3, 4), bool))
    with pytest.raises(TypeError, match=r"allowed: expected an array of booleans \(n, n\), got int64"):
        Edges(np.ones((3, 3), np.int64))
    with pytest.raises(TypeError, match=r"allowed: expected an array of booleans \(n, n\), got list"):
        Edges([[True]])


@given(
    stride=st.integers(1, 5), step=st.integers(1, 12), start=st.integers(0, 9), more=st.integers(0, 30), data=st.data()
)
def test_a_tile_of_block_ends_tells_the_truth_about_columns_with_steps(stride, step, start, more, data):
    """With a step that is a multiple of the stride, all columns are alike, and the tile says so."""
    pattern = BlockEnds(stride, data.draw(st.integers(1, stride), "width"))
    rows, columns = slice(0, 2), slice(start, start + more + 1, step)
    mask = pattern.mask(0, rows, columns, 2, start + more + 1, np)
    tile = pattern.tile(0, rows, columns, 2, start + more + 1)
    exact = Tile.FULL if mask.all() else Tile.MIXED if mask.any() else Tile.EMPTY
    assert tile is exact or (tile is Tile.MIXED and step > 1 and step % stride)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.backend import to_cpu, to_device
from scratchformer.records import ngram_buckets, recall

IDS = np.array([[3, 1, 4, 1, 5, 3, 1, 4], [1, 4, 1, 5, 9, 2, 6, 5]], np.int32)


def test_the_same_ngram_has_the_same_bucket_wherever_it_is(device):
    found = to_cpu(ngram_buckets(to_device(IDS, device), (1, 2, 3), 1000))
    assert found.shape == (2, 8, 3)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found[0, 2], found[0, 7])  # 3 1 4
    np.testing.assert_array_equal(found[0, 1, :2], found[0, 6, :2])  # 3 1; before it, nothing and 5
    assert found[0, 1, 2] != found[0, 6, 2]
    np.testing.assert_array_equal(found[0, 3:5], found[1, 2:4])  # 4 1, 1 4 1 and 1 5, 4 1 5
    assert found[0, 3, 1] != found[0, 4, 1]


def test_an_ngram_depends_on_its_n_ids_alone():
    other = IDS.copy()
    other[:, 2] += 1
    same = ngram_buckets(IDS, (2, 3), 1 << 20) == ngram_buckets(other, (2, 3), 1 << 20)
    np.testing.assert_array_equal(same[:, :, 0], np.broadcast_to([1, 1, 0, 0, 1, 1, 1, 1], (2, 8)).astype(bool))
    np.testing.assert_array_equal(same[:, :, 1], np.broadcast_to([1, 1, 0, 0, 0, 1, 1, 1], (2, 8)).astype(bool))


def test_buckets_are_the_same_on_every_machine():
    """A saved model is useless where they differ."""
    assert ngram_buckets(np.array([[0, 1, 2]]), (1, 2), 16_384).tolist() == [
        [[811, 29535], [1622, 25536], [1168, 22258]]
    ]


def test_orders_have_buckets_of_their_own_and_fill_them_evenly():
    ids = np.random.default_rng(0).integers(0, 256, (4, 5_000))
    found = ngram_buckets(ids, (3, 5), 100)
    for i in range(2):
        counts = np.bincount(found[:, 10:, i].reshape(-1), minlength=200)
        assert not counts[: 100 * i].any()
        assert not counts[100 * (i + 1) :].any()
        own = counts[100 * i : 100 * (i + 1)]
        assert own.min() > 140 and own.max() < 265  # 200 on average; a Poisson variable leaves this once in 10,000


def test_the_order_of_ids_matters():
    found = ngram_buckets(np.array([[1, 2], [2, 1]]), [2], 1 << 20)
    assert found[0, 1, 0] != found[1, 1, 0]


@pytest.mark.parametrize(
    ("ids", "orders", "buckets", "message"),
    [
        (IDS, (), 10, "orders: expected at least one length"),
        (IDS, 2, 10, "orders: expected a list of lengths, got 2"),
        (IDS, (2, 0), 10, "orders: expected .* got 0"),
        (IDS, (2.0,), 10, "orders"),
        (IDS, (2,), 0, "buckets"),
        (IDS, (65,), 10, "orders: expected lengths up to 64, got 65"),
        (IDS, (2, 3), 1 << 30, "buckets: expected at most 1,073,741,823, got"),
        (IDS[0], (2,), 10, r"ids: expected \(B, T\)"),
        (IDS.astype(float), (2,), 10, "ids: expected integers"),
    ],
)
def test_bad_arguments_are_named(ids, orders, buckets, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ngram_buckets(ids, orders, buckets)


def followed(ids, n, times):
    """What followed the last occurrences of the n-gram at each position, by looking at every earlier position."""
    found = np.zeros((len(ids), times), int)
    for t in range(n - 1, len(ids)):
        ends = [s for s in range(t - 1, n - 2, -1) if (ids[s - n + 1 : s + 1] == ids[t - n + 1 : t + 1]).all()]
        for k, s in enumerate(ends[:times]):
            found[t, k] = 1 + ids[s + 1]
    return found


@given(
    B=st.integers(0, 3), T=st.integers(0, 40), V=st.sampled_from([1, 2, 3, 256]), seed=st.integers(0, 1000),
    orders=st.lists(st.integers(1, 5), min_size=1, max_size=7), dtype=st.sampled_from([np.uint8, np.int32, np.int64]),
)  # fmt: skip
def test_what_followed_is_recalled(B, T, V, orders, seed, dtype):
    ids = (255 - np.random.default_rng(seed).integers(0, V, (B, T))).astype(dtype)
    found = recall(ids, orders)
    assert found.dtype == np.int32 and found.shape == (B, T, len(orders))
    for b in range(B):
        for i, n in enumerate(orders):
            k = orders[:i].count(n)
            np.testing.assert_array_equal(found[b, :, i], followed(ids[b].astype(int), n, k + 1)[:, k])


def test_the_docstrings_example(device):
    text = np.frombuffer(b"the cat sat on the c", np.uint8)[None]
    assert to_cpu(recall(to_device(text, device), [2]))[0, -1, 0] == 1 + ord("a")


def test_nothing_later_is_recalled():
    """A position is the same whatever follows it."""
    ids = np.random.default_rng(0).integers(0, 3, (1, 300))
    found = recall(ids, (1, 2, 4, 4))
    for T in 1, 2, 57, 299:
        np.testing.assert_array_equal(recall(ids[:, :T], (1, 2, 4, 4)), found[:, :T])


@pytest.mark.parametrize(
    ("ids", "orders", "message"),
    [
        (IDS, (), "orders: expected at least one length"),
        (IDS, (65,), "orders: expected lengths up to 64, got 65"),
        (IDS[0], (2,), r"ids: expected \(B, T\)"),
        ([[1, 2]], (2,), "ids: expected an array"),
        (IDS.astype(float), (2,), "ids: expected integers"),
    ],
)
def test_bad_arguments_of_recall_are_named(ids, orders, message):
    with pytest.raises((TypeError, ValueError), match=message):
        recall(ids, orders)

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device

IDS = np.array([[3, 1, 4, 1, 5, 3, 1, 4], [1, 4, 1, 5, 9, 2, 6, 5]], np.int32)


def test_the_same_ngram_has_the_same_bucket_wherever_it_is(device):
    found = to_cpu(ops.ngram_buckets(to_device(IDS, device), (1, 2, 3), 1000))
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
    same = ops.ngram_buckets(IDS, (2, 3), 1 << 20) == ops.ngram_buckets(other, (2, 3), 1 << 20)
    np.testing.assert_array_equal(same[:, :, 0], np.broadcast_to([1, 1, 0, 0, 1, 1, 1, 1], (2, 8)).astype(bool))
    np.testing.assert_array_equal(same[:, :, 1], np.broadcast_to([1, 1, 0, 0, 0, 1, 1, 1], (2, 8)).astype(bool))


def test_buckets_are_the_same_on_every_machine():
    """A saved model is useless where they differ."""
    assert ops.ngram_buckets(np.array([[0, 1, 2]]), (1, 2), 16_384).tolist() == [
        [[811, 29535], [1622, 25536], [1168, 22258]]
    ]


def test_orders_have_buckets_of_their_own_and_fill_them_evenly():
    ids = np.random.default_rng(0).integers(0, 256, (4, 5_000))
    found = ops.ngram_buckets(ids, (3, 5), 100)
    for i in range(2):
        counts = np.bincount(found[:, 10:, i].reshape(-1), minlength=200)
        assert not counts[: 100 * i].any()
        assert not counts[100 * (i + 1) :].any()
        own = counts[100 * i : 100 * (i + 1)]
        assert own.min() > 140 and own.max() < 265  # 200 on average; a Poisson variable leaves this once in 10,000


def test_the_order_of_ids_matters():
    found = ops.ngram_buckets(np.array([[1, 2], [2, 1]]), [2], 1 << 20)
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
        ops.ngram_buckets(ids, orders, buckets)

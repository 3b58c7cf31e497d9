import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.dispatch import reference_only
from scratchformer.ops.attention import check_attention
from scratchformer.ops.relative import check_relative_attention
from scratchformer.testing.strategies import tensors


def forward_backward(device, q, k, v, dy, pattern=None):
    """y and (dq, dk, dv), on the CPU."""
    y, cache = ops.attention(*(to_device(a, device) for a in (q, k, v)), pattern)
    return [to_cpu(a) for a in (y, *ops.attention_backward(to_device(dy, device), cache))]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(
    tensors("B G R T D", "B G S D", "B G S D", "B G R T D", scales=(1e-1, 1.0)),
    st.sampled_from([None, ops.Causal(), ops.Causal() & ops.Local(1), "padding", "heads"]),
)
def test_grouped_heads_share_keys_and_values(device, drawn, pattern):
    """As if k and v were repeated for each query head of their group, whose gradients then add up."""
    q, k, v, dy = drawn
    B, G, R, T, D = q.shape
    q, dy = (a.reshape(B, G * R, T, D) for a in (q, dy))
    if pattern == "padding":
        pattern = ops.Padding(to_device(np.arange(B) % k.shape[2] + 1, device))
    elif pattern == "heads":
        pattern = ops.Heads(*([ops.Causal(), None, ops.Local(1)] * G * R)[: G * R])
    found = forward_backward(device, q, k, v, dy, pattern)
    y, dq, dk, dv = forward_backward(device, q, *(np.repeat(a, R, axis=1) for a in (k, v)), dy, pattern)
    expected = [y, dq, *(d.reshape(B, G, R, *d.shape[2:]).sum(axis=2) for d in (dk, dv))]
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("op", [ops.attention, ops.attention.reference], ids=["twin", "reference"])
def test_shared_keys_and_values_are_not_repeated_in_memory(op, T):
    """k and v are 2 MiB each. Repeated for 32 heads they would be 64; scores and probabilities take a few."""
    k, v = np.ones((2, 1, 1, 8192, 64), np.float32)
    q = np.ones((1, 32, T, 64), np.float32)
    tracemalloc.start()
    try:
        y, cache = op(q, k, v)
        ops.attention_backward(y, cache)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30 * 2**20


def test_a_query_that_may_see_nothing_gives_zero_and_gets_no_gradient(device):
    """Sequence 0 has no keys; in sequence 1, of three keys, the first two of five queries see none (causal)."""
    pattern = ops.Padding(to_device(np.array([0, 3]), device)) & ops.Causal()
    q, k, v, dy = normal(2, 2, 5, 4), normal(2, 2, 3, 4, seed=1), normal(2, 2, 3, 4, seed=2), normal(2, 2, 5, 4, seed=3)
    y, dq, dk, dv = forward_backward(device, q, k, v, dy, pattern)
    assert not y[0].any() and not y[1, :, :2].any()
    assert not dq[0].any() and not dq[1, :, :2].any()
    assert not dk[0].any() and not dv[0].any()
    assert y[1, :, 2:].all() and dv[1].all()
    dy[0] = dy[1, :, :2] = 1e3  # the gradient of a query that saw nothing goes nowhere
    for a, b in zip((dq, dk, dv), forward_backward(device, q, k, v, dy, pattern)[1:], strict=True):
        assert np.array_equal(a, b)


def test_the_future_has_no_influence(device):
    """Changing keys and values after position t changes no output up to t, and those outputs give them no gradient."""
    q, k, v, dy = (normal(2, 2, 5, 3, seed=i) for i in range(4))
    y, dq, _, _ = forward_backward(device, q, k, v, dy, ops.Causal())
    for t in range(4):
        k2, v2 = k.copy(), v.copy()
        k2[:, :, t + 1 :], v2[:, :, t + 1 :] = 50, -50
        y2, dq2, _, _ = forward_backward(device, q, k2, v2, dy, ops.Causal())
        assert np.array_equal(y[:, :, : t + 1], y2[:, :, : t + 1])
        np.testing.assert_allclose(dq[:, :, : t + 1], dq2[:, :, : t + 1], rtol=1e-12)
        assert not np.allclose(y[:, :, t + 1], y2[:, :, t + 1])
        early = np.where(np.arange(5)[:, None] <= t, dy, 0)
        _, _, dk, dv = forward_backward(device, q, k, v, early, ops.Causal())
        assert not dk[:, :, t + 1 :].any() and not dv[:, :, t + 1 :].any()


def test_garbage_in_the_padding_does_not_matter(device):
    q, k, v, dy = (normal(2, 2, 4, 3, seed=i) for i in range(4))
    pattern = ops.Padding(to_device(np.array([2, 4]), device))
    expected = forward_backward(device, q, k, v, dy, pattern)
    k[0, :, 2:], v[0, :, 2:] = 1e5, -1e5
    found = forward_backward(device, q, k, v, dy, pattern)
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a, b)
    assert not found[2][0, :, 2:].any() and not found[3][0, :, 2:].any()


def test_a_padded_sequence_agrees_with_the_sequence_alone(device):
    q, k, v, dy = (normal(2, 2, 5, 3, seed=i) for i in range(4))
    n = 3
    dy[0, :, n:] = 0
    batched = forward_backward(device, q, k, v, dy, ops.Padding(to_device(np.array([n, 5]), device)))
    alone = forward_backward(device, *(a[:1, :, :n] for a in (q, k, v, dy)))
    for a, b in zip(batched, alone, strict=True):
        np.testing.assert_allclose(a[:1, :, :n], b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("pattern", [None, ops.Causal()])
def test_large_scores_do_not_overflow(pattern, dtype, device):
    """Scores of ±10,000 choose one key; the gradients stay finite."""
    q, dy = 100 * np.ones((1, 1, 3, 1), dtype), np.ones((1, 1, 3, 1), dtype)
    k, v = np.array([-100, 100, 0], dtype).reshape(1, 1, 3, 1), np.array([1, 2, 3], dtype).reshape(1, 1, 3, 1)
    y, *gradients = forward_backward(device, q, k, v, dy, pattern)
    assert y.ravel().tolist() == ([2, 2, 2] if pattern is None else [1, 2, 2])
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5), r"q: expected \(B, H, T, D\), got \(2, 3, 4\)"),
        ((2, 3, 4, 5), (2, 3, 6, 4), (2, 3, 6, 5), r"k: expected \(2, G, S, 5\), got \(2, 3, 6, 4\)"),
        ((2, 3, 4, 5), (1, 3, 6, 5), (2, 3, 6, 5), r"k: expected \(2, G, S, 5\), got \(1, 3, 6, 5\)"),
        (
            (2, 3, 4, 5),
            (2, 2, 6, 5),
            (2, 2, 6, 5),
            r"k: .* a G that divides the 3 heads of q, got \(2, 2, 6, 5\)",
        ),
        (
            (2, 3, 4, 5),
            (2, 6, 6, 5),
            (2, 6, 6, 5),
            r"k: .* a G that divides the 3 heads of q, got \(2, 6, 6, 5\)",
        ),
        (
            (2, 3, 4, 5),
            (2, 0, 6, 5),
            (2, 0, 6, 5),
            r"k: .* a G that divides the 3 heads of q, got \(2, 0, 6, 5\)",
        ),
        ((2, 3, 4, 5), (2, 1, 6, 5), (2, 3, 6, 5), r"v: expected \(2, 1, 6, 5\), got \(2, 3, 6, 5\)"),
        ((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 4, 5), r"v: expected \(2, 3, 6, 5\), got \(2, 3, 4, 5\)"),
    ],
)
def test_shapes_that_do_not_fit(q, k, v, message):
    with pytest.raises(ValueError, match=message):
        ops.attention(np.ones(q), np.ones(k), np.ones(v))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (ops.Heads(None, ops.Causal()), "patterns: expected a number that divides 3 heads, got 2"),
        (ops.Padding(np.array([4, 4, 4])), r"lengths: expected \(2\), got \(3,\)"),
    ],
    ids=["heads", "sequences"],
)
def test_the_check_alone_refuses_a_pattern_for_other_heads_or_sequences(pattern, message):
    """A twin whose `fits` calls the check does not have to check the pattern again."""
    x = np.ones((2, 3, 4, 5))
    relative = np.ones((3, 7, 5)), np.ones((3, 5)), np.ones((3, 5))
    for check, args in (check_attention, (x, x, x)), (check_relative_attention, (x, x, x, *relative)):
        check(*args, ops.Causal())
        with pytest.raises(ValueError, match=message):
            check(*args, pattern)


def test_backward_runs_in_float32_for_float16(device):
    """The row sum Σ p dp is small, but dp − Σ p dp overflows float16."""
    D, S = 1, 4
    q, k = np.zeros((1, 1, 1, D), np.float16), np.zeros((1, 1, S, D), np.float16)
    v = np.array([60_000, -60_000, 60_000, 60_000], np.float16).reshape(1, 1, S, D)
    k[...] = [[1], [2], [3], [4]]
    with reference_only():
        _, dq, _, _ = forward_backward(device, q, k, v, np.ones((1, 1, 1, D), np.float16))
    p = np.full(4, 0.25)
    dp = v.reshape(4).astype(float)
    expected = (p * (dp - p @ dp)) @ k.reshape(4).astype(float)
    np.testing.assert_allclose(dq.ravel(), expected, rtol=2e-3)


@pytest.mark.parametrize("op", [ops.attention, ops.attention.reference], ids=["twin", "reference"])
def test_without_heads_there_is_nothing_to_compute(op):
    q = np.ones((2, 0, 4, 3))
    y, cache = op(q, q, q)
    assert [a.shape for a in (y, *ops.attention_backward(y, cache))] == [q.shape] * 4


@pytest.mark.parametrize("op", [ops.attention, ops.attention.reference], ids=["twin", "reference"])
@pytest.mark.parametrize("T", [1, 2])
def test_without_keys_there_is_nothing_to_see(op, T):
    q, none = np.ones((2, 1, T, 3)), np.ones((2, 1, 0, 3))
    y, cache = op(q, none, none)
    dq, dk, dv = ops.attention_backward(np.ones_like(y), cache)
    assert not y.any() and not dq.any() and dk.shape == dv.shape == none.shape


def test_heads_without_columns():
    q = np.ones((2, 1, 4, 0))
    with pytest.raises(ValueError, match=r"q: expected at least one column, got \(2, 1, 4, 0\)"):
        ops.attention(q, q, q)


def test_a_boolean_mask_is_refused():
    q = np.ones((2, 3, 4, 5))
    with pytest.raises(TypeError, match=r"pattern: expected None or a Pattern, such as ops.Causal\(\)"):
        ops.attention.reference(q, q, q, np.ones((4, 4), bool))

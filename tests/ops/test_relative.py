"""Relative positions: the shift, and attention with it, compared with loops over pairs of query and key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device

NAMES = ("q", "k", "v", "r", "content_bias", "position_bias")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def draw(T, S, B=2, H=2, D=3):
    shapes = [(B, H, T, D), (B, H, S, D), (B, H, S, D), (H, S + T - 1, D), (H, D), (H, D)]
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def forward_backward(device, arrays, dy, pattern=None):
    """y and the six gradients, on the CPU."""
    y, cache = ops.relative_attention(*(to_device(a, device) for a in arrays), pattern)
    return [to_cpu(a) for a in (y, *ops.relative_attention_backward(to_device(dy, device), cache))]


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(st.integers(1, 5), st.integers(1, 5))
def test_the_shift_finds_every_distance(device, T, S):
    """Each entry of x encodes its distance and its query, so y_ts must contain the distance from key s to query t."""
    x = np.arange(S - 1, -T, -1) + 100.0 * np.arange(T)[:, None]  # (T, R)
    y, cache = ops.relative_shift(to_device(np.stack([x, -x]), device))
    expected = np.array([[t + S - T - s + 100.0 * t for s in range(S)] for t in range(T)])
    assert np.array_equal(to_cpu(y), np.stack([expected, -expected]))
    dx = to_cpu(ops.relative_shift_backward(y, cache))
    kept = np.isin(x, expected)
    assert np.array_equal(dx, np.stack([x * kept, -x * kept]))  # every number is back in its place, and the rest is 0


@given(st.integers(1, 5), st.integers(1, 5))
def test_the_shift_is_a_selection(T, S):
    """As a matrix it has a single 1 in each row and at most one in each column; its backward is the transpose."""
    R = S + T - 1
    matrix = np.stack([ops.relative_shift(e.reshape(T, R))[0].ravel() for e in np.eye(T * R)], axis=1)
    assert set(np.unique(matrix)) <= {0.0, 1.0}
    assert (matrix.sum(axis=1) == 1).all() and (matrix.sum(axis=0) <= 1).all()
    _, cache = ops.relative_shift(np.zeros((T, R)))
    back = np.stack([ops.relative_shift_backward(e.reshape(T, S), cache).ravel() for e in np.eye(T * S)], axis=1)
    assert np.array_equal(back, matrix.T)


@pytest.mark.parametrize("shape", [(3, 2), (4,), (0, 3), (2, 5, 4)])
def test_a_shift_without_room_for_a_key(shape):
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., T, S \+ T - 1\) with T, S >= 1, got"):
        ops.relative_shift(np.zeros(shape))


def test_a_gradient_of_another_shape_is_refused():
    _, cache = ops.relative_shift(np.zeros((2, 3, 6)))
    with pytest.raises(ValueError, match=r"dy: expected \(2, 3, 4\), got \(2, 3, 6\)"):
        ops.relative_shift_backward(np.zeros((2, 3, 6)), cache)


@pytest.mark.parametrize("pattern", [None, ops.Causal(), ops.Local(1)], ids=str)
def test_without_positions_and_biases_it_is_attention(device, pattern):
    q, k, v, r, u, w = draw(4, 6)
    dy = normal(*q.shape, seed=9)
    found = forward_backward(device, (q, k, v, 0 * r, 0 * u, w), dy, pattern)
    y, cache = ops.attention(*(to_device(a, device) for a in (q, k, v)), pattern)
    expected = [to_cpu(a) for a in (y, *ops.attention_backward(to_device(dy, device), cache))]
    for a, b in zip(found, expected, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_only_distances_matter(device):
    """Shifting queries and keys by one position shifts the outputs by one, where the window is the same."""
    _, _, _, r, u, w = draw(6, 6)
    q, k, v = (normal(1, 2, 7, 3, seed=i) for i in range(3))
    early = ops.relative_attention(*(to_device(a, device) for a in (q[:, :, :6], k[:, :, :6], v[:, :, :6], r, u, w)))
    q, k, v = (np.roll(a, 1, axis=2) for a in (q, k, v))
    late = ops.relative_attention(*(to_device(a, device) for a in (q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], r, u, w)))
    np.testing.assert_allclose(to_cpu(late[0]), to_cpu(early[0]), rtol=1e-12)


def test_the_future_has_no_influence(device):
    """Neither keys after a query nor vectors of negative distances influence it or get a gradient from it."""
    arrays, dy = draw(4, 6), normal(2, 2, 4, 3, seed=9)
    y, _, _, _, dr, *_ = forward_backward(device, arrays, dy, ops.Causal())
    assert not dr[:, 6:].any() and dr[:, :6].all()
    for t in range(3):
        q, k, v, r, u, w = (a.copy() for a in arrays)
        k[:, :, t + 3 :], v[:, :, t + 3 :], r[:, 6:] = 50, -50, 50
        y2, *_ = forward_backward(device, (q, k, v, r, u, w), dy, ops.Causal())
        assert np.array_equal(y[:, :, : t + 1], y2[:, :, : t + 1])
        assert not np.allclose(y[:, :, t + 1], y2[:, :, t + 1])


def test_a_query_that_may_see_nothing_gives_zero_and_gets_no_gradient(device):
    arrays, dy = draw(5, 3), normal(2, 2, 5, 3, seed=9)
    pattern = ops.Padding(to_device(np.array([0, 3]), device)) & ops.Causal()
    y, dq, dk, dv, *rest = forward_backward(device, arrays, dy, pattern)
    assert not y[0].any() and not y[1, :, :2].any() and y[1, :, 2:].all()
    assert not dq[0].any() and not dq[1, :, :2].any() and not dk[0].any() and not dv[0].any()
    dy[0] = dy[1, :, :2] = 1e3
    again = forward_backward(device, arrays, dy, pattern)
    for a, b in zip((dq, dk, dv, *rest), again[1:], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("pattern", [None, ops.Causal()], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_large_scores_do_not_overflow(pattern, dtype, device):
    """Scores of ±10,000 from the distances choose one key; the gradients stay finite."""
    one = np.ones((1, 1, 3, 1), dtype)
    v, r = np.array([1, 2, 3], dtype).reshape(1, 1, 3, 1), np.array([0, 100, -100, 0, 0], dtype).reshape(1, 5, 1)
    arrays = (100 * one, 0 * one, v, r, np.zeros((1, 1), dtype), np.zeros((1, 1), dtype))
    y, *gradients = forward_backward(device, arrays, one, pattern)
    assert y.dtype == dtype and all(g.dtype == dtype and np.isfinite(g).all() for g in gradients)
    # Distance 1 has the highest score: query 1 takes key 0, and query 2 key 1.
    assert y.ravel().tolist() == ([2.5, 1, 2] if pattern is None else [1, 1, 2])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (2, 5, 3), r"q: expected \(B, H, T, D\), got \(2, 5, 3\)"),
        ("k", (2, 2, 5, 4), r"k: expected \(2, 2, S, 3\), got \(2, 2, 5, 4\)"),
        ("r", (2, 6, 3), r"r: expected \(2, 9, 3\), got \(2, 6, 3\)"),
        ("r", (2, 2, 9, 3), r"r: expected \(2, 9, 3\), got \(2, 2, 9, 3\)"),
        ("content_bias", (3,), r"content_bias: expected \(2, 3\), got \(3,\)"),
        ("position_bias", (3, 2), r"position_bias: expected \(2, 3\), got \(3, 2\)"),
    ],
)
def test_shapes_that_do_not_fit(name, shape, message):
    arrays = dict(zip(NAMES, draw(4, 6), strict=True)) | {name: np.ones(shape)}
    with pytest.raises(ValueError, match=message):
        ops.relative_attention(**arrays)


def test_sums_over_sequences_run_in_float32_for_float16(device):
    """Each of 5,000 sequences adds 1 or ½ to the gradients of distances and biases; float16 sums would stop earlier."""
    B = 5000
    q, k = np.zeros((B, 1, 1, 1)), np.tile(np.array([[[[1.0], [-1.0]]]]), (B, 1, 1, 1))
    gradients = []
    for r, position_bias in ((1.0, -1.0), 0), ((0, 0), 1.0):  # so that all scores are 0
        arrays = q, k, k, np.reshape(r, (1, 2, 1)), np.zeros((1, 1)), np.full((1, 1), position_bias)
        y, cache = ops.relative_attention(*(to_device(np.asarray(a, np.float16), device) for a in arrays))
        *_, dr, du, dw = ops.relative_attention_backward(device.xp.ones_like(y), cache)
        gradients.append([to_cpu(a).ravel().tolist() for a in (dr, du, dw)])
    assert gradients == [[[0, 0], [B], [B]], [[B / 2, -B / 2], [B], [0]]]


def test_a_boolean_mask_is_refused():
    with pytest.raises(TypeError, match=r"pattern: expected None or a Pattern, such as ops.Causal\(\)"):
        ops.relative_attention(*draw(4, 4), np.ones((4, 4), bool))


def test_biases_of_half_precision_are_summed_in_float32():
    half = [x.astype(np.float16) for x in draw(4096, 2, B=1, H=1, D=2)]
    exact = [x.astype(np.float64) for x in half]
    dy = normal(1, 1, 4096, 2, seed=6).astype(np.float16)
    found, right = (
        ops.relative_attention_backward.reference(dy.astype(each[0].dtype), ops.relative_attention.reference(*each)[1])
        for each in (half, exact)
    )
    for bias in (4, 5):  # sums over 4,096 queries
        np.testing.assert_allclose(found[bias], right[bias], rtol=0, atol=0.01 * np.abs(right[bias]).max())

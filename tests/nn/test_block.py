"""The transformer block, its feed-forward layer, and gradient checkpointing."""

import copy

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.nn.recompute import RecomputeCache
from scratchformer.rng import Key

B, T, C = 2, 5, 6
BOTH_NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def forward_backward(layer, device, x, dy, **options):
    """y, dx and the gradients of the parameters, on the CPU."""
    layer.zero_grad()
    y, cache = layer.forward(to_device(x, device), **options)
    dx = layer.backward(to_device(dy, device), cache)
    return to_cpu(y), to_cpu(dx), {name: to_cpu(p.grad).copy() for name, p in layer.named_parameters().items()}


@BOTH_NORMS
def test_equation(norm, device):
    block = nn.TransformerBlock(C, 2, norm).to(device, np.float64)
    x = to_device(normal(B, T, C), device)
    if norm == "post":
        h = block.norm1(x + block.attention(x))
        expected = block.norm2(h + block.feedforward(h))
    else:
        h = x + block.attention(block.norm1(x))
        expected = h + block.feedforward(block.norm2(h))
    assert np.array_equal(to_cpu(block(x)), to_cpu(expected))


@BOTH_NORMS
def test_dropout_acts_on_both_branches_with_two_masks(norm):
    """Compared with the equations, with both masks written out; without a key nothing is dropped."""
    block = nn.TransformerBlock(C, 2, norm, dropout=0.5).to(dtype=np.float64)
    x, key = normal(B, T, C), Key(3)
    drop = lambda a, i: ops.dropout(a, 0.5, key.fold(i))[0]  # noqa: E731
    if norm == "post":
        h = block.norm1(x + drop(block.attention(x), 1))
        expected = block.norm2(h + drop(block.feedforward(h), 2))
    else:
        h = x + drop(block.attention(block.norm1(x)), 1)
        expected = h + drop(block.feedforward(block.norm2(h)), 2)
    assert np.array_equal(block(x, key=key), expected)
    plain = nn.TransformerBlock(C, 2, norm).to(dtype=np.float64)
    plain.load_state_dict(block.state_dict())
    assert np.array_equal(block(x), plain(x))
    assert not np.array_equal(block(x, key=key), block(x, key=Key(4)))


@BOTH_NORMS
def test_two_forwards_before_a_backward_keep_their_masks(norm, device):
    """Each backward uses the mask of its own forward."""
    block = nn.TransformerBlock(C, 2, norm, dropout=0.5).to(device, np.float64)
    x, dy = normal(B, T, C), normal(B, T, C, seed=1)
    _, expected, _ = forward_backward(block, device, x, dy, key=Key(1))
    _, cache = block.forward(to_device(x, device), key=Key(1))
    block.forward(to_device(x, device), key=Key(2))
    assert np.array_equal(to_cpu(block.backward(to_device(dy, device), cache)), expected)


@BOTH_NORMS
def test_causal_block_does_not_see_the_future(norm, device):
    block = nn.TransformerBlock(C, 2, norm, causal=True).to(device, np.float64)
    x = normal(B, T, C)
    y = to_cpu(block(to_device(x, device)))
    for t in range(T - 1):
        changed = x.copy()
        changed[:, t + 1 :] = normal(B, T - t - 1, C, seed=t + 1)
        y_changed = to_cpu(block(to_device(changed, device)))
        np.testing.assert_allclose(y_changed[:, : t + 1], y[:, : t + 1], rtol=1e-10)
        assert np.abs(y_changed[:, t + 1] - y[:, t + 1]).max() > 1e-3


@BOTH_NORMS
def test_padding_does_not_change_a_sequence(norm, device):
    """Outputs and dx are the same as without padding, whatever the padding contains; dy is 0 in the padding."""
    block = nn.TransformerBlock(C, 2, norm).to(device, np.float64)
    x, dy, n = normal(B, T, C), normal(B, T, C, seed=1), 3
    dy[0, n:] = 0
    pattern = ops.Padding(to_device(np.array([n, T]), device))
    y, dx, gradients = forward_backward(block, device, x, dy, pattern=pattern)
    y_alone, dx_alone, gradients_alone = forward_backward(block, device, x[:1, :n], dy[:1, :n])
    np.testing.assert_allclose(y[:1, :n], y_alone, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dx[:1, :n], dx_alone, rtol=1e-9, atol=1e-12)
    assert not dx[0, n:].any()
    _, _, gradients_other = forward_backward(block, device, x[1:], dy[1:])
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, gradients_alone[name] + gradients_other[name], rtol=1e-9, atol=1e-12)
    x[0, n:] = 1e3
    y_garbage, dx_garbage, _ = forward_backward(block, device, x, dy, pattern=pattern)
    np.testing.assert_allclose(y_garbage[0, :n], y[0, :n], rtol=1e-12)
    np.testing.assert_allclose(dx_garbage[0, :n], dx[0, :n], rtol=1e-12)


@BOTH_NORMS
def test_without_positions_the_order_does_not_matter(norm, device):
    """Permuting the input permutes outputs and gradients."""
    block = nn.TransformerBlock(C, 2, norm).to(device, np.float64)
    order = np.random.default_rng(2).permutation(T)
    x, dy = normal(B, T, C), normal(B, T, C, seed=1)
    y, dx, gradients = forward_backward(block, device, x, dy)
    y_other, dx_other, gradients_other = forward_backward(block, device, x[:, order], dy[:, order])
    np.testing.assert_allclose(y_other, y[:, order], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dx_other, dx[:, order], rtol=1e-9, atol=1e-12)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradients_other[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [[1] * T, [3, 2]], ids=str)
def test_what_a_parallel_block_extends_agrees_with_the_whole(device, sizes):
    parts = nn.SelfAttention(C, 2, causal=True), nn.FeedForward(C), nn.LayerNorm(C), nn.LayerNorm(C)
    block = nn.ParallelBlock(*parts, norm="pre").to(device, np.float64)
    x, past = to_device(normal(B, T, C), device), 0
    for pattern in None, ops.Local(1):
        whole, stored, past = to_cpu(block(x, pattern)), block.allocate(x, T), 0
        for size in sizes:
            y = to_cpu(block.extend(x[:, past : past + size], stored, past, pattern))
            np.testing.assert_allclose(y, whole[:, past : past + size], rtol=1e-9, atol=1e-12)
            past += size


# Recompute


@BOTH_NORMS
def test_recompute_agrees_exactly_with_the_plain_layer(norm, device):
    """Bit for bit, with dropout and a pattern: y, dx and every gradient, under the same names."""
    plain = nn.TransformerBlock(C, 2, norm, dropout=0.5).to(device)
    recomputed = nn.Recompute(copy.deepcopy(plain))
    x, dy = normal(B, T, C).astype(np.float32), normal(B, T, C, seed=1).astype(np.float32)
    options = dict(pattern=ops.Padding(to_device(np.array([3, T]), device)), key=Key(5))
    y, dx, gradients = forward_backward(plain, device, x, dy, **options)
    y_again, dx_again, gradients_again = forward_backward(recomputed, device, x, dy, **options)
    assert np.array_equal(y, y_again) and np.array_equal(dx, dx_again)
    assert list(gradients) == list(gradients_again)
    for name, gradient in gradients.items():
        assert np.array_equal(gradient, gradients_again[name])


def test_recompute_keeps_only_its_inputs():
    x, key = np.ones((B, T, C), np.float32), Key(1)
    _, cache = nn.Recompute(nn.TransformerBlock(C, 2)).forward(x, key=key)
    assert cache == RecomputeCache((x,), {"key": key})
    assert cache.inputs[0] is x


# Feed-forward


@pytest.mark.parametrize(("activation", "op"), [("relu", ops.relu), ("gelu", ops.gelu), ("gelu_tanh", ops.gelu)])
def test_feedforward_equation(activation, op):
    layer = nn.FeedForward(C, 7, activation).to(dtype=np.float64)
    x = normal(B, T, C)
    options = ("tanh",) if activation == "gelu_tanh" else ()
    a, _ = op(x @ layer.up.w.data + layer.up.b.data, *options)
    np.testing.assert_allclose(layer(x), a @ layer.down.w.data + layer.down.b.data, rtol=1e-12)


def test_feedforward_is_four_times_as_wide():
    assert nn.FeedForward(C).up.w.data.shape == (C, 4 * C)
    assert nn.TransformerBlock(C, 2, d_ff=5).feedforward.up.w.data.shape == (C, 5)


# Errors


def test_unknown_names():
    with pytest.raises(ValueError, match="norm: expected one of post, pre, got 'batch'"):
        nn.TransformerBlock(C, 2, norm="batch")
    with pytest.raises(ValueError, match="activation: expected one of relu, gelu, gelu_tanh, silu, got 'swish'"):
        nn.TransformerBlock(C, 2, activation="swish")


@pytest.mark.parametrize("p", [-0.5, 1.0])
def test_dropout_out_of_range(p):
    with pytest.raises(ValueError, match=f"dropout: expected 0 <= p < 1, got {p}"):
        nn.TransformerBlock(C, 2, dropout=p)


def test_x_of_another_width():
    for norm in ("post", "pre"):
        with pytest.raises(ValueError, match=r"x: expected \((B, T|\.\.\.), 512\), got \(4, 7, 256\)"):
            nn.TransformerBlock(512, 8, norm)(np.ones((4, 7, 256), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 512\), got \(4, 7, 256\)"):
        nn.FeedForward(512)(np.ones((4, 7, 256), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 512\), got \(4, 7, 256\)"):
        nn.LayerNorm(512)(np.ones((4, 7, 256), np.float32))

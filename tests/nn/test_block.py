"""The transformer block, its feed-forward layer, and gradient checkpointing."""

import copy
import itertools

import numpy as np
import pytest

from scratchformer import dispatch, nn, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.nn.recompute import RecomputeCache, recompute_blocks
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
    with pytest.raises(ValueError, match="activation: expected one of relu, gelu, gelu_tanh, silu, got 'swish'"):
        nn.TransformerBlock(C, 2, activation="swish")


def test_x_of_another_width():
    for norm in ("post", "pre"):
        with pytest.raises(ValueError, match=r"x: expected \((B, T|\.\.\.), 512\), got \(4, 7, 256\)"):
            nn.TransformerBlock(512, 8, norm)(np.ones((4, 7, 256), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 512\), got \(4, 7, 256\)"):
        nn.FeedForward(512)(np.ones((4, 7, 256), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \(\.\.\., 512\), got \(4, 7, 256\)"):
        nn.LayerNorm(512)(np.ones((4, 7, 256), np.float32))


class Own(nn.Dropout):
    """A user's dropout: another mask."""

    def forward(self, x, key=None):
        return super().forward(x, None if key is None else key.fold("own"))


@pytest.mark.parametrize("kind", [nn.TransformerBlock, nn.ParallelBlock])
@pytest.mark.parametrize("fits", [False, True])
def test_dropout_and_sum_are_one_operation_where_it_has_a_twin(monkeypatch, kind, fits):
    """With the same result; and two in evaluation, without dropout, outside `fast()`, and with a user's dropout."""
    calls = []

    def forward(*args):
        calls.append(1)
        return ops.dropout_add.reference(*args)

    backward = ops.dropout_add_backward.reference
    twin = dispatch.Twin("dropout_add", lambda f, p, key, x: p == 0.4 and fits, forward, backward)
    monkeypatch.setitem(ops.dropout_add.chosen[True], np.ndarray, [twin])
    x, dy, key = normal(B, T, C), normal(B, T, C, seed=1), Key(3)
    block = (
        nn.TransformerBlock(C, 2, dropout=0.4, norm="pre")
        if kind is nn.TransformerBlock
        else nn.ParallelBlock(nn.SelfAttention(C, 2), nn.FeedForward(C), nn.LayerNorm(C), nn.LayerNorm(C), dropout=0.4)
    ).to(dtype=np.float64)
    expected = forward_backward(block, block.device, x, dy, key=key)
    assert not calls
    with monkeypatch.context() as inside:
        inside.setattr(dispatch, "_fast_depth", 1)
        found = forward_backward(block, block.device, x, dy, key=key)
        assert len(calls) == 2 * fits
        block(x)
        block.first.dropout = block.second.dropout = Own(0.4)
        other = block(x, key=key)
        block.first.dropout = block.second.dropout = nn.Dropout(0.0)
        block(x, key=key)
        assert len(calls) == 2 * fits
    assert np.abs(other - expected[0]).max() > 0.1
    for a, b in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    for name in expected[2]:
        np.testing.assert_allclose(found[2][name], expected[2][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("order", "norm", "after"), [*itertools.product(["pre", "post"], [False, True], [False, True])]
)
def test_a_residual_around_another_function(order, norm, after):
    """With the branch itself it is forward."""
    if order == "post" and not norm:
        with pytest.raises(TypeError, match="norm: expected a Layer, got None"):
            nn.Residual(nn.FeedForward(C), None, order)
        return
    residual = nn.Residual(
        nn.FeedForward(C), nn.LayerNorm(C) if norm else None, order, after=nn.RMSNorm(C) if after else None
    )
    x = normal(B, T, C).astype(np.float32)
    np.testing.assert_allclose(residual.around(residual.branch, x), residual(x), rtol=1e-6)
    assert np.abs(residual.around(lambda n: 2 * residual.branch(n), x) - residual(x)).max() > 1e-3 or after


class OwnAttention(nn.SelfAttention):
    """A forward of its own, for which the `extend` of the class above was not written."""

    def forward(self, x, pattern=None):
        y, cache = super().forward(x, pattern)
        return 2 * y, cache


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [nn.SelfAttention, OwnAttention])
def test_extend_is_forward_whoever_wrote_it(kind, frozen):
    block = nn.Block(kind(C, 2), nn.FeedForward(C), nn.LayerNorm(C), nn.LayerNorm(C))
    if frozen:
        block.attention = nn.Frozen(block.attention)
    x = normal(B, T, C).astype(np.float32)
    stack = nn.Stack([block, block])
    (stored, _) = stack.allocate(x, T)
    assert len(stored) == (2 if kind is nn.SelfAttention else 1)  # keys and values, or inputs
    if kind is OwnAttention:
        assert stored[0].shape == (B, 1, T, C) and stored[0].dtype == x.dtype
    expected = stack(x, pattern=ops.Causal())
    stored, parts = stack.allocate(x, T), []
    for start, stop in (0, 2), (2, 3), (3, T):
        parts.append(stack.extend(x[:, start:stop], stored, start))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=1e-4, atol=1e-5)


def test_a_stack_with_memories_keeps_the_input_of_each_block():
    """The inputs are the memories of the next segment. Without memories, none are kept."""
    first, second = (nn.TransformerBlock(C, 2, relative=True, key=Key(i)) for i in range(2))
    stack, x, memories = nn.Stack([first, second]), normal(B, T, C), normal(B, 2, 3, C, seed=1)
    h = first(x, memory=memories[:, 0])
    y, cache = stack.forward(x, memories=memories)
    assert len(cache.block_inputs) == 2 and cache.block_inputs[0] is x
    np.testing.assert_array_equal(cache.block_inputs[1], h)
    np.testing.assert_array_equal(y, second(h, memory=memories[:, 1]))
    assert stack.forward(x)[1].block_inputs == []


class Returns(nn.Layer):
    """A block that returns or allocates another shape."""

    def __init__(self, *shapes):
        self.shapes = shapes

    def forward(self, x, **options):
        return x[:, 1:], None

    def allocate(self, x, length):
        return [np.empty(shape) for shape in self.shapes]

    def extend(self, x, stored, past):
        return x


def test_blocks_that_do_not_fit():
    x = np.ones((B, T, C))
    with pytest.raises(ValueError, match=r"block 0: expected to return \(2, 5, 6\), as it got, returned \(2, 4, 6\)"):
        nn.Stack([Returns()])(x)
    for wrong in (B, 1), (B + 1, 1, 9, 3), (B, 1, 8, 3), (B, 9):
        with pytest.raises(ValueError, match=r"block 1: allocate: expected arrays \(2, \.\.\., 9, \.\.\.\)"):
            nn.Stack([Returns((B, 1, 9)), Returns((B, 1, 9, 3), wrong)]).allocate(x, 9)
    with pytest.raises(TypeError, match="block 0: a block with shared inputs needs an extend of its own"):
        nn.Stack([nn.Linear(C, C)]).extend(x, [None], 0, [None])


def test_the_models_that_recompute_are_those_that_have_blocks():
    stack = nn.Stack([nn.FeedForward(C)])
    assert not stack.recompute
    for recompute in True, False:
        recompute_blocks(stack, recompute)
        assert stack.recompute is recompute
    with pytest.raises(ValueError, match=r"model: expected blocks to recompute .*, got a FeedForward without any"):
        recompute_blocks(nn.FeedForward(C))
    with pytest.raises(TypeError, match=r"^recompute: expected True or False, got 1$"):
        recompute_blocks(stack, 1)

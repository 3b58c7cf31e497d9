"""Multi-head attention, and the steps that lead to it, each compared with the next."""

import itertools

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.rng import Key

B, T, M, H, C = 2, 4, 5, 3, 6


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def double(layer, device):
    return layer.to(device, np.float64)


def forward_backward(layer, device, x, dy, *more, **options):
    """y, dx and the gradients of the parameters, on the CPU."""
    layer.zero_grad()
    y, cache = layer.forward(*(to_device(a, device) for a in (x, *more)), **options)
    dx = layer.backward(to_device(dy, device), cache)
    return to_cpu(y), dx, {name: to_cpu(p.grad).copy() for name, p in layer.named_parameters().items()}


def assert_close(found, expected):
    np.testing.assert_allclose(to_cpu(found), to_cpu(expected), rtol=1e-9, atol=1e-12)


# From one step to the next


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_loop_is_self_attention(causal, device):
    """With the matrices of its heads side by side: output, dx, and every gradient."""
    loop = double(nn.MultiHeadLoop(C, H, causal, Key(1)), device)
    whole = double(nn.SelfAttention(C, H, causal), device)
    beside = lambda state, part: np.concatenate([state[f"heads.{h}.{part}.w"] for h in range(H)], axis=1)  # noqa: E731
    parts = ("query", "key", "value")
    state = loop.state_dict()
    unify = {"unify.w": state["unify.w"], "unify.b": state["unify.b"]}
    whole.load_state_dict({f"{part}.w": beside(state, part) for part in parts} | unify)
    x, dy = normal(B, T, C), normal(B, T, C, seed=1)
    y, dx, gradients = forward_backward(loop, device, x, dy)
    y_whole, dx_whole, gradients_whole = forward_backward(whole, device, x, dy)
    assert_close(y, y_whole)
    assert_close(dx, dx_whole)
    for part in parts:
        assert_close(beside(gradients, part), gradients_whole[f"{part}.w"])
    for name in unify:
        assert_close(gradients[name], gradients_whole[name])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_one_head_is_single_head_attention_and_a_matrix(wide, causal, device):
    """And with one head, narrow and wide are the same."""
    single = double(nn.SingleHeadAttention(C, causal=causal, key=Key(1)), device)
    whole = double(nn.SelfAttention(C, 1, causal, wide), device)
    unify = {name: value for name, value in whole.state_dict().items() if name.startswith("unify")}
    whole.load_state_dict(single.state_dict() | unify)
    x, dy = normal(B, T, C), normal(B, T, C, seed=1)
    y, dx, gradients = forward_backward(whole, device, x, dy)
    y_single, dx_single, gradients_single = forward_backward(single, device, x, dy @ unify["unify.w"].T)
    assert_close(y, y_single @ unify["unify.w"] + unify["unify.b"])
    assert_close(dx, dx_single)
    for name, gradient in gradients_single.items():
        assert_close(gradients[name], gradient)


def test_basic_self_attention_is_attention_without_scaling(device):
    """Queries times √C undo the division by √C; dx is the sum over queries, keys and values."""
    x, dy = normal(B, T, C), normal(B, T, C, seed=1)
    y, dx, _ = forward_backward(nn.BasicSelfAttention(), device, x, dy)
    one_head = to_device(x[:, None], device)
    y_attention, cache = ops.attention(one_head * np.sqrt(C), one_head, one_head)
    dq, dk, dv = ops.attention_backward(to_device(dy[:, None], device), cache)
    assert_close(y, y_attention[:, 0])
    assert_close(dx, (dq * np.sqrt(C) + dk + dv)[:, 0])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_attention_to_itself_is_self_attention(wide, bias, device):
    cross = double(nn.CrossAttention(C, H, wide, bias, Key(1)), device)
    own = double(nn.SelfAttention(C, H, wide=wide, bias=bias), device)
    own.load_state_dict(cross.state_dict())
    x, dy = normal(B, T, C), normal(B, T, C, seed=1)
    y, (dx, dmemory), gradients = forward_backward(cross, device, x, dy, x)
    y_own, dx_own, gradients_own = forward_backward(own, device, x, dy)
    assert_close(y, y_own)
    assert_close(dx + dmemory, dx_own)
    for name, gradient in gradients.items():
        assert_close(gradient, gradients_own[name])


def test_causal_is_a_pattern(device):
    """causal=True is the same as the pattern Causal(), and combines with any other pattern."""
    causal, plain = (double(nn.SelfAttention(C, H, causal), device) for causal in (True, False))
    x, padding = to_device(normal(B, T, C), device), ops.Padding(to_device(np.array([2, T]), device))
    assert_close(causal(x), plain(x, ops.Causal()))
    assert_close(causal(x, padding), plain(x, ops.Causal() & padding))
    assert np.abs(to_cpu(causal(x)) - to_cpu(plain(x))).max() > 1e-3


# Widths


def test_narrow_heads_split_the_width_and_wide_ones_do_not():
    shapes = lambda layer: {name: p.data.shape for name, p in layer.named_parameters().items()}  # noqa: E731
    narrow = {"query.w": (C, C), "key.w": (C, C), "value.w": (C, C), "unify.w": (C, C), "unify.b": (C,)}
    assert shapes(nn.SelfAttention(C, H)) == narrow
    wide = {f"{part}.w": (C, H * C) for part in ("query", "key", "value")}
    assert shapes(nn.SelfAttention(C, H, wide=True)) == wide | {"unify.w": (H * C, C), "unify.b": (C,)}


def test_wide_heads_need_not_divide_the_width(device):
    layer = nn.SelfAttention(5, 3, wide=True).to(device)
    assert layer(device.xp.ones((B, T, 5), dtype=np.float32)).shape == (B, T, 5)


def test_heads_are_independent(device):
    """A head's columns of the value matrix affect only its own rows of the output projection."""
    layer = double(nn.SelfAttention(C, H), device)
    x = to_device(normal(B, T, C), device)
    D = C // H
    layer.unify.w.data[D:] = 0  # the output uses only head 0
    y = to_cpu(layer(x))
    for part in (layer.query, layer.key, layer.value):
        part.w.data[:, D:] = 7
    assert np.array_equal(to_cpu(layer(x)), y)
    layer.key.w.data[:, :D] *= 2
    assert not np.allclose(to_cpu(layer(x)), y)


# Who sees whom


def test_causal_output_does_not_depend_on_the_future(device):
    """y_t does not change with x_{t+1}, ..., and dy_t does not reach x_{t+1}; y_t does change with x_t."""
    for layer in (
        nn.SelfAttention(C, H, causal=True),
        nn.MultiHeadLoop(C, H, causal=True),
        nn.SingleHeadAttention(C, causal=True),
    ):
        layer = double(layer, device)
        x = normal(B, T, C)
        y, cache = layer.forward(to_device(x, device))
        for t in range(T - 1):
            changed = x.copy()
            changed[:, t + 1 :] += 5
            y_changed = to_cpu(layer(to_device(changed, device)))
            assert_close(y_changed[:, : t + 1], to_cpu(y)[:, : t + 1])
            assert np.abs(y_changed[:, t + 1 :] - to_cpu(y)[:, t + 1 :]).min() > 0
            dy = np.where(np.arange(T)[:, None] <= t, np.ones(y.shape), 0)
            dx = to_cpu(layer.backward(to_device(dy, device), cache))
            assert not dx[:, t + 1 :].any() and dx[:, : t + 1].any()


def test_cross_attention_asks_with_x_and_reads_the_memory(device):
    """y_t depends on x_t and no other x; the order of the memory does not matter, but its content does."""
    layer = double(nn.CrossAttention(C, H), device)
    x, memory = normal(B, T, C), normal(B, M, C, seed=1)
    y = to_cpu(layer(to_device(x, device), to_device(memory, device)))
    changed = x.copy()
    changed[:, 1:] += 5
    y_changed = to_cpu(layer(to_device(changed, device), to_device(memory, device)))
    assert_close(y_changed[:, 0], y[:, 0])
    assert np.abs(y_changed[:, 1:] - y[:, 1:]).max() > 1e-3
    assert_close(layer(to_device(x, device), to_device(memory[:, ::-1].copy(), device)), y)
    # If the memory is the same at all positions, the weights do not matter: the output is a mean of equal values.
    flat = np.broadcast_to(memory[:, :1], memory.shape).copy()
    y_flat = to_cpu(layer(to_device(x, device), to_device(flat, device)))
    assert_close(y_flat, np.broadcast_to(y_flat[:, :1], y_flat.shape))
    assert_close(y_flat[:, 0], to_cpu(layer.unify(layer.value(to_device(memory[:, 0], device)))))


def test_cross_attention_with_a_causal_pattern_hides_the_later_memory(device):
    layer = double(nn.CrossAttention(C, H), device)
    x, memory = normal(B, T, C), normal(B, T, C, seed=1)
    y = to_cpu(layer(to_device(x, device), to_device(memory, device), ops.Causal()))
    memory[:, 2:] += 5
    changed = to_cpu(layer(to_device(x, device), to_device(memory, device), ops.Causal()))
    assert_close(changed[:, :2], y[:, :2])
    assert np.abs(changed[:, 2:] - y[:, 2:]).min() > 0


def test_padding_of_the_memory_has_no_influence(device):
    layer = double(nn.CrossAttention(C, H), device)
    x, memory, dy = normal(B, T, C), normal(B, M, C, seed=1), normal(B, T, C, seed=2)
    pattern = ops.Padding(to_device(np.array([2, M]), device))
    y, (dx, dmemory), gradients = forward_backward(layer, device, x, dy, memory, pattern=pattern)
    assert not to_cpu(dmemory)[0, 2:].any() and to_cpu(dmemory)[0, :2].all()
    alone = layer(to_device(x[:1], device), to_device(memory[:1, :2], device))
    assert_close(y[:1], alone)
    memory[0, 2:] = 1e3
    y2, (dx2, dmemory2), gradients2 = forward_backward(layer, device, x, dy, memory, pattern=pattern)
    assert_close(y2, y)
    assert_close(dx2, dx)
    assert_close(dmemory2, dmemory)
    for name, gradient in gradients.items():
        assert_close(gradients2[name], gradient)


def test_extend_agrees_with_the_whole_sequence(device):
    """One position at a time, and in pieces, with stored keys and values."""
    layer = double(nn.SelfAttention(C, H, causal=True), device)
    x = to_device(normal(B, T, C), device)
    whole = to_cpu(layer(x))
    for cuts in ([0, 1, 2, 3, 4], [0, 3, 4], [0, 1, 4], [0, 4]):
        stored = layer.allocate(x, T + 2)
        for start, stop in itertools.pairwise(cuts):
            assert_close(layer.extend(x[:, start:stop], stored, start), whole[:, start:stop])


@pytest.mark.parametrize(
    "pattern",
    [ops.Local(1), ops.Strided(2), ops.Heads(ops.SameBlock(2), ops.BlockEnds(2, 1), None), ops.SameBlock(3)],
    ids=str,
)
def test_extend_with_a_pattern_agrees_with_the_whole_sequence(pattern, device):
    layer = double(nn.SelfAttention(C, H, causal=True), device)
    x = to_device(normal(B, T + 3, C), device)
    whole = to_cpu(layer(x, pattern))
    for cuts in (list(range(T + 4)), [0, 3, 5, 7], [0, 1, 4, 6, 7]):
        stored = layer.allocate(x, T + 5)
        for start, stop in itertools.pairwise(cuts):
            assert_close(layer.extend(x[:, start:stop], stored, start, pattern), whole[:, start:stop])


# Errors


@pytest.mark.parametrize("past", [-1, 2])
def test_positions_for_which_there_is_no_room(past):
    layer, x = nn.SelfAttention(C, H, causal=True), normal(B, 3, C).astype(np.float32)
    stored = [np.zeros_like(array) for array in layer.allocate(x, 4)]
    with pytest.raises(ValueError, match=f"^past: expected 0 to 1, for which there is room, got {past}$"):
        layer.extend(x, stored, past)
    assert not any(array.any() for array in stored)


@pytest.mark.parametrize("make", [nn.SelfAttention, nn.CrossAttention, nn.MultiHeadLoop, nn.TransformerBlock])
def test_heads_that_do_not_divide_the_width(make):
    with pytest.raises(ValueError, match="heads: 4 does not divide d_model 6"):
        make(6, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_is_not_a_pattern(causal):
    with pytest.raises(TypeError, match=r"pattern: expected None or a Pattern, .*ops.Padding\(lengths\), got ndarray"):
        nn.SelfAttention(6, 2, causal)(np.ones((2, 4, 6), np.float32), np.ones((4, 4), bool))


@pytest.mark.parametrize("make", [nn.SelfAttention, nn.MultiHeadLoop, lambda C, H: nn.SingleHeadAttention(C)])
def test_x_of_another_width(make):
    with pytest.raises(ValueError, match=r"x: expected \(B, T, 512\), got \(4, 7, 256\)"):
        make(512, 8)(np.ones((4, 7, 256), np.float32))


def test_x_of_another_rank():
    with pytest.raises(ValueError, match=r"x: expected \(B, T, 6\), got \(7, 6\)"):
        nn.SelfAttention(6, 2)(np.ones((7, 6), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\), got \(7, 6\)"):
        nn.BasicSelfAttention()(np.ones((7, 6), np.float32))


def test_a_memory_that_does_not_fit():
    layer, x = nn.CrossAttention(6, 2), np.ones((2, 4, 6), np.float32)
    with pytest.raises(ValueError, match=r"memory: expected \(2, M, 6\), got \(3, 5, 6\)"):
        layer(x, np.ones((3, 5, 6), np.float32))
    with pytest.raises(ValueError, match=r"memory: expected \(2, M, 6\), got \(2, 5, 4\)"):
        layer(x, np.ones((2, 5, 4), np.float32))

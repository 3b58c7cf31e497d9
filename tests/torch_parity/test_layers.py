"""Layers compared with PyTorch's, with the same weights: outputs, and the gradients of inputs and weights."""

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.rng import Key

torch = pytest.importorskip("torch")

B, T, S, C, H, F = 3, 5, 7, 6, 2, 11
LENGTHS = np.array([2, T, 3])
PADDED = torch.from_numpy(np.arange(T) >= LENGTHS[:, None])  # (B, T), PyTorch's convention: true in the padding
FUTURE = torch.ones(T, T, dtype=torch.bool).triu(1)  # true where a query may not see the key


def pairs_of_attention(ours, theirs, of):
    """Our names, and for each the part of PyTorch's parameter in our shape; `of` selects the part."""
    for i, part in enumerate((ours.query, ours.key, ours.value)):
        rows = slice(i * C, (i + 1) * C)
        yield part.w, of(theirs.in_proj_weight)[rows].T
        yield part.b, of(theirs.in_proj_bias)[rows]
    yield from pairs_of_linear(ours.unify, theirs.out_proj, of)


def pairs_of_linear(ours, theirs, of):
    yield ours.w, of(theirs.weight).T
    yield ours.b, of(theirs.bias)


def pairs_of_norm(ours, theirs, of):
    yield ours.gamma, of(theirs.weight)
    yield ours.beta, of(theirs.bias)


def pairs_of_block(ours, theirs, of):
    yield from pairs_of_attention(ours.attention, theirs.self_attn, of)
    yield from pairs_of_norm(ours.norm1, theirs.norm1, of)
    yield from pairs_of_linear(ours.feedforward.up, theirs.linear1, of)
    yield from pairs_of_linear(ours.feedforward.down, theirs.linear2, of)
    yield from pairs_of_norm(ours.norm2, theirs.norm2, of)


def with_equal_weights(ours, theirs, pairs, precision):
    """Both layers in one dtype, with the same random weights, including norms and biases."""
    ours.to(dtype=precision.dtype)
    theirs.to(getattr(torch, np.dtype(precision.dtype).name))
    for i, parameter in enumerate(theirs.parameters()):
        parameter.data[...] = 0.5 * torch.from_numpy(precision.normal(*parameter.shape, seed=100 + i))
    copied = 0
    for param, value in pairs(ours, theirs, lambda p: p.detach()):
        param.data[...] = value.numpy()
        copied += param.data.size
    assert copied == ours.flat.data.size == sum(p.numel() for p in theirs.parameters())


def agree_on_gradients(ours, theirs, pairs, precision):
    names = {id(p): name for name, p in ours.named_parameters().items()}
    for param, gradient in pairs(ours, theirs, lambda p: p.grad):
        if names[id(param)].endswith("key.b"):
            # It is 0 up to rounding: a bias of the keys adds the same to all scores of a query.
            assert np.abs(param.grad).max() < 1e3 * np.finfo(precision.dtype).eps
        else:
            precision.agree(param.grad, gradient, names[id(param)])


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention(causal, padding, precision):
    ours = nn.SelfAttention(C, H, causal, bias=True)
    theirs = torch.nn.MultiheadAttention(C, H, batch_first=True)
    with_equal_weights(ours, theirs, pairs_of_attention, precision)
    x, dy = precision.normal(B, T, C), precision.normal(B, T, C, seed=1)
    y, cache = ours.forward(x, ops.Padding(LENGTHS) if padding else None)
    x_theirs = torch.tensor(x, requires_grad=True)
    y_theirs, _ = theirs(
        x_theirs,
        x_theirs,
        x_theirs,
        key_padding_mask=PADDED if padding else None,
        attn_mask=FUTURE if causal else None,
    )
    precision.agree(y, y_theirs)
    y_theirs.backward(torch.tensor(dy))
    precision.agree(ours.backward(dy, cache), x_theirs.grad)
    agree_on_gradients(ours, theirs, pairs_of_attention, precision)


def test_cross_attention(precision):
    ours = nn.CrossAttention(C, H, bias=True)
    theirs = torch.nn.MultiheadAttention(C, H, batch_first=True)
    with_equal_weights(ours, theirs, pairs_of_attention, precision)
    x, memory, dy = precision.normal(B, T, C), precision.normal(B, S, C, seed=1), precision.normal(B, T, C, seed=2)
    y, cache = ours.forward(x, memory)
    x_theirs, memory_theirs = torch.tensor(x, requires_grad=True), torch.tensor(memory, requires_grad=True)
    y_theirs, _ = theirs(x_theirs, memory_theirs, memory_theirs)
    precision.agree(y, y_theirs)
    y_theirs.backward(torch.tensor(dy))
    dx, dmemory = ours.backward(dy, cache)
    precision.agree(dx, x_theirs.grad)
    precision.agree(dmemory, memory_theirs.grad)
    agree_on_gradients(ours, theirs, pairs_of_attention, precision)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_transformer_block(norm, causal, activation, precision):
    ours = nn.TransformerBlock(C, H, norm, causal, d_ff=F, activation=activation, bias=True, key=Key(1))
    theirs = torch.nn.TransformerEncoderLayer(
        C, H, F, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre"
    )
    with_equal_weights(ours, theirs, pairs_of_block, precision)
    x, dy = precision.normal(B, T, C), precision.normal(B, T, C, seed=1)
    y, cache = ours.forward(x, ops.Padding(LENGTHS))
    x_theirs = torch.tensor(x, requires_grad=True)
    y_theirs = theirs(x_theirs, src_mask=FUTURE if causal else None, src_key_padding_mask=PADDED)
    precision.agree(y, y_theirs)
    y_theirs.backward(torch.tensor(dy))
    precision.agree(ours.backward(dy, cache), x_theirs.grad)
    agree_on_gradients(ours, theirs, pairs_of_block, precision)

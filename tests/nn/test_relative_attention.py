"""Self-attention with relative positions, with and without a memory, and blocks that use it."""

import math

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.rng import Key

B, T, M, C, H = 2, 4, 3, 6, 2
D = C // H
S = M + T


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def make(device, layer=nn.RelativeSelfAttention, **options):
    """In float64, with all parameters random, including the two biases."""
    made = layer(C, H, key=Key(1), **options).to(device, np.float64)
    for i, p in enumerate(made.parameters()):
        p.data[...] = to_device(0.7 * normal(*p.data.shape, seed=100 + i), device)
    return made


def weights(layer):
    return {name: to_cpu(p.data) for name, p in layer.named_parameters().items()}


def sinusoids(distance):
    """P_δ for one distance, one pair of columns after another."""
    angles = [distance / 10_000 ** (2 * i / C) for i in range(C // 2)]
    return np.array([f(a) for a in angles for f in (math.sin, math.cos)])


def paper(w, x, queries, causal):
    """Section 3.3 of the paper, for the last positions of x (S, C), in loops over heads, queries and keys."""
    S = len(x)
    heads = []
    for h in range(H):
        own = slice(h * D, (h + 1) * D)
        q, k, v = (x @ w[f"{name}.w"][:, own] for name in ("query", "key", "value"))
        u, p = w["content_bias"][h], w["position_bias"][h]
        rows = []
        for t in range(S - queries, S):
            seen = [s for s in range(S) if not causal or s <= t]
            score = []
            for s in seen:
                r = sinusoids(t - s) @ w["position.w"][:, own]
                score.append((q[t] @ k[s] + q[t] @ r + u @ k[s] + p @ r) / math.sqrt(D))
            e = np.exp(score)
            rows.append(sum(a * v[s] for a, s in zip(e / e.sum(), seen, strict=True)))
        heads.append(rows)
    return np.concatenate(heads, axis=1) @ w["unify.w"] + w["unify.b"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [None, T, 1])
def test_the_papers_equations(device, queries, causal):
    layer = make(device, causal=causal)
    x = normal(B, S, C)
    y = to_cpu(layer(to_device(x, device), queries=queries))
    expected = np.stack([paper(weights(layer), row, queries or S, causal) for row in x])
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


def test_the_biases_start_at_zero_and_every_map_with_weights_of_its_own():
    layer = nn.RelativeSelfAttention(C, H)
    assert not layer.content_bias.data.any() and not layer.position_bias.data.any()
    maps = [layer.query.w.data, layer.key.w.data, layer.value.w.data, layer.position.w.data]
    assert all(not np.array_equal(a, b) for i, a in enumerate(maps) for b in maps[:i])
    assert layer.position.b is None


def test_shifting_a_text_changes_nothing(device):
    """After three positions that a pattern hides, x gives the same output as alone."""

    class NotTheFirst(ops.Pattern):
        def mask(self, b, rows, columns, T, S, xp):
            return xp.arange(columns.start, columns.stop)[None, :] >= M

    layer = make(device, causal=True)
    x = normal(B, S, C)
    alone = to_cpu(layer(to_device(x[:, M:], device)))
    behind = to_cpu(layer(to_device(x, device), NotTheFirst(), queries=T))
    np.testing.assert_allclose(behind, alone, rtol=1e-12, atol=1e-14)


def test_the_order_of_positions_matters(device):
    layer, x = make(device), normal(B, T, C)
    y, turned = (to_cpu(layer(to_device(a, device))) for a in (x, x[:, ::-1].copy()))
    assert np.abs(turned[:, ::-1] - y).max() > 1e-2


def test_the_future_has_no_influence(device):
    layer, x = make(device, causal=True), normal(B, S, C)
    y = to_cpu(layer(to_device(x, device), queries=T))
    for t in range(T - 1):
        changed = x.copy()
        changed[:, M + t + 1 :] = normal(B, T - t - 1, C, seed=t + 1)
        y_changed = to_cpu(layer(to_device(changed, device), queries=T))
        np.testing.assert_allclose(y_changed[:, : t + 1], y[:, : t + 1], rtol=1e-12)
        assert np.abs(y_changed[:, t + 1] - y[:, t + 1]).max() > 1e-3


@pytest.mark.parametrize("pieces", [[1] * S, [2, 3, 2], [S]], ids=str)
def test_extend_agrees_with_forward(device, pieces):
    layer, x = make(device, causal=True), to_device(normal(B, S, C), device)
    stored = tuple(to_device(np.full((B, H, S + 2, D), np.nan), device) for _ in "kv")
    expected, past = to_cpu(layer(x)), 0
    for n in pieces:
        y = to_cpu(layer.extend(x[:, past : past + n], stored, past))
        np.testing.assert_allclose(y, expected[:, past : past + n], rtol=1e-10, atol=1e-12)
        past += n


@pytest.mark.parametrize("queries", [0, S + 1])
def test_queries_out_of_range(queries):
    with pytest.raises(ValueError, match=f"queries: expected a number from 1 to 7, the length of x, got {queries}"):
        nn.RelativeSelfAttention(C, H)(np.ones((B, S, C)), queries=queries)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"x: expected \(B, S, 6\), got \(2, 7, 5\)"):
        nn.RelativeSelfAttention(C, H)(np.ones((B, S, 5)))
    with pytest.raises(ValueError, match="heads: 4 does not divide d_model 6"):
        nn.RelativeSelfAttention(C, 4)


# Blocks


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_block_sees_the_memory_like_earlier_positions(norm, device):
    """The output is that of the last T positions when the block reads [memory, x] as a single sequence."""
    block = make(device, nn.TransformerBlock, norm=norm, causal=True, relative=True)
    memory, x = normal(B, M, C), normal(B, T, C, seed=1)
    y = to_cpu(block(to_device(x, device), memory=to_device(memory, device)))
    whole = to_cpu(block(to_device(np.concatenate([memory, x], axis=1), device)))
    np.testing.assert_allclose(y, whole[:, M:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_an_empty_memory_is_none(norm, device):
    block, dy = make(device, nn.TransformerBlock, norm=norm, causal=True, relative=True), normal(B, T, C, seed=2)
    results = []
    for options in {}, {"memory": to_device(np.zeros((B, 0, C)), device)}:
        block.zero_grad()
        y, cache = block.forward(to_device(normal(B, T, C), device), **options)
        dx = block.backward(to_device(dy, device), cache)
        results.append([to_cpu(a).copy() for a in (y, dx, *(p.grad for p in block.parameters()))])
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


def test_a_memory_that_does_not_fit(device):
    x = to_device(normal(B, T, C), device)
    block = nn.TransformerBlock(C, H, causal=True, relative=True).to(device, np.float64)
    with pytest.raises(ValueError, match=r"memory: expected \(2, M, 6\), got \(1, 3, 6\)"):
        block(x, memory=to_device(normal(1, M, C), device))
    plain = nn.TransformerBlock(C, H, causal=True).to(device, np.float64)
    with pytest.raises(ValueError, match="memory: expected None, since only a relative block can take one"):
        plain(x, memory=to_device(normal(B, M, C), device))

import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.rng import Key

B, T, M, C = 2, 4, 5, 6
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def make(device, norm, **options):
    return nn.DecoderBlock(C, 2, norm, key=Key(1), **options).to(device, np.float64)


def arrays(device):
    rng = np.random.default_rng(0)
    return (to_device(rng.standard_normal(shape), device) for shape in ((B, T, C), (B, M, C)))


@NORMS
def test_equations(norm, device):
    block = make(device, norm)
    x, memory = arrays(device)
    if norm == "post":
        g = block.norm1(x + block.attention(x))
        h = block.norm2(g + block.cross(g, memory))
        expected = block.norm3(h + block.feedforward(h))
    else:
        g = x + block.attention(block.norm1(x))
        h = g + block.cross(block.norm2(g), memory)
        expected = h + block.feedforward(block.norm3(h))
    np.testing.assert_allclose(to_cpu(block(x, memory)), to_cpu(expected), rtol=1e-12)


def test_queries_come_from_the_target_and_values_from_the_memory(device):
    """Scaling the memory's values scales what cross-attention adds; queries do not change it if the memory is the same
    at all positions.
    """
    cross = make(device, "post").cross
    x, memory = arrays(device)
    memory = memory[:, :1] + 0 * memory  # the same at every position, so any mean over them is equal to each
    y = to_cpu(cross(x, memory))
    np.testing.assert_allclose(y, np.broadcast_to(y[:, :1], y.shape), rtol=1e-9)
    expected = cross.unify(cross.value(memory))[:, :T]
    np.testing.assert_allclose(y, to_cpu(expected), rtol=1e-9)


@NORMS
def test_later_targets_have_no_influence(norm, device):
    block = make(device, norm)
    x, memory = arrays(device)
    y = to_cpu(block(x, memory))
    for t in range(T - 1):
        changed = to_cpu(x).copy()
        changed[:, t + 1 :] += 1 + np.arange(C)
        y_changed = to_cpu(block(to_device(changed, device), memory))
        np.testing.assert_allclose(y_changed[:, : t + 1], y[:, : t + 1], rtol=1e-9, atol=1e-12)
        assert np.abs(y_changed[:, t + 1] - y[:, t + 1]).max() > 1e-3


@NORMS
def test_padding_of_the_memory_has_no_influence(norm, device):
    """It affects neither y nor the gradients; the rest of the memory affects every position of the target."""
    block, lengths = make(device, norm), np.array([2, M])
    x, memory = arrays(device)
    pattern, dy = ops.Padding(to_device(lengths, device)), to_device(np.ones((B, T, C)) * np.arange(C), device)
    y, cache = block.forward(x, memory, pattern)
    _, dmemory = (to_cpu(d) for d in block.backward(dy, cache))
    assert not dmemory[0, 2:].any()
    assert all(np.abs(dmemory[b, s]).max() > 1e-9 for b in range(B) for s in range(lengths[b]))
    changed = to_cpu(memory).copy()
    changed[0, 2:] = 100
    np.testing.assert_allclose(to_cpu(block(x, to_device(changed, device), pattern)), to_cpu(y), rtol=1e-9)
    changed[0, 1] += np.arange(C)
    moved = np.abs(to_cpu(block(x, to_device(changed, device), pattern)) - to_cpu(y)).max(axis=-1)
    assert (moved[0] > 1e-4).all() and moved[1].max() < 1e-9


def test_every_dropout_has_a_mask_of_its_own(monkeypatch):
    keys = []

    def dropout(x, p, key):
        keys.append(key)
        return x, ()

    monkeypatch.setattr(ops, "dropout", dropout)
    for norm in "post", "pre":
        nn.DecoderBlock(C, 2, norm, dropout=0.5)(np.ones((B, T, C)), np.ones((B, M, C)), key=Key(0, len(keys)))
    assert keys == [Key(0, first).fold(i) for first in (0, 3) for i in (1, 2, 3)]


@NORMS
def test_extend_agrees_with_forward(norm, device):
    block = make(device, norm, bias=True)
    x, memory = arrays(device)
    pattern = ops.Padding(to_device(np.array([2, M]), device))
    expected = to_cpu(block(x, memory, pattern))
    known = block.cross.project(memory)
    stored = block.allocate(x, T)
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        y = block.extend(x[:, start:stop], stored, start, known, pattern)
        np.testing.assert_allclose(to_cpu(y), expected[:, start:stop], rtol=1e-9)


def test_unknown_norm():
    with pytest.raises(ValueError, match="norm: expected one of post, pre, got 'batch'"):
        nn.DecoderBlock(C, 2, norm="batch")

"""Transformer-XL, compared with the paper's equations in plain loops; and properties of its memory."""

import math

import numpy as np
import pytest

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.models import LanguageModel, TransformerXL
from scratchformer.rng import Key

V, T, C, H, L = 9, 4, 8, 2, 2
D = C // H
TEXT = np.array([[1, 4, 2, 8, 0, 3, 6, 6, 5, 1, 2, 7], [3, 3, 5, 1, 7, 6, 0, 2, 8, 4, 4, 1]])
SEGMENTS = [TEXT[:, i : i + T] for i in range(0, 12, T)]
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def make(device, memory=T, **options):
    """In float64, with random biases instead of the initial zeros."""
    model = TransformerXL(V, C, H, L, T, memory, key=Key(1), **options).to(device, np.float64)
    for i, (name, p) in enumerate(model.named_parameters().items()):
        if name.endswith("_bias"):
            p.data[...] = to_device(np.random.default_rng(i).standard_normal(p.data.shape), device)
    return model


def read(model, segments, length=None):
    """The logits of each segment, read in order, on the CPU."""
    memory, logits = None, []
    for ids in segments:
        y, cache = model.forward(to_device(ids, model.device), memory)
        memory = model.remember(cache, length)
        logits.append(to_cpu(y))
    return logits


# The paper's section 3.3, for one text, in loops.


def norm_of(x, w, name):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * w[f"{name}.gamma"] + w[f"{name}.beta"]


def attend(w, h, queries):
    """Attention of the last positions of h (M + T, C) to all positions up to them."""
    found = np.zeros((queries, C))
    for head in range(H):
        own = slice(head * D, (head + 1) * D)
        q, k, v, r = (lambda x, m=m, own=own: x @ w[f"{m}.w"][:, own] for m in ("query", "key", "value", "position"))
        u, p = w["content_bias"][head], w["position_bias"][head]
        for t in range(queries):
            place, score = len(h) - queries + t, []
            for s in range(place + 1):
                angles = [(place - s) / 10_000 ** (2 * i / C) for i in range(C // 2)]
                distance = np.array([f(a) for a in angles for f in (math.sin, math.cos)])
                content = q(h[place]) @ k(h[s]) + u @ k(h[s])
                score.append((content + q(h[place]) @ r(distance) + p @ r(distance)) / math.sqrt(D))
            e = np.exp(np.array(score) - max(score))
            found[t, own] = sum(a * v(h[s]) for s, a in enumerate(e / e.sum()))
    return found @ w["unify.w"] + w["unify.b"]


def paper(model, segments, length):
    """The logits (T, V) of each segment of a text; each layer keeps its last `length` inputs."""
    w = {name: to_cpu(p.data) for name, p in model.named_parameters().items()}
    memory = [np.zeros((0, C)) for _ in range(L)]
    logits = []
    for ids in segments:
        x = w["body.tokens.table"][ids]
        for layer in range(L):
            own = {n.removeprefix(f"body.blocks.{layer}."): a for n, a in w.items() if f"blocks.{layer}." in n}
            attention = {n.removeprefix("attention."): a for n, a in own.items() if n.startswith("attention.")}
            up, up_b, down, down_b = (own[f"feedforward.{n}"] for n in ("up.w", "up.b", "down.w", "down.b"))
            h = np.concatenate([memory[layer], x])
            memory[layer] = h[max(0, len(h) - length) :]
            if model.body.final_norm is None:
                x = norm_of(x + attend(attention, h, T), own, "norm1")
                x = norm_of(x + np.maximum(x @ up + up_b, 0) @ down + down_b, own, "norm2")
            else:
                x = x + attend(attention, norm_of(h, own, "norm1"), T)
                x = x + np.maximum(norm_of(x, own, "norm2") @ up + up_b, 0) @ down + down_b
        x = x if model.body.final_norm is None else norm_of(x, w, "body.final_norm")
        logits.append(x @ w["output.w"] + w["output.b"])
    return logits


@NORMS
@pytest.mark.parametrize("length", [0, 3, T, 7])
def test_the_papers_equations(device, norm, length):
    """With memories shorter and longer than a segment, and than in training."""
    model = make(device, norm=norm)
    found = read(model, SEGMENTS, length)
    for b in range(2):
        expected = paper(model, [ids[b] for ids in SEGMENTS], length)
        for y, z in zip(found, expected, strict=True):
            np.testing.assert_allclose(y[b], z, rtol=1e-9, atol=1e-11)


@NORMS
def test_with_all_of_the_past_in_memory_it_is_one_long_text(device, norm):
    """The remembered vectors are the same as those of the whole text."""
    model = make(device, norm=norm)
    whole = LanguageModel(V, C, H, L, 12, norm=norm, positions="relative").to(device, np.float64)
    whole.load_state_dict(model.state_dict())
    found = np.concatenate(read(model, SEGMENTS, length=12), axis=1)
    np.testing.assert_allclose(found, to_cpu(whole(to_device(TEXT, device))), rtol=1e-9, atol=1e-11)


@NORMS
def test_an_empty_memory_is_like_none(device, norm):
    model = make(device, memory=0, norm=norm)
    plain = LanguageModel(V, C, H, L, T, norm=norm, positions="relative").to(device, np.float64)
    plain.load_state_dict(model.state_dict())
    for ids, y in zip(SEGMENTS, read(model, SEGMENTS), strict=True):
        assert np.array_equal(y, to_cpu(plain(to_device(ids, device))))


@NORMS
@pytest.mark.parametrize("options", [{}, {"wide": True}, {"recompute": True}], ids=str)
def test_the_future_has_no_influence(norm, options, device):
    """When all tokens after a position change, the logits up to it stay the same and the next ones change."""
    model = make(device, norm=norm, **options)
    y = np.concatenate(read(model, SEGMENTS), axis=1)
    for t in range(11):
        changed = np.where(np.arange(12) > t, (TEXT + 1) % V, TEXT)
        y_changed = np.concatenate(read(model, [changed[:, i : i + T] for i in (0, 4, 8)]), axis=1)
        np.testing.assert_allclose(y_changed[:, : t + 1], y[:, : t + 1], rtol=1e-9, atol=1e-12)
        assert np.abs(y_changed[:, t + 1] - y[:, t + 1]).max() > 1e-3


def test_how_far_it_sees(device):
    """With M = T one layer sees one segment back, and two layers see two: the first segment changes the third."""
    model = make(device)
    y = read(model, SEGMENTS)
    other = [(SEGMENTS[0] + 1) % V, *SEGMENTS[1:]]
    assert np.abs(read(model, other)[2] - y[2]).max() > 1e-4
    assert np.array_equal(read(model, other, length=0)[2], read(model, SEGMENTS, length=0)[2])


def test_what_is_remembered(device):
    """For every layer, its inputs, the old ones first."""
    model = make(device, memory=6)
    _, cache = model.forward(to_device(SEGMENTS[0], device), key=Key(3))
    memory = model.remember(cache)
    assert memory.shape == (2, L, T, C)
    for layer, entered in enumerate(cache.body.stack.block_inputs):
        assert np.array_equal(to_cpu(memory[:, layer]), to_cpu(entered))
    tokens = to_cpu(model.body.tokens(to_device(SEGMENTS[0], device)))
    assert np.array_equal(to_cpu(memory[:, 0]), tokens)
    _, cache = model.forward(to_device(SEGMENTS[1], device), memory)
    longer = to_cpu(model.remember(cache))
    assert longer.shape == (2, L, 6, C)
    assert np.array_equal(longer[:, :, :2], to_cpu(memory)[:, :, 2:])
    assert np.array_equal(longer[:, 1, 2:], to_cpu(cache.body.stack.block_inputs[1]))
    assert to_cpu(model.remember(cache, 0)).shape == (2, L, 0, C)
    assert to_cpu(model.remember(cache, 100)).shape == (2, L, 2 * T, C)
    with pytest.raises(ValueError, match="length: expected a number >= 0, got -1"):
        model.remember(cache, -1)


def test_a_memory_shares_nothing_with_the_segment():
    """A micro-batch may be freed while its rows of the memory are still in use."""
    model = make(CPU)
    _, cache = model.forward(SEGMENTS[0])
    memory = model.remember(cache)
    assert not any(np.shares_memory(memory, x) for x in cache.body.stack.block_inputs)


@NORMS
def test_gradient_of_the_loss(norm, device, check_loss_backward):
    """Of the second segment, with dropout and the memory of the first, which is constant."""
    model = make(device, norm=norm, dropout=0.2, activation="gelu")
    _, cache = model.forward(to_device(SEGMENTS[0], device))
    memory = to_cpu(model.remember(cache))
    check_loss_backward(model, SEGMENTS[1], np.roll(SEGMENTS[1], -1, axis=1), memory)


@NORMS
def test_no_gradient_goes_into_the_segment_before(norm, device):
    """A token that occurs only in the memory gets no gradient, although it changes the loss."""
    model = make(device, norm=norm)
    first, second = np.array([[0, 1, 2, 3]]), np.array([[4, 5, 6, 7]])
    losses = []
    for ids in first, np.array([[0, 1, 8, 3]]):
        _, cache = model.forward(to_device(ids, device))
        loss, cache = model.loss(
            to_device(second, device), to_device(np.roll(second, -1), device), model.remember(cache)
        )
        losses.append(float(loss))
    model.loss_backward(1.0, cache)
    grad = np.abs(to_cpu(model.body.tokens.table.grad)).max(axis=1)
    assert not grad[:4].any() and not grad[8] and (grad[4:8] > 1e-6).all()
    assert abs(losses[0] - losses[1]) > 1e-4


def test_parts_of_a_batch_add_up_to_the_whole(device):
    model = make(device)
    _, cache = model.forward(to_device(SEGMENTS[0], device))
    memory, ids, targets = model.remember(cache), SEGMENTS[1], np.roll(SEGMENTS[1], -1, axis=1)
    _, cache = model.loss(to_device(ids, device), to_device(targets, device), memory)
    model.loss_backward(1.0, cache)
    whole = to_cpu(model.flat.grad).copy()
    model.zero_grad()
    for b in range(2):
        rows = slice(b, b + 1)
        _, cache = model.loss(to_device(ids[rows], device), to_device(targets[rows], device), memory[rows])
        model.loss_backward(0.5, cache)
    np.testing.assert_allclose(to_cpu(model.flat.grad), whole, rtol=1e-9, atol=1e-12)


def test_float32_stays_float32(device):
    model = make(device).to(dtype=np.float32)
    ids, memory = to_device(SEGMENTS[0], device), None
    for _ in range(2):
        loss, cache = model.loss(ids, ids, memory)
        model.loss_backward(1.0, cache)
        memory = model.remember(cache[0])
    assert loss.dtype == memory.dtype == model.flat.grad.dtype == np.float32


@pytest.mark.parametrize(("narrow", "wide"), [(np.float16, np.float32), (np.float32, np.float64)])
def test_a_memory_of_another_type_is_refused(device, narrow, wide):
    """A wider dtype would spread to the whole computation; a narrower one would have lost precision."""
    ids = to_device(SEGMENTS[0], device)
    for own, other in ((narrow, wide), (wide, narrow)):
        model = make(device).to(dtype=own)
        memory = to_device(np.random.default_rng(0).standard_normal((2, L, T, C)).astype(own), device)
        expected = f"^memory: expected {np.dtype(own)}, the dtype of the model, got {np.dtype(other)}$"
        with pytest.raises(TypeError, match=expected):
            model(ids, memory.astype(other))
        with pytest.raises(TypeError, match=expected):
            model.loss(ids, ids, memory.astype(other))
        logits, cache = model.forward(ids, memory)
        assert logits.dtype == model.remember(cache).dtype == own
        nothing = memory[:, :, :0].astype(other)  # empty, so there is nothing to lose
        logits, cache = model.forward(ids, nothing)
        assert logits.dtype == model.remember(cache).dtype == own
        assert np.array_equal(to_cpu(logits), to_cpu(model(ids)))
    with pytest.raises(TypeError, match=r"^memory: expected an array"):
        model(ids, [1.0])


def test_config_makes_the_same_model_again():
    model = make(CPU, norm="pre", activation="gelu", d_ff=5, memory=3)
    twin = TransformerXL(**model.config)
    twin.load_state_dict(model.state_dict())
    assert twin.config == model.config and twin.memory == 3 and twin.context == T
    np.testing.assert_allclose(twin(SEGMENTS[0]), model(SEGMENTS[0]), rtol=1e-4)


def test_inputs_that_do_not_fit(device):
    model = make(device)
    ids = to_device(SEGMENTS[0], device)
    for shape in (1, L, T, C), (2, 1, T, C), (2, L, T, C + 1), (2, T, C):
        with pytest.raises(ValueError, match=r"memory: expected \(2, 2, M, 8\), got \("):
            model(ids, to_device(np.zeros(shape), device))
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T up to 8, got 9 tokens"):
        model(to_device(np.zeros((2, 9), int), device))
    for memory in (-1, 2.5, True):
        with pytest.raises((ValueError, TypeError), match=f"^memory: expected .*, got {memory}$"):
            TransformerXL(V, C, H, L, T, memory)
    with pytest.raises(ValueError, match="context: expected a number >= 1, got 0"):
        TransformerXL(V, C, H, L, 0, 4)
    with pytest.raises(ValueError, match="positions: a TransformerXL has relative ones"):
        TransformerXL(V, C, H, L, T, T, positions="learned")

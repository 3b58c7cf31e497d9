"""A user's own block works wherever a block is expected: in training, generation, estimates and snapshots."""

import itertools

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.data import TextBatches
from scratchformer.dispatch import backward, operation
from scratchformer.generation import generate
from scratchformer.generation.cache import KeyValueCache
from scratchformer.models import Body, Classifier, LanguageModel
from scratchformer.models.predictor import Predictor
from scratchformer.nn import (
    Block,
    EmbeddingSum,
    FeedForward,
    Frozen,
    Layer,
    LayerNorm,
    Linear,
    SelfAttention,
    SinusoidalPositions,
    Stack,
    TokenEmbedding,
    TransformerBlock,
)
from scratchformer.optim import Adam
from scratchformer.rng import Key
from scratchformer.testing import check_layer
from scratchformer.training import Replicas, SnapshotError, estimate, load_model, load_snapshot, save_snapshot
from scratchformer.training.snapshot import restore

V, C, H, T = 11, 8, 2, 6
QUICK = dict(max_elements=0, directions=1, together=8)  # of a gradient check
IDS = Key(5).generator().integers(0, V, (2, T))


class Mean(Layer):
    """y_t = x_t + (mean of the x_s that t may see) w: a block with only forward and backward."""

    def __init__(self, d_model, heads, gain, key=Key(0)):
        self.map, self.gain = Linear(d_model, d_model, key=key), gain

    def forward(self, x, pattern=None, key=None):
        one_head = (x[:, None], x[:, None], x[:, None])
        mean, cache = ops.attention(0 * one_head[0], *one_head[1:], pattern)
        y, mapped = self.map.forward(mean[:, 0])
        return x + self.gain * y, (cache, mapped)

    def backward(self, dy, cache):
        attention, mapped = cache
        _, _, dv = ops.attention_backward(self.map.backward(self.gain * dy, mapped)[:, None], attention)
        return dy + dv[:, 0]


class Halved(FeedForward):
    """A user's own part of one of the project's blocks."""

    def forward(self, x):
        y, cache = super().forward(x)
        return y / 2, cache

    def backward(self, dy, cache):
        return super().backward(dy / 2, cache)


class HalvedBlock(Block):
    def __init__(self, d_model, heads, key=Key(0)):
        norms = LayerNorm(d_model), LayerNorm(d_model)
        super().__init__(SelfAttention(d_model, heads, key=key), Halved(d_model, key=key), *norms, norm="pre")


class NoExtend(Layer):
    """A user's own attention, without the methods for generation."""

    def __init__(self, d_model, heads, key=Key(0)):
        self.inner = SelfAttention(d_model, heads, key=key)

    def forward(self, x, pattern=None):
        return self.inner.forward(x, pattern)

    def backward(self, dy, cache):
        return self.inner.backward(dy, cache)


class NoExtendBlock(Block):
    def __init__(self, d_model, heads, key=Key(0)):
        norms = LayerNorm(d_model), LayerNorm(d_model)
        super().__init__(NoExtend(d_model, heads, key), FeedForward(d_model, key=key), *norms, norm="post")


@operation
def cube(x):
    return x**3, x


@backward
def cube_backward(dy, x):
    return 3 * dy * x**2


class ParallelBlock(TransformerBlock):
    """A block with a forward of its own, which inherits an `extend` that computes something else."""

    def forward(self, x, pattern=None, key=None):
        n, norm = self.norm1.forward(x)
        a, attention = self.attention.forward(n, pattern)
        f, feedforward = self.feedforward.forward(n)
        return x + a + f + 0 * self.norm2(x), (norm, attention, feedforward)

    def backward(self, dy, cache):
        norm, attention, feedforward = cache
        dn = self.attention.backward(dy, attention) + self.feedforward.backward(dy, feedforward)
        return dy + self.norm1.backward(dn, norm)


class Doubled(SelfAttention):
    """The same of an attention."""

    def forward(self, x, pattern=None):
        return super().forward(2 * x, pattern)

    def backward(self, dy, cache):
        return 2 * super().backward(dy, cache)


class DoubledBlock(Block):
    def __init__(self, d_model, heads, key=Key(0)):
        norms = LayerNorm(d_model), LayerNorm(d_model)
        super().__init__(Doubled(d_model, heads, key=key), FeedForward(d_model, key=key), *norms, norm="pre")


every_block = pytest.mark.parametrize("block", [Mean, HalvedBlock, NoExtendBlock, ParallelBlock, DoubledBlock])


def make(block, device=None, **options):
    if block is Mean:
        options.setdefault("gain", 1.0)
    model = LanguageModel(V, C, H, 2, T, block=block, final_norm=LayerNorm, key=Key(1), **options)
    return model if device is None else model.to(device, np.float64)


@every_block
def test_gradients_and_causality(block, device):
    model = make(block, device)
    check_layer(model, to_device(IDS, device), device=device, **QUICK)
    y = to_cpu(model(to_device(IDS, device)))
    for t in range(1, T):
        changed = IDS.copy()
        changed[:, t] = (changed[:, t] + 1) % V
        moved = np.abs(to_cpu(model(to_device(changed, device))) - y).max(axis=(0, 2)) > 1e-12
        assert not moved[:t].any() and moved[t:].any()


@every_block
def test_the_cache_agrees_with_forward(block, device):
    """Token by token and in pieces, also after the context has slid."""
    model = make(block, device)
    for cuts in ([0, 1, 2, 3, 4, 5, 6], [0, 3, 4, 6]):
        cache = KeyValueCache(model, 2)
        for start, stop in itertools.pairwise(cuts):
            z = to_cpu(cache.logits(to_device(IDS[:, start:stop], device)))
            expected = to_cpu(model(to_device(IDS[:, :stop], device)))[:, -1]
            np.testing.assert_allclose(z, expected, rtol=1e-9, atol=1e-12)
    kept = np.concatenate([IDS[:, T - T // 2 + 1 :], IDS[:, :1]], axis=1)
    z = to_cpu(cache.logits(to_device(IDS[:, :1], device)))
    np.testing.assert_allclose(z, to_cpu(model(to_device(kept, device)))[:, -1], rtol=1e-9, atol=1e-12)


def test_one_new_token_uses_the_blocks_actual_parts():
    """The kernel for one token must call the parts that it does not know."""
    model = make(HalvedBlock)
    cache = KeyValueCache(model, 1)
    for t in range(T):
        z = cache.logits(IDS[:1, t : t + 1])
    np.testing.assert_allclose(z, model(IDS[:1])[:, -1], rtol=1e-4, atol=1e-5)


@every_block
def test_it_trains_writes_is_estimated_and_saved(block, tmp_path):
    model, data = make(block), np.arange(300) % V
    batches = TextBatches(data, 4, T, Key(2))
    adam = Adam(model.parameters(), 0.02)
    with Replicas(model, 2, 1) as replicas:
        losses = []
        for step in range(40):
            losses.append(replicas.gradients(batches.batch(step), Key(step)))
            adam.step()
        assert losses[-1] < 0.5 * losses[0]
        assert estimate(replicas, batches.batch(0)).parameters == model.flat.data.size
    assert len([*generate(model, IDS[:1], 2 * T, key=Key(3))]) == 2 * T
    save_snapshot(tmp_path / "last.safetensors", model)
    loaded, _ = load_model(tmp_path)
    assert loaded.config == model.config and type(loaded.body.blocks[0]) is block
    assert np.array_equal(loaded(IDS), model(IDS))


def test_options_go_to_the_block():
    model = make(Mean, gain=0.5)
    assert model.config["gain"] == 0.5 and [block.gain for block in model.body.blocks] == [0.5, 0.5]
    with pytest.raises(TypeError, match=r"^LanguageModel: no option 'gian'; expected one of .*by_block, gain$"):
        make(Mean, gian=0.5)
    with pytest.raises(TypeError, match=r"^LanguageModel: no option 'd_ff'"):
        make(Mean, d_ff=3)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_activation_defined_by_a_user(depth, tmp_path, device):
    model = LanguageModel(V, C, H, depth, T, activation=(cube, cube_backward), key=Key(1))
    save_snapshot(tmp_path / "last.safetensors", model)
    loaded, _ = load_model(tmp_path)
    assert np.array_equal(loaded(IDS), model(IDS))
    restore(load_snapshot(tmp_path), loaded)
    assert not np.allclose(LanguageModel(V, C, H, depth, T, key=Key(1))(IDS), model(IDS), atol=1e-3)
    check_layer(model.to(device, np.float64), to_device(IDS, device), device=device, **QUICK)
    cache = KeyValueCache(model, 2)
    for t in range(T):
        z = cache.logits(to_device(IDS[:, t : t + 1], device))
    np.testing.assert_allclose(to_cpu(z), to_cpu(model(to_device(IDS, device)))[:, -1], rtol=1e-9, atol=1e-12)


def test_a_function_that_makes_blocks():
    def block(d_model, heads, key):
        return TransformerBlock(d_model, heads, norm="pre", key=key)

    model = Classifier(V, 3, C, H, 2, T, block=block, key=Key(4))
    plain = Classifier(V, 3, C, H, 2, T, norm="pre", key=Key(4))
    assert np.array_equal(model(IDS), plain(IDS)) and plain.body.final_norm is not None
    assert Classifier(V, 3, C, H, 2, T, norm="pre", final_norm=lambda d_model: None).body.final_norm is None
    with pytest.raises(SnapshotError, match=r"cannot save a Classifier with these arguments: .*function"):
        save_snapshot("nowhere", model)


def test_no_code_comes_from_a_snapshot(tmp_path):
    model = make(HalvedBlock)
    model.config["block"] = print
    with pytest.raises(SnapshotError, match="expected JSON values, classes of layers, or operations"):
        save_snapshot(tmp_path / "last.safetensors", model)
    model.config["block"] = {"import": "os:system"}
    save_snapshot(tmp_path / "last.safetensors", model)
    with pytest.raises(SnapshotError, match="'os:system' is neither a class of layers nor an operation"):
        load_model(tmp_path)


class OfParts(Mean):
    """A block that gets its parts in a dict, and draws its weights in a way of its own."""

    def __init__(self, d_model, heads, parts, key=Key(0)):
        super().__init__(d_model, heads, 1.0, key)
        self.norm = parts["norm"](d_model)
        self.map.w.data[...] = key.generator().normal(0, 0.1, (d_model, d_model))


def test_classes_in_a_dict_and_other_draws_come_back(tmp_path):
    model = make(OfParts, parts={"norm": LayerNorm, "more": [{"of": Linear}]})
    save_snapshot(tmp_path / "last.safetensors", model)
    loaded, _ = load_model(tmp_path)
    assert loaded.config == model.config and np.array_equal(loaded(IDS), model(IDS))


def test_a_stack_of_an_iterator_keeps_its_blocks():
    stack = Stack(TransformerBlock(C, H, key=Key(i)) for i in range(2))
    x = Key(1).generator().standard_normal((2, 3, C))
    assert len(stack.parameters()) == 26 and np.array_equal(stack(x), stack(x)) and not np.array_equal(stack(x), x)


def test_a_stack_works_by_itself():
    """It has parameters, under the names of its parts."""
    stack = Stack([TransformerBlock(C, H, key=Key(i)) for i in range(2)], LayerNorm(C))
    assert {"blocks.1.attention.query.w", "norm.gamma"} <= stack.named_parameters().keys()
    check_layer(stack, Key(1).generator().standard_normal((2, 3, C)), **QUICK)


class OwnModel(Predictor):
    """A language model from the parts alone: without a Body, and without a depth among its arguments."""

    def __init__(self, vocab_size, d_model, context, key=Key(0)):
        self.context = context
        self.tokens = TokenEmbedding(vocab_size, d_model, 1.0, key)
        self.blocks = [TransformerBlock(d_model, H, causal=True, key=key.fold(i)) for i in range(2)]
        self.output = Linear(d_model, vocab_size, key=key.fold("output"))

    @property
    def parts(self):
        return EmbeddingSum([self.tokens], SinusoidalPositions()), Stack(self.blocks)

    def forward(self, ids, key=None):
        embedding, stack = self.parts
        x, embedded = embedding.forward(ids, key=key)
        x, stacked = stack.forward(x, key=key)
        z, output = self.output.forward(x)
        return z, (embedded, stacked, output)

    def backward(self, dz, cache):
        embedded, stacked, output = cache
        embedding, stack = self.parts
        embedding.backward(stack.backward(self.output.backward(dz, output), stacked), embedded)

    def loss(self, ids, targets, key=None):
        logits, forward = self.forward(ids, key)
        loss, cross_entropy = ops.cross_entropy(logits, targets)
        return loss, (forward, cross_entropy)

    def allocate(self, batch_size, length=T):
        return self.parts[1].allocate(np.empty((batch_size, 0, C), self.tokens.table.data.dtype), length)

    def extend(self, ids, stored, past):
        embedding, stack = self.parts
        x, _ = embedding.forward(ids, start=past)
        return self.output(stack.extend(x, stored, past))


def test_a_model_of_parts_alone(tmp_path):
    model = OwnModel(V, C, T, key=Key(1))
    check_layer(model, IDS, **QUICK)
    cache = KeyValueCache(model, 2)
    for t in range(T):
        z = cache.logits(IDS[:, t : t + 1])
    np.testing.assert_allclose(z, model(IDS)[:, -1], rtol=1e-4, atol=1e-5)
    assert len([*generate(model, IDS[:1], 2 * T)]) == 2 * T
    found = estimate(Replicas(model, 1, 1), TextBatches(np.arange(300) % V, 4, T, Key(2)).batch(0))
    assert found.parameters == model.flat.data.size
    save_snapshot(tmp_path / "last.safetensors", model)
    assert np.array_equal(load_model(tmp_path)[0](IDS), model(IDS))


def test_only_a_causal_body_generates():
    body = Body(V, C, H, 1, T)
    with pytest.raises(ValueError, match="causal: this body is not causal, so it cannot generate"):
        body.allocate(1)


class Hasty(TransformerBlock):
    """A block with defaults of its own."""

    def __init__(self, d_model, heads, norm="pre", dropout=0.5, key=Key(0)):
        super().__init__(d_model, heads, norm, dropout=dropout, key=key)


def test_a_blocks_own_defaults():
    """The body's dropout counts, and a pre-norm block gets a last norm whether or not the order was passed."""
    bodies = [Body(V, C, H, 1, T, block=Hasty, **options) for options in ({}, {"norm": "pre"}, {"dropout": 0.0})]
    assert [body.blocks[0].dropout.p for body in bodies] == [0.0, 0.0, 0.0]
    assert all(isinstance(body.final_norm, LayerNorm) for body in bodies)
    assert Body(V, C, H, 1, T, block=Hasty, dropout=0.25).blocks[0].dropout.p == 0.25


def test_the_first_blocks_can_be_frozen():
    model, plain = make(HalvedBlock), make(HalvedBlock)
    model.body.blocks[0] = Frozen(model.body.blocks[0])
    for each in model, plain:
        _, cache = each.loss(IDS, IDS)
        each.loss_backward(1.0, cache)
    for name, p in plain.named_parameters().items():
        frozen = name.startswith(("body.blocks.0.", "body.tokens.", "body.positions."))
        assert np.array_equal(model.named_parameters()[name].grad, 0 * p.grad if frozen else p.grad), name


class Shortened(Mean):
    def forward(self, x, pattern=None, key=None):
        y, cache = super().forward(x, pattern)
        return y[:, 1:], cache


class Sideways(Mean):
    def allocate(self, x, length):
        return (np.empty((x.shape[0], length, 1, x.shape[2]), x.dtype),)

    def extend(self, x, stored, past, pattern=None):
        return x


def test_blocks_that_break_the_rules():
    with pytest.raises(ValueError, match=r"block 0: expected to return \(2, 6, 8\), as it got, returned \(2, 5, 8\)"):
        make(Shortened, gain=1.0)(IDS)
    with pytest.raises(ValueError, match=r"block 0: allocate: expected arrays \(1, ..., 6, ...\): sequences along"):
        KeyValueCache(make(Sideways, gain=1.0), 1)


def test_two_inputs_that_are_vectors():
    embedding = EmbeddingSum([Linear(3, C), TokenEmbedding(V, C), Linear(2, C)], scale=np.sqrt(8))
    draw = Key(1).generator()
    inputs = draw.standard_normal((2, 4, 3)), IDS[:, :4], draw.standard_normal((2, 4, 2))
    check_layer(embedding, *inputs, **QUICK)
    assert embedding(*(x.astype(np.float32) if x.dtype == float else x for x in inputs)).dtype == np.float32

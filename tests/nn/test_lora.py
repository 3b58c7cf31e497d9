"""Low-rank adaptation and frozen layers: what is trained, what is not, and that merging changes nothing."""

import copy
import pickle

import numpy as np
import pytest

from scratchformer.backend import to_cpu, to_device
from scratchformer.generation import beam_search
from scratchformer.generation.cache import KeyValueCache
from scratchformer.models import Classifier, EncoderDecoder, LanguageModel, TransformerXL
from scratchformer.nn import (
    Frozen,
    Layer,
    LayerNorm,
    Linear,
    LoRA,
    Recompute,
    SelfAttention,
    TransformerBlock,
    add_lora,
    merge_lora,
)
from scratchformer.optim import Adam, AdamW, Group
from scratchformer.rng import Key

IDS = np.array([[1, 2, 3, 4], [5, 6, 0, 1]])
TRAINED = [Group("*.lora_*"), Group("output.*"), Group("*", frozen=True)]


def language_model(**options):
    return LanguageModel(7, 8, 2, 2, 5, key=Key(1), **options)


def adapted(rank=2, alpha=4.0, **options):
    """A model whose adapters have values as after training."""
    model = language_model(**options)
    add_lora(model, rank, alpha, key=Key(2))
    for name, p in model.named_parameters().items():
        if name.endswith(".lora_b"):
            p.data[...] = 0.5 * Key(3).fold(name).generator().standard_normal(p.data.shape)
    return model


def train(model, optimizer, steps=3):
    for step in range(steps):
        model.zero_grad()
        _, cache = model.loss(IDS, (IDS + 1) % 7, key=Key(step))
        model.loss_backward(1.0, cache)
        optimizer.step()


def test_an_adapted_layer_starts_as_the_layer_it_adapts(device):
    linear = Linear(4, 6, key=Key(1)).to(device)
    x = to_device(np.random.default_rng(0).standard_normal((2, 3, 4)), device, np.float32)
    np.testing.assert_array_equal(to_cpu(LoRA(linear, 2)(x)), to_cpu(linear(x)))


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_it_is_the_layer_whose_matrix_is_the_sum(device, alpha):
    linear = Linear(4, 6, key=Key(1)).to(device, np.float64)
    lora = LoRA(linear, 3, alpha, Key(2))
    lora.lora_b.data[...] = to_device(np.random.default_rng(0).standard_normal((3, 6)), device)
    x = np.random.default_rng(1).standard_normal((2, 4))
    w = to_cpu(linear.w.data) + (1 if alpha is None else 2) * to_cpu(lora.lora_a.data) @ to_cpu(lora.lora_b.data)
    y = to_cpu(lora(to_device(x, device)))
    np.testing.assert_allclose(y, x @ w + to_cpu(linear.b.data), rtol=1e-12)
    merged = lora.merge()
    assert type(merged) is Linear and merged.w is linear.w and not linear.w.frozen
    np.testing.assert_allclose(to_cpu(merged(to_device(x, device))), y, rtol=1e-12)


def test_merging_keeps_what_was_frozen_frozen():
    linear = Linear(4, 6)
    linear.b.frozen = True
    merged = LoRA(linear, 2).merge()
    assert (merged.w.frozen, merged.b.frozen) == (False, True)


def test_names_stay_and_two_are_added():
    model, before = language_model(), list(language_model().named_parameters())
    add_lora(model, 2, 6.0, ("*.query", "*.value"))
    assert model.config["lora"] == {"rank": 2, "alpha": 6.0, "layers": ["*.query", "*.value"]}
    after = list(model.named_parameters())
    assert [name for name in after if name in before] == before
    assert {name for name in after if name not in before} == {
        f"body.blocks.{i}.attention.{layer}.{leaf}"
        for i in (0, 1)
        for layer in ("query", "value")
        for leaf in ("lora_a", "lora_b")
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_only_the_intended_parts_are_trained(recompute):
    model = language_model(recompute=recompute)
    add_lora(model, 2, key=Key(2))
    before = model.state_dict()
    adam = AdamW(model.parameters(), 1e-2, groups=TRAINED)
    train(model, adam)
    changed = {name for name, value in model.state_dict().items() if not np.array_equal(value, before[name])}
    assert changed == {name for name in before if ".lora_" in name or name.startswith("output.")}
    assert adam.m.size == 2 * 2 * 2 * (8 + 8) + 8 * 7 + 7  # rank, blocks, layers, widths; and the head


def test_a_frozen_map_gets_no_gradient():
    model = adapted()
    train(model, Adam(model.parameters(), 1e-2), steps=1)
    attention = model.body.blocks[0].attention
    assert not attention.query.w.grad.any() and attention.key.w.grad.any() and attention.query.lora_b.grad.any()


@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_generation_sees_the_change_and_merging_keeps_it(positions):
    """Also with the key-value cache, which reads the matrices itself."""
    model, plain = adapted(positions=positions), language_model(positions=positions)
    logits = model(IDS)
    assert np.abs(logits - plain(IDS)).max() > 0.01
    cache = KeyValueCache(model, 1)  # one sequence, one token at a time, which a kernel computes
    for t in range(4):
        np.testing.assert_allclose(cache.logits(IDS[:1, t : t + 1]), logits[:1, t], rtol=1e-4, atol=1e-5)
    merge_lora(model)
    assert list(model.named_parameters()) == list(plain.named_parameters()) and model.config == plain.config
    np.testing.assert_allclose(model(IDS), logits, rtol=1e-4, atol=1e-5)
    assert model.flat.data.size == plain.flat.data.size


def test_copies_and_replicas_of_an_adapted_model(device):
    model = adapted().to(device)
    ids = to_device(IDS, device)
    for twin in (copy.deepcopy(model), model.replica()):
        np.testing.assert_array_equal(to_cpu(twin(ids)), to_cpu(model(ids)))
        assert [p.frozen for p in twin.parameters()] == [p.frozen for p in model.parameters()]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: LoRA(Linear(3, 3), 0), "rank: expected"),
        (lambda: LoRA(Linear(3, 3), 2, alpha=0.0), "alpha: expected a finite number > 0, got 0.0"),
        (lambda: LoRA(Linear(3, 3, activation="relu"), 2), "linear: expected a Linear without an activation"),
        (
            lambda: add_lora(language_model(), 2, layers=["*.queries"]),
            r"layers: '\*\.queries' matches no Linear .*query",
        ),
        (lambda: add_lora(language_model(), 2, layers=["*.feedforward.up"]), "matches no Linear without an activation"),
        (lambda: add_lora(language_model(), 2, layers=[]), "layers: expected at least one pattern, got none"),
        (lambda: add_lora(adapted(), 2), "model: it already has LoRA layers"),
    ],
)
def test_what_cannot_be_adapted_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_a_refused_model_is_unchanged():
    model = language_model()
    with pytest.raises(ValueError, match="without an activation"):
        add_lora(model, 2, layers=["*.query", "*.feedforward.up"])
    assert "lora" not in model.config
    assert type(model.body.blocks[0].attention.query) is Linear
    assert not any(p.frozen for p in model.parameters())


class Shares(Layer):
    def __init__(self, block=False):
        if block:
            self.blocks = [TransformerBlock(8, 2, key=Key(1))] * 3
        else:
            self.query, self.key = Linear(4, 4, key=Key(1)), Linear(4, 4, key=Key(2))
            self.key.w = self.query.w

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x, None


def test_a_block_that_is_used_three_times_is_adapted_and_merged_once():
    model, x = Shares(block=True), np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    add_lora(model, 2)
    model.blocks[0].attention.query.lora_b.data[...] = 0.5
    expected = model(x)
    merge_lora(model)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)
    assert type(model.blocks[2].attention.query) is Linear


class Tied(Layer):
    def __init__(self):
        self.query = Linear(4, 4)
        self.w = self.query.w  # which the layer itself reads


@pytest.mark.parametrize("make", [Shares, Tied])
def test_shared_weights_are_not_adapted(make):
    with pytest.raises(ValueError, match="layers: query shares its weights with another layer"):
        add_lora(make(), 2, layers=["query"])


class Experts(Layer):
    def __init__(self):
        self.experts = [Linear(4, 4, key=Key(1)), Linear(4, 4, key=Key(2))]
        self.named = {"a": [Frozen(Linear(4, 4, key=Key(3)))]}

    def forward(self, x):
        for linear in (*self.experts, *self.named["a"]):
            x = linear(x)
        return x, None


def test_layers_in_lists_and_dicts_are_adapted():
    model, x = Experts(), np.ones((2, 4), np.float32)
    add_lora(model, 2, layers=["experts.*"])
    assert [type(layer) for layer in model.experts] == [LoRA, LoRA]
    model.experts[1].lora_b.data[...] = 0.5
    expected = model(x)
    merge_lora(model)
    assert [type(layer) for layer in model.experts] == [Linear, Linear]
    np.testing.assert_allclose(model(x), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"layers: named.a.0 is in named.a.0, which is Frozen"):
        add_lora(model, 2, layers=["named.*"])
    model.experts = tuple(model.experts)
    add_lora(model, 2, layers=["experts.*"])
    assert [type(layer) for layer in model.experts] == [LoRA, LoRA]


def test_a_layer_among_the_arguments_of_a_model_is_one_layer():
    model = Experts()
    model.config = {"experts": model.experts}
    add_lora(model, 2, layers=["experts.*"])
    assert [type(layer) for layer in model.experts] == [LoRA, LoRA]


def test_layers_that_are_recomputed_are_adapted():
    model = language_model()
    model.body.blocks[0].attention = Recompute(model.body.blocks[0].attention)
    add_lora(model, 2)
    adapted_maps = {name.rpartition(".")[0] for name in model.named_parameters() if name.endswith(".lora_a")}
    assert adapted_maps == {f"body.blocks.{i}.attention.{part}" for i in (0, 1) for part in ("query", "value")}


def test_adapted_layers_that_are_frozen_later_are_merged_and_stay_frozen():
    model = adapted()
    expected = model(IDS)
    model.body.blocks[0].attention = Frozen(model.body.blocks[0].attention)
    merge_lora(model)
    np.testing.assert_allclose(model(IDS), expected, rtol=1e-5, atol=1e-6)
    assert not any("lora" in name for name in model.named_parameters()) and "lora" not in model.config
    assert all(p.frozen for p in model.body.blocks[0].attention.parameters())


# Frozen


def test_a_frozen_layer_computes_keeps_its_names_and_is_not_trained():
    plain, model = (Classifier(7, 2, 8, 2, 1, 5, dropout=0.2, key=Key(1)) for _ in "ab")
    model.body = Frozen(model.body)
    lengths = np.array([4, 2])
    np.testing.assert_array_equal(model(IDS, lengths, Key(3)), plain(IDS, lengths, Key(3)))
    assert model.state_dict().keys() == plain.state_dict().keys()
    before = model.state_dict()
    adamw = AdamW(model.parameters(), 0.1, weight_decay=0.5)
    _, cache = model.loss(IDS, lengths, np.array([0, 1]), key=Key(3))
    model.loss_backward(1.0, cache)
    adamw.step()
    changed = {name for name, value in model.state_dict().items() if not np.array_equal(value, before[name])}
    assert changed == {"output.w", "output.b"} and adamw.m.size == 8 * 2 + 2
    assert not any(p.grad.any() for name, p in model.named_parameters().items() if name.startswith("body."))


def test_a_frozen_layer_keeps_no_cache():
    y, cache = Frozen(SelfAttention(4, 2)).forward(np.ones((1, 3, 4), np.float32))
    assert cache is None and y.shape == (1, 3, 4)


def test_a_frozen_model_gets_no_lora():
    with pytest.raises(ValueError, match=r"layers: .*query is in the model, which is Frozen: it gets no gradient"):
        add_lora(Frozen(language_model()), 2)


def test_no_lora_in_a_frozen_layer():
    model = LanguageModel(11, 8, 2, 1, 6)
    model.body = Frozen(model.body)
    with pytest.raises(ValueError, match=r"attention.query is in body, which is Frozen"):
        add_lora(model, 2)


FOUR = np.array([[1, 2, 3, 4]])


@pytest.mark.parametrize("part", ["final_norm", "positions"])
def test_a_frozen_part_of_a_body_ends_the_backward(part):
    """What follows it is trained, and what precedes it is not."""
    model = LanguageModel(11, 8, 2, 1, 6, norm="pre")
    setattr(model.body, part, Frozen(getattr(model.body, part)))
    _, cache = model.loss(FOUR, FOUR)
    model.loss_backward(1.0, cache)
    assert model.output.w.grad.any() and not model.body.tokens.table.grad.any()
    assert model.body.blocks[0].attention.query.w.grad.any() == (part == "positions")


def test_a_frozen_block_of_a_decoder():
    """The last block ends the backward. Below a block that is trained, the encoder's gradient would lack a part."""
    model = EncoderDecoder(11, 8, 2, 2, norm="pre")
    model.decoder[1] = Frozen(model.decoder[1])
    _, cache = model.loss(FOUR, np.array([4]), FOUR, FOUR)
    model.loss_backward(1.0, cache)
    trained = {name.split(".")[0] for name, p in model.named_parameters().items() if p.grad.any()}
    assert trained == {"decoder_norm", "tokens"}  # the tokens are the output map too
    beam_search(model, FOUR, np.array([4]), 0, 1)  # it generates too
    model = EncoderDecoder(11, 8, 2, 2)
    model.decoder[0] = Frozen(model.decoder[0])
    _, cache = model.loss(FOUR, np.array([4]), FOUR, FOUR)
    with pytest.raises(TypeError, match=r"block 0 is Frozen below one that is trained, so the gradient of"):
        model.loss_backward(1.0, cache)


def test_a_frozen_body_remembers_nothing():
    model = TransformerXL(11, 8, 2, 1, 6, 3)
    model.body = Frozen(model.body)
    _, cache = model.loss(FOUR, FOUR)
    with pytest.raises(ValueError, match="cache: it has no vectors to remember"):
        model.remember(cache[0])


@pytest.mark.parametrize(
    ("part", "norm"), [("attention", "post"), ("feedforward", "pre"), ("norm1", "pre"), ("after1", "pre")]
)
def test_a_frozen_part_whose_gradient_is_needed_is_named(part, norm):
    block = TransformerBlock(8, 2, norm=norm)
    block.after1 = LayerNorm(8)
    setattr(block, part, Frozen(getattr(block, part)))
    y, cache = block.forward(np.ones((1, 3, 8), np.float32))
    name = {"norm1": "norm", "after1": "after"}.get(part, "branch")
    with pytest.raises(
        TypeError, match=rf"^{name}: expected a layer through which the gradient passes, got a Frozen one"
    ):
        block.backward(y, cache)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_frozen_layer_is_frozen(twin):
    """Although it looks attributes up on its layer, which a copy that is being made does not have yet."""
    frozen = Frozen(Linear(3, 4, key=Key(1)))
    copied, x = twin(frozen), np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(copied(x), frozen(x))
    assert copied.w.frozen and copied.b.frozen and type(copied) is Frozen
    with pytest.raises(AttributeError):
        getattr(Frozen.__new__(Frozen), "layer")  # noqa: B009

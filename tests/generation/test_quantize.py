"""Models with weights of 8 and 4 bits."""

import copy

import numpy as np
import pytest

from scratchformer.dispatch import fast, reference_only
from scratchformer.generation import cache_for, generate, quantize
from scratchformer.models import LanguageModel, Llama, TransformerXL
from scratchformer.nn import Linear, add_lora, merge_lora
from scratchformer.nn.quantized import LINE, QuantizedLinear
from scratchformer.ops.quantized import dequantize
from scratchformer.ops.quantized import quantize as round_matrix
from scratchformer.rng import Key
from scratchformer.training.snapshot import SnapshotError, save_snapshot

MODELS = {
    "post": lambda: LanguageModel(50, 48, 3, 2, 12, key=Key(0)),  # heads of 16: not whole groups
    "pre": lambda: LanguageModel(50, 64, 2, 2, 12, norm="pre", bias=True, activation="gelu_tanh", key=Key(0)),
    "llama": lambda: Llama(50, 64, 2, 2, 12, kv_heads=1, d_ff=300, key=Key(0)),
    "xl": lambda: TransformerXL(50, 32, 2, 2, 6, memory=6, key=Key(0)),
}


def widened(model):
    """A float model with the numbers that a quantised one stands for."""
    model = copy.deepcopy(model)
    for _, layer in model.named_layers():
        if isinstance(layer, QuantizedLinear):
            float_layer = Linear(*layer.w.shape, bias=layer.b is not None, activation=layer.activation)
            float_layer.w.data[...] = dequantize(layer.w)
            if layer.b is not None:
                float_layer.b.data[...] = layer.b.data
            layer.__class__ = Linear
            vars(layer).clear()
            vars(layer).update(vars(float_layer))
    return model


@pytest.mark.parametrize(("name", "B"), [("post", 1), ("pre", 2), ("llama", 1), ("xl", 1)])
@pytest.mark.parametrize("kind", [reference_only, fast])
@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_the_widened_model(name, bits, kind, B):
    model = quantize(MODELS[name](), bits)
    ids = Key(1).generator().integers(0, 50, (B, 6))

    def logits(model):
        cache = cache_for(model, B)
        return np.stack([cache.logits(part) for part in (ids[:, :3], *np.split(ids[:, 3:], 3, axis=1))])

    with kind():
        got = logits(model)
    with reference_only():
        expected = logits(widened(model))
    # activations are rounded to 8 bits, in the model alone
    assert np.sqrt(np.square(got - expected).mean()) < 0.03 * expected.std()


def test_the_model_is_the_same_and_its_copies_share_the_integers():
    model = MODELS["llama"]()
    assert quantize(model, 4) is model
    first = model.body.blocks[0].attention.query
    assert copy.deepcopy(model).body.blocks[0].attention.query.w is first.w
    assert sum(p.data.size for p in model.parameters()) == 64 * (50 + 5)  # tokens and norms


def test_low_rank_changes_are_merged_before():
    model = MODELS["post"]()
    add_lora(model, 2, key=Key(3))
    model.body.blocks[0].attention.query.lora_b.data[...] = 0.1
    merged = copy.deepcopy(model)
    merge_lora(merged)
    ids = np.array([[1, 2, 3]])
    one, other = (cache_for(quantize(each), 1).logits(ids) for each in (model, merged))
    np.testing.assert_array_equal(one, other)
    assert isinstance(model.body.blocks[0].attention.query, QuantizedLinear)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_matrices_are_those_of_the_layers_in_one_array(bits):
    model = MODELS["llama"]()
    before = [
        dequantize(round_matrix(layer.w.data, bits)) for _, layer in model.named_layers() if type(layer) is Linear
    ]
    layers = [x for _, x in quantize(model, bits).named_layers() if isinstance(x, QuantizedLinear)]
    for layer, expected in zip(layers, before, strict=False):  # a tied output is the last
        np.testing.assert_array_equal(dequantize(layer.w), expected)
    memory = {id(array.base.base if array.base.base is not None else array.base) for x in layers for array in x.w[:2]}
    assert len(memory) == 1
    assert all(x.w.numbers.ctypes.data % LINE == 0 and not x.w.numbers.flags.writeable for x in layers)


def test_a_prompt_gives_the_same_logits_as_its_tokens_one_by_one():
    model = quantize(MODELS["pre"](), 8)
    ids = Key(1).generator().integers(0, 50, (1, 5))
    whole, single = cache_for(model, 1), cache_for(model, 1)
    with reference_only():
        expected = whole.logits(ids)
        steps = [single.logits(ids[:, t : t + 1]) for t in range(5)]
    np.testing.assert_allclose(steps[-1], expected, atol=0.03 * expected.std())
    texts = [np.stack(list(generate(model, ids, 6, 0.0))) for _ in range(2)]
    np.testing.assert_array_equal(*texts)


def test_what_cannot_be_quantised_or_saved_is_refused(tmp_path):
    model = quantize(MODELS["post"]())
    with pytest.raises(ValueError, match="model: expected one that is not quantised yet"):
        quantize(model)
    with pytest.raises(ValueError, match="bits: expected 8 or 4"):
        quantize(MODELS["post"](), 3)
    with pytest.raises(TypeError, match="model: expected a LanguageModel or an EncoderDecoder, got a Linear"):
        quantize(Linear(2, 2))
    with pytest.raises(SnapshotError, match="quantised"):
        save_snapshot(tmp_path / "a.safetensors", model)
    with pytest.raises(TypeError, match="QuantizedLinear has no backward"):
        model.output.backward(np.ones((1, 1, 50), np.float32), None)

"""What the families of published decoders add to Llama; tests/torch_parity compares them with the library."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from scratchformer import nn
from scratchformer.backend import CPU
from scratchformer.models import Llama, from_pretrained
from scratchformer.models.families import FAMILIES
from scratchformer.models.pretrained import PretrainedError
from scratchformer.ops.rounding import bfloat16
from scratchformer.rng import Key

V, C, H, DEPTH, T = 11, 16, 4, 4, 8
IDS = np.arange(6)[None]
DECODERS = ("llama", "mistral", "qwen2", "olmo2", "phi3", "qwen3", "smollm3")


def write(folder, kind, **changes):
    """A folder with a model of this kind, and its weights; returns the model."""
    family, bias = FAMILIES[kind], kind == "qwen2"
    model = family(V, C, H, DEPTH, T, kv_heads=2, head_width=6, d_ff=10, tied=False, bias=bias, key=Key(1))
    model.flat.data[...] = Key(4).generator().standard_normal(model.flat.data.size) / 2
    tensors, params = {}, model.named_parameters()
    for name, source in model.tensors().items():
        prefix = "" if source.name.startswith("lm_head") else "model."
        part = params[name].data.T if source.transposed else params[name].data
        tensors.setdefault(prefix + source.name, []).append(part)
    whole = {name: np.ascontiguousarray(np.concatenate(parts)) for name, parts in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    sizes = dict(vocab_size=V, hidden_size=C, num_attention_heads=H, num_key_value_heads=2, head_dim=6)
    sizes |= dict(num_hidden_layers=DEPTH, max_position_embeddings=T, intermediate_size=10, rms_norm_eps=1e-6)
    config = dict(model_type=kind, rope_theta=1e4, tie_word_embeddings=False, **sizes) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("kind", DECODERS)
def test_a_folder_is_read_into_the_class_of_its_kind(kind, tmp_path):
    made, ids = write(tmp_path, kind), np.arange(6)[None]
    found = from_pretrained(tmp_path)
    assert type(found) is type(made) is FAMILIES[kind]
    np.testing.assert_array_equal(found(ids), made(ids))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(PretrainedError, match="expected model_type 'gpt2' or "):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_arguments_of_a_folder_make_its_model_again(kind, tmp_path):
    family = FAMILIES[kind]
    made = family(V, C, H, DEPTH, T, key=Key(1), **({"bias": True} if kind == "qwen2" else {}))
    save_file(made.stored(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(made.settings(kind)))
    again = family(**family.arguments(tmp_path), key=Key(2))
    assert again.named_parameters().keys() == made.named_parameters().keys()
    again.load_state_dict(made.state_dict())
    for model in again, from_pretrained(tmp_path):
        np.testing.assert_array_equal(model(IDS), made(IDS))


@pytest.mark.parametrize("dtype", [None, np.float64, np.float16, bfloat16(CPU)], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_are_cast_as_they_are_read(kind, dtype, tmp_path):
    """As casting all of them afterwards does; gradients take no memory before there are any."""
    made = FAMILIES[kind](V, C, H, DEPTH, T, key=Key(1), **({"bias": True} if kind == "qwen2" else {}))
    save_file(made.stored(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(made.settings(kind)))
    found = from_pretrained(tmp_path, dtype=dtype).named_parameters()
    for name, p in made.to(dtype=dtype).named_parameters().items():
        assert found[name].data.dtype == found[name].grad.dtype == (dtype or np.float32) and not found[name].grad.any()
        np.testing.assert_array_equal(found[name].data, p.data)


REFUSED = [
    ("phi3", dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_type: expected default, got linear"),
    ("phi3", dict(rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}), "got 'longrope'"),
    ("phi3", dict(attention_bias=True), "attention_bias: expected False, got True"),
    ("olmo2", dict(sliding_window=3), "sliding_window: expected None, got 3"),
    ("qwen3", dict(head_dim=None), r"q_proj.* expected \(16, 16\), got \(24, 16\)"),
    ("smollm3", dict(no_rope_layers=[1, 0]), "no_rope_layers: expected 4 numbers 0 or 1, got"),
    ("smollm3", dict(no_rope_layer_interval=0), "no_rope_layer_interval: expected a number >= 1, got 0"),
    ("smollm3", dict(layer_types=["sliding_attention"] * 4), "layer_types: expected"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_settings_of_another_computation_are_refused_by_name(kind, changes, message, tmp_path):
    write(tmp_path, kind, **changes)
    with pytest.raises(PretrainedError, match=message):
        from_pretrained(tmp_path)


def test_which_blocks_rotate(tmp_path):
    for settings, expected in [
        ({}, [None, None, None, 0]),
        (dict(no_rope_layer_interval=2), [None, 0, None, 0]),
        (dict(no_rope_layers=[0, 1, 1, 1, 1]), [0, None, None, None]),
        (dict(no_rope_layers=[1, 1, 1, 1]), [None] * 4),
    ]:
        write(tmp_path, "smollm3", **settings)
        blocks = from_pretrained(tmp_path).body.blocks
        assert [block.attention.rotary_width for block in blocks] == [6 if each is None else 0 for each in expected]


def test_options_that_vary_by_block():
    model = Llama(V, C, H, 2, T, by_block={"window": [2, None]})
    assert [block.attention.window for block in model.body.blocks] == [2, None]
    assert model.config["by_block"] == {"window": [2, None]}
    for by_block, error, message in [
        ({"window": [2]}, ValueError, r"^by_block: window: expected a list of 2, one for each block, got \[2\]"),
        ({"windows": [2, 2]}, TypeError, "^by_block: no option 'windows'; expected one of d_model, "),
        ([2, 2], TypeError, "^by_block: expected"),
    ]:
        with pytest.raises(error, match=message):
            Llama(V, C, H, 2, T, by_block=by_block)


def test_what_does_not_fit():
    for make, message in [
        (lambda: nn.NormedLinear(nn.Linear(2, 6), nn.RMSNorm(4)), r"norm: expected a width that divides 6, .* got 4"),
        (lambda: nn.RotarySelfAttention(8, 2, rotary_width=6), r"rotary_width: expected at most 4, .* got 6"),
        (lambda: nn.RotarySelfAttention(8, 2, query_key_norm="each"), "query_key_norm: expected one of heads, all"),
        (lambda: Llama(V, C, H, 1, T, norms="around"), r"norms: expected one of before, after, .*got 'around'"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            make()
    with pytest.raises(TypeError, match=r"^norm: expected a Layer, got None"):
        nn.Residual(nn.Linear(2, 2), None)


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_low_rank_changes_of_normed_queries(kind):
    model = FAMILIES[kind](V, C, H, 1, T)
    nn.add_lora(model, rank=2)
    adapted = {name for name, layer in model.named_layers() if type(layer) is nn.LoRA}
    assert adapted == {"body.blocks.0.attention.query.linear", "body.blocks.0.attention.value"}

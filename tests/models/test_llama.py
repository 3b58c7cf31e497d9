import inspect
import io
import itertools
import json
import math
import tokenize

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.data import TextBatches
from scratchformer.generation import KeyValueCache, generate
from scratchformer.models import GPT2, Llama, LlamaBlock, llama
from scratchformer.models.pretrained import PretrainedError
from scratchformer.nn import LoRA, TransformerBlock, add_lora, merge_lora
from scratchformer.optim import Adam
from scratchformer.rng import Key, Zeros
from scratchformer.training import Replicas, estimate, load_model, save_snapshot

V, C, H, T = 11, 24, 4, 8
IDS = Key(5).generator().integers(0, V, (2, T))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BIASES = dict(bias=True, output_bias=True, feedforward_bias=True)


def make(device=CPU, **options):
    """Two query heads for each head of keys and values; weights large enough for every part to matter."""
    model = Llama(V, C, H, 2, T, kv_heads=2, head_width=4, key=Key(1), **options).to(device, np.float64)
    model.flat.data[...] = to_device(Key(2).generator().standard_normal(model.flat.data.size) / 2, device)
    return model


def test_the_model_and_its_block_are_at_most_95_lines_of_code():
    """Lines with something other than comments and docstrings."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines, begins = set(), True  # a statement that is only a string is a docstring
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(llama)).readline):
        docstring = token.type == tokenize.STRING and begins
        if token.type not in ignored:
            begins = False
            lines.update([] if docstring else range(token.start[0], token.end[0] + 1))
        elif token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
    assert 40 < len(lines) <= 95


def rotated(x, place, theta):
    """x with every pair, one number from each half, rotated by the angle place · theta."""
    y = np.empty_like(x)
    half = len(x) // 2
    for i in range(half):
        angle = place * theta[i]
        y[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        y[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return y


def rms(x, norm):
    return norm.gamma.data * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps)


def affine(x, layer):
    return x @ layer.w.data + (0 if layer.b is None else layer.b.data)


def attended(x, attention, theta, window):
    """Head after head and position after position."""
    D, length = attention.head_width, len(x)
    heads, groups = attention.query.w.data.shape[1] // D, attention.kv_heads
    q, k, v = (affine(x, layer) for layer in (attention.query, attention.key, attention.value))
    y = np.empty((length, heads * D))
    for h, t in itertools.product(range(heads), range(length)):
        g, own = h // (heads // groups), slice(h * D, (h + 1) * D)
        shared = slice(g * D, (g + 1) * D)
        seen = range(max(0, t - window + 1), t + 1)
        query = rotated(q[t, own], t, theta)
        scores = np.array([query @ rotated(k[s, shared], s, theta) / math.sqrt(D) for s in seen])
        p = np.exp(scores - scores.max())
        y[t, own] = sum(p_s * v[s, shared] for p_s, s in zip(p / p.sum(), seen, strict=True))
    return affine(y, attention.unify)


@pytest.mark.parametrize(
    "options", [{}, dict(window=3, tied=True, eps=0.1, base=30.0, **BIASES)], ids=["plain", "other"]
)
def test_equation(options):
    model = make(**options)
    theta = [options.get("base", 10_000.0) ** (-2 * i / 4) for i in range(2)]
    for row, logits in zip(IDS, model(IDS), strict=True):
        x = model.body.tokens.table.data[row]
        for block in model.body.blocks:
            x = x + attended(rms(x, block.norm1), block.attention, theta, options.get("window", T))
            n = rms(x, block.norm2)
            gate = affine(n, block.feedforward.gate)
            x = x + affine(gate / (1 + np.exp(-gate)) * affine(n, block.feedforward.up), block.feedforward.down)
        w = model.body.tokens.table.data.T if options else model.output.w.data
        np.testing.assert_allclose(logits, rms(x, model.body.final_norm) @ w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_what_a_position_sees(window, device):
    """All before it, or through two blocks the last 2 W − 1, itself included."""
    model = make(device, window=window)
    y = to_cpu(model(to_device(IDS, device)))
    for t in range(T):
        changed = IDS.copy()
        changed[:, t] = (changed[:, t] + 1) % V
        moved = np.abs(to_cpu(model(to_device(changed, device))) - y).max(axis=(0, 2)) > 1e-12
        assert moved.tolist() == [t <= s < t + (T if window is None else 2 * window - 1) for s in range(T)]


@pytest.mark.parametrize("window", [None, 1, 3, T + 5])
def test_the_cache_agrees_with_forward(window, device):
    """Token after token and in pieces, and after the context slid."""
    model = make(device, window=window, **BIASES)
    for cuts in ([*range(T + 1)], [0, 3, 4, 6, 8]):
        cache = KeyValueCache(model, 2)
        for start, stop in itertools.pairwise(cuts):
            z = to_cpu(cache.logits(to_device(IDS[:, start:stop], device)))
            expected = to_cpu(model(to_device(IDS[:, :stop], device)))[:, -1]
            np.testing.assert_allclose(z, expected, rtol=1e-9, atol=1e-12)
    kept = np.concatenate([IDS[:, T - T // 2 + 1 :], IDS[:, :1]], axis=1)
    z = to_cpu(cache.logits(to_device(IDS[:, :1], device)))
    np.testing.assert_allclose(z, to_cpu(model(to_device(kept, device)))[:, -1], rtol=1e-9, atol=1e-12)
    assert {array.shape for array in cache.stored[0]} == {(2, 2, T, 4)}  # keys and values of two heads, not four


def test_it_trains_writes_is_estimated_saved_and_tuned(tmp_path):
    model = Llama(V, C, H, 2, T, kv_heads=2, window=5, scaling=LLAMA3, key=Key(1))
    batches, adam, losses = TextBatches(np.arange(300) % V, 4, T, Key(2)), Adam(model.parameters(), 0.02), []
    with Replicas(model, 2, 1) as replicas:
        for step in range(40):
            losses.append(replicas.gradients(batches.batch(step), Key(step)))
            adam.step()
        assert estimate(replicas, batches.batch(0)).parameters == model.flat.data.size
    assert losses[-1] < 0.5 * losses[0] and len([*generate(model, IDS[:1], 2 * T, key=Key(3))]) == 2 * T
    save_snapshot(tmp_path / "last.safetensors", model)
    loaded, _ = load_model(tmp_path)
    assert type(loaded) is Llama and loaded.config == model.config and np.array_equal(loaded(IDS), model(IDS))
    add_lora(loaded, rank=2, key=Key(4))
    adapted = {name for name, layer in loaded.named_layers() if type(layer) is LoRA}
    assert adapted == {f"body.blocks.{i}.attention.{part}" for i in range(2) for part in ("query", "value")}
    for name, p in loaded.named_parameters().items():
        if name.endswith("lora_b"):
            p.data[...] = Key(6).generator().standard_normal(p.data.shape)
    cache = KeyValueCache(loaded, 2)
    for t in range(T):
        z = cache.logits(IDS[:, t : t + 1])
    np.testing.assert_allclose(z, loaded(IDS)[:, -1], rtol=1e-4, atol=1e-5)
    expected = loaded(IDS)
    merge_lora(loaded)
    np.testing.assert_allclose(loaded(IDS), expected, rtol=1e-4, atol=1e-5)


def test_initialisation_and_sizes():
    model = Llama(500, 64, 4, 2, 32, bias=True, key=Key(0))
    for name, p in model.named_parameters().items():
        if name.endswith("gamma"):
            assert (p.data == 1).all()
        elif name.endswith(".b"):
            assert not p.data.any()
        else:
            assert p.data.std() == pytest.approx(0.02, rel=0.05), name
    assert Llama(500, 64, 4, 1, 32, std=0.1, key=Key(0)).output.w.data.std() == pytest.approx(0.1, rel=0.02)
    assert not Llama(5, 8, 4, 1, 4, key=Zeros()).output.w.data.any()
    block, plain = LlamaBlock(96, 4), TransformerBlock(96, 4)
    assert block.feedforward.up.w.data.shape == (96, 256)
    matrices = [sum(p.data.size for p in b.feedforward.parameters() if p.name == "w") for b in (block, plain)]
    assert matrices[0] == matrices[1]
    with pytest.raises(TypeError, match=r"^Llama: no option 'positions'; expected one of vocab_size, .*, eps$"):
        Llama(V, C, H, 1, T, positions="learned")
    with pytest.raises(ValueError, match=r"^kv_heads: 3 does not divide heads 4$"):
        Llama(V, C, H, 1, T, kv_heads=3)
    for kind in Llama, GPT2:
        with pytest.raises(TypeError, match=r"^tied: expected True or False, got 'no'"):
            kind(V, C, H, 1, T, tied="no")


# Published weights

CONFIG = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": C,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": T,
    "intermediate_size": 10,
}
MISTRAL, QWEN2 = {"model_type": "mistral"}, {"model_type": "qwen2"}
GONE = object()


def write(folder, tied=False, biases=None, **changes):
    """A folder with CONFIG and `changes`, and drawn weights; returns the model with these weights."""
    model = Llama(V, C, H, 2, T, kv_heads=2, d_ff=10, tied=tied, key=Key(3), **(biases or {}))
    model.flat.data[...] = Key(4).generator().standard_normal(model.flat.data.size)
    config = {name: value for name, value in (CONFIG | changes).items() if value is not GONE}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    sources = model.tensors()
    for name, p in model.named_parameters().items():
        tensor = sources[name]
        prefix = "" if tensor.name.startswith("lm_head") else "model."
        tensors[prefix + tensor.name] = np.ascontiguousarray(p.data.T if tensor.transposed else p.data)
    save_file(tensors, folder / "model.safetensors")
    return model


def test_every_tensor_arrives_where_it_belongs(tmp_path):
    written = write(tmp_path, biases=BIASES, attention_bias=True, mlp_bias=True)
    tensors, model = load_file(tmp_path / "model.safetensors"), Llama.from_pretrained(tmp_path)
    assert np.array_equal(model.flat.data, written.flat.data)
    block = model.body.blocks[1]
    for layer, name in {
        block.attention.query: "model.layers.1.self_attn.q_proj",
        block.attention.key: "model.layers.1.self_attn.k_proj",
        block.attention.value: "model.layers.1.self_attn.v_proj",
        block.attention.unify: "model.layers.1.self_attn.o_proj",
        block.feedforward.gate: "model.layers.1.mlp.gate_proj",
        block.feedforward.up: "model.layers.1.mlp.up_proj",
        block.feedforward.down: "model.layers.1.mlp.down_proj",
    }.items():
        assert np.array_equal(layer.w.data, tensors[f"{name}.weight"].T)
        assert np.array_equal(layer.b.data, tensors[f"{name}.bias"])
    assert np.array_equal(block.norm2.gamma.data, tensors["model.layers.1.post_attention_layernorm.weight"])
    assert np.array_equal(model.output.w.data, tensors["lm_head.weight"].T)


WINDOWS = {"window": [None, 3]}
ACCEPTED = [  # settings, and the arguments that they become
    ({}, dict(kv_heads=2, head_width=None, base=10_000.0, scaling=None, window=None, bias=False, eps=1e-6, tied=False)),
    (dict(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}),
     dict(base=5e5, scaling={"rope_type": "linear", "factor": 2.0})),
    (dict(rope_parameters=LLAMA3 | {"rope_theta": 5e5, "type": "llama3"}), dict(base=5e5, scaling=LLAMA3)),
    (dict(rope_theta=7.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0}), dict(base=7.0, scaling=None)),
    (dict(rope_theta=7.0, rope_scaling=None, pretraining_tp=4, hidden_act="swish"), dict(base=7.0, scaling=None)),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 1.0}), dict(base=7.0)),
    (dict(partial_rotary_factor=1.0, rope_scaling={"type": "linear", "factor": 2, "partial_rotary_factor": 1}),
     dict(scaling={"rope_type": "linear", "factor": 2})),
    (dict(layer_types=["full_attention"] * 2, rms_norm_eps=0.1), dict(eps=0.1)),
    (MISTRAL, dict(window=4096)),
    (MISTRAL | dict(sliding_window=3, layer_types=["sliding_attention"] * 2), dict(window=3)),
    (MISTRAL | dict(sliding_window=None), dict(window=None)),
    (QWEN2 | dict(sliding_window=3), dict(window=None, bias=True, output_bias=False)),
    (QWEN2 | dict(sliding_window=3, use_sliding_window=True), dict(window=None)),  # from layer 28 on
    (QWEN2 | dict(sliding_window=3, use_sliding_window=True, max_window_layers=0), dict(window=3)),
    (QWEN2 | dict(sliding_window=3, use_sliding_window=True, max_window_layers=1), dict(by_block=WINDOWS)),
    (QWEN2 | dict(sliding_window=3, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]),
     dict(by_block=WINDOWS)),
]  # fmt: skip


def test_settings_that_are_read(tmp_path):
    for settings, options in ACCEPTED:
        write(tmp_path, biases=dict(bias=settings.get("model_type") == "qwen2"), **settings)
        found = Llama.from_pretrained(tmp_path).config
        assert {name: found[name] for name in options} == options, settings


def test_a_llama_without_a_number_of_key_heads_has_one_for_each_query(tmp_path):
    write(tmp_path, num_key_value_heads=GONE)
    with pytest.raises(PretrainedError, match=r"k_proj\.weight: expected \(24, 24\), got \(12, 24\)"):
        Llama.from_pretrained(tmp_path)


REFUSED = {
    "expected model_type 'llama' or 'mistral' or 'qwen2', got 'mixtral'": [dict(model_type="mixtral")],
    "architectures: expected one of LlamaForCausalLM, got": [dict(architectures=["LlamaForSequenceClassification"])],
    "num_key_value_heads missing": [k | dict(num_key_value_heads=GONE) for k in (MISTRAL, QWEN2)],
    "hidden_size missing": [dict(hidden_size=GONE)],
    "hidden_act: expected 'silu' or 'swish', got 'gelu'": [dict(hidden_act="gelu")],
    "quantization_config: expected None, got {'bits': 4}": [dict(quantization_config={"bits": 4})],
    "compression_config: expected None": [dict(compression_config={})],
    "partial_rotary_factor: expected None or 1, got 0.5": [dict(partial_rotary_factor=0.5)],
    "use_mrope: expected False, got True": [QWEN2 | dict(use_mrope=True)],
    "is_causal: expected True, got False": [dict(is_causal=False)],
    "per_layer_config: expected None": [dict(per_layer_config={"0": {}})],
    "tie_word_embeddings: expected False or True, got 'no'": [dict(tie_word_embeddings="no")],
    "original_max_position_embeddings: expected None, got 8": [dict(original_max_position_embeddings=8)],
    "sliding_window: expected None, got 3": [dict(sliding_window=3)],
    "sliding_window: expected a whole number >= 1, got 0": [MISTRAL | dict(sliding_window=0)],
    "attention_bias: expected False, got True": [MISTRAL | dict(attention_bias=True)],
    "attention_bias: expected True, got False": [QWEN2 | dict(attention_bias=False)],
    "attention_bias: expected False or True, got 'yes'": [dict(attention_bias="yes")],
    "mlp_bias: expected False, got True": [k | dict(mlp_bias=True) for k in (MISTRAL, QWEN2)],
    "layer_types: expected ['full_attention', 'full_attention'], as other settings say, got": [
        dict(layer_types=["full_attention", "sliding_attention"]),
        MISTRAL | dict(layer_types=["sliding_attention"] * 2, sliding_window=None),
        QWEN2 | dict(layer_types=["sliding_attention"] * 2, sliding_window=3),
    ],
    "rope_scaling: yarn takes factor, original_max_position_embeddings, rope_type and perhaps attention_factor, ": [
        dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        dict(rope_scaling={"type": "yarn", "factor": 2.0}),
    ],
    "rope_parameters: expected a rope_type of default, linear, llama3, yarn, got 'longrope'": [
        dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    ],
    "rope_scaling: expected a rope_type of default, linear, llama3, yarn, got 'dynamic'": [
        dict(rope_scaling={"type": "dynamic", "factor": 2.0})
    ],
    "rope_parameters: default takes rope_type, got partial_rotary_factor, rope_type": [
        dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    ],
    "rope_parameters: default takes rope_type, got full_attention, rope_type": [
        QWEN2 | dict(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}})
    ],
    "rope_scaling: llama3 takes factor, high_freq_factor, low_freq_factor, original": [
        dict(rope_scaling={"rope_type": "llama3", "factor": 2.0})
    ],
    "rope_scaling: factor: expected a finite number > 0, got -1": [dict(rope_scaling={"type": "linear", "factor": -1})],
    "rope_scaling: expected settings by name, got 'linear'": [dict(rope_scaling="linear")],
    "rope_theta: expected a number": [dict(rope_theta="10000"), dict(rope_parameters={"rope_theta": None})],
    "rope_theta: expected a finite number > 0, got 0": [dict(rope_theta=0)],
    "cannot create this model: kv_heads: 3 does not divide heads 4": [dict(num_key_value_heads=3)],
    "cannot create this model: head_width: expected an even number": [dict(num_attention_heads=8)],
    "head_dim: expected a whole number >= 1, got 2.5": [dict(head_dim=2.5)],
    "rms_norm_eps: expected a number >= 0, got '1e-5'": [dict(rms_norm_eps="1e-5")],
}


def test_settings_of_another_computation_are_refused_by_name(tmp_path):
    for message, all_settings in REFUSED.items():
        for settings in all_settings:
            write(tmp_path, **settings)
            with pytest.raises(PretrainedError) as raised:
                Llama.from_pretrained(tmp_path)
            found = str(raised.value)
            assert message in found and str(tmp_path / "config.json") in found and "\n" not in found, found


def test_tensors_that_do_not_fit(tmp_path):
    """An output that is missing, or is no copy of the table to which it is tied; biases where there are none."""
    write(tmp_path, tied=True)
    with pytest.raises(PretrainedError, match=r"model\.safetensors: .* missing: lm_head\.weight$"):
        Llama.from_pretrained(tmp_path)
    write(tmp_path, tie_word_embeddings=True)
    with pytest.raises(PretrainedError, match=r"lm_head\.weight: expected a copy of embed_tokens\.weight"):
        Llama.from_pretrained(tmp_path)
    model = write(tmp_path, tied=True, tie_word_embeddings=True)
    assert np.array_equal(Llama.from_pretrained(tmp_path)(IDS), model(IDS))
    write(tmp_path, biases=dict(bias=True))
    with pytest.raises(PretrainedError, match=r"unknown: layers\.0\.self_attn\.k_proj\.bias; unknown"):
        Llama.from_pretrained(tmp_path)
    write(tmp_path, **QWEN2)
    with pytest.raises(PretrainedError, match=r"missing: layers\.0\.self_attn\.k_proj\.bias; missing"):
        Llama.from_pretrained(tmp_path)
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    Llama.from_pretrained(tmp_path)


def test_arguments(tmp_path):
    write(tmp_path)
    model = Llama.from_pretrained(tmp_path, context=3, dropout=0.25, recompute=True)
    assert (model.context, model.body.recompute, model.body.dropout.p, model.body.blocks[0].dropout.p) == (
        3,
        True,
        0.25,
        0.25,
    )
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T up to 3, got 8 tokens"):
        model(IDS)
    for options, message in {
        "dropout": (dict(dropout=2.0), "^dropout: expected 0 <= p < 1, got 2.0"),
        "context": (dict(context=0), "^context: expected"),
    }.values():
        with pytest.raises(ValueError, match=message) as raised:
            Llama.from_pretrained(tmp_path, **options)
        assert raised.type is ValueError
    with pytest.raises(TypeError, match=r"^recompute: expected"):
        Llama.from_pretrained(tmp_path, recompute=1)

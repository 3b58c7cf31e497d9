"""Published decoders compared with those of the transformers library, which saves random weights that we load."""

import json
import logging

import hypothesis
import numpy as np
import pytest

from scratchformer.generation import generate
from scratchformer.models import from_pretrained
from scratchformer.models.families import FAMILIES as CLASSES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIGURATIONS = max(56, hypothesis.settings.default.max_examples)
FAMILIES = {
    "Llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "Mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "Qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "Qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "SmolLM3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "Phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "Olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
}
logging.getLogger("transformers").setLevel(logging.ERROR)


def rope(draw, family):
    """The settings of the angles, as in older configurations or as in newer ones."""
    theta = float(draw.choice([100.0, 1e4, 5e5]))
    kind = "default" if family == "Phi3" else draw.choice(["default", "linear", "llama3", "yarn"])
    scaling = {"rope_type": str(kind)}
    if kind != "default":
        scaling["factor"] = float(draw.choice([2.0, 8.0]))
    if kind == "llama3":
        scaling |= dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8)
    if kind == "yarn":
        scaling |= dict(original_max_position_embeddings=8, beta_fast=1.5, beta_slow=0.1)
    if draw.integers(2):
        return {"rope_parameters": scaling | {"rope_theta": theta}}
    if kind == "linear" and draw.integers(2):
        scaling["type"] = scaling.pop("rope_type")
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}


def configuration(seed):
    """The name of a family, unusual settings for it, the type of the weights, and the size of a file."""
    draw = np.random.default_rng(seed)
    family = list(FAMILIES)[seed % len(FAMILIES)]
    shared = int(draw.choice([1, 2, 3]))
    groups = int(draw.choice([1, 2, 3]))
    heads, depth = groups * shared, int(draw.integers(1, 4))
    T = int(draw.integers(2, 20))
    settings = dict(
        vocab_size=int(draw.integers(3, 60)),
        hidden_size=heads * 2 * int(draw.integers(1, 4)),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        num_hidden_layers=depth,
        intermediate_size=int(draw.integers(1, 40)),
        max_position_embeddings=T + int(draw.integers(3, 6)),
        head_dim=None if draw.integers(2) else 2 * int(draw.integers(1, 6)),
        rms_norm_eps=float(draw.choice([1e-6, 1e-5, 0.1])),
        tie_word_embeddings=bool(draw.integers(2)),
        hidden_act=str(draw.choice(["silu", "swish"])),
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
        **rope(draw, family),
    )
    window = int(draw.choice([1, 2, T - 1, T, 3 * T]))
    if settings["head_dim"] is None and family not in ("Llama", "Mistral"):
        del settings["head_dim"]
    if family in ("Llama", "SmolLM3"):
        settings |= dict(attention_bias=bool(draw.integers(2)), mlp_bias=bool(draw.integers(2)))
    if family in ("Qwen3", "Olmo2"):
        settings |= dict(attention_bias=bool(draw.integers(2)))
    if family == "SmolLM3":
        settings |= dict(no_rope_layer_interval=int(draw.integers(1, 4)), use_sliding_window=bool(draw.integers(2)))
        settings |= dict(sliding_window=max(2, window))
    if family in ("Mistral", "Phi3"):
        settings |= dict(sliding_window=None if draw.integers(4) == 0 else window)
    if family in ("Qwen2", "Qwen3"):
        first = int(draw.choice([0, 1, depth, 28]))
        settings |= dict(sliding_window=window, use_sliding_window=bool(draw.integers(2)), max_window_layers=first)
    dtype = [torch.float32, torch.float32, torch.bfloat16, torch.float16][draw.integers(4)]
    return family, settings, T, dtype, ["10GB", "5KB"][draw.integers(2)]


@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_it_computes_what_the_library_computes(seed, tmp_path):
    """Logits, loss, the gradient of every parameter, and the tokens of greedy generation."""
    family, settings, T, dtype, size = configuration(seed)
    Config, Model = FAMILIES[family]
    torch.manual_seed(seed)
    theirs = Model(Config(**settings))
    for p in theirs.parameters():  # all of them, biases and norms too, and large enough for each part to matter
        p.data += 0.2 * torch.randn_like(p)
    theirs.to(dtype).save_pretrained(tmp_path, max_shard_size=size)
    if "rope_theta" in settings:  # as folders of older versions have it
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        del config["rope_parameters"]
        path.write_text(json.dumps(config | {n: settings[n] for n in ("rope_theta", "rope_scaling")}))
    theirs = Model.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ours = from_pretrained(tmp_path)
    assert type(ours) is CLASSES[family.lower()]
    assert {p.data.dtype for p in ours.parameters()} == {np.dtype(np.float32)}

    draw = np.random.default_rng(seed + 1)
    ids = draw.integers(0, settings["vocab_size"], (2, T + 1))
    inputs, targets = torch.from_numpy(ids[:, :-1]), torch.from_numpy(ids[:, 1:])
    logits = theirs(inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    loss, cache = ours.loss(ids[:, :-1], ids[:, 1:])
    ours.loss_backward(1.0, cache)
    np.testing.assert_allclose(ours(ids[:, :-1]), logits.detach().numpy(), rtol=0, atol=1e-5)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    parameters = {name.removeprefix("model."): p.grad.numpy() for name, p in theirs.named_parameters()}
    largest = max(np.linalg.norm(grad) for grad in parameters.values())
    seen, sources = set(), ours.tensors()
    for name, p in ours.named_parameters().items():
        stored = sources[name]
        seen.add(stored.name)
        grad = (parameters[stored.name].T if stored.transposed else parameters[stored.name])[..., stored.columns]
        rounding = 1e-6 * largest  # some gradients are zero, as for a query that sees one key
        assert np.linalg.norm(p.grad - grad) <= 1e-4 * np.linalg.norm(grad) + rounding, name
    assert seen == parameters.keys()

    count = ours.context - 2
    found = np.stack(list(generate(ours, ids[:, :2], count, temperature=0)), axis=1)
    options = dict(max_new_tokens=count, do_sample=False, attention_mask=torch.ones(2, 2, dtype=torch.long))
    options["use_cache"] = settings.get("sliding_window") != 1  # their cache would keep all keys
    expected = theirs.generate(torch.from_numpy(ids[:, :2]), pad_token_id=0, **options)[:, 2:].numpy()
    np.testing.assert_array_equal(found, expected)


def test_the_configurations_are_as_different_as_they_should_be():
    drawn = [configuration(seed) for seed in range(CONFIGURATIONS)]
    heads = {(s["num_attention_heads"] > s["num_key_value_heads"], s["num_key_value_heads"] == 1) for _, s, *_ in drawn}
    assert heads == {(False, False), (False, True), (True, False), (True, True)}
    windows = [(s["sliding_window"], T) for f, s, T, *_ in drawn if f in ("Mistral", "Phi3") and s["sliding_window"]]
    assert any(w == 1 for w, T in windows) and any(1 < w < T for w, T in windows) and any(w > T for w, T in windows)
    qwen = [s for f, s, *_ in drawn if f in ("Qwen2", "Qwen3") and s["use_sliding_window"]]
    assert any(s["max_window_layers"] == 0 for s in qwen) and any(s["max_window_layers"] > 0 for s in qwen)
    scalings = [s.get("rope_scaling") or s.get("rope_parameters", {}) for _, s, *_ in drawn]
    assert {x.get("rope_type", x.get("type")) for x in scalings if "factor" in x} == {"linear", "llama3", "yarn"}
    assert any("type" in x for x in scalings) and {s["num_hidden_layers"] for _, s, *_ in drawn} == {1, 2, 3}
    assert {(dtype, size) for *_, dtype, size in drawn} >= {(t, "5KB") for t in (torch.bfloat16, torch.float16)}
    assert {(s["tie_word_embeddings"], f) for f, s, *_ in drawn} == {(t, f) for t in (True, False) for f in FAMILIES}

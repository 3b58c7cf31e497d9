"""The tensors of a Llama, Mistral or Qwen2 in a Hugging Face folder, and the settings of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checks import expect_number
from ..nn import Layer
from ..ops.positions import BASE
from ..ops.rotary import check_scaling
from ..shell.text import shown
from .pretrained import Folder, PretrainedError, TensorSource, expect_sizes, load_weights, read_config, stored_name

SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "num_hidden_layers": "depth",
    "max_position_embeddings": "context",
    "intermediate_size": "d_ff",
}
OPTIONAL = {"num_key_value_heads": "kv_heads", "head_dim": "head_width"}  # null or missing: the default here
FRACTIONS = ("rms_norm_eps", "max_window_layers")
COMPUTED: dict[str, tuple] = {  # values with which the computation is the one here, the default first
    "hidden_act": ("silu", "swish"),
    "tie_word_embeddings": (False, True),
    "is_causal": (True,),
    "partial_rotary_factor": (None, 1),
    "use_mrope": (False,),
    "original_max_position_embeddings": (None,),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None,),
}
KINDS: dict[str, dict[str, tuple]] = {  # what each model_type adds
    "llama": {"attention_bias": (False, True), "mlp_bias": (False, True), "sliding_window": (None,)},
    "mistral": {"attention_bias": (False,), "mlp_bias": (False,)},
    "qwen2": {"attention_bias": (True,), "mlp_bias": (False,), "use_sliding_window": (False, True)},
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
WINDOW, FIRST_WINDOW = 4096, 28  # defaults of the library that writes these folders
# The path of each layer of ours in a file; those of a block, without the block.
LAYERS = {
    "tokens": "embed_tokens",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.unify": "self_attn.o_proj",
    "norm1": "input_layernorm",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
    "norm2": "post_attention_layernorm",
    "final_norm": "norm",
    "output": "lm_head",
}
PREFIX = "model."  # of most names in a file
BUFFERS = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # in old files, beside the weights
TIED = {"lm_head.weight": "embed_tokens.weight"}


def llama_config(folder: Folder) -> dict[str, Any]:
    """The sizes and options of `Llama` for a folder; raises PretrainedError if its model computes something else, or
    if the sizes are not those of its tensors.
    """
    path = Path(folder) / "config.json"
    kind = read_config(folder, tuple(KINDS))["model_type"]
    # Only a Llama may leave out its number of key and value heads: the library's defaults for the others are 8 and 32.
    names = [*SETTINGS, *([] if kind == "llama" else ["num_key_value_heads"])]
    config = read_config(
        folder,
        kind,
        names,
        COMPUTED | KINDS[kind],
        FRACTIONS,
        optional=(*OPTIONAL, "sliding_window"),
        architectures=(ARCHITECTURES[kind],),
    )
    C, F, H = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    queries = H * config["head_dim"] if config.get("head_dim") else C
    block = {"self_attn.q_proj.weight": (queries, C), "mlp.gate_proj.weight": (F, C)}
    tables = {"embed_tokens.weight": (config["vocab_size"], C)}
    tied = config.get("tie_word_embeddings", False)
    expect_sizes(folder, PREFIX, tables, "layers", block, config["num_hidden_layers"], TIED if tied else {})
    bias = config.get("attention_bias", kind == "qwen2")
    base, scaling = rotary_settings(path, config)
    return {ours: config[theirs] for theirs, ours in SETTINGS.items()} | {
        **{ours: config.get(theirs) for theirs, ours in OPTIONAL.items()},
        "window": window_setting(path, config),
        "base": base,
        "scaling": scaling,
        "bias": bias,
        "output_bias": bias and kind == "llama",
        "feedforward_bias": config.get("mlp_bias", False),
        "eps": config.get("rms_norm_eps", 1e-6),
        "tied": tied,
    }


def rotary_settings(path: Path, config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The base and the scaling of the angles, from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, dict):
        raise PretrainedError(f"{path}: {name}: expected settings by name, got {shown(rope)}")
    beside = config.get("rope_theta", rope.get("rope_theta", BASE))
    if (base := rope.get("rope_theta", beside)) != beside:
        raise PretrainedError(f"{path}: rope_theta: expected {shown(base)}, as in {name}, got {shown(beside)}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    whole = type(part := rope.get("partial_rotary_factor")) in (int, float) and part == 1  # of the width is rotated
    named = ("rope_theta", "rope_type", "type", *(["partial_rotary_factor"] if whole else []))
    scaling = {"rope_type": kind} | {n: x for n, x in rope.items() if n not in named}
    try:
        expect_number("rope_theta", base, zero=False)
        check_scaling(scaling)
    except (TypeError, ValueError) as error:
        raise PretrainedError(f"{path}: {name}: {str(error).removeprefix('scaling: ')}") from error
    return base, None if kind == "default" else scaling


def window_setting(path: Path, config: Mapping[str, Any]) -> int | None:
    """How many positions each position sees, in all layers; None for all."""
    kind, depth = config["model_type"], config["num_hidden_layers"]
    on = kind == "mistral" or (kind == "qwen2" and config.get("use_sliding_window", False))
    window = config.get("sliding_window", WINDOW) if on else None
    first = config.get("max_window_layers", FIRST_WINDOW) if kind == "qwen2" else 0
    windowed = [window is not None and i >= first for i in range(depth)]
    types = ["sliding_attention" if w else "full_attention" for w in windowed]
    if config.get("layer_types") not in (None, types):
        raise PretrainedError(
            f"{path}: layer_types: expected {shown(types)}, as other settings say, got {shown(config['layer_types'])}"
        )
    if any(windowed) and not all(windowed):
        raise PretrainedError(
            f"{path}: max_window_layers: expected 0 or at least {depth}, for one kind of attention, got {first}"
        )
    return window if all(windowed) else None


def load_llama(model: Layer, folder: Folder) -> None:
    """Copy the weights of a folder into `model`."""
    tensors = {name: stored_as(name) for name in model.named_parameters()}
    load_weights(model, folder, tensors, BUFFERS, PREFIX, {} if "output.w" in tensors else TIED)


def stored_as(name: str) -> TensorSource:
    """Where a parameter of ours is in a file: "body.blocks.0.norm1.gamma" is "layers.0.input_layernorm.weight"."""
    return TensorSource(stored_name(name, LAYERS, "layers"), transposed=name.endswith(".w"))

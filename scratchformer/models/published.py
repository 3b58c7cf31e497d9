"""Published decoders: what config.json may say of each kind of model, and where its tensors are.

A family of models is a class in a file of its own, derived from `PublishedDecoder` or from another family. Its `kinds`
say which settings are read, and its `layers` which tensors belong to which of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ..backend import to_cpu
from ..checks import expect_boolean, expect_floating_type, expect_fraction, expect_number, expect_positive
from ..nn import TiedOutput
from ..ops.positions import BASE
from ..ops.rotary import check_scaling
from ..rng import Zeros
from ..shell.text import shown
from .language_model import LanguageModel
from .pretrained import (
    Folder,
    PretrainedError,
    TensorSource,
    expect_sizes,
    load_weights,
    making,
    read_config,
    stored_shape,
    tensor_sources,
)

SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "num_hidden_layers": "depth",
    "max_position_embeddings": "context",
    "intermediate_size": "d_ff",
}
OPTIONAL = {"num_key_value_heads": "kv_heads", "head_dim": "head_width"}  # null or missing: the default here
FRACTIONS = ("rms_norm_eps", "layer_norm_eps", "max_window_layers")
# Values with which the computation is the one here, the default first; a kind may have others. (): any value.
COMPUTED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "tie_word_embeddings": (False, True),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_causal": (True,),
    "partial_rotary_factor": (None, 1),
    "use_mrope": (False,),
    "original_max_position_embeddings": (None,),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None,),
}
NO_WINDOW: dict[str, tuple] = {"sliding_window": (None,)}
KINDS = "sliding_attention", "full_attention"  # in layer_types: with a window, and without
FIRST_WINDOW = 28  # default of max_window_layers in the library that writes these folders


class Kind(NamedTuple):
    """What config.json may say of the models of one model_type, and what the library takes if it says nothing."""

    architecture: str
    settings: Mapping[str, tuple] = {}  # see COMPUTED
    needed: Sequence[str] = ()  # optional settings that must not be missing, since the library's default is a number
    window: int | None = None
    base: float = BASE
    eps: float = 1e-6


class PublishedDecoder(LanguageModel):
    """A language model whose weights have been published in Hugging Face folders.

    kinds: its model types, each with what its config.json may say. layers: the path in a file of each layer here; those
    within a block, without the block. Layers with the same path are side by side in one tensor. blocks: the path of the
    list of blocks. prefix: of most names in a file. buffers: a regular expression for what old files have beside the
    weights.
    """

    kinds: ClassVar[Mapping[str, Any]]
    layers: ClassVar[Mapping[str, str]] = {
        "tokens": "embed_tokens",
        "attention.query": "self_attn.q_proj",
        "attention.query.linear": "self_attn.q_proj",
        "attention.query.norm": "self_attn.q_norm",
        "attention.key": "self_attn.k_proj",
        "attention.key.linear": "self_attn.k_proj",
        "attention.key.norm": "self_attn.k_norm",
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
    blocks: ClassVar[str] = "layers"
    prefix: ClassVar[str] = "model."
    buffers: ClassVar[str] = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

    @classmethod
    def from_pretrained(
        cls,
        folder: Folder,
        context: int | None = None,
        dropout: float = 0.0,
        recompute: bool = False,
        dtype: Any = None,
    ) -> Self:
        """The model in a Hugging Face folder, of one of `kinds`: sizes from its config.json, weights from one file or
        several.

        context: None for the folder's (max_position_embeddings). dtype: of the weights, to which each tensor is cast
        as it is read; None for float32. dropout, recompute: as for the class. Dropout of attention probabilities
        (attention_dropout) is left out.
        Raises PretrainedError, naming the file and what is wrong in it: a setting that would change the computation,
        or tensors that are missing, unknown or of another shape; ValueError or TypeError for an argument.
        """
        expect_fraction("dropout", dropout, letter="p")
        expect_boolean(recompute=recompute)
        if dtype is not None:
            expect_floating_type("dtype", dtype)
        arguments = cls.arguments(folder)
        if context is not None:
            expect_positive(context=context)
            arguments["context"] = context
        with making(folder):
            model = cls(**arguments, dropout=dropout, recompute=recompute, key=Zeros())
        load_weights(model, folder, model.tensors(), cls.buffers, cls.prefix, cls.copies(arguments["tied"]), dtype)
        return model

    @classmethod
    def arguments(cls, folder: Folder) -> dict[str, Any]:
        """The sizes and options of the model in a folder. Raises PretrainedError, see `from_pretrained`."""
        config, kind = decoder_config(folder, cls)
        path, bias = Path(folder) / "config.json", config["attention_bias"]
        by_block = cls.angles(path, config, kind) | cls.by_block(path, config, kind)
        same = {name: values[0] for name, values in by_block.items() if all(each == values[0] for each in values)}
        varied = {name: values for name, values in by_block.items() if name not in same}
        return {ours: config[theirs] for theirs, ours in SETTINGS.items()} | {
            **{ours: config.get(theirs) for theirs, ours in OPTIONAL.items()},
            **(same | {"by_block": varied} if varied else same),
            "bias": bias,
            "output_bias": bias and config["model_type"] != "qwen2",
            "feedforward_bias": config["mlp_bias"],
            "eps": config.get("rms_norm_eps", kind.eps),
            "tied": config["tie_word_embeddings"],
        }

    @classmethod
    def angles(cls, path: Path, config: Mapping[str, Any], kind: Kind) -> dict[str, list]:
        """The base and the scaling of the angles in every block: see `by_block`."""
        base, scaling = rotary_settings(path, config, kind.base)
        return {"base": [base] * config["num_hidden_layers"], "scaling": [scaling] * config["num_hidden_layers"]}

    @classmethod
    def by_block(cls, path: Path, config: Mapping[str, Any], kind: Kind) -> dict[str, list]:
        """The options that may vary, each with its value for every block, by the config.json at `path`."""
        first = config.get("max_window_layers", FIRST_WINDOW) if config["model_type"].startswith("qwen") else 0
        return {"window": windows(path, config, kind, [i >= first for i in range(config["num_hidden_layers"])])}

    def settings(self, kind: str) -> dict[str, Any]:
        """What config.json says of this model, written as the one of `kinds` that is called `kind`."""
        block = self.body.blocks[0]
        attention, up = block.attention, block.feedforward.up
        seen = [each.attention.window for each in self.body.blocks]
        config = {
            "architectures": [self.kinds[kind].architecture],
            "model_type": kind,
            **{theirs: self.config[ours] for theirs, ours in SETTINGS.items() if ours != "d_ff"},
            "intermediate_size": up.w.data.shape[1],
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.body.final_norm.eps,
            "rope_theta": attention.base,
            "rope_scaling": attention.scaling,
            "attention_bias": attention.value.b is not None,
            "mlp_bias": up.b is not None,
            "tie_word_embeddings": isinstance(self.output, TiedOutput),
            "sliding_window": next((window for window in seen if window), None),
            "use_sliding_window": any(seen),
            "max_window_layers": next((i for i, window in enumerate(seen) if window), len(seen)),
        }
        if any(seen) and "use_sliding_window" in self.kinds[kind].settings:
            config["layer_types"] = [KINDS[not window] for window in seen]
        return config

    @classmethod
    def copies(cls, tied: bool) -> dict[str, str]:
        """The name of the output's matrix, if it is a copy of the table of the tokens, and the name of that table."""
        return {f"{cls.layers['output']}.weight": f"{cls.layers['tokens']}.weight"} if tied else {}

    @classmethod
    def transposed(cls, name: str) -> bool:
        """Whether a file has the matrix of the parameter `name` as (out, in)."""
        return name.endswith(".w")

    def stored(self) -> dict[str, np.ndarray]:
        """The tensors of this model, by their names in a file."""
        params, sources = self.named_parameters(), self.tensors()
        stored: dict[str, np.ndarray] = {}
        for name, source in sources.items():
            place = source.name if source.name.startswith(self.layers["output"] + ".") else self.prefix + source.name
            data = to_cpu(params[name].data)
            tensor = stored.setdefault(place, np.empty(stored_shape(params, name, sources), data.dtype))
            (tensor.T if source.transposed else tensor)[..., source.columns] = (
                data - source.plus if source.plus else data
            )
        return stored

    def tensors(self) -> dict[str, TensorSource]:
        """Where each parameter is in a file: "body.blocks.0.norm1.gamma" is "layers.0.input_layernorm.weight"."""
        return tensor_sources(self, self.layers, self.blocks, self.transposed)


def decoder_config(folder: Folder, model: type[PublishedDecoder]) -> tuple[dict[str, Any], Kind]:
    """The config.json of a folder, and its kind. Raises PretrainedError if it describes a model that computes something
    else than `model`, or whose sizes are not those of its tensors.
    """
    name = read_config(folder, tuple(model.kinds))["model_type"]
    kind, layers = model.kinds[name], model.layers
    computed = {each: values for each, values in (COMPUTED | kind.settings).items() if values}
    optional, architectures = (*OPTIONAL, "sliding_window"), (kind.architecture,)
    config = read_config(folder, name, [*SETTINGS, *kind.needed], computed, FRACTIONS, optional, architectures)
    for each in "tie_word_embeddings", "attention_bias", "mlp_bias":
        config.setdefault(each, computed[each][0])
    C, F, H = (config[each] for each in ("hidden_size", "intermediate_size", "num_attention_heads"))
    D, G = config.get("head_dim") or C // H, config.get("num_key_value_heads") or H
    widths = {"query": H * D if config.get("head_dim") else C, "key": G * D, "value": G * D}
    rows = {f"attention.{each}": width for each, width in widths.items()} | {"feedforward.gate": F, "feedforward.up": F}
    paths = [layers[each] for each in ("attention.query", "feedforward.up")]
    block = {f"{path}.weight": (sum(n for each, n in rows.items() if layers.get(each) == path), C) for path in paths}
    tables = {f"{layers['tokens']}.weight": (config["vocab_size"], C)}
    copies = model.copies(config["tie_word_embeddings"])
    expect_sizes(folder, model.prefix, tables, model.blocks, block, config["num_hidden_layers"], copies)
    return config, kind


def rotary_settings(path: Path, config: Mapping[str, Any], default: float) -> tuple[float, dict[str, Any] | None]:
    """The base and the scaling of the angles, from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, dict):
        raise PretrainedError(f"{path}: {name}: expected settings by name, got {shown(rope)}")
    base = rope.get("rope_theta", config.get("rope_theta", default))
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


def windows(path: Path, config: Mapping[str, Any], kind: Kind, by_rule: Sequence[bool]) -> list[int | None]:
    """How many positions each position sees in each layer; None for all.

    by_rule: which layers have a window if config.json has one but no layer_types.
    """
    switch = "use_sliding_window" in kind.settings
    on = config.get("use_sliding_window", False) if switch else True
    window = config.get("sliding_window", kind.window) if on else None
    types = [KINDS[not (window and each)] for each in by_rule]
    stated = config.get("layer_types")
    if stated is not None and stated != types:
        free = (switch or "layer_types" in kind.settings) and window
        known = isinstance(stated, list) and len(stated) == len(types) and all(each in KINDS for each in stated)
        if not (free and known):
            wanted = f"{len(types)} of {' or '.join(KINDS)}" if free else f"{shown(types)}, as other settings say"
            raise PretrainedError(f"{path}: layer_types: expected {wanted}, got {shown(stated)}")
        types = stated
    return [window if each == KINDS[0] else None for each in types]

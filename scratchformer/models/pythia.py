"""Pythia, and other published decoders of the type GPT-NeoX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import ops
from ..checks import expect_positive
from ..nn import FeedForward, LayerNorm, ParallelBlock, RotarySelfAttention
from ..ops.positions import BASE
from ..rng import Key, fold
from ..shell.text import shown
from .bert_weights import ACTIVATIONS
from .llama import Llama
from .pretrained import Folder, PretrainedError, TensorSource, making
from .published import SETTINGS, Kind, decoder_config, rotary_settings

SHARE = 0.25  # of each head is rotated, unless config.json says otherwise


class PythiaBlock(ParallelBlock):
    """Rotary self-attention and a feed-forward layer that both read x, each through a layer norm: see `ParallelBlock`.

    base, scaling, rotary_width: of the attention, see `RotarySelfAttention`; by default a quarter of each head is
    rotated, rounded down to an even number. bias: whether the maps of the attention have one. d_ff, activation: see
    `FeedForward`. eps: of both norms.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        d_ff: int | None = None,
        activation: ops.Activation = "gelu",
        base: float = BASE,
        scaling: Mapping[str, Any] | None = None,
        rotary_width: int | None = None,
        bias: bool = True,
        eps: float = 1e-5,
        dropout: float = 0.0,
        key: Key = Key(0),
    ) -> None:
        expect_positive(d_model=d_model, heads=heads)
        rotary_width = int(d_model) // int(heads) // 8 * 2 if rotary_width is None else rotary_width
        options: dict[str, Any] = dict(base=base, scaling=scaling, rotary_width=rotary_width)
        options |= dict(bias=bias, output_bias=bias, key=fold(key, "attention"))
        attention = RotarySelfAttention(d_model, heads, **options)
        feedforward = FeedForward(d_model, d_ff, activation, fold(key, "feedforward"))
        super().__init__(attention, feedforward, LayerNorm(d_model, eps), LayerNorm(d_model, eps), "pre", dropout)


class Pythia(Llama):
    """The language models that EleutherAI published in 2023, of 14 million to 12 billion weights.

    What differs from `Llama`, and why:
    - Attention and feed-forward layer read the same x, each through a norm of its own, and both are added to it
      (`nn.ParallelBlock`). They can be computed at the same time, and large models lose nothing by it.
    - Only the first quarter of the numbers of each head is rotated (rotary_width). The others compare the
      contents of two positions at any distance, and less is computed.
    - As in `GPT2`, the norms are layer norms, the feed-forward layer has one map with GELU instead of a gate, and all
      maps of a block have biases.

    `block` takes the options of a block: d_ff, activation, base, scaling, rotary_width, bias and eps. The other
    arguments are those of `Llama`.

    Source: Biderman et al., "Pythia: a suite for analyzing large language models across training and scaling", 2023;
    Black et al., "GPT-NeoX-20B: an open-source autoregressive language model", 2022, section 2.1.
    """

    block_class, norm_class = PythiaBlock, LayerNorm
    defaults: ClassVar[Mapping[str, Any]] = {"eps": 1e-5}
    kinds: ClassVar[Mapping[str, Kind]] = {
        "gpt_neox": Kind(
            "GPTNeoXForCausalLM",
            {
                "hidden_act": tuple(ACTIVATIONS),
                "attention_bias": (True, False),
                "use_parallel_residual": (True,),
                "partial_rotary_factor": (),
                **dict.fromkeys(("head_dim", "num_key_value_heads"), (None,)),
            },
        )
    }
    prefix = "gpt_neox."
    buffers = r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    layers: ClassVar[Mapping[str, str]] = {
        "tokens": "embed_in",
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), "attention.query_key_value"),
        "attention.unify": "attention.dense",
        "norm1": "input_layernorm",
        "feedforward.up": "mlp.dense_h_to_4h",
        "feedforward.down": "mlp.dense_4h_to_h",
        "norm2": "post_attention_layernorm",
        "final_norm": "final_layer_norm",
        "output": "embed_out",
    }

    @classmethod
    def arguments(cls, folder: Folder) -> dict[str, Any]:
        config, path = decoder_config(folder, cls)[0], Path(folder) / "config.json"
        with making(folder):
            rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
            rope = {"rope_theta": config.get("rotary_emb_base", BASE), **rope}
            rope = {"partial_rotary_factor": config.get("rotary_pct", SHARE), **rope}
            for name in "rope_theta", "partial_rotary_factor":  # the library does not read these
                if config.get(name) not in (None, rope[name]):
                    raise PretrainedError(f"{path}: {name}: expected {shown(rope[name])}, got {shown(config[name])}")
            width = int(config["hidden_size"] // config["num_attention_heads"] * rope.pop("partial_rotary_factor"))
        base, scaling = rotary_settings(path, {"rope_parameters": rope}, BASE)
        return {ours: config[theirs] for theirs, ours in SETTINGS.items()} | {
            **dict(rotary_width=width, base=base, scaling=scaling, bias=config["attention_bias"]),
            "activation": ACTIVATIONS[config.get("hidden_act", "gelu")],
            "eps": config.get("layer_norm_eps", 1e-5),
            "tied": config["tie_word_embeddings"],
        }

    def settings(self, kind: str) -> dict[str, Any]:
        attention, up = self.body.blocks[0].attention, self.body.blocks[0].feedforward.up
        return super().settings(kind) | {
            **dict.fromkeys(("head_dim", "num_key_value_heads")),
            "mlp_bias": False,  # the library has no such setting: there always is one
            "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == up.activation),
            "layer_norm_eps": self.body.final_norm.eps,
            "rotary_pct": attention.rotary_width / attention.head_width,
            "rotary_emb_base": attention.base,
            "use_parallel_residual": True,
        }

    def tensors(self) -> dict[str, TensorSource]:
        """As for `Llama`. The query, key and value of each head are side by side, in one matrix for all heads."""
        attention: Any = self.body.blocks[0].attention
        columns = np.arange(3 * attention.heads * attention.head_width).reshape(attention.heads, 3, -1)
        places = {name: columns[:, i].ravel().tolist() for i, name in enumerate(("query", "key", "value"))}
        return {
            name: tensor._replace(columns=places.get(name.split(".")[-2], tensor.columns))
            for name, tensor in super().tensors().items()
        }

"""The published decoder Gemma 3, for text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..ops.positions import BASE
from ..shell.text import shown
from .llama import Llama
from .pretrained import PretrainedError, TensorSource
from .published import KINDS, Kind, PublishedDecoder, rotary_settings, windows


class Gemma3(Llama):
    """The language model that Google DeepMind published in 2025, without its image encoder.

    What differs from `Llama`, and why:
    - The vectors of tokens are multiplied by √C. They are small, since the same table is the output's (tied), and
      would be lost beside what the branches add.
    - Each branch has a norm before it and one after it, four in a block. What it adds to the residual path has a size
      that is learned, γ.
    - Each head of the queries and keys is divided by its root mean square, as in Qwen3 (`nn.NormedLinear`).
    - The feed-forward layer is gated by GELU, in its approximation by tanh (`nn.GeGLU`).
    - In five of six blocks, a position sees only the last W (window), and angles are larger (base 10,000). In the sixth
      it sees all, with a base of 1,000,000 and perhaps a scaling. So the cache for long texts is small, and distant
      words are still reached. Options that vary in this way are given by_block.

    Published files store γ − 1 instead of γ. Weight decay then pulls γ to 1, while here it pulls γ to 0.

    All arguments are those of `Llama`.

    Source: Gemma team, "Gemma 3 technical report", 2025, section 2; "Gemma 2: improving open language models at a
    practical size", 2024, section 2.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {
        "gemma3_text": Kind(
            "Gemma3ForCausalLM",
            {
                "hidden_activation": ("gelu_pytorch_tanh",),
                "hidden_act": (),
                "attention_bias": (False, True),
                "tie_word_embeddings": (True, False),
                "attn_logit_softcapping": (None,),
                "final_logit_softcapping": (None,),
                "use_bidirectional_attention": (False, None),
                "layer_types": (),
            },
            needed=["num_key_value_heads", "head_dim", "sliding_window", "query_pre_attn_scalar"],
            base=1e6,
        )
    }
    layers: ClassVar[Mapping[str, str]] = {
        **PublishedDecoder.layers,
        "after1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "after2": "post_feedforward_layernorm",
    }
    defaults: ClassVar[Mapping[str, Any]] = {"norms": "both", "query_key_norm": "heads", "activation": "gelu_tanh"}

    def __init__(
        self, vocab_size: int, d_model: int, heads: int, depth: int, context: int, tied: bool = True, **options: Any
    ) -> None:
        super().__init__(vocab_size, d_model, heads, depth, context, tied, **options)
        self.body.embedding.scale = math.sqrt(d_model)

    @classmethod
    def angles(cls, path: Path, config: Mapping[str, Any], kind: Kind) -> dict[str, list]:
        """As for `Llama`; those of blocks with a window are different."""
        rope = config.get("rope_parameters") or {}
        if not isinstance(rope, dict) or not rope.keys() <= {*KINDS}:
            raise PretrainedError(f"{path}: rope_parameters: expected {' and '.join(KINDS)}, got {shown(rope)}")
        near = {"rope_theta": config.get("rope_local_base_freq", BASE)}, rope.get(KINDS[0])
        far = {"rope_theta": config.get("rope_theta", kind.base)}, rope.get(KINDS[1]), config.get("rope_scaling")
        settings = {}
        for name, parts in zip(KINDS, (near, far), strict=True):
            if wrong := [part for part in parts if not isinstance(part, dict | None)]:
                raise PretrainedError(f"{path}: {name}: expected settings by name, got {shown(wrong[0])}")
            merged = {setting: value for part in parts for setting, value in (part or {}).items()}
            settings[name] = rotary_settings(path, {"rope_parameters": merged}, kind.base)
        angles = [settings[KINDS[window is None]] for window in cls.by_block(path, config, kind)["window"]]
        return {"base": [base for base, _ in angles], "scaling": [scaling for _, scaling in angles]}

    @classmethod
    def by_block(cls, path: Path, config: Mapping[str, Any], kind: Kind) -> dict[str, list]:
        window, scalar, width = (config[name] for name in ("sliding_window", "query_pre_attn_scalar", "head_dim"))
        pattern = config.get("sliding_window_pattern", 6)  # every sixth block sees all positions
        if type(pattern) is not int or pattern < 1:
            raise PretrainedError(f"{path}: sliding_window_pattern: expected a number >= 1, got {shown(pattern)}")
        if window is None and config.get("layer_types") != [KINDS[1]] * config["num_hidden_layers"]:
            raise PretrainedError(f"{path}: sliding_window: expected a number, since layer_types has {KINDS[0]}")
        if scalar != width:
            raise PretrainedError(f"{path}: query_pre_attn_scalar: expected head_dim, {width}, got {shown(scalar)}")
        by_rule = [(i + 1) % pattern != 0 for i in range(config["num_hidden_layers"])]
        return {"window": windows(path, config, kind, by_rule)}

    def settings(self, kind: str) -> dict[str, Any]:
        attentions = [block.attention for block in self.body.blocks]
        rope = {
            KINDS[not each.window]: {"rope_type": "default", **(each.scaling or {}), "rope_theta": each.base}
            for each in attentions
        }
        config = super().settings(kind)
        for name in "rope_theta", "rope_scaling", "use_sliding_window":
            del config[name]
        return config | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config["head_dim"],
            "sliding_window": config["sliding_window"] or self.context,  # a number, even if no block has a window
            "layer_types": [KINDS[not each.window] for each in attentions],
            "rope_parameters": rope,
        }

    def tensors(self) -> dict[str, TensorSource]:
        """As for `Llama`; files store γ − 1."""
        tensors = super().tensors()
        return {name: each._replace(plus=float(name.endswith(".gamma"))) for name, each in tensors.items()}

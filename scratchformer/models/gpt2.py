"""GPT-2 as it was published; its weights can be loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..nn import Dropout, Linear, TiedOutput
from ..rng import Key, Zeros
from .body import Body
from .language_model import LanguageModel
from .pretrained import PretrainedError, Tensor, load_weights, making, read_config, stored_name

STD = 0.02  # of the weights at the start
SIZES = ("vocab_size", "n_embd", "n_head", "n_layer", "n_positions")  # in a folder, as the arguments of GPT2 begin
DROPOUTS = ("embd_pdrop", "resid_pdrop")  # after the embedding, and at the end of the branches: here one number
FRACTIONS = (*DROPOUTS, "layer_norm_epsilon")
COMPUTED = {  # values with which the computation is the one here
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True, False),
}


class GPT2(LanguageModel):
    """`LanguageModel` as OpenAI published it in 2019, in four sizes (by default the smallest: 124 million parameters).

    What is different from the tutorial's generator, and why:
    - The norms stand before attention and feed-forward, and one at the end: the residual path from the embedding to
      the output is a plain sum, through which a gradient passes unchanged to any depth.
    - The output has the tokens' embeddings as its weights, without a bias (`nn.TiedOutput`): one table of V C numbers
      less, and each token learns from being read and from being predicted. (tied: False gives it weights of its own.)
    - Query, key and value have biases; GELU, by its formula with tanh, takes the place of ReLU.
    - Weights start normal with a standard deviation of 0.02, biases at 0. The two maps of a block that end on the
      residual path (`unify`, `down`) start smaller by 1/√(2 depth): 2 depth terms are added up there, and the sum's
      variance is then that of one.

    vocab_size: V. d_model, heads, depth: C, H and the number of blocks. context: the longest sequence, each of whose
    positions has a learned vector. dropout: after the embedding and at the end of both branches of a block. (The
    published models were also trained with dropout of attention probabilities, which is left out.) d_ff: F, 4 C if not
    given. eps: of the norms. recompute: gradient checkpointing of every block.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3.
    """

    def __init__(
        self,
        vocab_size: int = 50_257,
        d_model: int = 768,
        heads: int = 12,
        depth: int = 12,
        context: int = 1024,
        dropout: float = 0.1,
        d_ff: int | None = None,
        eps: float = 1e-5,
        recompute: bool = False,
        tied: bool = True,
        key: Key = Key(0),
    ) -> None:
        options = dict(dropout=dropout, d_ff=d_ff, eps=eps, recompute=recompute)
        self.context = context
        kind = dict(norm="pre", causal=True, bias=True, activation="gelu_tanh")
        self.body = Body(vocab_size, d_model, heads, depth, context, key=Zeros(), **kind, **options)
        self.output = TiedOutput(self.body.tokens) if tied else Linear(d_model, vocab_size, False, Zeros())
        smaller = STD / math.sqrt(2 * depth)
        self.draw_weights(key, lambda name: smaller if name.endswith(("unify.w", "down.w")) else STD)

    @classmethod
    def from_pretrained(
        cls, folder: os.PathLike[str] | str, dropout: float | None = None, recompute: bool = False
    ) -> GPT2:
        """The model in a Hugging Face folder: sizes from its config.json, weights from one file or several.

        Any of the four sizes. dropout: None for that of the folder, which must be the same after the embedding
        (embd_pdrop) and in the blocks (resid_pdrop); a missing one counts as 0.1. recompute: as for the class.
        Raises PretrainedError, naming the file and what is wrong in it: a setting that would change the computation,
        or tensors that are missing, unknown or of another shape; ValueError for a dropout out of range.
        """
        if dropout is not None:
            Dropout(dropout)  # raises what is wrong with it
        config = read_config(folder, "gpt2", SIZES, COMPUTED, FRACTIONS, optional=("n_inner",))
        with making(folder):
            model = cls(
                *(config[name] for name in SIZES),
                _dropout(folder, config) if dropout is None else dropout,
                config.get("n_inner"),
                config.get("layer_norm_epsilon", 1e-5),
                recompute,
                config.get("tie_word_embeddings", True),
                key=Zeros(),
            )
        tensors = {name: stored_as(name, config["n_embd"]) for name in model.named_parameters()}
        tied = {"lm_head.weight": "wte.weight"}
        load_weights(model, folder, tensors, r"h\.\d+\.attn\.(masked_)?bias", "transformer.", tied)
        return model


def _dropout(folder: os.PathLike[str] | str, config: Mapping[str, Any]) -> float:
    """The dropout of a folder with this config; raises PretrainedError if it has two."""
    embedding, branches = (config.get(name, 0.1) for name in DROPOUTS)
    if embedding != branches:
        raise PretrainedError(
            f"{Path(folder) / 'config.json'}: embd_pdrop: expected that of resid_pdrop, {branches}, got {embedding}: "
            "say which it is to be (dropout)"
        )
    return branches


# The path of each layer of ours in a file; those of a block, without the block. Its matrices are (in, out), as ours.
LAYERS = {
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.unify": "attn.c_proj",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "tokens": "wte",
    "positions": "wpe",
    "final_norm": "ln_f",
    "output": "lm_head",  # if it is not tied; stored as (out, in)
}
COLUMNS = ("query", "key", "value")  # side by side in one matrix and in one bias


def stored_as(name: str, d_model: int) -> Tensor:
    """Where the parameter called `name` is in the file: "body.blocks.0.norm1.gamma" is "h.0.ln_1.weight"."""
    kind = name.split(".")[-2]
    start = COLUMNS.index(kind) * d_model if kind in COLUMNS else None
    columns = slice(None) if start is None else slice(start, start + d_model)
    return Tensor(stored_name(name, LAYERS, "h"), transposed=kind == "output", columns=columns)

"""GPT-2, whose published weights can be loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ..checks import expect_boolean
from ..nn import Layer, Linear, TiedOutput
from ..rng import Key, Zeros
from .body import Body
from .pretrained import Folder, expect_sizes, read_config
from .published import PublishedDecoder

STD = 0.02  # of the initial weights
PREFIX = "transformer."  # of most names in a file
SIZES = {
    "vocab_size": "vocab_size",
    "n_embd": "d_model",
    "n_head": "heads",
    "n_layer": "depth",
    "n_positions": "context",
}
FRACTIONS = ("resid_pdrop", "layer_norm_epsilon")
COMPUTED = {  # settings, and the values that this implementation supports
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),  # the last is GELU itself
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "tie_word_embeddings": (True, False),
}


class GPT2(PublishedDecoder):
    """The `LanguageModel` that OpenAI published in 2019 in four sizes; the default is the smallest, 124M parameters.

    The differences from the tutorial's generator, with reasons:
    - Norms come before attention and feed-forward layer, and there is one at the end. The residual path from the
      embedding to the output is then a plain sum, through which gradients pass unchanged at any depth.
    - The token embeddings are also the weights of the output, which has no bias (`nn.TiedOutput`). This saves a table
      of V C numbers, and each token's vector learns both when the token is read and when it is predicted. (tied: False
      gives the output its own weights.)
    - Query, key and value projections have biases, and GELU, in its tanh approximation, replaces ReLU.
    - Weights are initially normal with standard deviation 0.02, and biases 0. The two maps of a block that end on the
      residual path (`unify`, `down`) are smaller by 1/√(2 depth): 2 depth terms are added there, and so their sum has
      the variance of one.

    vocab_size: V. d_model, heads, depth: C, H and the number of blocks. context: the longest sequence; each of its
    positions has a learned vector. dropout: after the embedding and at the end of both branches of a block. (The
    published models were also trained with dropout on attention probabilities, which is omitted here.) d_ff: F, 4 C by
    default. eps: added in the norms. recompute: gradient checkpointing of every block. activation: "gelu" is GELU
    itself.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3.
    """

    kinds: ClassVar[Mapping[str, Any]] = {"gpt2": COMPUTED}
    blocks, prefix, buffers = "h", PREFIX, r"h\.\d+\.attn\.(masked_)?bias"
    layers: ClassVar[Mapping[str, str]] = {
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
        "output": "lm_head",  # unless tied
    }

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
        activation: str = "gelu_tanh",
        key: Key = Key(0),
    ) -> None:
        expect_boolean(tied=tied)
        options: dict[str, Any] = dict(dropout=dropout, d_ff=d_ff, eps=eps, recompute=recompute)
        self.context = context
        kind: dict[str, Any] = dict(norm="pre", causal=True, bias=True, activation=activation)
        self.body = Body(vocab_size, d_model, heads, depth, context, key=Zeros(), **kind, **options)
        self.output: Layer = TiedOutput(self.body.tokens) if tied else Linear(d_model, vocab_size, False, Zeros())
        smaller = STD / math.sqrt(2 * depth)
        self.draw_weights(key, lambda name: smaller if name.endswith(("unify.w", "down.w")) else STD)

    @classmethod
    def transposed(cls, name: str) -> bool:
        return name == "output.w"

    @classmethod
    def from_pretrained(
        cls, folder: Folder, dropout: float | None = None, recompute: bool = False, dtype: Any = None
    ) -> GPT2:
        """The model in a Hugging Face folder: sizes from its config.json, weights from one file or several.

        Any of the four sizes. dropout: None for that of the folder's blocks (resid_pdrop), 0.1 if it is not given.
        recompute, dtype: as for every `PublishedDecoder`. Raises PretrainedError, naming the file and what is wrong in
        it: a setting that would change the mathematics, or tensors that are missing, unknown or of the wrong shape;
        ValueError for a dropout out of range.
        """
        if dropout is None:
            dropout = _config(folder).get("resid_pdrop", 0.1)
        return super().from_pretrained(folder, None, dropout, recompute, dtype)

    @classmethod
    def arguments(cls, folder: Folder) -> dict[str, Any]:
        config = _config(folder)
        V, C, P, depth = (config[name] for name in ("vocab_size", "n_embd", "n_positions", "n_layer"))
        F, tied = config.get("n_inner") or 4 * C, config.get("tie_word_embeddings", True)
        block = {"attn.c_attn.weight": (C, 3 * C), "mlp.c_fc.weight": (C, F)}
        tables = {"wte.weight": (V, C), "wpe.weight": (P, C)}
        expect_sizes(folder, PREFIX, tables, "h", block, depth, cls.copies(tied))
        return {ours: config[theirs] for theirs, ours in SIZES.items()} | {
            "d_ff": config.get("n_inner"),
            "eps": config.get("layer_norm_epsilon", 1e-5),
            "tied": tied,
            "activation": "gelu" if config.get("activation_function") == "gelu" else "gelu_tanh",
        }

    def settings(self, kind: str) -> dict[str, Any]:
        """What config.json says of this model."""
        block = self.body.blocks[0]
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": kind,
            **{theirs: self.config[ours] for theirs, ours in SIZES.items()},
            "n_inner": block.feedforward.up.w.data.shape[1],
            "activation_function": {"gelu_tanh": "gelu_new"}.get(block.feedforward.up.activation, "gelu"),
            "layer_norm_epsilon": block.norm1.eps,
            "tie_word_embeddings": isinstance(self.output, TiedOutput),
            **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), self.config["dropout"]),
        }


def _config(folder: Folder) -> dict[str, Any]:
    """The config.json of a folder. Raises PretrainedError if it describes a model that computes something else."""
    return read_config(folder, "gpt2", SIZES, COMPUTED, FRACTIONS, optional=("n_inner",))

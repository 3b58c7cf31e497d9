"""Llama, and the published models that differ from it in a setting: Mistral and Qwen2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from ..checks import expect_boolean, expect_number, expect_one_of, expect_positive
from ..nn import Block, GeGLU, LayerNorm, Linear, RMSNorm, RotarySelfAttention, SwiGLU, TiedOutput
from ..ops.positions import BASE
from ..rng import Key, Zeros, fold
from .body import Body
from .published import NO_WINDOW, Kind, PublishedDecoder

EPS = 1e-6
GATED = {"silu": SwiGLU, "gelu_tanh": GeGLU}


class LlamaBlock(Block):
    """A pre-norm block of rotary self-attention and SwiGLU, with RMS norms: see `Block`.

    kv_heads, head_width, base, scaling, bias, output_bias, window, rotary_width, query_key_norm: of the attention, see
    `RotarySelfAttention`.
    d_ff, feedforward_bias: of the feed-forward layer, see `SwiGLU`. By default F is 8/3 C, rounded up: the three
    matrices then have as many weights as the two of a `FeedForward` with 4 C. norms: where they are, "before" the
    branches, "after" them or "both", see `Residual`. activation: of the gate, "silu", or "gelu_tanh" for a `GeGLU`.
    eps: added in all norms.

    Forward:

        s = x        n = norm1(s)        a = attention(n)        h_tc = x_tc + a_tc
        r = h        u = norm2(r)        f = feedforward(u)        y_tc = h_tc + f_tc

    Backward. Each sum passes its gradient on twice, past its branch and through it: see `TransformerBlock`.

        du = feedforward_backward(dy, u)        dr = norm2_backward(du, r)        dh_tc = dy_tc + dr_tc
        dn = attention_backward(dh, n)        ds = norm1_backward(dn, s)        dx_tc = dh_tc + ds_tc
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        d_ff: int | None = None,
        head_width: int | None = None,
        base: float = BASE,
        scaling: Mapping[str, Any] | None = None,
        window: int | None = None,
        bias: bool = False,
        output_bias: bool = False,
        feedforward_bias: bool = False,
        rotary_width: int | None = None,
        query_key_norm: str | None = None,
        norms: str = "before",
        activation: str = "silu",
        eps: float = EPS,
        dropout: float = 0.0,
        key: Key = Key(0),
    ) -> None:
        expect_positive(d_model=d_model)
        d_ff = -(-8 * int(d_model) // 3) if d_ff is None else d_ff
        expect_one_of("norms", norms, ("before", "after", "both"))
        expect_one_of("activation", activation, GATED)
        options: dict[str, Any] = dict(base=base, scaling=scaling, window=window, bias=bias, output_bias=output_bias)
        options |= dict(rotary_width=rotary_width, query_key_norm=query_key_norm, eps=eps)
        attention = RotarySelfAttention(d_model, heads, kv_heads, head_width, **options, key=fold(key, "attention"))
        feedforward = GATED[activation](d_model, d_ff, feedforward_bias, fold(key, "feedforward"))
        first, second, after1, after2 = (
            RMSNorm(d_model, eps) if norms in (place, "both") else None
            for place in ("before", "before", "after", "after")
        )
        super().__init__(attention, feedforward, first, second, "pre", dropout, after1, after2)


class Llama(PublishedDecoder):
    """The language model that Meta published in 2023. Mistral and Qwen2 are variants of it.

    What differs from `GPT2`, and why:
    - Queries and keys are rotated by angles that grow with their position, in every block. Their scores depend on how
      far apart they are. There is no table of positions, and `context` is only a limit.
    - The norms are RMS norms: no mean is subtracted and nothing is added. They are cheaper, and train as well.
    - The feed-forward layer is gated: SwiGLU, with F = 8/3 C, gives a lower loss than ReLU or GELU with 4 C and as many
      weights.
    - Linear layers have no biases, and the output has weights of its own (tied: True gives it the tokens' table).
    - Several query heads may share one head of keys and values (kv_heads: G < H). The cache for generation is then H/G
      times smaller, and faster to read. The larger models have this from Llama 2 on.
    - In Mistral a position sees only the last W (window): time grows with T W instead of T². Information still travels
      W − 1 positions in every block.
    - Qwen2 adds biases to queries, keys and values (bias).

    vocab_size: V. d_model, heads, depth: C, H and the number of blocks. context: the longest sequence. dropout: after
    the embedding and at the end of both branches of a block; the published models have none. recompute: gradient
    checkpointing of every block. std: all weights start normal with this standard deviation, biases at 0.
    by_block: options that vary from block to block, see `Body`.
    `block` takes the remaining options, those of `LlamaBlock`. A model derived from this one may have other defaults of
    them, `defaults`.

    Source: Touvron et al., "LLaMA: open and efficient foundation language models", 2023, section 2.2; Touvron et al.,
    "Llama 2", 2023, section 2.2, for grouped heads; Jiang et al., "Mistral 7B", 2023, section 2; Yang et al., "Qwen2
    technical report", 2024, section 2.2.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {
        "llama": Kind("LlamaForCausalLM", NO_WINDOW | {"attention_bias": (False, True), "mlp_bias": (False, True)}),
        "mistral": Kind("MistralForCausalLM", needed=["num_key_value_heads"], window=4096),
        "qwen2": Kind(
            "Qwen2ForCausalLM",
            {"attention_bias": (True,), "use_sliding_window": (False, True)},
            needed=["num_key_value_heads"],
            window=4096,
        ),
    }
    defaults: ClassVar[Mapping[str, Any]] = {}
    block_class: ClassVar[type[Block]] = LlamaBlock
    norm_class: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm  # of the final norm

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        context: int,
        tied: bool = False,
        dropout: float = 0.0,
        recompute: bool = False,
        std: float = 0.02,
        by_block: Mapping[str, Sequence[Any]] | None = None,
        key: Key = Key(0),
        **block: Any,
    ) -> None:
        expect_boolean(tied=tied)
        expect_number("std", std)
        block = {**self.defaults, **block}
        options: dict[str, Any] = dict(
            positions="none", causal=True, block=self.block_class, key=Zeros(), recompute=recompute, by_block=by_block
        )
        final_norm = partial(self.norm_class, eps=block.get("eps", EPS))
        options |= dict(dropout=dropout, final_norm=final_norm)
        self.context = context
        self.body = Body(vocab_size, d_model, heads, depth, context, **options, **block)
        self.output = TiedOutput(self.body.tokens) if tied else Linear(d_model, vocab_size, False, Zeros())
        self.draw_weights(key, lambda name: std)

    @classmethod
    def passes_to(cls, options: Mapping[str, Any]) -> Callable:
        return cls.block_class

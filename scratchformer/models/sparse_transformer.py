"""The sparse transformer: a language model for long sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import ops
from ..nn import GridPositions, Linear
from ..ops.checks import expect_boolean, expect_positive
from ..rng import Key
from .language_model import LanguageModel

STD = 0.125  # times 1/√fan-in: the standard deviation of the weights at the start
KINDS = {
    "strided": lambda stride, width: (ops.Local(stride), ops.Strided(stride)),
    "fixed": lambda stride, width: (ops.SameBlock(stride), ops.BlockEnds(stride, width)),
}


class SparseTransformer(LanguageModel):
    """The language model, where a position attends not to all n before it but to a few times √n of them.

    What changed from `LanguageModel`, and why:

    - Attention is factorised. Half of the heads see what is near, the other half a few places everywhere, chosen so
      that two steps lead from any place to any later one. With a stride near √n a block costs O(n √n) for O(n²).
      kind "strided": the last `stride` places, and every `stride`-th counted from the own, for data that has rows: in
      an image `stride` wide, the row and the column. kind "fixed": the own block of `stride` places, and the last
      `width` places of every block, where the model of a text can keep what a block was about.
      merged: instead every head sees what both halves would, at the cost of both.
    - Positions are the row and the column of a grid `stride` wide. Its tables are much smaller than one of n vectors,
      and learn from every row and every column.
    - The norm stands before each branch, the activation is GELU, and the weights start small, so that many blocks can
      be trained: normal with standard deviation 0.125/√fan-in (the vectors of tokens and positions have fan-in C, and
      the two that make a position 2 C), biases 0. The 2 · depth maps that end a branch, whose outputs add up, start
      smaller by √(2 depth). The output map starts as in `LanguageModel`; the paper's starts at 0, from where small
      models learn slowly.

    vocab_size: V (256 for bytes). d_model, heads, depth: C, H (even, unless merged) and the number of blocks. context:
    the longest sequence. width: of kind "fixed"; 1 for the other, which has none. positions: "grid", or one of those of
    `Body`. `body` takes its remaining options but causal: dropout, wide, d_ff, bias, eps, recompute. Relative positions
    with kind "fixed" have no tiles: attention is then the reference's, whose memory grows with n².

    While generating, when the context slides, blocks and the grid are counted again from the first token that is kept.
    Source: Child et al., "Generating long sequences with sparse transformers", 2019, sections 4.3 to 6.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        context: int,
        stride: int,
        kind: str = "strided",
        width: int = 1,
        merged: bool = False,
        positions: str = "grid",
        norm: str = "pre",
        activation: str = "gelu",
        key: Key = Key(0),
        **body: Any,
    ) -> None:
        expect_positive(context=context, d_model=d_model, stride=stride)
        expect_boolean(merged=merged)
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if kind != "fixed" and width != 1:
            raise ValueError(f"width: of kind 'fixed' alone, expected 1 for kind {kind!r}, got {width}")
        if heads % 2 and not merged:
            raise ValueError(f"heads: expected an even number, half for each pattern, got {heads}")
        std = STD / math.sqrt(d_model)
        body = {"norm": norm, "activation": activation, "embedding_std": std, **body}
        grid = GridPositions(context, d_model, stride, std / math.sqrt(2), key.fold("positions"))
        kept = grid if positions == "grid" else positions
        super().__init__(vocab_size, d_model, heads, depth, context, key, positions=kept, **body)
        near, far = KINDS[kind](stride, width)
        self.pattern = near | far if merged else ops.Heads(near, far)
        for name, layer in self.named_layers():
            if isinstance(layer, Linear) and layer is not self.output:
                start(layer, math.sqrt(2 * depth) if name.endswith((".unify", ".down")) else 1, key.fold(name))


def start(layer: Linear, smaller: float, key: Key) -> None:
    """Draw the weights of a layer as they stand before training, `smaller` times smaller; its bias is 0."""
    std = np.float32(STD / math.sqrt(layer.w.data.shape[0]) / smaller)
    layer.w.data[...] = std * key.generator().standard_normal(layer.w.data.shape, np.float32)
    if layer.b is not None:
        layer.b.data[...] = 0

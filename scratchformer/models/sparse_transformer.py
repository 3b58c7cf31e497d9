"""The sparse transformer: a language model for long sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import ops
from ..checks import expect_one_of, expect_positive
from ..nn import GridPositions, Linear
from ..rng import Key, fold
from .language_model import LanguageModel

STD = 0.125  # times 1/√fan-in: the standard deviation of the initial weights
KINDS = {
    "strided": lambda stride, window, width: (ops.Local(window - 1), ops.Strided(stride)),
    "fixed": lambda stride, window, width: (ops.SameBlock(stride), ops.BlockEnds(stride, width)),
}


class SparseTransformer(LanguageModel):
    """A language model in which a position attends not to all n positions before it but to a few times √n of them.

    The differences from `LanguageModel`, with reasons:

    - Attention is factorised. Half of the heads see nearby positions, and the other half see a few positions
      everywhere, chosen so that two steps lead from any position to any later one. With a stride near √n, a block costs
      O(n √n) instead of O(n²).
      kind "strided": the last `stride` positions, and those at multiples of `stride` before, for data with rows: in an
      image `stride` pixels wide, the row and the column. kind "fixed": the query's own block of `stride` positions, and
      the last `width` positions of every block, where a model of text can store a summary of the block.
    - Positions are the row and the column in a grid `stride` wide. Its tables are much smaller than one of n vectors,
      and are trained by every row and every column.
    - The norm comes before each branch, the activation is GELU, and the initial weights are small, so that many blocks
      can be trained: normal with standard deviation 0.125/√fan-in (token and position vectors have fan-in C, and the
      two that form a position 2 C), with biases 0. The 2 · depth maps that end a branch, whose outputs are added up,
      are smaller by √(2 depth). The output map starts as in `LanguageModel`; the paper's starts at 0, from where small
      models learn slowly.

    vocab_size: V (256 for bytes). d_model, heads, depth: C, H (even) and the number of blocks. context:
    the longest sequence. width: for kind "fixed"; must be 1 for the other. window: for kind "strided", how many
    positions, itself included, the nearby heads see; None for stride + 1, as in the paper. With fewer than `stride`,
    some earlier positions are out of reach. positions: "grid", or one of those of `Body`. `body`: the other options of
    `Body` except causal, such as dropout, wide, d_ff, bias, eps, recompute. With relative positions, kind "fixed"
    cannot be tiled: attention is then the reference, whose memory grows with n².

    During generation, when the context slides, blocks and grid are counted again from the first token that is kept.
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
        window: int | None = None,
        positions: str = "grid",
        norm: str = "pre",
        activation: ops.Activation = "gelu",
        key: Key = Key(0),
        **body: Any,
    ) -> None:
        expect_positive(d_model=d_model, heads=heads, depth=depth, context=context, stride=stride, width=width)
        expect_one_of("kind", kind, KINDS)
        if kind != "fixed" and width != 1:
            raise ValueError(f"width: only for kind 'fixed', expected 1 for kind {kind!r}, got {width}")
        if window is not None:
            expect_positive(window=window)
            if kind != "strided":
                raise ValueError(f"window: only for kind 'strided', expected None for kind {kind!r}, got {window}")
        if heads % 2:
            raise ValueError(f"heads: expected an even number, half for each pattern, got {heads}")
        std = STD / math.sqrt(d_model)
        body = {"norm": norm, "activation": activation, "embedding_std": std, **body}
        grid = GridPositions(context, d_model, stride, std / math.sqrt(2), fold(key, "positions"))
        kept = grid if positions == "grid" else positions
        super().__init__(vocab_size, d_model, heads, depth, context, key, positions=kept, **body)
        self.config["embedding_std"] = body["embedding_std"]
        near, far = KINDS[kind](stride, stride + 1 if window is None else window, width)
        self.pattern = ops.Heads(near, far)
        for name, layer in self.named_layers():
            if isinstance(layer, Linear) and layer is not self.output:
                start(layer, math.sqrt(2 * depth) if name.endswith((".unify", ".down")) else 1, fold(key, name))


def start(layer: Linear, smaller: float, key: Key) -> None:
    """Draw the initial weights of a layer, `smaller` times smaller than usual, and set its bias to 0."""
    std = np.float32(STD / math.sqrt(layer.w.data.shape[0]) / smaller)
    layer.w.data[...] = std * key.generator().standard_normal(layer.w.data.shape, np.float32)
    if layer.b is not None:
        layer.b.data[...] = 0

"""What the classifier and the language model share: from token ids to a vector for each position."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array
from ..nn import (
    Dropout,
    Layer,
    LayerNorm,
    PositionEmbedding,
    Recompute,
    SinusoidalPositions,
    TokenEmbedding,
    TransformerBlock,
)
from ..ops.checks import expect_positive, expect_shape
from ..rng import Key


class BodyCache(NamedTuple):
    tokens: Any
    positions: Any
    dropout: Any
    blocks: list
    final_norm: Any


class Body(Layer):
    """Token embedding + positions, dropout, blocks, and for pre-norm blocks a last layer norm.

    ids: (B, T) with T ≤ max_length. Returns (B, T, C).
    positions: "learned", "sinusoidal" or "none". recompute: gradient checkpointing of every block.
    embedding_std: of the tokens' and positions' vectors at the start (1 as in the tutorial).
    The other arguments are those of `TransformerBlock`.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        norm: str = "post",
        positions: str = "learned",
        dropout: float = 0.0,
        causal: bool = False,
        wide: bool = False,
        d_ff: int | None = None,
        activation: str = "relu",
        bias: bool = False,
        recompute: bool = False,
        embedding_std: float = 1.0,
        key: Key = Key(0),
    ) -> None:
        kinds = {
            "learned": lambda: PositionEmbedding(max_length, d_model, embedding_std, key.fold("positions")),
            "sinusoidal": SinusoidalPositions,
            "none": lambda: None,
        }
        if positions not in kinds:
            raise ValueError(f"positions: expected one of {', '.join(kinds)}, got {positions!r}")
        expect_positive(vocab_size=vocab_size, d_model=d_model, heads=heads, depth=depth, max_length=max_length)
        self.max_length = max_length
        self.tokens = TokenEmbedding(vocab_size, d_model, embedding_std, key.fold("tokens"))
        self.positions = kinds[positions]()
        self.dropout = Dropout(dropout)
        blocks = [
            TransformerBlock(d_model, heads, norm, causal, wide, d_ff, activation, dropout, bias, key.fold("block", i))
            for i in range(depth)
        ]
        self.blocks = [Recompute(block) for block in blocks] if recompute else blocks
        self.final_norm = LayerNorm(d_model) if norm == "pre" else None

    def forward(
        self, ids: Array, pattern: ops.Pattern | None = None, key: Key | None = None
    ) -> tuple[Array, BodyCache]:
        self.check(ids)
        positions = final_norm = None
        x, tokens = self.tokens.forward(ids)
        if self.positions is not None:
            x, positions = self.positions.forward(x)
        x, dropout = self.dropout.forward(x, None if key is None else key.fold("embedding"))
        caches = []
        for i, block in enumerate(self.blocks):
            x, cache = block.forward(x, pattern=pattern, key=None if key is None else key.fold("block", i))
            caches.append(cache)
        if self.final_norm is not None:
            x, final_norm = self.final_norm.forward(x)
        return x, BodyCache(tokens, positions, dropout, caches, final_norm)

    def backward(self, dx: Array, cache: BodyCache) -> None:
        if self.final_norm is not None:
            dx = self.final_norm.backward(dx, cache.final_norm)
        for block, block_cache in zip(reversed(self.blocks), reversed(cache.blocks), strict=True):
            dx = block.backward(dx, block_cache)
        dx = self.dropout.backward(dx, cache.dropout)
        if self.positions is not None:
            dx = self.positions.backward(dx, cache.positions)
        self.tokens.backward(dx, cache.tokens)

    def extend(self, ids: Array, keys: list[Array], values: list[Array], past: int) -> Array:
        """The vectors of new tokens ids (B, T) behind `past` stored ones: see `SelfAttention.extend`."""
        self.check(ids, past)
        x = self.tokens(ids)
        if self.positions is not None:
            x = self.positions(x, start=past)
        for block, k, v in zip(self.blocks, keys, values, strict=True):
            x = block.extend(x, k, v, past)
        return x if self.final_norm is None else self.final_norm(x)

    def check(self, ids: Array, past: int = 0) -> None:
        """Raise ValueError unless ids are (B, T) with T ≥ 1 and room for `past` + T tokens."""
        expect_shape("ids", ids, "B T")
        if not ids.shape[1]:
            raise ValueError(f"ids: expected (B, T) with T >= 1, got {tuple(ids.shape)}")
        if past + ids.shape[1] > self.max_length:
            raise ValueError(f"ids: expected (B, T) with T up to {self.max_length}, got {past + ids.shape[1]} tokens")

"""What the classifier and the language model share: from token ids, or units, to a vector for each position."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array
from ..nn import (
    Dropout,
    Layer,
    LayerNorm,
    Linear,
    PositionEmbedding,
    Recompute,
    SinusoidalPositions,
    TokenEmbedding,
    TransformerBlock,
)
from ..ops.checks import expect_boolean, expect_floating, expect_number, expect_positive, expect_shape
from ..rng import Key
from .model import Model


class BodyCache(NamedTuple):
    tokens: Any
    positions: Any
    dropout: Any
    blocks: list
    final_norm: Any
    block_inputs: list  # with a memory, what each block was given, (B, T, C)


class Body(Model):
    """Token embedding + positions, dropout, blocks, and for pre-norm blocks a last layer norm.

    ids: (B, T) with T ≤ max_length. Returns (B, T, C). With units=I and no vocab_size, the units of a sequence are not
    tokens but vectors (B, T, I), and a linear layer takes the place of the token embedding; then backward gives their
    gradient, for ids None.
    positions: "learned", "sinusoidal", "relative" (in every block's attention), "none", or a layer that adds some.
    recompute: gradient checkpointing of every block. embedding_std: of the tokens' and positions' vectors at the start
    (1 as in the tutorial). The other arguments are those of `TransformerBlock`.
    """

    def __init__(
        self,
        vocab_size: int | None,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        norm: str = "post",
        positions: str | Layer = "learned",
        dropout: float = 0.0,
        causal: bool = False,
        wide: bool = False,
        d_ff: int | None = None,
        activation: str = "relu",
        bias: bool = False,
        eps: float = 1e-5,
        recompute: bool = False,
        embedding_std: float = 1.0,
        units: int | None = None,
        key: Key = Key(0),
    ) -> None:
        kinds = {
            "learned": lambda: PositionEmbedding(max_length, d_model, embedding_std, key.fold("positions")),
            "sinusoidal": SinusoidalPositions,
            "relative": lambda: None,
            "none": lambda: None,
        }
        if positions not in kinds and not isinstance(positions, Layer):
            raise ValueError(f"positions: expected one of {', '.join(kinds)}, got {positions!r}")
        if (vocab_size is None) == (units is None):
            raise ValueError(f"vocab_size, units: expected one of the two, got {vocab_size} and {units}")
        expect_positive(d_model=d_model, heads=heads, depth=depth, max_length=max_length)
        expect_boolean(recompute=recompute)
        expect_number("embedding_std", embedding_std)
        self.max_length, self.units, self.d_model = max_length, units, d_model
        if units is None:
            self.tokens = TokenEmbedding(vocab_size, d_model, embedding_std, key.fold("tokens"))
        else:
            self.tokens = Linear(units, d_model, key=key.fold("tokens"))
        self.positions = positions if isinstance(positions, Layer) else kinds[positions]()
        self.dropout = Dropout(dropout)
        self.relative = positions == "relative"
        options = (norm, causal, wide, d_ff, activation, dropout, bias, eps)
        blocks = [TransformerBlock(d_model, heads, *options, key.fold("block", i), self.relative) for i in range(depth)]
        self.blocks = [Recompute(block) for block in blocks] if recompute else blocks
        self.final_norm = LayerNorm(d_model, eps) if norm == "pre" else None

    def forward(
        self,
        ids: Array,
        pattern: ops.Pattern | None = None,
        key: Key | None = None,
        memory: Array | None = None,
    ) -> tuple[Array, BodyCache]:
        """memory: (B, depth, M, C), for each block what stood before its input; see `TransformerBlock`."""
        self.check(ids)
        if memory is not None:
            expect_shape("memory", memory, "B depth M C", B=ids.shape[0], depth=len(self.blocks), C=self.d_model)
        positions = final_norm = None
        x, tokens = self.tokens.forward(ids)
        if self.positions is not None:
            x, positions = self.positions.forward(x)
        x, dropout = self.dropout.forward(x, None if key is None else key.fold("embedding"))
        caches, inputs = [], []
        for i, block in enumerate(self.blocks):
            options = {"pattern": pattern, "key": None if key is None else key.fold("block", i)}
            if memory is not None:
                options["memory"] = memory[:, i]
                inputs.append(x)
            x, cache = block.forward(x, **options)
            caches.append(cache)
        if self.final_norm is not None:
            x, final_norm = self.final_norm.forward(x)
        return x, BodyCache(tokens, positions, dropout, caches, final_norm, inputs)

    def backward(self, dx: Array, cache: BodyCache) -> Array | None:
        if self.final_norm is not None:
            dx = self.final_norm.backward(dx, cache.final_norm)
        for block, block_cache in zip(reversed(self.blocks), reversed(cache.blocks), strict=True):
            dx = block.backward(dx, block_cache)
        dx = self.dropout.backward(dx, cache.dropout)
        if self.positions is not None:
            dx = self.positions.backward(dx, cache.positions)
        return self.tokens.backward(dx, cache.tokens)

    def extend(
        self, ids: Array, keys: list[Array], values: list[Array], past: int, pattern: ops.Pattern | None = None
    ) -> Array:
        """The vectors of new tokens ids (B, T) after `past` stored ones: see `SelfAttention.extend`."""
        self.check(ids, past)
        x = self.tokens(ids)
        if self.positions is not None:
            x = self.positions(x, start=past)
        for block, k, v in zip(self.blocks, keys, values, strict=True):
            x = block.extend(x, k, v, past, pattern)
        return x if self.final_norm is None else self.final_norm(x)

    def check(self, ids: Array, past: int = 0) -> None:
        """Raise ValueError unless ids are (B, T), or units (B, T, I), with T ≥ 1 and room for `past` + T of them."""
        name, letters, what = ("ids", "B T", "tokens") if self.units is None else ("units", "B T I", "units")
        if self.units is not None:
            expect_floating(units=ids)
        expect_shape(name, ids, letters, I=self.units)
        expected = f"{name}: expected ({letters.replace(' ', ', ')}) with T"
        if not ids.shape[1]:
            raise ValueError(f"{expected} >= 1, got {tuple(ids.shape)}")
        if past + ids.shape[1] > self.max_length:
            raise ValueError(f"{expected} up to {self.max_length}, got {past + ids.shape[1]} {what}")

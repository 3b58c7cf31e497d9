"""The transformer of "Attention is all you need": from a text in one language to its translation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .. import ops
from ..backend import Array
from ..nn import (
    DecoderBlock,
    Dropout,
    LayerNorm,
    SinusoidalPositions,
    TiedOutput,
    TokenEmbedding,
    TransformerBlock,
)
from ..ops.checks import expect_fraction, expect_lengths, expect_positive, expect_range, expect_shape
from ..ops.cross_entropy import IGNORED
from ..rng import Key
from .model import Model


class SideCache(NamedTuple):
    tokens: Any
    positions: Any
    dropout: Any
    blocks: list
    final_norm: Any


class EncoderDecoderCache(NamedTuple):
    encoder: SideCache
    decoder: SideCache
    output: Any


class EncoderDecoder(Model):
    """Source ids -> encoder -> memory; target ids so far -> decoder, which looks at the memory -> the next target id.

    Unlike the language model it has two texts. The encoder reads the source whole, every place seeing every other, as
    the classifier does. The decoder writes the target as the language model does, each place seeing those before it,
    and in every block it also attends to what the encoder made of the source. In training the decoder is given the true
    target (teacher forcing), so that all places are predicted in one forward; when it translates it is given what it
    has written.

    vocab_size: V, of one vocabulary for both languages. d_model, heads, d_ff: C, H and F. depth: blocks of the encoder,
    and of the decoder. dropout: on what every part of a block returns, and on the sum of embedding and position, as in
    section 5.4. One table (V, C) embeds source and target, scaled by √C, and transposed it is the output (section 3.4):
    see `nn.TiedOutput`. It starts normal with deviation 1/√C, so that embeddings start with deviation 1, as large as
    positions, and logits with that of the decoder's output. Positions are sinusoidal: texts may be of any length.
    label_smoothing: of the training loss. norm: "post" as in the paper, or "pre", with a norm after the last blocks.

    Source: Vaswani et al., "Attention is all you need", 2017.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        d_ff: int | None = None,
        norm: str = "post",
        activation: str = "relu",
        dropout: float = 0.1,
        bias: bool = True,
        eps: float = 1e-5,
        label_smoothing: float = 0.1,
        key: Key = Key(0),
    ) -> None:
        block = dict(norm=norm, d_ff=d_ff, activation=activation, dropout=dropout, bias=bias, eps=eps)
        self.config = dict(
            vocab_size=vocab_size, d_model=d_model, heads=heads, depth=depth, label_smoothing=label_smoothing, **block
        )
        expect_positive(vocab_size=vocab_size, d_model=d_model, heads=heads, depth=depth)
        expect_fraction("label_smoothing", label_smoothing)
        self.label_smoothing, self.scale = label_smoothing, math.sqrt(d_model)
        self.tokens = TokenEmbedding(vocab_size, d_model, 1 / self.scale, key.fold("tokens"))
        self.positions = SinusoidalPositions()
        self.dropout = Dropout(dropout)
        self.encoder = [TransformerBlock(d_model, heads, key=key.fold("encoder", i), **block) for i in range(depth)]
        self.encoder_norm = LayerNorm(d_model, eps) if norm == "pre" else None
        self.decoder = [DecoderBlock(d_model, heads, key=key.fold("decoder", i), **block) for i in range(depth)]
        self.decoder_norm = LayerNorm(d_model, eps) if norm == "pre" else None
        self.output = TiedOutput(self.tokens)

    def forward(
        self, source: Array, lengths: Array, target: Array, key: Key | None = None
    ) -> tuple[Array, EncoderDecoderCache]:
        """Logits (B, T, V): those at [b, t] predict the target after target[b, t].

        source: (B, S), whose text b ends after lengths[b] tokens, from 1 to S. target: (B, T), beginning with a token
        that stands for the beginning. What stands after a target's end changes nothing before it.
        """
        expect_tokens("source", source)
        expect_tokens("target", target, B=source.shape[0])
        memory, encoder = self.encode(source, lengths, key)
        pattern = ops.Padding(lengths)
        x, tokens, positions, dropout = self.embed(target, None if key is None else key.fold("target"))
        caches = []
        for i, block in enumerate(self.decoder):
            x, cache = block.forward(x, memory, pattern, None if key is None else key.fold("decoder", i))
            caches.append(cache)
        x, final_norm = (x, None) if self.decoder_norm is None else self.decoder_norm.forward(x)
        logits, output = self.output.forward(x)
        decoder = SideCache(tokens, positions, dropout, caches, final_norm)
        return logits, EncoderDecoderCache(encoder, decoder, output)

    def backward(self, dlogits: Array, cache: EncoderDecoderCache) -> None:
        """The memory went to every block of the decoder: its gradient is the sum of what they return."""
        encoder, decoder, output = cache
        dx = self.output.backward(dlogits, output)
        if self.decoder_norm is not None:
            dx = self.decoder_norm.backward(dx, decoder.final_norm)
        dmemory = 0
        for block, block_cache in zip(reversed(self.decoder), reversed(decoder.blocks), strict=True):
            dx, d = block.backward(dx, block_cache)
            dmemory = dmemory + d
        self.embed_backward(dx, decoder)
        dx = dmemory
        if self.encoder_norm is not None:
            dx = self.encoder_norm.backward(dx, encoder.final_norm)
        for block, block_cache in zip(reversed(self.encoder), reversed(encoder.blocks), strict=True):
            dx = block.backward(dx, block_cache)
        self.embed_backward(dx, encoder)

    def encode(self, source: Array, lengths: Array, key: Key | None = None) -> tuple[Array, SideCache]:
        """The memory (B, M, C) of source (B, S), with M = S; raises ValueError or TypeError as `forward` does."""
        expect_tokens("source", source)
        expect_lengths(lengths, B=source.shape[0])
        expect_range("lengths", lengths, 1, source.shape[1])
        pattern = ops.Padding(lengths)
        x, tokens, positions, dropout = self.embed(source, None if key is None else key.fold("source"))
        caches = []
        for i, block in enumerate(self.encoder):
            x, cache = block.forward(x, pattern, None if key is None else key.fold("encoder", i))
            caches.append(cache)
        x, final_norm = (x, None) if self.encoder_norm is None else self.encoder_norm.forward(x)
        return x, SideCache(tokens, positions, dropout, caches, final_norm)

    def embed(self, ids: Array, key: Key | None = None, start: int = 0) -> tuple[Array, Any, Any, Any]:
        """√C table[ids] + positions, with dropout, and the three caches."""
        x, tokens = self.tokens.forward(ids)
        x, positions = self.positions.forward(self.scale * x, start)
        x, dropout = self.dropout.forward(x, key)
        return x, tokens, positions, dropout

    def embed_backward(self, dx: Array, cache: SideCache) -> None:
        """Add the gradient of the table from one of its uses as an input, of dx (B, T, C)."""
        dx = self.positions.backward(self.dropout.backward(dx, cache.dropout), cache.positions)
        self.tokens.backward(self.scale * dx, cache.tokens)

    def loss(
        self, source: Array, lengths: Array, target: Array, targets: Array, key: Key | None = None
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats a token, of targets (B, T), the token after each of target (B, T).

        A target of `ops.IGNORED` does not count. With a key, while training, labels are smoothed.
        """
        logits, forward = self.forward(source, lengths, target, key)
        smoothing = 0.0 if key is None else self.label_smoothing
        loss, cross_entropy = ops.cross_entropy(logits, targets, IGNORED, smoothing)
        return loss, (forward, cross_entropy)

    def loss_backward(self, dloss: float, cache: tuple) -> None:
        """Add dloss · ∂loss/∂w to the gradient of every parameter w."""
        forward, cross_entropy = cache
        self.backward(ops.cross_entropy_backward(dloss, cross_entropy), forward)

    def extend(
        self,
        ids: Array,
        keys: list[Array],
        values: list[Array],
        past: int,
        memory: list[tuple[Array, Array]],
        pattern: ops.Pattern,
    ) -> Array:
        """Logits (B, T, V) of new target tokens ids (B, T) after `past` stored ones: see `generation.DecoderCache`.

        memory: for each block of the decoder what its `cross.project` made of the encoder's output.
        """
        x, *_ = self.embed(ids, start=past)
        for block, k, v, m in zip(self.decoder, keys, values, memory, strict=True):
            x = block.extend(x, k, v, past, m, pattern)
        return self.output(x if self.decoder_norm is None else self.decoder_norm(x))


def expect_tokens(name: str, ids: Array, **sizes: int) -> None:
    """Raise ValueError unless ids are (B, T), of the B given, with T ≥ 1."""
    expect_shape(name, ids, "B T", **sizes)
    if not ids.shape[1]:
        raise ValueError(f"{name}: expected (B, T) with T >= 1, got {tuple(ids.shape)}")

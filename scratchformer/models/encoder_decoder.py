"""The transformer of "Attention is all you need", which translates a text from one language to another."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .. import nn, ops
from ..backend import Array
from ..checks import expect_fraction, expect_ids, expect_lengths, expect_positive, expect_range, expect_shape
from ..nn.block import Stored
from ..nn.embedding import extend_output
from ..nn.layer import Part, expect_backward, repeated
from ..ops.cross_entropy import IGNORED, counted_targets
from ..rng import Key, fold
from .body import BodyCache
from .predictor import Predictor


class EncoderDecoderCache(NamedTuple):
    encoder: BodyCache
    decoder: BodyCache
    output: Any


class EncoderDecoder(Predictor):
    """Source ids -> encoder -> memory; target ids so far -> decoder, which attends to the memory -> next target id.

    Unlike the language model, it works on two texts. The encoder reads the whole source, with every position attending
    to every other, as in the classifier. The decoder produces the target like the language model, with each position
    attending to those before it, and in every block it also attends to the output of the encoder. In training the
    decoder is given the true target (teacher forcing), so that one forward predicts all positions; when translating, it
    is given its own output so far.

    vocab_size: V, of one vocabulary for both languages. d_model, heads, d_ff: C, H and F. depth: the number of blocks
    in the encoder, and in the decoder. dropout: on the output of every branch of a block, and on the sum of embedding
    and position, as in section 5.4. One table (V, C), scaled by √C, embeds source and target, and its transpose is the
    output map (section 3.4): see `nn.TiedOutput`. It is initially normal with standard deviation 1/√C. So embeddings
    start with deviation 1, as large as the positions, and logits with the deviation of the decoder's output. Positions
    are sinusoidal, so texts can have any length. label_smoothing: of the training loss. norm: "post", as in the paper,
    or "pre", with a norm after the last blocks.

    Forward. The table's rows enter the encoder as u and the decoder as w, and the table turns vectors into logits. Here
    the encoder and the decoder start with the positions and dropout:

        u_bsc = √C table_vc with v = source_bs        w_btc = √C table_vc with v = target_bt
        memory = encoder(u)        x = decoder(w, memory)        logits_btv = Σ_c x_btc table_vc

    Backward. The memory goes to every block of the decoder. Its gradient, the sum over the blocks (see `Stack`), is all
    that reaches the encoder:

        dx_btc = Σ_v dlogits_btv table_vc        dw = decoder_backward(dx, w, memory)
        dmemory = decoder_backward_memory(dx, w, memory)        du = encoder_backward(dmemory, u)

    The table is used three times, and its gradient is the sum over the three uses (see `TiedOutput`):

        dtable_vc = Σ_b Σ_t dlogits_btv x_btc + √C Σ_b Σ_t [target_bt = v] dw_btc + √C Σ_b Σ_s [source_bs = v] du_bsc

    The loss is that of a `Predictor`.

    Source: Vaswani et al., "Attention is all you need", 2017.
    """

    tokens, positions = Part("embedding.embeddings.0"), Part("embedding.positions")
    dropout = Part("embedding.dropout")
    encoder, encoder_norm = Part("encoder_stack.blocks"), Part("encoder_stack.norm")
    decoder, decoder_norm = Part("decoder_stack.blocks"), Part("decoder_stack.norm")
    recompute = Part("encoder_stack.recompute", "decoder_stack.recompute")

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        d_ff: int | None = None,
        norm: str = "post",
        activation: ops.Activation = "relu",
        dropout: float = 0.1,
        bias: bool = True,
        eps: float = 1e-5,
        label_smoothing: float = 0.1,
        key: Key = Key(0),
    ) -> None:
        block: dict[str, Any] = dict(norm=norm, d_ff=d_ff, activation=activation, dropout=dropout, bias=bias, eps=eps)
        expect_positive(vocab_size=vocab_size, d_model=d_model, heads=heads, depth=depth)
        expect_fraction("label_smoothing", label_smoothing)
        self.label_smoothing, scale = label_smoothing, math.sqrt(d_model)
        tokens = nn.TokenEmbedding(vocab_size, d_model, 1 / scale, fold(key, "tokens"))
        expect_fraction("dropout", dropout, letter="p")
        self.embedding = nn.EmbeddingSum([tokens], nn.SinusoidalPositions(), dropout=nn.Dropout(dropout), scale=scale)
        encoder = repeated(lambda i: nn.TransformerBlock(d_model, heads, key=fold(key, "encoder", i), **block), depth)
        self.encoder_stack = nn.Stack(encoder, nn.LayerNorm(d_model, eps) if norm == "pre" else None)
        decoder = repeated(lambda i: nn.DecoderBlock(d_model, heads, key=fold(key, "decoder", i), **block), depth)
        self.decoder_stack = nn.Stack(decoder, nn.LayerNorm(d_model, eps) if norm == "pre" else None)
        self.output: nn.Layer = nn.TiedOutput(tokens)

    def forward(
        self, source: Array, lengths: Array, target: Array, key: Key | None = None
    ) -> tuple[Array, EncoderDecoderCache]:
        """Logits (B, T, V): those at [b, t] predict the token after target[b, t].

        source: (B, S), whose text b ends after lengths[b] tokens, from 1 to S. target: (B, T), each row starting with a
        token that marks the beginning. Tokens after the end of a target do not change the logits before it.
        """
        expect_tokens("source", source)
        expect_tokens("target", target, B=source.shape[0])
        memory, encoder = self.encode(source, lengths, key)
        x, embedding = self.embedding.forward(target, key=fold(key, "target"))
        x, stack = self.decoder_stack.forward(x, memory, key=fold(key, "decoder"), pattern=ops.Padding(lengths))
        logits, output = self.output.forward(x)
        return logits, EncoderDecoderCache(encoder, BodyCache(embedding, stack), output)

    def backward(self, dlogits: Array, cache: EncoderDecoderCache) -> None:
        """The memory goes to every block of the decoder; `Stack` returns the sum of its gradients, or None if the last
        blocks are `Frozen`, since what precedes them is not trained.
        """
        expect_backward(cache, EncoderDecoderCache, dlogits=dlogits)
        encoder, decoder, output = cache
        gradients = self.decoder_stack.backward(self.output.backward(dlogits, output), decoder.stack)
        if gradients is None:
            return
        dx, dmemory = gradients
        self.embedding.backward(dx, decoder.embedding)
        self.embedding.backward(self.encoder_stack.backward(dmemory, encoder.stack), encoder.embedding)

    def encode(self, source: Array, lengths: Array, key: Key | None = None) -> tuple[Array, BodyCache]:
        """The memory (B, M, C) of source (B, S), with M = S; raises ValueError or TypeError like `forward`."""
        self.check_source(source, lengths)
        x, embedding = self.embedding.forward(source, key=fold(key, "source"))
        x, stack = self.encoder_stack.forward(x, key=fold(key, "encoder"), pattern=ops.Padding(lengths))
        return x, BodyCache(embedding, stack)

    def check_source(self, source: Array, lengths: Array) -> None:
        """Raise ValueError or TypeError unless source (B, S) are tokens and lengths (B,) theirs."""
        expect_tokens("source", source)
        expect_lengths(lengths, B=source.shape[0])
        expect_range("lengths", lengths, 1, source.shape[1])

    def loss(
        self, source: Array, lengths: Array, target: Array, targets: Array, key: Key | None = None
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats per token, of targets (B, T), the token after each of target (B, T).

        Targets equal to `ops.IGNORED` do not count. With a key, in training, labels are smoothed.
        """
        logits, forward = self.forward(source, lengths, target, key)
        smoothing = 0.0 if key is None else self.label_smoothing
        loss, cross_entropy = ops.cross_entropy(logits, targets, IGNORED, smoothing)
        return loss, (forward, cross_entropy)

    def check_batch(self, source: Array, lengths: Array, target: Array, targets: Array) -> None:
        """Raise an error for an argument of `loss` that is out of range: see `Predictor`."""
        self.check_source(source, lengths)
        V = self.config["vocab_size"]
        for ids in source, target:
            expect_ids("ids", ids, V)
        counted_targets(targets, V, IGNORED)

    def extend(
        self, ids: Array, stored: list[Stored], past: int, memory: list[tuple[Array, Array]], pattern: ops.Pattern
    ) -> Array:
        """Logits (B, T, V) of new target tokens ids (B, T) after `past` stored ones: see `generation.DecoderCache`.

        memory: for each block of the decoder, the keys and values that its `cross.project` returns for the encoder's
        output.
        """
        x, _ = self.embedding.forward(ids, start=past)
        return extend_output(self.decoder_stack.extend(x, stored, past, memory, pattern=pattern), self.output)


def expect_tokens(name: str, ids: Array, **sizes: int) -> None:
    """Raise ValueError unless ids are (B, T) with T ≥ 1, and with the given B."""
    expect_shape(name, ids, "B T", **sizes)
    if not ids.shape[1]:
        raise ValueError(f"{name}: expected (B, T) with T >= 1, got {tuple(ids.shape)}")

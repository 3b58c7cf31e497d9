"""Transformer-XL: a text read segment after segment, with a memory of the segments before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .. import ops
from ..backend import Array, array_module
from ..nn import Linear
from ..ops.checks import expect_at_least, expect_positive
from ..ops.cross_entropy import IGNORED
from ..rng import Key
from .body import Body
from .language_model import LanguageModel, LanguageModelCache


class TransformerXL(LanguageModel):
    """The language model with a memory: it reads a text in segments, and in each layer sees what stood before.

    vocab_size, d_model, heads, depth: as in `LanguageModel`. context: T, the tokens of a segment. memory: how many
    vectors of the past each layer keeps from one segment to the next; 0 for none. `body` takes the remaining options
    of `LanguageModel` but positions.

    What changed from the language model, and why.

    1. It has no window that starts from nothing. There the first predictions of every window know hardly any text,
       and no prediction more than the context. Here the vectors that entered block l in the segments before are kept,
       and block l makes keys and values of them, [memory, x], as if the text had been longer. A vector in the memory
       has itself seen a memory, so what a prediction depends on grows by a memory's length with every layer.
    2. The memory is a constant: no gradient goes back into the segment before, whose caches are gone. A step costs what
       a segment costs, however long the text.
    3. Positions are relative, in every block's attention (`nn.RelativeSelfAttention`). Vectors of absolute places would
       tell the model that the memory's last token and the segment's last token stand at one place. Distances fit any
       length, so the memory may be longer in evaluation than it was in training.
    4. Training goes through the text in order (`data.SegmentBatches`), so that each segment meets the memory of the
       one before it.

    Source: Dai et al., "Transformer-XL: attentive language models beyond a fixed-length context", 2019.
    """

    fixed: ClassVar[Mapping[str, str]] = {**LanguageModel.fixed, "positions": "has relative ones"}

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        context: int,
        memory: int,
        key: Key = Key(0),
        **body: Any,
    ) -> None:
        expect_positive(context=context)
        expect_at_least(0, memory=memory)
        self.context, self.memory = context, memory
        length = context + memory  # what attention sees at once
        body_key = key.fold("body")
        self.body = Body(
            vocab_size, d_model, heads, depth, length, positions="relative", causal=True, key=body_key, **body
        )
        self.output = Linear(d_model, vocab_size, key=key.fold("output"))

    def forward(
        self, ids: Array, memory: Array | None = None, key: Key | None = None
    ) -> tuple[Array, LanguageModelCache]:
        """Logits (B, T, V) of a segment ids (B, T) after a memory (B, depth, M, C), of any length M; None for none.

        The memory of the next segment is `remember(cache)`. Raises TypeError for a memory of another type than the
        model's, unless it is empty.
        """
        if memory is None:
            memory = self.nothing(ids)
        dtype = self.body.tokens.table.data.dtype
        if (found := getattr(memory, "dtype", dtype)) != dtype:
            if memory.size:
                raise TypeError(f"memory: expected {dtype}, as the model is, got {found}")
            memory = memory.astype(dtype)
        x, body = self.body.forward(ids, key=key, memory=memory)
        logits, output = self.output.forward(x)
        return logits, LanguageModelCache(body, output, memory)

    def nothing(self, ids: Array) -> Array:
        """The memory (B, depth, 0, C) before the first segment ids (B, T)."""
        table = self.body.tokens.table.data
        return array_module(ids, table).zeros((ids.shape[0], len(self.body.blocks), 0, table.shape[1]), table.dtype)

    def remember(self, cache: LanguageModelCache, length: int | None = None) -> Array:
        """The memory (B, depth, M, C) for the next segment, from the cache of a forward.

        For each layer it has the last M vectors of the old memory and the segment together. M is `length`, by default
        that of training, or less if there are fewer vectors. They share no memory with the cache.
        """
        length = self.memory if length is None else length
        expect_at_least(0, length=length)
        (B, depth, M, C), T = cache.memory.shape, cache.body.stack.block_inputs[0].shape[1]
        kept = min(length, M + T)
        new = min(kept, T)
        memory = array_module(cache.memory).empty((B, depth, kept, C), cache.body.stack.block_inputs[0].dtype)
        memory[:, :, : kept - new] = cache.memory[:, :, M - (kept - new) :]
        for layer, x in enumerate(cache.body.stack.block_inputs):
            memory[:, layer, kept - new :] = x[:, T - new :]
        return memory

    def loss(
        self, ids: Array, targets: Array, memory: Array | None = None, key: Key | None = None
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats a token, of targets (B, T), the token after each of a segment ids (B, T).

        A target of `ops.IGNORED` does not count. memory: see `forward`. The cache begins with that of `forward`.
        """
        logits, forward = self.forward(ids, memory, key)
        loss, cross_entropy = ops.cross_entropy(logits, targets, ignore_index=IGNORED)
        return loss, (forward, cross_entropy)

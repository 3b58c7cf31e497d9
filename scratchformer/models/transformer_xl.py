"""Transformer-XL: a language model that reads a text in segments, with a memory of earlier segments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..backend import Array, array_module
from ..checks import expect_at_least, expect_instance, expect_positive, expect_shape
from ..rng import Key
from .language_model import LanguageModel, LanguageModelCache


class TransformerXL(LanguageModel):
    """A language model with a memory: it reads a text in segments, and each layer also sees its inputs from before.

    vocab_size, d_model, heads, depth: as in `LanguageModel`. context: T, the tokens of a segment. memory: how many
    past vectors each layer keeps from one segment to the next; 0 for none. `body`: the other options of
    `LanguageModel`, except positions.

    The differences from `LanguageModel`, with reasons:

    1. Windows do not start without a past. In `LanguageModel` the first predictions of every window are based on hardly
       any text, and no prediction on more than the context. Here the vectors that entered block l in earlier segments
       are kept, and block l computes keys and values from [memory, x], as if the text had been longer. A vector in the
       memory has itself seen a memory, so the range of a prediction grows by the memory's length with every layer.
    2. The memory is constant: no gradient goes back into the previous segment, whose caches are gone. A step costs the
       same however long the text is.
    3. Positions are relative, in the attention of every block (`nn.RelativeSelfAttention`). With absolute positions,
       the last token of the memory and the last token of the segment would have the same position. Distances work for
       any length, so the memory can be longer in evaluation than in training.
    4. Training goes through the text in order (`data.SegmentBatches`), so that each segment is read with the memory of
       the one before.

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
        seen = int(context) + int(memory)  # what attention sees at once
        super().__init__(vocab_size, d_model, heads, depth, seen, key, positions="relative", **body)
        self.context, self.memory = int(context), int(memory)

    def forward(
        self, ids: Array, memory: Array | None = None, key: Key | None = None
    ) -> tuple[Array, LanguageModelCache]:
        """Logits (B, T, V) of a segment ids (B, T) after a memory (B, depth, M, C) of any length M, or None.

        The memory for the next segment is `remember(cache)`. Raises TypeError if the memory is not empty and not of the
        model's dtype.
        """
        if memory is None:
            memory = self.nothing(ids)
        dtype = self.body.tokens.table.data.dtype
        if (got := getattr(memory, "dtype", dtype)) != dtype:
            if memory.size:
                raise TypeError(f"memory: expected {dtype}, the dtype of the model, got {got}")
            memory = memory.astype(dtype)
        x, body = self.body.forward(ids, key=key, memory=memory)
        logits, output = self.output.forward(x)
        return logits, LanguageModelCache(body, output, memory)

    def nothing(self, ids: Array) -> Array:
        """The empty memory (B, depth, 0, C) before the first segment ids (B, T)."""
        expect_shape("ids", ids, "B T")
        table = self.body.tokens.table.data
        return array_module(ids, table).zeros((ids.shape[0], len(self.body.blocks), 0, table.shape[1]), table.dtype)

    def remember(self, cache: LanguageModelCache, length: int | None = None) -> Array:
        """The memory (B, depth, M, C) for the next segment, from the cache of `forward`.

        For each layer it has the last M vectors of the old memory followed by the segment. M is `length`, by default
        the model's `memory`, or less if there are fewer vectors. The arrays of the cache are copied.
        """
        expect_instance("cache", cache, LanguageModelCache)
        if cache.body is None:
            raise ValueError(
                "cache: it has no vectors to remember, since the body is frozen; freeze it by a group instead"
            )
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

    def check_batch(self, ids: Array, targets: Array, memory: Array | None = None) -> None:
        super().check_batch(ids, targets)

    def loss(
        self, ids: Array, targets: Array, memory: Array | None = None, key: Key | None = None
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats per token, of targets (B, T), the token after each of a segment ids (B, T).

        Targets equal to `ops.IGNORED` do not count. memory: see `forward`. The cache begins with that of `forward`.
        """
        return super().loss(ids, targets, key, memory=memory)

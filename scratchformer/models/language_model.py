"""The text-generation transformer, which predicts the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from .. import ops
from ..backend import Array
from ..checks import describe, expect_ids, expect_positive
from ..nn import Layer, Linear
from ..nn.block import Stored
from ..nn.embedding import extend_output
from ..nn.layer import expect_backward
from ..ops.cross_entropy import IGNORED, counted_targets
from ..rng import Key, Zeros, expect_key, fold
from .body import Body
from .predictor import Predictor


class LanguageModelCache(NamedTuple):
    body: Any
    output: Any
    memory: Any = None  # of a TransformerXL, (B, depth, M, C)


class LanguageModel(Predictor):
    """Token ids -> causal body -> linear -> logits of the next token, at every position.

    vocab_size: V (256 for bytes). d_model, heads, depth: C, H and the number of blocks. context: the longest
    sequence. `body`: the other options of `Body`, which are positions, dropout, recompute, embedding_std,
    block, final_norm, and those of the block: norm, wide, d_ff, activation, bias, eps.
    """

    body_class = Body
    fixed: ClassVar[Mapping[str, str]] = {"causal": "always is", "units": "reads tokens"}
    pattern: ops.Pattern | None = None  # of every block, in addition to causal

    def __init__(
        self, vocab_size: int, d_model: int, heads: int, depth: int, context: int, key: Key = Key(0), **body: Any
    ) -> None:
        expect_positive(context=context)
        self.context = int(context)
        self.body = Body(vocab_size, d_model, heads, depth, context, causal=True, key=fold(key, "body"), **body)
        self.output: Layer = Linear(d_model, vocab_size, key=fold(key, "output"))

    def draw_weights(self, key: Key, std: Callable[[str], float]) -> None:
        """Draw every matrix and table, normal with standard deviation std(name); `Zeros` leaves them untouched."""
        expect_key(key)
        for name, p in self.named_parameters().items():
            if name.endswith((".w", ".table")) and not isinstance(key, Zeros):
                p.data[...] = std(name) * key.fold(name).generator().standard_normal(p.data.shape, p.data.dtype)

    def forward(self, ids: Array, key: Key | None = None) -> tuple[Array, LanguageModelCache]:
        """Logits (B, T, V) of ids (B, T): logits[:, t] predict the token after ids[:, t]."""
        x, body = self.body.forward(ids, self.pattern, key)
        logits, output = self.output.forward(x)
        return logits, LanguageModelCache(body, output)

    def backward(self, dlogits: Array, cache: LanguageModelCache) -> None:
        expect_backward(cache, LanguageModelCache, dlogits=dlogits)
        self.body.backward(self.output.backward(dlogits, cache.output), cache.body)

    def loss(self, ids: Array, targets: Array, key: Key | None = None, **options: Any) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats per token, of targets (B, T), the token after each of ids (B, T).

        Targets equal to `ops.IGNORED` do not count. options: of `forward`.
        """
        logits, forward = self.forward(ids, key=key, **options)
        loss, cross_entropy = ops.cross_entropy(logits, targets, ignore_index=IGNORED)
        return loss, (forward, cross_entropy)

    def loss_backward(self, dloss: float, cache: tuple) -> None:
        """As for every `Predictor`."""
        if not isinstance(cache, tuple) or len(cache) != 2:
            raise TypeError(f"cache: expected the one that loss returned, got {describe(cache)}")
        forward, cross_entropy = cache
        self.backward(ops.cross_entropy_backward(dloss, cross_entropy), forward)

    def check_batch(self, ids: Array, targets: Array) -> None:
        """Raise an error for ids or targets out of range: see `Predictor`."""
        self.body.check(ids)
        V = self.config["vocab_size"]
        expect_ids("ids", ids, V)
        counted_targets(targets, V, IGNORED)

    def allocate(self, batch_size: int, length: int | None = None) -> list[Stored]:
        """Room for what `extend` stores of `length` positions of `batch_size` sequences, by default of the longest;
        `generation.KeyValueCache` holds it.
        """
        return self.body.allocate(batch_size, length)

    def extend(self, ids: Array, stored: list[Stored], past: int) -> Array:
        """Logits (B, 1, V) for the token after the last of new tokens ids (B, T), which follow `past` stored ones."""
        return extend_output(self.body.extend(ids, stored, past, self.pattern)[:, -1:], self.output)

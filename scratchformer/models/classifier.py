"""The classification transformer: the class of a text, of an image, or of each unit of a set."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from .. import ops
from ..backend import Array
from ..checks import expect_ids, expect_lengths, expect_one_of, expect_positive, expect_range
from ..nn import Linear
from ..ops.cross_entropy import IGNORED, counted_targets
from ..ops.patterns import expect_pattern
from ..rng import Key, fold
from .body import Body
from .predictor import ClassPredictor

POOLS = {"mean": (ops.mean_pool, ops.mean_pool_backward), "max": (ops.max_pool, ops.max_pool_backward)}

LogitsCache = namedtuple("LogitsCache", "body pool output")


class Classifier(ClassPredictor):
    """Token ids -> body -> pooling over each text without its padding -> linear -> log-probabilities.

    vocab_size: V. num_classes: of the output. d_model, heads, depth: C, H and the number of blocks. max_length: the
    longest text. pool: "mean", "max", or "none" to classify every unit of a sequence separately. `body`: the
    other options of `Body`, which are positions, dropout, causal, recompute, embedding_std, units, block,
    final_norm, and those of the block: norm, wide, d_ff, activation, bias, eps.

    Every position attends to all of its text, but not to padding, so the class of a text does not depend on the other
    texts in the batch.

    A text is only one example of a structured set of units. With vocab_size=None and units=I, the units are vectors
    (B, T, I), such as the patches of an image. The pattern of `forward` gives the structure, such as the edges of a
    graph (`ops.Edges`, in a model with positions="none"). `backward` returns the gradient of units, or None for ids.
    """

    body_class = Body

    def __init__(
        self,
        vocab_size: int | None,
        num_classes: int,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        pool: str = "mean",
        key: Key = Key(0),
        **body: Any,
    ) -> None:
        expect_one_of("pool", pool, (*POOLS, "none"))
        expect_positive(num_classes=num_classes)
        self.pool = pool
        self.body = Body(vocab_size, d_model, heads, depth, max_length, key=fold(key, "body"), **body)
        self.output = Linear(d_model, num_classes, key=fold(key, "output"))

    def logits(
        self,
        ids: Array,
        lengths: Array | None = None,
        key: Key | None = None,
        pattern: ops.Pattern | None = None,
    ) -> tuple[Array, LogitsCache]:
        """Logits (B, num_classes), or (B, T, num_classes) with pool "none", of ids (B, T) or units (B, T, I).

        `forward` takes the same arguments and returns log-probabilities. Sequence b ends after lengths[b] of its ids,
        from 1 to T. pattern: which positions may attend to which; None for all.
        """
        expect_pattern(pattern)
        if lengths is not None:
            self.check(ids, lengths)
            padding = ops.Padding(lengths)
            pattern = padding if pattern is None else pattern & padding
        x, body = self.body.forward(ids, pattern, key)
        pooled = None
        if self.pool != "none":
            pool, _ = POOLS[self.pool]
            x, pooled = pool(x, lengths)  # (B, C)
        z, output = self.output.forward(x)
        return z, LogitsCache(body, pooled, output)

    def check(self, ids: Array, lengths: Array) -> None:
        """Raise an error unless lengths (B,) are those of ids (B, T), or units (B, T, I)."""
        self.body.check(ids)
        expect_lengths(lengths, B=ids.shape[0])
        expect_range("lengths", lengths, 1, ids.shape[1])

    def logits_backward(self, dz: Array, cache: LogitsCache) -> Array | None:
        """The gradient of units, or None for ids, given the gradient of the logits."""
        dx = self.output.backward(dz, cache.output)
        if self.pool != "none":
            _, pool_backward = POOLS[self.pool]
            dx = pool_backward(dx, cache.pool)
        return self.body.backward(dx, cache.body)

    def loss(
        self,
        ids: Array,
        lengths: Array | None,
        labels: Array,
        key: Key | None = None,
        pattern: ops.Pattern | None = None,
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats, of labels (B,).

        With pool "none" labels are (B, T), and labels equal to `ops.IGNORED` do not count: padding, or units of unknown
        class.
        """
        z, logits = self.logits(ids, lengths, key, pattern)
        loss, cross_entropy = ops.cross_entropy(z, labels, self.ignored)
        return loss, (logits, cross_entropy)

    def check_batch(self, ids: Array, lengths: Array | None, labels: Array) -> None:
        """Raise an error for ids, lengths or labels out of range: see `Predictor`."""
        if lengths is not None:
            self.check(ids, lengths)
        if self.body.units is None:
            expect_ids("ids", ids, self.config["vocab_size"])
        counted_targets(labels, self.output.w.data.shape[1], self.ignored)

    @property
    def ignored(self) -> int | None:
        """The label that does not count."""
        return IGNORED if self.pool == "none" else None

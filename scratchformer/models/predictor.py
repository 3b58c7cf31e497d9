"""The base of models with logits, whose loss is the cross-entropy of the logits."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from .. import ops
from ..backend import Array
from ..checks import describe
from ..nn.layer import expect_backward
from .model import Model


class Predictor(Model):
    """A model whose `loss` returns a mean cross-entropy and the cache `(forward, cross_entropy)`.

    A subclass has `backward(dlogits, cache)`, which takes the gradient of the logits. It may have `check_batch`, with
    the arguments of `loss` but the key: it raises the errors of `loss` for values out of range. `Replicas` calls it
    with the arrays of a batch before they are moved to a GPU. Without it, values are checked there, and the host waits.
    """

    def loss_backward(self, dloss: float, cache: tuple) -> None:
        """Add dloss · ∂loss/∂w to the gradient of every parameter w."""
        if not isinstance(cache, tuple) or len(cache) != 2:
            raise TypeError(f"cache: expected the one that loss returned, got {describe(cache)}")
        forward, cross_entropy = cache
        self.logits_backward(ops.cross_entropy_backward(dloss, cross_entropy), forward)

    def logits_backward(self, dlogits: Array, cache: Any) -> Array | None:
        return self.backward(dlogits, cache)


LogProbabilitiesCache = namedtuple("LogProbabilitiesCache", "logits log_softmax")


class ClassPredictor(Predictor):
    """A model whose `forward` returns log-probabilities of classes.

    A subclass has `logits(...)`, which returns logits (..., K) and a cache, and `logits_backward(dlogits, cache)`.
    `forward` returns the log-softmax of the logits. `loss` is their cross-entropy, which does not need a softmax first.
    """

    def logits(self, *inputs: Any, **options: Any) -> tuple[Array, Any]:
        raise TypeError(f"{type(self).__name__} has no logits")

    def forward(self, *inputs: Any, **options: Any) -> tuple[Array, LogProbabilitiesCache]:
        z, logits = self.logits(*inputs, **options)
        y, log_softmax = ops.log_softmax(z)
        return y, LogProbabilitiesCache(logits, log_softmax)

    def backward(self, dy: Array, cache: LogProbabilitiesCache) -> Array | None:
        expect_backward(cache, LogProbabilitiesCache, dy=dy)
        return self.logits_backward(ops.log_softmax_backward(dy, cache.log_softmax), cache.logits)

"""Two models of one text: one reads it from left to right, the other from right to left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, array_module
from ..checks import expect_ids, expect_instance, expect_shape
from ..models import Classifier, LanguageModel, Llama, Model
from ..models.predictor import ClassPredictor
from ..nn.layer import expect_backward
from ..rng import Key, fold
from ..shell.text import shown
from .start_from import start_from


class BothCache(NamedTuple):
    rightward: Any
    leftward: Any


class BidirectionalLanguageModel(Model):
    """Two language models: `rightward` predicts the next token of a text, `leftward` the previous one.

    Each knows of a token only what is on one side of it; together they know both. They share no weights, so each is
    what it would be alone. They are meant for pre-training; `BidirectionalClassifier` starts from them.

    model: the class of both, whose arguments are all the others; recall is left out, since what follows a token in one
    direction precedes it in the other. A batch holds rows of T + 1 tokens: the first T are `ids`, and the last T are
    `targets`. In reverse order, a row begins with the targets, and each id is what follows its target. The loss is the
    mean of two losses, so each model gets half of the gradient.

    Source: Peters et al., "Deep contextualized word representations", 2018, section 3.1. Their two directions share the
    tables of tokens and of outputs.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        context: int,
        model: type[LanguageModel] = Llama,
        key: Key = Key(0),
        **options: Any,
    ) -> None:
        if not (isinstance(model, type) and issubclass(model, LanguageModel)):
            raise TypeError(f"model: expected a LanguageModel or a class derived from it, got {shown(model)}")
        self.context = context
        self.rightward, self.leftward = (
            model(vocab_size, d_model, heads, depth, context, key=fold(key, name), **options)
            for name in ("rightward", "leftward")
        )
        expect_no_recall(self)

    @classmethod
    def passes_to(cls, options: Mapping[str, Any]) -> Callable:
        return options.get("model", Llama)

    def forward(self, ids: Array, key: Key | None = None) -> tuple[tuple[Array, Array], BothCache]:
        """The logits (B, T, V) of two predictions for ids (B, T). At [b, t], those of `rightward` are for the token
        after ids[b, t], and those of `leftward` for the token before it.
        """
        expect_shape("ids", ids, "B T")
        following, rightward = self.rightward.forward(ids, fold(key, "rightward"))
        preceding, leftward = self.leftward.forward(ids[:, ::-1], fold(key, "leftward"))
        return (following, preceding[:, ::-1]), BothCache(rightward, leftward)

    def backward(self, dy: tuple[Array, Array], cache: BothCache) -> None:
        expect_backward(cache, BothCache)
        self.rightward.backward(dy[0], cache.rightward)
        self.leftward.backward(dy[1][:, ::-1], cache.leftward)

    def loss(self, ids: Array, targets: Array, key: Key | None = None) -> tuple[Array, BothCache]:
        """The mean cross-entropy of both, in nats per token, for targets (B, T), the token after each of ids (B, T).

        No target may be ignored: each is a token that `leftward` reads.
        """
        self.check_batch(ids, targets)
        xp = array_module(ids, targets)
        before, after = (xp.ascontiguousarray(x[:, ::-1]) for x in (ids, targets))
        first, rightward = self.rightward.loss(ids, targets, fold(key, "rightward"))
        second, leftward = self.leftward.loss(after, before, fold(key, "leftward"))
        return (first + second) / 2, BothCache(rightward, leftward)

    def loss_backward(self, dloss: float, cache: BothCache) -> None:
        """Add dloss · ∂loss/∂w to the gradient of every parameter w."""
        expect_instance("cache", cache, BothCache)
        self.rightward.loss_backward(dloss / 2, cache.rightward)
        self.leftward.loss_backward(dloss / 2, cache.leftward)

    def check_batch(self, ids: Array, targets: Array) -> None:
        """Raise an error for ids or targets out of range: see `Predictor`."""
        self.rightward.body.check(ids)
        expect_shape("targets", targets, "B T", B=ids.shape[0], T=ids.shape[1])
        for name, x in (("ids", ids), ("targets", targets)):
            expect_ids(name, x, self.config["vocab_size"])


class BidirectionalClassifier(ClassPredictor):
    """Two classifiers, of which one reads a text from left to right, and the other from right to left.

    The arguments are those of `Classifier`, which each of them is, except units, recall and pool "none". In evaluation,
    without a key, the logits are the mean of both, so each gets half of the gradient. In training each learns from its
    own, as if it were alone: the loss is the mean of two losses.

    To start from two Llamas, it takes their sizes and causal=True, positions="none", block=LlamaBlock,
    final_norm=RMSNorm.
    """

    body_class = Classifier

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        key: Key = Key(0),
        **options: Any,
    ) -> None:
        if options.get("units") is not None:
            raise ValueError("units: expected None, since a BidirectionalClassifier has none")
        if options.get("pool") == "none":
            raise ValueError("pool: expected 'mean' or 'max', since whole texts are classified, got 'none'")
        self.rightward, self.leftward = (
            Classifier(vocab_size, num_classes, d_model, heads, depth, max_length, key=fold(key, name), **options)
            for name in ("rightward", "leftward")
        )
        expect_no_recall(self)

    def start_from(self, pretrained: BidirectionalLanguageModel) -> None:
        """Copy the bodies of two language models: see `records.start_from`."""
        expect_instance("pretrained", pretrained, BidirectionalLanguageModel)
        start_from(self.rightward, pretrained.rightward)
        start_from(self.leftward, pretrained.leftward)

    def logits(self, ids: Array, lengths: Array | None = None, key: Key | None = None) -> tuple[Array, BothCache]:
        """The mean of the logits (B, num_classes) of both: see `Classifier`."""
        first, rightward = self.rightward.logits(ids, lengths, fold(key, "rightward"))
        second, leftward = self.leftward.logits(in_reverse(ids, lengths), lengths, fold(key, "leftward"))
        return (first + second) / 2, BothCache(rightward, leftward)

    def logits_backward(self, dz: Array, cache: BothCache) -> None:
        """Add to the gradients of the parameters, given the gradient of the logits. ids have none."""
        self.rightward.logits_backward(dz / 2, cache.rightward)
        self.leftward.logits_backward(dz / 2, cache.leftward)

    def loss(self, ids: Array, lengths: Array | None, labels: Array, key: Key | None = None) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats, of labels (B,), or of probabilities (B, num_classes). In evaluation it is
        that of the mean of the logits, in training the mean of two.
        """
        if key is None:
            z, logits = self.logits(ids, lengths)
            loss, cross_entropy = self.cross_entropy(z, labels)
            return loss, (logits, cross_entropy)
        first, rightward = self.rightward.loss(ids, lengths, labels, fold(key, "rightward"))
        second, leftward = self.leftward.loss(in_reverse(ids, lengths), lengths, labels, fold(key, "leftward"))
        return (first + second) / 2, BothCache(rightward, leftward)

    def loss_backward(self, dloss: float, cache: tuple) -> None:
        """Add dloss · ∂loss/∂w to the gradient of every parameter w."""
        if not isinstance(cache, BothCache):
            return super().loss_backward(dloss, cache)
        self.rightward.loss_backward(dloss / 2, cache.rightward)
        self.leftward.loss_backward(dloss / 2, cache.leftward)

    def check_batch(self, ids: Array, lengths: Array | None, labels: Array) -> None:
        """Raise an error for an argument of `loss` that is out of range: see `Predictor`."""
        self.rightward.check_batch(ids, lengths, labels)


def expect_no_recall(both: Any) -> None:
    """Raise ValueError if the two models have an embedding that reads further columns: one of them reads in reverse."""
    if both.rightward.body.column_reader is not None:
        raise ValueError(f"embeddings: expected none that recalls, since a {type(both).__name__} has none")


def in_reverse(ids: Array, lengths: Array | None) -> Array:
    """Each text in reverse order, with the padding still at the end."""
    xp, (B, T) = array_module(ids), ids.shape
    ends = (xp.full(B, T) if lengths is None else lengths.astype(np.int64))[:, None]
    steps = xp.arange(T)[None]
    return xp.take_along_axis(ids, xp.where(steps < ends, ends - 1 - steps, steps), axis=1)

"""BERT: an encoder that is pre-trained on text without labels and then fine-tuned.

Source: Devlin, Chang, Lee, Toutanova, "BERT: pre-training of deep bidirectional transformers for language
understanding", 2019.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any, NamedTuple, Self

import numpy as np

from .. import nn, ops
from ..backend import Array, array_module
from ..checks import (
    expect_at_least,
    expect_boolean,
    expect_fraction,
    expect_ids,
    expect_instance,
    expect_lengths,
    expect_number,
    expect_positive,
    expect_range,
    expect_shape,
    is_checked,
)
from ..nn.layer import Part, expect_backward, repeated
from ..ops.cross_entropy import counted_targets
from ..rng import Key, Zeros, expect_key, fold
from .bert_heads import GELU, MaskedPrediction, Pooler, expect_in_text, expect_no_padding
from .bert_weights import bert_config, load_bert, output_dropout, published_as, stored_classes
from .body import BodyCache
from .model import Model
from .predictor import ClassPredictor
from .pretrained import Folder, PretrainedError, making, tensor_names


class Bert(Model):
    """The sum of token, position and segment embeddings; layer norm; dropout; blocks.

    ids: (B, T) with T ≤ max_length, "[CLS] text [SEP]" or "[CLS] text [SEP] other text [SEP]". lengths: (B,), after
    which a row is padding, or None. segments: (B, T), the text that each token is in, or None for all in text 0.
    Returns (B, T, C), a vector for each token.

    vocab_size: V. d_model, heads, depth: C, H and the number of blocks. d_ff: F, by default 4 C. segments: the largest
    number of texts in a row; 0 for no such embedding. first_position: the row of the first position in the table of
    positions, which has that many more rows. eps: of the layer norms. embedding_std: the standard deviation of the
    initial embeddings. Position embeddings start as sinusoids of this size, so that nearby positions are similar from
    the beginning. activation: "gelu", "gelu_tanh" or "relu".

    The differences from the `Body` of classifier and language model: segments are embedded, since a row can hold two
    texts; the sum of the embeddings is normalised before dropout; blocks are post-norm, as in the tutorial, with biases
    in all their maps and by default the exact GELU. Every position attends to every other in its row except padding:
    the tokens to predict are hidden in the input (`BertPretraining`), so that the text on both sides can be used. The
    paper also applies dropout to the attention probabilities; this attention does not.

    Two published encoders are variants:
    - RoBERTa was trained for longer, on more text, and without the next-sentence task, so a row is in segment 0. Its
      tokens are pieces of bytes. Positions are counted from the number after that of the padding token, so
      `first_position` is 2, and this token may only stand after the end of a text.
    - DistilBERT has half as many blocks, no segments and no pooler of its own, and learned to predict what BERT
      predicts.

    Source: Liu et al., "RoBERTa: a robustly optimized BERT pretraining approach", 2019; Sanh et al., "DistilBERT, a
    distilled version of BERT", 2019.
    """

    tokens, positions = Part("embedding.embeddings.0"), Part("embedding.positions")
    segments = Part("embedding.embeddings.1")
    norm, dropout = Part("embedding.norm"), Part("embedding.dropout")
    blocks, recompute = Part("stack.blocks"), Part("stack.recompute")

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        d_ff: int | None = None,
        segments: int = 2,
        first_position: int = 0,
        dropout: float = 0.1,
        eps: float = 1e-12,
        embedding_std: float = 0.02,
        activation: str = GELU,
        key: Key = Key(0),
    ) -> None:
        expect_positive(vocab_size=vocab_size, d_model=d_model, heads=heads, depth=depth, max_length=max_length)
        expect_at_least(0, segments=segments, first_position=first_position)
        expect_number("embedding_std", embedding_std)
        d_ff = 4 * int(d_model) if d_ff is None else d_ff
        self.config["d_ff"] = d_ff
        self.max_length, self.first_position = max_length, first_position = int(max_length), int(first_position)
        tokens = nn.TokenEmbedding(vocab_size, d_model, embedding_std, fold(key, "tokens"))
        positions = nn.PositionEmbedding(first_position + max_length, d_model, key=Zeros())
        clocks = ops.sinusoidal_positions(first_position + max_length, d_model)
        positions.table.data[...] = np.float32(embedding_std * math.sqrt(2)) * clocks
        tables = [tokens]
        if segments:
            tables.append(nn.TokenEmbedding(segments, d_model, embedding_std, fold(key, "segments")))
        norm = nn.LayerNorm(d_model, eps)
        expect_fraction("dropout", dropout, letter="p")
        self.embedding = nn.EmbeddingSum(tables, positions, norm, nn.Dropout(dropout))
        options: dict[str, Any] = dict(d_ff=d_ff, activation=activation, dropout=dropout, bias=True, eps=eps)
        blocks = repeated(lambda i: nn.TransformerBlock(d_model, heads, key=fold(key, "block", i), **options), depth)
        self.stack = nn.Stack(blocks)

    def forward(
        self, ids: Array, lengths: Array | None = None, segments: Array | None = None, key: Key | None = None
    ) -> tuple[Array, BodyCache]:
        self.check(ids, lengths, segments)
        inputs = [ids]
        if self.config["segments"]:
            inputs.append(array_module(ids).zeros_like(ids) if segments is None else segments)
        x, embedding = self.embedding.forward(*inputs, key=fold(key, "embedding"), start=self.first_position)
        pattern = None if lengths is None else ops.Padding(lengths)
        x, stack = self.stack.forward(x, key=fold(key, "block"), pattern=pattern)
        return x, BodyCache(embedding, stack)

    def backward(self, dx: Array, cache: BodyCache) -> None:
        expect_backward(cache, BodyCache, dx=dx)
        self.embedding.backward(self.stack.backward(dx, cache.stack), cache.embedding)

    def check(self, ids: Array, lengths: Array | None, segments: Array | None) -> None:
        """Raise ValueError, TypeError or IndexError unless the arguments fit each other and the model."""
        expect_shape("ids", ids, "B T")
        B, T = ids.shape
        if not 1 <= T <= self.max_length:
            raise ValueError(f"ids: expected (B, T) with T from 1 to {self.max_length}, got {(B, T)}")
        if lengths is not None:
            expect_lengths(lengths, B=B)
            expect_range("lengths", lengths, 1, T)
        if segments is not None:
            if not self.config["segments"]:
                raise ValueError("segments: expected None, since this model does not embed them")
            expect_shape("segments", segments, "B T", B=B, T=T)
            expect_ids("segments", segments, len(self.segments.table.data))
        if self.first_position and not is_checked(ids):
            expect_no_padding(ids, lengths, self.first_position - 1)

    def check_batch(self, ids: Array, lengths: Array | None, segments: Array | None) -> None:
        """`check`, and IndexError for ids out of range: see `Predictor`."""
        self.check(ids, lengths, segments)
        expect_ids("ids", ids, self.config["vocab_size"])

    @classmethod
    def from_pretrained(cls, folder: Folder, dropout: float | None = None) -> Self:
        """The encoder of a published BERT, RoBERTa or DistilBERT: see `BertClassifier.from_pretrained`."""
        config = bert_config(folder, dropout)
        with making(folder):
            model = cls(**config, key=Zeros())
        load_bert(model, folder)
        return model


class BertPretrainingCache(NamedTuple):
    body: Any
    masked: Any
    pooler: Any = None
    following: Any = None


class BertPretraining(Model):
    """`Bert` with its two pre-training tasks: predicting hidden tokens, and whether one text follows another.

    15% of the tokens of a row are chosen (by `data.MaskedBatches`); most of them are replaced, and all of them are
    predicted (`MaskedPrediction`). From the pooled first vector of a row, an affine map predicts whether the second
    text is the continuation of the first (0) or from elsewhere (1). The loss is the sum of the two means.
    next_sentence: False omits the second task, for published weights that were trained without it.
    The other arguments are those of `Bert`.

    The `LanguageModel` predicts every token from the tokens before it; here only 15% of the tokens are predicted, but
    from both sides.

    Backward. Both tasks start from the vectors x of the body: z_bk are the logits of hidden token k of row b, and u_b
    those of the row.

        z = masked(x)        p_bkv = softmax_v(z_bkv)        u = following(pooler(x))        r_bj = softmax_j(u_bj)
        loss = −1/(B K) Σ_b Σ_k log(p_{b,k,targets_bk}) − 1/B Σ_b log(r_{b,unrelated_b})

    So the gradient of x is a sum of two terms, of which `MaskedPrediction` and `Pooler` return one each:

        dz_bkv = dloss/(B K) (p_bkv − [v = targets_bk])        du_bj = dloss/B (r_bj − [j = unrelated_b])
        dx_btc = Σ_k Σ_v dz_bkv ∂z_bkv/∂x_btc + Σ_j du_bj ∂u_bj/∂x_btc

    In code:

        of_rows = self.pooler.backward(self.following.backward(dy[1], cache.following), cache.pooler)
        dx, _ = ops.add(dx, of_rows)
    """

    body_class = Bert

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        next_sentence: bool = True,
        key: Key = Key(0),
        **body: Any,
    ) -> None:
        expect_boolean(next_sentence=next_sentence)
        self.body = Bert(vocab_size, d_model, heads, depth, max_length, key=fold(key, "body"), **body)
        activation = body.get("activation", GELU)
        self.masked = MaskedPrediction(self.body.tokens, self.body.norm.eps, activation, fold(key, "masked"))
        self.pooler = Pooler(d_model, key=fold(key, "pooler")) if next_sentence else None
        self.following = nn.Linear(d_model, 2, key=fold(key, "following")) if next_sentence else None

    def forward(
        self, ids: Array, lengths: Array | None, segments: Array | None, places: Array, key: Key | None = None
    ) -> tuple[tuple[Array, ...], BertPretrainingCache]:
        """Logits (B, K, V) of the tokens at positions `places` (B, K) and, with next_sentence, (B, 2) of the rows."""
        x, body = self.body.forward(ids, lengths, segments, key)
        masked_logits, masked = self.masked.forward(x, places)
        if self.pooler is None or self.following is None:
            return (masked_logits,), BertPretrainingCache(body, masked)
        y, pooler = self.pooler.forward(x)
        logits, following = self.following.forward(y)
        return (masked_logits, logits), BertPretrainingCache(body, masked, pooler, following)

    def backward(self, dy: tuple[Array, ...], cache: BertPretrainingCache) -> None:
        expect_backward(cache, BertPretrainingCache)
        expect_instance("dy", dy, tuple)
        dx = self.masked.backward(dy[0], cache.masked)
        if self.pooler is not None and self.following is not None:
            of_rows = self.pooler.backward(self.following.backward(dy[1], cache.following), cache.pooler)
            dx, _ = ops.add(dx, of_rows)
        self.body.backward(dx, cache.body)

    def loss(
        self,
        ids: Array,
        lengths: Array | None,
        segments: Array | None,
        places: Array,
        targets: Array,
        unrelated: Array | None = None,
        key: Key | None = None,
    ) -> tuple[Array, tuple]:
        """The mean of −log p(target) over the chosen positions, in nats, plus the mean of −log p(unrelated) over rows.

        places: (B, K), the chosen positions. unrelated: (B,), 1 where the second text does not follow the first.
        Without next_sentence, the second mean is omitted and `unrelated` is not used. Raises IndexError for a position
        in the padding.
        """
        if self.pooler is not None:
            expect_shape("unrelated", unrelated, "B")
        y, forward = self.forward(ids, lengths, segments, places, key)
        if lengths is not None:
            expect_in_text(places, lengths)
        losses, caches = zip(*map(ops.cross_entropy, y, (targets, unrelated)), strict=True)
        return sum(losses), (forward, caches)

    def check_batch(
        self,
        ids: Array,
        lengths: Array | None,
        segments: Array | None,
        places: Array,
        targets: Array,
        unrelated: Array | None = None,
    ) -> None:
        """Raise an error for an argument of `loss` that is out of range: see `Predictor`."""
        self.body.check_batch(ids, lengths, segments)
        expect_range("places", places, 0, ids.shape[1] - 1, IndexError)
        if lengths is not None:
            expect_in_text(places, lengths)
        counted_targets(targets, self.config["vocab_size"], None)
        if self.pooler is not None and unrelated is not None:
            counted_targets(unrelated, 2, None)

    def loss_backward(self, dloss: float, cache: tuple) -> None:
        """Add dloss · ∂loss/∂w to the gradient of every parameter w."""
        forward, caches = cache
        self.backward(tuple(ops.cross_entropy_backward(dloss, c) for c in caches), forward)

    @classmethod
    def from_pretrained(cls, folder: Folder, dropout: float | None = None) -> Self:
        """A published BERT, RoBERTa or DistilBERT with its heads; next_sentence is False without a head for it.

        See `BertClassifier.from_pretrained`.
        """
        config = bert_config(folder, dropout)
        following = "cls.seq_relationship.weight" in tensor_names(folder)
        with making(folder):
            model = cls(**config, next_sentence=following, key=Zeros())
        load_bert(model, folder)
        return model


BertLogitsCache = namedtuple("BertLogitsCache", "body pooler dropout output")


class BertClassifier(ClassPredictor):
    """`Bert` -> pooled first vector -> dropout -> linear -> log-probabilities of the classes.

    num_classes: of the output. output_dropout: the dropout before the output, by default the same as in the body.
    pooling: the activation of the `Pooler`, "tanh", or "relu" as in DistilBERT. The other arguments are those of
    `Bert`.

    The `Classifier` takes the mean of all vectors; here the first one, of [CLS], represents the text. As in the
    paper, only the output is new in fine-tuning: body and pooler come from pre-training (`start_from`), and all three
    are trained. (The paper mentions only the first vector; its published program adds the pooler.)
    """

    body_class = Bert

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        output_dropout: float | None = None,
        pooling: str = "tanh",
        key: Key = Key(0),
        **body: Any,
    ) -> None:
        expect_positive(num_classes=num_classes)
        if output_dropout is not None:
            expect_fraction("output_dropout", output_dropout, letter="p")
        self.body = Bert(vocab_size, d_model, heads, depth, max_length, key=fold(key, "body"), **body)
        self.pooler = Pooler(d_model, pooling, fold(key, "pooler"))
        self.dropout = nn.Dropout(self.body.dropout.p if output_dropout is None else output_dropout)
        self.output = nn.Linear(d_model, num_classes, key=fold(key, "output"))

    def logits(
        self, ids: Array, lengths: Array | None = None, segments: Array | None = None, key: Key | None = None
    ) -> tuple[Array, BertLogitsCache]:
        """Logits (B, num_classes) of ids (B, T), lengths (B,) and segments (B, T): see `Bert`.

        `forward` takes the same arguments and returns log-probabilities.
        """
        x, body = self.body.forward(ids, lengths, segments, key)
        x, pooler = self.pooler.forward(x)
        x, dropout = self.dropout.forward(x, fold(key, "pooled"))
        z, output = self.output.forward(x)
        return z, BertLogitsCache(body, pooler, dropout, output)

    def logits_backward(self, dz: Array, cache: BertLogitsCache) -> None:
        """Add to the gradients of the parameters, given dz, the gradient of the logits."""
        dx = self.output.backward(dz, cache.output)
        dx = self.pooler.backward(self.dropout.backward(dx, cache.dropout), cache.pooler)
        self.body.backward(dx, cache.body)

    def loss(
        self, ids: Array, lengths: Array | None, labels: Array, segments: Array | None = None, key: Key | None = None
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats, of labels (B,); segments (B, T) for pairs of texts, see `Bert`."""
        z, logits = self.logits(ids, lengths, segments, key)
        loss, cross_entropy = ops.cross_entropy(z, labels)
        return loss, (logits, cross_entropy)

    def check_batch(self, ids: Array, lengths: Array | None, labels: Array, segments: Array | None = None) -> None:
        """Raise an error for an argument of `loss` that is out of range: see `Predictor`."""
        self.body.check_batch(ids, lengths, segments)
        counted_targets(labels, self.config["num_classes"], None)

    def start_from(self, pretrained: BertPretraining) -> None:
        """Copy the body of a pre-trained model, and its pooler if it has one; raises ValueError if they do not fit."""
        names = ("vocab_size", "d_model", "heads", "depth", "max_length", "d_ff", "segments", "first_position", "eps")
        for name in (*names, "activation"):
            if (value := pretrained.body.config[name]) != (expected := self.body.config[name]):
                raise ValueError(f"pretrained: expected a model with {name} {expected}, got {value}")
        self.body.load_state_dict(pretrained.body.state_dict())
        if pretrained.pooler is not None:
            self.pooler.load_state_dict(pretrained.pooler.state_dict())

    @classmethod
    def from_pretrained(
        cls,
        folder: Folder,
        num_classes: int | None = None,
        dropout: float | None = None,
        key: Key = Key(0),
        new_head: bool = False,
    ) -> Self:
        """A published BERT, RoBERTa or DistilBERT from a Hugging Face folder, of the encoder alone or with heads.

        num_classes: of the output; None for the number in the folder. An output in the folder is kept: it must be that
        of a `BertForSequenceClassification`, or its counterpart, and have this number of classes. With new_head=True,
        or if the folder has no output, the model gets a new one. A new output is drawn from `key`, and so is the pooler
        if the folder has none, as for a `BertForMaskedLM`.
        dropout: one for the whole model; None for the folder's, which may have another one before the output.
        RoBERTa's second dropout, before the pooler, is left out. Raises PretrainedError, naming the file and the tensor
        or setting, for what is missing, unknown or of the wrong shape, and for a setting that would change the
        computation; ValueError for a num_classes or dropout out of range, or for new_head without num_classes.
        """
        expect_boolean(new_head=new_head)
        expect_key(key)
        if num_classes is not None:
            expect_positive(num_classes=num_classes)
        elif new_head:
            raise ValueError("num_classes: expected the number of classes of the new head, got None")
        config, kind = bert_config(folder, dropout), published_as(folder)
        config["pooling"] = kind.pooling
        if dropout is None:
            config["output_dropout"] = output_dropout(folder)
        names = tensor_names(folder, kind.prefix)
        new: tuple[str, ...] = ()
        if num_classes is None or (any(name.startswith("classifier.") for name in names) and not new_head):
            stored = stored_classes(folder, names)
            if num_classes not in (None, stored):
                raise PretrainedError(
                    f"{folder} has an output for {stored} classes, and num_classes is {num_classes}: "
                    "pass new_head=True to replace it"
                )
            num_classes = stored
        else:
            new = ("output",) if f"{kind.layers['pooler.dense']}.weight" in names else ("output", "pooler")
        with making(folder):
            model = cls(num_classes=num_classes, **config, key=Zeros())
            for name, layer in (
                ("pooler", Pooler(config["d_model"], kind.pooling, fold(key, "pooler"))),
                ("output", nn.Linear(config["d_model"], num_classes, key=fold(key, "output"))),
            ):
                if name in new:
                    setattr(model, name, layer)
        load_bert(model, folder, new)
        return model

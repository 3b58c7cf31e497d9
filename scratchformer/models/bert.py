"""BERT: an encoder that learns from text without labels, and is then fine-tuned.

Source of all of it: Devlin, Chang, Lee, Toutanova, "BERT: pre-training of deep bidirectional transformers for language
understanding", 2019.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from .. import ops
from ..backend import Array, array_module
from ..nn import (
    Dropout,
    EmbeddingSum,
    Layer,
    LayerNorm,
    Linear,
    PositionEmbedding,
    Stack,
    TiedOutput,
    TokenEmbedding,
    TransformerBlock,
)
from ..nn.embedding_sum import EmbeddingSumCache
from ..nn.stack import StackCache
from ..ops.checks import (
    expect_boolean,
    expect_ids,
    expect_lengths,
    expect_number,
    expect_positive,
    expect_range,
    expect_shape,
)
from ..rng import Key, Zeros
from .model import Model
from .pretrained import PretrainedError, Tensor, load_weights, making, read_config, tensor_names

GELU = "gelu"  # the activation of the paper


class BertCache(NamedTuple):
    embedding: EmbeddingSumCache
    stack: StackCache


class Bert(Model):
    """Token, position and segment embeddings, added; layer norm; dropout; blocks.

    ids: (B, T) with T ≤ max_length, "[CLS] text [SEP]" or "[CLS] text [SEP] other text [SEP]". lengths: (B,), after
    which a row is padding, or None. segments: (B, T), which of the texts a token is in, or None for all in text 0.
    Returns (B, T, C), a vector for each token.

    vocab_size: V. d_model, heads, depth: C, H and the number of blocks. d_ff: F, by default 4 C. segments: the number
    of texts there may be. eps: of the layer norms. embedding_std: of the embeddings at the start. Those of the
    positions start as sinusoids of this size, so that near positions are alike before anything is learned of them.
    activation: "gelu", "gelu_tanh" or "relu".

    What differs from the `Body` of the classifier and the language model: segments are embedded, since two texts can be
    read at once; the sum of the embeddings is normalised before dropout; blocks are post-norm, as in the tutorial, with
    biases in all their maps and by default the exact GELU. Every position attends to every other of its row but the
    padding: what is to be predicted is hidden in the input instead (`BertPretraining`), so that both sides of it can be
    used. The paper drops out attention's probabilities too; the attention here does not.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        max_length: int,
        d_ff: int | None = None,
        segments: int = 2,
        dropout: float = 0.1,
        eps: float = 1e-12,
        embedding_std: float = 0.02,
        activation: str = GELU,
        key: Key = Key(0),
    ) -> None:
        expect_positive(vocab_size=vocab_size, d_model=d_model, heads=heads, depth=depth, max_length=max_length)
        expect_positive(segments=segments)
        expect_number("embedding_std", embedding_std)
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.config["d_ff"] = d_ff
        self.max_length = max_length
        self.tokens = TokenEmbedding(vocab_size, d_model, embedding_std, key.fold("tokens"))
        self.positions = PositionEmbedding(max_length, d_model, key=Zeros())
        clocks = ops.sinusoidal_positions(max_length, d_model)
        self.positions.table.data[...] = np.float32(embedding_std * 2**0.5) * clocks
        self.segments = TokenEmbedding(segments, d_model, embedding_std, key.fold("segments"))
        self.norm = LayerNorm(d_model, eps)
        self.dropout = Dropout(dropout)
        options = dict(d_ff=d_ff, activation=activation, dropout=dropout, bias=True, eps=eps)
        self.blocks = [TransformerBlock(d_model, heads, key=key.fold("block", i), **options) for i in range(depth)]

    @property
    def embedding(self) -> EmbeddingSum:
        return EmbeddingSum([self.tokens, self.segments], self.positions, self.norm, self.dropout)

    @property
    def stack(self) -> Stack:
        return Stack(self.blocks)

    def forward(
        self, ids: Array, lengths: Array | None = None, segments: Array | None = None, key: Key | None = None
    ) -> tuple[Array, BertCache]:
        self.check(ids, lengths, segments)
        if segments is None:
            segments = array_module(ids).zeros_like(ids)
        key1, key2 = (None, None) if key is None else (key.fold("embedding"), key.fold("block"))
        x, embedding = self.embedding.forward(ids, segments, key=key1)
        x, stack = self.stack.forward(x, key=key2, pattern=None if lengths is None else ops.Padding(lengths))
        return x, BertCache(embedding, stack)

    def backward(self, dx: Array, cache: BertCache) -> None:
        self.embedding.backward(self.stack.backward(dx, cache.stack), cache.embedding)

    def check(self, ids: Array, lengths: Array | None, segments: Array | None) -> None:
        """Raise ValueError, TypeError or IndexError unless these fit each other and the model."""
        expect_shape("ids", ids, "B T")
        B, T = ids.shape
        if not 1 <= T <= self.max_length:
            raise ValueError(f"ids: expected (B, T) with T from 1 to {self.max_length}, got {(B, T)}")
        if lengths is not None:
            expect_lengths(lengths, B=B)
            expect_range("lengths", lengths, 1, T)
        if segments is not None:
            expect_shape("segments", segments, "B T", B=B, T=T)
            expect_ids("segments", segments, len(self.segments.table.data))

    @classmethod
    def from_pretrained(cls, folder: Path | str, dropout: float | None = None) -> Self:
        """The encoder of a published BERT: see `BertClassifier.from_pretrained`."""
        config = _config(folder, dropout)
        with making(folder):
            model = cls(**config, key=Zeros())
        _load(model, folder)
        return model


class PoolerCache(NamedTuple):
    shape: tuple[int, int, int]  # of x
    dense: Any
    tanh: Any


class Pooler(Layer):
    """y = tanh(x₀ w + b), of the first of each row's vectors, that of [CLS]. x: (B, T, C). Returns (B, C).

    What is known of the whole row must be gathered there, since nothing else is told to the layers after it.
    """

    def __init__(self, d_model: int, key: Key = Key(0)) -> None:
        self.dense = Linear(d_model, d_model, key=key)

    def forward(self, x: Array) -> tuple[Array, PoolerCache]:
        h, dense = self.dense.forward(x[:, 0])
        y, tanh = ops.tanh(h)
        return y, PoolerCache(x.shape, dense, tanh)

    def backward(self, dy: Array, cache: PoolerCache) -> Array:
        dx = array_module(dy).zeros(cache.shape, dtype=dy.dtype)
        dx[:, 0] = self.dense.backward(ops.tanh_backward(dy, cache.tanh), cache.dense)
        return dx


class MaskedPredictionCache(NamedTuple):
    gather: Any
    dense: Any
    norm: Any
    output: Any


class MaskedPrediction(Layer):
    """z = norm(gelu(u w + b)) tableᵀ + c, with u the vectors at the chosen places: which token was there?

    x: (B, T, C), the encoder's vectors. places: (B, K), the chosen places of each row. embedding: whose table is the
    output's too (`TiedOutput`). Returns the logits z, (B, K, V).

    The masked-prediction loss is the mean over the n = B K chosen places i = (b, k), with target v_i, the token that
    was there before it was hidden. From the encoder's vectors on it is

        u_ic = x_btc with t = places_bk              chosen
        h_i  = norm(gelu(u_i w + b))                 an affine map, an activation and a layer norm, for each alone
        z_iv = Σ_c h_ic table_vc + c_v               a logit for every token of the vocabulary
        loss = 1/n Σ_i (log Σ_v exp(z_iv) − z_iv_i)  cross-entropy

    Places are chosen first, since the product with the table is the largest of the model: V-wide vectors are made for
    the 15% of the places that are chosen, and for no others.

    Backward. Step by step from the end, each being the derivative of one line above:

        dz_iv     = 1/n (p_iv − [v = v_i])    with p_i = softmax(z_i): see `cross_entropy`
        dc_v      = Σ_i dz_iv
        dtable_vc = Σ_i dz_iv h_ic            and beside it what the input's embedding adds: see `TiedOutput`
        dh_ic     = Σ_v dz_iv table_vc
        du        from dh by the norm and the affine map with GELU: see `layernorm` and `dense`
        dx_btc    = Σ_k [places_bk = t] du_bkc

    So only the chosen places start a gradient; it reaches the others through attention, in the blocks. Every row of
    the table gets one, from the tokens that were not there as well.

        dh = self.output.backward(dz, cache.output)
        du = self.dense.backward(self.norm.backward(dh, cache.norm), cache.dense)
        dx = ops.gather_backward(du, cache.gather)

    A micro-batch of m of the n places has the loss 1/m Σ_i …; times its share m/n it is its part of the sum above. All
    rows of a batch have the same number K of places, so m/n is its share of the rows, and the same weight serves the
    mean over rows of the next-sentence loss.

    Source: Devlin et al., 2019, section 3.1, task 1; the layers before the output as in their published program.
    """

    def __init__(
        self, embedding: TokenEmbedding, eps: float = 1e-12, activation: str = GELU, key: Key = Key(0)
    ) -> None:
        d_model = embedding.table.data.shape[1]
        self.dense = Linear(d_model, d_model, key=key, activation=activation)
        self.norm = LayerNorm(d_model, eps)
        self.output = TiedOutput(embedding, bias=True)

    def forward(self, x: Array, places: Array) -> tuple[Array, MaskedPredictionCache]:
        u, gather = ops.gather(x, places)
        h, dense = self.dense.forward(u)
        h, norm = self.norm.forward(h)
        z, output = self.output.forward(h)
        return z, MaskedPredictionCache(gather, dense, norm, output)

    def backward(self, dz: Array, cache: MaskedPredictionCache) -> Array:
        dh = self.output.backward(dz, cache.output)
        du = self.dense.backward(self.norm.backward(dh, cache.norm), cache.dense)
        dx = ops.gather_backward(du, cache.gather)
        return dx


class BertPretrainingCache(NamedTuple):
    body: Any
    masked: Any
    pooler: Any = None
    following: Any = None


class BertPretraining(Model):
    """`Bert` with what it learns from text alone: hidden tokens, and whether a text follows another.

    15% of the tokens of a row are chosen; most of them are replaced, and all of them are to be predicted
    (`MaskedPrediction`; `data.MaskedBatches` chooses). An affine map of the pooled first vector of a row tells whether
    the second text is the continuation of the first (0) or from elsewhere (1). The loss is the sum of the two means.
    next_sentence: False leaves the second task out, for published weights that were made without it.
    The other arguments are those of `Bert`.

    The `LanguageModel` predicts every token from those before it; here 15% of the tokens are predicted, but from both
    sides.
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
        self.body = Bert(vocab_size, d_model, heads, depth, max_length, key=key.fold("body"), **body)
        activation = body.get("activation", GELU)
        self.masked = MaskedPrediction(self.body.tokens, self.body.norm.eps, activation, key.fold("masked"))
        self.pooler = Pooler(d_model, key.fold("pooler")) if next_sentence else None
        self.following = Linear(d_model, 2, key=key.fold("following")) if next_sentence else None

    def forward(
        self, ids: Array, lengths: Array | None, segments: Array | None, places: Array, key: Key | None = None
    ) -> tuple[tuple[Array, ...], BertPretrainingCache]:
        """Logits (B, K, V) of the tokens at places (B, K), and, with next_sentence, logits (B, 2) of the rows."""
        x, body = self.body.forward(ids, lengths, segments, key)
        masked_logits, masked = self.masked.forward(x, places)
        if self.pooler is None:
            return (masked_logits,), BertPretrainingCache(body, masked)
        y, pooler = self.pooler.forward(x)
        logits, following = self.following.forward(y)
        return (masked_logits, logits), BertPretrainingCache(body, masked, pooler, following)

    def backward(self, dy: tuple[Array, ...], cache: BertPretrainingCache) -> None:
        dx = self.masked.backward(dy[0], cache.masked)
        if self.pooler is not None:
            dx = dx + self.pooler.backward(self.following.backward(dy[1], cache.following), cache.pooler)
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
        """The mean over the chosen places (B, K) of −log p(target), in nats, plus the mean over the rows of
        −log p(unrelated); unrelated: (B,), 1 where the second text does not follow the first. Without next_sentence
        there is no second mean, and unrelated is not used. Raises IndexError for a place in the padding.
        """
        if self.pooler is not None:
            expect_shape("unrelated", unrelated, "B")
        y, forward = self.forward(ids, lengths, segments, places, key)
        if lengths is not None:
            expect_in_text(places, lengths)
        losses, caches = zip(*map(ops.cross_entropy, y, (targets, unrelated)), strict=True)
        return sum(losses), (forward, caches)

    def loss_backward(self, dloss: float, cache: tuple) -> None:
        """Add dloss · ∂loss/∂w to the gradient of every parameter w."""
        forward, caches = cache
        self.backward(tuple(ops.cross_entropy_backward(dloss, c) for c in caches), forward)

    @classmethod
    def from_pretrained(cls, folder: Path | str, dropout: float | None = None) -> Self:
        """A published BERT with its heads; without next_sentence if the file has no such head.

        See `BertClassifier.from_pretrained`.
        """
        config = _config(folder, dropout)
        following = "cls.seq_relationship.weight" in tensor_names(folder, PREFIX)
        with making(folder):
            model = cls(**config, next_sentence=following, key=Zeros())
        _load(model, folder)
        return model


def expect_in_text(places: Array, lengths: Array) -> None:
    """Raise IndexError, naming the row, unless all places (B, K) are within the texts' lengths (B,)."""
    padding = places >= lengths[:, None]
    if padding.any():
        row = int(padding.any(axis=1).argmax())
        last, found = int(lengths[row]) - 1, int(places[row].max())
        raise IndexError(f"places: row {row}: expected values from 0 to {last}, where its text ends, got {found}")


class BertLogitsCache(NamedTuple):
    body: Any
    pooler: Any
    dropout: Any
    output: Any


class BertClassifierCache(NamedTuple):
    logits: BertLogitsCache
    log_softmax: Any


class BertClassifier(Model):
    """`Bert` -> pooled first vector -> dropout -> linear -> log-probabilities of a class.

    num_classes: of the output. output_dropout: the dropout before it, by default that of the rest. The other arguments
    are those of `Bert`.

    The `Classifier` takes the mean of all vectors; here the first one, that of [CLS], stands for the text. As in the
    paper only the output is new in fine-tuning; body and pooler come from pre-training (`start_from`), and all of them
    are trained further. (The paper names only the first vector; its published program has the pooler between.)
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
        key: Key = Key(0),
        **body: Any,
    ) -> None:
        expect_positive(num_classes=num_classes)
        self.body = Bert(vocab_size, d_model, heads, depth, max_length, key=key.fold("body"), **body)
        self.pooler = Pooler(d_model, key.fold("pooler"))
        self.dropout = Dropout(self.body.dropout.p if output_dropout is None else output_dropout)
        self.output = Linear(d_model, num_classes, key=key.fold("output"))

    def forward(
        self, ids: Array, lengths: Array | None = None, segments: Array | None = None, key: Key | None = None
    ) -> tuple[Array, BertClassifierCache]:
        """Log-probabilities (B, num_classes) of ids (B, T), lengths (B,) and segments (B, T): see `Bert`."""
        z, logits = self.logits(ids, lengths, segments, key)
        y, log_softmax = ops.log_softmax(z)
        return y, BertClassifierCache(logits, log_softmax)

    def backward(self, dy: Array, cache: BertClassifierCache) -> None:
        self.logits_backward(ops.log_softmax_backward(dy, cache.log_softmax), cache.logits)

    def logits(
        self, ids: Array, lengths: Array | None, segments: Array | None, key: Key | None
    ) -> tuple[Array, BertLogitsCache]:
        """The logits (B, num_classes): `forward` takes their log-softmax, `loss` their cross-entropy."""
        x, body = self.body.forward(ids, lengths, segments, key)
        x, pooler = self.pooler.forward(x)
        x, dropout = self.dropout.forward(x, None if key is None else key.fold("pooled"))
        z, output = self.output.forward(x)
        return z, BertLogitsCache(body, pooler, dropout, output)

    def logits_backward(self, dz: Array, cache: BertLogitsCache) -> None:
        """Add to the gradients of the parameters, from dz, that of the logits."""
        dx = self.output.backward(dz, cache.output)
        dx = self.pooler.backward(self.dropout.backward(dx, cache.dropout), cache.pooler)
        self.body.backward(dx, cache.body)

    def loss(
        self,
        ids: Array,
        lengths: Array | None,
        labels: Array,
        segments: Array | None = None,
        key: Key | None = None,
    ) -> tuple[Array, tuple]:
        """The mean cross-entropy, in nats, of labels (B,); segments (B, T) for pairs of texts, see `Bert`."""
        z, logits = self.logits(ids, lengths, segments, key)
        loss, cross_entropy = ops.cross_entropy(z, labels)
        return loss, (logits, cross_entropy)

    def loss_backward(self, dloss: float, cache: tuple) -> None:
        """Add dloss · ∂loss/∂w to the gradient of every parameter w."""
        logits, cross_entropy = cache
        self.logits_backward(ops.cross_entropy_backward(dloss, cross_entropy), logits)

    def start_from(self, pretrained: BertPretraining) -> None:
        """Copy the body of a pre-trained model, and its pooler if it has one; raises ValueError for another model."""
        for name in ("vocab_size", "d_model", "heads", "depth", "max_length", "d_ff", "segments", "eps", "activation"):
            if (found := pretrained.body.config[name]) != (own := self.body.config[name]):
                raise ValueError(f"pretrained: expected a model with {name} {own}, got {found}")
        self.body.load_state_dict(pretrained.body.state_dict())
        if pretrained.pooler is not None:
            self.pooler.load_state_dict(pretrained.pooler.state_dict())

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        num_classes: int | None = None,
        dropout: float | None = None,
        key: Key = Key(0),
        new_head: bool = False,
    ) -> Self:
        """A published BERT from a Hugging Face folder, of `BertModel` or one with heads.

        num_classes: of the output; None for that of the output in the folder. An output in the folder is kept: it must
        be that of a `BertForSequenceClassification`, and have this number of classes. new_head: True puts a new output
        in its place. A folder without an output gets a new one too. A new output is drawn from `key`, and so is a
        pooler where the folder has none, such as that of a `BertForMaskedLM`.
        dropout: one for the whole model; None for those of the folder, hidden_dropout_prob and, before the output,
        classifier_dropout. Raises PretrainedError, naming file and tensor or setting, for what is missing, unknown or
        of another shape, and for a setting that asks for another computation than the one here; ValueError for a
        num_classes or dropout out of range, or a new_head without num_classes.
        """
        if num_classes is None and new_head:
            raise ValueError("num_classes: expected that of the new head, got None")
        if not (num_classes is None or (isinstance(num_classes, Integral) and num_classes >= 1)):
            raise ValueError(f"num_classes: expected a whole number >= 1, got {num_classes!r}")
        config, names = _config(folder, dropout), tensor_names(folder, PREFIX)
        if dropout is None:
            own = ("classifier_dropout",)
            config["output_dropout"] = read_config(folder, "bert", fractions=own, optional=own).get(*own)
        new = ()
        if num_classes is None or ("classifier.weight" in names and not new_head):
            stored = _classes(folder, names)
            if num_classes not in (None, stored):
                raise PretrainedError(
                    f"{folder} has an output for {stored} classes, and num_classes is {num_classes}: say new_head=True "
                    "for a new output in its place"
                )
            num_classes = stored
        else:
            new = ("output",) if "pooler.dense.weight" in names else ("output", "pooler")
        with making(folder):
            model = cls(num_classes=num_classes, **config, key=Zeros())
            for name, layer in (
                ("pooler", Pooler(config["d_model"], key.fold("pooler"))),
                ("output", Linear(config["d_model"], num_classes, key=key.fold("output"))),
            ):
                if name in new:
                    setattr(model, name, layer)
        _load(model, folder, new)
        return model


PREFIX = "bert."  # of the names in a file of a model with a head
SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "num_hidden_layers": "depth",
    "max_position_embeddings": "max_length",
    "intermediate_size": "d_ff",
    "type_vocab_size": "segments",
    "hidden_dropout_prob": "dropout",
    "layer_norm_eps": "eps",
}
FRACTIONS = ("hidden_dropout_prob", "layer_norm_eps")  # of these; the others are whole numbers
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
COMPUTED = {  # settings with which the computation is the one here
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
HEAD_COMPUTED = {"problem_type": (None, "single_label_classification")}  # of the output for classes in a file
# The library's models with this body. Only in the first does an output for classes mean what it means here.
ARCHITECTURES = (
    "BertForSequenceClassification", "BertModel", "BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel",
    "BertForNextSentencePrediction", "BertForTokenClassification", "BertForMultipleChoice", "BertForQuestionAnswering",
)  # fmt: skip
# The path of each layer of ours in a file.
LAYERS = {
    "tokens": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "pooler.dense": "pooler.dense",
    "masked.dense": "cls.predictions.transform.dense",
    "masked.norm": "cls.predictions.transform.LayerNorm",
    "masked.output": "cls.predictions",
    "following": "cls.seq_relationship",
    "output": "classifier",
}
BLOCK_LAYERS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.unify": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "norm2": "output.LayerNorm",
}
LEAVES = {"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "table": "weight"}
# Tensors that a model without the head, or with tied weights, has no use for.
UNUSED = r"(cls\.predictions|cls\.seq_relationship|pooler|classifier)\..*|embeddings\.position_ids"
TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def _config(folder: Path | str, dropout: float | None) -> dict[str, Any]:
    """The arguments of `Bert` for a folder; raises PretrainedError if its model computes something else, ValueError for
    a dropout out of range.
    """
    if dropout is not None:
        Dropout(dropout)  # raises what is wrong with it
    config = read_config(folder, "bert", SETTINGS, COMPUTED, FRACTIONS)
    kinds = config.get("architectures") or []
    if not (isinstance(kinds, list) and all(kind in ARCHITECTURES for kind in kinds)):
        path, expected = Path(folder) / "config.json", ", ".join(ARCHITECTURES)
        raise PretrainedError(f"{path}: architectures: expected one of {expected}, got {kinds!r}")
    options = {ours: config[theirs] for theirs, ours in SETTINGS.items()}
    options["activation"] = ACTIVATIONS[config.get("hidden_act", "gelu")]
    return options if dropout is None else options | {"dropout": dropout}


def _classes(folder: Path | str, names: Mapping[str, tuple[int, ...]]) -> int:
    """The number of classes in a folder with a classifier of texts; raises PretrainedError for another model."""
    config = read_config(folder, "bert", computed=HEAD_COMPUTED)
    kinds = config.get("architectures") or [ARCHITECTURES[0]]
    if kinds != [ARCHITECTURES[0]] or not {"classifier.weight", "pooler.dense.weight"} <= names.keys():
        raise PretrainedError(
            f"{folder} has no output for classes of texts ({', '.join(kinds)}): say how many classes there "
            "are (num_classes), and new_head=True if it has another output"
        )
    classes = names["classifier.weight"][:1]
    if classes in ((), (0,), (1,)):
        raise PretrainedError(
            f"{folder}: classifier.weight: expected a row for each of two or more classes, got the shape "
            f"{names['classifier.weight']}, as for regression or multiple choice"
        )
    return classes[0]


def _load(model: Layer, folder: Path | str, new: Collection[str] = ()) -> None:
    """Copy the weights of a folder into `model`, but for those of its layers called `new`."""
    stored = tensor_names(folder, PREFIX)
    tensors = {
        name: stored_as(name, old="embeddings.LayerNorm.gamma" in stored)
        for name in model.named_parameters()
        if name.partition(".")[0] not in new
    }
    load_weights(model, folder, tensors, UNUSED, PREFIX, TIED)


def stored_as(name: str, old: bool) -> Tensor:
    """Where a parameter of ours is in a file; old: one whose norms have gamma and beta."""
    path, leaf = name.removeprefix("body.").rsplit(".", 1)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", path)
    path = f"encoder.layer.{block[1]}.{BLOCK_LAYERS[block[2]]}" if block else LAYERS[path]
    return Tensor(f"{path}.{leaf if old and leaf in ('gamma', 'beta') else LEAVES[leaf]}", transposed=leaf == "w")

"""The traces that the pictures are drawn from, of every layer and model, with sizes that are all different."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from letters import Letters, LetterSizes
from tracing import TracedCall, trace

from scratchformer import models, nn
from scratchformer.catalogue import LAYERS, LayerCase
from scratchformer.dispatch import reference_only
from scratchformer.rng import Key

DEPTH = 2


class Traced(NamedTuple):
    """A layer or model, traced with the references and with the NumPy twins."""

    letters: Letters
    reference: TracedCall
    twins: TracedCall


def _ids(d: LetterSizes, letters: str, high: int | None = None) -> np.ndarray:
    return d.integers(letters, d.V if high is None else high)


def _text(model: Callable, **options: Any) -> Callable[[LetterSizes], LayerCase]:
    """A language model with its loss on ids and targets (B, T)."""

    def case(d: LetterSizes) -> LayerCase:
        return LayerCase(model(d.V, d.C, d.H, DEPTH, d.T + 1, **options), (_ids(d, "B T"), _ids(d, "B T")))

    return case


def _llama(d: LetterSizes, model: Callable = models.Llama) -> LayerCase:
    model = model(d.V, d.C, d.H, DEPTH, d.T + 1, kv_heads=d.G, d_ff=d.F)
    return LayerCase(model, (_ids(d, "B T"), _ids(d, "B T")))


def _transformer_xl(d: LetterSizes) -> LayerCase:
    model = models.TransformerXL(d.V, d.C, d.H, DEPTH, d.T, d.M)
    memory = np.stack([d("B M C") for _ in range(DEPTH)], axis=1)
    return LayerCase(model, (_ids(d, "B T"), _ids(d, "B T"), memory))


def _classifier(d: LetterSizes) -> LayerCase:
    model = models.Classifier(d.V, d.K, d.C, d.H, DEPTH, d.T + 1)
    return LayerCase(model, (_ids(d, "B T"), d.lengths(), _ids(d, "B", d.K)))


def _encoder_decoder(d: LetterSizes) -> LayerCase:
    model = models.EncoderDecoder(d.V, d.C, d.H, DEPTH)
    return LayerCase(model, (_ids(d, "B S"), d.lengths("S"), _ids(d, "B T"), _ids(d, "B T")))


def _bert(model: Callable, d: LetterSizes, *sizes: int) -> tuple[nn.Layer, tuple]:
    """A BERT and rows of two texts."""
    bert = model(d.V, *sizes, d.C, d.H, DEPTH, d.T + 1)
    return bert, (_ids(d, "B T"), d.lengths(), d.integers("B T", 2))


def _body_of_bert(d: LetterSizes) -> LayerCase:
    return LayerCase(*_bert(models.Bert, d))


def _bert_classifier(d: LetterSizes) -> LayerCase:
    model, (ids, lengths, segments) = _bert(models.BertClassifier, d, d.K)
    return LayerCase(model, (ids, lengths, _ids(d, "B", d.K), segments))


def _bert_pretraining(d: LetterSizes) -> LayerCase:
    model, texts = _bert(models.BertPretraining, d)
    return LayerCase(model, (*texts, d.integers("B K", 1), _ids(d, "B K"), d.integers("B", 2)))


def _masked_prediction(d: LetterSizes) -> LayerCase:
    head = models.MaskedPrediction(nn.TokenEmbedding(d.V, d.C))
    return LayerCase(head, (d("B T C"), _ids(d, "B K", d.T)))


def _block_of_parts(d: LetterSizes) -> LayerCase:
    attention, feedforward = nn.RotarySelfAttention(d.C, d.H, d.G, d.D, causal=True), nn.SwiGLU(d.C, d.F)
    return LayerCase(nn.Block(attention, feedforward, nn.RMSNorm(d.C), nn.RMSNorm(d.C), "pre"), (d("B T C"),))


CASES: dict[str, Callable[[LetterSizes], LayerCase]] = {
    **{name: case for name, case in LAYERS.items() if hasattr(nn, name)},
    "LoRA": lambda d: LayerCase(nn.LoRA(nn.Linear(d.I, d.O), d.K), (d("B T I"),)),
    "RotarySelfAttention": lambda d: LayerCase(nn.RotarySelfAttention(d.C, d.H, d.G, d.D, causal=True), (d("B T C"),)),
    "NormedLinear": lambda d: LayerCase(nn.NormedLinear(nn.Linear(d.C, d.H * d.D), nn.RMSNorm(d.D)), (d("B T C"),)),
    "Block": _block_of_parts,
    "TransformerBlock": LAYERS["TransformerBlock, post"],
    "DecoderBlock": lambda d: LayerCase(nn.DecoderBlock(d.C, d.H), (d("B T C"), d("B M C"))),
    "Residual": LAYERS["Residual, pre"],
    "Stack": lambda d: LayerCase(nn.Stack([nn.TransformerBlock(d.C, d.H) for _ in range(DEPTH)]), (d("B T C"),)),
    "EmbeddingSum": lambda d: LayerCase(
        nn.EmbeddingSum([nn.TokenEmbedding(d.V, d.C)], nn.PositionEmbedding(d.T + 1, d.C)), (_ids(d, "B T"),)
    ),
    "Frozen": lambda d: LayerCase(nn.Frozen(nn.TransformerBlock(d.C, d.H)), (d("B T C"),)),
    "Recompute": lambda d: LayerCase(nn.Recompute(nn.TransformerBlock(d.C, d.H)), (d("B T C"),)),
    "RelativeSelfAttention": lambda d: LayerCase(
        nn.RelativeSelfAttention(d.C, d.H, causal=True), (d("B S C"),), {"queries": d.T}
    ),
    "ParallelBlock": lambda d: LayerCase(
        nn.ParallelBlock(
            nn.SelfAttention(d.C, d.H), nn.FeedForward(d.C, d.F), nn.LayerNorm(d.C), nn.LayerNorm(d.C), "pre"
        ),
        (d("B T C"),),
    ),
    "LlamaBlock": lambda d: LayerCase(models.LlamaBlock(d.C, d.H, d.G, d.F), (d("B T C"),)),
    "MaskedPrediction": _masked_prediction,
    "Body": lambda d: LayerCase(models.Body(d.V, d.C, d.H, DEPTH, d.T + 1), (_ids(d, "B T"),)),
    "Bert": _body_of_bert,
    "Classifier": _classifier,
    "LanguageModel": _text(models.LanguageModel),
    "SparseTransformer": lambda d: _text(models.SparseTransformer, stride=4)(d),
    "TransformerXL": _transformer_xl,
    "EncoderDecoder": _encoder_decoder,
    "BertPretraining": _bert_pretraining,
    "BertClassifier": _bert_classifier,
    "GPT2": _text(models.GPT2),
    "Llama": _llama,
    **{name: partial(_llama, model=getattr(models, name)) for name in ("Qwen3", "SmolLM3", "Phi3", "Olmo2", "Gemma3")},
    "Pythia": _text(models.Pythia),
}


# A list of heads: a number of heads that is a large prime shows as a factor of the counts.
REPEATED = {"MultiHeadLoop": "H"}
OTHER_SIZES = {"MultiHeadLoop": {"H": 23, "C": 230}}


@cache
def traced(name: str) -> Traced:
    """The traces of a layer or model in float32. A model with a loss is traced with it; dropout has a key."""
    d = LetterSizes(**OTHER_SIZES.get(name, {}))
    layer, inputs, options = CASES[name](d)
    if isinstance(layer, models.Model):
        options = {**options, "key": Key(0)}
    loss = hasattr(layer, "loss")
    with reference_only():
        reference = trace(layer, *inputs, loss=loss, **options)
    return Traced(Letters(d.sizes, REPEATED.get(name, "")), reference, trace(layer, *inputs, loss=loss, **options))

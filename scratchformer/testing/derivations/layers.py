"""The derivations of the layers: how gradients are routed through parameters and sublayers.

A derivation calls sublayers that have a derivation of their own as functions, such as norm(s). They run as they are, on
complex arrays for derivatives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import models, nn, ops
from ...nn import Layer
from ...notation.run import getdoc
from ...ops.cross_entropy import IGNORED
from ...rng import Key
from .case import DerivationCase, Sizes

GELU = "gelu_tanh"  # an activation that takes complex numbers


def prepared(d: Sizes, layer: Layer) -> dict[str, Any]:
    """The layer's parameters and gradients by name ("query.w", "dquery.w"); all are drawn, in float64."""
    layer.to(dtype=np.float64)
    named = layer.named_parameters()
    for p in named.values():
        p.data[...] = d.generator.standard_normal(p.data.shape) / np.sqrt(p.data.shape[0])
    gradients = {f"d{name}": partial(getattr, p, "grad") for name, p in named.items()}
    return {name: p.data for name, p in named.items()} | gradients


def case(
    d: Sizes, layer: Layer, *inputs: Any, names: dict[str, Any] | None = None, leave: str = "", **options: Any
) -> DerivationCase:
    """The case of a layer, whose derivation is the docstring of its class. leave: see `without`."""
    docstring = without(getdoc(type(layer)), leave)
    names = prepared(d, layer) | (names or {})
    return DerivationCase(layer.forward, layer.backward, inputs, names, options, docstring)


def without(docstring: str, start: str) -> str:
    """The docstring without the paragraph that begins with `start` and the equations below it.

    For a class with two orders of the same parts, of which a case runs one. The lines keep their numbers.
    """
    kept, leaving, above = [], False, ""
    for line in docstring.splitlines():
        if line and not line.startswith(" ") and not above:
            leaving = bool(start) and line.startswith(start)
        kept.append("" if leaving else line)
        above = line
    return "\n".join(kept)


def shows(source: Callable) -> Callable[[Callable], Callable]:
    """A decorator for a function that runs `source`, whose lines of code the derivation shows."""

    def decorate(function: Callable) -> Callable:
        function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        function.__wrapped__ = source  # type: ignore[attr-defined]
        return function

    return decorate


def output(forward: Callable, **options: Any) -> Callable:
    """The function of arrays that a forward computes, without its cache."""
    return lambda *inputs: forward(*inputs, **options)[0]


def basic_attention(d: Sizes) -> DerivationCase:
    """Scores are not divided by √C: with large x, nothing but round-off would be left of their gradients."""
    return case(d, nn.BasicSelfAttention(), min(1, 1 / d.scale) * d("B T C"))


def single_head(d: Sizes) -> DerivationCase:
    layer = nn.SingleHeadAttention(d.C, d.D, causal=d.seed % 2 == 1)
    pattern = ops.Causal() if layer.causal else None

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return ops.attention(q[:, None], k[:, None], v[:, None], pattern)[0][:, 0]

    return case(d, layer, d("B T C"), functions={"attention": attention})


def multi_head_loop(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "D": 3, "C": 6, "B": 4, "T": 5}
    layer = nn.MultiHeadLoop(d.C, d.H, causal=d.seed % 2 == 1)

    def heads(x: np.ndarray) -> np.ndarray:
        return np.stack([head(x) for head in layer.heads], axis=1)

    return case(d, layer, d("B T C"), names={"H": d.H, "D": d.D}, functions={"heads": heads})


def cross_attention(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "D": 3, "C": 6, "B": 4, "T": 5, "S": 7}
    lengths = d.lengths("S")
    names = {"H": d.H, "D": d.D, "m": lengths}
    return case(d, nn.CrossAttention(d.C, d.H), d("B T C"), d("B S C"), ops.Padding(lengths), names=names)


def self_attention(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "C": 6}
    layer = nn.SelfAttention(d.C, d.H, causal=d.seed % 2 == 1, bias=True)
    pattern = ops.Causal() if layer.causal else None
    cross = output(partial(nn.CrossAttention.forward, layer), pattern=pattern)
    return case(d, layer, d("B T C"), functions={"cross": cross})


def relative_attention(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "D": 3, "C": 6, "B": 4, "T": 5, "S": 7}
    layer = nn.RelativeSelfAttention(d.C, d.H, causal=d.seed % 2 == 1)
    x = d("B S C")
    names = {"H": d.H, "D": d.D, "P": layer.distances(d.T, d.S, x)}
    attention = output(ops.relative_attention, pattern=ops.Causal() if layer.causal else None)
    return case(d, layer, x, names=names, queries=d.T, functions={"attention": attention})


def rotary_attention(d: Sizes) -> DerivationCase:
    d.sizes |= {"G": 2, "H": 4, "D": 6, "C": 7, "B": 3, "T": 5}
    layer = nn.RotarySelfAttention(d.C, d.H, d.G, d.D, causal=d.seed % 2 == 1)
    pattern = ops.Causal() if layer.causal else None
    functions = {"rotary": output(ops.rotary), "attention": output(ops.attention, pattern=pattern)}
    return case(d, layer, d("B T C"), names={"G": d.G, "H": d.H, "D": d.D}, functions=functions)


def residual(d: Sizes, order: str) -> DerivationCase:
    """With a branch whose output at a position depends on all positions."""
    d.sizes |= {"H": 2, "C": 6}
    layer = nn.Residual(nn.SelfAttention(d.C, d.H), nn.LayerNorm(d.C), order, nn.Dropout(0.3))
    functions = {"branch": layer.branch, "norm": layer.norm, "dropout": output(layer.dropout.forward, key=d.key)}
    return case(d, layer, d("B T C"), key=d.key, functions=functions, leave=f'In "{OTHER[order]}" order')


OTHER = {"post": "pre", "pre": "post"}


def transformer_block(d: Sizes, order: str) -> DerivationCase:
    d.sizes |= {"H": 2, "C": 6}
    block = nn.TransformerBlock(d.C, d.H, order, causal=True, d_ff=d.F, activation=GELU, bias=True)
    functions = {name: getattr(block, name) for name in ("attention", "feedforward", "norm1", "norm2")}
    return case(d, block, d("B T C"), functions=functions, leave=f"{OTHER[order].title()}-norm")


def decoder_block(d: Sizes, order: str) -> DerivationCase:
    d.sizes |= {"H": 2, "C": 6}
    block = nn.DecoderBlock(d.C, d.H, order, d_ff=d.F, activation=GELU)
    x, memory, pattern = d("B T C"), d("B M C"), ops.Padding(d.lengths("M"))
    functions: dict[str, Callable] = {
        name: getattr(block, name) for name in ("attention", "feedforward", "norm1", "norm2", "norm3")
    }
    functions["cross"] = partial(block.cross, pattern=pattern)
    return case(d, block, x, memory, pattern, functions=functions, leave=f"{OTHER[order].title()}-norm")


def stack(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "C": 4, "B": 2, "T": 3, "I": 5, "F": 6}
    blocks = [nn.DecoderBlock(d.C, d.H, d_ff=d.F, activation=GELU, key=Key(i)) for i in range(2)]
    layer = nn.Stack(blocks, nn.LayerNorm(d.C))
    functions = {"block1": blocks[0], "block2": blocks[1], "norm": layer.norm}
    return case(d, layer, d("B T C"), d("B I C"), functions=functions)


def embedding_sum(d: Sizes) -> DerivationCase:
    embeddings = [nn.Linear(d.I, d.C), nn.TokenEmbedding(d.V, d.C)]
    layer = nn.EmbeddingSum(embeddings, nn.PositionEmbedding(d.T, d.C), nn.LayerNorm(d.C), nn.Dropout(0.3), scale=3)
    functions = {
        "positions": layer.positions,
        "norm": layer.norm,
        "dropout": output(nn.Dropout(0.3).forward, key=d.key),
    }
    units, ids = d("B T I"), d.integers("B T", d.V)
    return case(d, layer, units, ids, names={"scale": layer.scale}, key=d.key, functions=functions)


def tied_output(d: Sizes) -> DerivationCase:
    """A model of an embedding, a body, and an output that shares the embedding's table."""
    tokens, body = nn.TokenEmbedding(d.V, d.C), nn.LayerNorm(d.C)
    tied = nn.TiedOutput(tokens, bias=True)
    names = prepared(d, body) and prepared(d, tied)

    @shows(tied.forward)
    def forward(ids: np.ndarray) -> tuple[np.ndarray, tuple]:
        e, looked_up = tokens.forward(ids)
        x, normalised = body.forward(e)
        y, cache = tied.forward(x)
        return y, (looked_up, normalised, cache)

    @shows(tied.backward)
    def backward(dy: np.ndarray, cache: tuple) -> None:
        looked_up, normalised, own = cache
        tokens.backward(body.backward(tied.backward(dy, own), normalised), looked_up)

    docstring = getdoc(nn.TiedOutput)
    ids = d.integers("B T", d.V)
    return DerivationCase(forward, backward, (ids,), names, {"functions": {"body": body}}, docstring)


def lora(d: Sizes) -> DerivationCase:
    layer = nn.LoRA(nn.Linear(d.I, d.O), d.K, alpha=3.0)
    known = prepared(d, layer)
    names = {"a": "lora_a", "b": "lora_b", "c": "b", "da": "dlora_a", "db": "dlora_b"}
    names = {"w": known["w"], "s": layer.scale} | {name: known[full] for name, full in names.items()}
    docstring = getdoc(nn.LoRA)
    return DerivationCase(layer.forward, layer.backward, (d("B T I"),), names, {}, docstring)


def grid_positions(d: Sizes) -> DerivationCase:
    layer = nn.GridPositions(d.T, d.C, width=3)
    return case(d, layer, d("B T C"), names={"width": layer.width})


def masked_prediction(d: Sizes) -> DerivationCase:
    """The layer and its loss."""
    layer = models.bert_heads.MaskedPrediction(nn.TokenEmbedding(d.V, d.C), activation=GELU)
    known = prepared(d, layer)
    short = {"table": "output.table", "c": "output.b", "dtable": "doutput.table", "dc": "doutput.b"}

    @shows(layer.forward)
    def forward(x: np.ndarray, places: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, tuple]:
        z, cache = layer.forward(x, places)
        loss, of_loss = ops.cross_entropy(z, targets)
        return loss, (cache, of_loss)

    @shows(layer.backward)
    def backward(dloss: float, cache: tuple) -> np.ndarray:
        own, of_loss = cache
        return layer.backward(ops.cross_entropy_backward(dloss, of_loss), own)

    inputs = d("B T C"), d.integers("B K", d.T), d.integers("B K", d.V)
    names = {name: known[full] for name, full in short.items()}
    functions = {"dense": layer.dense, "norm": layer.norm}
    docstring = getdoc(type(layer))
    return DerivationCase(forward, backward, inputs, names, {"functions": functions}, docstring)


def bert_pretraining(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "C": 6, "B": 3, "T": 5, "K": 4, "V": 7}
    model = models.BertPretraining(d.V, d.C, d.H, 1, d.T, d_ff=8, dropout=0.0, activation=GELU)
    prepared(d, model)
    ids, places, targets = d.integers("B T", d.V), d.integers("B K", d.T), d.integers("B K", d.V)
    unrelated = d.integers("B", 2)
    functions = {"masked": partial(model.masked, places=places), "pooler": model.pooler, "following": model.following}

    @shows(model.forward)
    def forward(targets: np.ndarray, unrelated: np.ndarray) -> tuple[np.ndarray, tuple]:
        return model.loss(ids, None, None, places, targets, unrelated)

    @shows(model.backward)
    def backward(dloss: float, cache: tuple) -> None:
        model.loss_backward(dloss, cache)

    options = {"functions": functions}
    docstring = getdoc(models.BertPretraining)
    return DerivationCase(forward, backward, (targets, unrelated), {"x": model.body(ids)}, options, docstring)


def predictor(d: Sizes, smoothing: float = 0.0) -> DerivationCase:
    """A language model's loss, with some targets ignored; with smoothing, that of an encoder and decoder."""
    d.sizes |= {"H": 2, "C": 6}
    ids, targets = d.integers("B T", d.V), d.integers("B T", d.V)
    targets[0, 0] = IGNORED
    model: Any
    inputs: tuple
    if smoothing:
        model = models.EncoderDecoder(d.V, d.C, d.H, 1, d.F, dropout=0.0, label_smoothing=smoothing)
        inputs = (ids, np.full(d.B, d.T), ids)
        forward = partial(model.loss, *inputs, key=d.key)
    else:
        model = models.LanguageModel(d.V, d.C, d.H, 1, d.T)
        inputs = (ids,)
        forward = partial(model.loss, ids)
    prepared(d, model)

    @shows(model.loss)
    def loss(targets: np.ndarray) -> tuple[np.ndarray, tuple]:
        return forward(targets)

    names = {"logits": model.forward(*inputs)[0], "epsilon": smoothing}
    return DerivationCase(loss, model.loss_backward, (targets,), names, {}, getdoc(models.predictor.Predictor))


def encoder_decoder(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "C": 4, "B": 2, "T": 3, "S": 5, "V": 7}
    model = models.EncoderDecoder(d.V, d.C, d.H, 1, 8, activation=GELU, dropout=0.0)
    known = prepared(d, model)
    lengths = d.lengths("S")
    ids = d.integers("B S", d.V), lengths, d.integers("B T", d.V)
    pattern = ops.Padding(lengths)
    at = ops.sinusoidal_positions(max(d.S, d.T), d.C, dtype=np.float64)
    functions = {
        "encoder": lambda u: model.encoder_stack(u + at[: d.S], pattern=pattern),
        "decoder": lambda w, memory: model.decoder_stack(w + at[: d.T], memory, pattern=pattern),
    }
    names = {"table": known["tokens.table"], "dtable": known["dtokens.table"]}
    docstring = getdoc(models.EncoderDecoder)
    return DerivationCase(model.forward, model.backward, ids, names, {"functions": functions}, docstring)


CASES: dict[str, Callable[[Sizes], DerivationCase]] = {
    "BasicSelfAttention": basic_attention,
    "SingleHeadAttention": single_head,
    "MultiHeadLoop": multi_head_loop,
    "CrossAttention": cross_attention,
    "SelfAttention": self_attention,
    "RelativeSelfAttention": relative_attention,
    "RotarySelfAttention": rotary_attention,
    "SwiGLU": lambda d: case(d, nn.SwiGLU(d.C, d.F), d("B T C")),
    "Residual": partial(residual, order="post"),
    "Residual, pre": partial(residual, order="pre"),
    "TransformerBlock": partial(transformer_block, order="post"),
    "TransformerBlock, pre": partial(transformer_block, order="pre"),
    "DecoderBlock": partial(decoder_block, order="post"),
    "DecoderBlock, pre": partial(decoder_block, order="pre"),
    "Stack": stack,
    "EmbeddingSum": embedding_sum,
    "EmbeddingBag": lambda d: case(d, nn.EmbeddingBag(d.V, d.C), d.integers("B T K", d.V)),
    "TiedOutput": tied_output,
    "PositionEmbedding": lambda d: case(d, nn.PositionEmbedding(d.T + 2, d.C), d("B T C"), 1),
    "GridPositions": grid_positions,
    "LoRA": lora,
    "Pooler": lambda d: case(d, models.bert_heads.Pooler(d.C), d("B T C")),
    "MaskedPrediction": masked_prediction,
    "BertPretraining": bert_pretraining,
    "Predictor": predictor,
    "Predictor, smoothing": partial(predictor, smoothing=0.1),
    "EncoderDecoder": encoder_decoder,
}

"""Models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import models, nn, ops
from ..notation.run import getdoc
from ..rng import Key
from ..testing.draw import Draw, Sizes
from .blocks import memory, with_pattern
from .derived import GELU, derived, functions_of, prepared, shows
from .entry import DerivationCase, Entry, LayerCase, layer_of, on
from .tables import LLAMA3


def language_model(
    d: Draw, model: Callable[..., nn.Layer] = models.LanguageModel, heads: int = 0, **options: Any
) -> LayerCase:
    """Two blocks. heads: their number, if it is not to be drawn."""
    d.sizes |= {"H": heads} if heads else {}
    layer = model(d.V, d.C, d.H, 2, d.T + 1, key=Key(d.seed), **options)
    return on(layer, d.integers("B T", d.V), key=d.key)


gpt2 = partial(language_model, model=models.GPT2)
# Four heads of queries, two of keys and values, of a width of their own.
GEMMA3 = {"window": [2, None], "base": [10.0, 100.0], "scaling": [None, LLAMA3]}
llama = partial(language_model, model=models.Llama, heads=4, kv_heads=2, head_width=2)
sparse_transformer = partial(language_model, model=models.SparseTransformer, stride=2)


def encoder_and_decoder(d: Draw, **options: Any) -> LayerCase:
    model = models.EncoderDecoder(d.V, d.C, d.H, 2, d.F, key=Key(d.seed), **options)
    return on(model, d.integers("B S", d.V), d.lengths("S"), d.integers("B T", d.V), key=d.key)


def encoder_decoder(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "C": 4, "B": 2, "T": 3, "S": 5, "V": 7}
    model = models.EncoderDecoder(d.V, d.C, d.H, 1, 8, activation=GELU, dropout=0.0)
    known = prepared(d, model)
    lengths = d.lengths("S")
    ids = d.integers("B S", d.V), lengths, d.integers("B T", d.V)
    pattern = ops.Padding(lengths)
    at = ops.sinusoidal_positions(max(d.S, d.T), d.C, dtype=np.float64)
    encoder, decoder = model.encoder_stack, model.decoder_stack
    functions = functions_of(
        {
            "encoder": (lambda u: encoder.forward(u + at[: d.S], pattern=pattern), encoder.backward),
            "decoder": (
                lambda w, memory: decoder.forward(w + at[: d.T], memory, pattern=pattern),
                decoder.backward,
            ),
        }
    )
    names = {"table": known["tokens.table"], "dtable": known["dtokens.table"]}
    docstring = getdoc(models.EncoderDecoder)
    return DerivationCase(model.forward, model.backward, ids, names, {"functions": functions}, docstring)


def llama_block(d: Sizes) -> DerivationCase:
    d.sizes |= {"G": 2, "H": 4, "D": 6, "C": 7, "B": 3, "T": 5}
    block = models.LlamaBlock(d.C, d.H, d.G, d.F, d.D)
    feedforward: Any = block.feedforward

    def forward(u: np.ndarray) -> tuple[np.ndarray, Any]:
        """SwiGLU, whose code does not take complex numbers."""
        if np.isrealobj(u):
            return feedforward.forward(u)
        gate, up, down = (part.w.data for part in (feedforward.gate, feedforward.up, feedforward.down))
        return (u @ gate / (1 + np.exp(-u @ gate)) * (u @ up)) @ down, None

    replaced = {"feedforward": (forward, feedforward.backward)}
    names: dict[str, Any] = {"N": d.D, "θ": ops.rotary_frequencies(d.D)}
    return with_pattern(d, block, replaced=replaced, G=d.G, H=d.H, D=d.D, **names)


def transformer_xl(d: Draw, **options: Any) -> LayerCase:
    d.sizes["L"] = 2
    model = models.TransformerXL(d.V, d.C, d.H, d.L, d.T + 1, d.M, key=Key(d.seed), **options)
    return on(model, d.integers("B T", d.V), memory=memory(d, "B L M C"), key=d.key)


def classifier(d: Draw, **options: Any) -> LayerCase:
    model = models.Classifier(d.V, d.K, d.C, d.H, 2, d.T + 1, key=Key(d.seed), **options)
    return on(model, d.integers("B T", d.V), d.lengths(), key=d.key)


def classifier_of_units(d: Draw, **options: Any) -> LayerCase:
    model = models.Classifier(None, d.K, d.C, d.H, 2, d.T + 1, units=d.I, key=Key(d.seed), **options)
    pattern = ops.Edges(d.integers("T T", 3) > 0)
    return on(model, d("B T I"), d.lengths(), key=d.key, pattern=pattern)


def bert(d: Draw, model: Callable[..., nn.Layer], *sizes: int, depth: int, places: bool = False) -> LayerCase:
    """Rows of two texts, with padding and dropout; with `places`, positions to predict."""
    layer = model(d.V, *sizes, d.C, d.H, depth, d.T + 1, dropout=0.2, key=Key(d.seed))
    inputs = (d.integers("B T", d.V), d.lengths(), d.integers("B T", 2))
    return on(layer, *inputs, *([d.integers("B K", d.T)] if places else []), key=d.key)


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
        of_layer, of_loss = cache
        return layer.backward(ops.cross_entropy_backward(dloss, of_loss), of_layer)

    inputs = d("B T C"), d.integers("B K", d.T), d.integers("B K", d.V)
    names = {name: known[full] for name, full in short.items()}
    functions = functions_of({"dense": layer.dense, "norm": layer.norm})
    return DerivationCase(forward, backward, inputs, names, {"functions": functions}, getdoc(type(layer)))


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


ENTRIES = [
    Entry("LanguageModel")
    .case("post", language_model, dropout=0.2)
    .case(
        "pre, sinusoidal, recompute",
        language_model,
        norm="pre",
        positions="sinusoidal",
        recompute=True,
        activation="gelu_tanh",
    )
    .case("post, relative", language_model, positions="relative", dropout=0.2),
    Entry("EncoderDecoder")
    .case("post", encoder_and_decoder, dropout=0.2)
    .case("pre", encoder_and_decoder, norm="pre", dropout=0.2, bias=False, activation="gelu")
    .derivation("", encoder_decoder),
    Entry("LlamaBlock")
    .case("", layer_of(models.LlamaBlock, "C H", "B T C", head_width=4))
    .derivation("", llama_block)
    .mistake(
        "The gradient passes only through the attention",
        "In a pre-norm block the sums pass dy on unchanged, through any number of blocks; this path is cut.",
        equation="dx_tc = dh_tc + ds_tc",
        wrong="dx_tc = ds_tc",
    )
    .mistake(
        "The gradient passes only through the feed-forward layer",
        "In a pre-norm block the sums pass dy on unchanged, through any number of blocks; this path is cut.",
        equation="dh_tc = dy_tc + dr_tc",
        wrong="dh_tc = dr_tc",
    ),
    Entry("GPT2").case("", gpt2, dropout=0.2).case("recompute", gpt2, dropout=0.2, d_ff=3, recompute=True),
    Entry("Llama")
    .case("", llama, dropout=0.2)
    .case(
        "tied, window, scaling, biases, recompute",
        llama,
        tied=True,
        window=2,
        base=100.0,
        scaling=LLAMA3,
        bias=True,
        output_bias=True,
        feedforward_bias=True,
        d_ff=3,
        eps=0.1,
        recompute=True,
    ),
    Entry("Qwen3").case("", llama, model=models.Qwen3, dropout=0.2, window=2),
    Entry("SmolLM3").case("", llama, model=models.SmolLM3, by_block={"rotary_width": [None, 0]}),
    Entry("Phi3").case("", llama, model=models.Phi3, by_block={"window": [2, None]}, recompute=True),
    Entry("Olmo2").case("", llama, model=models.Olmo2, dropout=0.2),
    Entry("Pythia")
    .case("", gpt2, model=models.Pythia, heads=1, dropout=0.2, rotary_width=2)
    .case("tied, recompute", gpt2, model=models.Pythia, tied=True, bias=False, d_ff=3, recompute=True),
    Entry("Gemma3")
    .case("", llama, model=models.Gemma3, dropout=0.2)
    .case("by block", llama, model=models.Gemma3, tied=False, by_block=GEMMA3, recompute=True),
    Entry("TransformerXL")
    .case("post", transformer_xl, dropout=0.2)
    .case("pre, recompute", transformer_xl, norm="pre", recompute=True, dropout=0.2),
    Entry("Classifier")
    .case("mean", classifier, dropout=0.2)
    .case("units, mean", classifier_of_units, dropout=0.2)
    .case("units, each, pre", classifier_of_units, pool="none", norm="pre", positions="none")
    .case("max, pre, no positions", classifier, pool="max", norm="pre", positions="none")
    .case("max, pre, relative", classifier, pool="max", norm="pre", positions="relative", dropout=0.2),
    Entry("SparseTransformer")
    .case("strided", sparse_transformer, heads=2, dropout=0.2)
    .case("strided, window", sparse_transformer, heads=2, window=1)
    .case("fixed", sparse_transformer, heads=4, kind="fixed", bias=True, recompute=True)
    .case(
        "fixed, learned positions",
        sparse_transformer,
        heads=4,
        kind="fixed",
        width=2,
        positions="learned",
        norm="post",
    ),
    Entry("Pooler", "models/bert_heads.py")
    .derivation("", lambda d: derived(d, models.bert_heads.Pooler(d.C), d("B T C")))
    .mistake(
        "The gradient of the first vector goes to all of them",
        "Only the first vector is read, so the others get no gradient.",
        file="models/bert_heads.py",
        replace={
            "cache.dense)\n        return dx\n\n\nMaskedPredictionCache": (
                "cache.dense)\n        dx[...] = dx[:, :1]\n        return dx\n\n\nMaskedPredictionCache"
            )
        },
        tests="tests/models/test_bert.py",
    ),
    Entry("MaskedPrediction").derivation("", masked_prediction),
    Entry("BertPretraining")
    .case("", lambda d: bert(d, models.BertPretraining, depth=2, places=True))
    .derivation("", bert_pretraining),
    Entry("BertClassifier").case("", lambda d: bert(d, models.BertClassifier, d.K, depth=1)),
]

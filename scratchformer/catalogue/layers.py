"""Layers of one step: maps, norms, tables, positions, dropout, and the feed-forward layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .. import nn, ops
from ..notation.run import getdoc
from ..testing.draw import Draw, Sizes
from .derived import derived, functions_of, prepared, shows
from .entry import DerivationCase, Entry, LayerCase, layer_of, on


def lora(d: Sizes) -> DerivationCase:
    layer = nn.LoRA(nn.Linear(d.I, d.O), d.K, alpha=3.0)
    known = prepared(d, layer)
    names = {"a": "lora_a", "b": "lora_b", "c": "b", "da": "dlora_a", "db": "dlora_b"}
    names = {"w": known["w"], "s": layer.scale} | {name: known[full] for name, full in names.items()}
    return DerivationCase(layer.forward, layer.backward, (d("B T I"),), names, {}, getdoc(nn.LoRA))


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
        looked_up, normalised, kept = cache
        tokens.backward(body.backward(tied.backward(dy, kept), normalised), looked_up)

    ids = d.integers("B T", d.V)
    return DerivationCase(
        forward, backward, (ids,), names, {"functions": functions_of({"body": body})}, getdoc(nn.TiedOutput)
    )


def grid_positions(d: Sizes) -> DerivationCase:
    layer = nn.GridPositions(d.T, d.C, width=3)
    return derived(d, layer, d("B T C"), names={"width": layer.width})


def units_and_tokens(d: Draw, **options: Any) -> LayerCase:
    embeddings = [nn.Linear(d.I, d.C), nn.TokenEmbedding(d.V, d.C)]
    embedding = nn.EmbeddingSum(embeddings, dropout=nn.Dropout(0.3), **options)
    return on(embedding, d("B T I"), d.integers("B T", d.V), key=d.key)


def embedding_sum(d: Sizes, training: bool = True) -> DerivationCase:
    """training: whether dropout drops anything."""
    embeddings, norm, dropout = [nn.Linear(d.I, d.C), nn.TokenEmbedding(d.V, d.C)], nn.LayerNorm(d.C), nn.Dropout(0.3)
    layer = nn.EmbeddingSum(embeddings, nn.PositionEmbedding(d.T, d.C), norm, dropout, scale=3)
    drop = (partial(dropout.forward, key=d.key), dropout.backward) if training else dropout
    parts: dict[str, Any] = {"positions": layer.positions, "norm": norm, "dropout": drop}
    names = {"scale": layer.scale, "eps": norm.eps, "start": 0}
    key = d.key if training else None
    return derived(d, layer, d("B T I"), d.integers("B T", d.V), names=names, parts=parts, key=key)


def normed_linear(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "D": 3}
    layer = nn.NormedLinear(nn.Linear(d.C, d.H * d.D, bias=False), nn.RMSNorm(d.D, 0.1))
    return derived(d, layer, d("N C"), names={"H": d.H, "D": d.D, "eps": layer.norm.eps})


ENTRIES = [
    Entry("Linear", tests="tests/nn/test_all_layers.py tests/nn/test_pointwise.py -k 'Linear or FeedForward'")
    .case("", layer_of(nn.Linear, "I O", "B T I"))
    .mistake(
        "A weight's gradient is assigned, not added",
        "If a layer is used twice, or a weight is shared, only the last gradient is left.",
        file="nn/layer.py",
        replace={"grad += gradient": "grad[...] = gradient"},
        tests="tests/nn/test_pointwise.py tests/nn/test_layer.py",
    ),
    Entry("LoRA", tests="tests/nn/test_all_layers.py tests/nn/test_lora.py -k LoRA")
    .case("", lambda d: on(nn.LoRA(nn.Linear(d.I, d.O), 2, alpha=3.0), d("B T I")))
    .case("no bias", lambda d: on(nn.LoRA(nn.Linear(d.I, d.O, bias=False), 2), d("B T I")))
    .derivation("", lora),
    Entry("LayerNorm").case("", layer_of(nn.LayerNorm, "C", "B T C")),
    Entry("TokenEmbedding").case("", lambda d: on(nn.TokenEmbedding(d.V, d.C), d.integers("B T", d.V))),
    Entry("TiedOutput")
    .case("", lambda d: on(nn.TiedOutput(nn.TokenEmbedding(d.V, d.C)), d("B T C")))
    .case("bias", lambda d: on(nn.TiedOutput(nn.TokenEmbedding(d.V, d.C), bias=True), d("B T C")))
    .derivation("", tied_output)
    .mistake(
        "The table gets no gradient from the output",
        "A tied table is used twice, and its gradient is the sum of both uses.",
        replace={"grads = [self.table.grad.T] if": "grads = [self.table.grad.T.copy()] if"},
        tests="tests/models/test_encoder_decoder.py -k table",
    )
    .mistake(
        "The gradient overwrites the one from the table's other use",
        "A tied table is used twice, and its gradient is the sum of both uses.",
        replace={"grads = [self.table.grad.T] if": "self.table.grad[...] = 0\n        grads = [self.table.grad.T] if"},
        tests="tests/nn/test_all_layers.py -k TiedOutput",
    ),
    Entry("PositionEmbedding")
    .case("", lambda d: on(nn.PositionEmbedding(d.T + 1, d.C), d("B T C")))
    .derivation("", lambda d: derived(d, nn.PositionEmbedding(d.T + 2, d.C), d("B T C"), 1))
    .mistake(
        "The gradient goes to the first positions, wherever x starts",
        "Backward takes row t of the table, where forward has taken row start + t.",
        equation="dtable_pc = Σ_b Σ_{t, start + t = p} dy_btc",
        wrong="dtable_pc = Σ_b Σ_{t, t = p} dy_btc",
    ),
    Entry("GridPositions")
    .case("", lambda d: on(nn.GridPositions(d.T + 1, d.C, 2), d("B T C")))
    .derivation("", grid_positions)
    .mistake(
        "The columns get the gradient of the rows",
        "Each table must be indexed with its own positions, in backward as in forward.",
        equation="dcolumns_kc = Σ_t [t mod width = k] g_tc",
        wrong="dcolumns_kc = Σ_t [⌊t/width⌋ = k] g_tc",
        replace={
            "cache.columns, out=self.columns.grad)\n        ret": "cache.rows, out=self.columns.grad)\n        ret"
        },
    ),
    Entry("SinusoidalPositions")
    .case("", layer_of(nn.SinusoidalPositions, "", "B T C"))
    .derivation("", lambda d: derived(d, nn.SinusoidalPositions(), d("B T C"), 1))
    .mistake(
        "100,000 instead of 10,000",
        "The sinusoids are others. x gets the right gradient, but weights trained with one base do not fit the other.",
        equation="θ_c = 10000^(−2⌊c/2⌋/C)",
        wrong="θ_c = 100000^(−2⌊c/2⌋/C)",
    ),
    Entry("Dropout").case("", lambda d: on(nn.Dropout(0.4), d("B T C"), key=d.key)),
    Entry("FeedForward")
    .case("", layer_of(nn.FeedForward, "C F", "B T C"))
    .case("gelu", layer_of(nn.FeedForward, "C F", "B T C", activation="gelu"))
    .case("gelu_tanh", layer_of(nn.FeedForward, "C F", "B T C", activation="gelu_tanh"))
    .case("a pair", layer_of(nn.FeedForward, "C F", "B T C", activation=(ops.silu, ops.silu_backward)))
    .derivation("", lambda d: derived(d, nn.FeedForward(d.C, d.F), d("B T C")))
    .mistake(
        "The gradient passes where ReLU let nothing through",
        "Backward skips the activation, so dx and the gradients of the first map belong to another function.",
        equation="de_nf = da_nf where e_nf > 0, 0 elsewhere",
        wrong="de_nf = da_nf",
    )
    .mistake(
        "ReLU is judged by the gradient",
        "A negative gradient is dropped, where it is the number before ReLU that decides.",
        equation="de_nf = da_nf where e_nf > 0, 0 elsewhere",
        wrong="de_nf = da_nf where da_nf > 0, 0 elsewhere",
    ),
    Entry("RMSNorm").case("", layer_of(nn.RMSNorm, "C", "B T C")),
    Entry("NormedLinear")
    .case("", lambda d: on(nn.NormedLinear(nn.Linear(d.C, 6), nn.RMSNorm(3)), d("B T C")))
    .case("all", lambda d: on(nn.NormedLinear(nn.Linear(d.C, 4, False), nn.RMSNorm(4, 0.1)), d("B T C")))
    .derivation("", normed_linear)
    .mistake(
        "The mean is taken over all groups",
        "The mean of g ẑ is over the D numbers of one group, since they alone share its ρ.",
        equation="dz_nhd = (g_nhd − ẑ_nhd 1/D Σ_d' g_nhd' ẑ_nhd')/ρ_nh",
        wrong="dz_nhd = (g_nhd − ẑ_nhd 1/D Σ_h' Σ_d' g_nh'd' ẑ_nh'd')/ρ_nh",
    )
    .mistake(
        "ρ is treated as a constant",
        "ρ depends on every number of its group. Its slope removes the part of g along ẑ, which cannot change y.",
        equation="dz_nhd = (g_nhd − ẑ_nhd 1/D Σ_d' g_nhd' ẑ_nhd')/ρ_nh",
        wrong="dz_nhd = g_nhd/ρ_nh",
    ),
    Entry("GeGLU")
    .case("", layer_of(nn.GeGLU, "C F", "B T C", bias=True))
    .derivation("", lambda d: derived(d, nn.GeGLU(d.C, d.F), d("B T C")))
    .mistake(
        "The gate gets no factor from the other branch",
        "Each factor of a product gets the other one. Here dgate has the wrong size, and often the wrong sign.",
        equation="dgate_nf = da_nf ∂a_nf/∂gate_nf = da_nf up_nf (s_nf + gate_nf r_nf)",
        wrong="dgate_nf = da_nf (s_nf + gate_nf r_nf)",
    ),
    Entry("SwiGLU")
    .case("", layer_of(nn.SwiGLU, "C F", "B T C"))
    .case("bias", layer_of(nn.SwiGLU, "C F", "B T C", bias=True))
    .derivation("", lambda d: derived(d, nn.SwiGLU(d.C, d.F), d("B T C")))
    .mistake(
        "The gate passes nothing back to x",
        "x feeds both factors of the product; dx has only the term of one.",
        equation="dx_nc = Σ_f dgate_nf gate.w_cf + Σ_f dup_nf up.w_cf",
        wrong="dx_nc = Σ_f dup_nf up.w_cf",
        replace={
            "dx = add_backward(self.up.backward(dup, cache.up), self.gate, dgate, cache.gate)\n        return": (
                "self.gate.backward(dgate, cache.gate)\n        dx = self.up.backward(dup, cache.up)\n        return"
            )
        },
        tests="tests/nn/test_all_layers.py -k SwiGLU",
    ),
    Entry("EmbeddingSum")
    .case("", units_and_tokens)
    .case(
        "positions, norm, scale",
        lambda d: units_and_tokens(d, positions=nn.PositionEmbedding(d.T + 1, d.C), norm=nn.LayerNorm(d.C), scale=3.0),
    )
    .derivation("", embedding_sum)
    .mistake(
        "The embedding is scaled, its gradient is not",
        "The gradients of the embeddings lack the factor of the forward, such as √C.",
        equation="de = scale dx",
        wrong="de = dx",
        replace={"         de = (self.scale * dx).astype(dx.dtype, copy=False)": "         de = dx"},
        tests="tests/models/test_encoder_decoder.py -k gradient",
    ),
]

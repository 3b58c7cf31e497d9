"""The heads of a BERT: what is learned from the vectors of its body.

Source: Devlin, Chang, Lee, Toutanova, "BERT: pre-training of deep bidirectional transformers for language
understanding", 2019.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..nn import Layer, LayerNorm, Linear, TiedOutput, TokenEmbedding
from ..rng import Key

GELU = "gelu"  # the activation of the paper


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


def expect_in_text(places: Array, lengths: Array) -> None:
    """Raise IndexError, naming the row, unless all places (B, K) are within the texts' lengths (B,)."""
    padding = places >= lengths[:, None]
    if padding.any():
        row = int(padding.any(axis=1).argmax())
        last, found = int(lengths[row]) - 1, int(places[row].max())
        raise IndexError(f"places: row {row}: expected values from 0 to {last}, where its text ends, got {found}")

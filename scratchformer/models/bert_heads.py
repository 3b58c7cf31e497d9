"""The heads of BERT, which turn the vectors of its body into predictions.

Source: Devlin, Chang, Lee, Toutanova, "BERT: pre-training of deep bidirectional transformers for language
understanding", 2019.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

from .. import ops
from ..backend import Array, array_module, zeros_like
from ..checks import expect_instance, is_checked
from ..nn import Layer, LayerNorm, Linear, TiedOutput, TokenEmbedding
from ..nn.layer import expect_backward
from ..rng import Key

GELU = "gelu"  # the activation of the paper


POOLING = {"tanh": (ops.tanh, ops.tanh_backward), "relu": (ops.relu, ops.relu_backward)}


class PoolerCache(NamedTuple):
    shape: tuple[int, int, int]  # of x
    dense: Any
    activation: Any


class Pooler(Layer):
    """y = tanh(x₀ w + b), where x₀ is the vector of [CLS], the first of each row. x: (B, T, C). Returns (B, C).

    The body must collect there what it knows of the whole row, since later layers see no other vector.
    pooling: "tanh", or "relu", which then takes the place of tanh.

    Backward. In indices, with the affine map and the tanh of the first vector of each row (see `linear` and `tanh`),

        h_bc = Σ_c' x_{b,0,c'} dense.w_c'c + dense.b_c        y_bc = tanh(h_bc)
        dh_bc = dy_bc (1 − y_bc²)

    So only the first vector of a row gets a gradient:

        dx_btc' = [t = 0] Σ_c dh_bc dense.w_c'c
        dx[:, 0] = self.dense.backward(activation_backward(dy, cache.activation), cache.dense)
    """

    def __init__(self, d_model: int, pooling: str = "tanh", key: Key = Key(0)) -> None:
        if pooling not in POOLING:
            raise ValueError(f"pooling: expected one of {', '.join(POOLING)}, got {pooling!r}")
        self.dense = Linear(d_model, d_model, key=key)
        self.pooling = pooling

    def forward(self, x: Array) -> tuple[Array, PoolerCache]:
        h, dense = self.dense.forward(x[:, 0])
        y, activation = POOLING[self.pooling][0](h)
        return y, PoolerCache(x.shape, dense, activation)

    def backward(self, dy: Array, cache: PoolerCache) -> Array:
        expect_backward(cache, PoolerCache, dy=dy)
        _, activation_backward = POOLING[self.pooling]
        dx = zeros_like(dy, cache.shape)
        dx[:, 0] = self.dense.backward(activation_backward(dy, cache.activation), cache.dense)
        return dx


MaskedPredictionCache = namedtuple("MaskedPredictionCache", "gather dense norm output")


class MaskedPrediction(Layer):
    """z = norm(gelu(u w + b)) tableᵀ + c, with u the vectors at the chosen positions: logits of the hidden tokens.

    x: (B, T, C), the encoder's vectors. places: (B, K), the chosen positions in each row. embedding: the layer whose
    table is shared with the output (`TiedOutput`). Returns the logits z (B, K, V).

    The masked-prediction loss is the mean over the N = B K chosen positions n = (b, k), with the hidden tokens as
    targets. Starting from the encoder's vectors, it is

        u_bkc = x_btc with t = places_bk        (chosen)
        e = dense(u)        h = norm(e)        (an affine map with an activation, and a layer norm)
        z_bkv = Σ_c h_bkc table_vc + c_v        (a logit for every token of the vocabulary)
        loss = 1/N Σ_n (log(Σ_v exp(z_nv)) − z_{n,targets_n})        (cross-entropy)

    Positions are chosen first because the product with the table is the largest in the model: V logits are computed
    only for the 15% of the positions that are chosen.

    Backward. From the last step to the first, each line differentiates one of the lines above:

        p_bkv = softmax_v(z_bkv)        dz_bkv = dloss/N (p_bkv − [v = targets_bk])        (see `cross_entropy`)
        dc_v = Σ_n dz_nv        dtable_vc = Σ_n dz_nv h_nc        dh_bkc = Σ_v dz_bkv table_vc
        de = norm_backward(dh, e)        du = dense_backward(de, u)        (see `layernorm` and `dense`)
        dx_btc = Σ_k [places_bk = t] du_bkc        (see `gather`)

    In a model, the gradient from the input embedding is added to dtable: see `TiedOutput`. Only the chosen positions
    get a gradient here; in the blocks, attention passes it on to the others. Every row of the table gets one, including
    those of tokens that do not occur.

        dh = self.output.backward(dz, cache.output)
        du = self.dense.backward(self.norm.backward(dh, cache.norm), cache.dense)
        dx = ops.gather_backward(du, cache.gather)

    A micro-batch with M of the N positions has the mean over M as its loss; multiplied by its share M/N, this is its
    part of the sum above. All rows of a batch have the same number K of positions, so M/N is also its share of the
    rows, and the same weight is right for the next-sentence loss, a mean over rows.

    Source: Devlin et al., 2019, section 3.1, task 1; the layers before the output as in their published program.
    """

    def __init__(
        self, embedding: TokenEmbedding, eps: float = 1e-12, activation: str = GELU, key: Key = Key(0)
    ) -> None:
        expect_instance("embedding", embedding, TokenEmbedding)
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
        expect_backward(cache, MaskedPredictionCache, dz=dz)
        dh = self.output.backward(dz, cache.output)
        du = self.dense.backward(self.norm.backward(dh, cache.norm), cache.dense)
        dx = ops.gather_backward(du, cache.gather)
        return dx


def expect_in_text(places: Array, lengths: Array) -> None:
    """Raise IndexError, naming the row, unless the positions `places` (B, K) are within the texts' lengths (B,), or
    `is_checked(places)`.
    """
    if is_checked(places):
        return
    padding = places >= lengths[:, None]
    if padding.any():
        row = int(padding.any(axis=1).argmax())
        last, place = int(lengths[row]) - 1, int(places[row].max())
        raise IndexError(f"places: row {row}: expected values from 0 to {last}, where its text ends, got {place}")


def expect_no_padding(ids: Array, lengths: Array | None, padding: int) -> None:
    """Raise ValueError, naming the row, if the padding token is within a text of ids (B, T): see `Bert`."""
    inside = ids == padding
    if lengths is not None:
        inside &= array_module(ids).arange(ids.shape[1]) < lengths[:, None]
    if inside.any():
        row = int(inside.any(axis=1).argmax())
        raise ValueError(f"ids: row {row}: expected the padding token, {padding}, only after the end of the text")

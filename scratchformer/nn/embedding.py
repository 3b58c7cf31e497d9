"""Token and position embeddings, and the sum of embeddings that every model starts with."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import ops
from ..backend import Array, array_module, widen
from ..checks import (
    expect_at_least,
    expect_boolean,
    expect_floating,
    expect_instance,
    expect_number,
    expect_positive,
    expect_real,
    expect_shape,
)
from ..dispatch import operation
from ..rng import Key, fold
from .layer import Layer, Param, add_gradients, expect_backward, initial_generator, list_of_layers
from .pointwise import Dropout


class TokenEmbedding(Layer):
    """y = table[ids]: a learned vector of width d_model for each of vocab_size tokens.

    std: the standard deviation of the initial values, which are normal. ids: (B, T), integers. Returns (B, T, C).
    ids have no gradient, so `backward` returns None.
    """

    def __init__(self, vocab_size: int, d_model: int, std: float = 1.0, key: Key = Key(0)) -> None:
        draw = initial_generator(key, vocab_size=vocab_size, d_model=d_model)
        expect_number("std", std)
        self.table = Param(np.float32(std) * draw.standard_normal((vocab_size, d_model), np.float32), "table")

    def forward(self, ids: Array) -> tuple[Array, tuple]:
        return ops.embedding(ids, self.table.data)

    def backward(self, dy: Array, cache: tuple) -> None:
        ops.embedding_backward(dy, cache, out=self.table.grad)


class TiedOutput(Layer):
    """y = x tableᵀ + b: the logit of a token is the product of x with its vector in the table of a `TokenEmbedding`.

    embedding: the layer whose table is shared. bias: whether there is a b (V,), initially zero. x: (..., C).
    Returns (..., V).

    Forward, in a model with a body between the embedding and the output:

        e_btc = table_vc with v = ids_bt        x = body(e)        y_btv = Σ_c x_btc table_vc + b_v

    Backward. By `linear`, with w = tableᵀ,

        dx_btc = Σ_v dy_btv table_vc        dw_cv = Σ_b Σ_t x_btc dy_btv        db_v = Σ_b Σ_t dy_btv

    The body passes dx back to e. A row of the table gets the gradients of all positions that looked it up (see
    `embedding`):

        de = body_backward(dx, e)        din_vc = Σ_b Σ_t [ids_bt = v] de_btc

    The loss depends on the table through both its uses, and the gradient is the sum over these two paths:

        dtable_vc = dw_cv + din_vc

    The first term, transposed back, is added here, and the second in the backward of the embedding. Both are added to
    the same `.grad`, in either order. A token's row gets a gradient from every position where a token is predicted,
    even if this token does not occur in the input. In code, where dw is added to the transposed view of that `.grad`:

        dx = add_gradients(ops.linear_backward, dy, cache, grads)

    Source: Press, Wolf, "Using the output embedding to improve language models", 2017.
    """

    def __init__(self, embedding: TokenEmbedding, bias: bool = False) -> None:
        expect_instance("embedding", embedding, TokenEmbedding)
        expect_boolean(bias=bias)
        self.table = embedding.table
        self.b = Param(np.zeros(len(self.table.data), np.float32), "b") if bias else None

    def forward(self, x: Array) -> tuple[Array, tuple]:
        return ops.linear(x, self.table.data.T, None if self.b is None else self.b.data)

    def backward(self, dy: Array, cache: tuple) -> Array:
        grads = [self.table.grad.T] if self.b is None else [self.table.grad.T, self.b.grad]
        dx = add_gradients(ops.linear_backward, dy, cache, grads)
        return dx


@operation
def extend_output(x: Array, output: Layer) -> Array:
    """The logits (B, T, V) that a model's output layer gives for x (B, T, C), without a cache."""
    return output(x)


@operation
def extend_by_token(numbers: Array, embedding: EmbeddingSum, stack: Any, output: Layer, stored: list) -> Array:
    """The logits (B, V) after one new token of each of B sequences, from a model's embedding, stack and output.

    numbers: (1 + B,), integers: how many positions of each sequence are stored, then the new ids. On a GPU no size or
    address depends on them, so a twin of this step can be recorded once and run for every token. stored: see `Stack`.
    """
    past = int(numbers[0])
    x, _ = embedding.forward(numbers[1:, None], start=past)
    return extend_output(stack.extend(x, stored, past), output)[:, 0]


class PositionEmbedding(Layer):
    """y = x + table[:T]: a learned vector for each of max_length positions.

    std: the standard deviation of the initial values, which are normal. x: (B, T, C) with T ≤ max_length; `start` is
    the position of x[:, 0].

    Backward. The vector of a position is added in every sequence, so its gradient is a sum over the sequences:

        y_btc = x_btc + table_{start + t,c}        dx_btc = dy_btc        dtable_pc = Σ_b Σ_{t, start + t = p} dy_btc
    """

    def __init__(self, max_length: int, d_model: int, std: float = 1.0, key: Key = Key(0)) -> None:
        draw = initial_generator(key, max_length=max_length, d_model=d_model)
        expect_number("std", std)
        self.table = Param(np.float32(std) * draw.standard_normal((max_length, d_model), np.float32), "table")

    def forward(self, x: Array, start: int = 0) -> tuple[Array, slice]:
        max_length, C = self.table.data.shape
        expect_floating(x=x)
        expect_shape("x", x, "B T C", C=C)
        places = expect_places(x, start, max_length)
        return x + self.table.data[places], places

    def backward(self, dy: Array, cache: slice) -> Array:
        expect_backward(cache, slice, dy=dy)
        expect_shape("dy", dy, "B T C", T=cache.stop - cache.start, C=self.table.data.shape[1])
        self.table.grad[cache] += widen(dy).sum(axis=0)
        return dy


def expect_places(x: Array, start: int, max_length: int) -> slice:
    """The positions of x (B, T, C) if its first one is at `start`. Raises ValueError or TypeError unless all are below
    max_length.
    """
    expect_at_least(0, start=start)
    start, T = int(start), x.shape[1]
    if start + T > max_length:
        got = f"{start} + {T}" if start else f"T = {T}"
        raise ValueError(f"x: expected (B, T, C) with {'start + ' * bool(start)}T up to {max_length}, got {got}")
    return slice(start, start + T)


GridCache = namedtuple("GridCache", "rows columns")


class GridPositions(Layer):
    """y_t = x_t + rows[⌊t/width⌋] + columns[t mod width]: a learned vector for each row and each column of a grid.

    The sequence is a grid read row by row, like the pixels of an image; positions in the same row, or in the same
    column, share a vector. max_length: of the sequences. width: the number of columns of the grid. std: the standard
    deviation of the initial values, which are normal. x: (B, T, C) with T ≤ max_length; `start` is the position of
    x[:, 0].

    Forward, with start = 0:

        y_btc = x_btc + rows_rc + columns_kc with r = ⌊t/width⌋, k = t mod width

    Backward. The gradient at a position is summed over the sequences, and goes to both its row and its column:

        dx_btc = dy_btc        g_tc = Σ_b dy_btc
        drows_rc = Σ_t [⌊t/width⌋ = r] g_tc        dcolumns_kc = Σ_t [t mod width = k] g_tc

    Each is the gradient of a table in which T vectors were looked up (see `embedding`):

        g = widen(dy).sum(axis=0).astype(dy.dtype, copy=False)
        ops.embedding_backward(g, cache.rows, out=self.rows.grad)
        ops.embedding_backward(g, cache.columns, out=self.columns.grad)

    Source: Child et al., "Generating long sequences with sparse transformers", 2019, section 5.3.
    """

    def __init__(self, max_length: int, d_model: int, width: int, std: float = 1.0, key: Key = Key(0)) -> None:
        expect_positive(max_length=max_length, d_model=d_model, width=width)
        expect_number("std", std)
        self.max_length, self.width = max_length, width = int(max_length), int(width)

        def table(name: str, size: int) -> Param:
            draw = initial_generator(fold(key, name), **{name: size}, d_model=d_model)
            return Param(np.float32(std) * draw.standard_normal((size, d_model), np.float32), name)

        self.rows = table("rows", -(-max_length // width))
        self.columns = table("columns", width)

    def forward(self, x: Array, start: int = 0) -> tuple[Array, GridCache]:
        expect_floating(x=x)
        expect_shape("x", x, "B T C", C=self.rows.data.shape[1])
        places = expect_places(x, start, self.max_length)
        t = array_module(x).arange(places.start, places.stop)
        of_row, rows = ops.embedding(t // self.width, self.rows.data)  # (T, C)
        of_column, columns = ops.embedding(t % self.width, self.columns.data)
        return x + (of_row + of_column), GridCache(rows, columns)

    def backward(self, dy: Array, cache: GridCache) -> Array:
        expect_backward(cache, GridCache, dy=dy)
        g = widen(dy).sum(axis=0).astype(dy.dtype, copy=False)
        ops.embedding_backward(g, cache.rows, out=self.rows.grad)
        ops.embedding_backward(g, cache.columns, out=self.columns.grad)
        return dy


class SinusoidalPositions(Layer):
    """y = x + P[:T], with the fixed sinusoids P of `ops.sinusoidal_positions`.

    x: (B, T, C), for any length T; `start` is the position of x[:, 0].

        θ_c = 10000^(−2⌊c/2⌋/C)
        P_tc = sin((start + t) θ_c) where c mod 2 = 0, cos((start + t) θ_c) elsewhere
        y_btc = x_btc + P_tc

    Backward. P depends on neither x nor a parameter, so only x gets a gradient:

        dx_btc = dy_btc
    """

    def forward(self, x: Array, start: int = 0) -> tuple[Array, None]:
        expect_floating(x=x)
        expect_shape("x", x, "B T C")
        _, T, C = x.shape
        return x + ops.sinusoidal_positions(T, C, array_module(x), x.dtype, start), None

    def backward(self, dy: Array, cache: None) -> Array:
        expect_real("dy", dy)
        return dy


EmbeddingSumCache = namedtuple("EmbeddingSumCache", "embeddings positions norm dropout")


class EmbeddingSum(Layer):
    """y = dropout(norm(positions(scale · Σ_i embedding_i(input_i)))): the input of a model's first block.

    embeddings: layers that return vectors (B, T, C), one for each input of `forward`: a `TokenEmbedding` for ids
    (B, T), or a `Linear` for vectors (B, T, I). positions: a layer that adds position embeddings; it is called with
    `start=`, the first position, unless that is 0. norm: a layer. dropout: a `Dropout`. Each of these three may be
    None, and is then left out. scale: a number.

    Forward. With a `Linear` for units u and a `TokenEmbedding` for ids,

        u := inputs1        ids := inputs2        w := embeddings.0.w        table := embeddings.1.table
        e_btc = Σ_i u_bti w_ic + embeddings.0.b_c + table_vc with v = ids_bt
        x = scale e        a = positions(x)        o = norm(a)        y = dropout(o)

    Backward. Dropout, norm and positions, in this order, pass dy back to dx. Every term of e has the same gradient, de:

        do = dropout_backward(dy, o)        da = norm_backward(do, a)
        dx = positions_backward(da, x)        de = scale dx

    Each embedding gets de, as if it were the only one (see `linear` and `embedding`):

        du_bti = Σ_c de_btc w_ic        dw_ic = Σ_b Σ_t u_bti de_btc        dtable_vc = Σ_b Σ_t [ids_bt = v] de_btc
        dembeddings.0.b_c = Σ_b Σ_t de_btc

    In code:

        de = (self.scale * dx).astype(dx.dtype, copy=False)

    `backward` returns the gradient of the input that is not ids, a tuple of them if there are several, or None.
    """

    def __init__(
        self,
        embeddings: Sequence[Layer],
        positions: Layer | None = None,
        norm: Layer | None = None,
        dropout: Dropout | None = None,
        scale: float = 1.0,
    ) -> None:
        for name, layer in ("positions", positions), ("norm", norm), ("dropout", dropout):
            expect_instance(name, layer, Layer, none=True)
        expect_number("scale", scale)
        self.embeddings = list_of_layers("embeddings", embeddings)
        self.positions, self.norm, self.dropout = positions, norm, dropout
        self.scale = float(scale)  # a NumPy number would turn float32 into float64

    def forward(self, *inputs: Array, key: Key | None = None, start: int = 0) -> tuple[Array, EmbeddingSumCache]:
        if len(inputs) != len(self.embeddings):
            raise ValueError(f"inputs: expected {len(self.embeddings)}, one for each embedding, got {len(inputs)}")
        first, *rest = (e.forward(i) for e, i in zip(self.embeddings, inputs, strict=True))
        x, caches, positions, norm, dropout = first[0], [first[1]], None, None, None
        for y, cache in rest:
            if y.shape != x.shape:
                raise ValueError(f"inputs: expected vectors of one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
            x, _ = ops.add(x, y)
            caches.append(cache)
        if self.scale != 1:
            x = (self.scale * x).astype(x.dtype, copy=False)
        if self.positions is not None:
            x, positions = self.positions.forward(x, **({"start": start} if start else {}))
        if self.norm is not None:
            x, norm = self.norm.forward(x)
        if self.dropout is not None:
            x, dropout = self.dropout.forward(x, key)
        return x, EmbeddingSumCache(tuple(caches), positions, norm, dropout)

    def backward(self, dy: Array | None, cache: EmbeddingSumCache) -> Any:
        expect_backward(cache, EmbeddingSumCache)
        if dy is None:  # of frozen blocks
            return None
        dx = dy
        if self.dropout is not None:
            dx = self.dropout.backward(dy, cache.dropout)
        if self.norm is not None:
            dx = self.norm.backward(dx, cache.norm)
        if self.positions is not None and dx is not None:
            dx = self.positions.backward(dx, cache.positions)
        if dx is None:  # of a frozen norm, or frozen positions
            return None
        de = dx
        if self.scale != 1:
            de = (self.scale * dx).astype(dx.dtype, copy=False)
        backwards = [e.backward(de, c) for e, c in zip(self.embeddings, cache.embeddings, strict=True)]
        gradients = [gradient for gradient in backwards if gradient is not None]
        return tuple(gradients) if len(gradients) > 1 else gradients[0] if gradients else None

"""The sum of embeddings that every model starts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..backend import Array
from ..checks import expect_instance, expect_number
from ..rng import Key
from .dropout import Dropout
from .layer import Layer, expect_backward, list_of_layers


class EmbeddingSumCache(NamedTuple):
    embeddings: tuple
    positions: Any
    norm: Any
    dropout: Any


class EmbeddingSum(Layer):
    """y = dropout(norm(positions(scale · Σ_i embedding_i(input_i)))): the input of a model's first block.

    embeddings: layers that return vectors (B, T, C), one for each input of `forward`: a `TokenEmbedding` for ids
    (B, T), or a `Linear` for vectors (B, T, I). positions: a layer that adds position embeddings; it is called with
    `start=`, the first position, unless that is 0. norm: a layer. dropout: a `Dropout`. Each of these three may be
    None, and is then left out. scale: a number.

    Forward. With a `Linear` for units u and a `TokenEmbedding` for ids,

        u := inputs1        ids := inputs2        w := embeddings.0.w        table := embeddings.1.table
        e_btc = Σ_i u_bti w_ic + embeddings.0.b_c + table_vc with v = ids_bt
        x = scale e        y = dropout(norm(positions(x)))

    Backward. Dropout, norm and positions, in this order, pass dy back to dx. Every term of e has the same gradient, de:

        dx = ∂L/∂x        de = scale dx

    Each embedding gets de, as if it were the only one (see `linear` and `embedding`):

        du_bti = Σ_c de_btc w_ic        dw_ic = Σ_b Σ_t u_bti de_btc        dtable_vc = Σ_b Σ_t [ids_bt = v] de_btc

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
            x = x + y
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
        dx = dy if self.dropout is None else self.dropout.backward(dy, cache.dropout)
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
        found = [gradient for gradient in backwards if gradient is not None]
        return tuple(found) if len(found) > 1 else found[0] if found else None

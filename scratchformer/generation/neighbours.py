"""Translation with a memory: what followed in known translations, where the decoder's vector was nearly the same."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from ..backend import Array, array_module, to_cpu, to_device
from ..data import Subwords
from ..data.translation import TokenPairs, pairs_in_order
from ..dispatch import fast
from ..models import EncoderDecoder
from ..nn import Layer
from ..ops.checks import expect_array, expect_instance, expect_number, expect_positive, expect_shape
from ..ops.cross_entropy import IGNORED
from ..ops.precision import widen
from .generate import expect_vocabulary

TOKENS = 2048  # of known translations at once, at most, unless a single one is longer
SCORES = 1 << 24  # scores at once, at most, unless a single vector has more
BLOCK = 128  # scores whose largest is found before any of them is looked at


class NeighbourOutput(Layer):
    """An output layer whose predictions are mixed with what followed the known vectors nearest to its input.

    output: the layer (..., C) to (..., V) that it stands for, such as a `nn.TiedOutput`. keys: (N, C), the known
    vectors. values: (N,), integers, the token that followed each. neighbours: K, how many are looked up. weight: λ,
    the share of their prediction, between 0 and 1. temperature: τ > 0, in squared distance: the larger, the more alike
    the weights of the K. x: (..., C). Returns logits (..., V), whose softmax is p. It is for generation, so it has no
    backward.

    With keys and values k_n and v_n, and the K nearest keys among all N,

        d_n = Σ_c (x_c − k_nc)²        w_n = exp(−d_n/τ) / Σ_m exp(−d_m/τ), over the K nearest
        q_v = Σ_n w_n [v_n = v]        p_v = (1 − λ) softmax(output(x))_v + λ q_v

    The nearest are those with the largest score x·k_n − k_n·k_n/2, which is (x·x − d_n)/2. All N are compared, in
    2 N C operations for each vector. Raises TypeError for keys that are not floating-point or values that are not
    integers, ValueError for other shapes, for fewer than K keys, and for an option out of range.

    Source: Khandelwal et al., "Nearest neighbor machine translation", 2021, equations 2 and 3.
    """

    def __init__(
        self,
        output: Layer,
        keys: np.ndarray,
        values: np.ndarray,
        neighbours: int = 32,
        weight: float = 0.3,
        temperature: float = 10.0,
    ) -> None:
        expect_instance("output", output, Layer)
        keys, values = expect_array("keys", keys), expect_array("values", values)
        expect_shape("keys", keys, "N C")
        expect_shape("values", values, "N", N=len(keys))
        if keys.dtype.kind != "f" or values.dtype.kind not in "iu":
            raise TypeError(f"keys, values: expected floats and integers, got {keys.dtype} and {values.dtype}")
        expect_positive(neighbours=neighbours)
        expect_number("temperature", temperature, zero=False)
        expect_number("weight", weight, zero=False)
        if weight >= 1:
            raise ValueError(f"weight: expected a number between 0 and 1, got {weight}")
        if len(keys) < neighbours:
            raise ValueError(f"neighbours: expected at most the number of keys, {len(keys):,}, got {neighbours:,}")
        self.output, self.neighbours, self.weight, self.temperature = output, neighbours, weight, temperature
        missing, keys = -len(keys) % BLOCK, widen(keys)
        halves = np.pad((keys**2).sum(axis=1) / 2, (0, missing), constant_values=np.inf)  # those added are never near
        columns = np.ascontiguousarray(np.pad(keys, ((0, missing), (0, 0))).T)  # (C, N), with N a multiple of BLOCK
        device = output.device
        self.keys, self.halves = to_device(columns, device), to_device(halves, device)
        self.values = to_device(np.pad(values, (0, missing)), device)

    def forward(self, x: Array) -> tuple[Array, None]:
        z, rows = self.output(x), x.reshape(-1, x.shape[-1])
        xp, logits = array_module(z), widen(z).reshape(len(rows), -1)
        top = logits.max(axis=1, keepdims=True)
        logits = logits - top - xp.log(xp.exp(logits - top).sum(axis=1, keepdims=True)) + math.log1p(-self.weight)
        size = max(1, SCORES // len(self.values))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            w, tokens = self.nearest(widen(rows[part]))
            q = ((tokens[:, :, None] == tokens[:, None, :]) * w[:, None, :]).sum(axis=2)  # q of each neighbour's token
            with np.errstate(divide="ignore"):  # a neighbour can be so far away that its weight is 0
                log_q = xp.log(q)
            places = xp.arange(start, start + len(w))[:, None], tokens
            logits[places] = xp.logaddexp(logits[places], math.log(self.weight) + log_q)  # equal where a token repeats
        return logits.reshape(z.shape), None

    def nearest(self, x: Array) -> tuple[Array, Array]:
        """The weights and the tokens of the K nearest keys of each x (n, C); both (n, K), in no particular order."""
        scores = x @ self.keys
        scores -= self.halves
        scores, places = largest(scores, self.neighbours)
        xp = array_module(scores)
        w = xp.exp((scores - scores.max(axis=1, keepdims=True)) * (2 / self.temperature))
        return w / w.sum(axis=1, keepdims=True), self.values[places]


def largest(scores: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest of scores (n, N) in each row, and their places, both (n, count), in no particular order.

    N is a multiple of BLOCK. Each of the largest is in one of the `count` blocks with the largest maxima, so only these
    blocks are searched.
    """
    xp, blocks = array_module(scores), scores.reshape(len(scores), -1, BLOCK)

    def top(x: Array, k: int) -> Array:
        return xp.argpartition(x, x.shape[1] - k, axis=1)[:, x.shape[1] - k :]

    best = top(blocks.max(axis=2), min(count, blocks.shape[1]))
    inside = xp.take_along_axis(blocks, best[:, :, None], 1).reshape(len(scores), -1)
    chosen = top(inside, count)
    places = xp.take_along_axis(best, chosen // BLOCK, 1) * BLOCK + chosen % BLOCK
    return xp.take_along_axis(inside, chosen, 1), places


class Unchanged(Layer):
    """The output layer of a model whose vectors are wanted, not its logits."""

    def forward(self, x: Array) -> tuple[Array, None]:
        return x, None


@fast()
def with_neighbours(model: EncoderDecoder, pairs: TokenPairs, subwords: Subwords, **options: Any) -> EncoderDecoder:
    """A model with the same weights, whose output is a `NeighbourOutput` with a vector for every token of `pairs`.

    The vectors are those from which the model predicts the tokens and END, given the true ones before them. options:
    neighbours, weight and temperature. `model` stays as it is. A saved model has no neighbours.
    Raises ValueError if the vocabulary and the model differ in size, and like `NeighbourOutput`.
    """
    expect_instance("model", model, EncoderDecoder)
    expect_vocabulary(model, len(subwords))
    inner, found = copy.copy(model), copy.copy(model)
    inner.output = Unchanged()
    keys, values = [], []
    for batch in pairs_in_order(pairs, TOKENS, subwords, model.backwards):
        x = to_cpu(inner(*(to_device(a, model.device) for a in (batch.source, batch.lengths, batch.target))))
        counted = batch.targets != IGNORED
        keys.append(widen(x[counted]))
        values.append(batch.targets[counted])
    found.output = NeighbourOutput(model.output, np.concatenate(keys), np.concatenate(values), **options)
    return found

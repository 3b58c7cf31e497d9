"""Translation with a memory of known translations: which token followed where the decoder's vector was similar."""

from __future__ import annotations

import copy
import math
from itertools import chain
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..backend import Array, array_module, to_cpu, to_device, widen
from ..checks import expect_array, expect_instance, expect_number, expect_positive, expect_shape
from ..data import Subwords
from ..data.translation import TokenPairs, pairs_in_order
from ..dispatch import fast, operation
from ..generation.generate import expect_vocabulary
from ..models import EncoderDecoder
from ..nn import Layer
from ..ops.cross_entropy import IGNORED
from ..parallel.ranks import Ranks
from .translators import as_written

TOKENS = 2048  # of known translations at once, at most, unless a single one is longer
ROWS = 256  # vectors that are compared with all keys at once, at most
SCORES = 1 << 18  # scores at once, about: few enough for a processor's cache; a GPU computes NUMBERS
NUMBERS = 1 << 24  # other numbers at once, about, unless a single vector has more
BLOCK = 128  # keys in a block; only the blocks with the largest maxima are searched


class NeighbourOutput(Layer):
    """An output layer whose predictions are mixed with what followed the known vectors nearest to its input.

    output: the layer (..., C) to (..., V) that it stands for, such as a `nn.TiedOutput`. keys: (N, C), the known
    vectors. values: (N,), integers, the token that followed each. neighbours: K, how many are looked up. weight: λ,
    the share of their prediction, between 0 and 1. temperature: τ > 0, in squared distance: the larger, the more alike
    the weights of the K. x: (..., C). Returns logits (..., V), of at least single precision, whose softmax is p. It is
    for generation, so it has no backward. The keys stay as they are when the layer is trained, cast or moved.

    With keys and values k_n and v_n, and the K nearest keys among all N,

        d_n = Σ_c (x_c − k_nc)²        w_n = exp(−d_n/τ) / Σ_m exp(−d_m/τ), over the K nearest
        q_v = Σ_n w_n [v_n = v]        p_v = (1 − λ) softmax(output(x))_v + λ q_v

    The nearest are those with the largest score x·k_n − k_n·k_n/2, which is (x·x − d_n)/2. The mean of the keys is
    subtracted from x and from every key, so that less is lost to rounding; distances stay the same. All N are compared,
    in about 2 N C operations for each vector, and those of K blocks of 128 keys once more: see `nearest_keys`.

    Raises TypeError for keys that are not floating-point, values that are not integers and options that are not
    numbers, ValueError for other shapes, numbers that are not finite, negative values, fewer than K keys, and an option
    out of range. Forward raises IndexError if a value is V or more.

    Source: Khandelwal et al., "Nearest neighbor machine translation", 2021. Their keys are the inputs of the last
    feed-forward layer. Here they are the inputs of the output map.
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
        if not np.isfinite(widen(keys)).all() or values.min(initial=0) < 0:
            raise ValueError("keys, values: expected finite numbers and tokens >= 0")
        if len(keys) < neighbours:
            raise ValueError(f"neighbours: expected at most the number of keys, {len(keys):,}, got {neighbours:,}")
        self.largest_value = int(values.max())
        self.output, self.neighbours, self.weight, self.temperature = output, neighbours, weight, temperature
        missing, device = -len(keys) % BLOCK, output.device
        mean = widen(keys).mean(axis=0)
        columns = np.zeros((len(mean), len(keys) + missing), mean.dtype)
        columns[:, : len(keys)] = (widen(keys) - mean).T
        halves = (columns**2).sum(axis=0) / 2
        halves[len(keys) :] = np.inf  # the keys that were added are never near
        blocks = columns.reshape(len(mean), -1, BLOCK).swapaxes(0, 1)  # (N/BLOCK, C, BLOCK)
        self.keys, self.mean = (to_device(np.ascontiguousarray(a), device) for a in (blocks, mean))
        self.halves = to_device(halves.reshape(-1, BLOCK), device)
        self.values = to_device(np.pad(values, (0, missing)), device)

    def forward(self, x: Array) -> tuple[Array, None]:
        z, rows = self.output(x), x.reshape(-1, x.shape[-1])
        if self.largest_value >= z.shape[-1]:
            raise IndexError(f"values: expected tokens below {z.shape[-1]}, got {self.largest_value}")
        xp, logits = array_module(z), widen(z).reshape(-1, z.shape[-1])
        top = logits.max(axis=1, keepdims=True)
        logits = logits - top - xp.log(xp.exp(logits - top).sum(axis=1, keepdims=True)) + math.log1p(-self.weight)
        size = max(1, min(ROWS, NUMBERS // self.neighbours**2))
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
        xp = array_module(x)
        scores, places = nearest_keys(x - self.mean, self)
        w = xp.exp((scores - scores.max(axis=1, keepdims=True)) * (2 / self.temperature))
        return w / w.sum(axis=1, keepdims=True), self.values[places]

    def scores(self, x: Array, blocks: slice | Array) -> Array:
        """x·k_n − k_n·k_n/2 for the keys of these blocks. x: (..., n, C). blocks: a slice or places. (..., n, BLOCK)"""
        scores = x @ self.keys[blocks]
        scores -= self.halves[blocks][..., None, :]
        return scores


@operation
def nearest_keys(x: Array, layer: NeighbourOutput) -> tuple[Array, Array]:
    """The largest `layer.neighbours` scores of each x (n, C), and the places of their keys, (n, K), unordered.

    The keys' mean has been subtracted from x, and n is at least 1. Each of these keys is in one of the K blocks
    with the largest maxima (up to rounding). So all scores are computed, but only the maximum of each block is kept.
    Then the scores in the best blocks are computed again.
    """
    xp = array_module(x)
    step = max(1, (SCORES if xp is np else NUMBERS) // (len(x) * BLOCK))
    parts = [slice(start, start + step) for start in range(0, len(layer.keys), step)]
    maxima = xp.concatenate([layer.scores(x, part).max(axis=2) for part in parts]).T  # (n, N/BLOCK)
    blocks = largest(maxima, min(layer.neighbours, len(layer.keys)))
    step = max(1, NUMBERS // (blocks.shape[1] * layer.keys[0].size))
    parts = [slice(start, start + step) for start in range(0, len(x), step)]
    scores = xp.concatenate([layer.scores(x[part, None, None], blocks[part])[:, :, 0] for part in parts])
    return largest_of_blocks(scores, blocks, layer.neighbours)


def largest_of_blocks(scores: Array, blocks: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest of scores (n, B, BLOCK), those in B blocks of each row, and the places of their keys."""
    xp, scores = array_module(scores), scores.reshape(len(scores), -1)
    chosen = largest(scores, count)
    places = xp.take_along_axis(blocks, chosen // BLOCK, 1) * BLOCK + chosen % BLOCK
    return xp.take_along_axis(scores, chosen, 1), places


def largest(x: Array, count: int) -> Array:
    """The places of the `count` largest of x (n, N) in each row, (n, count), in no particular order."""
    return array_module(x).argpartition(x, x.shape[1] - count, axis=1)[:, x.shape[1] - count :]


class Unchanged(Layer):
    """The output layer of a model whose vectors are wanted, not its logits."""

    def forward(self, x: Array) -> tuple[Array, None]:
        return x, None


@fast()
def with_neighbours(
    model: EncoderDecoder, pairs: TokenPairs, subwords: Subwords, ranks: Ranks | None = None, **options: Any
) -> EncoderDecoder:
    """A model that shares its weights with `model`, and whose output is a `NeighbourOutput` with a key for every token.

    The keys are the vectors from which `model` predicts the tokens of `pairs` and END, given the true ones before them.
    ranks: processes that have all called this function; each computes a part of the keys, and all get all of them.
    options: neighbours, weight and temperature. The keys do not change when the weights do, so train, cast or move
    `model` first. `model` itself has the same output as before, and a saved model has no neighbours.

    Raises TypeError for an unknown option, ValueError if the vocabulary and the model differ in size, if there are no
    pairs or if `model` has neighbours already, and like `NeighbourOutput`.
    """
    expect_instance("model", model, EncoderDecoder)
    expect_vocabulary(model, len(subwords))
    if not pairs.target:
        raise ValueError("pairs: expected at least one, got none")
    if isinstance(model.output, NeighbourOutput):
        raise ValueError("model: expected one without neighbours")
    inner, remembering = copy.copy(model), copy.copy(model)
    inner.output = Unchanged()
    ranks = ranks or Ranks()
    batches = list(pairs_in_order(as_written(model, pairs), TOKENS, subwords))
    part, seen = ranks.part(len(batches)), []
    with fast(), threadpool_limits(1 if ranks.size > 1 else None, "blas"):
        for batch in batches[part.start : part.stop]:
            x = to_cpu(inner(*(to_device(a, model.device) for a in (batch.source, batch.lengths, batch.target))))
            counted = batch.targets != IGNORED
            seen.append((widen(x[counted]), batch.targets[counted]))
    keys, values = map(np.concatenate, zip(*chain(*ranks.gather(seen)), strict=True))
    remembering.output = NeighbourOutput(model.output, keys, values, **options)
    return remembering

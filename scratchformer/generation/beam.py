"""Beam search with the decoder of an encoder-decoder."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..backend import widen
from ..checks import (
    expect_array,
    expect_at_least,
    expect_lengths,
    expect_number,
    expect_positive,
    expect_shape,
)
from ..dispatch import fast
from ..models import EncoderDecoder
from .cache import DecoderCache

LONGER = 50  # how many more tokens than its source a translation may have: Vaswani et al., 2017, section 6.1
WIDEST = 1000  # hypotheses of a source; wide beams make translations worse (Koehn, Knowles, 2017, section 3.6)
FEWER = 0.75  # once at most this share of the sources is still searched, the caches are copied without the others
MAX_LOG = 700  # the largest log of lp(n), for float64


class Hypothesis(NamedTuple):
    """A finished translation: its score, and its ids without the begin and end tokens."""

    score: float
    ids: np.ndarray


@fast()
def beam_search(
    model: EncoderDecoder,
    source: np.ndarray,
    lengths: np.ndarray,
    begin: int,
    end: int,
    beam: int = 4,
    length_penalty: float = 0.6,
    longer: int = LONGER,
) -> list[Hypothesis]:
    """For each source, the translation with the highest score that the search can reach.

    source: (B, S), lengths: (B,), see `EncoderDecoder.forward`. beam: K, the number of hypotheses kept for each source.
    At each step every hypothesis is extended by every token, and the K most likely results that do not end are kept.
    K = 1 is greedy search. A finished hypothesis y has the score log p(y)/lp(|y|) with lp(n) = ((5 + n)/6)^α, where |y|
    includes `end`: log p falls with every token, so without the division short translations would win. length_penalty:
    α ≥ 0. longer: how many more tokens than its source a translation may have; at this limit hypotheses are scored as
    they are. begin, end: two of the model's V tokens. Raises ValueError for an option out of range, and if there is no
    source.

    The search for a source stops when no open hypothesis can become the best one any more. Let an open hypothesis have
    log p = s after n tokens. When it finishes, it has N tokens, n < N ≤ limit, and log p ≤ s ≤ 0, since no probability
    is above 1. As α ≥ 0, lp never decreases, so its score is at most s/lp(N) ≤ s/lp(limit). For α = 0 this is s. The
    search is over when the best score is at least s/lp(limit) for the largest s. So the results are those of a search
    that never stops early.

    Source: Wu et al., "Google's neural machine translation system", 2016, equation 14, with β = 0.
    """
    expect_options(beam, longer, length_penalty)
    expect_at_least(0, begin=begin, end=end)
    source, lengths = expect_array("source", source), expect_array("lengths", lengths)
    expect_lengths(lengths)
    if not len(lengths):
        raise ValueError("source: expected (B, S) with B >= 1, got no text")
    expect_shape("source", source, "B S")
    B, K, limits = len(lengths), beam, np.asarray(lengths, np.int64) + longer
    length = int(limits.max())
    cache = DecoderCache(model, source, lengths, length, copies=K)
    for name, token in (("begin", begin), ("end", end)):
        if token >= cache.vocab_size:
            raise ValueError(f"{name}: expected a token from 0 to {cache.vocab_size - 1}, got {token}")
    if length_penalty * math.log(penalty(length, 1)) > MAX_LOG:
        raise ValueError(f"length_penalty: {length_penalty} is too large for translations of {length} tokens")
    scores = np.full((B, K), -np.inf)  # log p of the open hypotheses
    scores[:, 0] = 0  # all K hypotheses are empty, and only one may count
    written = np.empty((B, K, 0), np.int64)
    best = [Hypothesis(-math.inf, written[b, 0]) for b in range(B)]  # of the finished ones; at first there is none
    last = np.full(B * K, begin)
    places = np.arange(B)  # the sources whose search goes on, and some whose search is over
    for n in range(1, length + 1):
        total, parents, tokens = likeliest(scores, cache.logits(last[:, None]))
        count = total.shape[1]  # at most K of them end, so at least K do not
        chosen = np.zeros((len(places), K), np.int64)  # which of them go on
        for b, place in enumerate(places):
            goes_on = np.flatnonzero(tokens[b] != end)[:K]
            chosen[b, : len(goes_on)] = goes_on
            if done(best[place], scores[b], limits[place], length_penalty):
                continue
            ends = [i for i in range(min(K, count)) if tokens[b, i] == end or n == limits[place]]
            for i in ends:
                score = float(total[b, i]) / penalty(n, length_penalty)
                if score > best[place].score:
                    ids = np.append(written[b, parents[b, i]], tokens[b, i])
                    best[place] = Hypothesis(score, ids[ids != end])
        scores = np.take_along_axis(total, chosen, 1)
        scores[np.take_along_axis(tokens, chosen, 1) == end] = -np.inf  # where fewer than K go on
        scores[n >= limits[places]] = -np.inf  # none goes on beyond the limit
        rows = np.take_along_axis(parents, chosen, 1)
        last = np.take_along_axis(tokens, chosen, 1).reshape(-1)
        written = np.concatenate([np.take_along_axis(written, rows[:, :, None], 1), last.reshape(-1, K, 1)], axis=2)
        over = [done(best[i], s, limits[i], length_penalty) for i, s in zip(places, scores, strict=True)]
        kept = np.flatnonzero(~np.array(over))
        if not len(kept):
            break
        cache.reorder((np.arange(len(places))[:, None] * K + rows).reshape(-1))
        if len(kept) <= FEWER * len(places):
            cache.keep(kept)
            places, scores, written, last = places[kept], scores[kept], written[kept], last.reshape(-1, K)[kept].ravel()
    return best


def likeliest(scores: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The 2 K most likely hypotheses with one more token: their log p, parents and tokens, each (B, 2 K), best first.

    scores: (B, K), log p of the parents. logits: (B K, V). With 2 K > K V, there are only K V. Of each parent only its
    2 K most likely tokens can be among them. Raises ValueError unless the logits are finite.
    """
    if not np.isfinite(logits).all():
        raise ValueError("logits: expected finite numbers")
    logits, (B, K), V = widen(logits), scores.shape, logits.shape[1]
    each, count = min(2 * K, V), min(2 * K, K * V)
    tokens = np.argpartition(logits, V - each, axis=1)[:, V - each :]
    top = logits.max(axis=1, keepdims=True)
    log_sum = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True, dtype=np.float64))
    log_p = np.take_along_axis(logits, tokens, 1) - log_sum
    total = scores[:, :, None] + log_p.reshape(B, K, each)
    total, tokens = total.reshape(B, -1), tokens.reshape(B, -1)
    best = np.argsort(-total, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(total, best, 1), best // each, np.take_along_axis(tokens, best, 1)


def expect_options(beam: int, longer: int, length_penalty: float) -> None:
    """Raise TypeError or ValueError unless these options of `beam_search` are in range."""
    expect_positive(beam=beam, longer=longer)
    expect_number("length_penalty", length_penalty)
    if beam > WIDEST:
        raise ValueError(f"beam: expected a number <= {WIDEST:,}, got {beam}")


def penalty(n: int, length_penalty: float) -> float:
    """lp(n), by which log p is divided."""
    return ((5 + n) / 6) ** length_penalty


def done(best: Hypothesis, scores: np.ndarray, limit: int, length_penalty: float) -> bool:
    """Whether none of the open hypotheses of a source, with log p (K,), can become better than the best finished one.

    See `beam_search` for the bound.
    """
    return bool(best.score >= scores.max() / penalty(limit, length_penalty))

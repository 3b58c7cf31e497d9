"""Translation by several models together, which write in one direction or in both."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend import to_cpu, to_device, widen
from ..checks import expect_instance
from ..data import Subwords, TokenPairs
from ..data.batching import padded
from ..dispatch import fast
from ..generation.beam import LONGER, Hypothesis, log_sum_exp, penalty, search
from ..generation.cache import DecoderCache
from ..generation.translation import translate
from ..models import EncoderDecoder
from ..ops import IGNORED

TOKENS = 2048  # of proposed translations at once, at most, unless a single one is longer
WEIGHTS = 2 / 3, 1 / 3  # of the models that write forwards, and of those that write backwards


class BackwardEncoderDecoder(EncoderDecoder):
    """An `EncoderDecoder` that writes a translation from its end to its beginning. In all else it is the same.

    It learns from pairs whose targets are reversed: see `as_written`.
    """


def writes_backwards(model: EncoderDecoder) -> bool:
    return isinstance(model, BackwardEncoderDecoder)


def as_written(model: EncoderDecoder, pairs: TokenPairs) -> TokenPairs:
    """The pairs with their targets in the order in which a model writes. END comes last either way."""
    return pairs._replace(target=[in_order(model, ids) for ids in pairs.target])


def in_order(model: EncoderDecoder, ids: np.ndarray) -> np.ndarray:
    """ids (T,), from the order in which a model writes them to the order of reading, or the other way round."""
    return ids[::-1] if writes_backwards(model) else ids


def expect_together(models: Sequence[EncoderDecoder]) -> None:
    """Raise an error unless the models have the same vocabulary and are on the same device."""
    expect_instance("models", models, Sequence)
    for model in models:
        expect_instance("models", model, EncoderDecoder)
    for what, values in (
        ("vocabulary", {model.config["vocab_size"] for model in models}),
        ("device", {model.device for model in models}),
    ):
        if len(values) != 1:
            raise ValueError(f"models: expected at least one, all with the same {what}, got {len(values)} of them")


def expect_one_direction(models: Sequence[EncoderDecoder]) -> None:
    """Raise ValueError if some of the models write backwards and some do not: they do not predict the same token."""
    expect_together(models)
    if len(set(map(writes_backwards, models))) > 1:
        raise ValueError("models: expected some that all write in one direction, got both directions")


class EnsembleCache:
    """The `DecoderCache` of each model of an ensemble. The probability of a token is the mean of theirs.

    Source: Hansen, Salamon, "Neural network ensembles", 1990.
    """

    def __init__(self, models: Sequence[EncoderDecoder], *arguments: Any, **options: Any) -> None:
        self.caches = [DecoderCache(model, *arguments, **options) for model in models]
        self.vocab_size = self.caches[0].vocab_size

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return mixed([cache.logits(ids) for cache in self.caches])

    def reorder(self, rows: np.ndarray) -> None:
        for cache in self.caches:
            cache.reorder(rows)

    def keep(self, sources: np.ndarray) -> None:
        for cache in self.caches:
            cache.keep(sources)


def mixed(logits: list[np.ndarray]) -> np.ndarray:
    """Logits (N, V) whose softmax is the mean of the softmax of each of `logits`; for several, at least float32."""
    if len(logits) == 1:
        return logits[0]
    log_p = [(z - log_sum_exp(z)).astype(z.dtype) for z in map(widen, logits)]
    top = functools.reduce(np.maximum, log_p)
    with np.errstate(invalid="ignore"):  # where no model gives a token any probability; see `likeliest`
        return top + np.log(sum(np.exp(each - top) for each in log_p))


@fast()
def search_together(
    models: Sequence[EncoderDecoder],
    source: np.ndarray,
    lengths: np.ndarray,
    begin: int,
    end: int,
    beam: int = 4,
    length_penalty: float = 0.6,
    longer: int = LONGER,
    wanted: int = 1,
) -> list[list[Hypothesis]]:
    """For each source, the `wanted` best of the K translations by an ensemble of models that write in one direction.

    The arguments are those of `generation.beam.search`, which says the rest. Raises ValueError for models of both
    directions, for none, and for several vocabularies or devices.
    """
    expect_one_direction(models)
    cache = functools.partial(EnsembleCache, models)
    return search(cache, source, lengths, begin, end, beam, length_penalty, longer, wanted)


def translate_together(
    models: Sequence[EncoderDecoder], subwords: Subwords, sentences: list[str], **options: Any
) -> list[str]:
    """The translations of `sentences` by `choose_translations`. options: those of `generation.translate`."""
    expect_together(models)
    chosen = functools.partial(choose_translations, models)
    return translate(models[0], subwords, sentences, search=chosen, **options)


def choose_translations(
    models: Sequence[EncoderDecoder],
    source: np.ndarray,
    lengths: np.ndarray,
    begin: int,
    end: int,
    beam: int = 4,
    length_penalty: float = 0.6,
) -> list[np.ndarray]:
    """For each source, the ids of the best translation, first word first, by models of one direction or of both.

    Models of one direction are an ensemble: see `search_together`, also for the arguments. If some write backwards and
    some do not, each of the two ensembles proposes the K best translations that it can reach, and both judge all of
    them. A translation y has the score (2/3 log p_f(y) + 1/3 log p_b(y))/lp(|y|), where f writes forwards and b
    backwards. One that was cut off at the limit is judged as if it ended there.

    Source: Liu et al., "Agreement on target-bidirectional neural machine translation", 2016. The weights are ours:
    models that write backwards translated worse in our trials (docs/trials.md).
    """
    expect_together(models)
    ensembles = [[model for model in models if writes_backwards(model) is backwards] for backwards in (False, True)]
    options = (source, lengths, begin, end, beam, length_penalty)
    if not all(ensembles):
        return [in_order(models[0], best.ids) for (best,) in search_together(models, *options)]
    proposed: list[dict[tuple[int, ...], np.ndarray]] = [{} for _ in lengths]  # without repetitions
    for ensemble in ensembles:
        lists = search_together(ensemble, *options, wanted=beam)
        for known, hypotheses in zip(proposed, lists, strict=True):
            known |= {tuple(y): y for y in (in_order(ensemble[0], hypothesis.ids) for hypothesis in hypotheses)}
    chosen = []
    for ids, length, texts in zip(source, lengths, map(list, map(dict.values, proposed)), strict=True):
        log_p = np.zeros(len(texts))
        for ensemble, weight in zip(ensembles, WEIGHTS, strict=True):
            written = [in_order(ensemble[0], y) for y in texts]
            log_p += weight * log_probabilities(ensemble, ids[:length], written, begin, end)
        chosen.append(texts[int(np.argmax(log_p / [penalty(len(y) + 1, length_penalty) for y in texts]))])
    return chosen


@fast()
def log_probabilities(
    models: Sequence[EncoderDecoder],
    source: np.ndarray,
    translations: Sequence[np.ndarray],
    begin: int,
    end: int,
) -> np.ndarray:
    """log p(y_n, end | source), float64 (N,), of N translations y_n of one source.

    source: (S,), as for `beam_search`. translations: N arrays of ids, (T_n,) each, in the order in which the models
    write, without `begin` and `end`. The probability of a token is the mean of those of the models.
    """
    expect_one_direction(models)
    size = max(1, TOKENS // (1 + max(map(len, translations))))
    parts = [translations[i : i + size] for i in range(0, len(translations), size)]
    return np.concatenate([_log_probabilities(models, source, part, begin, end) for part in parts])


def _log_probabilities(
    models: Sequence[EncoderDecoder], source: np.ndarray, translations: Sequence[np.ndarray], begin: int, end: int
) -> np.ndarray:
    device, N = models[0].device, len(translations)
    target = padded([np.append(begin, y) for y in translations], end)
    targets = padded([np.append(y, end) for y in translations], IGNORED)
    given = [to_device(x, device) for x in (np.tile(source, (N, 1)), np.full(N, len(source)), target)]
    z = mixed([to_cpu(model(*given)).reshape(target.size, -1) for model in models])
    rows = np.arange(target.size)
    log_p = widen(z)[rows, np.maximum(targets, 0).ravel()] - log_sum_exp(z)[:, 0]
    return np.where(targets == IGNORED, 0, log_p.reshape(targets.shape)).sum(axis=1)

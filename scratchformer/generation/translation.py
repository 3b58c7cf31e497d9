"""Translation of sentences, with one model or several, which write in one direction or in both."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits

from ..backend import CPU, to_cpu, to_device
from ..data import Subwords
from ..data.batching import padded
from ..data.subwords import BEGIN, END, PAD
from ..dispatch import fast
from ..models import EncoderDecoder
from ..ops.checks import expect_at_least
from ..ops.cross_entropy import IGNORED
from ..ops.precision import widen
from ..shell.progress import counted
from .beam import (
    LONGER,
    beam_search,
    ensemble,
    expect_one_direction,
    expect_options,
    log_sum_exp,
    mixed,
    n_best,
    penalty,
)
from .bleu import expect_list
from .generate import expect_vocabulary

if TYPE_CHECKING:
    from ..parallel.ranks import Ranks

ROWS = 256  # hypotheses at once, at most
TOKENS = 2048  # of proposed translations at once, at most, unless a single one is longer
WEIGHTS = 2 / 3, 1 / 3  # of the models that write forwards, and of those that write backwards
FEWEST = 4  # batches, so that as many cores have work; not the number of cores, on which the results would depend


@fast()
def translate(
    model: EncoderDecoder | Sequence[EncoderDecoder],
    subwords: Subwords,
    sentences: list[str],
    beam: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    ranks: Ranks | None = None,
) -> list[str]:
    """The translations of `sentences` by `beam_search`, with one model or an ensemble, or by `choose_translations`.

    On a CPU, batches are distributed over the cores. max_length: the largest number of tokens in a sentence, including
    END; None for no limit. ranks: processes that have all called this function; batches are distributed over them, and
    all get all translations. Raises ValueError for a longer or an empty sentence, with its number, if the vocabulary
    and the model differ in size, and like `beam_search`; TypeError for a single text instead of a list.
    """
    from ..parallel.ranks import Ranks  # here, since training imports this package

    models = ensemble(model)
    expect_options(beam, LONGER, length_penalty)
    beam = int(beam)  # a small integer of NumPy's would wrap
    expect_list("sentences", sentences)
    if max_length is not None:
        expect_at_least(1, max_length=max_length)
    begin, end, pad = (subwords[token] for token in (BEGIN, END, PAD))
    expect_vocabulary(models[0], len(subwords))
    ids = [np.append(s, np.int32(end)) for s in subwords.encode_all(sentences)]
    for i, sentence in enumerate(sentences):
        if not sentence.strip():
            raise ValueError(f"sentence {i + 1}: expected text, got an empty one")
        if max_length is not None and len(ids[i]) > max_length:
            raise ValueError(f"sentence {i + 1}: expected at most {max_length} tokens with END, got {len(ids[i])}")
    order = np.argsort([len(s) for s in ids], kind="stable")
    size = max(1, min(ROWS // beam, -(-len(ids) // FEWEST)))
    ranks = ranks or Ranks()
    own = [order[i : i + size] for i in range(0, len(order), size)][ranks.rank :: ranks.size]

    def work(batch: np.ndarray) -> list[np.ndarray]:
        source, lengths = padded([ids[i] for i in batch], pad), np.array([len(ids[i]) for i in batch])
        return choose_translations(models, source, lengths, begin, end, beam, length_penalty)

    device = models[0].device
    threads = ranks.cores() if device is CPU else 1
    found: dict[int, str] = {}
    blas = threadpool_limits(1 if threads > 1 or ranks.size > 1 else None, "blas")
    with blas, ThreadPoolExecutor(threads, initializer=device.use) as pool:
        pairs, total = zip(own, pool.map(work, own), strict=True), sum(map(len, own))
        for batch, translations in counted(pairs, "translating", "sentences", total, lambda pair: len(pair[0])):
            for i, translation in zip(batch, translations, strict=True):
                found[i] = subwords.decode(translation)
    translated = {i: text for part in ranks.gather(found) for i, text in part.items()}
    return [translated[i] for i in range(len(sentences))]


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

    Models of one direction are an ensemble: see `beam_search`, also for the arguments. If some write backwards and some
    do not, each of the two ensembles proposes the K best translations that it finds, and both judge all of them. A
    translation y has the score (2/3 log p_f(y) + 1/3 log p_b(y))/lp(|y|), where f writes forwards and b backwards. One
    that was cut off at the limit is judged as if it ended there.

    Source: Liu et al., "Agreement on target-bidirectional neural machine translation", 2016. The weights are ours:
    models that write backwards translated worse in our trials (docs/trials.md).
    """
    ensembles = [[model for model in models if model.backwards is backwards] for backwards in (False, True)]
    if not all(ensembles):
        found = beam_search(models, source, lengths, begin, end, beam, length_penalty)
        return [in_order(models[0], hypothesis.ids) for hypothesis in found]
    proposed: list[dict[tuple[int, ...], np.ndarray]] = [{} for _ in lengths]  # without repetitions
    for own in ensembles:
        lists = n_best(own, source, lengths, begin, end, beam, length_penalty)
        for known, hypotheses in zip(proposed, lists, strict=True):
            known |= {tuple(y): y for y in (in_order(own[0], hypothesis.ids) for hypothesis in hypotheses)}
    chosen = []
    for ids, length, texts in zip(source, lengths, map(list, map(dict.values, proposed)), strict=True):
        log_p = np.zeros(len(texts))
        for own, weight in zip(ensembles, WEIGHTS, strict=True):
            written = [in_order(own[0], y) for y in texts]
            log_p += weight * log_probabilities(own, ids[:length], written, begin, end)
        chosen.append(texts[int(np.argmax(log_p / [penalty(len(y) + 1, length_penalty) for y in texts]))])
    return chosen


def in_order(model: EncoderDecoder, ids: np.ndarray) -> np.ndarray:
    """ids (T,), from the order in which a model writes them to the order of reading, or the other way round."""
    return ids[::-1] if model.backwards else ids


@fast()
def log_probabilities(
    model: EncoderDecoder | Sequence[EncoderDecoder],
    source: np.ndarray,
    translations: Sequence[np.ndarray],
    begin: int,
    end: int,
) -> np.ndarray:
    """log p(y_n, end | source), float64 (N,), of N translations y_n of one source.

    source: (S,), as for `beam_search`. translations: N arrays of ids, (T_n,) each, in the order in which the model
    writes, without `begin` and `end`. Of an ensemble, the probability of a token is the mean.
    """
    models = ensemble(model)
    expect_one_direction(models)
    size = max(1, TOKENS // (1 + max(map(len, translations))))
    parts = [translations[i : i + size] for i in range(0, len(translations), size)]
    return np.concatenate([_log_probabilities(models, source, part, begin, end) for part in parts])


def _log_probabilities(
    models: list[EncoderDecoder], source: np.ndarray, translations: Sequence[np.ndarray], begin: int, end: int
) -> np.ndarray:
    device, N = models[0].device, len(translations)
    target = padded([np.append(begin, y) for y in translations], end)
    targets = padded([np.append(y, end) for y in translations], IGNORED)
    given = [to_device(x, device) for x in (np.tile(source, (N, 1)), np.full(N, len(source)), target)]
    z = mixed([to_cpu(one(*given)).reshape(target.size, -1) for one in models])
    rows = np.arange(target.size)
    log_p = widen(z)[rows, np.maximum(targets, 0).ravel()] - log_sum_exp(z)[:, 0]
    return np.where(targets == IGNORED, 0, log_p.reshape(targets.shape)).sum(axis=1)

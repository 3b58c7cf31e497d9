"""Translation: beam search with the decoder of an encoder-decoder, or with several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from ..backend import CPU
from ..data import Subwords
from ..data.subwords import BEGIN, END, PAD
from ..data.translation import padded
from ..dispatch import fast
from ..models import EncoderDecoder
from ..ops.checks import (
    expect_array,
    expect_at_least,
    expect_instance,
    expect_lengths,
    expect_number,
    expect_positive,
    expect_shape,
    expect_texts,
)
from ..ops.precision import widen
from ..progress import counted
from .cache import DecoderCache
from .generate import expect_vocabulary

if TYPE_CHECKING:
    from ..training.ranks import Ranks

LONGER = 50  # how many more tokens than its source a translation may have: Vaswani et al., 2017, section 6.1
ROWS = 256  # hypotheses at once, at most
FEWEST = 4  # batches, so that as many cores have work; not the number of cores, on which the results would depend
WIDEST = 1000  # hypotheses of a source; wide beams make translations worse (Koehn, Knowles, 2017, section 3.6)
LARGEST = 700  # the largest log of lp(n), for float64


class Hypothesis(NamedTuple):
    """A finished translation: its score, and its ids without the begin and end tokens."""

    score: float
    ids: np.ndarray


@fast()
def beam_search(
    model: EncoderDecoder | Sequence[EncoderDecoder],
    source: np.ndarray,
    lengths: np.ndarray,
    begin: int,
    end: int,
    beam: int = 4,
    length_penalty: float = 0.6,
    longer: int = LONGER,
) -> list[Hypothesis]:
    """For each source, the translation with the highest score that the search finds.

    source: (B, S), lengths: (B,), see `EncoderDecoder.forward`. beam: K, the number of hypotheses kept for each source.
    At each step every hypothesis is extended by every token, and the K most likely results that do not end are kept.
    K = 1 is greedy search. A finished hypothesis y has the score log p(y)/lp(|y|) with lp(n) = ((5 + n)/6)^α, where |y|
    includes `end`: log p falls with every token, so without the division short translations would win. length_penalty:
    α ≥ 0. longer: how many more tokens than its source a translation may have; at this limit hypotheses are scored as
    they are. Several models with the same vocabulary are an ensemble: the probability of a token is the mean of theirs.

    The search for a source stops when K hypotheses have finished, or when no open one can still reach the best score:
    lp is largest at the limit, so log p/lp(limit) is an upper bound. begin, end: two of the model's V tokens. Raises
    ValueError for an option out of range, for models that are no ensemble, and if there is no source.

    Source: Wu et al., "Google's neural machine translation system", 2016, equation 14, with β = 0.
    """
    models = ensemble(model)
    expect_options(beam, longer, length_penalty)
    V = models[0].config["vocab_size"]
    expect_at_least(0, begin=begin, end=end)
    for name, token in (("begin", begin), ("end", end)):
        if token >= V:
            raise ValueError(f"{name}: expected a token from 0 to {V - 1}, got {token}")
    source, lengths = expect_array("source", source), expect_array("lengths", lengths)
    expect_lengths(lengths)
    if not len(lengths):
        raise ValueError("source: expected (B, S) with B >= 1, got no text")
    expect_shape("source", source, "B S")
    B, K, limits = len(lengths), beam, np.asarray(lengths) + longer
    most_tokens = int(limits.max())
    caches = [DecoderCache(model, source, lengths, most_tokens, copies=K) for model in models]
    if length_penalty * math.log(penalty(most_tokens, 1)) > LARGEST:
        raise ValueError(f"length_penalty: {length_penalty} is too large for translations of {most_tokens} tokens")
    scores = np.full((B, K), -np.inf)  # log p of the open hypotheses
    scores[:, 0] = 0  # all K hypotheses are empty, and only one may count
    written = np.empty((B, K, 0), np.int64)
    finished: list[list[Hypothesis]] = [[] for _ in range(B)]
    last = np.full(B * K, begin)
    for n in range(1, most_tokens + 1):
        total, parents, tokens = likeliest(scores, mixed([cache.logits(last[:, None]) for cache in caches]))
        most = total.shape[1]  # at most K of them end, so at least K do not
        chosen = np.zeros((B, K), np.int64)  # which of them go on
        for b in range(B):
            goes_on = np.flatnonzero(tokens[b] != end)[:K]
            chosen[b, : len(goes_on)] = goes_on
            if done(finished[b], scores[b], K, limits[b], length_penalty):
                continue
            ends = [i for i in range(min(K, most)) if tokens[b, i] == end or n == limits[b]]
            for i in ends:
                ids = np.append(written[b, parents[b, i]], tokens[b, i])
                score = total[b, i] / penalty(n, length_penalty)
                if np.isfinite(score):
                    finished[b].append(Hypothesis(float(score), ids[ids != end]))
        scores = np.take_along_axis(total, chosen, 1)
        scores[np.take_along_axis(tokens, chosen, 1) == end] = -np.inf  # where fewer than K go on
        rows = np.take_along_axis(parents, chosen, 1)
        last = np.take_along_axis(tokens, chosen, 1).reshape(-1)
        written = np.concatenate([np.take_along_axis(written, rows[:, :, None], 1), last.reshape(B, K, 1)], axis=2)
        texts = zip(finished, scores, limits, strict=True)
        if all(done(ended, going_on, K, limit, length_penalty) for ended, going_on, limit in texts):
            break
        for cache in caches:
            cache.reorder((np.arange(B)[:, None] * K + rows).reshape(-1))
    return [max(hypotheses, key=lambda h: h.score) for hypotheses in finished]


def ensemble(model: EncoderDecoder | Sequence[EncoderDecoder]) -> list[EncoderDecoder]:
    """The models of an ensemble; raises ValueError unless they have the same vocabulary and are on the same device."""
    if isinstance(model, EncoderDecoder):
        return [model]
    expect_instance("model", model, Sequence)
    for one in model:
        expect_instance("model", one, EncoderDecoder)
    for what, found in (
        ("vocabulary", {one.config["vocab_size"] for one in model}),
        ("device", {one.device for one in model}),
    ):
        if len(found) != 1:
            raise ValueError(f"model: expected at least one, all with the same {what}, got {len(found)} of them")
    return list(model)


def mixed(logits: list[np.ndarray]) -> np.ndarray:
    """Logits (B K, V) whose softmax is the mean of the softmax of each of `logits`."""
    if len(logits) == 1:
        return logits[0]
    log_p = [widen(z) - log_sum_exp(z) for z in logits]
    return np.logaddexp.reduce(log_p, axis=0)


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """log Σ_v exp(z_v), float64 (B K, 1), of logits (B K, V)."""
    top = widen(logits).max(axis=1, keepdims=True)
    return top + np.log(np.exp(widen(logits) - top).sum(axis=1, keepdims=True, dtype=np.float64))


def likeliest(scores: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The 2 K most likely hypotheses with one more token: their log p, parents and tokens, each (B, 2 K), best first.

    scores: (B, K), log p of the parents. logits: (B K, V). With 2 K > K V, there are only K V. Of each parent only its
    2 K most likely tokens can be among them. Raises ValueError unless the logits are finite.
    """
    if not np.isfinite(logits).all():
        raise ValueError("logits: expected finite numbers")
    logits, (B, K), V = widen(logits), scores.shape, logits.shape[1]
    each, most = min(2 * K, V), min(2 * K, K * V)
    tokens = np.argpartition(logits, V - each, axis=1)[:, V - each :]
    log_p = np.take_along_axis(logits, tokens, 1) - log_sum_exp(logits)
    total = scores[:, :, None] + log_p.reshape(B, K, each)
    total, tokens = total.reshape(B, -1), tokens.reshape(B, -1)
    best = np.argsort(-total, axis=1, kind="stable")[:, :most]
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


def done(finished: list[Hypothesis], scores: np.ndarray, beam: int, limit: int, length_penalty: float) -> bool:
    """Whether the search for a source is over, given its finished hypotheses and the log p (K,) of its open ones."""
    if not finished:
        return False
    return len(finished) >= beam or max(h.score for h in finished) >= scores.max() / penalty(limit, length_penalty)


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
    """The translations of `sentences` by `beam_search`, with one model or an ensemble.

    On a CPU, batches are distributed over the cores. max_length: the largest number of tokens in a sentence, including
    END; None for no limit. ranks: processes that have all called this function; batches are distributed over them, and
    all get all translations. Raises ValueError for a longer or an empty sentence, with its number, if the vocabulary
    and the model differ in size, and like `beam_search`; TypeError for a single text instead of a list.
    """
    from ..training.ranks import Ranks  # here, since training imports this package

    models = ensemble(model)
    expect_options(beam, LONGER, length_penalty)
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

    def work(batch: np.ndarray) -> list[Hypothesis]:
        source, lengths = padded([ids[i] for i in batch], pad), np.array([len(ids[i]) for i in batch])
        return beam_search(models, source, lengths, begin, end, beam, length_penalty)

    device = models[0].device
    threads = ranks.cores() if device is CPU else 1
    found: dict[int, str] = {}
    blas = threadpool_limits(1 if threads > 1 or ranks.size > 1 else None, "blas")
    with blas, ThreadPoolExecutor(threads, initializer=device.use) as pool:
        pairs, total = zip(own, pool.map(work, own), strict=True), sum(map(len, own))
        for batch, translations in counted(pairs, "translating", "sentences", total, lambda pair: len(pair[0])):
            for i, translation in zip(batch, translations, strict=True):
                found[i] = subwords.decode(translation.ids)
    translated = {i: text for part in ranks.gather(found) for i, text in part.items()}
    return [translated[i] for i in range(len(sentences))]


def expect_list(name: str, texts: list[str]) -> None:
    """Raise TypeError unless `texts` is a list of texts."""
    expect_texts(name, texts, list | tuple)
    for i, text in enumerate(texts):
        expect_instance(f"{name}[{i}]", text, str)


def bleu(found: list[str], references: list[str], moses: str | None = None) -> tuple[float, str]:
    """BLEU, from 0 to 100, of whole translations with one reference each, and sacreBLEU's signature of its settings.

    moses: None for sacreBLEU's default: its own tokenizer, case-sensitive. Such scores can be compared between
    publications. A language, such as "de", for lower-case, tokenised BLEU, which many papers on Multi30k report: the
    rules of Moses for this language normalise the punctuation of translations and references and split them into
    tokens. For a language that it does not know, Moses uses general rules and the English abbreviations. This score is
    usually higher, and cannot be compared with the default. Its signature begins with "moses:" and the language.

    Raises ValueError unless there are as many references as translations, and at least one, and ImportError without
    sacreBLEU or, for moses, sacremoses. Source: Post, "A call for clarity in reporting BLEU scores", 2018.
    """
    for name, texts in ("found", found), ("references", references):
        expect_list(name, texts)
    expect_instance("moses", moses, str, none=True)
    if not 0 < len(found) == len(references):
        raise ValueError(
            f"found, references: expected the same number >= 1 of both, got {len(found)} and {len(references)}"
        )
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError("BLEU needs sacreBLEU: pip install 'scratchformer[translate]'") from error
    if moses is None:
        metric = BLEU()
        return metric.corpus_score(found, [references]).score, str(metric.get_signature())
    metric = BLEU(tokenize="none", lowercase=True, force=True)  # force: no warning that it is tokenised
    score = metric.corpus_score(moses_words(found, moses), [moses_words(references, moses)]).score
    return score, f"moses:{moses}|{metric.get_signature()}"


def moses_words(texts: list[str], language: str) -> list[str]:
    """Each text after Moses has normalised its punctuation and split it into tokens, with spaces between them."""
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
    except ImportError as error:
        raise ImportError(
            "BLEU with Moses's tokens needs sacremoses: pip install 'scratchformer[translate]'"
        ) from error
    plain, split = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [split.tokenize(plain.normalize(text), escape=False, return_str=True) for text in texts]

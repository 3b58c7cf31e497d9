"""Translation of sentences."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits

from ..backend import CPU
from ..checks import expect_at_least, expect_texts
from ..data import Subwords
from ..data.batching import padded
from ..data.subwords import BEGIN, END, PAD
from ..dispatch import fast
from ..models import EncoderDecoder
from ..shell.progress import counted
from .beam import LONGER, Hypothesis, beam_search, expect_options
from .generate import expect_vocabulary

if TYPE_CHECKING:
    from ..parallel.ranks import Ranks

ROWS = 256  # hypotheses at once, at most
FEWEST = 4  # batches, so that as many cores have work; not the number of cores, on which the results would depend


@fast()
def translate(
    model: EncoderDecoder,
    subwords: Subwords,
    sentences: list[str],
    beam: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    ranks: Ranks | None = None,
) -> list[str]:
    """The translations of `sentences` by `beam_search`. On a CPU, batches are distributed over the cores.

    max_length: the largest number of tokens in a sentence, including END; None for no limit. ranks: processes that have
    all called this function; batches are distributed over them, and all get all translations. Raises ValueError for a
    longer or an empty sentence, with its number, if the vocabulary and the model differ in size, and like
    `beam_search`; TypeError for a single text instead of a list.
    """
    from ..parallel.ranks import Ranks  # here, since training imports this package

    expect_options(beam, LONGER, length_penalty)
    expect_texts("sentences", sentences, list | tuple)
    if max_length is not None:
        expect_at_least(1, max_length=max_length)
    begin, end, pad = (subwords[token] for token in (BEGIN, END, PAD))
    expect_vocabulary(model, len(subwords))
    ids = [np.append(s, np.int32(end)) for s in subwords.encode_all(sentences)]
    for i, sentence in enumerate(sentences):
        if not sentence.strip():
            raise ValueError(f"sentence {i + 1}: expected text, got an empty one")
        if max_length is not None and len(ids[i]) > max_length:
            raise ValueError(f"sentence {i + 1}: expected at most {max_length} tokens with END, got {len(ids[i])}")
    order = np.argsort([len(s) for s in ids], kind="stable")
    size = max(1, min(ROWS // beam, -(-len(ids) // FEWEST)))
    ranks = ranks or Ranks()
    batches = [order[i : i + size] for i in range(0, len(order), size)][ranks.rank :: ranks.size]

    def work(batch: np.ndarray) -> list[Hypothesis]:
        source, lengths = padded([ids[i] for i in batch], pad), np.array([len(ids[i]) for i in batch])
        return beam_search(model, source, lengths, begin, end, beam, length_penalty)

    device = model.device
    threads = ranks.cores() if device is CPU else 1
    translated: dict[int, str] = {}
    blas = threadpool_limits(1 if threads > 1 or ranks.size > 1 else None, "blas")
    with blas, ThreadPoolExecutor(threads, initializer=device.use) as pool:
        pairs, total = zip(batches, pool.map(work, batches), strict=True), sum(map(len, batches))
        for batch, hypotheses in counted(pairs, "translating", "sentences", total, lambda pair: len(pair[0])):
            for i, hypothesis in zip(batch, hypotheses, strict=True):
                translated[i] = subwords.decode(hypothesis.ids)
    texts = {i: text for part in ranks.gather(translated) for i, text in part.items()}
    return [texts[i] for i in range(len(sentences))]

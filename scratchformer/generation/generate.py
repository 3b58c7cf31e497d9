"""Generation of text, token by token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ..backend import CPU, cores, to_cpu
from ..checks import expect_array, expect_at_least
from ..data.subwords import PublishedTokenizer, Subwords
from ..dispatch import fast
from ..models import LanguageModel
from ..rng import Key, expect_key
from ..shell.text import shown
from .cache import KeyValueCache, cache_for
from .sampling import probabilities, sample

ROWS = 8  # the smallest number of sequences worth a separate thread


def generate(
    model: LanguageModel,
    prompt: np.ndarray,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Key = Key(0),
    allowed: np.ndarray | None = None,
    open_cache: Callable[[Any, np.ndarray], KeyValueCache] | None = None,
) -> Iterator[np.ndarray]:
    """Yield the next token ids (B,) after prompts (B, T) with T ≥ 1, `tokens` times, each appended before the next.

    temperature, top_k, top_p, allowed: see `sampling.probabilities`; temperature 0 is greedy. The same key gives the
    same text. If a prompt is longer than the model can see at once, only its end is read. On a CPU a large batch is
    distributed over the cores. open_cache: makes the cache for some of the prompts, in place of `cache_for`; called
    with the model and what was cut from them, (B', n). Raises ValueError, when the first token is asked for, for an
    empty prompt or an option out of range.
    """
    expect_at_least(0, tokens=tokens)
    prompt = expect_array("prompt", prompt)
    expect_key(key)
    if prompt.ndim != 2 or prompt.size == 0:
        raise ValueError(f"prompt: expected (B, T) with T >= 1, got {prompt.shape}")
    B = prompt.shape[0]
    threads = max(1, min(cores(), B // ROWS)) if model.device is CPU else 1
    parts = np.array_split(np.arange(B), threads)
    room = model.context + getattr(model, "memory", 0)
    new, cut = prompt[:, -room:], prompt[:, :-room]
    caches = [open_cache(model, cut[part]) if open_cache else cache_for(model, len(part)) for part in parts]

    def logits(cache: KeyValueCache, part: np.ndarray) -> np.ndarray:
        return to_cpu(cache.logits(new[part]))

    with fast():  # loads libraries, which are limited, too
        blas = ThreadpoolController().select(user_api="blas")
    with ThreadPoolExecutor(threads) as pool:
        for i in range(tokens):
            # Products with few rows are limited by memory, so more BLAS threads would only wait for each other.
            few = new.shape[1] == 1 and caches[0].length < caches[0].room
            with fast(), blas.limit(limits=1 if threads > 1 or few else None):
                z = np.concatenate(list((pool.map if threads > 1 else map)(logits, caches, parts)))
            ids = sample(probabilities(z, temperature, top_k, top_p, allowed), key.fold(i))
            yield ids
            new = ids[:, None]


def expect_vocabulary(model: Any, size: int, note: str = "") -> None:
    """Raise ValueError unless the model has as many tokens as the vocabulary, `size`."""
    if size != (expected := model.config["vocab_size"]):
        raise ValueError(f"vocabulary: expected {expected:,} tokens, as in the model, got {size:,}{note}")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` with control characters, which a terminal would obey, replaced by U+FFFD, except newline and tab."""
    return _CONTROL.sub("\ufffd", text)


def stream_text(
    model: LanguageModel,
    prompt: str | bytes,
    tokens: int,
    vocabulary: Subwords | PublishedTokenizer | None = None,
    **options: Any,
) -> Iterator[str]:
    """Generate tokens after `prompt`, and yield text as soon as their bytes form complete characters (UTF-8).

    vocabulary: the model's byte-pair encoding, with the ids that end a text (`ends`); None for a model of bytes.
    Bytes that are not UTF-8 become U+FFFD; control characters are not changed: see `printable`. The other options are
    those of `generate`. Raises ValueError if the vocabulary and the model differ in size.
    """
    if not isinstance(prompt, str | bytes):
        raise TypeError(f"prompt: expected text or bytes, got {shown(prompt)}")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    ends: frozenset[int] = frozenset()
    if vocabulary is None:
        pieces, note = [bytes([i]) for i in range(256)], " bytes, the default"
        ids = np.frombuffer(prompt.encode("utf-8") if isinstance(prompt, str) else prompt, np.uint8)
    else:
        pieces, ends, note = vocabulary.pieces, vocabulary.ends, ""
        ids = vocabulary.encode(prompt if isinstance(prompt, str) else prompt.decode("utf-8", "replace"))
    expect_vocabulary(model, len(pieces), note)
    for new in generate(model, ids[None, :], tokens, **options):
        if new[0] in ends:
            break
        text = decoder.decode(pieces[new[0]])
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest

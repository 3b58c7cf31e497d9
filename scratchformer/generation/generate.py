"""Generation of text, token by token."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ..backend import CPU, cores, to_cpu
from ..checks import (
    expect_array,
    expect_at_least,
    expect_ids,
    expect_instance,
    expect_number,
    expect_shape,
    expect_texts,
)
from ..data.subwords import Subwords
from ..dispatch import fast
from ..models import LanguageModel
from ..rng import Key, expect_key
from ..shell.text import shown
from .cache import KeyValueCache, cache_for
from .sampling import choose, occurrences, penalised

ROWS = 8  # the smallest number of sequences worth a separate thread


def generate(
    model: LanguageModel,
    prompt: np.ndarray | Sequence[Any],
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Key = Key(0),
    allowed: np.ndarray | None = None,
    open_cache: Callable[[Any, int], KeyValueCache] = cache_for,
    repetition_penalty: float = 1.0,
    stop: Sequence[int] = (),
) -> Iterator[np.ndarray]:
    """Yield the next token ids (B,) after prompts (B, T) with T ≥ 1, `tokens` times, each appended before the next.

    prompt: (B, T), or a list of B prompts of any lengths, each (T,). temperature, top_k, top_p, allowed: see
    `sampling.probabilities`; temperature 0 is greedy. repetition_penalty: θ of `sampling.penalised`, for the tokens of
    the prompt and those that were written; 1 is none. stop: ids that end a sequence. After one of them, −1 is yielded
    in place of its tokens, and nothing more when all sequences have ended. The same key gives the same text. If a
    prompt is longer than the model can see at once, only its end is read. On a CPU a large batch is distributed over
    the cores. open_cache: makes the cache for some of the prompts; called with the model and the number of prompts.
    Raises ValueError, when the first token is asked for, for an empty prompt or an option out of range; TypeError or
    IndexError for prompts of anything but tokens.

    Prompts of different lengths all begin at position 0, so every sequence has as many tokens in the cache as the
    others. Then any model can continue them together, each as if it were alone, up to rounding; but if tokens are
    drawn, the other prompts decide too which ones are. As many tokens of each prompt as the shortest one has are read
    at once. From there each step appends one token to every sequence: the next one of its prompt while there is one,
    and then one that is written. So a prompt that is d tokens longer takes d more steps. Where lengths are further
    apart than `tokens`, separate batches take fewer steps, and are made.
    """
    expect_at_least(0, tokens=tokens)
    expect_key(key)
    expect_number("repetition_penalty", repetition_penalty, zero=False)
    prompts, V = expect_prompts(prompt), model.config["vocab_size"]
    ending = expect_array("stop", stop)
    expect_shape("stop", ending, "N")
    ending = ending if ending.size else np.empty(0, np.int64)
    for name, ids in ("stop", ending), *(("ids", ids) for ids in prompts):
        expect_ids(name, ids, V)
    prompts = [ids.astype(np.int64, copy=False) for ids in prompts]  # of uint64 and int64 NumPy would make float64
    lengths = np.array([len(ids) for ids in prompts])
    order = np.argsort(lengths, kind="stable")
    batches = np.split(order, np.flatnonzero(np.diff(lengths[order]) > tokens) + 1)
    options = tokens, (temperature, top_k, top_p, allowed), open_cache, repetition_penalty
    streams = [
        _continued(model, [prompts[b] for b in batch], key.fold("batch", i) if i else key, *options)
        for i, batch in enumerate(batches)
    ]
    ended = np.zeros(len(prompts), bool)
    for parts in zip(*streams, strict=True):
        ids = np.empty(len(prompts), np.int64)
        ids[order] = np.concatenate(parts)
        ids[ended] = -1
        yield ids
        ended |= np.isin(ids, ending)
        if ended.all():
            return


def _continued(
    model: LanguageModel,
    prompts: Sequence[np.ndarray],
    key: Key,
    tokens: int,
    options: tuple[Any, Any, Any, Any],
    open_cache: Callable[[Any, int], KeyValueCache],
    repetition_penalty: float,
) -> Iterator[np.ndarray]:
    """What `generate` yields for one batch of prompts, the shortest first. options: of `sampling.probabilities`."""
    B, room = len(prompts), model.context + getattr(model, "memory", 0)
    threads = max(1, min(cores(), B // ROWS)) if model.device is CPU else 1
    parts = np.array_split(np.arange(B), threads)
    seen = [ids[-room:] for ids in prompts]
    later = [len(ids) - len(seen[0]) for ids in seen]  # how many steps later than that of the first each text begins
    caches = [open_cache(model, len(part)) for part in parts]
    occurred = None if repetition_penalty == 1 else occurrences(prompts, model.config["vocab_size"])

    def logits(cache: KeyValueCache, part: np.ndarray) -> np.ndarray:
        return to_cpu(cache.logits(new[part]))

    with fast():  # loads libraries, which are limited, too
        blas = ThreadpoolController().select(user_api="blas")
    new = np.stack([ids[: len(seen[0])] for ids in seen])
    steps: deque[np.ndarray] = deque(maxlen=later[-1] + 1)  # what the last steps have appended
    with ThreadPoolExecutor(threads) as pool:
        for i in range(tokens + later[-1] if tokens else 0):
            # Products with few rows are limited by memory, so more BLAS threads would only wait for each other.
            few = new.shape[1] == 1 and caches[0].length < caches[0].room
            with fast(), blas.limit(limits=1 if threads > 1 or few else None):
                z = np.concatenate(list((pool.map if threads > 1 else map)(logits, caches, parts)))
            if occurred is not None:
                z = penalised(z, occurred, repetition_penalty)
            ids = choose(z, *options, key=key.fold(i))
            for b in range(bisect_right(later, i), B):  # those that are still read
                ids[b] = seen[b][len(seen[0]) + i]
            if occurred is not None:
                occurred[np.arange(B), ids] = True
            steps.append(ids)
            if i >= later[-1]:
                yield np.array([steps[begun][b] for b, begun in enumerate(later)])
            new = ids[:, None]


def expect_prompts(prompt: Any) -> list[np.ndarray]:
    """The prompts of `generate`, each (T,); raises ValueError unless there is one, and all have tokens."""
    if isinstance(prompt, list | tuple) and len(prompt) and all(hasattr(ids, "__len__") for ids in prompt):
        prompts = [expect_array(f"prompt[{b}]", ids) for b, ids in enumerate(prompt)]
        for b, ids in enumerate(prompts):
            if ids.ndim != 1 or ids.size == 0:
                raise ValueError(f"prompt[{b}]: expected (T,) with T >= 1, got {ids.shape}")
        return prompts
    prompt = expect_array("prompt", prompt)
    if prompt.ndim != 2 or prompt.size == 0:
        raise ValueError(f"prompt: expected (B, T) with T >= 1, got {prompt.shape}")
    return list(prompt)


def expect_vocabulary(model: Any, size: int, note: str = "") -> None:
    """Raise ValueError unless the model has as many tokens as the vocabulary, `size`."""
    if size != (expected := model.config["vocab_size"]):
        raise ValueError(f"vocabulary: expected {expected:,} tokens, as in the model, got {size:,}{note}")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` with control characters, which a terminal would obey, replaced by U+FFFD, except newline and tab."""
    return _CONTROL.sub("\ufffd", text)


class Writing:
    """A text that is written in pieces of bytes: what of it can be shown, and whether it has ended.

    stop: texts that end it, and do not belong to it. What could be the beginning of one is held back for now.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.stop, self.held, self.ended = stop, "", False

    def add(self, piece: bytes, final: bool = False) -> str:
        """Append the bytes, and return the characters that can be shown now. final: no more bytes follow."""
        if self.ended:
            return ""
        text, self.held, self.ended = self.held + self.decoder.decode(piece, final), "", final
        places = [(start + len(stop), start) for stop in self.stop if (start := text.find(stop)) >= 0]
        if places:  # the text that was complete first; of several, the longest
            self.ended = True
            return text[: min(places)[1]]
        if not final:
            lengths = range(min(len(text), max(map(len, self.stop), default=0)), 0, -1)
            held = next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stop)), 0)
            text, self.held = text[: len(text) - held], text[len(text) - held :]
        return text


def stream_texts(
    model: LanguageModel,
    prompts: Sequence[str | bytes],
    tokens: int,
    vocabulary: Subwords | None = None,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[list[str]]:
    """Generate tokens after B prompts, of any lengths, and yield for each the text that is new: see `stream_text`.

    Each list has B texts. After the end of a text, what is new of it is ""; when all have ended, so do the lists.
    """
    expect_instance("prompts", prompts, list | tuple)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str | bytes):
            raise TypeError(f"prompt{f'[{i}]' * (len(prompts) > 1)}: expected text or bytes, got {shown(prompt)}")
    expect_texts("stop", stop, Sequence)
    if "" in stop:
        raise ValueError("stop: expected texts of at least one character, got an empty one")
    ends: frozenset[int] = frozenset()
    if vocabulary is None:
        pieces, note = [bytes([i]) for i in range(256)], " bytes, the default"
        ids = [np.frombuffer(p.encode("utf-8") if isinstance(p, str) else p, np.uint8) for p in prompts]
    else:
        pieces, ends, note = vocabulary.pieces, vocabulary.ends, ""
        ids = [vocabulary.encode(p if isinstance(p, str) else p.decode("utf-8", "replace")) for p in prompts]
    expect_vocabulary(model, len(pieces), note)
    texts = [Writing(stop) for _ in prompts]
    for new in generate(model, ids if len(ids) > 1 else ids[0][None], tokens, **options):
        yield [text.add(b"" if i in ends else pieces[i], final=i in ends) for text, i in zip(texts, new, strict=True)]
        if all(text.ended for text in texts):
            return
    yield [text.add(b"", final=True) for text in texts]


def stream_text(
    model: LanguageModel,
    prompt: str | bytes,
    tokens: int,
    vocabulary: Subwords | None = None,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    """Generate tokens after `prompt`, and yield text as soon as its bytes form complete characters (UTF-8).

    vocabulary: the model's byte-pair encoding, with the ids that end a text (`ends`); None for a model of bytes.
    stop: texts before which the text ends, even within a token; what could be the beginning of one is yielded when it
    is known not to be. Bytes that are not UTF-8 become U+FFFD; control characters are not changed: see `printable`. The
    other options are those of `generate`. Raises ValueError if the vocabulary and the model differ in size, and for an
    empty text to stop at.
    """
    for (text,) in stream_texts(model, [prompt], tokens, vocabulary, stop, **options):
        if text:
            yield text

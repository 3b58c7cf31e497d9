"""Programs that train a language model: its corpus, its score in bits per byte, and a sample of its text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from ..data import (
    STANDARD_LIBRARY,
    VALIDATION_BYTES,
    Corpus,
    DataError,
    NoConnection,
    TextBatches,
    as_text,
    load_enwik8,
)
from ..data.batching import recalling, tokens_of
from ..generation import printable, stream_text
from ..generation.recalled import recall_orders
from ..models import TransformerXL
from ..optim import DynamicRMS
from ..parallel.replicas import Replicas
from ..rng import Key
from ..shell.text import one_line
from .dynamic import evaluate_dynamic, expect_adaptable, observe_gradients
from .evaluate import evaluate_language_model, evaluate_transformer_xl
from .program import Program, file_of
from .settings import Run
from .snapshot import class_name
from .stage import as_text as scores_as_text
from .state import Diverged

# Settings of dynamic evaluation: those of `DynamicRMS` and `evaluate_dynamic`, and how many batches are observed. They
# were chosen on validation; stride None is an eighth of the context.
DYNAMIC: Mapping[str, Any] = dict(lr=2e-5, decay=0.0, eps=1e-5, stride=None, windows=4, learn="new", observed=40)
LEAST = 20_000  # a short run is scored on at least as many tokens, if the part has them


class LanguageProgram(Program):
    """A program that trains a language model on a text, scores it in bits per byte, and prints a sample.

    A subclass must define `make_model`. The text is given as --data and is enwik8 by default. Tokens are bytes unless
    `load` also sets a `vocabulary` (`Subwords.byte_bpe`). A preset needs "context", "batch_size", "lr", "warmup" and
    "steps"; the optional "test_bytes" limits how much of the test part is scored.
    """

    evaluations = 20  # during training
    test_part = "the last 5%"  # what `report` calls the test part
    dynamic: Mapping[str, Any] | None = None  # settings in place of DYNAMIC; None for no dynamic evaluation

    def load(self) -> None:
        self.corpus = load_corpus(self.run)

    @cache  # noqa: B019 (a process has one program)
    def tokens(self, part: str) -> np.ndarray:
        """The tokens (n,) of a part of the corpus: all of "train", and of "validation" and "test" what is scored.

        For a model with `recall`, rows (n, 1 + K) from `data.recalling`. Matches are searched in all that precedes a
        token, in its own part and in earlier ones.
        """
        limit = self.most_bytes(part)
        if not self.orders:
            return self.encoded(getattr(self.corpus, part)[:limit])
        rows = self.rows[part]
        if limit is not None and self.vocabulary is not None:  # as many bytes as without recall
            limit = len(self.encoded(getattr(self.corpus, part)[:limit]))
        return rows[:limit]

    def most_bytes(self, part: str) -> int | None:
        """How many bytes of a part are scored at most; None if all are."""
        return {"validation": VALIDATION_BYTES, "test": getattr(self.run, "test_bytes", None)}.get(part)

    def encoded(self, data: np.ndarray) -> np.ndarray:
        """The tokens (n,) of bytes."""
        return data if self.vocabulary is None else self.vocabulary.encode_long(as_text(data, self.corpus.name))

    @property
    def bytes_of_tokens(self) -> np.ndarray | None:
        """The number of bytes of each token, (V,); None if tokens are bytes."""
        return None if self.vocabulary is None else self.vocabulary.sizes

    @property
    def orders(self) -> Sequence[int]:
        """The model's `recall`."""
        return recall_orders(self.model)

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """Each part of the corpus as rows (n, 1 + K) from `data.recalling`."""
        parts = {name: self.encoded(getattr(self.corpus, name)) for name in ("train", "validation", "test")}
        ends = np.cumsum([len(tokens) for tokens in parts.values()])
        whole = recalling(np.concatenate(list(parts.values())), self.orders)
        return dict(zip(parts, np.split(whole, ends[:-1]), strict=True))

    def make_batches(self, key: Key) -> Any:
        training, *scored = map(self.tokens, ("train", "validation", "test"))  # all, to report bad text early
        batches = TextBatches(training, self.run.batch_size, self.model.context, key)
        for part, tokens in zip(("validation", "test"), scored, strict=True):
            if len(tokens) < 2:
                raise DataError(f"corpus: the {part} part has {len(tokens)} token(s), too few: use a longer text")
        return batches

    def evaluate(self, replicas: Replicas, part: str, **options: Any) -> dict[str, float]:
        score = evaluate_transformer_xl if isinstance(replicas.model, TransformerXL) else evaluate_language_model
        return score(replicas, self.scored_tokens(part), sizes=self.bytes_of_tokens, **options)

    def evaluate_dynamic(self, replicas: Replicas, part: str, **settings: Any) -> dict[str, float]:
        """The scores of `replicas.model` on a part if it learns while it reads: see `training.evaluate_dynamic`.

        settings: in place of those in DYNAMIC. The steps are scaled by gradients of the first training batches.
        """
        if unknown := settings.keys() - DYNAMIC.keys():
            raise TypeError(f"settings: expected some of {', '.join(DYNAMIC)}, got {min(unknown)}")
        chosen = {**DYNAMIC, **settings}
        expect_adaptable(replicas)
        context = replicas.model.context
        stride = chosen["stride"] or max(1, context // 8)
        if stride > context:
            raise ValueError(f"--stride: expected at most the context, {context}, got {stride}")
        optimizer = DynamicRMS(replicas.model.parameters(), **{name: chosen[name] for name in ("lr", "decay", "eps")})
        observe_gradients(replicas, optimizer, self.batches, chosen["observed"])
        options = dict(stride=stride, windows_per_step=chosen["windows"], learn=chosen["learn"])
        return evaluate_dynamic(replicas, self.scored_tokens(part), optimizer, sizes=self.bytes_of_tokens, **options)

    def summary(self, replicas: Replicas, part: str) -> str:
        lines = []
        if self.dynamic is not None:  # first, since it may be refused
            found = scores_as_text(self.evaluate_dynamic(replicas, part, **self.dynamic))
            lines.append(f"{part}, learning while reading: {found}")
        size, most = len(getattr(self.corpus, part)), self.most_bytes(part)
        where = "" if most is None or most >= size else f" on the first {most:,} of {size:,} bytes"
        return "\n".join([super().summary(replicas, part) + where, *lines])

    def prepare(self, replicas: Replicas) -> None:
        super().prepare(replicas)
        if self.dynamic is not None:
            expect_adaptable(replicas)  # before training, and not only after it

    def test(self, replicas: Replicas) -> dict[str, float]:
        found = super().test(replicas)
        if self.dynamic is not None:
            try:
                found["dynamic"] = self.evaluate_dynamic(replicas, "test", **self.dynamic)["bits_per_byte"]
            except Diverged as error:  # the other score is good
                print(one_line(f"learning while reading: {error}"), file=sys.stderr)
        return found

    def scored_tokens(self, part: str) -> np.ndarray:
        """The tokens of a part that are scored: all, or only the first ones if the run is short."""
        tokens, trained = self.tokens(part), self.steps * self.run.batch_size * self.model.context
        return tokens[: self.scored(part, len(tokens), trained, LEAST)]

    def identity(self) -> dict[str, Any]:
        subwords = {} if self.vocabulary is None else {"subwords": self.vocabulary.fingerprint}
        return {"data": self.corpus.fingerprint, **subwords}

    def schedule(self, floor: float | None = None) -> Any:
        return super().schedule(self.lr / 10 if floor is None else floor)

    def training(self) -> dict[str, Any]:
        every = max(250, self.steps // self.evaluations)
        return dict(evaluate_every=every, select=("bits_per_byte", "min"))

    def describe(self) -> None:
        tokens = ""
        if self.vocabulary is not None:
            tokens = f", {len(self.tokens('train')):,} tokens of {len(self.vocabulary):,} kinds"
        print(f"{self.corpus.name}: {len(self.corpus.train):,} training bytes{tokens}; {self.parameters} parameters")

    def report(self, state: Mapping[str, Any], test: Mapping[str, float]) -> None:
        nats = "" if self.vocabulary is None else f" ({test['loss']:.4f} nats per token)"
        limit = self.most_bytes("test")
        whole = limit is None or limit >= len(self.corpus.test)
        where = self.test_part if whole else f"{limit:,} bytes of {self.test_part}"
        count, size = len(self.scored_tokens("test")), len(self.tokens("test"))
        if count < size:
            unit = "bytes" if self.vocabulary is None else "tokens"
            where = "the first " + self.share(count, size, f"{unit} of {self.test_part}")
        bits = test["bits_per_byte"]
        print(f"{self.corpus.name}: {bits:.4f} bits per byte{nats} on {where}, {self.described(state, test)}")
        if "dynamic" in test:
            print(f"{self.corpus.name}: {test['dynamic']:.4f} if it learns while reading")
        self.write()

    def read_before(self) -> np.ndarray:
        """The tokens (n,) of all parts but the last, in which a model with recall looks for matches when it writes."""
        return np.concatenate([self.encoded(part) for part in (self.corpus.train, self.corpus.validation)])

    def described(self, state: Mapping[str, Any], test: Mapping[str, float]) -> str:
        """How the scored model was trained, to end the sentence with its score."""
        return f"the best of {state['step']} steps"

    def write(self) -> None:
        """Print a continuation of the beginning of the test part."""
        vocabulary, context = self.vocabulary, self.model.context
        if vocabulary is None:
            prompt = self.corpus.test[: context // 2].tobytes().decode("utf-8", errors="ignore") or "\n"
        else:
            prompt = vocabulary.decode(tokens_of(self.tokens("test")[: min(64, context // 2)]))
        print(f"\n--- the model continues a text it has not seen ---\n{printable(prompt[-200:])}|", end="")
        count, key = 400 if vocabulary is None else 150, self.key.fold("sample")
        options = {"before": self.read_before()} if self.orders else {}
        for text in stream_text(self.model, prompt, count, vocabulary, temperature=0.7, key=key, **options):
            print(printable(text), end="", flush=True)
        own = ["--program", file_of(self.run.out)] if ":" in class_name(self.model) else []  # of a class of the program
        print(f"\n---\nfor more: {one_line(shlex.join(['scratchformer', 'generate', str(self.run.out), *own]))}")


def load_corpus(run: Run) -> Corpus:
    """The text of `run.data`, by default enwik8, or the sources of the standard library if there is no network."""
    try:
        return load_enwik8(run.data, getattr(run, "bytes", None) or None)
    except NoConnection:
        if run.resume:  # it trained on enwik8
            raise
        run.data = STANDARD_LIBRARY
        corpus = load_enwik8(run.data, getattr(run, "bytes", None) or None)
        print(f"no connection to download enwik8: training on {corpus.name} instead")
        return corpus

"""Shared parts of programs that train a language model: the corpus, a sample, and scores while it learns."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from ..data import STANDARD_LIBRARY, Corpus, NoConnection, TextBatches, load_enwik8
from ..data.batching import tokens_of
from ..generation import printable, stream_text
from ..optim import DynamicRMS
from ..parallel.replicas import Replicas
from ..shell.text import one_line
from .dynamic import evaluate_dynamic, expect_adaptable, observe_gradients
from .run import Run
from .snapshot import class_name

# Settings of dynamic evaluation: those of `DynamicRMS` and `evaluate_dynamic`, and how many batches are observed. They
# were chosen on validation; stride None is an eighth of the context.
DYNAMIC: dict[str, Any] = dict(lr=2e-5, decay=0.0, eps=1e-5, stride=None, windows=4, learn="new", observed=40)


def load_corpus(run: Run) -> Corpus:
    """The text of `run.data`, by default enwik8, or the sources of the standard library if there is no network. Of a
    run with the setting `bytes`, if that is not 0, it is so much of the beginning.
    """
    limit = getattr(run, "bytes", None) or None
    try:
        return load_enwik8(run.data, limit)
    except NoConnection:
        if run.resumed:  # it trained on enwik8
            raise
        run.settings["data"] = STANDARD_LIBRARY
        corpus = load_enwik8(run.data, limit)
        print(f"no connection to download enwik8: training on {corpus.name} instead")
        return corpus


def write_sample(run: Run, model: Any, corpus: Any, **options: Any) -> None:
    """Print a continuation of the beginning of the test part. options: further ones of `stream_text`."""
    vocabulary, context = getattr(corpus, "vocabulary", None), model.context
    tokens = tokens_of(corpus.test)
    if vocabulary is None:
        prompt = tokens[: context // 2].astype(np.uint8).tobytes().decode("utf-8", errors="ignore") or "\n"
    else:
        prompt = vocabulary.decode(tokens[: min(64, context // 2)])
    print(f"\n--- the model continues a text it has not seen ---\n{printable(prompt[-200:])}|", end="")
    count, key = 400 if vocabulary is None else 150, run.key("sample")
    for text in stream_text(model, prompt, count, vocabulary, temperature=0.7, key=key, **options):
        print(printable(text), end="", flush=True)
    command = ["scratchformer", "generate", str(run.out)]
    if ":" in class_name(model):  # a class of the program
        command += ["--program", str(run.made_by) if Path(str(run.made_by)).is_file() else "FILE"]
    print(f"\n---\nfor more: {one_line(shlex.join(command))}")


def score_dynamically(run: Run, replicas: Replicas, corpus: Any, part: str, **settings: Any) -> dict[str, float]:
    """The scores of `replicas.model` on a part if it learns while it reads: see `evaluate_dynamic`.

    corpus: with `train` and the part, arrays of tokens. settings: in place of those in DYNAMIC. The steps are scaled by
    gradients of the first training batches.
    """
    if not hasattr(replicas.model, "context"):
        raise ValueError(f"--dynamic: {run.name} trains no language model, so leave it out")
    chosen = {**DYNAMIC, **settings}
    expect_adaptable(replicas)
    context = replicas.model.context
    stride = chosen["stride"] or max(1, context // 8)
    if stride > context:
        raise ValueError(f"--stride: expected at most the context, {context}, got {stride}")
    optimizer = DynamicRMS(replicas.model.parameters(), **{name: chosen[name] for name in ("lr", "decay", "eps")})
    batches = TextBatches(corpus.train, run.batch_size, context, run.key("batches"))
    observe_gradients(replicas, optimizer, batches, chosen["observed"])
    options = dict(stride=stride, windows_per_step=chosen["windows"], learn=chosen["learn"])
    tokens, vocabulary = run.scored(part, getattr(corpus, part)), getattr(corpus, "vocabulary", None)
    sizes = None if vocabulary is None else vocabulary.sizes
    return evaluate_dynamic(replicas, tokens, optimizer, sizes=sizes, **options)

"""Shared parts of programs that train a language model: the corpus and a sample."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from ..data import STANDARD_LIBRARY, Corpus, NoConnection, load_enwik8
from ..generation import printable, stream_text
from ..shell.text import one_line
from .run import Run
from .snapshot import class_name


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


def write_sample(run: Run, model: Any, corpus: Any) -> None:
    """Print a continuation of the beginning of the test part."""
    vocabulary, context = getattr(corpus, "vocabulary", None), model.context
    if vocabulary is None:
        prompt = corpus.test[: context // 2].astype(np.uint8).tobytes().decode("utf-8", errors="ignore") or "\n"
    else:
        prompt = vocabulary.decode(corpus.test[: min(64, context // 2)])
    print(f"\n--- the model continues a text it has not seen ---\n{printable(prompt[-200:])}|", end="")
    count, key = 400 if vocabulary is None else 150, run.key("sample")
    for text in stream_text(model, prompt, count, vocabulary, temperature=0.7, key=key):
        print(printable(text), end="", flush=True)
    command = ["scratchformer", "generate", str(run.out)]
    if ":" in class_name(model):  # a class of the program
        command += ["--program", str(run.made_by) if Path(str(run.made_by)).is_file() else "FILE"]
    print(f"\n---\nfor more: {one_line(shlex.join(command))}")

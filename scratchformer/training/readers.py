"""Loading of models that read or write text, with their vocabularies, from runs or published weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..data import PublishedTokenizer, Subwords, Vocabulary
from ..models import GPT2, BertClassifier, EncoderDecoder, LanguageModel
from ..models.bert_weights import ROBERTA, published_as
from ..models.families import family
from ..models.pretrained import PretrainedError, instead_of_folder
from ..nn import Layer
from ..shell.text import with_article
from .folder import SUBWORDS, TOKENIZER, WORDS
from .snapshot import SnapshotError, best_snapshot, load_model

BYTES = 256  # the vocabulary size of a byte-level model
MEAN = "average.safetensors"  # the mean of a run's last snapshots


def vocabulary_file(folder: Path, kind: Any) -> Path:
    """The file, or folder, in which a run in `folder` keeps its vocabulary, of class `kind`."""
    if issubclass(kind, PublishedTokenizer):
        return folder / TOKENIZER
    return folder / (WORDS if issubclass(kind, Vocabulary) else SUBWORDS)


def published_files(path: Path | str) -> Path | None:
    """The folder with the tokenizer and the chat template of a published model, which a run that tuned it keeps.

    path: of the published folder, the run or its snapshot. None for other models.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    folders = (folder, folder / TOKENIZER)
    return next((each for each in folders if (each / "config.json").is_file()), None)


def load_vocabulary(snapshot: Path | str, state: Mapping[str, Any], kind: Any = Subwords) -> Any:
    """The vocabulary, of class `kind`, from the folder of a snapshot or a run.

    state: the snapshot's state, which has the vocabulary's fingerprint as "subwords" or "vocabulary". Raises DataError
    if the file is missing or damaged, SnapshotError if the fingerprint differs.
    """
    folder = Path(snapshot) if Path(snapshot).is_dir() else Path(snapshot).parent
    if kind is Subwords and (folder / TOKENIZER).is_dir():
        kind = PublishedTokenizer
    path = vocabulary_file(folder, kind)
    vocabulary = kind.load(path)
    if vocabulary.fingerprint != state.get("subwords", state.get("vocabulary", vocabulary.fingerprint)):
        raise SnapshotError(f"{snapshot}: the snapshot was made with another vocabulary than {path}")
    return vocabulary


def reads_text(model: Layer, state: Mapping[str, Any]) -> bool:
    """Whether a model's tokens are text: bytes, or words of a vocabulary. state: the snapshot's state."""
    return "subwords" in state or "vocabulary" in state or getattr(model, "config", {}).get("vocab_size") == BYTES


def load_reader(snapshot: Path | str, model: Any, state: Mapping[str, Any]) -> Any:
    """The vocabulary of a model that reads text, from the folder of its run; None if its tokens are bytes.

    state: the snapshot's state. Raises ValueError if the tokens are not text, and the errors of `load_vocabulary`.
    """
    if not reads_text(model, state):
        raise ValueError(f"{snapshot}: its {model.config['vocab_size']} tokens are neither bytes nor words")
    if "subwords" in state:
        return load_vocabulary(snapshot, state)
    return load_vocabulary(snapshot, state, Vocabulary) if "vocabulary" in state else None


def load_writer(
    path: Path | str, context: int | None = None, program: ModuleType | None = None, dtype: Any = None
) -> tuple[LanguageModel, Subwords | None]:
    """A language model and its vocabulary (None: bytes), from a run's folder, a snapshot, or a folder with a published
    decoder. context, dtype: see `load_published`. program: see `load_model`. Raises ValueError for a model that cannot
    generate text, and the errors of loading.
    """
    if (Path(path) / "config.json").is_file():
        return load_published(path, context, dtype=dtype)
    if (other := instead_of_folder(path)) and ("no such folder" not in other or "hf download" in other):
        raise PretrainedError(other)
    model, state = load_model(best_snapshot(path), program=program)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{path} holds {with_article(type(model))}, which cannot generate text")
    if isinstance(vocabulary := load_reader(path, model, state), Vocabulary):
        raise ValueError(f"{path} holds a word-level model, whose text cannot be streamed")
    return model, vocabulary


def load_translator(run: Path, program: ModuleType | None = None) -> tuple[EncoderDecoder, Subwords]:
    """The encoder-decoder of a run, and its vocabulary. program: see `load_model`. Raises ValueError for a model that
    cannot translate, and the errors of loading.
    """
    model, state = load_model(mean_snapshot(run), program=program)
    if not isinstance(model, EncoderDecoder):
        raise ValueError(f"{run} holds {with_article(type(model))}, which cannot translate")
    return model, load_vocabulary(run, state)


def mean_snapshot(run: Path) -> Path:
    """The saved mean of a run's last snapshots, or its best snapshot if there is no mean."""
    return run / MEAN if os.path.lexists(run / MEAN) else best_snapshot(run)  # what is no file is named on loading


def load_bert(folder: Path | str, num_classes: int, **options: Any) -> tuple[BertClassifier, Subwords]:
    """A published BERT, RoBERTa or DistilBERT as a classifier, and its vocabulary. Raises the errors of loading."""
    model = BertClassifier.from_pretrained(folder, num_classes, **options)
    return model, (Subwords.from_roberta if published_as(folder) == ROBERTA else Subwords.from_bert)(folder)


def load_published(
    folder: Path | str, context: int | None = None, dropout: float = 0.0, dtype: Any = None
) -> tuple[LanguageModel, PublishedTokenizer]:
    """A published decoder of any family and its vocabulary, to write, or to be trained further.

    context: the most tokens that it sees at once, if the folder allows so many; None for all. (That of a GPT-2 is that
    of its table.) dropout, dtype: see `PublishedDecoder.from_pretrained`. Raises the errors of loading.
    """
    kind: Any = family(folder)
    sizes = kind.arguments(folder)
    vocabulary = PublishedTokenizer(folder, sizes["vocab_size"])
    options: dict[str, Any] = dict(dropout=dropout, dtype=dtype)
    if kind is not GPT2:
        options["context"] = min(sizes["context"], context or sizes["context"])
    return kind.from_pretrained(folder, **options), vocabulary

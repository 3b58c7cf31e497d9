"""Models that read or write text, each with its vocabulary, from the folder of a run or of published weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data import PublishedTokenizer, Subwords, Vocabulary
from ..models import GPT2, EncoderDecoder, LanguageModel, Llama
from ..models.llama_weights import KINDS, llama_config
from ..models.pretrained import PretrainedError, read_config
from ..nn import Layer
from .snapshot import SnapshotError, best_snapshot, load_model

WORDS, SUBWORDS = "vocabulary.txt", "vocabulary.json"
BYTES = 256  # the vocabulary of a model of bytes
MEAN = "average.safetensors"  # of a run whose last snapshots were averaged


def vocabulary_file(folder: Path, kind: Any) -> Path:
    """Where a run in `folder` keeps its vocabulary, of the class `kind`."""
    return folder / (WORDS if issubclass(kind, Vocabulary) else SUBWORDS)


def load_vocabulary(snapshot: Path | str, state: Mapping[str, Any], kind: Any = Subwords) -> Any:
    """The vocabulary, of the class `kind`, beside a snapshot, or in the folder of a run.

    state: that of the snapshot; it has the vocabulary's fingerprint as "subwords" or "vocabulary". Raises DataError if
    the file is missing or damaged, SnapshotError if it is another vocabulary.
    """
    folder = Path(snapshot) if Path(snapshot).is_dir() else Path(snapshot).parent
    path = vocabulary_file(folder, kind)
    vocabulary = kind.load(path)
    if vocabulary.fingerprint != state.get("subwords", state.get("vocabulary", vocabulary.fingerprint)):
        raise SnapshotError(f"{snapshot}: the snapshot was made with another vocabulary than {path}")
    return vocabulary


def reads_text(model: Layer, state: Mapping[str, Any]) -> bool:
    """Whether a model's tokens stand for text: bytes, or words of a vocabulary. state: that of its snapshot."""
    return "subwords" in state or "vocabulary" in state or getattr(model, "config", {}).get("vocab_size") == BYTES


def load_reader(snapshot: Path | str, model: Any, state: Mapping[str, Any]) -> Any:
    """The vocabulary with which a model reads text, from the folder of its run; None if its tokens are bytes.

    state: that of the snapshot. Raises ValueError if its tokens are no text, and as `load_vocabulary` does.
    """
    if not reads_text(model, state):
        raise ValueError(f"{snapshot}: its {model.config['vocab_size']} tokens are neither bytes nor words of a text")
    if "subwords" in state:
        return load_vocabulary(snapshot, state)
    return load_vocabulary(snapshot, state, Vocabulary) if "vocabulary" in state else None


def load_writer(
    path: Path | str, prompt: str = "", tokens: int | None = None
) -> tuple[LanguageModel, Subwords | PublishedTokenizer | None]:
    """A language model that writes, and its vocabulary (None: bytes), from the folder of a run, a snapshot, or a folder
    with a published GPT-2, Llama, Mistral or Qwen2. prompt, tokens: see `load_llama`. Raises ValueError for a model
    that does not write, and as the loading does.
    """
    if (Path(path) / "config.json").is_file():
        gpt2 = read_config(path, ("gpt2", *KINDS))["model_type"] == "gpt2"
        return load_gpt2(path, dropout=0.0) if gpt2 else load_llama(path, prompt, tokens)
    model, state = load_model(best_snapshot(path))
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{path} holds a {type(model).__name__}, which does not write")
    if isinstance(vocabulary := load_reader(path, model, state), Vocabulary):
        raise ValueError(f"{path} holds a model of whole words, which cannot be streamed")
    return model, vocabulary


def load_translator(run: Path) -> tuple[EncoderDecoder, Subwords]:
    """The encoder-decoder of a run, the mean of its last snapshots if it was saved, and its vocabulary. Raises
    ValueError for a model that does not translate, and as the loading does.
    """
    model, state = load_model(mean_snapshot(run))
    if not isinstance(model, EncoderDecoder):
        raise ValueError(f"{run} holds a {type(model).__name__}, which does not translate")
    return model, load_vocabulary(run, state)


def mean_snapshot(run: Path) -> Path:
    """The mean of the last snapshots of a run, if it was saved; else its best snapshot."""
    return run / MEAN if (run / MEAN).is_file() else best_snapshot(run)


def load_gpt2(folder: Path | str, **options: Any) -> tuple[GPT2, Subwords]:
    """A published GPT-2 and its vocabulary; raises as the loading of both does, and if they do not fit each other."""
    model, vocabulary = GPT2.from_pretrained(folder, **options), Subwords.from_gpt2(folder)
    if len(vocabulary) != (size := model.config["vocab_size"]):
        raise PretrainedError(f"{folder}: vocab.json has {len(vocabulary):,} tokens, the model of config.json {size:,}")
    return model, vocabulary


def load_llama(folder: Path | str, prompt: str = "", tokens: int | None = None) -> tuple[Llama, PublishedTokenizer]:
    """A published Llama, Mistral or Qwen2 and its vocabulary, to write `tokens` tokens after `prompt`.

    Its context is no longer than that takes, since generation reserves memory for all of it; None: as in the folder.
    Raises as the loading of both does.
    """
    sizes = llama_config(folder)
    vocabulary = PublishedTokenizer(folder, sizes["vocab_size"])
    context = sizes["context"]
    if tokens is not None:
        context = min(context, max(1, len(vocabulary.encode(prompt)) + tokens))
    return Llama.from_pretrained(folder, context, dropout=0.0), vocabulary

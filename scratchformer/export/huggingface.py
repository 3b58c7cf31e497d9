"""Hugging Face folders that the library transformers loads: config.json, the weights, and the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from ..backend import to_cpu
from ..data import Subwords
from ..data.subwords import GPT2_END, SETTINGS, byte_vocabulary, copy_files
from ..models import GPT2, LanguageModel
from ..models.families import FAMILIES
from ..models.pretrained import WEIGHTS, PretrainedError
from ..models.published import PublishedDecoder
from ..nn import Dropout, Layer, LoRA, Param
from ..rng import Zeros
from ..shell.files import replacing_folder
from ..shell.reading import read_json
from ..shell.text import shown, with_article


class NotPublished(ValueError):
    """A model computes something that no published kind of model computes."""


def as_gpt2(model: LanguageModel) -> GPT2:
    """The GPT-2 that computes the same as `model`."""
    if type(model) is not LanguageModel:
        raise NotPublished(f"{with_article(type(model))} has no counterpart in transformers")
    given, sizes = model.config, ("vocab_size", "d_model", "heads", "depth", "context")
    options = {name: given[name] for name in (*sizes, "d_ff", "eps", "activation") if name in given}
    tied = not any(name.startswith("output.w") for name in model.named_parameters())
    gpt2 = GPT2(**options, tied=tied, dropout=0.0, key=Zeros())
    reason = difference(model, gpt2, added=("query.b", "key.b", "value.b"))
    if reason is not None:
        raise NotPublished(
            f"{with_article(type(model))} has no counterpart in transformers unless it is a GPT-2: {reason}"
        )
    params = gpt2.named_parameters()
    for name, p in model.named_parameters().items():
        params[name].data[...] = to_cpu(p.data)
    return gpt2


def difference(model: Layer, other: Layer, added: tuple[str, ...] = ()) -> str | None:
    """What `other` computes differently, or None. added: the ends of the names of biases that only `other` has."""
    kinds, others = dict(described(model)), dict(described(other))
    for name in kinds | others:
        if kinds.get(name) != others.get(name) and not (name not in kinds and name.endswith(added or (" ",))):
            return f"{name}: expected {shown(others.get(name))}, got {shown(kinds.get(name))}"
    return None


def described(model: Layer) -> Iterator[tuple[str, Any]]:
    """What a model computes: by full name, the class and the settings of its layers, and the shapes of parameters."""
    for name, layer in model.named_layers():
        if isinstance(layer, Dropout):
            continue
        if layer is not model:
            yield name, type(layer).__name__
        for setting, value in vars(layer).items():
            if not isinstance(value, Layer | Param | list) and setting not in ("config", "b", "recompute"):
                yield f"{name}.{setting}" if name else setting, value
    for name, p in model.named_parameters().items():
        yield name, tuple(p.data.shape)


def write_folder(model: LanguageModel, out: Path, vocabulary: Any = None, source: Path | None = None) -> None:
    """Write `model` to the new folder `out`, under the names of transformers. It is read back before it is kept.

    vocabulary: of the model; None for bytes. source: the folder that the model was read from, whose vocabulary is
    copied. A `LanguageModel` becomes a GPT-2 if it computes the same. Raises NotPublished, which says what differs, if
    there is no kind of model in transformers that computes what this one does.
    """
    if not isinstance(model, PublishedDecoder) or type(model) not in FAMILIES.values():
        model = as_gpt2(model)
    if any(isinstance(layer, LoRA) for _, layer in model.named_layers()):
        raise NotPublished("the model has LoRA beside its weights: call nn.merge_lora(model) first")
    with replacing_folder(out) as folder:
        save_file(model.stored(), folder / WEIGHTS, {"format": "pt"})
        ends, reasons = special_ids(vocabulary, source), []
        for kind in model.kinds:
            text = json.dumps(model.settings(kind) | ends, indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8", newline="\n")
            if (reason := misread(model, folder)) is None:
                break
            reasons.append(f"{kind}: {reason}")
        else:
            raise NotPublished(
                f"{with_article(type(model))} like this has no counterpart in transformers: {reasons[0]}"
            )
        write_vocabulary(folder, vocabulary, source)


def special_ids(vocabulary: Any, source: Path | None) -> dict[str, Any]:
    """The ids of the tokens that begin and end a text, as in config.json."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if source is not None:
        config = read_json(source / "config.json", PretrainedError)
        return {name: config[name] for name in names if name in config}
    ends = [] if vocabulary is None else sorted(vocabulary.ends)
    return dict.fromkeys(names) | {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def misread(model: PublishedDecoder, folder: Path) -> str | None:
    """What the model in a folder computes differently from `model`, or None."""
    try:
        return difference(model, type(model).from_pretrained(folder, dropout=0.0))
    except PretrainedError as error:
        return str(error).removeprefix(f"{folder / 'config.json'}: ")


def write_vocabulary(folder: Path, vocabulary: Subwords | None, source: Path | None) -> None:
    """Write the files of a vocabulary to `folder`: see `write_folder`."""
    texts: dict[str, str] = {}
    if source is not None:
        copy_files(source, folder)
    else:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if vocabulary is not None and vocabulary.ends:  # learned as GPT-2's was
            settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), GPT2_END)
        texts[SETTINGS] = json.dumps(settings, indent=2) + "\n"
    if source is None or (vocabulary is not None and not (folder / "tokenizer.json").exists()):
        texts["tokenizer.json"] = (byte_vocabulary() if vocabulary is None else vocabulary.tokenizer).to_str()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")

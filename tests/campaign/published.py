"""Folders of published weights: a file is damaged, missing or strange, or config.json has sizes that do not fit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from area import Area, Case
from damage import STRANGE, damage_bytes, damage_json, json_text, replace_by_no_file, size_of
from safetensors.numpy import save

from scratchformer.data import Subwords
from scratchformer.models import GPT2, BertClassifier, BertPretraining, Llama, bert_weights
from scratchformer.training import readers

TEXTS = ["the film was low, lower, the lowest of the films\n", "élan: a naïve café film, again and again\n"] * 3
TEXT = "the film"
SIZES = {  # the settings that must agree with the tensors
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_positions", "n_inner"),
    "llama": ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "head_dim"),
    "bert": ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings",
             "type_vocab_size"),
}  # fmt: skip
TYPES = ("F8_E4M3", "F8_E5M2", "I64", "BOOL", "U8", "F16", "BF16", "F64", "F4", "C64", "E8M0", "X", "", 1, None)


# Well-formed parts of a tokenizer.json with which this text cannot be encoded, or not with these tokens.
PARTS: tuple[dict[str, Any], ...] = (
    {"model": {"type": "Unigram", "unk_id": 5, "vocab": [["a", -1.0]]}},
    {"model": {"type": "Unigram", "unk_id": None, "vocab": []}},
    {"model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"a": 0}}},
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "aaaa"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}],
                        "pair": [], "special_tokens": {}}},
    {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    # Those that would never end.
    {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 22}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 1000}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}] * 22}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "([a-z ]+)+$"}, "behavior": "Isolated", "invert": False}},
    {"post_processor": {"type": "Sequence", "processors": [
        {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
         "pair": [], "special_tokens": {}}] * 30}},
    {"model": {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
    {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["a" * 10**6, -1.0]]}},
)  # fmt: skip


class Published(Area):
    name = "published"

    def prepare(self, folder: Path) -> None:
        self.folders = {"gpt2": _gpt2(), "llama": _llama(), "bert": _bert(), "bert classifier": _bert_classifier()}
        for name in "gpt2", "llama":
            self.folders[f"{name} in parts"] = _in_parts(self.folders[name])

    def case(self, draw: random.Random, folder: Path) -> Case:
        kind = draw.choice(list(self.folders))
        files = self.folders[kind]
        for name, data in files.items():
            (folder / name).write_bytes(data)
        load = _loader(kind, folder)
        names = (str(folder),)
        roll = draw.random()
        one = draw.choice(list(files))
        path = folder / one
        expect = "either"
        if roll < 0.05:
            return Case(kind, load, "accepted", size=size_of(folder))
        if roll < 0.15:
            what = replace_by_no_file(draw, path)
            expect = "either" if one in ("generation_config.json", "tokenizer_config.json") else "refused"
        elif roll < 0.35:
            what, data = damage_bytes(draw, files[one])
            path.write_bytes(data)
            what = f"{one}: {what}"
        elif roll < 0.4:
            one = draw.choice([name for name in files if name.endswith("config.json")])
            config = json.loads(files[one])
            name = draw.choice([*config])
            config[name] = value = draw.choice((10**6, 10**9, 2**31 - 1, 10**18, 1e300, [10**9] * 3))
            (folder / one).write_text(json_text(config))
            what = f"{one}: {name} = {value}"
        elif roll < 0.45 and "tokenizer.json" in files:
            huge = draw.choice((10**6, 10**9, 2**40))
            padding = {"strategy": {"Fixed": huge}, "direction": "Right", "pad_to_multiple_of": huge, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
            path = folder / "tokenizer.json"
            path.write_text(json.dumps(json.loads(files[path.name]) | {"padding": padding}))
            what, expect = f"tokenizer.json with padding to {huge}", "accepted"
        elif roll < 0.5:
            config = json.loads(files["config.json"])
            name = draw.choice(SIZES[kind.split()[0]])
            config[name] = value = draw.choice((*STRANGE, 10**6, 10**7, 10**8, 2**31 - 1, 1, 2, 3, 5, 100))
            (folder / "config.json").write_text(json_text(config))
            what = f"config.json: {name} = {str(value)[:40]!r}"
            default = value is None and name in ("n_inner", "head_dim")
            right = json.loads(files["config.json"]).get(name)
            expect = "accepted" if default or (value == right and type(value) is int) else "refused"
        elif roll < 0.55 and "tokenizer.json" in files:
            part = draw.choice(PARTS)
            path = folder / "tokenizer.json"
            path.write_text(json.dumps(json.loads(files[path.name]) | part))
            what, expect = f"tokenizer.json with {part}", "refused"
        elif roll < 0.75:
            one = draw.choice([name for name in files if name.endswith(".json")])
            what, text = damage_json(draw, json.loads(files[one]))
            (folder / one).write_bytes(text.encode(errors="surrogatepass"))
            what = f"{one}: {what}"
        else:
            one = draw.choice([name for name in files if name.endswith(".safetensors")])
            what, data = _damage_header(draw, files[one])
            (folder / one).write_bytes(data)
            what = f"{one}: {what}"
        return Case(f"{kind}: {what}", load, expect, names, size_of(folder))


def _loader(kind: str, folder: Path) -> Callable[[], Any]:
    if kind == "bert classifier":
        return lambda: _classify(BertClassifier.from_pretrained(folder, dropout=0.0), folder)
    if kind == "bert":
        return lambda: _classify(BertClassifier.from_pretrained(folder, 2), folder)
    return lambda: _write(folder)


def _write(folder: Path) -> np.ndarray:
    model, vocabulary = readers.load_writer(folder, TEXT, 3)
    return model(vocabulary.encode(TEXT)[None, :2])


def _classify(model: BertClassifier, folder: Path) -> np.ndarray:
    vocabulary = Subwords.from_bert(folder)
    return model(vocabulary.encode(TEXT)[None, :3])


def _damage_header(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """A safetensors file with another header: its length, JSON, or where the tensors are."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = draw.choice(("length", "json", "json", "type", "shape", "offsets", "name", "rest"))
    if kind == "length":
        length = draw.choice((0, 1, length - 1, length + 1, length * 2, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1))
        return f"header of {length} bytes", length.to_bytes(8, "little") + data[8:]
    name = draw.choice([name for name in header if name != "__metadata__"])
    tensor = header[name]
    if kind == "json":
        what, text = damage_json(draw, header)
    else:
        if kind == "type":
            tensor["dtype"] = draw.choice(TYPES)
        elif kind == "shape":
            tensor["shape"] = draw.choice(
                (
                    [],
                    [0],
                    [-1],
                    [2**40, 2**40],
                    tensor["shape"][::-1],
                    [*tensor["shape"], 1],
                    [2**32, 0],
                    [2**63],
                    [1.5],
                    3,
                )
            )
        elif kind == "offsets":
            start, end = tensor["data_offsets"]
            pairs = (
                [start, end + 4],
                [start + 4, end],
                [end, start],
                [0, 2**63],
                [-1, 4],
                [start],
                [0, end],
                [start, 2**64],
            )
            tensor["data_offsets"] = draw.choice(pairs)
        elif kind == "name":
            header[draw.choice(("x", "", "a\nb", "é" * 1000, "h.7.ln_1.weight", "transformer." + name))] = header.pop(
                name
            )
        else:
            rest = damage_bytes(draw, rest)[1]
        what, text = f"{kind} of {name}: {header.get(name)}", json.dumps(header)
    header = text.encode(errors="surrogatepass")
    return what, len(header).to_bytes(8, "little") + header + rest


def _tensors(model: Any, stored_as: Callable, prefix: Callable[[str], str]) -> dict[str, np.ndarray]:
    found: dict[str, list] = {}
    for name, parameter in model.named_parameters().items():
        tensor = stored_as(name)
        found.setdefault(prefix(tensor.name) + tensor.name, []).append(
            parameter.data.T if tensor.transposed else parameter.data
        )
    return {name: np.ascontiguousarray(np.concatenate(parts, -1)) for name, parts in found.items()}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _gpt2() -> dict[str, bytes]:
    words = Subwords.byte_bpe(TEXTS, 270)
    described = json.loads(words.tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    model = GPT2(len(words), 8, 2, 2, 6)
    sizes = dict(vocab_size=len(words), n_embd=8, n_head=2, n_layer=2, n_positions=6)
    return {
        "config.json": _json({"model_type": "gpt2", **sizes, "n_inner": None, "layer_norm_epsilon": 1e-5}),
        "model.safetensors": save(_tensors(model, model.tensors().__getitem__, lambda name: "transformer.")),
        "vocab.json": json.dumps(words.tokenizer.get_vocab()).encode(),
        "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *merges]).encode(),
    }


def _llama() -> dict[str, bytes]:
    words = Subwords.byte_bpe(TEXTS, 270)
    model = Llama(len(words) + 2, 8, 4, 2, 6, kv_heads=2, d_ff=10)
    sizes = dict(hidden_size=8, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=10)
    config = {"model_type": "llama", "vocab_size": len(words) + 2, "max_position_embeddings": 100, **sizes}
    rotary = {"rope_type": "linear", "factor": 2.0}
    tensors = _tensors(model, model.tensors().__getitem__, lambda name: "" if name.startswith("lm_head") else "model.")
    return {
        "config.json": _json(config | {"eos_token_id": 0, "rope_theta": 1e4, "rope_scaling": rotary}),
        "generation_config.json": _json({"eos_token_id": [0, 1]}),
        "tokenizer.json": words.tokenizer.to_str().encode(),
        "model.safetensors": save(tensors),
    }


def _bert_config(size: int) -> dict[str, Any]:
    sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=6)
    own = dict(intermediate_size=10, type_vocab_size=2, hidden_dropout_prob=0.1, layer_norm_eps=1e-12)
    return {"model_type": "bert", "vocab_size": size, "hidden_act": "gelu", **sizes, **own}


def _bert() -> dict[str, bytes]:
    words = Subwords.wordpiece(TEXTS, 60)
    model = BertPretraining(len(words), 8, 2, 2, 6, d_ff=10)
    listed = sorted(words.tokenizer.get_vocab().items(), key=lambda item: item[1])
    tensors = _tensors(
        model, lambda name: bert_weights.stored_as(name), lambda name: "" if name.startswith("cls") else "bert."
    )
    return {
        "config.json": _json(_bert_config(len(words)) | {"architectures": ["BertForPreTraining"]}),
        "tokenizer_config.json": _json({"do_lower_case": True}),
        "vocab.txt": "".join(f"{token}\n" for token, _ in listed).encode(),
        "model.safetensors": save(tensors),
    }


def _bert_classifier() -> dict[str, bytes]:
    files = _bert()
    size = json.loads(files["config.json"])["vocab_size"]
    model = BertClassifier(size, 3, 8, 2, 2, 6, d_ff=10)
    tensors = _tensors(
        model,
        lambda name: bert_weights.stored_as(name),
        lambda name: "" if name.startswith("classifier") else "bert.",
    )
    return files | {
        "config.json": _json(_bert_config(size) | {"architectures": ["BertForSequenceClassification"]}),
        "model.safetensors": save(tensors),
    }


def _in_parts(files: dict[str, bytes]) -> dict[str, bytes]:
    """The folder with its weights in two files and an index."""
    from safetensors.numpy import load

    tensors = load(files["model.safetensors"])
    places = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    parts = {
        part: save({name: tensor for name, tensor in tensors.items() if places[name] == part})
        for part in sorted(set(places.values()))
    }
    rest = {name: data for name, data in files.items() if name != "model.safetensors"}
    return rest | parts | {"model.safetensors.index.json": _json({"metadata": {}, "weight_map": places})}

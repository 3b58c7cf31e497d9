"""GGUF files, which llama.cpp and the programs built on it read: made from a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..data.subwords import bytes_of_symbols, bytes_of_words, end_ids
from ..models.pretrained import WEIGHTS, tensors_at
from ..ops import rotary_frequencies
from ..ops.positions import BASE
from ..shell.files import replacing
from ..shell.text import shown

# The architectures of llama.cpp whose computation was compared with that of the models here, by model_type.
ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "gemma3_text": "gemma3",
}
NEIGHBOURS = ("llama", "smollm3")  # architectures whose rotation pairs neighbouring numbers of a head, not its halves
NAMES = {  # of settings in config.json, and of the functions of the writer; the first that is there counts
    "add_context_length": ("max_position_embeddings", "n_positions"),
    "add_embedding_length": ("hidden_size", "n_embd"),
    "add_block_count": ("num_hidden_layers", "n_layer"),
    "add_feed_forward_length": ("intermediate_size", "n_inner"),
    "add_head_count": ("num_attention_heads", "n_head"),
    "add_head_count_kv": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "add_key_length": ("head_dim",),
    "add_value_length": ("head_dim",),
    "add_rope_dimension_count": ("head_dim",),
    "add_rope_freq_base": ("rope_theta",),
    "add_layer_norm_rms_eps": ("rms_norm_eps",),
    "add_layer_norm_eps": ("layer_norm_epsilon",),
    "add_vocab_size": ("vocab_size",),
}
WORDS = (  # how the tokenizers of Llama 3 and Qwen2 split a text; they differ in how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NO_MERGE = "▁ ▁"  # llama.cpp wants a merge; this one joins symbols that no text has


class NotInGGUF(ValueError):
    """A model computes something that llama.cpp does not, or its vocabulary is of another kind."""


def library() -> Any:
    """The package gguf; raises ImportError, which says what to install."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need the library gguf: pip install 'scratchformer[export]'") from error
    return gguf


def write_gguf(folder: Path, out: Path) -> None:
    """Write the model and the vocabulary of a folder, as `write_folder` makes it, to the new file `out`, in float32.

    Raises NotInGGUF if llama.cpp does not compute this model. If all blocks have a window, the context becomes no
    longer than the window, because llama.cpp would ignore it. A Gemma 3 keeps its windows.
    """
    gguf, config = library(), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = expect_computed(config)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.get("num_hidden_layers") or config["n_layer"])
    _, tensors = tensors_at(folder / WEIGHTS)
    with replacing(out) as unfinished:
        writer = gguf.GGUFWriter(unfinished, name)
        for function, settings in NAMES.items():
            value = next((config[each] for each in settings if config.get(each) is not None), None)
            if function == "add_context_length" and windowed(config) and name != "gemma3":
                value = min(value, config["sliding_window"])
            if value is not None:
                getattr(writer, function)(value)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        add_scaling(gguf, writer, config if name != "gemma3" else with_windows(writer, config))
        add_vocabulary(gguf, writer, folder, config)
        for each, tensor in tensors.items():
            data = tensor.read().astype(np.float32, copy=False)
            if name == "gpt2" and ".c_" in each:
                data = data.T
            if name in NEIGHBOURS and (".q_proj." in each or ".k_proj." in each):
                data = neighbours(data, config["head_dim"])
            if name == "gemma3" and each.endswith("norm.weight"):
                data = data + 1
            place = names.get_name(each, (".weight", ".bias"))
            if place is None:
                raise NotInGGUF(f"llama.cpp has no tensor for {each} in a model of the kind {name}")
            writer.add_tensor(place, np.ascontiguousarray(data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def expect_computed(config: Mapping[str, Any]) -> str:
    """The architecture in llama.cpp of a model with this config.json. Raises NotInGGUF if there is none."""
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise NotInGGUF(f"model_type: expected one of {', '.join(ARCHITECTURES)} for a GGUF file, got {shown(kind)}")
    if kind == "gpt2" and config["activation_function"] == "gelu":
        raise NotInGGUF("activation: expected gelu_tanh, since llama.cpp has only gelu_tanh in a GPT-2, got gelu")
    rotated = config.get("no_rope_layers", [])
    if rotated != [int((i + 1) % 4 > 0) for i in range(len(rotated))]:
        raise NotInGGUF(f"no_rope_layers: expected 0 in every fourth layer alone, got {shown(rotated)}")
    if kind != "gemma3_text" and len({*config.get("layer_types", ["full_attention"])}) > 1:
        raise NotInGGUF("window: expected one for all layers, since llama.cpp has none in some of the layers")
    return ARCHITECTURES[kind]


def windowed(config: Mapping[str, Any]) -> bool:
    """Whether positions see only those in a window."""
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", True)


def neighbours(data: np.ndarray, width: int) -> np.ndarray:
    """The rows of a projection, or its bias, in the order in which llama.cpp rotates them: the two of a pair, d and
    d + D/2 of a head, are neighbours.
    """
    return data.reshape(-1, 2, width // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def with_windows(writer: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Write the windows of a Gemma 3; returns its settings with the angles of the layers that see all positions.

    Raises NotInGGUF unless every sixth layer does, and the angles of the others are those that llama.cpp has.
    """
    types, rope = config["layer_types"], config["rope_parameters"]
    near, far = ({"rope_type": "default"} | rope.get(f"{each}_attention", {}) for each in ("sliding", "full"))
    if types != ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(len(types))]:
        raise NotInGGUF(f"layer_types: expected a window in all but every sixth layer, got {shown(types)}")
    if near["rope_type"] != "default" or near["rope_theta"] != BASE:
        raise NotInGGUF(f"base: expected {BASE} without scaling in layers with a window, got {shown(near)}")
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(far.get("rope_theta", BASE))
    return {**config, "rope_scaling": None if far["rope_type"] == "default" else far}


def add_scaling(gguf: Any, writer: Any, config: Mapping[str, Any]) -> None:
    """Write how the rotary angles are scaled."""
    scaling = config.get("rope_scaling")
    if not scaling:
        return
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif scaling["rope_type"] == "llama3" and ARCHITECTURES[config["model_type"]] == "llama":
        plain, scaled = (rotary_frequencies(config["head_dim"], config["rope_theta"], s) for s in (None, scaling))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    else:
        raise NotInGGUF(f"scaling: expected linear, or llama3 in a Llama, for a GGUF file, got {shown(scaling)}")


def add_vocabulary(gguf: Any, writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the vocabulary in the tokenizer.json of a folder. Raises NotInGGUF if llama.cpp would split a text in
    another way.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotInGGUF("the folder has no tokenizer.json, from which the vocabulary of a GGUF file is made")
    settings = json.loads(path.read_text(encoding="utf-8"))
    model, added = settings["model"], {each["content"]: each for each in settings.get("added_tokens", [])}
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]  # the vocabulary may have fewer, or more
    numbers = {**model["vocab"], **{name: each["id"] for name, each in added.items()}}
    ids = {name: i for name, i in numbers.items() if i < len(tokens)}
    types, scores = [gguf.TokenType.UNUSED] * len(tokens), [-1000.0] * len(tokens)
    sentencepiece = model.get("byte_fallback", False)  # the kind of vocabulary that Llama 2 has
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    for name, i in ids.items():
        tokens[i], types[i] = name, gguf.TokenType.NORMAL
        if name == model.get("unk_token") and sentencepiece:
            types[i] = gguf.TokenType.UNKNOWN
        elif name in added:
            types[i] = gguf.TokenType.CONTROL
            if not added[name]["special"]:
                types[i] = gguf.TokenType.USER_DEFINED  # llama.cpp writes it as it is called
                piece = (bytes_of_words if sentencepiece else bytes_of_symbols)(name, added=True)
                tokens[i] = piece.decode("utf-8", "replace")
        elif sentencepiece and name.startswith("<0x") and len(name) == 6:
            types[i] = gguf.TokenType.BYTE
    if sentencepiece:  # pieces are joined in the order of their scores, as the merges are in theirs
        for rank, merge in reversed([*enumerate(merges)]):
            if (i := ids.get(merge.replace(" ", ""))) is not None:
                scores[i] = -float(rank)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        begins = json.dumps([settings.get("normalizer"), settings.get("pre_tokenizer")])
        writer.add_add_space_prefix('"Prepend"' in begins or '"first"' in begins or '"always"' in begins)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splitting(settings.get("pre_tokenizer"), model))
        writer.add_token_merges(merges or [NO_MERGE])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, n_vocab=len(tokens))
    begin, end = put_around(settings)
    special.add_special_token = {"bos": begin in ids, "eos": end in ids}
    special.special_token_ids |= {kind: ids[name] for kind, name in (("bos", begin), ("eos", end)) if name in ids}
    first = special.special_token_ids.get("eos")
    ends = sorted(end_ids(folder, len(tokens)), key=lambda i: i != first)
    special.special_token_ids |= dict(zip(("eos", "eot", "eom"), ends, strict=False))  # GGUF has names for three
    special.add_to_gguf(writer, quiet=True)


def put_around(settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The first and the last token that a tokenizer.json puts around a text, if it does."""
    processor = settings.get("post_processor") or {}
    for part in processor.get("processors", [processor]):
        if "single" in part:
            names = [piece.get("SpecialToken", {}).get("id") for piece in part["single"]]
            return names[0], names[-1]
        if "cls" in part:
            return part["cls"][0], part["sep"][0]
    return None, None


def splitting(pre_tokenizer: Any, model: Mapping[str, Any]) -> str:
    """The name in llama.cpp of how a byte-level vocabulary splits a text before it merges bytes."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    patterns = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and (parts[0].get("use_regex", True) or not model["merges"]):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        return "smollm"
    if patterns == [WORDS % "{1,3}"]:
        return "llama-bpe" if model.get("ignore_merges") else "dbrx"
    if patterns == [WORDS % ""]:
        return "qwen2"
    raise NotInGGUF(f"tokenizer.json: pre_tokenizer: unknown to this export: {shown(pre_tokenizer)}")

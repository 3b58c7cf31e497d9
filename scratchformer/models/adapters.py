"""Adapters of PEFT: low-rank changes of published weights (LoRA), which others have trained."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..backend import array_module
from ..checks import expect_instance
from ..shell.reading import read_json
from ..shell.text import printable, shown
from .pretrained import Folder, PretrainedError, tensors_at
from .published import PublishedDecoder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = r"base_model\.model\.(transformer\.|model\.|gpt_neox\.)?"  # of all names in a file
# What settings may be; of all that are neither here nor in UNREAD, one of NOTHING. The first is the one to expect.
COMPUTED: Mapping[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (False, True, None),
    # The adapter is for the weights as published; "pissa", "olora", "corda", "lora_ga" and "loftq" change them first.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
}
NOTHING: tuple = (None, False, [], {})
# Which layers are adapted is seen from the tensors; the others are for training, or only say where an adapter is from.
UNREAD = frozenset(
    "r lora_alpha target_modules exclude_modules layers_to_transform layers_pattern fan_in_fan_out lora_dropout "
    "eva_config corda_config lora_ga_config loftq_config qalora_group_size megatron_core runtime_config "
    "ensure_weight_tying task_type inference_mode base_model_name_or_path revision auto_mapping peft_version".split()
)


def load_adapter(model: PublishedDecoder, folder: Folder) -> None:
    """Add the changes of a PEFT adapter to the weights of `model`, which it was trained for: w + s (b a), transposed,
    where a and b are two narrow matrices for each adapted layer and s is lora_alpha/r (with use_rslora, lora_alpha/√r).

    folder: with adapter_config.json and adapter_model.safetensors. The model is changed only if all of it fits. Raises
    PretrainedError, naming the file and the setting or the tensor, if the adapter is of another kind or for another
    model, TypeError unless the model is of a published kind.

    Source: Hu et al., "LoRA: low-rank adaptation of large language models", 2022, equation 3; see `nn.LoRA`.
    """
    expect_instance("model", model, PublishedDecoder)
    rank, scale = _rank_and_scale(Path(folder) / CONFIG)
    params, changes = model.named_parameters(), {}
    path, tensors = tensors_at(Path(folder) / WEIGHTS)
    narrow = {re.sub(f"^{PREFIX}", "", name): tensor for name, tensor in tensors.items()}
    used = set()
    for name, source in model.tensors().items():
        pair = [source.name.removesuffix("weight") + f"lora_{side}.weight" for side in "AB"]
        if not (source.name.endswith(".weight") and set(pair) & narrow.keys()):
            continue
        if missing := [each for each in pair if each not in narrow]:
            raise PretrainedError(f"{path}: missing: {missing[0]}")
        if unreadable := narrow[pair[0]].unreadable(pair[0]) or narrow[pair[1]].unreadable(pair[1]):
            raise PretrainedError(f"{path}: {unreadable}")
        a, b = (narrow[each].read().astype(np.float32) for each in pair)
        fits, expected = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] == rank, params[name].data.shape
        changes[name] = scale * (b @ a).T[:, source.columns] if fits else np.empty(0)
        if changes[name].shape != expected or not np.isfinite(changes[name]).all():
            raise PretrainedError(
                f"{path}: {pair[0]} and {pair[1]}: expected a finite change of shape {expected[::-1]} and rank {rank}, "
                f"got the shapes {a.shape} and {b.shape}"
            )
        used |= set(pair)
    if unknown := sorted(narrow.keys() - used):
        raise PretrainedError(f"{path}: for another model: it has no layer for {printable(unknown[0])}")
    for name, change in changes.items():
        data = params[name].data
        data += array_module(data).asarray(change, data.dtype)


def _rank_and_scale(path: Path) -> tuple[int, float]:
    """The rank of the changes and their factor, from the settings at `path`; raises PretrainedError if they ask for
    anything else.
    """
    config: dict[str, Any] = read_json(path, PretrainedError)
    for name, value in config.items():
        values = COMPUTED.get(name, NOTHING)
        if name not in UNREAD and value not in values:
            raise PretrainedError(f"{path}: {name}: expected {shown(values[0])}, got {shown(value)}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise PretrainedError(f"{path}: r and lora_alpha: expected numbers, got {shown(rank)} and {shown(alpha)}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

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
from .pretrained import Folder, PretrainedError, opened
from .published import PublishedDecoder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = r"base_model\.model\.(transformer\.|model\.|gpt_neox\.)?"  # of all names in a file
# The settings that change what is computed, and what they must be; the first is the default.
COMPUTED: Mapping[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "megatron_config": (None,),
}


def load_adapter(model: PublishedDecoder, folder: Folder) -> None:
    """Add the changes of a PEFT adapter to the weights of `model`, which it was trained for: w + s (b a), transposed,
    where a and b are two narrow matrices for each adapted layer and s is lora_alpha/r (with use_rslora, lora_alpha/√r).

    folder: with adapter_config.json and adapter_model.safetensors. The model is changed only if all of it fits. Raises
    PretrainedError, naming the file and the setting or the tensor, if the adapter is of another kind or for another
    model, TypeError unless the model is of a published kind.

    Source: Hu et al., "LoRA: low-rank adaptation of large language models", 2022, equation 3; see `nn.LoRA`.
    """
    expect_instance("model", model, PublishedDecoder)
    scale = _scale(Path(folder) / CONFIG)
    params, changes = model.named_parameters(), {}
    with opened(Path(folder) / WEIGHTS) as (path, tensors):
        narrow = {re.sub(f"^{PREFIX}", "", name): tensor for name, tensor in tensors.items()}
        used = set()
        for name, source in model.tensors().items():
            pair = [source.name.removesuffix("weight") + f"lora_{side}.weight" for side in "AB"]
            if not (source.name.endswith(".weight") and set(pair) & narrow.keys()):
                continue
            if missing := [each for each in pair if each not in narrow]:
                raise PretrainedError(f"{path}: missing: {missing[0]}")
            a, b = (narrow[each].read().astype(np.float32) for each in pair)
            change, expected = scale * (b @ a).T[:, source.columns] if a.shape[:1] == b.shape[1:] else a, params[name]
            if change.shape != expected.data.shape or not np.isfinite(change).all():
                raise PretrainedError(
                    f"{path}: {pair[0]} and {pair[1]}: expected a finite change of shape {expected.data.shape[::-1]}, "
                    f"got the shapes {a.shape} and {b.shape}"
                )
            changes[name] = change
            used |= set(pair)
        if unknown := sorted(narrow.keys() - used):
            raise PretrainedError(f"{path}: for another model: it has no layer for {printable(unknown[0])}")
    for name, change in changes.items():
        data = params[name].data
        data += array_module(data).asarray(change, data.dtype)


def _scale(path: Path) -> float:
    """The factor of the changes, from the settings at `path`; raises PretrainedError if they ask for anything else."""
    config: dict[str, Any] = read_json(path, PretrainedError)
    for name, values in COMPUTED.items():
        if (value := config.get(name, values[0])) not in values:
            raise PretrainedError(f"{path}: {name}: expected {shown(values[0])}, got {shown(value)}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise PretrainedError(f"{path}: r and lora_alpha: expected numbers, got {shown(rank)} and {shown(alpha)}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

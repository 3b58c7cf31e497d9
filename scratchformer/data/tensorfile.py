"""Writing safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

CODES = {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)}
CODES |= {"float16": "F16", "float32": "F32", "float64": "F64", "bool": "BOOL"}


def save_file(tensors: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str]) -> None:
    """Write C-contiguous arrays and texts in the safetensors format.

    The function of this name in the safetensors library first writes to a file of its own beside `path`, named at
    random. A killed process would leave that behind, as large as the snapshot, and nobody would ever remove it.

    Raises SafetensorError if the format has no such dtype. Source of the format: github.com/huggingface/safetensors.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that every tensor is aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        array = tensors[name]
        if array.dtype.name not in CODES:
            raise SafetensorError(f"{name}: expected one of {', '.join(CODES)}, got {array.dtype}")
        start, end = end, end + array.nbytes
        header[name] = {"dtype": CODES[array.dtype.name], "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            array = tensors[name]
            file.write(array.reshape(-1).astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8))

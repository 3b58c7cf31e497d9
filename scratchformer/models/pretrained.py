"""Published weights: loading a Hugging Face folder into one of our models.

Such a folder has `config.json`, with the sizes, and `model.safetensors`, with the tensors under the names of the
library that wrote them. The tensors may also be in several files, which `model.safetensors.index.json` lists. A model
that can be loaded says for each of its parameters which tensor it comes from (`TensorSource`); here tensors are read,
checked by name and shape, and copied. A model is made only after its sizes were compared with the tensors
(`expect_sizes`). Nothing in the folder is executed: weights in a pickle (`.bin`) are refused.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from ..backend import CPU, array_module
from ..nn import Layer, Param
from ..ops.rounding import bfloat16
from ..shell.progress import counted
from ..shell.reading import (
    BEGINNING,
    MAX_HEADER,
    MAX_VOCABULARY,
    decoded,
    expect_itself,
    open_file,
    parsed,
    read_json,
    what_else,
)
from ..shell.text import printable, shown

WEIGHTS = "model.safetensors"
INDEX = WEIGHTS + ".index.json"  # of weights in several files
# The names in a file of a layer's own parameters.
LEAVES = {"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "table": "weight"}
FLOATING = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # types of tensors that are read, and NumPy's
MAX_WHOLE = 2**31 - 1  # the largest size


Folder = os.PathLike[str] | str


class PretrainedError(ValueError):
    """A folder of published weights is missing, damaged, or for another model."""


class TensorSource(NamedTuple):
    """Where one of our parameters comes from."""

    name: str  # of the tensor in the file
    transposed: bool = False
    columns: slice | list[int] = slice(None)  # of the last axis (transposed), if the tensor holds several parameters
    plus: float = 0.0  # added to the tensor


def read_config(
    folder: Folder,
    model_type: str | tuple[str, ...],
    names: Collection[str] = (),
    computed: Mapping[str, tuple] = {},
    fractions: Collection[str] = (),
    optional: Collection[str] = (),
    architectures: Collection[str] | None = None,
) -> dict[str, Any]:
    """The contents of config.json in the Hugging Face folder of a model of type `model_type` ("gpt2", "bert"), or of
    one of several types.

    names: settings that must be present. They must be whole numbers >= 1, except `fractions`, which are numbers >= 0
    and are checked if present. optional: settings that may be missing or null, and are otherwise checked in the same
    way. computed: for some settings, the values that this implementation supports; the first is the default if the
    setting is missing. architectures: the classes of transformers that the folder may name, if it names any; all by
    default. Raises PretrainedError if the file is missing, damaged, for another model, or has a value that is not
    supported.
    """
    path = Path(folder) / "config.json"
    if other := instead_of_folder(folder):
        raise PretrainedError(other)
    config = read_json(path, PretrainedError)
    types = (model_type,) if isinstance(model_type, str) else model_type
    if config.get("model_type") not in types:
        expected = " or ".join(map(repr, types))
        raise PretrainedError(f"{path}: expected model_type {expected}, got {shown(config.get('model_type'))}")
    kinds = config.get("architectures") or []
    if architectures is not None and not (isinstance(kinds, list) and all(kind in architectures for kind in kinds)):
        raise PretrainedError(f"{path}: architectures: expected one of {', '.join(architectures)}, got {shown(kinds)}")
    if missing := [name for name in names if name not in config]:
        raise PretrainedError(f"{path}: {', '.join(missing)} missing")
    for name in dict.fromkeys([*names, *fractions, *optional]):
        if name not in config or (name in optional and config[name] is None):
            continue
        value, whole = config[name], name not in fractions
        if not (type(value) is int and value >= 1 if whole else type(value) in (int, float) and 0 <= value < math.inf):
            expected = "a whole number >= 1" if whole else "a number >= 0"
            raise PretrainedError(f"{path}: {name}: expected {expected}, got {shown(value)}")
        if value > MAX_WHOLE:
            raise PretrainedError(f"{path}: {name}: expected at most {MAX_WHOLE:,}, got {shown(value)}")
    for name, values in computed.items():
        chosen = config.get(name, values[0])
        if not any(chosen == value and isinstance(chosen, bool) == isinstance(value, bool) for value in values):
            raise PretrainedError(f"{path}: {name}: expected {' or '.join(map(repr, values))}, got {shown(chosen)}")
    return config


def instead_of_folder(path: Folder) -> str | None:
    """What to say of something that is often given in place of a folder with published weights; None for all else."""
    path = Path(path)
    wanted = "expected a Hugging Face folder, with config.json and model.safetensors"
    if path.is_file():
        with open_file(path, PretrainedError, math.inf) as (file, _):
            kind = what_else(file.peek()[:BEGINNING])
        return f"{path}: {wanted}, got {kind}" if kind == "a GGUF file" else None
    if not os.path.lexists(path):
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
        load = f"; if it is a model on the hub, download it first: hf download {path} --local-dir FOLDER"
        return f"{path}: no such folder{load if hub else ''}"
    if (path / "config.json").exists() or not path.is_dir():
        return None
    names = sorted(each.name for each in path.iterdir())
    if "adapter_config.json" in names:
        return f"{path}: {wanted}, got a PEFT adapter: load its model, then models.load_adapter"
    if "params.json" in names:
        return f"{path}: {wanted}, got Meta's own format, which transformers can convert"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{path}: {wanted}, got a GGUF file, {printable(gguf[0])}"
    return None


def expect_sizes(
    folder: Folder,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    blocks: str = "",
    block_shapes: Mapping[str, tuple[int, ...]] = {},
    depth: int = 0,
    tied: Mapping[str, str] = {},
) -> None:
    """Raise PretrainedError unless the tensors of `folder` have the sizes that its config.json gives.

    A model is made only after this check, since one of wrong sizes could fill the memory. shapes: the expected shapes
    of some tensors, which together have all sizes of the model, by name without `prefix`. block_shapes: the same for
    each of the `depth` blocks, whose names begin with `blocks`, a dot and the block's number. tied: see `load_weights`.
    """
    path, tensors = tensors_at(Path(folder) / WEIGHTS)
    stored = {name: tensor.shape for name, tensor in _named(tensors, prefix, tied).items()}
    numbers = {match[1] for name in stored if (match := re.match(rf"{re.escape(blocks)}\.(\d+)\.", name))}
    expected = dict(shapes)
    for i in range(min(depth, len(numbers) + 1)):  # so many show whether a block is missing
        expected |= {f"{blocks}.{i}.{name}": shape for name, shape in block_shapes.items()}
    _refuse(path, [_mismatch(name, shape, stored.get(name)) for name, shape in expected.items()])


@contextmanager
def making(folder: Folder) -> Iterator[None]:
    """Turn errors in creating a model from the sizes in `folder` into a PretrainedError that names the file."""
    try:
        yield
    except PretrainedError:
        raise
    except (TypeError, ValueError, MemoryError) as error:
        raise PretrainedError(f"{Path(folder) / 'config.json'}: cannot create this model: {error}") from error


def load_weights(
    model: Layer,
    folder: Folder,
    tensors: Mapping[str, TensorSource],
    ignored: str = r"(?!)",
    prefix: str = "",
    tied: Mapping[str, str] = {},
    dtype: Any = None,
) -> None:
    """Copy the tensors of `folder` into the parameters of `model`.

    tensors: where each parameter comes from, by the parameter's name. ignored: a regular expression for the names of
    tensors that the model does not need. prefix: of names in the file, removed where present ("transformer."). tied:
    names of tensors that may be present as copies of others, each with the name of the other, or instead of them.
    Raises PretrainedError, naming the file and the tensors, if one is missing, unknown, of the wrong shape, of an
    unsupported type or not finite. Names and shapes are checked before anything is copied. Tensors are cast to the
    model's dtype, or to `dtype`, of which each parameter then becomes.
    """
    params = model.named_parameters()
    path, available = tensors_at(Path(folder) / WEIGHTS)
    stored = _named(available, prefix, tied)
    known = {t.name for t in tensors.values()}
    problems: list[str | None] = [f"missing: {name}" for name in known - stored.keys()]
    unused = [name for name in stored if name not in known]
    copies = [name for name in unused if tied.get(name) in stored]
    problems += [f"unknown: {n}" for n in unused if n not in copies and not re.fullmatch(ignored, n)]
    problems += [stored[name].unreadable(name) for name in {*copies, *(known & stored.keys())}]
    problems += [
        _mismatch(t.name, stored_shape(params, name, tensors), stored[t.name].shape)
        for name, t in tensors.items()
        if t.name in stored
    ]
    _refuse(path, problems)
    for name in copies:
        if not np.array_equal(stored[name].read(), stored[tied[name]].read()):
            raise PretrainedError(f"{path}: {name}: expected a copy of {tied[name]}, since the two are tied")
    for name, tensor in counted(tensors.items(), "loading", "tensors"):
        if dtype is not None:
            params[name].bind(array_module(params[name].data).empty(params[name].data.shape, dtype), None, None)
        source, data = stored[tensor.name].read(), params[name].data
        with np.errstate(over="ignore"):  # float64 to float32
            data[...] = (source.T if tensor.transposed else source)[..., tensor.columns]
            data += tensor.plus
        if not bool(array_module(data).isfinite(data).all()):
            raise PretrainedError(f"{path}: {tensor.name}: expected finite numbers that fit in {data.dtype}")


def _named(tensors: Mapping[str, Stored], prefix: str, tied: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors of a folder by their names without `prefix`; a tied one stands for the other if that is missing."""
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    for copy, original in tied.items():
        if copy in named and original not in named:
            named[original] = named.pop(copy)
    return named


def stored_name(name: str, layers: Mapping[str, str], blocks: str, leaves: Mapping[str, str] = LEAVES) -> str:
    """The name in a file of our parameter called `name`.

    layers: the path in the file for each of our layers; those within a block, without the block. blocks: the path of
    the list of blocks in the file. leaves: the names of the parameters themselves.
    """
    path, _, leaf = name.removeprefix("body.").rpartition(".")
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", path)
    path = f"{blocks}.{block[1]}.{layers[block[2]]}" if block else layers[path]
    return f"{path}.{leaves[leaf]}"


def tensor_sources(
    model: Layer, layers: Mapping[str, str], blocks: str, transposed: Callable[[str], bool]
) -> dict[str, TensorSource]:
    """Where each parameter of `model` is in a file. Those that share a tensor are side by side in it, in their order.

    layers, blocks: see `stored_name`. transposed: whether the file has the matrix of a parameter as (out, in).
    """
    params = model.named_parameters()
    names = {name: stored_name(name, layers, blocks) for name in params}
    holds, ends, sources = Counter(names.values()), Counter[str](), {}
    for name, tensor in names.items():
        start, ends[tensor] = ends[tensor], ends[tensor] + params[name].data.shape[-1]
        columns = slice(start, ends[tensor]) if holds[tensor] > 1 else slice(None)
        sources[name] = TensorSource(tensor, transposed(name), columns)
    return sources


def tensor_names(folder: Folder, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in `folder`, by its name without `prefix`. Raises PretrainedError."""
    _, tensors = tensors_at(Path(folder) / WEIGHTS)
    return {name.removeprefix(prefix): tensor.shape for name, tensor in tensors.items()}


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    kind: str  # "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int  # where its data begins in the file, in bytes

    def unreadable(self, name: str) -> str | None:
        """What to say of the tensor, called `name`, if its type is none that is read."""
        known = self.kind in FLOATING
        return None if known else f"{name}: expected one of the types {', '.join(FLOATING)}, got {self.kind}"

    def read(self) -> np.ndarray:
        """The tensor; BF16 as bfloat16, or without the package that defines it for NumPy as float32, of which its bits
        are the upper half.

        (A file that is mapped into memory, as the library does it, stays there whole, beside the weights.)
        """
        dtype = np.dtype(FLOATING[self.kind])
        with open_file(self.path, PretrainedError, math.inf) as (file, _):
            file.seek(self.start)
            numbers = np.frombuffer(file.read(dtype.itemsize * math.prod(self.shape)), dtype)
        if self.kind == "BF16":
            try:
                numbers = numbers.view(bfloat16(CPU))
            except ImportError:
                numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.reshape(self.shape)


def tensors_at(path: Path) -> tuple[Path, dict[str, Stored]]:
    """The file of tensors at `path`, or the index beside it, and the tensors by name."""
    index = None if path.exists() else _index(path.parent)
    if index is None and not path.exists():
        raise PretrainedError(f"{path}: no such file{_what_else(path.parent)}")
    parts = [path] if index is None else [path.with_name(name) for name in sorted(set(index.values()))]
    tensors: dict[str, Stored] = {}
    for part in parts:
        header, start = _header(part)
        try:
            with safe_open(part, framework="numpy") as file:  # which checks the header
                names = file.keys()
        except (SafetensorError, OSError) as error:
            raise PretrainedError(f"{part} is damaged: {printable(str(error))}") from error
        for name in names:
            entry = header[name]
            tensors[name] = Stored(part, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
    return path if index is None else path.with_name(INDEX), tensors


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, which says where each tensor is, and where the data begins.

    The file begins with the length of the header (8 bytes); the header is JSON. It is read here, before the library
    reads it, so that errors have messages in plain words.
    """
    with open_file(path, PretrainedError, math.inf) as (file, size):
        expect_itself(start := file.peek(), path, PretrainedError)
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER):
            kind = f" ({kind})" if start and (kind := what_else(start)) else ""
            raise PretrainedError(f"{path} is damaged: a header of {length:,} bytes, in a file of {size:,}{kind}")
        return parsed(decoded(file.read(length), path, PretrainedError), path, PretrainedError), 8 + length


def _index(folder: Folder) -> dict[str, str] | None:
    """The file of each tensor in `folder`, by the tensor's name; None if there is no index. Raises PretrainedError."""
    path = Path(folder) / INDEX
    if not os.path.lexists(path):
        return None
    index = read_json(path, PretrainedError, MAX_VOCABULARY).get("weight_map")
    if not isinstance(index, dict):
        raise PretrainedError(f"{path} is damaged: weight_map: expected the file of each tensor, got {shown(index)}")
    for name, file in index.items():
        if not (isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file):
            raise PretrainedError(
                f"{path}: {printable(name)}: expected a file NAME.safetensors in the folder, got {shown(file)}"
            )
    return index


def _what_else(folder: Folder) -> str:
    """The end of the message about a folder without readable weights."""
    if pickles := sorted(path.name for path in Path(folder).glob("*.bin")):
        return (
            f"; {printable(pickles[0])} is a pickle, and loading one can run any code: if you trust it, convert it "
            "with transformers' NAME.from_pretrained(folder).save_pretrained(folder, safe_serialization=True), where "
            "NAME is the class that config.json has under architectures"
        )
    return f"; expected a folder with config.json and {WEIGHTS}"


def stored_shape(params: Mapping[str, Param], name: str, tensors: Mapping[str, TensorSource]) -> tuple[int, ...]:
    """The shape of the stored tensor that the parameter `name` comes from."""
    tensor, shape = tensors[name], params[name].data.shape
    if tensor.columns != slice(None):  # the parameters in one tensor use all its columns
        shape = (*shape[:-1], sum(params[n].data.shape[-1] for n, t in tensors.items() if t.name == tensor.name))
    return shape[::-1] if tensor.transposed else shape


def _mismatch(name: str, expected: tuple[int, ...], shape: tuple[int, ...] | None) -> str | None:
    """What is wrong with a tensor; `shape` is None if it is missing. Returns None if nothing is."""
    if shape is None:
        return f"missing: {name}"
    return None if shape == expected else f"{name}: expected {expected}, got {shape}"


def _refuse(path: Path, problems: Iterable[str | None]) -> None:
    """Raise PretrainedError if there is a problem; a problem that is None does not count."""
    if messages := sorted(printable(problem) for problem in problems if problem):
        more = f" and {len(messages) - 8} more" if len(messages) > 8 else ""
        raise PretrainedError(f"{path}: weights of another model: {'; '.join(messages[:8])}{more}")

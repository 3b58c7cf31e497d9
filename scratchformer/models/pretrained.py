"""Published weights: reading a Hugging Face folder into a model of ours.

Such a folder has `config.json`, the sizes, and `model.safetensors`, the tensors under the names of the library that
wrote them. A model that can be loaded says for each of its own parameters which tensor it comes from (`Tensor`); here
they are read, checked by name and shape, and copied. Nothing in the folder is executed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from ..nn import Layer, Param

WEIGHTS = "model.safetensors"
FLOATING = ("F64", "F32", "F16")  # types of tensors that NumPy has


class PretrainedError(ValueError):
    """A folder of published weights that is missing, damaged, or of another model."""


class Tensor(NamedTuple):
    """Where a parameter of ours comes from."""

    name: str  # of the tensor in the file
    transposed: bool = False
    columns: slice = slice(None)  # of the tensor's last axis, where several parameters stand side by side in it


def read_config(
    folder: Path | str,
    model_type: str,
    names: Collection[str] = (),
    computed: Mapping[str, tuple] = {},
    fractions: Collection[str] = (),
    optional: Collection[str] = (),
) -> dict[str, Any]:
    """config.json of a Hugging Face folder, of a model of `model_type` ("gpt2", "bert").

    names: of the settings that must be in it, whole numbers but for the `fractions`. computed: for settings, the values
    with which the computation is the one here; the first of them is meant where the setting is not there. optional: of
    settings that may be missing or null, and are whole numbers otherwise. Raises PretrainedError if the file is missing
    or damaged, of another model, or of one that computes something else.
    """
    path = Path(folder) / "config.json"
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise PretrainedError(f"{path}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise PretrainedError(f"{path} is damaged: {error}") from error
    if config.get("model_type") != model_type:
        raise PretrainedError(f"{path}: expected model_type {model_type!r}, got {config.get('model_type')!r}")
    if missing := [name for name in names if name not in config]:
        raise PretrainedError(f"{path}: {', '.join(missing)} missing")
    given = [name for name in dict.fromkeys([*names, *fractions]) if name in config]
    for name in (*given, *(name for name in optional if config.get(name) is not None)):
        value, whole = config[name], name not in fractions
        if not (type(value) is int and value >= 1 if whole else type(value) in (int, float) and 0 <= value < math.inf):
            expected = "a whole number >= 1" if whole else "a number >= 0"
            raise PretrainedError(f"{path}: {name}: expected {expected}, got {value!r}")
    for name, values in computed.items():
        if (found := config.get(name, values[0])) not in values:
            raise PretrainedError(f"{path}: {name}: expected {values[0]!r}, got {found!r}")
    return config


@contextmanager
def making(folder: Path | str) -> Iterator[None]:
    """Turns the errors of making a model from the sizes in `folder` into a PretrainedError that names the file."""
    try:
        yield
    except PretrainedError:
        raise
    except (TypeError, ValueError, MemoryError) as error:
        raise PretrainedError(f"{Path(folder) / 'config.json'}: no such model can be made: {error}") from error


def load_weights(
    model: Layer,
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    ignored: str = r"(?!)",
    prefix: str = "",
    tied: Mapping[str, str] = {},
) -> None:
    """Copy the tensors of `folder` into the parameters of `model`.

    tensors: for the name of every parameter, where it comes from. ignored: a regular expression for the names of
    tensors that the model has no use for. prefix: of the names in the file, taken off where it is ("transformer.").
    tied: names of tensors that may be there as copies of others.
    Raises PretrainedError, naming the file and the tensors, if one is missing, unknown, of another shape, or of a type
    that NumPy does not have. Names and shapes are checked before anything is copied.
    """
    params = model.named_parameters()
    with _opened(folder) as (path, file):
        stored = {name.removeprefix(prefix): name for name in file.keys()}
        known = {t.name for t in tensors.values()}
        problems = [f"missing: {name}" for name in known - stored.keys()]
        unused = [name for name in stored if name not in known]
        copies = [name for name in unused if tied.get(name) in stored]
        problems += [f"unknown: {n}" for n in unused if n not in copies and not re.fullmatch(ignored, n)]
        problems += [f"twice: {n}" for n in stored if prefix and {n, prefix + n} <= set(file.keys())]
        for name in known & stored.keys():
            if (kind := file.get_slice(stored[name]).get_dtype()) not in FLOATING:
                problems.append(f"{name}: expected one of the types {', '.join(FLOATING)}, got {kind}")
        shapes = {name: tuple(file.get_slice(stored[name]).get_shape()) for name in known & stored.keys()}
        problems += filter(
            None, (_mismatch(params, n, tensors, shapes) for n, t in tensors.items() if t.name in shapes)
        )
        if problems:
            shown = "; ".join(sorted(problems)[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise PretrainedError(f"{path}: weights of another model: {shown}")
        for name in copies:
            if not np.array_equal(*(file.get_tensor(stored[n]) for n in (name, tied[name]))):
                raise PretrainedError(f"{path}: {name}: expected a copy of {tied[name]}, to which it is tied here")
        for name, tensor in tensors.items():
            source = file.get_tensor(stored[tensor.name])[..., tensor.columns]
            params[name].data[...] = source.T if tensor.transposed else source


def tensor_names(folder: Path | str, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of `folder` by its name, without `prefix` where it is. Raises PretrainedError."""
    with _opened(folder) as (_, file):
        return {name.removeprefix(prefix): tuple(file.get_slice(name).get_shape()) for name in file.keys()}


@contextmanager
def _opened(folder: Path | str) -> Iterator[tuple[Path, Any]]:
    """The path of the weights in `folder`, and the open file; what goes wrong with it becomes a PretrainedError."""
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as file:
            yield path, file
    except FileNotFoundError as error:
        raise PretrainedError(f"{path}: no such file; expected a folder with config.json and {WEIGHTS}") from error
    except (SafetensorError, OSError, TypeError) as error:
        raise PretrainedError(f"{path} is damaged or of a type that NumPy does not have: {error}") from error


def _mismatch(
    params: Mapping[str, Param], name: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """What is wrong with the shape of the stored tensor for the parameter called `name`."""
    tensor, expected = tensors[name], params[name].data.shape
    if tensor.columns != slice(None):  # the parameters that stand in one tensor take all its columns
        expected = (*expected[:-1], max(t.columns.stop for t in tensors.values() if t.name == tensor.name))
    elif tensor.transposed:
        expected = expected[::-1]
    found = shapes[tensor.name]
    return None if found == expected else f"{tensor.name}: expected {expected}, got {found}"

"""Snapshots: weights, and everything else that a run needs to continue, in one safetensors file.

Tensors are named "model.…", "optimizer.…" and, for batches that keep a memory, "batches.…". The header holds JSON: the
model's class and sizes, and the state of the run (step, seed, best score so far, fingerprint of the vocabulary). Random
numbers and the position in the data are functions of seed and step, so they need not be saved. The header also holds a
checksum of everything, which is verified on loading: it detects damage, not forgery.

A model of this project is saved under the name of its class, any other as "module:Class", or "__main__:Class" if the
class is defined in the program itself. A snapshot may come from a stranger. So `load_model` imports no module because a
snapshot names it, and looks for the class only in modules that are imported already: those of this package, and those
that your own program imports. It executes another file only if you name it: `load_model(path, program="my.py")`.

A snapshot is written to a new file, which is then renamed to replace the old one (`replacing`). If the program is
killed or the disk is full, the last good snapshot is still there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .. import models
from ..nn import Layer, add_lora
from ..nn.quantized import QuantizedLinear
from ..optim.optimizer import Optimizer
from ..parallel.diagnose import nonfinite_tensor
from ..rng import Key, Zeros
from ..shell.files import make_folder, replacing
from ..shell.reading import expect_file, parsed
from ..shell.text import printable, shown

FORMAT = "scratchformer snapshot 2"
LAST, BEST = "last.safetensors", "best.safetensors"
PARTS = ("model", "optimizer", "batches")
MODELS = {name: getattr(models, name) for name in models.__all__ if hasattr(getattr(models, name), "loss")}
MODELS["Bert"] = models.Bert


class SnapshotError(ValueError):
    """A snapshot cannot be written or read, or does not fit."""


class NotImported(SnapshotError):
    """Code is needed that is not imported, and no file may choose code to import: the user has to name the program."""


class NotFinite(SnapshotError):
    """A snapshot was not written because a tensor has NaN or infinity."""


class Snapshot(NamedTuple):
    model_class: str
    config: dict[str, Any]
    state: dict[str, Any]
    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    batches: dict[str, np.ndarray]
    path: Path  # of the file, for messages


def describe(model: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """The header of a snapshot, without the checksum.

    Raises SnapshotError unless the model has a `config`, the arguments to create it again, and both `config` and
    `state` can be written as JSON.
    """
    name = type(model).__name__
    if not isinstance(getattr(model, "config", None), Mapping):
        raise SnapshotError(f"cannot save a {name}: it has no `config`, a dict of the arguments to create it again")
    try:
        described = json.dumps({"class": class_name(model), "config": model.config}, default=importable)
    except (TypeError, ValueError) as error:  # such as a user's own layer as `positions`
        raise SnapshotError(f"cannot save a {name} with these arguments: {error}") from error
    _warn_of_a_lost_class(type(model), class_name(model))
    try:
        return {"format": FORMAT, "model": described, "state": json.dumps(state)}
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"cannot save this state of a run: {error}") from error


def save_snapshot(
    path: Path | str, model: Layer, optimizer: Optimizer | None = None, batches: Any = None, **state: Any
) -> None:
    """Write a snapshot atomically: the model, `state` (JSON values) and, if given, the optimizer and batches' memory.

    Raises SnapshotError if it cannot be written, or its subclass NotFinite if a tensor has NaN or infinity; an older
    snapshot at `path` then stays unchanged. Warns if `load_model` will not find the model's class. The snapshot is
    still saved: `restore` can load its weights into a model that was created in another way.
    """
    path = Path(path)
    if any(isinstance(layer, QuantizedLinear) for _, layer in model.named_layers()):
        raise SnapshotError(f"cannot save {path}: the model's weights are quantised; save it before that")
    header = describe(model, state)
    tensors: dict[str, np.ndarray] = {}
    for part, owner in zip(PARTS, (model, optimizer, batches), strict=True):
        if owner is not None:
            tensors |= {f"{part}.{name}": np.asarray(a, order="C") for name, a in owner.state_dict().items()}
    if narrow := next((name for name, a in tensors.items() if a.dtype.kind == "V"), None):
        kind = tensors[narrow].dtype
        raise SnapshotError(f"cannot save {path}: {narrow} is {kind}; cast the model first: to(dtype=np.float32)")
    if bad := nonfinite_tensor(tensors):
        raise NotFinite(f"cannot save {path}: {bad} is not finite")
    header["sha256"] = checksum(header, tensors)
    try:
        make_folder(path.parent)
        with replacing(path) as unfinished:
            save_file(tensors, unfinished, header)
    except (OSError, SafetensorError) as error:
        kept = "; the last good snapshot is kept" if os.path.lexists(path) else ""
        raise SnapshotError(f"cannot save {path}: {getattr(error, 'strerror', None) or error}{kept}") from error


def checksum(header: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the header, except "sha256", and of every tensor's name, dtype, shape and bytes."""
    texts = sorted((name, value) for name, value in header.items() if name != "sha256")
    kinds = [(name, tensors[name].dtype.name, tensors[name].shape) for name in sorted(tensors)]
    digest = hashlib.sha256(json.dumps([texts, kinds]).encode())
    for name, *_ in kinds:
        digest.update(tensors[name].data)
    return digest.hexdigest()


def class_name(model: Layer) -> str:
    """The name under which a model's class is saved, such as "LanguageModel", or "module:Class" for a user's own."""
    kind = type(model)
    return kind.__name__ if MODELS.get(kind.__name__) is kind else f"{kind.__module__}:{kind.__qualname__}"


def find(name: str, program: ModuleType | None = None) -> Any:
    """The class of layers with this `class_name`, or the operation "module:name", from `program` or else from that
    module, if it is imported already.

    Nothing is imported or called, not even an attribute's descriptor. Raises NotImported if it is not found,
    SnapshotError if it is something else.
    """
    if name in MODELS:
        return MODELS[name]
    module, _, qualified = name.partition(":")
    parts = qualified.split(".")
    if not all(map(str.isidentifier, (*module.split("."), *parts))):
        local = ": a class defined inside a function cannot be found again" if "<locals>" in parts else ""
        raise SnapshotError(f"unknown model {name[:200]!r}{local}")
    for place in (program, sys.modules.get(module)):
        value: Any = place
        for part in parts:
            value = vars(value).get(part) if isinstance(value, ModuleType | type) else None
        if is_part(value):
            return value
        if value is not None:
            raise SnapshotError(f"{shown(name)} is neither a class of layers nor an operation")
    module, qualified = printable(module), printable(qualified)
    if program is not None:
        raise SnapshotError(f"its model {qualified}, of {module}, is not in {program.__file__} or what that imports")
    hint = "import it first, or name the file of its program (program=FILE, --program FILE)"
    raise NotImported(f"its model {qualified}, of the module {module}, is not imported: {hint}")


def load_file(path: Path | str) -> ModuleType:
    """Execute a Python file as a module. Meanwhile, as with `python FILE`, modules in its folder can be imported, and
    come before installed ones of the same name. Raises ValueError.
    """
    path = Path(path)
    spec = importlib.util.spec_from_file_location(f"_program_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None  # like a script, it cannot be imported by its name
    sys.modules[spec.name] = module
    sys.path.insert(0, folder := str(path.absolute().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file does
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    finally:
        with suppress(ValueError):  # the file may have changed the path itself
            sys.path.remove(folder)
    return module


def importable(value: Any) -> dict[str, str]:
    """A class of layers, or an operation, as JSON: its name. Raises TypeError for anything else."""
    name = f"{value.__module__}:{value.__qualname__}" if is_part(value) else ""
    if is_part(value) and find(name) is value:
        return {"import": name}
    what = f"{name}, which is not at the top of a module" if name else f"a {type(value).__name__}"
    raise TypeError(f"an argument is {what}: expected JSON values, classes of layers, or operations")


def imported(value: Any, program: ModuleType | None = None) -> Any:
    """The inverse of `importable`, also inside lists and dicts. program, errors: see `find`."""
    if isinstance(value, list):
        return [imported(part, program) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {"import"}:
        return {name: imported(part, program) for name, part in value.items()}
    return find(str(value["import"]), program)


def is_part(value: Any) -> bool:
    """Whether `value` is something that models consist of: a class of layers, an operation, or its backward."""
    if isinstance(value, type):
        return issubclass(value, Layer)
    return isinstance(value, FunctionType) and "reference" in vars(value)  # others may say that they have any attribute


def _warn_of_a_lost_class(kind: type[Layer], name: str) -> None:
    try:
        known = find(name)
    except SnapshotError:
        known = None
    if known is not kind or kind.__module__ == "__main__":
        where = f"only where {kind.__name__} can be imported from the top of a module"
        warnings.warn(f"load_model will find the class of this snapshot's model {where}", stacklevel=1)  # once


def best_snapshot(path: Path | str) -> Path:
    """The best snapshot in a run's folder, or the folder itself, which means its last; a file is returned as it is."""
    best = Path(path) / BEST
    return best if os.path.lexists(best) else Path(path)  # a broken link too, so that the error on loading names it


def kept_snapshots(run: Path | str) -> list[Path]:
    """The snapshots that `train` kept in a run's folder (its `keep`), oldest first."""
    return sorted(Path(run).glob("step-*.safetensors"), key=str)


def average_snapshots(paths: Sequence[Path | str], model: Layer) -> None:
    """Give `model` the mean of the weights of several snapshots of the same model.

    Near the end of training the weights wander around a minimum, and their mean is closer to it than most of them are.
    Vaswani et al., 2017, section 6.1, average the last 5. Raises SnapshotError if there are no snapshots or one does
    not fit; TypeError for a single path.
    """
    if isinstance(paths, str | os.PathLike):
        raise TypeError(f"paths: expected a list of snapshots, got {shown(paths)}")
    if not paths:
        raise SnapshotError("average_snapshots: expected at least one snapshot, got none")
    total: dict[str, np.ndarray] = {}
    for path in paths:
        restore(load_snapshot(path), model)
        weights = {name: array.astype(np.float64) for name, array in model.state_dict().items()}
        total = {name: total[name] + weights[name] for name in total} or weights
    model.load_state_dict({name: array / len(paths) for name, array in total.items()})


def load_snapshot(path: Path | str) -> Snapshot:
    """Read a snapshot, or the last one in a run's folder. Raises SnapshotError if it is missing or damaged."""
    path = Path(path)
    if path.is_dir():
        path = path / LAST
    if not path.exists():
        raise SnapshotError(f"no snapshot at {path}")
    expect_file(path, SnapshotError)
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"it is a safetensors file, but not a {FORMAT}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if header.get("sha256") != checksum(header, tensors):
            raise ValueError("the checksum does not match")
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{path} is damaged or not a snapshot: {error}") from error
    described, state = (parsed(header.get(name, ""), f"{path}, {name},", SnapshotError) for name in ("model", "state"))
    model_class, config = described.get("class"), described.get("config")
    if not isinstance(model_class, str) or not isinstance(config, dict):
        got = f"{shown(model_class)} and {shown(config)}"
        raise SnapshotError(f"{path} is damaged: expected the name of a class and its arguments, got {got}")
    parts = {
        part: {name.partition(".")[2]: a for name, a in tensors.items() if name.startswith(part + ".")}
        for part in PARTS
    }
    return Snapshot(model_class, config, state, **parts, path=path)


def load_model(
    path: Path | str, expected: type[Any] = Layer, program: ModuleType | Path | str | None = None
) -> tuple[Any, dict[str, Any]]:
    """The model of a snapshot, created again with its weights in the saved precision, and the state of its run.

    The class of a model that is not part of this project must be imported, or come from `program`: see the beginning of
    this module. Its key is the default, or Key(0): what such a class draws from its key is saved only if it is a Param
    (which may be `frozen`).
    expected: the class that the model must have. program: a Python file that defines or imports the class; it is
    executed. (Or the module that was loaded from it.) Raises SnapshotError if the snapshot is damaged, or if its model
    is of another class or cannot be created here; its subclass NotImported if `program` is needed; ValueError if that
    file cannot be executed.
    """
    snapshot = load_snapshot(path)
    source = program if program is None or isinstance(program, ModuleType) else load_file(program)
    try:
        kind = find(snapshot.model_class, source)
        if not (isinstance(kind, type) and issubclass(kind, expected)):
            raise SnapshotError(f"it holds a {kind.__name__}, expected a {expected.__name__}")
        model = _make(kind, snapshot, source)
        model.load_state_dict(snapshot.model)
    except SnapshotError as error:
        raise type(error)(f"{snapshot.path}: {error}") from error
    except ValueError as error:
        raise SnapshotError(f"{snapshot.path}: snapshot does not fit: {error}") from error
    return model, snapshot.state


def _make(kind: type[Layer], snapshot: Snapshot, program: ModuleType | None) -> Layer:
    """A model like the one in the snapshot, before its weights are loaded."""
    try:
        key: dict[str, Any] = {"key": Zeros()} if kind in MODELS.values() else needed_key(kind)
        config = {name: imported(value, program) for name, value in snapshot.config.items()}
        lora = config.pop("lora", None)
        model = kind(**config, **key)
        if lora is not None:
            add_lora(model, **lora)
    except NotImported as error:
        raise NotImported(f"cannot create this {kind.__name__}: {error}") from error
    except Exception as error:  # whatever a user's own class raises
        raise SnapshotError(f"cannot create this {kind.__name__}: {error}") from error
    dtype = next((a.dtype for a in snapshot.model.values()), None)  # the same for all
    return model.to(dtype=dtype) if any(p.data.dtype != dtype for p in model.parameters()) else model


def needed_key(kind: type[Layer]) -> dict[str, Any]:
    """The key for a class of a user's own: its default, or Key(0). It may compute with what it draws, so no zeros."""
    key = inspect.signature(kind).parameters.get("key")
    return {} if key is None or key.default is not key.empty else {"key": Key(0)}


def expect_model(snapshot: Snapshot, model: Any) -> None:
    """Raise SnapshotError, naming what differs, unless the snapshot's model has this class, config and precision."""
    config = json.loads(json.dumps(model.config, default=importable))  # tuples become lists
    saved = snapshot.config
    names = (class_name(model), f"__main__:{type(model).__qualname__}")  # it may be loaded by its program's file now
    differing = {
        name[:80]: f"{str(saved.get(name))[:80]} in the snapshot, {str(config.get(name))[:80]} here"
        for name in sorted(saved.keys() | config.keys())
        if saved.get(name) != config.get(name)
    }
    if snapshot.model_class not in names or differing:
        other = printable(snapshot.model_class)
        raise SnapshotError(f"{snapshot.path}: snapshot of another model ({other}): {differing}")
    for name, p in model.named_parameters().items():
        if name in snapshot.model and snapshot.model[name].dtype != p.data.dtype:
            types = f"{snapshot.model[name].dtype} in the snapshot, {p.data.dtype} in the model"
            raise SnapshotError(f"{snapshot.path}: snapshot does not fit: {name} is {types}")


def restore(snapshot: Snapshot, model: Layer, optimizer: Optimizer | None = None, batches: Any = None) -> None:
    """Load the weights and, if given, the state of optimizer and batches, from a snapshot of the same model.

    Raises SnapshotError, naming what differs, and leaves the model unchanged, if the snapshot is of a model of another
    class, other sizes or another precision, of another optimizer, or of batches of other sizes.
    """
    expect_model(snapshot, model)
    before = model.state_dict()
    try:
        model.load_state_dict(snapshot.model)
        if batches is not None:
            batches.load_state_dict(snapshot.batches)
        if optimizer is not None:
            optimizer.load_state_dict(snapshot.optimizer)
    except (TypeError, ValueError) as error:
        model.load_state_dict(before)
        raise SnapshotError(f"{snapshot.path}: snapshot does not fit: {error}") from error

"""The command `scratchformer export`, and `export_model`, which does its work."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from ..models import LanguageModel
from ..nn import merge_lora
from ..shell.text import one_line, with_article


def add_command(commands: Any) -> None:
    """Add `export` to the commands of the command line."""
    command = commands.add_parser(
        "export", help="write a trained language model to a Hugging Face folder, a GGUF file or an ONNX file"
    )
    command.add_argument("run_folder", metavar="RUN", help="folder of a run, a snapshot, or a published decoder")
    command.add_argument("out", metavar="OUT", help="a new folder, or a new file NAME.gguf or NAME.onnx")
    command.add_argument(
        "--program", metavar="FILE", help="execute this file: the program of the run, unless it is one of examples/"
    )
    command.set_defaults(run=export)


def export(args: argparse.Namespace) -> None:
    from ..training.snapshot import load_file

    export_model(args.run_folder, Path(args.out), None if args.program is None else load_file(args.program))
    print(one_line(args.out))


def export_model(path: Path | str, out: Path, program: ModuleType | None = None) -> None:
    """Write the language model of a run, a snapshot or a published folder to `out`, in the format of its name.

    out: NAME.onnx, NAME.gguf, or else a folder, which must not exist yet. program: see `load_model`. Raises
    ValueError for a model that the format cannot express, ImportError for a library that is not installed, and the
    errors of loading.
    """
    from . import gguf_file, huggingface, onnx_file

    for each in out, *([out.with_name(out.name + onnx_file.DATA)] if out.suffix == ".onnx" else []):
        if os.path.lexists(each):
            raise ValueError(f"{each}: expected a new file or folder, got one that exists")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: expected a name in an existing folder")
    formats = {".onnx": onnx_file.library, ".gguf": gguf_file.library}
    if out.suffix in formats:
        formats[out.suffix]()  # an error about a missing library comes before the work
    model, vocabulary = load(path, program, text=out.suffix != ".onnx")
    source = getattr(vocabulary, "folder", None)  # of a published tokenizer
    merge_lora(model)
    if out.suffix == ".onnx":
        onnx_file.write_onnx(model, out)
    elif out.suffix == ".gguf":
        with tempfile.TemporaryDirectory(dir=out.absolute().parent) as folder:
            huggingface.write_folder(model, Path(folder) / "model", vocabulary, source)
            gguf_file.write_gguf(Path(folder) / "model", out)
    else:
        huggingface.write_folder(model, out, vocabulary, source)


def load(path: Path | str, program: ModuleType | None, text: bool) -> tuple[LanguageModel, Any]:
    """A language model and its vocabulary (None: bytes). text: whether the vocabulary is needed."""
    from ..training.readers import load_reader, load_writer
    from ..training.snapshot import best_snapshot, load_model

    if (Path(path) / "config.json").is_file():
        return load_writer(path)
    model, state = load_model(best_snapshot(path), program=program)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{path} holds {with_article(type(model))}, and only language models are exported")
    return model, load_reader(path, model, state) if text else None

"""What the example programs share: their options, the folder of a run, and errors as one line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..backend import Device, cores, get_device
from ..data import STANDARD_LIBRARY, Corpus, NoConnection, Subwords, load_enwik8
from ..data.files import locked, replacing
from ..models import GPT2, LanguageModel
from ..models.pretrained import PretrainedError
from .folder import holds_run, read_run
from .snapshot import SnapshotError, best_snapshot, load_model

SETTINGS = "settings.json"
SUBWORDS = "vocabulary.json"
# Names that every settings.json has.
NAMES = ("program", "preset", "seed", "steps", "data", "replicas", "micro_batch", "tensorboard")
# Options that a run keeps, so that --resume takes none of them.
KEPT = ("preset", "seed", "out", "replicas", "micro_batch", "tensorboard")


# What a run does not keep.
PASSING = ("device", "out", "resume", "estimate", "given")


class Run(argparse.Namespace):
    """The settings of a run: those of the preset, overridden by the options, and those of PASSING."""

    device: Device
    out: Path
    resume: bool
    estimate: bool
    given: frozenset[str]  # names of the settings that are options of the command line

    def replicas_on_device(self) -> dict[str, int | None]:
        """The arguments of `Replicas`."""
        return {"count": self.replicas if self.device.index is None else 1, "micro_batch": self.micro_batch}

    def save(self) -> None:
        """Write the settings to the run's folder: for `train` to call when it is about to begin (`on_start`).

        Whatever else the run needs to be resumed, such as its vocabulary, must be written before: a folder without
        settings may be used by another run.
        """
        settings = {name: value for name, value in vars(self).items() if name not in PASSING}
        self.out.mkdir(parents=True, exist_ok=True)
        with replacing(self.out / SETTINGS) as unfinished:
            unfinished.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def start_run(
    name: str,
    description: str,
    presets: Mapping[str, Mapping[str, Any]],
    argv: list[str] | None,
    options: Mapping[str, Mapping[str, Any]] = {},
    passing: Collection[str] = (),
) -> Run:
    """Parse the command line of an example program; with --resume, read the settings from the run's folder.

    presets: settings by name; "small" is the default, or the preset that is called as an option of `options` that is
    given. options: those of this program alone, by name, with the arguments of argparse's `add_argument`; their values
    become settings. One with the metavar PATH is a path.
    A resumed run goes on as it began, with the default of an option that there was not yet then: only --device, --data,
    --steps, and those of `options` that are `passing`, may be given then. Raises ValueError if the folder already holds
    a run, or with --resume if it holds none.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, gpu or gpu:1 (default: a GPU if there is one)")
    parser.add_argument("--data", metavar="PATH", help="an archive, file or folder with the data, not downloaded")
    parser.add_argument("--preset", choices=presets, help="sizes and settings (default: small)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps, instead of the preset's number")
    parser.add_argument("--seed", type=int, help="of the weights, the batches and dropout (default: 0)")
    parser.add_argument("--out", metavar="DIR", help=f"folder of the run (default: runs/{name}, numbered)")
    parser.add_argument("--resume", metavar="DIR", help="continue the run in this folder")
    parser.add_argument("--replicas", type=int, metavar="N", help="threads on a CPU (default: one for each core)")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="rows computed at once (default: automatic)")
    parser.add_argument("--estimate", action="store_true", help="print how much memory the run will take, and stop")
    parser.add_argument("--tensorboard", action="store_true", default=None, help="log to TensorBoard too")
    for option, described in options.items():
        parser.add_argument(f"--{option}", **{**described, "default": None})
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps: expected at least 1, got {args.steps}")
    if args.seed is not None and args.seed < 0:
        raise ValueError(f"--seed: expected a number >= 0, got {args.seed}")
    for option, value in (("--replicas", args.replicas), ("--micro-batch", args.micro_batch)):
        if value is not None and value < 1:
            raise ValueError(f"{option}: expected at least 1, got {value}")

    names = [name.replace("-", "_") for name in options]
    defaults = {name: described.get("default") for name, described in zip(names, options.values(), strict=True)}
    given = {name: value for name in (*KEPT, "steps", "data", *names) if (value := getattr(args, name)) is not None}
    kept = [name for name in given if name not in ("steps", "data", *passing)]
    device = get_device(args.device)
    if args.resume is not None:
        if kept:
            refused = ", ".join("--" + name.replace("_", "-") for name in kept)
            raise ValueError(f"--resume: the run goes on as it began, so leave out {refused}")
        out = Path(args.resume)
        _check_folder(out, lock=not args.estimate)
        settings = read_settings(out)
        if settings["program"] != name:
            raise ValueError(f"--resume: {out} is a run of {settings['program']}, not of {name}")
        preset = presets.get(settings["preset"], presets["small"])
        required = [name for name in preset if defaults.get(name) is None]
        settings = defaults | read_settings(out, *required) | given
        for option, described in zip(names, options.values(), strict=True):
            if settings[option] not in (None, *described.get("choices", (settings[option],))):
                raise ValueError(f"{out / SETTINGS} is damaged: {option} is {settings[option]!r}")
        for folder in (out, *sorted(path for path in out.iterdir() if path.is_dir())):
            read_run(folder)  # of every stage, before the first of them goes on
    else:
        out = Path(given.pop("out", None) or _unused(Path("runs") / name))
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out: {out} is no folder")
        _check_folder(out, lock=not args.estimate)
        if holds_run(out) or os.path.lexists(out / SETTINGS):
            raise ValueError(f"{out} holds a run: continue it with --resume {out}, or choose another --out")
        preset = given.get("preset") or next((name for name in names if name in given and name in presets), "small")
        settings = {"program": name, "preset": preset, "seed": 0, "data": None}
        settings |= {"replicas": cores(), "micro_batch": None, "tensorboard": False}
        settings |= {**defaults, **presets[preset], **given}
    for path in ("data", *(name for name in names if options[name.replace("_", "-")].get("metavar") == "PATH")):
        if settings[path] and Path(settings[path]).exists():
            settings[path] = str(Path(settings[path]).absolute())
    print(f"{name}: preset {settings['preset']}, {settings['steps']} steps on {device}, run in {out}", flush=True)
    passed = dict(device=device, out=out, resume=args.resume is not None, estimate=args.estimate)
    return Run(**settings, **passed, given=frozenset(given))


def read_settings(run: Path, *names: str) -> dict[str, Any]:
    """The settings of the run in folder `run`; raises ValueError if there is none, or they are damaged.

    names: of the program's own settings, that must be among them.
    """
    try:
        settings = dict(json.loads((run / SETTINGS).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{run} holds no run ({SETTINGS} is missing)") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{run / SETTINGS} is damaged: {error}") from error
    if missing := [name for name in (*NAMES, *names) if name not in settings]:
        raise ValueError(f"{run / SETTINGS} is damaged: {', '.join(missing)} missing")
    return settings


def load_corpus(run: Run) -> Corpus:
    """The text of `run.data`, or enwik8; where that cannot be downloaded, the standard library's sources instead."""
    try:
        return load_enwik8(run.data)
    except NoConnection:
        if run.resume:  # it trained on enwik8
            raise
        run.data = STANDARD_LIBRARY
        corpus = load_enwik8(run.data)
        print(f"no connection to download enwik8: training on {corpus.name} instead")
        return corpus


def load_subwords(snapshot: Path | str, state: Mapping[str, Any]) -> Subwords | None:
    """The sub-word vocabulary beside a snapshot (in the folder of its run), None for a model of bytes.

    state: that of the snapshot. Raises DataError if the file is missing or damaged, SnapshotError if it is another
    vocabulary.
    """
    if "subwords" not in state:
        return None
    path = Path(snapshot) / SUBWORDS if Path(snapshot).is_dir() else Path(snapshot).with_name(SUBWORDS)
    vocabulary = Subwords.load(path)
    if vocabulary.fingerprint != state["subwords"]:
        raise SnapshotError(f"{snapshot}: the snapshot was made with another vocabulary than {path}")
    return vocabulary


def load_writer(path: Path | str) -> tuple[LanguageModel, Subwords | None]:
    """A language model that writes, and its vocabulary (None: bytes), of a run's folder, a snapshot, or a folder with
    a published GPT-2. Raises ValueError for a model that does not write, and as the loading does.
    """
    if (Path(path) / "config.json").is_file():
        return load_gpt2(path, dropout=0.0)
    model, state = load_model(best_snapshot(path))
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{path} holds a {type(model).__name__}, which does not write")
    subwords = load_subwords(path, state)
    if subwords is None and model.config["vocab_size"] != 256:
        raise ValueError(f"{path}: its {model.config['vocab_size']} tokens are neither bytes nor sub-words of a text")
    return model, subwords


def load_gpt2(folder: Path | str, **options: Any) -> tuple[GPT2, Subwords]:
    """A published GPT-2 and its vocabulary; raises as the loading of both does, and if they do not fit each other."""
    model, vocabulary = GPT2.from_pretrained(folder, **options), Subwords.from_gpt2(folder)
    if len(vocabulary) != (size := model.config["vocab_size"]):
        raise PretrainedError(f"{folder}: vocab.json has {len(vocabulary):,} tokens, the model of config.json {size:,}")
    return model, vocabulary


def _check_folder(run: Path, lock: bool) -> None:
    """Refuse at once a folder that another process uses; `train` does so too, but only after all data was read."""
    if lock and run.is_dir():
        with locked(run):
            pass


def _unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that holds no run."""
    number, candidate = 1, folder
    while os.path.lexists(candidate / SETTINGS) or holds_run(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def run_program(program: Callable[[], None]) -> None:
    """Run a program's main function: a mistake of the user's or of the data ends it with one line and exit status 1.

    Characters that the terminal cannot show are printed as "?".
    """
    take_any_text()
    try:
        program()
    except BrokenPipeError:  # the reader of standard output, such as `head`, has gone
        sys.stderr.close()
        sys.exit(1)
    except (ValueError, TypeError, IndexError, OSError, RuntimeError, ImportError, MemoryError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as saved:  # by `train`, with the word that a snapshot was saved, or by anything else
        sys.exit(f"interrupted; {saved}: continue with --resume" if saved.args else "interrupted")


def take_any_text() -> None:
    """Let no character end the program that the terminal cannot show or the locale (LC_ALL=C, cp1252) cannot read."""
    for stream, errors in (sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace"):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)

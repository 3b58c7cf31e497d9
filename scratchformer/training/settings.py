"""The settings of a run: from a preset and the command line, or from the folder of a resumed run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..backend import Device, cores, get_device
from ..data.files import locked, replacing
from ..options import MOST_STEPS, MOST_THREADS, SEED, Parser
from .folder import holds_run, read_run

SETTINGS = "settings.json"
# Names that every settings.json has.
NAMES = ("program", "preset", "seed", "steps", "data", "replicas", "micro_batch", "tensorboard")
# Options that a resumed run keeps, so --resume refuses them.
KEPT = ("preset", "seed", "out", "replicas", "micro_batch", "tensorboard")
# Attributes of a Run that are not saved.
PASSING = ("device", "out", "resume", "estimate", "given", "state", "preset_steps")


class Run(argparse.Namespace):
    """The settings of a run: those of its preset, overridden by options, and the attributes of PASSING."""

    device: Device
    out: Path
    resume: bool
    estimate: bool
    given: frozenset[str]  # names of the settings that were given on the command line
    state: Mapping[str, Any]  # of the snapshot from which the run is resumed; empty if there is none
    preset_steps: int = 0  # of the preset; 0 if the run is only scored

    def replicas_on_device(self) -> dict[str, int | None]:
        """The arguments of `Replicas`."""
        return {"count": self.replicas if self.device.index is None else 1, "micro_batch": self.micro_batch}

    def save(self) -> None:
        """Write the settings to the run's folder. `train` calls this just before it starts (`on_start`).

        Anything else that resuming needs, such as the vocabulary, must be written first: a folder without settings may
        be taken by another run.
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
    without: Collection[str] = (),
) -> Run:
    """Parse the command line of a program; with --resume, read the settings from the run's folder.

    presets: settings by name. The default is the preset with the name of a given option, if there is one, else "small".
    options: the program's own options, by name, with the arguments of `options.Parser.add_argument`; their values
    become settings. An option with the metavar PATH is a path. without: "data", "estimate" or both, if the program does
    not take these options.
    A resumed run keeps its settings: only --device, --data, --steps and the options in `passing` may be given, and an
    option that is newer than the run has its default. Raises ValueError if the folder already holds a run, or, with
    --resume, if it holds none.
    """
    args = _parser(name, description, presets, options, without).parse_args(argv)
    names = [_setting(option) for option in options]
    given = {name: value for name in (*KEPT, "steps", "data", *names) if (value := getattr(args, name)) is not None}
    device = get_device(args.device)
    state: Mapping[str, Any] = {}
    if args.resume is not None:
        if kept := [name for name in given if name not in ("steps", "data", *passing)]:
            refused = ", ".join("--" + name.replace("_", "-") for name in kept)
            raise ValueError(f"--resume: the run keeps its settings, so leave out {refused}")
        out = Path(args.resume)
        _check_folder(out, lock=not args.estimate)
        settings = saved_settings(out, name, presets, options) | given
        for folder in (out, *sorted(path for path in out.iterdir() if path.is_dir())):
            snapshot = read_run(folder)  # of every stage, before the first one starts
            state = snapshot.state if snapshot is not None and folder == out else state
    else:
        out = Path(given.pop("out", None) or _unused(Path("runs") / name))
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out: {out} is not a folder")
        _check_folder(out, lock=not args.estimate)
        if holds_run(out) or os.path.lexists(out / SETTINGS):
            raise ValueError(f"{out} holds a run: continue it with --resume {out}, or choose another --out")
        preset = given.get("preset") or next((name for name in names if name in given and name in presets), "small")
        settings = {"program": name, "preset": preset, "seed": 0, "data": None}
        settings |= {"replicas": cores(), "micro_batch": None, "tensorboard": False}
        settings |= {**_defaults(options), **presets[preset], **given}
    for path in ("data", *(_setting(option) for option in options if options[option].get("metavar") == "PATH")):
        if settings[path] and Path(settings[path]).exists():
            settings[path] = str(Path(settings[path]).absolute())
    print(f"{name}: preset {settings['preset']}, {settings['steps']} steps on {device}, run in {out}", flush=True)
    passed = dict(device=device, out=out, resume=args.resume is not None, estimate=args.estimate, state=state)
    usual = presets.get(settings["preset"], presets["small"])["steps"]
    return Run(**settings, **passed, given=frozenset(given), preset_steps=usual)


def open_run(
    name: str,
    presets: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]],
    out: Path,
    device: str,
    data: str | None = None,
) -> Run:
    """The run of program `name` in folder `out`, for scoring rather than training: its `resume` is True. data: the path
    of the data, if it has moved. Raises what `saved_settings` raises.
    """
    settings = saved_settings(out, name, presets, options) | ({"data": data} if data else {})
    passed = dict(device=get_device(device), out=out, resume=True, estimate=False, given=frozenset(), state={})
    return Run(**settings, **passed)


def read_settings(run: Path, *names: str) -> dict[str, Any]:
    """The settings of the run in folder `run`. Raises ValueError if there is no run, or its settings are damaged.

    names: settings of the program's own that are required.
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


def saved_settings(
    run: Path, name: str, presets: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """All settings of a run of program `name`, with defaults for options that are newer than the run. Raises ValueError
    if they are damaged, or belong to another program.
    """
    settings, defaults = read_settings(run), _defaults(options)
    if settings["program"] != name:
        raise ValueError(f"--resume: {run} is a run of {settings['program']}, not of {name}")
    preset = presets.get(settings["preset"], presets["small"])
    required = [name for name in preset if defaults.get(name) is None]
    settings = defaults | read_settings(run, *required)
    for option, described in options.items():
        value = settings[_setting(option)]
        if value not in (None, *described.get("choices", (value,))):
            raise ValueError(f"{run / SETTINGS} is damaged: {_setting(option)} is {value!r}")
    return settings


def _parser(
    name: str,
    description: str,
    presets: Collection[str],
    options: Mapping[str, Mapping[str, Any]],
    without: Collection[str] = (),
) -> Parser:
    number: dict[str, Any] = {"type": int, "metavar": "N", "least": 1}
    common: dict[str, dict[str, Any]] = {
        "device": dict(default="auto", help="auto, cpu, gpu or gpu:1 (default: a GPU if there is one)"),
        "data": dict(metavar="PATH", help="a local archive, file or folder, instead of a download"),
        "preset": dict(choices=presets, help="sizes and settings (default: small)"),
        "steps": dict(**number, most=MOST_STEPS, help="training steps, instead of the preset's number"),
        "seed": dict(**SEED, help="random seed for weights, batches and dropout (default: 0)"),
        "out": dict(metavar="DIR", help=f"folder of the run (default: runs/{name}, numbered)"),
        "resume": dict(metavar="DIR", help="continue the run in this folder"),
        "replicas": dict(**number, most=MOST_THREADS, help="threads on a CPU (default: one for each core)"),
        "micro-batch": dict(**number, help="rows computed at once (default: automatic)"),
        "estimate": dict(action="store_true", help="print how much memory the run will take, and stop"),
        "tensorboard": dict(action="store_true", default=None, help="log to TensorBoard too"),
    }
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(data=None, estimate=False)
    for option, described in common.items():
        if option not in without:
            parser.add_argument(f"--{option}", **described)
    for option, described in options.items():
        parser.add_argument(f"--{option}", **{**described, "default": None})
    return parser


def _setting(option: str) -> str:
    return option.replace("-", "_")


def _defaults(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {_setting(option): described.get("default") for option, described in options.items()}


def _check_folder(run: Path, lock: bool) -> None:
    """Refuse a folder that another process uses. `train` does so too, but only after all the data has been read."""
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

"""The settings of a run: from a preset and the command line, or from the folder of a resumed run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..backend import get_device
from ..parallel.precision import PRECISIONS
from ..parallel.replicas import MAX_REPLICAS
from ..shell.files import expect_no_link, make_folder, replacing
from ..shell.options import MAX_STEPS, SEED, CommandLine
from ..shell.reading import read_json
from ..shell.text import one_line, printable, shown
from ..version import __version__
from .folder import SETTINGS, holds_run, read_run

BITS = ("ordinary", "portable")  # see `portable`
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N", "min": 1}
_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}
# Options of every program, with the arguments of `CommandLine.add_argument`. First those that are no settings.
FOR_ONE_START: dict[str, dict[str, Any]] = {
    "device": dict(default="auto", help="auto, cpu, gpu or gpu:1 (default: a GPU if one works)"),
    "out": dict(metavar="DIR", help="folder of the run (default: runs/NAME, numbered)"),
    "resume": dict(metavar="DIR", help="continue the run in this folder"),
    "continue": dict(
        action="store_true", dest="go_on", help="continue the run in the folder of --out, if there is one"
    ),
    "estimate": dict(action="store_true", help="print how much memory the run will take, and stop"),
}
OF_RUN: dict[str, dict[str, Any]] = {
    "data": dict(metavar="PATH", help="a local archive, file or folder, instead of a download"),
    "steps": dict(**_NUMBER, max=MAX_STEPS, help="training steps, instead of the preset's number"),
    "seed": dict(**SEED, default=0, help="random seed for weights, batches and dropout (default: 0)"),
    "replicas": dict(**_NUMBER, max=MAX_REPLICAS, help="threads on a CPU (default: one for each core)"),
    "micro-batch": dict(**_NUMBER, max=2**31 - 1, help="rows computed at once (default: automatic)"),
    "micro-batches": dict(
        **_NUMBER,
        max=2**31 - 1,
        help="divide each batch into N micro-batches, of its rows / N each, rounded up; instead of --micro-batch",
    ),
    "precision": dict(
        choices=PRECISIONS, default="float32", help="float32 (default), bfloat16 or float16; tf32 on a GPU"
    ),
    "bits": dict(
        choices=BITS,
        default="ordinary",
        help="portable: the same results on every processor, in float32; slower (default: ordinary)",
    ),
    "shard": dict(
        **_SWITCH,
        help="under mpiexec, each process keeps the optimizer's state for its part of the parameters: same results",
    ),
    "recompute": dict(
        **_SWITCH,
        help="keep only the inputs of blocks and compute the rest again in backward: less memory, same results",
    ),
    "tensorboard": dict(action="store_true", default=False, help="log to TensorBoard too"),
}
CHANGEABLE = ("steps", "data", "recompute", "shard", "replicas")  # of these, what a resumed run does not keep
MUON_OPTIONS = {  # for a program whose presets may have them too
    "optimizer": dict(
        choices=("adam", "muon"), default="adam", help="muon: for the matrices of blocks (default: the preset's)"
    ),
    "muon-lr": dict(
        type=float,
        default=0.02,
        metavar="X",
        min=1e-9,
        max=1000,
        help="learning rate of Muon (default: the preset's, or 0.02)",
    ),
}
VALIDATION_OPTION = {
    "validation": dict(type=int, metavar="N", default=2_500, min=2, help="reviews held out (default: 2500)"),
}

Options = Mapping[str, Mapping[str, Any]]
Presets = Mapping[str, Mapping[str, Any]]


def _setting(option: str) -> str:
    return option.replace("-", "_")


def _option(setting: str) -> str:
    return setting.replace("_", "-")


def defaults(options: Options = OF_RUN) -> dict[str, Any]:
    """The settings of a run that is given none of these options."""
    return {_setting(option): described.get("default") for option, described in options.items()}


def save_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings to the run's folder, just before training starts.

    Anything else that resuming needs, such as the vocabulary, must be written first: a folder without settings may
    be taken by another run.
    """
    make_folder(out)
    text = json.dumps({**settings, "version": __version__}, indent=2) + "\n"
    with replacing(out / SETTINGS) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def start_run(
    name: str,
    description: str,
    presets: Presets,
    argv: list[str] | None,
    options: Mapping[str, Mapping[str, Any] | None] = {},
) -> dict[str, Any]:
    """Parse the command line of a program; with --resume, read the settings from the run's folder. Returns the
    arguments of `Run`, and the attributes `given`, `estimating`, `preset_steps` and `state`.

    presets: settings by name. The default is the preset with the name of a given option, if there is one, else "small".
    options: the program's own options, by name, with the arguments of `options.CommandLine.add_argument`; their values
    become settings. An option with the metavar PATH is a path. An option that is `changeable` may be given with
    --resume. None takes away an option that every program has, "data" or "estimate".
    A resumed run keeps its settings: only --device, --data, --steps, --replicas, --shard, --recompute and changeable
    options may be given, and an option that is newer than the run has its default. Raises ValueError if the presets
    lack what every program needs, if the folder already holds a run, or, with --resume, if it holds none.
    """
    if "small" not in presets:
        raise ValueError(f"presets: expected one named small, got {', '.join(presets) or 'none'}")
    if without := [preset for preset in presets if "steps" not in presets[preset]]:
        raise ValueError(f"presets: {without[0]} has no steps")
    described, changeable = program_options(options)
    args = parser(description, presets, options).parse_args(argv)
    given = {name: value for name in (*defaults(described), "preset") if (value := getattr(args, name)) is not None}
    device = get_device(args.device)
    for path in (_setting(option) for option in described if described[option].get("metavar") == "PATH"):
        if given.get(path) and Path(given[path]).exists():
            given[path] = str(Path(given[path]).absolute())
    if args.go_on and (args.out is None or args.resume is not None):
        raise ValueError("--continue: name the run's folder with --out, and leave out --resume")
    goes_on = args.go_on and os.path.lexists(Path(args.out) / SETTINGS)
    kept = {name: value for name, value in given.items() if name not in changeable}
    state: Mapping[str, Any] = {}
    if args.resume is None and not goes_on:
        out = Path(args.out or _unused(Path("runs") / name))
        settings = _new_settings(out, name, presets, described, given)
    else:
        if not goes_on and (refused := [*kept, *(["out"] if args.out is not None else [])]):
            options_given = ", ".join(f"--{_option(name)}" for name in refused)
            raise ValueError(f"--resume: the run keeps its settings, so leave out {options_given}")
        out = Path(args.out if goes_on else args.resume)
        before = saved_settings(out, name, presets, described)
        for name_of_setting, value in kept.items():
            if before[name_of_setting] != value:
                has = f"the run in {out} has {shown(before[name_of_setting])}, not {shown(value)}"
                raise ValueError(f"--{_option(name_of_setting)}: {has}")
        settings = before | given
        state = _read_all(out)
    begins = f"{name}: preset {settings['preset']}, {settings['steps']} steps on {device}, run in {out}"
    print(one_line(begins), flush=True)
    resumed = args.resume is not None or goes_on
    if resumed:
        own = [name for name in changeable if name not in CHANGEABLE and name not in given]
        usual_values = defaults(described)
        if asked := [name for name in own if settings[name] != usual_values[name]]:
            again = ", ".join(f"--{_option(name)} {settings[name]}".removesuffix(" True") for name in asked)
            print(one_line(f"as before: {again}; to change this, give the option again"), flush=True)
    usual = presets.get(settings["preset"], presets["small"])["steps"]
    attributes = dict(given=frozenset(given), estimating=args.estimate, preset_steps=usual, state=state)
    return dict(out=out, resume=resumed, device=device, settings=settings, attributes=attributes)


def program_options(
    options: Mapping[str, Mapping[str, Any] | None],
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """The options of a program that become settings, and the settings that a resumed run may change."""
    described = {name: {**option} for name, option in {**OF_RUN, **options}.items() if option is not None}
    described.pop("estimate", None)
    own = [_setting(name) for name, option in described.items() if option.pop("changeable", False)]
    return described, (*CHANGEABLE, *own)


def parser(description: str, presets: Collection[str], options: Mapping[str, Mapping[str, Any] | None]) -> CommandLine:
    """The command line of a program. An option that is not given is None, if it becomes a setting."""
    parser = CommandLine(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(data=None, estimate=False)
    for option, arguments in FOR_ONE_START.items():
        if option not in options:
            parser.add_argument(f"--{option}", **arguments)
    parser.add_argument("--preset", choices=presets, help="sizes and settings (default: small)")
    for option, arguments in program_options(options)[0].items():
        parser.add_argument(f"--{option}", **{**arguments, "default": None})
    return parser


def _read_all(out: Path) -> Mapping[str, Any]:
    """Read the snapshots of every stage of a run, before the first one starts; returns the state of the run's own."""
    for folder in sorted((path for path in out.iterdir() if path.is_dir() and holds_run(path)), key=str):
        read_run(expect_no_link(folder))
    snapshot = read_run(out)
    return {} if snapshot is None else snapshot.state


def _new_settings(out: Path, name: str, presets: Presets, options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a new run, whose folder must not hold one."""
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out: {out} is not a folder")
    if holds_run(out) or os.path.lexists(out / SETTINGS):
        raise ValueError(f"{out} holds a run: continue it with --resume {out}, or choose another --out")
    named = (name for name in map(_setting, options) if name in given and name in presets)
    preset = given.get("preset") or next(named, "small")
    settings = {"program": name, "data": None, **defaults(options), **presets[preset], **given, "preset": preset}
    if None not in (settings["micro_batch"], settings["micro_batches"]):
        raise ValueError("--micro-batches: give either this or --micro-batch, not both")
    return settings


def read_settings(run: Path, *names: str) -> dict[str, Any]:
    """The settings of the run in folder `run`. Raises ValueError if there is no run, or a setting is missing.

    names: settings of the program's own that are required.
    """
    path = run / SETTINGS
    if not os.path.lexists(path):
        if (run / "config.json").is_file():
            raise ValueError(f"{run} holds a published model, not a run: gpt2.py or bert.py --pretrained makes one")
        raise ValueError(f"{run} holds no run ({SETTINGS} is missing)")
    settings = read_json(path, ValueError)
    if missing := [name for name in ("program", "preset", "seed", "steps", *names) if name not in settings]:
        raise ValueError(f"{path} is damaged: {', '.join(missing)} missing")
    return settings


def saved_settings(run: Path, name: str, presets: Presets, options: Options) -> dict[str, Any]:
    """All settings of a run of program `name`, with defaults for options that are newer than the run. Raises ValueError
    if one is missing, or if they belong to another program.
    """
    settings = read_settings(run)
    if settings["program"] != name:
        raise ValueError(f"--resume: {run} is a run of {printable(str(settings['program']))}, not of {name}")
    preset = presets.get(str(settings["preset"]), presets["small"])
    usual = {name: value for name, value in defaults(options).items() if value is not None or name not in preset}
    return usual | read_settings(run, *(name for name in preset if name not in usual))


def _unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that holds no run."""
    number, candidate = 1, folder
    while os.path.lexists(candidate / SETTINGS) or holds_run(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate

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
from ..shell.files import expect_no_link, locked, make_folder, replacing
from ..shell.options import MAX_STEPS, SEED, CommandLine
from ..shell.reading import read_json
from ..shell.text import one_line, printable, shown
from ..version import __version__
from .folder import SETTINGS, holds_run, read_run
from .metrics import is_number

# What every settings.json has, with examples of its values.
NAMES: dict[str, tuple[Any, ...]] = {
    **{"program": ("",), "preset": ("",), "seed": (0,), "steps": (0,), "data": ("", None)},
    **{"replicas": (0, None), "micro_batch": (0, None), "tensorboard": (False,)},
}
LIMITS = {"steps": MAX_STEPS, "replicas": MAX_REPLICAS}  # any other whole number has to fit in 64 bits, signed
VERSION = "version"  # what the file has beyond the settings
# Options that a resumed run keeps, so --resume refuses them.
KEPT = ("preset", "seed", "out", "micro_batch", "tensorboard")
CHANGEABLE = ("steps", "data", "recompute", "shard", "replicas")  # options that it accepts
BITS = ("ordinary", "portable")  # see `portable`
# Options of every program that are newer than the first runs.
NEWER: Mapping[str, Mapping[str, Any]] = {
    "precision": dict(
        choices=PRECISIONS, default="float32", help="float32 (default), bfloat16 or float16; tf32 on a GPU"
    ),
    "bits": dict(
        choices=BITS,
        default="ordinary",
        help="portable: the same results on every processor, in float32; slower (default: ordinary)",
    ),
    "micro-batches": dict(
        type=int,
        metavar="N",
        min=1,
        max=2**31 - 1,
        help="divide each batch into N micro-batches, of its rows / N each, rounded up; instead of --micro-batch",
    ),
    "shard": dict(
        action=argparse.BooleanOptionalAction,
        default=False,
        help="under mpiexec, each process keeps the optimizer's state for its part of the parameters: same results",
    ),
    "recompute": dict(
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep only the inputs of blocks and compute the rest again in backward: less memory, same results",
    ),
}
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
# What a run has that is given none of it.
COMMON: dict[str, Any] = {
    **{"preset": "", "data": None, "replicas": None, "micro_batch": None, "micro_batches": None},
    **{"precision": "float32", "bits": "ordinary", "recompute": False, "shard": False, "tensorboard": False},
}


def save_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings to the run's folder, just before training starts.

    Anything else that resuming needs, such as the vocabulary, must be written first: a folder without settings may
    be taken by another run.
    """
    make_folder(out)
    text = json.dumps({VERSION: __version__, **settings}, indent=2) + "\n"
    with replacing(out / SETTINGS) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def start_run(
    name: str,
    description: str,
    presets: Mapping[str, Mapping[str, Any]],
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
    _check_presets(presets)
    without = [option for option, described in options.items() if described is None]
    options, passing = program_options(options)
    args = _parser(name, description, presets, options, without).parse_args(argv)
    names = [_setting(option) for option in options]
    given = {name: value for name in (*KEPT, *CHANGEABLE, *names) if (value := getattr(args, name)) is not None}
    device = get_device(args.device)
    for path in ("data", *(_setting(option) for option in options if options[option].get("metavar") == "PATH")):
        if given.get(path) and Path(given[path]).exists():
            given[path] = str(Path(given[path]).absolute())
    given_again = _continue(args, given, passing) if args.go_on else {}
    state: Mapping[str, Any] = {}
    if args.resume is None:
        out = Path(given.pop("out", None) or _unused(Path("runs") / name))
        settings = _new_settings(out, args.estimate, name, presets, options, given)
    else:
        out = Path(args.resume)
        settings = _resumed_settings(out, args.estimate, name, presets, options, passing, given, given_again)
        for folder in (out, *sorted((path for path in out.iterdir() if path.is_dir()), key=str)):
            if folder != out and holds_run(folder):
                expect_no_link(folder)
            snapshot = read_run(folder)  # of every stage, before the first one starts
            state = snapshot.state if snapshot is not None and folder == out else state
    begins = f"{name}: preset {settings['preset']}, {settings['steps']} steps on {device}, run in {out}"
    print(one_line(begins), flush=True)
    if args.resume is not None:
        usual_values = _defaults(options)
        kept = [name for name in passing if name not in given and settings[name] != usual_values[name]]
        if kept:
            asked = ", ".join(f"--{_option(name)} {settings[name]}".removesuffix(" True") for name in kept)
            print(one_line(f"as before: {asked}; to change this, give the option again"), flush=True)
    usual = presets.get(settings["preset"], presets["small"])["steps"]
    attributes = dict(given=frozenset(given), estimating=args.estimate, preset_steps=usual, state=state)
    return dict(out=out, resume=args.resume is not None, device=device, settings=settings, attributes=attributes)


def program_options(options: Mapping[str, Mapping[str, Any] | None]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The options of a program, those of every program included, and the settings of those that are changeable."""
    described = {name: {**option} for name, option in options.items() if option is not None}
    changeable = [_setting(name) for name, option in described.items() if option.pop("changeable", False)]
    return {**{name: {**option} for name, option in NEWER.items()}, **described}, changeable


def _continue(args: argparse.Namespace, given: dict[str, Any], passing: Collection[str]) -> dict[str, Any]:
    """Set args.resume if the folder of --continue holds a run. Removes from `given`, and returns, the settings that
    such a run keeps: they must be the same as before.
    """
    if args.out is None:
        raise ValueError("--continue: name the run's folder with --out")
    if args.resume is not None:
        raise ValueError("--continue: leave out --resume, since --out names the run")
    if not os.path.lexists(Path(args.out) / SETTINGS):
        return {}
    args.resume = given.pop("out")
    return {name: given.pop(name) for name in [*given] if name not in (*CHANGEABLE, *passing)}


def _resumed_settings(
    out: Path,
    estimate: bool,
    name: str,
    presets: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]],
    passing: Collection[str],
    given: dict[str, Any],
    given_again: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings of the run in a folder, with those that are given now. given_again: those that must be the same."""
    if kept := [setting for setting in given if setting not in (*CHANGEABLE, *passing)]:
        refused = ", ".join(f"--{_option(setting)}" for setting in kept)
        raise ValueError(f"--resume: the run keeps its settings, so leave out {refused}")
    if out.is_dir() and not estimate:
        _check_folder(out)
    settings = saved_settings(out, name, presets, options)
    for setting, value in given_again.items():
        if settings[setting] != value:
            has = f"the run in {out} has {shown(settings[setting])}, not {shown(value)}"
            raise ValueError(f"--{_option(setting)}: {has}")
    return settings | given


def _new_settings(
    out: Path,
    estimate: bool,
    name: str,
    presets: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings of a new run, whose folder must not hold one."""
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"--out: {out} is not a folder")
    if not estimate:
        _check_folder(out)
    if holds_run(out) or os.path.lexists(out / SETTINGS):
        raise ValueError(f"{out} holds a run: continue it with --resume {out}, or choose another --out")
    named = (name for name in map(_setting, options) if name in given and name in presets)
    preset = given.get("preset") or next(named, "small")
    settings = {"program": name, "preset": preset, "seed": 0, "data": None}
    settings |= {"replicas": None, "micro_batch": None, "tensorboard": False}
    settings |= {**_defaults(options), **presets[preset], **given}
    if None not in (settings["micro_batch"], settings["micro_batches"]):
        raise ValueError("--micro-batches: give either this or --micro-batch, not both")
    return settings


def read_settings(run: Path, *names: str) -> dict[str, Any]:
    """The settings of the run in folder `run`. Raises ValueError if there is no run, or its settings are damaged.

    names: settings of the program's own that are required.
    """
    path = run / SETTINGS
    if not os.path.lexists(path):
        if (run / "config.json").is_file():
            raise ValueError(f"{run} holds a published model, not a run: gpt2.py or bert.py --pretrained makes one")
        raise ValueError(f"{run} holds no run ({SETTINGS} is missing)")
    content = read_json(path, ValueError)
    settings = {name: value for name, value in content.items() if name not in (VERSION, "files", "sha256")}
    if missing := [name for name in (*NAMES, *names) if name not in settings]:
        raise ValueError(f"{path} is damaged: {', '.join(missing)} missing")
    for name, examples in NAMES.items():
        _expect_like(run, name, settings[name], examples)
    _expect_like(run, "made_by", settings.get("made_by"), ("", None))
    return settings


def saved_settings(
    run: Path, name: str, presets: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """All settings of a run of program `name`, with defaults for options that are newer than the run. Raises ValueError
    if they are damaged, or belong to another program.
    """
    settings, defaults = read_settings(run), _defaults(options)
    if settings["program"] != name:
        raise ValueError(f"--resume: {run} is a run of {printable(settings['program'])}, not of {name}")
    preset = presets.get(settings["preset"], presets["small"])
    required = [name for name in preset if defaults.get(name) is None]
    settings = read_settings(run, *required)
    settings |= {name: value for name, value in defaults.items() if name not in settings}
    _check_settings(run, settings, presets, options)
    return settings


def _check_settings(
    run: Path,
    settings: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise ValueError unless every setting has its type in the presets, or the type of the program's option."""
    for name, value in settings.items():
        examples = [preset[name] for preset in presets.values() if name in preset]
        if examples and name not in map(_setting, options):
            _expect_like(run, name, value, examples, low=min(0, *(e for e in examples if type(e) is int), 0))
    for option, described in options.items():
        name, value = _setting(option), settings[_setting(option)]
        action = described.get("action", "store")
        if "nargs" in described or action not in ("store", "store_true", argparse.BooleanOptionalAction):
            continue  # a list, or whatever the program's own action makes
        if value not in (None, *described.get("choices", (value,))):
            known = ", ".join(map(str, described["choices"]))
            raise ValueError(f"{run / SETTINGS} is damaged: {name} is {shown(value)}, expected one of {known}")
        kind = described.get("type", str) if action == "store" else bool
        examples = [preset[name] for preset in presets.values() if name in preset]
        if kind in (bool, int, float, str):  # and not a function of the program's own
            _expect_like(run, name, value, [kind(), described.get("default"), None, *examples], low=-(2**63))


def _expect_like(run: Path, name: str, value: Any, examples: Collection[Any], low: int = 0) -> None:
    """Raise ValueError unless `value` is of the same type as one of the examples, a whole number is not less than
    `low` and not too large, and a text is not too long. An infinite number is right if one of the examples is.
    """
    kinds = {list if isinstance(example, tuple) else type(example) for example in examples}  # as JSON gives it back
    high = LIMITS.get(name, 2**63 - 1)
    if type(value) is int and int in kinds:
        right = low <= value <= high
    elif type(value) in (int, float) and float in kinds:
        right = is_number(value) or any(value == example for example in examples)
    else:
        right = type(value) in kinds and not (isinstance(value, str) and len(value) > 4096)  # longer than any path
    if not right:
        words = {
            str: "text of at most 4,096 characters",
            int: f"a whole number from {low} to {high:,}",
            float: "a finite number",
            bool: "true or false",
            list: "a list",
            dict: "an object",
            type(None): "null",
        }
        expected = " or ".join(word for kind, word in words.items() if kind in kinds)
        raise ValueError(f"{run / SETTINGS} is damaged: {name} is {shown(value)}, expected {expected}")


def _parser(
    name: str,
    description: str,
    presets: Collection[str],
    options: Mapping[str, Mapping[str, Any]],
    without: Collection[str] = (),
) -> CommandLine:
    number: dict[str, Any] = {"type": int, "metavar": "N", "min": 1}
    common: dict[str, dict[str, Any]] = {
        "device": dict(default="auto", help="auto, cpu, gpu or gpu:1 (default: a GPU if one works)"),
        "data": dict(metavar="PATH", help="a local archive, file or folder, instead of a download"),
        "preset": dict(choices=presets, help="sizes and settings (default: small)"),
        "steps": dict(**number, max=MAX_STEPS, help="training steps, instead of the preset's number"),
        "seed": dict(**SEED, help="random seed for weights, batches and dropout (default: 0)"),
        "out": dict(metavar="DIR", help=f"folder of the run (default: runs/{name}, numbered)"),
        "resume": dict(metavar="DIR", help="continue the run in this folder"),
        "continue": dict(
            action="store_true", dest="go_on", help="continue the run in the folder of --out, if there is one"
        ),
        "replicas": dict(**number, max=MAX_REPLICAS, help="threads on a CPU (default: one for each core)"),
        "micro-batch": dict(**number, max=2**31 - 1, help="rows computed at once (default: automatic)"),
        "estimate": dict(action="store_true", help="print how much memory the run will take, and stop"),
        "tensorboard": dict(action="store_true", default=None, help="log to TensorBoard too"),
    }
    parser = CommandLine(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(data=None, estimate=False, go_on=False)
    described = {option: common[option] for option in common if option not in without}
    described |= {option: {**arguments, "default": None} for option, arguments in options.items()}
    for option, arguments in described.items():
        parser.add_argument(f"--{option}", **arguments)
    return parser


def _setting(option: str) -> str:
    return option.replace("-", "_")


def _option(setting: str) -> str:
    return setting.replace("_", "-")


def _check_presets(presets: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError unless there is a preset "small", and each has "steps"."""
    if "small" not in presets:
        raise ValueError(f"presets: expected one named small, got {', '.join(presets) or 'none'}")
    for name, preset in presets.items():
        if "steps" not in preset:
            raise ValueError(f"presets: {name} has no steps")


def _defaults(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {_setting(option): described.get("default") for option, described in options.items()}


def _check_folder(run: Path) -> None:
    """Refuse a folder that another process uses or that cannot be written to, before any data is read."""
    with locked(run):
        pass


def _unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that holds no run."""
    number, candidate = 1, folder
    while os.path.lexists(candidate / SETTINGS) or holds_run(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate

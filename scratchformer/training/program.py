"""What the example programs share: their options, the folder of a run, and errors as one line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..backend import Device, cores, get_device
from ..data.files import replacing
from .snapshot import holds_run

SETTINGS = "settings.json"
# Names that every settings.json has.
NAMES = ("program", "preset", "seed", "steps", "data", "replicas", "micro_batch", "tensorboard")
# Options that a run keeps, so that --resume takes none of them.
KEPT = ("preset", "seed", "out", "replicas", "micro_batch", "tensorboard")


# What a run does not keep.
PASSING = ("device", "out", "resume", "estimate")


class Run(argparse.Namespace):
    """The settings of a run: those of the preset, overridden by the options, and those of PASSING."""

    device: Device
    out: Path
    resume: bool
    estimate: bool

    def replicas_on_device(self) -> dict[str, int | None]:
        """The arguments of `Replicas`."""
        return {"count": self.replicas if self.device.index is None else 1, "micro_batch": self.micro_batch}

    def save(self) -> None:
        """Write the settings to the run's folder: for `train` to call when it is about to begin (`on_start`)."""
        settings = {name: value for name, value in vars(self).items() if name not in PASSING}
        self.out.mkdir(parents=True, exist_ok=True)
        with replacing(self.out / SETTINGS) as unfinished:
            unfinished.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def start_run(name: str, description: str, presets: Mapping[str, Mapping[str, Any]], argv: list[str] | None) -> Run:
    """Parse the command line of an example program; with --resume, read the settings from the run's folder.

    A resumed run goes on as it began: of the other options only --device, --data and --steps may be given then.
    Raises ValueError if the folder already holds a run, or with --resume if it holds none.
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
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps: expected at least 1, got {args.steps}")
    if args.seed is not None and args.seed < 0:
        raise ValueError(f"--seed: expected a number >= 0, got {args.seed}")
    for option, value in (("--replicas", args.replicas), ("--micro-batch", args.micro_batch)):
        if value is not None and value < 1:
            raise ValueError(f"{option}: expected at least 1, got {value}")

    kept = {name: value for name in KEPT if (value := getattr(args, name)) is not None}
    device = get_device(args.device)
    if args.resume is not None:
        if kept:
            options = ", ".join("--" + name.replace("_", "-") for name in kept)
            raise ValueError(f"--resume: the run goes on as it began, so leave out {options}")
        out = Path(args.resume)
        settings = read_settings(out)
        if settings["program"] != name:
            raise ValueError(f"--resume: {out} is a run of {settings['program']}, not of {name}")
        settings = read_settings(out, *presets["small"])
    else:
        out = Path(kept.pop("out", None) or _unused(Path("runs") / name))
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out: {out} is no folder")
        if holds_run(out):
            raise ValueError(f"{out} holds a run: continue it with --resume {out}, or choose another --out")
        settings = {"program": name, "preset": "small", "seed": 0, "data": None}
        settings |= {"replicas": cores(), "micro_batch": None, "tensorboard": False, **kept}
        settings |= presets[settings["preset"]]
    settings |= {key: value for key in ("steps", "data") if (value := getattr(args, key)) is not None}
    if settings["data"] and Path(settings["data"]).exists():
        settings["data"] = str(Path(settings["data"]).absolute())
    print(f"{name}: preset {settings['preset']}, {settings['steps']} steps on {device}, run in {out}", flush=True)
    return Run(**settings, device=device, out=out, resume=args.resume is not None, estimate=args.estimate)


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


def _unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that holds no run."""
    number, candidate = 1, folder
    while (candidate / SETTINGS).exists() or holds_run(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def run_program(program: Callable[[], None]) -> None:
    """Run a program's main function: a mistake of the user's or of the data ends it with one line and exit status 1."""
    try:
        program()
    except BrokenPipeError:  # the reader of standard output, such as `head`, has gone
        sys.stderr.close()
        sys.exit(1)
    except (ValueError, TypeError, IndexError, OSError, RuntimeError, ImportError, MemoryError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as saved:  # by `train`, with the word that a snapshot was saved, or by anything else
        sys.exit(f"interrupted; {saved}: continue with --resume" if saved.args else "interrupted")

"""The start of programs, and the scoring of a run by the program that made it.

A program is a file with a function `main(run)`, which `start` calls. These names in the file are looked up:

PRESETS: settings by name; one of them is "small", the default, and each has "steps".
OPTIONS: the program's own options; see `settings.start_run`.
check(run): raises ValueError for options that exclude each other, before any data is read.
data(run): the data, an object with a `fingerprint`, and a `vocabulary` if there is one; see `Run.load`.
model(run, data): a new model.
score(run, replicas, data, part): the scores of `replicas.model` on "validation" or "test", a dict of numbers.

`scratchformer evaluate` uses the last three, so `main` should use them too. The name of a program is that of its file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..backend import CPU, get_device
from ..parallel.ranks import Ranks
from ..parallel.replicas import Replicas
from ..shell.process import run_program
from ..shell.text import printable
from .examples import is_example
from .readers import mean_snapshot
from .run import Estimated, Run, as_text
from .settings import program_options, read_settings, saved_settings, start_run
from .snapshot import BEST, LAST, NotImported, load_file


def start(main: Callable[[Run], Any], argv: list[str] | None = None) -> None:
    """Run a program; a user's mistake ends it with a one-line message."""
    run_program(lambda: run_main(main, argv))


def run_main(main: Callable[[Run], Any], argv: list[str] | None = None) -> None:
    """Run a program with this command line, in each of its ranks; errors are raised."""
    names = main.__globals__
    name, presets, options = name_of(names), names.get("PRESETS", {}), names.get("OPTIONS", {})
    with Ranks.find() as ranks:
        ranks.expect_same_program(sys.argv[1:] if argv is None else argv)
        arguments = ranks.from_first(lambda: start_run(name, names.get("__doc__") or "", presets, argv, options))
        run = make_run(name, ranks=ranks, **arguments)
        run.settings["made_by"] = source_of(names)
        if ranks.size > 1:
            print(ranks.places())
        ranks.from_first(lambda: check(run, names.get("check")))
        started = time.perf_counter()
        try:
            main(run)
        except Estimated:
            return
        print(f"{name}: {(time.perf_counter() - started) / 60:.1f} minutes\n", flush=True)


def make_run(name: str, settings: dict[str, Any], attributes: Mapping[str, Any], **arguments: Any) -> Run:
    """The run of a program."""
    run = Run(**arguments, **settings)
    run.name = name
    vars(run).update(attributes)
    return run


def check(run: Run, check_options: Callable[[Run], Any] | None) -> None:
    """Raise ValueError for options that exclude each other."""
    if "muon_lr" in run.given and run.optimizer != "muon":
        raise ValueError("--muon-lr: applies only to --optimizer muon, so add it or leave --muon-lr out")
    if check_options is not None:
        check_options(run)


def open_run(run: Path, names: Mapping[str, Any], device: str, data: str | None, ranks: Ranks) -> Run:
    """The run in folder `run`, of the program with these names, for scoring rather than training.

    data: the path of the data, if it has moved. Raises what `saved_settings` raises.
    """
    options = names.get("OPTIONS", {})
    if data is not None and options.get("data", data) is None:
        raise ValueError(f"--data: {name_of(names)} takes none, so leave it out")
    settings = saved_settings(run, name_of(names), names.get("PRESETS", {}), program_options(options)[0])
    settings |= {"data": data} if data else {}
    return make_run(
        name_of(names), settings, dict(scoring=True), out=run, resume=True, device=get_device(device), ranks=ranks
    )


def stages_to_score(run: Run) -> Iterator[Run]:
    """The stages of a run that have a snapshot; of a run without stages, the run itself."""
    if any((run.out / name).exists() for name in (LAST, BEST)):
        yield run
        return
    chosen = sorted(path.parent.name for path in run.out.glob(f"*/{LAST}"))
    if not chosen:
        raise ValueError(f"{run.out} holds no model yet")
    for name in chosen:
        yield run.stage(name)


def score_lines(
    run: Run, names: Mapping[str, Any], part: str, place: Callable[[Any], Any] | None = None
) -> Iterator[str]:
    """One line for each scored stage: the scores of its best model on a part, "validation" or "test".

    place: called with each model before it is scored, for example to round its weights; returns the model to score.
    """
    data = run.load(names["data"])
    for stage in stages_to_score(run):
        model = names["model"](stage, data).to(run.device)
        stage.load_weights(model, mean_snapshot(stage.out))
        run.ranks.expect_same_bits("parameters", model.flat.data)
        model = model if place is None else place(model)
        count = run.ranks.cores() if run.device is CPU else 1
        options = {name: getattr(run, name) for name in ("micro_batch", "micro_batches", "ranks")}
        with Replicas(model, count, **options) as replicas:
            head = f"{stage.stage_name}: " if stage.stage_name else ""
            yield f"{head}{part}: {as_text(names['score'](stage, replicas, data, part))}"


# Where a program is


def name_of(names: Mapping[str, Any]) -> str:
    """The name of a program, from the names in its file."""
    return Path(names.get("__file__") or "program").stem


def source_of(names: Mapping[str, Any]) -> str | None:
    """Where a program is: the name of a module that Python can import, or the path of a script."""
    if (spec := names.get("__spec__")) is not None:
        return spec.name
    file = names.get("__file__")
    return None if file is None else str(Path(file).absolute())


def find_program(run: Path, file: str | None = None) -> dict[str, Any]:
    """The names in the program that made the run in folder `run`: from `file`, or from the source that the run's
    settings name.

    Loading a program executes its code, and the settings may come from a stranger. So without `file` it must be one of
    the package's examples, or in a module that is imported already. Raises NotImported if `file` is needed,
    ValueError if it is not a program.
    """
    names = vars(load_source(run, read_settings(run), file))
    if missing := [name for name in ("data", "model", "score") if not callable(names.get(name))]:
        where = names.get("__file__") or names["__name__"]
        raise ValueError(f"{where} has no function {missing[0]}: name the file of the run's program, --program FILE")
    return names


def load_source(run: Path, settings: Mapping[str, Any], file: str | None = None) -> ModuleType:
    """The module of the program of a run: see `find_program`."""
    if file is not None:
        return load_file(file)
    source = str(settings.get("made_by"))
    if isinstance(imported := sys.modules.get(source), ModuleType):
        return imported
    if is_example(Path(source)):
        return load_file(source)
    raise NotImported(f"{run} was made by {printable(source)}, which is executed only if you name it with --program")


def file_of(run: Path) -> str:
    """The file of the program that made a run, for a command; "FILE" if the run does not say, or says it strangely."""
    try:
        source = str(read_settings(run if run.is_dir() else run.parent).get("made_by"))
    except ValueError:
        return "FILE"
    return source if source.isprintable() and Path(source).is_file() else "FILE"

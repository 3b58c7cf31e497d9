'''A training program: its command line, its run's folder, and how `scratchformer evaluate` finds it again.

A program defines its data, model and results; everything else is done here and in `Stage`. This one trains a language
model on the text given as --data:

    """Train a small language model on a text."""

    from scratchformer.models import LanguageModel
    from scratchformer.training import LanguageProgram


    class Poems(LanguageProgram):
        name = "poems"
        description = __doc__
        presets = {
            "small": dict(d_model=64, heads=4, depth=2, context=64, batch_size=16, lr=1e-3, warmup=50, steps=500)
        }

        def make_model(self, key):
            return LanguageModel(256, key=key, **self.sizes("d_model", "heads", "depth", "context"))


    if __name__ == "__main__":
        Poems.main()

It has all the common options (`python poems.py --help`), and `scratchformer plot` and `generate` work on its runs, as
does `scratchformer evaluate RUN --program poems.py`. A program for other data derives from `Program` and defines
`load`, `make_batches`, `make_model`, `evaluate` (the scores on a part of the data) and `identity` (what identifies the
data). See examples/digits.py.
'''

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from ..backend import CPU
from ..parallel.ranks import Ranks
from ..parallel.replicas import Replicas
from ..shell.files import expect_no_link, locked
from ..shell.process import run_program
from ..shell.text import printable, shown
from .examples import examples, is_example
from .readers import load_vocabulary, mean_snapshot, vocabulary_file
from .settings import Run, open_run, read_settings, start_run
from .snapshot import LAST, NotImported, load_file, load_snapshot
from .stage import Stage

PACKAGE = Path(__file__).parents[2]  # the folder that holds this package, and in a checkout the examples too


class Program(Stage):
    """A training program; `main` is its main function. The docstring of this module shows how to write one.

    name: the default folder of a run is runs/NAME. description: for --help. presets: settings by name; one of them is
    "small", the default. Every preset has "steps"; the defaults of `Stage` also read "lr" and "warmup". options,
    passing, without: see `start_run`.
    """

    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    passing: ClassVar[Collection[str]] = ()
    without: ClassVar[Collection[str]] = ()
    vocabulary: Any = None  # set by `load` if there is one; saved with the run
    vocabulary_of_first: Any = None  # set in the other ranks

    def check(self) -> None:
        """Raise ValueError for options that exclude each other, before any data is read."""

    def expect_final(self, stage: str, later: Iterable[str]) -> None:
        """Raise ValueError if a stage would go on although one of the `later` stages has started from its model."""
        started = [str(self.run.out / name) for name in later if (self.run.out / name / LAST).exists()]
        done = load_snapshot(self.run.out / stage / LAST).state["step"] if started else self.run.steps
        if done < self.run.steps:
            folders = " and ".join(started)
            raise ValueError(
                f"--steps: {stage} would go on to step {self.run.steps}, but the models in {folders} have started from "
                f"its step {done}: remove them, add --steps {done}, or begin a new run"
            )

    def check_all(self) -> None:
        if "muon_lr" in self.run.given and not self.with_muon:
            raise ValueError("--muon-lr: applies only to --optimizer muon, so add it or leave --muon-lr out")
        self.check()

    def load(self) -> None:
        """Read the data."""

    def stages(self) -> list[Stage]:
        """The stages to train, in order."""
        return [self]

    def scored_stages(self) -> list[Stage]:
        """The stages whose models `scratchformer evaluate` scores."""
        return [self]

    @classmethod
    def main(cls) -> None:
        """Run the program; a user's mistake ends it with a one-line message."""
        run_program(cls.start, needs_output=False)

    @classmethod
    def start(cls, argv: list[str] | None = None) -> None:
        """Run the program with this command line; errors are raised."""
        with Ranks.find() as ranks:
            cls.start_in(ranks, argv)

    @classmethod
    def start_in(cls, ranks: Ranks, argv: list[str] | None = None) -> None:
        """`start`, as one of several ranks."""
        ranks.expect_same_program(sys.argv[1:] if argv is None else argv, files_of(cls))
        description = cls.description or cls.__doc__ or ""
        run = ranks.from_first(
            lambda: start_run(cls.name, description, cls.presets, argv, cls.options, cls.passing, cls.without)
        )
        run.made_by = source_of(cls)
        run.ranks = ranks
        if ranks.size > 1:
            print(ranks.places())
        stages = cls._loaded(run).stages()  # of an ensemble, the program is the first model, and is to be freed too
        ranks.from_first(lambda: [expect_no_link(stage.out) for stage in stages if stage.folder])
        if run.estimate:
            return stages[0].fit()
        several = any(stage.folder for stage in stages)  # `train` locks the folder of a single stage
        with ExitStack() as opened:
            if several:
                ranks.from_first(lambda: opened.enter_context(locked(run.out)))
            for stage in one_by_one(stages):
                started = time.perf_counter()
                stage.fit()
                print(f"{stage.folder or cls.name}: {(time.perf_counter() - started) / 60:.1f} minutes\n", flush=True)

    @classmethod
    def _loaded(cls, run: Run) -> Self:
        """The program of a run, with its data; rank 0 has checked the options, and all have its vocabulary."""
        program, ranks = cls(run), run.ranks
        ranks.from_first(program.check_all)
        ranks.from_first(program.load)
        vocabulary = ranks.from_first(lambda: program.vocabulary)
        if not ranks.first:
            program.vocabulary_of_first = vocabulary
            program.load()
        return program

    @classmethod
    def open(cls, run: Path, device: str, data: str | None = None, ranks: Ranks | None = None) -> Self:
        """The program of a run, with its data loaded, for scoring its model, on these ranks."""
        if data is not None and "data" in cls.without:
            raise ValueError(f"--data: {cls.name} takes none, so leave it out")
        program = cls(open_run(cls.name, cls.presets, cls.options, run, device, data))
        program.run.ranks = ranks or Ranks()
        program.load()
        return program

    def scores(self, part: str) -> Iterator[str]:
        """One line for each scored stage: the scores of its best model on a part, "validation" or "test"."""
        for stage in one_by_one(self.scored_stages()):
            stage.load_weights(mean_snapshot(stage.out))
            self.run.ranks.expect_same_bits("parameters", stage.model.flat.data)
            count = self.run.ranks.cores() if self.run.device is CPU else 1
            own = {name: getattr(self.run, name) for name in ("micro_batch", "micro_batches", "ranks")}
            with Replicas(stage.model, count, **own) as replicas:
                yield f"{stage.heading}{part}: {stage.summary(replicas, part)}"

    def saved_vocabulary(self, kind: type) -> Any:
        """The saved vocabulary, of class `kind`, when a run is resumed or scored; None for a new run.

        Of several ranks, all but rank 0 get its vocabulary: another one might be learned from the same data.
        kind: `Vocabulary`, `Subwords`, or a class with the same `load`, `save` and `fingerprint`.
        """
        if self.vocabulary_of_first is not None:
            return self.vocabulary_of_first
        return load_vocabulary(self.run.out, self.run.state, kind) if self.run.resume else None

    def save(self) -> None:
        if self.vocabulary is not None and not self.run.resume:
            self.vocabulary.save(vocabulary_file(self.run.out, type(self.vocabulary)))
        super().save()


def one_by_one(stages: list[Stage]) -> Iterator[Stage]:
    """Each stage in turn. The list is emptied on the way, so that one model is freed before the next is made."""
    while stages:
        yield stages.pop(0)


def files_of(program: type[Program]) -> set[Path]:
    """The files that define a program's class and those that it inherits from, outside the package."""
    modules = (sys.modules.get(kind.__module__) for kind in program.__mro__)
    files = {Path(file).resolve() for module in modules if (file := getattr(module, "__file__", None))}
    return {file for file in files if file.suffix == ".py" and PACKAGE / "scratchformer" not in file.parents}


def source_of(program: type[Program]) -> str | None:
    """Where a program's class is defined: the name of a module that Python can import, or the path of a script."""
    module = sys.modules.get(program.__module__)
    if (spec := getattr(module, "__spec__", None)) is not None:
        return spec.name
    file = getattr(module, "__file__", None)
    return None if file is None else str(Path(file).absolute())


def find_program(run: Path, file: str | None = None) -> type[Program]:
    """The program that made the run in folder `run`: from `file`, or from the source that the run's settings name.

    Loading a program executes its code, and the settings may come from a stranger. So without `file` it must be one of
    the package's examples, or in a module that is imported already. Raises NotImported if `file` is needed,
    ValueError if the program is not in it.
    """
    settings = read_settings(run)
    return program_in(load_source(run, settings, file), settings["program"])


def program_in(module: ModuleType, name: str) -> type[Program]:
    """The program with this name in a module. Raises ValueError if there is none."""
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, Program) and found.name == name:
            return found
    where = getattr(module, "__file__", None) or module.__name__
    raise ValueError(f"{where} has no program {shown(name)}: name the file that has it, --program FILE")


def load_source(run: Path, settings: Mapping[str, Any], file: str | None = None) -> ModuleType:
    """The module that defines the program of a run: see `find_program`."""
    if file is not None:
        return load_file(file)
    source, name = settings.get("made_by"), settings["program"]
    if isinstance(imported := sys.modules.get(str(source)), ModuleType):
        return imported
    if source is None and name in examples():  # a run of an earlier version
        return load_file(examples()[name])
    if source is None:
        raise NotImported(f"{run} does not say in which file its program {shown(name)} is: add --program FILE")
    path, source = Path(source), printable(source)
    hint = f"add --program FILE, with the file of {shown(name)}"
    if all(map(str.isidentifier, source.split("."))):
        raise NotImported(f"{run}: its program is in the module {source}, which is not imported: {hint}")
    if not path.is_file():
        raise NotImported(f"{run}: its program {source} is not a file here: {hint}")
    if is_example(path):
        return load_file(path)
    came = ", which came with it" if run.resolve() in path.resolve().parents else ""
    raise NotImported(f"{run} was made by {source}{came}; to execute that file, name it with --program")


def file_of(run: Path) -> str:
    """The file of the program that made a run, for a command; "FILE" if the run does not say, or says it strangely."""
    try:
        source = str(read_settings(run if run.is_dir() else run.parent).get("made_by"))
    except ValueError:
        return "FILE"
    return source if source.isprintable() and Path(source).is_file() else "FILE"

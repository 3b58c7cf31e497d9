"""The command `scratchformer learn`."""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..shell.files import replacing
from .record import Progress, find, write

if TYPE_CHECKING:
    from rich.console import Console


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `learn` with its own commands to the parser of `scratchformer`."""
    learn = commands.add_parser("learn", help="exercises: derive and write gradients, with checks that explain")
    learn.set_defaults(run=overview)
    add_folder(learn)
    parts = learn.add_subparsers(metavar="COMMAND")

    start = parts.add_parser("start", help="write the file of an exercise (default: the next one)")
    start.add_argument("name", nargs="?", metavar="NAME", help='an exercise (default: the next one), or "all"')
    start.add_argument(
        "dir", nargs="?", metavar="DIR", default=argparse.SUPPRESS, help="folder for the exercises (default: exercises)"
    )
    add_folder(start)
    start.set_defaults(run=run_start)

    for name, run, text in (
        ("check", run_check, 'check your answer (default: the file that you saved last; "all": all that you started)'),
        ("hint", run_hint, "show the next of three hints"),
        ("solution", run_solution, "show the solution and the library's derivation"),
        ("reset", run_reset, "start an exercise over; your file is kept under another name"),
    ):
        part = parts.add_parser(name, help=text)
        part.add_argument("name", nargs="?", metavar="NAME", help="an exercise (default: the file that you saved last)")
        add_folder(part)
        part.set_defaults(run=run)

    watch = parts.add_parser("watch", help="check a file whenever you save it")
    add_folder(watch)
    watch.set_defaults(run=run_watch)


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", metavar="DIR", default=argparse.SUPPRESS, help="folder of your exercises (default: . or exercises)"
    )


def opened(args: argparse.Namespace) -> Progress:
    return find(getattr(args, "dir", None))


def overview(args: argparse.Namespace) -> None:
    """Print all exercises, one on a line, with what was done."""
    from rich.markup import escape

    from .course import CHAPTERS, NAMES, exercise

    progress, out = opened(args), console()
    number, width = 0, max(map(len, NAMES))
    for chapter, names in CHAPTERS.items():
        out.print(f"[bold]{chapter}[/]")
        for name in names:
            number += 1
            each = exercise(name)
            row = f"{number:3}  {name:<{width}}  [dim]{each.kind:<11}[/]{escape(each.title)}"
            out.print(f" {mark(progress, name)}{row}{note(progress, name)}", soft_wrap=True)
    passed = sum(progress.of(name).passed for name in NAMES)
    out.print(f"\n{passed} of {len(NAMES)} done", end="")
    following = next_step(progress)
    out.print(f"; next: [bold]{following}[/]" if following else ", all of them!")


def mark(progress: Progress, name: str) -> str:
    if progress.of(name).passed:
        return "[green]✓[/]"
    return "[yellow]…[/]" if progress.started(name) else "[dim]·[/]"


def note(progress: Progress, name: str) -> str:
    """What help the student took, in words."""
    record = progress.of(name)
    help_taken = [f"{record.hints} hint{'s' * (record.hints > 1)}"] * bool(record.hints) + [
        "solution seen"
    ] * record.solution
    return f"  [dim]({', '.join(help_taken)})[/]" if help_taken else ""


def run_start(args: argparse.Namespace) -> None:
    from .course import NAMES, exercise

    progress, out = opened(args), console()
    names = NAMES if args.name == "all" else [args.name or next_name(progress) or NAMES[0]]
    exercises = [exercise(name) for name in names]
    with progress.changing():
        new = [each for each in exercises if not progress.started(each.name)]
        for each in new:
            write(progress.path(each.name), each.start)
    for each in exercises:
        path = progress.path(each.name)
        if each not in new:
            out.print(f"{path} exists already; `scratchformer learn reset {each.name}` starts it over", markup=False)
            continue
        if len(exercises) == 1:
            out.print(f"[bold]{each.title}[/]\n")
            out.print(each.task + "\n", markup=False)
        out.print(f"{path}", markup=False)
    if len(exercises) == 1:
        there = f" --dir {shlex.quote(args.dir)}" if progress.folder != find().folder else ""
        then = f"Open it in your editor, then: scratchformer learn check{there} (or watch{there})"
        out.print(then, markup=False)


def run_check(args: argparse.Namespace) -> None:
    from .course import NAMES

    progress = opened(args)
    started = [name for name in NAMES if progress.started(name)]
    names = started if args.name == "all" and started else [chosen(progress, None if args.name == "all" else args.name)]
    passed = [check_one(progress, name) for name in names]
    if any(passed):
        print_next(progress)
    if not all(passed):
        sys.exit(1)


def check_one(progress: Progress, name: str) -> bool:
    """Check one exercise and print the verdict; remember it if it is passed. Returns whether it is."""
    from ..generation import printable
    from .child import grade_apart

    out = console()
    verdict = grade_apart(name, progress.path(name), show)
    if not verdict.passed:
        out.print(f"[red]✗[/] [bold]{name}[/]")
        out.print(printable(indented(verdict.message)), markup=False)  # what an answer raises may have any characters
        return False
    out.print(f"[green]✓[/] [bold]{name}[/]  {verdict.message}".rstrip())
    with progress.changing():
        progress.of(name).passed = True
    return True


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def print_next(progress: Progress) -> None:
    if following := next_step(progress):
        console().print(f"  next: {following}", style="dim", markup=False)
    else:
        console().print("  That was the last one. Well done!")


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def run_hint(args: argparse.Namespace) -> None:
    progress = opened(args)
    give_hint(progress, chosen(progress, args.name))


def give_hint(progress: Progress, name: str) -> None:
    """Print the hints given so far and one more."""
    from .course import exercise

    hints = exercise(name).hints
    with progress.changing():
        record = progress.of(name)
        record.hints = min(record.hints + 1, len(hints))
    for number, hint in enumerate(hints[: record.hints], 1):
        console().print(f"{name}, hint {number} of {len(hints)}: {hint}", markup=False)


def run_solution(args: argparse.Namespace) -> None:
    from ..notation.run import getdoc
    from .course import exercise

    progress = opened(args)
    name = chosen(progress, args.name)
    each, out = exercise(name), console()
    with progress.changing():
        record = progress.of(name)
        record.solution |= not record.passed
    out.print("\n".join(each.answers), markup=False)
    if each.library is not None:
        out.print(f"\n[bold]The derivation of {each.library.__name__} in the library[/]\n")
        out.print(getdoc(each.library), markup=False)


def run_reset(args: argparse.Namespace) -> None:
    from .course import exercise

    progress = opened(args)
    name = chosen(progress, args.name)
    path = progress.path(name)
    with progress.changing():
        kept = next(kept for i in range(1, 10_000) if not os.path.lexists(kept := path.with_suffix(f".old{i}")))
        with replacing(kept) as copy:  # before it is overwritten, so that a full disk loses nothing
            shutil.copy2(path, copy)
        write(path, exercise(name).start)
        record = progress.of(name)
        record.passed, record.hints = False, 0
    console().print(f"{path} starts over; what you wrote is in {kept}", markup=False)


def run_watch(args: argparse.Namespace) -> None:
    """Check each exercise when its file is saved. h and Enter give a hint, q and Enter stop."""
    from watchfiles import watch

    from .course import NAMES

    progress, out = opened(args), console()
    if not any(map(progress.started, NAMES)):
        raise ValueError(f"no exercises in {progress.folder}: start one with `scratchformer learn start`")
    name = chosen(progress, None)
    out.print(
        f"Watching {progress.folder}: save a file to check it; type h and Enter for a hint, q and Enter to stop",
        markup=False,
    )
    if check_one(progress, name):
        print_next(progress)
    typed = typed_lines()
    for changes in watch(progress.folder, yield_on_timeout=True, rust_timeout=300, raise_interrupt=False):
        while not typed.empty():
            line = typed.get()
            if line == "q":
                return
            if line == "h":
                give_hint(progress, name)
        for path in sorted({Path(path) for _, path in changes}):
            if path.suffix == ".py" and path.stem in NAMES and path.exists():
                name = path.stem
                if check_one(progress, name):
                    print_next(progress)


def typed_lines() -> queue.Queue[str]:
    """A queue of the lines that are typed while the program goes on."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        with open(0, errors="replace", closefd=False) as typed:  # sys.stdin is locked meanwhile, also in a fork
            for line in typed:
                lines.put(line.strip().lower())

    threading.Thread(target=read, daemon=True).start()
    return lines


def chosen(progress: Progress, name: str | None) -> str:
    """The exercise of this name, by default the one that was saved last. Raises ValueError if there is none."""
    from .course import NAMES, exercise

    if name is not None:
        exercise(name)
        if not progress.started(name):
            raise ValueError(f"{progress.path(name)} does not exist: start it with `scratchformer learn start {name}`")
        return name
    started = [each for each in NAMES if progress.started(each)]
    if not started:
        raise ValueError(f"no exercises in {progress.folder}: start one with `scratchformer learn start`")
    return max(started, key=lambda each: progress.path(each).stat().st_mtime_ns)


def next_name(progress: Progress) -> str | None:
    """The exercise after the last one passed; after the end, the first that was left out; None if all are passed."""
    from .course import NAMES

    passed = [progress.of(name).passed for name in NAMES]
    last = max((i for i, done in enumerate(passed) if done), default=-1)
    order = [*range(last + 1, len(NAMES)), *range(last + 1)]
    return next((NAMES[i] for i in order if not passed[i]), None)


def next_step(progress: Progress) -> str:
    """What to do next: the file of the next exercise if it is started, or the command that starts it."""
    name = next_name(progress)
    if name is None:
        return ""
    return str(progress.path(name)) if progress.started(name) else f"scratchformer learn start {name}"


def console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the exercises need rich: pip install rich") from error
    return Console(file=sys.stdout, soft_wrap=True, highlight=False)

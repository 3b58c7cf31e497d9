"""The command `scratchformer learn`."""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..shell.files import replacing
from .course import CHAPTERS, NAMES, exercise
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
    progress = opened(args)
    if args.name == "all":
        for name in NAMES:
            begin(progress, name, task=False)
        return
    begin(progress, args.name or next_name(progress) or NAMES[0])
    there = f" --dir {shlex.quote(args.dir)}" if progress.folder != find().folder else ""
    then = f"Open it in your editor, then: scratchformer learn check{there} (or watch{there})"
    console().print(then, markup=False)


def begin(progress: Progress, name: str, task: bool = True) -> None:
    """Write the file of an exercise, unless it is there, and print its task."""
    each, path, out = exercise(name), progress.path(name), console()
    with progress.changing():
        if begun := progress.started(name):
            out.print(f"{path} exists already; `scratchformer learn reset {name}` starts it over", markup=False)
        else:
            write(path, each.start)
    if task and not begun:
        out.print(f"[bold]{each.title}[/]\n")
        out.print(each.task + "\n", markup=False)
    if not begun:
        out.print(f"{path}", markup=False)


def run_check(args: argparse.Namespace) -> None:
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
    hints = exercise(name).hints
    with progress.changing():
        record = progress.of(name)
        record.hints = min(record.hints + 1, len(hints))
    for number, hint in enumerate(hints[: record.hints], 1):
        console().print(f"{name}, hint {number} of {len(hints)}: {hint}", markup=False)


def run_solution(args: argparse.Namespace) -> None:
    from ..notation.run import getdoc

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
    progress = opened(args)
    reset(progress, chosen(progress, args.name))


def reset(progress: Progress, name: str) -> None:
    """Write the file of an exercise as it was at first, and keep the student's under another name."""
    path = progress.path(name)
    with progress.changing():
        kept = next(kept for i in range(1, 10_000) if not os.path.lexists(kept := path.with_suffix(f".old{i}")))
        with replacing(kept) as copy:  # before it is overwritten, so that a full disk loses nothing
            shutil.copy2(path, copy)
        write(path, exercise(name).start)
        record = progress.of(name)
        record.passed, record.hints = False, 0
    console().print(f"{path} starts over; what you wrote is in {kept}", markup=False)


KEYS = "n next · h hint · l list · c check all · r reset · q quit"


def run_watch(args: argparse.Namespace) -> None:
    """Check each exercise when its file is saved, and do what a key asks for; in a pipe, a line takes a key's place."""
    from watchfiles import watch

    progress = opened(args)
    if not any(map(progress.started, NAMES)):
        raise ValueError(f"no exercises in {progress.folder}: start one with `scratchformer learn start`")
    name, begun = chosen(progress, None), ""
    console().print(f"Watching {progress.folder}: save a file to check it", markup=False)
    with typed_keys() as typed:
        screen(progress, name)
        for changes in watch(progress.folder, yield_on_timeout=True, rust_timeout=300, raise_interrupt=False):
            while not typed.empty():
                match typed.get():
                    case "q":
                        return
                    case "h":
                        give_hint(progress, name)
                    case "l":
                        overview(args)
                    case "c":
                        for each in filter(progress.started, NAMES):
                            check_one(progress, each)
                        print_progress(progress)
                    case "r":
                        begun = name
                        reset(progress, name)
                    case "n":
                        name = next_name(progress, name) or name
                        if progress.started(name):
                            screen(progress, name)
                        else:
                            begun = name
                            begin(progress, name)
            for path in sorted({Path(path) for _, path in changes}):
                if path.suffix == ".py" and path.stem in NAMES:
                    try:
                        text = path.read_text(encoding="utf-8", errors="replace")
                    except OSError:  # it is being replaced, or is no file
                        continue
                    if path.stem != begun or text != exercise(begun).start:  # else it was written here
                        name, begun = path.stem, ""
                        screen(progress, name)


def screen(progress: Progress, name: str) -> None:
    """Clear the terminal, if it is one, and check an exercise."""
    console().clear()
    if check_one(progress, name):
        print_next(progress)
    print_progress(progress)


def print_progress(progress: Progress) -> None:
    """A bar of the exercises that are done, and the keys."""
    done, width = sum(progress.of(name).passed for name in NAMES), len(NAMES)
    bar = "█" * done + "░" * (width - done)
    console().print(f"{bar} {done} of {width} · {KEYS}", style="dim", markup=False)


@contextmanager
def typed_keys() -> Iterator[queue.Queue[str]]:
    """A queue of the keys that are typed while the program goes on; in a pipe, of the first letters of lines."""
    keys: queue.Queue[str] = queue.Queue()

    def read() -> None:
        while typed := os.read(0, 100):
            for line in typed.decode(errors="replace").lower().split("\n"):
                for key in line.strip() if terminal else line.strip()[:1]:
                    keys.put(key)

    terminal = None
    if os.isatty(0):
        with suppress(ImportError):  # Windows has no termios
            import termios
            import tty

            terminal = termios.tcgetattr(0)
            tty.setcbreak(0, termios.TCSADRAIN)
    threading.Thread(target=read, daemon=True).start()
    try:
        yield keys
    finally:
        if terminal:
            termios.tcsetattr(0, termios.TCSADRAIN, terminal)


def chosen(progress: Progress, name: str | None) -> str:
    """The exercise of this name, by default the one that was saved last. Raises ValueError if there is none."""
    if name is not None:
        exercise(name)
        if not progress.started(name):
            raise ValueError(f"{progress.path(name)} does not exist: start it with `scratchformer learn start {name}`")
        return name
    started = [each for each in NAMES if progress.started(each)]
    if not started:
        raise ValueError(f"no exercises in {progress.folder}: start one with `scratchformer learn start`")
    return max(started, key=lambda each: progress.path(each).stat().st_mtime_ns)


def next_name(progress: Progress, after: str = "") -> str | None:
    """The exercise after this one, by default the last one passed, that is not passed; after the end, the first of all;
    None if all are passed.
    """
    passed = [name for name in NAMES if progress.of(name).passed]
    place = NAMES.index(after or [NAMES[-1], *passed][-1]) + 1
    return next((name for name in NAMES[place:] + NAMES[:place] if name not in passed), None)


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

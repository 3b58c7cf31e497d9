"""The command `scratchformer page`."""

from __future__ import annotations

import argparse
import os
import sys
import time
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..shell.files import replacing
from ..shell.text import one_line

if TYPE_CHECKING:
    from ..testing.mutate.run import MutationResult
    from .user_operation import UserOperation

SCALES = (1.0, 4.0, 16.0)  # of arguments that are drawn: the first with which every case is reached


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `page` to the parser of `scratchformer`."""
    command = commands.add_parser("page", help="make a live page, in one file, of an operation of your own")
    command.add_argument(
        "name", metavar="FILE.py[::FUNCTION]", help="the file, which is executed, and so are its tests, test_FILE.py"
    )
    command.add_argument("--out", metavar="FILE.html", help="the page (default: FUNCTION.html beside the file)")
    command.add_argument("--open", action="store_true", help="show the page in a browser")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from ..notation import DerivationError, NotationError, check_derivation
    from .operation_page import page
    from .user_operation import read_operation

    started = time.perf_counter()
    try:
        for scale in SCALES:
            user = read_operation(args.name, scale)
            report = check_derivation(user.op, user.op_backward, *user.args)
            if not report.unreached:
                break
        out = Path(args.out) if args.out else user.file.with_name(f"{user.name}.html")
        expect_place(out)
        if report.unreached:
            cases = "".join(f"\n    {case}" for case in report.unreached)
            raise DerivationError(
                f"{user.name}: no element of the arguments reaches these cases, so they are not checked:{cases}\n"
                f"    {user.name}_case() in the file can return other arguments"
            )
        text = page(user, report, outcomes_of(user))
    except (DerivationError, NotationError) as error:
        sys.exit("\n".join(map(one_line, f"error: {error}".splitlines())))
    with replacing(out) as path:
        path.write_text(text, encoding="utf-8", newline="\n")
    kilobytes, seconds = out.stat().st_size / 1000, time.perf_counter() - started
    equations = len(report.derivation.equations)
    print(
        f"{one_line(str(out))}: {equations} equations, worst error {report.worst:.0e}; {kilobytes:.0f} kB "
        f"in {seconds:.1f} s"
    )
    if args.open:
        webbrowser.open(out.absolute().as_uri())


def expect_place(out: Path) -> None:
    """Raise ValueError unless a page may be written there: over nothing but a page."""
    from .operation_page import GENERATOR

    if out.suffix != ".html":
        raise ValueError(f"--out: expected a file that ends in .html, got {out}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out: expected a file in an existing folder, got {out}")
    if not os.path.lexists(out):
        return
    if not out.is_file() or out.is_symlink():
        raise ValueError(f"--out: expected a file, got {out}, which is a folder or a link")
    with out.open(encoding="utf-8", errors="replace") as file:
        made_here = GENERATOR in file.read(1000)
    if not made_here:
        raise ValueError(f"{out}: was not made by this command: choose another --out")


def outcomes_of(user: UserOperation) -> list[MutationResult] | str:
    """Plant mistakes in the backward and run the tests of its file; or say in a sentence why that cannot be done."""
    from ..testing.mutate.mutants import mutants
    from ..testing.mutate.run import Job, run_jobs
    from ..testing.mutate.targets import find_targets

    tests = tests_of(user.file)
    if not tests:
        return (
            f"No mistakes were planted in the code, since there are no tests of it: `test_{user.file.stem}.py` or "
            f"`{user.file.stem}_test.py`, beside `{user.file.name}` or in `tests`."
        )
    if not hasattr(os, "fork") or find_spec("pytest") is None:
        return "No mistakes were planted in the code, which needs `pytest`, and a system that can fork a process."
    (target,) = find_targets(f"{user.file}::{user.op_backward.__name__}")
    jobs = [Job(target, mutant, tests) for mutant in mutants(target.source, target.name)]
    print(f"Planting {len(jobs)} mistakes in {target.name}, one at a time, for {', '.join(tests)}", flush=True)
    return (
        sorted(run_jobs(jobs, min(os.cpu_count() or 1, len(jobs))), key=lambda outcome: outcome.job.mutant.start)
        if jobs
        else "There is no place in the code for a mistake."
    )


def tests_of(file: Path) -> tuple[str, ...]:
    """The test files of a file: beside it or in the folder `tests` there, with its name."""
    names = (f"test_{file.stem}.py", f"{file.stem}_test.py")
    paths = [folder / name for folder in (file.parent, file.parent / "tests") for name in names]
    return tuple(str(path) for path in paths if path.is_file())

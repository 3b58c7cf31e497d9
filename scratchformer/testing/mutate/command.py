"""The command `scratchformer mutate`: plant mistakes in a backward, run the tests, report what they miss."""

from __future__ import annotations

import json
import os
import random
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from ...shell.progress import on_terminal, progress_bar
from .mutants import mutants
from .run import Job, MutationResult, run_jobs
from .targets import TargetFunction, choose_tests, find_targets


def mutate(
    names: Sequence[str],
    tests: Sequence[str] = (),
    *,
    helpers: bool = False,
    processes: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    only_list: bool = False,
    output: Path | None = None,
) -> bool:
    """Plant mistakes in functions, one at a time, and print those that the tests miss. Returns whether they miss none.

    names: "my_ops.py::cube_backward", "package.module::Layer.backward", or a module for all its backwards. tests:
    arguments of pytest (default: the test files that mention the function). helpers: also plant mistakes in
    the functions of the module that a backward calls. processes: how many run at a time (default: one for each core).
    limit: plant only this many, drawn with `seed`. only_list: print the mistakes and run nothing. output: a JSON file
    for all outcomes. Raises ValueError for a name or tests that are not found, and if the tests fail without a mistake.
    """
    targets = list(dict.fromkeys(target for name in names for target in find_targets(name, helpers)))
    planted = [(target, mutant) for target in targets for mutant in mutants(target.source, target.name)]
    if not planted:
        raise ValueError(f"{', '.join(map(str, targets))}: found no place for a mistake")
    if limit is not None and limit < len(planted):
        chosen = sorted(random.Random(seed).sample(range(len(planted)), limit))
        planted = [planted[i] for i in chosen]
    if only_list:
        for target, mutant in planted:
            print_mistake(target, *mutant[1:3], *mutant.difference(target.source))
        print(f"{len(planted)} mistakes")
        return True
    for_target = {target: tuple(tests) or announce(target) for target in dict.fromkeys(target for target, _ in planted)}
    groups: dict[tuple[str, ...], list[Job]] = {}
    for target, mutant in planted:
        groups.setdefault(for_target[target], []).append(Job(target, mutant, for_target[target]))
    print(f"Planting {len(planted)} mistakes, one at a time.", flush=True)
    start, outcomes = time.perf_counter(), list[MutationResult]()
    try:
        with progress_bar(total=len(planted), unit="mistakes", delay=0, disable=not on_terminal()) as bar:
            for jobs in groups.values():
                for outcome in run_jobs(jobs, min(processes or os.cpu_count() or 1, len(jobs))):
                    outcomes.append(outcome)
                    bar.set_postfix_str(f"{sum(not o.killed for o in outcomes)} missed", refresh=False)
                    bar.update()
    except KeyboardInterrupt:
        report(outcomes, len(planted), time.perf_counter() - start, output)
        raise
    report(outcomes, len(planted), time.perf_counter() - start, output)
    return all(outcome.killed for outcome in outcomes)


def announce(target: TargetFunction) -> tuple[str, ...]:
    """The tests for a function, chosen and shown."""
    tests, word = choose_tests(target)
    print(f"{target}: pytest {shlex.join(tests)}   (the test files that mention {word})")
    return tuple(tests)


def report(outcomes: list[MutationResult], total: int, seconds: float, output: Path | None) -> None:
    """Print each mistake that was missed, and how many were found; write all to the file."""
    outcomes.sort(key=lambda o: (o.job.target, o.job.mutant.start))
    for (target, mutant, _), killed in outcomes:
        if not killed:
            print_mistake(target, mutant.what, mutant.line, *mutant.difference(target.source))
    count, missed = len(outcomes), sum(not outcome.killed for outcome in outcomes)
    late = sum(outcome.killed == "timed out" for outcome in outcomes)
    line = f"\nThe tests found {count - missed} of {count} mistakes and missed {missed}, in {seconds:.0f} s"
    line += f"; for {late} of them the tests did not end" if late else ""
    print(line + (f"; stopped after {count} of {total}" if count < total else ""))
    if output:
        output.write_text(json.dumps(as_data(outcomes), indent=1) + "\n", encoding="utf-8", newline="\n")


def print_mistake(target: TargetFunction, what: str, line: int, before: Sequence[str], after: Sequence[str]) -> None:
    print(f"\n{target.path}:{line} in {target.name}: {what}")
    for sign, lines in ("-", before), ("+", after):
        for text in lines:
            print(f"{sign} {text}")


def as_data(outcomes: Sequence[MutationResult]) -> list[dict[str, object]]:
    """The outcomes for a JSON file."""
    rows: list[dict[str, object]] = []
    for (target, mutant, _), killed in outcomes:
        before, after = mutant.difference(target.source)
        rows.append(
            {"function": str(target), "line": mutant.line, "what": mutant.what, "before": before, "after": after}
            | {"killed": killed}
        )
    return rows

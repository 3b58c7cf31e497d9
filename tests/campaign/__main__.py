"""Try to break scratchformer for as long as one likes: damaged files, bad input, bad arguments, kills.

    python tests/campaign --minutes 10                      # all areas in turn
    python tests/campaign --cases 500 --seed 7 archives     # 500 cases of one area
    python tests/campaign --repeat 123 --seed 7 archives    # one case again, with all that it writes

A case is good if bad input is refused with a message that helps, in time and without much memory, or if it is right and
accepted. Everything else is listed at the end with the command that repeats it, and gives exit status 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from area import GOOD, OUTCOMES, Area
from areas import AREAS
from child import Result, Task, run_all


def main() -> None:
    names = [area.name for area in AREAS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"(default: all) {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=5, help="how long to go on (default: 5)")
    parser.add_argument("--cases", type=int, metavar="N", help="cases of each area, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, metavar="N", help="only case number N")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result to this file")
    args = parser.parse_args()
    if unknown := {*args.areas} - {*names}:
        parser.error(f"no such area: {', '.join(sorted(unknown))}")
    chosen = [area() for area in AREAS if not args.areas or area.name in args.areas]
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        for area in chosen:
            (Path(folder) / area.name).mkdir()
            area.prepare(Path(folder) / area.name)
        results, started = [], time.monotonic()
        for result in run_all(tasks(chosen, args), args.processes):
            results.append(result)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(as_json(result)) + "\n")
            if args.repeat is not None:
                print(f"{result.what}\n{result.verdict}\n{result.seconds:.2f} s, {result.peak >> 20} MB")
    failures = [result for result in results if result.verdict.outcome not in GOOD]
    print_table(chosen, results, time.monotonic() - started)
    print_failures(failures)
    sys.exit(bool(failures))


def tasks(areas: list[Area], args: argparse.Namespace) -> Iterator[Task]:
    """The areas in turn, until the time is over or each has had its number of cases."""
    if args.repeat is not None:
        yield from (Task(area, args.seed, args.repeat) for area in areas)
        return
    end = time.monotonic() + 60 * args.minutes
    for number in range(args.cases) if args.cases else count():
        for area in areas:
            if not args.cases and time.monotonic() > end:
                return
            yield Task(area, args.seed, number)


def print_table(areas: list[Area], results: list[Result], seconds: float) -> None:
    print("".join(f"{title:>10}" for title in ("area", "cases", *OUTCOMES)))
    for area in areas:
        own = [result for result in results if result.task.area is area]
        found = Counter(result.verdict.outcome for result in own)
        print("".join(f"{cell:>10}" for cell in (area.name[:9], len(own), *(found[o] or "" for o in OUTCOMES))))
    print(f"{len(results):,} cases in {seconds:.0f} s")


def print_failures(failures: list[Result]) -> None:
    """One failure of each kind, with the command that repeats it and how many are like it."""
    kinds: dict[tuple, list[Result]] = {}
    for failure in failures:
        text = re.sub(r"\d+|'[^']*'|/\S*", "…", failure.verdict.message)[:60]
        kinds.setdefault((failure.task.area.name, failure.verdict.outcome, text, failure.verdict.where), []).append(
            failure
        )
    for alike in sorted(kinds.values(), key=len, reverse=True):
        task, what, verdict, *_ = alike[0]
        print(f"\n{len(alike)} × {verdict.outcome}: {what}\n    {verdict.message[:300]} {verdict.where}")
        print(f"    python tests/campaign --repeat {task.number} --seed {task.seed} {task.area.name}")


def as_json(result: Result) -> dict:
    task, what, verdict, seconds, peak = result
    return {"area": task.area.name, "seed": task.seed, "number": task.number, "what": what} | (
        verdict._asdict() | {"seconds": round(seconds, 3), "megabytes": peak >> 20}
    )


if __name__ == "__main__":
    main()

"""Try to break scratchformer with damaged files, bad input, bad arguments and kills, for as long as you like.

    python tests/campaign --minutes 10                      # all areas, each for an equal share of the time
    python tests/campaign --cases 500 --seed 7 archives     # 500 cases of one area
    python tests/campaign --repeat 123 --seed 7 archives    # repeat one case and print its outcome

A case is good if bad input is refused in time, with a helpful message and without much memory, or if valid input is
accepted and the result is right. The other cases are failures. They are listed at the end with the commands that repeat
them, and the exit status is then 1. Ctrl-C ends the campaign early and still prints the table.
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
from pathlib import Path

from area import GOOD, OUTCOMES, Area
from areas import AREAS
from child import Result, Task, run_all
from tqdm import tqdm


def main() -> None:
    names = [area.name for area in AREAS]
    default = [area.name for area in AREAS if not area.only_when_named]
    slow = [area.name for area in AREAS if area.slow]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = f"any of {', '.join(names)} (default: {', '.join(default)})"
    parser.add_argument("areas", nargs="*", metavar="AREA", help=which)
    parser.add_argument("--minutes", type=float, default=5, help="how long to run (default: 5)")
    parser.add_argument("--cases", type=int, metavar="N", help="number of cases of each area, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the cases (default: 0)")
    parser.add_argument("--repeat", type=int, metavar="N", help="only case number N")
    parser.add_argument("--processes", type=int, default=2, help="number of cases that run at once (default: 2)")
    parser.add_argument("--quick", action="store_true", help=f"leave out areas with slow cases: {', '.join(slow)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result to this file")
    args = parser.parse_args()
    if unknown := {*args.areas} - {*names}:
        parser.error(f"no such area: {', '.join(sorted(unknown))}")
    names = [name for name in args.areas or default if not (args.quick and name in slow)]
    chosen = [area() for area in AREAS if area.name in names]
    results, turns = [], Turns(chosen, args)
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        for area in chosen:
            (Path(folder) / area.name).mkdir()
            area.prepare(Path(folder) / area.name)
        started = time.monotonic()
        try:
            for result in tqdm(run_all(turns, args.processes), unit=" cases", disable=not sys.stderr.isatty()):
                results.append(result)
                turns.count(result)
                if args.json:
                    with open(args.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(as_json(result)) + "\n")
                if args.repeat is not None:
                    print(f"{result.what}\n{result.verdict}\n{result.seconds:.2f} s, {result.peak >> 20} MB")
        except KeyboardInterrupt:
            print("interrupted")
    failures = [result for result in results if result.verdict.outcome not in GOOD]
    print_table(chosen, results, time.monotonic() - started, args.seed)
    print_failures(failures)
    sys.exit(bool(failures))


class Turns:
    """The tasks, in an order that gives each area an equal share of the time, or the number of cases asked for."""

    def __init__(self, areas: list[Area], args: argparse.Namespace) -> None:
        self.areas, self.args = areas, args
        self.started, self.ended, self.seconds = Counter[Area](), Counter[Area](), Counter[Area]()

    def __iter__(self) -> Iterator[Task]:
        args = self.args
        if args.repeat is not None:
            yield from (Task(area, args.seed, args.repeat) for area in self.areas)
            return
        end = time.monotonic() + 60 * args.minutes
        while waiting := [area for area in self.areas if not args.cases or self.started[area] < args.cases]:
            if not args.cases and time.monotonic() > end:
                return
            area = min(waiting, key=lambda area: (self.spent(area), self.started[area]))
            self.started[area] += 1
            yield Task(area, args.seed, self.started[area] - 1)

    def count(self, result: Result) -> None:
        self.ended[result.task.area] += 1
        self.seconds[result.task.area] += result.seconds

    def spent(self, area: Area) -> float:
        """The seconds that the cases of an area take, where a case that still runs counts as an average one."""
        return self.seconds[area] / max(1, self.ended[area]) * self.started[area]


def print_table(areas: list[Area], results: list[Result], seconds: float, seed: int) -> None:
    print(f"{'area':<13}" + "".join(f"{title:>10}" for title in ("cases", *OUTCOMES)))
    for area in areas:
        own = [result for result in results if result.task.area is area]
        found = Counter(result.verdict.outcome for result in own)
        print(f"{area.name:<13}" + "".join(f"{cell:>10}" for cell in (len(own), *(found[o] or "" for o in OUTCOMES))))
    for area in areas:
        told = [r.verdict for r in results if r.task.area is area and r.verdict.outcome == "accepted"]
        if (messages := [verdict.message for verdict in told if verdict.message]) and (line := area.summary(messages)):
            print(f"{area.name}: {line}")
    print(f"{len(results):,} cases in {seconds:.0f} s, seed {seed}")


def print_failures(failures: list[Result]) -> None:
    """One failure of each kind, with the number of similar ones and the command that repeats it."""
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

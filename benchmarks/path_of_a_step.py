"""The functions and files of the package that one training step of the plain language model passes through.

    SCRATCHFORMER_FAST=0 python benchmarks/path_of_a_step.py            # prints the functions by file
    SCRATCHFORMER_FAST=0 python benchmarks/path_of_a_step.py --calls    # and how often each is called

The step is one of the program `examples/enwik8.py --model plain --optimizer adam`, by one replica, without the extra
`fast`: a step that is neither logged nor scored. What `Run` does between two steps is counted, and the program's
own loop. A lambda counts as a function; a comprehension or generator expression belongs to the function that it is in.
"""

import argparse
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import scratchformer
from scratchformer.training import Run
from scratchformer.training.snapshot import load_file
from scratchformer.training.start import run_main

PACKAGE = str(Path(scratchformer.__file__).parent)
PROGRAM = Path(__file__).parents[1] / "examples" / "enwik8.py"
OPTIONS = "--model plain --optimizer adam --steps 6 --replicas 1 --micro-batch 8"
INNER = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
WARM_UP = 3  # steps in which what is computed once is computed


def path_of_a_step() -> Counter:
    """How often each function of the package is called in one step: (file, line, name) and a number."""
    program, steps, calls = load_file(str(PROGRAM)), Run.steps, Counter()
    code = program.main.__code__
    calls[f"examples/{PROGRAM.name}", code.co_firstlineno, "main"] = 1  # it has the loop

    def note(frame, event, _argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in INNER:
            calls[code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_firstlineno, code.co_qualname] += 1

    def counted(*arguments, **options):
        for number in steps(*arguments, **options):
            sys.setprofile(note if number == WARM_UP else None)  # from one yield to the next
            yield number

    with TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        text = Path(folder, "text")
        text.write_bytes(np.random.default_rng(0).integers(ord("a"), ord("z") + 1, 100_000, np.uint8).tobytes())
        Run.steps = counted
        try:
            run_main(program.main, [*OPTIONS.split(), "--data", str(text), "--out", f"{folder}/run"])
        finally:
            Run.steps = steps
            sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="also print how often each function is called")
    options = parser.parse_args()
    calls = path_of_a_step()
    files = Counter(file for file, _, _ in calls)
    for file, count in sorted(files.items()):
        print(f"{file}: {count}")
        for (where, line, name), times in sorted(calls.items()):
            if where == file and options.calls:
                print(f"    {times:5}  {name}, line {line}")
    print(f"{len(calls)} functions in {len(files)} files, {calls.total()} calls")


if __name__ == "__main__":
    main()

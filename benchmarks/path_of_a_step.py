"""The functions and files of the package that one training step of the plain language model passes through.

    SCRATCHFORMER_FAST=0 python benchmarks/path_of_a_step.py            # prints the functions by file
    SCRATCHFORMER_FAST=0 python benchmarks/path_of_a_step.py --calls    # and how often each is called

The model is that of `examples/enwik8.py --preset small`, trained with Adam on random bytes by one replica, without the
extra `fast`. The loop itself, `step` below, is counted too. A lambda counts as a function; a comprehension or generator
expression belongs to the function that it is in.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import scratchformer
from scratchformer import Key
from scratchformer.data import TextBatches
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, Cosine
from scratchformer.parallel.replicas import Replicas

PACKAGE = str(Path(scratchformer.__file__).parent)
INNER = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
WARM_UP = 3  # steps in which what is computed once is computed


def path_of_a_step() -> Counter:
    """How often each function of the package is called in one step: (file, line, name) and a number."""
    key, data = Key(0), np.random.default_rng(0).integers(0, 256, 100_000)
    model = LanguageModel(256, 128, heads=4, depth=4, context=128, norm="pre", embedding_std=0.02, key=key.fold("w"))
    batches = TextBatches(data, 8, model.context, key.fold("batches"))
    adam, rate = Adam(model.parameters(), lr=2e-3), Cosine(2e-3, 100, 1000, 2e-4)
    calls: Counter = Counter()

    def note(frame, event, _argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith((PACKAGE, __file__)) and code.co_name not in INNER:
            calls[code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_firstlineno, code.co_qualname] += 1

    with Replicas(model, count=1) as replicas:

        def step(number):
            replicas.gradients(batches.batch(number), key.fold("train", number))
            replicas.clip(adam, 1.0)
            adam.lr = rate(number)
            replicas.step(adam)

        for number in range(WARM_UP):
            step(number)
        sys.setprofile(note)
        try:
            step(WARM_UP)
        finally:
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

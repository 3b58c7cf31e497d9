"""Tiny runs of three programs. `python runs.py NAME ARGUMENTS` is `python examples/NAME.py ARGUMENTS` with a tiny model
and with snapshots every few steps; the names "plain" and "xl" are two models of examples/enwik8.py. With
CAMPAIGN_DEATH="12 500" the program kills itself while it writes: see `die_while_writing`.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from scratchformer.training import Run, start
from scratchformer.training.examples import examples
from scratchformer.training.snapshot import load_file

EXAMPLES = examples()
LANGUAGE = dict(d_model=16, heads=2, depth=2, context=32, xl_d_ff=24, batch_size=8)
SIZES: dict[str, dict[str, Any]] = {
    "plain": LANGUAGE | dict(model="plain"),
    "xl": LANGUAGE | dict(model="xl"),
    "translate": dict(d_model=16, heads=2, depth=1, d_ff=32, vocabulary=100, max_length=32, tokens=200, average=3),
    "bert": dict(d_model=16, heads=2, depth=1, max_length=16, vocabulary=60, batch_size=4, short_length=16)
    | dict(tuning_batch_size=8, finetune_epochs=1, scratch_epochs=1),
}
STEPS, DUE = Run.steps, Run.due
WORDS = "a the film story acting plot was is not very good bad dull bright long short never again café straße".split()


def command(name: str, *arguments: object) -> list[str]:
    """The command that starts a program in a process of its own."""
    return [sys.executable, __file__, name, *map(str, arguments)]


def make_data(folder: Path) -> dict[str, Path]:
    """Data for each program, below `folder`."""
    draw = random.Random(0)
    text, sentences, reviews = folder / "text.txt", folder / "sentences", folder / "aclImdb"
    text.write_text(" ".join(draw.choices(WORDS, k=12_000)), encoding="utf-8")
    sentences.mkdir()
    for stem, count in ("train", 100), ("val", 12), ("test_2016_flickr", 12):
        lines = [" ".join(draw.choices(WORDS, k=5)) for _ in range(count)]
        (sentences / f"{stem}.en").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (sentences / f"{stem}.de").write_text("\n".join(lines).upper() + "\n", encoding="utf-8")
    for split, count in ("train", 1300), ("test", 40):
        for kind in "pos", "neg":
            (reviews / split / kind).mkdir(parents=True)
            for number in range(count):
                words = draw.choices(WORDS, k=draw.randrange(3, 12))
                path = reviews / split / kind / f"{number}_{9 if kind == 'pos' else 2}.txt"
                path.write_text(" ".join([kind, *words]), encoding="utf-8")
    return {"plain": text, "xl": text, "translate": sentences, "bert": reviews}


def set_intervals(snapshot_every: int = 3, evaluate_every: int = 7, log_every: int = 1, **others: int) -> None:
    """From here on every run of this process saves, scores and logs this often. others: further options of `steps`."""
    intervals = dict(snapshot_every=snapshot_every, log_every=log_every, **others)
    Run.steps = lambda *args, **options: STEPS(*args, **options | intervals)
    Run.due = lambda run, every: DUE(run, evaluate_every)


def tiny(name: str, sizes: dict[str, Any] | None = None) -> ModuleType:
    """The program of `name`, with these sizes in its default preset."""
    program = load_file(EXAMPLES[{"plain": "enwik8", "xl": "enwik8"}.get(name, name)])
    program.PRESETS["small"].update(SIZES[name] if sizes is None else sizes)
    return program


def die_while_writing(event: int, size: int) -> None:
    """Kill this process at event number `event`: an unfinished file is opened or renamed, or its mode is changed.

    If the event is the opening of a file, the process may still make files of up to `size` bytes. It is killed when a
    file becomes larger, or at the next event.
    """
    count = 0

    def notice(name: str, arguments: tuple) -> None:
        nonlocal count
        if name not in ("open", "os.rename", "os.chmod") or ".unfinished" not in str(arguments[0]):
            return
        count += 1
        if count == event and name == "open":
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the signal when a file becomes larger than allowed
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        elif count >= event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(notice)


def main() -> None:
    name = sys.argv.pop(1)
    set_intervals()
    if death := os.environ.get("CAMPAIGN_DEATH"):
        die_while_writing(*map(int, death.split()))
    start(tiny(name).main)


if __name__ == "__main__":
    main()

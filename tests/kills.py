"""Kill programs at random moments, resume them until they finish, and compare them with uninterrupted runs.

    python tests/kills.py                           # at least ten kills of each program
    python tests/kills.py plain xl --kills 50 --seed 7

The programs are those in examples/, with tiny models: a language model, a Transformer-XL and a translator. A kill may
come while they import modules, read data, train, score or write a file. In the end, weights, moments, the best model,
settings and metrics must be identical bit for bit, except for the speed in the metrics.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scratchformer.training import Run, load_snapshot, read_metrics, start
from scratchformer.training.examples import examples
from scratchformer.training.settings import read_settings
from scratchformer.training.snapshot import load_file

LANGUAGE = dict(d_model=16, heads=2, depth=2, context=32, xl_d_ff=24, batch_size=8)
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("enwik8", LANGUAGE | dict(model="plain")),
    "xl": ("enwik8", LANGUAGE | dict(model="xl")),
    "translate": (
        "translate",
        dict(d_model=16, heads=2, depth=1, d_ff=32, vocabulary=100, max_length=32, tokens=200, average=3),
    ),
}
STEPS = 20
WORDS = "a the film story acting plot was is not very good bad dull bright long short never again café straße".split()


def make_data(folder: Path) -> dict[str, Path]:
    """Write a small data set for each program into `folder`."""
    draw = random.Random(0)
    text, sentences = folder / "text.txt", folder / "sentences"
    text.write_text(" ".join(draw.choices(WORDS, k=12_000)), encoding="utf-8")
    sentences.mkdir()
    for stem, count in ("train", 100), ("val", 12), ("test_2016_flickr", 12):
        lines = [" ".join(draw.choices(WORDS, k=5)) for _ in range(count)]
        (sentences / f"{stem}.en").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (sentences / f"{stem}.de").write_text("\n".join(lines).upper() + "\n", encoding="utf-8")
    return {"plain": text, "xl": text, "translate": sentences}


def run_tiny(name: str) -> None:
    """Run a program in this process, with snapshots every 3 steps and scores every 7."""
    steps, due = Run.steps, Run.due
    Run.steps = lambda *args, **options: steps(*args, **options | dict(snapshot_every=3, log_every=1))
    Run.due = lambda run, every: due(run, 7)
    file, sizes = PROGRAMS[name]
    program = load_file(examples()[file])
    program.PRESETS["small"].update(sizes)
    start(program.main)


def begin(name: str, data: Path, run: Path) -> subprocess.Popen:
    """Start a program in a process of its own. It resumes the run in this folder if there is one."""
    new = ["--out", run, "--data", data, "--steps", STEPS, "--replicas", 2]
    arguments = ["--resume", run] if (run / "settings.json").exists() else new
    command = [sys.executable, __file__, "--run", name, *map(str, arguments), "--device", "cpu"]
    with open(run.with_suffix(".output"), "w", encoding="utf-8") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def finish(name: str, data: Path, run: Path) -> None:
    if begin(name, data, run).wait():
        raise SystemExit(f"{name} failed:\n{run.with_suffix('.output').read_text(encoding='utf-8')}")


def content(path: Path) -> Any:
    """The part of a file that must be the same in both runs."""
    if path.suffix == ".safetensors":
        found = load_snapshot(path)
        parts = [
            {name: (a.dtype, a.shape, a.tobytes()) for name, a in part.items()}
            for part in (found.model, found.optimizer, found.batches)
        ]
        return found.model_class, found.config, found.state, parts
    if path.name == "metrics.jsonl":
        return [{n: value for n, value in record.items() if n != "tokens_per_second"} for record in read_metrics(path)]
    if path.name == "settings.json":
        return read_settings(path.parent)
    return path.read_bytes() if path.is_file() else None


def contents(run: Path) -> dict[Path, Any]:
    return {path.relative_to(run): content(path) for path in run.rglob("*")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*PROGRAMS, []]  # argparse checks an empty list too
    named = f"{', '.join(PROGRAMS)} (default: all)"
    parser.add_argument("programs", nargs="*", metavar="program", choices=choices, help=named)
    parser.add_argument("--kills", type=int, default=10, help="at least so many of each program (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        for name in args.programs or PROGRAMS:
            alone, started = Path(folder, f"{name}-alone"), time.monotonic()
            finish(name, data[name], alone)
            seconds, kills, runs = time.monotonic() - started, 0, 0
            while kills < args.kills:
                run = Path(folder, f"{name}-{runs}")
                runs += 1
                for _ in range(draw.randint(1, 4)):
                    process = begin(name, data[name], run)
                    time.sleep(draw.uniform(0, seconds))
                    process.kill()
                    kills += process.wait() == -signal.SIGKILL  # it may have finished before
                finish(name, data[name], run)
                found, expected = contents(run), contents(alone)
                different = {
                    str(path) for path in found.keys() | expected.keys() if found.get(path) != expected.get(path)
                }
                if different:
                    raise SystemExit(f"{name}, seed {args.seed}: {', '.join(sorted(different))} differ")
            print(f"{name}: {kills} kills in {runs} runs, all identical to the uninterrupted run", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        del sys.argv[1]
        run_tiny(sys.argv.pop(1))
    else:
        main()

"""Everything that needs a GPU, in one command that writes its results as it goes.

    pip install -e '.[test,cuda13,torch,translate,units,plot]'
    python benchmarks/gpu.py --enwik8 enwik8-first-4000000.gz --imdb aclImdb_v1.tar.gz --multi30k multi30k --out gpu

The parts, in this order; `--only` chooses some of them:

- check: what is installed, and what is missing.
- agree: 20 training steps of small models on the CPU and on the GPU; the largest relative difference of their losses.
- suite: the tests that run on CuPy, the most important first.
- programs: the programs in examples/ for 20 steps, resumed, scored, and used. These three parts run at the same time,
  and beside them PyTorch compiles what it needs for the part speed.
- speed: training steps beside PyTorch eager and the modes of `torch.compile`, alone on the GPU; see gpu_speed.py.
- generation: GPT-2 small writes one sequence.
- profile: the kernels of two training steps.
- training: a model of 122 million parameters on bytes of Wikipedia, with a curve; see gpu_training.py.

Each part gets the time that the ones before have left of `--minutes`. Results are written to OUT/results.jsonl and
OUT/suite.jsonl, a JSON object on each line, and what programs print to OUT/output.txt. If a part fails, its error is
written there too, and the next part begins. At the end a table is printed; --table prints it again. To try this program
without a GPU, add --device cpu --small.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gpu_speed
import gpu_training

from scratchformer.backend import CPU, Device, DeviceError, get_device

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20  # that are compared
PARTS = ("check", "agree", "suite", "programs", "speed", "generation", "profile", "training")
RESERVED = {"generation": 40, "profile": 40}  # seconds that the part speed leaves to these
COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
AT_ONCE = 3  # rows of the part speed whose competitors are held on the GPU at once
EXTRAS = {  # of setup.cfg: what is lost without
    "": "programs and tests fail",
    "test": "some tests are skipped",
    "cuda13": "twins do not run, and steps are not recorded",
    "torch": "there is no peer and no profile",
    "translate": "the programs that translate, and some of their tests",
    "units": "the programs units and digits",
    "plot": "no curve",
}
# The folders whose tests come first.
FIRST = ("kernels", "ops", "nn", "models", "parallel", "training", "optim", "generation")


class Results:
    """Results as lines of JSON, on the screen and in a file. Threads may share it."""

    def __init__(self, out: Path, minutes: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.started, self.seconds = out.resolve(), time.perf_counter(), 60 * minutes
        self.lock, self.temporary = threading.Lock(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def left(self) -> float:
        """The seconds that are left of the whole time."""
        return self.seconds - (time.perf_counter() - self.started)

    def log(self, name: str) -> Path:
        """A file in a temporary folder, which is deleted at the end; see `keep`."""
        return Path(self.temporary.name) / name

    def add(self, part: str, **values: Any) -> None:
        line = json.dumps({"part": part, "minutes": round((time.perf_counter() - self.started) / 60, 2), **values})
        with self.lock, (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            print(line[:1000], flush=True)
            file.write(line + "\n")

    def keep(self, title: str, text: str) -> None:
        """Add the last 100,000 characters of what was printed to OUT/output.txt."""
        with self.lock, (self.out / "output.txt").open("a", encoding="utf-8") as file:
            file.write(f"\n======== {title}\n{text[-100_000:]}\n")

    def run(
        self, part: str, command: list[str], seconds: float, environment: dict[str, str] | None = None, **values: Any
    ) -> int | None:
        """Run a program, and return its status; None if it takes too long. Its last lines go into the results."""
        begun = time.perf_counter()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            streams: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0)
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | (environment or {}), **streams)
            code: int | None
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGINT)  # pytest then says what failed
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            file.seek(0)
            text = file.read().replace("\r", "\n")
        taken = time.perf_counter() - begun
        self.keep(f"{part} {values}: {' '.join(command)}: {code}, {taken:.1f} s", text)
        last = [line[:300] for line in text.splitlines() if line.strip()][-3:]
        self.add(part, **values, code=f"stopped after {taken:.0f} s" if code is None else code, seconds=taken, end=last)
        return code


def check(device: Device, results: Results) -> None:
    """Write the versions of the packages that setup.cfg names, and of some others; and which are missing."""
    from packaging.requirements import Requirement

    config, versions, missing = configparser.ConfigParser(), {"python": sys.version.split()[0]}, []
    config.read(ROOT / "setup.cfg")
    for extra, lost in EXTRAS.items():
        listed = config["options.extras_require"][extra] if extra else config["options"]["install_requires"]
        for requirement in map(Requirement, listed.strip().splitlines()):
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            try:
                versions[requirement.name] = metadata.version(requirement.name)
                if requirement.specifier.contains(versions[requirement.name], prereleases=True):
                    continue
            except metadata.PackageNotFoundError:
                pass
            missing.append(f"{requirement}: {lost}")
    for other in "triton", "numba", "mkl", "cuda-core", "cuda-bindings", "transformers", "jax":
        try:
            versions[other] = metadata.version(other)
        except metadata.PackageNotFoundError:
            versions[other] = "missing"
    results.add("check", device=_described(device), cores=os.cpu_count(), missing=missing, versions=versions)


def agree(device: Device, results: Results) -> None:
    """The losses of training on the CPU and on the device."""
    for name, row in gpu_speed.rows(small=True).items():
        if row.generating:
            continue
        here, there = ([*gpu_speed.losses(row, where, STEPS)] for where in (CPU, device))
        apart = max(abs(a - b) / abs(a) for a, b in zip(here, there, strict=True))
        results.add("agree", model=name, steps=STEPS, relative_difference=apart, first=here[0], last=here[-1])


def suite(results: Results, device: Device, seconds: float) -> None:
    """The tests on CuPy. Only files that mention a device are collected, since each worker imports all of them."""
    files = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\bdevice\b|[Cc]u[Pp]y", path.read_text(encoding="utf-8"))
    ]

    def place(path: Path) -> tuple[int, Path]:
        folder = path.relative_to(ROOT / "tests").parts[0]
        return FIRST.index(folder) if folder in FIRST else len(FIRST), path

    reports = results.out / "suite.jsonl"
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"GPU_REPORTS": str(reports), "PYTHONPATH": os.pathsep.join(path)}
    chosen = "cupy" if device is not CPU else "strict and softmax"  # a few, to try this program
    options = ["-p", "gpu_reports", "-p", "no:cacheprovider", "-n", "auto", "-k", chosen, "--tb", "short"]
    limits = ["--maxfail", "100", "--maxschedchunk", "1", "--continue-on-collection-errors"]
    names = [str(path.relative_to(ROOT)) for path in sorted(files, key=place)]
    results.run("suite", [sys.executable, "-m", "pytest", *options, *limits, *names], seconds, environment)
    lines = [json.loads(line) for line in reports.read_text(encoding="utf-8").splitlines()] if reports.exists() else []
    failed = [line for line in lines if line["outcome"] == "failed"]
    slowest = sorted(lines, key=lambda line: -line["seconds"])[:15]
    results.add(
        "tests", outcomes=Counter(line["outcome"] for line in lines), seconds=sum(line["seconds"] for line in lines),
        failed=[[line["test"], line["why"][-300:]] for line in failed],
        slowest=[[line["test"], line["seconds"]] for line in slowest],
    )  # fmt: skip


def chains(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """For each program what is run in turn: (its name, (what is done, the command) ...)."""
    here, steps, later = sys.executable, *(("2", "3") if args.small else ("20", "25"))
    command, where = [here, "-m", "scratchformer"], ["--device", args.device]
    data = {"": None, "text": args.enwik8, "reviews": args.imdb, "pairs": args.multi30k}
    stages = ["--stage", "pretrain"], ["--stage", "all"]
    both, half = ("bfloat16", "float32"), ("bfloat16",)
    table: list[tuple[str, str, tuple[str, ...], list[str], str]] = [
        ("enwik8", "text", both, [], "generate"),
        ("enwik8", "text", both, ["--model", "xl"], "generate"),
        ("enwik8", "text", half, ["--preset", "tutorial"], "generate"),
        ("translate", "pairs", both, [], "translate"),
        ("gpt2", "text", half, [], "generate"),
        ("imdb", "reviews", both, [], ""),
        ("bert", "reviews", half, [], "stages"),
        ("sparse", "text", half, [], "generate"),
        ("sparse", "text", half, ["--preset", "fixed"], "generate"),
        ("digits", "", half, [], ""),
        ("units", "", half, [], ""),
        ("sparse", "", half, ["--preset", "photos"], ""),
    ]
    for program, needs, precisions, options, use in table:
        for precision in precisions:
            name = " ".join([program, *options, precision])
            out, file = str(folder / name.replace(" ", "-")), str(ROOT / "examples" / f"{program}.py")
            path = ["--data", str(data[needs].resolve())] if data[needs] else []
            path += ["--validation", "500"] if needs == "reviews" else []  # a small archive will do
            first, second = stages if use == "stages" else ([], [])
            begin = [*where, "--precision", precision, "--steps", steps, "--out", out, *path, *options, *first]
            chain = [("train", [here, file, *begin])]
            chain.append(("resume", [here, file, "--resume", out, "--steps", later, *where, *second]))
            chain.append(("evaluate", [*command, "evaluate", out, *where]))
            if use == "generate":
                chain.append((use, [*command, use, out, "--tokens", "100", "--precision", precision, *where]))
            if use == "translate":
                chain.append((use, [*command, use, out, "A man in an orange hat looks at something.", *where]))
            yield name, chain


def programs(args: argparse.Namespace, results: Results, end: float) -> None:
    """All programs, a few at once."""

    def run(name: str, chain: list[tuple[str, list[str]]]) -> None:
        for what, command in chain:
            seconds = min(60.0 * args.program_minutes, results.left() - end)
            if seconds < 5:
                return results.add("program", name=name, what=what, code="no time was left")
            if results.run("program", command, seconds, name=name, what=what) != 0 and what == "train":
                return None
        return None

    with ThreadPoolExecutor(args.at_once) as pool:
        for chain in chains(args, results.log("runs")):
            pool.submit(attempt, results, chain[0], partial(run, *chain))


def precompile(args: argparse.Namespace, results: Results, end: float) -> None:
    """Let PyTorch compile the peers of the part speed: each gets ready, and ends since it has no input."""

    def run(name: str, precision: str, mode: str) -> None:
        if (seconds := min(240.0, results.left() - end)) > 5:
            command = gpu_speed.command(name, precision, mode, args.device, args.small)
            threads = {COMPILERS: "8"} if mode == "max-autotune" else None
            results.run("compiled", command, seconds, threads, model=name, precision=precision, mode=mode)

    with ThreadPoolExecutor(args.at_once) as pool:
        for precision in args.precision:
            for name, row in gpu_speed.rows(args.small).items():
                for mode in reversed(row.competitors(precision)):  # the slowest first
                    if mode in args.modes and mode not in (gpu_speed.OURS, "eager"):
                        pool.submit(run, name, precision, mode)


def beside(args: argparse.Namespace, results: Results, device: Device, end: float) -> None:
    """The parts that may share the GPU, and PyTorch's compiler, until `end` seconds are left."""
    jobs: dict[str, Callable[[], None]] = {
        "suite": lambda: suite(results, device, results.left() - end),
        "programs": lambda: programs(args, results, end),
        "speed": lambda: precompile(args, results, end),
    }
    with ThreadPoolExecutor(len(jobs)) as pool:
        for name, job in jobs.items():
            if name in args.only:
                pool.submit(attempt, results, name, job)
        if "agree" in args.only:
            attempt(results, "agree", lambda: agree(device, results))


def speed(args: argparse.Namespace, results: Results, device: Device, end: float) -> None:
    """All rows, in one precision after the other, until `end` seconds are left."""
    names = [name for name, row in gpu_speed.rows(args.small).items() if not row.generating]
    for precision in args.precision:
        for first in range(0, len(names), AT_ONCE):
            some = names[first : first + AT_ONCE]
            if results.left() < end + args.patience / 2:
                results.add("failed", what="speed", model=", ".join(some), precision=precision, why="no time was left")
                continue
            compare = partial(
                gpu_speed.compare, results, some, precision, device, args.small, args.patience, args.modes
            )
            attempt(results, f"speed {some} {precision}", compare)


def generation(args: argparse.Namespace, results: Results, device: Device) -> None:
    for precision in "bfloat16", "float32":
        names = [name for name, row in gpu_speed.rows(args.small).items() if row.generating]
        gpu_speed.compare(results, names, precision, device, args.small, args.patience, args.modes)


def attempt(results: Results, what: str, part: Callable[[], None]) -> None:
    try:
        part()
    except Exception as error:
        results.add("failed", what=what, why=repr(error)[:500], where=traceback.format_exc()[-1500:])


def table(path: Path) -> str:
    """The results in short."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return "\n".join(_table(lines))


def _table(lines: list[dict[str, Any]]) -> Iterator[str]:
    def of(*parts: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["part"] in parts]

    for line in of("check"):
        yield f"{line['device']}; missing: {'; '.join(line['missing']) or 'nothing'}"
    for line in of("agree"):
        yield f"agree: {line['model']}: {line['relative_difference']:.1e} in {line['steps']} steps"
    for line in of("tests"):
        yield f"tests: {line['outcomes']}, {line['seconds']:.0f} s in all; failed:"
        yield from (f"  {name}" for name, _ in line["failed"][:25])
    bad = [line for line in of("program") if line["code"] != 0]
    yield f"programs: {len(of('program'))} runs, {len(bad)} with another status than 0"
    yield from (f"  {line['name']}: {line['what']}: {line['code']}: {line.get('end', [''])[-1][:150]}" for line in bad)
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in of("speed"):
        rows.setdefault((line["model"], line["precision"]), {})[line["competitor"]] = line
    for (model, precision), each in rows.items():
        peers = {name: line["seconds"] for name, line in each.items() if name != gpu_speed.OURS}
        times = ", ".join(f"{name} {1e3 * line['seconds']:.2f}" for name, line in each.items())
        text = f"{model}, {precision}: {times} ms"
        if ours := each.get(gpu_speed.OURS):
            text += f"; {ours['tokens_per_second']:,.0f} tokens/s"
            if peers:
                text += f", ours/{min(peers, key=lambda name: peers[name])} {ours['seconds'] / min(peers.values()):.2f}"
            if "share_of_rate" in ours:
                text += f", {ours['share_of_rate']:.0%} of the rate"
            if "share_of_peak" in ours:
                text += f", {ours['share_of_peak']:.0%} of the peak"
        yield text
    for line in of("profile"):
        yield f"{line['model']}, bfloat16: {line['ms']:.2f} ms in kernels"
        yield from (f"  {ms:.3f} ms, {count:g} × {name[:70]}" for name, ms, count in line["kernels"][:14])
    for line in of("training", "trained"):
        yield ", ".join(f"{name} {value}" for name, value in line.items() if name not in ("part", "minutes"))
    for line in of("failed"):
        yield f"failed: {' '.join(str(value) for name, value in line.items() if name not in ('part', 'where'))[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="some of the parts")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="the folder of the results (gpu)")
    parser.add_argument("--table", action="store_true", help="only print the results in --out as a table")
    parser.add_argument("--device", default="gpu", help="gpu, gpu:N, or cpu to try this program")
    parser.add_argument("--small", action="store_true", help="small models, and few steps")
    precisions, modes = gpu_speed.PRECISIONS, [*gpu_speed.MODES]
    parser.add_argument("--precision", nargs="+", choices=precisions, default=precisions, help="in speed (all)")
    parser.add_argument("--modes", nargs="*", choices=modes, default=modes, help="of PyTorch in speed (all)")
    for name, value, what in (
        ("minutes", 9.5, "for everything"),
        ("beside-minutes", 3.5, "for the parts that run at the same time"),
        ("program-minutes", 1.0, "for each step of a program"),
        ("train-minutes", 1.5, "reserved for the part training, which gets what is left"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, metavar="M", help=f"{what} ({value})")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for competitors to get ready (60)")
    parser.add_argument("--at-once", type=int, default=5, help="programs that run at once, and compilers (5)")
    for name in "enwik8", "imdb", "multi30k":
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help="as --data for programs (default: downloaded)")
    args = parser.parse_args()
    if args.table:
        return print(table(args.out / "results.jsonl"))
    try:
        device = get_device(args.device)
    except DeviceError as error:
        raise SystemExit(str(error)) from error
    os.environ[COMPILERS] = "2"  # since many processes compile at once
    results = Results(args.out, args.minutes)
    train = 60 * args.train_minutes if "training" in args.only else 0
    later = train + sum(seconds for part, seconds in RESERVED.items() if part in args.only)
    after = max(later, results.seconds - 60 * args.beside_minutes)
    parts: dict[str, Callable[[], None]] = {
        "check": lambda: check(device, results),
        "suite": lambda: beside(args, results, device, after),
        "speed": lambda: speed(args, results, device, later),
        "generation": lambda: generation(args, results, device),
        "profile": lambda: gpu_speed.profile(results, device, args.small),
        "training": lambda: gpu_training.train(results, device, args.small, max(10, results.left() - 15), args.enwik8),
    }
    for name, part in parts.items():
        if name in args.only or (name == "suite" and not {"agree", "programs"}.isdisjoint(args.only)):
            attempt(results, name, part)
    if (log := results.log("speed")).exists():
        results.keep("speed: errors", log.read_text(encoding="utf-8", errors="replace"))
    print(f"\n{table(results.out / 'results.jsonl')}")
    return None


def _described(device: Device) -> str:
    if device.index is None:
        return "the CPU"
    return device.xp.cuda.runtime.getDeviceProperties(device.index)["name"].decode()


if __name__ == "__main__":
    main()

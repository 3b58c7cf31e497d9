"""Everything that needs a GPU, in one command that writes its results as it goes.

    pip install -e '.[test,cuda13,torch]'
    python benchmarks/gpu.py --enwik8 enwik8-first-4000000.gz --imdb aclImdb_v1.tar.gz --out gpu

In this order, the most important results first; `--only` chooses some of the parts:

- agree: 20 training steps of small models on the CPU and on the GPU; the largest relative difference of their losses.
- suite: the tests that run on CuPy.
- examples: the programs imdb.py and enwik8.py for 100 steps, with the tutorial's sizes.
- speed: a training step of the tutorial's two models and of GPT-2 small (124 million parameters, context 1,024), beside
  PyTorch eager and `torch.compile`, both with fused attention and fused Adam. They take turns in one process. Each runs
  in float32, in TF32 and in bfloat16. Medians, tokens a second, memory, and the share of the rate that CuPy reaches in
  a large product.

Results are written to OUT/results.jsonl, one JSON object on each line. The output of the tests and programs is in the
same folder. If a part fails, its error is written there too, and the next part begins. To try this program without a
GPU, add --device cpu --small.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from setups import counted_work

from scratchformer import Key, models
from scratchformer.backend import CPU, Device, DeviceError, get_device, use_tf32
from scratchformer.data import Labelled, LabelledBatches, TextBatches
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.training import Replicas

ROOT = Path(__file__).resolve().parents[1]
STEPS, ROUNDS, TURN = 20, 6, 5  # steps that are compared; turns of each competitor, and steps of a turn
PRECISIONS = ("float32", "tf32", "bfloat16")


class Results:
    """Results as lines of JSON, on the screen and in a file."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.started = out, time.perf_counter()

    def add(self, part: str, **values: Any) -> None:
        line = json.dumps({"part": part, "minutes": round((time.perf_counter() - self.started) / 60, 2), **values})
        print(line, flush=True)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(line + "\n")

    def run(self, part: str, command: list[str], seconds: float) -> None:
        """A program whose output goes to OUT/PART.txt; its last lines are the result."""
        path = self.out / f"{part.replace(' ', '-')}.txt"
        with path.open("w") as file:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, stdout=file, stderr=file, timeout=seconds, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"stopped after {seconds:.0f} s"
        self.add(part, code=code, end=path.read_text(errors="replace").replace("\r", "\n").splitlines()[-3:])


def setups(small: bool) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Names, models, and their batches."""
    shrink = dict(d_model=32, heads=4, depth=2) if small else {}
    words, rows = (500, 4) if small else (50_000, 32)
    text = Key(1).generator().integers(0, 256, 1_000_000, dtype=np.uint8)
    sizes = dict(d_model=256, heads=8, depth=12, context=256) | shrink
    yield (
        "generator",
        lambda: models.LanguageModel(256, **sizes, key=Key(0)),
        lambda model: TextBatches(text, rows, model.context, Key(2)),
    )
    texts = Key(1).generator().integers(2, words, (256, 512), dtype=np.int32)
    reviews = Labelled([*texts], np.arange(256) % 2)
    sizes_of_classifier = dict(d_model=128, heads=8, depth=6, max_length=512) | shrink
    yield (
        "classifier",
        lambda: models.Classifier(words, 2, **sizes_of_classifier, key=Key(0)),
        lambda model: LabelledBatches(reviews, rows, 512, Key(2), keep="both"),
    )
    sizes_of_gpt2 = shrink | {"vocab_size": words, "context": 64} if small else {"vocab_size": 50_257}
    tokens = Key(1).generator().integers(0, sizes_of_gpt2["vocab_size"], 1_000_000, dtype=np.int32)
    yield (
        "GPT-2 small",
        lambda: models.GPT2(dropout=0.0, **sizes_of_gpt2, key=Key(0)),
        lambda model: TextBatches(tokens, min(rows, 8), model.context, Key(2)),
    )


def our_steps(model: Any, batches: Any, precision: str) -> Callable[[int], Any]:
    """A function that makes `count` training steps and returns the last loss, which may still be on the device."""
    replicas, adam = Replicas(model, precision=precision), Adam(model.parameters(), 1e-4)

    replicas.__enter__()  # left only at the end, since leaving forgets the recorded steps

    def steps(count: int) -> Any:
        for number in range(count):
            loss = replicas.gradients(batches.batch(number), None)
            clip_by_global_norm(replicas.flat.grad, 1.0)
            adam.step(replicas.map)
        return loss

    vars(steps)["replicas"] = replicas
    return steps


def torch_steps(model: Any, batches: Any, precision: str, compiled: bool, device: str) -> Callable[[int], Any]:
    """The same in PyTorch."""
    import torch
    from torch_model import TorchClassifier, TorchGPT2, TorchLanguageModel

    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    kinds = {models.GPT2: TorchGPT2, models.LanguageModel: TorchLanguageModel, models.Classifier: TorchClassifier}
    peer = kinds[type(model)](model, fused=True).to(device)
    peer.padded = False  # no row of a classifier's batch is
    adam = torch.optim.Adam(peer.parameters(), 1e-4, fused=True)
    torch.compiler.reset()  # it compiles only so many variants of a function
    compute = torch.compile(peer.loss) if compiled else peer.loss

    def steps(count: int) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for number in range(count):
            batch = [torch.from_numpy(a).to(device, non_blocking=True).long() for a in batches.batch(number)]
            adam.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
                loss = compute(*batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            adam.step()
        return loss.detach()

    return steps


def agree(device: Device, results: Results) -> None:
    """The losses of training on the CPU and on the device."""
    for name, make, batches_of in setups(small=True):
        losses = {}
        for where in CPU, device:
            model = make().to(where)
            batches, adam = batches_of(model), Adam(model.parameters(), 1e-3)
            with Replicas(model, 1) as replicas:
                losses[where.name] = []
                for number in range(STEPS):
                    losses[where.name].append(float(replicas.gradients(batches.batch(number), Key(number))))
                    clip_by_global_norm(model.flat.grad, 1.0)
                    adam.step()
        here, there = losses["cpu"], losses[device.name]
        apart = max(abs(a - b) / abs(a) for a, b in zip(here, there, strict=True))
        results.add("agree", model=name, steps=STEPS, relative_difference=apart, first=here[0], last=here[-1])


def synchronized(device: Device) -> None:
    if device.index is not None:
        device.xp.cuda.Device(device.index).synchronize()


def device_rate(device: Device, precision: str) -> float:
    """FLOP/s in products of large square matrices: the best of many."""
    n = 8192 if device.index is not None else 1024
    a = device.xp.asarray(Key(0).generator().standard_normal((n, n), np.float32))
    if precision == "bfloat16" and device is not CPU:
        import ml_dtypes

        a = a.astype(ml_dtypes.bfloat16)
    use_tf32(device, precision == "tf32")
    best = float("inf")
    for _ in range(10):
        synchronized(device)
        start = time.perf_counter()
        a @ a
        synchronized(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


class Memory:
    """The GB on the GPU: those that scratchformer holds at the end, recorded steps included, and the most that PyTorch
    has held since this was made.
    """

    def __init__(self, device: Device) -> None:
        self.pool = None if device.index is None else device.xp.get_default_memory_pool()
        if self.pool is not None:
            import torch

            self.pool.free_all_blocks()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def of(self, steps: Callable) -> float | None:
        """Of both of PyTorch's competitors together, since they share one pool."""
        if self.pool is None:
            return None
        if replicas := getattr(steps, "replicas", None):
            return (self.pool.total_bytes() + replicas.graphs.memory()) / 1e9
        import torch

        return torch.cuda.max_memory_reserved() / 1e9


def speed(device: Device, results: Results, small: bool, precisions: Sequence[str]) -> None:
    for label in precisions:
        for name, make, batches_of in setups(small):
            compare(device, results, label, name, make, batches_of)


def compare(device: Device, results: Results, label: str, name: str, make: Callable, batches_of: Callable) -> None:
    """Steps of one model in one precision, by all competitors in turns."""
    where, memory = "cpu" if device is CPU else "cuda", Memory(device)
    model = make()
    batches = batches_of(model)
    competitors = {
        "scratchformer": lambda: our_steps(make().to(device), batches, label),
        "PyTorch": lambda: torch_steps(model, batches, label, False, where),
        "torch.compile": lambda: torch_steps(model, batches, label, True, where),
    }
    steps: dict[str, Callable[[int], Any]] = {}
    for competitor, begin in competitors.items():
        try:
            steps[competitor] = begin()
            loss = float(steps[competitor](5))  # compiles, records, and fills caches
            results.add("first steps", model=name, precision=label, competitor=competitor, loss=loss)
        except Exception as error:
            steps.pop(competitor, None)
            results.add("failed", model=name, precision=label, competitor=competitor, why=repr(error)[:500])
    seconds: dict[str, list[float]] = {competitor: [] for competitor in steps}
    for _ in range(ROUNDS):
        for competitor, take in steps.items():
            synchronized(device)
            start = time.perf_counter()
            float(take(TURN))  # waits for the device
            seconds[competitor].append((time.perf_counter() - start) / TURN)
    batch = batches.batch(0)
    work, tokens = counted_work(model, batch), batch[0].size
    held = {competitor: memory.of(take) for competitor, take in steps.items()}
    for take in steps.values():
        if replicas := getattr(take, "replicas", None):
            replicas.__exit__(None, None, None)
    steps.clear()  # and so the memory of all
    rate = device_rate(device, label)
    for competitor, measured in seconds.items():
        median = statistics.median(measured)
        values = dict(seconds=median, least=min(measured), most=max(measured), tokens_per_second=tokens / median)
        if "torch.compile" in seconds:
            values["ratio_to_compiled"] = median / statistics.median(seconds["torch.compile"])
        results.add(
            "speed", model=name, precision=label, competitor=competitor, share_of_rate=work / median / rate,
            rate=rate, memory_gb=held[competitor], **values,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("agree", "suite", "examples", "speed")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help="some of the parts")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="the folder of the results (gpu)")
    parser.add_argument("--device", default="gpu", help="gpu, gpu:N, or cpu to try this program")
    parser.add_argument("--small", action="store_true", help="small models in the part speed")
    parser.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="in the part speed (all)"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="the most for the tests, and for each example (8)")
    for name in "enwik8", "imdb":
        parser.add_argument(f"--{name}", metavar="PATH", help="as --data for the program (default: downloaded)")
    args = parser.parse_args()
    try:
        device = get_device(args.device)
    except DeviceError as error:
        raise SystemExit(str(error)) from error
    results = Results(args.out)
    results.add("device", name=device.name, found=_described(device))
    for part in args.only:
        try:
            if part == "suite":
                tests = ["-vv", "-n", "auto", "-k", "cupy", "--maxfail", "100", "tests"]  # with names, if it is stopped
                results.run("suite", [sys.executable, "-m", "pytest", *tests], 60 * args.minutes)
            elif part == "examples":
                for name in "enwik8", "imdb":
                    folder = args.out.resolve() / f"run-{name}-{time.strftime('%H%M%S')}"
                    options = ["--device", args.device, "--preset", "tutorial", "--steps", "100", "--out", str(folder)]
                    data = getattr(args, name)
                    data = data and str(Path(data).resolve())  # the program runs in the repository
                    program = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]
                    results.run(f"example {name}", program + (["--data", data] if data else []), 60 * args.minutes)
            else:
                agree(device, results) if part == "agree" else speed(device, results, args.small, args.precision)
        except Exception as error:
            results.add("failed", what=part, why=repr(error), where=traceback.format_exc()[-1500:])


def _described(device: Device) -> str:
    if device.index is None:
        return "the CPU"
    return device.xp.cuda.runtime.getDeviceProperties(device.index)["name"].decode()


if __name__ == "__main__":
    main()

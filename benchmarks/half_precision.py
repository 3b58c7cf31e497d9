"""Measure what half precision does to numbers, sums, gradients, weights and whole runs: the figures of
docs/half_precision.md.

    python benchmarks/half_precision.py --data enwik8.gz [--steps 3000 --overflows 200 --plot docs/img]

The model is a small language model on bytes (2 blocks of width 32, context 32, batches of 8), trained with Adam. It is
trained in each precision; without master weights, with weights that are rounded after every step; in float16 with a
loss scale of 1; and in float16 with overflows planted in as many batches as --overflows says: there the gradient is 2⁴⁰
times as large. All runs have the same seed and the same batches.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from scratchformer import Key
from scratchformer.backend import cores
from scratchformer.data import TextBatches, load_enwik8
from scratchformer.models import LanguageModel
from scratchformer.nn import Layer
from scratchformer.optim import Adam, Cosine
from scratchformer.testing.contracts import as_tuple
from scratchformer.training import LossScale, Replicas, Run, evaluate_language_model

HALF = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
COLOURS = {"float32": "tab:gray", "float16": "tab:blue", "bfloat16": "tab:orange"}
CONTEXT, ROWS, RATE = 32, 8, 2e-3
LOST = {"float16": 2.0**-25, "bfloat16": 2.0**-134}  # what is smaller becomes 0


def new_model(seed: int = 0) -> LanguageModel:
    return LanguageModel(
        256, d_model=32, heads=2, depth=2, context=CONTEXT, norm="pre", embedding_std=0.02, key=Key(seed)
    )


# Numbers and sums


def rounding_errors(dtype: np.dtype, exponents: np.ndarray) -> list[float]:
    """The largest relative error of rounding numbers in [2^e, 2^(e+1)) to a type, for each exponent e."""
    draw, errors = np.random.default_rng(0), []
    for e in exponents:
        x = np.ldexp(draw.uniform(1, 2, 1000), int(e))
        with np.errstate(over="ignore", under="ignore"):
            error = np.abs(x.astype(np.float32).astype(dtype).astype(np.float64) - x) / x
        errors.append(float(error.max()))
    return errors


def running_sums(terms: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """All partial sums of `terms`, each rounded to the type."""
    total, sums = dtype.type(0), np.empty(len(terms))
    for i, term in enumerate(terms.astype(dtype)):
        total = dtype.type(np.float32(total) + np.float32(term))
        sums[i] = total
    return sums


# A real run


def gradients_of_activations(model: Layer, batch: Any) -> np.ndarray:
    """What the backward of every layer returns, in one array."""
    magnitudes: list[np.ndarray] = []

    def watch(layer: Layer) -> None:
        backward = layer.backward

        def watched(dy: Any, cache: Any) -> Any:
            dx = backward(dy, cache)
            magnitudes.extend(np.abs(x).ravel() for x in as_tuple(dx) if x is not None)
            return dx

        layer.backward = watched  # type: ignore[method-assign]

    layers = [layer for _, layer in model.named_layers()][1:]
    for layer in layers:
        watch(layer)
    try:
        _, cache = model.loss(*batch)
        model.loss_backward(1.0, cache)
    finally:
        for layer in layers:
            del layer.backward
    return np.concatenate(magnitudes)


class Watched:
    """Batches that call a function before each step."""

    def __init__(self, batches: TextBatches, before: Callable[[int], None]) -> None:
        self.batches, self.before = batches, before

    def batch(self, step: int) -> Any:
        self.before(step)
        return self.batches.batch(step)


class Finished(NamedTuple):
    bits: float  # per byte, of the validation part
    records: list[dict[str, Any]]
    skipped: int
    model: LanguageModel


def run(
    data: Any,
    steps: int,
    precision: str,
    scale: LossScale | None = None,
    rounded: np.dtype | None = None,
    overflows: frozenset[int] = frozenset(),
    seed: int = 0,
) -> Finished:
    """Train a model. rounded: the type to which the master weights are rounded after every step."""
    model = new_model(seed)
    planted = [1.0]

    def before(step: int) -> None:
        planted[0] = 2.0**40 if step in overflows else 1.0
        if rounded is not None:
            model.flat.data[...] = model.flat.data.astype(rounded)

    with tempfile.TemporaryDirectory() as out, Replicas(model, 1, ROWS, precision) as replicas:
        for replica in replicas.models:
            whole = replica.loss_backward
            replica.loss_backward = lambda dloss, cache, whole=whole: whole(planted[0] * dloss, cache)
        batches = Watched(TextBatches(data.train, ROWS, CONTEXT, Key(seed, 1)), before)
        adam, rate = Adam(model.parameters(), RATE), Cosine(RATE, min(100, steps), steps, RATE / 10)
        replicas.loss_scale = scale or replicas.loss_scale
        trained, select = Run(out, steps), ("bits_per_byte", "min")
        for step in trained.steps(replicas, adam, batches, select, snapshot_every=steps):
            loss = replicas.gradients(batches.batch(step), trained.key("train", step))
            norm = replicas.clip(adam, 1.0)
            adam.lr = rate(step)
            replicas.step(adam)
            trained.log(loss=loss, norm=norm)
            if trained.due(0):
                trained.keep_best(evaluate_language_model(replicas, data.validation[:30_000]))
        lines = (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [r for r in map(json.loads, lines) if "loss" in r]
    skipped = 0 if replicas.loss_scale is None else replicas.loss_scale.skipped
    return Finished(trained.best["bits_per_byte"], records, skipped, model)


def relative_updates(model: LanguageModel, batch: Any, adam: Adam) -> np.ndarray:
    """|change|/|w| of every weight in one step."""
    replicas, before = Replicas(model, 1), model.flat.data.copy()
    replicas.gradients(batch, Key(0))
    adam.step()
    changed = (before != 0) & (model.flat.data != before)
    return np.abs(model.flat.data - before)[changed] / np.abs(before[changed])


# Pictures


def two_plots() -> tuple[Any, Any, Any]:
    from scratchformer.commands.plots import subplots

    figure, (left, right) = subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    return figure, left, right


def plot_numbers(folder: Path) -> None:
    figure, left, right = two_plots()
    exponents = np.arange(-45, 45)
    for name, dtype in {"float32": np.dtype(np.float32), **HALF}.items():
        left.plot(
            exponents, [max(e, 2.0**-26) for e in rounding_errors(dtype, exponents)], color=COLOURS[name], label=name
        )
    left.set_yscale("log", base=2)
    left.set(title="largest relative error of rounding", xlabel="exponent e of numbers from 2$^e$ to 2$^{e+1}$")
    n = np.arange(1, 4097)
    right.plot(n, n, color=COLOURS["float32"], label="float32: exact")
    for name, dtype in HALF.items():
        right.plot(n, running_sums(np.ones(len(n)), dtype), color=COLOURS[name], label=name)
    right.set(title="1 + 1 + 1 + ..., rounded after every addition", xlabel="terms")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(folder / "half_numbers.png", dpi=110)


def plot_gradients(folder: Path, data: Any, trained: LanguageModel) -> None:
    """Gradients and changes of a new and a trained model; prints how many are lost."""
    figure, left, right = two_plots()
    batches, new = TextBatches(data.train, ROWS, CONTEXT, Key(1)), new_model()
    bins = np.arange(-35.0, 0.0, 0.5)
    for name, model, colour in (("new", new, "tab:green"), ("trained", trained, "tab:purple")):
        g = gradients_of_activations(model, batches.batch(0))
        g = g[g > 0]
        lost = float((g < LOST["float16"]).mean())
        left.hist(np.log2(g), bins, density=True, histtype="step", color=colour, label=f"{name} model")
        rough = float((g < 2.0**-14).mean())
        kept = [float((g * s < LOST["float16"]).mean()) for s in (2.0**10, 2.0**15)]
        print(f"gradients of activations, {name}: {lost:.1%} become 0 in float16, {rough:.0%} lose digits; "
              f"with S = 2^10 {kept[0]:.2%}, with 2^15 {kept[1]:.3%}; largest {g.max():.2g}")  # fmt: skip
    left.axvspan(-35, -25, color="black", alpha=0.08)
    left.text(-34.5, 0.005, "0 in float16")
    left.axvline(-14, color="black", linestyle=":")
    left.text(-20.5, 0.14, "fewer digits")
    left.set(title="gradients of activations, by size", xlabel="log$_2$ |dx|")
    left.legend(loc="upper left")
    for name, model, colour, rate in (("new", new, "tab:green", RATE), ("trained", trained, "tab:purple", RATE / 10)):
        adam = Adam(model.parameters(), rate)
        for step in range(20):
            updates = relative_updates(model, batches.batch(step), adam)
        right.hist(np.log2(updates), np.arange(-25, 5, 0.5), density=True, histtype="step", color=colour,
                   label=f"{name} model, lr {rate:g}")  # fmt: skip
        shares = {kind: float((updates < 2.0**-bits).mean()) for kind, bits in (("bfloat16", 9), ("float16", 12))}
        print(
            f"changes of weights, {name}: " + ", ".join(f"{s:.0%} below half an ulp in {k}" for k, s in shares.items())
        )
    for name, at in (("bfloat16", -9), ("float16", -12)):
        right.axvline(at, color=COLOURS[name], linestyle=":", label=f"2$^{{{at}}}$: {name}")
    right.set(title="changes of the weights in one step of Adam", xlabel="log$_2$ |change|/|w|")
    right.legend()
    figure.savefig(folder / "half_gradients.png", dpi=110)


def plot_training(folder: Path, runs: dict[str, Finished], overflows: frozenset[int]) -> None:
    figure, left, right = two_plots()
    for name, done in runs.items():
        steps, losses = [r["step"] for r in done.records], [r["loss"] for r in done.records]
        smooth = np.convolve(losses, np.ones(20) / 20, "valid")
        kind = name.partition(",")[0]
        style = "--" if "rounded" in name else ":" if "," in name else "-"
        left.plot(steps[19:], smooth, style, color=COLOURS[kind], label=name, linewidth=1.2)
    left.set(title="training loss, mean of 200 steps", xlabel="step", ylim=(None, 3.2))
    left.legend(fontsize=8)
    name = next(name for name in runs if "overflows" in name)
    records = runs[name].records
    batch = [r["step"] - 1 + r["skipped_batches"] for r in records]
    right.step(batch, [r["loss_scale"] for r in records], color="tab:blue", label="S")
    right.plot(sorted(overflows), [0.7] * len(overflows), "|", color="tab:red", label="planted overflow")
    right.set_yscale("log", base=2)
    right.set(title=f"loss scale with {len(overflows)} planted overflows", xlabel="batch")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "half_training.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="PATH", help="a text (default: enwik8)")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--overflows", type=int, default=200)
    parser.add_argument("--processes", type=int, default=cores(), help="runs at the same time")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="draw the pictures")
    args = parser.parse_args()
    data = load_enwik8(args.data)
    for name, dtype in HALF.items():
        sums = running_sums(np.ones(4096), dtype)
        draw = np.random.default_rng(0).standard_normal((64, 4096))
        errors = [
            math.sqrt(np.mean([(running_sums(x[:n], dtype)[-1] - x[:n].sum()) ** 2 for x in draw])) for n in (256, 4096)
        ]
        print(f"{name}: the sum of ones stops at {sums[-1]:g}; of 256 and 4,096 normal terms the sum is off by "
              f"{errors[0]:.3g} and {errors[1]:.3g}")  # fmt: skip
    draw = np.random.default_rng(0)
    planted = frozenset(draw.choice(args.steps, args.overflows, replace=False).tolist())
    described: dict[str, dict[str, Any]] = {
        "float16": {},
        f"float16, {args.overflows} overflows": {"scale": LossScale(patience=5), "overflows": planted},
        "float32": {},
        "float32, seed 1": {"seed": 1},
        "float32, seed 2": {"seed": 2},
        "bfloat16": {},
        "bfloat16, rounded weights": {"rounded": HALF["bfloat16"]},
        "float16, S = 1": {"scale": LossScale(1.0, patience=args.steps + 1)},
    }
    with ProcessPoolExecutor(args.processes) as pool:
        started = {
            name: pool.submit(run, data, args.steps, name.partition(",")[0], **options)
            for name, options in described.items()
        }
        runs = {}
        for name, future in started.items():
            done = runs[name] = future.result()
            print(f"{name:<28} {done.bits:.4f} bits per byte, {done.skipped} batches skipped", flush=True)
    if args.plot:
        plot_numbers(args.plot)
        plot_gradients(args.plot, data, runs["float32"].model)
        plot_training(args.plot, runs, planted)


if __name__ == "__main__":
    main()

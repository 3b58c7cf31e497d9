"""Plots of runs: learning curves, attention maps, position encodings. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..backend import to_cpu, to_device
from ..data import Vocabulary
from ..data.subwords import BEGIN, END
from ..dispatch import reference_only
from ..generation import beam_search
from ..models import Classifier, EncoderDecoder, LanguageModel
from ..nn import RelativeSelfAttention
from ..nn.recompute import RecomputeCache
from ..ops import sinusoidal_positions
from ..shell.files import expect_no_link, replacing
from ..shell.text import one_line, printable
from ..training import best_snapshot, load_model, read_metrics
from ..training.readers import load_reader, load_vocabulary, reads_text
from ..training.settings import read_settings
from ..training.snapshot import BEST, LAST

TEXTS = {  # shown by default, by the kind of model
    EncoderDecoder: "A man in an orange hat looks at something.",
    Classifier: "i expected nothing , but this is not a bad film : the plot is thin , the acting is wonderful .",
    LanguageModel: "The [[French Revolution]] of 1789 was a period",
}


@contextmanager
def default_style() -> Iterator[None]:
    """Draw in matplotlib's own style: one that is in the current folder may be a stranger's, and start programs."""
    try:
        from matplotlib import style
    except ImportError as error:
        raise ImportError("plotting needs matplotlib: pip install 'scratchformer[plot]'") from error
    with style.context("default"):
        yield


def subplots(rows: int, columns: int, layout: Any = "constrained", **options: Any) -> tuple[Any, Any]:
    """A figure, and its axes as an array (rows, columns). It draws to files: the figures and the backend of pyplot are
    left to the user's plots.
    """
    from matplotlib.figure import Figure

    figure = Figure(layout=layout, **options)
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_run(run: Path, program: ModuleType | None = None) -> Iterator[Path]:
    """Plot the run in folder `run` into its folder `plots`, and yield the paths: curves.png, or one for each stage;
    attention.png for a short example, if the model reads text; and positions.png, if it also is not an encoder-decoder.
    Before the first snapshot there are only curves.

    program: see `load_model`. Raises ValueError if the folder holds no run.
    """
    settings, out, curves = read_settings(run), expect_no_link(run / "plots"), read_curves(run)
    for stage, records in curves.items():
        yield plot_curves(records, settings, out / named("curves", stage))
    folder = run / next(iter(curves))
    if not any(os.path.lexists(folder / name) for name in (BEST, LAST)):
        print(one_line(f"{folder} holds no snapshot yet, so only curves are plotted"), file=sys.stderr)
        return
    model, state = load_model(best_snapshot(folder), program=program)
    text = next((example for kind, example in TEXTS.items() if isinstance(model, kind)), None)
    if text is not None and reads_text(model, state):
        rows, columns, *inputs = encode(model, text, run, state)
        yield plot_attention(attention_maps(model, *inputs), rows, out / "attention.png", columns)
        if not isinstance(model, EncoderDecoder):
            yield plot_positions(model, out / "positions.png")


def plot_runs(runs: Sequence[Path]) -> Iterator[Path]:
    """Plot the curves of several runs together, in the folder `plots` of the first, and yield the paths:
    comparison.png, or one for each stage that all runs have. Raises ValueError if there is none, or if a folder holds
    no run or is given twice.
    """
    for run in runs:
        read_settings(run)
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError(f"{', '.join(map(str, runs))}: expected different runs")
    all_curves, out = [read_curves(run) for run in runs], expect_no_link(runs[0] / "plots")
    stages = [stage for stage in all_curves[0] if all(stage in curves for curves in all_curves)]
    if not stages:
        raise ValueError(f"{', '.join(map(str, runs))}: they have no stage in common, whose curves could be compared")
    short = len({run.resolve().name for run in runs}) == len(runs)
    names = [run.resolve().name if short else str(run) for run in runs]
    for stage in stages:
        records = {name: curves[stage] for name, curves in zip(names, all_curves, strict=True)}
        yield plot_comparison(records, out / named("comparison", stage))


def read_curves(run: Path) -> dict[str, list[dict[str, Any]]]:
    """What was logged, by the subfolder of each stage that has a loss; "" if the run has no stages.

    Raises ValueError if nothing was logged.
    """
    folders = [run] if (run / "metrics.jsonl").exists() else sorted(p.parent for p in run.glob("*/metrics.jsonl"))
    records = {"" if folder == run else folder.name: read_metrics(folder / "metrics.jsonl") for folder in folders}
    if curves := {stage: logged for stage, logged in records.items() if series(logged, "loss")[0]}:
        return curves
    raise ValueError(f"{run}: nothing to plot yet: metrics.jsonl has no loss")


def named(what: str, stage: str) -> str:
    return f"{what}_{stage}.png" if stage else f"{what}.png"


def encode(model: Any, text: str, run: Path, state: Mapping[str, Any] = {}) -> tuple[Any, ...]:
    """The labels of the queries and of the keys, and the inputs of `attention_maps`: the ids (1, T) of the text, cut to
    the model's maximum length; for an encoder-decoder, the ids of the source and of its translation.

    state: the snapshot's state.
    """
    if isinstance(model, EncoderDecoder):
        subwords = load_vocabulary(run, state)
        source = np.append(subwords.encode(text), subwords[END])[None, :]
        lengths = np.array([source.shape[1]])
        (best,) = beam_search(model, source, lengths, subwords[BEGIN], subwords[END])
        target = np.concatenate([[subwords[BEGIN]], best.ids])[None, :]
        name = subwords.tokenizer.id_to_token
        return [name(int(i)) for i in (*best.ids, subwords[END])], [name(int(i)) for i in source[0]], source, target
    vocabulary, longest = load_reader(run, model, state), model.body.max_length
    if isinstance(vocabulary, Vocabulary):
        ids = vocabulary.encode(text)[:longest]
        labels = vocabulary.decode(ids).split()
    elif vocabulary is not None:
        ids = vocabulary.encode(text)[:longest]
        labels = [vocabulary.pieces[i].decode("utf-8", "replace").replace(" ", "␣") for i in ids]
    else:
        ids = np.frombuffer(text.encode("utf-8"), np.uint8)[:longest]
        labels = [chr(i) if 32 < i < 127 else "␣" if i == 32 else "·" for i in ids]
    return labels, labels, ids[None, :]


def attention_maps(model: Any, ids: np.ndarray, target: np.ndarray | None = None) -> np.ndarray:
    """The attention probabilities (depth, H, T, S): self-attention on ids (1, T), S = T; or, for an encoder-decoder,
    cross-attention from target (1, T) to the source, ids (1, S).
    """
    with reference_only():
        if target is not None:
            _, cache = model.forward(ids, np.array([ids.shape[1]]), target)
            caches = [block.cross for block in cache.decoder.stack.blocks]
        else:
            _, cache = model.body.forward(ids, getattr(model, "pattern", None))
            caches = [
                block.forward(*c.inputs, **c.options)[1] if isinstance(c, RecomputeCache) else c
                for block, c in zip(model.body.blocks, cache.stack.blocks, strict=True)
            ]
    return np.stack([to_cpu(probabilities(cache)[0]) for cache in caches])


def probabilities(cache: Any) -> Any:
    """The attention probabilities (B, H, T, S) in a block's cache, which is a tree of tuples; None if it has none."""
    if hasattr(cache, "probabilities"):
        return cache.probabilities
    parts = cache if isinstance(cache, tuple) else ()
    return next((p for p in map(probabilities, parts) if p is not None), None)


@default_style()
def plot_curves(records: list[dict[str, Any]], settings: dict[str, Any], path: Path) -> Path:
    """Plot by step: training and validation loss, the first other validation score, and the learning rate."""
    figure, [(left, middle, right)] = subplots(1, 3, figsize=(13, 3.8))
    steps, loss = series(records, "loss")
    few = dict(marker="o", markersize=3) if len(steps) < 25 else {}  # a single point makes no line
    width = max(1, len(loss) // 40)
    left.plot(steps, loss, color="tab:blue", alpha=0.3 if width > 1 else 1, label="training, one batch", **few)
    if width > 1:
        left.plot(*smoothed(steps, loss, width), color="tab:blue", label=f"training, mean of {width} batches")
    left.plot(*series(records, "validation_loss"), "o-", color="tab:orange", markersize=3, label="validation")
    left.set(xlabel="step", ylabel="loss (nats)", title="Loss")
    left.legend(frameon=False)

    score = score_of(records)
    steps, values = scores(records, score)
    higher = score.endswith("accuracy")
    middle.plot(steps, values, "o-", color="tab:orange", markersize=3)
    if values and (higher or score == "loss" or score.startswith("bits_")):  # else it is not known which is the best
        best = int(np.argmax(values) if higher else np.argmin(values))
        middle.plot(steps[best], values[best], "o", color="tab:red", label=f"best: {values[best]:.4g} at {steps[best]}")
        middle.legend(frameon=False)
    middle.set(xlabel="step", ylabel=labelled(score), title="Validation")

    right.plot(*series(records, "lr"), color="tab:green", **few)
    right.set(xlabel="step", ylabel="learning rate", title="Learning rate")
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    title = f"{settings['program']}, preset {settings['preset']}, seed {settings['seed']}"
    figure.suptitle(as_label(title))
    return save(figure, path)


@default_style()
def plot_comparison(runs: Mapping[str, list[dict[str, Any]]], path: Path) -> Path:
    """Plot by step, a colour for each run: the training loss, a mean over as many steps in all runs, and the validation
    score. This is the first that is not a loss, if all runs that have been scored have it, and else the loss.
    """
    of_runs = {score_of(records) for records in runs.values() if validated(records)}
    score = of_runs.pop() if len(of_runs) == 1 else "loss"
    window = min(series(records, "loss")[0][-1] for records in runs.values()) // 12  # of the shortest run
    figure, [(left, right)] = subplots(1, 2, figsize=(10, 4.2))
    for number, (name, records) in enumerate(runs.items()):
        color = f"C{number % 10}"
        steps, loss = series(records, "loss")
        steps, mean = smoothed(steps, loss, max(1, window * len(steps) // steps[-1]))
        name = as_label(name)
        left.plot(steps, mean, color=color, label=name, **(dict(marker="o", markersize=3) if len(steps) < 2 else {}))
        steps, values = scores(records, score)
        label = f"{name}: {values[-1]:.4g}" if values else name
        right.plot(steps, values, "o-", color=color, markersize=3, label=label)
    left.set(xlabel="step", ylabel="loss (nats)", title=f"Training, mean over {max(1, window)} steps")
    right.set(xlabel="step", ylabel=labelled(score), title="Validation, with the last value")
    for axes in (left, right):
        axes.legend(frameon=False)
    return save(figure, path)


def as_label(text: str) -> str:
    """Text from a file for a figure, which hides a legend's names that begin with "_", takes what is between two $ for
    TeX, and cannot draw control characters.
    """
    return ("\u200b" if text.startswith("_") else "") + printable(text).replace("$", r"\$")


def series(records: list[dict[str, Any]], name: str) -> tuple[list, list]:
    """The steps at which a value was logged, and the values."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smoothed(steps: list, values: list, width: int) -> tuple[list, np.ndarray]:
    """The mean of the last `width` values at a step, from the step on that has as many."""
    return steps[width - 1 :], np.convolve(values, np.ones(width) / width, mode="valid")


def validated(records: list[dict[str, Any]]) -> list[str]:
    """The names of the validation scores that were logged."""
    return [name.removeprefix("validation_") for r in records for name in r if name.startswith("validation_")]


def score_of(records: list[dict[str, Any]]) -> str:
    """The name of the first validation score that is not a loss; "loss" if there is none."""
    return next((name for name in validated(records) if name != "loss"), "loss")


def scores(records: list[dict[str, Any]], score: str) -> tuple[list, list]:
    """The steps at which this score was taken, and its values, in percent if it is an accuracy."""
    steps, values = series(records, f"validation_{score}")
    return steps, [100 * v if score.endswith("accuracy") else v for v in values]


def labelled(score: str) -> str:
    """A score's name and unit."""
    return as_label(score.replace("_", " ") + " (%)" * score.endswith("accuracy") + " (nats)" * (score == "loss"))


def save(figure: Any, path: Path) -> Path:
    """Write a figure of curves over steps."""
    for axes in figure.axes:
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return written(figure, path, dpi=120)


def written(figure: Any, path: Path, **options: Any) -> Path:
    """Write a figure to a .png, whose folder is made if necessary. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", **options)
    return path


@default_style()
def plot_attention(maps: np.ndarray, labels: list[str], path: Path, columns: list[str] | None = None) -> Path:
    """Plot a grid of attention maps (depth, H, T, S): a row for each layer, a column for each head.

    labels: of the T queries. columns: labels of the S keys; by default the same.
    """
    depth, heads, T, S = maps.shape
    every = 1 + max(T, S) // 48  # label only some of many tokens
    columns = [as_label(label) for label in (labels if columns is None else columns)[::every]]
    labels = [as_label(label) for label in labels[::every]]
    size = min(3.6, max(1.8, 0.08 * max(T, S)))  # inches, with room for the labels
    figure, axes = subplots(depth, heads, figsize=(size * heads + 1.4, size * depth + 0.5))
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, 0, 1)  # the same in all plots: uniform attention is pale for any number of tokens
    for layer, row in enumerate(axes):
        for head, cell in enumerate(row):
            image = cell.imshow(maps[layer, head], cmap="Blues", norm=norm, interpolation="nearest")
            cell.set_xticks(range(0, S, every), columns if layer == depth - 1 else [""] * len(columns), rotation=90)
            cell.set_yticks(range(0, T, every), labels if head == 0 else [""] * len(labels))
            cell.tick_params(length=0, pad=1, labelsize=6)
            cell.spines[:].set_color("lightgray")
            if layer == 0:
                cell.set_title(f"head {head + 1}", fontsize=9)
            if head == 0:
                cell.set_ylabel(f"layer {layer + 1}", fontsize=9)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=30, pad=0.01)
    bar.set_label("attention of row to column", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return written(figure, path, dpi=130)


@default_style()
def plot_positions(model: Any, path: Path) -> Path:
    """Plot the model's position encodings as a heat map, and the cosine similarity of each pair. For relative positions
    these are encodings of distances.
    """
    positions = model.body.positions
    length, width = model.body.max_length, model.config["d_model"]
    nothing = to_device(np.zeros((1, length, width), np.float32), model.device)
    table = sinusoidal_positions(length, width) if positions is None else to_cpu(positions(nothing))[0]
    normed = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    kind, place = "No positions in the model; sinusoidal", "position"
    if positions is not None:
        kind = "Learned" if positions.parameters() else "Sinusoidal"
    elif isinstance(getattr(model.body.blocks[0], "attention", None), RelativeSelfAttention):
        kind, place = "Relative", "distance"
    figure, [(left, right)] = subplots(1, 2, figsize=(11, 4.4))
    limit = float(np.percentile(np.abs(table), 99))
    for axes, values, largest, aspect in (left, table, limit, "auto"), (right, normed @ normed.T, 1, "equal"):
        image = axes.imshow(values, "RdBu_r", aspect=aspect, vmin=-largest, vmax=largest, interpolation="nearest")
        figure.colorbar(image, ax=axes)
    left.set(xlabel="column", ylabel=place, title=f"{kind} position encodings")
    right.set(xlabel=place, ylabel=place, title=f"Cosine of two {place}s' encodings")
    return written(figure, path, dpi=120)

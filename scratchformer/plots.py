"""Pictures of a run: learning curves, attention maps, position encodings. Needs matplotlib, an extra."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .backend import to_cpu
from .data import Vocabulary
from .dispatch import reference_only
from .models import Classifier
from .nn import Layer, Recompute
from .ops import sinusoidal_positions
from .training import best_snapshot, load_model, read_metrics
from .training.program import read_settings

TEXTS = {
    "Classifier": "i expected nothing , but this is not a bad film : the plot is thin , the acting is wonderful .",
    "LanguageModel": "The [[French Revolution]] of 1789 was a period",
}


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plotting needs matplotlib: pip install 'scratchformer[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_run(run: Path, text: str | None = None, out: Path | None = None) -> Iterator[Path]:
    """Draw curves.png, attention.png and positions.png of the run in folder `run` into `out`; yield their paths.

    text: whose attention is shown, by default a short example. Raises ValueError if the folder holds no run.
    """
    settings = read_settings(run)
    metrics = run / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    if not any("loss" in r for r in records):
        raise ValueError(f"{run}: nothing to plot yet, no loss is in {metrics.name}")
    model, _ = load_model(best_snapshot(run))
    ids, labels = encode(model, TEXTS[type(model).__name__] if text is None else text, run)
    out = out or run / "plots"
    out.mkdir(parents=True, exist_ok=True)
    yield plot_curves(records, settings, out / "curves.png")
    yield plot_attention(attention_maps(model, ids), labels, out / "attention.png")
    yield plot_positions(model, out / "positions.png")


def encode(model: Layer, text: str, run: Path) -> tuple[np.ndarray, list[str]]:
    """The ids (1, T) of a text, as far as the model can read it, and a label for each token."""
    if isinstance(model, Classifier):
        vocabulary = Vocabulary.load(run / "vocabulary.txt")
        ids = vocabulary.encode(text)[: model.body.max_length]
        labels = vocabulary.decode(ids).split()
    else:
        ids = np.frombuffer(text.encode("utf-8"), np.uint8)[: model.context]
        labels = [chr(i) if 32 < i < 127 else "␣" if i == 32 else "·" for i in ids]
    if len(ids) == 0:
        raise ValueError("--text: expected at least one token")
    return ids[None, :], labels


def attention_maps(model: Layer, ids: np.ndarray) -> np.ndarray:
    """The attention probabilities (depth, H, T, T) with which the model reads ids (1, T)."""
    with reference_only():
        _, cache = model.body.forward(ids)
        blocks = [
            block.layer.forward(*c.inputs, **c.options)[1] if isinstance(block, Recompute) else c
            for block, c in zip(model.body.blocks, cache.blocks, strict=True)
        ]
    return np.stack([to_cpu(c.attention.attention.probabilities[0]) for c in blocks])


def plot_curves(records: list[dict[str, Any]], settings: dict[str, Any], path: Path) -> Path:
    """Training and validation loss, the score that chose the best model, and the learning rate, by step."""
    plt = pyplot()

    def series(name: str) -> tuple[list, list]:
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    accuracy, bits = "validation_accuracy", "validation_bits_per_byte"
    score = accuracy if any(accuracy in r for r in records) else bits
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    steps, loss = series("loss")
    width = max(1, len(loss) // 40)  # points that the smooth curve averages
    left.plot(steps, loss, color="tab:blue", alpha=0.3 if width > 1 else 1, label="training, one batch")
    if width > 1:
        smooth = np.convolve(loss, np.ones(width) / width, mode="valid")
        left.plot(steps[width - 1 :], smooth, color="tab:blue", label=f"training, mean of {width} batches")
    left.plot(*series("validation_loss"), "o-", color="tab:orange", markersize=3, label="validation")
    left.set(xlabel="step", ylabel="loss (nats)", title="Loss")
    left.legend(frameon=False)

    steps, values = series(score)
    percent = score == accuracy
    values = [100 * v if percent else v for v in values]
    best = int(np.argmax(values) if percent else np.argmin(values)) if values else None
    middle.plot(steps, values, "o-", color="tab:orange", markersize=3)
    if best is not None:
        middle.plot(steps[best], values[best], "o", color="tab:red", label=f"best: {values[best]:.4g} at {steps[best]}")
        middle.legend(frameon=False)
    unit = "accuracy (%)" if percent else "bits per byte"
    middle.set(xlabel="step", ylabel=unit, title="Validation")

    right.plot(*series("lr"), color="tab:green")
    right.set(xlabel="step", ylabel="learning rate", title="Learning rate")
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{settings['program']}, preset {settings['preset']}, seed {settings['seed']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def plot_attention(maps: np.ndarray, labels: list[str], path: Path) -> Path:
    """A grid of attention maps (depth, H, T, S): a row of pictures for each layer, a column for each head."""
    plt = pyplot()
    from matplotlib.colors import PowerNorm

    depth, heads, T, _ = maps.shape
    every = 1 + T // 48  # with more tokens only some are labelled
    ticks, labels = range(0, T, every), labels[::every]
    size = min(3.6, max(1.8, 0.08 * T))  # inches: room for a label a token
    figure, axes = plt.subplots(
        depth, heads, figsize=(size * heads + 1.4, size * depth + 0.5), squeeze=False, layout="constrained"
    )
    norm = PowerNorm(0.5, 0, float(maps.max()))
    for layer, row in enumerate(axes):
        for head, cell in enumerate(row):
            image = cell.imshow(maps[layer, head], cmap="Blues", norm=norm, interpolation="nearest")
            cell.set_xticks(ticks, labels if layer == depth - 1 else [""] * len(labels), fontsize=6, rotation=90)
            cell.set_yticks(ticks, labels if head == 0 else [""] * len(labels), fontsize=6)
            cell.tick_params(length=0, pad=1)
            cell.spines[:].set_color("lightgray")
            if layer == 0:
                cell.set_title(f"head {head + 1}", fontsize=9)
            if head == 0:
                cell.set_ylabel(f"layer {layer + 1}", fontsize=9)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=30, pad=0.01)
    bar.set_label("attention of the row's token to the column's token")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def plot_positions(model: Layer, path: Path) -> Path:
    """The model's position encodings, learned or sinusoidal, as a heat map, and the likeness of any two of them."""
    plt = pyplot()
    positions = model.body.positions
    learned = hasattr(positions, "table")
    length, width = model.body.max_length, model.config["d_model"]
    table = to_cpu(positions.table.data) if learned else sinusoidal_positions(length, width)
    normed = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    limit = float(np.percentile(np.abs(table), 99))
    image = left.imshow(table, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    kind = "Learned" if learned else "Sinusoidal" if positions is not None else "No positions in the model; sinusoidal"
    left.set(xlabel="column", ylabel="position", title=f"{kind} position encodings")
    figure.colorbar(image, ax=left)
    image = right.imshow(normed @ normed.T, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    right.set(xlabel="position", ylabel="position", title="Cosine of two positions' encodings")
    figure.colorbar(image, ax=right)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path

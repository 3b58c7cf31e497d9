"""Train a sparse transformer on images as sequences of pixels (scikit-learn's handwritten digits), then let it draw.

A token for the digit is followed by the 8 × 8 pixels, row by row. Half of the heads see the last eight pixels, the
other half every eighth pixel before them. The picture digits.png in the run's folder shows test images, generated
images, and test images whose lower half was generated. The data comes with scikit-learn:
pip install 'scratchformer[units]'.
"""

import math
from pathlib import Path

import numpy as np

from scratchformer import Key
from scratchformer.commands.plots import subplots, written
from scratchformer.data import DrawnBatches, Images, TextBatch, load_digits
from scratchformer.data.digits import CLASSES, GREYS, SIDE
from scratchformer.generation import generate
from scratchformer.models import SparseTransformer
from scratchformer.optim import AdamW, Cosine
from scratchformer.training import mean_loss, start

PRESETS = {
    "small": dict(
        d_model=64, heads=4, depth=4, stride=SIDE, kind="strided", dropout=0.1, batch_size=64, lr=3e-3,
        weight_decay=0.01, warmup=50, steps=1500,
    ),
}  # fmt: skip
OPTIONS = {"data": None}
DRAWN = 4  # generated images of each digit
TEMPERATURE = 0.8


def data(run):
    return load_digits()


def model(run, digits):
    sizes = run.sizes("d_model", "heads", "depth", "stride", "kind", "dropout")
    return SparseTransformer(GREYS + CLASSES, context=SIDE * SIDE, key=run.key("weights"), **sizes)


def score(run, replicas, digits, part):
    loss = mean_loss(replicas, as_sequences(getattr(digits, part)).split(64))
    return {"loss": loss, "bits_per_pixel": loss / math.log(2)}


def as_sequences(images: Images) -> TextBatch:
    """Each image as its digit's token and all pixels but the last; the targets are all pixels."""
    pixels = images.pixels.reshape(len(images.labels), -1).astype(np.int32)
    digits = GREYS + images.labels[:, None].astype(np.int32)
    return TextBatch(np.concatenate([digits, pixels[:, :-1]], axis=1), pixels)


def bits_of_frequencies(train: Images, test: Images) -> float:
    """The baseline, in bits per pixel: for each digit and pixel, how often each grey occurs, plus one."""
    bits = 0.0
    for digit in range(CLASSES):
        seen, new = (part.pixels[part.labels == digit].reshape(-1, SIDE * SIDE) for part in (train, test))
        counts = 1 + (seen[:, :, None] == np.arange(GREYS)).sum(axis=0)  # (pixels, greys)
        p = counts / counts.sum(axis=1, keepdims=True)
        bits -= np.log2(p[np.arange(SIDE * SIDE), new]).sum()
    return bits / test.pixels.size


def draw(model: SparseTransformer, prompts: np.ndarray, key: Key) -> np.ndarray:
    """Images (n, SIDE, SIDE): the pixels of prompts (n, 1 + pixels), continued by sampling."""
    known, greys = prompts[:, 1:], np.arange(GREYS + CLASSES) < GREYS
    missing = SIDE * SIDE - known.shape[1]
    sampled = generate(model, prompts, missing, temperature=TEMPERATURE, key=key, allowed=greys)
    return np.concatenate([known, np.stack(list(sampled), axis=1)], axis=1).reshape(-1, SIDE, SIDE)


def pictures(run, model, test):
    """Rows of images by name; each row has one image of every digit."""
    first = [int(np.flatnonzero(test.labels == digit)[0]) for digit in range(CLASSES)]
    real = Images(*(a[first] for a in test))
    prompts, rows = as_sequences(real).ids, {"real": real.pixels}
    for i in range(DRAWN):
        rows["generated" if i == 0 else " " * i] = draw(model, prompts[:, :1], run.key("draw", i))
    upper = prompts[:, : 1 + SIDE * SIDE // 2]
    return rows | {"lower half generated": draw(model, upper, run.key("complete"))}


def plot_images(rows: dict[str, np.ndarray], path: Path) -> Path:
    """Plot a grid with a row of images (n, SIDE, SIDE) for each name."""
    columns = max(map(len, rows.values()))
    figure, axes = subplots(len(rows), columns, figsize=(0.55 * columns + 1.6, 0.6 * len(rows)), layout=None)
    for (name, images), line in zip(rows.items(), axes, strict=True):
        for image, cell in zip(images, line, strict=True):
            cell.imshow(image, cmap="gray_r", vmin=0, vmax=GREYS - 1)
            cell.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    return written(figure, path, dpi=80, bbox_inches="tight")


def main(run):
    digits = run.load(data)
    print(f"{len(digits.train.labels):,} training images")
    batches = DrawnBatches(as_sequences(digits.train), run.batch_size, run.key("batches"))
    with run.replicas(model(run, digits), batches) as replicas:
        adam = AdamW(replicas.model.parameters(), run.lr, weight_decay=run.weight_decay)
        rate = Cosine(run.lr, min(run.warmup, run.total // 5), run.total, run.lr / 10)
        for step in run.steps(replicas, adam, batches, select=("bits_per_pixel", "min")):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))  # forward and backward
            norm = replicas.clip(adam, 1.0)
            adam.lr = rate(step)
            replicas.step(adam)
            run.log(loss=loss, norm=norm)
            if run.due(max(25, run.total // 20)):
                run.keep_best(score(run, replicas, digits, "validation"))
        run.load_best()
        bits = score(run, replicas, digits, "test")["bits_per_pixel"]
    baseline = bits_of_frequencies(digits.train, digits.test)
    print(f"{bits:.4f} bits per pixel on {len(digits.test.labels)} test images, the best of {run.total} steps")
    print(f"{baseline:.4f} by each pixel's frequencies, {math.log2(GREYS):.4f} if all greys were equally likely")
    print(plot_images(pictures(run, replicas.model, digits.test), run.out / "digits.png"))


if __name__ == "__main__":
    start(main)

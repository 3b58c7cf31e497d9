"""Train a sparse transformer on images as sequences of pixels, then let it draw: scikit-learn's handwritten digits.

An image of 8 × 8 pixels is read row by row after a token that says which digit it is. Half of the heads see the last
eight pixels, the other half every eighth before them. The picture digits.png in the run's folder has real images of
the test part, images that were generated, and test images whose lower half was generated. The data comes with
scikit-learn: pip install 'scratchformer[units]'.
"""

import math

import numpy as np

from scratchformer import Key
from scratchformer.data import Images, TextBatch, load_digits
from scratchformer.data.digits import CLASSES, GREYS, SIDE
from scratchformer.generation import generate
from scratchformer.models import SparseTransformer
from scratchformer.optim import AdamW, Cosine
from scratchformer.plots import pyplot
from scratchformer.training import Replicas, best_snapshot, estimate, load_model, train
from scratchformer.training.memory import resident_bytes
from scratchformer.training.program import run_program, start_run

PRESETS = {
    "small": dict(
        d_model=64, heads=4, depth=4, stride=SIDE, kind="strided", dropout=0.1, batch_size=64, lr=3e-3,
        weight_decay=0.01, warmup=50, steps=1500,
    ),
}  # fmt: skip
DRAWN = 4  # images generated of each digit
TEMPERATURE = 0.8


def as_sequences(images: Images) -> TextBatch:
    """Of each image the token of its digit and all pixels but the last; and as targets all pixels."""
    pixels = images.pixels.reshape(len(images.labels), -1).astype(np.int32)
    digits = GREYS + images.labels[:, None].astype(np.int32)
    return TextBatch(np.concatenate([digits, pixels[:, :-1]], axis=1), pixels)


class DigitBatches:
    """Training batches: images drawn at random at every step."""

    def __init__(self, images: Images, batch_size: int, key: Key) -> None:
        self.images, self.batch_size, self.key = images, batch_size, key

    def batch(self, step: int) -> TextBatch:
        rows = self.key.fold(step).generator().integers(0, len(self.images.labels), self.batch_size)
        return as_sequences(Images(*(a[rows] for a in self.images)))


def bits_per_pixel(replicas: Replicas, images: Images) -> dict[str, float]:
    """The mean over all pixels of all images."""
    batch = as_sequences(images)

    def nats(model: SparseTransformer, part: TextBatch) -> float:
        return float(model.loss(*replicas.move(part))[0]) * part.weight

    loss = math.fsum(replicas.map_models(nats, batch.split(64))) / batch.weight
    return {"loss": loss, "bits_per_pixel": loss / math.log(2)}


def bits_of_frequencies(train: Images, test: Images) -> float:
    """The baseline, bits per pixel: how often each grey stands at each pixel of each digit, every grey once more."""
    bits = 0.0
    for digit in range(CLASSES):
        seen, new = (part.pixels[part.labels == digit].reshape(-1, SIDE * SIDE) for part in (train, test))
        counts = 1 + (seen[:, :, None] == np.arange(GREYS)).sum(axis=0)  # (pixels, greys)
        p = counts / counts.sum(axis=1, keepdims=True)
        bits -= np.log2(p[np.arange(SIDE * SIDE), new]).sum()
    return bits / test.pixels.size


def draw(model: SparseTransformer, prompts: np.ndarray, key: Key) -> np.ndarray:
    """Images (n, SIDE, SIDE) that begin as prompts (n, 1 + pixels) do, and are sampled from there on."""
    known, greys = prompts[:, 1:], np.arange(GREYS + CLASSES) < GREYS
    missing = SIDE * SIDE - known.shape[1]
    sampled = generate(model, prompts, missing, temperature=TEMPERATURE, key=key, allowed=greys)
    return np.concatenate([known, np.stack(list(sampled), axis=1)], axis=1).reshape(-1, SIDE, SIDE)


def save_picture(path, rows: dict[str, np.ndarray]) -> None:
    """A row of images (n, SIDE, SIDE) for each name, in a grid."""
    plt = pyplot()
    columns = max(map(len, rows.values()))
    figure, axes = plt.subplots(len(rows), columns, figsize=(0.55 * columns + 1.6, 0.6 * len(rows)))
    for (name, images), line in zip(rows.items(), axes, strict=True):
        for image, cell in zip(images, line, strict=True):
            cell.imshow(image, cmap="gray_r", vmin=0, vmax=GREYS - 1)
            cell.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    figure.savefig(path, dpi=80, bbox_inches="tight")
    plt.close(figure)


def main(argv=None):
    run = start_run("digits", __doc__, PRESETS, argv)
    if run.data:
        raise ValueError("--data: the digits come with scikit-learn; leave it out")
    digits = load_digits()
    before, key = resident_bytes(), Key(run.seed)
    sizes = {name: getattr(run, name) for name in ("d_model", "heads", "depth", "stride", "kind", "dropout")}
    model = SparseTransformer(GREYS + CLASSES, context=SIDE * SIDE, key=key.fold("weights"), **sizes).to(run.device)
    print(f"{len(digits.train.labels):,} training images; {model.flat.data.size:,} parameters")

    batches = DigitBatches(digits.train, run.batch_size, key.fold("batches"))
    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(replicas.describe(batches.batch(0)))
        if run.estimate:
            return print(estimate(replicas, batches.batch(0), before))
        train(
            replicas,
            AdamW(model.parameters(), run.lr, weight_decay=run.weight_decay),
            Cosine(run.lr, min(run.warmup, run.steps // 5), run.steps, floor=run.lr / 10),
            batches,
            run.steps,
            run.out,
            evaluate=lambda: bits_per_pixel(replicas, digits.validation),
            evaluate_every=max(25, run.steps // 20),
            select=("bits_per_pixel", "min"),
            seed=run.seed,
            identity={"corpus": "scikit-learn's digits", "data": digits.fingerprint},
            resume=run.resume,
            tensorboard=run.tensorboard,
            on_start=run.save,
        )
        best, _ = load_model(best_snapshot(run.out))
        model.load_state_dict(best.state_dict())
        test = bits_per_pixel(replicas, digits.test)["bits_per_pixel"]
    baseline = bits_of_frequencies(digits.train, digits.test)
    print(f"{test:.4f} bits per pixel on {len(digits.test.labels)} test images, the best of {run.steps} steps")
    print(f"{baseline:.4f} by each pixel's frequencies, {math.log2(GREYS):.4f} if all greys were equally likely")

    first = [int(np.flatnonzero(digits.test.labels == digit)[0]) for digit in range(CLASSES)]
    real = Images(*(a[first] for a in digits.test))
    prompts = as_sequences(real).ids
    rows = {"real": real.pixels}
    for i in range(DRAWN):
        rows["generated" if i == 0 else " " * i] = draw(model, prompts[:, :1], key.fold("draw", i))
    rows["lower half generated"] = draw(model, prompts[:, : 1 + SIDE * SIDE // 2], key.fold("complete"))
    save_picture(run.out / "digits.png", rows)
    print(run.out / "digits.png")


if __name__ == "__main__":
    run_program(main)

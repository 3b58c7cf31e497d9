"""Train a sparse transformer on images as sequences of pixels (scikit-learn's handwritten digits), then let it draw.

A token for the digit is followed by the 8 × 8 pixels, row by row. Half of the heads see the last eight pixels, the
other half every eighth pixel before them. The picture digits.png in the run's folder shows test images, generated
images, and test images whose lower half was generated. The data comes with scikit-learn:
pip install 'scratchformer[units]'.
"""

import math

import numpy as np

from scratchformer import Key
from scratchformer.commands.plots import plot_images
from scratchformer.data import DrawnBatches, Images, TextBatch, load_digits
from scratchformer.data.digits import CLASSES, GREYS, SIDE
from scratchformer.generation import generate
from scratchformer.models import SparseTransformer
from scratchformer.shell.progress import counted
from scratchformer.training import Program, mean_loss

PRESETS = {
    "small": dict(
        d_model=64, heads=4, depth=4, stride=SIDE, kind="strided", dropout=0.1, batch_size=64, lr=3e-3,
        weight_decay=0.01, warmup=50, steps=1500,
    ),
}  # fmt: skip
DRAWN = 4  # generated images of each digit
TEMPERATURE = 0.8


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


class Digits(Program):
    name = "digits"
    description = __doc__
    presets = PRESETS
    without = ("data",)

    def load(self):
        self.digits = load_digits()

    def identity(self):
        return {"corpus": "scikit-learn's digits", "data": self.digits.fingerprint}

    def make_model(self, key):
        sizes = self.sizes("d_model", "heads", "depth", "stride", "kind", "dropout")
        return SparseTransformer(GREYS + CLASSES, context=SIDE * SIDE, key=key, **sizes)

    def make_batches(self, key):
        return DrawnBatches(as_sequences(self.digits.train), self.run.batch_size, key)

    def schedule(self):
        return super().schedule(floor=self.lr / 10)

    def training(self):
        return dict(evaluate_every=max(25, self.steps // 20), select=("bits_per_pixel", "min"))

    def evaluate(self, replicas, part):
        loss = mean_loss(replicas, as_sequences(getattr(self.digits, part)).split(64))
        return {"loss": loss, "bits_per_pixel": loss / math.log(2)}

    def describe(self):
        print(f"{len(self.digits.train.labels):,} training images; {self.parameters} parameters")

    def report(self, state, test):
        bits, images = test["bits_per_pixel"], len(self.digits.test.labels)
        baseline = bits_of_frequencies(self.digits.train, self.digits.test)
        print(f"{bits:.4f} bits per pixel on {images} test images, the best of {self.steps} steps")
        print(f"{baseline:.4f} by each pixel's frequencies, {math.log2(GREYS):.4f} if all greys were equally likely")
        print(plot_images(self.pictures(), GREYS - 1, self.out / "digits.png"))

    def pictures(self):
        """Rows of images by name; each row has one image of every digit."""
        first = [int(np.flatnonzero(self.digits.test.labels == digit)[0]) for digit in range(CLASSES)]
        real = Images(*(a[first] for a in self.digits.test))
        prompts, rows = as_sequences(real).ids, {"real": real.pixels}
        for i in counted(range(DRAWN), "drawing", "rows"):
            rows["generated" if i == 0 else " " * i] = draw(self.model, prompts[:, :1], self.key.fold("draw", i))
        upper = prompts[:, : 1 + SIDE * SIDE // 2]
        return rows | {"lower half generated": draw(self.model, upper, self.key.fold("complete"))}


if __name__ == "__main__":
    Digits.main()

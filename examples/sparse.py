"""Train a sparse transformer on long byte sequences, of Wikipedia (enwik8) or of photographs: a context of 4,096 bytes.

    python examples/sparse.py                                # context 4,096, strided attention
    python examples/sparse.py --preset fixed                 # the fixed pattern
    python examples/sparse.py --preset full --minutes 10     # for comparison: full attention, context 256
    python examples/sparse.py --preset photos                # context 4,096, on photographs
    python examples/sparse.py --preset photos-full           # for comparison: full attention, context 256

The models have the same width and depth, read the same number of bytes per step, and are scored with their whole
context. With --minutes the program times a few steps first and trains for as many as the time allows.

The text is --data, and without it the official archive is downloaded; without a network, the program says so and trains
on the sources of Python's standard library, as with --data stdlib. The photographs come with scikit-learn: pip install
'scratchformer[units]'. Each of their lines is stored as 640 red values, 640 green and 640 blue ones. So the best hint
about a byte, another colour of the same pixel, is 640 bytes before it, and 639 before the position that predicts it.
"""

import copy
import time

from scratchformer.data import load_photos
from scratchformer.data.photos import WIDTH
from scratchformer.models import LanguageModel, SparseTransformer
from scratchformer.shell.progress import counted
from scratchformer.training import MUON_OPTIONS, LanguageProgram

SIZES = dict(d_model=128, heads=4, depth=4, lr=2e-3, warmup=100, steps=1000)
PHOTOS = SIZES | dict(corpus="photographs", optimizer="muon")
FULL = dict(kind="full", context=256, stride=0, width=0, batch_size=32)
PRESETS = {
    "small": SIZES | dict(kind="strided", context=4096, stride=64, width=1, batch_size=2),
    "fixed": SIZES | dict(kind="fixed", context=4096, stride=64, width=4, batch_size=2),
    "full": SIZES | FULL,
    "photos": PHOTOS | dict(kind="strided", context=4096, stride=WIDTH - 1, window=32, width=1, batch_size=2),
    "photos-full": PHOTOS | FULL,
}
MEASURED = 5  # steps that are timed, after one to warm up
OPTIONS = MUON_OPTIONS | {
    "minutes": dict(
        type=float, metavar="M", least=1e-6, most=10**6, help="train for about M minutes, instead of a number of steps"
    ),
}


class Sparse(LanguageProgram):
    name = "sparse"
    description = __doc__
    presets = PRESETS
    options = OPTIONS
    evaluations = 10

    def check(self):
        if {"minutes", "steps"} <= self.run.given:
            raise ValueError("--minutes: this sets the number of steps, so leave out --steps")

    @property
    def of_photographs(self):
        return getattr(self.run, "corpus", None) == "photographs"  # a run of an earlier version has no such setting

    def load(self):
        if not self.of_photographs:
            super().load()
        elif self.run.data is not None:
            raise ValueError(f"--data: the preset {self.run.preset} takes none, so leave it out")
        else:
            self.corpus, self.test_part = load_photos(), "the last 32 lines of each"

    def make_model(self, key):
        sizes = self.sizes("d_model", "heads", "depth", "context")
        if self.run.kind == "full":
            return LanguageModel(256, norm="pre", activation="gelu", embedding_std=0.02, key=key, **sizes)
        window = getattr(self.run, "window", None)
        return SparseTransformer(256, key=key, window=window, **sizes, **self.sizes("stride", "kind", "width"))

    def prepare(self, replicas):
        run = self.run
        if run.minutes and not run.resume:
            seconds = self.seconds_per_step(replicas)
            run.steps = run.ranks.from_first(lambda: max(1, round(60 * run.minutes / seconds)))
            print(f"{seconds:.3f} s a step: {run.steps} steps in {run.minutes:g} minutes")

    def seconds_per_step(self, replicas):
        """The mean time of a few steps of training. The optimizer steps a copy of the model."""
        twin = copy.deepcopy(self.model)
        optimizer = self.optimizer(twin)
        for step in counted(range(1 + MEASURED), "timing", "steps"):
            if step == 1:
                start = time.perf_counter()
            replicas.gradients(self.batches.batch(step), self.key)
            twin.flat.grad[...] = self.model.flat.grad
            optimizer.step()
            float(twin.flat.data[0])  # a GPU computes after these calls return; a number waits for it
        return (time.perf_counter() - start) / MEASURED

    def described(self, state, test):
        run = self.run
        read = f"after {run.steps} steps, {run.steps * run.batch_size * run.context:,} bytes read"
        return f"{run.kind} attention, context {run.context:,},\n{read}"

    def write(self):
        if not self.of_photographs:
            super().write()


if __name__ == "__main__":
    Sparse.main()

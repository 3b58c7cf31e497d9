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

from scratchformer.data import TextBatches, load_photos
from scratchformer.data.photos import WIDTH
from scratchformer.models import LanguageModel, SparseTransformer
from scratchformer.optim import Adam, Cosine, Muon
from scratchformer.training import evaluate_language_model, load_corpus, start, write_sample

SIZES = dict(d_model=128, heads=4, depth=4, lr=2e-3, warmup=100, steps=1000, window=None)
TEXT = SIZES | dict(corpus="text", optimizer="adam")
PHOTOS = SIZES | dict(corpus="photographs", optimizer="muon", muon_lr=0.02)
FULL = dict(kind="full", context=256, stride=0, width=0, batch_size=32)
PRESETS = {
    "small": TEXT | dict(kind="strided", context=4096, stride=64, width=1, batch_size=2),
    "fixed": TEXT | dict(kind="fixed", context=4096, stride=64, width=4, batch_size=2),
    "full": TEXT | FULL,
    "photos": PHOTOS | dict(kind="strided", context=4096, stride=WIDTH - 1, window=32, width=1, batch_size=2),
    "photos-full": PHOTOS | FULL,
}
OPTIONS = {
    "minutes": dict(
        type=float, metavar="M", min=1e-6, max=10**6, help="train for about M minutes, instead of a number of steps"
    ),
}
MEASURED = 5  # steps that are timed, after one to warm up


def check(run):
    if {"minutes", "steps"} <= run.given:
        raise ValueError("--minutes: this sets the number of steps, so leave out --steps")
    if run.corpus == "photographs" and run.data is not None:
        raise ValueError(f"--data: the preset {run.preset} takes none, so leave it out")


def data(run):
    return load_photos() if run.corpus == "photographs" else load_corpus(run)


def model(run, corpus):
    sizes = run.sizes("d_model", "heads", "depth", "context") | {"key": run.key("weights")}
    if run.kind == "full":
        return LanguageModel(256, norm="pre", activation="gelu", embedding_std=0.02, **sizes)
    return SparseTransformer(256, window=run.window, **sizes, **run.sizes("stride", "kind", "width"))


def score(run, replicas, corpus, part):
    return evaluate_language_model(replicas, run.scored(part, getattr(corpus, part)))


def make_optimizer(run, parameters):
    if run.optimizer == "adam":
        return Adam(parameters, run.lr)
    precision = "bfloat16" if run.precision == "bfloat16" else "float32"
    return Muon(parameters, run.muon_lr, run.lr, weight_decay=0.0, precision=precision)


def seconds_per_step(run, replicas, batches):
    """The mean time of a few steps of training. The optimizer steps a copy of the model."""
    twin = copy.deepcopy(replicas.model)
    optimizer = make_optimizer(run, twin.parameters())
    for step in range(1 + MEASURED):
        if step == 1:
            began = time.perf_counter()
        replicas.gradients(batches.batch(step), run.key())
        twin.flat.grad[...] = replicas.model.flat.grad
        optimizer.step()
        float(twin.flat.data[0])  # a GPU computes after these calls return; a number waits for it
    return (time.perf_counter() - began) / MEASURED


def main(run):
    corpus = run.load(data)
    print(f"{corpus.name}: {len(corpus.train):,} training bytes")
    batches = TextBatches(corpus.train, run.batch_size, run.context, run.key("batches"))
    with run.replicas(model(run, corpus), batches) as replicas:
        if run.minutes and not run.resumed:
            seconds = seconds_per_step(run, replicas, batches)
            run.total = run.ranks.from_first(lambda: max(1, round(60 * run.minutes / seconds)))
            print(f"{seconds:.3f} s a step: {run.total} steps in {run.minutes:g} minutes")
        optimizer = make_optimizer(run, replicas.model.parameters())
        peak = optimizer.lr
        rate = Cosine(peak, min(run.warmup, run.total // 5), run.total, peak / 10)
        for step in run.steps(replicas, optimizer, batches, select=("bits_per_byte", "min")):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))  # forward and backward
            norm = replicas.clip(optimizer, 1.0)
            optimizer.lr = rate(step)
            replicas.step(optimizer)
            run.log(loss=loss, norm=norm)
            if run.due(max(250, run.total // 10)):
                run.keep_best(score(run, replicas, corpus, "validation"))
        run.load_best()
        bits = score(run, replicas, corpus, "test")["bits_per_byte"]
    scored, part = len(run.scored("test", corpus.test)), "the last 32 lines of each"
    if run.corpus == "text":
        part = "the last 5%"
    where = (
        part if scored == len(corpus.test) else f"the first {run.share(scored, len(corpus.test), f'bytes of {part}')}"
    )
    print(f"{corpus.name}: {bits:.4f} bits per byte on {where}, {run.kind} attention, context {run.context:,},")
    print(f"after {run.total} steps, {run.total * run.batch_size * run.context:,} bytes read")
    if run.corpus == "text":
        write_sample(run, replicas.model, corpus)


if __name__ == "__main__":
    start(main)

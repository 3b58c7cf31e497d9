"""Train a sparse transformer on long byte sequences of Wikipedia (enwik8): a context of 4,096 bytes on a CPU.

    python examples/sparse.py                                # context 4,096, strided attention
    python examples/sparse.py --preset fixed                 # the fixed pattern
    python examples/sparse.py --preset full --minutes 10     # beside it, full attention of context 256

The models have the same width and depth, a step reads as many bytes, and each is scored with its whole context. With
--minutes the number of steps is what the time allows, from the time that a few steps take at the start. Without --data
the official archive is downloaded; without a network, the program says so and trains on the sources of Python's
standard library, as with --data stdlib.
"""

import math
import time

from scratchformer import Key
from scratchformer.data import VALIDATION_BYTES, TextBatches
from scratchformer.generation import printable, stream_text
from scratchformer.models import LanguageModel, SparseTransformer
from scratchformer.optim import Adam, Cosine
from scratchformer.training import Replicas, best_snapshot, estimate, evaluate_language_model, load_model, train
from scratchformer.training.memory import resident_bytes
from scratchformer.training.program import load_corpus, run_program, start_run

SIZES = dict(d_model=128, heads=4, depth=4, lr=2e-3, warmup=100, steps=1000)
PRESETS = {
    "small": SIZES | dict(kind="strided", context=4096, stride=64, width=1, batch_size=2),
    "fixed": SIZES | dict(kind="fixed", context=4096, stride=64, width=4, batch_size=2),
    "full": SIZES | dict(kind="full", context=256, stride=0, width=0, batch_size=32),
}
MEASURED = 5  # steps, after one that warms up
OPTIONS = {
    "minutes": dict(type=float, metavar="M", help="train for about so long, instead of a number of steps"),
}


def make_model(run, key: Key) -> LanguageModel:
    sizes = {name: getattr(run, name) for name in ("d_model", "heads", "depth", "context")}
    if run.kind == "full":
        return LanguageModel(256, norm="pre", activation="gelu", embedding_std=0.02, key=key, **sizes)
    return SparseTransformer(256, stride=run.stride, kind=run.kind, width=run.width, key=key, **sizes)


def seconds_per_step(replicas: Replicas, batches: TextBatches, key: Key) -> float:
    """The mean of a few steps, of forward and backward, which nearly all of a step's time goes to."""
    for step in range(1 + MEASURED):
        if step == 1:
            start = time.perf_counter()
        replicas.gradients(batches.batch(step), key)
    return (time.perf_counter() - start) / MEASURED


def main(argv=None):
    run = start_run("sparse", __doc__, PRESETS, argv, OPTIONS)
    if run.minutes is not None and not 0 < run.minutes < math.inf:
        raise ValueError(f"--minutes: expected a number > 0, got {run.minutes}")
    if {"minutes", "steps"} <= run.given:
        raise ValueError("--minutes: instead of a number of steps, so leave out --steps")
    corpus = load_corpus(run)
    before, key = resident_bytes(), Key(run.seed)
    model = make_model(run, key.fold("weights")).to(run.device)
    print(f"{corpus.name}: {len(corpus.train):,} training bytes; {model.flat.data.size:,} parameters")

    batches = TextBatches(corpus.train, run.batch_size, run.context, key.fold("batches"))
    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(replicas.describe(batches.batch(0)))
        if run.estimate:
            return print(estimate(replicas, batches.batch(0), before))
        if run.minutes and not run.resume:
            seconds = seconds_per_step(replicas, batches, key)
            run.steps = max(1, round(60 * run.minutes / seconds))
            print(f"{seconds:.3f} s a step: {run.steps} steps in {run.minutes:g} minutes")
        validation = corpus.validation[:VALIDATION_BYTES]
        train(
            replicas,
            Adam(model.parameters(), run.lr),
            Cosine(run.lr, min(run.warmup, run.steps // 5), run.steps, floor=run.lr / 10),
            batches,
            run.steps,
            run.out,
            evaluate=lambda: evaluate_language_model(replicas, validation),
            evaluate_every=max(250, run.steps // 10),
            select=("bits_per_byte", "min"),
            seed=run.seed,
            identity={"corpus": corpus.name, "data": corpus.fingerprint},
            resume=run.resume,
            tensorboard=run.tensorboard,
            on_start=run.save,
        )
        best, _ = load_model(best_snapshot(run.out))
        model.load_state_dict(best.state_dict())
        test = evaluate_language_model(replicas, corpus.test)["bits_per_byte"]
        tokens = run.steps * run.batch_size * run.context
        print(f"{corpus.name}: {test:.4f} bits per byte on the last 5%, {run.kind} attention, context {run.context:,},")
        print(f"after {run.steps} steps, {tokens:,} bytes read")

    prompt = corpus.test[: run.context // 2].tobytes().decode("utf-8", errors="ignore") or "\n"
    print(f"\n--- the model continues a text it has not seen ---\n{printable(prompt[-200:])}|", end="")
    for text in stream_text(model, prompt, tokens=400, temperature=0.7, key=key.fold("sample")):
        print(printable(text), end="", flush=True)
    print(f"\n---\nmore of it: scratchformer generate {run.out}")


if __name__ == "__main__":
    run_program(main)

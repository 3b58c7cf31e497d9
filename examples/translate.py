"""Train the encoder-decoder of "Attention is all you need" to translate English to German (Multi30k).

The model that is scored is the mean of the last snapshots. Without --data the official files are downloaded.
"""

import time

from scratchformer import Key
from scratchformer.data import Subwords, TranslationBatches, encode_pairs, load_multi30k
from scratchformer.generation import bleu, translate
from scratchformer.models import EncoderDecoder
from scratchformer.optim import Adam, InverseSquareRoot
from scratchformer.training import (
    Replicas,
    average_snapshots,
    estimate,
    evaluate_translation,
    kept_snapshots,
    load_snapshot,
    save_snapshot,
    train,
)
from scratchformer.training.memory import resident_bytes
from scratchformer.training.program import SUBWORDS, load_subwords, run_program, start_run

PRESETS = {
    "small": dict(
        source="en", target="de", vocabulary=8000, d_model=128, heads=4, depth=4, d_ff=256, dropout=0.3, tokens=4096,
        max_length=128, lr=4e-3, warmup=1920, steps=7680, average=10, beam=5, length_penalty=2.0,
    ),
    "paper": dict(
        source="en", target="de", vocabulary=16_000, d_model=512, heads=8, depth=6, d_ff=2048, dropout=0.1,
        tokens=25_000, max_length=128, lr=7e-4, warmup=4000, steps=100_000, average=5, beam=4, length_penalty=0.6,
    ),
}  # fmt: skip


def main(argv=None):
    run = start_run("translate", __doc__, PRESETS, argv)
    started, words = time.perf_counter(), run.out / SUBWORDS
    data = load_multi30k(run.data, run.source, run.target)
    known = (run.out / "last.safetensors").exists()
    if known:
        subwords = load_subwords(run.out, load_snapshot(run.out).state)
    else:
        subwords = Subwords.bpe(data.train.source + data.train.target, run.vocabulary)
    training, validation = (
        encode_pairs(subwords, getattr(data, part), run.max_length, part) for part in ("train", "validation")
    )
    before, key = resident_bytes(), Key(run.seed)
    sizes = {name: getattr(run, name) for name in ("d_model", "heads", "depth", "d_ff", "dropout")}
    model = EncoderDecoder(len(subwords), key=key.fold("weights"), **sizes).to(run.device)
    print(f"{len(training.source):,} pairs, {len(subwords):,} sub-words, {model.flat.data.size:,} parameters")

    def save():
        if not known:
            subwords.save(words)
        run.save()

    batches = TranslationBatches(training, run.tokens, subwords, key.fold("batches"))
    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(f"{len(batches)} batches an epoch; {replicas.describe(batches.batch(0))}")
        if run.estimate:
            largest = max(map(batches.batch, range(len(batches))), key=lambda b: b.source.size + b.target.size)
            return print(estimate(replicas, largest, before))
        train(
            replicas,
            Adam(model.parameters(), run.lr, betas=(0.9, 0.98), eps=1e-9),
            InverseSquareRoot(run.lr, min(run.warmup, max(1, run.steps // 4))),
            batches,
            run.steps,
            run.out,
            evaluate=lambda: evaluate_translation(replicas, validation, run.tokens, subwords),
            evaluate_every=len(batches),
            snapshot_every=len(batches),
            keep=run.average,
            seed=run.seed,
            identity={"subwords": subwords.fingerprint, "data": data.fingerprint},
            resume=run.resume,
            tensorboard=run.tensorboard,
            on_start=save,
        )
        print(f"trained in {(time.perf_counter() - started) / 60:.0f} minutes")
        snapshots = kept_snapshots(run.out)
        if snapshots:  # none in less than an epoch
            average_snapshots(snapshots, model)
            print(f"scored is the mean of the last {len(snapshots)} epochs' models")
        save_snapshot(run.out / "average.safetensors", model, subwords=subwords.fingerprint, data=data.fingerprint)

    for beam in sorted({1, run.beam}):
        found = list(translate(model, subwords, data.test.source, beam, run.length_penalty))
        score, signature = bleu(found, data.test.target)
        print(f"{score:.2f} BLEU on the {len(found):,} test sentences, beam {beam} ({signature})")
    for source, written, reference in list(zip(data.test.source, found, data.test.target, strict=True))[:5]:
        print(f"\n{run.source}: {source}\n{run.target}: {written}\n    (reference: {reference})")


if __name__ == "__main__":
    run_program(main)

"""Train the text-generation transformer on bytes of Wikipedia (enwik8), then let it write.

Without --data the official archive is downloaded; without a network, the program says so and trains on the sources
of Python's standard library, as with --data stdlib.
"""

from scratchformer import Key
from scratchformer.data import STANDARD_LIBRARY, VALIDATION_BYTES, NoConnection, TextBatches, load_enwik8
from scratchformer.generation import printable, stream_text
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, Cosine
from scratchformer.training import Replicas, best_snapshot, estimate, evaluate_language_model, load_model, train
from scratchformer.training.memory import resident_bytes
from scratchformer.training.program import run_program, start_run

PRESETS = {
    "small": dict(
        d_model=128, heads=4, depth=4, context=128, norm="pre", embedding_std=0.02,
        batch_size=32, lr=2e-3, warmup=100, steps=1000,
    ),
    "tutorial": dict(
        d_model=256, heads=8, depth=12, context=256, norm="post", embedding_std=1.0,
        batch_size=32, lr=1e-4, warmup=5000, steps=170_000,
    ),
}  # fmt: skip


def load_corpus(run):
    try:
        return load_enwik8(run.data)
    except NoConnection:
        if run.resume:  # it trained on enwik8
            raise
        run.data = STANDARD_LIBRARY
        corpus = load_enwik8(run.data)
        print(f"no connection to download enwik8: training on {corpus.name} instead")
        return corpus


def main(argv=None):
    run = start_run("enwik8", __doc__, PRESETS, argv)
    corpus = load_corpus(run)
    before, key = resident_bytes(), Key(run.seed)
    sizes = {name: getattr(run, name) for name in ("d_model", "heads", "depth", "context", "norm", "embedding_std")}
    model = LanguageModel(256, key=key.fold("weights"), **sizes).to(run.device)
    print(f"{corpus.name}: {len(corpus.train):,} training bytes; {model.flat.data.size:,} parameters")

    batches = TextBatches(corpus.train, run.batch_size, run.context, key.fold("batches"))
    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(replicas.describe(batches.batch(0)))
        if run.estimate:
            return print(estimate(replicas, batches.batch(0), before))
        validation = corpus.validation[:VALIDATION_BYTES]
        state = train(
            replicas,
            Adam(model.parameters(), run.lr),
            Cosine(run.lr, min(run.warmup, run.steps // 5), run.steps, floor=run.lr / 10),
            batches,
            run.steps,
            run.out,
            evaluate=lambda: evaluate_language_model(replicas, validation),
            evaluate_every=max(250, run.steps // 20),
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
        print(f"{corpus.name}: {test:.4f} bits per byte on the last 5%, the best of {state['step']} steps")

    prompt = corpus.test[: run.context // 2].tobytes().decode("utf-8", errors="ignore") or "\n"
    print(f"\n--- the model continues a text it has not seen ---\n{printable(prompt)}|", end="")
    for text in stream_text(model, prompt, tokens=400, temperature=0.7, key=key.fold("sample")):
        print(printable(text), end="", flush=True)
    print(f"\n---\nmore of it: scratchformer generate {run.out}")


if __name__ == "__main__":
    run_program(main)

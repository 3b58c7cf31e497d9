"""Train the text-generation transformer on bytes of Wikipedia (enwik8), then let it write.

With --model xl it is a Transformer-XL, of no more parameters, which reads the text in order with a memory.
Without --data the official archive is downloaded; without a network, the program says so and trains on the sources
of Python's standard library, as with --data stdlib.

--preset tutorial has the settings of the tutorial's own program (github.com/pbloem/former, experiments/generate.py),
with the width and the number of steps that the tutorial names. Adam's rate rises to 1e-4 over 5,000 texts, 156 steps of
32, and stays there. Gradients are clipped to norm 1, and nothing is dropped out. What differs from that program:
- Attention divides its logits by the root of the head's width; that program divides them by the root of the model's.
- The first step has 1/156 of the rate; in that program it has none.
- The best model on the validation part is scored; in that program the last one.
- A byte is scored given at least the 128 bytes before it; in that program given all 256 that the model reads.
"""

from scratchformer import Key
from scratchformer.data import VALIDATION_BYTES, SegmentBatches, TextBatches
from scratchformer.generation import printable, stream_text
from scratchformer.models import LanguageModel, TransformerXL
from scratchformer.optim import Adam, Constant, Cosine
from scratchformer.training import (
    Replicas,
    best_snapshot,
    estimate,
    evaluate_language_model,
    evaluate_transformer_xl,
    load_model,
    train,
)
from scratchformer.training.memory import resident_bytes
from scratchformer.training.program import load_corpus, run_program, start_run

PRESETS = {
    "small": dict(
        d_model=128, heads=4, depth=4, context=128, norm="pre", embedding_std=0.02,
        batch_size=32, lr=2e-3, warmup=100, steps=1000, memory=128, xl_d_ff=448,
    ),
    "tutorial": dict(
        d_model=256, heads=8, depth=12, context=256, norm="post", embedding_std=1.0,
        batch_size=32, lr=1e-4, warmup=5000 // 32, schedule="constant", steps=170_000, memory=256, xl_d_ff=896,
    ),
}  # fmt: skip
# Of a Transformer-XL: its maps from distances cost more than vectors of positions, so xl_d_ff is below 4 d_model.
OPTIONS = {
    "model": dict(choices=("plain", "xl"), default="plain", help="(default: plain)"),
    "positions": dict(choices=("sinusoidal", "relative"), help="of the plain model, instead of learned ones"),
    "schedule": dict(choices=("cosine", "constant"), default="cosine", help="of the learning rate"),
}


def main(argv=None):
    run = start_run("enwik8", __doc__, PRESETS, argv, OPTIONS)
    if run.model == "xl" and run.positions:
        raise ValueError(f"--positions {run.positions}: those of a Transformer-XL are relative, so leave it out")
    corpus = load_corpus(run)
    before, key = resident_bytes(), Key(run.seed)
    sizes = {name: getattr(run, name) for name in ("d_model", "heads", "depth", "context", "norm", "embedding_std")}
    order = (corpus.train, run.batch_size, run.context, key.fold("batches"))
    if run.model == "xl":
        model = TransformerXL(256, memory=run.memory, d_ff=run.xl_d_ff, key=key.fold("weights"), **sizes)
        batches, evaluate = SegmentBatches(*order, run.depth, run.d_model), evaluate_transformer_xl
    else:
        positions = {"positions": run.positions} if run.positions else {}
        model = LanguageModel(256, key=key.fold("weights"), **sizes, **positions)
        batches, evaluate = TextBatches(*order), evaluate_language_model
    model.to(run.device)
    warmup = min(run.warmup, run.steps // 5)
    cosine, constant = Cosine(run.lr, warmup, run.steps, floor=run.lr / 10), Constant(run.lr, warmup)
    print(f"{corpus.name}: {len(corpus.train):,} training bytes; {model.flat.data.size:,} parameters")

    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(replicas.describe(batches.batch(0)))
        if run.estimate:
            return print(estimate(replicas, batches.batch(0), before))
        validation = corpus.validation[:VALIDATION_BYTES]
        state = train(
            replicas,
            Adam(model.parameters(), run.lr),
            cosine if run.schedule == "cosine" else constant,
            batches,
            run.steps,
            run.out,
            evaluate=lambda: evaluate(replicas, validation),
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
        test = evaluate(replicas, corpus.test)["bits_per_byte"]
        print(f"{corpus.name}: {test:.4f} bits per byte on the last 5%, the best of {state['step']} steps")
        if run.model == "xl":
            longer = evaluate(replicas, corpus.test, memory=2 * run.memory)["bits_per_byte"]
            print(f"{corpus.name}: {longer:.4f} with a memory twice as long as in training")

    prompt = corpus.test[: run.context // 2].tobytes().decode("utf-8", errors="ignore") or "\n"
    print(f"\n--- the model continues a text it has not seen ---\n{printable(prompt)}|", end="")
    for text in stream_text(model, prompt, tokens=400, temperature=0.7, key=key.fold("sample")):
        print(printable(text), end="", flush=True)
    print(f"\n---\nmore of it: scratchformer generate {run.out}")


if __name__ == "__main__":
    run_program(main)

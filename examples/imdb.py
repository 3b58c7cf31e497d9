"""Train the classification transformer on IMDb: is a film review positive or negative?

The model is chosen on a validation part of the training reviews and scored once on the test reviews.
Without --data the official archive is downloaded.

--preset tutorial has the settings of the tutorial's own program (github.com/pbloem/former, experiments/classify.py).
Adam's rate rises to 1e-4 over 10,000 texts, 2,500 steps of 4, and stays there for 80 epochs. Gradients are clipped to
norm 1, a text is its first 512 words, and nothing is dropped out. What differs from that program:
- Padding is left out of attention and of the mean over a text; in that program it is part of both.
- Attention divides its logits by the root of the head's width; that program divides them by the root of the model's.
- Punctuation marks are words of their own; in that program words are what stands between spaces.
- The first step has 1/2,500 of the rate; in that program it has none.
- 2,500 reviews are set aside to choose the best model; that program sets a fifth aside, or none, only to report on.
"""

from scratchformer import Key
from scratchformer.data import LabelledBatches, Vocabulary, load_imdb
from scratchformer.models import Classifier
from scratchformer.optim import AdamW, Constant, Cosine
from scratchformer.training import Replicas, best_snapshot, estimate, evaluate_classifier, load_model, train
from scratchformer.training.memory import resident_bytes
from scratchformer.training.program import run_program, start_run

PRESETS = {
    "small": dict(
        d_model=64, heads=2, depth=2, max_length=512, keep="both", vocabulary=30_000, norm="pre", pool="mean",
        dropout=0.5, word_dropout=0.5, embedding_std=0.03, batch_size=32, lr=5e-4, weight_decay=0.1, warmup=200,
        steps=2112,
    ),
    "tutorial": dict(
        d_model=128, heads=8, depth=6, max_length=512, keep="head", vocabulary=50_000, norm="post", pool="mean",
        dropout=0.0, word_dropout=0.0, embedding_std=1.0, batch_size=4, lr=1e-4, weight_decay=0.0, warmup=10_000 // 4,
        schedule="constant", steps=80 * 22_500 // 4,
    ),
}  # fmt: skip
OPTIONS = {
    "pool": dict(choices=("mean", "max"), help="over the words of a review (default: mean)"),
    "positions": dict(choices=("sinusoidal", "relative", "none"), help="instead of learned ones"),
    "schedule": dict(choices=("cosine", "constant"), default="cosine", help="of the learning rate"),
}


def main(argv=None):
    run = start_run("imdb", __doc__, PRESETS, argv, OPTIONS)
    words = run.out / "vocabulary.txt"
    known = Vocabulary.load(words) if (run.out / "last.safetensors").exists() else None
    data = load_imdb(run.data, run.vocabulary, seed=run.seed, vocabulary=known)
    before, key = resident_bytes(), Key(run.seed)
    names = ("d_model", "heads", "depth", "max_length", "norm", "pool", "dropout", "embedding_std")
    sizes = {name: getattr(run, name) for name in names} | ({"positions": run.positions} if run.positions else {})
    model = Classifier(len(data.vocabulary), 2, key=key.fold("weights"), **sizes).to(run.device)
    print(f"{len(data.train.labels):,} reviews, {len(data.vocabulary):,} words, {model.flat.data.size:,} parameters")

    def save():
        if known is None:
            data.vocabulary.save(words)
        run.save()

    batches = LabelledBatches(
        data.train, run.batch_size, run.max_length, key.fold("batches"), run.keep, run.word_dropout
    )
    warmup = min(run.warmup, run.steps // 5)
    cosine, constant = Cosine(run.lr, warmup, run.steps), Constant(run.lr, warmup)
    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(replicas.describe(batches.batch(0)))
        if run.estimate:
            return print(estimate(replicas, batches.batch(0), before))
        state = train(
            replicas,
            AdamW(model.parameters(), run.lr, weight_decay=run.weight_decay),
            cosine if run.schedule == "cosine" else constant,
            batches,
            run.steps,
            run.out,
            evaluate=lambda: evaluate_classifier(replicas, data.validation, run.max_length, run.keep),
            evaluate_every=len(batches) // 2,
            select=("accuracy", "max"),
            seed=run.seed,
            identity={"vocabulary": data.vocabulary.fingerprint, "data": data.fingerprint},
            resume=run.resume,
            tensorboard=run.tensorboard,
            on_start=save,
        )
        best, _ = load_model(best_snapshot(run.out))
        model.load_state_dict(best.state_dict())
        test = evaluate_classifier(replicas, data.test, run.max_length, run.keep)
    print(f"best on validation: {state['best']}")
    print(f"test accuracy on {len(data.test.labels):,} reviews: {100 * test['accuracy']:.2f}%")


if __name__ == "__main__":
    run_program(main)

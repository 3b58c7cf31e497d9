"""Train a transformer on IMDb: is a film review positive or negative?

It reads the words of a review, is selected on held-out training reviews, and is scored once on the test reviews.
Without --data the official archive is downloaded.

--preset tutorial has the settings of the tutorial's own program (github.com/pbloem/former, experiments/classify.py).
Adam's learning rate rises to 1e-4 over 10,000 texts (2,500 steps of 4) and then stays there, for 80 epochs in all.
Gradients are clipped to norm 1, texts are cut to their first 512 words, and there is no dropout. Differences from that
program:
- Padding is left out of attention and of the mean over a text; there, it is part of both.
- Attention scores are divided by the root of the head's width; there, by the root of the model's width.
- Punctuation marks are separate words; there, words are separated by spaces only.
- The learning rate starts at 1/2,500 of its peak; there, at zero.
- 2,500 reviews are held out to select the best model; there, a fifth or none, used only for reporting.
"""

from scratchformer.data import LabelledBatches, Vocabulary, load_imdb
from scratchformer.models import Classifier
from scratchformer.optim import AdamW, Constant, Cosine
from scratchformer.training import VALIDATION_OPTION, as_text, evaluate_classifier, start

PRESETS = {
    "small": dict(
        d_model=64, heads=2, depth=2, max_length=512, keep="both", vocabulary=30_000, norm="pre", embedding_std=0.03,
        dropout=0.5, word_dropout=0.5, batch_size=32, lr=5e-4, weight_decay=0.1, warmup=200, constant=False, steps=2112,
    ),
    "tutorial": dict(
        d_model=128, heads=8, depth=6, max_length=512, keep="head", vocabulary=50_000, norm="post", embedding_std=1.0,
        dropout=0.0, word_dropout=0.0, batch_size=4, lr=1e-4, weight_decay=0.0, warmup=10_000 // 4, constant=True,
        steps=80 * 22_500 // 4,
    ),
}  # fmt: skip
OPTIONS = VALIDATION_OPTION


def data(run):
    return load_imdb(run.data, run.vocabulary, run.validation, run.seed, run.saved_vocabulary(Vocabulary))


def model(run, reviews):
    sizes = run.sizes("d_model", "heads", "depth", "max_length", "norm", "dropout", "embedding_std")
    return Classifier(len(reviews.vocabulary), 2, key=run.key("weights"), **sizes)


def score(run, replicas, reviews, part):
    return evaluate_classifier(replicas, run.scored(part, getattr(reviews, part)), run.max_length, run.keep)


def main(run):
    reviews = run.load(data)
    print(f"{len(reviews.train.labels):,} reviews, {len(reviews.vocabulary):,} words")
    key = run.key("batches")
    batches = LabelledBatches(reviews.train, run.batch_size, run.max_length, key, run.keep, run.word_dropout)
    with run.replicas(model(run, reviews), batches) as replicas:
        adam = AdamW(replicas.model.parameters(), run.lr, weight_decay=run.weight_decay)
        warmup = min(run.warmup, run.total // 5)
        rate = Constant(run.lr, warmup) if run.constant else Cosine(run.lr, warmup, run.total)
        for step in run.steps(replicas, adam, batches, select=("accuracy", "max")):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))  # forward and backward
            norm = replicas.clip(adam, 1.0)
            adam.lr = rate(step)
            replicas.step(adam)
            run.log(loss=loss, norm=norm)
            if run.due(len(batches) // 2):
                run.keep_best(score(run, replicas, reviews, "validation"))
        print(f"best on validation: {as_text(run.load_best())}")
        accuracy = score(run, replicas, reviews, "test")["accuracy"]
    scored, size = (len(texts.labels) for texts in (run.scored("test", reviews.test), reviews.test))
    print(f"test accuracy on {run.share(scored, size, 'reviews')}: {100 * accuracy:.2f}%")


if __name__ == "__main__":
    start(main)

"""Train the classification transformer on IMDb: is a film review positive or negative?

Beside each word the model reads what a linear model of n-grams says about it (`data.find_evidence`). In evaluation the
logits of both are added. --evidence 0 trains a transformer that reads words alone, without the linear model. The model
is selected on held-out training reviews and scored once on the test reviews.

With --models 3 two more models are trained after the first, from different weights and on different batches. The mean
of the probabilities of all three is scored. Each has a subfolder in the run's folder. Without --data the official
archive is downloaded.

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

from contextlib import nullcontext

import numpy as np

from scratchformer.data import LabelledBatches, Vocabulary, load_imdb
from scratchformer.models import Classifier, EvidenceClassifier
from scratchformer.training import MODELS_OPTION, Ensemble, evaluate_classifier, predict_classes, scores_of_classes
from scratchformer.training.stage import as_text

PRESETS = {
    "small": dict(
        d_model=64, heads=2, depth=2, max_length=512, keep="both", vocabulary=30_000, norm="pre", pool="mean",
        dropout=0.5, word_dropout=0.5, evidence=3, embedding_std=0.03, batch_size=32, lr=5e-4, weight_decay=0.1,
        warmup=200, steps=2112,
    ),
    "tutorial": dict(
        d_model=128, heads=8, depth=6, max_length=512, keep="head", vocabulary=50_000, norm="post", pool="mean",
        dropout=0.0, word_dropout=0.0, evidence=0, embedding_std=1.0, batch_size=4, lr=1e-4, weight_decay=0.0,
        warmup=10_000 // 4, schedule="constant", steps=80 * 22_500 // 4,
    ),
}  # fmt: skip
OPTIONS = {
    **MODELS_OPTION,
    "evidence": dict(
        type=int,
        choices=range(4),
        default=0,
        help="longest n-grams of the linear model whose evidence is read; 0 for none (small: 3)",
    ),
    "pool": dict(choices=("mean", "max"), help="pooling over the words of a review (default: mean)"),
    "positions": dict(choices=("sinusoidal", "relative", "none"), help="position encodings (default: learned)"),
    "schedule": dict(choices=("cosine", "constant"), default="cosine", help="learning rate after the warm-up"),
}


class Imdb(Ensemble):
    name = "imdb"
    description = __doc__
    presets = PRESETS
    options = OPTIONS

    def load(self):
        known = self.saved_vocabulary(Vocabulary)
        options = dict(seed=self.run.seed, vocabulary=known, evidence=self.run.evidence)
        self.data = load_imdb(self.run.data, self.run.vocabulary, **options)
        self.vocabulary = self.data.vocabulary

    def identity(self):
        return {"vocabulary": self.vocabulary.fingerprint, "data": self.data.fingerprint}

    def make_model(self, key):
        names = ("d_model", "heads", "depth", "max_length", "norm", "pool", "dropout", "embedding_std", "positions")
        sizes = self.sizes(*names)
        if self.run.evidence:
            return EvidenceClassifier(len(self.vocabulary), self.run.evidence, key=key, **sizes)
        return Classifier(len(self.vocabulary), 2, key=key, **sizes)

    def make_batches(self, key):
        run = self.run
        return LabelledBatches(self.data.train, run.batch_size, run.max_length, key, run.keep, run.word_dropout)

    def training(self):
        return dict(evaluate_every=len(self.batches) // 2, select=("accuracy", "max"))

    def texts(self, part):
        """The reviews of a part that are scored."""
        whole = getattr(self.data, part)
        return whole.evenly(self.scored(part, len(whole.labels), self.steps * self.run.batch_size))

    def evaluate(self, replicas, part):
        return evaluate_classifier(replicas, self.texts(part), self.run.max_length, self.run.keep)

    def describe(self):
        reviews, words = len(self.data.train.labels), len(self.vocabulary)
        print(f"{reviews:,} reviews, {words:,} words, {self.parameters} parameters")

    def together(self, replicas, part):
        """The scores of the mean of all models' probabilities, and the accuracy of each model, as text."""
        texts, found = self.texts(part), []
        for other in self.each():
            with nullcontext(replicas) if other is self else replicas.like(other.model) as own:
                found.append(predict_classes(own, texts, self.run.max_length, self.run.keep))
        *each, scores = (scores_of_classes(p, texts.labels) for p in (*found, np.mean(found, axis=0)))
        alone = ", ".join(f"{100 * own['accuracy']:.2f}%" for own in each)
        return scores, f" (each model alone: {alone})" if len(each) > 1 else ""

    def summary(self, replicas, part):
        scores, alone = self.together(replicas, part)
        return as_text(scores) + alone

    def test(self, replicas):
        if not self.is_last:
            return {}
        if self.run.models > 1:
            print(f"all models on validation: {self.summary(replicas, 'validation')}")
        scores, self.alone = self.together(replicas, "test")
        return scores

    def report(self, state, test):
        print(f"best on validation: {state['best']}")
        if test:
            reviews = self.share(len(self.texts("test").labels), len(self.data.test.labels), "reviews")
            print(f"test accuracy on {reviews}: {100 * test['accuracy']:.2f}%{self.alone}")


if __name__ == "__main__":
    Imdb.main()

"""Train the classification transformer on IMDb: is a film review positive or negative?

Beside each word the model reads what a linear model of n-grams says about it (`data.find_evidence`). In evaluation both
decide together, with weights that are fitted to held-out training reviews (`training.stack_weights`). --evidence 0
trains a transformer that reads words alone, without the linear model. The model is selected on the held-out reviews and
scored once on the test reviews.

With --models 3 two more models are trained after the first, from different weights and on different batches. The mean
of the probabilities of all three is scored, together with the linear model. Each has a subfolder in the run's folder.
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

from contextlib import nullcontext

import numpy as np
from scratchformer.training.stage import as_text

from scratchformer.data import LabelledBatches, Vocabulary, load_imdb
from scratchformer.models import Classifier, EvidenceClassifier
from scratchformer.training import (
    MODELS_OPTION,
    VALIDATION_OPTION,
    Ensemble,
    predict_classes,
    scores_of_classes,
    stack_weights,
    stacked,
)

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
    **VALIDATION_OPTION,
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
        self.data = load_imdb(self.run.data, self.run.vocabulary, self.run.validation, **options)
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
        # A transformer alone is too sure of itself: while its accuracy still rises, its loss does too.
        select = ("loss", "min") if self.run.evidence else ("accuracy", "max")
        return dict(evaluate_every=len(self.batches) // 2, select=select)

    def texts(self, part):
        """The reviews of a part that are scored."""
        whole = getattr(self.data, part)
        return whole.evenly(self.scored(part, len(whole.labels), self.steps * self.run.batch_size))

    def predict(self, replicas, part):
        """The probabilities, (texts, 2), that a model predicts for a part, by its name. With evidence, also those for
        the validation part, to which the weights are fitted.
        """
        run = self.run
        parts = dict.fromkeys((part, "validation") if run.evidence else (part,))
        return {name: predict_classes(replicas, self.texts(name), run.max_length, run.keep) for name in parts}

    def scores_of(self, found, part):
        """The scores of what `predict` returned, together with the linear model if there is one."""
        texts, probabilities = self.texts(part), found[part]
        if self.run.evidence:
            held_out = self.texts("validation")
            weights = stack_weights(found["validation"], held_out.logits, held_out.labels)
            probabilities = stacked(probabilities, texts.logits, weights)
        return scores_of_classes(probabilities, texts.labels)

    def evaluate(self, replicas, part):
        found = self.predict(replicas, part)
        return self.run.ranks.from_first(lambda: self.scores_of(found, part))  # each rank has its own linear model

    def describe(self):
        reviews, words = len(self.data.train.labels), len(self.vocabulary)
        print(f"{reviews:,} reviews, {words:,} words, {self.parameters} parameters")

    def together(self, replicas, part):
        """The scores of the mean of all models' probabilities, and the accuracy with each model alone, as text."""
        found = []
        for other in self.each():
            with nullcontext(replicas) if other is self else replicas.like(other.model) as own:
                found.append(self.predict(own, part))
        mean = {name: np.mean([own[name] for own in found], axis=0) for name in found[0]}
        *each, scores = self.run.ranks.from_first(lambda: [self.scores_of(own, part) for own in (*found, mean)])
        alone = ", ".join(f"{100 * own['accuracy']:.2f}%" for own in each)
        return scores, f" (with one transformer each: {alone})" if len(each) > 1 else ""

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
        print(f"{self.which}best on validation: {state['best']}")
        if test:
            reviews = self.share(len(self.texts("test").labels), len(self.data.test.labels), "reviews")
            print(f"test accuracy on {reviews}: {100 * test['accuracy']:.2f}%{self.alone}")


if __name__ == "__main__":
    Imdb.main()

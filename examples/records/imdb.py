"""Train a transformer that reads, beside each word of a film review, what a linear model says about it (IMDb).

The linear model is a logistic regression on n-grams, trained on other films (`records.find_evidence`). In evaluation
both decide together, with weights that are fitted to held-out training reviews (`records.stack_weights`). The
transformer is selected on the held-out reviews and scored once on the test reviews.

With --models 3 two more transformers are trained after the first, from different weights and on different batches. The
mean of the probabilities of all three is scored, together with the linear model. Each has a subfolder in the run's
folder. Without --data the official archive is downloaded.
"""

import numpy as np

from scratchformer.data import LabelledBatches, Vocabulary, load_imdb
from scratchformer.optim import AdamW, Cosine
from scratchformer.records import (
    MODELS_OPTION,
    EvidenceClassifier,
    member,
    other_members,
    predict_classes,
    scores_of_classes,
    stack_weights,
    stacked,
    with_evidence,
)  # fmt: skip
from scratchformer.training import VALIDATION_OPTION, as_text, start

PRESETS = {
    "small": dict(
        d_model=64, heads=2, depth=2, max_length=512, vocabulary=30_000, dropout=0.5, word_dropout=0.5, evidence=3,
        embedding_std=0.03, batch_size=32, lr=5e-4, weight_decay=0.1, warmup=200, steps=2112,
    ),
}  # fmt: skip
OPTIONS = {
    **MODELS_OPTION,
    **VALIDATION_OPTION,
    "evidence": dict(type=int, choices=range(1, 4), default=3, help="longest n-grams of the linear model (default: 3)"),
}


def check(run):
    if run.bits == "portable":
        raise ValueError("--bits portable: SciPy fits the linear model, whose bits are not portable, so leave it out")


def data(run):
    vocabulary = run.saved_vocabulary(Vocabulary)
    reviews = load_imdb(run.data, run.vocabulary, run.validation, run.seed, vocabulary)
    return with_evidence(reviews, run.evidence)


def model(run, reviews):
    sizes = run.sizes("d_model", "heads", "depth", "max_length", "dropout", "embedding_std")
    return EvidenceClassifier(len(reviews.vocabulary), run.evidence, norm="pre", key=run.key("weights"), **sizes)


def predict(run, replicas, reviews, part):
    """The probabilities, (texts, 2), for the texts of a part and for those of "validation", by name."""
    return {
        name: predict_classes(replicas, run.scored(name, getattr(reviews, name)), run.max_length, "both")
        for name in dict.fromkeys((part, "validation"))
    }


def judge(run, predicted, reviews, part):
    """The scores of what `predict` returned, together with the linear model."""

    def scores():  # of rank 0, since each rank has its own linear model
        texts, held_out = run.scored(part, getattr(reviews, part)), reviews.validation
        weights = stack_weights(predicted["validation"], held_out.logits, held_out.labels)
        return scores_of_classes(stacked(predicted[part], texts.logits, weights), texts.labels)

    return run.ranks.from_first(scores)


def score(run, replicas, reviews, part):
    """The scores of all models together, and with several the accuracy with each one alone."""
    each = [predict(run, replicas, reviews, part)]
    for other in other_members(run, model, reviews):
        with replicas.like(other) as others:
            each.append(predict(run, others, reviews, part))
    mean = {name: np.mean([predicted[name] for predicted in [*each[1:], each[0]]], axis=0) for name in each[0]}
    scores = judge(run, mean, reviews, part)
    if run.models > 1:
        alone = [judge(run, predicted, reviews, part)["accuracy"] for predicted in [*each[1:], each[0]]]
        scores |= {f"accuracy_{number}": accuracy for number, accuracy in enumerate(alone, 1)}
    return scores


def stages(run):
    return [f"model-{run.models}"]


def train(run, key, reviews):
    """Train a model of the ensemble. Returns the scores of all on the test reviews if it is the last one.

    key: of the whole run, from which dropout is drawn.
    """
    options = dict(keep="both", word_dropout=run.word_dropout)
    batches = LabelledBatches(reviews.train, run.batch_size, run.max_length, run.key("batches"), **options)
    with run.replicas(model(run, reviews), batches) as replicas:
        adam = AdamW(replicas.model.parameters(), run.lr, weight_decay=run.weight_decay)
        rate = Cosine(run.lr, min(run.warmup, run.total // 5), run.total)
        for step in run.steps(replicas, adam, batches):
            loss = replicas.gradients(batches.batch(step), key("train", step))  # forward and backward
            norm = replicas.clip(adam, 1.0)
            adam.lr = rate(step)
            replicas.step(adam)
            run.log(loss=loss, norm=norm)
            if run.due(len(batches) // 2):
                run.keep_best(judge(run, predict(run, replicas, reviews, "validation"), reviews, "validation"))
        print(f"{run.stage_name} best on validation: {as_text(run.load_best(mark=run.models > 1))}".strip())
        if run.stage_name in ("", f"model-{run.models}"):
            return score(run, replicas, reviews, "test")


def main(run):
    reviews = run.load(data)
    print(f"{len(reviews.train.labels):,} reviews, {len(reviews.vocabulary):,} words")
    for number in range(1, run.models + 1):
        test = train(member(run, number), run.key, reviews)
    scored = run.share(len(run.scored("test", reviews.test).labels), len(reviews.test.labels), "reviews")
    print(f"test accuracy on {scored}: {100 * test.pop('accuracy'):.2f}%")
    for name, accuracy in test.items():
        if name != "loss":  # the accuracy with one of several transformers
            print(f"{name}: {100 * accuracy:.2f}%")


if __name__ == "__main__":
    start(main)

"""Read film reviews without labels first: language models of all reviews become a classifier (IMDb).

Three stages, each with a subfolder in the run's folder; --resume continues where the run stopped. pretrain: a Llama
learns to predict the next sub-word of the training reviews and of the 50,000 unlabelled ones. A second one learns to
predict the sub-word before. finetune: their bodies, each with a mean over the text and an output layer, learn the
labels of the training reviews. They decide together with a linear model of n-grams, as in imdb.py. selftrain: the
classifier and the linear model predict the labels of the unlabelled reviews, as probabilities. A new classifier starts
from the same language models, and learns from the true labels and from these pseudo-labels. Without unlabelled reviews
this stage is left out.

--steps sets the steps of pre-training, and limits those of the other stages. Each classifier is selected on held-out
training reviews. No stage learns from them, but the two weights in the joint decision are fitted to them. After
training, only the last classifier is scored on the test reviews. Without --data the official archive is downloaded.

Source: Dai, Le, "Semi-supervised sequence learning", 2015.
"""

import math

from scratchformer.data import LabelledBatches, Subwords, TextBatches, joined, load_imdb_subwords, windows
from scratchformer.models.llama import LlamaBlock
from scratchformer.nn import RMSNorm
from scratchformer.optim import AdamW, Cosine, Muon
from scratchformer.records import (
    BidirectionalClassifier,
    BidirectionalLanguageModel,
    PseudoLabelled,
    Reviews,
    load_finished,
)  # fmt: skip
from scratchformer.training import (
    VALIDATION_OPTION,
    Replicas,
    best_snapshot,
    load_model,
    mean_loss,
    scores_of_classes,
    start,
)  # fmt: skip

PRESETS = {
    "small": dict(
        d_model=256, heads=4, depth=4, max_length=512, vocabulary=8_000, evidence=3, weight_decay=0.1,
        batch_size=8, dropout=0.1, muon_lr=0.02, lr=2e-3, warmup=150, steps=4_000,
        tuning_batch_size=32, tuning_dropout=0.2, tuning_lr=2e-4, epochs=1,
    ),
}  # fmt: skip
STAGES = ("pretrain", "finetune", "selftrain")
OPTIONS = {
    "stage": dict(choices=(*STAGES, "all"), default="all", changeable=True, help="run only this stage (default: all)"),
    **VALIDATION_OPTION,
}
SCORED = 300  # validation reviews that score the language model


def check(run):
    chosen = run.settings["stage"]
    if run.estimating and chosen not in ("pretrain", "all"):
        raise ValueError("--estimate: only pre-training is estimated: use --stage pretrain")
    if run.resumed and chosen in ("pretrain", "all"):
        run.expect_final("pretrain", STAGES[1:])
    before = {"finetune": "pretrain", "selftrain": "finetune"}.get(chosen)
    if before and not (run.out / before / "last.safetensors").exists():
        what = "language model" if before == "pretrain" else "classifier"
        raise ValueError(f"{run.out / before} holds no {what}: run --stage {before} first")


def data(run):
    vocabulary = run.saved_vocabulary(Subwords)
    reviews = load_imdb_subwords(run.data, run.vocabulary, run.validation, run.seed, vocabulary)
    return Reviews(reviews, run.evidence)


def model(run, reviews):
    vocabulary, key, sizes = len(reviews.vocabulary), run.key("weights"), run.sizes("d_model", "heads", "depth")
    if run.stage_name == "pretrain":
        return BidirectionalLanguageModel(vocabulary, context=run.max_length, dropout=run.dropout, key=key, **sizes)
    block = dict(causal=True, positions="none", block=LlamaBlock, final_norm=RMSNorm, dropout=run.tuning_dropout)
    return BidirectionalClassifier(vocabulary, 2, max_length=run.max_length, key=key, **sizes, **block)


def stages(run):
    if found := [name for name in STAGES[1:] if (run.out / name / "last.safetensors").exists()]:
        return found
    raise ValueError(f"{run.out} holds no classifier yet: the model is only pre-trained")


def score(run, replicas, reviews, part):
    if run.stage_name != "pretrain":
        texts = run.scored(part, getattr(reviews, part), run.total * run.tuning_batch_size)
        return scores_of_classes(reviews.predict(replicas, texts, run.max_length), texts.labels)
    texts = reviews.validation.evenly(min(SCORED, len(reviews.validation.labels)))
    tokens = joined(texts.ids, reviews.vocabulary["[SEP]"])
    context = min(run.max_length, len(tokens) - 1)
    whole = (batch for batch, counted in windows(tokens, context, context, 1) if counted.all())  # the last may overlap
    return {"loss": mean_loss(replicas, whole, (len(tokens) - 1) // context)}


def train(run, key, reviews, model, batches, every):
    """Train the model of a stage. key: of the whole run, from which dropout is drawn."""
    with run.replicas(model, batches) as replicas:
        if run.stage_name == "pretrain":
            precision = "bfloat16" if run.precision == "bfloat16" else "float32"
            options = dict(weight_decay=run.weight_decay, precision=precision)
            optimizer = Muon(model.parameters(), run.muon_lr, run.lr, **options)
        else:
            optimizer = AdamW(model.parameters(), run.tuning_lr, weight_decay=run.weight_decay)
        peak = optimizer.lr
        rate = Cosine(peak, min(run.warmup, run.total // 5), run.total, peak / 20)
        for step in run.steps(replicas, optimizer, batches):
            loss = replicas.gradients(batches.batch(step), key("train", step))  # forward and backward
            norm = replicas.clip(optimizer, 1.0)
            optimizer.lr = rate(step)
            replicas.step(optimizer)
            run.log(loss=loss, norm=norm)
            if run.due(every):
                run.keep_best(score(run, replicas, reviews, "validation"))
        print(f"{run.stage_name}: best on validation: {run.load_best()}", flush=True)
        if run.stage_name == ("selftrain" if reviews.unlabelled else "finetune"):
            scored = run.scored("test", reviews.test, run.total * run.tuning_batch_size)
            where = run.share(len(scored.labels), len(reviews.test.labels), "reviews")
            print(f"test accuracy on {where}: {100 * score(run, replicas, reviews, 'test')['accuracy']:.2f}%")


def pretrain(run, key, reviews):
    texts = reviews.data.unlabelled
    print(f"{len(texts):,} reviews of {sum(map(len, texts)):,} tokens, {len(reviews.unlabelled):,} without a label")
    tokens = joined(texts, reviews.vocabulary["[SEP]"])
    batches = TextBatches(tokens, run.batch_size, run.max_length, run.key("batches"))
    train(run, key, reviews, model(run, reviews), batches, max(250, run.total // 20))


def classify(whole, name, reviews, texts):
    """Train a classifier that starts from the language models."""
    per_epoch = math.ceil(len(texts.labels) / whole.tuning_batch_size)
    run = whole.stage(name, steps=min(whole.total, whole.epochs * per_epoch), warmup=per_epoch // 5)
    classifier = model(run, reviews)
    if not run.has_snapshot and run.ranks.first:  # which sends the others its weights
        pretrained, state = load_model(best_snapshot(whole.out / "pretrain"), BidirectionalLanguageModel)
        print(f"starts from the language models of step {state['step']} of {whole.total}")
        classifier.start_from(pretrained)
    kind = PseudoLabelled if name == "selftrain" else LabelledBatches
    batches = kind(texts, run.tuning_batch_size, run.max_length, run.key("batches"), "both")
    train(run, whole.key, reviews, classifier, batches, max(100, per_epoch // 2))


def pseudo_labelled(run, reviews):
    """All reviews, with the labels that the classifier of `finetune` predicts for those that have none."""
    if run.ranks.from_first((run.out / "selftrain" / "last.safetensors").exists):
        return reviews.with_pseudo_labels(None, run.max_length)
    teacher = run.stage("finetune")
    classifier = load_finished(teacher, model(teacher, reviews))
    print(f"the classifier of finetune predicts the labels of {len(reviews.unlabelled):,} unlabelled reviews")
    with Replicas(classifier, **teacher.how_many()) as replicas:
        return reviews.with_pseudo_labels(replicas, run.max_length)


def main(run):
    reviews, chosen = run.load(data), run.settings["stage"]
    if chosen == "selftrain" and not reviews.unlabelled:
        raise ValueError("--stage selftrain: the data has no unlabelled reviews (train/unsup) to learn from")
    if chosen in ("pretrain", "all"):
        pretrain(run.stage("pretrain"), run.key, reviews)
    if chosen in ("finetune", "all"):
        classify(run, "finetune", reviews, reviews.train)
    if chosen in ("selftrain", "all") and reviews.unlabelled:
        classify(run, "selftrain", reviews, pseudo_labelled(run, reviews))


if __name__ == "__main__":
    start(main)

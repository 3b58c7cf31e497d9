"""Read film reviews without labels first: language models of all reviews become a classifier (IMDb).

Three stages, each with a subfolder in the run's folder. pretrain: a Llama learns to predict the next sub-word of the
training reviews and of the 50,000 unlabelled ones, a second one the sub-word before. finetune: their bodies, each with
a mean over the text and an output layer, learn the labels of the training reviews. They decide together with a linear
model of n-grams, as in imdb.py. selftrain: that classifier and the linear model predict the labels of the unlabelled
reviews, as probabilities; a new classifier starts from the same language models, and learns from the true labels and
from these. Without unlabelled reviews this stage is left out.

--steps sets the steps of pre-training, and limits those of the other stages. Each classifier is selected on held-out
training reviews, to which the two weights in the joint decision are fitted. Only the last one is scored on the test
reviews. Without --data the official archive is downloaded.
"""

from scratchformer import records, training
from scratchformer.data import LabelledBatches, Subwords, TextBatches, joined, load_imdb_subwords, windows
from scratchformer.models.llama import LlamaBlock
from scratchformer.nn import RMSNorm
from scratchformer.optim import AdamW, Cosine, Muon
from scratchformer.training import VALIDATION_OPTION, Replicas, best_snapshot, load_model, start

PRESETS = {
    "small": dict(
        d_model=256, heads=4, depth=4, max_length=512, vocabulary=8_000, evidence=3, weight_decay=0.1,
        batch_size=8, dropout=0.1, muon_lr=0.02, lr=2e-3, warmup=150, steps=4_000,
        tuning_batch_size=32, tuning_dropout=0.2, tuning_lr=2e-4, epochs=1,
    ),
}  # fmt: skip
STAGES = ("pretrain", "finetune", "selftrain")
STAGE = dict(choices=(*STAGES, "all"), default="all", changeable=True, help="run only this stage (default: all)")
OPTIONS = {"stage": STAGE, **VALIDATION_OPTION}


def check(run):
    chosen = run.settings["stage"]
    if run.bits == "portable":
        raise ValueError("--bits portable: SciPy fits the linear model, whose bits are not portable, so leave it out")
    if run.estimating and chosen not in ("pretrain", "all"):
        raise ValueError("--estimate: only pre-training is estimated: use --stage pretrain")
    if run.resumed and chosen in ("pretrain", "all"):
        run.expect_final("pretrain", STAGES[1:])
    before = {"finetune": "pretrain", "selftrain": "finetune"}.get(chosen)
    if before and not (run.out / before / "last.safetensors").exists():
        raise ValueError(f"{run.out / before} holds no model: run --stage {before} first")


def data(run):
    vocabulary = run.saved_vocabulary(Subwords)
    reviews = load_imdb_subwords(run.data, run.vocabulary, run.validation, run.seed, vocabulary)
    return records.Reviews(reviews, run.evidence)


def model(run, reviews):
    vocabulary, length = len(reviews.vocabulary), run.max_length
    sizes = dict(key=run.key("weights"), **run.sizes("d_model", "heads", "depth"))
    if run.stage_name == "pretrain":
        return records.BidirectionalLanguageModel(vocabulary, context=length, dropout=run.dropout, **sizes)
    block = dict(causal=True, positions="none", block=LlamaBlock, final_norm=RMSNorm, dropout=run.tuning_dropout)
    return records.BidirectionalClassifier(vocabulary, 2, max_length=length, **sizes, **block)


def stages(run):
    trained = [name for name in STAGES[1:] if (run.out / name / "last.safetensors").exists()]
    if not trained:
        raise ValueError(f"{run.out} holds no classifier yet: the model is only pre-trained")
    return trained


def scored(run, reviews, part):
    """The texts of a part on which a classifier is scored."""
    return run.parent.scored(part, getattr(reviews, part), run.total * run.tuning_batch_size)


def score(run, replicas, reviews, part):
    if run.stage_name != "pretrain":
        texts = scored(run, reviews, part)
        return records.scores_of_classes(reviews.predict(replicas, texts, run.max_length), texts.labels)
    texts = reviews.validation.evenly(min(300, len(reviews.validation.labels)))  # enough for the language models
    tokens = joined(texts.ids, reviews.vocabulary["[SEP]"])
    context = min(run.max_length, len(tokens) - 1)
    whole = (batch for batch, counted in windows(tokens, context, context, 1) if counted.all())  # the last may overlap
    return {"loss": training.mean_loss(replicas, whole, (len(tokens) - 1) // context)}


def train(run, reviews, model, batches, every):
    """Train the model of a stage, and score it every so many steps."""
    with run.replicas(model, batches) as replicas:
        parameters, decay = model.parameters(), dict(weight_decay=run.weight_decay)
        if run.stage_name == "pretrain":
            precision = "bfloat16" if run.precision == "bfloat16" else "float32"
            optimizer = Muon(parameters, run.muon_lr, run.lr, precision=precision, **decay)
        else:
            optimizer = AdamW(parameters, run.tuning_lr, **decay)
        peak = optimizer.lr
        rate = Cosine(peak, min(run.warmup, run.total // 5), run.total, peak / 20)
        for step in run.steps(replicas, optimizer, batches):
            loss = replicas.gradients(batches.batch(step), run.parent.key("train", step))  # forward and backward
            norm = replicas.clip(optimizer, 1.0)
            optimizer.lr = rate(step)
            replicas.step(optimizer)
            run.log(loss=loss, norm=norm)
            if run.due(every):
                run.keep_best(score(run, replicas, reviews, "validation"))
        print(f"{run.stage_name}: best on validation: {training.as_text(run.load_best())}", flush=True)
        if run.stage_name == ("selftrain" if reviews.unlabelled else "finetune"):
            test, count = score(run, replicas, reviews, "test"), len(scored(run, reviews, "test").labels)
            where = run.share(count, len(reviews.test.labels), "reviews")
            print(f"test accuracy on {where}: {100 * test['accuracy']:.2f}%")


def classify(whole, name, reviews, texts):
    """Train a classifier that starts from the language models."""
    per_epoch = -(-len(texts.labels) // whole.tuning_batch_size)  # rounded up
    run = whole.stage(name, steps=min(whole.total, whole.epochs * per_epoch), warmup=per_epoch // 5)
    classifier = model(run, reviews)
    if not run.has_snapshot and run.ranks.first:  # which sends the others its weights
        pretrained, state = load_model(best_snapshot(whole.out / "pretrain"), records.BidirectionalLanguageModel)
        print(f"starts from the language models of step {state['step']} of {whole.total}")
        classifier.start_from(pretrained)
    kind = records.PseudoLabelled if name == "selftrain" else LabelledBatches
    batches = kind(texts, run.tuning_batch_size, run.max_length, run.key("batches"), "both")
    train(run, reviews, classifier, batches, max(100, per_epoch // 2))


def pseudo_labelled(run, reviews):
    """All reviews, with the labels that the classifier of `finetune` predicts for those that have none."""
    if run.ranks.from_first((run.out / "selftrain" / "last.safetensors").exists):
        return reviews.with_pseudo_labels(None, run.max_length)
    teacher = run.stage("finetune")
    classifier = records.load_finished(teacher, model(teacher, reviews))
    print(f"the classifier of finetune predicts the labels of {len(reviews.unlabelled):,} unlabelled reviews")
    with Replicas(classifier, **teacher.how_many()) as replicas:
        return reviews.with_pseudo_labels(replicas, run.max_length)


def main(run):
    reviews, chosen = run.load(data), run.settings["stage"]
    if chosen == "selftrain" and not reviews.unlabelled:
        raise ValueError("--stage selftrain: the data has no unlabelled reviews (train/unsup) to learn from")
    if chosen in ("pretrain", "all"):
        stage, tokens = run.stage("pretrain"), joined(reviews.data.unlabelled, reviews.vocabulary["[SEP]"])
        print(f"{len(reviews.data.unlabelled):,} reviews of {len(tokens):,} tokens")
        batches = TextBatches(tokens, run.batch_size, run.max_length, stage.key("batches"))
        train(stage, reviews, model(stage, reviews), batches, max(250, run.total // 20))
    if chosen in ("finetune", "all"):
        classify(run, "finetune", reviews, reviews.train)
    if chosen in ("selftrain", "all") and reviews.unlabelled:
        classify(run, "selftrain", reviews, pseudo_labelled(run, reviews))


if __name__ == "__main__":
    start(main)

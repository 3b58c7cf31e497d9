"""Read film reviews without labels first: language models of all reviews become a classifier (IMDb).

Three stages, each with a subfolder in the run's folder; --resume continues where the run stopped. pretrain: a Llama
learns to predict the next sub-word of the training reviews and of the 50,000 unlabelled ones. A second one learns to
predict the sub-word before. finetune: their bodies, each with a mean over the text and an output layer, learn the
labels of the training reviews. They decide together, with the linear model of imdb.py as a third. selftrain: these
three say how probable it is that an unlabelled review is good. A second classifier starts from the language models
again, and learns the labels and these probabilities.

--steps sets the steps of pre-training, and limits those of the other stages. Each classifier is selected on held-out
training reviews, which no stage learns from. Only the last one is scored on the test reviews, once.

Without --data the official archive is downloaded.
"""

import hashlib
from functools import cached_property

import numpy as np

from scratchformer.data import (
    DataError,
    Labelled,
    LabelledBatches,
    Subwords,
    TextBatch,
    TextBatches,
    fit_evidence,
    joined,
    load_imdb_subwords,
)
from scratchformer.data.files import replacing
from scratchformer.models import BidirectionalClassifier, BidirectionalLanguageModel
from scratchformer.models.llama import LlamaBlock
from scratchformer.nn import RMSNorm
from scratchformer.optim import AdamW
from scratchformer.progress import counted
from scratchformer.training import (
    Program,
    Replicas,
    best_snapshot,
    evaluate_classifier,
    load_model,
    mean_loss,
    predict_classes,
)
from scratchformer.training.stage import Stage

PRESETS = {
    "small": dict(
        d_model=256, heads=4, depth=4, max_length=512, vocabulary=8_000, evidence=3, weight_decay=0.1,
        batch_size=8, dropout=0.1, optimizer="muon", muon_lr=0.02, lr=2e-3, warmup=150, steps=8_000,
        tuning_batch_size=32, tuning_dropout=0.2, tuning_lr=2e-4, epochs=1,
    ),
}  # fmt: skip
STAGES = ("pretrain", "finetune", "selftrain")
OPTIONS = {"stage": dict(choices=(*STAGES, "all"), help="run only this stage (default: all)")}
SCORED = 300  # validation reviews that score the language model


class Part(Stage):
    """What all stages have in common: the program's data and settings."""

    def __init__(self, program):
        super().__init__(program.run)
        self.program, self.data, self.save = program, program.data, program.save

    def identity(self):
        return self.program.identity()

    def schedule(self):
        return super().schedule(floor=self.lr / 20)


class Pretraining(Part):
    folder = "pretrain"

    def make_model(self, key):
        sizes = self.sizes("d_model", "heads", "depth", "dropout")
        return BidirectionalLanguageModel(len(self.data.vocabulary), context=self.run.max_length, key=key, **sizes)

    def tokens(self, texts):
        return joined(texts, self.data.vocabulary["[SEP]"])

    def make_batches(self, key):
        return TextBatches(self.tokens(self.data.unlabelled), self.run.batch_size, self.run.max_length, key)

    def training(self):
        return dict(evaluate_every=max(250, self.steps // 20))

    def evaluate(self, replicas, part):
        tokens = self.tokens(self.data.validation.ids[:SCORED])
        context = min(self.run.max_length, len(tokens) - 1)
        starts = np.arange(0, len(tokens) - context, context)
        rows = tokens[starts[:, None] + np.arange(context + 1)]  # without what is left over at the end
        batches = (TextBatch(row[None, :-1], row[None, 1:]) for row in rows)
        return {"loss": mean_loss(replicas, batches, len(rows))}

    def test(self, replicas):
        return {}

    def report(self, state, test):
        print(f"pre-trained: {state['best']}")

    def describe(self):
        texts = self.data.unlabelled
        if len(texts) <= len(self.data.train.labels):
            print("the data has no unlabelled reviews (train/unsup): pre-training uses only the training reviews")
        print(f"{len(texts):,} reviews of {sum(map(len, texts)):,} tokens, {self.parameters} parameters")


class Classification(Part):
    folder = "finetune"

    def make_model(self, key):
        run, sizes = self.run, self.sizes("evidence", "d_model", "heads", "depth", "max_length")
        block = dict(causal=True, positions="none", block=LlamaBlock, final_norm=RMSNorm, dropout=run.tuning_dropout)
        model = BidirectionalClassifier(len(self.data.vocabulary), reads_evidence=False, **sizes, **block, key=key)
        if not (self.out / "last.safetensors").exists() and run.ranks.first:  # which sends the others its weights
            pretrained, state = load_model(best_snapshot(run.out / "pretrain"), BidirectionalLanguageModel)
            print(f"starts from the language models of step {state['step']} of {run.steps}")
            model.start_from(pretrained)
        return model

    def make_batches(self, key):
        return LabelledBatches(self.data.train, self.run.tuning_batch_size, self.run.max_length, key, "both")

    @property
    def steps(self):
        return min(self.run.steps, self.run.epochs * len(self.batches))

    @property
    def lr(self):
        return self.run.tuning_lr

    @property
    def warmup(self):
        return len(self.batches) // 5

    def optimizer(self, model):
        return AdamW(model.parameters(), self.lr, weight_decay=self.run.weight_decay)

    def training(self):
        return dict(evaluate_every=max(100, len(self.batches) // 2), select=("accuracy", "max"))

    def texts(self, part):
        """The reviews of a part that are scored."""
        whole = getattr(self.data, part)
        return whole.evenly(self.scored(part, len(whole.labels), self.steps * self.run.tuning_batch_size))

    def evaluate(self, replicas, part):
        return evaluate_classifier(replicas, self.texts(part), self.run.max_length, "both")

    def describe(self):
        pass

    def test(self, replicas):
        return self.evaluate(replicas, "test") if self.program.last is type(self) else {}

    def report(self, state, test):
        print(f"best on validation: {state['best']}")
        if not test:
            return
        reviews = self.share(len(self.texts("test").labels), len(self.data.test.labels), "reviews")
        print(f"test accuracy on {reviews}: {100 * test['accuracy']:.2f}%")


class SelfTraining(Classification):
    folder = "selftrain"
    predictions = None  # the checksum of what the model of `finetune` says, once it is known

    def identity(self):
        return super().identity() | ({} if self.predictions is None else {"predictions": self.predictions})

    def make_batches(self, key):
        train, texts = self.data.train, self.program.without_label
        probabilities = self.predicted(texts)
        self.predictions = hashlib.sha256(probabilities.tobytes()).hexdigest()
        labels = np.concatenate([np.eye(2, dtype=np.float32)[train.labels], probabilities])
        evidence = [np.zeros((len(text), self.run.evidence), np.float32) for text in texts]  # not read in training
        both = Labelled([*train.ids, *texts], labels, [*train.evidence, *evidence])
        return LabelledBatches(both, self.run.tuning_batch_size, self.run.max_length, key, "both")

    def predicted(self, texts):
        """The probabilities of both classes for each of these texts, float32 (texts, 2), from the run's folder, or from
        the model of `finetune`, once for all resumptions.
        """
        file = self.out / "predictions.npy"
        saved = self.run.ranks.from_first(lambda: read_predictions(file, len(texts)) if file.exists() else None)
        if saved is not None:
            return saved
        model, _ = load_model(best_snapshot(self.run.out / "finetune"), BidirectionalClassifier)
        evidence = fit_evidence(self.data.train.ids, self.data.train.labels, self.run.evidence)
        found = [evidence.of(text) for text in counted(texts, "finding evidence", "reviews")]
        unlabelled = Labelled(texts, np.empty(0), found)
        with Replicas(model.to(self.run.device), **self.run.replicas_on_device()) as replicas:
            probabilities = predict_classes(replicas, unlabelled, self.run.max_length, "both").astype(np.float32)
        if self.run.ranks.first:
            self.out.mkdir(exist_ok=True)
            with replacing(file) as new, open(new, "wb") as opened:
                np.save(opened, probabilities)
        return probabilities


def read_predictions(file, count):
    """The probabilities (count, 2) in a file. Raises DataError."""
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: not a file of predictions ({error})") from error
    if found.shape != (count, 2) or found.dtype != np.float32:
        raise DataError(f"{file}: expected float32 ({count}, 2), got {found.dtype} {found.shape}")
    return found


class Reviews(Program):
    name = "reviews"
    description = __doc__
    presets = PRESETS
    options = OPTIONS
    passing = ("stage",)

    def check(self):
        run = self.run
        if run.estimate and run.stage in STAGES[1:]:
            raise ValueError("--estimate: only pre-training is estimated, so leave out --stage")
        for stage, before, what in zip(STAGES[1:], STAGES, ("language model", "classifier"), strict=False):
            if run.stage == stage and not (run.out / before / "last.safetensors").exists():
                raise ValueError(f"{run.out / before} holds no {what}: run --stage {before} first")

    def load(self):
        run, vocabulary = self.run, self.saved_vocabulary(Subwords)
        evidence = 0 if run.stage == "pretrain" else run.evidence  # which takes a minute to find
        options = dict(seed=run.seed, vocabulary=vocabulary, evidence=evidence)
        self.data = load_imdb_subwords(run.data, run.vocabulary, **options)
        self.vocabulary = self.data.vocabulary

    def identity(self):
        return {"vocabulary": self.vocabulary.fingerprint, "data": self.data.fingerprint}

    @cached_property
    def without_label(self):
        """The unlabelled reviews, without copies of training reviews."""
        known = {ids.tobytes() for ids in self.data.train.ids}
        return [ids for ids in self.data.unlabelled if ids.tobytes() not in known]

    @property
    def last(self):
        """The last stage of this run, whose model is scored on the test reviews."""
        chosen = self.run.stage or "all"
        if chosen == "all":
            return SelfTraining if self.without_label else Classification
        return {stage.folder: stage for stage in KINDS}[chosen]

    def stages(self):
        chosen = self.run.stage or "all"
        if chosen == "selftrain" and not self.without_label:
            raise ValueError("--stage selftrain: the data has no unlabelled reviews (train/unsup) to learn from")
        kinds = [kind for kind in KINDS if chosen in ("all", kind.folder)]
        return [kind(self) for kind in kinds if kind is not SelfTraining or self.without_label]

    def scored_stages(self):
        for kind in (SelfTraining, Classification):
            if (self.run.out / kind.folder / "last.safetensors").exists():
                return [kind(self)]
        raise ValueError(f"{self.run.out} holds no classifier yet: the model is only pre-trained")


KINDS = (Pretraining, Classification, SelfTraining)

if __name__ == "__main__":
    Reviews.main()

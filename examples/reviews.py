"""Read film reviews without labels first: language models of all reviews become a classifier (IMDb).

Three stages, each with a subfolder in the run's folder; --resume continues where the run stopped. pretrain: a Llama
learns to predict the next sub-word of the training reviews and of the 50,000 unlabelled ones. A second one learns to
predict the sub-word before. finetune: their bodies, each with a mean over the text and an output layer, learn the
labels of the training reviews. In evaluation they decide together with a linear model of n-grams, as in imdb.py.
selftrain: when this stage begins, the classifier and the linear model predict the labels of the unlabelled reviews, as
probabilities. A new classifier starts from the same language models, and learns from the true labels and from these
pseudo-labels. Without unlabelled reviews this stage is left out.

--steps sets the steps of pre-training, and limits those of the other stages. Each classifier is selected on held-out
training reviews. No stage learns from them, but the two weights in the joint decision are fitted to them. After
training, only the last classifier is scored on the test reviews.

Without --data the official archive is downloaded.

Source: Dai, Le, "Semi-supervised sequence learning", 2015; for the last stage Xie, Luong, Hovy, Le, "Self-training with
Noisy Student improves ImageNet classification", 2020.
"""

import math
from functools import cached_property

import numpy as np
from scratchformer.training.stage import Stage

from scratchformer.checks import expect_probabilities
from scratchformer.data import (
    Labelled,
    LabelledBatches,
    Subwords,
    TextBatches,
    fit_evidence,
    joined,
    load_imdb_subwords,
    windows,
)
from scratchformer.models import BidirectionalClassifier, BidirectionalLanguageModel
from scratchformer.models.llama import LlamaBlock
from scratchformer.nn import RMSNorm
from scratchformer.optim import AdamW
from scratchformer.shell.progress import counted
from scratchformer.training import (
    VALIDATION_OPTION,
    Program,
    Replicas,
    best_snapshot,
    load_model,
    load_snapshot,
    mean_loss,
    predict_classes,
    scores_of_classes,
    stack_weights,
    stacked,
)

PRESETS = {
    "small": dict(
        d_model=256, heads=4, depth=4, max_length=512, vocabulary=8_000, evidence=3, weight_decay=0.1,
        batch_size=8, dropout=0.1, optimizer="muon", muon_lr=0.02, lr=2e-3, warmup=150, steps=4_000,
        tuning_batch_size=32, tuning_dropout=0.2, tuning_lr=2e-4, epochs=1,
    ),
}  # fmt: skip
STAGES = ("pretrain", "finetune", "selftrain")
NEEDED = {"finetune": ("pretrain", "language model"), "selftrain": ("finetune", "classifier")}
OPTIONS = {"stage": dict(choices=(*STAGES, "all"), help="run only this stage (default: all)"), **VALIDATION_OPTION}
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
        texts = self.data.validation
        tokens = self.tokens(texts.evenly(min(SCORED, len(texts.labels))).ids)
        context = min(self.run.max_length, len(tokens) - 1)
        cut = windows(tokens, context, context, batch_size=1)
        whole = (batch for batch, counted in cut if counted.all())  # the last one may overlap
        return {"loss": mean_loss(replicas, whole, (len(tokens) - 1) // context)}

    def test(self, replicas):
        return {}

    def report(self, state, test):
        print(f"pre-trained: {state['best']}")

    def describe(self):
        texts = self.data.unlabelled
        if not self.program.unlabelled:
            print("the data has no unlabelled reviews (train/unsup): pre-training uses only the training reviews,")
            print("and there is no self-training")
        print(f"{len(texts):,} reviews of {sum(map(len, texts)):,} tokens, {self.parameters} parameters")


class Classification(Part):
    folder = "finetune"

    def make_model(self, key):
        run, sizes = self.run, self.sizes("d_model", "heads", "depth", "max_length")
        block = dict(causal=True, positions="none", block=LlamaBlock, final_norm=RMSNorm, dropout=run.tuning_dropout)
        model = BidirectionalClassifier(len(self.data.vocabulary), 2, **sizes, **block, key=key)
        if not (self.out / "last.safetensors").exists() and run.ranks.first:  # which sends the others its weights
            pretrained, state = load_model(best_snapshot(run.out / "pretrain"), BidirectionalLanguageModel)
            print(f"starts from the language models of step {state['step']} of {run.steps}")
            model.start_from(pretrained)
        return model

    def make_batches(self, key):
        return LabelledBatches(self.data.train, self.run.tuning_batch_size, self.run.max_length, key, "both")

    @property
    def learned(self):
        """The number of texts in an epoch."""
        return len(self.data.train.labels)

    @property
    def per_epoch(self):
        """The number of steps in an epoch."""
        return math.ceil(self.learned / self.run.tuning_batch_size)

    @property
    def steps(self):
        return min(self.run.steps, self.run.epochs * self.per_epoch)

    @property
    def lr(self):
        return self.run.tuning_lr

    @property
    def warmup(self):
        return self.per_epoch // 5

    def optimizer(self, model):
        return AdamW(model.parameters(), self.lr, weight_decay=self.run.weight_decay)

    def training(self):
        return dict(evaluate_every=max(100, self.per_epoch // 2), select=("loss", "min"))

    @property
    def tested(self):
        """The number of test reviews that are scored."""
        return self.scored("test", len(self.data.test.labels), self.steps * self.run.tuning_batch_size)

    def evaluate(self, replicas, part):
        texts = self.data.validation if part == "validation" else self.data.test.evenly(self.tested)
        return scores_of_classes(self.predict(replicas, texts), texts.labels)

    def predict(self, replicas, texts):
        """The probabilities, (texts, 2), that the classifier and the linear model predict together. Their weights are
        fitted to the validation reviews.
        """
        held_out = self.data.validation
        parts = [held_out] if texts is held_out else [held_out, texts]
        own = [predict_classes(replicas, part, self.run.max_length, "both") for part in parts]

        def together():
            logits = [self.program.logits(part) for part in parts]
            return stacked(own[-1], logits[-1], stack_weights(own[0], logits[0], held_out.labels))

        return self.run.ranks.from_first(together)

    def describe(self):
        pass

    def test(self, replicas):
        last = "selftrain" if self.program.unlabelled else "finetune"
        return self.evaluate(replicas, "test") if self.folder == last else {}

    def report(self, state, test):
        print(f"best on validation: {state['best']}")
        if test:
            reviews = self.share(self.tested, len(self.data.test.labels), "reviews")
            print(f"test accuracy on {reviews}: {100 * test['accuracy']:.2f}%")


class PseudoLabelled(LabelledBatches):
    """Batches whose labels are saved with the run, so that it resumes with the same ones."""

    def state_dict(self):
        return {"labels": self.dataset.labels}

    def load_state_dict(self, state):
        if state.keys() != {"labels"}:
            raise ValueError(f"pseudo-labels: expected a state with labels, got {', '.join(state) or 'an empty one'}")
        expect_probabilities("pseudo-labels", state["labels"], self.dataset.labels.shape)
        self.dataset = replace(self.dataset, labels=state["labels"])


class SelfTraining(Classification):
    folder = "selftrain"

    def make_batches(self, key):
        train, unlabelled = self.data.train, self.program.unlabelled
        if self.run.ranks.from_first((self.out / "last.safetensors").exists):
            labels = np.full((self.learned, 2), 0.5, np.float32)  # until `train` loads those of the snapshot
        else:
            labels = np.concatenate([np.eye(2, dtype=np.float32)[train.labels], self.pseudo_labels(unlabelled)])
        part = Labelled([*train.ids, *unlabelled], labels)
        return PseudoLabelled(part, self.run.tuning_batch_size, self.run.max_length, key, "both")

    @property
    def learned(self):
        return len(self.data.train.labels) + len(self.program.unlabelled)

    def pseudo_labels(self, texts):
        """The probabilities, float32 (texts, 2), that the best classifier of `finetune` and the linear model predict
        for texts.
        """
        teacher = Classification(self.program)
        teacher.load_finished()
        step = self.run.ranks.from_first(lambda: load_snapshot(teacher.out / "last.safetensors").state["step"])
        trained = f"trained for {step:,} of {teacher.steps:,} steps"
        print(
            f"the classifier of {teacher.folder}, {trained}, predicts the labels of {len(texts):,} unlabelled reviews"
        )
        with Replicas(teacher.model, **self.run.replicas_on_device()) as replicas:
            return teacher.predict(replicas, Labelled(texts, np.empty(0))).astype(np.float32)


class Reviews(Program):
    name = "reviews"
    description = __doc__
    presets = PRESETS
    options = OPTIONS
    passing = ("stage",)

    def check(self):
        run = self.run
        if run.estimate and run.stage in NEEDED:
            raise ValueError("--estimate: only pre-training is estimated: use --stage pretrain")
        if run.resume and run.stage not in NEEDED:
            self.expect_final("pretrain", NEEDED)
        before, what = NEEDED.get(run.stage, ("", ""))
        if before and not (run.out / before / "last.safetensors").exists():
            raise ValueError(f"{run.out / before} holds no {what}: run --stage {before} first")

    def load(self):
        run, vocabulary = self.run, self.saved_vocabulary(Subwords)
        self.data = load_imdb_subwords(run.data, run.vocabulary, run.validation, run.seed, vocabulary)
        self.vocabulary = self.data.vocabulary

    def identity(self):
        return {"vocabulary": self.vocabulary.fingerprint, "data": self.data.fingerprint}

    @cached_property
    def unlabelled(self):
        """The reviews without labels, except copies of training reviews."""
        known = {ids.tobytes() for ids in self.data.train.ids}
        return [ids for ids in self.data.unlabelled if ids.tobytes() not in known]

    @cached_property
    def linear(self):
        """The linear model of the training reviews."""
        return fit_evidence(self.data.train.ids, self.data.train.labels, self.run.evidence)

    def logits(self, part):
        """The linear model's logit for each text of a part of the data."""
        return self.linear.logits(counted(part.ids, "scoring with the linear model", "reviews"))

    def stages(self):
        kinds, chosen = [Pretraining, Classification, SelfTraining], self.run.stage or "all"
        if not self.unlabelled:
            if chosen == "selftrain":
                raise ValueError("--stage selftrain: the data has no unlabelled reviews (train/unsup) to learn from")
            kinds.remove(SelfTraining)
        return [kind(self) for kind in kinds if chosen in ("all", kind.folder)]

    def scored_stages(self):
        kinds = [
            kind
            for kind in (Classification, SelfTraining)
            if (self.run.out / kind.folder / "last.safetensors").exists()
        ]
        if not kinds:
            raise ValueError(f"{self.run.out} holds no classifier yet: the model is only pre-trained")
        return [kind(self) for kind in kinds]


if __name__ == "__main__":
    Reviews.main()

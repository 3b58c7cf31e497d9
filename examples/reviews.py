"""Read film reviews without labels first: language models of all reviews become a classifier (IMDb).

Two stages, each with a subfolder in the run's folder; --resume continues where the run stopped. pretrain: a Llama
learns to predict the next sub-word of the training reviews and of the 50,000 unlabelled ones. A second one learns to
predict the sub-word before. finetune: their bodies, each with a mean over the text and an output layer, learn the
labels of the training reviews, and decide together. Beside each sub-word they read what a linear model of n-grams says
about it, as in imdb.py. --steps sets the steps of pre-training and limits those of fine-tuning. The classifier is
selected on held-out training reviews, which neither stage learns from, and scored once on the test reviews.

Without --data the official archive is downloaded.
"""

import numpy as np

from scratchformer.data import LabelledBatches, Subwords, TextBatch, TextBatches, joined, load_imdb_subwords
from scratchformer.models import BidirectionalClassifier, BidirectionalLanguageModel
from scratchformer.models.llama import LlamaBlock
from scratchformer.nn import RMSNorm
from scratchformer.optim import AdamW
from scratchformer.training import Program, best_snapshot, evaluate_classifier, load_model, mean_loss
from scratchformer.training.stage import Stage

PRESETS = {
    "small": dict(
        d_model=256, heads=4, depth=4, max_length=512, vocabulary=8_000, evidence=3, weight_decay=0.1,
        batch_size=8, dropout=0.1, optimizer="muon", muon_lr=0.02, lr=2e-3, warmup=150, steps=8_000,
        tuning_batch_size=32, tuning_dropout=0.2, tuning_lr=2e-4, epochs=1,
    ),
}  # fmt: skip
STAGES = ("pretrain", "finetune")
OPTIONS = {"stage": dict(choices=(*STAGES, "all"), help="run only this stage (default: both)")}
SCORED = 300  # validation reviews that score the language model


class Part(Stage):
    """What both stages have in common: the program's data and settings."""

    def __init__(self, program):
        super().__init__(program.run)
        self.data, self.identity, self.save = program.data, program.identity, program.save
        self.pretrained = program.run.out / "pretrain"

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
        model = BidirectionalClassifier(len(self.data.vocabulary), **sizes, **block, key=key)
        if not (self.out / "last.safetensors").exists() and run.ranks.first:  # which sends the others its weights
            pretrained, state = load_model(best_snapshot(self.pretrained), BidirectionalLanguageModel)
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

    def report(self, state, test):
        print(f"best on validation: {state['best']}")
        reviews = self.share(len(self.texts("test").labels), len(self.data.test.labels), "reviews")
        print(f"test accuracy on {reviews}: {100 * test['accuracy']:.2f}%")


class Reviews(Program):
    name = "reviews"
    description = __doc__
    presets = PRESETS
    options = OPTIONS
    passing = ("stage",)

    def check(self):
        if self.run.estimate and self.run.stage == "finetune":
            raise ValueError("--estimate: only pre-training is estimated, so leave out --stage")
        if self.run.stage == "finetune" and not (self.run.out / "pretrain" / "last.safetensors").exists():
            raise ValueError(f"{self.run.out / 'pretrain'} holds no language model: run --stage pretrain first")

    def load(self):
        run, vocabulary = self.run, self.saved_vocabulary(Subwords)
        evidence = 0 if run.stage == "pretrain" else run.evidence  # which takes a minute to find
        options = dict(seed=run.seed, vocabulary=vocabulary, evidence=evidence)
        self.data = load_imdb_subwords(run.data, run.vocabulary, **options)
        self.vocabulary = self.data.vocabulary

    def identity(self):
        return {"vocabulary": self.vocabulary.fingerprint, "data": self.data.fingerprint}

    def stages(self):
        kinds = {"pretrain": Pretraining(self), "finetune": Classification(self)}
        return [stage for name, stage in kinds.items() if self.run.stage in (None, "all", name)]

    def scored_stages(self):
        if (self.run.out / "finetune" / "last.safetensors").exists():
            return [Classification(self)]
        raise ValueError(f"{self.run.out} holds no classifier yet: the model is only pre-trained")


if __name__ == "__main__":
    Reviews.main()

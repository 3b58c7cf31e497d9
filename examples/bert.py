"""Pre-train BERT on unlabelled film reviews, then fine-tune it to tell good reviews from bad ones.

For comparison, the same model is also trained from scratch on the labelled reviews alone. The stages are pretrain,
finetune and scratch. Each has a subfolder in the run's folder, and --resume continues where the run stopped. --steps
sets the steps of pre-training and limits those of the other stages. Models are selected on held-out training reviews,
which pre-training does not see either, and scored once on the test reviews.

Fine-tuning trains the whole model. --tune head trains only the layers after the body (pooler and output); --tune lora
trains these and low-rank updates of the query and value matrices (`nn.LoRA`). Each way has its own subfolder, so one
pre-trained model can be tuned in all three: --resume RUN --stage finetune --tune head.

Without --data the official archive is downloaded. --pretrained FOLDER fine-tunes a published BERT, with its own
vocabulary, from a folder in Hugging Face's format.
"""

from functools import cached_property

from scratchformer.training.stage import Stage

from scratchformer.data import LabelledBatches, MaskedBatches, Subwords, load_imdb_subwords, single_texts
from scratchformer.models import BertClassifier, BertPretraining
from scratchformer.nn import Frozen, add_lora
from scratchformer.optim import AdamW, Group
from scratchformer.training import (
    MUON_OPTIONS,
    VALIDATION_OPTION,
    Program,
    best_snapshot,
    evaluate_classifier,
    evaluate_pretraining,
    load_model,
)
from scratchformer.training.folder import holds_run

PRESETS = {
    "small": dict(
        d_model=192, heads=3, depth=3, max_length=256, embedding_std=0.05, vocabulary=8_000, weight_decay=0.01,
        dropout=0.0, chosen=0.3,  # pre-training, with the next line
        batch_size=16, optimizer="muon", muon_lr=0.01, lr=1e-3, beta2=0.98, warmup=100, steps=5_000,
        short_length=256, short_share=0.0,
        tuning_dropout=0.1, tuning_batch_size=32,
        finetune_lr=3e-4, finetune_epochs=2, scratch_lr=5e-4, scratch_epochs=3,
        head_lr=3e-3, lora_lr=3e-3, lora_rank=8, lora_alpha=16,
    ),
    "base": dict(
        d_model=768, heads=12, depth=12, max_length=512, embedding_std=0.02, vocabulary=30_000, weight_decay=0.01,
        dropout=0.1, chosen=0.15,
        batch_size=256, lr=1e-4, beta2=0.999, warmup=10_000, steps=1_000_000, short_length=128, short_share=0.9,
        tuning_dropout=0.1, tuning_batch_size=32,
        finetune_lr=3e-5, finetune_epochs=3, scratch_lr=1e-4, scratch_epochs=3,
        head_lr=1e-3, lora_lr=3e-4, lora_rank=8, lora_alpha=16,
    ),
}  # fmt: skip
STAGES = ("pretrain", "finetune", "scratch")
OPTIONS = {
    "stage": dict(choices=(*STAGES, "all"), help="run only this stage (default: all, in order)"),
    "tune": dict(choices=("all", "head", "lora"), default="all", help="what fine-tuning trains (default: all)"),
    "new-head": dict(action="store_true", default=False, help="with --pretrained: replace its trained output layer"),
    **VALIDATION_OPTION,
    **MUON_OPTIONS,  # of pre-training
    "pretrained": dict(metavar="PATH", help="fine-tune a published BERT, a folder in Hugging Face's format"),
}
VALIDATION_BATCHES = 25
PUBLISHED_LR = 3e-5  # the paper tries 2e-5, 3e-5 and 5e-5
HEAD = [Group("pooler.*"), Group("output.*")]  # the layers after the body
TRAINED = {
    "all": [],
    "head": [*HEAD, Group("*", frozen=True)],
    "lora": [*HEAD, Group("*.lora_*"), Group("*", frozen=True)],
}


class BertStage(Stage):
    """What the stages have in common: the program's data, vocabulary and settings."""

    def __init__(self, program):
        super().__init__(program.run)
        self.program, self.data = program, program.data
        self.identity, self.save = program.identity, program.save

    def model_sizes(self):
        names = ("d_model", "heads", "depth", "max_length", "embedding_std")
        return {"vocab_size": len(self.data.vocabulary), **self.sizes(*names)}


class Pretraining(BertStage):
    folder = "pretrain"

    def make_model(self, key):
        return BertPretraining(key=key, dropout=self.run.dropout, **self.model_sizes())

    def masked(self, texts, key, **options):
        run = self.run
        return MaskedBatches(
            texts, self.data.vocabulary, run.batch_size, run.max_length, key, chosen=run.chosen, **options
        )

    def make_batches(self, key):
        _ = self.validation  # now, to report bad reviews early
        short_steps = round(self.run.short_share * self.steps)
        return self.masked(self.data.unlabelled, key, short_length=self.run.short_length, short_steps=short_steps)

    @cached_property
    def validation(self):
        texts = [ids for ids in self.data.validation.ids if len(ids) > 1]  # each is cut in two
        return self.masked(texts, self.key.fold("validation"))

    def optimizer(self, model):
        if self.with_muon:
            return super().optimizer(model)
        return AdamW(model.parameters(), self.lr, betas=(0.9, self.run.beta2), weight_decay=self.run.weight_decay)

    def training(self):
        return dict(evaluate_every=max(250, self.steps // 20))

    def evaluate(self, replicas, part):
        return evaluate_pretraining(replicas, self.validation, min(VALIDATION_BATCHES, len(self.validation)))

    def describe(self):
        texts = self.data.unlabelled
        if len(texts) <= len(self.data.train.labels):
            print("the data has no unlabelled reviews (train/unsup): pre-training uses only the training reviews")
        print(f"{len(texts):,} reviews of {sum(map(len, texts)):,} tokens, {self.parameters} parameters")

    def test(self, replicas):
        return {}

    def report(self, state, test):
        print(f"pre-trained: {state['best']}")


class Classification(BertStage):
    """Fine-tuning, or training from scratch. tune: a key of TRAINED."""

    def __init__(self, program, stage, tune="all"):
        super().__init__(program)
        self.stage, self.tune = stage, tune
        self.folder, self.key = stage if tune == "all" else f"{stage}-{tune}", self.key.fold(stage)

    def make_model(self, key):
        last, program = self.out / "last.safetensors", self.program
        if last.exists():
            model, _ = load_model(last, BertClassifier)
        elif self.run.pretrained:
            model = program.published or program.load_published()
        else:
            model = BertClassifier(num_classes=2, key=key, dropout=self.run.tuning_dropout, **self.model_sizes())
            if self.stage == "finetune" and self.run.ranks.first:  # which sends the others its weights
                model.start_from(program.load_pretrained())
        if self.tune == "head":
            model.body = Frozen(model.body)
        elif self.tune == "lora" and "lora" not in model.config:  # a resumed model has it already
            add_lora(model, self.run.lora_rank, self.run.lora_alpha, key=self.key.fold("lora"))
        return model

    @property
    def length(self):
        return min(self.run.max_length, self.model.config["max_length"])

    @cached_property
    def texts(self):
        parts = ("train", "validation", "test")
        return {part: single_texts(getattr(self.data, part), self.data.vocabulary) for part in parts}

    def make_batches(self, key):
        return LabelledBatches(self.texts["train"], self.run.tuning_batch_size, self.length, key, keep="both")

    @property
    def steps(self):
        return min(self.run.steps, getattr(self.run, f"{self.stage}_epochs") * len(self.batches))

    @property
    def lr(self):
        if self.tune != "all":
            return getattr(self.run, f"{self.tune}_lr")
        return PUBLISHED_LR if self.run.pretrained else getattr(self.run, f"{self.stage}_lr")

    @property
    def warmup(self):
        return len(self.batches) // 5

    def optimizer(self, model):
        optimizer = AdamW(model.parameters(), self.lr, weight_decay=self.run.weight_decay, groups=TRAINED[self.tune])
        trained, bytes_each = optimizer.m.size, optimizer.m.itemsize
        print(f"trains {trained:,} of {self.parameters} parameters, {bytes_each * trained:,} bytes")
        return optimizer

    def training(self):
        return dict(evaluate_every=max(100, len(self.batches) // 2), select=("accuracy", "max"))

    def evaluate(self, replicas, part):
        return evaluate_classifier(replicas, self.scored_texts(part), self.length, "both")

    def scored_texts(self, part):
        whole = self.texts[part]
        return whole.evenly(self.scored(part, len(whole.labels), self.steps * self.run.tuning_batch_size))

    def describe(self):
        pass

    def report(self, state, test):
        print(f"best on validation: {state['best']}")
        reviews = self.share(len(self.scored_texts("test").labels), len(self.data.test.labels), "reviews")
        print(f"{self.folder}: test accuracy on {reviews}: {100 * test['accuracy']:.2f}%")


class Bert(Program):
    name = "bert"
    description = __doc__
    presets = PRESETS
    options = OPTIONS
    passing = ("stage", "tune")
    published = None  # the model of --pretrained

    def check(self):
        run, chosen = self.run, self.chosen()
        if "tune" in run.given and "finetune" not in chosen:
            raise ValueError(f"--tune: applies only to fine-tuning, so leave it out with --stage {run.stage}")
        if run.new_head and not run.pretrained:
            raise ValueError("--new-head: applies only with --pretrained, so leave it out")
        if run.pretrained and run.stage not in (None, "all", "finetune"):
            raise ValueError(f"--pretrained: published weights are only fine-tuned, so leave out --stage {run.stage}")
        if run.estimate and chosen[0] != "pretrain":
            raise ValueError("--estimate: only pre-training is estimated: use --stage pretrain, without --pretrained")
        if run.given & {"optimizer", "muon_lr"} and "pretrain" not in chosen:
            raise ValueError("--optimizer, --muon-lr: these apply only to pre-training, so leave them out")
        if run.resume and "pretrain" in chosen:
            self.expect_final("pretrain", ("finetune", "finetune-head", "finetune-lora"))
        if chosen == ("finetune",) and not run.pretrained and not (run.out / "pretrain" / "last.safetensors").exists():
            raise ValueError(f"{run.out / 'pretrain'} holds no pre-trained model: run --stage pretrain first")

    def chosen(self):
        """The names of the stages to run."""
        if self.run.pretrained:
            return ("finetune",)
        return STAGES if self.run.stage in (None, "all") else (self.run.stage,)

    def load_published(self):
        """The published model, with an output layer for two classes."""
        key = self.key.fold("finetune", "weights")
        return BertClassifier.from_pretrained(self.run.pretrained, 2, key=key, new_head=self.run.new_head)

    def load_pretrained(self):
        model, state = load_model(best_snapshot(self.run.out / "pretrain"), BertPretraining)
        print(f"starts from the pre-trained model of step {state['step']} of {self.run.steps}")
        return model

    def load(self):
        run, vocabulary = self.run, self.saved_vocabulary(Subwords)
        if run.pretrained and vocabulary is None:
            self.published, vocabulary = self.load_published(), Subwords.from_bert(run.pretrained)
        self.data = load_imdb_subwords(run.data, run.vocabulary, run.validation, run.seed, vocabulary)
        self.vocabulary = self.data.vocabulary

    def identity(self):
        return {"vocabulary": self.vocabulary.fingerprint, "data": self.data.fingerprint}

    def stages(self):
        kinds = {
            "pretrain": Pretraining(self),
            "finetune": Classification(self, "finetune", self.run.tune),
            "scratch": Classification(self, "scratch"),
        }
        return [kinds[stage] for stage in self.chosen()]

    def scored_stages(self):
        classifiers = [*(Classification(self, "finetune", tune) for tune in TRAINED), Classification(self, "scratch")]
        if found := [stage for stage in classifiers if holds_run(stage.out)]:
            return found
        raise ValueError(f"{self.run.out} holds no classifier yet: the model is only pre-trained")


if __name__ == "__main__":
    Bert.main()

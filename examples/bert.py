"""Pre-train BERT on film reviews without their labels, then fine-tune it to tell the good ones from the bad.

Beside it the same model is trained from nothing on the labels alone. Stages: pretrain, finetune, scratch; each has a
folder of its own in that of the run, and --resume continues where the run stopped. --steps is the number of steps of
pre-training, and the most that the other stages take. Models are chosen on a validation part of the training reviews,
which is not pre-trained on either, and scored once on the test reviews.

Fine-tuning trains everything. With --tune head it trains only the layers after the body (pooler and output), and with
--tune lora these and low-rank changes of attention's query and value matrices (`nn.LoRA`). Each way has a folder of its
own, so one pre-trained model can be tuned in all three: --resume RUN --stage finetune --tune head.

Without --data the official archive is downloaded. With --pretrained the weights and the vocabulary of a published
BERT are fine-tuned, from a Hugging Face folder.
"""

import time

from scratchformer import Key
from scratchformer.data import LabelledBatches, MaskedBatches, Subwords, load_imdb_subwords, single_texts
from scratchformer.data.files import locked
from scratchformer.models import BertClassifier, BertPretraining
from scratchformer.nn import Frozen, add_lora
from scratchformer.optim import AdamW, Cosine, Group
from scratchformer.training import (
    Replicas,
    best_snapshot,
    estimate,
    evaluate_classifier,
    evaluate_pretraining,
    load_model,
    train,
)
from scratchformer.training.memory import resident_bytes
from scratchformer.training.program import SUBWORDS, run_program, start_run

PRESETS = {
    "small": dict(
        d_model=192, heads=3, depth=3, max_length=256, embedding_std=0.05, vocabulary=8_000, weight_decay=0.01,
        dropout=0.0, chosen=0.3,  # of pre-training
        batch_size=16, lr=1e-3, beta2=0.98, warmup=100, steps=11_000, short_length=256, short_share=0.0,  # and this
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
    "stage": dict(choices=(*STAGES, "all"), help="one stage alone (default: all, one after the other)"),
    "tune": dict(choices=("all", "head", "lora"), default="all", help="what fine-tuning trains (default: all)"),
    "new-head": dict(
        action="store_true", default=False, help="with --pretrained: replace a trained output of the folder"
    ),
    "pretrained": dict(metavar="PATH", help="fine-tune a published BERT, from a Hugging Face folder"),
}
VALIDATION_BATCHES = 25
PUBLISHED_LR = 3e-5  # of the paper's three, the one in the middle
HEAD = [Group("pooler.*"), Group("output.*")]  # what comes after the body
TRAINED = {
    "all": [],
    "head": [*HEAD, Group("*", frozen=True)],
    "lora": [*HEAD, Group("*.lora_*"), Group("*", frozen=True)],
}


def load_published(run):
    """The published model of --pretrained, with a new output, and its vocabulary; those of the run if it has them."""
    last = run.out / folder_of("finetune", run.tune) / "last.safetensors"
    if last.exists():
        return load_model(last)[0], Subwords.load(run.out / SUBWORDS)
    key = Key(run.seed).fold("finetune", "weights")
    model = BertClassifier.from_pretrained(run.pretrained, 2, key=key, new_head=run.new_head)
    return model, Subwords.from_bert(run.pretrained)


def load_data(run, vocabulary):
    """The reviews, in this vocabulary, or in that of the run; and what saves the run's settings and vocabulary."""
    path = run.out / SUBWORDS
    if run.resume and vocabulary is None:
        vocabulary = Subwords.load(path)
    data = load_imdb_subwords(run.data, run.vocabulary, seed=run.seed, vocabulary=vocabulary)

    def save():
        if not run.resume:
            data.vocabulary.save(path)
        run.save()

    return data, save


def sizes(run, data):
    names = ("d_model", "heads", "depth", "max_length", "embedding_std")
    return {"vocab_size": len(data.vocabulary), **{name: getattr(run, name) for name in names}}


def training(run, data, save, folder, lr, warmup, steps):
    """The arguments that every stage gives to `train`."""
    return dict(
        schedule=Cosine(lr, min(warmup, steps // 5), steps),
        steps=steps,
        out=run.out / folder,
        seed=run.seed,
        identity={"vocabulary": data.vocabulary.fingerprint, "data": data.fingerprint},
        resume=run.resume,
        tensorboard=run.tensorboard,
        on_start=save,
    )


def pretrain(run, data, save):
    before, key = resident_bytes(), Key(run.seed)
    model = BertPretraining(key=key.fold("weights"), dropout=run.dropout, **sizes(run, data)).to(run.device)
    tokens = sum(map(len, data.unlabelled))
    if len(data.unlabelled) <= len(data.train.labels):
        print("the reviews without labels (train/unsup) are not among the data: the training reviews are all there is")
    print(f"{len(data.unlabelled):,} reviews of {tokens:,} tokens, {model.flat.data.size:,} parameters")
    rows = (data.vocabulary, run.batch_size, run.max_length)
    short_steps = round(run.short_share * run.steps)
    short = dict(short_length=run.short_length, short_steps=short_steps)
    batches = MaskedBatches(data.unlabelled, *rows, key.fold("batches"), **short, chosen=run.chosen)
    validation = MaskedBatches(data.validation.ids, *rows, key.fold("validation"), chosen=run.chosen)
    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(replicas.describe(batches.batch(0)))
        if run.estimate:
            return print(estimate(replicas, batches.batch(0), before))
        state = train(
            replicas,
            AdamW(model.parameters(), run.lr, betas=(0.9, run.beta2), weight_decay=run.weight_decay),
            batches=batches,
            evaluate=lambda: evaluate_pretraining(replicas, validation, min(VALIDATION_BATCHES, len(validation))),
            evaluate_every=max(250, run.steps // 20),
            **training(run, data, save, "pretrain", run.lr, run.warmup, run.steps),
        )
    print(f"pre-trained: {state['best']}")


def folder_of(stage, tune):
    """The folder of a stage: each way to fine-tune has its own."""
    return stage if stage != "finetune" or tune == "all" else f"{stage}-{tune}"


def classify(run, data, save, stage, published=None):
    key, tune = Key(run.seed).fold(stage), run.tune if stage == "finetune" else "all"
    folder = folder_of(stage, tune)
    lr, epochs = (run.finetune_lr, run.finetune_epochs) if stage == "finetune" else (run.scratch_lr, run.scratch_epochs)
    if published is not None:
        model, lr = published, PUBLISHED_LR
    else:
        model = BertClassifier(num_classes=2, key=key.fold("weights"), dropout=run.tuning_dropout, **sizes(run, data))
        if stage == "finetune":
            model.start_from(load_pretrained(run))
    if tune == "head":
        lr, model.body = run.head_lr, Frozen(model.body)
    elif tune == "lora":
        lr = run.lora_lr
        if "lora" not in model.config:  # the published model of a resumed run has them already
            add_lora(model, run.lora_rank, run.lora_alpha, key=key.fold("lora"))
    model.to(run.device)
    optimizer = AdamW(model.parameters(), lr, weight_decay=run.weight_decay, groups=TRAINED[tune])
    trained, total = optimizer.m.size, model.flat.data.size
    print(f"trains {trained:,} of {total:,} parameters, {optimizer.m.itemsize * trained:,} bytes")
    length = min(run.max_length, model.body.max_length)
    training_part, validation, test = (
        single_texts(part, data.vocabulary) for part in (data.train, data.validation, data.test)
    )
    batches = LabelledBatches(training_part, run.tuning_batch_size, length, key.fold("batches"), keep="both")
    steps = min(run.steps, epochs * len(batches))
    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(replicas.describe(batches.batch(0)))
        state = train(
            replicas,
            optimizer,
            batches=batches,
            evaluate=lambda: evaluate_classifier(replicas, validation, length, "both"),
            evaluate_every=max(100, len(batches) // 2),
            select=("accuracy", "max"),
            **training(run, data, save, folder, lr, len(batches) // 5, steps),
        )
        best, _ = load_model(best_snapshot(run.out / folder))
        model.load_state_dict(best.state_dict())
        found = evaluate_classifier(replicas, test, length, "both")
    print(f"best on validation: {state['best']}")
    print(f"{folder}: test accuracy on {len(test.labels):,} reviews: {100 * found['accuracy']:.2f}%")


def check_pretrained(run):
    folder = run.out / "pretrain"
    if not (folder / "last.safetensors").exists():
        raise ValueError(f"{folder} holds no pre-trained model: --stage pretrain comes first")


def load_pretrained(run):
    model, state = load_model(best_snapshot(run.out / "pretrain"))
    print(f"starts from the model of {state['step']} of {run.steps} steps of pre-training")
    return model


def main(argv=None):
    run = start_run("bert", __doc__, PRESETS, argv, OPTIONS, passing=("stage", "tune"))
    stages = STAGES if run.stage in (None, "all") else (run.stage,)
    if "tune" in run.given and "finetune" not in stages:
        raise ValueError(f"--tune: it says what fine-tuning trains, and --stage {run.stage} does none")
    published = vocabulary = None
    if run.pretrained:
        if run.stage not in (None, "all", "finetune"):
            raise ValueError(f"--pretrained: published weights are fine-tuned, so there is no --stage {run.stage}")
        stages = ("finetune",)
        published, vocabulary = load_published(run)
    elif stages == ("finetune",):
        check_pretrained(run)
    data, save = load_data(run, vocabulary)
    if run.estimate:
        if stages[0] != "pretrain":
            raise ValueError("--estimate: what is estimated is pre-training, so leave out --stage and --pretrained")
        return pretrain(run, data, save)
    with locked(run.out):  # during all stages; `train` locks the folder of one
        for stage in stages:
            started = time.perf_counter()
            if stage == "pretrain":
                pretrain(run, data, save)
            else:
                classify(run, data, save, stage, published)
            print(f"{stage}: {(time.perf_counter() - started) / 60:.1f} minutes\n", flush=True)


if __name__ == "__main__":
    run_program(main)

"""Pre-train BERT on unlabelled film reviews, then fine-tune it to tell good reviews from bad ones.

The stages are pretrain, finetune and, for comparison, scratch: the same model, trained on the labelled reviews alone.
Each has its own subfolder. --steps sets the steps of pre-training and limits those of the others. Models are selected
on held-out training reviews, which pre-training does not see either. --tune head fine-tunes only the layers after the
body (pooler and output), --tune lora these and low-rank updates of the query and value matrices (`nn.LoRA`), each in
its own subfolder: --resume RUN --stage finetune --tune head. --pretrained FOLDER fine-tunes a published BERT, RoBERTa
or DistilBERT, with its own vocabulary, from a folder in Hugging Face's format. Without --data the official archive of
reviews is downloaded.
"""

from scratchformer import Key, training
from scratchformer.data import LabelledBatches, MaskedBatches, Subwords, load_imdb_subwords, single_texts
from scratchformer.models import BertClassifier, BertPretraining
from scratchformer.nn import Frozen, add_lora
from scratchformer.optim import AdamW, Cosine, Group, Muon
from scratchformer.training.readers import load_bert

SMALL = dict(
    d_model=192, heads=3, depth=3, max_length=256, embedding_std=0.05, vocabulary=8_000, weight_decay=0.01,
    dropout=0.0, chosen=0.3, batch_size=16, optimizer="muon", muon_lr=0.01, lr=1e-3, beta2=0.98, warmup=100,
    steps=5_000, short_length=256, short_share=0.0, tuning_dropout=0.1, tuning_batch_size=32, finetune_lr=3e-4,
    finetune_epochs=2, scratch_lr=5e-4, scratch_epochs=3, head_lr=3e-3, lora_lr=3e-3, lora_rank=8, lora_alpha=16,
)  # fmt: skip
BASE = SMALL | dict(
    d_model=768, heads=12, depth=12, max_length=512, embedding_std=0.02, vocabulary=30_000, dropout=0.1, chosen=0.15,
    batch_size=256, optimizer="adam", lr=1e-4, beta2=0.999, warmup=10_000, steps=1_000_000, short_length=128,
    short_share=0.9, finetune_lr=3e-5, finetune_epochs=3, scratch_lr=1e-4, head_lr=1e-3, lora_lr=3e-4,
)  # fmt: skip
PRESETS = {"small": SMALL, "base": BASE, "pretrained": SMALL | dict(finetune_lr=3e-5)}
STAGES = ("pretrain", "finetune", "scratch")
OPTIONS = {
    "stage": dict(choices=(*STAGES, "all"), default="all", changeable=True, help="run only this stage (default: all)"),
    "tune": dict(choices=("all", "head", "lora"), default="all", changeable=True, help="what fine-tuning trains (all)"),
    "pretrained": dict(
        metavar="PATH", help="fine-tune a published BERT, RoBERTa or DistilBERT, a folder in Hugging Face's format"
    ),
    **training.VALIDATION_OPTION,
}


def check(run):
    stage = run.settings["stage"]
    if stage in ("pretrain", "scratch") and (run.pretrained or "tune" in run.given):
        raise ValueError(f"--pretrained, --tune: these apply only to fine-tuning, so leave out --stage {stage}")
    if run.resumed and not run.pretrained and stage in ("pretrain", "all"):
        run.expect_final("pretrain", ("finetune", "finetune-head", "finetune-lora"))
    if stage == "finetune" and not run.pretrained and not run.stage("pretrain").has_snapshot:
        raise ValueError(f"{run.out / 'pretrain'} holds no pre-trained model: run --stage pretrain first")


def data(run):
    vocabulary = run.saved_vocabulary(Subwords)
    if run.pretrained and vocabulary is None:
        _, vocabulary = load_bert(run.pretrained, 2, new_head=True)  # before reviews, perhaps a download
    return load_imdb_subwords(run.data, run.vocabulary, run.validation, run.seed, vocabulary)


def model(run, reviews):
    sizes = run.sizes("d_model", "heads", "depth", "max_length", "embedding_std") | {"key": run.key("weights")}
    if run.stage_name == "pretrain":
        return BertPretraining(len(reviews.vocabulary), dropout=run.dropout, **sizes)
    if run.has_snapshot:
        bert, _ = training.load_model(run.out, BertClassifier)
    elif run.pretrained:
        bert = BertClassifier.from_pretrained(run.pretrained, 2, key=run.key("weights"), new_head=True)
    else:
        bert = BertClassifier(len(reviews.vocabulary), num_classes=2, dropout=run.tuning_dropout, **sizes)
        if run.stage_name != "scratch" and run.ranks.first:  # which sends the others its weights
            pretrained, state = training.load_model(training.best_snapshot(run.parent.out / "pretrain"))
            print(f"starts from the pre-trained model of step {state['step']} of {run.parent.total}")
            bert.start_from(pretrained)
    if run.stage_name == "finetune-head":
        bert.body = Frozen(bert.body)
    elif run.stage_name == "finetune-lora" and "lora" not in bert.config:  # a resumed model has it already
        add_lora(bert, run.lora_rank, run.lora_alpha, key=run.key("lora"))
    return bert


def scored(run, reviews, part):
    return run.scored(part, single_texts(getattr(reviews, part), reviews.vocabulary))


def score(run, replicas, reviews, part):
    if run.stage_name == "pretrain":
        texts = [ids for ids in getattr(reviews, part).ids if len(ids) > 1]  # each is cut in two
        sizes = run.batch_size, run.max_length, run.key(part)
        masked = MaskedBatches(texts, reviews.vocabulary, *sizes, chosen=run.chosen)
        return training.evaluate_pretraining(replicas, masked, min(25, len(masked)))
    length = min(run.max_length, replicas.model.config["max_length"])
    return training.evaluate_classifier(replicas, scored(run, reviews, part), length, "both")


def pretrain(run, reviews):
    texts = reviews.unlabelled
    if len(texts) <= len(reviews.train.labels):
        print("the data has no unlabelled reviews (train/unsup): pre-training uses only the training reviews")
    print(f"{len(texts):,} reviews of {sum(map(len, texts)):,} tokens")
    options = dict(chosen=run.chosen, short_length=run.short_length, short_steps=round(run.short_share * run.total))
    batches = MaskedBatches(texts, reviews.vocabulary, run.batch_size, run.max_length, run.key("batches"), **options)
    with run.replicas(model(run, reviews), batches) as replicas:
        parameters, decay = replicas.model.parameters(), run.weight_decay
        if run.optimizer == "muon":
            precision = "bfloat16" if run.precision == "bfloat16" else "float32"
            optimizer = Muon(parameters, run.muon_lr, run.lr, weight_decay=decay, precision=precision)
        else:
            optimizer = AdamW(parameters, run.lr, betas=(0.9, run.beta2), weight_decay=decay)
        train(run, replicas, optimizer, batches, reviews, max(250, run.total // 20), ("loss", "min"))


def classify(run, reviews):
    bert, texts = model(run, reviews), scored(run, reviews, "train")
    sizes = run.batch_size, min(run.max_length, bert.config["max_length"])
    batches = LabelledBatches(texts, *sizes, run.key("batches"), keep="both")
    with run.replicas(bert, batches) as replicas:
        part = ("pooler.*", "output.*", "*.lora_*")[: 3 if "lora" in bert.config else 2]
        groups = [] if run.stage_name in STAGES else [*map(Group, part), Group("*", frozen=True)]
        adam = AdamW(bert.parameters(), run.lr, weight_decay=run.weight_decay, groups=groups)
        print(f"trains {adam.m.size:,} of {bert.flat.data.size:,} parameters")
        train(run, replicas, adam, batches, reviews, max(100, len(batches) // 2), ("accuracy", "max"))
        accuracy = score(run, replicas, reviews, "test")["accuracy"]
    count = run.share(len(scored(run, reviews, "test").labels), len(reviews.test.labels), "reviews")
    print(f"{run.stage_name}: test accuracy on {count}: {100 * accuracy:.2f}%")


def train(run, replicas, optimizer, batches, reviews, every, select):
    rate = Cosine(optimizer.lr, min(run.warmup, run.total // 5), run.total)
    for step in run.steps(replicas, optimizer, batches, select):
        loss = replicas.gradients(batches.batch(step), Key(run.seed).fold("train", step))  # forward and backward
        norm = replicas.clip(optimizer, 1.0)
        optimizer.lr = rate(step)
        replicas.step(optimizer)
        run.log(loss=loss, norm=norm)
        if run.due(every):
            run.keep_best(score(run, replicas, reviews, "validation"))
    print(f"best on validation: {training.as_text(run.load_best())}")


def main(run):
    reviews, stage = run.load(data), run.settings["stage"]
    epoch = 1 + (len(reviews.train.labels) - 1) // run.tuning_batch_size  # in steps
    for kind in ("finetune",) if run.pretrained else STAGES if stage == "all" else (stage,):
        if kind == "pretrain":
            pretrain(run.stage(kind), reviews)
            continue
        part = run.tune if kind == "finetune" and run.tune != "all" else ""
        lr, steps = run.settings[f"{part or kind}_lr"], min(run.total, run.settings[f"{kind}_epochs"] * epoch)
        settings = dict(lr=lr, batch_size=run.tuning_batch_size, warmup=epoch // 5, steps=steps)
        classify(run.stage(f"{kind}-{part}".strip("-"), kind, **settings), reviews)


if __name__ == "__main__":
    training.start(main)

"""Train a small GPT-2 with its own sub-word vocabulary, or fine-tune a published one; then let it write.

--pretrained FOLDER starts from a published decoder in Hugging Face's format, such as GPT-2, Llama 3, Qwen3, SmolLM3 or
OLMo 2: config.json, model.safetensors, and tokenizer.json or GPT-2's vocab.json and merges.txt. Without --data the text
is Wikipedia (enwik8) or, without a network, the sources of Python's standard library, as with --data stdlib. A
published model also writes without fine-tuning: scratchformer generate FOLDER.
"""

from types import SimpleNamespace

from scratchformer.data import VALIDATION_BYTES, Subwords, TextBatches, as_text
from scratchformer.models import GPT2
from scratchformer.optim import AdamW, Cosine
from scratchformer.training import evaluate_language_model, load_corpus, load_model, start, write_sample
from scratchformer.training.readers import load_published

PRESETS = {
    "small": dict(
        vocabulary=4096, d_model=128, heads=4, depth=4, context=128, dropout=0.0,
        batch_size=32, lr=2e-3, weight_decay=0.1, warmup=100, steps=1000, evaluate_every=250, test_bytes=None,
    ),
    "pretrained": dict(
        context=1024, dropout=0.1, batch_size=4, lr=5e-5, weight_decay=0.1, warmup=10, steps=100, evaluate_every=50,
        test_bytes=VALIDATION_BYTES,
    ),
}  # fmt: skip
OPTIONS = {
    "pretrained": dict(metavar="PATH", help="start from a published decoder, a folder in Hugging Face's format"),
}


def check(run):
    if run.preset != "pretrained" and run.pretrained is not None:
        raise ValueError(f"--pretrained: the model has its own sizes, so leave out --preset {run.preset}")
    if run.preset == "pretrained" and run.pretrained is None:
        raise ValueError("--preset pretrained: needs --pretrained FOLDER")


def data(run):
    published = None
    if run.pretrained and not run.has_snapshot:  # before the corpus, which may need a download
        published, vocabulary = load_published(run.pretrained, run.context, run.dropout)
    corpus = load_corpus(run)
    if published is None:
        vocabulary = run.saved_vocabulary(Subwords)
    if vocabulary is None:
        lines = as_text(corpus.train, corpus.name).splitlines(keepends=True)
        vocabulary = Subwords.byte_bpe(lines, run.vocabulary)
    limits = {"train": None, "validation": VALIDATION_BYTES, "test": run.test_bytes}
    parts = {part: getattr(corpus, part)[:limit] for part, limit in limits.items()}
    tokens = {part: vocabulary.encode_long(as_text(text, corpus.name)) for part, text in parts.items()}
    known = dict(fingerprint=corpus.fingerprint, vocabulary=vocabulary, published=published)
    return SimpleNamespace(name=corpus.name, bytes=corpus, **tokens, **known)


def model(run, text):
    if run.pretrained:
        return text.published or load_model(run.out / "last.safetensors")[0]
    sizes = run.sizes("d_model", "heads", "depth", "context", "dropout")
    return GPT2(len(text.vocabulary), key=run.key("weights"), **sizes)


def scored(run, context, text, part):
    return run.scored(part, getattr(text, part), trained=run.total * run.batch_size * context)


def score(run, replicas, text, part):
    tokens = scored(run, replicas.model.context, text, part)
    return evaluate_language_model(replicas, tokens, sizes=text.vocabulary.sizes)


def main(run):
    text = run.load(data)
    kinds = f"{len(text.train):,} tokens of {len(text.vocabulary):,} kinds"
    print(f"{text.name}: {len(text.bytes.train):,} training bytes, {kinds}")
    gpt2 = model(run, text)
    batches = TextBatches(text.train, run.batch_size, gpt2.context, run.key("batches"))
    with run.replicas(gpt2, batches) as replicas:
        adam = AdamW(gpt2.parameters(), run.lr, weight_decay=run.weight_decay)
        rate = Cosine(run.lr, min(run.warmup, run.total // 5), run.total, run.lr / 10)
        for step in run.steps(replicas, adam, batches, select=("bits_per_byte", "min")):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))  # forward and backward
            norm = replicas.clip(adam, 1.0)
            adam.lr = rate(step)
            replicas.step(adam)
            run.log(loss=loss, norm=norm)
            if run.due(run.evaluate_every):
                run.keep_best(score(run, replicas, text, "validation"))
        run.load_best()
        test = score(run, replicas, text, "test")
    count, size = len(scored(run, gpt2.context, text, "test")), len(text.test)
    where = "the last 5%" if run.test_bytes is None else f"{run.test_bytes:,} bytes of the last 5%"
    if count < size:
        where = "the first " + run.share(count, size, "tokens of the last 5%")
    bits = f"{test['bits_per_byte']:.4f} bits per byte ({test['loss']:.4f} nats per token)"
    print(f"{text.name}: {bits} on {where}, the best of {run.total} steps")
    write_sample(run, gpt2, text)


if __name__ == "__main__":
    start(main)

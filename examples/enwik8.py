"""Train a transformer on the bytes of Wikipedia (enwik8), then let it write.

The preset small trains a Llama with Muon. --model plain trains the tutorial's kind of model, --model xl a
Transformer-XL, which reads the text in order and keeps a memory of it; --optimizer adam trains with Adam. The preset
uses the first 4,000,000 bytes of the text; --bytes 0 uses all of it. Without --data the official archive is downloaded;
without a network, the program says so and trains on the sources of Python's standard library, as with --data stdlib.

--preset tutorial has the settings of the tutorial's own program (github.com/pbloem/former, experiments/generate.py),
with the width and the number of steps given in the tutorial. Adam's learning rate rises to 1e-4 over 5,000 texts (156
steps of 32) and then stays there. Gradients are clipped to norm 1, and there is no dropout. Differences from that
program:
- Attention scores are divided by the root of the head's width; there, by the root of the model's width.
- The learning rate starts at 1/156 of its peak; there, at zero.
- The best model on the validation part is scored; there, the last one.
- Each byte is scored given at least the 128 bytes before it; there, given all 256 that the model reads.
"""

from functools import partial

from scratchformer.data import SegmentBatches, TextBatches
from scratchformer.models import LanguageModel, Llama, TransformerXL
from scratchformer.optim import Adam, Constant, Cosine, Muon
from scratchformer.training import (
    MUON_OPTIONS,
    evaluate_language_model,
    evaluate_transformer_xl,
    load_corpus,
    start,
    write_sample,
)

PRESETS = {
    "small": dict(
        model="llama", d_model=128, heads=4, depth=4, context=128, norm="pre", embedding_std=0.02, llama_d_ff=396,
        xl_d_ff=448, bytes=4_000_000, batch_size=32, optimizer="muon", lr=2e-3, warmup=100, steps=1000,
    ),
    "tutorial": dict(
        d_model=256, heads=8, depth=12, context=256, norm="post", embedding_std=1.0, llama_d_ff=776, xl_d_ff=896,
        batch_size=32, lr=1e-4, warmup=5000 // 32, schedule="constant", steps=170_000,
    ),
}  # fmt: skip
OPTIONS = {
    "model": dict(choices=("plain", "xl", "llama"), default="plain", help="(default: the preset's, or plain)"),
    "bytes": dict(type=int, metavar="N", default=0, min=0, help="the first N bytes; 0: all (default: the preset's)"),
    "schedule": dict(choices=("cosine", "constant"), default="cosine", help="learning rate after the warm-up"),
    **MUON_OPTIONS,
}


def data(run):
    return load_corpus(run)


def model(run, corpus):
    sizes, key = run.sizes("d_model", "heads", "depth", "context"), run.key("weights")
    if run.model == "llama":
        return Llama(256, **sizes, kv_heads=run.heads // 2, d_ff=run.llama_d_ff, dropout=0.0, key=key)
    sizes |= run.sizes("norm", "embedding_std")
    if run.model == "xl":  # the narrower d_ff makes up for its projections of distances
        return TransformerXL(256, memory=run.context, d_ff=run.xl_d_ff, dropout=0.0, **sizes, key=key)
    return LanguageModel(256, dropout=0.0, **sizes, key=key)


def score(run, replicas, corpus, part):
    evaluate = evaluate_transformer_xl if run.model == "xl" else evaluate_language_model
    return evaluate(replicas, run.scored(part, getattr(corpus, part)))


def main(run):
    corpus = run.load(data)
    print(f"{corpus.name}: {len(corpus.train):,} training bytes")
    sizes = run.sizes("batch_size", "context", "depth", "d_model")
    if run.model == "xl":
        batches = SegmentBatches(corpus.train, key=run.key("batches"), **sizes)
    else:
        batches = TextBatches(corpus.train, run.batch_size, run.context, run.key("batches"))
    with run.replicas(model(run, corpus), batches) as replicas:
        parameters = replicas.model.parameters()
        if run.optimizer == "muon":
            precision = "bfloat16" if run.precision == "bfloat16" else "float32"
            optimizer = Muon(parameters, run.muon_lr, run.lr, weight_decay=0.0, precision=precision)
        else:
            optimizer = Adam(parameters, run.lr)
        peak, warmup = optimizer.lr, min(run.warmup, run.total // 5)
        cosine = run.schedule == "cosine"
        rate = Cosine(peak, warmup, run.total, peak / 10) if cosine else Constant(peak, warmup)
        for step in run.steps(replicas, optimizer, batches, select=("bits_per_byte", "min")):
            remember = partial(batches.remember, step) if run.model == "xl" else None
            loss = replicas.gradients(batches.batch(step), run.key("train", step), remember)  # forward and backward
            norm = replicas.clip(optimizer, 1.0)
            optimizer.lr = rate(step)
            replicas.step(optimizer)
            run.log(loss=loss, norm=norm)
            if run.due(max(250, run.total // 20)):
                run.keep_best(score(run, replicas, corpus, "validation"))
        run.load_best()
        bits = score(run, replicas, corpus, "test")["bits_per_byte"]
    count, size = len(run.scored("test", corpus.test)), len(corpus.test)
    where = "the last 5%" if count == size else "the first " + run.share(count, size, "bytes of the last 5%")
    print(f"{corpus.name}: {bits:.4f} bits per byte on {where}, the best of {run.total} steps")
    write_sample(run, replicas.model, corpus)


if __name__ == "__main__":
    start(main)

"""Train a transformer that also looks up what followed earlier n-grams (enwik8), then let it write.

For each byte the model also gets the bytes that followed earlier occurrences of the last few, anywhere in the text
before it. The matrices of its blocks are trained with Muon.

--preset hour trains a larger Llama, with vectors for n-grams too. It is meant for an hour on two cores with the extra
`fast`, --precision bfloat16 and --micro-batch 8.

Both presets use the first 4,000,000 bytes of the text; --bytes 0 uses all of it. Without --data the official archive is
downloaded; without a network, the program says so and trains on the sources of Python's standard library, as with
--data stdlib.
"""

import numpy as np

from scratchformer.data import VALIDATION_BYTES, TextBatches, tokens_of
from scratchformer.models import LanguageModel, Llama
from scratchformer.optim import Cosine, Muon
from scratchformer.records import NGrams, Recall, searching, with_recalled
from scratchformer.training import evaluate_language_model, load_corpus, start, write_sample

PRESETS = {
    "small": dict(
        model="plain", d_model=128, heads=4, depth=4, context=128, norm="pre", embedding_std=0.02, dropout=0.0,
        bytes=4_000_000, ngrams=0, batch_size=32, muon_lr=0.02, lr=2e-3, weight_decay=0.0, warmup=100, steps=1000,
    ),
    "hour": dict(
        model="llama", d_model=256, heads=4, depth=8, context=512, norm="pre", embedding_std=0.02, dropout=0.25,
        bytes=4_000_000, ngrams=3, batch_size=16, muon_lr=0.02, lr=2e-3, weight_decay=0.1, warmup=150, steps=3600,
    ),
}  # fmt: skip
OPTIONS = {"bytes": dict(type=int, metavar="N", default=0, min=0, help="use the first N bytes (0: all)")}
# The lengths of n-grams whose earlier occurrences are looked up, each as often as its number of occurrences.
ORDERS = [n for n, times in {3: 3, 4: 4, 5: 4, 6: 3, 8: 2, 12: 1, 16: 1, 24: 1}.items() for _ in range(times)]


def data(run):
    return with_recalled(load_corpus(run), ORDERS)


def model(run, corpus):
    ngrams = [{"layer": NGrams, "orders": list(range(2, run.ngrams + 1))}] if run.ngrams else []
    sizes = run.sizes("d_model", "heads", "depth", "context", "dropout")
    options = dict(embeddings=[*ngrams, {"layer": Recall, "orders": ORDERS}], key=run.key("weights"), **sizes)
    if run.model == "llama":
        return Llama(256, **options)
    return LanguageModel(256, **options, **run.sizes("norm", "embedding_std"))


def score(run, replicas, corpus, part):
    text = corpus.validation[:VALIDATION_BYTES] if part == "validation" else corpus.test
    return evaluate_language_model(replicas, run.scored(part, text))


def main(run):
    corpus = run.load(data)
    print(f"{corpus.name}: {len(corpus.train):,} training bytes")
    batches = TextBatches(corpus.train, run.batch_size, run.context, run.key("batches"))
    with run.replicas(model(run, corpus), batches) as replicas:
        precision = "bfloat16" if run.precision == "bfloat16" else "float32"
        options = dict(weight_decay=run.weight_decay, precision=precision)
        muon = Muon(replicas.model.parameters(), run.muon_lr, run.lr, **options)
        rate = Cosine(run.muon_lr, min(run.warmup, run.total // 5), run.total, run.muon_lr / 10)
        for step in run.steps(replicas, muon, batches, select=("bits_per_byte", "min")):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))  # forward and backward
            norm = replicas.clip(muon, 1.0)
            muon.lr = rate(step)
            replicas.step(muon)
            run.log(loss=loss, norm=norm)
            if run.due(max(250, run.total // 20)):
                run.keep_best(score(run, replicas, corpus, "validation"))
        run.load_best()
        bits = score(run, replicas, corpus, "test")["bits_per_byte"]
    count, size = len(run.scored("test", corpus.test)), len(corpus.test)
    where = "the last 5%" if count == size else "the first " + run.share(count, size, "bytes of the last 5%")
    print(f"{corpus.name}: {bits:.4f} bits per byte on {where}, the best of {run.total} steps")
    before = np.concatenate([tokens_of(part) for part in (corpus.train, corpus.validation)])
    write_sample(run, replicas.model, corpus, open_cache=searching(before))


if __name__ == "__main__":
    start(main)

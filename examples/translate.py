"""Train the encoder-decoder of "Attention is all you need" to translate English to German (Multi30k).

Unlike in the paper, the preset small has layer norms before attention and feed-forward layers, and trains with Muon.
The preset adam has them after these layers, and trains with Adam, as in the paper. The mean of the last snapshots is
scored.

BLEU is printed twice: as sacreBLEU counts by default, and of lower-case words split by Moses, as many papers report it.
Without --data the official files are downloaded.
"""

from types import SimpleNamespace

from scratchformer.data import Subwords, TranslationBatches, encode_pairs, load_multi30k
from scratchformer.generation import bleu, printable, translate
from scratchformer.models import EncoderDecoder
from scratchformer.optim import Adam, Cosine, InverseSquareRoot, Muon
from scratchformer.training import evaluate_translation, start

PRESETS = {
    "small": dict(
        source="en", target="de", vocabulary=8000, d_model=128, heads=4, depth=4, d_ff=256, dropout=0.3, norm="pre",
        tokens=4096, max_length=128, optimizer="muon", muon_lr=0.01, lr=5e-3, warmup=300, steps=7680, average=10,
        beam=5, length_penalty=1.0,
    ),
    "adam": dict(
        source="en", target="de", vocabulary=8000, d_model=128, heads=4, depth=4, d_ff=256, dropout=0.3, norm="post",
        tokens=4096, max_length=128, optimizer="adam", lr=4e-3, warmup=1920, steps=7680, average=10,
        beam=5, length_penalty=1.0,
    ),
    "paper": dict(
        source="en", target="de", vocabulary=16_000, d_model=512, heads=8, depth=6, d_ff=2048, dropout=0.1, norm="post",
        tokens=25_000, max_length=128, optimizer="adam", lr=7e-4, warmup=4000, steps=100_000, average=5,
        beam=4, length_penalty=0.6,
    ),
}  # fmt: skip
BLEU = {"BLEU": False, "lower-case, tokenised BLEU": True}  # whether words are split by Moses


def data(run):
    sentences = load_multi30k(run.data, run.source, run.target)
    subwords = run.saved_vocabulary(Subwords)
    if subwords is None:
        subwords = Subwords.bpe(sentences.train.source + sentences.train.target, run.vocabulary)
    train, validation = (
        encode_pairs(subwords, getattr(sentences, part), run.max_length, part) for part in ("train", "validation")
    )
    known = dict(vocabulary=subwords, fingerprint=sentences.fingerprint)
    return SimpleNamespace(sentences=sentences, train=train, validation=validation, **known)


def model(run, pairs):
    sizes = run.sizes("d_model", "heads", "depth", "d_ff", "dropout", "norm")
    return EncoderDecoder(len(pairs.vocabulary), key=run.key("weights"), **sizes)


def translations(run, replicas, pairs, part, beam):
    """The translations of a part's sentences, and for each kind of BLEU the score and sacreBLEU's signature."""
    source, target = getattr(pairs.sentences, part)
    written = translate(replicas.model, pairs.vocabulary, source, beam, run.length_penalty, ranks=run.ranks)
    return written, {name: bleu(written, target, run.target if moses else None) for name, moses in BLEU.items()}


def score(run, replicas, pairs, part):
    _, scores = translations(run, replicas, pairs, part, run.beam)
    return {name: value for name, (value, _) in scores.items()}


def main(run):
    pairs = run.load(data)
    batches = TranslationBatches(pairs.train, run.tokens, pairs.vocabulary, run.key("batches"))
    print(f"{len(pairs.train.source):,} pairs, {len(pairs.vocabulary):,} sub-words; {len(batches)} batches an epoch")
    largest = max(map(batches.batch, range(len(batches))), key=lambda batch: batch.source.size + batch.target.size)
    with run.replicas(model(run, pairs), batches, largest) as replicas:
        parameters = replicas.model.parameters()
        if run.optimizer == "muon":
            precision = "bfloat16" if run.precision == "bfloat16" else "float32"
            options = dict(hidden="*coder.*.w", weight_decay=0.0, precision=precision)
            optimizer = Muon(parameters, run.muon_lr, run.lr, **options)
            rate = Cosine(run.muon_lr, min(run.warmup, run.total // 5), run.total, run.muon_lr / 20)
        else:
            optimizer = Adam(parameters, run.lr, betas=(0.9, 0.98), eps=1e-9)
            rate = InverseSquareRoot(run.lr, min(run.warmup, max(1, run.total // 4)))
        for step in run.steps(replicas, optimizer, batches, keep=run.average, snapshot_every=len(batches)):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))  # forward and backward
            norm = replicas.clip(optimizer, 1.0)
            optimizer.lr = rate(step)
            replicas.step(optimizer)
            run.log(loss=loss, norm=norm)
            if run.due(len(batches)):
                run.keep_best(evaluate_translation(replicas, pairs.validation, run.tokens, pairs.vocabulary))
        run.load_best()
        for beam in sorted({1, run.beam}):
            written, scores = translations(run, replicas, pairs, "test", beam)
            for name, (value, signature) in scores.items():
                print(f"{value:.2f} {name} on the {len(written):,} test sentences, beam {beam} ({signature})")
    sentences = pairs.sentences.test
    for source, target, reference in list(zip(sentences.source, written, sentences.target, strict=True))[:5]:
        print(printable(f"\n{run.source}: {source}\n{run.target}: {target}\n    (reference: {reference})"))


if __name__ == "__main__":
    start(main)

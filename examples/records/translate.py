"""Train transformers that translate English to German together (Multi30k).

They are encoder-decoders with layer norms before attention and feed-forward layers, trained one after another with
Muon, from different weights and on different batches; each has a subfolder in the run's folder. The mean of the last
snapshots of each is scored. With --models 2 two translate together. With --models 2 --backwards 1 the second one writes
from the end of a sentence to its beginning. Then each direction proposes translations, and all models judge them. With
--neighbours 32 the scored translations also use the tokens that followed at the 32 most similar places of the training
pairs. The preset hour has three models, the last of which writes backwards, and 32 neighbours.

BLEU is printed twice: as sacreBLEU counts by default, and of lower-case words split by Moses, as many papers report it.
Without --data the official files are downloaded.
"""

from functools import partial
from types import SimpleNamespace

from scratchformer.data import Subwords, TranslationBatches, encode_pairs, load_multi30k
from scratchformer.generation import bleu, printable
from scratchformer.models import EncoderDecoder
from scratchformer.optim import Cosine, Muon
from scratchformer.records import (
    MODELS_OPTION,
    BackwardEncoderDecoder,
    as_written,
    member,
    other_members,
    translate_together,
    with_neighbours,
)  # fmt: skip
from scratchformer.training import as_text, evaluate_translation, start

SMALL = dict(
    source="en", target="de", vocabulary=8000, d_model=128, heads=4, depth=4, d_ff=256, dropout=0.3, norm="pre",
    tokens=4096, max_length=128, muon_lr=0.01, lr=5e-3, warmup=300, steps=7680, average=10, beam=5, length_penalty=1.0,
)  # fmt: skip
PRESETS = {"small": SMALL, "hour": SMALL | dict(models=3, backwards=1, neighbours=32, steps=6400)}
number = partial(dict, type=int, default=0, min=0)
OPTIONS = {
    **MODELS_OPTION,
    "backwards": number(metavar="N", max=100, help="how many of the models, the last ones, write backwards"),
    "neighbours": number(metavar="K", max=1000, help="mix in the tokens at the K most similar places (0: none)"),
}


def check(run):
    if run.backwards >= run.models:
        expected = f"expected fewer than --models, {run.models}, got {run.backwards}"
        raise ValueError(f"--backwards: {expected}; add --backwards 0 for models that all write forwards")


def data(run):
    """The sentences, their sub-words by part, and the vocabulary."""
    sentences, vocabulary = load_multi30k(run.data, run.source, run.target), run.saved_vocabulary(Subwords)
    if vocabulary is None:
        vocabulary = Subwords.bpe(sentences.train.source + sentences.train.target, run.vocabulary)
    parts = dict(train=sentences.train, validation=sentences.validation)
    pairs = {name: encode_pairs(vocabulary, part, run.max_length, name) for name, part in parts.items()}
    known = sum(len(ids) + 1 for ids in pairs["train"].target)
    if run.neighbours > known:
        raise ValueError(f"--neighbours: expected at most the {known:,} tokens of the pairs, got {run.neighbours}")
    return SimpleNamespace(sentences=sentences, pairs=pairs, vocabulary=vocabulary, fingerprint=sentences.fingerprint)


def number_of(run):
    """Which of the models of the ensemble a stage trains, from 1."""
    return int(run.stage_name.removeprefix("model-") or 1)


def model(run, corpus):
    kind = BackwardEncoderDecoder if number_of(run) > run.models - run.backwards else EncoderDecoder
    sizes = run.sizes("d_model", "heads", "depth", "d_ff", "dropout", "norm")
    return kind(len(corpus.vocabulary), key=run.key("weights"), **sizes)


def loss_of(run, replicas, corpus, part="validation"):
    return evaluate_translation(replicas, as_written(replicas.model, corpus.pairs[part]), run.tokens, corpus.vocabulary)


def translate_part(run, models, corpus, part, beam):
    if run.neighbours:
        known = corpus.pairs["train"], corpus.vocabulary, run.ranks
        models = [with_neighbours(each, *known, neighbours=run.neighbours) for each in models]
    options = dict(beam=beam, length_penalty=run.length_penalty, ranks=run.ranks)
    return translate_together(models, corpus.vocabulary, getattr(corpus.sentences, part).source, **options)


def bleu_of(run, written, references):
    """BLEU and sacreBLEU's signature, of mixed case and of lower-case words split by Moses."""
    ways = {"BLEU": None, "lower-case, tokenised BLEU": run.target}
    return {name: bleu(written, references, moses) for name, moses in ways.items()}


def score(run, replicas, corpus, part):
    """BLEU of what all models translate together."""
    models = [*other_members(run, model, corpus), replicas.model]
    written = translate_part(run, models, corpus, part, run.beam)
    return {name: value for name, (value, _) in bleu_of(run, written, getattr(corpus.sentences, part).target).items()}


def stages(run):
    return [f"model-{run.models}"]


def train(run, key, corpus):
    """Train a model of the ensemble. key: of the whole run, from which dropout is drawn."""
    translator = model(run, corpus)
    pairs = as_written(translator, corpus.pairs["train"])
    batches = TranslationBatches(pairs, run.tokens, corpus.vocabulary, run.key("batches"))
    largest = max(map(batches.batch, range(len(batches))), key=lambda batch: batch.source.size + batch.target.size)
    with run.replicas(translator, batches, largest) as replicas:
        precision = "bfloat16" if run.precision == "bfloat16" else "float32"
        options = dict(hidden="*coder.*.w", weight_decay=0.0, precision=precision)
        muon = Muon(translator.parameters(), run.muon_lr, run.lr, **options)
        rate = Cosine(run.muon_lr, min(run.warmup, run.total // 5), run.total, run.muon_lr / 20)
        epoch = len(batches)
        for step in run.steps(replicas, muon, batches, keep=run.average, snapshot_every=epoch):
            loss = replicas.gradients(batches.batch(step), key("train", step))  # forward and backward
            norm = replicas.clip(muon, 1.0)
            muon.lr = rate(step)
            replicas.step(muon)
            run.log(loss=loss, norm=norm)
            if run.due(epoch):
                run.keep_best(loss_of(run, replicas, corpus))
        print(f"{run.stage_name} best on validation: {as_text(run.load_best(mark=True))}".strip())
    return translator


def main(run):
    corpus = run.load(data)
    print(f"{len(corpus.sentences.train.source):,} pairs, {len(corpus.vocabulary):,} sub-words")
    for number in range(1, run.models + 1):
        stage = member(run, number)
        translator = train(stage, run.key, corpus)
    models, test = [*other_members(stage, model, corpus), translator], corpus.sentences.test
    for beam in sorted({1, run.beam}):
        written = translate_part(run, models, corpus, "test", beam)
        for name, (value, signature) in bleu_of(run, written, test.target).items():
            print(f"{value:.2f} {name} on the {len(written):,} test sentences, beam {beam} ({signature})")
    for source, translation, reference in list(zip(test.source, written, test.target, strict=True))[:5]:
        print(printable(f"\n{run.source}: {source}\n{run.target}: {translation}\n    (reference: {reference})"))


if __name__ == "__main__":
    start(main)

"""Train the encoder-decoder of "Attention is all you need" to translate English to German (Multi30k).

Unlike in the paper, the preset small has layer norms before attention and feed-forward layers, and trains with Muon.
The preset adam has them after these layers, and trains with Adam, as in the paper. The mean of the last snapshots is
scored. With --models 2 a second model is trained after the first, from other weights and on other batches, and both
translate together; each has a subfolder in the run's folder. With --models 2 --backwards 1 the second model writes from
the end of a sentence to its beginning. Then each direction proposes translations, and all models judge them. With
--neighbours 32 the scored translations also use the tokens that followed at the 32 most similar places of the training
pairs. The preset hour has three models, the last of which writes backwards, and 32 neighbours.

BLEU is printed twice: as sacreBLEU counts by default, and of lower-case words split by Moses, as many papers report it.
Without --data the official files are downloaded.
"""

from functools import cached_property

from scratchformer.data import Subwords, TranslationBatches, encode_pairs, load_multi30k
from scratchformer.generation import bleu, printable, translate, with_neighbours
from scratchformer.models import EncoderDecoder
from scratchformer.optim import Adam, InverseSquareRoot
from scratchformer.training import MODELS_OPTION, MUON_OPTIONS, Ensemble, evaluate_translation

SMALL = dict(
    source="en", target="de", vocabulary=8000, d_model=128, heads=4, depth=4, d_ff=256, dropout=0.3, norm="pre",
    tokens=4096, max_length=128, optimizer="muon", muon_lr=0.01, lr=5e-3, warmup=300, steps=7680, average=10,
    beam=5, length_penalty=1.0,
)  # fmt: skip
PRESETS = {
    "small": SMALL,
    "hour": SMALL | dict(models=3, backwards=1, neighbours=32, steps=6400),
    "adam": dict(
        source="en", target="de", vocabulary=8000, d_model=128, heads=4, depth=4, d_ff=256, dropout=0.3, tokens=4096,
        max_length=128, lr=4e-3, warmup=1920, steps=7680, average=10, beam=5, length_penalty=1.0,
    ),
    "paper": dict(
        source="en", target="de", vocabulary=16_000, d_model=512, heads=8, depth=6, d_ff=2048, dropout=0.1,
        tokens=25_000, max_length=128, lr=7e-4, warmup=4000, steps=100_000, average=5, beam=4, length_penalty=0.6,
    ),
}  # fmt: skip
SIZES = ("d_model", "heads", "depth", "d_ff", "dropout", "norm")
OPTIONS = {
    **MUON_OPTIONS,
    **MODELS_OPTION,
    "backwards": dict(
        type=int,
        default=0,
        metavar="N",
        least=0,
        most=100,
        help="how many of the models write from the end of a sentence to its beginning; these are trained last "
        "(default: the preset's)",
    ),
    "neighbours": dict(
        type=int,
        default=0,
        metavar="K",
        least=0,
        most=1000,
        help="in the scored translations, mix predictions with the tokens that followed at the K most similar places "
        "of the training pairs (0: none; default: the preset's)",
    ),
    "norm": dict(choices=("post", "pre"), default="post", help="of the blocks (default: the preset's)"),
}


class Translate(Ensemble):
    name = "translate"
    description = __doc__
    presets = PRESETS
    options = OPTIONS
    hidden = "*coder.*.w"

    def __init__(self, run, number=1):
        if run.backwards >= run.models and not run.resume:
            expected = f"expected fewer than --models, {run.models}, got {run.backwards}"
            raise ValueError(f"--backwards: {expected}; add --backwards 0 for models that all write forwards")
        super().__init__(run, number)
        self.backwards = number > run.models - run.backwards

    def load(self):
        self.data = load_multi30k(self.run.data, self.run.source, self.run.target)
        self.vocabulary = self.saved_vocabulary(Subwords)
        if self.vocabulary is None:
            self.vocabulary = Subwords.bpe(self.data.train.source + self.data.train.target, self.run.vocabulary)

    def identity(self):
        return {"subwords": self.vocabulary.fingerprint, "data": self.data.fingerprint}

    @cached_property
    def encoded(self):
        return {}

    def pairs(self, part):
        """The sentences of a part of the data, as sub-words."""
        if part not in self.encoded:
            self.encoded[part] = encode_pairs(self.vocabulary, getattr(self.data, part), self.run.max_length, part)
        return self.encoded[part]

    def make_model(self, key):
        return EncoderDecoder(len(self.vocabulary), backwards=self.backwards, key=key, **self.sizes(*SIZES))

    def make_batches(self, key):
        training, _ = map(self.pairs, ("train", "validation"))  # both now, to report bad sentences early
        if self.run.neighbours > (known := sum(len(ids) + 1 for ids in training.target)):
            raise ValueError(
                f"--neighbours: expected at most the {known:,} tokens of the pairs, got {self.run.neighbours}"
            )
        return TranslationBatches(training, self.run.tokens, self.vocabulary, key, self.backwards)

    def largest_batch(self):
        batches = map(self.batches.batch, range(len(self.batches)))
        return max(batches, key=lambda batch: batch.source.size + batch.target.size)

    def optimizer(self, model):
        if self.with_muon:
            return super().optimizer(model)
        return Adam(model.parameters(), self.lr, betas=(0.9, 0.98), eps=1e-9)

    def schedule(self):
        if self.with_muon:
            return super().schedule(floor=self.lr / 20)
        return InverseSquareRoot(self.lr, min(self.run.warmup, max(1, self.steps // 4)))

    def training(self):
        epoch = len(self.batches)
        return dict(evaluate_every=epoch, snapshot_every=epoch, keep=self.run.average)

    def evaluate(self, replicas, part):
        return evaluate_translation(replicas, self.pairs(part), self.run.tokens, self.vocabulary)

    def describe(self):
        pairs, words = len(self.data.train.source), len(self.vocabulary)
        print(f"{pairs:,} pairs, {words:,} sub-words, {self.parameters} parameters")
        print(f"{len(self.batches)} batches an epoch")

    def test(self, replicas):
        if not self.is_last:
            return {}
        self.tested = {beam: self.translations("test", beam) for beam in sorted({1, self.run.beam})}
        return {}  # BLEU, in `report`

    def translations(self, part, beam):
        """The translations of a part's sentences."""
        run, sentences = self.run, getattr(self.data, part)
        return translate(self.models, self.vocabulary, sentences.source, beam, run.length_penalty, ranks=run.ranks)

    @cached_property
    def models(self):
        """The models that translate together. With `neighbours`, each looks up its own vectors."""
        models, k = [other.model for other in self.each()], self.run.neighbours
        if not k:
            return models
        known = self.pairs("train"), self.vocabulary, self.run.ranks
        return [with_neighbours(model, *known, neighbours=k) for model in models]

    def summary(self, replicas, part):
        found, references = self.translations(part, self.run.beam), getattr(self.data, part).target
        scores = ((name, *bleu(found, references, moses)) for name, moses in self.kinds())
        return "; ".join(f"{name} {score:.2f}, beam {self.run.beam} ({signature})" for name, score, signature in scores)

    def kinds(self):
        """The names of two ways to count BLEU, with the argument `moses` of each."""
        return ("BLEU", None), ("lower-case, tokenised BLEU", self.run.target)

    def report(self, state, test):
        run, sentences = self.run, self.data.test
        if not self.is_last:
            return print(f"{self.which}best on validation: {state['best']}")
        for beam, found in self.tested.items():
            for name, moses in self.kinds():
                score, signature = bleu(found, sentences.target, moses)
                print(f"{score:.2f} {name} on the {len(found):,} test sentences, beam {beam} ({signature})")
        for source, written, reference in list(zip(sentences.source, found, sentences.target, strict=True))[:5]:
            print(printable(f"\n{run.source}: {source}\n{run.target}: {written}\n    (reference: {reference})"))


if __name__ == "__main__":
    Translate.main()

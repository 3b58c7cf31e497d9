"""Train a small GPT-2 with its own sub-word vocabulary, or fine-tune a published one; then let it write.

--pretrained FOLDER starts from a published GPT-2 in Hugging Face's format: config.json, model.safetensors, vocab.json
and merges.txt. Without --data the text is Wikipedia (enwik8) or, without a network, the sources of Python's standard
library, as with --data stdlib. A published model also writes without fine-tuning: scratchformer generate FOLDER.
"""

from scratchformer.data import VALIDATION_BYTES, Subwords, as_text
from scratchformer.models import GPT2
from scratchformer.training import LanguageProgram, load_model
from scratchformer.training.readers import load_gpt2

PRESETS = {
    "small": dict(
        vocabulary=4096, d_model=128, heads=4, depth=4, context=128, dropout=0.0,
        batch_size=32, lr=2e-3, weight_decay=0.1, warmup=100, steps=1000, evaluate_every=250, test_bytes=None,
    ),
    "pretrained": dict(
        dropout=0.1, batch_size=4, lr=5e-5, weight_decay=0.1, warmup=10, steps=100, evaluate_every=50,
        test_bytes=VALIDATION_BYTES,
    ),
}  # fmt: skip
OPTIONS = {
    "pretrained": dict(metavar="PATH", help="start from a published GPT-2, a folder in Hugging Face's format"),
}


class Gpt2(LanguageProgram):
    name = "gpt2"
    description = __doc__
    presets = PRESETS
    options = OPTIONS
    published = None  # a model and its vocabulary

    def check(self):
        run = self.run
        if run.preset != "pretrained" and run.pretrained is not None:
            raise ValueError(f"--pretrained: the model has its own sizes, so leave out --preset {run.preset}")
        if run.preset == "pretrained" and run.pretrained is None:
            raise ValueError("--preset pretrained: needs --pretrained FOLDER")

    def load(self):
        self.last = self.out / "last.safetensors"
        if self.run.pretrained and not self.last.exists():  # before the corpus, which may need a download
            self.published = load_gpt2(self.run.pretrained, dropout=self.run.dropout)
        super().load()
        self.vocabulary = self.saved_vocabulary(Subwords) or (self.published or self.learned())[1]

    def learned(self):
        text = as_text(self.corpus.train, self.corpus.name)
        return None, Subwords.byte_bpe(text.splitlines(keepends=True), self.run.vocabulary)

    def make_model(self, key):
        if self.run.pretrained:
            return self.published[0] if self.published else load_model(self.last)[0]
        sizes = self.sizes("d_model", "heads", "depth", "context", "dropout")
        return GPT2(len(self.vocabulary), key=key, **sizes)

    def training(self):
        return super().training() | dict(evaluate_every=self.run.evaluate_every)


if __name__ == "__main__":
    Gpt2.main()

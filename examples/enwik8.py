"""Train the text-generation transformer on bytes of Wikipedia (enwik8), then let it write.

For the last few bytes, the model also gets the bytes that followed their earlier occurrences (--recall), and the
matrices of its blocks are trained with Muon. --recall 0 --optimizer adam trains a plain model with Adam.

--model xl trains a Transformer-XL, which reads the text in order and keeps a memory of it, without --recall; --model
llama trains a Llama.

--preset hour trains a larger Llama, with vectors for n-grams too. It is meant for an hour on two cores with the extra
`fast`, --precision bfloat16 and --micro-batch 8.

The presets small and hour use the first 4,000,000 bytes of the text; --bytes 0 uses all of it. Without --data the
official archive is downloaded; without a network, the program says so and trains on the sources of Python's standard
library, as with --data stdlib.

--preset tutorial has the settings of the tutorial's own program (github.com/pbloem/former, experiments/generate.py),
with the width and the number of steps given in the tutorial. Adam's learning rate rises to 1e-4 over 5,000 texts (156
steps of 32) and then stays there. Gradients are clipped to norm 1, and there is no dropout. Differences from that
program:
- Attention scores are divided by the root of the head's width; there, by the root of the model's width.
- The learning rate starts at 1/156 of its peak; there, at zero.
- The best model on the validation part is scored; there, the last one.
- Each byte is scored given at least the 128 bytes before it; there, given all 256 that the model reads.
"""

from argparse import BooleanOptionalAction

from scratchformer.data import SegmentBatches
from scratchformer.models import LanguageModel, Llama, NGrams, Recall, TransformerXL
from scratchformer.training import MUON_OPTIONS, LanguageProgram

PRESETS = {
    "small": dict(
        d_model=128, heads=4, depth=4, context=128, norm="pre", embedding_std=0.02,
        bytes=4_000_000, recall=24, batch_size=32, optimizer="muon", lr=2e-3, warmup=100, steps=1000,
        memory=128, xl_d_ff=448,
    ),
    "tutorial": dict(
        d_model=256, heads=8, depth=12, context=256, norm="post", embedding_std=1.0,
        batch_size=32, lr=1e-4, warmup=5000 // 32, schedule="constant", steps=170_000, memory=256, xl_d_ff=896,
    ),
    "hour": dict(
        model="llama", d_model=256, heads=4, depth=8, context=512, norm="pre", embedding_std=0.02, dropout=0.25,
        bytes=4_000_000, ngrams=3, recall=24, batch_size=16, optimizer="muon", lr=2e-3, weight_decay=0.1, warmup=150,
        steps=3600, memory=256, xl_d_ff=896,
    ),
}  # fmt: skip
# xl_d_ff is below 4 d_model to make up for the Transformer-XL's projections of distances, which are larger than a table
# of positions. LLAMA, by preset: the key-value heads, and the width of the three feed-forward matrices, if not the
# usual ones. RECALL: for each length of n-grams, how many earlier occurrences to look up.
LLAMA = {"small": dict(kv_heads=2, d_ff=396), "tutorial": dict(kv_heads=4, d_ff=776), "hour": {}}
RECALL = {3: 3, 4: 4, 5: 4, 6: 3, 8: 2, 12: 1, 16: 1, 24: 1}
OPTIONS = {
    "model": dict(choices=("plain", "xl", "llama"), default="plain", help="(default: plain)"),
    "positions": dict(choices=("sinusoidal", "relative"), help="positions of the plain model (default: learned)"),
    "dynamic": dict(
        action=BooleanOptionalAction, default=False, help="also score the model while it learns from the test part"
    ),
    "bytes": dict(
        type=int,
        metavar="N",
        default=0,
        least=0,
        help="use the first N bytes of the text; 0: all (default: the preset's)",
    ),
    "ngrams": dict(
        type=int,
        choices=(0, *range(2, 9)),
        default=0,
        help="vectors for n-grams of 2 to N bytes; 0: none (default: the preset's)",
    ),
    "recall": dict(
        type=int,
        choices=(0, *RECALL),
        default=0,
        help="what followed earlier n-grams of up to N bytes; 0: none (default: the preset's)",
    ),
    "schedule": dict(choices=("cosine", "constant"), default="cosine", help="learning rate after the warm-up"),
    **MUON_OPTIONS,
}


class Enwik8(LanguageProgram):
    name = "enwik8"
    description = __doc__
    presets = PRESETS
    options = OPTIONS
    passing = ("dynamic",)

    def check(self):
        if self.run.model != "plain" and self.run.positions:
            kind = {"xl": "a Transformer-XL has relative ones", "llama": "a Llama has rotary ones"}[self.run.model]
            raise ValueError(f"--positions {self.run.positions}: {kind}, so leave it out")
        for name in "ngrams", "recall":
            if self.run.model == "xl" and name in self.run.given and getattr(self.run, name):
                raise ValueError(
                    f"--{name}: a Transformer-XL does not store the bytes before a segment, so leave --{name} out"
                )
        if self.run.model == "xl" and self.run.dynamic:
            raise ValueError("--dynamic: a Transformer-XL reads segments, not windows, so leave it out")
        if self.run.dynamic and self.run.precision == "float16":
            raise ValueError("--dynamic: it has no loss scale for float16; use bfloat16, or leave it out")
        if self.run.dynamic and self.run.ranks.size > 1:
            raise ValueError("--dynamic: it takes one process; leave it out, or add --no-dynamic to resume the run")

    def load(self):
        super().load()
        self.dynamic = {} if self.run.dynamic else None

    def make_model(self, key):
        sizes = self.sizes("d_model", "heads", "depth", "context")
        sizes["dropout"] = getattr(self.run, "dropout", 0.0)
        block = self.sizes("norm", "embedding_std")
        if self.run.model == "xl":
            return TransformerXL(256, memory=self.run.memory, d_ff=self.run.xl_d_ff, key=key, **sizes, **block)
        recall = [n for n, times in RECALL.items() if n <= self.run.recall for _ in range(times)]
        ngrams = list(range(2, self.run.ngrams + 1))
        embeddings = [{"layer": NGrams, "orders": ngrams}] if ngrams else []
        embeddings += [{"layer": Recall, "orders": recall}] if recall else []
        if self.run.model == "llama":
            return Llama(256, key=key, embeddings=embeddings, **sizes, **LLAMA[self.run.preset])
        return LanguageModel(256, key=key, embeddings=embeddings, **sizes, **block, **self.sizes("positions"))

    def make_batches(self, key):
        if self.run.model != "xl":
            return super().make_batches(key)
        sizes = self.sizes("batch_size", "context", "depth", "d_model")
        return SegmentBatches(self.tokens("train"), key=key, **sizes)

    def test(self, replicas):
        found = super().test(replicas)
        if self.run.model == "xl":
            found["longer"] = self.evaluate(replicas, "test", memory=2 * self.run.memory)["bits_per_byte"]
        return found

    def described(self, state, test):
        described = super().described(state, test)
        if "longer" in test:
            described += f"\n{self.corpus.name}: {test['longer']:.4f} with a memory twice as long as in training"
        return described


if __name__ == "__main__":
    Enwik8.main()

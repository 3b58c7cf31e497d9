"""Time translation: an encoder-decoder of the preset "paper" or "small" of examples/translate.py, against transformers.

    pip install transformers 'scratchformer[fast]'
    python benchmarks/translation.py [--preset paper --sentences 1 --beam 4 --rounds 3]

Its peer is a MarianMTModel of the same size. They take turns, each in float32 and in bfloat16, with random weights and
greedy search or beam search, on all cores. Every source has 16 tokens, and every translation as many as asked for: the
token that ends it has a small logit.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from functools import partial

import ml_dtypes
import numpy as np
import torch
from transformers import MarianConfig, MarianMTModel

from scratchformer import Key
from scratchformer.backend import cores
from scratchformer.data.subwords import BEGIN, END, PAD
from scratchformer.generation import translate
from scratchformer.generation.beam import LONGER
from scratchformer.models import EncoderDecoder

SIZES = {"paper": (16_000, 512, 8, 6, 2048), "small": (8000, 128, 4, 4, 256)}  # V, d_model, heads, depth, d_ff
SOURCE, FIRST = 16, 3  # tokens of a source; the first three mark the beginning, the end and padding


class Numbers:
    """A vocabulary whose texts are numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, token: str) -> int:
        return (BEGIN, END, PAD).index(token)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(text.split(), np.int32) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        return " ".join(map(str, ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=SIZES, default="paper")
    for name, value in (("sentences", 1), ("beam", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(cores())
    V, C, H, depth, F = SIZES[args.preset]
    tokens = SOURCE + LONGER  # the longest translation of `translate`

    ours = EncoderDecoder(V, C, H, depth, F, key=Key(0))
    ours.tokens.table.data[1] = 0
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in side_of(H, depth, F).items()}
    config = MarianConfig(
        vocab_size=V, d_model=C, max_position_embeddings=tokens + 2, activation_function="relu", scale_embedding=True,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=2, forced_eos_token_id=None, **sides,
    )  # fmt: skip
    theirs = MarianMTModel(config).eval()
    ids = Key(1).generator().integers(FIRST, V, (args.sentences, SOURCE - 1))
    texts = [" ".join(map(str, row)) for row in ids]
    source = torch.from_numpy(np.concatenate([ids, np.ones((len(ids), 1), ids.dtype)], axis=1))

    def run_ours(model: EncoderDecoder) -> int:
        translations = translate(model, Numbers(V), texts, args.beam, length_penalty=0.6)  # type: ignore[arg-type]
        return sum(len(text.split()) for text in translations)

    def run_theirs(model: MarianMTModel) -> int:
        length = dict(min_new_tokens=tokens, max_new_tokens=tokens)
        with torch.inference_mode():
            options = dict(attention_mask=torch.ones_like(source), num_beams=args.beam, do_sample=False, **length)
            return model.generate(source, **options)[:, 1:].numel()

    runs = {
        "scratchformer, float32": partial(run_ours, ours),
        "scratchformer, bfloat16": partial(run_ours, copy.deepcopy(ours).to(dtype=ml_dtypes.bfloat16)),
        "transformers, float32": partial(run_theirs, theirs),
        "transformers, bfloat16": partial(run_theirs, copy.deepcopy(theirs).to(torch.bfloat16)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(args.rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            count = run()
            if i:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
            if count != args.sentences * tokens:
                raise SystemExit(f"{name} gave {count} tokens, not {args.sentences * tokens}")
    speeds = {name: args.sentences * tokens / statistics.median(s) for name, s in seconds.items()}
    best = max(speed for name, speed in speeds.items() if name.startswith("transformers"))
    print(
        f"{args.preset}, {args.sentences} sentences, beam {args.beam}, {tokens} tokens each, median of {args.rounds}:"
    )
    for name, speed in speeds.items():
        print(f"{name:<24}{speed:>8.0f} tokens/s{speed / best:>8.2f} (to the best of transformers)")


def side_of(heads: int, depth: int, d_ff: int) -> dict[str, int]:
    return dict(attention_heads=heads, layers=depth, ffn_dim=d_ff)


if __name__ == "__main__":
    main()

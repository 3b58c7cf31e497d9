"""Time generation: 12 blocks of width 256, 8 heads, context 256; scratchformer against transformers' `generate`.

    pip install transformers 'scratchformer[fast]'
    python benchmarks/generation.py [--batch 1 --rounds 5 --tokens 240]

They take turns, each in float32 and in bfloat16. All sample with temperature 1 from models of the same size with random
weights, each with its key-value cache, on all cores, after a prompt of 16 tokens.
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
from transformers import GPT2Config, GPT2LMHeadModel

from scratchformer import Key
from scratchformer.backend import cores
from scratchformer.generation import generate
from scratchformer.models import LanguageModel

CONTEXT, PROMPT = 256, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 1), ("rounds", 5), ("tokens", CONTEXT - PROMPT)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(cores())

    ours = LanguageModel(
        256, 256, 8, 12, CONTEXT, norm="pre", bias=True, activation="gelu_tanh", embedding_std=0.02, key=Key(0)
    )
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=256, n_layer=12, n_head=8, bos_token_id=0, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config).eval()
    prompt = Key(1).generator().integers(0, 256, (args.batch, PROMPT))

    def run_ours(model: LanguageModel, seed: int) -> np.ndarray:
        return np.stack(list(generate(model, prompt, args.tokens, key=Key(seed))), axis=1)

    def run_theirs(model: GPT2LMHeadModel, seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        ids = torch.from_numpy(prompt)
        options = dict(max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=True, top_k=0, use_cache=True)
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, PROMPT:].numpy()

    runs = {
        "scratchformer, float32": partial(run_ours, ours),
        "scratchformer, bfloat16": partial(run_ours, copy.deepcopy(ours).to(dtype=ml_dtypes.bfloat16)),
        "transformers, float32": partial(run_theirs, theirs),
        "transformers, bfloat16": partial(run_theirs, copy.deepcopy(theirs).to(torch.bfloat16)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(args.rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens = run(seed)
            if seed:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
            if tokens.shape != (args.batch, args.tokens):
                raise SystemExit(f"{name} gave {tokens.shape}, not {(args.batch, args.tokens)}")
    speeds = {name: args.batch * args.tokens / statistics.median(s) for name, s in seconds.items()}
    best = max(speed for name, speed in speeds.items() if name.startswith("transformers"))
    print(f"batch {args.batch}, {args.tokens} tokens each, median of {args.rounds}:")
    for name, speed in speeds.items():
        print(f"{name:<24}{speed:>8.0f} tokens/s{speed / best:>8.2f} (to the best of transformers)")


if __name__ == "__main__":
    main()

"""GPT-2 small (124 million parameters, random weights): loading, generation against transformers, a fine-tuning step.

    pip install transformers 'scratchformer[fast]'
    python benchmarks/gpt2.py [--tokens 100 --rounds 5 --replicas 2]

The weights are saved by transformers and loaded by both. Loading and the step run in processes of their own, whose time
and peak memory are printed. For generation the two take turns, each in float32 and in bfloat16: one sequence, sampled
at temperature 1 after a prompt of 16 tokens, each with its key-value cache, on all cores. A step is forward and
backward of --replicas sequences of 1,024 tokens, clipping and AdamW, as in examples/gpt2.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from scratchformer import Key
from scratchformer.backend import cores
from scratchformer.data import TextBatches
from scratchformer.generation import generate
from scratchformer.models import GPT2
from scratchformer.optim import AdamW, clip_by_global_norm
from scratchformer.parallel.memory import resident_bytes
from scratchformer.training import Replicas

PROMPT = 16


def load(folder: str, _replicas: int) -> dict[str, float]:
    """Seconds and peak memory of loading."""
    start = time.perf_counter()
    GPT2.from_pretrained(folder)
    return {"seconds": time.perf_counter() - start, "peak": resident_bytes(peak=True)}


def step(folder: str, replicas: int) -> dict[str, float]:
    """Seconds of the second of two steps, and peak memory of both."""
    model = GPT2.from_pretrained(folder)
    data = Key(1).generator().integers(0, model.config["vocab_size"], 100_000, dtype=np.int32)
    batches = TextBatches(data, replicas, model.context, Key(2))
    with Replicas(model, replicas, micro_batch=1) as threads:
        adam = AdamW(model.parameters(), 5e-5)
        for number in range(2):
            start = time.perf_counter()
            threads.gradients(batches.batch(number), Key(3, number))
            clip_by_global_norm(model.flat.grad, 1.0, threads.map)
            adam.step(threads.map)
    return {"seconds": time.perf_counter() - start, "peak": resident_bytes(peak=True)}


def in_a_process(work: str, folder: str, replicas: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", work, "--folder", folder, "--replicas", str(replicas)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare_generation(folder: str, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens a second of each, the median of `rounds`."""
    import ml_dtypes
    import torch
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(cores())
    ours, theirs = GPT2.from_pretrained(folder), GPT2LMHeadModel.from_pretrained(folder).eval()
    prompt = Key(1).generator().integers(0, ours.config["vocab_size"], (1, PROMPT))
    ids = torch.from_numpy(prompt)
    options = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, use_cache=True)

    def run_ours(model: GPT2, seed: int) -> int:
        return sum(1 for _ in generate(model, prompt, tokens, key=Key(seed)))

    def run_theirs(model: GPT2LMHeadModel, seed: int) -> int:
        torch.manual_seed(seed)
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **options).shape[1] - PROMPT

    runs = {
        "scratchformer, float32": partial(run_ours, ours),
        "scratchformer, bfloat16": partial(run_ours, GPT2.from_pretrained(folder).to(dtype=ml_dtypes.bfloat16)),
        "transformers, float32": partial(run_theirs, theirs),
        "transformers, bfloat16": partial(run_theirs, copy.deepcopy(theirs).to(torch.bfloat16)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            written = run(seed)
            if seed:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
            if written != tokens:
                raise SystemExit(f"{name} wrote {written} tokens, not {tokens}")
    return {name: tokens / statistics.median(s) for name, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 100), ("rounds", 5), ("replicas", min(2, cores()))):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--worker", choices=("load", "step"), help="(for its own use) do one of them")
    parser.add_argument("--folder", help="of the weights, made if they are not there (default: a temporary one)")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps({"load": load, "step": step}[args.worker](args.folder, args.replicas)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        if not (Path(folder) / "model.safetensors").exists():
            import torch
            from transformers import GPT2Config, GPT2LMHeadModel

            torch.manual_seed(0)
            config = GPT2Config(bos_token_id=0, eos_token_id=None, pad_token_id=0)
            GPT2LMHeadModel(config).save_pretrained(folder)
        loading = in_a_process("load", folder, args.replicas)
        print(f"loading: {loading['seconds']:.2f} s, {loading['peak'] / 1e9:.2f} GB at most")
        speeds = compare_generation(folder, args.tokens, args.rounds)
        best = max(speed for name, speed in speeds.items() if name.startswith("transformers"))
        for name, speed in speeds.items():
            print(f"{name:<24}{speed:>8.1f} tokens/s{speed / best:>8.2f} (to the best of transformers)")
        cost = in_a_process("step", folder, args.replicas)
        print(f"a step of {args.replicas} x 1,024 tokens: {cost['seconds']:.1f} s, {cost['peak'] / 1e9:.2f} GB at most")


if __name__ == "__main__":
    main()

"""Time generation: scratchformer against transformers' `generate` and, if asked, llama.cpp and CTranslate2.

    pip install transformers 'scratchformer[fast]'
    python benchmarks/generation.py [--batch 1 --rounds 5 --tokens 240]
    pip install llama-cpp-python gguf ctranslate2
    python benchmarks/generation.py --peers --blocks 12 768 12 --vocabulary 50257 --temperature 0

By default models have 12 blocks of width 256, 8 heads, a vocabulary of 256 and a context of 256. They have random
weights and take turns, each with its key-value cache, on all cores, after a prompt of 16 tokens. float32 and bfloat16
are compared for both libraries. The int8 and int4 weights of scratchformer are compared with those of the peers, Q8_0
and Q4_0 of llama.cpp and int8 of CTranslate2, for a batch of 1 only.

On a machine that others use too, processor time says more than the time by the clock, so both speeds are printed.
The rate at which the cores read memory, divided by the bytes of the weights, is the limit.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from scratchformer import Key
from scratchformer.backend import cores
from scratchformer.generation import generate, quantize
from scratchformer.models import GPT2
from scratchformer.nn.quantized import QuantizedLinear

CONTEXT, PROMPT = 256, 16
Run = Callable[[int], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 1), ("rounds", 5), ("tokens", CONTEXT - PROMPT), ("vocabulary", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--blocks", type=int, nargs=3, default=(12, 256, 8), metavar=("DEPTH", "WIDTH", "HEADS"))
    parser.add_argument("--temperature", type=float, default=1.0, choices=(0.0, 1.0))
    parser.add_argument("--peers", action="store_true", help="also time llama.cpp and CTranslate2")
    args = parser.parse_args()
    if args.peers and args.batch != 1:
        parser.error("--peers: for --batch 1 only")
    torch.set_num_threads(cores())
    prompt = Key(1).generator().integers(0, args.vocabulary, (args.batch, PROMPT))

    depth, width, heads = args.blocks
    ours = GPT2(args.vocabulary, width, heads, depth, CONTEXT, key=Key(0))
    config = GPT2Config(
        vocab_size=args.vocabulary, n_positions=CONTEXT, n_embd=width, n_layer=depth, n_head=heads, bos_token_id=0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config).eval()

    def run_ours(model: GPT2, seed: int) -> np.ndarray:
        return np.stack(list(generate(model, prompt, args.tokens, args.temperature, key=Key(seed))), axis=1)

    def run_theirs(model: GPT2LMHeadModel, seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        ids = torch.from_numpy(prompt)
        options = dict(max_new_tokens=args.tokens, min_new_tokens=args.tokens, use_cache=True)
        options |= dict(do_sample=True, top_k=0) if args.temperature else dict(do_sample=False)
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, PROMPT:].numpy()

    models = {
        "float32": ours,
        "bfloat16": copy.deepcopy(ours).to(dtype=ml_dtypes.bfloat16),
        "int8": quantize(copy.deepcopy(ours), 8),
        "int4": quantize(copy.deepcopy(ours), 4),
    }
    runs: dict[str, Run] = {f"scratchformer, {name}": partial(run_ours, model) for name, model in models.items()}
    runs |= {
        "transformers, float32": partial(run_theirs, theirs),
        "transformers, bfloat16": partial(run_theirs, copy.deepcopy(theirs).to(torch.bfloat16)),
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.peers:
            runs |= llama_cpp_runs(theirs, prompt, args, Path(folder))
            runs |= ctranslate2_runs(theirs, prompt, args, Path(folder))
        clock: dict[str, list[float]] = {name: [] for name in runs}
        processor: dict[str, list[float]] = {name: [] for name in runs}
        rates = []
        for seed in range(args.rounds + 1):
            rates.append(reading_rate())
            for name, run in runs.items():
                start = time.perf_counter(), time.process_time()
                tokens = run(seed)
                if seed:  # the first one warms up
                    clock[name].append(time.perf_counter() - start[0])
                    processor[name].append(time.process_time() - start[1])
                if tokens.shape != (args.batch, args.tokens):
                    raise SystemExit(f"{name} gave {tokens.shape}, not {(args.batch, args.tokens)}")
    rate = statistics.median(rates)
    print(f"{cores()} core(s), which read {rate / 1e9:.1f} GB/s together")
    print(f"batch {args.batch}, {args.tokens} tokens each, median of {args.rounds}; tokens/s")
    print(f"{'':<26}{'by the clock':>14}{'per core-second':>18}{'limit of memory':>18}")
    for name in runs:
        speeds = [args.batch * args.tokens / statistics.median(s[name]) for s in (clock, processor)]
        limit = f"{args.batch * rate / weight_bytes(models[name[15:]]):.0f}" if name.startswith("scratch") else ""
        print(f"{name:<26}{speeds[0]:>14.0f}{speeds[1]:>18.0f}{limit:>18}")


def reading_rate() -> float:
    """Bytes a second that all cores read together, from 256 MB."""
    parts = np.array_split(np.ones(1 << 26, np.float32), cores())
    with ThreadPoolExecutor(len(parts)) as pool:
        start = time.perf_counter()
        list(pool.map(lambda x: x @ x, parts))
        return sum(part.nbytes for part in parts) / (time.perf_counter() - start)


def weight_bytes(model: GPT2) -> int:
    """The bytes of weights that are read for a token: all but tables of embeddings that the output does not read."""
    matrices = [layer.w for _, layer in model.named_layers() if isinstance(layer, QuantizedLinear)]
    tables = (model.body.tokens.table, model.body.positions.table)
    unread = tables if matrices else tables[1:]
    rest = sum(p.data.nbytes for p in model.parameters() if all(p is not table for table in unread))
    return rest + sum(w.numbers.nbytes + w.scales.nbytes for w in matrices)


def llama_cpp_runs(
    model: GPT2LMHeadModel, prompt: np.ndarray, args: argparse.Namespace, folder: Path
) -> dict[str, Run]:
    """The model in llama.cpp's formats of 8 and 4 bits, without a vocabulary."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
    from llama_cpp import Llama

    names = {
        "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
        "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    }  # fmt: skip

    def written(kind: str) -> str:
        path, config, dtype = folder / f"{kind}.gguf", model.config, GGMLQuantizationType[kind]
        writer = GGUFWriter(path, "gpt2")
        writer.add_block_count(config.n_layer)
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(config.vocab_size)
        for name, tensor in model.transformer.state_dict().items():
            *path_of, last = name.split(".")
            block = f"blk.{path_of.pop(1)}." if path_of[0] == "h" else ""
            name = f"{block}{names['.'.join(path_of[1:] if block else path_of)]}.{last}"
            array = tensor.numpy()
            if array.ndim == 2 and block:
                array = array.T  # GPT-2 stores (I, O)
            if array.ndim == 2 and not name.startswith("position"):
                writer.add_tensor(name, quants.quantize(np.ascontiguousarray(array), dtype), raw_dtype=dtype)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return str(path)

    def run(llama: Llama, seed: int) -> np.ndarray:
        llama.reset()
        llama.set_seed(seed)
        options = dict(temp=args.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
        tokens = llama.generate(prompt[0].tolist(), **options)
        return np.array([[next(tokens) for _ in range(args.tokens)]])

    def opened(kind: str) -> Run:
        threads = dict(n_threads=cores(), n_threads_batch=cores())
        return partial(run, Llama(written(kind), n_ctx=CONTEXT, verbose=False, **threads))

    return {f"llama.cpp, {kind}": opened(kind) for kind in ("Q8_0", "Q4_0")}


def ctranslate2_runs(
    model: GPT2LMHeadModel, prompt: np.ndarray, args: argparse.Namespace, folder: Path
) -> dict[str, Run]:
    """The model with the integer weights of CTranslate2."""
    import ctranslate2
    from ctranslate2.converters.transformers import GPT2Loader

    spec, words = GPT2Loader().get_model_spec(model), [f"<{i}>" for i in range(args.vocabulary)]
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = words[0]
    spec.register_vocabulary(words)
    spec.validate()
    spec.optimize(quantization="int8")
    (folder / "ctranslate2").mkdir()
    spec.save(str(folder / "ctranslate2"))
    generator = ctranslate2.Generator(str(folder / "ctranslate2"), intra_threads=cores(), compute_type="int8")

    def run(seed: int) -> np.ndarray:
        ctranslate2.set_random_seed(seed)
        [result] = generator.generate_batch(
            [[words[i] for i in prompt[0]]], max_length=args.tokens, min_length=args.tokens,
            sampling_topk=0 if args.temperature else 1, include_prompt_in_result=False,
        )  # fmt: skip
        return np.array(result.sequences_ids)

    return {"CTranslate2, int8": run}


if __name__ == "__main__":
    main()

"""Speed on a GPU: training steps and generation beside PyTorch, and the kernels of a step. A part of gpu.py.

Each competitor runs in a process of its own, so several can get ready at once. Then it takes a turn whenever it is told
to. A process whose input has ended before it is ready leaves PyTorch's compiled kernels on the
disk, where the next one finds them.

PyTorch has the same weights and batches, and fused attention. In training it has one product for queries, keys and
values, and fused Adam, and runs under autocast in bfloat16. In generation queries, keys and values are three products,
and for bfloat16 the weights are rounded. The Transformer-XL and the sparse transformer have no twin in PyTorch here.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from setups import Process, counted_work

from scratchformer import Key, models
from scratchformer.backend import CPU, Device, get_device, tf32
from scratchformer.data import Labelled, LabelledBatches, SegmentBatches, TextBatches
from scratchformer.generation import generate
from scratchformer.optim import Adam, Muon
from scratchformer.training import Replicas

PRECISIONS = ("bfloat16", "tf32", "float32")
OURS = "scratchformer"
MODES = {"eager": None, "compile": "default", "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
ROUNDS, TURN = 5, 0.25  # turns of each competitor, and the seconds of one
PROMPT, WRITTEN = 16, 256  # tokens
PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16, by the data sheet


class Row(NamedTuple):
    """A model and how it is trained. `generating`: it writes tokens instead, and `batches` is not used."""

    make: Callable[[], Any]
    batches: Callable[[Any], Any]
    peer: str | None = None  # the class in torch_model.py
    muon: bool = False
    key: Key | None = None  # of dropout
    generating: bool = False

    def optimizer(self, model: Any, precision: str) -> Any:
        if not self.muon:
            return Adam(model.parameters(), 1e-4)
        precision = "bfloat16" if precision == "bfloat16" else "float32"
        return Muon(model.parameters(), 0.02, 2e-3, weight_decay=0.1, precision=precision)

    def competitors(self, precision: str) -> list[str]:
        """Ours, then PyTorch's modes, the one that compiles longest last."""
        if self.peer is None or (self.generating and precision == "tf32"):
            return [OURS]
        if self.generating:
            return [OURS, "reduce-overhead"]
        return [OURS, *(mode for mode in MODES if mode != "max-autotune" or precision == "bfloat16")]


def rows(small: bool) -> dict[str, Row]:
    """The tutorial's models, GPT-2 small, a Llama trained with Muon, enwik8.py's Transformer-XL, and sparse.py."""

    def sized(**sizes: int) -> dict[str, int]:
        return sizes | (dict(d_model=32, heads=4, depth=2) if small else {})

    def text(vocabulary: int, rows: int) -> Callable[[Any], TextBatches]:
        ids = Key(1).generator().integers(0, vocabulary, 1_000_000, dtype=np.int32)
        return lambda model: TextBatches(ids, min(rows, 4) if small else rows, model.context, Key(2))

    def reviews(model: Any) -> LabelledBatches:
        texts = Key(1).generator().integers(2, words, (256, 512), dtype=np.int32)
        return LabelledBatches(Labelled([*texts], np.arange(256) % 2), 4 if small else 32, 512, Key(2), keep="both")

    def segments(model: Any) -> SegmentBatches:
        sizes = dict(context=model.context, depth=len(model.body.blocks), d_model=model.config["d_model"])
        ids = Key(1).generator().integers(0, 256, 4_000_000, dtype=np.uint8)
        return SegmentBatches(ids, 4 if small else 32, key=Key(2), **sizes)

    words, tokens, length, sub_words = (500, 500, 64, 300) if small else (50_000, 50_257, 1024, 8000)
    tutorial, narrow = sized(d_model=256, heads=8, depth=12), sized(d_model=256, heads=4, depth=4)
    gpt2 = partial(
        models.GPT2, tokens, context=length, dropout=0.0, key=Key(0), **sized(d_model=768, heads=12, depth=12)
    )
    xl = dict(context=256, memory=256, d_ff=896, norm="post", embedding_std=1.0, key=Key(0))
    sparse = dict(context=1024 if small else 4096, stride=64, key=Key(0), **sized(d_model=128, heads=4, depth=4))
    return {
        "GPT-2 small": Row(gpt2, text(tokens, 8), "TorchGPT2"),
        "Llama": Row(
            lambda: models.Llama(sub_words, **narrow, context=length // 2, dropout=0.1, key=Key(0)),
            text(sub_words, 8), "TorchLlama", muon=True, key=Key(3),
        ),
        "generator": Row(
            lambda: models.LanguageModel(256, **tutorial, context=256, key=Key(0)), text(256, 32), "TorchLanguageModel"
        ),
        "classifier": Row(
            lambda: models.Classifier(words, 2, **sized(d_model=128, heads=8, depth=6), max_length=512, key=Key(0)),
            reviews, "TorchClassifier",
        ),
        "Transformer-XL": Row(lambda: models.TransformerXL(256, **tutorial, **xl), segments),
        "sparse transformer": Row(lambda: models.SparseTransformer(256, **sparse), text(256, 2)),
        "generation, GPT-2 small": Row(gpt2, lambda model: None, "TorchGPT2", generating=True),
    }  # fmt: skip


class Steps(NamedTuple):
    take: Callable[[int], Any]  # makes so many training steps, or tokens; returns the last loss, or token
    memory: Callable[[], float | None]  # GB held on the GPU


def our_steps(row: Row, device: Device, precision: str) -> Steps:
    if row.generating:
        model = row.make().to(device, ml_dtypes.bfloat16 if precision == "bfloat16" else np.float32)
        prompt = np.ones((1, PROMPT), np.int32)
        return Steps(lambda count: [*generate(model, prompt, count)][-1][0], lambda: held(device))
    model = row.make().to(device)
    batches, optimizer, numbers = row.batches(model), row.optimizer(model, precision), itertools.count()
    replicas = Replicas(model, precision=precision, micro_batches=1)  # as on a GPU, since dropout depends on it
    replicas.reading = device is CPU  # as a `Run` has it
    replicas.__enter__()  # for good, since leaving forgets the recorded steps

    def take(count: int) -> Any:
        for number in itertools.islice(numbers, count):
            remember = partial(batches.remember, number) if hasattr(batches, "remember") else None
            key = None if row.key is None else row.key.fold(number)
            loss = replicas.gradients(batches.batch(number), key, remember)
            replicas.clip(optimizer, 1.0)
            replicas.step(optimizer)
        return loss

    return Steps(take, lambda: held(device, replicas.graphs.memory() if replicas.graphs else 0))


def held(device: Device, recorded: int = 0) -> float | None:
    """The GPU memory in use, in GB, that of recorded steps included."""
    return None if device is CPU else (device.xp.get_default_memory_pool().total_bytes() + recorded) / 1e9


def torch_steps(row: Row, mode: str | None, device: Device, precision: str) -> Steps:
    """The same in PyTorch. mode: of torch.compile, or None."""
    import torch
    import torch_model

    where = "cpu" if device is CPU else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    model = row.make()
    peer = getattr(torch_model, row.peer or "")(model, fused=True).to(where)
    peer.padded = False  # no row of a classifier's batch is
    compiled = partial(torch.compile, mode=mode) if mode else lambda function: function

    def memory() -> float | None:
        return None if device is CPU else torch.cuda.max_memory_reserved() / 1e9

    if row.generating:
        if precision == "bfloat16":
            peer.to(torch.bfloat16)
        decoder = torch_model.TorchDecoder(peer, PROMPT + WRITTEN).to(where)
        step = compiled(decoder)

        def write(count: int) -> Any:
            with torch.inference_mode():
                token, position = decoder(
                    *(torch.arange(PROMPT, device=where)[None], torch.arange(PROMPT, device=where))
                )
                tokens = [token]
                for _ in range(count - 1):
                    torch.compiler.cudagraph_mark_step_begin()
                    token, position = (x.clone() for x in step(token, position))
                    tokens.append(token)
                return torch.cat(tokens).cpu()[-1]

        return Steps(write, memory)

    batches, numbers = row.batches(model), itertools.count()
    rest = dict(peer.named_parameters())
    if row.muon:
        hidden = [rest.pop(name) for name in [*rest] if ".blocks." in name and rest[name].ndim == 2]
        muon = torch.optim.Muon(hidden, 0.02, 0.1, adjust_lr_fn="original")
        adam = torch.optim.AdamW(rest.values(), 2e-3, (0.9, 0.99), weight_decay=0.1, fused=True)
        optimizers = [(muon, compiled(muon.step)), (adam, adam.step)]
    else:
        adam = torch.optim.Adam(rest.values(), 1e-4, fused=True)
        optimizers = [(adam, adam.step)]
    step = torch_model.training_step(peer, optimizers, where, mode, precision == "bfloat16")

    def take(count: int) -> Any:
        for number in itertools.islice(numbers, count):
            loss = step(batches.batch(number))
        return loss

    return Steps(take, memory)


# A competitor's process


def work(name: str, precision: str, competitor: str, where: str, small: bool) -> None:
    """Get ready and say so; then, for each line with a number, take so many steps, and say how long they took."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    start, device, row = time.perf_counter(), get_device(where), rows(small)[name]
    if competitor == OURS:
        steps = our_steps(row, device, precision)
    else:
        steps = torch_steps(row, MODES[competitor], device, precision)

    def timed(count: int) -> dict[str, Any]:
        begun = time.perf_counter()
        last = float(steps.take(count))  # waits for the device
        return {"last": last, "seconds": (time.perf_counter() - begun) / count, "memory": steps.memory()}

    replies.write(json.dumps({**timed(5), "ready": time.perf_counter() - start}) + "\n")
    replies.flush()
    usual = timed(3)["seconds"]
    for _ in sys.stdin:
        count = (8 if small else WRITTEN) if row.generating else max(2, min(100, round(TURN / usual)))
        replies.write(json.dumps(timed(count)) + "\n")
        replies.flush()


def command(name: str, precision: str, competitor: str, where: str, small: bool) -> list[str]:
    return [sys.executable, __file__, json.dumps([name, precision, competitor, where, small])]


def compare(
    results: Any,
    names: Sequence[str],
    precision: str,
    device: Device,
    small: bool,
    patience: float,
    modes: Sequence[str],
) -> None:
    """Let the competitors of some rows get ready at once, in `patience` seconds, and then take turns, row after row."""
    running: dict[str, dict[str, Process]] = {name: {} for name in names}
    known = rows(small)
    begun = time.perf_counter()
    try:
        for name in names:
            for competitor in known[name].competitors(precision):
                if competitor == OURS or competitor in modes:
                    line = command(name, precision, competitor, device.name, small)
                    running[name][competitor] = Process(line, results.log("speed"))
        for name, competitors in running.items():
            for competitor, process in [*competitors.items()]:
                what = dict(model=name, precision=precision, competitor=competitor)
                try:
                    said = process.reply(begun + patience - time.perf_counter())
                    results.add("ready", **what, last=said["last"], seconds=said["ready"])
                except RuntimeError as error:
                    competitors.pop(competitor).stop()
                    results.add("failed", **what, why=str(error))
        time.sleep(1)  # for the last ones' first steps
        rate = device_rate(device, precision)
        for name, competitors in running.items():
            turns: dict[str, list[dict[str, Any]]] = {competitor: [] for competitor in competitors}
            for _ in range(ROUNDS):
                for competitor, process in [*competitors.items()]:
                    try:
                        turns[competitor].append(process.ask("turn", 60))
                    except RuntimeError as error:
                        competitors.pop(competitor).stop()
                        turns.pop(competitor)
                        results.add("failed", model=name, precision=precision, competitor=competitor, why=str(error))
            for process in competitors.values():
                process.stop()
            compared(results, name, precision, known[name], turns, rate)
            competitors.clear()
    finally:
        for process in itertools.chain(*(competitors.values() for competitors in running.values())):
            process.stop()


def compared(results: Any, name: str, precision: str, row: Row, turns: dict[str, list[dict]], rate: float) -> None:
    """Write what the turns of one row gave: a line for each competitor."""
    seconds = {competitor: [turn["seconds"] for turn in taken] for competitor, taken in turns.items()}
    medians = {competitor: statistics.median(each) for competitor, each in seconds.items()}
    model, tokens, work = row.make(), 1, None
    if not row.generating:
        batch = row.batches(model).batch(0)
        tokens = batch[0].size
        if type(model) in (models.GPT2, models.LanguageModel, models.Classifier):
            work = counted_work(model, batch)
    for competitor, each in seconds.items():
        median = medians[competitor]
        values = dict(seconds=median, min=min(each), max=max(each), tokens_per_second=tokens / median)
        if work is not None:
            values["share_of_rate"] = work / median / rate
            if precision == "bfloat16":
                values["share_of_peak"] = work / median / PEAK
        held = turns[competitor][-1]["memory"]
        results.add("speed", model=name, precision=precision, competitor=competitor, memory_gb=held, **values)


def device_rate(device: Device, precision: str) -> float:
    """FLOP/s in products of large square matrices: the best of many."""
    n = 8192 if device.index is not None else 512
    a = device.xp.asarray(Key(0).generator().standard_normal((n, n), np.float32))
    if precision == "bfloat16" and device is not CPU:
        a = a.astype(ml_dtypes.bfloat16)
    best = float("inf")
    with tf32(device, precision == "tf32"):
        for _ in range(10):
            synchronize(device)
            start = time.perf_counter()
            a @ a
            synchronize(device)
            best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def synchronize(device: Device) -> None:
    if device.index is not None:
        device.xp.cuda.Device(device.index).synchronize()


def profile(results: Any, device: Device, small: bool, steps: int = 5) -> None:
    """The time of each kernel in a step in bfloat16, by PyTorch's profiler, which also sees CuPy's kernels."""
    import torch

    activity = torch.profiler.ProfilerActivity
    for name in "GPT-2 small", "Llama":
        take = our_steps(rows(small)[name], device, "bfloat16").take
        float(take(6))
        with torch.profiler.profile(activities=[activity.CPU if device is CPU else activity.CUDA]) as recorded:
            start = time.perf_counter()
            float(take(steps))
            synchronize(device)
            whole = time.perf_counter() - start
        times, counts = Counter[str](), Counter[str]()
        for event in recorded.events():
            if event.device_type != torch.autograd.DeviceType.CPU:
                times[event.name] += event.time_range.elapsed_us() / 1e3 / steps
                counts[event.name] += 1
        kernels = [[kernel[:90], round(ms, 4), counts[kernel] / steps] for kernel, ms in times.most_common(60)]
        total = sum(times.values())
        results.add("profile", model=name, ms=total, ms_with_profiler=1e3 * whole / steps, kernels=kernels)


def losses(row: Row, device: Device, steps: int) -> Iterator[float]:
    """Of training in float32."""
    take = our_steps(row, device, "float32").take
    for _ in range(steps):
        yield float(take(1))


if __name__ == "__main__":
    work(*json.loads(sys.argv[1]))

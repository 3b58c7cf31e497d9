"""Runs the kernels for one new token on a CPU, and compares them with the references: see `emulator.py`.

python tests/kernels/on_cpu/tokens.py
python tests/kernels/on_cpu/tokens.py FILE OLD NEW      # with a mistake planted in FILE.cu
"""

import os
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import run
from emulator import Kernel, compile_what_is_called
from run import RNG, TYPES, Array, as_array, cupy, draw, on_gpu, rounded

from scratchformer import Key, models, ops
from scratchformer.backend import Device
from scratchformer.dispatch import fast, has_twin, reference_only
from scratchformer.generation.cache import TokenStep, grow
from scratchformer.kernels import cupy_code, cupy_extend  # noqa: F401
from scratchformer.nn.embedding import extend_by_token


class Recorder(Kernel):
    """A kernel that is started, or only noted if a stream is recording. What is done without a kernel is not noted, so
    that a step with such parts gives wrong results.
    """

    noted = None  # the calls of the stream that is recording

    def __call__(self, *call):
        if Recorder.noted is None:
            super().__call__(*call)
        else:
            Recorder.noted.append((self, call))


class Stream(nullcontext):
    def synchronize(self):
        assert Recorder.noted is None

    def begin_capture(self, mode):
        Recorder.noted = []

    def end_capture(self):
        calls, Recorder.noted = Recorder.noted, None
        return SimpleNamespace(calls=calls, launch=lambda: [kernel(*call) for kernel, call in calls])


def put(array, x):
    assert (x.shape, x.dtype) == (array.shape, array.dtype)
    array[...] = x


Array.set, cupy.RawKernel = put, Recorder
cupy.cuda.runtime.streamCaptureModeRelaxed = 2
cupy.cuda.MemoryPool, cupy.cuda.Stream = lambda: SimpleNamespace(malloc=None), Stream
cupy.cuda.using_allocator = nullcontext

GPT2 = partial(models.GPT2, 37, 24, 3, 2, tied=True)
PLAIN = partial(models.LanguageModel, 21, 16, 2, 1)
LLAMA = partial(models.Llama, 32, 16, 4, 2, kv_heads=2, d_ff=24)
TOKENS = [  # a model, the length of its context, the sequences, and how many positions are stored
    (GPT2, 8, 1, 0),
    (GPT2, 8, 9, 5),
    (partial(GPT2, tied=False, activation="gelu"), 9, 2, 8),
    (GPT2, 1100, 1, 1060),
    (PLAIN, 7, 3, 4),
    (partial(PLAIN, norm="pre", bias=True, activation="silu", wide=True), 8, 1, 7),
    (LLAMA, 16, 3, 11),
    (partial(LLAMA, window=4, bias=True, feedforward_bias=True, tied=True), 10, 2, 6),
    (partial(LLAMA, window=1030), 2200, 1, 2190),
    (partial(models.Llama, 40, 1100, 1, 1, d_ff=30, head_width=8), 4, 1, 3),
    (partial(models.Llama, 8452, 16, 1, 1, d_ff=2100), 4, 1, 3),
]
SMALL = 21, 16, 2, 1
REFUSED = [
    partial(models.TransformerXL, *SMALL, memory=8),
    partial(models.LanguageModel, *SMALL, positions="sinusoidal"),
    partial(models.LanguageModel, *SMALL, activation=(ops.relu, ops.relu_backward)),
]
RECORDED = [(GPT2, 5 * 2 + 2), (LLAMA, 5 * 2 + 2), (PLAIN, 7 * 1 + 2)]  # with the kernels of a token


def model_on_gpu(make, context, dtype):
    """A model with random weights on the stand-in for a GPU, and one with the same weights in float64."""
    there, here = make(context=context, key=Key(0)), make(context=context, key=Key(0)).to(dtype=np.float64)
    for p, q in zip(there.parameters(), here.parameters(), strict=True):
        weights = RNG.standard_normal(p.data.shape) / np.sqrt(p.data.shape[0] if p.data.ndim > 1 else 4)
        q.data = rounded(weights, dtype)
        p.bind(on_gpu(weights, dtype), None, None)
    return there, here


def stored_on_gpu(stored, dtype):
    return [(as_array(k.swapaxes(2, 3).astype(dtype)).swapaxes(2, 3), on_gpu(v, dtype)) for k, v in stored]


def compare_recorded(make, launches):
    """Several tokens by a recorded step."""
    there, here = model_on_gpu(make, 8, TYPES[0])
    stored = here.allocate(2)
    step = step_of(there)
    for past in range(4):
        ids = RNG.integers(0, 20, 2)
        with fast():
            found = step(past, ids)
        assert len(step.recording.graph.calls) == launches, f"{len(step.recording.graph.calls)} kernels"
        with reference_only():
            right = here.extend(ids[:, None], stored, past)[:, 0]
        error = np.abs(found - right).max() / np.abs(right).max()
        assert error < 1e-4, f"relative error {error:.1e}"


def compare_new_weights():
    """A model whose weights are in new arrays is recorded again."""
    there, _ = model_on_gpu(PLAIN, 8, TYPES[0])
    ids, step = np.array([3, 5]), step_of(there)
    with fast():
        before = step(0, ids)
        for p in there.parameters():
            p.bind(as_array(p.data / 2), None, None)
        after = step(0, ids)
        np.testing.assert_array_equal(after, step_of(there)(0, ids))
        assert not (before == after).all()


def compare_more_room():
    """A step whose keys and values are in new arrays, which have more room, is recorded again."""
    there, _ = model_on_gpu(PLAIN, 8, TYPES[0])
    ids, growing, whole = np.array([3, 5]), step_of(there, 4), step_of(there)
    stored = growing.arguments[-1]
    with fast():
        for past in range(8):
            grow(stored, past, 4 if past < 4 else 8, lambda room: stored_on_gpu(there.allocate(2, room), TYPES[0]))
            np.testing.assert_array_equal(growing(past, ids), whole(past, ids))


def step_of(model, room=None):
    """The step of a token of two sequences, for a model on the stand-in for a GPU."""
    parts = dict(body=model.body, output=model.output, parameters=model.parameters)
    layers = SimpleNamespace(**parts, device=Device("gpu:0", cupy, 0))
    return TokenStep(layers, stored_on_gpu(model.allocate(2, room), TYPES[0]), 2)


def broken_end(stream):
    Recorder.noted = None
    raise RuntimeError("cannot be ended")


def compare_what_is_not_recorded():
    """A failure is said once, and a step that is not recorded gives the same numbers; so it is if the environment turns
    recording off. A model with other layers has no such step.
    """
    there, _ = model_on_gpu(PLAIN, 8, TYPES[0])
    ids = np.array([3, 5])
    with fast():
        right = step_of(there)(0, ids)
        with patch.dict(os.environ, SCRATCHFORMER_GRAPHS="0"):
            off = step_of(there)
        broken = step_of(there)
        with patch.object(Stream, "end_capture", broken_end):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = [broken(0, ids), broken(0, ids)]
        assert [str(w.message) for w in caught] == [
            "steps are not recorded as CUDA graphs: RuntimeError: cannot be ended"
        ]
        for logits in *found, off(0, ids), broken(0, ids):
            assert (logits == right).all()
        assert broken.recording is None and off.recording is None
        for model in REFUSED:
            there, _ = model_on_gpu(model, 8, TYPES[0])
            assert step_of(there)(0, ids) is None, model


def compare_tokens(make, context, B, past, dtype):
    """The logits after a token, and what is stored, given random weights and random stored keys and values."""
    there, here = model_on_gpu(make, context, dtype)
    numbers = np.array([past, *RNG.integers(0, len(here.body.tokens.table.data), B)])
    stored = here.allocate(B)
    for array in (array for arrays in stored for array in arrays):
        array[:, :, :past] = rounded(draw(*array[:, :, :past].shape), dtype)
        array[:, :, past:] = np.nan  # whatever was there
    copies = stored_on_gpu(stored, dtype)
    arguments = there.body.embedding, there.body.stack, there.output, copies
    with fast():
        if not has_twin(extend_by_token, as_array(numbers), *arguments):
            raise TypeError("the twin does not take it")
        found = extend_by_token(as_array(numbers), *arguments)
    with reference_only():
        right = extend_by_token(numbers, here.body.embedding, here.body.stack, here.output, stored)
    assert found.dtype == cupy_code.real(dtype) and found.shape == right.shape
    tolerance = 1e-4 if dtype == np.float32 else 3e-2
    for f, r in [
        (found, right),
        *((f, r) for fs, rs in zip(copies, stored, strict=True) for f, r in zip(fs, rs, strict=True)),
    ]:
        f, r = (x[:, :, : past + 1] if x.ndim == 4 else x for x in (f, r))
        error = np.abs(f.astype(np.float64) - r).max() / np.abs(r).max()
        assert error < tolerance, f"relative error {error:.1e}"


def main(*mistake):
    if mistake:
        run.plant(run.cupy_code, *mistake)
    checks = [
        ((dtype.name, make, *sizes), partial(compare_tokens, make, *sizes, dtype))
        for make, *sizes in TOKENS
        for dtype in TYPES[: 1 if mistake else None]
    ]
    checks.append((("new weights",), compare_new_weights))
    checks.append((("more room",), compare_more_room))
    checks.append((("not recorded",), compare_what_is_not_recorded))
    checks += [(("recorded", make), partial(compare_recorded, make, launches)) for make, launches in RECORDED]
    if not mistake:
        compile_what_is_called(check for _, check in checks)
    failed = False
    for what, check in checks:
        try:
            check()
            print("ok", *what, flush=True)
        except AssertionError as error:
            failed = True
            print("FAILED", *what, error, flush=True)
            if mistake:
                break
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs the twins for a GPU on a CPU: CuPy is NumPy here, and CUDA's threads take turns (see emulator.py).

test_cuda_on_cpu.py starts this program, since it must not change the process of other tests.

    python tests/kernels/on_cpu/run.py                              # all operations
    python tests/kernels/on_cpu/run.py attention FILE OLD NEW       # one of them, with a mistake planted in FILE.cu
"""

import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
from emulator import Kernel


class Array(np.ndarray):
    """A NumPy array with the attributes of CuPy's that the twins use."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))
    device = SimpleNamespace(id=0)

    def set(self, x):
        assert (x.shape, x.dtype) == (self.shape, self.dtype)
        self[...] = x


def as_array(x):
    return x.view(Array) if isinstance(x, np.ndarray) else x


def multiply(x, y, out, add=0.0, bias=None, activation="", times=1.0):
    """What cuBLASLt would do."""
    found = times * (x.astype(out.dtype) @ y.astype(out.dtype))
    found = found if bias is None else found + bias
    out[...] = (add * out if add else 0) + (np.maximum(found, 0) if activation else found)
    return out


def numpys(name):
    """A function of NumPy that returns these arrays."""
    found = getattr(np, name)
    return found if isinstance(found, type) else lambda *args, **kwargs: as_array(found(*args, **kwargs))


cupy = ModuleType("cupy")


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


cupy.ndarray, cupy.RawKernel = Array, Recorder
cupy.cuda = SimpleNamespace(
    runtime=SimpleNamespace(getDevice=lambda: 0, streamCaptureModeRelaxed=2),
    Device=lambda index: nullcontext(),
    MemoryPool=lambda: SimpleNamespace(malloc=None),
    Stream=Stream,
    using_allocator=nullcontext,
)
cupy.__getattr__ = numpys
sys.modules["cupy"] = cupy

from scratchformer import Key, models, ops  # noqa: E402
from scratchformer.backend import Device  # noqa: E402
from scratchformer.dispatch import TwinCache, fast, has_twin, reference_only  # noqa: E402
from scratchformer.generation.cache import TokenStep  # noqa: E402
from scratchformer.kernels import cupy_code, cupy_products  # noqa: E402
from scratchformer.nn import Param  # noqa: E402
from scratchformer.nn.embedding import extend_by_token  # noqa: E402
from scratchformer.ops import rounding  # noqa: E402
from scratchformer.optim import Adam, AdamW, Group, Muon, adam, muon, optimizer  # noqa: E402
from scratchformer.testing.contracts import as_tuple  # noqa: E402

cupy_products.available, cupy_products.product = (lambda: True), multiply
cupy_products.attempt = lambda *args, **options: multiply(*args, **options) is not None

from scratchformer.compiler import add_all  # noqa: E402
from scratchformer.compiler.cuda_pieces import add_pieces  # noqa: E402
from scratchformer.compiler.cuda_target import CudaTarget  # noqa: E402

add_pieces()
add_all(CudaTarget())

from scratchformer.kernels import (  # noqa: E402, F401
    cupy_adam,
    cupy_attention,
    cupy_embedding,
    cupy_extend,
    cupy_half,
    cupy_linear,
    cupy_muon,
)

RNG = np.random.default_rng(0)
TYPES = [np.dtype(np.float32)]
HALVES = {}
if find_spec("ml_dtypes"):
    TYPES.append(np.dtype(import_module("ml_dtypes").bfloat16))
    HALVES["float32"] = TYPES[-1]


def draw(*shape, start=0):
    """Standard normal numbers, which need not start at a multiple of 16 bytes."""
    return RNG.standard_normal(start + int(np.prod(shape)))[start:].reshape(shape)


def heads(T, S, H=2, G=2, D=8):
    return draw(2, H, T, D), draw(2, G, S, D), draw(2, G, S, D)


LENGTHS = np.array([5, 0])
ATTENTION = [
    (heads(7, 7), None),
    (heads(260, 260, 1, 1), ops.Causal()),
    (heads(6, 9), ops.Causal()),
    (heads(9, 6), ops.Causal()),
    (heads(7, 11), ops.Padding(LENGTHS)),
    (heads(8, 8, 4, 2), ops.Causal() & ops.Padding(LENGTHS)),
    (heads(20, 20), ops.Local(3)),
    (heads(3, 2100, 1, 1, 2), None),
]
CASES = [
    (ops.embedding, (RNG.integers(0, 9, (4, 5)), draw(9, 7)), {}),
    (ops.embedding, (RNG.zipf(1.5, (3, 100)) % 1100, draw(1100, 40)), {}),
    *((ops.dense, (draw(3, 2, 6), draw(6, 10), draw(10), name), {}) for name in ("relu", "gelu", "gelu_tanh", "silu")),
    (ops.linear, (draw(70, 6), draw(6, 33), draw(33)), {}),
    (ops.linear, (draw(2, 3, 6), draw(9, 6).T), {}),
    *((ops.attention, (*arrays, pattern), {}) for arrays, pattern in ATTENTION),
]


def on_gpu(x, dtype):
    if isinstance(x, ops.Padding):
        return ops.Padding(as_array(x.lengths))
    if isinstance(x, ops.patterns.Both):
        return on_gpu(x.first, dtype) & on_gpu(x.second, dtype)
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype != np.float64 or dtype == np.float64:
        return as_array(x)
    padded = np.empty(x.size + x.ctypes.data % 16 // 8, dtype)  # as far from a multiple of 16 bytes as x is
    moved = padded[len(padded) - x.size :].reshape(x.shape)
    moved[...] = x
    return as_array(moved if x.flags.c_contiguous else np.asfortranarray(x.astype(dtype)))


def rounded(x, dtype):
    """What `on_gpu` makes of x, in float64."""
    return x.astype(dtype).astype(x.dtype) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x


def compare(op, args, options, dtype):
    backward = getattr(ops, f"{op.__name__}_backward")
    with fast():
        y, cache = op(*(on_gpu(a, dtype) for a in args), **options)
        if not isinstance(cache, TwinCache) and "Cuda" not in type(cache).__name__ and op is not ops.add:
            raise TypeError(f"the twin did not run: {type(cache)}")
        dy = rounded(draw(*np.shape(y)), dtype) if np.shape(y) else 0.7
        found = y, *as_tuple(backward(on_gpu(dy, dtype), cache))
    with reference_only():
        y, cache = op(*(rounded(a, dtype) for a in args), **options)
        right = y, *as_tuple(backward(dy, cache))
    for f, r in zip(found, right, strict=True):
        assert f.dtype in (dtype, cupy_code.real(dtype)) and f.shape == np.shape(r)
        error = np.abs(f.astype(np.float64) - r).max() / max(1e-3, np.abs(r).max())
        assert error < (2e-5 if dtype == np.float32 else 3e-2), f"relative error {error:.1e}"


def compare_flat(dtype, start):
    there = [on_gpu(draw(1003, start=start), dtype) for _ in range(4)]
    there[3] = there[3] ** 2
    here = [np.array(a, np.float64) for a in there]
    with fast():
        assert abs(float(optimizer.sum_of_squares(there[1])) / np.sum(here[1] ** 2) - 1) < 1e-6
        for t in 1, 2, 3:
            adam.adam_step(*there, 0.01, 0.9, 0.999, 1e-8, t)
        half, share = as_array(np.zeros(there[0].shape, np.float16)), as_array(np.array(0.25))
        settings = *there, 0.01, 0.9, 0.999, 1e-8, 4, 0.1
        steps = (
            (optimizer.scale, (there[1], share)),
            (adam.adam_step, settings),
            (rounding.round_into, (there[0], half)),
        )
        for op, args in steps:
            if not any(twin.fits(*args) for twin in op.chosen[True][type(half)]):
                raise TypeError("the loops do not take these arguments")
            op(*args)
    with reference_only():
        for t in 1, 2, 3:
            adam.adam_step(*here, 0.01, 0.9, 0.999, 1e-8, t)
        here[1] *= 0.25
        adam.adam_step(*here, *settings[4:])
    np.testing.assert_array_equal(half, there[0].astype(np.float16))
    for f, r in zip(there, here, strict=True):
        np.testing.assert_allclose(f, r, rtol=1e-5, atol=1e-6)


def compare_muon(shape, precision):
    """The factors are the same bfloat16 numbers in both, so only the order of sums may differ."""
    products = []
    cupy_muon.product = lambda *args, **scales: products.append(args) or multiply(*args, **scales)
    g = draw(*shape).astype(np.float32) * draw(*shape[:-2], 1, 1).astype(np.float32)
    with fast():
        found = muon.newton_schulz(as_array(g), precision=precision)
    assert len(products) == 3 * muon.STEPS, "the twin did not run"
    right = muon.newton_schulz.reference(g, precision=precision)
    assert found.shape == shape
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


SHAPES = [(9, 7), (7, 9), (5,), (6, 6), (9, 7), (300,), (6, 6), (40, 3), (1,)]


def compare_pieces(kind, dtype, decay, count):
    """Two steps of an optimizer. All parameters that are treated alike are changed in one call of each kernel; of
    matrices only those of one shape, but some of them may be transposed. Adam's own weight decay takes one by one.
    """
    calls, values = [], [draw(*shape).astype(dtype) for shape in SHAPES]
    gradients = [[draw(*shape).astype(dtype) for shape in SHAPES] for _ in range(2)]
    groups = [Group("p4", lr=0.5), Group("p7", frozen=True), Group("p3", weight_decay=0.0)]
    states = []
    for on_gpu in False, True:
        params = [Param(x.copy(), f"p{i}") for i, x in enumerate(values)]
        made = kind(params, 0.1, weight_decay=decay, groups=groups, **({"hidden": "*"} if kind is Muon else {}))
        flat, half = made.flats[0], np.zeros(made.flats[0].data.size, HALVES.get(dtype.name, dtype))
        share = 0.5
        if on_gpu:
            half, share = as_array(half), as_array(np.array(share))
            for owner, name in (flat, "_data"), (flat, "_grad"), (made, "m"), (made, "v"):
                setattr(owner, name, as_array(getattr(owner, name)))
        with fast() if on_gpu else reference_only(), arrays_of(cupy if on_gpu else np, calls):
            for step in gradients:
                for p, g in zip(params, step, strict=True):
                    p.grad[...] = g
                made.step(share=share, half=half)
        states.append([np.array(x) for x in (flat.data, made.m, made.v, half)])
    assert len(calls) == count * len(gradients), f"kernels: {len(calls)}"
    for found, right in zip(*states, strict=True):
        limit = 1e-12 if dtype == np.float64 else 2e-5 if found.dtype == dtype else 1e-2
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=limit, atol=limit)


@contextmanager
def arrays_of(library, calls):
    """Inside the block the optimizers take their arrays for those of a library. The calls of kernels are collected."""
    before, run = optimizer.array_module, Kernel.__call__
    modules = optimizer, muon
    for module in modules:
        module.array_module = lambda *arrays: library
    Kernel.__call__ = lambda self, *args: calls.append(self.name) or run(self, *args)
    yield
    Kernel.__call__ = run
    for module in modules:
        module.array_module = before


def compare_in_half():
    """Attention by relative positions has no kernels in half precision."""
    import ml_dtypes

    args = *heads(5, 7), draw(2, 11, 8), draw(2, 8), draw(2, 8)
    dy = draw(2, 2, 5, 8)
    halves = [as_array(a.astype(ml_dtypes.bfloat16)) for a in (*args, dy)]
    with fast():
        y, cache = ops.relative_attention(*halves[:-1])
        assert cache.twin.forward.__module__ == cupy_half.__name__
        found = y, *ops.relative_attention_backward(halves[-1], cache)
    with reference_only():
        y, cache = ops.relative_attention(*args)
        right = y, *ops.relative_attention_backward(dy, cache)
    for f, r in zip(found, right, strict=True):
        assert f.dtype == ml_dtypes.bfloat16
        np.testing.assert_allclose(f.astype(np.float64), r, rtol=0.05, atol=0.05 * np.abs(r).max())


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
    (partial(models.Llama, 40, 1100, 1, 1, d_ff=1300, head_width=8), 4, 1, 3),
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
    layers = SimpleNamespace(body=there.body, output=there.output, device=Device("gpu:0", cupy, 0))
    step = TokenStep(layers, stored_on_gpu(there.allocate(2), TYPES[0]), 2)
    for past in range(8):
        ids = RNG.integers(0, 20, 2)
        with fast():
            found = step(past, ids)
        assert len(step.recording.graph.calls) == launches, f"{len(step.recording.graph.calls)} kernels"
        with reference_only():
            right = here.extend(ids[:, None], stored, past)[:, 0]
        error = np.abs(found - right).max() / np.abs(right).max()
        assert error < 1e-4, f"relative error {error:.1e}"


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


def plant(file, old, new):
    """Make the kernels of a file wrong."""
    source = cupy_code.source

    def changed(name, *args, **constants):
        text = source(name, *args, **constants)
        if name == file and old not in text:
            raise LookupError(f"{old!r} is not in {file}.cu")
        return text.replace(old, new) if name == file else text

    cupy_code.source = changed


if __name__ == "__main__":
    only, *mistake = sys.argv[1:] or [None]
    if mistake:
        plant(*mistake)
    failed = 0
    checks = [
        (op.__name__, [dtype.name, *(getattr(a, "shape", a) for a in args)], partial(compare, op, args, options, dtype))
        for op, args, options in CASES
        for dtype in TYPES[: 1 if mistake else None]
    ]
    checks += [("adam_step", start, partial(compare_flat, TYPES[0], start)) for start in (0, 1)]
    checks += [
        ("extend_by_token", [dtype.name, make, *sizes], partial(compare_tokens, make, *sizes, dtype))
        for make, *sizes in TOKENS
        for dtype in TYPES[: 1 if mistake else None]
    ]
    checks += [("extend_by_token", ["recorded", make], partial(compare_recorded, make, n)) for make, n in RECORDED]
    for kind, decay, count in (Adam, 0.0, 4), (Adam, 0.3, 8), (AdamW, 0.3, 6), (Muon, 0.3, 23):
        for dtype in (TYPES[0], np.dtype(np.float64))[: 1 if kind is Muon else 2]:
            checks.append(("pieces", (kind.__name__, decay, dtype), partial(compare_pieces, kind, dtype, decay, count)))
    for shape in (6, 6), (9, 4), (3, 4, 9), (2, 40, 33), (2, 1, 9, 4):
        for precision in ("float32", "bfloat16")[: 1 if max(shape) > 9 else 2]:  # large ones differ after rounding
            checks.append(("newton_schulz", (shape, precision), partial(compare_muon, shape, precision)))
    checks.append(("relative_attention", "", compare_in_half))
    checks = [check for check in checks if only in (None, check[0])]
    if not checks:
        sys.exit(f"{only}: there is no such case")
    for *what, check in checks:
        try:
            check()
            print("ok", *what, flush=True)
        except AssertionError as error:  # anything else is no comparison, and ends the program
            failed += 1
            print("FAILED", *what, error, flush=True)
            if mistake:  # found
                break
    sys.exit(3 if failed else 0)  # 1 is Python's for another error

"""Runs the twins for a GPU on a CPU: CuPy is NumPy here, and CUDA's threads take turns (see emulator.py).

test_cuda_on_cpu.py starts this program, since it must not change the process of other tests.

    python tests/kernels/on_cpu/run.py                              # all operations
    python tests/kernels/on_cpu/run.py attention FILE OLD NEW       # one of them, with a mistake planted in FILE.cu
"""

import copy
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
from emulator import Kernel, compile_what_is_called, plant


class Array(np.ndarray):
    """A NumPy array with the attributes of CuPy's that the twins use."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))
    device = SimpleNamespace(id=0)

    def __matmul__(self, other):
        raise TypeError("a product of CuPy cannot be part of a CUDA graph")


def as_array(x):
    return x.view(Array) if isinstance(x, np.ndarray) else x


def multiply(x, y, out, plus=None, scales=(1.0, 1.0), bias=None, activation=""):
    """What cuBLASLt would do."""
    found = scales[0] * np.matmul(x.astype(out.dtype).view(np.ndarray), y.astype(out.dtype).view(np.ndarray))
    found = (0 if plus is None else scales[1] * plus) + (found if bias is None else found + bias)
    out[...] = np.maximum(found, 0) if activation else found
    return out


def numpys(name):
    """What NumPy has under this name; a function then returns these arrays."""
    found = getattr(np, name)
    if isinstance(found, type) or not callable(found):
        return found
    return lambda *args, **kwargs: as_array(found(*args, **kwargs))


cupy = ModuleType("cupy")
cupy.ndarray, cupy.RawKernel = Array, Kernel
cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0), Device=nullcontext)
cupy.__getattr__ = numpys
sys.modules["cupy"], sys.modules["cupy.lib.stride_tricks"] = cupy, np.lib.stride_tricks

from scratchformer import (  # noqa: E402
    Key,
    backend,
    models,
    ops,
)
from scratchformer.dispatch import TwinCache, fast, reference_only  # noqa: E402
from scratchformer.kernels import cupy_code, cupy_products  # noqa: E402
from scratchformer.nn import Param  # noqa: E402
from scratchformer.ops import rounding  # noqa: E402
from scratchformer.optim import Adam, AdamW, Group, Muon, adam, muon, optimizer  # noqa: E402
from scratchformer.parallel import graphs  # noqa: E402
from scratchformer.testing.contracts import as_tuple  # noqa: E402

library = backend.library_of
backend.library_of = lambda x: cupy if type(x) is Array else library(x)
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
    cupy_linear,
    cupy_muon,
    cupy_relative,
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


def with_distances(T, S):
    return *heads(T, S), draw(2, S + T - 1, 8), draw(2, 8), draw(2, 8)


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
    (heads(20, 20), ops.Causal() & ops.Heads(ops.Local(3), ops.Strided(4))),
    (heads(9, 14, 4, 2), ops.Causal() & (ops.SameBlock(4) | ops.BlockEnds(4, 2))),
    (heads(260, 300), ops.Causal() & ops.Strided(7)),
    (heads(8, 8), ops.Heads(ops.Padding(LENGTHS), ops.Strided(3))),
    (heads(3, 2100, 2, 2, 2), ops.Strided(5)),
]
RELATIVE = [
    (with_distances(7, 7), ops.Causal()),
    (with_distances(5, 11), ops.Causal()),
    (with_distances(1, 6), None),
    (with_distances(6, 6), ops.Heads(ops.Local(2), ops.Strided(3))),
]
CASES = [
    (ops.embedding, (RNG.integers(0, 9, (4, 5)), draw(9, 7)), {}),
    (ops.embedding, (RNG.zipf(1.5, (3, 100)) % 1100, draw(1100, 40)), {}),
    *((ops.dense, (draw(3, 2, 6), draw(6, 10), draw(10), name), {}) for name in ("relu", "gelu", "gelu_tanh", "silu")),
    (ops.linear, (draw(70, 6), draw(6, 33), draw(33)), {}),
    (ops.linear, (draw(2, 3, 6), draw(9, 6).T), {}),
    *((ops.attention, (*arrays, pattern), {}) for arrays, pattern in ATTENTION),
    *((ops.relative_attention, (*arrays, pattern), {}) for arrays, pattern in RELATIVE),
]


def on_gpu(x, dtype):
    if isinstance(x, ops.Padding):
        return ops.Padding(as_array(x.lengths))
    if isinstance(x, ops.patterns.Both):
        return on_gpu(x.first, dtype) & on_gpu(x.second, dtype)
    if isinstance(x, ops.Heads):
        return ops.Heads(*(on_gpu(each, dtype) for each in x.patterns))
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
        found, cache_of_twin = (y, *as_tuple(backward(on_gpu(dy, dtype), cache))), cache
    with reference_only():
        y, cache = op(*(rounded(a, dtype) for a in args), **options)
        right = y, *as_tuple(backward(dy, cache))
    if getattr(cache_of_twin, "twin", None) and cache_of_twin.twin.adds:  # the gradients once more, added to arrays
        plus, *into = (as_array(RNG.standard_normal(f.T.shape).astype(f.dtype).T) for f in found[1:])
        into = [x if f.flags.f_contiguous else as_array(x.copy()) for x, f in zip(into, found[2:], strict=True)]
        right = *right, *(r + x.astype(np.float64) for r, x in zip(right[1:], (plus, *into), strict=True))
        sums = as_tuple(backward(on_gpu(dy, dtype), cache_of_twin, into=into, plus=plus))
        assert all(s is x for s, x in zip(sums[1:], into, strict=True))
        found = *found, *sums
    for f, r in zip(found, right, strict=True):
        assert f.dtype in (dtype, cupy_code.real(dtype)) and f.shape == np.shape(r)
        error = np.abs(f.astype(np.float64) - r).max() / max(1e-3, np.abs(r).max())
        assert error < (2e-5 if dtype == np.float32 else 3e-2), f"relative error {error:.1e}"


def compare_shares():
    for norm in 0.0, 0.5, 1.0, 4.0, np.inf, np.nan:
        with fast():
            found = optimizer.share_for(as_array(np.array(norm)), 1.0)
        assert type(found) is Array and found.dtype == np.float64 and found == optimizer.share_for(norm, 1.0)


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


MODELS = [
    (models.LanguageModel, dict(dropout=0.2)),
    (models.TransformerXL, dict(memory=7, dropout=0.2)),
    (models.SparseTransformer, dict(stride=3)),
    (models.SparseTransformer, dict(stride=3, kind="fixed", width=2, dropout=0.2)),
]


def compare_model(kind, options):
    """The gradient of a model as it is recorded: where random numbers start is in an array, and so is the factor."""
    key = Key(1)
    ids = [RNG.integers(0, 9, (2, 12)) for _ in range(2)]
    memory = [draw(2, 2, 7, 8).astype(np.float32)] * (kind is models.TransformerXL)
    starts, there = graphs.Starts(cupy), kind(9, d_model=8, heads=2, depth=2, context=12, **options)
    here = copy.deepcopy(there)
    for p in there.parameters():
        p.bind(as_array(p.data), as_array(p.grad), None)
    with fast():
        for _ in range(2):  # once to know which keys there are
            starts.put(key)
            there.zero_grad()
            loss, cache = there.loss(*map(as_array, (*ids, *memory)), key=graphs.RecordedKey(starts))
            there.loss_backward(as_array(np.array(0.25, np.float32)), cache)
    with reference_only():
        right, cache = here.loss(*ids, *memory, key=key)
        here.loss_backward(0.25, cache)
    assert (len(starts.places) > 0) == ("dropout" in options)
    np.testing.assert_allclose(loss, right, rtol=1e-5)
    for found, p in zip(there.parameters(), here.parameters(), strict=True):
        np.testing.assert_allclose(found.grad, p.grad, rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    only, *mistake = sys.argv[1:] or [None]
    if mistake:
        plant(cupy_code, *mistake)
    failed = 0
    checks = [
        (op.__name__, [dtype.name, *(getattr(a, "shape", a) for a in args)], partial(compare, op, args, options, dtype))
        for op, args, options in CASES
        for dtype in TYPES[: 1 if mistake else None]
    ]
    checks += [("adam_step", start, partial(compare_flat, TYPES[0], start)) for start in (0, 1)]
    checks.append(("pieces", "share_for", compare_shares))
    checks += [("model", kind.__name__, partial(compare_model, kind, options)) for kind, options in MODELS]
    for kind, decay, count in (Adam, 0.0, 4), (Adam, 0.3, 8), (AdamW, 0.3, 6), (Muon, 0.3, 23):
        for dtype in (TYPES[0], np.dtype(np.float64))[: 1 if kind is Muon else 2]:
            checks.append(("pieces", (kind.__name__, decay, dtype), partial(compare_pieces, kind, dtype, decay, count)))
    for shape in (6, 6), (9, 4), (3, 4, 9), (2, 40, 33), (2, 1, 9, 4):
        for precision in ("float32", "bfloat16")[: 1 if max(shape) > 9 else 2]:  # large ones differ after rounding
            checks.append(("newton_schulz", (shape, precision), partial(compare_muon, shape, precision)))
    checks = [check for check in checks if only in (None, check[0])]
    if not checks:
        sys.exit(f"{only}: there is no such case")
    if not mistake:  # which may be found by the first kernel
        compile_what_is_called(check for *_, check in checks)
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

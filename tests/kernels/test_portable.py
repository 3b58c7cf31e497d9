"""The compiled twins of `portable`: bit by bit what the definitions give, on every processor."""

import hashlib
import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops, portable
from scratchformer.dispatch import TwinCache, fast, reference_only, turned_off
from scratchformer.ops import patterns
from scratchformer.portable import PortableArray
from scratchformer.testing.contracts import as_tuple

from .bitwise import SPECIAL, expect_same_bits, numbers, strided

pytest.importorskip("numba")
if turned_off():
    pytest.skip(f"{turned_off()} keeps the twins from running", allow_module_level=True)
with fast():
    twins = pytest.importorskip("scratchformer.kernels.numba_portable")

FUNCTIONS = portable.exp, portable.log, portable.tanh, portable.erf
BLOCK = twins.DEPTH + 1
SIZES = st.sampled_from([0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 50, 64])
# Of compiled code; the last has no instruction for a fused multiply-add, which is then a call.
PROCESSORS = {
    "AVX2": ("haswell", "+avx,+avx2,+fma"),
    "SSE": ("x86-64", ""),
}


def same_bits(operation, *args):
    with fast(), np.errstate(all="ignore"):
        y, expected = operation(*args), operation.reference(*args)
    expect_same_bits(y, expected)


KINDS = st.sampled_from(["plain", "special", "subnormal", "ties"])
STRIDES = st.sampled_from(["plain", "transposed", "reversed", "cut out"])


@given(
    sizes=st.tuples(SIZES, st.one_of(SIZES, st.just(BLOCK)), SIZES),
    kinds=st.tuples(KINDS, KINDS),
    strides=st.tuples(STRIDES, STRIDES),
    stacks=st.sampled_from([((), ()), ((3,), ()), ((), (2,)), ((2, 3), (3,)), ((2, 1, 2), (1, 2, 1)), ((0,), ())]),
    seed=st.integers(0, 2**32),
)
def test_products(sizes, kinds, strides, stacks, seed):
    M, K, N = sizes
    a = strided(numbers(seed, (*stacks[0], M, K), kinds[0]), strides[0])
    b = strided(numbers(seed + 1, (*stacks[1], K, N), kinds[1]), strides[1])
    same_bits(portable.product, a, b)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("quick", [False, True])
def test_sizes_that_do_not_fit_are_an_error(rows, quick):
    a, b = np.ones((2, 3), np.float32), np.ones((rows, 5), np.float32)
    with pytest.raises(ValueError, match="b: expected 3 rows"), fast() if quick else nullcontext():
        portable.product(a, b)


@pytest.mark.parametrize(("M", "N"), [(twins.HEIGHT + 1, twins.COLUMNS), (3, twins.WIDTH + twins.COLUMNS + 1)])
def test_products_of_several_blocks(M, N):
    same_bits(portable.product, numbers(0, (M, BLOCK), "plain"), numbers(1, (BLOCK, N), "plain"))


@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 33, 70]), min_size=1, max_size=3),
    axes=st.sets(st.integers(0, 2)),
    every=st.booleans(),
    keepdims=st.booleans(),
    double=st.booleans(),
    transposed=st.booleans(),
    kind=KINDS,
    seed=st.integers(0, 2**32),
)
def test_totals(shape, axes, every, keepdims, double, transposed, kind, seed):
    x = numbers(seed, tuple(shape), kind).astype(np.float64 if double else np.float32)
    x = x.T if transposed else x
    same_bits(portable.total, x, None if every else tuple(axis for axis in axes if axis < x.ndim), keepdims)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_of_any_bits(function):
    bits = np.random.default_rng(0).integers(0, 2**32, 30_000, dtype=np.uint32).view(np.float32)
    for x in bits.reshape(3, -1).T, numbers(0, 5000, "plain"), SPECIAL.astype(np.float32), np.float32(2).reshape(()):
        same_bits(function, x)


def pattern_of(n):
    """A pattern for n keys; some queries see none of them."""
    edges = np.arange(n * n).reshape(n, n) % 5 < 3
    edges[-1] = False
    seen = patterns.Edges(edges)
    return [None, seen, patterns.Padding(np.array([0, n])), patterns.Heads(None, seen)][n % 4]


def scores(x, n):
    """Arguments of attention with n keys."""
    return x(2, 4, min(3, n), 8), x(2, 2, n, 8), x(2, 2, n, 8), pattern_of(n)


def relative_scores(x, n):
    T = min(3, n)
    return x(2, 4, T, 8), x(2, 4, n, 8), x(2, 4, n, 8), x(4, n + T - 1, 8), x(4, 8), x(4, 8), pattern_of(n)


OPERATIONS = {
    "swiglu": lambda x, n: (x(2, 3, n), x(2, 3, n)),
    "rmsnorm": lambda x, n: (x(2, 3, n), x(n)),
    "layernorm": lambda x, n: (x(2, 3, n), x(n), x(n)),
    "attention": scores,
    "relative_attention": relative_scores,
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(n=st.sampled_from([1, 2, 3, 8, 15, 16, 17, 33, 64, 70]), kind=KINDS, seed=st.integers(0, 2**32))
def test_operations(name, n, kind, seed):
    operation, backward = getattr(ops, name), getattr(ops, f"{name}_backward")

    def draw(*shape):
        nonlocal seed
        seed += 1
        return portable.portable(numbers(seed, shape, kind))

    args = OPERATIONS[name](draw, n)
    with fast(), np.errstate(all="ignore"):
        y, cache = operation(*args)
        dy = draw(*y.shape)
        results = y, *as_tuple(backward(dy, cache))
        with reference_only():
            expected, expected_cache = operation(*args)
            expected = expected, *as_tuple(backward(dy, expected_cache))
    assert type(cache) is TwinCache
    for each, other in zip(results, expected, strict=True):
        assert type(each) is type(other) is PortableArray
        expect_same_bits(each, other)


def fingerprint():
    """SHA-256 of the results of all twins for some numbers."""
    found = hashlib.sha256()
    with fast():
        for kind in "plain", "special", "subnormal", "ties":
            a, b = numbers(0, (2, 19, BLOCK), kind), numbers(1, (2, BLOCK, 37), kind)
            sums = (portable.total(a.astype(dtype), axis) for dtype in (np.float32, np.float64) for axis in (1, 2))
            products = portable.product(a, b), portable.product(b.swapaxes(1, 2), a.swapaxes(1, 2))
            for y in (*products, *sums, *(function(a) for function in FUNCTIONS)):
                found.update(np.where(np.isnan(y), 0, y).tobytes())
    return found.hexdigest()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for processors of this kind")
@pytest.mark.parametrize("instructions", PROCESSORS)
def test_the_bits_do_not_depend_on_the_instructions(instructions):
    name, features = PROCESSORS[instructions]
    if instructions == "AVX2" and twins.LANES < 8:
        pytest.skip("this processor has no AVX2")
    code = "from tests.kernels.test_portable import fingerprint; print(fingerprint())"
    changed = dict(NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features, PYTHONPATH=str(Path(__file__).parents[2]))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | changed, check=True, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip() == fingerprint()

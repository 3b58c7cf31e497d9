"""Portable arrays on a GPU have the bits of those on a CPU. test_cupy.py runs these checks on a GPU, and
on_cpu/portable_arrays.py without one.
"""

import io
import itertools
import re
import tempfile
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from scratchformer import portable
from scratchformer.backend import CPU, device_of, to_cpu, to_device
from scratchformer.catalogue import LAYERS, OPERATIONS
from scratchformer.dispatch import reference_only
from scratchformer.generation import generate
from scratchformer.models import LanguageModel, Llama, TransformerXL
from scratchformer.optim import Adam, AdamW, Muon
from scratchformer.portable import PortableKey
from scratchformer.training import Replicas, evaluate_language_model

from .. import test_portable
from .bitwise import SPECIAL, expect_same_bits, numbers, strided

KINDS = "plain", "special", "subnormal", "ties"
STRIDES = "plain", "transposed", "reversed", "cut out"
STACKS = ((), ()), ((3,), ()), ((), (2,)), ((2, 3), (3,)), ((2, 1, 2), (1, 2, 1)), ((0,), ())


def portable_device(gpu):
    """The device whose arrays are the portable ones of a GPU."""
    return device_of(portable.portable(gpu.xp.zeros(1)))


def compare(gpu, function, *args):
    """Compare function(*args) of portable arrays on the GPU with that on the CPU."""
    device = portable_device(gpu)
    here = function(*(portable.portable(x) if isinstance(x, np.ndarray) else x for x in args))
    there = function(*(to_device(x, device) if isinstance(x, np.ndarray) else x for x in args))
    expect_same_arrays(*(each if isinstance(each, list | tuple) else [each] for each in (there, here)))


def expect_same_arrays(there, here):
    for x, y in zip(there, here, strict=True):
        assert portable.is_portable(x) and device_of(x) is not CPU
        expect_same_bits(np.ascontiguousarray(to_cpu(x)), np.ascontiguousarray(y))


def compare_products(gpu):
    sizes = itertools.cycle([0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 65, 130])
    for a_kind, b_kind, a_how, b_how in itertools.product(KINDS, KINDS, STRIDES, STRIDES):
        M, K, N = (next(sizes) for _ in range(3))
        stack_a, stack_b = STACKS[(M + K + N + len(a_how)) % len(STACKS)]
        a = strided(numbers(M, (*stack_a, M, K), a_kind), a_how)
        compare(gpu, np.matmul, a, strided(numbers(N, (*stack_b, K, N), b_kind), b_how))
        next(sizes)  # the fourth of 13, so that M, K and N each take every size
    from scratchformer.kernels import cupy_portable  # here, since it needs CuPy

    with patch.object(cupy_portable, "STACKS", 2):  # fewer blocks than pairs of matrices
        compare(gpu, np.matmul, numbers(0, (5, 17, 33), "plain"), numbers(1, (5, 33, 18), "plain"))


def compare_sums(gpu):
    for shape in (7,), (1, 33), (3, 70, 2), (5, 2, 40), (2, 0, 3), (1030,), (70_001,):
        for kind, dtype in itertools.product(KINDS, (np.float32, np.float64)):
            x = numbers(len(shape), shape, kind).astype(dtype)
            for axis in (None, 0, -1, *[(0, -1), ()][: 2 * (x.ndim > 1)]):
                compare(gpu, lambda x, axis=axis: np.sum(x, axis), x)
                compare(gpu, lambda x, axis=axis: x.T.mean(axis, keepdims=True), x)


def compare_functions(gpu):
    bits = np.random.default_rng(0).integers(0, 2**32, 30_000, dtype=np.uint32).view(np.float32)
    for function in test_portable.FUNCTIONS:
        for x in bits.reshape(3, -1).T, numbers(0, 5000, "plain"), SPECIAL.astype(np.float32), np.array(2, np.float32):
            compare(gpu, function, x)


def compare_exact(gpu):
    """All exact functions for pairs of numbers, also with a Python number, and functions that compare or convert."""
    x, y = (a.reshape(-1).astype(np.float32) for a in np.meshgrid(SPECIAL, SPECIAL))
    x, y = (np.concatenate([a, *(numbers(seed, 200, kind) for kind in KINDS)]) for seed, a in enumerate((x, y)))
    for ufunc in (*portable.EXACT, np.maximum, np.minimum):
        compare(gpu, ufunc, *((x, y) if ufunc.nin == 2 else (x,)))
        compare(gpu, ufunc, *((x, y.astype(np.float64)) if ufunc.nin == 2 else (x.astype(np.float64),)))
    compare(gpu, lambda x: [0.1 * x, x / 3, 1 - x, x < 1e-40, x * np.float32(0.1), x * np.float64(0.1), x > 0], x)
    for ufunc in np.add, np.maximum, np.minimum:
        compare(gpu, lambda x, ufunc=ufunc: [ufunc.reduce(x), ufunc.reduce(x > 0)][: 1 + (ufunc is np.add)], x)
    for dtype in (np.float64, bool):
        compare(gpu, lambda x, dtype=dtype: x.astype(dtype), x)
    compare(gpu, lambda x: x.astype(np.float32), x.astype(np.float64) * 2.0**-140)
    table = x[: 30 * (x.size // 30)].reshape(-1, 5, 6)
    for name in "all any argmax argmin max min".split():
        compare(
            gpu, lambda x, name=name: [getattr(x, name)(), getattr(x, name)(axis=1), getattr(np, name)(x, -1)], table
        )
    compare(
        gpu, lambda x, y: [np.where(x < y, x, 0), np.concatenate([x, y]), x.clip(-1, y), np.stack([x, y])[:, ::2]], x, y
    )
    compare(
        gpu, lambda x: [(x > 0).mean(), (x > 0).sum(), np.cumsum(x > 0), np.nonzero(x)[0], np.where(x > 0, x, np.pi)], x
    )
    compare(gpu, lambda x: [np.where(x, x, 2), np.where(x)[0], np.where(x.astype(np.float64), x, 2)], x)
    compare(gpu, lambda x, y: [np.where(x > 0, x, y), np.where(x > 0, x, np.float64(1))], x, x.astype(np.float64) / 3)
    compare(gpu, lambda x: x[:1] * (int(np.count_nonzero(x)) + bool(np.array_equal(x, x))), x)


def compare_assignments(gpu):
    """Assignments to an array and to parts of it."""

    def change(x, y, ids):
        x = x.copy()
        x += y
        x[1:3] *= 0.3
        x[0] = y[1].astype(np.float64)
        np.add.at(x, ids, y[: len(ids)])
        np.add.at(x[:, 1:], ids, y[: len(ids), 1:])
        np.add.at(x[:, 0], ids, y[: len(ids), 0])
        np.divide(x, y, out=x, where=y > 1)
        return x

    for kind in KINDS:
        compare(gpu, change, numbers(0, (9, 7), kind), numbers(1, (9, 7), kind), np.array([3, 0, -6, 8, 3, -9]))


def compare_refusals(gpu):
    """What is refused on a CPU is refused on a GPU, and so are additions to rows that are not given one by one."""
    device = portable_device(gpu)
    for call in test_portable.REFUSED:
        for x in portable.portable(np.ones((2, 2), np.float32)), to_device(np.ones((2, 2), np.float32), device):
            with pytest.raises(TypeError, match=test_portable.REFUSAL):
                call(x)
    table, rows, ids = (to_device(x, device) for x in (np.ones((4, 2), np.float32), np.ones((3, 2)), np.arange(3)))
    others = (ids[0], rows[0]), (ids.reshape(3, 1), rows), (ids > 0, rows), (2, rows)
    for wrong in (ids, rows[0]), (ids, rows[:, :1]), (ids, 1.0), *others:
        with pytest.raises(TypeError, match=test_portable.REFUSAL):
            np.add.at(table, *wrong)
    assert (table == 1).all()


def compare_case(gpu, function, name):
    device = portable_device(gpu)
    expect_same_arrays(function(name, partial(to_device, device=device), device), function(name, portable.portable))


def compare_cases(gpu):
    for function, names in (test_portable.of_operation, OPERATIONS), (test_portable.of_layer, LAYERS):
        for name in names:
            if name != "BidirectionalLanguageModel":  # its dy has another form
                compare_case(gpu, function, name)
    with reference_only():  # without the twins here
        for name in "attention", "layernorm":
            compare_case(gpu, test_portable.of_operation, name)


def compare_training(gpu):
    sizes = dict(d_model=12, heads=2, depth=1, context=8, dropout=0.1, key=PortableKey(0))
    kinds = (LanguageModel, Adam, 10), (Llama, Muon, 3), (partial(TransformerXL, memory=8), AdamW, 3)
    for kind, optimizer, steps in kinds:
        hashes = []
        for device in "cpu", gpu:
            model = kind(31, **sizes).to(device).make_portable()
            results = test_portable.trained(model, optimizer(model.parameters(), 0.01), steps, count=1)
            hashes.append(test_portable.digest_of(results))
        assert portable.is_portable(results[0]) and device_of(results[0]) is not CPU
        assert hashes[0] == hashes[1], kind


def compare_texts(gpu):
    """What a model appends to a text, and its scores."""
    text = (np.arange(300) ** 2 % 31).astype(np.uint8)
    for kind in LanguageModel, Llama:
        found = []
        for device in CPU, gpu:
            model = kind(31, d_model=12, heads=2, depth=1, context=8, key=PortableKey(0)).to(device).make_portable()
            with Replicas(model, count=1) as replicas:
                scores = evaluate_language_model(replicas, text)
            tokens = np.concatenate([*generate(model, text[None, :3], 5, key=PortableKey(3))])
            found.append((scores, tokens.tolist()))
        assert found[0] == found[1], found


def compare_runs(gpu):
    """A run on one device is resumed on the other."""
    whole = None
    with tempfile.TemporaryDirectory() as folder:
        for out, device, steps, options in (
            ("whole", CPU, 4, {}),
            ("here", CPU, 2, {}),
            ("here", gpu, 4, dict(resume=True)),
            ("there", gpu, 2, {}),
            ("there", CPU, 4, dict(resume=True)),
        ):
            with redirect_stdout(io.StringIO()) as printed:
                test_portable.run_of(Path(folder, out), steps, device=device, **options)
            (found,) = re.findall(f"SHA-256 of the parameters after step {steps}: (.*)", printed.getvalue())
            whole = whole or found
            assert steps == 2 or found == whole, (out, device)


CHECKS = {
    "kernels": [compare_products, compare_sums, compare_functions, compare_exact, compare_assignments],
    "refusals": [compare_refusals],
    "operations": [compare_cases],
    "training": [compare_training, compare_texts, compare_runs],
}

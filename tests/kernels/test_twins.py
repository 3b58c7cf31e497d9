"""Every twin compared with its reference, at all scales, on shapes that need several tiles and pieces.

The cases are those of `scratchformer.catalogue` and, for the twins' own derivations, of
`scratchformer.catalogue`. Without `scratchformer/kernels` there is nothing to test here.
"""

import inspect
import sys
import tracemalloc
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.catalogue import OPERATIONS, Draw, derivations
from scratchformer.catalogue.check import check_operation
from scratchformer.dispatch import fast, reference_only, twins_of
from scratchformer.notation import check_derivation
from scratchformer.notation.layout import normal
from scratchformer.notation.run import statements
from scratchformer.ops import patterns
from scratchformer.optim import adam
from scratchformer.testing import check_precision
from scratchformer.testing.contracts import as_tuple, is_array, is_floating
from scratchformer.testing.strategies import SCALES, arrays

MADE = "scratchformer.compiler.twins"
KINDS = {"numpy": nullcontext} | ({"numba": fast} if find_spec("numba") and find_spec("scratchformer.kernels") else {})
for kind in KINDS.values():
    with kind():  # registers the fast twins
        pass


def twins(op, kind):
    """Those that run inside KINDS[kind]."""
    found = twins_of(op, fast=kind != "numpy") if type(getattr(op, "chosen", None)) is tuple else ()
    return [twin for twin in found if not twin.forward.__module__.endswith(".numpy_half")]  # see test_half.py


def by_hand(op, kind):
    """Those that are not made from the derivation of the operation."""
    return [twin for twin in twins(op, kind) if not twin.forward.__module__.startswith("scratchformer.compiler.")]


def runs(case, kind):
    """Whether one of them takes the arguments of a case."""
    return any(twin.fits(*case.args, **case.options) for twin in twins(case.op, kind))


TWINS = [(kind, name) for kind in KINDS for name in OPERATIONS if runs(OPERATIONS[name](Draw()), kind)]
MODULES = [module for name, module in sys.modules.items() if name.startswith("scratchformer.")]
FORWARDS = {(f.__name__, kind) for kind in KINDS for m in MODULES for f in list(vars(m).values()) if by_hand(f, kind)}
DERIVED = [name for name in derivations.CASES if "." in name and FORWARDS]


@contextmanager
def pieces(small):
    """Tiles and pieces of the usual size, or so small that every loop runs several times and heads are split."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            attention = pytest.importorskip("scratchformer.kernels.numpy_attention")
            for module in (patterns, attention):
                patch.setattr(module, "SIDE", 2)
            patch.setattr(attention, "WIDTH", 3)
            patch.setattr(attention, "TILE", 8)
            patch.setattr(attention, "kept_groups", attention.kept_groups.__wrapped__)  # the kept ones are larger
        yield


def run(case, args, dy=None):
    """The cache, and y and the gradients."""
    y, cache = case.op(*args, **case.options)
    dy = np.random.default_rng(0).standard_normal(np.shape(y)).astype(y.dtype) if dy is None else dy
    return cache, (y, *as_tuple(case.op_backward(dy, cache)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("kind", "name"), TWINS)
def test_the_twin_agrees_with_the_reference(kind, name, dtype, combinations):
    for drawn in combinations(4, scale=SCALES, small=[False, True]):
        expect_what_the_reference_gives(kind, name, dtype, **drawn)


def expect_what_the_reference_gives(kind, name, dtype, scale, small, seed):
    case = OPERATIONS[name](Draw(seed, scale, largest=17))
    args = [x.astype(dtype) if is_array(x) and is_floating(x) else x for x in case.args]
    with pieces(small), KINDS[kind]():
        cache, found = run(case, args)
    with reference_only():
        _, plain = run(case, args)
    backward = cache.twin.backward
    twin = "numba" if backward.__module__ == MADE else backward.__module__.rpartition(".")[2]
    assert twin.startswith(kind) or "attention" in name, "it did not run"  # attention leaves some patterns to NumPy's
    largest = max(np.abs(a).max() for a in plain)
    for f, p in zip(found, plain, strict=True):
        assert f.shape == p.shape and f.dtype == p.dtype == dtype
        tolerance = 1e-12 if dtype == np.float64 else 1e-5
        if "attention" in name:  # scores of size |z| lose |z| eps before they are exponents
            tolerance *= max(1, scale**2)
        np.testing.assert_allclose(f, p, rtol=0, atol=tolerance * max(np.abs(p).max(), 0.1 * largest))


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "name"), TWINS)
def test_gradients(kind, name, combinations, thorough):
    """Central differences and the contract of a pair, for the twin with several tiles and pieces."""
    for drawn in combinations(2, scale=SCALES, small=[False, True] if thorough else [True]):
        with pieces(drawn["small"]), KINDS[kind]():
            check_operation(name, Draw(drawn["seed"], drawn["scale"]), max_elements=20 if thorough else 4)


@pytest.mark.skipif(not TWINS, reason="no kernels")
def test_every_twin_has_a_derivation():
    derived = {tuple(name.partition(",")[0].split(".")) for name in DERIVED} - {("scores_by_place", "numpy")}  # a part
    assert derived <= FORWARDS
    rounded = ("newton_schulz",)  # the reference's, with other factors in half precision: see test_muon.py
    # These have no gradient: see test_numba_neighbours.py and test_quantized.py.
    searched = ("nearest_keys", "quantized_linear")
    exact = ("product", "total", "exp", "log", "tanh", "erf")  # these give the reference's bits: see test_portable.py
    generating = {(f"extend_{name}", kind) for name in ("block", "decoder_block", "output") for kind in KINDS}
    without = {(name, "numba") for name in ("attention", *rounded, *searched, *exact)}
    assert FORWARDS - derived <= without | generating  # of the latter see test_extend.py and test_decoder.py


@pytest.mark.parametrize("name", DERIVED)
@settings(max_examples=max(4, settings.default.max_examples // 6))
@given(st.integers(0, 2**32 - 1), st.sampled_from(SCALES), st.booleans())
def test_the_derivation_is_true(name, seed, scale, small):
    """Of every twin. With several tiles or pieces, lines of code are left out: their variables hold a part only."""
    case = derivations.CASES[name](derivations.Sizes(seed, scale))
    text = inspect.getdoc(case.op)
    if small:
        code = {s.text for f in (case.op, case.op_backward) if f for s in statements(f)}
        text = "\n".join(line for line in text.splitlines() if normal(line) not in code)
    with pieces(small):
        report = check_derivation(
            case.op, case.op_backward, *case.args, names=case.names, docstring=text, **case.options
        )
    assert report.worst < 1e-9
    assert small or {row.kind for row in report.rows} >= {"compared", "code"}


@pytest.mark.parametrize(("kind", "name"), TWINS)
def test_other_types_are_left_to_the_reference(kind, name):
    """Arrays of two types give what the reference gives."""
    case = OPERATIONS[name](Draw(5))
    floating = [i for i, x in enumerate(case.args) if is_array(x) and is_floating(x)]
    for first in (np.float16, np.float32) if len(floating) > 1 else ():
        dtypes = [first] + [np.float64] * (len(floating) - 1)
        args = list(case.args)
        for i, dtype in zip(floating, dtypes, strict=True):
            args[i] = args[i].astype(dtype)
        with KINDS[kind]():
            _, found = run(case, args)
            reference = case._replace(op=case.op.reference, op_backward=case.op_backward.reference)
            _, plain = run(reference, args)  # which may call operations that have twins
        for f, p in zip(found, plain, strict=True):
            assert f.dtype == p.dtype
            np.testing.assert_array_equal(f, p)


@pytest.mark.parametrize("name", [name for kind, name in TWINS if kind == "numba" and "attention" not in name])
def test_bfloat16_is_within_its_bounds(name):
    """Those of `check_precision`; the gradients of parameters, which are float32, are rounded for it."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

    def rounded(dy, cache):
        return tuple(g.astype(bfloat16) for g in as_tuple(case.op_backward(dy, cache)))

    for seed, scale in enumerate([0.1, 1.0, 10.0]):
        case = OPERATIONS[name](Draw(seed, scale))
        with fast():
            check_precision(case.op, rounded, *case.args, dtype=bfloat16, seed=seed, **case.options)


@pytest.mark.parametrize("kind", KINDS)
@given(arrays("4 N", scales=(1e-3, 1.0)), st.sampled_from([np.float32, np.float64]), st.integers(1, 3))
def test_adam(kind, drawn, dtype, steps):
    """w, m and v change in the same way, and g does not change."""
    start = [*drawn[:3], drawn[3] ** 2]
    found, plain = ([a.astype(dtype) for a in start] for _ in range(2))
    for t in range(1, steps + 1):
        with KINDS[kind]():
            adam.adam_step(*found, 1e-2, 0.9, 0.999, 1e-8, t)
        with reference_only():
            adam.adam_step(*plain, 1e-2, 0.9, 0.999, 1e-8, t)
    for f, p in zip(found, plain, strict=True):
        assert f.dtype == dtype
        np.testing.assert_allclose(f, p, rtol=0 if kind == "numba" else 1e-5 if dtype == np.float32 else 1e-12)
    assert np.array_equal(found[1], start[1].astype(dtype))


def test_what_a_query_may_not_see_does_not_change_its_last_bit():
    """Large scores in another head or sequence, or in the padding, lead to another computation of the same number."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 6, 4)).astype(np.float32) for _ in range(3))
    y, _ = ops.attention(q, k, v, ops.Causal())
    k[:, :, 3:] *= 1e3
    k[1] *= 1e3
    q[:, 1] *= 1e3
    y2, _ = ops.attention(q, k, v, ops.Causal())
    assert np.array_equal(y[0, 0, :3], y2[0, 0, :3])


@pytest.mark.parametrize(
    "pattern",
    [
        None,
        ops.Causal(),
        ops.Causal() & ops.Local(16),
        ops.Strided(32),
        ops.Causal() & ops.Heads(ops.SameBlock(64) | ops.BlockEnds(64, 4)),
    ],
    ids=str,
)
@pytest.mark.skipif(not TWINS, reason="no kernels")
def test_attention_takes_memory_linear_in_the_length(pattern):
    """Forward and backward of 4,096 positions need only a few (T, D) arrays and tiles; (T, T) takes 64 MiB."""
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((1, 1, 4096, 8)).astype(np.float32) for _ in range(4))
    tracemalloc.start()
    try:
        _, cache = ops.attention(q, k, v, pattern)
        ops.attention_backward(dy, cache)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20


@pytest.mark.skipif(not TWINS, reason="no kernels")
def test_relative_attention_takes_memory_linear_in_the_length():
    """As above, with the vectors of 8,191 distances and their gradient."""
    rng = np.random.default_rng(0)
    shapes = [*[(1, 1, 4096, 8)] * 3, (1, 8191, 8), (1, 8), (1, 8)]
    arrays, dy = [rng.standard_normal(shape).astype(np.float32) for shape in shapes], np.ones(shapes[0], np.float32)
    tracemalloc.start()
    try:
        _, cache = ops.relative_attention(*arrays, ops.Causal())
        ops.relative_attention_backward(dy, cache)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20


@pytest.mark.skipif(not TWINS, reason="no kernels")
def test_pieces_whose_rows_and_columns_have_different_steps_are_left_to_the_reference():
    """Their distances are not evenly spaced: queries 0, 1, 2, ... with every second key."""

    class EverySecondKey(ops.Pattern):
        def mask(self, b, rows, columns, T, S, xp):
            return patterns.numbers(columns, xp) % 2 == 0

        def pieces(self, b, T, S, xp):
            yield patterns.Piece(slice(0, T), slice(0, S, 2), None)

    case = OPERATIONS["relative_attention"](Draw(1))
    y, cache = ops.relative_attention(*case.args[:-1], EverySecondKey())
    expected, plain_cache = ops.relative_attention.reference(*case.args[:-1], EverySecondKey())
    assert type(cache) is type(plain_cache) and np.array_equal(y, expected)


def test_the_steps_of_every_sequence_are_checked():
    """Only the second is long enough for pieces whose rows and columns have different steps."""
    T, draw = 100, np.random.default_rng(0)
    q, k, v = draw.standard_normal((3, 2, 2, T, 4))
    arguments = q, k, v, draw.standard_normal((2, 2 * T - 1, 4)), *draw.standard_normal((2, 2, 4))
    pattern = ops.BlockEnds(8, 1) & ops.Padding(np.array([1, T]))
    y, cache = ops.relative_attention(*arguments, pattern)
    expected, plain_cache = ops.relative_attention.reference(*arguments, pattern)
    assert type(cache) is type(plain_cache) and np.array_equal(y, expected)


@pytest.mark.parametrize("pattern", [ops.Full() | ops.Padding(np.array([3, 6])), ops.Padding(np.array([3, 6]))])
def test_a_union_with_all_is_all(pattern):
    q = np.random.default_rng(0).standard_normal((2, 2, 6, 4))
    y, _ = ops.attention(q, q, q, pattern)
    np.testing.assert_allclose(y, ops.attention.reference(q, q, q, pattern)[0], rtol=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("C", [96, 768])
def test_layer_norm_of_a_constant_row_is_beta(C, size):
    gamma, beta = np.full(C, 2, np.float32), np.arange(C, dtype=np.float32)
    y, _ = ops.layernorm(np.full((3, C), size, np.float32), gamma, beta)
    np.testing.assert_allclose(y, np.tile(beta, (3, 1)), atol=1e-6)


@pytest.mark.parametrize("lengths", [[3], [3, 3, 3]])
def test_padding_of_another_number_of_sequences_is_refused(lengths):
    q = np.ones((2, 2, 4, 3))
    pattern = ops.Causal() & ops.Padding(np.array(lengths))
    for run in (ops.attention, ops.attention.reference):
        with pytest.raises(ValueError, match=r"lengths: expected \(2\)"):
            run(q, q, q, pattern)


@pytest.mark.skipif(not TWINS, reason="no kernels")
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_backward_has_the_probabilities_of_forward(small, relative):
    """With nearly equal scores near 10¹⁰, probabilities depend only on the last digits; y and dv show them.

    With v = 1 forward gives y = p, and with dy = 1 backward gives dv = pᵀ.
    """
    n, draw = 6, np.random.default_rng(0)
    one = np.eye(n)[None, None]
    q = 1e5 * draw.standard_normal((1, 1, n, n))
    k = 1e5 * draw.standard_normal(n) + 1e-5 * draw.standard_normal((1, 1, n, n))
    with pieces(small):
        if relative:
            biases = np.zeros((2, 1, n))
            p, cache = ops.relative_attention(q, k, one, draw.standard_normal((1, 2 * n - 1, n)) * 1e-5, *biases)
            _, _, dv, *_ = ops.relative_attention_backward(one, cache)
        else:
            p, cache = ops.attention(q, k, one)
            _, _, dv = ops.attention_backward(one, cache)
    assert 0.01 < p.max(axis=-1).min() < 0.99  # in some rows, more than one probability counts
    np.testing.assert_allclose(dv, p.swapaxes(-1, -2), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_were_changed_after_forward_are_checked_again(kind):
    """They may not change; but compiled code must not write outside an array."""
    ids = np.array([0, 2, 1])
    with KINDS[kind]():
        y, cache = ops.embedding(ids, np.ones((3, 4), np.float32))
        ids[1] = 10**9
        with pytest.raises((IndexError, ValueError)):
            ops.embedding_backward(y, cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_of_one_number_is_refused(kind):
    with KINDS[kind](), pytest.raises(ValueError, match=r"^b: expected \(32\), got \(1,\)"):
        ops.linear(np.ones((2, 32), np.float32), np.ones((32, 32), np.float32), np.ones(1, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_without_axes_are_left_to_the_reference(kind):
    x = np.array(1.0)
    with KINDS[kind](), pytest.raises((IndexError, ValueError), match="expected"):
        ops.rmsnorm(x, x)


def test_the_norm_of_a_constant_row():
    """Divisions are not estimated: the mean of equal numbers is that number."""
    pytest.importorskip("numba")
    x, gamma = np.full((1, 7), 6e4, np.float32), np.ones(7, np.float32)
    with fast():
        np.testing.assert_array_equal(ops.layernorm(x, gamma, 0 * gamma)[0], 0)

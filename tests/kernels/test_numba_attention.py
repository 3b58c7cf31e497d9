"""Compiled attention: against the reference in float64, its gradients and derivation, and from several threads."""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("numba")
ml_dtypes = pytest.importorskip("ml_dtypes")

from scratchformer import ops  # noqa: E402
from scratchformer.catalogue import derivations  # noqa: E402
from scratchformer.dispatch import fast, reference_only  # noqa: E402
from scratchformer.notation.layout import normal  # noqa: E402
from scratchformer.testing import check_gradients  # noqa: E402
from scratchformer.testing.strategies import SCALES  # noqa: E402

with fast():
    compiled = pytest.importorskip("scratchformer.kernels.numba_attention")
    numba_amx = pytest.importorskip("scratchformer.kernels.numba_amx")

UNIT = {np.float32: 2.0**-24, ml_dtypes.bfloat16: 2.0**-9}  # half the distance from 1 to the next


def run(arrays, pattern, dy):
    y, cache = ops.attention(*arrays, pattern)
    return cache, (y, *ops.attention_backward(dy, cache))


def drawn(draw, dtype, scale, largest):
    """q, k, v and dy, of memory in several orders, and a pattern that leaves some queries without a key."""
    B, G, shared = (int(n) for n in draw.integers(1, 4, 3))
    T, S = (int(n) for n in draw.integers(2, largest, 2))
    D = int(draw.choice([3, 8, 16, 32, 40]))
    lengths = draw.integers(0, S + 1, B)
    pattern = draw.choice(
        np.array(
            [
                None,
                ops.Causal(),
                ops.Local(int(draw.integers(0, S))),
                ops.Padding(lengths),
                ops.Causal() & ops.Padding(lengths),
                ops.Causal() & ops.Local(3) & ops.Full(),
            ],
            dtype=object,
        )
    )
    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)]
    arrays = []
    for heads, length in ((G * shared, T), (G, S), (G, S), (G * shared, T)):
        order = orders[draw.integers(3)]
        shape = np.array([B, heads, length, D])
        x = draw.standard_normal(shape[list(order)]).astype(dtype).transpose(np.argsort(order))
        arrays.append(x)
    arrays[0] = (arrays[0] * dtype(scale)).astype(dtype)
    return arrays, pattern


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("dtype", UNIT, ids=lambda dtype: dtype.__name__)
def test_it_gives_what_the_reference_gives_in_float64(dtype, amx, combinations, monkeypatch):
    """Up to the rounding of the results and, in half precision, of the y from which the backward takes δ."""
    if amx and not (dtype is ml_dtypes.bfloat16 and numba_amx.available()):
        pytest.skip("for bfloat16, on processors with AMX")
    if amx:
        monkeypatch.setattr(numba_amx, "FEW", 0)
    else:
        monkeypatch.setattr(numba_amx, "available", lambda: False)
    for case in combinations(12, scale=(1e-3, 1.0, 30.0), largest=(20, 150)):
        (*arrays, dy), pattern = drawn(np.random.default_rng(case["seed"]), dtype, case["scale"], case["largest"])
        with fast():
            cache, found = run(arrays, pattern, dy)
        tiles = amx and numba_amx.fits(*arrays[:2])
        assert cache.twin.backward is compiled.attention_backward and cache.kept[-1] == tiles
        with reference_only():
            _, expected = run([x.astype(np.float64) for x in arrays], pattern, dy.astype(np.float64))
        sizes = [np.abs(x).max(initial=0) for x in (*arrays, dy)]
        terms = [1, sizes[1] * sizes[3], sizes[0] * sizes[3], sizes[3]]  # of y/v, dq, dk, dv: what sums are made of
        for one, reference, term in zip(found, expected, terms, strict=True):
            assert one.dtype == dtype and one.shape == reference.shape
            bound = UNIT[dtype] * 16 * max(1, case["scale"]) * max(np.abs(reference).max(), term)
            assert np.abs(one.astype(np.float64) - reference).max() <= bound


@pytest.mark.skipif(not numba_amx.available(), reason="for processors with AMX")
@pytest.mark.parametrize(("T", "S", "tiles"), [(32, 64, True), (130, 128, True), (32, 20, False), (100, 128, False)])
def test_short_sequences_that_would_have_to_be_filled_up_do_not_go_through_tiles(T, S, tiles):
    q, k = (np.zeros((1, 1, length, 32), ml_dtypes.bfloat16) for length in (T, S))
    with fast():
        _, cache = ops.attention(q, k, k)
    assert cache.twin.backward is compiled.attention_backward and cache.kept[-1] == tiles


def test_gradients(combinations):
    for case in combinations(3, scale=SCALES, largest=(5, 90)):
        (*arrays, _), pattern = drawn(np.random.default_rng(case["seed"]), np.float64, case["scale"], case["largest"])
        with fast():
            check_gradients(ops.attention, ops.attention_backward, *arrays, pattern, max_elements=4, seed=case["seed"])


def test_the_derivation_is_true():
    for seed in range(4):
        assert derivations.check("attention.numba", seed, SCALES[seed % len(SCALES)]).worst < 1e-9


def test_the_loops_have_the_equations_of_the_derivation():
    equations = normal(inspect.getdoc(compiled.attention))
    for loops in (compiled.forward, compiled.backward):
        comments = re.findall(r"^ *# (.*[^ ] :?= .*)$", inspect.getsource(loops.py_func), re.MULTILINE)
        assert len(comments) > 4
        for comment in comments:
            assert normal(comment) in equations


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_threads_give_the_bits_of_one(dtype):
    rng = np.random.default_rng(0)
    q, k, v, dy = rng.standard_normal((4, 2, 4, 200, 16)).astype(dtype)
    with fast():
        _, alone = run((q, k, v), ops.Causal(), dy)
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(run, (q, k, v), ops.Causal(), dy) for _ in range(16)]:
                for a, b in zip(alone, future.result()[1], strict=True):
                    assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_key_reaches_only_queries_that_may_see_it(dtype):
    rng = np.random.default_rng(0)
    q, k, v, dy = rng.standard_normal((4, 1, 2, 130, 16)).astype(dtype)
    with fast():
        _, (y, dq, _, _) = run((q, k, v), ops.Causal(), dy)
        k[0, 1, 70, :] = 50
        _, (y2, dq2, _, _) = run((q, k, v), ops.Causal(), dy)
    for a, b in ((y, y2), (dq, dq2)):
        assert np.array_equal(a[0, 0], b[0, 0]) and np.array_equal(a[0, 1, :70], b[0, 1, :70])


@pytest.mark.parametrize("pattern", [ops.Strided(2), ops.Causal() | ops.Local(1), ops.Heads(ops.Causal(), ops.Full())])
def test_other_patterns_are_left_to_the_numpy_twin(pattern):
    q = np.random.default_rng(0).standard_normal((1, 2, 9, 16)).astype(np.float32)
    with fast():
        y, cache = ops.attention(q, q, q, pattern)
    assert cache.twin.forward.__module__.endswith(".numpy_attention")
    np.testing.assert_allclose(y, ops.attention.reference(q, q, q, pattern)[0], atol=1e-5)


def test_powers_of_two():
    """To 2⁻²² of the value; 0 for what float32 cannot hold; NaN stays."""
    from scratchformer.kernels import numba_vectors as vectors

    @vectors.vectorised
    def powers(x, y):
        for i in range(0, len(x), vectors.LANES):
            vectors.store(y, (i,), vectors.exp2(vectors.load(x, (i,))))

    x = np.concatenate([np.linspace(-126, 0, 1 << 16), np.linspace(-1, 0, 1 << 16)]).astype(np.float32)
    y = np.empty_like(x)
    powers(x, y)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(y / exact - 1).max() < 2.0**-22
    far = np.full(2 * vectors.LANES, -np.inf, np.float32)
    far[:4] = -127, -1e30, np.nan, 0
    y = np.empty_like(far)
    powers(far, y)
    assert y[0] == y[1] == y[-1] == 0 and np.isnan(y[2]) and y[3] == 1


def test_bfloat16_is_rounded_to_nearest_even():
    from scratchformer.kernels import numba_vectors as vectors

    @vectors.vectorised
    def copy(x, y):
        for i in range(0, len(x), vectors.LANES):
            vectors.store(y, (i,), vectors.load(x, (i,)))

    x = np.random.default_rng(0).integers(0, 1 << 32, 1 << 14, dtype=np.uint32).view(np.float32)
    x[:2] = 1 + 2.0**-8, 1 + 3 * 2.0**-8  # halfway between two neighbours
    bits, back = np.empty(x.shape, np.uint16), np.empty_like(x)
    copy(x, bits)
    with np.errstate(invalid="ignore"):
        rounded, expected = (
            y.astype(np.float32) for y in (bits.view(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16))
        )
    np.testing.assert_array_equal(rounded, expected)
    copy(bits, back)
    np.testing.assert_array_equal(back, rounded)


def test_intervals_in_any_order_of_memory():
    class Given(ops.Pattern):
        def __init__(self, begin, end):
            self.begin, self.end = begin, end

        def intervals(self, T, S, xp):
            return self.begin, self.end

    draw = np.random.default_rng(0)
    q, dy = draw.standard_normal((2, 3, 1, 32, 16)).astype(np.float32)
    end = draw.integers(1, 33, (3, 32))
    with fast():
        first, second = (
            run((q, q, q), Given(order(0 * end), order(end)), dy)[1]
            for order in (np.ascontiguousarray, np.asfortranarray)
        )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)

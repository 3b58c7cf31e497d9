"""Large scores, masked numbers and rows far from 0, in attention, layer norm and their twins."""

from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.dispatch import fast, reference_only
from scratchformer.testing.contracts import as_tuple, is_array, is_floating

KINDS = {"reference": reference_only}
if find_spec("scratchformer.kernels"):
    KINDS["numpy"] = nullcontext
    if find_spec("numba"):
        KINDS["numba"] = fast
ATTENTION = [name for name in OPERATIONS if OPERATIONS[name](Draw()).op.__name__ in ("attention", "relative_attention")]
LARGE = [0.0, 1.0, 2.0, 4.0, 5.7, 8.6, 9.0, 12.0]  # powers of 10: the size of scores


@pytest.fixture(autouse=True, params=KINDS)
def kind(request):
    with KINDS[request.param](), np.errstate(all="ignore"):
        yield request.param


@contextmanager
def tiles(small):
    """NumPy's tiles of the usual size, or small ones."""
    with pytest.MonkeyPatch.context() as patch:
        if small and find_spec("scratchformer.kernels"):
            from scratchformer.kernels import numpy_attention

            for name, size in {"SIDE": 2, "WIDTH": 3, "TILE": 8}.items():
                patch.setattr(numpy_attention, name, size)
            patch.setattr(numpy_attention, "kept_groups", numpy_attention.kept_groups.__wrapped__)
            patch.setattr(ops.patterns, "SIDE", 2)
        yield


def drawn(name, seed, small, dtype=np.float32):
    """The case and its arguments, of more queries and keys than a vector holds now and then."""
    case = OPERATIONS[name](Draw(seed, 1.0, largest=6 if small else (4, 9, 20)[seed % 3]))
    return case, [x.astype(dtype) if is_array(x) and is_floating(x) else x for x in case.args]


def run(case, args, dy=None, small=False):
    with tiles(small):
        y, cache = case.op(*args, **case.options)
        dy = np.ones_like(y) if dy is None else dy
        return (y, *as_tuple(case.op_backward(dy, cache)))


def seen(case, args):
    """(B, H, T, S): which query may see which key."""
    q, k, pattern = args[0], args[1], args[-1]
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    table = None if pattern is None else pattern.table(*shape[1:], np)
    return np.broadcast_to(True if table is None else table, shape)


@pytest.mark.parametrize("name", ATTENTION)
def test_probabilities_sum_to_1_in_forward_and_backward(name, combinations):
    """For v = 1 and dy = 1, y is 1, and the sum of dv over the keys is the number of queries, however large scores are.
    No probability exceeds 1, so no dv exceeds the number of queries.
    """
    half = [pytest.importorskip("ml_dtypes").bfloat16] if "numba" in KINDS else []
    for values in combinations(6, power=LARGE, dtype=["float32", "float64", *half], small=[False, True]):
        dtype = values["dtype"]
        case, args = drawn(name, values["seed"], values["small"], np.dtype(dtype))
        args[:2] = [(x.astype(np.float64) * 10 ** (values["power"] / 2)).astype(dtype) for x in args[:2]]
        args[2] = np.ones_like(args[2])
        y, _, _, dv, *_ = (x.astype(np.float64) for x in run(case, args, small=values["small"]))
        expected = np.broadcast_to(seen(case, args).any(axis=-1)[..., None], y.shape).astype(np.float64)
        within = 1e-2 if dtype not in ("float32", "float64") else 1e-5
        np.testing.assert_allclose(y, expected, rtol=0, atol=within)
        B, G = dv.shape[:2]
        queries = expected.reshape(B, G, -1, expected.shape[-1]).sum(axis=2)
        np.testing.assert_allclose(dv.sum(axis=2), queries, rtol=within, atol=within)
        assert (dv <= queries[:, :, None] * (1 + within)).all()


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_are_those_of_float64_where_scores_have_digits(name, combinations):
    for values in combinations(4, power=[0.0, 1.0, 2.0], small=[False, True]):
        power, seed = values["power"], values["seed"]
        case, args = drawn(name, seed, values["small"])
        args[:2] = [x * np.float32(10 ** (power / 2)) for x in args[:2]]
        dy = np.random.default_rng(seed).standard_normal(args[0].shape).astype(np.float32)
        with reference_only():
            expected = run(case, [x.astype(np.float64) if is_array(x) else x for x in args], dy.astype(np.float64))
        for one, other in zip(run(case, args, dy, values["small"]), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * 10**power * max(1, np.abs(other).max()))


@pytest.mark.parametrize("name", ATTENTION)
def test_a_masked_place_contributes_nothing(name, combinations):
    """A finite key or value, however large, changes neither y nor dq of queries that may not see it."""
    for values in combinations(8, argument=[1, 2], wrong=[1e4, -1e4], small=[False, True]):
        argument, wrong, small, seed = (values[n] for n in ("argument", "wrong", "small", "seed"))
        case, args = drawn(name, seed, small)
        before = run(case, args, small=small)
        x = args[argument] = args[argument].copy()
        b, g, s = (int(np.random.default_rng(seed).integers(n)) for n in x.shape[:3])
        x[b, g, s] = wrong
        after = run(case, args, small=small)
        hidden = ~seen(case, args)[..., s]  # (B, H, T)
        shared = hidden.shape[1] // x.shape[1]
        others = np.ones(hidden.shape, bool)
        others[b, g * shared : (g + 1) * shared] = False
        for one, other in zip(before[:2], after[:2], strict=True):
            np.testing.assert_allclose(one[hidden | others], other[hidden | others], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scores_beyond_float16(dtype):
    """Reductions of half precision run in float32: scores of 2.6e5, and products of dy and v."""
    q = np.array([[200, 200], [-200, 200]], dtype)[None, None]
    k, v = np.array([[900, 900], [-900, 900]], dtype)[None, None], np.array([[250, 1], [1, 250]], dtype)[None, None]
    y, cache = ops.attention(q, k, v)
    np.testing.assert_array_equal(y, v)
    for x in ops.attention_backward(np.full_like(y, 250), cache):
        assert np.isfinite(x).all()
    r, bias = np.zeros((1, 3, 2), dtype), np.zeros((1, 2), dtype)
    y, cache = ops.relative_attention(q, k, v, r, bias, bias)
    np.testing.assert_array_equal(y, v)
    assert all(np.isfinite(x).all() for x in ops.relative_attention_backward(np.full_like(y, 250), cache))


@pytest.mark.parametrize("spread", [0, 1])
def test_a_wide_row_far_from_0(spread):
    """Its mean is rounded by more than σ."""
    draw = np.random.default_rng(3)
    x = (1e7 + spread * draw.standard_normal((1, 50_257))).astype(np.float32)
    ones = np.ones(x.shape[1], np.float32)
    y, _ = ops.layernorm(x, ones, 0 * ones)
    centred = x.astype(np.float64) - x.mean(dtype=np.float64)
    np.testing.assert_allclose(y, centred / np.sqrt((centred**2).mean() + 1e-5), rtol=0, atol=1e-4)


def test_dp_may_overflow_float16_where_dq_does_not():
    q, k = np.ones((1, 1, 2, 64), np.float16), np.full((1, 1, 2, 64), 1e-3, np.float16)
    k[:, :, 1] *= 2
    v = np.broadcast_to(np.array([[6e4], [-6e4]], np.float16), q.shape)
    assert np.isfinite(ops.attention_backward(q, ops.attention(q, k, v)[1])[0]).all()

"""Large, infinite and masked numbers in attention, norms and their twins: nothing is lost and nothing is hidden."""

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
def test_what_is_not_finite_surfaces_as_in_the_reference(name, kind, combinations):
    """In q, k and v. y is non-finite in the same places, and so is dq if v is finite; the others at least there."""
    if kind == "reference":
        pytest.skip("for the twins")
    wrongs = [np.nan, np.inf, -np.inf, 1e30]
    for values in combinations(8, argument=[0, 1, 2], wrong=wrongs, whole=[False, True], small=[False, True]):
        wrong = values["wrong"]
        case, args = drawn(name, values["seed"], values["small"])
        draw = np.random.default_rng(values["seed"])
        x = args[values["argument"]] = args[values["argument"]].copy()
        at = tuple(int(draw.integers(n)) for n in x.shape)
        x[at[:3] if values["whole"] else at] = wrong
        if wrong == 1e30:  # scores of ±1e60, if it is in q or k
            other = args[1 - min(values["argument"], 1)]
            other[...] = wrong * np.sign(other[..., :1])
            x[at[:3]] = wrong
        found = run(case, args, small=values["small"])
        with reference_only():
            expected = run(case, args)
        exact = 2 if values["argument"] < 2 else 1
        for i, (one, plain) in enumerate(zip(found, expected, strict=True)):
            one, plain = ~np.isfinite(one), ~np.isfinite(plain)
            assert (one >= plain).all() and (i >= exact or (one == plain).all())


def test_scores_of_minus_infinity_are_no_masked_row(kind):
    q = np.array([[-3e38, -3e38], [1, 1]], np.float32)[None, None]
    k, v = np.full((1, 1, 3, 2), 2, np.float32), np.ones((1, 1, 3, 2), np.float32)
    for pattern in (None, ops.Causal(), ops.Padding(np.array([2])), ops.Strided(1)):
        y, cache = ops.attention(q, k, v, pattern)
        assert np.isnan(y[0, 0, 0]).all() and (y[0, 0, 1] == 1).all()
        assert np.isnan(ops.attention_backward(np.ones_like(y), cache)[0][0, 0, 0]).any()
        r, bias = np.zeros((1, 4, 2), np.float32), np.zeros((1, 2), np.float32)
        y, _ = ops.relative_attention(q, k, v, r, bias, bias, pattern)
        assert np.isnan(y[0, 0, 0]).all() and (y[0, 0, 1] == 1).all()
    y, _ = ops.attention(q, k, v, ops.Padding(np.array([0])))
    assert (y == 0).all()


@pytest.mark.parametrize("name", ATTENTION)
def test_a_masked_place_contributes_nothing(name, combinations):
    """A finite key or value, however large, changes neither y nor dq of queries that may not see it."""
    for values in combinations(8, argument=[1, 2], wrong=[3e38, -3e38], small=[False, True]):
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
        if (hidden | others).all():
            assert all(np.isfinite(a).all() for a in after)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scores_beyond_float16(dtype, kind):
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_norms_of_large_rows(name, dtype, combinations):
    """A row times a large number gives the row's own result, and a gradient divided by it."""
    powers = [10, 18, 19, 20, 30, 36] if dtype == np.float32 else [19, 100, 153, 155, 200, 300]
    op, op_backward = getattr(ops, name), getattr(ops, f"{name}_backward")
    for values in combinations(6, power=powers):
        draw, large = np.random.default_rng(values["seed"]), 10.0 ** values["power"]
        x = draw.standard_normal((2, 3, int(draw.integers(3, 70))))
        parameters = draw.standard_normal((2 if name == "layernorm" else 1, x.shape[-1]))
        dy = draw.standard_normal(x.shape)
        with reference_only():
            y, cache = op(x, *parameters, eps=0)
            dx, *others = op_backward(dy, cache)
        x[0, 0] *= large  # and rows beside it are not large
        y2, cache = op(x.astype(dtype), *parameters.astype(dtype), eps=0)
        dx2, *others2 = op_backward(dy.astype(dtype), cache)
        dx2 = dx2.astype(np.float64)
        dx2[0, 0] *= large
        for one, other in zip((y, dx, *others), (y2, dx2, *others2), strict=True):
            np.testing.assert_allclose(
                other, one, rtol=0, atol=(1e-4 if dtype == np.float32 else 1e-12) * max(1, abs(one).max())
            )


@pytest.mark.parametrize("C", [3, 64, 1000])
def test_sums_of_a_large_row_do_not_overflow(C):
    """Nor do products of dy and x. A row of equal numbers has σ² = eps, however large they are."""
    draw = np.random.default_rng(C)
    x, gamma, beta, dy = draw.uniform(0.5, 1, (2, C)), *draw.standard_normal((2, C)), 4 * draw.standard_normal((2, C))
    x, gamma, beta, dy = (a.astype(np.float32) for a in (x, gamma, beta, dy))
    for op, op_backward, parameters in (
        (ops.layernorm, ops.layernorm_backward, (gamma, beta)),
        (ops.rmsnorm, ops.rmsnorm_backward, (gamma,)),
    ):
        (y, cache), (y2, cache2) = op(x, *parameters, eps=0), op(x * np.float32(2.0**127), *parameters, eps=0)
        np.testing.assert_allclose(y2, y, rtol=0, atol=2e-5)
        for one, other in zip(op_backward(dy, cache)[1:], op_backward(dy, cache2)[1:], strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-4)
    y, cache = ops.layernorm(np.full((2, C), 1e30, np.float32), gamma, beta)
    np.testing.assert_array_equal(y, np.broadcast_to(beta, y.shape))
    g = (dy * gamma).astype(np.float64)
    expected = (g - g.mean(axis=1, keepdims=True)) / np.sqrt(1e-5)
    np.testing.assert_allclose(ops.layernorm_backward(dy, cache)[0], expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("spread", [0, 1])
def test_a_wide_row_far_from_0(spread):
    """Its mean is rounded by more than σ."""
    draw = np.random.default_rng(3)
    x = (1e7 + spread * draw.standard_normal((1, 50_257))).astype(np.float32)
    ones = np.ones(x.shape[1], np.float32)
    y, _ = ops.layernorm(x, ones, 0 * ones)
    centred = x.astype(np.float64) - x.mean(dtype=np.float64)
    np.testing.assert_allclose(y, centred / np.sqrt((centred**2).mean() + 1e-5), rtol=0, atol=1e-4)


def test_a_large_row_is_normalised_in_place(kind):
    """As after a block with post-norm."""
    if kind != "numba":
        pytest.skip("of compiled code")
    from scratchformer.kernels.numba_extend import normalise

    x = np.random.default_rng(0).standard_normal(32).astype(np.float32) + np.float32(5)
    ones = np.ones(32, np.float32)
    with reference_only():
        expected, _ = ops.layernorm(x[None], ones, ones, eps=0)
    x *= np.float32(2.0**100)
    normalise(x, (ones, ones, 1e-5), x)
    np.testing.assert_allclose(x, expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wrong", [0, 1])
def test_hidden_nan_in_half_precision(dtype, wrong):
    """In a query or key that a pattern hides."""
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), dtype, dtype))
    args = np.random.default_rng(0).standard_normal((4, 1, 1, 3, 4)).astype(dtype)
    args[wrong, :, :, 2] = np.nan
    q, k, v, dy = args
    r, bias = np.zeros((1, 5, 4), dtype), np.zeros((1, 4), dtype)
    pattern = ops.Local(0) if wrong == 0 else ops.Padding(np.array([2]))
    _, cache = ops.attention(q, k, v, pattern)
    _, relative = ops.relative_attention(q, k, v, r, bias, bias, pattern)
    for dq, dk, *_ in ops.attention_backward(dy, cache), ops.relative_attention_backward(dy, relative):
        assert np.isfinite(dq[:, :, :2].astype(np.float32)).all()
        assert np.isfinite(dk[:, :, :2].astype(np.float32)).all() or wrong == 0


def test_dp_may_overflow_float16_where_dq_does_not():
    q, k = np.ones((1, 1, 2, 64), np.float16), np.full((1, 1, 2, 64), 1e-3, np.float16)
    k[:, :, 1] *= 2
    v = np.broadcast_to(np.array([[6e4], [-6e4]], np.float16), q.shape)
    assert np.isfinite(ops.attention_backward(q, ops.attention(q, k, v)[1])[0]).all()


@pytest.mark.parametrize("g", [1.9e19, 1e20, 5e20])
def test_adam_moves_after_a_gradient_whose_square_overflows(g):
    """As PyTorch's does: by the learning rate, and then on."""
    from scratchformer import nn, optim

    for optimizer in (optim.Adam, optim.AdamW):
        w = nn.Param(np.zeros(9, np.float32), "w")
        adam = optimizer([w], 0.1)
        w.grad[...] = [g, -g, 1] * 3
        adam.step()
        np.testing.assert_allclose(w.data, [-0.1, 0.1, -0.1] * 3, rtol=1e-5)
        w.grad[...] = 1
        adam.step()
        np.testing.assert_allclose(w.data[:2], [-0.167006, 0.167006], rtol=1e-5)


def test_adam_does_not_stand_still_where_v_overflows():
    from scratchformer import nn, optim

    for optimizer in (optim.Adam, optim.AdamW):
        w = nn.Param(np.zeros(9, np.float32), "w")
        adam = optimizer([w], 0.1)
        w.grad[...] = [1e25, 1, 1] * 3
        adam.step()
        assert np.isnan(w.data).tolist() == [True, False, False] * 3

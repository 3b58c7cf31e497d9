"""The precision check: right code is not refused, planted mistakes are found, and every rule bounds its errors."""

import re
import sys
from typing import NamedTuple

import numpy as np
import pytest
from scipy.special import erf, erfc, expit

from scratchformer import ops
from scratchformer.backend import array_module
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.commands.cli import main
from scratchformer.dispatch import reference_only
from scratchformer.testing import GradientError, bounds, check_precision
from scratchformer.testing.bounds import Arithmetic, gamma
from scratchformer.testing.strict import STRICT

# Twins that are less accurate than their reference, and why that is accepted.
LESS_ACCURATE_TWINS = {
    "dense, gelu": "its erf is a polynomial that is right to 1.5e-7, which is 2.5 u, wherever erf is near 0 too",
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


def check_case(name, scale, seed=0, **options):
    case = OPERATIONS[name](Draw(seed, scale))
    return check_precision(case.op, case.op_backward, *case.args, seed=seed, **options, **case.options)


# Right code


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_within_its_bounds(name):
    bfloat16()
    for seed, scale in enumerate([0.1, 1.0, 10.0]):
        with reference_only():
            for dtype in ("float16", "bfloat16", "float32"):
                rows = check_case(name, scale, seed, dtype=dtype)
                assert all(row.bound > 0 or row.error == 0 for row in rows)
        if name not in LESS_ACCURATE_TWINS:
            check_case(name, scale, seed, dtype="float32")
    for dtype in ("float16", "bfloat16") if "attention" not in name else ():  # whose twins: tests/kernels/test_half.py
        check_case(name, 1.0, dtype=dtype)


def long_sums(seed):
    """Pairs with arguments: sums of up to 4096 terms, of numbers of one sign, of both, and of equal numbers."""
    rng = np.random.default_rng(seed)
    n, scale = int(2 ** rng.uniform(1, 12)), 10 ** rng.uniform(-1, 1)
    draws = [lambda *s: rng.standard_normal(s), lambda *s: np.abs(rng.standard_normal(s)), lambda *s: np.full(s, 0.1)]
    draw = lambda *shape: scale * draws[seed % 3](*shape)  # noqa: E731
    yield ops.linear, ops.linear_backward, draw(n, 2), draw(2, 3), draw(3)
    yield ops.softmax, ops.softmax_backward, draw(2, n)
    yield ops.layernorm, ops.layernorm_backward, draw(2, n), draw(n), draw(n)
    yield ops.embedding, ops.embedding_backward, rng.integers(0, 2, n), draw(2, 3)
    yield ops.cross_entropy, ops.cross_entropy_backward, draw(n, 3), rng.integers(0, 3, n)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_long_sums_are_not_refused(dtype):
    if dtype == "bfloat16":
        bfloat16()
    for seed in range(3):
        for op, op_backward, *args in long_sums(seed):
            check_precision(op, op_backward, *args, dtype=dtype, seed=seed)


def test_a_relu_that_rounding_turns_on_is_not_refused():
    """x w is 0 up to rounding, so either side of the kink is right in float16."""
    x, w = np.array([[1.0, 1.0, 1.0]]), np.array([[1.0, 2.0], [1 / 3, 1 / 7], [-4 / 3, -15 / 7]])
    report = check_precision(ops.dense, ops.dense_backward, x, w, np.zeros(2), "relu")
    assert report[1].bound > 1


class Halves(NamedTuple):
    left: np.ndarray
    right: np.ndarray


@pytest.mark.parametrize("kind", [Halves, lambda left, right: [left, right]], ids=["NamedTuple", "list"])
def test_outputs_in_a_named_tuple_or_a_list(kind):
    def split(x):
        return kind(x[:2] * x.dtype.type(2), x[2:] * x.dtype.type(2)), x.dtype

    def split_backward(dy, dtype):
        left, right = (dy.left, dy.right) if kind is Halves else dy
        return np.concatenate([left, right]) * dtype.type(2)

    report = check_precision(split, split_backward, normal(5))
    assert [row.tensor for row in report] == ["y[0]", "y[1]", "gradient of x"]


def test_the_code_may_run_on_a_device():
    check_precision(ops.softmax, ops.softmax_backward, normal(3, 5), device=STRICT)


# Planted mistakes


def wide(x):
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def bias(x, b):
    return x + b, None


def bias_backward(dy, _):
    return dy.copy(), wide(dy).sum(axis=0).astype(dy.dtype)


def sum_in_half(dy, _):
    return dy.copy(), dy.sum(axis=0)


def softmax(z):
    e = np.exp(wide(z) - wide(z).max(axis=-1, keepdims=True))
    y = (e / e.sum(axis=-1, keepdims=True)).astype(z.dtype)
    return y, y


def softmax_without_maximum(z):
    e = np.exp(z)
    y = e / e.sum(axis=-1, keepdims=True)
    return y, y


def softmax_backward(dy, y):
    y, g = wide(y), wide(dy)
    return (y * (g - (g * y).sum(axis=-1, keepdims=True))).astype(dy.dtype)


def variance(x):
    centred = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    return (centred * centred).mean(axis=-1).astype(x.dtype), x


def variance_that_cancels(x):
    mean = x.mean(axis=-1)
    return (x * x).mean(axis=-1) - mean * mean, x


def variance_backward(dy, x):
    centred = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    return (wide(dy)[..., None] * 2 * centred / x.shape[-1]).astype(dy.dtype)


def log1p(x):
    return np.log1p(x), x


def naive_log1p(x):
    return np.log(1 + x), x


def log1p_backward(dy, x):
    return (dy / (1 + x.astype(np.float64))).astype(dy.dtype)


def rms(x):
    r = 1 / np.sqrt((wide(x) * wide(x)).mean(axis=-1, keepdims=True) + 1e-6)
    return (wide(x) * r).astype(x.dtype), (x, r)


def rms_with_root_in_half(x):
    r = 1 / np.sqrt((wide(x) * wide(x)).mean(axis=-1, keepdims=True).astype(x.dtype) + np.asarray(1e-6, x.dtype))
    return (wide(x) * r).astype(x.dtype), (x, r)


def rms_backward(dy, cache):
    (x, r), g = map(wide, cache), wide(dy)
    return (r * (g - x * r * (g * x * r).mean(axis=-1, keepdims=True))).astype(dy.dtype)


def mean(x):
    return wide(x).mean(axis=0).astype(x.dtype), x


def mean_of_half_sum(x):
    return x.sum(axis=0) / len(x), x


def mean_by_running_sum(x):
    total = np.zeros_like(x[0])
    for row in x:
        total += row
    return total / len(x), x


def mean_backward(dy, x):
    return np.broadcast_to((wide(dy) / len(x)).astype(dy.dtype), x.shape).copy()


MISTAKES = [
    ((bias, bias_backward), (bias, sum_in_half), (normal(4096, 3), normal(3)), "accumulated .*a sum of 4096 terms"),
    ((softmax, softmax_backward), (softmax_without_maximum, softmax_backward), (8 * normal(8, 16),), "An overflow: "),
    ((variance, variance_backward), (variance_that_cancels, variance_backward), (10 + normal(8, 16),), "too early"),
    ((log1p, log1p_backward), (naive_log1p, log1p_backward), (0.1 * np.abs(normal(8, 16)),), r"np\.log\(1 \+ x\)"),
    ((rms, rms_backward), (rms_with_root_in_half, rms_backward), (normal(8, 64),), "too early.*r = 1 / np.sqrt"),
    ((mean, mean_backward), (mean_of_half_sum, mean_backward), (normal(4096, 3) + 1,), "a sum of 4096 terms"),
    ((mean, mean_backward), (mean_by_running_sum, mean_backward), (normal(200, 3) + 1,), "200 steps .*total .= row"),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "right, wrong, args, reason", MISTAKES, ids=[f"{m[1][0].__name__}-{i}" for i, m in enumerate(MISTAKES)]
)
def test_a_mistake_is_found_and_explained(right, wrong, args, reason, dtype):
    if dtype == "bfloat16":
        bfloat16()
    check_precision(*right, *args, dtype=dtype)
    if (wrong[0], dtype) == (softmax_without_maximum, "bfloat16"):
        reason = "too early"  # bfloat16 ends where float32 does: here nothing overflows
    with pytest.raises(GradientError) as info:
        check_precision(*wrong, *args, dtype=dtype)
    message = str(info.value)
    assert re.search(reason, message, re.DOTALL), message
    assert re.search(r"\[.*\] is outside its error bound:\n  computed .*\n  right .*\n  .*bound .* ulps", message)


def test_the_lines_can_be_allowed_to_round():
    """Every step of these rounds to float16, but none of them is worse than that."""
    args = (np.abs(normal(8, 16)),)
    with pytest.raises(GradientError):
        check_precision(naive_log1p, log1p_backward, *args)
    check_precision(naive_log1p, log1p_backward, *args, elementwise=np.float16)
    with pytest.raises(GradientError):
        check_precision(bias, sum_in_half, normal(4096, 3), normal(3), elementwise=np.float16)
    check_precision(bias, sum_in_half, normal(4096, 3), normal(3), elementwise=np.float16, accumulate=np.float16)


def test_float32_code_can_be_held_to_float64():
    x = (1e-3 * np.abs(normal(8, 16)),)
    check_precision(naive_log1p, log1p_backward, *x, dtype=np.float32)
    check_precision(log1p, log1p_backward, *x, dtype=np.float32, elementwise=np.float64)
    with pytest.raises(GradientError, match=r"np\.log\(1 \+ x\)"):
        check_precision(naive_log1p, log1p_backward, *x, dtype=np.float32, elementwise=np.float64)


def test_a_gradient_that_is_another_function_in_the_type():
    def wrong(dy, x):
        return 2 * x * dy * x.dtype.type(1 if x.dtype == np.float64 else 3)

    with pytest.raises(GradientError, match=r"in float32, gradient of x\[\d\] is .* as in float64"):
        check_precision(lambda x: (x * x, x), wrong, normal(4), dtype=np.float32)


def test_an_operation_that_sums_in_half_is_reported_by_the_command(monkeypatch, capsys):
    main(["check", "softmax", "--dtype", "float16"])
    assert re.search(r"softmax +2 +\d+ +\d\.\de-01 +-$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(sys.modules["scratchformer.ops.softmax"], "widen", lambda x: x)
    with pytest.raises(SystemExit, match=r"wrong: softmax \(reference\)"):
        main(["check", "softmax", "--dtype", "float16"])


# Underflow and overflow


def square(x):
    return x * x, x


def square_backward(dy, x):
    return 2 * x * dy


def test_gradients_that_become_zero_are_counted():
    x = np.array([1.0, 1e-3, 1e-4, 1e-6])
    report = check_precision(square, square_backward, x, dy=np.full(4, 2e-5), elementwise=np.float16)
    assert report[1].underflow == 2
    (note,) = report.notes
    assert str(report).endswith(note)
    assert re.search(r"gradient of x: 2 of 4 elements became 0: .* between 0 and 6e-08\. .* 2\^29 it would be 0", note)


def test_what_does_not_fit_is_an_error_of_the_arguments():
    with pytest.raises(ValueError, match=r"x in float16\[0\] is inf"):
        check_precision(square, square_backward, np.array([1e5]))
    with pytest.raises(ValueError, match=r"y\[0\] is 90000, which does not fit in float16 \(at most 65504\)"):
        check_precision(square, square_backward, np.array([300.0]))


# Arguments


def test_arguments_are_checked(monkeypatch):
    x = normal(3)
    with pytest.raises(ValueError, match="dtype: expected a type narrower than float64"):
        check_precision(square, square_backward, x, dtype=np.float64)
    with pytest.raises(TypeError, match="accumulate: expected a floating-point type, got int64"):
        check_precision(square, square_backward, x, accumulate=np.int64)
    with pytest.raises(ValueError, match="nothing to check"):
        check_precision(square, square_backward, np.arange(3))
    with pytest.raises(GradientError, match="gradient of x is float32 where x is float16"):
        check_precision(square, lambda dy, x: wide(2 * x * dy), x)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"pip install 'scratchformer\[bfloat16\]'"):
        check_precision(square, square_backward, x, dtype="bfloat16")


def test_what_cannot_be_bounded_is_said():
    with pytest.raises(TypeError, match=r"replace np.zeros\(shape\) with np.zeros_like\(x\)"):
        check_precision(lambda x: (np.add(x, x, out=np.zeros(3, x.dtype)), x), square_backward, normal(3))
    with pytest.raises(TypeError, match=r"np\.remainder: there is no rule for its rounding errors"):
        check_precision(lambda x: (np.remainder(x, x), x), square_backward, normal(3))
    with pytest.raises(TypeError, match=r"np\.sort: there is no rule"):
        check_precision(lambda x: (np.sort(x), x), square_backward, normal(3))
    with pytest.raises(TypeError, match="keep the array"):
        check_precision(lambda x: (x * float(x.sum()), x), square_backward, normal(3))


# The rules


EXPRESSIONS = {
    "sums": lambda x, y: (x * y).sum(axis=0) + x.mean() - y.var(axis=0),
    "products": lambda x, y: x @ y.T + np.einsum("ij,kj->ik", x, y) + np.dot(x, y.T) + np.tensordot(x, y, ((1,), (1,))),
    "quotients": lambda x, y: x / y + 1 / (np.abs(y) + 1) + np.reciprocal(3 + x * x),
    "roots": lambda x, y: np.sqrt(np.abs(x)) + np.square(x * y * 0.7) + np.abs(y) ** 1.5 + (2 + np.abs(x)) ** -0.5,
    "exponentials": lambda x, y: np.exp(x) - np.expm1(y) + np.logaddexp(x, y) + np.exp2(-x),
    "logarithms": lambda x, y: np.log(np.abs(x)) + np.log1p(np.abs(y)) + np.log2(1 + np.abs(x)),
    "bounded": lambda x, y: np.tanh(x) + np.sin(y) * np.cos(x) + erf(x) + expit(y) + np.arctan(x),
    "selection": lambda x, y: np.where(x > y, x * y, y) + np.maximum(x, y) - np.minimum(x, 0) + np.clip(y, -0.3, 0.3),
    "extremes": lambda x, y: (x - x.max(axis=-1, keepdims=True)) * y.min(axis=0) + np.sign(x) * np.floor(y),
    "masks": lambda x, y: x * (x * y > 0.1) + np.where(~(x < y) & (y > 0), x, 0.1),
    "either way": lambda x, y: np.where((x + y) - y > x, x, -y) + x * (x * 3 / 3 != x),
    "moves": lambda x, y: np.concatenate([x[:, 1:], y[:, :1]], axis=1) + np.roll(np.flip(x.T), 1) + np.stack([x, y])[1],
    "in place": lambda x, y: in_place(x * y, y),
    "scatter": lambda x, y: scattered(x, y),
    "constants": lambda x, y: 0.1 * x + np.full_like(y, 0.3) * y - 1 / 3 + np.pi * x,
}  # fmt: skip


def in_place(z, y):
    z += y
    z[1:] *= 0.3
    np.exp(z, out=z, where=z < 0)
    z[0, :2] -= y[0, :2]
    return z


def scattered(x, y):
    z = np.zeros_like(x)
    np.add.at(z, np.arange(len(x)) % 3, x * y * 0.3)
    z[:, [0]] = y[:, [1]]
    return z + np.take_along_axis(x, y.argsort(axis=1), axis=1) * np.sum(y, axis=0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_bound_holds_for_every_step_in_the_type_itself(name, dtype):
    """Evaluated in the type alone, with a bound for exactly that. The bound is not vacuous either."""
    dtype = np.dtype(bfloat16() if dtype == "bfloat16" else dtype)
    if dtype.kind == "V" and name in ("products", "bounded", "selection"):
        pytest.skip("NumPy lacks some of these functions in bfloat16")
    arithmetic = Arithmetic(dtype, dtype)
    for seed in range(4):
        x, y = (normal(6, 6, seed=2 * seed + i).astype(dtype) for i in range(2))
        with np.errstate(all="ignore"):
            actual = EXPRESSIONS[name](x, y)
        bounded = EXPRESSIONS[name](arithmetic.array(x), arithmetic.array(y))
        assert bounded.dtype == actual.dtype and bounded.shape == actual.shape
        exact = EXPRESSIONS[name](x.astype(np.float64), y.astype(np.float64))
        np.testing.assert_allclose(bounded.value, exact, rtol=1e-12, atol=1e-12)
        assert (np.abs(actual.astype(np.float64) - exact) <= bounded.bound).all()
        if name != "either way":
            digits = 2.0**-7 if dtype.kind == "V" else 2.0**-10
            assert np.median(bounded.bound) < 100 * digits * np.median(np.abs(exact))


@pytest.mark.parametrize("name", bounds.PROPAGATION)
def test_a_rule_covers_every_error_of_its_arguments(name):
    f = {"erf": erf, "erfc": erfc, "expit": expit}.get(name) or getattr(np, name)
    a, b, ea, eb = np.abs(normal(4, 200)) * [[0.5], [0.5], [0.1], [0.1]]
    with np.errstate(all="ignore"):
        pairs = [(a, ea), (b, eb)][: f.nin]
        bound = bounds.PROPAGATION[name](*(part for pair in pairs for part in pair))
        for t in (-1, -0.5, 0.5, 1):
            for s in (-1, -0.5, 0.5, 1):
                change = np.abs(
                    f(*(x + d * e for d, (x, e) in zip((t, s), pairs, strict=False))) - f(*(x for x, _ in pairs))
                )
                assert (np.isnan(change) | (change <= bound * (1 + 1e-9) + 1e-12)).all()


def test_gamma():
    assert gamma(10, 1e-3) == pytest.approx(0.01 / 0.99)
    assert gamma(4096, 2.0**-11) == np.inf
    assert gamma(64, 1e-8, likely=True) <= gamma(64, 1e-8)
    assert gamma(4096, 1e-8, likely=True) == pytest.approx(8 * 64 * 1e-8, rel=1e-4)


def test_the_library_makes_arrays_with_bounds():
    arithmetic = Arithmetic()
    xp = array_module(arithmetic.array(np.ones(3, np.float16)))
    made = [xp.zeros((2, 3), dtype=np.float16), xp.arange(3), xp.asarray([0.1], dtype=np.float16), xp.ones((2,), bool)]
    assert [x.dtype.name for x in made] == ["float16", "int64", "float16", "bool"]
    assert made[2].bound == abs(0.1 - float(np.float16(0.1)))

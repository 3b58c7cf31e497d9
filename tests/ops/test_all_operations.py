"""Properties of every operation, on every backend, with the cases of `scratchformer.catalogue`."""

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, DeviceError, array_module, to_cpu, to_device
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.dispatch import fast, reference_only
from scratchformer.rng import Key
from scratchformer.testing.contracts import as_tuple, is_array, is_floating
from scratchformer.testing.strict import STRICT

LOSSES = ("cross_entropy",)  # it returns a sum


class Run(NamedTuple):
    """The arguments, the output and the gradients of one case, of one dtype."""

    args: list
    y: object
    gradients: tuple


def run(name, device, dtype, args=None):
    """Run a case forward and backward in `dtype`; `args` replaces its arguments."""
    case = OPERATIONS[name](Draw(3, 1.0, device))
    args = [
        to_device(x, device, dtype if is_floating(x) else None) if is_array(x) else x
        for x in (case.args if args is None else args)
    ]
    y, cache = case.op(*args, **case.options)
    dy = np.random.default_rng(0).standard_normal(tuple(y.shape)).astype(dtype)
    return Run(args, y, as_tuple(case.op_backward(to_device(dy, device), cache)))


def assert_close(result, expected, tolerance):
    """Each array differs by at most `tolerance` times its largest expected element. For an array that should be zero,
    up to rounding, the scale is a tenth of the largest element of all arrays.
    """
    arrays = [
        (to_cpu(x).astype(np.float64), to_cpu(e).astype(np.float64))
        for x, e in zip((result.y, *result.gradients), (expected.y, *expected.gradients), strict=True)
    ]
    largest = max(np.abs(e).max() for _, e in arrays)
    for x, e in arrays:
        assert x.shape == e.shape
        size = np.abs(e).max()
        np.testing.assert_allclose(x, e, rtol=0, atol=tolerance * (size if size > 1e-6 * largest else 0.1 * largest))


def test_every_operation_is_checked():
    """It has a case, and its module has a test file that checks the gradients."""
    cases = [OPERATIONS[name](Draw()) for name in OPERATIONS]
    assert {c.op_backward for c in cases} == {getattr(ops, name) for name in ops.__all__ if name.endswith("_backward")}
    for module in {c.op.__module__.rpartition(".")[2] for c in cases}:
        assert "check_gradients(case)" in (Path(__file__).parent / f"test_{module}.py").read_text(encoding="utf-8")


def test_what_checks_an_operation_takes_the_same_arguments():
    ops_with_check = [op for op in map(ops.__dict__.get, ops.__all__) if getattr(op, "given", None)]
    assert ops.rotary in ops_with_check
    for op in ops_with_check:
        expected = inspect.signature(op).parameters
        arguments = inspect.signature(op.given).parameters
        assert list(arguments) == list(expected)
        for name, argument in arguments.items():
            assert argument.default in (inspect.Parameter.empty, expected[name].default)


@pytest.mark.parametrize("name", OPERATIONS)
def test_float32_stays_float32(name, device):
    single, double = run(name, device, np.float32), run(name, device, np.float64)
    assert all(a.dtype == np.float32 for a in (single.y, *single.gradients))
    assert all(a.dtype == np.float64 for a in (double.y, *double.gradients))
    assert_close(single, double, 1e-5)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "large scores" not in name])
def test_float16_stays_float16_and_is_near_the_float32_result(name, device):
    """Without scores of 100 and more, which in float16 are off by hundredths even before the softmax."""
    half = run(name, device, np.float16)
    assert half.y.dtype == (np.float32 if name.startswith(LOSSES) else np.float16)  # a loss is a sum
    assert all(a.dtype == np.float16 for a in half.gradients)
    assert_close(half, run(name, device, np.float32, args=half.args), 4e-3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arguments_are_not_written_to(name, dtype):
    """Read-only arguments and a read-only dy are accepted."""
    case = OPERATIONS[name](Draw(1))
    args = [x.astype(dtype) if is_floating(x) else x for x in case.args]
    y, cache = case.op(*(read_only(x) for x in args), **case.options)
    case.op_backward(read_only(np.ones_like(y)), cache)


def read_only(x):
    if not is_array(x):
        return x
    x = np.array(x)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("name", [n for n in OPERATIONS if sum(map(is_array, OPERATIONS[n](Draw()).args)) > 1])
def test_arrays_of_two_devices_are_refused(name):
    """One error names both devices and the calls that move an array and a model."""
    case = OPERATIONS[name](Draw())
    first, *rest = case.args
    assert array_module(first) is CPU.xp
    with pytest.raises(DeviceError, match=r"cpu \(numpy\) and gpu \(strict\)|gpu \(strict\) and cpu \(numpy\)") as info:
        case.op(to_device(first, STRICT), *rest, **case.options)
    if case.op is ops.embedding:  # whose check does not compute with both
        with pytest.raises(DeviceError):
            case.op.given(to_device(first, STRICT), *rest)
    assert "to_device(x, device)" in str(info.value)
    assert "layer.to(device)" in str(info.value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1e4, -1e4, 0.0])
def test_large_scores_do_not_overflow(size, dtype, device):
    """Scores around ±10,000, and rows whose scores are 20,000 apart, give finite outputs and gradients."""
    z = to_device(np.array([[size, size, size], [1e4, -1e4, 0], [-1e4, 0, 5]]), device, dtype)
    targets = to_device(np.array([0, 1, 2]), device)
    for op, op_backward, *more in [
        (ops.softmax, ops.softmax_backward),
        (ops.log_softmax, ops.log_softmax_backward),
        (ops.gelu, ops.gelu_backward),
        (ops.gelu, ops.gelu_backward, "tanh"),
        (ops.cross_entropy, ops.cross_entropy_backward, targets),
    ]:
        y, cache = op(z, *more)
        assert np.isfinite(to_cpu(y)).all()
        assert np.isfinite(to_cpu(op_backward(device.xp.ones_like(y), cache))).all()


@pytest.mark.parametrize("name", OPERATIONS)
def test_arguments_by_keyword(name):
    """Every argument can be passed by its name in the signature."""
    case = OPERATIONS[name](Draw())
    named = dict(zip(inspect.signature(case.op).parameters, case.args, strict=False))
    y, _ = case.op(*case.args, **case.options)
    y_named, cache = case.op(**named, **case.options)
    assert np.array_equal(y, y_named)
    dy_name, cache_name, *_ = inspect.signature(case.op_backward).parameters
    case.op_backward(**{dy_name: np.ones_like(y), cache_name: cache})


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith(LOSSES)])
def test_a_dy_that_would_broadcast_is_refused(name):
    case = OPERATIONS[name](Draw())
    with reference_only():
        y, cache = case.op(*case.args, **case.options)
    with pytest.raises(ValueError, match=r"dy: expected \(.*\), got \(1, "):
        case.op_backward(np.ones_like(y[:1]), cache)


def not_floating(shape, device):
    """Things that are not floating-point arrays, of this shape where they have one, by their name in the message."""
    found = {name: to_device(np.ones(shape, name), device) for name in ("int64", "uint8", "bool")}
    found |= {"list": np.ones(shape).tolist() if shape else [1.0], "tuple": (1.0, 2.0), "None": None, "str": "abc"}
    return found | ({"object": np.full(shape, None), "<U1": np.full(shape, "1")} if device is CPU else {})


def expect_refusal(name, expected, found, call):
    """Each value of `found`, passed to `call`, is refused in one line that says what `name` must be and what it is."""
    for kind, wrong in found.items():
        with pytest.raises(TypeError) as info:
            call(wrong)
        message = str(info.value)
        assert message.startswith(f"{name}: expected ") and expected in message and f", got {kind}" in message
        assert "\n" not in message and len(message) < 120


@pytest.mark.parametrize("twins", [True, False], ids=["twins", "references"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_non_floating_arrays_are_refused(name, twins, device):
    """As each array argument of an operation, and as the dy of its backward. An optional argument may be None. As ids
    and lengths, arrays that are not integers are refused.
    """
    case = OPERATIONS[name](Draw(3, 1.0, device))
    args = [to_device(x, device) if is_array(x) else x for x in case.args]
    parameters = list(inspect.signature(case.op).parameters.values())
    with nullcontext() if twins else reference_only():
        for i, x in enumerate(args):
            if not is_array(x):
                continue
            wrong = not_floating(x.shape, device) | {"float": 2.0, "int": 3}
            if not is_floating(x):
                wrong = {k: w for k, w in wrong.items() if k not in ("int64", "uint8")}
                wrong["float64"] = to_device(np.ones(x.shape), device)
            if parameters[i].default is None:
                del wrong["None"]
            kind = "floating-point" if is_floating(x) else "integers"
            call = lambda w, i=i: case.op(*args[:i], w, *args[i + 1 :], **case.options)  # noqa: E731
            expect_refusal(parameters[i].name, kind, wrong, call)
        y, cache = case.op(*args, **case.options)
        wrong = not_floating(y.shape, device) | ({"float": 2.0, "int": 3} if y.ndim else {})  # dloss may be a number
        dy_name, *_ = inspect.signature(case.op_backward).parameters
        expect_refusal(dy_name, "floating-point", wrong, lambda w: case.op_backward(w, cache))


@pytest.mark.parametrize("twins", [True, False], ids=["twins", "references"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_of_other_kinds_are_refused_by_name(name, twins):
    """Long doubles, and complex numbers beside real ones, whose imaginary parts would be lost. As the first array,
    complex numbers are computed with: the result is complex.
    """
    case = OPERATIONS[name](Draw())
    parameters = list(inspect.signature(case.op).parameters)
    y, cache = case.op(*case.args, **case.options)
    floating = [i for i, x in enumerate(case.args) if is_array(x) and is_floating(x)]
    with nullcontext() if twins else reference_only():
        for i, x in enumerate(case.args):
            if not is_array(x):
                continue
            call = lambda w, i=i: case.op(*case.args[:i], w, *case.args[i + 1 :], **case.options)  # noqa: E731
            for dtype in (np.longdouble, np.clongdouble, np.complex64, np.complex128, object, str, bool):
                if i == floating[0] and dtype in (np.complex64, np.complex128):
                    try:
                        assert call(x.astype(dtype))[0].dtype.kind == "c"
                    except TypeError as error:
                        assert str(error).startswith(f"{parameters[i]}: expected ")
                    continue
                with pytest.raises(TypeError, match=f"^{parameters[i]}: expected "):
                    call(x.astype(dtype))
        dy_name, *_ = inspect.signature(case.op_backward).parameters
        for dtype in (np.longdouble, np.clongdouble, np.complex64, object, str, bool):
            with pytest.raises(TypeError, match=f"^{dy_name}: expected "):
                case.op_backward(np.ones(y.shape).astype(dtype), cache)


PARAMETERS = {"w", "b", "gamma", "beta", "table"}  # whose gradients fast twins give in float32 for bfloat16


@pytest.mark.parametrize("mode", [nullcontext, reference_only, fast])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_gradient_has_the_type_of_its_argument(name, mode):
    """In every floating-point type."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    case = OPERATIONS[name](Draw())
    parameters = list(inspect.signature(case.op).parameters)
    names = [parameters[i] for i, x in enumerate(case.args) if is_array(x) and is_floating(x)]
    with mode():
        for dtype in map(np.dtype, (np.float16, bfloat16, np.float32, np.float64)):
            args = [x.astype(dtype) if is_array(x) and is_floating(x) else x for x in case.args]
            y, cache = case.op(*args, **case.options)
            gradients = as_tuple(case.op_backward(np.ones(y.shape, y.dtype), cache))
            for of, gradient in zip(names, gradients, strict=False):
                wide = mode is fast and dtype == bfloat16 and of in PARAMETERS
                assert gradient.dtype in ((dtype, np.float32) if wide else (dtype,)), of


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_error_for_an_integer_array_says_how_to_convert_it(name, device):
    """The call in the message works."""
    case = OPERATIONS[name](Draw(3, 1.0, device))
    i, x = next((i, x) for i, x in enumerate(case.args) if is_array(x) and is_floating(x))
    integers = to_device(np.ones(x.shape, np.int64), device)
    rest = [to_device(a, device, np.float32 if is_floating(a) else None) if is_array(a) else a for a in case.args]
    parameter = list(inspect.signature(case.op).parameters)[i]
    advice = f"convert it with {parameter}.astype(np.float32)"
    with pytest.raises(TypeError, match=rf"^{parameter}: expected a floating-point array, got int64; ") as info:
        case.op(*rest[:i], integers, *rest[i + 1 :], **case.options)
    assert str(info.value).endswith(advice)
    case.op(*rest[:i], integers.astype(np.float32), *rest[i + 1 :], **case.options)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex128])
def test_a_numpy_scalar_is_accepted_as_an_array(dtype):
    for op in (ops.relu, ops.tanh):
        assert op(dtype(0.5))[0] == op(np.full((1,), 0.5, dtype))[0][0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_cache_of_another_operation_is_refused(name):
    """The message names it, whether the operation's own cache is that of a twin or of the reference."""
    case = OPERATIONS[name](Draw())
    for mode in nullcontext, reference_only:
        with mode():
            y, cache = case.op(*case.args, **case.options)
            other = ops.dropout(np.ones(2), 0.5, Key(0))[1]
        _, kept, *_ = inspect.signature(case.op_backward).parameters
        for wrong in (None, (), [cache], 3, np.full(2, "text"), {"x": cache}, *[other] * ("dropout" not in name)):
            with pytest.raises(TypeError, match=rf"^{kept}: expected the \w+ that forward returned, got \w+$"):
                case.op_backward(np.ones_like(y), wrong)

"""Second derivatives, forward mode and batches of gradients, of functions of NumPy and PyTorch."""

from functools import partial

import numpy as np
import pytest
from packaging.version import Version

from scratchformer.testing import GradientError, check_gradients, check_jax, check_torch

torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def swish(x):
    s = 1 / (1 + np.exp(-x))
    return x * s, (x, s)


def swish_backward(dy, cache):
    x, s = cache
    return dy * (s + x * s * (1 - s))


def swish_backward_backward(dgx, cache):
    dy, (x, s) = cache
    slope = s * (1 - s)
    return dgx * (s + x * slope), dgx * dy * slope * (2 + x * (1 - 2 * s))


def test_a_backward_is_checked_as_an_operation():
    report = check_gradients(swish, swish_backward, swish_backward_backward, X.numpy(), order=2)
    assert [row.tensor for row in report] == ["x", "swish_backward: dy", "swish_backward: x"]

    def saved(dgx, cache):  # the sigmoid that was saved is taken for a constant
        dy, (x, s) = cache
        return dgx * (s + x * s * (1 - s)), dgx * dy * s * (1 - s)

    with pytest.raises(GradientError, match=r"^swish_backward: wrong gradient at x\[") as info:
        check_gradients(swish, swish_backward, saved, X.numpy(), order=2)
    assert "check_gradients(swish, swish_backward, saved, ..., seed=0, order=2)" in str(info.value)


@pytest.mark.parametrize("order", [0, 3, "2"])
def test_an_order_that_there_is_not(order):
    with pytest.raises(ValueError, match=r"^order: expected 1 or 2, got "):
        check_gradients(swish, swish_backward, X.numpy(), order=order)
    for checker, function in (check_torch, torch.tanh), (check_jax, jax.numpy.tanh):
        with pytest.raises(ValueError, match=r"^order: expected 1 or 2, got "):
            checker(function, X, order=order)


def test_a_function_that_has_the_name_of_an_option():
    report = check_torch(
        lambda x, order, forward, batched: x**order if forward else x, X, order=3, forward=1, batched=0
    )
    assert [row.tensor for row in report] == ["x"]


def test_the_backward_of_the_backward_must_be_given():
    with pytest.raises(TypeError, match=r"^op_backward_backward: expected a function, got ndarray$"):
        check_gradients(swish, swish_backward, X.numpy(), order=2)


class Saved(torch.autograd.Function):
    """tanh, whose y is saved as a constant: the gradient is right, its derivative by x is 0."""

    @staticmethod
    def forward(ctx, x):
        ctx.y = torch.tanh(x)
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 - ctx.y.detach() ** 2)


class Cube(torch.autograd.Function):
    """x³ with all rules right."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy

    @staticmethod
    def jvp(ctx, dx):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dx


class WrongForward(Cube):
    @staticmethod
    def jvp(ctx, dx):
        (x,) = ctx.saved_tensors
        return 3 * x * dx


class MixedGradients(torch.autograd.Function):
    """A backward that is right for one dy, and calls a function whose vmap mixes several."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2 / 2

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return Mixed.apply(dy) * x


class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy

    @staticmethod
    def vmap(info, in_dims, x):
        return x.flip(0), 0


def test_right_functions_of_pytorch_pass():
    names = [row.tensor for row in check_torch(Cube, X, order=2, forward=True, batched=True)]
    assert names == ["x", "the backward of Cube: dy", "the backward of Cube: x", "Cube in forward mode: x"]
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.LayerNorm(2))
    for function, *tensors in (model, X), (torch.nn.functional.linear, X, X), (lambda x: x.sum() ** 2, X):
        check_torch(function, *tensors, order=2, forward=True, batched=True)
    check_torch(lambda z: z.exp() * z.conj(), torch.complex(X, 2 * X), order=2, forward=True, batched=True)


WRONG = [
    (Saved, {"order": 2}, r"^the backward of Saved: wrong gradient at x[^$]*check_torch\(Saved, .*seed=0, order=2\)$"),
    (WrongForward, {"forward": True}, r"^WrongForward in forward mode: wrong gradient at x\["),
    (MixedGradients, {"batched": True}, r"^MixedGradients: gradient of x: several dy at once \(vmap\) do not give"),
]


@pytest.mark.parametrize("function, options, message", WRONG, ids=[function.__name__ for function, *_ in WRONG])
def test_what_only_another_order_or_mode_shows(function, options, message):
    check_torch(function, X)
    with pytest.raises(GradientError, match=message):
        check_torch(function, X, **options)


class Once(Cube):
    """No second derivative, as the decorator says, and nothing else."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return Cube.backward(ctx, dy)

    jvp = torch.autograd.Function.jvp


def test_what_pytorch_does_not_have():
    lacking = [(torch.nn.functional.scaled_dot_product_attention, *3 * [X[None, None]])]
    if Version(torch.__version__) < Version("2.14"):
        lacking.append((torch.cdist, X, X))
    for function, *tensors in lacking:
        with pytest.raises(
            NotImplementedError, match=r"^the backward of .*implement.* \(without order=2 the check passes"
        ):
            check_torch(function, *tensors, order=2)
    with pytest.raises(NotImplementedError, match=r"^Once in forward mode: You must implement the jvp function"):
        check_torch(Once, X, forward=True)
    with pytest.raises(GradientError, match=r"no gradient reaches dy: look for once_differentiable"):
        check_torch(Once, X, order=2)


@jax.custom_vjp
def saved(p, x):
    return x * jax.nn.sigmoid(p["beta"] * x)


def saved_forward(p, x):
    return saved(p, x), (p, x, jax.nn.sigmoid(p["beta"] * x))


def saved_backward(cut, cache, dy):
    p, x, s = cache
    slope = x * cut(s) * (1 - s)
    return {"beta": (dy * x * slope).sum()}, dy * (s + p["beta"] * slope)


def test_second_derivatives_of_jax():
    """One that is computed from what the forward has saved is right: JAX differentiates the forward rule too."""
    x, p = jax.numpy.asarray(X.numpy()), {"beta": jax.numpy.array(1.5)}
    saved.defvjp(saved_forward, partial(saved_backward, lambda s: s))
    names = [row.tensor for row in check_jax(saved, p, x, order=2)]
    of_backward = [f"the backward of saved: {name}" for name in ("dy", "p['beta']", "x")]
    assert names == ["p['beta']", "x", *of_backward]
    check_jax(lambda x, ids: (x[ids] ** 3, ids, x.astype(complex) ** 2), x, jax.numpy.array([0, 1, 1]), order=2)
    saved.defvjp(saved_forward, partial(saved_backward, jax.lax.stop_gradient))
    check_jax(saved, p, x)
    with pytest.raises(GradientError, match=r"^the backward of saved: wrong .*[^$]*check_jax\(saved, .*, order=2\)$"):
        check_jax(saved, p, x, order=2)

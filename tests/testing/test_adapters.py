"""check_torch and check_jax: what they accept, and what they say of each mistake."""

import numpy as np
import pytest

from scratchformer.testing import GradientError, check_torch


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax")


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 3))


@pytest.fixture
def cube_of(torch):
    """cube_of(backward, forward) makes x³ as a torch.autograd.Function."""

    def make(backward, forward=lambda x: x**3):
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return forward(x)

            @staticmethod
            def backward(ctx, dy):
                return backward(*ctx.saved_tensors, dy)

        return Cube

    return make


def slope(x, dy):
    return 3 * x**2 * dy


@pytest.fixture
def rule_of(jax):
    """rule_of(backward, forward) makes x³ as a function of JAX with rules of its own."""

    def make(backward, forward=lambda x: (x**3, x)):
        @jax.custom_vjp
        def cube(x):
            return x**3

        cube.defvjp(forward, backward)
        return cube

    return make


def complaint(check, *args, **options):
    with pytest.raises(GradientError) as caught:
        check(*args, **options)
    return str(caught.value)


def names(report):
    return [row.tensor for row in report]


@pytest.mark.parametrize("form", ["class", "apply", "function", "setup_context"])
def test_torch_a_function_is_checked_under_its_own_names(form, cube_of, torch, x):
    class Separate(cube_of(slope)):
        forward = staticmethod(lambda x: x**3)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

    cube = cube_of(slope)
    form = {"class": cube, "apply": cube.apply, "function": lambda x: cube.apply(x), "setup_context": Separate}[form]
    for dtype in (torch.float32, torch.bfloat16):
        assert names(check_torch(form, torch.tensor(x, dtype=dtype))) == ["x"]


def test_torch_a_wrong_gradient_is_reported_as_for_a_pair(cube_of, torch, x):
    wrong = complaint(check_torch, cube_of(lambda x, dy: 1.0001 * slope(x, dy)), torch.tensor(x), seed=3)
    assert wrong.startswith("Cube: wrong gradient at x[")
    assert wrong.endswith("check_torch(Cube, ..., seed=3)")


@pytest.mark.parametrize(
    "said, backward, forward",
    [
        ("forward writes to x", slope, lambda x: x.mul_(2) ** 3),
        ("forward writes to x", slope, lambda x: x.data.mul_(2) ** 3),
        ("backward writes to x", lambda x, dy: x.pow_(2).mul_(3) * dy, None),
        ("backward writes to dy", lambda x, dy: dy.mul_(3 * x**2), None),
        ("gradient of x shares memory with x", lambda x, dy: x.view_as(x), None),
        ("backward gives another gradient when called twice", lambda x, dy: slope(x, dy) * x.new_empty(1).normal_(), None),
        ("y: differs between two calls", slope, lambda x: x**3 + len(x.calls) if x.calls.append(0) else x**3),
        ("y is float64 where all floating-point inputs are float32", slope, lambda x: x.double() ** 3),
        ("incorrect number of gradients", lambda x, dy: (dy, dy), None),
        ("invalid gradient", lambda x, dy: dy[0, 0], None),
        ("is nan", lambda x, dy: dy * float("nan"), None),
    ],
)
def test_torch_the_contract_is_that_of_check_gradients(said, backward, forward, cube_of, torch, x):
    pass

"""The backwards of backwards: second derivatives, and products of a Hessian with a vector."""

import inspect

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, device_of, to_device, widen
from scratchformer.catalogue import SECOND_ORDER, Draw, derivations_of
from scratchformer.catalogue.check import check_operation
from scratchformer.catalogue.derivations import check
from scratchformer.ops import second_order
from scratchformer.testing import GradientError, check_gradients
from scratchformer.testing.contracts import mapped
from scratchformer.testing.strategies import SCALES


@pytest.mark.parametrize("name", SECOND_ORDER)
def test_gradients(name, device, combinations):
    """Of both orders, with all rules."""
    for drawn in combinations(4 if device is CPU else 1, scale=SCALES):
        check_operation(name, Draw(drawn["seed"], drawn["scale"], device), max_elements=20)


@pytest.mark.parametrize("name", derivations_of("second order"))
def test_derivation_is_true_and_ends_on_the_code(name):
    for seed in range(3):
        rows = check(name, seed).rows
    function = getattr(second_order, f"{name.partition(',')[0]}_backward")
    assert rows[-1].kind == "code"
    assert rows[-1].text in " ".join(inspect.getsource(function).split())


@pytest.mark.parametrize("name", SECOND_ORDER)
def test_types_and_dy_are_checked(name):
    case = SECOND_ORDER[name](Draw())
    second, *args = case.args
    y, cache = case.op(*args)
    gradients = case.op_backward(np.ones_like(y), cache)
    with pytest.raises(TypeError, match=r"^cache: expected the \w+ that forward returned, got str$"):
        second(gradients, (y, "cache"))
    with pytest.raises(TypeError, match=r"^cache: expected gy and the cache of the forward, got NoneType$"):
        second(gradients, None)
    for i, g in enumerate(gradients := gradients if isinstance(gradients, tuple) else (gradients,)):
        wrong = tuple(g[:1] if i == j else each for j, each in enumerate(gradients))
        with pytest.raises(ValueError, match=r"^dg\w+: expected \(" + ", ".join(map(str, g.shape))):
            second(wrong if len(wrong) > 1 else wrong[0], (y, cache))


@pytest.mark.parametrize("name", SECOND_ORDER)
def test_float16_is_rounded_once(name):
    """The sums and differences are those of float32, except that `linear` adds up products that were rounded."""
    case = SECOND_ORDER[name](Draw())
    second, *args = case.args
    rng = np.random.default_rng(0)

    def normal(x):
        return rng.standard_normal(x.shape).astype(np.float16)

    halves = [x.astype(np.float16) if isinstance(x, np.ndarray) else x for x in args]
    y, cache = case.op(*halves, **{n: x for n, x in case.options.items() if n != "order"})
    gy = normal(y)
    gradients = case.op_backward(gy, cache)
    upstream = tuple(map(normal, gradients)) if isinstance(gradients, tuple) else normal(gradients)
    half = second(upstream, (gy, cache))
    single = second(*mapped(lambda _, x: widen(x), "", (upstream, (gy, cache))))
    for given, expected in zip(half, single, strict=True):
        assert given.dtype == np.float16 and expected.dtype == np.float32
        largest = np.abs(expected).max()
        error = 2**-9 * largest if name.startswith("linear") else 2**-11 * np.abs(expected) + 1e-6 * largest
        assert np.all(np.abs(given - expected) <= error + 2**-24)


def constant_spread(dgradients, cache):
    """σ as a constant, in gx but not in x̂."""
    x, shift, rstd, _ = cache[1]
    gx, *_ = ops.layernorm_backward(*cache)
    xhat = (x - x[..., :1] - shift) * rstd
    dgy, dx, dgamma, dbeta = second_order.layernorm_backward_backward(dgradients, cache)
    return dgy, dx + rstd * xhat * (dgradients[0] * gx).mean(axis=-1, keepdims=True), dgamma, dbeta


def constant_probabilities(dgz, cache):
    return ops.softmax_backward(dgz, cache[1]), np.zeros_like(dgz)


def constant_weights(dgradients, cache):
    dgy, dx, dw, db = second_order.linear_backward_backward(dgradients, cache)
    return dgy - dgradients[0] @ cache[1].w, dx, dw, db


def no_values(dgradients, cache):
    dgq, dgk, dgv = dgradients
    return second_order.attention_backward_backward((dgq, dgk, 0 * dgv), cache)


WRONG = [
    ("layernorm_backward", constant_spread, "x"),
    ("softmax_backward", constant_probabilities, "z"),
    ("linear_backward", constant_weights, "dy"),
    ("attention_backward", no_values, "dy"),
]


@pytest.mark.parametrize("name, wrong, tensor", WRONG, ids=[name for name, *_ in WRONG])
def test_what_is_taken_for_a_constant_is_found(name, wrong, tensor):
    """The first order is right, and the message names the backward and the tensor."""
    case = SECOND_ORDER[name](Draw())
    _, *args = case.args
    check_gradients(case.op, case.op_backward, *args)
    with pytest.raises(GradientError, match=rf"^{name}: wrong gradient at {tensor}[\[ ]"):
        check_gradients(case.op, case.op_backward, wrong, *args, order=2)


def draw(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape)


X, C = draw(1, 2, 5, 3), draw(1, 2, 5, 4)
PARAMETERS = draw(3, 4), draw(4), 1 + draw(4), 2 * draw(4)  # w, b, γ and β


def gradients(*parameters):
    """The gradients of a tiny model, and dy and the cache of each of its operations. The loss is Σ c attention(u, u, u)
    with u = layernorm(softmax(x w + b)).
    """
    w, b, gamma, beta = parameters
    x, c = (to_device(given, device_of(w)) for given in (X, C))
    h, affine = ops.linear.reference(x, w, b)
    p, probabilities = ops.softmax.reference(h)
    u, normed = ops.layernorm.reference(p, gamma, beta)
    _, attended = ops.attention.reference(u, u, u)
    du = sum(ops.attention_backward(c, attended))
    dp, dgamma, dbeta = ops.layernorm_backward(du, normed)
    dh = ops.softmax_backward(dp, probabilities)
    _, dw, db = ops.linear_backward(dh, affine)
    return (dw, db, dgamma, dbeta), ((dh, affine), (dp, probabilities), (du, normed), (c, attended))


def hessian_product(v, cache):
    """H v, for v of the parameters: the backwards of the backwards run from the first operation to the last, with 0 for
    x. What they give for the arguments of an operation goes back with an ordinary backward.
    """
    affine, probabilities, normed, attended = cache
    vw, vb, vgamma, vbeta = v
    dgh, _, dw, db = second_order.linear_backward_backward((0 * affine[1].x, vw, vb), affine)
    dgp, dh = second_order.softmax_backward_backward(dgh, probabilities)
    dgu, dp, dgamma, dbeta = second_order.layernorm_backward_backward((dgp, vgamma, vbeta), normed)
    _, *du = second_order.attention_backward_backward((dgu, dgu, dgu), attended)
    back, *of_norm = ops.layernorm_backward(sum(du), normed[1])
    back = ops.softmax_backward(dp + back, probabilities[1])
    _, *of_affine = ops.linear_backward(dh + back, affine[1])
    return tuple(a + b for a, b in zip((dw, db, dgamma, dbeta), (*of_affine, *of_norm), strict=True))


def test_a_hessian_vector_product_is_the_change_of_the_gradients(device):
    """The Hessian is symmetric, so the gradients as an operation of the parameters have H v as their backward."""
    check_gradients(gradients, hessian_product, *PARAMETERS, device=device)


def test_a_hessian_vector_product_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    x, c, *parameters = map(torch.from_numpy, (X, C, *PARAMETERS))
    v = tuple(draw(*p.shape) for p in PARAMETERS)

    def loss(w, b, gamma, beta):
        u = torch.nn.functional.layer_norm(torch.softmax(x @ w + b, -1), (4,), gamma, beta)
        return (c * (torch.softmax(u @ u.mT / 2, -1) @ u)).sum()

    _, expected = torch.autograd.functional.hvp(loss, tuple(parameters), tuple(map(torch.from_numpy, v)))
    for product, theirs in zip(hessian_product(v, gradients(*PARAMETERS)[1]), expected, strict=True):
        np.testing.assert_allclose(product, theirs.numpy(), rtol=1e-10, atol=1e-12)

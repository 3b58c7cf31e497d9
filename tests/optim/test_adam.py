"""Adam, AdamW and SGD compared with transcriptions of their papers, one number at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.backend import to_cpu
from scratchformer.nn import Param
from scratchformer.optim import SGD, Adam, AdamW

GRADIENTS = [0.3, -1.2, 0.0, 2.5, 1e-3, -0.7, 40.0, -1e-4]


def adam_of_the_paper(theta, gradients, alpha, beta1, beta2, epsilon, l2=0.0, decoupled=0.0):
    """Kingma, Ba 2015, algorithm 1, in the paper's notation, with l2 and the decoupled decay as in lines 6 and 12 of
    algorithm 2 of Loshchilov, Hutter 2019.
    """
    m, v, t = 0.0, 0.0, 0
    for gradient in gradients:
        t = t + 1
        g = gradient + l2 * theta
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        theta = theta - (alpha * m_hat / (math.sqrt(v_hat) + epsilon) + alpha * decoupled * theta)
    return theta, m, v


def run(optimizer, param, gradients, device):
    for gradient in gradients:
        param.grad[...] = gradient
        optimizer.step()
    return [float(to_cpu(a)[0]) for a in (param.data.reshape(-1), *(getattr(optimizer, b) for b in optimizer.buffers))]


def parameter(device, value=0.5, axes=1):
    return Param(device.xp.asarray(np.full((1,) * axes, value, np.float64)), "w")


betas = st.floats(0.0, 0.999)


@given(
    lr=st.floats(1e-5, 0.5),
    beta1=betas,
    beta2=betas,
    eps=st.sampled_from([1e-8, 1e-3, 1.0]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    steps=st.integers(1, len(GRADIENTS)),
)
def test_adam_is_the_algorithm_of_its_paper(device, lr, beta1, beta2, eps, weight_decay, steps):
    w = parameter(device)
    found = run(Adam([w], lr, (beta1, beta2), eps, weight_decay), w, GRADIENTS[:steps], device)
    expected = adam_of_the_paper(0.5, GRADIENTS[:steps], lr, beta1, beta2, eps, l2=weight_decay)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


@given(lr=st.floats(1e-5, 0.5), weight_decay=st.floats(0.0, 0.5), steps=st.integers(1, len(GRADIENTS)))
def test_the_decay_of_adamw_is_decoupled(device, lr, weight_decay, steps):
    w = parameter(device, axes=2)
    found = run(AdamW([w], lr, weight_decay=weight_decay), w, GRADIENTS[:steps], device)
    expected = adam_of_the_paper(0.5, GRADIENTS[:steps], lr, 0.9, 0.999, 1e-8, decoupled=weight_decay)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


@given(momentum=st.floats(0.0, 0.99), weight_decay=st.floats(0.0, 0.5), lr=st.floats(1e-4, 0.5))
def test_sgd_sums_its_velocity(device, momentum, weight_decay, lr):
    w = parameter(device)
    found = run(SGD([w], lr, momentum, weight_decay), w, GRADIENTS, device)
    theta, velocity = 0.5, 0.0
    for gradient in GRADIENTS:
        velocity = momentum * velocity + gradient + weight_decay * theta
        theta = theta - lr * velocity
    np.testing.assert_allclose(found, (theta, velocity), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("gradient", [1e-3, 1.0, -250.0])
def test_adams_first_step_is_the_learning_rate_whatever_the_gradients_size(device, gradient):
    w = parameter(device, 0.0)
    value, *_ = run(Adam([w], lr=0.01, eps=1e-12), w, [gradient], device)
    assert value == pytest.approx(-math.copysign(0.01, gradient), rel=1e-6)


def test_a_changed_learning_rate_holds_from_the_next_step(device):
    w = parameter(device, 0.0)
    optimizer = SGD([w], lr=1.0)
    run(optimizer, w, [1.0], device)
    optimizer.lr = 0.25
    assert run(optimizer, w, [1.0], device)[0] == -1.25


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: Adam(p, lr=-1.0), "lr"),
        (lambda p: Adam(p, lr=math.nan), "lr"),
        (lambda p: Adam(p, lr=1.0, betas=(1.0, 0.999)), "betas"),
        (lambda p: Adam(p, lr=1.0, betas=(0.9, -0.1)), "betas"),
        (lambda p: Adam(p, lr=1.0, eps=-1e-8), "eps"),
        (lambda p: AdamW(p, lr=1.0, weight_decay=-0.1), "weight_decay"),
        (lambda p: SGD(p, lr=1.0, momentum=1.0), "momentum"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(device, make, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        make([parameter(device)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(eps=-1), "eps: expected a finite number >= 0, got -1"),
        (dict(eps=math.nan), "eps: expected a finite number >= 0, got nan"),
        (dict(eps="1e-8"), "eps: expected a number, got '1e-8'"),
        (dict(betas=(0.9, 1.0)), "betas: expected 0 <= beta < 1, got 1.0"),
        (dict(betas=0.9), "betas: expected two numbers, got 0.9"),
        (dict(betas=(0.9,)), r"betas: expected two numbers, got \(0.9,\)"),
        (dict(betas="ab"), "betas: expected two numbers, got 'ab'"),
        (dict(lr=math.inf), "lr: expected a finite number >= 0, got inf"),
        (dict(lr=10**400), "lr: expected a finite number >= 0, got a number of 401 digits"),
        (dict(params=3), "params: expected an Iterable, got 3"),
        (dict(params=[np.ones(3)]), r"params\[0\]: expected a Param, got array"),
    ],
    ids=str,
)
def test_arguments_out_of_range(options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        Adam(**{"params": [Param(np.ones(3), "w")], "lr": 0.1} | options)

"""What users write before they have read the docs is checked as it is, or with two lines changed; see `users.py`."""

import inspect
import re

import numpy as np
import pytest

from scratchformer.testing import GradientError, check_gradients

from . import users as u


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


X, Y, IDS = normal(4, 3), normal(4, 3, seed=1), np.array([0, 2, 1, 2])
IMAGES = normal(2, 3, 4, 4)
COVARIANCE = X.T @ X + 2 * np.eye(3)


def check(op, op_backward, *args, **options):
    return check_gradients, op, op_backward, args, options


def in_one(function, *args):
    """A function that returns its value and its gradient."""
    return check(function, lambda dy, grad: u_scaled(dy, grad), *args)


def u_scaled(dy, grad):
    return [dy * g for g in grad] if isinstance(grad, list | tuple) else dy * grad


def of_layer(layer):
    """A layer that keeps its state in itself: only its latest forward has a backward."""
    return lambda x: (layer.forward(x), None), lambda dy, _: layer.backward(dy)


def net_loss(params):
    net = u.TwoLayerNet(3, 5, 3)
    net.params = params
    return net.loss(X, IDS)


def gru(x, h):
    cell = u.GRUCell(normal(3, 5, 2, seed=3))
    return cell(x, h), cell


def of_dense(x, w, b):
    layer = u.Dense(3, 2)
    layer.W, layer.b = w, b
    return layer.forward(x), layer


def of_dense_backward(dy, layer):
    return layer.backward(dy), layer.dW, layer.db


def of_neuron(x):
    values = [u.Value(v) for v in x]
    out = u.neuron(values)
    return out.data, (out, values)


def of_neuron_backward(dy, cache):
    out, values = cache
    for value in values:
        value.grad = 0.0
    out.backward()
    return dy * np.array([value.grad for value in values])


def lstm_step(*args):
    *y, cache = u.lstm_step_forward(*args)
    return y, cache


LSTM = normal(3, 8), normal(2, 8), normal(8)
BN_PARAM = {"running_mean": np.zeros(3), "running_var": np.ones(3)}
USERS = {
    "affine": check(u.affine_forward, u.affine_backward, normal(2, 3, 2), normal(6, 4), normal(4)),
    "relu in place": check(u.relu_forward, u.relu_backward, X),
    "softmax loss": in_one(u.softmax_loss, X, IDS),
    "SVM loss": in_one(u.svm_loss, X, IDS),
    "batch norm": check(u.batchnorm_forward, u.batchnorm_backward, X, normal(3), normal(3), BN_PARAM),
    "dropout": check(u.dropout_forward, u.dropout_backward, X, {"p": 0.6, "mode": "train", "seed": 3}),
    "convolution": check(
        u.conv_forward_naive, u.conv_backward_naive, IMAGES, normal(2, 3, 3, 3), normal(2), {"stride": 1, "pad": 1}
    ),
    "convolution by im2col": check(u.conv_im2col_forward, u.conv_im2col_backward, IMAGES, normal(2, 3, 2, 2)),
    "max pool": check(u.max_pool_forward, u.max_pool_backward, IMAGES),
    "LSTM step": check(
        lstm_step, lambda dy, cache: u.lstm_step_backward(*dy, cache), X, normal(4, 2), normal(4, 2), *LSTM
    ),
    "LSTM": check(u.lstm_forward, u.lstm_backward, normal(2, 3, 3), normal(2, 2), *LSTM, rules={"again": False}),
    "logistic regression": check(
        u.logistic_regression, lambda dy, grad: dy * grad, normal(3), x=X, y=np.array([1, -1, 1, 1])
    ),
    "Rosenbrock": in_one(u.rosenbrock, normal(4)),
    "min-char-rnn": in_one(
        lambda *weights: u.char_rnn_loss([0, 2, 1], [2, 1, 1], *weights),
        normal(4, 1),
        normal(4, 3),
        normal(4, 4),
        normal(3, 4),
    ),
    "CTC": in_one(u.ctc_loss, normal(3, 6), [1, 2, 2]),
    "soft DTW": in_one(u.soft_dtw, normal(3, 4) ** 2, 0.7),
    "a class": check(*of_layer(u.Dense(3, 2)), X, rules={"again": False}),
    "a class and its weights": check(of_dense, of_dense_backward, X, normal(3, 2), normal(2)),
    "a network of classes": check(
        *of_layer(u.Sequential(u.Dense(3, 4), u.Tanh(), u.Dense(4, 2))), X, rules={"again": False}
    ),
    "two-layer net": check(
        net_loss, lambda dy, grads: {n: dy * g for n, g in grads.items()}, u.TwoLayerNet(3, 5, 3).params
    ),
    "GRU": check(gru, lambda dy, cell: cell.backward(dy), X, normal(4, 2)),
    "micrograd": check(of_neuron, of_neuron_backward, normal(3), rules={"again": False}),
    "layer norm": check(u.layer_norm, u.layer_norm_grad, normal(2, 3, 5), normal(5), normal(5)),
    "attention": check(u.attention, u.attention_grad, normal(3, 4), dict(zip("qkvo", normal(4, 4, 4), strict=True))),
    "embedding": check(u.embed, u.embed_grad, IDS, X),
    "log Σ exp": check(lambda x: (u.logsumexp(x), x), lambda dy, x: dy * np.exp(x - u.logsumexp(x)), X),
    "GELU": check(u.gelu, u.gelu_grad, X),
    "triplet loss": in_one(u.triplet_loss, *normal(3, 4)[::-1]),
    "cosine similarity": in_one(u.cosine_similarity, *normal(2, 4)),
    "variational autoencoder": check(u.vae_loss, u.vae_loss_grad, *normal(3, 4)),
    "Cholesky": check(u.cholesky, u.cholesky_grad, COVARIANCE),
    "Gaussian process": check(u.log_likelihood, lambda dy, grad: dy * grad, COVARIANCE, y=normal(3)),
    "inverse": check(u.inverse, lambda dy, y: -y.T @ dy @ y.T, COVARIANCE),
    "eigenvalues": check(
        lambda a: ((r := u.eigenvalues(a)).eigenvalues, r.eigenvectors), lambda dy, v: (v * dy) @ v.T, COVARIANCE
    ),
    "power spectrum": check(u.power_spectrum, lambda dy, f: len(f) * np.fft.ifft(2 * dy * f).real, normal(5)),
    "circular convolution": check(
        u.circular_convolution,
        lambda dy, c: [np.fft.ifft(np.fft.fft(dy) * np.conj(f)).real for f in reversed(c)],
        *normal(2, 5),
    ),
    "grid sample": check(
        u.grid_sample, u.grid_sample_grad, normal(5, 5), np.array([[0.3, 1.7], [2.2, 2.9], [2.2, 2.9]])
    ),
}


@pytest.mark.parametrize("name", USERS)
def test_a_function_of_a_user(name):
    check, op, op_backward, args, options = USERS[name]
    assert check(op, op_backward, *args, **options)
    with pytest.raises(GradientError, match="wrong gradient at"):
        check(op, lambda dy, cache: larger(op_backward(dy, cache)), *args, **options)


def larger(g):
    if isinstance(g, dict):
        return {n: 1.01 * x for n, x in g.items()}
    return type(g)(1.01 * x if is_number(x) else larger(x) for x in g) if isinstance(g, tuple | list) else 1.01 * g


def is_number(x):
    return isinstance(x, np.ndarray | float)


def test_at_most_two_lines_of_each_are_changed():
    for name, function in inspect.getmembers(u, inspect.isfunction):
        assert len(re.findall("# was: ", inspect.getsource(function))) <= 2, name


def test_a_straight_through_estimator_has_another_gradient_than_its_function():
    with pytest.raises(GradientError, match=r"wrong gradient at x\[.*\]:\n  analytic \S+\n  numeric  0\n"):
        check_gradients(u.binarize, u.binarize_grad, X)

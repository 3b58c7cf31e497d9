"""Right code as it is written before anybody has read the docs: it passes with the rules that are on by default."""

# ruff: noqa: NPY002 (it is not written by this project)

import math

import numpy as np
import pytest

from scratchformer.testing import GradientError, check_gradients
from scratchformer.testing.contracts import HOUSE, RULES


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def relu(x):
    mask = (x > 0).astype(float)
    return x * mask, mask


def relu_backward(dy, mask):
    return dy * mask


TARGETS = np.array([0, 2, 1, 1])


def squared_error(p):
    y = np.eye(3)[TARGETS]
    return ((p - y) ** 2).sum(), p - y


def padded(x):
    y = np.zeros((x.shape[0] + 2, x.shape[1]))
    y[1:-1] = x
    return y, None


def attention_scores(q, k):
    return q @ k.T / np.sqrt(q.shape[1]), (q, k)


def attention_scores_backward(ds, cache):
    q, k = cache
    return ds @ k / np.sqrt(q.shape[1]), ds.T @ q / np.sqrt(q.shape[1])


def python_loss(x):
    return float(sum(v * v for row in x.tolist() for v in row)), x


def mlp(params, x):
    h = np.tanh(x @ params["w1"] + params["b1"])
    return h @ params["w2"], (params, x, h)


def mlp_backward(dy, cache):
    params, x, h = cache
    da = dy @ params["w2"].T * (1 - h**2)
    return {"w1": x.T @ da, "b1": da.sum(0), "w2": h.T @ dy}, da @ params["w1"].T


def concatenate(arrays):
    return np.concatenate(arrays), [len(a) for a in arrays]


def concatenate_backward(dy, lengths):
    return np.split(dy, np.cumsum(lengths)[:-1])


def max_pool(x):
    at = x.argmax(axis=1)
    return (x.max(axis=1), at), (x.shape, at)


def max_pool_backward(dy, cache):
    shape, at = cache
    dx = np.zeros(shape)
    dx[np.arange(shape[0]), at] = dy
    return dx


def scale_in_place(x):
    x *= 3
    return x, None


def scale_in_place_backward(dy, _):
    dy *= 3
    return dy


def svm_loss(x):
    n = x.shape[0]
    margins = np.maximum(0, x - x[np.arange(n), TARGETS][:, np.newaxis] + 1.0)
    margins[np.arange(n), TARGETS] = 0
    dx = (margins > 0).astype(float)
    dx[np.arange(n), TARGETS] -= np.sum(margins > 0, axis=1)
    return np.sum(margins) / n, dx / n


def batchnorm(x, gamma, beta, bn_param):
    mean, var = x.mean(axis=0), x.var(axis=0)
    std = np.sqrt(var + bn_param.get("eps", 1e-5))
    x_hat = (x - mean) / std
    bn_param["running_mean"] = 0.9 * bn_param["running_mean"] + 0.1 * mean
    return gamma * x_hat + beta, (x_hat, gamma, std)


def batchnorm_backward(dout, cache):
    x_hat, gamma, std = cache
    n = dout.shape[0]
    dbeta = dout.sum(axis=0)
    dgamma = (dout * x_hat).sum(axis=0)
    return gamma / std / n * (n * dout - dbeta - x_hat * dgamma), dgamma, dbeta


def dropout(x, dropout_param):
    if "seed" in dropout_param:
        np.random.seed(dropout_param["seed"])
    mask = (np.random.rand(*x.shape) < dropout_param["p"]) / dropout_param["p"]
    return x * mask, mask


def attention(x, weights, heads=2):
    """Multi-head self-attention; weights: a dict."""
    t, d = x.shape
    q, k, v = (np.reshape(x @ weights[n], (t, heads, -1)).transpose(1, 0, 2) for n in ("q", "k", "v"))
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d // heads)
    s[:, np.triu(np.ones((t, t)), 1) == 1] = -1e9
    a = np.exp(s - s.max(-1, keepdims=True))
    a = a / a.sum(-1, keepdims=True)
    o = (a @ v).transpose(1, 0, 2).reshape(t, d)
    return o @ weights["o"], (x, weights, q, k, v, a, o)


def attention_backward(dy, cache):
    x, weights, q, k, v, a, o = cache
    heads, t, size = q.shape
    do = (dy @ weights["o"].T).reshape(t, heads, size).transpose(1, 0, 2)
    da = do @ v.transpose(0, 2, 1)
    ds = a * (da - (da * a).sum(-1, keepdims=True)) / np.sqrt(size)
    parts = {"q": ds @ k, "k": ds.transpose(0, 2, 1) @ q, "v": a.transpose(0, 2, 1) @ do}
    flat = {n: g.transpose(1, 0, 2).reshape(t, -1) for n, g in parts.items()}
    dw = {n: x.T @ g for n, g in flat.items()}
    dw["o"] = o.T @ dy
    return sum(g @ weights[n].T for n, g in flat.items()), dw


def vae_loss(mu, logvar, eps):
    z = mu + np.exp(0.5 * logvar) * eps
    kl = -0.5 * np.sum(1 + logvar - mu**2 - np.exp(logvar))
    return [z, kl], (mu, logvar, eps)


def vae_loss_backward(grads, cache):
    (dz, dkl), (mu, logvar, eps) = grads, cache
    dmu = dz + dkl * mu
    dlogvar = dz * 0.5 * np.exp(0.5 * logvar) * eps - 0.5 * dkl * (1 - np.exp(logvar))
    return [dmu, dlogvar, dz * np.exp(0.5 * logvar)]


class Dense:
    def __init__(self, w, b):
        self.W, self.b = w, b

    def forward(self, x):
        self.x = x
        return x @ self.W + self.b

    def backward(self, grad):
        self.dW = self.x.T @ grad
        self.db = grad.sum(axis=0)
        return grad @ self.W.T


def dense(x, w, b):
    layer = Dense(w, b)
    return layer.forward(x), layer


X = normal(4, 3)
EVERYDAY = {
    "a mask by astype(float)": (relu, relu_backward, X),
    "targets by np.eye(3)[y]": (squared_error, lambda dy, d: 2 * d * dy, X),
    "np.zeros(shape)": (padded, lambda dy, _: dy[1:-1], X),
    "x / np.sqrt(d)": (attention_scores, attention_scores_backward, X, normal(5, 3, seed=1)),
    "x.reshape(-1)": (lambda x: (x.reshape(-1), x.shape), lambda dy, shape: dy.reshape(shape), X),
    "x.T": (lambda x: (x.T, None), lambda dy, _: dy.T, X),
    "identity": (lambda x: (x, None), lambda dy, _: dy, X),
    "(dy, dy)": (lambda a, b: (a + b, None), lambda dy, _: (dy, dy), X, X),
    "broadcast_to": (lambda x: (x.sum(axis=0), x.shape), lambda dy, shape: np.broadcast_to(dy, shape), X),
    "a loss that is a float": (python_loss, lambda dy, x: 2 * x * dy, X),
    "arrays in a dict": (mlp, mlp_backward, {"w1": normal(3, 5), "b1": normal(5), "w2": normal(5, 2)}, X),
    "arrays in a list": (concatenate, concatenate_backward, [X, X[:2]]),
    "an integer output": (max_pool, max_pool_backward, X),
    "in place": (scale_in_place, scale_in_place_backward, X),
    "a loss and its gradient in one": (svm_loss, lambda dy, grad: dy * grad, X),
    "running statistics in a dict": (
        batchnorm, batchnorm_backward, X, normal(3), normal(3), {"running_mean": np.zeros(3)},
    ),
    "NumPy's global generator": (dropout, lambda dy, mask: dy * mask, X, {"p": 0.6, "seed": 3}),
    "a dict of weights": (
        attention, attention_backward, normal(3, 4), dict(zip("qkvo", normal(4, 4, 4), strict=True)),
    ),
    "lists": (vae_loss, vae_loss_backward, *normal(3, 4, seed=2)),
    "a class": (dense, lambda dy, layer: (layer.backward(dy), layer.dW, layer.db), X, normal(3, 2), normal(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYDAY)
def test_right_code_passes(name):
    op, op_backward, *args = EVERYDAY[name]
    report = check_gradients(op, op_backward, *args)
    assert all(row.elements for row in report) and all("bn_param" in note for note in report.notes)


@pytest.mark.parametrize("name", EVERYDAY)
def test_the_same_code_with_a_wrong_gradient_does_not(name):
    """A wrong value is said first, whatever rule is broken too."""
    op, op_backward, *args = EVERYDAY[name]

    def larger(g):
        if isinstance(g, dict):
            return {n: larger(x) for n, x in g.items()}
        return type(g)(map(larger, g)) if isinstance(g, tuple | list) else 1.01 * g

    for rules in (None, True):
        with pytest.raises(GradientError, match="wrong gradient at"):
            check_gradients(op, lambda dy, cache: larger(op_backward(dy, cache)), *args, rules=rules)


calls, kept = [], {}


def counting(x):
    calls.append(0)
    return 2 * x + 1e-15 * len(calls) * x, None


def latest(x):
    kept["x"] = x.copy()
    return x * x, kept


BROKEN = {
    "in_place": ("forward writes to x", scale_in_place, lambda dy, _: 3 * dy),
    "memory": ("y shares memory with x", lambda x: (x.T, None), lambda dy, _: dy.T.copy()),
    "types": ("y is float64 where all floating-point inputs are float32", relu, relu_backward),
    "same_bits": ("the last digits differ", counting, lambda dy, _: 2 * dy),
    "again": ("changes after a second forward", latest, lambda dy, kept: 2 * kept["x"] * dy),
    "linear": ("backward is not linear in dy", lambda x: (2 * x, None), lambda dy, _: 2 * np.clip(dy, -9, 9)),
    "layouts": ("with x in Fortran order", lambda x: (x.ravel("K").reshape(x.shape), None), lambda dy, _: dy),
    "empty": ("with x of length 0", lambda x: (x * 1, len(x)), lambda dy, n: dy * (n // n)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_says_that_the_values_agree_why_it_matters_and_how_to_switch_it_off(name):
    what, op, op_backward = BROKEN[name]
    with pytest.raises(GradientError) as caught:
        check_gradients(op, op_backward, X, rules={n: n == name for n in RULES})
    said = str(caught.value)
    assert f": the values agree, but {what}" in said or f": the values agree, but y: {what}" in said or what in said
    assert "the values agree, but" in said
    assert f"\n  {RULES[name]} rules={{'{name}': False}} switches this rule off.\nRepeat with" in said
    check_gradients(op, op_backward, X, rules={n: n != name and n not in HOUSE for n in RULES})
    if name in HOUSE:
        check_gradients(op, op_backward, X)


def test_a_cache_that_is_used_up():
    def cube(x):
        return x**3, [x]

    def backward(dy, cache):
        return 3 * cache.pop() ** 2 * dy

    check_gradients(cube, backward, X, rules={"again": False})
    with pytest.raises(GradientError, match="again with the same cache, it raises IndexError: pop from empty list"):
        check_gradients(cube, backward, X)


@pytest.mark.parametrize("rules", [{"float": True}, "memory", {"memory": 3}, ["memory"]])
def test_unknown_rules(rules):
    with pytest.raises(ValueError, match="rules: expected True, False, or a dict from some of 'in_place', 'memory'"):
        check_gradients(relu, relu_backward, X, rules=rules)


# What is compared, and what is not.


def test_a_part_that_gets_no_gradient_is_named_in_the_report():
    report = check_gradients(lambda x, more: (x * more[0], more), lambda dy, more: dy * more[0], X, [normal(3)])
    assert report.notes == ("more[0]: not checked, since backward returns no gradient for it",)
    assert str(report).endswith(report.notes[0])


def test_the_gradient_of_a_dict_has_its_keys():
    params = {"w": normal(3), "b": normal(3)}

    def affine(params, x):
        return x * params["w"] + params["b"], (params, x)

    def backward(dy, cache, **other):
        params, x = cache
        return {"b": dy.sum(0), "w": (dy * x).sum(0)} | other, dy * params["w"]

    assert [row.tensor for row in check_gradients(affine, backward, params, X)] == ["params['w']", "params['b']", "x"]
    with pytest.raises(GradientError, match=r"gradient of params: expected params\['w'\], params\['b'\], got params"):
        check_gradients(affine, lambda dy, cache: ({"w": dy.sum(0)}, dy), params, X)


def spectrum(x):
    return np.fft.fft(x), x.shape[-1]


def test_complex_arrays():
    """The gradient is dF/dRe + i dF/dIm."""
    z = normal(2, 3) + 1j * normal(2, 3, seed=1)
    report = check_gradients(spectrum, lambda dy, n: n * np.fft.ifft(dy), z)
    assert [row.tensor for row in report] == ["x.real", "x.imag"]
    check_gradients(spectrum, lambda dy, n: n * np.fft.ifft(dy).real, X)
    check_gradients(lambda z: (np.abs(z) ** 2, z), lambda dy, z: 2 * z * dy, z)
    with pytest.raises(GradientError, match=r"wrong gradient at x\.imag\["):
        check_gradients(spectrum, lambda dy, n: n * np.conj(np.fft.ifft(dy)), z)
    with pytest.raises(GradientError, match="gradient of x: expected real numbers, got complex128: take the real part"):
        check_gradients(spectrum, lambda dy, n: n * np.fft.ifft(dy), X)


def cholesky(a):
    low = np.linalg.cholesky(a)
    return low, low


def cholesky_backward(dlow, low):
    """Murray, "Differentiation of the Cholesky decomposition", 2016."""
    p = np.tril(low.T @ dlow)
    p[np.diag_indices(len(p))] /= 2
    inverse = np.linalg.inv(low)
    s = inverse.T @ p @ inverse
    return (s + s.T) / 2


def test_a_symmetric_matrix_of_which_one_triangle_is_read():
    a = normal(3, 3)
    a = a @ a.T + 3 * np.eye(3)
    report = check_gradients(cholesky, cholesky_backward, a)
    assert report.notes == ("a is symmetric, and y ignores one of its triangles: two elements count as one",)
    with pytest.raises(GradientError, match="wrong gradient at a"):
        check_gradients(cholesky, lambda dy, low: 1.01 * cholesky_backward(dy, low), a)
    with pytest.raises(GradientError, match="wrong gradient at a"):  # not symmetric: every element by itself
        check_gradients(
            lambda a: (np.tril(a) * X[:3], None),
            lambda dy, _: np.tril(dy * X[:3]) + np.triu(dy, 1),
            a + np.eye(3, 3, 1),
        )


def in_float32(x):
    return np.tanh(x.astype(np.float32)).astype(x.dtype), x


def test_what_is_computed_in_float32_is_compared_as_closely_as_that_allows():
    def backward(dy, x):
        return dy * (1 - np.tanh(x) ** 2)

    report = check_gradients(in_float32, backward, X)
    assert report.notes == (
        "y is computed in float32: compared to within its round-off, which may hide derivatives below 0.001",
    )
    with pytest.raises(GradientError, match="wrong gradient at x"):
        check_gradients(in_float32, lambda dy, x: 1.05 * backward(dy, x), X)
    assert not check_gradients(lambda x: (1 + 1e-9 * x, None), lambda dy, _: 1e-9 * dy, X).notes


def softmax_in_float32(x):
    e = np.exp(x.astype(np.float32))
    y = e / e.sum(axis=-1, keepdims=True)
    return y, y


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_softmax_in_float32_is_not_refused(dtype, seed):
    """Its results hardly change with an element of x, whether they are returned in float32 or widened."""

    def forward(x):
        y, cache = softmax_in_float32(x)
        return y.astype(dtype), cache

    def backward(dy, y):
        return (y * (dy - (dy * y).sum(axis=-1, keepdims=True))).astype(np.float64)

    x = np.random.default_rng(seed).standard_normal((4, 3))
    assert check_gradients(forward, backward, x, seed=seed).notes
    with pytest.raises(GradientError, match="wrong gradient at x"):
        check_gradients(forward, lambda dy, y: 1.002 * backward(dy, y), x, seed=seed)


def test_a_loss_with_a_regulariser_on_an_empty_batch():
    """The batch has no part in it then, but the weights have."""

    def loss(x, w):
        return ((x @ w) ** 2).sum() + math.pi * (w**2).sum(), (x, w)

    def backward(dy, cache):
        x, w = cache
        e = 2 * x @ w * dy
        return e @ w.T, x.T @ e + 2 * math.pi * w * dy

    on = {"rules": {"empty": True}}
    check_gradients(loss, backward, X, normal(3, 2), **on)

    def mean_backward(dy, cache):
        x, w = cache
        return backward(dy, cache)[0], backward(dy, cache)[1] + 0 * w / np.float64(len(x))

    with pytest.raises(GradientError, match=r"with x of length 0, gradient of w\[0, 0\] is nan, not finite"):
        check_gradients(loss, mean_backward, X, normal(3, 2), **on)

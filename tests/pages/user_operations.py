"""Operations as users write them, each with its derivation: what `scratchformer page` makes pages of."""

from typing import NamedTuple

import numpy as np


def sigmoid(x):
    """The logistic function of each number: y_i = 1/(1 + exp(−x_i)).

    Backward. The derivative of the logistic function is y (1 − y), so

        y_i = 1/(1 + exp(−x_i))
        ∂y_i/∂x_j = δ_ij y_i (1 − y_i)
        dx_i = Σ_j dy_j ∂y_j/∂x_i = dy_i y_i (1 − y_i)
        dx = dy * y * (1 - y)

    The cache keeps y.
    """
    y = 1 / (1 + np.exp(-x))
    return y, y


def sigmoid_backward(dy, y):
    dx = dy * y * (1 - y)
    return dx


class LogSumExpCache(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def log_sum_exp(x):
    """The logarithm of the sum of exponentials over the last axis.

    x: (N, C)

    Forward. The largest number of a row is taken out, so that nothing overflows:

        m_n := max_c(x_nc)
        y_n = m_n + log(Σ_c exp(x_nc − m_n)) = log(Σ_c exp(x_nc))

    Backward. Each number gets its share p_nc, the softmax:

        p_nc := exp(x_nc − y_n)
        ∂y_n/∂x_nc = p_nc
        dx_nc = dy_n ∂y_n/∂x_nc = dy_n p_nc
        dx = dy[:, None] * np.exp(x - y[:, None])
    """
    m = x.max(axis=-1)
    y = m + np.log(np.exp(x - m[:, None]).sum(axis=-1))
    return y, LogSumExpCache(x, y)


def log_sum_exp_backward(dy, cache):
    x, y = cache
    dx = dy[:, None] * np.exp(x - y[:, None])
    return dx


class BatchNormCache(NamedTuple):
    xhat: np.ndarray
    sigma: np.ndarray
    gamma: np.ndarray


def batch_norm(x, gamma, beta, eps=1e-5):
    """Each column is shifted and scaled to mean 0 and variance 1 over the batch.

    x: (B, C); gamma, beta: (C)

    Forward.

        μ_c := 1/B Σ_b x_bc
        σ_c := √(1/B Σ_b (x_bc − μ_c)² + eps)
        x̂_bc := (x_bc − μ_c)/σ_c
        y_bc = γ_c x̂_bc + β_c

    Backward. γ and β are used by every row, so their gradients add up:

        dβ_c = Σ_b dy_bc
        dγ_c = Σ_b dy_bc x̂_bc
        dx̂_bc := dy_bc γ_c
        dx_bc = 1/σ_c (dx̂_bc − 1/B Σ_b' dx̂_b'c − x̂_bc/B Σ_b' dx̂_b'c x̂_b'c)
        dx = (g - g.mean(0) - xhat * (g * xhat).mean(0)) / sigma
    """
    mu = x.mean(0)
    sigma = np.sqrt(((x - mu) ** 2).mean(0) + eps)
    xhat = (x - mu) / sigma
    return gamma * xhat + beta, BatchNormCache(xhat, sigma, gamma)


def batch_norm_backward(dy, cache):
    xhat, sigma, gamma = cache
    dbeta = dy.sum(0)
    dgamma = (dy * xhat).sum(0)
    g = dy * gamma
    dx = (g - g.mean(0) - xhat * (g * xhat).mean(0)) / sigma
    return dx, dgamma, dbeta


class HuberCache(NamedTuple):
    r: np.ndarray
    delta: float


def huber(x, t, delta=1.0):
    """The mean of Huber's loss: quadratic for small errors, linear for large ones.

    Forward.

        r_n := x_n − t_n
        l_n := ½ r_n² where |r_n| ≤ delta, delta (|r_n| − ½ delta) elsewhere
        loss = 1/N Σ_n l_n

    Backward. The slope is the error itself, but at most delta:

        g_n := max(−delta, min(delta, r_n))
        dx_n = dloss ∂loss/∂x_n = 1/N dloss g_n
        dt_n = dloss ∂loss/∂t_n = −1/N dloss g_n
        dx = dloss * np.clip(r, -delta, delta) / r.size
    """
    r = x - t
    each = np.where(np.abs(r) <= delta, r**2 / 2, delta * (np.abs(r) - delta / 2))
    return each.mean(), HuberCache(r, delta)


def huber_backward(dloss, cache):
    r, delta = cache
    dx = dloss * np.clip(r, -delta, delta) / r.size
    return dx, -dx


class Conv1dCache(NamedTuple):
    x: np.ndarray
    w: np.ndarray


def conv1d(x, w, b):
    """A causal convolution: each position sees itself and the K − 1 positions before it.

    x: (T, I); w: (K, I, O); b: (O)

    Forward.

        y_to = b_o + Σ_{k, k ≤ t} Σ_i x_{t−k,i} w_kio

    Backward. The number x_si is in y_to for t = s + k:

        db_o = Σ_t dy_to
        dw_kio = Σ_{t, t ≥ k} x_{t−k,i} dy_to
        dx_si = Σ_{k, s + k < T} Σ_o dy_{s+k,o} w_kio
        db = dy.sum(0)
    """
    y = np.tile(b, (len(x), 1))
    for k in range(len(w)):
        if k < len(x):
            y[k:] += x[: len(x) - k] @ w[k]
    return y, Conv1dCache(x, w)


def conv1d_backward(dy, cache):
    x, w = cache
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for k in range(min(len(w), len(x))):
        dw[k] = x[: len(x) - k].T @ dy[k:]
        dx[: len(x) - k] += dy[k:] @ w[k].T
    db = dy.sum(0)
    return dx, dw, db


class BilinearCache(NamedTuple):
    x: np.ndarray
    w: np.ndarray
    z: np.ndarray


def bilinear(x, w, z):
    """A bilinear form of each pair of rows.

    Backward. Each of the three is multiplied by the other two:

        y_no = Σ_i Σ_j x_ni w_oij z_nj
        dx_ni = Σ_o Σ_j dy_no w_oij z_nj
        dw_oij = Σ_n dy_no x_ni z_nj
        dz_nj = Σ_o Σ_i dy_no w_oij x_ni
    """
    return np.einsum("ni,oij,nj->no", x, w, z), BilinearCache(x, w, z)


def bilinear_backward(dy, cache):
    x, w, z = cache
    dx = np.einsum("no,oij,nj->ni", dy, w, z)
    dw = np.einsum("no,ni,nj->oij", dy, x, z)
    dz = np.einsum("no,oij,ni->nj", dy, w, x)
    return dx, dw, dz


class HingeCache(NamedTuple):
    a: np.ndarray
    targets: np.ndarray


def hinge(scores, targets):
    """The hinge loss of several classes: every class that comes within 1 of the target's score costs.

    scores: (N, V); targets: (N)

    Forward. Of row n the target is t_n:

        t := targets
        a_nv := max(0, 1 + scores_nv − scores_{n,t_n})
        loss = 1/N Σ_n Σ_{v, v ≠ t_n} a_nv

    Backward.

        h_nv := [a_nv > 0] [v ≠ t_n]
        dscores_nv = 1/N dloss (h_nv − [v = t_n] Σ_v' h_nv')
        dscores = dloss * (h - y * h.sum(1, keepdims=True)) / len(h)
    """
    rows = np.arange(len(targets))
    a = np.maximum(0, 1 + scores - scores[rows, targets][:, None])
    return (a.sum() - len(rows)) / len(rows), HingeCache(a, targets)


def hinge_backward(dloss, cache):
    a, targets = cache
    y = np.zeros_like(a)
    y[np.arange(len(a)), targets] = 1
    h = (a > 0) * (1 - y)
    dscores = dloss * (h - y * h.sum(1, keepdims=True)) / len(h)
    return dscores

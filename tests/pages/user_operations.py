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


class CosineCache(NamedTuple):
    a: np.ndarray
    b: np.ndarray
    y: np.ndarray


def cosine(a, b):
    """The cosine of the angle between the rows of a and of b.

    a, b: (N, C)

    Forward.

        u_n := √(Σ_c a_nc²)
        v_n := √(Σ_c b_nc²)
        y_n = Σ_c a_nc b_nc/(u_n v_n)

    Backward. By the quotient rule, with ∂u_n/∂a_nc = a_nc/u_n,

        da_nc = dy_n ∂y_n/∂a_nc = dy_n (b_nc/(u_n v_n) − y_n a_nc/u_n²)
        db_nc = dy_n ∂y_n/∂b_nc = dy_n (a_nc/(u_n v_n) − y_n b_nc/v_n²)
        da = dy[:, None] * (b / (u * v) - y[:, None] * a / u**2)
        db = dy[:, None] * (a / (u * v) - y[:, None] * b / v**2)
    """
    u, v = np.sqrt((a**2).sum(1)), np.sqrt((b**2).sum(1))
    y = (a * b).sum(1) / (u * v)
    return y, CosineCache(a, b, y)


def cosine_backward(dy, cache):
    a, b, y = cache
    u = np.sqrt((a**2).sum(1, keepdims=True))
    v = np.sqrt((b**2).sum(1, keepdims=True))
    da = dy[:, None] * (b / (u * v) - y[:, None] * a / u**2)
    db = dy[:, None] * (a / (u * v) - y[:, None] * b / v**2)
    return da, db


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


class SquaredReluAttentionCache(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    a: np.ndarray


def squared_relu_attention(q, k, v):
    """Attention whose weights are max(0, s)² of the scores, without a softmax.

    q: (T, D); k: (S, D); v: (S, C)

    Forward.

        a_ts := 1/√D Σ_d q_td k_sd
        p_ts := max(0, a_ts)²
        y_tc = Σ_s p_ts v_sc

    Backward.

        dv_sc = Σ_t p_ts dy_tc
        dp_ts := Σ_c dy_tc v_sc
        da_ts := 2 dp_ts max(0, a_ts)
        dq_td = 1/√D Σ_s da_ts k_sd
        dk_sd = 1/√D Σ_t da_ts q_td
        dq = da @ k / np.sqrt(D)
        dk = da.T @ q / np.sqrt(D)
    """
    a = q @ k.T / np.sqrt(q.shape[1])
    return np.maximum(a, 0) ** 2 @ v, SquaredReluAttentionCache(q, k, v, a)


def squared_relu_attention_backward(dy, cache):
    q, k, v, a = cache
    D = q.shape[1]
    dv = (np.maximum(a, 0) ** 2).T @ dy
    da = 2 * (dy @ v.T) * np.maximum(a, 0)
    dq = da @ k / np.sqrt(D)
    dk = da.T @ q / np.sqrt(D)
    return dq, dk, dv


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


class GroupNormCache(NamedTuple):
    xhat: np.ndarray
    sigma: np.ndarray
    gamma: np.ndarray


def group_norm(x, gamma, beta, eps=1e-5):
    """The numbers of each group g of a row b get mean 0 and variance 1.

    x: (B, G, C)

    Forward.

        μ_bg := mean_c(x_bgc)
        σ_bg := √(mean_c((x_bgc − μ_bg)²) + eps)
        x̂_bgc := (x_bgc − μ_bg)/σ_bg
        y_bgc = γ_gc x̂_bgc + β_gc

    Backward.

        dβ_gc = Σ_b dy_bgc
        dγ_gc = Σ_b dy_bgc x̂_bgc
        dx̂_bgc := dy_bgc γ_gc
        dx_bgc = (dx̂_bgc − mean_c'(dx̂_bgc') − x̂_bgc mean_c'(dx̂_bgc' x̂_bgc'))/σ_bg
    """
    mu = x.mean(-1, keepdims=True)
    sigma = np.sqrt(((x - mu) ** 2).mean(-1, keepdims=True) + eps)
    xhat = (x - mu) / sigma
    return gamma * xhat + beta, GroupNormCache(xhat, sigma, gamma)


def group_norm_backward(dy, cache):
    xhat, sigma, gamma = cache
    g = dy * gamma
    dx = (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True)) / sigma
    return dx, (dy * xhat).sum(0), dy.sum(0)


class WeightNormCache(NamedTuple):
    x: np.ndarray
    v: np.ndarray
    g: np.ndarray
    s: np.ndarray


def weight_norm(x, v, g):
    """A linear layer whose columns have the lengths g: the weight is g_o v_io/‖v_o‖.

    x: (N, I); v: (I, O); g: (O)

    Forward.

        s_o := √(Σ_i v_io²)
        w_io := g_o v_io/s_o
        y_no = Σ_i x_ni w_io

    Backward.

        dx_ni = Σ_o dy_no w_io
        dw_io := Σ_n x_ni dy_no
        dg_o = Σ_i dw_io v_io/s_o
        dv_io = g_o/s_o (dw_io − v_io/s_o² Σ_i' dw_i'o v_i'o)
        dx = dy @ w.T
    """
    s = np.sqrt((v**2).sum(0))
    return x @ (g * v / s), WeightNormCache(x, v, g, s)


def weight_norm_backward(dy, cache):
    x, v, g, s = cache
    w = g * v / s
    dx = dy @ w.T
    dw = x.T @ dy
    dg = (dw * v).sum(0) / s
    dv = g / s * (dw - v / s**2 * (dw * v).sum(0))
    return dx, dv, dg


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

"""Second derivatives: the backward of a backward, for Hessian-vector products by hand.

A backward is an operation too. Its arguments are dy and those of the forward, its results their gradients. Here dy is
called gy, and the gradients gx, gw, ..., so that d is free for a second loss L, a function of the gradients:

    gradients = op_backward(gy, cache)
    dgy, dx, ... = op_backward_backward(dgradients, (gy, cache))

dgx = ∂L/∂gx has the shape of x. The results are ∂L/∂gy and ∂L/∂x, one for each argument of the forward; dx says how the
gradients change with x while gy stays.

For L = Σ gx v, the product of the gradient with a direction v, the results mean more. gx = Jᵀ gy with the Jacobian
J = ∂y/∂x, so L = gyᵀ J v, and dgy = J v is how y changes along v. Backward runs from the last operation to the first,
so its backward runs from the first to the last and carries these changes forward. A second, ordinary backward then adds
up the dx. What it gives for all parameters is the product of the Hessian of the loss with v.

The cache is that of the reference: twins keep other things.
Source: Pearlmutter, "Fast exact multiplication by the Hessian", 1994.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend import Array, array_module, cast, widen
from ..checks import expect_like
from ..dispatch import expect_cache
from .attention import AttentionCache, stack_groups
from .layernorm import LayerNormCache
from .linear import LinearCache
from .softmax import softmax_backward


def linear_backward_backward(dgradients: tuple[Array, ...], cache: tuple[Array, LinearCache]) -> tuple[Array, ...]:
    """dgy = dgx w + x dgw + dgb: the backward of `linear_backward`, with b and without.

    dgradients: dgx (..., I), dgw (I, O) and dgb (O,), without dgb if there is no b. Returns dgy (..., O), dx (..., I),
    dw (I, O) and db (O,), without db if there is no b. Raises ValueError if shapes do not fit.

    Forward, which is the backward of `linear`:

        gx_ni = Σ_o gy_no w_io        gw_io = Σ_n x_ni gy_no        gb_o = Σ_n gy_no

    Backward. gy is in all three, x only in gw, w only in gx. Each is a product, so each factor gets the other one:

        dgy_no = Σ_i dgx_ni w_io + Σ_i x_ni dgw_io + dgb_o
        dx_ni = Σ_o dgw_io gy_no        dw_io = Σ_n dgx_ni gy_no

    b is in none of them, so db = 0. dgy is the change of y = x w + b by the product rule, for the changes dgx of x, dgw
    of w and dgb of b. An affine map has no second derivative by x alone, nor by w alone: dx has only dgw in it, and dw
    only dgx.

        dx = gy @ dgw.T
        dw = dgx.T @ gy
        dgy = dgx @ w + x @ dgw
        dgy += dgb

    The cache keeps gy, x and w.
    """
    gy, (x, w, has_bias) = expect_kept(cache, LinearCache)
    dgx, dgw, *of_bias = dgradients
    expect_like("dgx", dgx, x.shape)
    expect_like("dgw", dgw, w.shape)
    xp, shapes = array_module(gy), (gy.shape, x.shape)
    dgx, x, gy = xp.reshape(dgx, (-1, w.shape[0])), xp.reshape(x, (-1, w.shape[0])), xp.reshape(gy, (-1, w.shape[1]))
    dx = gy @ dgw.T
    dw = dgx.T @ gy
    dgy = dgx @ w + x @ dgw
    dgy, dx = (xp.reshape(d, shape) for d, shape in zip((dgy, dx), shapes, strict=True))
    if not has_bias:
        return dgy, dx, dw
    (dgb,) = of_bias
    expect_like("dgb", dgb, gy.shape[1:])
    dgy += dgb
    return dgy, dx, dw, xp.zeros_like(dgb)


def softmax_backward_backward(dgz: Array, cache: tuple[Array, Array]) -> tuple[Array, Array]:
    """dgy_i = p_i (dgz_i − Σ_k dgz_k p_k): the backward of `softmax_backward`.

    dgz: (..., V). Returns dgy and dz, both (..., V). Raises ValueError if shapes do not fit.

    Forward, which is the softmax p and its backward:

        p_k = exp(z_k)/Σ_j exp(z_j)        m = Σ_i gy_i p_i        gz_k = p_k (gy_k − m)

    Backward. The Jacobian of the softmax is symmetric, so gy gets the same product as z did:

        dgy_i = Σ_k dgz_k ∂gz_k/∂gy_i = Σ_k dgz_k p_k (δ_ik − p_i) = p_i (dgz_i − Σ_k dgz_k p_k)

    p is a function of z. It is in gz twice, as the factor and in m:

        a = Σ_k dgz_k p_k
        dp_i := dgz_i (gy_i − m) − gy_i Σ_k dgz_k p_k = dgz_i (gy_i − m) − gy_i a

    From p to z it is the backward of the softmax once more:

        dz_k = p_k (dp_k − Σ_i dp_i p_i)
        Σ_k dz_k = 0        (a constant added to the row changes no gradient either)

    In NumPy:

        dgy = softmax_backward(dgz, p)
        dp = dgz * (gy - xp.sum(gy * p, axis=-1, keepdims=True)) - gy * xp.sum(dgz * p, axis=-1, keepdims=True)
        dz = softmax_backward(dp, p)

    The cache keeps gy and p. With p taken as a constant, dz would be 0.
    """
    gy, p = expect_kept(cache, np.ndarray)
    expect_like("dgz", dgz, p.shape)
    xp, dtype, dgz, gy = array_module(p), p.dtype, widen(dgz), widen(gy)
    dgy = softmax_backward(dgz, p)
    dp = dgz * (gy - xp.sum(gy * p, axis=-1, keepdims=True)) - gy * xp.sum(dgz * p, axis=-1, keepdims=True)
    dz = softmax_backward(dp, p)
    return cast(dgy, dtype), cast(dz, dtype)


def layernorm_backward_backward(
    dgradients: tuple[Array, Array, Array], cache: tuple[Array, LayerNormCache]
) -> tuple[Array, Array, Array, Array]:
    """dgy = γ P dgx + x̂ dgγ + dgβ: the backward of `layernorm_backward`, where P dgx is the change of x̂.

    dgradients: dgx (..., C), dggamma (C,) and dgbeta (C,). Returns dgy and dx, both (..., C), dgamma and dbeta (C,).
    Raises ValueError if shapes do not fit.

    Forward, which is the backward of `layernorm`, with r = 1/σ and the gradient h of x̂. r is used twice; its use in gx
    is called s:

        μ_n = mean_c(x_nc)        r_n = 1/√(mean_c((x_nc − μ_n)²) + eps)        x̂_nc = (x_nc − μ_n) r_n
        h_nc = gy_nc γ_c        m_n = mean_c(h_nc x̂_nc)
        s_n = r_n        gx_nk = s_n (h_nk − mean_c(h_nc) − x̂_nk m_n)
        gγ_c = Σ_n gy_nc x̂_nc        gβ_c = Σ_n gy_nc

    Backward. First through what is linear: gx is a symmetric matrix times h, so that h gets the same product with dgx,

        q_n = mean_c(dgx_nc x̂_nc)
        dh_nk := r_n (dgx_nk − mean_c(dgx_nc) − x̂_nk q_n)
        dgy_nc = dh_nc γ_c + dgγ_c x̂_nc + dgβ_c
        dγ_c = Σ_n dh_nc gy_nc

    β is in none of the gradients, so dβ = 0. Then through x̂ and s, which are functions of x. x̂ is in gx as a factor and
    in m, and it is in gγ; gx is s times something:

        dx̂_nk := dgγ_k gy_nk − r_n (dgx_nk m_n + h_nk q_n)
        ds_n := Σ_k dgx_nk gx_nk/s_n

    From x̂ to x it is the backward of layer norm again, and ∂s/∂x_k = −r² ∂σ/∂x_k = −r² x̂_k/C:

        dx_nk = r_n (dx̂_nk − mean_c(dx̂_nc) − x̂_nk mean_c(dx̂_nc x̂_nc)) − ds_n r_n² x̂_nk/C
            = r_n (dx̂_nk − mean_c(dx̂_nc) − x̂_nk mean_c(dx̂_nc x̂_nc)) − r_n x̂_nk mean_c(dgx_nc gx_nc)
        Σ_k dx_nk = 0

    In NumPy, where `project` is the product with the symmetric matrix:

        dh = project(dgx)
        dgy = dh * gamma + dggamma * xhat + dgbeta
        dgamma = xp.sum(dh * gy, axis=rows)
        dxhat = dggamma * gy - rstd * (dgx * m + h * q)
        dx = project(dxhat) - rstd * xhat * xp.mean(dgx * gx, axis=-1, keepdims=True)

    The cache keeps gy, x, γ, and two numbers of each row, as that of `layernorm` does. With s taken as a constant, the
    last term of dx would be missing.
    """
    gy, (x, shift, rstd, gamma) = expect_kept(cache, LayerNormCache)
    dgx, dggamma, dgbeta = dgradients
    for name, dg, shape in zip(
        ("dgx", "dggamma", "dgbeta"), dgradients, (x.shape, gamma.shape, gamma.shape), strict=True
    ):
        expect_like(name, dg, shape)
    xp, dtype, rows = array_module(x), x.dtype, tuple(range(x.ndim - 1))
    dgx, gy, xhat = widen(dgx), widen(gy), (widen(x) - x[..., :1] - shift) * rstd

    def project(d: Array) -> Array:
        return rstd * (d - xp.mean(d, axis=-1, keepdims=True) - xhat * xp.mean(d * xhat, axis=-1, keepdims=True))

    h = gy * gamma
    m, q = (xp.mean(d * xhat, axis=-1, keepdims=True) for d in (h, dgx))
    gx = project(h)
    dh = project(dgx)
    dgy = dh * gamma + dggamma * xhat + dgbeta
    dgamma = xp.sum(dh * gy, axis=rows)
    dbeta = xp.zeros_like(dgamma)
    dxhat = dggamma * gy - rstd * (dgx * m + h * q)
    dx = project(dxhat) - rstd * xhat * xp.mean(dgx * gx, axis=-1, keepdims=True)
    dgy, dx, dgamma, dbeta = (cast(d, dtype) for d in (dgy, dx, dgamma, dbeta))
    return dgy, dx, dgamma, dbeta


def attention_backward_backward(
    dgradients: tuple[Array, Array, Array], cache: tuple[Array, AttentionCache]
) -> tuple[Array, Array, Array, Array]:
    """dgy = dp v + p dgv: the backward of `attention_backward`, where dp is the change of the probabilities p.

    dgradients: dgq (B, H, T, D), dgk and dgv (B, G, S, D). Returns dgy and dq (B, H, T, D), dk and dv (B, G, S, D). All
    numbers must be finite. Raises ValueError if shapes do not fit.

    Forward, which is attention with its backward. m_hts = 1 if query t may see key s, and g is the key head of h:

        a_hts = Σ_d q_htd k_gsd with g = ⌊h G/H⌋        w_hts = m_hts exp(a_hts/√D)
        Z_ht = Σ_s w_hts        p_hts = w_hts/Z_ht where Z_ht > 0, 0 elsewhere
        gp_hts = Σ_d gy_htd v_gsd with g = ⌊h G/H⌋
        n_ht = Σ_s p_hts gp_hts        ga_hts = p_hts (gp_hts − n_ht)/√D
        gq_htd = Σ_s ga_hts k_gsd with g = ⌊h G/H⌋
        gk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t ga_hts q_htd
        gv_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t p_hts gy_htd

    Backward. First through gq and gk to ga. This is the change of the scores along dgq and dgk:

        dga_hts := Σ_d dgq_htd k_gsd + Σ_d q_htd dgk_gsd with g = ⌊h G/H⌋

    Then through the softmax, as in `softmax_backward_backward`. gp gets the change of the probabilities:

        c_hts = dga_hts/√D        l_ht = Σ_s p_hts c_hts        dgp_hts := p_hts (c_hts − l_ht)
        dgy_htd = Σ_s dgp_hts v_gsd + Σ_s p_hts dgv_gsd with g = ⌊h G/H⌋
        dv_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t dgp_hts gy_htd

    p is in ga and in gv:

        dp_hts := c_hts (gp_hts − n_ht) − gp_hts l_ht + Σ_d gy_htd dgv_gsd with g = ⌊h G/H⌋
        da_hts := p_hts (dp_hts − Σ_s' p_hts' dp_hts')/√D

    Last, q and k are factors of the scores, with da, and factors of each other's gradients, with ga:

        dq_htd = Σ_s da_hts k_gsd + Σ_s ga_hts dgk_gsd with g = ⌊h G/H⌋
        dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t (da_hts q_htd + ga_hts dgq_htd)

    With the rows of a group's heads stacked, as in `attention`:

        gp = gy @ xp.matrix_transpose(v)
        ga = softmax_backward(gp, p) * scale
        dga = dgq @ xp.matrix_transpose(k) + q @ xp.matrix_transpose(dgk)
        c = dga * scale
        dgp = softmax_backward(c, p)
        dgy = dgp @ v + p @ dgv
        dv = xp.matrix_transpose(dgp) @ gy
        dp = c * (gp - xp.sum(p * gp, axis=-1, keepdims=True)) - gp * xp.sum(p * c, axis=-1, keepdims=True)
        dp += gy @ xp.matrix_transpose(dgv)
        da = softmax_backward(dp, p) * scale
        dq = da @ k + ga @ dgk
        dk = xp.matrix_transpose(da) @ q + xp.matrix_transpose(ga) @ dgq

    The cache keeps gy, q, k, v and the probabilities. Where p is 0, as where the pattern forbids a pair, so are dgp
    and da: the pattern is not needed.
    """
    gy, (q, k, v, p) = expect_kept(cache, AttentionCache)
    dgq, dgk, dgv = dgradients
    xp, dtype, shape, shape_of_keys = array_module(q), q.dtype, q.shape, k.shape
    for name, dg, expected in zip(
        ("dgq", "dgk", "dgv"), dgradients, (shape, shape_of_keys, shape_of_keys), strict=True
    ):
        expect_like(name, dg, expected)
    scale = 1 / math.sqrt(shape[-1])
    gy, q, p, dgq = (stack_groups(each, shape_of_keys[1]) for each in (gy, q, p, dgq))
    k, v, dgk, dgv = map(widen, (k, v, dgk, dgv))
    gp = gy @ xp.matrix_transpose(v)
    ga = softmax_backward(gp, p) * scale
    dga = dgq @ xp.matrix_transpose(k) + q @ xp.matrix_transpose(dgk)
    c = dga * scale
    dgp = softmax_backward(c, p)
    dgy = dgp @ v + p @ dgv
    dv = xp.matrix_transpose(dgp) @ gy
    dp = c * (gp - xp.sum(p * gp, axis=-1, keepdims=True)) - gp * xp.sum(p * c, axis=-1, keepdims=True)
    dp += gy @ xp.matrix_transpose(dgv)
    da = softmax_backward(dp, p) * scale
    dq = da @ k + ga @ dgk
    dk = xp.matrix_transpose(da) @ q + xp.matrix_transpose(ga) @ dgq
    dgy, dq, dk, dv = (cast(d, dtype) for d in (xp.reshape(dgy, shape), xp.reshape(dq, shape), dk, dv))
    return dgy, dq, dk, dv


def expect_kept(cache: Any, kind: type) -> tuple[Array, Any]:
    """gy and the cache of the forward. Raises TypeError unless that is of this kind, as the cache of a reference is."""
    if not isinstance(cache, tuple) or len(cache) != 2:
        raise TypeError(f"cache: expected gy and the cache of the forward, got {type(cache).__name__}")
    expect_cache("cache", cache[1], kind)
    return cache

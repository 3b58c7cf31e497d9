"""Mistakes in the gradients of operations.

On the page of each operation the site shows those that replace one of its equations.
"""

from __future__ import annotations

from .mistake import Mistake

SOFTMAX = "dz_k = Σ_i dy_i ∂y_i/∂z_k = Σ_i dy_i y_i (δ_ik − y_k) = y_k (dy_k − Σ_i dy_i y_i)"
NORM = "dx_k = Σ_c g_c ∂x̂_c/∂x_k = (g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ"
SCORES = "dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')"
KEYS = "dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_hts q_htd"
GELU = "dx_i = dy_i ∂y_i/∂x_i = dy_i (Φ_i + x_i φ_i)"
CROSS_ENTROPY = "dz_nv = dℓ_n ∂ℓ_n/∂z_nv = dℓ_n (p_nv − t_nv)"

MISTAKES = (
    Mistake(
        name="linear: the bias gets the mean over the rows",
        title="The bias gets the mean over the rows",
        effect="The gradient of the bias is N times too small. Adam divides each gradient by its own size, so "
        "training looks normal.",
        operation="linear",
        equation="db_o = Σ_n dy_no",
        wrong="db_o = mean_n(dy_no)",
        code="db = dy.mean(axis=0)",
    ),
    Mistake(
        name="linear: the weights' gradient is divided by the number of rows",
        title="The weights' gradient is divided by the number of rows",
        effect="dy already contains the 1/N of the loss. Divided twice, dw is N times too small, while dx is right.",
        operation="linear",
        equation="dw_io = Σ_n x_ni dy_no",
        wrong="dw_io = 1/N Σ_n x_ni dy_no",
        code="dw = x.T @ dy / len(x)",
    ),
    Mistake(
        name="relu: the result is compared with ≥",
        title="The result is compared with ≥",
        effect="y is never negative, so every element passes its gradient on, even where forward gave 0.",
        operation="relu",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i positive_i",
        wrong="dx_i = dy_i [y_i ≥ 0]",
        code="dx = dy * (y >= 0)",
    ),
    Mistake(
        name="gelu: the product rule has two terms",
        title="The product rule has two terms",
        effect="Without x φ(x) the gradient is too small where x is positive and too large where it is negative: "
        "near x = ±1 the slope is off by 0.24.",
        operation="gelu",
        equation=GELU,
        wrong="dx_i = dy_i Φ_i",
        code="dx = dy * cdf",
    ),
    Mistake(
        name="GELU: backward with a constant right to three digits",
        title="Constants are typed in decimal",
        effect="The gradient of the tanh form is right to three digits. A tolerance of 1e-3 hides this; a check in "
        "float64 does not.",
        operation="gelu",
        equation="w_i := ∂u_i/∂x_i = √(2/π) (1 + 3·0.044715 x_i²)",
        wrong="w_i := ∂u_i/∂x_i = 0.798 (1 + 3·0.044715 x_i²)",
        file="ops/activations.py",
        replacements=(("        slope = math.sqrt(2 / math.pi) * (1", "        slope = 0.798 * (1"),),
    ),
    Mistake(
        name="silu: the factor x is left out of the second term",
        title="The factor x is left out of the second term",
        effect="The slope is then positive everywhere, but silu falls to the left of x = −1.28.",
        operation="silu",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i s_i (1 + x_i (1 − s_i))",
        wrong="dx_i = dy_i s_i (1 + (1 − s_i))",
    ),
    Mistake(
        name="SiLU: the slope of the sigmoid is left out",
        title="The slope of the sigmoid is left out",
        effect="The product rule has two terms. With the first alone the slope is never negative.",
        operation="silu",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i s_i (1 + x_i (1 − s_i))",
        wrong="dx_i = dy_i s_i",
        file="ops/activations.py",
        replacements=(("    dx = dy * (s * (1 + x * (1 - s)))\n    return", "    dx = dy * s\n    return"),),
    ),
    Mistake(
        name="tanh: x is used in place of y",
        title="x is used in place of y",
        effect="Nearly right for small x, where y is nearly x, and far off for large ones, where it even turns "
        "negative.",
        operation="tanh",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i (1 − y_i²)",
        wrong="dx_i = dy_i (1 − x_i²)",
    ),
    Mistake(
        name="an activation: its backward is left out",
        title="The activation is skipped on the way back",
        effect="Units that are switched off get a gradient too, and pass one on.",
        operation="dense",
        equation="dh_no = dy_no ∂y_no/∂h_no",
        wrong="dh_no = dy_no",
        code="dh = dy",
        file="ops/dense.py",
        replacements=(
            (
                (
                    "    dh = cache.activation_backward(dy, cache.activated)\n"
                    "    dx, dw, db = linear_backward(dh, cache.linear)\n"
                    "    return"
                ),
                "    dh = dy\n    dx, dw, db = linear_backward(dh, cache.linear)\n    return",
            ),
        ),
    ),
    Mistake(
        name="a kernel: a bias of one number is spread over all columns",
        title="A bias of one number is spread over all columns",
        effect="A bias of the wrong shape is accepted.",
        operation="dense",
        file="kernels/numba_linear.py",
        replacements=((" and (b is None or b.shape == w.shape[1:])", ""),),
    ),
    Mistake(
        name="swiglu: the gate gets no factor from the other branch",
        title="The gate gets no factor from the other branch",
        effect="Each factor of a product gets the other one. Here dgate has the wrong size, and the wrong sign where "
        "u is negative.",
        operation="swiglu",
        equation="dg_i = dy_i ∂y_i/∂g_i = dy_i u_i s_i (1 + g_i (1 − s_i))",
        wrong="dg_i = dy_i s_i (1 + g_i (1 − s_i))",
    ),
    Mistake(
        name="SwiGLU: the gate's gradient has the sigmoid in place of silu's slope",
        title="The sigmoid is taken for the slope of silu",
        effect="silu(g) = g s is a product of two functions of g. Only one of them is differentiated.",
        operation="swiglu",
        equation="dg_i = dy_i ∂y_i/∂g_i = dy_i u_i s_i (1 + g_i (1 − s_i))",
        wrong="dg_i = dy_i u_i s_i",
        file="ops/swiglu.py",
        replacements=(
            (
                ("    dgate = dy * up * (s * (1 + gate * (1 - s)))\n    dup = dy * (gate * s)\n    return"),
                "    dgate = dy * up * s\n    dup = dy * (gate * s)\n    return",
            ),
        ),
    ),
    Mistake(
        name="softmax: only the diagonal of the Jacobian is used",
        title="Only the diagonal of the Jacobian is used",
        effect="Every score changes the sum Z, and with it every probability. The right dz sums to 0 in each row; "
        "this one does not.",
        operation="softmax",
        equation=SOFTMAX,
        wrong="dz_k = dy_k y_k (1 − y_k)",
    ),
    Mistake(
        name="softmax: backward divided by the batch size",
        title="It is divided by the size of the batch",
        effect="A mean belongs to the loss, which has divided already. All gradients further back are too small by "
        "the same factor.",
        operation="softmax",
        equation=SOFTMAX,
        wrong="dz_nk = 1/N y_nk (dy_nk − Σ_i dy_ni y_ni)",
        code="return dz / len(y)",
        file="ops/softmax.py",
        replacements=(
            (
                "    dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))\n    return",
                "    dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True)) / y.shape[0]\n    return",
            ),
        ),
    ),
    Mistake(
        name="log softmax: y is taken for a probability",
        title="y is taken for a probability",
        effect="y is the logarithm of a probability, which is negative: every score gets a gradient of the wrong sign "
        "for the other classes.",
        operation="log_softmax",
        equation="dz_k = Σ_i dy_i ∂y_i/∂z_k = Σ_i dy_i (δ_ik − exp(y_k)) = dy_k − exp(y_k) Σ_i dy_i",
        wrong="dz_k = dy_k − y_k Σ_i dy_i",
    ),
    Mistake(
        name="cross-entropy: forward takes the mean, backward leaves out 1/N",
        title="Forward takes the mean, backward the sum",
        effect="Gradients are too large by a factor: the number of rows that count. So they grow with the batch. Adam "
        "hides it; clipping and SGD do not.",
        operation="cross_entropy",
        equation=CROSS_ENTROPY,
        wrong="dz_nv = dloss k_n (p_nv − t_nv)",
        file="ops/cross_entropy.py",
        replacements=(
            (
                "    dlogits *= dloss / count\n    dlogits *= counted[:, None]\n    return",
                "    dlogits *= dloss\n    dlogits *= counted[:, None]\n    return",
            ),
        ),
    ),
    Mistake(
        name="cross entropy: rows that do not count still pass a gradient",
        title="Rows that do not count still pass a gradient",
        effect="Ignored rows, such as padding, get p − t as if they had a target, and pull on the model.",
        operation="cross_entropy",
        equation=CROSS_ENTROPY,
        wrong="dz_nv = dloss (p_nv − t_nv)/count",
    ),
    Mistake(
        name="cross entropy: the mean is over all rows, not those that count",
        title="The mean is over all rows, not those that count",
        effect="The more padding a batch has, the smaller its gradient.",
        operation="cross_entropy",
        equation=CROSS_ENTROPY,
        wrong="dz_nv = dloss k_n (p_nv − t_nv)/N",
    ),
    Mistake(
        name="layer norm: backward right only while gamma is uniform",
        title="γ is applied outside the means",
        effect="Right as long as all γ are equal, as they are before training, and wrong from the first step on.",
        operation="layernorm",
        equation=NORM,
        wrong="dx_k = γ_k (dy_k − mean_c(dy_c) − x̂_k mean_c(dy_c x̂_c))/σ",
        code="dx = gamma * rstd * (dy - dy.mean(-1) - xhat * (dy * xhat).mean(-1))",
        file="ops/layernorm.py",
        replacements=(
            ("    g = dy * cache.gamma\n", "    g = dy\n"),
            (
                "\n    dx = rstd * (g - g.mean(axis=-1, keepdims=True) -",
                "\n    dx = cache.gamma * rstd * (g - g.mean(axis=-1, keepdims=True) -",
            ),
        ),
    ),
    Mistake(
        name="layernorm: the third term is forgotten",
        title="The third term is forgotten",
        effect="x changes σ as well. Without this term the gradient pushes along x̂, a direction that normalising "
        "removes.",
        operation="layernorm",
        equation=NORM,
        wrong="dx_k = (g_k − mean_c(g_c))/σ",
    ),
    Mistake(
        name="layernorm: β gets the mean over the rows",
        title="β gets the mean over the rows",
        effect="The gradient of β is N times too small.",
        operation="layernorm",
        equation="dβ_c = Σ_n dy_nc",
        wrong="dβ_c = mean_n(dy_nc)",
    ),
    Mistake(
        name="RMS norm: backward without the term of the root mean square",
        title="The scale is treated as a constant",
        effect="Each x_k changes ρ and so the whole row. The gradient keeps its component along x̂, which should "
        "vanish.",
        operation="rmsnorm",
        equation="dx_k = Σ_c g_c ∂x̂_c/∂x_k = (g_k − x̂_k mean_c(g_c x̂_c))/ρ",
        wrong="dx_k = g_k/ρ",
        file="ops/rmsnorm.py",
        replacements=(
            (
                "    dx = rrms * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))\n    return",
                "    dx = rrms * g\n    return",
            ),
        ),
    ),
    Mistake(
        name="embedding: dW[ids] += dy, so that repeated tokens lose gradient",
        title="A buffered addition",
        effect="Only the last occurrence of each token counts. Frequent tokens lose nearly all of their gradient. "
        "Batches without a repeated token pass every test.",
        operation="embedding",
        equation="dtable_vc = Σ_n dy_nc ∂y_nc/∂table_vc = Σ_n [ids_n = v] dy_nc",
        wrong="dtable_vc = Σ_n [ids_n = v, Σ_n' [n' > n, ids_n' = v] = 0] dy_nc",
        code="dtable[ids] += dy",
        file="ops/embedding.py",
        replacements=(("    scatter_add(dtable, ids, dy)\n    if out", "    dtable[ids] += dy\n    if out"),),
    ),
    Mistake(
        name="gather: assigned instead of added",
        title="Assigned instead of added",
        effect="Where a position is taken twice, only the last gradient is left.",
        operation="gather",
        equation="dx_btc = Σ_k dy_bkc ∂y_bkc/∂x_btc = Σ_k [places_bk = t] dy_bkc",
        wrong="dx_btc = Σ_k [places_bk = t, Σ_l [l > k, places_bl = t] = 0] dy_bkc",
        code="dx[rows, places] = dy",
    ),
    Mistake(
        name="gather: every row takes from the first",
        title="Every row takes from the first",
        effect="Positions of other sequences are read, and get the gradient.",
        operation="gather",
        file="ops/gather.py",
        replacements=(
            ("    rows = xp.arange(B)[:, None] * T + places", "    rows = xp.arange(B)[:, None] * 0 + places"),
        ),
    ),
    Mistake(
        name="rotary positions: backward rotates forward",
        title="Rotated forward once more",
        effect="The transpose of a rotation is the rotation back. Position 0 is right, and the error grows with the "
        "angle.",
        operation="rotary",
        equation="dx_bhtd = dy_bhtd cos_ti − σ_d dy_bhtj sin_ti with i = i_d, j = j_d",
        wrong="dx_bhtd = dy_bhtd cos_ti + σ_d dy_bhtj sin_ti with i = i_d, j = j_d",
        code="dx = rotate(dy, cos, sin)",
        file="ops/rotary.py",
        replacements=(
            (
                "    dx = rotate(dy, cache.cos, -cache.sin)\n    return",
                "    dx = rotate(dy, cache.cos, cache.sin)\n    return",
            ),
        ),
    ),
    Mistake(
        name="rotary positions: neighbours form a pair, not one number from each half",
        title="Neighbours form a pair, not one number from each half",
        effect="The result is a rotation too, and its gradient is right, but published weights expect the other pairs.",
        operation="rotary",
        file="ops/rotary.py",
        replacements=(
            ("    a, b = x[..., :half], x[..., half:]\n", "    a, b = x[..., ::2], x[..., 1::2]\n"),
            ("    half = x.shape[-1] // 2\n", ""),
        ),
    ),
    Mistake(
        name="sinusoids with base 100,000",
        title="100,000 instead of 10,000",
        effect="Nothing fails, since no gradient depends on it, but published weights were trained with other "
        "positions.",
        operation="sinusoidal_positions",
        equation="θ_c = 10000^(−2⌊c/2⌋/C)",
        wrong="θ_c = 100000^(−2⌊c/2⌋/C)",
        file="ops/positions.py",
        replacements=(("BASE = 10_000 ", "BASE = 100_000 "),),
    ),
    Mistake(
        name="dropout: the scale is left out of backward",
        title="The scale is left out of backward",
        effect="All gradients further back are too small by the factor 1 − p.",
        operation="dropout",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i k_i scale",
        wrong="dx_i = dy_i k_i",
    ),
    Mistake(
        name="one dropout object in two places: the second forward overwrites the first mask",
        title="One object with one mask is used in two places",
        effect="The second forward overwrites the mask of the first, whose backward then lets gradients through that "
        "forward dropped. Here masks are in caches, not in layers.",
        operation="dropout",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i k_i scale",
        wrong="dx_i = dy_i scale",
        code="self.mask = rng.random(x.shape) > p",
        file="nn/dropout.py",
        replacements=(
            (
                "        return (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)",
                (
                    "        y, self.mask = (x, None) if key is None or self.p == 0 else ops.dropout(x, self.p, key)\n"
                    "        return y, self.mask"
                ),
            ),
            (
                "        return dy if cache is None else ops.dropout_backward(dy, cache)",
                "        return dy if self.mask is None else ops.dropout_backward(dy, self.mask)",
            ),
        ),
    ),
    Mistake(
        name="dropout: not scaled by 1/(1 - p)",
        title="Neither forward nor backward is scaled",
        effect="The gradient is right, but activations are smaller in training than when the model is used.",
        operation="dropout",
        file="ops/dropout.py",
        replacements=(("keep.reshape(shape), LEVELS / (LEVELS - threshold)", "keep.reshape(shape), 1.0"),),
    ),
    Mistake(
        name="pooling over the padding too",
        title="The mean is over all T positions, padding included",
        effect="The vector of a text, and so its class, depends on the other texts in its batch.",
        operation="mean_pool",
        equation="a_bt = [t < n_b]/max(n_b, 1)",
        wrong="a_bt = [t < n_b]/T",
        file="ops/pooling.py",
        replacements=(
            (
                "    return xp.arange(x.shape[1])[None, :] < lengths[:, None]",
                "    return xp.arange(x.shape[1])[None, :] < x.shape[1] + 0 * lengths[:, None]",
            ),
        ),
    ),
    Mistake(
        name="mean pool: the padding gets a gradient",
        title="The padding gets a gradient",
        effect="Training changes vectors that the forward did not read.",
        operation="mean_pool",
        equation="dx_btc = dy_bc ∂y_bc/∂x_btc = a_bt dy_bc",
        wrong="dx_btc = dy_bc/max(n_b, 1)",
    ),
    Mistake(
        name="max pool: every element as large as the maximum gets the gradient",
        title="Every element as large as the maximum gets the gradient",
        effect="Padding that is larger than the maximum gets a gradient, and so does every member of a tie.",
        operation="max_pool",
        equation="dx_btc = dy_bc ∂y_bc/∂x_btc = live_b dy_bc where t = w_bc, 0 elsewhere",
        wrong="dx_btc = [x_btc ≥ y_bc] dy_bc",
        code="dx = dy * (x >= y)",
    ),
    Mistake(
        name="attention: the second term of the softmax is left out",
        title="The second term of the softmax is left out",
        effect="Raising one score lowers the other probabilities of its row. Without this term, the rows of dz do "
        "not sum to 0.",
        operation="attention",
        equation=SCORES,
        wrong="dz_hts = p_hts dp_hts",
    ),
    Mistake(
        name="attention: the sum runs over the queries",
        title="The sum runs over the queries",
        effect="The softmax is over the keys of a query, a row, and so is the sum. The shapes fit either way.",
        operation="attention",
        equation=SCORES,
        wrong="dz_hts = p_hts (dp_hts − Σ_t' p_ht's dp_ht's)",
        code="dz = p * (dp - (p * dp).sum(axis=-2, keepdims=True))",
    ),
    Mistake(
        name="attention: the scaling is used in forward only",
        title="The scaling is used in forward only",
        effect="dq and dk are √D times too large, while dv is right.",
        operation="attention",
        equation="da_hts = dz_hts/√D",
        wrong="da_hts = dz_hts",
    ),
    Mistake(
        name="attention: dK transposed, hidden by a reshape",
        title="dk is transposed, and a reshape hides it",
        effect="The numbers are right, but in the wrong places. With weights near 0 they were all so small that a "
        "test with a tolerance of 1e-4 passed.",
        operation="attention",
        equation=KEYS,
        wrong="dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_{h, t, (s D + d) mod S} q_{h, t, ⌊(s D + d)/S⌋}",
        code="dk = (q.T @ da).reshape(k.shape)",
        file="ops/attention.py",
        replacements=(
            (
                "    dk = da.swapaxes(-1, -2) @ q\n",
                "    dk = (q.swapaxes(-1, -2) @ da).reshape(k.shape)\n",
            ),
        ),
    ),
    Mistake(
        name="grouped attention: dK comes from the first head of each group alone",
        title="Each key head gets the gradient of only one of its query heads",
        effect="With shared keys, the gradients of all query heads of the group add up.",
        operation="attention",
        equation=KEYS,
        wrong="dk_gsd = Σ_t da_hts q_htd with h = ⌊g H/G⌋",
        file="ops/attention.py",
        replacements=(
            (
                "    dk = da.swapaxes(-1, -2) @ q\n",
                "    dk = da[:, :, : shape[2]].swapaxes(-1, -2) @ q[:, :, : shape[2]]\n",
            ),
        ),
    ),
    Mistake(
        name="attention: a factor in the reference alone, before dK",
        title="dk has a wrong factor",
        effect="dk is seven times too large, in the reference alone.",
        operation="attention",
        file="ops/attention.py",
        replacements=(("    dk = da.swapaxes(-1, -2) @ q\n", "    dk = 7 * da.swapaxes(-1, -2) @ q\n"),),
    ),
    Mistake(
        name="float64 from float32",
        title="An array of float64 ones as a factor, and no cast",
        effect="The gradients of float32 arrays are float64.",
        operation="attention",
        file="ops/attention.py",
        replacements=(
            (
                "k.shape[1]\n    scale = 1 / math.sqrt(shape[-1])",
                "k.shape[1]\n    scale = array_module(q).ones(1) / math.sqrt(shape[-1])",
            ),
            (
                "    dq, dk, dv = (x.astype(dy.dtype, copy=False) for x in (dq.reshape(shape), dk, dv))\n",
                "    dq = dq.reshape(shape)\n",
            ),
        ),
    ),
    Mistake(
        name="a kernel: tiled attention without the row sum of dO times O",
        title="A tile leaves out the row sum of dy times y",
        effect="It is the second term of the softmax's gradient: without it the rows of dz do not sum to 0.",
        operation="attention",
        file="kernels/numpy_attention.py",
        replacements=(("output_delta = with_column(output, -delta)", "output_delta = with_column(output, 0 * delta)"),),
    ),
    Mistake(
        name="a kernel: the log-sum-exp without the maximum",
        title="The log-sum-exp is kept without the row's maximum",
        effect="Where scores are large, backward and forward compute different probabilities.",
        operation="attention",
        file="kernels/numpy_attention.py",
        replacements=(
            ("(log_sum, ()) if bound <= SAFE else (shift, after)", "log_sum, ()"),
            ("np.ascontiguousarray(queries), (shift, log_sum)\n", "np.ascontiguousarray(queries), (log_sum,)\n"),
        ),
    ),
    Mistake(
        name="a kernel: an empty tile is taken for a full one",
        title="An empty tile is taken for a full one",
        effect="Work is done that should be skipped.",
        operation="attention",
        file="ops/patterns.py",
        replacements=(("        if left > last + S - T:\n            return Tile.EMPTY\n", ""),),
    ),
    Mistake(
        name="a kernel: all heads take the first head's pattern",
        title="All heads take the first head's pattern",
        effect="The other heads see, and pass gradients to, the wrong keys.",
        operation="attention",
        file="kernels/numpy_attention.py",
        replacements=(
            (
                "    for heads, own in pattern.of_heads(H):\n",
                "    for heads, own in [(slice(0, H), pattern.of_heads(H)[0][1])]:\n",
            ),
        ),
    ),
    Mistake(
        name="a kernel: part of a group overwrites the gradient of the part before it",
        title="Part of a group overwrites the gradient of the part before it",
        effect="With shared keys, the gradients of all query heads of the group add up.",
        operation="attention",
        file="kernels/numpy_attention.py",
        replacements=(("        if heads.start % shared == 0:\n", "        if True:\n"),),
    ),
    Mistake(
        name="relative shift: shifted the same way again",
        title="Shifted the same way again",
        effect="Gradients reach the wrong distances; only the middle row is right.",
        operation="relative_shift",
        equation="dx_tj = dy_{t, j−(T−1−t)} where 0 ≤ j − (T − 1 − t) < S, 0 elsewhere",
        wrong="dx_tj = dy_{t, j−t} where 0 ≤ j − t < S, 0 elsewhere",
    ),
    Mistake(
        name="relative shift: the windows move the other way",
        title="The windows move the other way",
        effect="Forward reads the scores of other distances, and backward writes there.",
        operation="relative_shift",
        file="ops/relative.py",
        replacements=(
            (
                "    return rows, xp.arange(S)[None, :] + (T - 1 - rows)",
                "    return rows, xp.arange(S)[None, :] + rows",
            ),
        ),
    ),
    Mistake(
        name="relative attention: q gets only one of its two gradients",
        title="q gets only one of its two gradients",
        effect="q is used twice, for the content and for the distance, so its gradient is a sum.",
        operation="relative_attention",
        equation="dq_htd = dqu_htd + dqw_htd",
        wrong="dq_htd = dqu_htd",
    ),
    Mistake(
        name="relative attention: the gradient of r is averaged over the sequences",
        title="The gradient of r is averaged over the sequences",
        effect="All sequences share r: their gradients are summed, not averaged.",
        operation="relative_attention",
        equation="dr_hjd = Σ_{n,t} db_nhtj qw_nhtd",
        wrong="dr_hjd = mean_n(Σ_t db_nhtj qw_nhtd)",
    ),
    Mistake(
        name="relative attention: the gradient of the keys with the positions' bias",
        title="The keys get the bias of the positions",
        effect="The keys meet the queries with the content's bias. Right as long as both biases are equal, as they "
        "are at the start.",
        operation="relative_attention",
        equation="dk_hsd = Σ_t da_hts qu_htd",
        wrong="dk_hsd = Σ_t da_hts qw_htd",
        file="ops/relative.py",
        replacements=(("@ (q + content_bias[:, None])\n    dr", "@ (q + position_bias[:, None])\n    dr"),),
    ),
    Mistake(
        name="a kernel: the vectors of distances are shared, and the last tile's gradient is all they get",
        title="The last tile overwrites the gradient of r",
        effect="All tiles and sequences share r: their gradients are summed.",
        operation="relative_attention",
        file="kernels/numpy_relative.py",
        replacements=(("            dr[heads][near] += (db", "            dr[heads][near] = (db"),),
    ),
)

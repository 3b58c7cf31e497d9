"""Mistakes in hand-written gradients, most of them found in other projects, where the tests passed: by operation.

`equation` is an equation of the derivation, and `wrong` what was written in its place. A test plants each of them and
sees that the check of the derivation fails.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """effect: what it does to the gradient. code: the wrong line of a program, if that says more than the equation."""

    title: str
    equation: str
    wrong: str
    effect: str
    code: str = ""


SOFTMAX = "dz_k = Σ_i dy_i ∂y_i/∂z_k = Σ_i dy_i y_i (δ_ik − y_k) = y_k (dy_k − Σ_i dy_i y_i)"
NORM = "dx_k = Σ_c g_c ∂x̂_c/∂x_k = (g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ"
SCORES = "dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')"
KEYS = "dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_hts q_htd"
GELU = "dx_i = dy_i ∂y_i/∂x_i = dy_i (Φ_i + x_i φ_i)"
CROSS_ENTROPY = "dz_nv = dℓ_n ∂ℓ_n/∂z_nv = dloss k_n (p_nv − t_nv)/max(1, count)"

MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "linear": (
        Mistake(
            "The bias gets the mean over the rows",
            "db_o = Σ_n dy_no",
            "db_o = mean_n(dy_no)",
            "The gradient of the bias is N times too small. Adam divides each gradient by its own size, so "
            "training looks normal.",
            "db = dy.mean(axis=0)",
        ),
        Mistake(
            "The weights' gradient is divided by the number of rows",
            "dw_io = Σ_n x_ni dy_no",
            "dw_io = 1/N Σ_n x_ni dy_no",
            "dy already contains the 1/N of the loss. Divided twice, dw is N times too small, while dx is right.",
            "dw = x.T @ dy / len(x)",
        ),
    ),
    "relu": (
        Mistake(
            "The result is compared with ≥",
            "dx_i = dy_i ∂y_i/∂x_i = dy_i positive_i",
            "dx_i = dy_i [y_i ≥ 0]",
            "y is never negative, so every element passes its gradient on, even where forward gave 0.",
            "dx = dy * (y >= 0)",
        ),
    ),
    "gelu": (
        Mistake(
            "The product rule has two terms",
            GELU,
            "dx_i = dy_i Φ_i",
            "Without x φ(x) the gradient is too small where x is positive and too large where it is negative: "
            "near x = ±1 the slope is off by 0.24.",
            "dx = dy * cdf",
        ),
        Mistake(
            "Constants are typed in decimal",
            "∂u_i/∂x_i = √(2/π) (1 + 3·0.044715 x_i²)",
            "∂u_i/∂x_i = 0.798 (1 + 0.134 x_i²)",
            "The gradient of the tanh form is right to three digits. A tolerance of 1e-3 hides this; a check in "
            "float64 does not.",
        ),
    ),
    "silu": (
        Mistake(
            "The factor x is left out of the second term",
            "dx_i = dy_i ∂y_i/∂x_i = dy_i s_i (1 + x_i (1 − s_i))",
            "dx_i = dy_i s_i (1 + (1 − s_i))",
            "The slope is then positive everywhere, but silu falls to the left of x = −1.28.",
        ),
    ),
    "tanh": (
        Mistake(
            "x is used in place of y",
            "dx_i = dy_i ∂y_i/∂x_i = dy_i (1 − y_i²)",
            "dx_i = dy_i (1 − x_i²)",
            "Nearly right for small x, where y is nearly x, and far off for large ones, where it even turns negative.",
        ),
    ),
    "dense": (
        Mistake(
            "The activation is skipped on the way back",
            "dw_io = Σ_n x_ni dh_no",
            "dw_io = Σ_n x_ni dy_no",
            "The weights of units that are switched off get a gradient too.",
        ),
    ),
    "swiglu": (
        Mistake(
            "The gate gets no factor from the other branch",
            "dg_i = dy_i ∂y_i/∂g_i = dy_i u_i s_i (1 + g_i (1 − s_i))",
            "dg_i = dy_i s_i (1 + g_i (1 − s_i))",
            "Each factor of a product gets the other one. Here dgate has the wrong size, and the wrong sign where "
            "u is negative.",
        ),
    ),
    "softmax": (
        Mistake(
            "Only the diagonal of the Jacobian is used",
            SOFTMAX,
            "dz_k = dy_k y_k (1 − y_k)",
            "Every score changes the sum Z, and with it every probability. The right dz sums to 0 in each row; "
            "this one does not.",
        ),
        Mistake(
            "It is divided by the size of the batch",
            SOFTMAX,
            "dz_nk = 1/N y_nk (dy_nk − Σ_i dy_ni y_ni)",
            "A mean belongs to the loss, which has divided already. All gradients further back are too small by the "
            "same factor.",
            "return dz / len(y)",
        ),
    ),
    "log_softmax": (
        Mistake(
            "y is taken for a probability",
            "dz_k = Σ_i dy_i ∂y_i/∂z_k = Σ_i dy_i (δ_ik − exp(y_k)) = dy_k − exp(y_k) Σ_i dy_i",
            "dz_k = dy_k − y_k Σ_i dy_i",
            "y is the logarithm of one, which is negative: every score gets a gradient of the wrong sign for the "
            "other classes.",
        ),
    ),
    "cross_entropy": (
        Mistake(
            "Forward takes the mean, backward the sum",
            CROSS_ENTROPY,
            "dz_nv = dloss k_n (p_nv − t_nv)",
            "Gradients are too large by the number of rows that count, so they grow with the batch. Adam hides it; "
            "clipping and SGD do not.",
        ),
        Mistake(
            "Rows that do not count still pass a gradient",
            CROSS_ENTROPY,
            "dz_nv = dloss (p_nv − t_nv)/max(1, count)",
            "Ignored rows, such as padding, get p − t as if they had a target, and pull on the model.",
        ),
        Mistake(
            "The mean is over all rows, not those that count",
            CROSS_ENTROPY,
            "dz_nv = dloss k_n (p_nv − t_nv)/N",
            "The more padding a batch has, the smaller its gradient.",
        ),
    ),
    "layernorm": (
        Mistake(
            "γ is applied outside the means",
            NORM,
            "dx_k = γ_k (dy_k − mean_c(dy_c) − x̂_k mean_c(dy_c x̂_c))/σ",
            "Right as long as all γ are equal, as they are before training, and wrong from the first step on.",
            "dx = gamma * rstd * (dy - dy.mean(-1) - xhat * (dy * xhat).mean(-1))",
        ),
        Mistake(
            "The third term is forgotten",
            NORM,
            "dx_k = (g_k − mean_c(g_c))/σ",
            "x changes σ as well. Without this term the gradient pushes along x̂, a direction that normalising removes.",
        ),
        Mistake(
            "β gets the mean over the rows",
            "dβ_c = Σ_n dy_nc",
            "dβ_c = mean_n(dy_nc)",
            "The gradient of β is N times too small.",
        ),
    ),
    "rmsnorm": (
        Mistake(
            "The scale is treated as a constant",
            "dx_k = Σ_c g_c ∂x̂_c/∂x_k = (g_k − x̂_k mean_c(g_c x̂_c))/ρ",
            "dx_k = g_k/ρ",
            "Each x_k changes ρ and so the whole row. The gradient keeps its component along x̂, which should vanish.",
        ),
    ),
    "embedding": (
        Mistake(
            "A buffered addition",
            "dtable_vc = Σ_n dy_nc ∂y_nc/∂table_vc = Σ_n [ids_n = v] dy_nc",
            "dtable_vc = Σ_n [ids_n = v, Σ_m [m > n, ids_m = v] = 0] dy_nc",
            "Only the last occurrence of each token counts. Frequent tokens lose nearly all of their gradient. "
            "Batches without a repeated token pass every test.",
            "dtable[ids] += dy",
        ),
    ),
    "gather": (
        Mistake(
            "Assigned instead of added",
            "dx_btc = Σ_k dy_bkc ∂y_bkc/∂x_btc = Σ_k [places_bk = t] dy_bkc",
            "dx_btc = Σ_k [places_bk = t, Σ_l [l > k, places_bl = t] = 0] dy_bkc",
            "Where a position is taken twice, only the last gradient is left.",
            "dx[rows, places] = dy",
        ),
    ),
    "rotary": (
        Mistake(
            "Rotated forward once more",
            "dx_td = Σ_k dy_tk ∂y_tk/∂x_td = dy_td cos_ti − σ_d dy_tj sin_ti with i = i_d, j = j_d",
            "dx_td = dy_td cos_ti + σ_d dy_tj sin_ti with i = i_d, j = j_d",
            "The transpose of a rotation is the rotation back. Position 0 is right, and the error grows with the "
            "angle.",
            "dx = rotate(dy, cos, sin)",
        ),
    ),
    "sinusoidal_positions": (
        Mistake(
            "100,000 for 10,000",
            "θ_c = 10000^(−2⌊c/2⌋/C)",
            "θ_c = 100000^(−2⌊c/2⌋/C)",
            "Nothing fails, since no gradient depends on it, but published weights were trained with other positions.",
        ),
    ),
    "dropout": (
        Mistake(
            "The scale is left out of backward",
            "dx_i = dy_i ∂y_i/∂x_i = dy_i k_i/(1 − r)",
            "dx_i = dy_i k_i",
            "All gradients further back are too small by the factor 1 − p.",
        ),
        Mistake(
            "One object with one mask is used in two places",
            "dx_i = dy_i ∂y_i/∂x_i = dy_i k_i/(1 − r)",
            "dx_i = dy_i/(1 − r)",
            "The second forward overwrites the mask of the first, whose backward then lets gradients through that "
            "forward dropped. Here masks are in caches, not in layers.",
            "self.mask = rng.random(x.shape) > p",
        ),
    ),
    "mean_pool": (
        Mistake(
            "The mean over T, padding included",
            "a_bt = [t < n_b]/max(n_b, 1)",
            "a_bt = [t < n_b]/T",
            "The other texts of its batch change the vector of a text, and so its class.",
        ),
        Mistake(
            "The padding gets a gradient",
            "dx_btc = dy_bc ∂y_bc/∂x_btc = a_bt dy_bc",
            "dx_btc = dy_bc/max(n_b, 1)",
            "Training changes vectors that the forward did not read.",
        ),
    ),
    "max_pool": (
        Mistake(
            "Every element as large as the maximum gets the gradient",
            "dx_btc = dy_bc ∂y_bc/∂x_btc = live_b [t = w_bc] dy_bc",
            "dx_btc = [x_btc ≥ y_bc] dy_bc",
            "Padding that is larger than the maximum gets a gradient, and so does every member of a tie.",
            "dx = dy * (x >= y)",
        ),
    ),
    "attention": (
        Mistake(
            "The second term of the softmax is left out",
            SCORES,
            "dz_hts = p_hts dp_hts",
            "Raising one score lowers the other probabilities of its row. Without this term, the rows of dz do not "
            "sum to 0.",
        ),
        Mistake(
            "The sum runs over the queries",
            SCORES,
            "dz_hts = p_hts (dp_hts − Σ_t' p_ht's dp_ht's)",
            "The softmax is over the keys of a query, a row, and so is the sum. The shapes fit either way.",
            "dz = p * (dp - (p * dp).sum(axis=-2, keepdims=True))",
        ),
        Mistake(
            "The scaling is used in forward only",
            "da_hts = dz_hts/√D",
            "da_hts = dz_hts",
            "dq and dk are √D times too large, while dv is right.",
        ),
        Mistake(
            "dk is transposed, and a reshape hides it",
            KEYS,
            "dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_{h, t, (s D + d) mod S} q_{h, t, ⌊(s D + d)/S⌋}",
            "The numbers are right, but in the wrong places. With weights near 0 they were all so small that a test "
            "with a tolerance of 1e-4 passed.",
            "dk = (q.T @ da).reshape(k.shape)",
        ),
        Mistake(
            "Each key head gets the gradient of only one of its query heads",
            KEYS,
            "dk_gsd = Σ_t da_hts q_htd with h = ⌊g H/G⌋",
            "With shared keys, the gradients of all query heads of the group add up.",
        ),
    ),
    "relative_shift": (
        Mistake(
            "Shifted the same way again",
            "dx_tj = dy_{t, j−(T−1−t)} where 0 ≤ j − (T − 1 − t) < S, 0 elsewhere",
            "dx_tj = dy_{t, j−t} where 0 ≤ j − t < S, 0 elsewhere",
            "Gradients reach other distances than those of their scores; only the middle row is right.",
        ),
    ),
    "relative_attention": (
        Mistake(
            "q gets only one of its two gradients",
            "dq_htd = dqu_htd + dqw_htd",
            "dq_htd = dqu_htd",
            "q is used twice, for the content and for the distance, so its gradient is a sum.",
        ),
        Mistake(
            "The gradient of r is averaged over the sequences",
            "dr_hjd = Σ_{n,t} db_nhtj qw_nhtd",
            "dr_hjd = mean_n(Σ_t db_nhtj qw_nhtd)",
            "All sequences share r: their gradients are summed, not averaged.",
        ),
    ),
}

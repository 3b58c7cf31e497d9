"""Rows taken from a table or from a sequence."""

from __future__ import annotations

from .entry import OperationEntry, given

ENTRIES = [
    OperationEntry("embedding", analytic=True, helpers=True)
    .case("", lambda d: given(d.integers("B T", d.V), d("V C")))
    .mistake(
        "A buffered addition",
        "Only the last occurrence of each token counts. Frequent tokens lose nearly all of their gradient. Batches "
        "without a repeated token pass every test.",
        name="embedding: dW[ids] += dy, so that repeated tokens lose gradient",
        equation="dtable_vc = Σ_n dy_nc ∂y_nc/∂table_vc = Σ_n [ids_n = v] dy_nc",
        wrong="dtable_vc = Σ_n [ids_n = v, Σ_n' [n' > n, ids_n' = v] = 0] dy_nc",
        code="dtable[ids] += dy",
        replace={"scatter_add(dtable, ids, dy)\n    if out": "dtable[ids] += dy\n    if out"},
    )
    .survivors(
        "embedding_backward",
        {
            "dtable = xp.zeros(cache.shape, dtype=dy.dtype) if out is None or dy.dtype != dtype else out -> "
            "dtable = xp.zeros(cache.shape, dtype=dy.dtype)": "a table of its own is added to out afterwards"
        },
    ),
    OperationEntry("gather", analytic=True)
    .case("", lambda d: given(d("B T C"), d.integers("B K", d.T)))
    .case("one place again and again", lambda d: given(d("B T C"), d.integers("B K", 1)))
    .mistake(
        "Assigned instead of added",
        "Where a position is taken twice, only the last gradient is left.",
        equation="dx_btc = Σ_k dy_bkc ∂y_bkc/∂x_btc = Σ_k [places_bk = t] dy_bkc",
        wrong="dx_btc = Σ_k [places_bk = t, Σ_l [l > k, places_bl = t] = 0] dy_bkc",
        code="dx[rows, places] = dy",
    )
    .mistake(
        "Every row takes from the first",
        "Positions of other sequences are read, and get the gradient.",
        replace={"    rows = xp.arange(B)[:, None] * T + places": "    rows = xp.arange(B)[:, None] * 0 + places"},
    ),
]

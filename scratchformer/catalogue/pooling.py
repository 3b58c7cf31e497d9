"""Pooling: one vector of a sequence of vectors."""

from __future__ import annotations

import numpy as np

from ..testing.draw import Sizes
from .entry import Arguments, OperationEntry, given, normal


def whole(x: np.ndarray, lengths: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Lengths that say that nothing is padding, if there are none."""
    return {"lengths": np.full(x.shape[0], x.shape[1]) if lengths is None else lengths}


def with_ties(d: Sizes) -> Arguments:
    """Two positions with the same vector, and a sequence that is all padding."""
    x, lengths = d("B T C"), d.lengths()
    lengths[0] = 0
    x[-1, 1] = x[-1, 0]
    return given(x, lengths)


ENTRIES = [
    OperationEntry("mean_pool", names=whole, analytic=True)
    .extension("padding", "padding", n="T")
    .case("", normal("B T C"))
    .case("padding", lambda d: given(d("B T C"), d.lengths()))
    .derivation("padding", with_ties)
    .mistake(
        "The mean is over all T positions, padding included",
        "The vector of a text, and so its class, depends on the other texts in its batch.",
        equation="a_bt = [t < n_b]/max(n_b, 1)",
        wrong="a_bt = [t < n_b]/T",
        replace={
            "return xp.arange(x.shape[1])[None, :] < lengths[:, None]": (
                "return xp.arange(x.shape[1])[None, :] < x.shape[1] + 0 * lengths[:, None]"
            )
        },
    )
    .mistake(
        "The padding gets a gradient",
        "Training changes vectors that the forward did not read.",
        equation="dx_btc = dy_bc ∂y_bc/∂x_btc = a_bt dy_bc",
        wrong="dx_btc = dy_bc/max(n_b, 1)",
    ),
    OperationEntry("max_pool", names=whole)
    .extension("padding", "padding", n="T", live="1")
    .case("", normal("B T C"))
    .case("padding", lambda d: given(d("B T C"), d.lengths()))
    .derivation("padding", with_ties)
    .mistake(
        "Every element as large as the maximum gets the gradient",
        "Padding that is larger than the maximum gets a gradient, and so does every member of a tie.",
        equation="dx_btc = dy_bc ∂y_bc/∂x_btc = live_b dy_bc where t = w_bc, 0 elsewhere",
        wrong="dx_btc = [x_btc ≥ y_bc] dy_bc",
        code="dx = dy * (x >= y)",
    )
    .survivors(
        "max_pool_backward",
        {
            "dx = xp.where((steps == winner[:, None, :]) & live[:, :, None], dy[:, None, :], 0) -> "
            "dx = xp.where((steps == winner[:, None, :]) & live[:, None, :], dy[:, None, :], 0)": "live is (B, 1)"
        },
    ),
]

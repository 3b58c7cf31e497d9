"""Affine map with activation in compiled code: ReLU is part of the pass that adds the bias, others are a second one."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ops
from ..ops.activations import Activation
from . import numba_linear
from .numba_activations import BACKWARD, FORWARD
from .numba_linear import affine_map, as_row, gradients, matrix
from .numba_math import rows


def fits(x: np.ndarray, w: np.ndarray, b: np.ndarray, activation: Activation = "relu") -> bool:
    return isinstance(activation, str) and activation in BACKWARD and b is not None and numba_linear.fits(x, w, b)


def dense(x: np.ndarray, w: np.ndarray, b: np.ndarray, activation: str = "relu") -> tuple[np.ndarray, Any]:
    """As `ops.dense`, in one or two passes after the product.

    Forward, with all leading axes folded into n. Each activation is h Φ(h), as in `numpy_dense`:

        h_no = Σ_i x_ni w_io + b_o
        Φ_no = [h_no > 0] where activation = relu,
            1/(1 + exp(−h_no)) where activation = silu,
            ½ (1 + erf(h_no/√2)) where activation = gelu,
            ½ (1 + tanh(√(2/π) (h_no + 0.044715 h_no³))) elsewhere
        y_no = h_no Φ_no

    Since ½ (1 + tanh u) = 1/(1 + exp(−2u)), the last line is a sigmoid too, of 2u:

        u_no := √(2/π) h_no (1 + 0.044715 h_no²)
        ½ (1 + tanh(u_no)) = 1/(1 + exp(−2 u_no))

    Backward. The slope of y is a function of h; of ReLU it is a function of y, since y is positive where h is:

        slope_no := ∂y_no/∂h_no
        [h_no > 0] = [y_no > 0]        kept_no = y_no where activation = relu, h_no elsewhere
        dh_no = dy_no slope_no
        dx_ni = Σ_o dh_no w_io        dw_io = Σ_n x_ni dh_no        db_o = Σ_n dh_no

    dh is rounded to the type of dy in the pass that multiplies it with the slope. Then it is the dy of `linear`:

        BACKWARD[activation](dy.reshape(-1), kept.reshape(-1), dh.reshape(-1))
        dw, db = gradients(dh, flat, table, across, True, dx)

    The cache keeps x, w, and one array of the size of y.
    """
    flat, (table, across), relu = rows(x), matrix(w), activation == "relu"
    h = y = np.empty((len(flat), w.shape[1]), flat.dtype)
    affine_map(flat, table, across, as_row(b, flat), 0.0 if relu else -np.inf, h)
    if not relu:
        y = np.empty_like(h)
        FORWARD[activation](h.reshape(-1), y.reshape(-1))
    return y.view(x.dtype).reshape(*x.shape[:-1], w.shape[1]), ((x, w), h, activation)


def dense_backward(dy: np.ndarray, cache: tuple[tuple, np.ndarray, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dw, db), as `ops.dense_backward`; in bfloat16 dw and db are float32."""
    (x, w), kept, activation = cache
    flat, (table, across) = rows(x), matrix(w)
    dy, dh, dx = rows(dy), np.empty_like(kept), np.empty_like(flat)
    BACKWARD[activation](dy.reshape(-1), kept.reshape(-1), dh.reshape(-1))
    dw, db = gradients(dh, flat, table, across, True, dx)
    return dx.view(x.dtype).reshape(x.shape), dw, db


ops.dense.add_twin(np.ndarray, fits, dense, dense_backward, fast=True)

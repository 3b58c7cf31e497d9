"""One new token through a decoder block on NumPy: as in `numpy_extend`, with cross-attention between the two halves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..nn import CrossAttention, DecoderBlock, FeedForward, LayerNorm, SelfAttention
from ..nn.decoder_block import extend_decoder_block
from ..nn.stack import Stored
from ..ops import Pattern
from ..ops.attention import masked_softmax
from .numpy_arrays import one_real_dtype
from .numpy_extend import Keys, affine, around, attend, feed_forward

plain = extend_decoder_block.reference


@extend_decoder_block.twin(np.ndarray)
def extend(
    x: np.ndarray,
    block: Any,
    stored: Stored,
    past: int,
    memory: tuple[np.ndarray, np.ndarray],
    pattern: Pattern | None = None,
) -> np.ndarray:
    """As `nn.decoder_block.extend_decoder_block`, which does the rest: layers not known here, and several new tokens.

    Of all past positions, only their keys and values are needed, and of the memory only its keys and values, which are
    the same for every new token. In a pre-norm block, with K_hsd and V_hsd the keys and values of S = past + 1 target
    positions, the last of which is new,

        μ = mean_c(x_c)        σ = √(mean_c((x_c − μ)²) + eps)        x̂_c = γ1_c (x_c − μ)/σ + β1_c
        q_hd = Σ_c x̂_c Wq_chd        K_hsd = Σ_c x̂_c Wk_chd with s = past        V_hsd = Σ_c x̂_c Wv_chd with s = past
        z_hs = Σ_d q_hd K_hsd/√D        p_hs = softmax_s(z_hs)
        g_c = x_c + bo_c + Σ_{h,d,s} p_hs V_hsd Wo_hdc

    The cross-attention sees the first ℓ of the memory's positions m, with keys A_hmd and values E_hmd:

        μ2 = mean_c(g_c)        σ2 = √(mean_c((g_c − μ2)²) + eps)        ĝ_c = γ2_c (g_c − μ2)/σ2 + β2_c
        r_hd = Σ_c ĝ_c Wr_chd        w_hm = Σ_d r_hd A_hmd/√D
        P_hm = [m < ℓ] exp(w_hm)/Σ_n [n < ℓ] exp(w_hn)
        h_c = g_c + bu_c + Σ_{h,d,m} P_hm E_hmd Wu_hdc

    The feed-forward layer is the third branch:

        μ3 = mean_c(h_c)        σ3 = √(mean_c((h_c − μ3)²) + eps)        f_c = γ3_c (h_c − μ3)/σ3 + β3_c
        y_c = h_c + b2_c + Σ_f W2_fc max(0, b1_f + Σ_c' f_c' W1_c'f)

    Each branch is a few operations on one row:

        g = around(first, rows, lambda n: attend(n, block.attention, stored, past, seen))
        h = around(second, g, lambda n: look(n, block.cross, memory, pattern))
        return around(third, h, lambda n: feed_forward(n, block.feedforward))[:, None]

    (There is no backward: generation differentiates nothing.)
    """
    known = (
        x.shape[1] == 1
        and past >= 0
        and len(stored[0]) == len(memory[0]) == len(x)
        and type(block).branches is DecoderBlock.branches
        and type(block.attention) is SelfAttention
        and type(block.cross) is CrossAttention
        and type(block.feedforward) is FeedForward
        and {type(block.norm1), type(block.norm2), type(block.norm3)} == {LayerNorm}
    )
    if not (known and one_real_dtype(x, *stored, *memory, block.norm1.gamma.data)):
        return plain(x, block, stored, past, memory, pattern)
    first, second, third = block.branches()
    rows = x[:, 0]
    seen: list[tuple[slice, Keys]] = [(slice(0, stored[0].shape[1]), slice(0, past + 1))]
    g = around(first, rows, lambda n: attend(n, block.attention, stored, past, seen))
    h = around(second, g, lambda n: look(n, block.cross, memory, pattern))
    return around(third, h, lambda n: feed_forward(n, block.feedforward))[:, None]


def look(
    x: np.ndarray, layer: CrossAttention, memory: tuple[np.ndarray, np.ndarray], pattern: Pattern | None
) -> np.ndarray:
    """The output of `layer.attend` for one query a sequence, x (B, C)."""
    keys, values = memory
    B, D = len(x), layer.head_width
    q = affine(x, layer.query)
    q *= 1 / math.sqrt(D)
    if pattern is not None:
        pattern.check(B)
    p = masked_softmax(q.reshape(B, -1, 1, D) @ keys.swapaxes(2, 3), pattern)
    return affine((p @ values).reshape(B, -1), layer.unify)

"""Attention layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import nn, ops
from ..testing.draw import Draw, Sizes
from .derived import derived
from .entry import DerivationCase, Entry, LayerCase, layer_of, on, padded
from .tables import LLAMA3

TWO_HEADS = {"H": 2, "D": 3, "C": 6, "B": 4, "T": 5, "S": 7}  # sizes for derivations, all different


def basic_attention(d: Sizes) -> DerivationCase:
    """Scores are not divided by √C: with large x, nothing but round-off would be left of their gradients."""
    return derived(d, nn.BasicSelfAttention(), min(1, 1 / d.scale) * d("B T C"))


def single_head(d: Sizes) -> DerivationCase:
    layer = nn.SingleHeadAttention(d.C, d.D, causal=d.seed % 2 == 1)
    x = d("B T C")
    return derived(d, layer, x, names={"D": d.D, "m": before(d, layer.causal)})


def before(d: Sizes, causal: bool) -> np.ndarray:
    """Which position sees which, (T, T): all, or if `causal` those before it and itself."""
    return np.tri(d.T) if causal else np.ones((d.T, d.T))


def multi_head_loop(d: Sizes) -> DerivationCase:
    d.sizes |= TWO_HEADS
    layer = nn.MultiHeadLoop(d.C, d.H, causal=d.seed % 2 == 1)

    parts = {f"head{i}": head for i, head in enumerate(layer.heads, 1)}
    x = d("B T C")
    return derived(d, layer, x, names={"D": d.D, "m": before(d, layer.heads[0].causal)}, parts=parts)


def cross_attention(d: Sizes) -> DerivationCase:
    d.sizes |= TWO_HEADS
    lengths = d.lengths("S")
    names = {"H": d.H, "D": d.D, "m": lengths}
    return derived(d, nn.CrossAttention(d.C, d.H), d("B T C"), d("B S C"), ops.Padding(lengths), names=names)


def self_attention(d: Sizes) -> DerivationCase:
    d.sizes |= TWO_HEADS
    layer = nn.SelfAttention(d.C, d.H, causal=d.seed % 2 == 1)
    seen = edges(d, d.T, layer.causal)
    names = {"H": d.H, "D": d.D, "m": seen}
    return derived(d, layer, d("B T C"), ops.Edges(seen), names=names)


def edges(d: Sizes, n: int, causal: bool = False) -> np.ndarray:
    """Which of n positions sees which, (n, n); the last sees none. causal: none sees those after it."""
    seen = d.generator.random((n, n)) < 0.6
    seen = np.tril(seen) if causal else seen
    seen[-1] = False
    return seen


def relative_attention(d: Sizes) -> DerivationCase:
    d.sizes |= TWO_HEADS
    layer = nn.RelativeSelfAttention(d.C, d.H, causal=d.seed % 2 == 1)
    x, seen = d("B S C"), edges(d, d.S, layer.causal)
    names = {"H": d.H, "D": d.D, "P": layer.distances(d.T, d.S, x), "m": seen[-d.T :]}
    return derived(d, layer, x, ops.Edges(seen), names=names, queries=d.T)


def rotary(d: Draw, padding: bool = False, **options: Any) -> LayerCase:
    d.sizes.setdefault("C", 4 * d.H)
    layer = nn.RotarySelfAttention(d.C, d.H, **options)
    return padded(d, layer) if padding else on(layer, d("B T C"))


def grouped_rotary(d: Draw, **options: Any) -> LayerCase:
    """Four query heads and two key heads, with a width that does not depend on C."""
    d.sizes["H"], d.sizes["C"] = 4, d.K
    return rotary(d, kv_heads=2, head_width=4, **options)


def rotary_attention(d: Sizes) -> DerivationCase:
    d.sizes |= {"G": 2, "H": 4, "D": 6, "C": 7, "B": 3, "T": 5}
    d.sizes["N"] = min(4, d.D)
    layer = nn.RotarySelfAttention(d.C, d.H, d.G, d.D, causal=d.seed % 2 == 1, rotary_width=d.N)
    seen = edges(d, d.T, layer.causal)
    names = {"G": d.G, "H": d.H, "D": d.D, "θ": ops.rotary_frequencies(d.N), "N": d.N, "m": seen}
    return derived(d, layer, d("B T C"), ops.Edges(seen), names=names)


ENTRIES = [
    Entry("RotarySelfAttention")
    .case("", rotary)
    .case("grouped, causal, padding, bias", grouped_rotary, padding=True, causal=True, bias=True)
    .case(
        "grouped, causal, window, scaling, output bias",
        grouped_rotary,
        causal=True,
        window=2,
        base=100.0,
        scaling=LLAMA3,
        output_bias=True,
    )
    .case(
        "norms of heads, partly rotated",
        grouped_rotary,
        causal=True,
        query_key_norm="heads",
        rotary_width=2,
    )
    .case("norms of all, not rotated", grouped_rotary, causal=True, query_key_norm="all", rotary_width=0)
    .derivation("", rotary_attention)
    .mistake(
        "The gradient of the queries is rotated forward once more",
        "Backward needs the transpose, the rotation by the opposite angle. Position 0 is not rotated, and right.",
        equation="dq_htd = Σ_d' R_td'd dq̂_htd'",
        wrong="dq_htd = Σ_d' R_tdd' dq̂_htd'",
    )
    .mistake(
        "The gradient of the keys is not rotated back",
        "dk is that of the rotated keys. Position 0 is right.",
        equation="dk_gsd = Σ_d' R_sd'd dk̂_gsd'",
        wrong="dk_gsd = dk̂_gsd",
        replace={
            (
                "        dy = self.unify.backward(dy, cache.unify)\n"
                "        dq, dk, dv = ops.attention_backward(self.split_heads(dy), cache.attention)\n"
                "        dq = self.rotate_back(dq, cache.rotated_q)\n"
                "        dk = self.rotate_back(dk, cache.rotated_k)\n"
            ): (
                "        dy = self.unify.backward(dy, cache.unify)\n"
                "        dq, dk, dv = ops.attention_backward(self.split_heads(dy), cache.attention)\n"
                "        dq = self.rotate_back(dq, cache.rotated_q)\n"
            )
        },
        tests="tests/nn/test_all_layers.py -k Rotary",
    )
    .mistake(
        "New keys are rotated as if they came first",
        replace={"self.rotate(self.key(x), past)": "self.rotate(self.key(x))"},
        tests="tests/nn/test_rotary_attention.py -k extend",
    )
    .mistake(
        "The window is one too wide",
        replace={"ops.Local(self.window - 1)": "ops.Local(self.window)"},
        tests="tests/nn/test_rotary_attention.py -k window",
    ),
    Entry("BasicSelfAttention")
    .case("", layer_of(nn.BasicSelfAttention, "", "B T C"))
    .derivation("", basic_attention)
    .mistake(
        "x gets no gradient as a key",
        "The same x is a value, a query and a key, so dx has three terms; the last is left out.",
        equation="dx_sc = Σ_t w_ts dy_tc + Σ_t dz_st x_tc + Σ_t dz_ts x_tc",
        wrong="dx_sc = Σ_t w_ts dy_tc + Σ_t dz_st x_tc",
    ),
    Entry("SingleHeadAttention")
    .case("", layer_of(nn.SingleHeadAttention, "C D", "B T C"))
    .case("causal", layer_of(nn.SingleHeadAttention, "C", "B T C", causal=True))
    .derivation("", single_head)
    .mistake(
        "x gets no gradient from the keys",
        "x feeds queries, keys and values, so dx has three terms; one is left out.",
        equation="dx_tc = Σ_d dq_td query.w_cd + Σ_d dk_td key.w_cd + Σ_d dv_td value.w_cd",
        wrong="dx_tc = Σ_d dq_td query.w_cd + Σ_d dv_td value.w_cd",
    ),
    Entry("MultiHeadLoop")
    .case("", layer_of(nn.MultiHeadLoop, "C H", "B T C"))
    .case("causal", layer_of(nn.MultiHeadLoop, "C H", "B T C", causal=True))
    .derivation("", multi_head_loop)
    .mistake(
        "Only the last head passes its gradient back",
        "dx is overwritten in the loop over the heads, where it should be added to.",
        equation="dx_tc = dx1_tc + dx2_tc",
        wrong="dx_tc = dx2_tc",
    ),
    Entry(
        "SelfAttention",
        tests="tests/nn/test_all_layers.py tests/nn/test_attention.py -k 'test_attention.py or Attention'",
    )
    .case("", layer_of(nn.SelfAttention, "C H", "B T C"))
    .case("causal", layer_of(nn.SelfAttention, "C H", "B T C", causal=True))
    .case("wide, bias", layer_of(nn.SelfAttention, "C H", "B T C", wide=True, bias=True))
    .case("causal, padding", lambda d: padded(d, nn.SelfAttention(d.C, d.H, causal=True)))
    .derivation("", self_attention)
    .mistake(
        "x gets no gradient from keys and values",
        "The other positions read this one through its key and value, but dx has only the gradient of its own query.",
        equation="dx_tc = du_tc + dmemory_tc",
        wrong="dx_tc = du_tc",
        replace={
            "return add_backward(dmemory, self.query, self.join_heads(dq), cache.query)": (
                "return self.query.backward(self.join_heads(dq), cache.query)"
            )
        },
    )
    .mistake(
        "The gradient of the scores is not divided by √D",
        "The scores are divided by √D, and so is their gradient on its way to the queries. dq is √D times too large.",
        equation="dq_htd = Σ_s dz_hts k_hsd/√D",
        wrong="dq_htd = Σ_s dz_hts k_hsd",
    )
    .mistake(
        "The gradient skips the sum in the softmax",
        "Raising one score lowers the other probabilities of its row; this is the term that is left out.",
        equation="dz_hts = p_hts (dp_hts − Σ_s' p_hts' dp_hts')",
        wrong="dz_hts = p_hts dp_hts",
    )
    .mistake(
        "The causal mask is not used",
        "The gradients fit this forward; a model that sees the future learns nothing.",
        replace={"if self.causal:": "if False:"},
    )
    .mistake(
        "Heads are split without a transpose",
        "Time and heads are mixed. It is right only for T = 1; the gradients fit this forward.",
        replace={
            "return x.reshape(B, T, width // self.head_width, self.head_width).transpose(0, 2, 1, 3)": (
                "return x.reshape(B, width // self.head_width, T, self.head_width)"
            ),
            "return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)": "return x.reshape(B, T, H * D)",
        },
    )
    .mistake(
        "A pattern lets the tokens of a prompt see later ones",
        "The gradient is right, but generation differs from training.",
        replace={"pattern = causal(pattern)\n        y, _ =": "pass\n        y, _ ="},
        tests="tests/nn/test_attention.py -k extend",
    ),
    Entry("CrossAttention")
    .case("", layer_of(nn.CrossAttention, "C H", "B T C", "B M C"))
    .case("wide", layer_of(nn.CrossAttention, "C H", "B T C", "B M C", wide=True))
    .derivation("", cross_attention)
    .mistake(
        "The memory gets no gradient from the values",
        "The memory feeds keys and values, so its gradient has two terms; one is left out.",
        equation="dmemory_bsc = Σ_h Σ_d dk_bhsd wk_chd + Σ_h Σ_d dv_bhsd wv_chd",
        wrong="dmemory_bsc = Σ_h Σ_d dk_bhsd wk_chd",
        replace={
            "dmemory = add_backward(dmemory, self.value, self.join_heads(dv), cache.value)\n        if together": (
                "self.value.backward(self.join_heads(dv), cache.value)\n        if together"
            )
        },
    )
    .mistake(
        "Padding gets a gradient",
        "Without [s < m_b] in p, the padding of the memory is attended to, forward and backward.",
        equation="p_bhts = [s < m_b] exp(z_bhts) / Σ_s' [s' < m_b] exp(z_bhts')",
        wrong="p_bhts = exp(z_bhts) / Σ_s' exp(z_bhts')",
    )
    .mistake(
        "Queries come from the memory, keys and values from x",
        "The gradients fit this forward, so a check of values passes; but future tokens leak.",
        replace={
            (
                "q, query = self.query.forward(x)\n"
                "        k, key = self.key.forward(memory)\n"
                "        v, value = self.value.forward(memory)"
            ): (
                "q, query = self.query.forward(memory)\n"
                "        k, key = self.key.forward(x)\n"
                "        v, value = self.value.forward(x)"
            ),
            "        return dx, dmemory": "        return dmemory, dx",
        },
    ),
    Entry("RelativeSelfAttention")
    .case("", layer_of(nn.RelativeSelfAttention, "C H", "B T C"))
    .case(
        "causal, wide, bias",
        layer_of(nn.RelativeSelfAttention, "C H", "B T C", causal=True, wide=True, bias=True),
    )
    .case("causal, padding", lambda d: padded(d, nn.RelativeSelfAttention(d.C, d.H, causal=True)))
    .case("causal, memory", lambda d: on(nn.RelativeSelfAttention(d.C, d.H, causal=True), d("B T C"), queries=d.T - 1))
    .derivation("", relative_attention)
    .mistake(
        "The gradient of the queries goes to the first positions",
        "The queries are the last T positions. Without a memory S = T, and nothing is wrong.",
        equation="dx_sc = Σ_h Σ_d dk_hsd wk_chd + Σ_h Σ_d dv_hsd wv_chd + Σ_t [s = t + S − T] Σ_h Σ_d dq_htd wq_chd",
        wrong="dx_sc = Σ_h Σ_d dk_hsd wk_chd + Σ_h Σ_d dv_hsd wv_chd + Σ_t [s = t] Σ_h Σ_d dq_htd wq_chd",
        replace={"padded[:, like.shape[1] - last.shape[1] :] = last": "padded[:, : last.shape[1]] = last"},
        tests="tests/nn/test_all_layers.py -k memory",
    )
    .mistake(
        "The queries get no gradient from the distances",
        "A query meets the content and the distance of each key; only the first part is passed back.",
        equation="dq_htd = Σ_s g_hts (k_hsd + r_{h,s + T − 1 − t,d})",
        wrong="dq_htd = Σ_s g_hts k_hsd",
    ),
]

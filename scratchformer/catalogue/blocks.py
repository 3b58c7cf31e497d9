"""Blocks, and what they are made of and stacked in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from .. import nn, ops
from ..backend import Array, to_device
from ..rng import Key
from ..testing.draw import Draw, Sizes
from .attention_layers import TWO_HEADS, edges
from .derived import GELU, Part, derived
from .entry import DerivationCase, Entry, LayerCase, on, padded

OTHER = {"post": "pre", "pre": "post"}
STARTS = {"post": 'In "post" order', "pre": 'In "pre" order', "after": "With a norm after"}
OTHER_ORDERS = {order: tuple(start for name, start in STARTS.items() if name != order) for order in STARTS}


def memory(d: Draw, letters: str) -> Array:
    """A memory, on the device: a constant, so it is no input of the check and gets no gradient."""
    return to_device(d(letters).astype(np.float32), d.device)


def block(d: Draw, **options: Any) -> LayerCase:
    return padded(d, nn.TransformerBlock(d.C, d.H, **options), key=d.key)


def block_with_memory(d: Draw, **options: Any) -> LayerCase:
    layer = nn.TransformerBlock(d.C, d.H, causal=True, relative=True, **options)
    return on(layer, d("B T C"), memory=memory(d, "B M C"), key=d.key)


def other_parts(d: Draw, kind: type[nn.Block]) -> LayerCase:
    attention, feedforward = nn.RotarySelfAttention(d.C, d.H, head_width=4), nn.SwiGLU(d.C, d.F)
    layer = kind(attention, feedforward, nn.RMSNorm(d.C), nn.LayerNorm(d.C), norm="pre", dropout=0.3)
    return padded(d, layer, key=d.key)


def parallel(d: Sizes) -> DerivationCase:
    d.sizes |= TWO_HEADS
    parts = nn.SelfAttention(d.C, d.H), nn.FeedForward(d.C, d.F, GELU)
    block = nn.ParallelBlock(*parts, nn.LayerNorm(d.C), nn.LayerNorm(d.C), "pre")
    return with_pattern(d, block, H=d.H, D=d.D)


BLOCK_PARTS = ("attention", "feedforward", "norm1", "norm2")


def transformer_block(d: Sizes, order: str, activation: ops.Activation = GELU) -> DerivationCase:
    d.sizes |= TWO_HEADS
    block = nn.TransformerBlock(d.C, d.H, order, d_ff=d.F, activation=activation)
    return with_pattern(d, block, H=d.H, D=d.D, leave=f"{OTHER[order].title()}-norm")


def with_pattern(
    d: Sizes, block: nn.Block, leave: str = "", replaced: Mapping[str, Part] | None = None, **names: Any
) -> DerivationCase:
    """The case of a block whose positions see some of each other. replaced: parts that are called in another way than
    as they are; names: what the derivations of the parts use.
    """
    parts: dict[str, Part] = {**{name: getattr(block, name) for name in BLOCK_PARTS}, **(replaced or {})}
    norm: Any = block.norm1
    seen = edges(d, d.T)
    parts["attention"] = partial(block.attention.forward, pattern=ops.Edges(seen)), block.attention.backward
    names |= {"m": seen, "eps": norm.eps}
    return derived(d, block, d("B T C"), ops.Edges(seen), names=names, parts=parts, leave=leave)


def looking_at_memory(d: Draw, **options: Any) -> LayerCase:
    layer = nn.DecoderBlock(d.C, d.H, **options)
    return on(layer, d("B T C"), d("B M C"), pattern=ops.Padding(d.lengths("M")), key=d.key)


def decoder_block(d: Sizes, order: str, activation: ops.Activation = GELU) -> DerivationCase:
    d.sizes |= TWO_HEADS
    block = nn.DecoderBlock(d.C, d.H, order, d_ff=d.F, activation=activation)
    x, memory, lengths, norm = d("B T C"), d("B M C"), d.lengths("M"), block.norm1
    parts: dict[str, Part] = {name: getattr(block, name) for name in (*BLOCK_PARTS, "norm3")}
    parts["cross"] = partial(block.cross.forward, pattern=ops.Padding(lengths)), block.cross.backward
    names = {"H": d.H, "D": d.D, "eps": norm.eps, "m": lengths, "attention.m": np.tri(d.T)}
    leave = f"{OTHER[order].title()}-norm"
    return derived(d, block, x, memory, ops.Padding(lengths), names=names, parts=parts, leave=leave)


def around_feedforward(d: Draw, order: str, after: bool = False) -> LayerCase:
    branch, norm = nn.FeedForward(d.C, d.F, "gelu"), nn.LayerNorm(d.C)
    norms = dict(norm=None, after=norm) if after else dict(norm=norm)
    return on(nn.Residual(branch, order=order, dropout=nn.Dropout(0.3), **norms), d("B T C"), key=d.key)


def residual(d: Sizes, order: str) -> DerivationCase:
    """With a branch whose output at a position depends on all positions, and with dropout."""
    d.sizes |= {"H": 2, "C": 6}
    branch, norm = nn.SelfAttention(d.C, d.H), nn.LayerNorm(d.C)
    if order == "after":
        layer = nn.Residual(branch, None, "pre", after=norm)
    else:
        layer = nn.Residual(branch, norm, order, nn.Dropout(0.3))

    def forward(n: np.ndarray) -> tuple[np.ndarray, tuple]:
        f, branch = layer.branch.forward(n)
        f, dropout = layer.dropout.forward(f, d.key)
        return f, (branch, dropout)

    def backward(df: np.ndarray, cache: tuple) -> np.ndarray:
        branch, dropout = cache
        return layer.branch.backward(layer.dropout.backward(df, dropout), branch)

    parts: dict[str, Part] = {"branch": (forward, backward), "after" if order == "after" else "norm": norm}
    return derived(d, layer, d("B T C"), key=d.key, parts=parts, leave=OTHER_ORDERS[order])


def residual_of_linear(d: Sizes, order: str) -> DerivationCase:
    """With the smallest branch that can be written out, for the page."""
    norm = nn.LayerNorm(d.C)
    layer = nn.Residual(nn.Linear(d.C, d.C), norm, order)
    parts: dict[str, Part] = {"branch": layer.branch, "norm": norm}
    return derived(d, layer, d("B T C"), names={"eps": norm.eps}, parts=parts, leave=OTHER_ORDERS[order])


def two_blocks(d: Draw, order: str) -> LayerCase:
    """Two blocks that look at another sequence, and a norm."""
    block = nn.DecoderBlock(d.C, d.H, order, dropout=0.3)
    stack = nn.Stack([block, nn.DecoderBlock(d.C, d.H, order)], nn.LayerNorm(d.C))
    return on(stack, d("B T C"), d("B M C"), key=d.key)


def stack(d: Sizes) -> DerivationCase:
    d.sizes |= {"H": 2, "C": 4, "B": 2, "T": 3, "I": 5, "F": 6}
    blocks = [nn.DecoderBlock(d.C, d.H, d_ff=d.F, activation=GELU, key=Key(i)) for i in range(2)]
    layer = nn.Stack(blocks, nn.LayerNorm(d.C))
    parts: dict[str, Any] = {"block1": blocks[0], "block2": blocks[1], "norm": layer.norm}
    return derived(d, layer, d("B T C"), d("B I C"), parts=parts)


ENTRIES = [
    Entry("TransformerBlock")
    .case("post", block, norm="post")
    .case("pre", block, norm="pre")
    .case(
        "post, causal, wide, dropout",
        block,
        norm="post",
        causal=True,
        wide=True,
        dropout=0.3,
        activation="gelu",
    )
    .case("pre, causal, bias, dropout", block, norm="pre", causal=True, bias=True, dropout=0.3, d_ff=3)
    .case("post, relative, dropout", block, norm="post", relative=True, dropout=0.3)
    .case("post, relative, causal, memory", block_with_memory, norm="post")
    .case("pre, relative, causal, memory, dropout", block_with_memory, norm="pre", dropout=0.3)
    .derivation("", transformer_block, order="post")
    .derivation("pre", transformer_block, order="pre")
    .mistake(
        "The gradient passes only through the attention",
        "x also goes to the first sum directly. The blocks below get only what the attention lets through.",
        equation="dx_tc = ds_tc + dn_tc",
        wrong="dx_tc = dn_tc",
    )
    .mistake(
        "Pre-norm: the gradient passes only through the attention",
        "The sums pass dy on unchanged, through any number of blocks; this path is cut.",
        equation="dx_tc = dh_tc + ds_tc",
        wrong="dx_tc = ds_tc",
    )
    .mistake(
        "Pre-norm: the gradient passes only through the feed-forward layer",
        "The sums pass dy on unchanged, through any number of blocks; this path is cut.",
        equation="dh_tc = dy_tc + dr_tc",
        wrong="dh_tc = dr_tc",
    )
    .mistake(
        "The gradient passes only through the feed-forward layer",
        "h also goes to the second sum directly. The gradient of everything before it is wrong.",
        equation="dh_tc = dr_tc + du_tc",
        wrong="dh_tc = du_tc",
    ),
    Entry("DecoderBlock")
    .case("post, dropout", looking_at_memory, dropout=0.3)
    .case("pre, bias", looking_at_memory, norm="pre", bias=True, activation="gelu")
    .derivation("", decoder_block, order="post")
    .derivation("pre", decoder_block, order="pre")
    .mistake(
        "The gradient passes only through the cross-attention",
        "g also goes to the second sum directly. Without this path, everything before it gets the wrong gradient.",
        equation="dg_tc = dr_tc + dw_tc",
        wrong="dg_tc = dw_tc",
    )
    .mistake(
        "Pre-norm: the gradient passes only through the cross-attention",
        "The sums pass dy on unchanged, through any number of blocks; this path is cut.",
        equation="dg_tc = dh_tc + dr_tc",
        wrong="dg_tc = dr_tc",
    ),
    Entry("ParallelBlock")
    .case("", other_parts, kind=nn.ParallelBlock)
    .derivation("", parallel)
    .mistake(
        "Only the branches pass the gradient on",
        "y is a sum of three terms, and the first is x itself.",
        equation="dx_tc = dy_tc + ds_tc + dr_tc",
        wrong="dx_tc = ds_tc + dr_tc",
    ),
    Entry("Residual")
    .case("post", around_feedforward, order="post")
    .case("pre", around_feedforward, order="pre")
    .case("after", around_feedforward, order="pre", after=True)
    .derivation("", residual, order="post")
    .derivation("pre", residual, order="pre")
    .derivation("after", residual, order="after")
    .mistake(
        "The gradient passes only through the branch",
        "In y = x + f(x), the first x passes dy on unchanged; this part is left out.",
        equation="dx_tc = ds_tc + dn_tc",
        wrong="dx_tc = dn_tc",
        replace={"         dx, _ = ops.add(ds, dn[:, -T:])": "         dx = dn[:, -T:]"},
        tests="tests/nn/test_all_layers.py -k Residual",
    )
    .mistake(
        "Pre-norm: the gradient passes only through the branch",
        "The sum passes dy on unchanged, whatever the branch does; this path is cut.",
        equation="dx_tc = dy_tc + ds_tc",
        wrong="dx_tc = ds_tc",
        replace={
            "dx = add_backward(dy, before, dn, cache.norm)\n        else": (
                "dx = before.backward(dn, cache.norm)\n        else"
            ),
        },
        tests="tests/nn/test_all_layers.py -k Residual",
    )
    .mistake(
        "The gradient passes only past the branch",
        "dx looks right where the branch is small, as it is at the start of training.",
        equation="dx_tc = ds_tc + dn_tc",
        wrong="dx_tc = ds_tc",
        replace={"         dx, _ = ops.add(ds, dn[:, -T:])": "         dx = ds"},
        tests="tests/nn/test_all_layers.py -k Residual",
    )
    .mistake(
        "γ gets no gradient from the memory",
        "The norm is also applied to the memory, so the memory's rows are part of the sums for γ and β.",
        replace={
            "         dx, _ = ops.add(dy, before.backward(dn, cache.norm)[:, -T:])": (
                "         dn[:, : dn.shape[1] - T] = 0\n"
                "            dx, _ = ops.add(dy, before.backward(dn, cache.norm)[:, -T:])"
            )
        },
        tests="tests/nn/test_all_layers.py -k memory",
    ),
    Entry("Stack")
    .case("shared input, post", two_blocks, order="post")
    .case("shared input, pre", two_blocks, order="pre")
    .derivation("", stack)
    .mistake(
        "The memory gets its gradient from only one block",
        "Every block reads the memory, so its gradient is the sum over the blocks.",
        replace={"[ops.add(total, d)[0] for total, d in zip(totals, dshared, strict=True)]": "totals"},
        tests="tests/models/test_encoder_decoder.py -k gradient",
    ),
    Entry("Block of other parts").case("", other_parts, kind=nn.Block),
    Entry("Recompute")
    .case("", lambda d: on(nn.Recompute(nn.TransformerBlock(d.C, d.H, dropout=0.3)), d("B T C"), key=d.key))
    .mistake(
        "The second forward draws a different mask",
        "The gradient belongs to a different forward than the one that gave y.",
        replace={
            "self.layer.forward(*cache.inputs, **cache.options)": (
                'self.layer.forward(*cache.inputs, **{**cache.options, "key": None})'
            )
        },
        tests="tests/nn/test_block.py",
    ),
]

"""Losses."""

from __future__ import annotations

from typing import Any

from ..ops.cross_entropy import given_targets
from ..testing.draw import Draw, Sizes
from .entry import Arguments, OperationEntry, given

CROSS_ENTROPY = "dz_nv = dℓ_n ∂ℓ_n/∂z_nv = dℓ_n (p_nv − t_nv)"


def cross_entropy(d: Draw, **options: Any) -> Arguments:
    return given(d("B T V"), d.integers("B T", d.V), **options)


def some_ignored(d: Sizes, ignore_index: int | None = None, ignored: int = 1, **options: Any) -> Arguments:
    """ignored: how many of the targets; all but one if it is −1."""
    targets = d.integers("B T", d.V)
    if ignore_index is not None:
        targets.reshape(-1)[:ignored] = ignore_index
    return given(d("B T V"), targets, ignore_index, **options)


ENTRIES = [
    OperationEntry(
        "cross_entropy",
        names=lambda logits, targets, ignore_index=None, **_: given_targets(logits, targets, ignore_index, 0),
    )
    .case("", cross_entropy)
    .case("smoothing", cross_entropy, label_smoothing=0.1)
    .case("ignored", cross_entropy, ignore_index=0)
    .case("smoothing, ignored", cross_entropy, label_smoothing=0.1, ignore_index=0)
    .extension(
        "label smoothing, ignored rows, safe from overflow and rounding",
        "label smoothing|ignored|overflow|round",
        ε="0",
        k="1",
        count="N",
    )
    .derivation("", some_ignored)
    .derivation("ignored", some_ignored, ignore_index=-1)
    .derivation("all ignored", some_ignored, ignore_index=-100, ignored=1000)
    .derivation("one counted", some_ignored, ignore_index=-100, ignored=-1)
    .derivation("smoothing", some_ignored, label_smoothing=0.1)
    .derivation("smoothing, ignored", some_ignored, ignore_index=0, label_smoothing=0.1)
    .mistake(
        "Forward takes the mean, backward the sum",
        "Gradients are too large by a factor: the number of rows that count. So they grow with the batch. Adam hides "
        "it; clipping and SGD do not.",
        equation=CROSS_ENTROPY,
        wrong="dz_nv = dloss k_n (p_nv − t_nv)",
        replace={
            "dlogits *= dloss / count * cast(": "dlogits *= dloss * cast(",
        },
    )
    .mistake(
        "Rows that do not count still pass a gradient",
        "Ignored rows, such as padding, get p − t as if they had a target, and pull on the model.",
        equation=CROSS_ENTROPY,
        wrong="dz_nv = dloss (p_nv − t_nv)/count",
    )
    .mistake(
        "The mean is over all rows, not those that count",
        "The more rows of a batch are ignored, the smaller its gradient.",
        equation=CROSS_ENTROPY,
        wrong="dz_nv = dloss k_n (p_nv − t_nv)/N",
    ),
]

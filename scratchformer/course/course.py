"""The exercises in order, by chapter."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache

from .exercise import Exercise, read_exercise

CHAPTERS: dict[str, tuple[str, ...]] = {
    "The chain rule": (
        "chain_rule",
        "linear_equations",
        "linear",
        "relu",
    ),
    "Layers": (
        "softmax_equations",
        "softmax",
        "cross_entropy_equations",
        "cross_entropy",
        "layernorm_equations",
        "layernorm",
        "rmsnorm_equations",
        "rmsnorm",
        "embedding",
        "dropout",
        "gelu_equations",
    ),
    "Attention": (
        "attention_equations",
        "attention",
        "masked_attention",
        "heads",
        "cross_attention",
        "grouped_attention",
        "rotary_equations",
        "rotary",
        "relative_shift",
        "tiles_equations",
        "tiles",
    ),
    "Training": (
        "tied_table",
        "lora",
        "recompute",
        "adam",
        "clipping",
        "accumulation",
    ),
    "Generation": (
        "key_value_cache",
        "sampling",
    ),
    "A model": (
        "block",
        "model",
    ),
}

NAMES = tuple(name for names in CHAPTERS.values() for name in names)


@cache
def exercise(name: str) -> Exercise:
    """The exercise of this name. Raises ValueError for an unknown one."""
    if name not in NAMES:
        near = get_close_matches(name, NAMES)
        known = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(NAMES)}"
        raise ValueError(f"unknown exercise {name!r}; {known}")
    return read_exercise(name)

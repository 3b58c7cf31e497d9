"""The exercises in order, by chapter."""

from __future__ import annotations

from functools import cache

from .exercise import Exercise, read_exercise

CHAPTERS: dict[str, tuple[str, ...]] = {
    "The chain rule": (),
    "Layers": (
        "softmax_equations",
        "softmax",
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
    "Training": (),
    "Generation": (),
    "A model": (),
}

NAMES = tuple(name for names in CHAPTERS.values() for name in names)


@cache
def exercise(name: str) -> Exercise:
    """The exercise of this name. Raises ValueError for an unknown one."""
    if name not in NAMES:
        raise ValueError(f"unknown exercise {name!r}; known are {', '.join(NAMES)}")
    return read_exercise(name)

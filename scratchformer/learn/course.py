"""The exercises in order, by chapter."""

from __future__ import annotations

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
    "Attention": (),
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

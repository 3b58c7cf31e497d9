"""The mistakes that others have made in hand-written gradients and around them, as data.

    from scratchformer.testing.mistakes import MISTAKES, mistakes_of

    for mistake in mistakes_of("layernorm"):
        print(f"{mistake.title}. {mistake.effect}")

The tests plant each mistake that replaces code of the package, and must fail. The pages of the operations show those
that replace an equation. `diagnosis` recognises wrong gradients by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import elsewhere, layers, operations
from .mistake import Mistake

if TYPE_CHECKING:
    from ...notation import Equation

MISTAKES = (*operations.MISTAKES, *layers.MISTAKES, *elsewhere.MISTAKES)


def mistakes_of(operation: str) -> tuple[Mistake, ...]:
    """The mistakes in the derivation of an operation."""
    return tuple(mistake for mistake in MISTAKES if mistake.operation == operation and mistake.equation)


def says(chain: Equation, equation: Equation) -> bool:
    """Whether an equation of the derivation has the same left side, and among its parts the last of the other's."""
    return chain.parts[0] == equation.parts[0] and equation.parts[-1] in chain.parts[1:]


__all__ = ["MISTAKES", "Mistake", "mistakes_of", "says"]

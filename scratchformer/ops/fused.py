"""Neighbouring operations as one, with derivations that are put together from those of their parts.

See `compiler.neighbours`. This module is loaded when one of its names is first used, since reading derivations takes
time.
"""

from ..compiler.neighbours import fused
from .add import add, add_backward
from .dropout import dropout, dropout_backward

__all__ = [
    "dropout_add",
    "dropout_add_backward",
]

dropout_add, dropout_add_backward = fused("dropout_add", (dropout, dropout_backward), (add, add_backward), "h")

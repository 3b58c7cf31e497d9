"""Neighbouring operations as one, with derivations that are put together from those of their parts.

See `compiler.neighbours`. This module is loaded when one of its names is first used, since reading derivations takes
time.
"""

from ..compiler.neighbours import fused
from .add import add, add_backward
from .dropout import dropout, dropout_backward
from .layernorm import layernorm, layernorm_backward

__all__ = [
    "add_layernorm",
    "add_layernorm_backward",
    "dropout_add",
    "dropout_add_backward",
]

add_layernorm, add_layernorm_backward = fused("add_layernorm", (add, add_backward), (layernorm, layernorm_backward))
dropout_add, dropout_add_backward = fused("dropout_add", (dropout, dropout_backward), (add, add_backward), "h")

"""Fast twins of the operations. Importing this package registers them; without it everything works, but slower."""

from . import (
    numpy_adam,
    numpy_attention,
    numpy_cross_entropy,
    numpy_dense,
    numpy_dropout,
    numpy_embedding,
    numpy_extend,
    numpy_layernorm,
    numpy_relative,
    numpy_rmsnorm,
    numpy_swiglu,
)

__all__ = [
    "numpy_adam",
    "numpy_attention",
    "numpy_cross_entropy",
    "numpy_dense",
    "numpy_dropout",
    "numpy_embedding",
    "numpy_extend",
    "numpy_layernorm",
    "numpy_relative",
    "numpy_rmsnorm",
    "numpy_swiglu",
]

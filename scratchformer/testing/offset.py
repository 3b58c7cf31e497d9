"""The check that a common offset, which does not change y, does not change the gradients in float32 either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import CPU
from .contracts import GradientError, copied, is_floating, named_gradients
from .runs import flat, name_of, normal_like

_OFFSET = 2.0**22
_KEPT, _LOST = 1e-3, 3e-2  # errors relative to the largest element: of y, and of a gradient


def check_offset(
    op: Callable, op_backward: Callable, names: list[str], args: tuple, kwargs: dict[str, Any], seed: int
) -> None:
    """Raise GradientError if 2²² can be added to all elements of an argument without a change of y in float32, as for a
    softmax or a layer norm, but not without a change of the gradients.

    Nothing is said where y changes, or is not finite.
    """
    for place in [i for i, x in enumerate(args) if is_floating(x)]:
        single = copied(list(args), CPU, np.float32)
        single[place] = (args[place] + _OFFSET).astype(np.float32)
        double = copied(single, CPU, np.float64)
        double[place] -= _OFFSET
        with np.errstate(all="ignore"):
            try:
                y, cache = op(*single, **kwargs)
                right_y, right_cache = op(*double, **kwargs)
            except Exception:  # such numbers are not in its domain
                continue
            if not _error(flat(y), flat(right_y)) <= _KEPT:
                continue
            dy = normal_like(right_y, seed, CPU, np.float64)
            gradients = op_backward(copied(dy, CPU, np.float32), cache)
            right = op_backward(dy, right_cache)
        arrays = {name: x for name, x in zip(names, single, strict=True) if is_floating(x)}
        backward = name_of(op_backward)
        expected = named_gradients(right, arrays, backward)
        for name, gradient in named_gradients(gradients, arrays, backward).items():
            if not (error := _error(gradient, expected[name])) <= _LOST:
                raise GradientError(
                    f"{name_of(op)}: with 2²² added to {names[place]} in float32, y is the same, but the gradient of "
                    f"{name} is wrong by {error:.2g} of its largest element: backward subtracts numbers of the size of "
                    "the offset"
                )


def _error(x: np.ndarray, right: np.ndarray) -> float:
    """The largest difference, relative to the largest right element; NaN if one is not finite."""
    size = float(np.abs(right).max(initial=0))
    error = float(np.abs(x - right).max(initial=0))
    return error / size if size else error

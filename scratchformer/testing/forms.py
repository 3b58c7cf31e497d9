"""General forms of a wrong gradient, which need no knowledge of the operation: a constant factor, a transpose, ..."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .diagnosis import Evidence

Form = tuple[str, str]  # a sentence, and the name of the form


def forms(evidence: Evidence) -> list[Form]:
    """All forms that the wrong gradients have."""
    return list(constant_factors(evidence))


def agree(evidence: Evidence, name: str, found: np.ndarray, right: np.ndarray, factor: float = 1.0) -> bool:
    """Whether `found` is `right`, computed from the numeric gradient of this tensor, wherever that is known."""
    known = np.isfinite(right)
    slack = evidence.slack[name].max(initial=0) * max(1.0, abs(factor))
    return bool(known.any() and np.all(np.abs(found - right)[known] <= slack))


def constant_factors(evidence: Evidence) -> Iterator[Form]:
    """The gradient is the right one times a number."""
    by_factor: dict[float, list[str]] = {}
    for name in evidence.wrong:
        found, right = evidence.found[name], evidence.right[name]
        known = np.isfinite(right)
        size = float(right[known] @ right[known])
        factor = float(found[known] @ right[known]) / size if size else np.nan
        if not np.isfinite(factor) or not agree(evidence, name, found, factor * right, factor):
            return
        same = next((other for other in by_factor if math.isclose(other, factor, rel_tol=1e-5, abs_tol=1e-9)), factor)
        by_factor.setdefault(same, []).append(name)
    for factor, names in by_factor.items():
        yield f"{of(names)} {times(factor)}.", "constant factor"


def of(names: list[str]) -> str:
    """ "The gradient of x is", "The gradients of x and w are"."""
    *others, last = names
    return f"The gradients of {', '.join(others)} and {last} are" if others else f"The gradient of {last} is"


def times(factor: float) -> str:
    if abs(factor) < 1e-9:
        return "zero everywhere"
    if math.isclose(factor, -1, rel_tol=1e-6):
        return "right but for the sign"
    return f"{factor:.4g} times what it should be"

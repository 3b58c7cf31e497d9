"""The gradients of a check that failed: what the search for the mistake has to explain."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..notation.ratios import Compared
from .differences import FIRST_STEP, Comparison, Differences, Variable

EXACT = 1e-9  # relative to the largest element: two computations of one gradient
MAX_ELEMENTS = 1000  # of a tensor, beyond which no derivation is evaluated
SECONDS = 1.0  # that a Jacobian, or the search in a derivation, may take


class FailedCheck:
    """The gradients of a check that failed, by the name of their tensor.

    compared: those of the backward beside the right ones, NaN where none was computed, and how far each element of
    these may be off. wrong: the names of the tensors whose gradients disagree. differences: numerical derivatives of
    the outputs, for a Jacobian.
    """

    def __init__(self, differences: Differences) -> None:
        self.differences = differences
        self.tensors: dict[str, Variable] = {}
        self.compared: dict[str, Compared] = {}
        self.wrong: list[str] = []

    def add(
        self,
        tensor: Variable,
        indices: Sequence[tuple[int, ...]],
        elements: Sequence[Comparison],
        directions: Sequence[Comparison],
    ) -> None:
        """Add a tensor with its comparisons: the first of `elements` are those at `indices`."""
        numeric, uncertain = np.full(tensor.gradient.shape, np.nan), np.zeros(tensor.gradient.shape)
        for index, comparison in zip(indices, elements, strict=False):
            numeric[index] = comparison.numeric
            uncertain[index] = comparison.tolerance - comparison.rtol * comparison.size
        self.tensors[tensor.name] = tensor
        self.compared[tensor.name] = Compared(tensor.gradient, numeric, uncertain)
        if not all(c.agrees for c in (*elements, *directions)):
            self.wrong.append(tensor.name)

    def jacobian(self, name: str) -> np.ndarray | None:
        """The derivatives of all outputs (rows) by all elements of a tensor (columns); None if that takes too long."""
        tensor = self.tensors[name]
        if tensor.base.size * self.differences.y.size > MAX_ELEMENTS**2:
            return None
        start = time.thread_time()
        self.differences.outputs()
        if 4 * tensor.base.size * (time.thread_time() - start) > SECONDS:
            return None
        columns = []
        for index in np.ndindex(tensor.base.shape):
            columns.append(self.differences.slope(tensor.along_element(index), FIRST_STEP * tensor.scale))
        return np.stack(columns, axis=-1)

    def explained_by(self, gradients: dict[str, np.ndarray]) -> bool:
        """Whether these are the gradients of the backward; those that are not given must be right."""
        if not all(name in gradients for name in self.wrong):
            return False
        return all(same(gradients[name], each.wrong) for name, each in self.compared.items() if name in gradients)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two gradients are equal to round-off; one of them may have several axes folded into one."""
    if a.size != b.size:
        return False
    return bool(np.all(np.abs(a.reshape(b.shape) - b) <= EXACT * np.abs(b).max(initial=0)))

"""The loops for Numba as Python runs them: slow, but at once, for the comparison of a derivation with small arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import erf
from ..rng import GAMMA, Bits
from .numba_code import numba_source
from .plan import Plan

__all__ = ["PythonTarget"]


class PythonTarget:
    xp: Any = np
    kind: type = np.ndarray
    adds: bool = False
    source: Any = staticmethod(numba_source)
    contiguous: Any = staticmethod(np.ascontiguousarray)
    empty: Any = staticmethod(np.empty)

    def takes(self, dtype: np.dtype, op: Any) -> bool:
        return dtype in (np.float32, np.float64)

    def loops(self, plan: Plan, dtype: np.dtype) -> Callable[[list, list, list], None]:
        number = dtype.type
        space: dict[str, Any] = {name: getattr(np, name) for name in ("exp", "log", "log1p", "tanh", "sin", "cos")}
        space |= {"np": np, "R": number, "read": number, "narrow": lambda x, to: x, "plus": np.add, "erf": erf}
        space |= {"greater": np.maximum, "lesser": np.minimum, "maximum_of_row": lambda x, row: x[row].max()}
        space |= {"column_of": lambda place, columns: place if 0 <= place < columns else -1}
        space |= {"draw": draw, "drawn_at": drawn_at}
        exec(self.source(plan).replace(f"def {plan.name}(", "def loops(", 1), space)  # it may be called tanh

        def run(reads: list, numbers: list, writes: list) -> None:
            values = [x if isinstance(x, Bits) or np.ndim(x) else number(x) for x in reads]
            with np.errstate(all="ignore"):
                space["loops"](*values, *map(number, numbers), *writes)

        return run


def draw(words: np.ndarray, bits: Bits, first: int) -> None:
    """The words of `bits` from the one numbered `first` on."""
    start = np.add(bits.start, np.multiply(first, GAMMA, dtype=np.uint64), dtype=np.uint64)
    words[:] = Bits(start).draw(4 * words.size).view(np.uint64)


def drawn_at(bits: Bits, place: int) -> int:
    """One of the integers of `bits`."""
    word = np.empty(1, np.uint64)
    draw(word, bits, place // 4)
    return int(word.view(np.uint16)[place % 4])

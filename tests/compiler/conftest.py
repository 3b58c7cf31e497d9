"""Numba's loops as Python runs them, which takes no time to compile."""

import numpy as np
import pytest
from scipy.special import erf

from scratchformer.compiler.numba_code import numba_source


class UncompiledTarget:
    xp, kind, source = np, np.ndarray, staticmethod(numba_source)
    contiguous, empty = staticmethod(np.ascontiguousarray), staticmethod(np.empty)

    def takes(self, dtype, op):
        return dtype in (np.float32, np.float64)

    def loops(self, plan, dtype):
        space = {name: getattr(np, name) for name in ("exp", "log", "log1p", "tanh", "sin", "cos")}
        space |= {"np": np, "R": np.float64, "erf": erf, "read": np.float64, "narrow": lambda x, to: x, "plus": np.add}
        space |= {"maximum_of_row": lambda x, row: x[row].max(), "greater": np.maximum, "lesser": np.minimum}
        space |= {"column_of": lambda place, columns: place if 0 <= place < columns else -1}
        exec(numba_source(plan), space)
        return lambda reads, numbers, writes: space[plan.name](*reads, *map(np.float64, numbers), *writes) == 0


@pytest.fixture
def uncompiled():
    return UncompiledTarget()

"""When results agree with PyTorch's."""

from typing import Any, NamedTuple

import numpy as np
import pytest


class Precision(NamedTuple):
    """A dtype, and how far two correct programs may differ in it, relative to the largest element."""

    dtype: Any
    tolerance: float

    def normal(self, *shape: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(shape).astype(self.dtype)

    def agree(self, ours: Any, theirs: Any, what: str = "") -> None:
        """Assert that our array and PyTorch's tensor have this dtype, the same shape, and nearly the same numbers."""
        theirs = theirs.detach().numpy()
        assert ours.dtype == theirs.dtype == self.dtype, what
        assert ours.shape == theirs.shape, what
        atol = self.tolerance * np.abs(theirs).max(initial=0)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=what)


@pytest.fixture(params=[Precision(np.float64, 1e-9), Precision(np.float32, 1e-5)], ids=["float64", "float32"])
def precision(request):
    return request.param

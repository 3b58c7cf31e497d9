"""What both models are asked."""

import math

import numpy as np
import pytest

from scratchformer.backend import to_device
from scratchformer.rng import Key


@pytest.fixture
def check_loss_backward(device):
    """A function that compares `loss_backward` with a central difference along a random direction of all weights."""

    def check(model, *batch):
        """model: in float64. batch: what its `loss` takes, NumPy arrays."""
        batch = [to_device(x, device) for x in batch]
        flat, key, dloss, h = model.flat, Key(4), 2.5, 1e-6
        _, cache = model.loss(*batch, key=key)
        model.loss_backward(dloss, cache)
        direction = to_device(np.random.default_rng(0).standard_normal(flat.data.size), device)
        start, losses = flat.data.copy(), []
        for step in (h, -h):
            flat.data[...] = start + step * direction
            losses.append(float(model.loss(*batch, key=key)[0]))
        numeric = dloss * (losses[0] - losses[1]) / (2 * h)
        assert math.isclose(float(flat.grad @ direction), numeric, rel_tol=1e-5)

    return check

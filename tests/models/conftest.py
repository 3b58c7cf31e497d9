"""What several models are asked."""

import math

import numpy as np
import pytest

from scratchformer.backend import to_device
from scratchformer.data import TextBatches
from scratchformer.generation import generate
from scratchformer.optim import Adam
from scratchformer.rng import Key
from scratchformer.training import Replicas, estimate, load_model, save_snapshot


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


@pytest.fixture
def check_life():
    """A function that trains a language model, estimates it, writes with it, saves it and loads it again."""

    def check(model, folder):
        """Returns the loaded model and the estimate."""
        vocab_size, T = model.config["vocab_size"], model.context
        batches = TextBatches(np.arange(300) % vocab_size, 4, T, Key(2))
        adam, losses = Adam(model.parameters(), 0.02), []
        with Replicas(model, 2, 1) as replicas:
            for step in range(40):
                losses.append(replicas.gradients(batches.batch(step), Key(step)))
                adam.step()
            found = estimate(replicas, batches.batch(0))
        assert losses[-1] < 0.5 * losses[0]
        assert found.cache == sum(array.nbytes for block in model.allocate(1) for array in block) > 0
        ids = np.arange(T)[None] % vocab_size
        assert len([*generate(model, ids, 2 * T, key=Key(3))]) == 2 * T
        save_snapshot(folder / "last.safetensors", model)
        loaded, _ = load_model(folder)
        assert type(loaded) is type(model) and loaded.config == model.config
        assert np.array_equal(loaded(ids), model(ids))
        return loaded, found

    return check

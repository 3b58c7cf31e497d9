import math

import numpy as np
import pytest

from scratchformer.backend import to_cpu, to_device
from scratchformer.models import LanguageModel
from scratchformer.ops.cross_entropy import IGNORED
from scratchformer.rng import Key

V, T = 9, 6
IDS = np.array([[1, 4, 2, 8, 0, 3], [3, 3, 5, 1, 7, 6]])
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def make(device, **options):
    return LanguageModel(V, 8, 2, 2, T, key=Key(1), **options).to(device, np.float64)


@NORMS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"wide": True, "positions": "sinusoidal"},
        {"positions": "relative"},
        {"recompute": True},
    ],
)
def test_the_future_has_no_influence(norm, options, device):
    """When the tokens from t + 1 on change, the logits up to t stay the same and those at t + 1 change."""
    model = make(device, norm=norm, **options)
    y = to_cpu(model(to_device(IDS, device)))
    for t in range(T - 1):
        changed = IDS.copy()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % V
        y_changed = to_cpu(model(to_device(changed, device)))
        np.testing.assert_allclose(y_changed[:, : t + 1], y[:, : t + 1], rtol=1e-9, atol=1e-12)
        assert np.abs(y_changed[:, t + 1] - y[:, t + 1]).max() > 1e-3


@NORMS
def test_a_prefix_gives_the_same_logits(norm, device):
    model = make(device, norm=norm)
    y = to_cpu(model(to_device(IDS, device)))
    for length in range(1, T):
        np.testing.assert_allclose(to_cpu(model(to_device(IDS[:, :length], device))), y[:, :length], rtol=1e-9)


@NORMS
def test_the_gradient_of_early_losses_reaches_no_later_token(norm, device):
    model = make(device, norm=norm)
    y, cache = model.forward(to_device(np.array([[0, 1, 2, 3, 4, 5]]), device))
    dy = np.zeros(y.shape)
    dy[:, :3] = 1 + np.arange(V)
    model.backward(to_device(dy, device), cache)
    tokens, positions = to_cpu(model.body.tokens.table.grad), to_cpu(model.body.positions.table.grad)
    assert not tokens[3:].any() and not positions[3:].any()
    assert all(np.abs(row).max() > 1e-6 for row in (*tokens[:3], *positions[:3]))


def test_loss_is_the_mean_over_targets_that_count(device):
    model = make(device)
    targets = np.roll(IDS, -1, axis=1)
    targets[:, -1] = IGNORED
    logits = to_cpu(model(to_device(IDS, device)))
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    rows = [log_p[b, t, targets[b, t]] for b in range(2) for t in range(T - 1)]
    loss, _ = model.loss(to_device(IDS, device), to_device(targets, device))
    assert math.isclose(float(loss), -np.mean(rows), rel_tol=1e-12)


@NORMS
def test_gradient_of_the_loss(norm, device, check_loss_backward):
    check_loss_backward(make(device, norm=norm, dropout=0.2, activation="gelu"), IDS, np.roll(IDS, -1, axis=1))


@NORMS
def test_parts_of_a_batch_add_up_to_the_whole(norm, device):
    """The gradient of each part is weighted with its share of the targets."""
    model = make(device, norm=norm)
    targets = np.roll(IDS, -1, axis=1)
    _, cache = model.loss(to_device(IDS, device), to_device(targets, device))
    model.loss_backward(1.0, cache)
    whole = to_cpu(model.flat.grad).copy()
    model.zero_grad()
    for b in range(2):
        _, cache = model.loss(to_device(IDS[b : b + 1], device), to_device(targets[b : b + 1], device))
        model.loss_backward(0.5, cache)
    np.testing.assert_allclose(to_cpu(model.flat.grad), whole, rtol=1e-9, atol=1e-12)


def test_float32_loss(device):
    model = make(device).to(dtype=np.float32)
    loss, cache = model.loss(to_device(IDS, device), to_device(IDS, device))
    model.loss_backward(1.0, cache)
    assert loss.dtype == model.flat.grad.dtype == np.float32


def test_config_makes_the_same_model_again():
    model = LanguageModel(V, 8, 2, 2, T, norm="pre", activation="gelu", d_ff=5)
    twin = LanguageModel(**model.config)
    twin.load_state_dict(model.state_dict())
    assert np.array_equal(model(IDS), twin(IDS))
    assert twin.config == model.config


def test_inputs_that_do_not_fit(device):
    model = make(device)
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T up to 6, got 7 tokens"):
        model(to_device(np.zeros((1, 7), int), device))
    with pytest.raises(IndexError, match="ids: expected values from 0 to 8, got 9"):
        model(to_device(IDS + 1, device))
    with pytest.raises(IndexError, match="targets: expected values from 0 to 8, got -2"):
        model.loss(to_device(IDS, device), to_device(np.full((2, T), -2), device))
    with pytest.raises(ValueError, match=r"targets: expected \(2, 6\), got \(2, 5\)"):
        model.loss(to_device(IDS, device), to_device(IDS[:, 1:], device))
    with pytest.raises(ValueError, match="heads: 3 does not divide d_model 8"):
        LanguageModel(V, 8, 3, 2, T)

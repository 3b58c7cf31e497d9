"""Classifiers that learn from their embeddings with adversarial noise too."""

from functools import partial

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.models import Classifier, EvidenceClassifier
from scratchformer.nn import Frozen, recompute_blocks
from scratchformer.rng import Key

V, T, I = 11, 6, 3
LENGTHS = np.array([2, 6, 4])
LABELS = np.array([1, 0, 1])
SIZES = dict(d_model=8, heads=2, depth=2, max_length=T, key=Key(1))
KINDS = {
    "Classifier": lambda **options: Classifier(V, 2, **SIZES | options),
    "pre, causal, max": lambda **options: Classifier(V, 2, **SIZES | options, norm="pre", causal=True, pool="max"),
    "EvidenceClassifier": lambda **options: EvidenceClassifier(V, I, **SIZES | options),
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def batch(kind, device):
    draw = np.random.default_rng(0)
    ids, evidence = draw.integers(0, V, (3, T)), draw.standard_normal((3, T, I))
    arrays = [ids, evidence, LENGTHS, LABELS] if kind == "EvidenceClassifier" else [ids, LENGTHS, LABELS]
    return [to_device(x, device) for x in arrays]


def gradient(model, arrays, dloss=1.0, **options):
    model.zero_grad()
    loss, cache = model.loss(*arrays, **options)
    model.loss_backward(dloss, cache)
    return to_cpu(loss), to_cpu(model.flat.grad).copy(), cache


@EVERY
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_gradient_is_the_mean_of_two(kind, dropout, device):
    """That of the loss at x, and that of the loss at x + r, both with the same dropout."""
    model, plain = (KINDS[kind](adversarial=e, dropout=dropout).to(device, np.float64) for e in (0.2, 0.0))
    plain.load_state_dict(model.state_dict())
    arrays, key = batch(kind, device), Key(5)
    loss, found, _ = gradient(model, arrays, 3.0, key=key)
    clean, first, cache = gradient(plain, arrays, 3.0, key=key)
    assert loss == clean

    _, cache = plain.loss(*arrays, key=key)
    dx = plain.stack_backward(1.0, *cache)
    noise = partial(ops.adversarial_noise, dx=dx, epsilon=0.2, lengths=to_device(LENGTHS, device))
    noisy, second, _ = gradient(plain, arrays, 3.0, key=key, noise=noise)
    assert noisy > loss + 0.01
    np.testing.assert_allclose(found, (first + second) / 2, rtol=1e-9, atol=1e-12)


@EVERY
def test_the_loss_with_noise_has_the_gradients_of_numerical_differences(kind):
    """So the mean of the two above is checked as well. The noise is a constant."""
    model = KINDS[kind](dropout=0.3).to(dtype=np.float64)
    arrays, key = batch(kind, CPU), Key(5)
    r = np.random.default_rng(1).standard_normal((3, T, 8))

    def noise(x):
        return r

    _, found, _ = gradient(model, arrays, key=key, noise=noise)
    before, h = model.flat.data.copy(), 1e-6
    for direction in np.random.default_rng(2).standard_normal((5, before.size)):
        losses = []
        for step in (h, -h):
            model.flat.data[...] = before + step * direction
            losses.append(model.loss(*arrays, key=key, noise=noise)[0])
        np.testing.assert_allclose((losses[0] - losses[1]) / (2 * h), found @ direction, rtol=1e-6)


@EVERY
@pytest.mark.parametrize("adversarial", [0.0, 0.2])
def test_labels_that_are_probabilities(kind, adversarial, device):
    """Those of one class each give what its number gives; a mixture of two gives the mean of both."""
    model, key = KINDS[kind](adversarial=adversarial, dropout=0.3).to(device, np.float64), Key(5)
    *inputs, labels = batch(kind, device)
    loss, expected, _ = gradient(model, [*inputs, labels], 3.0, key=key)
    certain = [to_device(np.eye(2)[x], device) for x in (LABELS, 1 - LABELS)]
    found = gradient(model, [*inputs, certain[0]], 3.0, key=key)
    np.testing.assert_allclose(found[0], loss, rtol=1e-9)
    np.testing.assert_allclose(found[1], expected, rtol=1e-9, atol=1e-12)
    model.check_batch(*inputs, certain[0])
    if not adversarial:  # whose noise depends on the labels
        other = gradient(model, [*inputs, certain[1]], 3.0, key=key)
        mixed = gradient(model, [*inputs, 0.75 * certain[0] + 0.25 * certain[1]], 3.0, key=key)
        np.testing.assert_allclose(mixed[0], 0.75 * loss + 0.25 * other[0], rtol=1e-9)
        np.testing.assert_allclose(mixed[1], 0.75 * expected + 0.25 * other[1], rtol=1e-9, atol=1e-12)


@EVERY
def test_in_evaluation_there_is_no_noise(kind, device):
    model, plain = (KINDS[kind](adversarial=e).to(device, np.float64) for e in (0.2, 0.0))
    arrays = batch(kind, device)
    np.testing.assert_array_equal(gradient(model, arrays)[1], gradient(plain, arrays)[1])


def test_recomputed_blocks_give_the_same(device):
    models = [KINDS["Classifier"](adversarial=0.2, dropout=0.3).to(device, np.float64) for _ in range(2)]
    recompute_blocks(models[1])
    found = [gradient(model, batch("Classifier", device), key=Key(5))[1] for model in models]
    np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-12)


def test_a_frozen_part_has_no_use_for_noise():
    """The error is raised before any gradient is computed."""
    for name in ("the body", "block 1"):
        model = KINDS["Classifier"](adversarial=0.2)
        if name == "the body":
            model.body = Frozen(model.body)
        else:
            model.body.blocks[1] = Frozen(model.body.blocks[1])
        with pytest.raises(
            ValueError, match=f"adversarial: expected 0, since no gradient passes through {name}, which is frozen"
        ):
            gradient(model, batch("Classifier", CPU), key=Key(5))
        assert not model.flat.grad.any()


@pytest.mark.parametrize("epsilon", [-0.1, float("nan"), "much"])
def test_wrong_arguments(epsilon):
    with pytest.raises((ValueError, TypeError), match="adversarial: expected"):
        KINDS["Classifier"](adversarial=epsilon)
    make = partial(KINDS["Classifier"]().loss, *batch("Classifier", CPU))
    with pytest.raises(ValueError, match=r"noise: expected \(3, 6, 8\), got \(3, 6, 4\)"):
        make(noise=lambda x: x[:, :, :4])


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (np.array([0.0, 1.0, 1.0]), ValueError, r"labels: expected \(3, 2\), got \(3,\)"),
        (np.array([[5.0, -3.0]] * 3), ValueError, "labels: expected probabilities, from 0 to 1"),
        (np.array([[0.5, 0.4]] * 3), ValueError, "labels: expected probabilities, from 0 to 1"),
        (np.full((3, 2), np.nan), ValueError, "labels: expected probabilities, from 0 to 1"),
    ],
)
@pytest.mark.parametrize("kind", ["Classifier", "EvidenceClassifier"])
def test_labels_that_are_no_probabilities(kind, labels, error, message):
    model, (*inputs, _) = KINDS[kind](), batch(kind, CPU)
    for call in (model.loss, model.check_batch):
        with pytest.raises(error, match=message):
            call(*inputs, labels)


def test_probabilities_of_every_unit_are_refused():
    model = KINDS["Classifier"](pool="none")
    ids, lengths, _ = batch("Classifier", CPU)
    for call in (model.loss, model.check_batch):
        with pytest.raises(
            ValueError, match=r"labels: expected classes \(B, T\), integers, with pool 'none', got float"
        ):
            call(ids, lengths, np.full((3, T, 2), 0.5))

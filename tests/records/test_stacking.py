"""Stacking: a classifier and another model decide together."""

import numpy as np
import pytest

from scratchformer.records import scores_of_classes, stack_weights, stacked
from scratchformer.records.stacking import stack_loss


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def drawn(texts, weights, seed=0):
    """Probabilities, logits and labels, whose true log-odds have these weights. Both models know part of the same."""
    draw = np.random.default_rng(seed)
    shared, own, other = draw.standard_normal((3, texts)) * 2
    d, s = shared + own, shared + other
    labels = (draw.random(texts) < sigmoid(weights[0] * d + weights[1] * s)).astype(np.int64)
    p = sigmoid(d)
    return np.stack([1 - p, p], axis=1), s, labels


def test_the_gradient_is_that_of_the_loss():
    probabilities, logits, labels = drawn(20, (0.4, 0.7))
    x = np.stack([np.log(probabilities[:, 1] / probabilities[:, 0]), logits], axis=1)
    at, h = np.array([0.3, 1.2]), 1e-6
    _, gradient = stack_loss(at, x, labels)
    for m, step in enumerate(np.eye(2) * h):
        difference = stack_loss(at + step, x, labels)[0] - stack_loss(at - step, x, labels)[0]
        assert gradient[m] == pytest.approx(difference / (2 * h), rel=1e-7)
    z = x @ at
    nats = -np.log(np.where(labels == 1, sigmoid(z), sigmoid(-z)))
    assert stack_loss(at, x, labels)[0] == pytest.approx(nats.sum() + 0.5 * (0.7**2 + 0.2**2), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_weights_that_drew_the_labels_are_found(dtype):
    probabilities, logits, labels = drawn(50_000, (0.4, 0.7))
    found = stack_weights(probabilities.astype(dtype), logits.astype(dtype), labels)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, (0.4, 0.7), atol=0.02)  # about 1.5 standard errors
    together, alone = (
        scores_of_classes(stacked(probabilities, logits, np.array(weights)), labels)["loss"]
        for weights in (found, (1.0, 1.0))
    )
    assert together < alone - 0.05


def test_no_other_weights_have_a_lower_loss():
    probabilities, logits, labels = drawn(500, (0.5, 0.1), seed=1)
    x = np.stack([np.log(probabilities[:, 1] / probabilities[:, 0]), logits], axis=1)
    found = stack_weights(probabilities, logits, labels)
    least = stack_loss(found, x, labels)[0]
    for step in np.random.default_rng(0).standard_normal((50, 2)) * 0.01:
        assert stack_loss(found + step, x, labels)[0] > least


def test_few_texts_stay_near_the_plain_sum():
    """Also if all of them are classified correctly: without the penalty, the weights would grow without end."""
    right = np.array([[0.1, 0.9], [0.8, 0.2]])
    found = stack_weights(right, np.array([1.0, -1.0]), np.array([1, 0]))
    assert (found > 1).all() and (found < 1.5).all()
    for dtype in np.float32, np.float64:
        sure = stack_weights(np.array([[0, 1], [1, 0]], dtype), np.array([50.0, -50.0]), np.array([1, 0]))
        np.testing.assert_allclose(sure, 1, atol=1e-6)


def test_weights_are_applied_to_log_odds():
    probabilities, logits, _ = drawn(30, (1, 1))
    odds = (probabilities[:, 1] / probabilities[:, 0]) ** 0.3 * np.exp(0.9 * logits)
    found = stacked(probabilities.astype(np.float32), logits, np.array([0.3, 0.9]))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, np.stack([1 / (1 + odds), odds / (1 + odds)], axis=1), rtol=1e-5)
    np.testing.assert_allclose(stacked(probabilities, logits, np.array([1.0, 0.0])), probabilities, rtol=1e-12)
    for dtype in np.float32, np.float64:
        sure = stacked(np.array([[0, 1], [1, 0]], dtype), np.zeros(2), np.ones(2))
        np.testing.assert_allclose(sure, [[0, 1], [1, 0]], atol=1e-300)
    unlikely = stacked(np.full((2, 2), 0.5), np.array([50.0, -50.0]), np.ones(2))
    np.testing.assert_allclose(unlikely[[0, 1], [0, 1]], np.exp(-50), rtol=1e-12)


GOOD = dict(
    probabilities=np.full((3, 2), 0.5), logits=np.zeros(3), labels=np.array([0, 1, 1]), weights=np.array([1.0, 1.0])
)


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("probabilities", np.ones((3, 2), int), TypeError, "probabilities: expected a floating-point array"),
        ("probabilities", np.full((3, 3), 1 / 3), ValueError, r"probabilities: expected \(texts, 2\), got \(3, 3\)"),
        ("probabilities", np.full((3, 2), 0.7), ValueError, "probabilities: expected probabilities, from 0 to 1"),
        ("probabilities", np.full((3, 2), np.nan), ValueError, "probabilities: expected probabilities, from 0 to 1"),
        ("logits", np.zeros(2), ValueError, r"logits: expected \(3\), got \(2,\)"),
        ("logits", np.zeros((3, 1)), ValueError, r"logits: expected \(3\), got \(3, 1\)"),
        ("logits", np.zeros(3, int), TypeError, "logits: expected a floating-point array"),
        ("logits", np.array([0, np.inf, 0]), ValueError, "logits: expected finite numbers"),
        ("logits", [0.0, 0.0, 0.0], TypeError, "logits: expected a floating-point array"),
        ("labels", np.array([0, 1]), ValueError, r"labels: expected \(3\), got \(2,\)"),
        ("labels", np.array([0, 1, 2]), IndexError, "labels: expected .* 0 to 1"),
        ("labels", np.array([0.0, 1.0, 1.0]), TypeError, "labels: expected integers"),
        ("weights", np.ones(3), ValueError, r"weights: expected \(2\), got \(3,\)"),
        ("weights", np.array([1, 1]), TypeError, "weights: expected a floating-point array"),
        ("weights", np.array([1.0, np.nan]), ValueError, "weights: expected finite numbers"),
    ],
)
def test_arrays_that_do_not_fit(name, wrong, error, message):
    given = GOOD | {name: wrong}
    function = stacked if name == "weights" else stack_weights
    names = ("probabilities", "logits", "weights" if name == "weights" else "labels")
    with pytest.raises(error, match=message):
        function(*(given[name] for name in names))

"""Stacking: a classifier of two classes and another model decide together.

Let d_b be the classifier's log-odds of class 1 for text b, and s_b the other model's logit. Together they predict class
1 with the logit

    z_b = u d_b + v s_b

The plain sum, u = v = 1, is too sure of itself if both models have learned from the same texts: it counts twice what
both know. So u and v are fitted to texts from which neither model has learned.

Source: Wolpert, "Stacked generalization", 1992.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..checks import expect_floating, expect_ids, expect_instance, expect_probabilities, expect_shape
from ..data import Labelled
from ..parallel.replicas import Replicas
from ..training.evaluate import log_probabilities_of_classes, scores_of_log_probabilities


def stack_weights(probabilities: np.ndarray, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The weights (u, v) of a classifier and of another model, fitted to texts: a float64 array (2,).

    probabilities: (texts, 2), the classifier's, as from `predict_classes`. logits: (texts,), the other model's of class
    1. labels: (texts,), 0 or 1. The result minimises `stack_loss`, by BFGS (SciPy). Raises TypeError, ValueError or
    IndexError for arrays that do not fit.
    """
    from scipy import optimize
    from threadpoolctl import threadpool_limits

    x = _inputs(probabilities, logits)
    expect_shape("labels", labels, "texts", texts=len(x))
    expect_ids("labels", labels, 2)
    with threadpool_limits(1, "blas"):  # the last bits of a sum depend on the number of threads
        return optimize.minimize(stack_loss, np.ones(2), (x, labels.astype(np.float64)), jac=True, method="BFGS").x


def stack_loss(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss that fits the weights w = (u, v), and its gradient. x: (B, 2), with d in the first column and s in the
    second. y: (B,), labels 0 or 1.

        z_b = Σ_m x_bm w_m
        loss = Σ_b (log(1 + exp(z_b)) − y_b z_b) + 1/2 Σ_m (w_m − 1)²

    The first sum is the cross-entropy in nats. The second keeps the weights finite, and near the plain sum if there are
    few texts; with thousands of texts it makes no difference.

    Gradient. The derivative of log(1 + exp(z)) is p, the probability of class 1:

        p_b = 1/(1 + exp(−z_b))
        dw_m = Σ_b (p_b − y_b) x_bm + w_m − 1        dw = (p − y) @ x + w − 1
    """
    from scipy.special import expit

    z = x @ weights
    loss = float(np.sum(np.logaddexp(0, z) - y * z)) + 0.5 * float(np.sum((weights - 1) ** 2))
    p = expit(z)
    return loss, (p - y) @ x + weights - 1


def stacked(probabilities: np.ndarray, logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The probabilities of both classes, float64 (texts, 2), that a classifier and another model predict together.

    probabilities and logits as for `stack_weights`, which also fits the weights (2,). Raises TypeError or ValueError
    for arrays that do not fit.
    """
    from scipy.special import expit

    expect_floating(weights=weights)
    expect_shape("weights", weights, "models", models=2)
    if not np.isfinite(weights).all():
        raise ValueError("weights: expected finite numbers")
    z = _inputs(probabilities, logits) @ weights
    return expit(np.stack([-z, z], axis=1))


def _inputs(probabilities: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The log-odds of both models, float64 (texts, 2)."""
    expect_floating(probabilities=probabilities, logits=logits)
    expect_shape("probabilities", probabilities, "texts K", K=2)
    expect_probabilities("probabilities", probabilities, probabilities.shape)
    expect_shape("logits", logits, "texts", texts=len(probabilities))
    if not np.isfinite(logits).all():
        raise ValueError("logits: expected finite numbers")
    smallest = math.ulp(0.0)  # a probability of 0 would have infinite log-odds
    log_p = np.log(np.maximum(np.asarray(probabilities, np.float64), smallest))
    return np.stack([log_p[:, 1] - log_p[:, 0], np.asarray(logits, np.float64)], axis=1)


def predict_classes(
    replicas: Replicas, dataset: Labelled, max_length: int, keep: str = "head", batch_size: int | None = None
) -> np.ndarray:
    """The probabilities of the classes, float64 (texts, K), that a classifier predicts for each text, in the order of
    the dataset. Its labels are ignored. The arguments are those of `evaluate_classifier`.
    """
    expect_instance("dataset", dataset, Labelled)
    unread = replace(dataset, labels=np.zeros(len(dataset.ids), np.int64))
    probabilities = np.exp(
        log_probabilities_of_classes(replicas, unread, max_length, keep, batch_size).astype(np.float64)
    )
    return probabilities / probabilities.sum(axis=1, keepdims=True)


def scores_of_classes(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Loss (nats per text) and accuracy of probabilities (texts, K), such as the mean of those that several classifiers
    predict. labels: (texts,), the true classes. A text whose class has probability 0 makes the loss infinite. Raises
    TypeError, ValueError or IndexError for arrays that do not fit.
    """
    expect_floating(probabilities=probabilities)
    expect_shape("probabilities", probabilities, "texts K")
    if not probabilities.size:
        raise ValueError(f"probabilities: expected texts and classes, got {probabilities.shape}")
    expect_probabilities("probabilities", probabilities, probabilities.shape)
    expect_shape("labels", labels, "texts", texts=len(probabilities))
    expect_ids("labels", labels, probabilities.shape[1])
    with np.errstate(divide="ignore"):
        return scores_of_log_probabilities(np.log(probabilities), labels)

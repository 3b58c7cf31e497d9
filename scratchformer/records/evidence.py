"""Evidence: how much each word of a text speaks for class 1, as a linear model of n-grams sees it.

The linear model is a logistic regression on which n-grams a text contains, each weighted by its log-ratio of the two
classes (Wang, Manning, "Baselines and bigrams: simple, good sentiment and topic classification", 2012). Its logit is a
sum over n-grams, so it can be divided among the words of a text: each gets the terms of the n-grams that end with it. A
transformer that reads these numbers beside the words need not learn from little text what thousands of n-grams mean. It
learns what counting cannot see: in which context they mean what they say.

The evidence in training texts must come from linear models that were not trained on them. A model knows the labels of
its own texts from their rare n-grams, and a transformer would learn to believe it. So the texts are divided into folds,
and the evidence in a fold comes from a model of the other folds (Wolpert, "Stacked generalization", 1992).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..checks import expect_at_least, expect_integers, expect_number, expect_positive, expect_shape
from ..shell.progress import counted
from ..shell.reading import DataError

BITS = 20  # of an id in the key of an n-gram: three fit in 63 bits
MAX_ORDER = 3
FOLDS = 10
ITERATIONS = 20  # of L-BFGS, at most; the loss is then within 1e-4 of its minimum on IMDb


class TextEvidence(NamedTuple):
    """What a linear model says about texts: the evidence in each, float32 (T, order), and the logit of class 1 of each,
    (texts,), bias included.
    """

    evidence: list[np.ndarray]
    logits: np.ndarray


class Evidence(NamedTuple):
    """A linear model: the keys of its n-grams (G,), in ascending order, the weight of each (G,), and a bias."""

    keys: np.ndarray
    weights: np.ndarray
    bias: float
    order: int

    def of(self, ids: np.ndarray) -> np.ndarray:
        """The evidence in a text ids (T,): float32 (T, order), a column for each n. An n-gram counts where it occurs
        first. The sum of all, plus the bias, is the logit of class 1. Raises TypeError or ValueError for ids that
        `find_evidence` does not take.
        """
        _check_text(ids)
        keys, first = np.unique(keys_of(ids, self.order), return_index=True)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        evidence = np.zeros(len(ids) * self.order, np.float32)
        evidence[first] = np.where(self.keys[places] == keys, self.weights[places], 0)
        return evidence.reshape(len(ids), self.order)

    def logits(self, texts: Iterable[np.ndarray]) -> np.ndarray:
        """The logit of class 1 of each of the texts, (texts,)."""
        return self.logits_of(map(self.of, texts))

    def read(self, texts: Sequence[np.ndarray]) -> TextEvidence:
        """The evidence in each of the texts, and its logit."""
        evidence = [self.of(ids) for ids in texts]
        return TextEvidence(evidence, self.logits_of(evidence))

    def logits_of(self, evidence: Iterable[np.ndarray]) -> np.ndarray:
        """`logits` of the texts with this evidence."""
        return np.array([values.sum(dtype=np.float64) for values in evidence]) + self.bias


def keys_of(ids: np.ndarray, order: int) -> np.ndarray:
    """A number for each n-gram of a text ids (T,): int64 (T, order). Column n − 1 has those of the n ids that end
    there, and 0 where there are fewer. Different n-grams have different numbers.
    """
    keys = np.zeros((len(ids), order), np.int64)
    for n in range(1, order + 1):
        for back in range(n):  # the id `back` positions before
            keys[n - 1 :, n - 1] |= (ids[n - 1 - back : len(ids) - back].astype(np.int64) + 1) << (BITS * back)
    return keys


class Counts(NamedTuple):
    """Which n-grams texts contain: their keys (G,), and a sparse matrix (texts, G) of 0 and 1."""

    keys: np.ndarray
    x: Any


def count(texts: Sequence[np.ndarray], order: int, minimum: int = 2) -> Counts:
    """The n-grams, n up to `order`, that at least `minimum` texts contain. Raises DataError if there are none."""
    from scipy import sparse

    keys_of_texts = [np.unique(keys_of(ids, order)) for ids in texts]
    keys_of_texts = [keys[np.searchsorted(keys, 1) :] for keys in keys_of_texts]  # without 0
    keys, index = np.unique(np.concatenate(keys_of_texts), return_inverse=True)
    starts = np.concatenate([[0], np.cumsum([len(text) for text in keys_of_texts])])
    x = sparse.csr_matrix((np.ones(len(index), np.float32), index, starts), (len(texts), len(keys)))
    kept = np.asarray(x.sum(axis=0)).ravel() >= minimum
    if not kept.any():
        raise DataError(f"evidence: no n-gram of up to {order} words is in {minimum} of the {len(texts)} texts")
    return Counts(keys[kept], x[:, kept].tocsr())


def log_ratios(x: Any, labels: np.ndarray) -> np.ndarray:
    """r_g = log((1 + p_g)/Σ_h (1 + p_h)) − log((1 + q_g)/Σ_h (1 + q_h)), (G,), for x (texts, G) and labels 0 and 1.

    p_g and q_g are the numbers of texts of class 1 and of class 0 that contain n-gram g.
    """
    p, q = (1 + np.asarray(x[labels == label].sum(axis=0), np.float64).ravel() for label in (1, 0))
    return np.log(p / p.sum()) - np.log(q / q.sum())


def fit(counts: Counts, labels: np.ndarray, order: int, c: float = 0.1, rows: Any = slice(None)) -> Evidence:
    """The logistic regression of some rows of `counts`, by L-BFGS (SciPy): see `logistic`.

    A text's inputs are the log-ratios r_g of its n-grams, so with the parameters u the weight of an n-gram in the logit
    is r_g u_g. The penalty of u makes weights with a large log-ratio cheap, so an n-gram that occurs in texts of both
    classes has little weight.
    """
    from scipy import optimize
    from threadpoolctl import threadpool_limits

    x, y = counts.x[rows], labels[rows]
    ratios = log_ratios(x, y)
    scaled = x.multiply(ratios).tocsr()
    arguments = (scaled, scaled.T.tocsr(), y.astype(np.float64), c)
    start, options = np.zeros(len(ratios) + 1), {"maxiter": ITERATIONS}
    with threadpool_limits(1, "blas"):  # the last bits of a sum depend on the number of threads
        solution = optimize.minimize(logistic, start, arguments, jac=True, method="L-BFGS-B", options=options).x
    return Evidence(counts.keys, ratios * solution[:-1], float(solution[-1]), order)


def logistic(parameters: np.ndarray, x: Any, across: Any, y: np.ndarray, c: float) -> tuple[float, np.ndarray]:
    """The loss of a logistic regression, and its gradient. Labels y_b are 0 or 1:

        z_b = Σ_g x_bg u_g + bias
        loss = c Σ_b (log(1 + exp(z_b)) − y_b z_b) + 1/2 Σ_g u_g²

    parameters: (G + 1,), u and then the bias. x: (B, G), and across (G, B), its transpose: sparse matrices. y: (B,).

    Gradient. The derivative of log(1 + exp(z)) is p, the probability of class 1. So e is that of the loss by z,
    slope that by u, and slope0 that by the bias, which has no penalty:

        p_b = 1/(1 + exp(−z_b))        e_b = c (p_b − y_b)
        slope_g = Σ_b e_b x_bg + u_g        slope0 = Σ_b e_b
    """
    from scipy.special import expit

    u, bias = parameters[:-1], parameters[-1]
    z = x @ u + bias
    e = c * (expit(z) - y)
    loss = c * float(np.sum(np.logaddexp(0, z) - y * z)) + 0.5 * float(u @ u)
    return loss, np.append(across @ e + u, e.sum())


def find_evidence(
    train: Sequence[np.ndarray],
    labels: np.ndarray,
    others: Sequence[Sequence[np.ndarray]] = (),
    order: int = 3,
    c: float = 0.1,
    folds: np.ndarray | None = None,
) -> list[TextEvidence]:
    """The evidence in the training texts, and in those of each of `others`, with the linear model's logits.

    train: texts, ids (T,) from 0 to 1,048,574. labels: (texts,), 0 or 1. order: the longest n-grams, 1 to 3. c: the
    weight of the loss against that of the penalty. folds: (texts,), the fold of each training text, at least two, with
    both labels outside of each; by default FOLDS parts of neighbours. Evidence in `others` comes from a model of all
    training texts. Raises ValueError for texts, labels or folds that do not fit, and DataError if no n-gram is in two
    texts.
    """
    _check([train, *others], labels, order, c)
    folds = by_class(labels) if folds is None else folds
    expect_integers("folds", folds)
    expect_shape("folds", folds, "texts", texts=len(train))
    if len(np.unique(folds)) < 2:
        raise ValueError("folds: expected at least two, got one")
    for fold in np.unique(folds).tolist():
        if len(np.unique(labels[folds != fold])) < 2:
            raise ValueError(f"folds: expected both labels outside of each fold, got one outside of fold {fold}")
    counts = count(train, order)
    evidence, logits = [np.empty(0)] * len(train), np.empty(len(train))
    for fold in counted(np.unique(folds).tolist(), "finding evidence", "folds"):
        rows = np.flatnonzero(folds == fold)
        model = fit(counts, labels, order, c, np.flatnonzero(folds != fold))
        held_out = model.read([train[i] for i in rows.tolist()])
        logits[rows] = held_out.logits
        for i, one in zip(rows.tolist(), held_out.evidence, strict=True):
            evidence[i] = one
    whole = fit(counts, labels, order, c)
    return [TextEvidence(evidence, logits), *map(whole.read, others)]


def fit_evidence(train: Sequence[np.ndarray], labels: np.ndarray, order: int = 3, c: float = 0.1) -> Evidence:
    """The linear model that `find_evidence` fits to all training texts. Its method `read` returns the evidence in new
    texts, and its logits. Arguments and errors as in `find_evidence`.
    """
    _check([train], labels, order, c)
    return fit(count(train, order), labels, order, c)


def _check(parts: Sequence[Sequence[np.ndarray]], labels: np.ndarray, order: int, c: float) -> None:
    """Raise an error for arguments out of range: see `find_evidence`. parts: the training texts, then the others."""
    expect_positive(order=order)
    expect_number("c", c, zero=False)
    if order > MAX_ORDER:
        raise ValueError(f"order: expected at most {MAX_ORDER}, got {order}")
    expect_shape("labels", labels, "texts", texts=len(parts[0]))
    if set(np.unique(labels)) != {0, 1}:
        raise ValueError(f"labels: expected 0 and 1, got {np.unique(labels).tolist()}")
    for ids in (ids for texts in parts for ids in texts):
        _check_text(ids)


def _check_text(ids: np.ndarray) -> None:
    expect_shape("texts", ids, "T")
    expect_integers("texts", ids)
    expect_at_least(0, ids=int(ids.min(initial=0)))
    if ids.max(initial=0) >= (1 << BITS) - 1:
        raise ValueError(f"ids: expected at most {(1 << BITS) - 2:,}, got {ids.max()}")


def by_class(labels: np.ndarray, count: int = FOLDS) -> np.ndarray:
    """The fold of each text, (texts,): for each class, `count` parts of neighbours, which may be about one film."""
    folds = np.empty(len(labels), int)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        folds[members] = np.arange(len(members)) * count // len(members)
    return folds

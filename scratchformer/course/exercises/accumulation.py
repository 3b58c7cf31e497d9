"""Gradient accumulation with unequal weights

A batch that does not fit in memory is cut into micro-batches, whose gradients are added up. The sum must be the
gradient of the whole batch's loss, which is the mean over all targets that count.

The trap: the micro-batches do not have the same number of targets. A padded sentence has targets of −1, which do not
count, so a mean of the micro-batches' means gives some targets more weight than others.
"""

import numpy as np


def loss_and_gradient(w, x, targets):
    """The mean loss of one micro-batch, over the targets that count, and its gradient with respect to w.

    x: (N, C), w: (C, V), targets: (N,), −1 where there is none.
    """
    counted = targets >= 0
    n = max(1, counted.sum())
    z = x @ w
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    rows = np.flatnonzero(counted)
    loss = -np.log(p[rows, targets[rows]]).sum() / n
    p[rows, targets[rows]] -= 1
    return loss, x.T @ (p * counted[:, None]) / n


def accumulate(w, micro_batches):
    """The mean loss and its gradient for the whole batch, from a list of (x, targets). Without a target both are 0."""
    # TODO: loss and dw, with one call of loss_and_gradient for each micro-batch.
    total = max(1, sum((targets >= 0).sum() for _, targets in micro_batches))
    loss, dw = 0.0, np.zeros_like(w)
    for x, targets in micro_batches:
        part, gradient = loss_and_gradient(w, x, targets)
        weight = (targets >= 0).sum() / total
        loss += weight * part
        dw += weight * gradient
    # END
    return loss, dw


# The student's file ends here.

import numpy as np

from scratchformer.training import Replicas

from ..grading import Wrong, expect_close, normal

HINTS = (
    "Write the whole batch's loss as a sum over all its targets divided by their number, and split the sum.",
    "Which part of all targets does a micro-batch have? Its mean counts with this weight, and so does its gradient.",
    "With n of the N targets the weight is n/N. Count with (targets >= 0).sum(), not with len(targets), and "
    "divide by at least 1, as loss_and_gradient does.",
)
LIBRARY = Replicas
MISTAKES = (
    (
        "weight = (targets >= 0).sum() / total",
        "weight = 1 / len(micro_batches)",
        "loss",
        "all micro-batches weigh alike",
    ),
    ("weight = (targets >= 0).sum() / total", "weight = 1.0", "loss", "the means are added"),
    (
        "weight = (targets >= 0).sum() / total",
        "weight = len(targets) / sum(len(targets) for _, targets in micro_batches)",
        "loss",
        "targets of −1 are counted in the weights too",
    ),
    ("        dw += weight * gradient", "        dw += gradient", "dw", "the gradients have no weights"),
    (
        "        dw += weight * gradient",
        "        dw = weight * gradient",
        "dw",
        "the last gradient is all that is left",
    ),
    (
        "total = max(1, sum((targets >= 0).sum() for _, targets in micro_batches))",
        "total = sum((targets >= 0).sum() for _, targets in micro_batches)",
        "loss: expected 0, got nan.*no target counts",
    ),
    (
        "    loss, dw = 0.0, np.zeros_like(w)\n",
        "    return loss_and_gradient(w, *(np.concatenate(parts) for parts in zip(*micro_batches)))\n",
        "once for each of the 4 micro-batches",
    ),
)


def check(student):
    w, batches = normal(0, 4, 6), []
    for i, targets in enumerate(([1, 2, -1, 5], [-1, -1, 3], [0, 4, 4, 2, 1], [-1, -1])):
        batches.append((normal(i + 1, len(targets), 4), np.array(targets)))
    x, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    expected = student.loss_and_gradient(w, x, targets)
    sizes, of_micro_batch = [], student.loss_and_gradient

    def observed(w, x, targets):
        sizes.append(len(targets))
        return of_micro_batch(w, x, targets)

    student.loss_and_gradient = observed
    loss, dw = student.accumulate(w, batches)
    student.loss_and_gradient = of_micro_batch
    if sizes != [len(targets) for _, targets in batches]:
        raise Wrong(f"call loss_and_gradient once for each of the {len(batches)} micro-batches, in their order")
    why = "It must be that of the whole batch, in which each target that counts has the same weight"
    expect_close("loss", loss, expected[0], why)
    expect_close("dw", dw, expected[1], why)
    loss, dw = student.accumulate(w, batches[-1:])  # without any target
    why = "Here no target counts, so there is nothing to divide by: the loss and its gradient are 0"
    expect_close("loss", loss, 0.0, why)
    expect_close("dw", dw, 0 * w, why)

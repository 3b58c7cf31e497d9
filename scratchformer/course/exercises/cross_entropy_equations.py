"""The derivation of cross-entropy

The loss of a row is −log p, where p is the probability that softmax gives to its target. The loss of a batch is the
mean over the targets that count: where a text has ended before the longest one, the target is −1 and does not count.

[condition] is 1 where the condition holds and 0 elsewhere. So t_nv is a table with a single 1 in each row that counts,
at its target. v' is a second index over the same values as v.

Replace each `?`. The logarithm undoes the exponentials of softmax, so the result is simpler than the gradient of
softmax alone. You may type sum_v for Σ_v. Do not use ∂ in an answer.
"""

from scratchformer import ops


def cross_entropy(z, targets):
    """The mean of −log softmax(z_n) at the target of n, over the rows that count. z: (N, V), targets: (N,).

    Forward. log(exp(z)/Z) = z − log(Z), so no softmax is needed:

        t_nv = [v = targets_n]
        k_n = [targets_n ≥ 0]
        count = Σ_n k_n
        λ_n = log(Σ_v exp(z_nv))
        ℓ_n = λ_n − Σ_v t_nv z_nv
        loss = 1/count Σ_n k_n ℓ_n

    Backward. First the derivatives within a row. The first one is called p; write it in terms of z:

        p_nv := ∂λ_n/∂z_nv = ⟦exp(z_nv)/Σ_v' exp(z_nv')⟧
        ∂ℓ_n/∂z_nv = ⟦p_nv − t_nv⟧

    Then the mean. dloss is the gradient of the mean; find that of ℓ_n. Rows that do not count get 0:

        dℓ_n = ⟦dloss k_n/count⟧

    Put together, in terms of p, t, k, count and dloss:

        dz_nv = dℓ_n ∂ℓ_n/∂z_nv = ⟦dloss k_n (p_nv − t_nv)/count⟧
    """
    return ops.cross_entropy(z, targets, ignore_index=-1)


# The student's file ends here.

import numpy as np

from ..grading import Derivation, normal

HINTS = (
    "The derivative of log(u) is 1/u times the derivative of u. Here u is the sum of the exponentials of a row, in "
    "which one term contains z_nv. You know the result: it is the softmax.",
    "ℓ_n has two terms. The first gives p_nv; the second is a sum in which z_nv has the factor t_nv. In the mean, each "
    "row has the weight k_n/count.",
    "∂ℓ_n/∂z_nv = p_nv − t_nv, and dℓ_n is dloss times the weight of the row. dz_nv is the product of both.",
)
LIBRARY = ops.cross_entropy
MISTAKES = (
    (
        "∂ℓ_n/∂z_nv = p_nv − t_nv",
        "∂ℓ_n/∂z_nv = p_nv (1 − p_nv)",
        "∂ℓ_n/∂z_nv.*is not true",
        "the derivative of the probability is written, not that of the loss",
    ),
    ("dℓ_n = dloss k_n/count", "dℓ_n = dloss", "dℓ_n", "the weight of the row in the mean is left out"),
    (
        "∂ℓ_n/∂z_nv = p_nv − t_nv",
        "∂ℓ_n/∂z_nv = p_nv − 1",
        "ℓ_n/∂z_nv.*is not true",
        "1 is subtracted everywhere, and not at the target alone",
    ),
    ("exp(z_nv)/Σ_v' exp(z_nv')", "1/Σ_v' exp(z_nv')", "p_nv.*is not true"),
    ("= p_nv − t_nv", "= t_nv − p_nv", "∂ℓ_n/∂z_nv.*is not true"),
    ("= dloss k_n/count", "= dloss k_n", "dℓ_n.*differs", "the division by count is left out"),
    ("= dloss k_n/count", "= dloss/count", "dℓ_n.*differs", "rows that do not count get a gradient too"),
    ("dloss k_n (p_nv − t_nv)/count", "dloss k_n (p_nv − t_nv)/N", "dz_nv.*is not true"),
    ("dloss k_n (p_nv − t_nv)/count", "dloss (p_nv − t_nv)/count", "dz_nv.*is not true"),
)


def derivation(student):
    runs = (normal(0, 5, 3), np.array([2, -1, 0, 1, -1])), (normal(1, 3, 4), np.array([3, -1, 0]))
    return Derivation(student.cross_entropy, ops.cross_entropy_backward, runs)

"""Adam

Adam moves each parameter by the mean of its gradients divided by the root of the mean of their squares. Both means run
over all steps, and older gradients count less:

    m ← β1 m + (1 − β1) g        v ← β2 v + (1 − β2) g²

They start at 0, which pulls them towards 0 in the first steps. After t steps the weights of all gradients in m add up
to 1 − β1^t. Divide by that, and m̂ is a true weighted mean; the same goes for v̂. Then

    w ← w − lr m̂ / (√v̂ + eps)
"""

import numpy as np


def adam_step(w, g, m, v, t, lr, beta1, beta2, eps):
    """Step t = 1, 2, ... Returns the new w, m and v; changes none of the arrays that it is given."""
    # TODO: w, m and v after this step.
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    w = w - lr * m_hat / (np.sqrt(v_hat) + eps)
    # END
    return w, m, v


# The student's file ends here.

import numpy as np

from scratchformer import optim
from scratchformer.optim.adam import adam_step as library

from ..grading import expect_close, expect_unchanged, normal

HINTS = (
    "First the new m and v, then m̂ and v̂ from them, and w last. m and v themselves stay without the correction.",
    "A correction divides by the sum of all weights so far, which depends on β and t: after step 1, m̂ is the "
    "gradient itself.",
    "m̂ = m/(1 − β1^t) and v̂ = v/(1 − β2^t) are variables of their own. eps is added to the root, not inside it.",
)
LIBRARY = optim.Adam
MISTAKES = (
    ("v = beta2 * v + (1 - beta2) * g**2", "v = beta2 * v + (1 - beta1) * g**2", "v.*after step 3", "v has 1 − β1"),
    ("v_hat = v / (1 - beta2**t)", "v_hat = v", "w.*after step 3", "v is not corrected"),
    ("m_hat = m / (1 - beta1**t)", "m_hat = m", "w.*after step 3", "m is not corrected"),
    ("m_hat = m / (1 - beta1**t)", "m_hat = m / (1 - beta1)", "w.*after step 3", "β1 has no power t"),
    (
        "    m_hat = m / (1 - beta1**t)\n    v_hat = v / (1 - beta2**t)\n",
        "    m_hat = m / (1 - beta1 ** (t + 1))\n    v_hat = v / (1 - beta2 ** (t + 1))\n",
        "w.*after step 3",
        "steps are counted from 0: t is 1 in the first step already",
    ),
    ("(np.sqrt(v_hat) + eps)", "np.sqrt(v_hat + eps)", "w.*after step", "eps is inside the root"),
    (
        "    m_hat = m / (1 - beta1**t)\n",
        "    m = m_hat = m / (1 - beta1**t)\n",
        "m.*after step 3",
        "the correction is stored in m, and the next step corrects it again",
    ),
    ("m = beta1 * m + (1 - beta1) * g", "m = beta1 * m + g", "m.*after step", "g has no factor 1 − β1"),
    ("(1 - beta2) * g**2", "(1 - beta2) * g", "v.*after step", "g is not squared"),
    ("(np.sqrt(v_hat) + eps)", "(v_hat + eps)", "w.*after step", "the root is left out"),
    ("w = w - lr", "w = w + lr", "w.*after step", "w moves in the direction of the gradient, not against it"),
)


def check(student):
    w, m, v = normal(0, 3, 4), normal(8, 3, 4), normal(9, 3, 4) ** 2  # as some steps have left them
    expected = w.copy(), m.copy(), v.copy()
    for t, settings in (3, (0.1, 0.9, 0.97, 1e-2)), (4, (0.1, 0.9, 0.97, 1e-2)), (5, (0.3, 0.8, 0.95, 1e-4)):
        g = normal(t, 3, 4)
        with expect_unchanged(w=w, g=g, m=m, v=v):
            w, m, v = student.adam_step(w, g, m, v, t, *settings)
        lr, beta1, beta2, eps = settings
        library(expected[0], g, expected[1], expected[2], lr, beta1, beta2, eps, t)
        for name, actual, right in zip("mvw", (m, v, w), (expected[1], expected[2], expected[0]), strict=True):
            expect_close(name, actual, right, f"This is {name} after step {t}.")

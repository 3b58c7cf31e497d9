"""The larger of two equals

What was wrong. The gradient of max(a, b) went to a where a ≥ b, and to b where b ≥ a: to both, where they are equal.
This made training in float16 diverge, where equal numbers are common.

Why its tests passed. Normal numbers are never equal.

What finds it. Equal numbers in both arguments, moved together.

How to derive it. What a and b get must add up to dy, so the two conditions must exclude each other:

    da_n = dy_n where a_n ≥ b_n, 0 elsewhere; db_n = dy_n − da_n
"""

import numpy as np

SOURCE = "microsoft/onnxruntime 7217"
ARGUMENTS = ("N C", "N C")
NAMED = "moved together"


def forward(a, b):
    return np.maximum(a, b), a - b


def wrong(dy, difference):
    return dy * (difference >= 0), dy * (difference <= 0)


def right(dy, difference):
    return dy * (difference >= 0), dy * (difference < 0)

"""The chain rule, step by step

A forward computes y from x in small steps. The last step of all gives the loss L, a single number, and training asks
how L changes with each number of x. Backward is given dy = ∂L/∂y and goes through the steps from last to first. The
gradient of a step's input is the gradient of its output times the derivative of the step:

    u = 3x        du = ∂L/∂u        dx = 3 du

All arrays here have the same shape, and every step is elementwise, so this is calculus with numbers. Only one thing is
new: s is used twice, by exp and by the product. A small change of s changes the loss in both ways, and the two effects
add up.

Write your code in place of each `...`. More lines and other names are fine, as long as dx is right.
"""

import numpy as np


def chain(x):
    """y = s exp(s) with s = sin(x). Returns y and the cache: what backward will need."""
    s = np.sin(x)
    e = np.exp(s)
    y = e * s
    return y, (x, s, e)


def chain_backward(dy, cache):
    """dx = ∂L/∂x, from dy = ∂L/∂y."""
    x, s, e = cache
    # TODO: the gradients of e, of s and of x, in this order.
    de = dy * s
    ds = dy * e + de * e
    dx = ds * np.cos(x)
    # END
    return dx


# The student's file ends here.

from ...testing import GradientError
from ..grading import check_pair, expect_close, normal, variables_of

HINTS = (
    "The last step is y = e s. If e grows by 1, y grows by s; if s grows by 1, y grows by e. What is de, then?",
    "The derivative of exp(s) is exp(s), which is e. So s gets de · e through exp, and a second gradient directly from "
    "the product. The derivative of sin is cos.",
    "de = dy * s, then ds = dy * e + (what reaches s through e), then dx = ds * (the derivative of sin at x).",
)
LIBRARY = None
MISTAKES = (
    ("ds = dy * e + de * e", "ds = de * e", "ds.*expected.*used twice"),
    ("ds = dy * e + de * e", "ds = dy * e", "ds.*expected.*used twice"),
    ("de = dy * s", "de = dy", "de.*expected.*the other factor"),
    ("ds = dy * e + de * e", "ds = dy * e + de", "ds.*expected.*used twice"),
    ("    ds = dy * e + de * e\n    dx = ds * np.cos(x)", "    dx = dy * e * np.cos(x)", "dx.*which step is wrong"),
    ("dx = ds * np.cos(x)", "dx = ds", "dx.*expected.*cos"),
    ("dx = ds * np.cos(x)", "dx = ds * np.cos(s)", "dx.*expected.*cos"),
)


def check(student):
    for x in (normal(0, 5), normal(1, 2, 3)):
        try:
            check_pair(student, "chain", x)
        except GradientError as error:
            if "wrong gradient" in str(error) and "writes to dy" not in str(error):
                expect_steps(student, x)
            raise


def expect_steps(student, x):
    """Raise Wrong for the first step whose gradient is wrong."""
    values = variables_of(student, "chain", x)
    dy, s = values["dy"], np.sin(x)
    de = dy * s
    terms = dy * np.exp(s), de * np.exp(s)
    ds = sum(terms)
    dx = ds * np.cos(x)
    last = "s = sin(x): multiply the gradient of s by the derivative of sin, which is cos, at x"
    for name, expected, why in (
        ("de", de, "y = e s: a factor of a product gets dy times the other factor"),
        ("ds", ds, "s is used twice: it gets a gradient from e = exp(s), where de arrives, and one from y = e s"),
        ("dx", dx, last if "ds" in values else "Call the gradients of e and s de and ds to see which step is wrong"),
    ):
        if name in values and not (name == "ds" and is_one_of(terms, values)):
            expect_close(name, values[name], expected, why)


def is_one_of(terms, values):
    """Whether ds is the name of one of the two gradients that s gets, and dx is not made of it alone."""
    ds = values["ds"]
    alone = ds.shape == values["dx"].shape and np.allclose(values["dx"], ds * np.cos(values["x"]))
    return not alone and any(ds.shape == term.shape and np.allclose(ds, term) for term in terms)
